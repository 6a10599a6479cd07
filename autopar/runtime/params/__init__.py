"""Parameters, gradients and buffers on a mesh.

parameters          the state of a model: DTensors on this rank, whole tensors by name
sharded_tensor      the DTensor subclass that users hold
sharded_ops, sharded_reductions, replicate_ops, shard_views, full_values, scalar_tensor     its operators
shard_ranges, gather_shards, dtensor_layout, state_layout       which elements a rank holds
sharded_modules     the user's modules with sharded parameters
missing_gradient    tensors whose gradient exists in torch only

Stands on `runtime.comm`.
"""
