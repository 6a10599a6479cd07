"""finish=: the first layouts run on the real ranks, and the fastest that ran is kept on all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopar
import autopar.api
from autopar.auto.finish import Finalist
from tests.auto.logged import logged_lines
from tests.auto.test_machine import BATCH, SEQ, Blocks, example
from tests.support.ranks import close_pools, run_ranks

PLAIN = {
    "zero": 0,
    "activation_checkpoint": "none",
    "microbatches": 1,
    "loss_chunks": 1,
    "optimizer_cpu_offload": False,
}


def kept(seconds: dict[str, float], hungry: str, options: dict[str, Any]) -> tuple[str, float, list[str], bool]:
    """(mesh, loss, logged lines, whether the weights are as before), where meshes take the given seconds by the clock
    of rank 1, and rank 1 has no memory for one of them."""
    torch.manual_seed(0)
    timed, rank = autopar.api.timed_steps, torch.distributed.get_rank()

    def planted(parallel: Any, *args: Any) -> float:
        mesh = str(parallel.plan.mesh)
        if mesh == hungry and rank == 1:
            raise torch.OutOfMemoryError("no memory is left")
        found = timed(parallel, *args)
        return seconds.get(mesh, 9.0 if seconds else found) if rank == 1 else 1e-6

    autopar.api.timed_steps = planted if seconds or hungry else timed
    model = Blocks(4).double()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    try:
        with logged_lines() as lines:
            parallel = autopar.parallelize(
                model, "auto", batch=BATCH, finish=3, example_batch=example(), **options
            )  # fmt: skip
    finally:
        autopar.api.timed_steps = timed
    same = all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    ids = torch.arange(BATCH * SEQ).reshape(BATCH, SEQ) * 7 % 32
    mesh = parallel.plan.mesh
    here, rows = mesh.dp_rank_and_size(mesh.coordinate(rank)), BATCH // mesh.data_size
    loss = parallel.train_step(ids=ids[here * rows : (here + 1) * rows])
    return str(mesh), float(loss), lines, same


def checked(found: list[tuple[str, float, list[str], bool]]) -> tuple[str, list[str]]:
    """(mesh, lines of rank 0)"""
    torch.manual_seed(0)
    ids = torch.arange(BATCH * SEQ).reshape(BATCH, SEQ) * 7 % 32
    wanted = float(Blocks(4).double()(ids).detach())
    assert all(abs(loss - wanted) < 1e-10 and same for _, loss, _, same in found)
    assert len({mesh for mesh, *_ in found}) == 1
    assert [len(lines) for _, _, lines, _ in found] == [3] + [0] * (len(found) - 1)
    return found[0][0], found[0][2]


def test_layouts_are_measured_and_the_fastest_is_kept() -> None:
    mesh, lines = checked(run_ranks(2, kept, {}, "", {}, timeout=180))
    assert lines[0].startswith("measured 3 of 3 layouts on 2 ranks: ") and lines[0].count("estimated") == 3
    assert lines[1].startswith(f"kept: {mesh}") and lines[2].startswith("estimates ordered")


def test_the_slowest_rank_counts() -> None:
    """Rank 0 sees no difference between them."""
    for fast, slow in (("dp=2", "pp=2"), ("pp=2", "dp=2")):
        mesh, lines = checked(run_ranks(2, kept, {fast: 1.0, slow: 2.0}, "", PLAIN, timeout=180))
        assert mesh == fast, lines


def test_a_layout_that_runs_out_of_memory_on_one_rank_is_left() -> None:
    mesh, lines = checked(run_ranks(2, kept, {"dp=2": 1.0, "pp=2": 2.0}, "dp=2", PLAIN, timeout=180))
    close_pools()
    assert mesh == "pp=2" and "out of memory on rank 1" in lines[0], lines


def refused(how: dict[str, Any]) -> str:
    try:
        autopar.parallelize(Blocks(2) if how.pop("weights", True) else Blocks(2).to("meta"), "auto", **how)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"batch": 8, "finish": -1}, "finish: expected a whole number of at least 0, found -1"),
        ({"batch": 8, "finish": True}, "finish: expected a whole number of at least 0, found True"),
        ({"finish": 5}, 'mesh="auto" needs the examples of a step of all ranks; pass batch=512'),
        ({"batch": 8, "finish": 5, "weights": False}, "finish= measures steps, found a model without weights"),
    ],
    ids=str,
)  # fmt: skip
def test_what_finish_refuses(how: dict[str, Any], said: str) -> None:
    (found,) = run_ranks(1, refused, dict(how), timeout=60)
    close_pools()
    assert said in found


def test_a_finalist_is_named() -> None:
    assert str(Finalist({"dp": 2, "tp": 2}, {"zero": 1, "loss_chunks": 1}, 1.0)) == "dp=2,tp=2 zero=1"
