"""Runs compiled steps on a mesh of processes; knows step graphs and orders, and not how they were made.

groups, connections, rendezvous, store_line, heartbeat, failures, launch, settings      processes that find each other
comm, point_to_point, attention_comm, functional, differentiable      what moves between them
bind, executor, pipeline_executor, step_program, step_values, instructions, calls      step graphs that run
pausing, cells                                           and take turns
module, tree, module_watch, note_watch, step_cache, step_facts, agreement      the user's module, and its steps
batches, batch_watch, last_words, inputs, arguments, contents, feed, results, ambient      what users pass and get
state, stateful, sharded_tensor, sharded_ops, layout, checkpoint_folder, clipping      weights
dtensor_layout, view_sources, pieces, boxes              and how they lie
safetensors_io, safetensors_files, windows               files of weights, in and out
saving, in_flight, loading, together, saved_parts, optimizer_state, value_tree, pending      a run, saved and going on
saved_tensors, staging, run_folder                       the files of that
schedules                                                pipeline schedules, as data: a room of their own

Stands on steps, ir and attention. `autopar.api`, verify and the command line import it.
"""
