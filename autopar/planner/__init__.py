"""Making a plan: from a graph, a mesh and options to every decision, by dataflow alone."""

from autopar.planner.make_plan import make_plan, planned_batch_dims

__all__ = ["planned_batch_dims", "make_plan"]
