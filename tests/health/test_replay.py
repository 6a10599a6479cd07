"""``check="replay"``: bits that are flipped, in what a step makes and in what lies in memory between steps."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import autopar
from autopar.runtime.comm.collectives import Collective
from autopar.runtime.comm.step_notes import open_notes
from autopar.runtime.exec.lowering import Lowered
from autopar.runtime.exec.replay_check import BitsDiffer, replay_every
from autopar.runtime.module.argument_checks import checks_of
from tests.health.test_finite import Stack
from tests.support.plain_models import gap
from tests.support.ranks import rank_outcomes, run_ranks
from tests.support.scalar_kernels import scalar_kernels

MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp": ({"dp": 2}, {"zero": 3}),
    "tp": ({"tp": 2}, {}),
    "pp": ({"pp": 2}, {"microbatches": 2, "schedule": "zb_h1"}),
}


def trained(mesh: str, **options: Any) -> tuple[Any, torch.optim.Optimizer, dict[str, Tensor]]:
    """A model whose every step is made twice, after one step."""
    sizes, more = MESHES[mesh]
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 8)}
    parallel = autopar.parallelize(
        Stack("", -1),
        autopar.init_mesh("cpu", 60.0, **sizes),
        example_batch=batch,
        **{"check": "replay:1", **more, **options},
    )
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.1)
    step(parallel, optimizer, batch)
    return parallel, optimizer, batch


def step(parallel: Any, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> None:
    parallel.train_step(**batch)
    torch.nn.utils.clip_grad_norm_(parallel.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


def flip(x: Tensor, drawn: random.Random) -> None:
    """One bit of its memory."""
    lanes = x.detach().reshape(-1).view(torch.int32)
    lanes.data[drawn.randrange(len(lanes))] ^= 1 << drawn.randrange(31)


# --- in a step ------------------------------------------------------------------------------------------


class Flipping:
    """Flips a bit in the n-th value that a step makes, over both of its runs, or in the n-th sum that it receives."""

    def __init__(self, what: str, place: int, drawn: random.Random) -> None:
        self.what, self.place, self.drawn, self.met = what, place, drawn, 0

    def may(self, what: str, x: Any) -> None:
        if what == self.what and isinstance(x, Tensor) and x.is_floating_point() and x.is_contiguous() and x.numel():
            if self.met == self.place:
                flip(x, self.drawn)
            self.met += 1

    @contextmanager
    def planted(self) -> Iterator[None]:
        noted, launch = Lowered._noted, Collective.launch

        def made(lowered: Lowered, results: tuple[Any, ...]) -> tuple[Any, ...]:
            for x in results if open_notes() is not None else ():
                self.may("made", x)
            return noted(lowered, results)

        def launched(collective: Collective, *args: Any, **kwargs: Any) -> Any:
            pending = launch(collective, *args, **kwargs)
            if open_notes() is not None:
                pending.work = Waited(pending.work, lambda: self.may("sum", pending.buffer))
            return pending

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Lowered, "_noted", made)
            patch.setattr(Collective, "launch", launched)
            yield


class Waited:
    """Work after which something is done."""

    def __init__(self, work: Any, then: Any) -> None:
        self.work, self.then = work, then

    def wait(self) -> None:
        self.work.wait()
        self.then()


def flipped_in_a_step(mesh: str, seeds: range, backend: str = "eager") -> list[str]:
    """The errors of steps with one flipped bit each; "" where the drawn place does not exist on that rank."""
    parallel, optimizer, batch = trained(mesh, backend=backend)
    found = []
    for seed in seeds:
        drawn = random.Random(seed)
        what, place, rank = drawn.choice(["made", "made", "sum"]), drawn.randrange(30), drawn.randrange(2)
        flipping = Flipping(what if dist.get_rank() == rank else "", place, drawn)
        said = ""
        with flipping.planted():
            try:
                parallel.train_step(**batch)
            except BitsDiffer as error:
                said = str(error)
        reached: list[Any] = [None, None]
        dist.all_gather_object(reached, flipping.met > place)
        assert bool(said) == reached[rank], (seed, what, place, rank, said)
        assert not said or f"on rank {rank}" in said, (seed, what, said)
        assert not said or re.search(r"differ in .*, action \d\w+ on rank", said), said
        optimizer.zero_grad()
        found.append(said)
    step(parallel, optimizer, batch)  # goes on
    return found


@pytest.mark.parametrize("mesh", MESHES)
def test_a_bit_that_flips_in_a_step_is_named(mesh: str) -> None:
    one, other = run_ranks(2, flipped_in_a_step, mesh, range(6), timeout=120)
    assert one == other and sum(map(bool, one)) >= 3


@pytest.mark.full
@pytest.mark.parametrize("mesh", MESHES)
def test_fifty_bits_that_flip_in_steps_are_named(mesh: str) -> None:
    one, other = run_ranks(2, flipped_in_a_step, mesh, range(100, 170), timeout=500)
    assert one == other and sum(map(bool, one)) >= 25


def flipped_in_a_compiled_step(mesh: str, seeds: range) -> list[str]:
    with scalar_kernels():
        return flipped_in_a_step(mesh, seeds, "inductor")


@pytest.mark.full
@pytest.mark.parametrize("mesh", MESHES)
def test_a_bit_that_flips_in_a_compiled_step_is_named(mesh: str) -> None:
    one, other = run_ranks(2, flipped_in_a_compiled_step, mesh, range(20), timeout=200)
    assert one == other and sum(map(bool, one)) >= 3


# --- between steps --------------------------------------------------------------------------------------


def flipped_in_memory(mesh: str, what: str, seed: int) -> None:
    parallel, optimizer, batch = trained(mesh)
    drawn = random.Random(seed)
    if what == "gradient":
        parallel.train_step(**batch)
    if dist.get_rank() == 1:
        held = [p for p in parallel.parameters() if p.to_local().numel()]
        p = drawn.choice([p for p in held if what != "gradient" or p.grad is not None])
        x = {"weight": lambda: p, "gradient": lambda: p.grad, "state": lambda: optimizer.state[p]["exp_avg_sq"]}[what]()
        flip(x.to_local(), drawn)
    if what == "gradient":
        optimizer.step()
    step(parallel, optimizer, batch)


@pytest.mark.parametrize(("mesh", "what"), [("dp", "weight"), ("tp", "state"), ("pp", "gradient")])
def test_a_bit_that_flips_in_memory_is_named(mesh: str, what: str) -> None:
    first, second = rank_outcomes(2, flipped_in_memory, mesh, what, len(mesh + what), timeout=60, grace=20)
    named = {"weight": "", "state": "the state exp_avg_sq of ", "gradient": "the gradient of "}[what]
    need = rf"replay: {named}\S+ on rank 1 must be as the last step left it, found other bits"
    assert re.search(rf"BitsDiffer: {need}", str(second.error)), second.error
    assert re.search(rf"rank 1 failed: BitsDiffer: {need}", str(first.error)), first.error


def drifted() -> str:
    """A replica whose weights became others in a way that nobody notices there."""
    parallel, optimizer, batch = trained("dp", zero=0)
    if dist.get_rank() == 1:
        with torch.no_grad():
            next(iter(parallel.parameters())).to_local().add_(1e-3)
    with pytest.raises(BitsDiffer) as caught:
        step(parallel, optimizer, batch)
    return str(caught.value)


def test_replicas_that_drift_apart_are_named() -> None:
    for text in run_ranks(2, drifted, timeout=60):
        assert re.match(r"replay: shards that several ranks hold must be bitwise equal, found .*embed\.weight", text), (
            text
        )


# --- what is healthy ------------------------------------------------------------------------------------


def healthy(mesh: str) -> None:
    """As without the check: losses, gradients and weights, by both ways of training, with writes in between."""
    found = []
    for check in ("replay:2", ()):
        parallel, optimizer, batch = trained(mesh, check=check)
        for turn in range(5):
            if mesh != "pp" and turn % 2:
                parallel(**batch).backward()
                torch._foreach_mul_([p.grad for p in parallel.parameters() if p.grad is not None], 0.5)
                optimizer.step()
                optimizer.zero_grad()
            else:
                step(parallel, optimizer, batch)
            with torch.no_grad():
                for p in parallel.parameters():
                    p.clamp_(-1, 1)
        found.append(parallel.full_state_dict())
    assert gap(*found) == 0.0


@pytest.mark.parametrize("mesh", MESHES)
def test_healthy_steps_are_as_without_the_check(mesh: str) -> None:
    run_ranks(2, healthy, mesh, timeout=120)


def test_how_often_is_checked() -> None:
    assert replay_every(checks_of("replay")) == 100 and replay_every(checks_of(["finite", "replay:7"])) == 7
    assert replay_every(checks_of("finite")) == 0
    for wrong in ("replay:0", "replay:often", "replays"):
        with pytest.raises(ValueError, match=r"check"):
            checks_of(wrong)
