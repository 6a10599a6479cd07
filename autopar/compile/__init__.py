"""From a model and a batch to step graphs: capture, plan, passes, stages. Pure: no process group, any mesh.

model            `compile_model`, from a module or a captured graph
parameters       what is known before a batch arrives: the plan, and the shards of parameters
stages           a local graph split into pipeline stages, each differentiated, and the order of actions
slices           the pipeline of token slices
loss_chunks, tiles         whether losses, and what computes every token by itself, run in pieces
trials           the best of several ways to compile
serving          the graphs that serve a model; expert_role: those of experts in a role of their own

The one room that imports both the planner and the passes. `autopar.api`, verify and the command line import it; the
runtime does not.
"""
