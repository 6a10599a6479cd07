"""The table of token dispatchers (option ``token_dispatcher``): how tokens reach experts on other ranks. Loads no
torch.

    allgather        every token to every rank of the axis; what comes back is summed on the way
    alltoall         a row per token and expert
    alltoall_dedup   a copy per token and rank that has one of its experts; that rank adds up what it has of the token
    hierarchical     a copy per token and node, to the rank at the same place there, and from it one per rank of the
                     node

A dispatcher is a file with its functions (`autopar.ops.token_dispatch`) and a row here: all that options, planner,
costs, rules and passes ask of it. A token chooses ``top_k`` of ``experts`` evenly; with ``groups`` (node-limited
routing: DeepSeek-V3, 2.1.2) first ``limit`` of them, then its experts from these. Ranks have consecutive experts,
nodes consecutive ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from autopar.registry import Registry


@dataclass(frozen=True)
class Routing:
    """``experts`` dealt to ``ranks`` of an axis, ``per_node`` of which are in a node; see the module's docstring.

    Raises ValueError for experts, ranks or groups that do not divide, and for choices that cannot be made.
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
        """How probably one of experts [first, first + count) is chosen."""
        size = self.experts // self.groups
        shared = [max(min(first + count, g + size) - max(first, g), 0) for g in range(0, self.experts, size)]
        ways = Counter({(0, 0): 1})  # (groups chosen, experts of these that are asked for) -> ways to choose so
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
    """On how many nodes experts [first, first + count) are, with ``node`` experts each."""
    return (first + count - 1) // node - first // node + 1


Copies = tuple[float, float]  # of a token, that leave its rank: inside its node, and between nodes


@dataclass(frozen=True)
class TokenDispatcher:
    """A row of the table.

    title: what travels, in a line. module: the file with its functions; `autopar.ops.token_dispatch` says which.
    copies: of a token if routing is even; most_copies: at most. What is sent on by a rank of the token's node counts as
    inside. collective: with which copies travel, ``exchanges`` of which a layer and step have on each level.
    expert_bytes: of an expert's number that goes with a copy (0: then no weights go either). gathers: every rank of the
    axis has all tokens when they are dispatched, and results are summed; else tokens stay sharded. over_nodes: needs an
    axis over several nodes of several ranks, and goes over two levels, one after the other.
    """

    title: str
    module: str
    copies: Callable[[Routing], Copies]
    most_copies: Callable[[Routing], Copies]
    exchanges: int
    collective: str = "all_to_all"
    expert_bytes: int = 0
    gathers: bool = False
    over_nodes: bool = False


TOKEN_DISPATCHERS: Registry[TokenDispatcher] = Registry("token_dispatcher")


def _gathered(r: Routing) -> Copies:
    """A gather goes around a ring, on which one rank of a node has its neighbour in the next one."""
    between = (r.ranks - 1) / r.per_node if r.nodes > 1 else 0.0
    return r.ranks - 1 - between, between


def _most_rows(r: Routing) -> Copies:
    own = r.experts // r.ranks
    return min(r.top_k, own * (r.per_node - 1)), min(r.top_k, own * (r.ranks - r.per_node))


def _copies_for_ranks(r: Routing) -> Copies:
    reached = r.reached(r.ranks)
    return reached * (r.per_node - 1) / r.ranks, reached * (r.ranks - r.per_node) / r.ranks


def _copies_for_nodes(r: Routing) -> Copies:
    inside = r.reached(r.ranks) * (r.per_node - 1) / r.per_node
    return inside, r.reached(r.nodes) * (r.nodes - 1) / r.nodes


def _most_copies_for_nodes(r: Routing) -> Copies:
    """A rank passes on inside its node what came from the same place in all of them."""
    return r.nodes * min(r.top_k, r.per_node - 1), min(r.most_nodes, r.nodes - 1)


_ROWS = {
    "allgather": TokenDispatcher(
        "every token to every rank of the axis",
        "autopar.ops.token_dispatch.allgather",
        copies=_gathered,
        most_copies=_gathered,
        exchanges=7,
        collective="all_gather",
        expert_bytes=8,
        gathers=True,
    ),
    "alltoall": TokenDispatcher(
        "a row per token and expert",
        "autopar.ops.token_dispatch.alltoall",
        copies=lambda r: (r.top_k * (r.per_node - 1) / r.ranks, r.top_k * (r.nodes - 1) / r.nodes),
        most_copies=_most_rows,
        exchanges=5,
    ),
    "alltoall_dedup": TokenDispatcher(
        "a copy per token and rank with an expert of it",
        "autopar.ops.token_dispatch.alltoall_dedup",
        copies=_copies_for_ranks,
        most_copies=lambda r: (min(r.top_k, r.per_node - 1), min(r.top_k, r.ranks - r.per_node)),
        exchanges=8,
        expert_bytes=4,
    ),
    "hierarchical": TokenDispatcher(
        "a copy per token and node with an expert of it, there one per rank",
        "autopar.ops.token_dispatch.alltoall_dedup",
        copies=_copies_for_nodes,
        most_copies=_most_copies_for_nodes,
        exchanges=8,
        expert_bytes=4,
        over_nodes=True,
    ),
}
for _name, _row in _ROWS.items():
    TOKEN_DISPATCHERS.add(_name, _row)
