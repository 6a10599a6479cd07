"""Execution: step graphs are lowered to instructions, and the executor runs them.

lowering, instructions, program, slots      graph -> function -> instructions over slots
executor, step_inputs, cross_stage, buffer_updates      one step
overlapped_fb, cuda_graphs, unsharded_cache, global_statistics      ways to run it
module_profiling, expert_stats, value_checks        what is measured and reported
step_fingerprint            what ranks compare before they bind a step

Knows step graphs, and neither compile, passes nor planner.
"""
