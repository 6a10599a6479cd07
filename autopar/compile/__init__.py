"""From a model and a batch to step graphs: capture, plan, passes, parts. Pure: no process group, any mesh.

model            `compile_model`, from a module or a captured graph
parameters       what is known before a batch comes: the plan, and the pieces of parameters
stages           a local graph cut into the parts of a pipeline, each differentiated, and the order of actions
slices           the pipeline of token slices

The one room that knows the planner and the passes. `autopar.api`, verify and the command line import it; the runtime
does not.
"""
