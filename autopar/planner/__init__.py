"""The planner: makes every decision from a graph, a mesh, options and costs, by dataflow alone. It matches no names.

make_plan           the plan, from what the others decide
batch_dims, tensor_parallel, factor_propagation, context_parallel, one_hot_experts      what is sharded on which dim
attention_choice    algorithms and layouts of context-parallel attention
pipeline, experts, recompute      a folder each
plan_fits           refuses options and plans that do not fit the mesh or the graph

Stands on cost and rules; knows no pass. `autopar.compile` imports it.
"""

from autopar.planner.make_plan import make_plan

__all__ = ["make_plan"]
