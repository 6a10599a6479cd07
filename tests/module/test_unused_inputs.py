"""Numbers and lists that differ over ranks and steps: left out where they have no effect, else refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

import autopar
from autopar.capture.front_end import capture
from autopar.capture.reads.unused_inputs import unused_inputs
from tests.module.test_padding import expected
from tests.support.ranks import RankError, run_ranks
from tests.support.subjects import tiny

LIMIT = 1e-10
STEPS = [[(5, 9, 4), (7, 16)], [(3, 8), (12, 5, 2, 2)], [(11,), (6, 6)]]  # lengths of documents of each rank


def flat(lengths: tuple[int, ...], seed: int) -> dict[str, Any]:
    """Documents in one row, as transformers' DataCollatorWithFlattening and TRL's packing give them."""
    torch.manual_seed(seed)
    ids = torch.randint(3, 30, (1, sum(lengths)))
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    labels = ids.clone()
    labels[0, starts[:-1].long()] = -100
    longest = max(lengths)
    return {
        "input_ids": ids, "labels": labels, "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest,
        "seq_idx": torch.repeat_interleave(torch.arange(len(lengths)).int(), torch.tensor(lengths))[None],
    }  # fmt: skip


def packed(sizes: dict[str, int], options: dict[str, Any]) -> int:
    """Steps on packed documents; how many of training were compiled."""
    model, _ = tiny("llama", layers=1)
    mesh = autopar.init_mesh("cpu", 60.0, **sizes)
    at, parts = autopar.dp_rank_and_size(mesh)
    parallel = autopar.parallelize(model, mesh, lift_to_float64=True, padding="auto", **options)
    for seed, step in enumerate(STEPS):
        batches = [flat(lengths, 10 * seed + i) for i, lengths in enumerate(step[:parts])]
        loss = float(parallel.train_step(**batches[at]))
        each = [ids for lengths, b in zip(step, batches) for ids in b["input_ids"].split(lengths, 1)]
        total, gradients = expected(model, [{"input_ids": ids, "labels": ids} for ids in each])
        assert abs(loss - total) < LIMIT, (step, loss, total)
        for key, x in parallel.full_gradients().items():
            assert (x - gradients[key]).abs().max() / gradients[key].abs().max().clamp(min=1e-3) < LIMIT, (step, key)
        parallel.zero_grad()
    return sum(runner.compiled.train for runner in parallel._cache.runners)


PACKED = [({"dp": 2}, {"zero": 3}), pytest.param({"tp": 2}, {}, marks=pytest.mark.full)]


@pytest.mark.parametrize(("sizes", "options"), PACKED, ids=str)
def test_packed_documents_of_any_lengths(sizes: dict[str, int], options: dict[str, Any]) -> None:
    assert max(run_ranks(2, packed, sizes, options, timeout=200.0)) <= 2


class Net(nn.Module):
    """Attends within documents, ``longest`` of which is an upper bound, and computes with other numbers if asked."""

    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.way, self.qkv = way, nn.Linear(8, 24)

    def forward(self, x: Tensor, offsets: Tensor, longest: int, scale: float = 1.0, more: Any = None) -> Tensor:
        q, k, v = self.qkv(x.flatten(0, 1)).view(-1, 3, 2, 4).unbind(1)
        y = varlen_attn(q, k, v, offsets, offsets, longest, longest, window_size=(-1, 0)).flatten(1)
        if self.way == "a branch" and longest > 100:
            y = y + 1
        if self.way == "a slice":
            y = y[:longest]
        if self.way == "a factor":
            y = y * scale
        if self.way == "a size":
            y = y * len(more)
        if self.way == "a loop":
            for _ in range(min(longest, 3)):
                y = torch.tanh(y)
        return F.mse_loss(y, torch.ones_like(y))


@pytest.mark.parametrize(
    ("way", "read"),
    [("", ""), ("a branch", "longest"), ("a slice", "longest"), ("a factor", "scale"), ("a size", "more"),
     ("a loop", "longest")],
)  # fmt: skip
def test_what_a_forward_reads(way: str, read: str) -> None:
    x, offsets = torch.zeros(2, 8, 8), torch.tensor([0, 5, 16], dtype=torch.int32)
    given = {"x": x, "offsets": offsets, "longest": 11, "scale": 2.0, "more": torch.arange(3)}
    names = {"longest", "scale", "more"}
    found = unused_inputs(lambda batch, log: capture(Net(way), batch, sizes=log), given, names)
    assert found == names - {read}


class ByRow(Net):
    """The same for offsets of each row."""

    def forward(self, x: Tensor, offsets: Tensor, longest: int, scale: float = 1.0, more: Any = None) -> Tensor:
        starts = offsets + torch.arange(len(offsets))[:, None].int() * x.shape[1]
        return super().forward(x, starts.flatten(), longest, scale, more)


def differing(way: str) -> None:
    mesh, x = autopar.init_mesh("cpu", 60.0, dp=2), torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model, x, rank = ByRow(way).double(), x.double(), autopar.dp_rank_and_size(mesh)[0]
    offsets = torch.tensor([[0, 3, 8], [0, 6, 8], [0, 8, 8], [0, 4, 8]], dtype=torch.int32)
    given = {"x": x[:2], "offsets": offsets[:2], "longest": 6}
    parallel = autopar.parallelize(model, mesh, padding="auto", example_batch=given, batch_dims={"offsets": 0})
    for step in range(3):
        mine = {"x": x.chunk(2)[rank] + step, "offsets": offsets.chunk(2)[rank], "longest": 8 + rank + step}
        y = parallel.train_step(**mine)
        parts = [model.qkv(row + step).view(-1, 3, 2, 4).unbind(1) for row in x]
        rows = [attended(q, k, v, starts) for (q, k, v), starts in zip(parts, offsets.tolist(), strict=True)]
        assert abs(float(y) - float(F.mse_loss(torch.cat(rows), torch.ones(32, 8).double()))) < LIMIT


def attended(q: Tensor, k: Tensor, v: Tensor, starts: list[int]) -> Tensor:
    """Each document by itself."""
    found = []
    for a, b in pairwise(starts):
        part = [x[a:b].transpose(0, 1)[None] for x in (q, k, v)]
        found.append(F.scaled_dot_product_attention(*part, is_causal=True)[0].transpose(0, 1).flatten(1))
    return torch.cat(found)


@pytest.mark.parametrize("way", ["", "a slice"])
def test_an_upper_bound_that_differs_over_ranks(way: str) -> None:
    if not way:
        run_ranks(2, differing, way, timeout=200.0)
        return
    with pytest.raises(RankError, match="must be the same on all ranks, found longest"):
        run_ranks(2, differing, way, timeout=200.0)
