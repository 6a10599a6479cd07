"""The CTC loss: torch's errors, and sharded on examples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.testing.harness import check_model
from tests.canonicalize.test_normalize import normalized, rand

TARGETS = torch.tensor([[1, 2, 2], [3, 1, 0], [2, 0, 0], [1, 3, 2]])
INPUTS, COUNTS = torch.tensor([6, 6, 5, 6]), torch.tensor([3, 2, 1, 3])

CALLS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "another blank": {"blank": 4},
    "without infinities": {"zero_infinity": True},
}


@pytest.mark.parametrize("how", CALLS)
def test_is_torchs(how: str) -> None:
    inputs = {"x": rand(6, 4, 5, grad=True), "targets": TARGETS, "inputs": INPUTS, "counts": COUNTS}
    normalized(
        lambda x, targets, inputs, counts: F.ctc_loss(x.log_softmax(-1), targets, inputs, counts, **CALLS[how]), inputs
    )


def test_targets_that_do_not_fit() -> None:
    inputs = {"x": rand(6, 4, 5, grad=True), "targets": TARGETS, "inputs": torch.tensor([1, 6, 5, 6]), "counts": COUNTS}

    def function(x: Tensor, targets: Tensor, inputs: Tensor, counts: Tensor) -> Tensor:
        return F.ctc_loss(x.log_softmax(-1), targets, inputs, counts, zero_infinity=True)

    normalized(function, inputs)


def test_other_ways_to_say_it() -> None:
    flat = torch.tensor([1, 2, 2, 3, 1, 2, 1, 3, 2])
    normalized(
        lambda x, t: F.ctc_loss(x.log_softmax(-1), t, (6, 6, 5, 6), (3, 2, 1, 3)),
        {"x": rand(6, 4, 5, grad=True), "t": flat},
    )
    one = {"x": rand(6, 5, grad=True), "t": torch.tensor([1, 2])}
    normalized(lambda x, t: F.ctc_loss(x.log_softmax(-1), t, torch.tensor(6), torch.tensor(2)), one)
    normalized(lambda x, t: F.ctc_loss(x.log_softmax(-1), t, torch.tensor(6), torch.tensor(2), reduction="none"), one)


class Listener(nn.Module):
    """``padded``: labels of -100 are no labels, and are left out as transformers' models do it."""

    def __init__(self, padded: bool = False) -> None:
        super().__init__()
        self.padded = padded
        self.up, self.down, self.loss = nn.Linear(8, 16), nn.Linear(16, 5), nn.CTCLoss()

    def forward(self, x: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
        logits = self.down(torch.relu(self.up(x))).log_softmax(-1).transpose(0, 1)
        lengths = torch.full((x.shape[0],), logits.shape[0], dtype=torch.long)
        if self.padded:
            mask = labels >= 0
            labels, counts = labels.masked_select(mask), mask.sum(-1)
        return self.loss(logits, labels, lengths, counts)


MESHES = [({"dp": 2, "tp": 2}, {"zero": 3}), ({"dp": 2}, {"microbatches": 2})]


@pytest.mark.parametrize("mesh, options", MESHES, ids=str)
def test_same_numbers(mesh: dict[str, int], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 6, 8).double(), "labels": TARGETS, "counts": COUNTS}
    assert check_model(Listener().double(), batch, Mesh.of(**mesh), Options(**options)).worst < 1e-10


@pytest.mark.parametrize("mesh, options", MESHES, ids=str)
def test_targets_picked_out_of_padded_rows(mesh: dict[str, int], options: dict[str, Any]) -> None:
    """Wherever the padding stands, and in a row that is all padding."""
    torch.manual_seed(0)
    labels = torch.tensor([[1, 2, 2], [3, -100, 1], [-100, -100, 2], [-100, -100, -100]])
    batch = {"x": torch.randn(4, 6, 8).double(), "labels": labels, "counts": COUNTS}
    assert check_model(Listener(padded=True).double(), batch, Mesh.of(**mesh), Options(**options)).worst < 1e-10


def test_targets_picked_by_another_mask_are_refused() -> None:
    class Other(Listener):
        def forward(self, x: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
            return super().forward(x, labels.masked_select(labels > 1), counts)

    batch = {"x": torch.randn(4, 6, 8).double(), "labels": TARGETS, "counts": torch.tensor([2, 1, 1, 2])}
    with pytest.raises(ValueError, match=r"test_ctc.py:\d+ in forward.*size of the result depends on tensor values"):
        check_model(Other().double(), batch, Mesh.of(dp=2))
