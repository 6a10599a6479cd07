"""Derivatives that the model defines or takes itself.

autograd_function       `torch.autograd.Function`: its own backward becomes part of the graph
every_apply             the same by whatever name the model keeps its ``apply``
inner_derivatives       `torch.autograd.grad` within a forward: gradient penalties, physics-informed models, forces

Stands on `capture.layer_dedup`; used by `capture.trace`.
"""
