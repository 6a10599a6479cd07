"""Execution: step graphs are lowered to instructions, and the executor runs them.

lowering, instructions          a graph becomes a function; instructions run it on slots
program_builder, value_slots    a lowered order becomes the instructions of one rank; which slot holds which value
executor, step_inputs           one step: inputs go into slots, actions run
finalize_step, buffer_updates   what stages exchange at its end; new values of buffers
overlap_f_b, cuda_graphs, unsharded_cache, global_statistics    ways to run it
module_profiling, expert_stats, value_checks    what is measured and reported
step_fingerprint                what ranks compare before they bind a step

Knows step graphs, and neither compile, passes nor planner.
"""
