"""Optimizers on sharded parameters.

step_hooks          a step of any torch optimizer, split where necessary
local_step          elementwise optimizers, on local shards
unsharded_step      optimizers of whole matrices (Muon), one matrix at a time
cpu_offload         optimizer states in host memory
grad_clipping, grad_scaler, stale_optimizer, step_events

Stands on `runtime.params` and `runtime.consistency`.
"""
