"""Loops of steps with zero=0, 1, 2, 3, and losses that are differentiated one by one, as torch does both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from tests.support.ranks import run_ranks

MODES = (0, 1, 2, 3)


class Odd(nn.Module):
    """A tied, a frozen and an unused weight, one that does not divide, and two losses."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.second = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.odd, self.unused = nn.Linear(8, 5, bias=False), nn.Linear(8, 8)
        self.second.weight.requires_grad_(False)

    def forward(self, tokens: Tensor, target: Tensor) -> dict[str, Tensor]:
        x = self.second(self.first(self.table(tokens)).relu())
        logits = x @ self.table.weight.t()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
        return {"tokens": loss, "other": self.odd(x).square().mean()}


def odd_batch() -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(3)
    return {name: torch.randint(0, 12, (8, 4), generator=made) for name in ("tokens", "target")}


def odd_loop(zero: int, count: int, accumulate: int, replicas: int = 1) -> dict[str, Tensor]:
    """Three steps of AdamW, each of ``accumulate`` batches, with clipped gradients."""
    torch.manual_seed(0)
    model = Odd().double()
    mesh = autopar.init_mesh("cpu", 30.0, dp_replicate=replicas, dp=2)
    part, parts = autopar.dp_rank_and_size(mesh)
    mine = {k: v.chunk(parts)[part] for k, v in odd_batch().items()}
    parallel = autopar.parallelize(model, mesh, example_batch=mine, zero=zero, microbatches=count)
    optimizer = torch.optim.AdamW([p for p in parallel.parameters() if p.requires_grad], lr=0.05)
    for _ in range(3):
        for _ in range(accumulate):
            parallel.train_step(**mine)
        parallel.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return dict(parallel.full_state_dict())


def one_process(accumulate: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Odd().double()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(3):
        for _ in range(accumulate):
            sum(model(**odd_batch()).values()).backward()  # type: ignore[union-attr]
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


OTHERS = [pytest.param(zero, 1 + (zero + 1) % 2, marks=pytest.mark.full) for zero in MODES]


@pytest.mark.parametrize(("zero", "count"), [*((zero, 1 + zero % 2) for zero in MODES), *OTHERS])
def test_odd_models_and_sums_over_steps(zero: int, count: int) -> None:
    accumulate = 2 if zero in (1, 2) else 1
    expected = one_process(accumulate)
    replicas = 2 if (zero, count) in ((1, 2), (3, 1), (3, 2)) else 1
    for found in run_ranks(2 * replicas, odd_loop, zero, count, accumulate, replicas):
        for name, x in expected.items():
            assert (found[name] - x).abs().max() < 1e-10, name


# --- model(**batch) -----------------------------------------------------------------------------------------


class TwoEnds(nn.Module):
    """Two losses; one weight is in both, the first is read by no backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.both, self.other = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        two = (self.other(x) @ self.both.weight).square().mean()
        return {"one": self.both(self.first(x)).square().mean(), "two": two}


def ends(zero: int) -> dict[str, Any]:
    """Gradients of each loss alone; what is said of weights that change between forward and backward."""
    torch.manual_seed(0)
    whole = torch.rand(8, 8, dtype=torch.float64)
    mine = {"x": whole.chunk(2)[torch.distributed.get_rank()]}
    model = TwoEnds().double()
    parallel = autopar.parallelize(model, autopar.init_mesh("cpu", 30.0, dp=2), example_batch=mine, zero=zero)
    found: dict[str, Any] = {}
    for end in ("one", "two"):
        model.zero_grad(), parallel.zero_grad()
        model(whole)[end].backward()
        parallel(**mine)[end].backward()
        gradients, ours = parallel.full_gradients(), dict(parallel.named_parameters())
        for name, p in model.named_parameters():
            assert (p.grad is None) == (ours[name].grad is None), f"{end}: {name}"
            found[f"{end} {name}"] = 0.0 if p.grad is None else float((gradients[name] - p.grad).abs().max())
    for name in ("first", "both"):
        out = parallel(**mine)
        with torch.no_grad():
            ours[f"{name}.weight"].mul_(1.0)
        try:
            out["two"].backward()
            found[name] = ""
        except RuntimeError as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize("zero", MODES)
def test_outputs_are_differentiated_as_in_torch(zero: int) -> None:
    for found in run_ranks(2, ends, zero):
        assert found.pop("first") == "" and "both.weight is at version" in found.pop("both")
        assert max(found.values()) < 1e-10, found
