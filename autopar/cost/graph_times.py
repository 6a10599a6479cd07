"""How long a step graph takes when transfers overlap with computation, and which transfers the computation waits for.

    y = all_reduce(x)        starts here, on the links of its axis
    z = mm(a, b)             computes meanwhile
    w = y + z                waits for the rest of it: that time is *exposed*

Computation is one queue, launches of kernels another that runs ahead, and the links of each axis are one queue each.
Waits are where the executor has them (`autopar.ir.waits`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from autopar.cost.attention_costs import is_context_attention
from autopar.cost.flops import Requests, node_seconds
from autopar.cost.hardware import Device, Links, host_link
from autopar.cost.traffic import transfer, transfer_seconds
from autopar.ir.graph import nbytes
from autopar.ir.waits import WaitPlaces, is_started, pauses_at
from autopar.ops.traits import COPIES

HOST = "host"  # the link to host memory, in addition to those of axes


@dataclass(frozen=True)
class GraphTimes:
    """Seconds of one run. seconds: from the first node to the last. computing: node -> its computation. moving: node ->
    its transfer. exposed: node -> how long the computation waits for its transfer."""

    seconds: float
    computing: Mapping[Node, float]
    moving: Mapping[Node, float]
    exposed: Mapping[Node, float]


def graph_times(gm: GraphModule, device: Device, links: Links, requests: Requests | None = None) -> GraphTimes:
    """Estimated times of a step graph. ``requests``: as in `autopar.cost.flops.flops`."""
    run = _GraphRun(gm, device, links, requests)
    for node in gm.graph.nodes:
        run.reach(node)
    return GraphTimes(run.now, run.computing, run.moving, run.exposed)


def transfer_of(node: Node, device: Device, links: Links) -> tuple[str, float]:
    """(the link that a collective or a copy uses: an axis, or `HOST`; seconds on it)"""
    if node.target in COPIES:
        host = host_link(links.named, device)
        return HOST, host.latency + nbytes(node) / host.bandwidth
    moved = transfer(node, links.mesh)
    return (moved.axis if moved is not None else ""), transfer_seconds(node, links) or 0.0


class _GraphRun:
    def __init__(self, gm: GraphModule, device: Device, links: Links, requests: Requests | None) -> None:
        self.places, self.device, self.links, self.now = WaitPlaces(gm), device, links, 0.0
        self.launched = 0.0  # when the host is done with launches so far
        self.requests = requests
        self.free: dict[str, float] = {}  # axis -> when its links are
        self.done: dict[Node, float] = {}
        self.computing: dict[Node, float] = {}
        self.moving: dict[Node, float] = {}
        self.exposed: dict[Node, float] = {}

    def reach(self, node: Node) -> None:
        for earlier in self.places.before(node):
            self._wait(earlier)
        if is_started(node):
            self._start(node)
        elif is_context_attention(node):
            self._attend(node)
        elif seconds := node_seconds(node, self.device, requests=self.requests):
            self._compute(node, seconds)

    def _compute(self, node: Node, seconds: float) -> None:
        """A kernel starts when the host has launched it; computation includes the wait for that."""
        self.launched += self.device.launch
        end = max(self.now, self.launched) + seconds
        self.computing[node] = end - self.now
        self.now = end

    def _start(self, node: Node) -> None:
        link, seconds = transfer_of(node, self.device, self.links)
        self.launched += self.device.launch
        begin = max(self.now, self.launched, self.free.get(link, 0.0))
        self.moving[node] = seconds
        self.done[node] = self.free[link] = begin + seconds
        for earlier in self.places.started(node):
            self._wait(earlier)

    def _wait(self, node: Node) -> None:
        late = self.done.get(node, 0.0) - self.now
        if late > 0:
            self.exposed[node] = late
            self.now += late

    def _attend(self, node: Node) -> None:
        """Exchanges of attention overlap with its own products."""
        self._compute(node, node_seconds(node, self.device))
        self.moving[node] = transfer_seconds(node, self.links) or 0.0
        self.exposed[node] = max(self.moving[node] - self.computing[node], 0.0)
        self.now += self.exposed[node]


# --- graphs that exchange tokens, alone or two by turns ------------------------------------------------


@dataclass(frozen=True)
class Segment:
    """Computes for ``computes`` seconds, then starts exchanges, (which, seconds) each, or waits for some. ``launches``:
    seconds of the host for its kernels, which goes on while the device waits.

        F    compute, start 1, compute, wait 1, ...    each half runs until it waits for an exchange of tokens, then
        BW   compute, start 2, wait 2, compute, ...    the other one runs (`autopar.runtime.exec.overlap_f_b`)

    Exchanges share one link. Everything else, other collectives included, does not overlap, as in `autopar.cost.flops`.
    """

    computes: float
    started: tuple[tuple[int, float], ...] = ()
    waits: tuple[int, ...] = ()
    launches: float = 0.0


Segments = tuple[Segment, ...]


def segments_of(gm: GraphModule, axis: str, device: Device, links: Links) -> Segments:
    """The segments of a step graph whose experts are sharded on an axis."""
    places, found, computes, launches = WaitPlaces(gm), list[Segment](), 0.0, 0.0
    numbers: dict[Node, int] = {}

    def wait(collectives: list[Node]) -> None:
        nonlocal computes, launches
        if ours := tuple(numbers[node] for node in collectives if node in numbers):
            found.append(Segment(computes, waits=ours, launches=launches))
            computes = launches = 0.0

    for node in gm.graph.nodes:
        wait(places.before(node))
        took = node_seconds(node, device, links)
        if not is_started(node):
            computes, launches = computes + took, launches + (device.launch if took else 0.0)
            continue
        launches += device.launch
        if pauses_at([node], axis):
            numbers[node] = len(numbers)
            found.append(Segment(computes, ((numbers[node], took),), launches=launches))
            computes = launches = 0.0
        else:
            computes += took
        wait(places.started(node))
    return (*found, Segment(computes, launches=launches))


def seconds_by_turns(*halves: Segments) -> float:
    """Seconds of one graph, or of two that take turns."""
    now = link = launched = 0.0
    ends: list[dict[int, float]] = [{} for _ in halves]
    at, paused = [0] * len(halves), [False] * len(halves)
    while any(i < len(half) for i, half in zip(at, halves, strict=True)):
        for k, half in enumerate(halves):
            while at[k] < len(half):
                segment = half[at[k]]
                if not paused[k]:
                    launched += segment.launches
                    now = max(now + segment.computes, launched)
                    for number, took in segment.started:
                        link = ends[k][number] = max(now, link) + took
                    paused[k] = bool(segment.waits)
                    if paused[k]:
                        break
                else:
                    paused[k] = False
                    now = max([now, *(ends[k][number] for number in segment.waits)])
                at[k] += 1
    return now
