"""Parameters, gradients and buffers on a mesh.

parameters          the state of a model: DTensors on this rank, full tensors by name
sharded_tensor      the DTensor subclass that users hold
sharded_ops, sharded_reductions     its operators
shards, dtensor_layout              which elements a rank holds
chunks              what distributed checkpoints write and read of a shard
sharded_modules     the user's modules with sharded parameters

Stands on `runtime.comm`.
"""
