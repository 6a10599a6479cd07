"""What a forward does that leaves no operator in the graph.

function_watch          every torch function that a traced forward calls
trace_side_effects      Python state and Python's random generators
external_calls          files, clocks, entropy, processes; `other_clocks`: does a clock's answer matter?
eager_answers           questions such as `torch.compiler.is_compiling()`, answered as in eager mode
unseen_effects          contexts and hooks that change autograd
unusual                 warnings about what is captured, but perhaps not meant

Stands on `capture.branches` and `capture.reads`; used by `capture.trace`, `capture.layer_dedup` and the front end.
"""
