"""The `autopar::` operators: each is one node in every graph, with a fake, an autograd formula and a backward
that is itself an `autopar::` operator, so that joint graphs keep single nodes.

attention, facts, kernels     softmax attention that knows facts about its mask, and who computes it
cross_entropy, vocabulary     losses by row, and with embeddings over a cut vocabulary
ctc                           a loss by example
dropout, fused_dropout        masks that depend on a seed and positions alone; on GPUs as one kernel of Triton
random_numbers                numbers of other distributions, likewise
random_recipes                which of them each random operator of torch is made of, in eager runs, too
declare                       how operators are declared
collectives                   what moves between ranks, by the name of an axis
moe, cache, gradient, watch      experts, keys of earlier slices, own backwards, reports, ranges

Importing this package registers them under `torch.ops.autopar`. Stands on adapters; ir and all above import it.
"""

from __future__ import annotations

from autopar.ops import (
    attention,
    cache,
    collectives,
    cross_entropy,
    ctc,
    dropout,
    gradient,
    grouped_experts,
    random_numbers,
    value_checks,
    vocab_parallel,
)

__all__ = [
    "attention",
    "cache",
    "collectives",
    "cross_entropy",
    "ctc",
    "dropout",
    "gradient",
    "grouped_experts",
    "random_numbers",
    "vocab_parallel",
    "value_checks",
]
