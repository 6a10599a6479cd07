"""What a plan says of attentions that GPUs have no fused kernel for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.planner.test_planner import plan

PLAIN = "unfused on GPUs, with all scores in memory at once"
OWN = "on GPUs fused in autopar's own kernel"


class Attending(nn.Module):
    """Two attentions of 16 tokens; how they differ from causal ones is said by ``kind``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, width = kind, {"odd width": 37, "wide softcap": 264}.get(kind, 8)
        self.project = nn.Linear(8, 3 * 2 * width)
        self.bias = nn.Parameter(torch.zeros(2, 16, 16)) if kind == "bias" else None

    def forward(self, x: Tensor) -> Tensor:
        loss = x.new_zeros(())
        for _ in range(2):
            q, k, v = self.project(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            loss = loss + self.attend(q, k, v).square().mean()
        return loss

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if "softcap" in self.kind:
            scores = torch.tanh(q @ k.mT / 30.0) * 30.0
            return torch.softmax(scores, -1) @ v
        rate = 0.1 if self.kind == "dropout" else 0.0
        return F.scaled_dot_product_attention(q, k, v, self.bias, rate, is_causal=self.bias is None)


NOTES = {
    "causal": None,
    "odd width": None,
    "dropout": f"{PLAIN}: no fused kernel has position-based dropout of probabilities; without dropout they are fused",
    "bias": None,
    "softcap": f"{OWN}, or in that of the package flash-attn where it is installed (extra flash)",
    "wide softcap": f"{PLAIN}: no fused kernel supports the combination of softcap, bfloat16, widths 264 and 264",
}


@pytest.mark.parametrize("kind", NOTES)
def test_notes(kind: str) -> None:
    found_plan = plan(Attending(kind).bfloat16(), {"x": torch.ones(4, 16, 8).bfloat16()}, "dp=2")
    found = [note for note in found_plan.notes if note[0] == "attention"]
    assert found == ([("attention", f"2 of 2 {NOTES[kind]}")] if NOTES[kind] else [])
    assert all(f"note {subject}: {why}" in str(found_plan) for subject, why in found)


def test_other_types() -> None:
    """The package takes half types alone; nobody trains in double precision on a GPU."""
    found: dict[torch.dtype, Any] = {}
    for dtype in (torch.float32, torch.float64):
        batch = {"x": torch.ones(4, 16, 8, dtype=dtype)}
        found[dtype] = plan(Attending("softcap").to(dtype), batch, "dp=2").notes
    assert found[torch.float32] == (("attention", f"2 of 2 {OWN}"),)
    assert found[torch.float64] == ()
