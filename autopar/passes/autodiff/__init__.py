"""Autodiff: a local forward graph becomes a joint graph, which is partitioned into forward and backward.

trace_joint             the joint graph, operator by operator, with `backward_builder` and `vjp`
joint, differentiate    the joint graph, partitioned into forward (F) and backward (B, W)
fused_loss_backward     gradients of a chunked loss within the forward
widen_reductions, clone_aliased_grads, routed_sizes     rewrites of joint graphs

Runs after `passes.partition`, before `passes.stage`.
"""
