"""Training loops on fake CUDA tensors, on every kind of mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cuda.loops import check_loop, in_type
from tests.support.subjects import tiny

MODELS = ("llama", "gpt2", "mixtral", "t5")
ATTENTIONS = ("all_gather", "ring", "bi_ring", "zigzag_ring", "token_ring", "ulysses")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb_auto", "zb_v", "dual_pipe", "dual_pipe_v")
WAYS: list[tuple[str, dict[str, Any]]] = [
    ("dp=2", {}),
    ("dp=2", {"zero": 3, "microbatches": 2}),
    ("tp=2", {}),
    ("tp=2", {"sequence_parallel": True, "microbatches": 4}),
    ("dp=2,tp=2", {"zero": 3, "microbatches": 2}),
    *(("cp=2", {"attention": attention}) for attention in ATTENTIONS),
    ("cp=4", {"attention": "hybrid"}),
    ("dp=2,cp=2", {"zero": 3}),
    ("cp=2,tp=2", {"sequence_parallel": True}),
    ("pp=2,dp=2", {"zero": 3, "microbatches": 4}),
    ("pp=2,tp=2", {"microbatches": 4}),
    ("pp=2,cp=2", {"microbatches": 4}),
    ("pp=2,dp=2,cp=2,tp=2", {"zero": 3, "microbatches": 4}),
    *(("pp=2", {"schedule": schedule, "microbatches": 4}) for schedule in SCHEDULES),
]
CELLS = [
    *((model, *way) for model in MODELS for way in WAYS if not (model == "t5" and "token_ring" in way[1].values())),
    ("llama", "pp=2", {"schedule": "seq1f1b", "microbatches": 2, "token_slices": 2}),
    ("gpt2", "pp=2", {"schedule": "tera_pipe", "microbatches": 2, "token_slices": 2}),
    ("whisper", "dp=2,tp=2", {}),
]
OFTEN = (
    ("llama", "cp=2", {"attention": "zigzag_ring"}),
    ("mixtral", "dp=2", {"zero": 3, "microbatches": 2}),
)


def made(name: str, layers: int, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model with dropout, and a batch."""
    return in_type(*tiny(name, layers, dropout=0.1), dtype)


@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [pytest.param(*cell, marks=() if cell in OFTEN else pytest.mark.full) for cell in CELLS],
    ids=str,
)
def test_a_training_loop(name: str, mesh: str, options: dict[str, Any]) -> None:
    check_loop(*made(name, 2 if "pp" in mesh else 1), mesh, options)


@pytest.mark.full
@pytest.mark.parametrize(("dtype", "capability"), [(torch.float32, (9, 0)), (torch.bfloat16, (8, 0))], ids=str)
def test_experts_without_a_kernel_of_their_own(dtype: torch.dtype, capability: tuple[int, int]) -> None:
    check_loop(*made("mixtral", 1, dtype), "dp=2", {}, capability=capability)
