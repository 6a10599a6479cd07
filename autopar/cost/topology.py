"""How the ranks of an axis are connected, over which links a message goes, and how long it takes.

    ring     links to both neighbours; a message over distance d crosses d links, and occupies them all
    mesh     a link to every other rank
    switch   one port per rank, for everything that it sends and receives

    Topology.parse("ring:50e9:5e-6")                          50 GB/s per link and direction, 5 us per hop
    Topologies.parse("cp=ring:50e9:5e-6,tp=switch:450e9")     per mesh axis; other axes have the links of the cluster
    Topologies.parse("ep%8=switch:450e9,ep/8=switch:50e9")    8 consecutive ranks of ep are a node: its links, and the
                                                              links to ranks with the same index in other nodes

All links carry both directions at full speed at the same time.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.spelling import did_you_mean
from autopar.values import byte_rate

KINDS = ("ring", "mesh", "switch")
ROUND = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")  # go from neighbour to neighbour, except on a mesh
EXAMPLE = "ring:50e9:5e-6 (kind:bytes per second:seconds)"

Link = tuple[str, int]  # (direction as seen from the sending rank, or port: out or in; that rank)


@dataclass(frozen=True)
class Topology:
    """The links of one axis.

    bandwidth: bytes per second of a link in each direction (switch: of a port). latency: seconds from the start of a
    message until its first byte arrives (ring: per hop).
    """

    kind: str = "switch"
    bandwidth: float = 25e9
    latency: float = 10e-6

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            hint = did_you_mean(self.kind, KINDS) or f"; such as {EXAMPLE}"
            raise ValueError(f"topology: expected one of {', '.join(KINDS)}, found {self.kind!r}{hint}")
        if not 0 < self.bandwidth < float("inf"):
            raise ValueError(f"topology: bandwidth needs bytes per second above 0, found {self.bandwidth:g}")
        if not 0 <= self.latency < float("inf"):
            raise ValueError(f"topology: latency needs 0 or more seconds, found {self.latency:g}")

    @classmethod
    def parse(cls, text: str, default: Topology | None = None) -> Topology:
        """From "kind", "kind:bandwidth" or "kind:bandwidth:latency"; missing numbers are those of the default."""
        kind, *numbers = text.strip().split(":")
        if len(numbers) > 2:
            raise ValueError(f"topology: expected kind:bandwidth:latency, found {text!r}; such as {EXAMPLE}")
        try:
            found = [byte_rate(number) for number in numbers[:1]] + [float(number) for number in numbers[1:]]
        except ValueError:
            raise ValueError(f"topology: expected numbers after the kind, found {text!r}; such as {EXAMPLE}") from None
        left_out = default or cls()
        return cls(kind, *[*found, *(left_out.bandwidth, left_out.latency)[len(found) :]])

    def __str__(self) -> str:
        return f"{self.kind}:{_short(self.bandwidth)}:{_short(self.latency)}"

    def route(self, source: int, target: int, size: int, way: str = "") -> tuple[Link, ...]:
        """The links that a message crosses, among ``size`` ranks. On a ring it takes the shorter direction; if both are
        equally long it goes up, unless its ``way`` is "down". Two ranks have one link."""
        distance = (target - source) % size
        assert distance, f"a message from rank {source} to itself"
        if self.kind == "switch":
            return ("out", source), ("in", target)
        if self.kind == "mesh":
            return ((f"+{distance}", source),)
        if distance < size - distance or (distance == size - distance and (way != "down" or size == 2)):
            return tuple(("up", (source + hop) % size) for hop in range(distance))
        return tuple(("down", (source - hop) % size) for hop in range(size - distance))

    def delay(self, route: tuple[Link, ...]) -> float:
        """Seconds until the first byte of a message over a route arrives."""
        return self.latency * (len(route) if self.kind == "ring" else 1)

    def seconds(self, kind: str, nbytes: float, size: int, calls: float = 1) -> float:
        """Seconds of ``calls`` collectives of a kind (or "send": to a neighbour) among ``size`` ranks, one after
        another, each with one delay. nbytes: sent per rank in all of them together."""
        straight = kind.startswith("all_to_all") or (kind in ROUND and self.kind == "mesh")
        routes = [self.route(0, distance, size) for distance in range(1, size if straight else 2)]
        loads = Counter(name for route in routes for name, _ in route)  # of a link of each rank, in messages
        hops = size - 1 if kind in ROUND and self.kind == "ring" else 1
        return calls * hops * max(map(self.delay, routes)) + nbytes / len(routes) * max(loads.values()) / self.bandwidth


@dataclass(frozen=True)
class NamedLinks:
    """The links of an axis of ``size`` ranks that the user names."""

    topology: Topology
    size: int

    def seconds(self, kind: str, sent: float, calls: float = 1.0) -> float:
        """As `autopar.cost.cluster.AxisLinks.seconds`."""
        return self.topology.seconds(kind, sent, self.size, calls) if self.size > 1 else 0.0


@dataclass(frozen=True)
class Topologies:
    """The topology of each mesh axis, and the default for axes without an entry; `parse` reads what ``str`` writes."""

    axes: Mapping[str, Topology] = field(default_factory=dict)
    default: Topology = field(default_factory=Topology)

    @classmethod
    def parse(cls, text: str, default: Topology | None = None) -> Topologies:
        """From "cp=ring:50e9:5e-6,tp=switch", or one topology for all axes, such as "ring:50e9"; "" has no entry."""
        axes: dict[str, Topology] = {}
        for entry in text.split(",") if text.strip() else []:
            axis, equals, topology = entry.strip().rpartition("=")
            axis = axis.strip()
            if equals and not axis:
                raise ValueError(f"topology: expected AXIS=TOPOLOGY, found {entry!r}; such as cp={EXAMPLE}")
            if (axis or "*") in axes:
                raise ValueError(f"topology: {axis!r} given twice in {text!r}; name each axis once")
            axes[axis or "*"] = Topology.parse(topology, default)
        return cls(axes, default or Topology())

    def of(self, axis: str) -> Topology:
        """The topology of an axis, or of a level of one (cp%4); for joined axes that of the first, the outermost."""
        return self.given(axis) or self.default

    def given(self, axis: str) -> Topology | None:
        """The same; None without an entry for it."""
        return self.axes.get(axis) or self.axes.get(re.split("[%/,]", axis)[0]) or self.axes.get("*")

    def per_node(self, axis: str) -> int:
        """How many consecutive ranks of an axis are one node; 0 without an entry. Raises ValueError for entries that
        disagree."""
        named = [re.split("[%/]", name) for name in self.axes]
        found = sorted({int(level[1]) for level in named if level[0] == axis and len(level) == 2})
        if len(found) > 1:
            raise ValueError(
                f"topology: nodes of {' and '.join(map(str, found))} ranks of axis {axis!r} in {str(self)!r}; name one "
                f"size, as in {axis}%{found[0]}=switch,{axis}/{found[0]}=switch"
            )
        return found[0] if found else 0

    def __str__(self) -> str:
        return ",".join(str(t) if axis == "*" else f"{axis}={t}" for axis, t in self.axes.items())


def _short(number: float) -> str:
    """Exact, and short: 5e10 rather than 50000000000.0."""
    mantissa, e, exponent = f"{number:g}".partition("e")
    text = f"{mantissa}e{int(exponent)}" if e else mantissa
    return text if float(text) == number else repr(number)
