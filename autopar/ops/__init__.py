"""The `autopar::` operators: each is one node in every graph, with a fake, an autograd formula and a backward
that is itself an `autopar::` operator, so that joint graphs keep single nodes.

Importing this package registers them under `torch.ops.autopar`.
"""

from __future__ import annotations

from autopar.ops import attention, cache, checked, collectives, cross_entropy, dropout, gradient, moe, vocabulary, watch

__all__ = [
    "attention",
    "cache",
    "checked",
    "collectives",
    "cross_entropy",
    "dropout",
    "gradient",
    "moe",
    "vocabulary",
    "watch",
]
