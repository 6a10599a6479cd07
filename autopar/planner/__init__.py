"""Making a plan: from a graph, a mesh and options to every decision, by dataflow alone."""

from autopar.planner.make_plan import batch_dims, make_plan

__all__ = ["batch_dims", "make_plan"]
