"""The planner: every decision, from a graph, a mesh, options and costs, by dataflow alone. It matches no names.

make_plan           the plan, from what the others decide
batch_dims, tensor_parallel, factor_propagation, context_parallel      what is sharded on which dim
attention_choice    algorithms and layouts of context-parallel attention
pipeline, experts, recompute      a room each
plan_fits           options and plans that fit neither mesh nor graph, refused

Stands on cost and rules; knows no pass. `autopar.compile` imports it.
"""

from autopar.planner.make_plan import make_plan

__all__ = ["make_plan"]
