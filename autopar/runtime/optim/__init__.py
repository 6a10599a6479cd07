"""Optimizers on sharded parameters.

step_hooks          steps of any torch optimizer: split or refused where necessary
local_step          elementwise optimizers, on local shards
cpu_offload         optimizer states in host memory
grad_clipping, grad_scaler

Stands on `runtime.params` and `runtime.consistency`.
"""
