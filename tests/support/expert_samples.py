"""Samples of layers of experts, for tests of rules."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from autopar.testing.soundness import Ref, Sample, SampleCall, call
from tests.support.pointwise_samples import normal

ours = torch.ops.autopar

EXPERTS = (ours.moe_dispatch.default, ours.grouped_mm.default, ours.grouped_bias.default, ours.moe_combine.default)


def experts() -> Iterator[Sample]:
    """Dispatch, product, bias, second product, combination. Expert 3 of 4 has no token; 2 or 1 per token.

    Operands in order: x, the chosen experts, first weight, its bias, second weight, the experts' shares.
    """
    for top, transposed in ((2, False), (1, True)):
        chosen = torch.tensor([[0, 1], [2, 0], [1, 2], [2, 1], [0, 2], [1, 0]])[:, :top].contiguous()
        up, down = (normal(4, 6, 12), normal(4, 12, 6)) if transposed else (normal(4, 12, 6), normal(4, 6, 12))
        yield Sample(
            [
                SampleCall(ours.moe_dispatch.default, (normal(6, 6), chosen, 4)),
                SampleCall(ours.grouped_mm.default, (Ref(0), up, Ref(0, 2), transposed)),
                SampleCall(ours.grouped_bias.default, (Ref(1), normal(4, 12), Ref(0, 2))),
                SampleCall(ours.grouped_mm.default, (Ref(2), down, Ref(0, 2), transposed)),
                SampleCall(ours.moe_combine.default, (Ref(3), Ref(0, 1), normal(6, top))),
            ],
            private=(0, 1, 2, 3),
        )


def dispatch() -> Sample:
    """The dispatch alone: its order and offsets have no width."""
    return call(ours.moe_dispatch.default, normal(1, 6), torch.tensor([[2, 0]]), 4)
