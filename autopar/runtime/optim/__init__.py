"""Optimizers on sharded parameters.

step_hooks          steps of any optimizer: split or refused where necessary
step_trials         which way an optimizer can step, found out on small copies
local_step          elementwise optimizers, on local shards
whole_step          optimizers of whole parameters: each on its owner, or all on every rank
owners              who owns which parameter, and the exchange of shards for whole tensors
cpu_offload         optimizer states in host memory
grad_clipping, grad_scaler

Stands on `runtime.params` and `runtime.consistency`.
"""
