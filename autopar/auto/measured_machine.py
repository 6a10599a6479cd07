"""What a machine reaches: products, attention, memory, launches, copies, the optimizer and collectives, timed on all
ranks at once, and the stack that follows.

    measured = measure(groups, Machine(...), torch.float32)
    stack_of(measured, machine, stack_named("autopar-eager", machine.chip))

Ranks wait for each other before each measurement, and the slowest counts: ranks of one host share its memory, its cores
and its links.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from autopar.auto.machine import CPU, Machine
from autopar.auto.timed_steps import slowest
from autopar.cost.efficiency import Stack
from autopar.runtime.mesh.process_groups import Groups

BACKENDS = {"flash2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "plain": SDPBackend.MATH}
TRAINED = 2.5  # FLOPs of attention's backward, of those of the forward
SCORE_BYTES = 13  # moved per element of the scores without a fused kernel, as in `autopar.cost.layout_price`
LEVELS = {"inside": "dp", "network": "dp_replicate"}  # of links -> axis of the mesh of `levels`


@dataclass(frozen=True)
class Sizes:
    """Of what is timed. tokens, width: of products; heads: of attention, of width 64; elements: of tensors in memory;
    messages: bytes of two collectives; seconds: for a measurement, about."""

    tokens: int
    width: int
    heads: int
    seq: int
    elements: int
    messages: tuple[int, int]
    seconds: float


ON_GPU = Sizes(8192, 4096, 32, 4096, 1 << 27, (1 << 20, 1 << 28), 0.5)
ON_CPU = Sizes(1024, 512, 4, 512, 1 << 23, (1 << 14, 1 << 23), 0.3)
SMALL = Sizes(128, 64, 1, 128, 1 << 16, (1 << 10, 1 << 16), 0.02)  # to try it


@dataclass(frozen=True)
class Measured:
    """products: operations per second. attention: kernel -> (forward, backward) seconds of one call with ``sizes``.
    memory: bytes per second. launch: seconds per operator. copies: bytes per second to the host. optimizer: seconds per
    element. links: level -> (bytes per second and rank, seconds until they start)."""

    sizes: Sizes
    products: float
    attention: Mapping[str, tuple[float, float]]
    memory: float
    launch: float
    copies: float
    optimizer: float
    links: Mapping[str, tuple[float, float]]


def levels(machine: Machine, world: int) -> dict[str, int]:
    """Sizes of a mesh whose axes are the levels of the machine's links."""
    return {"dp_replicate": max(1, world // machine.per_node), "dp": min(world, machine.per_node)}


def measure(groups: Groups, dtype: torch.dtype, device: torch.device, sizes: Sizes | None = None) -> Measured:
    """Time everything. groups: of a mesh of `levels`. Collective; every rank gets the same answer."""
    sizes = sizes or (ON_GPU if device.type == "cuda" else ON_CPU)
    clock = _Clock(device, sizes.seconds)
    like: dict[str, Any] = {"dtype": dtype, "device": device}
    a, b = torch.randn(sizes.tokens, sizes.width, **like), torch.randn(sizes.width, sizes.width, **like)
    wide = torch.randn(sizes.width, 4 * sizes.width, **like)
    rates = [2 * a.numel() * w.shape[1] / clock(functools.partial(torch.mm, a, w)) for w in (b, wide)]
    x, y, out = (torch.ones(sizes.elements, **like) for _ in range(3))
    memory = 3 * x.nbytes / clock(lambda: torch.add(x, y, out=out))
    host = torch.empty(sizes.elements, dtype=dtype, pin_memory=device.type == "cuda")
    copies = x.nbytes / clock(lambda: host.copy_(x, non_blocking=True))
    return Measured(
        sizes, statistics.fmean(rates), dict(_attention(sizes, clock, dtype, device)), memory, _launch(clock, device),
        copies, _optimizer(sizes, clock, dtype, device), dict(_links(groups, sizes, clock, device)),
    )  # fmt: skip


@dataclass(frozen=True)
class _Clock:
    """Times calls: the median of one rank, of the slowest rank."""

    device: torch.device
    seconds: float

    def __call__(self, call: Callable[[], object], calls: int = 1) -> float:
        """Seconds of a call. ``calls``: that it makes itself. Collective: every rank makes as many."""
        self._once(call)
        count = int(min(50.0, max(3.0, self.seconds / slowest(self._once(call), self.device))))
        return slowest(statistics.median(self._once(call) for _ in range(count)), self.device) / calls

    def _once(self, call: Callable[[], object]) -> float:
        self._wait()
        start = time.perf_counter()
        call()
        self._wait()
        return max(time.perf_counter() - start, 1e-9)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _attention(
    sizes: Sizes, clock: _Clock, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, tuple[float, float]]]:
    shape = (1, sizes.heads, sizes.seq, 64)
    q, k, v = (torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    for name, backend in BACKENDS.items():

        def forward(backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel([backend]):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        try:
            out = forward()
        except RuntimeError:  # torch has no such kernel here; the same on all ranks
            continue
        grad = torch.ones_like(out)
        ahead = clock(forward)
        back = clock(functools.partial(torch.autograd.grad, out, (q, k, v), grad, retain_graph=True))
        yield name, (ahead, back)


def _launch(clock: _Clock, device: torch.device, calls: int = 300) -> float:
    """Of operators that compute nearly nothing."""
    x, w = torch.ones(2, 2, device=device), torch.ones(2, 2, device=device)

    def chain() -> None:
        for _ in range(calls // 3):
            torch.mm(torch.add(torch.mul(x, w), w), w)

    return clock(chain, calls)


def _optimizer(sizes: Sizes, clock: _Clock, dtype: torch.dtype, device: torch.device) -> float:
    parameters = [torch.zeros(sizes.elements // 16, dtype=dtype, device=device) for _ in range(16)]
    for p in parameters:
        p.requires_grad_()
        p.grad = torch.ones_like(p)
    step = torch.optim.AdamW(parameters).step
    return clock(step) / sum(p.numel() for p in parameters)


def _links(
    groups: Groups, sizes: Sizes, clock: _Clock, device: torch.device
) -> Iterator[tuple[str, tuple[float, float]]]:
    """An all-gather and an all-reduce of two sizes on each level that has ranks."""
    for name, axis in LEVELS.items():
        ranks = groups.mesh.sizes.get(axis, 1)
        if ranks < 2:
            continue
        speeds, starts = list[float](), list[float]()
        for rounds, call in ((1, _gathered), (2, _reduced)):
            times = [clock(call(groups.group(axis), size, ranks, device)) for size in sizes.messages]
            sent = [rounds * size * (ranks - 1) / ranks for size in sizes.messages]
            speeds.append((sent[1] - sent[0]) / max(times[1] - times[0], 1e-3 * times[1]))
            starts.append(max(1e-6, times[0] - sent[0] / speeds[-1]))
        yield name, (math.sqrt(speeds[0] * speeds[1]), statistics.fmean(starts))


def _gathered(group: Any, size: int, ranks: int, device: torch.device) -> Callable[[], object]:
    part = torch.zeros(size // 4 // ranks, device=device)
    parts = [torch.zeros_like(part) for _ in range(ranks)]
    return lambda: dist.all_gather(parts, part, group=group)


def _reduced(group: Any, size: int, ranks: int, device: torch.device) -> Callable[[], object]:
    whole = torch.zeros(size // 4, device=device)
    return lambda: dist.all_reduce(whole, group=group)


# --- the stack ------------------------------------------------------------------------------------------------


def stack_of(measured: Measured, machine: Machine, base: Stack, about: str = "") -> Stack:
    """The stack of what was measured. base: of the values that were not. Raises ValueError for what cannot be: times
    that are zero, negative or no numbers."""
    _check(measured)
    group, chip = machine.cluster.group, machine.cluster.chip
    s = measured.sizes
    flops = 4 * s.heads * s.seq**2 * 64  # of all pairs
    forward, backward = dict(base.attention), dict(base.attention_backward)
    for kernel, (ahead, back) in measured.attention.items():
        plain = kernel == "plain"
        counted = flops if plain else flops / 2
        spent = SCORE_BYTES * s.heads * s.seq**2 / measured.memory if plain else 0.0
        forward[kernel] = counted / max(ahead - spent, ahead / 4) / chip.flops
        backward[kernel] = TRAINED * counted / max(back - spent, back / 4) / chip.flops
    values: dict[str, Any] = {
        "products": measured.products / chip.flops, "memory": measured.memory / chip.memory, "launch": measured.launch,
        "host": measured.copies / chip.host, "optimizer": measured.optimizer * measured.memory,
    }  # fmt: skip
    if "inside" in measured.links:
        speed, values["start"] = measured.links["inside"]
        values["inside"] = speed / group.inside
    if "network" in measured.links:
        speed, start = measured.links["network"]
        values |= {"network": speed / (group.card * min(1.0, group.cards / group.per_node))}
        values.setdefault("start", start)
    kernel = base.kernel if base.kernel in measured.attention else next(iter(measured.attention), base.kernel)
    kernels = [f"attention of {name}" for name in forward if name not in measured.attention]
    links = [name for name in ("inside", "network", "start") if name not in values]
    shared: dict[str, Any] = {"hidden": {"dp": 0.0, "zero": 0.0}, "reserved": 0.0} if machine.chip == CPU else {}
    return replace(
        base, name="measured", attention=forward, attention_backward=backward, kernel=kernel, kernels={},
        guesses=(*kernels, *links, "float8", "hidden", "jitter"), source=f"measured: {about or machine.cluster.name}",
        **values, **shared,
    )  # fmt: skip


def _check(measured: Measured) -> None:
    plain = {n: getattr(measured, n) for n in ("products", "memory", "launch", "copies", "optimizer")}
    for words, pairs in (("attention of", measured.attention), ("link", measured.links)):
        plain |= {f"{words} {name}": x for name, pair in pairs.items() for x in pair if not 0 < x < math.inf}
    for name, value in plain.items():
        if not 0 < value < math.inf:
            raise ValueError(f"calibrate: {name} needs a number above 0, found {value}; measure on an idle machine")
