"""What the token dispatchers send, from numbers alone, without a graph: copies, bytes and seconds.

    allgather        every token to every rank of the axis; results are reduce-scattered
    alltoall         a copy per token and expert
    alltoall_dedup   a copy per token and rank that has one of its experts; that rank sums its results for the token
    hierarchical     a copy per token and node, to the rank with the same index there, which forwards one copy to each
                     rank of its node

A token chooses ``top_k`` of ``experts`` evenly; with ``groups`` (node-limited routing: DeepSeek-V3, 2.1.2) it first
chooses ``limit`` groups, then its experts from these. Ranks have consecutive experts, nodes consecutive ranks. A copy
moves four times in a step: to the experts, back, and both ways for gradients.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from autopar.cost.topology import Topology

# Bytes of the expert index that goes with a copy; exchanges per layer and step, on each level.
_NUMBERS = {"allgather": 8, "alltoall": 0, "alltoall_dedup": 4, "hierarchical": 4}
_CALLS = {"allgather": 7, "alltoall": 5, "alltoall_dedup": 8, "hierarchical": 8}


@dataclass(frozen=True)
class Routing:
    """``experts`` dealt to ``ranks`` of an axis, ``per_node`` of which are in a node; see the module's docstring.

    Raises ValueError for experts, ranks or groups that do not divide, and for a top_k that the groups do not allow.
    """

    experts: int
    top_k: int
    ranks: int
    per_node: int
    groups: int = 1
    limit: int = 1

    def __post_init__(self) -> None:
        e, r = self.experts, self.ranks
        if e % r:
            fits = ", ".join(str(n) for n in range(1, e + 1) if e % n == 0)
            raise ValueError(f"experts: {e} experts do not divide over {r} ranks; use one of {fits}")
        if r % self.per_node:
            raise ValueError(
                f"experts: {r} ranks do not divide into nodes of {self.per_node}; use a multiple of "
                f"{self.per_node} ranks, or nodes of {math.gcd(r, self.per_node)}"
            )
        if e % self.groups:
            raise ValueError(f"experts: {e} experts do not divide into {self.groups} groups; use a divisor of {e}")
        if not 1 <= self.limit <= self.groups:
            raise ValueError(f"experts: a token may use 1 to {self.groups} groups, found a limit of {self.limit}")
        if not 1 <= self.top_k <= self.reach:
            raise ValueError(
                f"experts: top_k must be from 1 to {self.reach}, the experts in the groups that a token may use, found "
                f"{self.top_k}; use a smaller top_k, or a higher limit of groups"
            )

    @property
    def nodes(self) -> int:
        return self.ranks // self.per_node

    @property
    def reach(self) -> int:
        """Experts from which a token chooses once its groups are chosen."""
        return self.experts // self.groups * self.limit

    def reached(self, parts: int) -> float:
        """Of ``parts`` equal runs of experts (a divisor of their number), how many have an expert of a token, on
        average."""
        return sum(self._chosen(part * self.experts // parts, self.experts // parts) for part in range(parts))

    def _chosen(self, first: int, count: int) -> float:
        """The probability that at least one of experts [first, first + count) is chosen."""
        size = self.experts // self.groups
        shared = [max(min(first + count, g + size) - max(first, g), 0) for g in range(0, self.experts, size)]
        ways = Counter({(0, 0): 1})  # (groups chosen, experts counted in these) -> number of ways to choose them
        for own in shared:
            ways += Counter({(n + 1, there + own): k for (n, there), k in ways.items() if n < self.limit})
        missed = sum(k * math.comb(self.reach - there, self.top_k) for (n, there), k in ways.items() if n == self.limit)
        return 1 - missed / (math.comb(self.groups, self.limit) * math.comb(self.reach, self.top_k))

    @property
    def most_nodes(self) -> int:
        """Nodes that a token can reach."""
        size, node = self.experts // self.groups, self.experts // self.nodes
        spans = sorted((_nodes_of(first, size, node) for first in range(0, self.experts, size)), reverse=True)
        return min(self.top_k, self.nodes, sum(spans[: self.limit]))

    def worst_rows(self, tokens: int) -> int:
        """Rows that a rank's experts get if all ``tokens`` of every rank choose as many of them as they can."""
        size, own = self.experts // self.groups, self.experts // self.ranks
        within = own if own <= size else min(own, self.limit * size)
        return tokens * self.ranks * min(self.top_k, within)


def _nodes_of(first: int, count: int, node: int) -> int:
    """The number of nodes that have experts [first, first + count), with ``node`` experts per node."""
    return (first + count - 1) // node - first // node + 1


@dataclass(frozen=True)
class DispatchCost:
    """Cost of one layer, per rank. Copies of a token: those that leave its rank, or the rank that forwards them within
    a node. Bytes and seconds: of a whole step, forward and backward."""

    name: str
    copies_inside: float
    copies_between: float
    bytes_inside: float
    bytes_between: float
    seconds: float


def dispatch_costs(
    routing: Routing, tokens: int, width: int, itemsize: int, inside: Topology, between: Topology
) -> list[DispatchCost]:
    """One row per dispatcher, in the order of the module's docstring. ``tokens``: of a rank; ``width``: elements of a
    token, of ``itemsize`` bytes each; ``inside``, ``between``: links of a rank within its node, and to other nodes."""
    found = []
    for name, (near, far) in _copies(routing).items():
        copy = copy_bytes(routing, name, tokens, width, itemsize)
        times = [
            wires.seconds("all_gather" if name == "allgather" else "all_to_all", n * copy, ranks, _CALLS[name])
            for wires, n, ranks in ((inside, near, routing.per_node), (between, far, routing.nodes))
            if ranks > 1
        ]
        # Both levels of one exchange run at the same time; those of hierarchical run one after the other.
        seconds = sum(times) if name == "hierarchical" else max(times, default=0.0)
        found.append(DispatchCost(name, near, far, near * copy, far * copy, seconds))
    return found


def copy_bytes(routing: Routing, name: str, tokens: int, width: int, itemsize: int) -> int:
    """Bytes of one copy of each of ``tokens`` in a step: both ways, gradients, expert indices and weights included."""
    weights = 2 * itemsize if _NUMBERS[name] else 0  # one way, and their gradient back
    return tokens * (4 * width * itemsize + routing.top_k * (_NUMBERS[name] + weights))


def even_copies_of(routing: Routing, name: str) -> tuple[float, float]:
    """(copies of a token within a node, between nodes), as in `DispatchCost`."""
    return _copies(routing)[name]


def most_copies(routing: Routing, name: str) -> tuple[float, float]:
    """The same in the worst case: all tokens choose the experts that send most. With two levels, a rank forwards within
    its node the copies from ranks with its index in all nodes."""
    r, g, n, k = routing.ranks, routing.per_node, routing.nodes, routing.top_k
    near, far = min(k, g - 1), min(k, r - g)
    own = routing.experts // r
    return {
        "allgather": _copies(routing)["allgather"],
        "alltoall": (min(k, own * (g - 1)), min(k, own * (r - g))),
        "alltoall_dedup": (near, far),
        "hierarchical": (n * near, min(routing.most_nodes, n - 1)),
    }[name]


def _copies(routing: Routing) -> dict[str, tuple[float, float]]:
    """Name -> copies of a token (inside its node, between nodes). A gather goes around a ring, on which one rank per
    node has its neighbour in the next node."""
    r, g, n, k = routing.ranks, routing.per_node, routing.nodes, routing.top_k
    ranks = routing.reached(r)
    other = (r - 1) / g if n > 1 else 0.0
    return {
        "allgather": (r - 1 - other, other),
        "alltoall": (k * (g - 1) / r, k * (n - 1) / n),
        "alltoall_dedup": (ranks * (g - 1) / r, ranks * (r - g) / r),
        "hierarchical": (ranks * (g - 1) / g, routing.reached(n) * (n - 1) / n),
    }
