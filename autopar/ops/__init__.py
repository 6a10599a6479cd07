"""The `autopar::` operators: each is one node in every graph, with a fake, an autograd formula and a backward
that is itself an `autopar::` operator, so that joint graphs keep single nodes.

attention, mask_spec, kernels     softmax attention whose mask is given by arguments, and its kernels
cached_attention                  of a step's tokens of several requests to keys in pages; writes to them
cross_entropy, vocab_parallel     losses per row, and with embeddings over a sharded vocabulary
ctc                               a loss per example
filled_rows, placed_rows          rows, or those that a mask selects, at the true entries of a mask
dropout                           masks that depend on a seed and positions alone; on GPUs one Triton kernel
random_numbers                    numbers of other distributions, likewise
random_recipes                    torch's random operators in terms of them, in eager runs, too
few_bits                          linear layers and experts whose products are of eight-bit operands
declare                           how operators are declared
collectives                       communication between ranks, by the name of an axis
grouped_experts, cache, gradient, value_checks      experts, keys of earlier slices, custom backwards, range checks

Importing this package registers them under `torch.ops.autopar`. Imports adapters; ir and everything above import it.
"""

from __future__ import annotations

from autopar.ops import (
    attention,
    cache,
    cached_attention,
    collectives,
    cross_entropy,
    ctc,
    dropout,
    filled_rows,
    gradient,
    grouped_experts,
    placed_rows,
    random_numbers,
    value_checks,
    vocab_parallel,
)
from autopar.ops.few_bits import scaled_experts, scaled_products

__all__ = [
    "attention",
    "cache",
    "cached_attention",
    "collectives",
    "cross_entropy",
    "ctc",
    "dropout",
    "filled_rows",
    "gradient",
    "grouped_experts",
    "placed_rows",
    "random_numbers",
    "scaled_experts",
    "scaled_products",
    "vocab_parallel",
    "value_checks",
]
