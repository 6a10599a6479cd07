"""States of optimizers in host memory: the bits of states on the device, three buckets there at once, saved, loaded."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from autopar.adapters.dtensor import local_of
from autopar.cost.memory import memory
from autopar.runtime.mesh import host_copies
from autopar.runtime.mesh.host_copies import HostArena, OffloadBuffers
from tests.benchmarks.meter import Meter
from tests.runtime.test_optimizers import OPTIMIZERS
from tests.support.compile_cache import compiled_once
from tests.support.ranks import run_ranks
from tests.support.runs import Tied, batch_of
from tests.support.subjects import tiny

NAMES = ("AdamW", "AdamW foreach", "SGD fused", "Rprop", "Muon", "Adafactor", "Adafactor, relative steps")
BUCKET = 1_500  # bytes of parameters: several buckets of the small model
LARGE = 20_000  # of one that a meter sees well


def arena() -> HostArena:
    return OffloadBuffers.on(torch.device("cpu")).arena


def made(sizes: dict[str, int], **options: Any) -> tuple[Any, dict[str, Tensor]]:
    """A parallel model, and a rank's part of a batch."""
    mesh = autopar.init_mesh("cpu", 60.0, **sizes)
    part, parts = autopar.dp_rank_and_size(mesh)
    torch.manual_seed(0)
    batch = {k: v.chunk(parts)[part] for k, v in batch_of(0).items()}
    options = {"bucket_bytes": BUCKET, "example_batch": batch, **options}
    return autopar.parallelize(Tied().double(), mesh, **options), batch


def steps(parallel: Any, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor], count: int = 3) -> None:
    for _ in range(count):
        parallel.train_step(**batch)
        optimizer.step()
        parallel.zero_grad()


def states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Pieces of all states that are not single numbers."""
    found = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor) and x.dim()]
    return [*map(_plain_state, found)]


@pytest.mark.parametrize(
    ("sizes", "options"),
    [({"dp": 2}, {"zero": 3}), pytest.param({"pp": 2}, {"microbatches": 2, "zero": 0}, marks=pytest.mark.full)],
    ids=str,
)
def test_steps_are_the_same_bits(sizes: dict[str, int], options: dict[str, Any]) -> None:
    for found in run_ranks(2, _stepped, sizes, options, timeout=200.0):
        assert set(found) == set(NAMES)
        for name, (same, there, away) in found.items():
            assert same, f"{name} steps otherwise"
            assert there == 0 and away, f"{name} keeps states on the device"


def _stepped(sizes: dict[str, int], options: dict[str, Any]) -> dict[str, Any]:
    models = {on_host: made(sizes, optimizer_cpu_offload=on_host, **options) for on_host in (False, True)}
    start = {n: x.clone() for n, x in models[False][0].full_state_dict().items()}
    found = {}
    for name in NAMES:
        kept = []
        for parallel, batch in models.values():
            parallel.load_state_dict(start)
            optimizer = OPTIMIZERS[name]([*parallel.parameters()])
            steps(parallel, optimizer, batch)
            assert all(p.grad is None for p in parallel.parameters())
            held = [arena().holds(x) for x in states(optimizer) if x.numel()]
            kept.append(({n: x.clone() for n, x in parallel.full_state_dict().items()}, held))
        (expected, nothing), (weights, held) = kept
        same = all(torch.equal(x, weights[n]) for n, x in expected.items())
        assert not all(torch.equal(x, start[n]) for n, x in expected.items()), f"{name} does not step"
        found[name] = same, sum(nothing), all(held)
    return found


def test_three_buckets_are_on_the_device() -> None:
    seen, said, on_host, whole = run_ranks(1, _metered, timeout=100.0)[0]
    assert 0.95 * seen <= said <= 1.02 * seen
    assert on_host == whole > 3 * LARGE


def _metered() -> tuple[int, int, int, int]:
    model, batch = tiny("llama", layers=1)
    mesh = autopar.init_mesh("cpu", 60.0, dp=1)
    parallel = autopar.parallelize(model, mesh, bucket_bytes=LARGE, optimizer_cpu_offload=True)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9, foreach=False)
    steps(parallel, optimizer, batch)
    parallel.train_step(**batch)
    pieces = [local_of(x) for p in parallel.parameters() for x in (p, p.grad)]
    with Meter(pieces, arena().holds) as meter:
        optimizer.step()
    said = memory(parallel.compiled()[0])
    # (AdamW has two moments, of which SGD has one, and each of its steps a value besides)
    return meter.peak, said.parameters + said.gradients + said.optimizer // 2, 2 * arena().lent, said.states


def test_hooks_closures_and_groups() -> None:
    assert run_ranks(1, _habits, timeout=100.0) == [["before", "closure", "after", "0.5", "kept", "kept"]]


def _habits() -> list[str]:
    """A closure runs once; hooks run once, around; a scheduler's rate counts; a parameter of somebody else is stepped,
    and its state stays; a step that fails leaves states that the next one takes."""
    parallel, batch = made({"dp": 1}, optimizer_cpu_offload=True)
    other, log = torch.nn.Parameter(torch.ones(3)), list[str]()
    other.grad = torch.ones(3)
    matrices, rest = ([p for p in parallel.parameters() if (p.dim() == 2) == two] for two in (True, False))
    optimizer = torch.optim.Adam([{"params": matrices}, {"params": [*rest, other], "lr": 0.25}], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: log.append("before"))
    optimizer.register_step_post_hook(lambda *_: log.append("after"))

    def closure() -> float:
        log.append("closure")
        return float(parallel.train_step(**batch))

    optimizer.param_groups[1]["lr"] = 0.5
    optimizer.step(closure)
    log.append(f"{float(1 - other[0]):.1f}")
    log.append("kept" if not arena().holds(optimizer.state[other]["exp_avg"]) else "moved")
    before = [x.clone() for x in states(optimizer)]
    matrices[-1].grad = None
    for p in matrices[:1]:
        p.grad = p.detach().clone()
    optimizer.param_groups[0]["betas"] = None  # the step raises
    with contextlib.suppress(TypeError):
        optimizer.step()
    del log[5:]
    same = all(torch.equal(x, y) for x, y in zip(before, states(optimizer), strict=True))
    return [*log, "kept" if same else "lost"]


def test_saved_and_loaded(tmp_path: Path) -> None:
    """From states on the host to states on the device, and back."""
    assert all(run_ranks(2, _saved, str(tmp_path), timeout=200.0))


@compiled_once()
def _saved(folder: str) -> bool:
    def run(at: str, on_host: bool, load: str = "") -> dict[str, Tensor]:
        parallel, batch = made({"dp": 2}, zero=1, optimizer_cpu_offload=on_host)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
        if load:
            autopar.load(f"{folder}/{load}", parallel, optimizer)
            assert all(arena().holds(x) == on_host for x in states(optimizer))
        steps(parallel, optimizer, batch, 2)
        if at:
            autopar.save(f"{folder}/{at}", parallel, optimizer, step=2)
        return dict(parallel.full_state_dict())

    expected = run("device", on_host=False)
    run("host", on_host=True)
    expected = run("", on_host=False, load="device")
    ways = [run("", on_host=True, load="host"), run("", True, "device"), run("", False, "host")]
    return all(torch.equal(x, found[n]) for found in ways for n, x in expected.items())


@pytest.mark.full
def test_loaded_on_other_meshes(tmp_path: Path) -> None:
    """From two ranks onto four, whose states are there or here, and back: the bits of states on the device."""
    run_ranks(2, _went_on, str(tmp_path), {"dp": 2}, 1, True, "", "first", timeout=100.0)
    for zero in (1, 3):
        ways = [
            run_ranks(4, _went_on, str(tmp_path), {"dp": 2, "tp": 2}, zero, on_host, "first", f"{zero}{on_host}")[0]
            for on_host in (False, True)
        ]
        ways += [run_ranks(2, _went_on, str(tmp_path), {"dp": 2}, 3, x, f"{zero}{not x}", "")[0] for x in (True, False)]
        for one, other in (ways[:2], ways[2:]):
            assert all(torch.equal(x, other[n]) for n, x in one.items())


def _went_on(folder: str, sizes: dict[str, int], zero: int, on_host: bool, load: str, save: str) -> dict[str, Tensor]:
    parallel, batch = made(sizes, zero=zero, optimizer_cpu_offload=on_host)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
    if load:
        autopar.load(f"{folder}/{load}", parallel, optimizer)
        assert all(arena().holds(x) == on_host for x in states(optimizer) if x.numel())
    steps(parallel, optimizer, batch, 2)
    if save:
        autopar.save(f"{folder}/{save}", parallel, optimizer)
    return dict(parallel.full_state_dict())


def test_habits_between_steps() -> None:
    """Groups that come later, parameters frozen for a while, several backwards to a step, zeros as gradients."""
    for same, there in run_ranks(2, _between, timeout=100.0):
        assert same and there


def _between() -> tuple[bool, bool]:
    found = []
    for on_host in (False, True):
        parallel, batch = made({"dp": 2}, zero=2, microbatches=2, optimizer_cpu_offload=on_host)
        parameters = [*parallel.parameters()]
        optimizer = torch.optim.AdamW(parameters[:5], lr=0.01)
        for number in range(5):
            for k, p in enumerate(parameters):
                p.requires_grad_(number not in (1, 2) or k % 2 == 0)
            parallel.train_step(**batch)
            if number == 2:
                continue
            if number == 3:
                optimizer.add_param_group({"params": parameters[5:], "lr": 0.1, "weight_decay": 0.0})
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        found.append((dict(parallel.full_state_dict()), [arena().holds(x) for x in states(optimizer) if x.numel()]))
    (expected, here), (weights, there) = found
    return all(torch.equal(x, weights[n]) for n, x in expected.items()), all(there) and not any(here)


class LateCopies(OffloadBuffers):
    """As on a GPU: what leaves the device arrives when somebody waits for it, or when it is to come back."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.late: list[tuple[Tensor, Tensor]] = []

    def to_host(self, x: Tensor) -> Any:
        found = super().to_host(x)
        self.late.append((found.made, x.clone()))
        found.made.fill_(7)
        return found

    def from_host(self, x: Tensor) -> Any:
        self.arrived()
        return super().from_host(x)

    def arrived(self) -> None:
        while self.late:
            made, x = self.late.pop()
            made.copy_(x)


def test_the_host_waits_before_it_reads_states(tmp_path: Path) -> None:
    (found,) = run_ranks(1, _late, str(tmp_path), timeout=100.0)
    assert [what for what, right in found.items() if not right] == [] and len(found) == 5


def _late(folder: str) -> dict[str, bool]:
    """Whether `state_dict`, saves and loads have what lies in host memory once all copies are done."""
    device, late, found = torch.device("cpu"), LateCopies(), dict[str, bool]()
    known = host_copies._OF_DEVICES.pop(device, None)
    host_copies._OF_DEVICES[device] = late
    try:
        parallel, batch = made({"dp": 1}, optimizer_cpu_offload=True)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
        steps(parallel, optimizer, batch, 1)
        assert late.late, "copies are on their way"
        told = [x["momentum_buffer"].clone() for x in optimizer.state_dict()["state"].values()]
        late.arrived()
        found["state_dict"] = all(map(torch.equal, map(_plain_state, told), states(optimizer)))
        for asynchronous in (False, True):
            steps(parallel, optimizer, batch, 1)
            saved = autopar.save(folder, parallel, optimizer, asynchronous=asynchronous)
            saved.wait()
            late.arrived()
            expected = [x.clone() for x in states(optimizer)]
            steps(parallel, optimizer, batch, 1)
            autopar.load(saved.folder, parallel, optimizer)
            found[f"load {asynchronous=}"] = not late.late
            late.arrived()
            found[f"save {asynchronous=}"] = all(map(torch.equal, expected, states(optimizer)))
    finally:
        del host_copies._OF_DEVICES[device]
        if known is not None:
            host_copies._OF_DEVICES[device] = known
    return found


def _plain_state(x: Tensor) -> Tensor:
    return local_of(x) if hasattr(x, "device_mesh") else x


class Everything(torch.optim.Optimizer):
    """Steps all parameters by one number of them all."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise AssertionError


@pytest.mark.parametrize("kind", [Everything, functools.partial(torch.optim.LBFGS, lr=0.1)], ids=["own", "LBFGS"])
def test_what_steps_all_together_is_refused(kind: Any) -> None:
    (said,) = run_ranks(1, _refused, kind, timeout=60.0)
    assert said.startswith(
        "optimizer_cpu_offload: needs an optimizer that steps each parameter by itself, such as those of"
    )


def _refused(kind: Any) -> str:
    parallel, batch = made({"dp": 1}, optimizer_cpu_offload=True)
    parallel.train_step(**batch)
    try:
        kind(parallel.parameters()).step(lambda: torch.zeros(()))
    except ValueError as error:
        return str(error)
    return ""
