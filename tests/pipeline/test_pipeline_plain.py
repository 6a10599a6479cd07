"""What plain modules can do to a pipeline: values that skip stages, frozen and unused weights, ties, several losses,
buffers, parts without gradient. Loss and gradients equal one process, on real ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.runtime.mesh.process_groups import init_mesh
from tests.support.order_texts import parse_row
from tests.support.ranks import run_ranks

WIDTH = 8


def batch(rows: int = 8) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(rows, WIDTH).double(), "y": torch.randn(rows, WIDTH).double()}


class Stack(nn.Module):
    """Four blocks; subclasses say what else happens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Any:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return ((x - y) ** 2).mean()


class Skip(Stack):
    """The first block's result is used by the third and the last one; the second part has no use for it."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        first = torch.tanh(self.blocks[0](x))
        h = torch.tanh(self.blocks[1](first.detach() * 2))
        h = torch.tanh(self.blocks[2](h + first))
        return ((self.blocks[3](h) * first - y) ** 2).mean()


class Frozen(Stack):
    """The first part has nothing to train, the third is used without gradient, one weight by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.blocks[2].weight.requires_grad_(False)


class Tied(Stack):
    """One weight in the first, third and last part, once transposed; and a value made of parameters alone."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        scale = torch.sigmoid(self.extra.bias)
        h = torch.tanh(self.blocks[0](x)) * scale
        h = torch.tanh(self.blocks[1](h))
        h = torch.tanh(nn.functional.linear(h, self.blocks[0].weight.t())) * scale
        return ((nn.functional.linear(self.blocks[3](h), self.blocks[0].weight) - y) ** 2).mean()


class Losses(Stack):
    """A loss in every part, and a number without gradient that travels."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        losses = []
        for block in self.blocks:
            x = torch.tanh(block(x))
            losses.append(((x - y) ** 2).mean())
        sign = (x > 0).to(x.dtype)
        return losses[0], losses[1] * 0.5, losses[3] + ((x * sign) ** 2).mean()


class Buffers(Stack):
    """Running statistics in the first and the last part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.BatchNorm1d(WIDTH).double(), nn.BatchNorm1d(WIDTH).double()

    def forward(self, x: Tensor, y: Tensor) -> Any:
        h = self.first(torch.tanh(self.blocks[0](x)))
        h = torch.tanh(self.blocks[1](h))
        return ((self.last(torch.tanh(self.blocks[2](h))) - y) ** 2).mean()


class Vectors(Stack):
    """A spectral norm in the first part: each step moves vectors that are made of the weight alone."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.blocks[0])


class Places(Stack):
    """Numbers of the first part that the last one takes for places alone: they have no gradient."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        chosen = self.extra(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return ((x.gather(1, chosen.argsort(1)) - y) ** 2).mean()


MODELS = (Stack, Skip, Frozen, Tied, Losses, Vectors)


def errors_of_all(
    sizes: dict[str, int], options: dict[str, Any], models: Sequence[type[Stack]] = MODELS
) -> dict[str, float]:
    """On a rank: the largest error of each model."""
    found = {}
    mesh = init_mesh(**sizes)
    for make in models:
        report = autopar.verify(make(), mesh, batch(), example_batch=_part(sizes), **options)
        assert report.passed, str(report)
        found[make.__name__] = max(e.error for e in report.entries)
    return found


def _part(sizes: dict[str, int]) -> dict[str, Tensor]:
    return {k: v.chunk(sizes.get("dp", 1))[0] for k, v in batch().items()}


def test_on_two_ranks() -> None:
    """Of two parts each: values come back to a rank."""
    for found in run_ranks(2, errors_of_all, {"pp": 2}, {"schedule": "zb_v", "microbatches": 4}, timeout=200):
        assert max(found.values()) < 1e-12, found


@pytest.mark.full
def test_on_four_ranks() -> None:
    for found in run_ranks(4, errors_of_all, {"pp": 4}, {"schedule": "1f1b", "microbatches": 2}, timeout=200):
        assert max(found.values()) < 1e-12, found


def gradients_of_places(schedule: str) -> set[str]:
    """On a rank: the parameters with a gradient after a step."""
    options = {"schedule": schedule, "microbatches": 4, "split_points": ["blocks.2"]}
    parallel = autopar.parallelize(Places(), init_mesh(pp=2), example_batch=batch(), **options)
    parallel.train_step(**batch())
    return {name for name, p in parallel.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zb_h1", marks=pytest.mark.full)])
def test_what_is_sent_without_gradient_gets_none(schedule: str) -> None:
    for found in run_ranks(2, gradients_of_places, schedule, timeout=100):
        assert found == {name for name, _ in Places().named_parameters() if "blocks" in name}


FAR = (Skip, Tied)  # what ranks exchange that are no neighbours


@pytest.mark.parametrize("models", [FAR, pytest.param(MODELS, marks=pytest.mark.full)], ids=["far", "all"])
def test_two_copies(models: Sequence[type[Stack]]) -> None:
    options = {"schedule": "dual_pipe", "microbatches": 8}
    for found in run_ranks(4, errors_of_all, {"pp": 4}, options, models, timeout=200):
        assert max(found.values()) < 1e-12, found


@pytest.mark.parametrize("schedule", ["dual_pipe", pytest.param("zb_h1", marks=pytest.mark.full)])
def test_on_two_ranks_with_parts_on_one_or_both(schedule: str) -> None:
    for found in run_ranks(2, errors_of_all, {"pp": 2}, {"schedule": schedule, "microbatches": 4}, timeout=200):
        assert max(found.values()) < 1e-12, found


def layer_gathers(options: dict[str, Any]) -> list[tuple[float, dict[str, int], list[float]]]:
    """On a rank, with gathers once per step and for each use: the error of a step; how often parameters were gathered
    and gradients reduced over dp; the norm before clipping, that of one process, and the norm afterwards."""
    mesh, model, found = init_mesh(pp=2, dp=2), Tied(), []
    part, parts = autopar.dp_rank_and_size(mesh)
    mine = {k: v.chunk(parts)[part] for k, v in batch().items()}
    model(**batch()).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    for reshard in (False, True):
        parallel = autopar.parallelize(
            Tied(), mesh, example_batch=mine, zero=3, reshard_after_forward=reshard, **options
        )
        parallel.train_step(**mine)
        calls = {kind: t.calls for (axis, kind), t in parallel.traffic().items() if axis == "dp"}
        gradients = parallel.full_gradients()
        assert {name for name, x in gradients.items() if x is not None} == expected.keys()
        error = max(float((gradients[name] - x).abs().max()) for name, x in expected.items())
        norms = [float(x) for x in (parallel.clip_grad_norm_(1e-3), norm, parallel.clip_grad_norm_(1e-3))]
        found.append((error, calls, norms))
    return found


def test_gathers_once_per_step_or_for_each_use_and_the_norm_over_all_stages() -> None:
    count = 4
    for once, each in run_ranks(4, layer_gathers, {"schedule": "1f1b", "microbatches": count}, timeout=200):
        calls, more = once[1], each[1]
        assert calls["all_gather"] * 2 * count >= more["all_gather"] >= calls["all_gather"] * count
        assert calls["reduce_scatter"] == more["reduce_scatter"]
        for error, _, (before, expected, after) in (once, each):
            assert error < 1e-12 and abs(before - expected) < 1e-12 and abs(after - 1e-3) < 1e-6


def buffers_after_a_step() -> dict[str, float]:
    """On a rank: how far buffers are from those of one process."""
    model = Buffers()
    parallel = autopar.parallelize(model, init_mesh(pp=2), example_batch=batch(), schedule="gpipe")
    parallel.train_step(**batch())
    model(**batch())
    state, expected = parallel.full_state_dict(), model.state_dict()
    assert set(state) == set(expected)
    return {name: float((state[name] - expected[name]).abs().max()) for name in expected if "running" in name}


def test_buffers_reach_all_ranks() -> None:
    for found in run_ranks(2, buffers_after_a_step, timeout=100):
        assert len(found) == 4 and max(found.values()) < 1e-12, found


def traced(sizes: dict[str, int], folder: str) -> tuple[float, float]:
    parallel = autopar.parallelize(Stack(), init_mesh("cpu", **sizes), example_batch=batch(), microbatches=4)
    return float(parallel.trace(folder, **batch())), float(parallel.train_step(**batch()))


def _is_within(event: dict[str, Any], other: dict[str, Any]) -> bool:
    start, end = other["ts"], other["ts"] + other["dur"]
    return start <= event["ts"] and event["ts"] + event["dur"] <= end + 2e-3  # microseconds, each rounded


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}], ids=str)
def test_any_step_can_be_measured(sizes: dict[str, int], tmp_path: Path) -> None:
    """The trace and the report of a step, with and without stages: all that was done, in its order."""
    for loss, again in run_ranks(2, traced, sizes, str(tmp_path)):
        assert loss == again
    rows = [[str(a) for a in parse_row(row)] for row in (tmp_path / "order.txt").read_text().splitlines()]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    (measured,) = (e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == "measured")
    spans = sorted((e for e in events if e["ph"] == "X" and e["pid"] == measured), key=lambda e: e["ts"])
    blocks: list[str] = []  # of all ranks
    for rank, row in enumerate(rows):
        mine = [e for e in spans if e["tid"] // 2 == rank]
        actions, modules = ([e for e in mine if (e["cat"] == "module") == wanted] for wanted in (False, True))
        assert [e["name"] for e in actions] == row
        found = {(kind, e["name"]) for e in modules for a in actions if _is_within(e, a) for kind in a["cat"]}
        ahead, behind = ({name for kind, name in found if kind == wanted} for wanted in "FW")
        assert ahead == behind and "blocks" in ahead
        blocks += sorted(ahead - {"blocks"})
        assert all(any(_is_within(e, a) for a in actions) for e in modules)
    assert blocks == [f"blocks.{i}" for i in range(4)]
    if "tp" in sizes:
        assert rows == [["0F0", "0BW0", "0F1", "0BW1", "0F2", "0BW2", "0F3", "0BWR3"]]
    assert "<dt>measured</dt>" in (tmp_path / "report.html").read_text()
