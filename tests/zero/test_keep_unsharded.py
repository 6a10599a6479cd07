"""`with model.keep_unsharded()`: gathered weights outlive a step, and nothing else is another than without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import autopar
from tests.support.compile_cache import compiled_once
from tests.support.ranks import run_ranks
from tests.zero.test_zero_loops import Odd, odd_batch

Found = dict[str, Any]


def loop(sizes: dict[str, int], options: dict[str, Any], held: bool) -> Found:
    """On a rank: three optimizer steps of three batches each and an evaluation after each; what was gathered in all."""
    torch.manual_seed(0)
    model = Odd().double()
    mesh = autopar.init_mesh("cpu", 30.0, **sizes)
    part, parts = autopar.dp_rank_and_size(mesh)
    mine = {k: v.chunk(parts)[part] for k, v in odd_batch().items()}
    parallel = autopar.parallelize(model, mesh, example_batch=mine, **options)
    groups = [p for p in parallel.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([{"params": groups[:2], "lr": 0.1}, {"params": groups[2:], "lr": 0.05}])
    losses: list[Tensor] = []
    for _ in range(3):
        with parallel.keep_unsharded() if held else torch.enable_grad():
            for i in range(3):
                rolled = {k: v.roll(i, 0) for k, v in mine.items()}
                losses += parallel.train_step(**rolled)
                if i == 1:  # between two micro-steps
                    losses += [
                        x.to_local() if hasattr(x, "to_local") else x for x in parallel.eval_step(**mine).values()
                    ]
        optimizer.step()
        optimizer.zero_grad()
    sent = {key: t.calls for key, t in parallel.traffic().items() if key[1] == "all_gather"}
    return {"losses": [float(x) for x in losses], "state": parallel.full_state_dict(), "gathers": sum(sent.values())}


def both(sizes: dict[str, int], options: dict[str, Any]) -> tuple[Found, Found]:
    with compiled_once():
        return loop(sizes, options, False), loop(sizes, options, True)


CASES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp": 2}, {"zero": 1}),
    ({"dp": 2}, {"zero": 2, "microbatches": 2}),
    ({"dp": 2}, {"zero": 3, "reshard_after_forward": False, "microbatches": 2}),
    ({"dp": 2, "pp": 2}, {"zero": 1, "microbatches": 2, "split_points": ("second",)}),
    ({"dp": 2}, {"zero": 3, "microbatches": 2}),
    ({"dp": 2}, {"zero": 0}),
]


@pytest.mark.parametrize(("sizes", "options"), CASES, ids=str)
def test_the_same_numbers_with_fewer_gathers(sizes: dict[str, int], options: dict[str, Any]) -> None:
    count = 2 * sizes.get("pp", 1)
    once = options["zero"] in (1, 2) or options.get("reshard_after_forward") is False
    for a, b in run_ranks(count, both, sizes, options):
        assert a["losses"] == b["losses"], "bitwise"
        assert all(torch.equal(x, b["state"][name]) for name, x in a["state"].items())
        if once:  # of 3 steps and an evaluation the first of each kind gathers
            assert b["gathers"] * 2 == a["gathers"] > 0
        else:
            assert b["gathers"] == a["gathers"]


def changed() -> list[str]:
    """What is said of changes within, on a rank; and that what is left behind is gone."""
    torch.manual_seed(0)
    mine = {k: v.chunk(2)[dist.get_rank()] for k, v in odd_batch().items()}
    mesh = autopar.init_mesh("cpu", 30.0, dp=2)
    parallel = autopar.parallelize(Odd().double(), mesh, example_batch=mine, zero=1)
    weight = dict(parallel.named_parameters())["first.weight"]
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    state = parallel.full_state_dict()

    def scaled() -> None:
        with torch.no_grad():
            weight.mul_(2.0)

    said = []
    for change in (scaled, optimizer.step, lambda: parallel.load_state_dict(state)):
        with parallel.keep_unsharded():
            parallel.train_step(**mine)
            change()
            try:
                parallel.train_step(**mine)
                said.append("")
            except RuntimeError as error:
                said.append(str(error))
        before = parallel.train_step(**mine)
        scaled()
        said.append(str(bool((before[0] - parallel.train_step(**mine)[0]).abs() > 1e-6)))
    with parallel.keep_unsharded():  # model(**batch), forward and backward
        parallel.zero_grad()
        losses = [parallel(**mine)["tokens"] for _ in range(2)]
        sum(losses).backward()  # type: ignore[union-attr]
        said.append(str(float(losses[0]) == float(losses[1])))
    return said


def test_changes_within_are_refused_and_seen_behind() -> None:
    for said in run_ranks(2, changed):
        for refused, seen in zip(said[:6:2], said[1:6:2], strict=True):
            assert "was written to, or replaced, inside `with model.keep_unsharded()`" in refused and seen == "True"
        assert said[6] == "True"


def alone() -> str:
    mine = {k: v.chunk(2)[dist.get_rank()] for k, v in odd_batch().items()}
    mesh = autopar.init_mesh("cpu", 30.0, dp=2)
    parallel = autopar.parallelize(Odd().double(), mesh, example_batch=mine, zero=1)
    parallel.train_step(**mine)
    try:
        if dist.get_rank():
            parallel.train_step(**mine)
        else:
            with parallel.keep_unsharded():
                parallel.train_step(**mine)
    except ValueError as error:
        return str(error)
    return ""


def test_a_rank_alone_within_is_refused_on_all() -> None:
    assert all("being inside keep_unsharded()" in said for said in run_ranks(2, alone))
