"""float16: a scaled loss, and steps that are skipped on all ranks, as by torch's scaler in one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.precision import PRECISIONS
from autopar.verification import computing_in
from tests.support.ranks import run_ranks

Found = dict[str, Any]


class Overflowing(nn.Module):
    """Two layers (stages) whose gradients overflow where ``x`` has a huge value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()).float().square().mean()


class OverflowingTokens(Overflowing):
    """The same with attention over two tokens, for axes that cut these: only the last one overflows."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(torch.stack([x.clamp(max=1.0), x], 1)).relu()
        mixed = h + nn.functional.scaled_dot_product_attention(h, h, h, is_causal=True)
        return self.second(mixed).float().square().mean()


def model_for(sizes: dict[str, int]) -> Overflowing:
    torch.manual_seed(0)
    return OverflowingTokens() if "cp" in sizes else Overflowing()


def scaled_loop(sizes: dict[str, int], options: dict[str, Any], clip: bool, by_hand: bool) -> Found:
    """Four steps on a rank, of which the third overflows on one dp rank."""
    model, mesh = model_for(sizes), autopar.init_mesh("cpu", 30.0, **sizes)
    at, count = autopar.dp_rank_and_size(mesh)
    parts = [x.chunk(count)[at] for x in scaled_batches()]
    parallel = autopar.parallelize(model, mesh, example_batch={"x": parts[0]}, precision="fp16", **options)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
    scaler = autopar.GradScaler(parallel, init_scale=2.0**10, growth_interval=2)
    scales, stepped, losses = [], [], []
    for x in parts:
        if by_hand:
            loss = parallel(x=x)
            scaler.scale(loss).backward()
        else:
            loss = parallel.train_step(x=x)
        if clip:
            parallel.clip_grad_norm_(0.05)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        stepped.append(scaler.stepped)
        losses.append(float(loss))
    steps = {float(s["step"]) for s in optimizer.state.values()}
    return {"scales": scales, "stepped": stepped, "steps": steps, "losses": losses, "state": parallel.full_state_dict()}


def scaled_batches() -> list[Tensor]:
    made = torch.Generator().manual_seed(1)
    found = [torch.rand(8, 8, generator=made) for _ in range(4)]
    found[2][5] = 6e4  # of the second dp rank
    return found


def scaled_alone(sizes: dict[str, int], clip: bool) -> Found:
    """The same loop by torch, in one process."""
    model = model_for(sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales = []
    for x in scaled_batches():
        half = computing_in(model, PRECISIONS["fp16"])
        scaler.scale(half(x=x)).backward()
        for p, h in zip(model.parameters(), half.parameters(), strict=True):
            assert h.grad is not None
            p.grad = h.grad.float()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return {"scales": scales, "state": model.state_dict()}


CASES: list[tuple[dict[str, int], dict[str, Any], bool]] = [
    ({"dp": 2}, {"zero": 3}, False),
    ({"dp": 2}, {"zero": 1}, True),
    ({"dp": 2, "pp": 2}, {"microbatches": 2, "split_points": ("second",)}, False),
    ({"tp": 2}, {}, False),
    ({"dp": 2, "tp": 2}, {"zero": 2, "microbatches": 2}, False),
    ({"dp_replicate": 2, "dp": 1}, {"zero": 3}, True),
    ({"cp": 2}, {"zero": 3}, False),
    ({"dp": 2, "cp": 2}, {}, True),
]
CLIPPED = (0, 2, 3, 7)  # the others with -m full


def clips(often: bool) -> list[tuple[dict[str, int], dict[str, Any], bool, bool]]:
    clipped = [i in CLIPPED for i in range(len(CASES))]
    return [(*case, clip == often) for case, clip in zip(CASES, clipped, strict=True)]


def test_clipping_meets_every_axis_and_both_ways() -> None:
    """And so do steps without it."""
    for clip in (False, True):
        cases = [case for case in clips(often=True) if case[3] == clip]
        assert {axis for sizes, *_ in cases for axis in sizes} >= {"dp", "tp", "cp"}
        assert {by_hand for _, _, by_hand, _ in cases} == {False, True}
    assert {(*map(str, case[:3]),) for case in clips(often=True)} == {(*map(str, case),) for case in CASES}


@pytest.mark.parametrize(
    ("sizes", "options", "by_hand", "clip"),
    [*clips(often=True), *(pytest.param(*case, marks=pytest.mark.full) for case in clips(often=False))],
    ids=str,
)
def test_scaled_steps_are_those_of_torch(
    sizes: dict[str, int], options: dict[str, Any], by_hand: bool, clip: bool
) -> None:
    expected = scaled_alone(sizes, clip)
    for found in run_ranks(math.prod(sizes.values()), scaled_loop, sizes, options, clip, by_hand):
        assert found["scales"] == expected["scales"] == [1024.0, 2048.0, 1024.0, 1024.0]
        assert found["stepped"] == [True, True, False, True] and found["steps"] == {3.0}
        for name, x in expected["state"].items():
            assert (found["state"][name] - x).abs().max() < 2e-3, name


def without_scaler() -> list[str]:
    torch.manual_seed(0)
    x = torch.rand(4, 8)
    parallel = autopar.parallelize(
        Overflowing(), autopar.init_mesh("cpu", 30.0, dp=2), example_batch={"x": x}, precision="fp16"
    )
    said = []
    for run in (lambda: parallel.train_step(x=x), lambda: parallel(x=x)):
        try:
            run()
        except ValueError as error:
            said.append(str(error))
    with torch.no_grad():
        parallel(x=x)
    return said


def test_float16_needs_a_scaler() -> None:
    for said in run_ranks(2, without_scaler):
        assert len(said) == 2 and all("create scaler = autopar.GradScaler(model)" in text for text in said)


def saved_and_refused() -> list[Any]:
    x = torch.rand(4, 8)
    mesh = autopar.init_mesh("cpu", 30.0, dp=2)
    parallel = autopar.parallelize(Overflowing(), mesh, example_batch={"x": x}, precision="fp16")
    scaler, other = autopar.GradScaler(parallel, init_scale=64.0), torch.amp.GradScaler("cpu")
    optimizer, said = torch.optim.SGD(parallel.parameters(), lr=0.1), []
    other.load_state_dict(scaler.state_dict())
    said.append(other.state_dict() == scaler.state_dict())
    scaler.load_state_dict({**other.state_dict(), "scale": 32.0})
    said.append(scaler.get_scale())
    parallel.train_step(x=x)
    scaler.unscale_(optimizer)
    for call in (lambda: scaler.unscale_(optimizer), lambda: scaler.step(optimizer, closure=lambda: 0.0)):
        try:
            call()
        except RuntimeError as error:
            said.append(str(error))
    for bad in (lambda: autopar.GradScaler(parallel, growth_factor=0.5), lambda: autopar.GradScaler(nn.Linear(1, 1))):  # type: ignore[arg-type]
        try:
            bad()
        except ValueError as error:
            said.append(str(error))
    return said


def test_states_are_torchs_and_misuse_is_refused() -> None:
    for said in run_ranks(2, saved_and_refused):
        assert said[:2] == [True, 32.0]
        assert "already been called" in said[2] and "Closure" in said[3]
        assert "growth_factor above 1" in said[4] and "made by autopar.parallelize, found a Linear" in said[5]
