"""mesh="auto" on real CPU ranks: the choice runs, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.auto import machine
from autopar.auto.machine import chip_called, lengthened, rows_of, sequence_of
from tests.auto.logged import logged_lines
from tests.support.ranks import RankError, close_pools, run_ranks

BATCH, SEQ, WIDTH = 8, 16, 16


class Blocks(nn.Module):
    """Blocks of two products, which nobody wrote a formula for."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.first = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(layers)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.first(ids)
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def example() -> dict[str, torch.Tensor]:
    return {"ids": torch.arange(2 * SEQ).reshape(2, SEQ) % 32}


def trained(options: dict[str, Any]) -> tuple[float, str, dict[str, Any], list[str]]:
    """(loss, mesh, options, logged lines) of a step on the chosen mesh."""
    torch.manual_seed(0)
    with logged_lines() as lines:
        model = autopar.parallelize(Blocks(4).double(), "auto", batch=BATCH, example_batch=example(), **options)
    ids = torch.arange(BATCH * SEQ).reshape(BATCH, SEQ) * 7 % 32
    mesh = model.plan.mesh
    here = mesh.dp_rank_and_size(mesh.coordinate(torch.distributed.get_rank()))
    rows = BATCH // mesh.data_size
    loss = model.train_step(ids=ids[here * rows : (here + 1) * rows])
    return float(loss), str(mesh), dict(vars(model.plan.options)), lines


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {}), (4, {}), (4, {"zero": 3, "microbatches": 2}), (2, {"schedule": "1f1b"}),
        (4, {"activation_checkpoint": "full"}),
    ],
    ids=str,
)  # fmt: skip
def test_the_choice_runs_on_real_ranks(ranks: int, options: dict[str, Any]) -> None:
    found = run_ranks(ranks, trained, options, timeout=120)
    torch.manual_seed(0)
    ids = torch.arange(BATCH * SEQ).reshape(BATCH, SEQ) * 7 % 32
    wanted = float(Blocks(4).double()(ids).detach())
    assert all(abs(loss - wanted) < 1e-10 for loss, *_ in found)
    assert len({mesh for _, mesh, *_ in found}) == 1
    assert all(chosen[name] == value for _, _, chosen, _ in found for name, value in options.items())
    assert [len(lines) for *_, lines in found] == [3] + [0] * (ranks - 1)


def refused(how: dict[str, Any]) -> str:
    try:
        autopar.parallelize(Blocks(how.pop("layers", 2)), how.pop("mesh", "auto"), **how)
    except ValueError as error:
        return str(error)
    raise AssertionError("not refused")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({}, 'mesh="auto" needs the examples of a step of all ranks; pass batch=512'),
        ({"batch": 0}, "batch: expected a whole number of at least 1, found 0"),
        ({"batch": 8, "mesh": "automatic"}, "pass autopar.init_mesh(...) instead of 'automatic'"),
        ({"batch": 8, "layers": 1, "example_batch": example()}, "auto: needs a model with repeated layers"),
        ({"batch": 8, "example_batch": example(), "tp": 2}, "unknown option 'tp'"),
        ({"batch": 8, "example_batch": example(), "token_slices": 2}, "auto: token_slices is not searched"),
    ],
    ids=str,
)  # fmt: skip
def test_what_auto_refuses(how: dict[str, Any], said: str) -> None:
    (found,) = run_ranks(1, refused, dict(how), timeout=60)
    close_pools()
    assert said in found


def differently(rank_batches: list[int]) -> None:
    autopar.parallelize(Blocks(2), "auto", batch=rank_batches[torch.distributed.get_rank()], example_batch=example())


def test_ranks_that_are_given_different_batches_are_refused() -> None:
    with pytest.raises(RankError) as error:
        run_ranks(2, differently, [8, 4], timeout=60)
    close_pools()
    assert "every rank must be given the same model, batch and options" in str(error.value)


def on_other_chips() -> str:
    rank, seen = torch.distributed.get_rank(), machine.this_machine
    machine.this_machine = lambda world: machine.Machine(("H100", "A100")[rank], 80 << 30, 2)
    try:
        return refused({"batch": 8, "example_batch": example()})
    finally:
        machine.this_machine = seen


def test_ranks_that_see_different_chips_are_refused() -> None:
    for found in run_ranks(2, on_other_chips, timeout=60):
        assert "auto: all ranks must see the same machine" in found and "rank 1: A100; against rank 0: H100" in found, (
            found
        )
    close_pools()


@pytest.mark.parametrize(
    ("name", "memory", "chip"),
    [
        ("NVIDIA H100 80GB HBM3", 80e9, "H100"), ("NVIDIA A100-SXM4-40GB", 40e9, "A100-40"),
        ("NVIDIA A100-SXM4-80GB", 80e9, "A100"), ("NVIDIA GB200", 186e9, "GB200"),
        ("AMD Instinct MI300X", 192e9, "MI300X"), ("NVIDIA H200", 141e9, "H200"),
    ],
)  # fmt: skip
def test_a_gpu_is_found_in_the_table(name: str, memory: float, chip: str) -> None:
    assert chip_called(name, memory) == chip


def test_an_unknown_gpu_is_refused() -> None:
    for name in ("NVIDIA GeForce", "NVIDIA RTX A1000"):
        with pytest.raises(ValueError, match=f"found '{name}'; name the mesh"):
            chip_called(name, 8e9)


def test_batches_like_an_example() -> None:
    batch = {"ids": torch.zeros(2, 8, dtype=torch.int64), "scale": torch.ones(3), "flag": True}
    made = rows_of(batch)(5)
    assert sequence_of(batch) == 8
    assert made["ids"].shape == (5, 8) and made["scale"].shape == (3,) and made["flag"] is True
    assert lengthened(batch, nn.Module())["ids"].shape == (2, 2048)
