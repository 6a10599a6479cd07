"""Additions as docs/adding.md describes them, with the code of that page, on real ranks by what users call.

The page itself is run by tests/docs/test_docs.py. Entries that a test makes are gone afterwards.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.attention.algorithm_table import ALGORITHMS
from autopar.chips import CHIPS
from autopar.compile.model import compile_model
from autopar.cost.expert_traffic import copy_bytes
from autopar.cost.hardware import device_named
from autopar.cost.step_estimate import step_estimate
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.registry import Registry
from autopar.schedule.request import SCHEDULES
from autopar.testing.reference import LIMIT
from autopar.token_dispatchers import TOKEN_DISPATCHERS, Routing
from tests.support.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
TABLES: tuple[Registry[Any], ...] = (ALGORITHMS, SCHEDULES, TOKEN_DISPATCHERS, CHIPS)
WIDTH = 8


def blocks() -> list[tuple[str, str]]:
    """(file or "", code) of the page, in order."""
    text = (ROOT / "docs" / "adding.md").read_text(encoding="utf-8")
    return re.findall(r"^```python(?: file=(\S+))?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def code_with(words: str) -> str:
    """The block of the page that has these words."""
    (code,) = [code for file, code in blocks() if not file and words in code]
    return code


@contextlib.contextmanager
def added(folder: Path, words: str) -> Iterator[None]:
    """Within: what a block of the page adds. ``folder``: of the page's files."""
    known = [set(table) for table in TABLES]
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        exec(code_with(words), {"__name__": "adding"})
        yield
    finally:
        sys.path.remove(str(folder))
        for table, names in zip(TABLES, known, strict=True):
            for name in set(table) - names:
                table.remove(name)


class Experts(nn.Module):
    """Tokens whose experts the batch says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = (nn.Parameter(torch.randn(4, WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor, expert: Tensor, weights: Tensor) -> Tensor:
        ours = torch.ops.autopar
        rows, order, offsets = ours.moe_dispatch(self.gate(x), expert, 4)
        hidden = ours.grouped_mm(rows, self.up, offsets, False).relu()
        out: Tensor = ours.moe_combine(ours.grouped_mm(hidden, self.down, offsets, False), order, weights)
        return (x + out).square().mean()


class Layers(nn.Module):
    """Causal attention, and a layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.first(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.last(out.transpose(1, 2).flatten(2)).square().mean()


def values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def train(model: nn.Module, batch: dict[str, Tensor], sizes: dict[str, int], **options: Any) -> Any:
    """A step on a real mesh. Asserts that loss and gradients are those of one process; returns the parallel model."""
    model = model.double()
    whole = copy.deepcopy(model)
    loss = whole(**batch)
    loss.backward()
    mesh = autopar.init_mesh("cpu", 60.0, **sizes)
    rank, parts = autopar.dp_rank_and_size(mesh)
    part = {name: x.chunk(parts)[rank] for name, x in batch.items()}
    parallel = autopar.parallelize(model, mesh, example_batch=part, **options)
    assert abs(float(parallel.train_step(**part)) - float(loss)) < LIMIT
    found = parallel.full_gradients()
    for name, p in whole.named_parameters():
        assert p.grad is not None and float((found[name] - p.grad).abs().max()) < LIMIT, name
    return parallel


# --- a token dispatcher -------------------------------------------------------------------------------------


def test_a_token_dispatcher(tmp_path: Path) -> None:
    """On two ranks, each of which sends half of the rows of its tokens: as many bytes as its row says."""
    (file,) = [(name, code) for name, code in blocks() if name == "halved_alltoall.py"]
    (tmp_path / file[0]).write_text(file[1], encoding="utf-8")
    for sent, expected in run_ranks(2, _dispatch, tmp_path, timeout=120.0):
        assert sent == expected > 0
    with pytest.raises(ValueError, match=r"token_dispatcher: expected 'auto', 'allgather',.* found 'halved_alltoall'"):
        Options(token_dispatcher="halved_alltoall")


def _dispatch(folder: Path) -> tuple[int, float]:
    name, first = "halved_alltoall", torch.arange(16) % 2
    batch = {"x": values(16, WIDTH), "expert": torch.stack([first, first + 2], 1), "weights": values(16, 2)}
    with added(folder, "TOKEN_DISPATCHERS.add("):
        parallel = train(Experts(), batch, {"ep": 2}, token_dispatcher=name)
        copies, routing = TOKEN_DISPATCHERS[name].copies, Routing(experts=4, top_k=2, ranks=2, per_node=2)
        expected = sum(copies(routing)) * copy_bytes(routing, name, 8, WIDTH, 8)
    return parallel.traffic()["ep", "all_to_all_rows"].bytes, expected


# --- an attention algorithm, and a schedule -----------------------------------------------------------------


def test_an_attention_algorithm(tmp_path: Path) -> None:
    run_ranks(2, _attend, tmp_path, timeout=120.0)


def _attend(folder: Path) -> None:
    with added(folder, "ALGORITHMS.add("):
        parallel = train(Layers(), {"x": values(2, 24, WIDTH)}, {"cp": 2}, attention="uneven_ring")
    (plan,) = parallel.compiled()[0].plan.attention.values()
    assert (plan.forward, plan.backward) == ("uneven_ring", "uneven_ring")


def test_a_schedule(tmp_path: Path) -> None:
    run_ranks(2, _schedule, tmp_path, timeout=120.0)


def _schedule(folder: Path) -> None:
    with added(folder, "SCHEDULES.add("):
        how = {"schedule": "last_first", "microbatches": 2, "split_points": ("last",)}
        parallel = train(Layers(), {"x": values(4, 6, WIDTH)}, {"pp": 2}, **how)
    assert parallel.compiled()[0].plan.pipeline.schedule == "last_first"


# --- a chip -------------------------------------------------------------------------------------------------


def test_a_chip(tmp_path: Path) -> None:
    """Every row of the table has speeds, and a plan."""
    batch = {"x": values(4, 16, WIDTH)}
    with added(tmp_path, "CHIPS.add("):
        assert "FAST" in CHIPS
        for name, chip in CHIPS.items():
            made = compile_model(Layers().double(), batch, Mesh.of(dp=2), Options(target_hardware=name), outputs=())
            assert made.plan.options.target_hardware == name and step_estimate(made).seconds > 0
            device = device_named(name)
            assert device.speed(torch.float64) == device.stack.products * chip.float64 > 0
            assert device.speed(torch.bfloat16) == device.stack.products * chip.flops
            assert device.card.bandwidth == device.stack.network * chip.links and device.host.bandwidth == chip.host
    with pytest.raises(ValueError, match=r"target_hardware: expected 'V100',.* found 'FAST'"):
        Options(target_hardware="FAST")


# --- names stand in their tables ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "files"),
    [
        (TOKEN_DISPATCHERS, {"token_dispatchers.py", "options.py", "planner/experts/expert_plan.py"}),
        (
            CHIPS,
            {
                "chips.py",
                "options.py",
                "cost/hardware.py",
                "cost/cluster.py",
                "cost/efficiency.py",
                "auto/machine.py",
                "auto/costed_model.py",
                "auto/stack_fit.py",
            },
        ),
    ],
    ids=["token dispatchers", "chips"],
)
def test_nothing_else_names_a_row(table: Registry[Any], files: set[str]) -> None:
    """Beside the table: the option's default and other words for a row, and what is chosen where nothing is asked."""
    names = re.compile("|".join(f"[\"']{name}[\"']" for name in table))
    package = ROOT / "autopar"
    found = {f.relative_to(package).as_posix() for f in package.rglob("*.py") if names.search(f.read_text("utf-8"))}
    assert found == files
