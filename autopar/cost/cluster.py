"""Nodes of chips, and the links of a mesh axis on them. Loads no torch.

    Cluster.parse("H100")            nodes of eight H100, as many as the layout has ranks for
    Cluster.parse("H100:64x8")       64 nodes of 8
    Cluster.parse("cluster.json")    groups of nodes, which may have different chips:
                                     {"groups": [{"chip": "H100", "nodes": 4}, {"chip": "A100", "nodes": 4}]}

Ranks fill nodes one after another, the innermost axis first. ``inside`` ranks of an axis are then on one node, and the
axis spans ``nodes`` of them: inside, messages go at the speed of a chip's links; between nodes at that of the network
cards of all the neighbours that are on the node.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from autopar.chips import CHIPS, Chip
from autopar.cost.extremes import least, most
from autopar.cost.topology import Topology
from autopar.spelling import did_you_mean
from autopar.values import byte_rate, parse, whole_number

HOP_INSIDE, HOP_ACROSS = 2e-6, 6e-6  # seconds from rank to rank within a node, and between nodes
START = 10e-6  # seconds until the first byte of a collective moves
_SHORT = re.compile(r"(?P<chip>[^:]+)(:(?P<nodes>\d+)x(?P<per_node>\d+))?")
_ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1}


@dataclass(frozen=True)
class NodeGroup:
    """Nodes of one kind. nodes: how many (0: as many as are asked for). per_node: chips. inside, card: bytes per second
    and direction, as in `Chip`. cards: network cards of a node."""

    chip: str
    nodes: int
    per_node: int
    inside: float
    card: float
    cards: int

    @property
    def ranks(self) -> int:
        """Chips of all nodes."""
        return self.nodes * self.per_node

    @property
    def data(self) -> Chip:
        """The chip."""
        return CHIPS[self.chip]


@dataclass(frozen=True)
class AxisLinks:
    """How the ranks of an axis are connected. inside: ranks of the axis on one node; nodes: that it spans; near, far:
    bytes per second and rank within a node, and through one network card; cards: how many the neighbours of a node use
    together. start: seconds until the first byte of a collective moves."""

    inside: int
    nodes: int
    near: float
    far: float
    cards: float
    start: float = START

    @property
    def size(self) -> int:
        """Ranks of the axis."""
        return self.inside * self.nodes

    @property
    def bandwidth(self) -> float:
        """Bytes per second that each rank of a ring over the axis sends."""
        return self.near if self.nodes == 1 else least(self.near, self.far * self.cards)

    def scaled(self, near: float, far: float, start: float = START) -> AxisLinks:
        """With the shares of both speeds that a stack reaches, and its start of a collective."""
        return replace(self, near=self.near * near, far=self.far * far, start=start)

    def seconds(self, kind: str, sent: float, calls: float = 1.0) -> float:
        """Seconds of ``calls`` collectives of a kind, or of sends to a neighbour, in which each rank sends ``sent``
        bytes together."""
        if self.size == 1 or not calls:
            return 0.0
        if kind.startswith("all_to_all"):
            away = self.inside * (self.nodes - 1) / (self.size - 1)
            moved = most(sent * (1 - away) / self.near, sent * away / self.far)
            return moved + calls * (self.start + (HOP_ACROSS if self.nodes > 1 else HOP_INSIDE))
        if kind not in _ROUNDS:  # to a neighbour, the slowest of which counts
            return sent / (self.near if self.nodes == 1 else least(self.near, self.far)) + calls * self._hop
        return sent / self.bandwidth + calls * (self.start + self._delay(kind))

    @property
    def topology(self) -> Topology:
        """The same as links of one kind, for messages between neighbours: those of the slowest."""
        return Topology(bandwidth=self.near if self.nodes == 1 else min(self.near, self.far))

    @property
    def _hop(self) -> float:
        return HOP_ACROSS if self.nodes > 1 else HOP_INSIDE

    def _delay(self, kind: str) -> float:
        ring = _ROUNDS[kind] * (HOP_INSIDE * (self.inside - 1) * self.nodes + HOP_ACROSS * (self.nodes - 1))
        return min(ring, 4 * math.log2(self.size) * self._hop)


@dataclass(frozen=True)
class Cluster:
    """Groups of nodes in rank order. name: as it was asked for."""

    name: str
    groups: tuple[NodeGroup, ...]

    @property
    def ranks(self) -> int:
        """Chips of all groups; 0 if nobody said how many nodes there are."""
        return sum(group.ranks for group in self.groups)

    @cached_property
    def group(self) -> NodeGroup:
        """The group whose links are the slowest, between nodes first."""
        return min(self.groups, key=lambda g: (g.card * g.cards / g.per_node, g.inside))

    @cached_property
    def chip(self) -> Chip:
        """The slowest chip."""
        return min((group.data for group in self.groups), key=lambda chip: chip.flops)

    @cached_property
    def chip_name(self) -> str:
        """The name of the slowest chip."""
        return min(self.groups, key=lambda g: g.data.flops).chip

    @property
    def is_uniform(self) -> bool:
        """Whether all nodes are alike."""
        return len({replace(group, nodes=0) for group in self.groups}) == 1

    @cached_property
    def capacity(self) -> float:
        """Bytes of memory of the smallest chip."""
        return min(group.data.capacity for group in self.groups)

    def with_ranks(self, ranks: int) -> Cluster:
        """This cluster with as many nodes as ``ranks`` need, where nobody said how many there are. Raises ValueError
        for another number of ranks."""
        if self.ranks:
            if self.ranks != ranks:
                raise ValueError(f"cluster: {self.name} has {self.ranks} chips, found {ranks} ranks; use all of them")
            return self
        (group,) = self.groups
        return Cluster(self.name, (replace(group, nodes=-(-ranks // group.per_node)),))

    def spans(self, count: int) -> tuple[Cluster, ...]:
        """The nodes of each of ``count`` equal parts of the ranks: groups that a part touches."""
        size, ends, found = self.ranks // count, [0], list[Cluster]()
        for group in self.groups:
            ends.append(ends[-1] + group.ranks)
        for k in range(count):
            low, high = k * size, (k + 1) * size
            touched = [g for g, a, b in zip(self.groups, ends, ends[1:], strict=False) if a < high and b > low]
            found.append(Cluster(self.name, tuple(touched)))
        return tuple(found)

    def memory_rich_first(self) -> Cluster:
        """The same groups, those of chips with more memory first: the first stages of a pipeline keep the most."""
        order = sorted(self.groups, key=lambda group: (-group.data.capacity, -group.data.flops))
        return Cluster(self.name, tuple(order))

    def links(self, size: int, stride: int) -> AxisLinks:
        """The links of an axis of ``size`` ranks, whose neighbours are ``stride`` ranks apart."""
        group = self.group
        inside = min(size, max(1, group.per_node // stride))
        while size % inside:
            inside -= 1
        cards = max(1.0, inside * group.cards / group.per_node)
        return AxisLinks(
            inside, size // inside, group.inside, group.card * min(1.0, group.cards / group.per_node), cards
        )

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """From "H100", "H100:64x8", or the path of a file. Raises ValueError."""
        if text.endswith(".json"):
            return cls._from_file(Path(text))
        match = _SHORT.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"cluster: expected CHIP, CHIP:NODESxCHIPS or a .json file, found {text!r}; as H100:64x8")
        nodes, per_node = match["nodes"], match["per_node"]
        if nodes is not None and (not int(nodes) or not int(per_node)):
            raise ValueError(f"cluster: expected nodes and chips above 0, found {text!r}; such as H100:64x8")
        return cls(text, (_group(match["chip"], int(nodes or 0), int(per_node or 0)),))

    @classmethod
    def _from_file(cls, file: Path) -> Cluster:
        try:
            data = parse(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, ValueError) as error:
            raise ValueError(f"cluster: {str(file)!r} cannot be read: {error}; give a JSON file with groups") from error
        groups = data.get("groups") if isinstance(data, dict) else None
        if not isinstance(groups, list) or not groups:
            raise ValueError(f'cluster: {str(file)!r} needs {{"groups": [{{"chip": "H100", "nodes": 4}}]}}')
        return cls(str(file), tuple(_group_of(row) for row in groups))


def _group_of(row: Any) -> NodeGroup:
    if not isinstance(row, Mapping) or not isinstance(row.get("chip"), str):
        raise ValueError(f"cluster: a group needs a chip, found {row!r}; such as {{'chip': 'H100', 'nodes': 4}}")
    unknown = sorted(row.keys() - {"chip", "nodes", "per_node", "inside", "card", "cards"})
    if unknown:
        raise ValueError(f"cluster: a group has chip, nodes, per_node, inside, card, cards; found {', '.join(unknown)}")
    counts = {
        name: whole_number(f"cluster: {name}", row[name], least=1) for name in ("per_node", "cards") if name in row
    }
    nodes = whole_number("cluster: nodes", row.get("nodes", 1), least=1)
    group = _group(row["chip"], nodes, counts.get("per_node", 0))
    speeds: dict[str, Any] = {name: _speed(name, row[name]) for name in ("inside", "card") if name in row}
    return replace(group, cards=counts.get("cards", group.cards), **speeds)


def _speed(name: str, value: Any) -> float:
    try:
        found = byte_rate(str(value))
    except ValueError:
        found = 0.0
    if not 0 < found < math.inf:
        raise ValueError(f"cluster: {name} needs bytes per second above 0, found {value!r}; such as 50e9")
    return found


def _group(chip: str, nodes: int, per_node: int) -> NodeGroup:
    name = chip.strip().upper()
    if name not in CHIPS:
        known = tuple(CHIPS)
        raise ValueError(f"cluster: unknown chip {chip!r}; the chips are {', '.join(known)}{did_you_mean(name, known)}")
    data = CHIPS[name]
    size = per_node or data.node
    return NodeGroup(name, nodes, size, data.inside, data.links, size)
