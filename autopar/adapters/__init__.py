"""The files that may use private names of torch: one for each corner of it that the compiler needs.

aot, export, inductor        torch's compilers as functions of graphs
fake, rebuild, frozen, hooks, function_watch      modules without weights, and what a capture would lose of them
backward_paths, questions, unseen_effects, traced_threads      what a forward asks, and does to autograd
autograd, autograd_function, dispatch, operators, decompositions, effects      operators, and what runs below them
graph_nodes, graph_data      nodes of graphs, without what torch looks for in each
versions                     which of torch and transformers were tried; older ones are refused
distributed, dtensor, foreach, state_dict, lazy, flash_attn      single names of torch, and of one other package

Everything may import this room; it imports nothing of the project. Nothing private leaves it.
"""

from autopar.adapters.versions import refuse_older

refuse_older("torch")
