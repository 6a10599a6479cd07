"""Every decision, from a graph, a mesh, options and costs, by dataflow alone: it matches no names.

make_plan                     the plan, from what the others decide
batch_dims, tensor_parallel, closure, streams, context_parallel      what is cut along which dim
attention_choice              algorithms and layouts of attention over ranks
stages, units, balance        where a pipeline is cut, and by which schedule (schedule_choice); kept_cuts: once it runs
slice_lengths, tera_pipe_slices      lengths of token slices
step_order                    the order of actions, and who holds which parameter
kernel_notes                  attentions that GPUs have no fused kernel for
option_checks, plan_fits      options and plans that fit neither mesh nor graph, refused

Stands on costs and rules; knows no pass. `autopar.compile` imports it.
"""

from autopar.planner.make_plan import make_plan

__all__ = ["make_plan"]
