"""Which ranks share a node, to which rank of the next node each sends its memory checkpoint, and how blocks come back.

    node 0: ranks 0 1    node 1: ranks 2 3    node 2: ranks 4 5        0 -> 2 -> 4 -> 0, 1 -> 3 -> 5 -> 1

Every pair has a gloo group of its own, so nothing waits for a collective of a step, and a heartbeat that stops ends its
waits as it ends all others.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.checkpoint.memory_folder import node_name
from autopar.runtime.consistency.rank_checks import answer_of_first
from autopar.runtime.fault.errors import explained
from autopar.runtime.mesh.process_groups import Groups

WAVE = 32 * 2**20  # bytes of a message


def waves(data: Tensor) -> Iterator[Tensor]:
    """Parts of a uint8 tensor, each as long as a message may be."""
    return iter(data.split(WAVE)) if data.numel() else iter(())


@dataclass(frozen=True)
class Nodes:
    """``of``: the number of each rank's node; nodes are numbered by their first ranks."""

    of: Sequence[int]

    @staticmethod
    def named(names: Sequence[str]) -> Nodes:
        """Ranks that give the same name share a node."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return Nodes([numbers[name] for name in names])

    @property
    def count(self) -> int:
        return max(self.of) + 1

    def ranks(self, node: int) -> list[int]:
        return [rank for rank, at in enumerate(self.of) if at == node]

    def is_first(self, rank: int) -> bool:
        """Whether no rank before it is on the same node."""
        return self.of[rank] not in self.of[:rank]

    def target(self, rank: int) -> int | None:
        """The rank that keeps a copy of this one's share: at the same place of the next node, if there are several."""
        if self.count == 1:
            return None
        theirs = self.ranks((self.of[rank] + 1) % self.count)
        return theirs[self.ranks(self.of[rank]).index(rank) % len(theirs)]

    def sources(self, rank: int) -> list[int]:
        """The ranks of which this one keeps copies."""
        before = self.ranks((self.of[rank] - 1) % self.count) if self.count > 1 else []
        return [source for source in before if self.target(source) == rank]


class Peers:
    """This rank's place among the nodes, and its connections to the next and to the previous one."""

    def __init__(self, groups: Groups) -> None:
        self.rank = groups.rank
        self.nodes = nodes_of(groups)
        self.target, self.sources = self.nodes.target(self.rank), self.nodes.sources(self.rank)
        pairs = {(source, self.rank) for source in self.sources}
        if self.target is not None:
            pairs.add((self.rank, self.target))
        # Pairs that begin at an even node first: else each node would wait for the one before it.
        order = sorted({(min(pair), max(pair)) for pair in pairs}, key=lambda pair: (self.nodes.of[pair[0]] % 2, pair))
        self._groups = {pair: groups.host_pair(*pair) for pair in order}

    @property
    def is_first_of_node(self) -> bool:
        return self.nodes.is_first(self.rank)

    @property
    def ranks_of_node(self) -> list[int]:
        return self.nodes.ranks(self.nodes.of[self.rank])

    @property
    def kept_on_node(self) -> set[int]:
        """The ranks of which this node has parts."""
        here = self.ranks_of_node
        return {*here, *(source for rank in here for source in self.nodes.sources(rank))}

    def send(self, x: Tensor, to: int) -> None:
        """Send a tensor of the host. Raises CollectiveError."""
        self._move("send", x, to)

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Fill a tensor of the host. Raises CollectiveError."""
        self._move("recv", x, source)
        return x

    def _move(self, way: str, x: Tensor, other: int) -> None:
        pair = min(self.rank, other), max(self.rank, other)
        with explained("copying a checkpoint to another node", pair):
            getattr(self._groups[pair], way)([x], int(other > self.rank), 0).wait()


_nodes: weakref.WeakKeyDictionary[Groups, Nodes] = weakref.WeakKeyDictionary()
_peers: weakref.WeakKeyDictionary[Groups, Peers] = weakref.WeakKeyDictionary()


def peers_of(groups: Groups) -> Peers:
    """The peers of this rank, found and connected at the first call. Collective then."""
    if groups not in _peers:
        _peers[groups] = Peers(groups)
    return _peers[groups]


def nodes_of(groups: Groups) -> Nodes:
    """The nodes of all ranks. Collective at the first call."""
    if groups not in _nodes:
        texts = json.dumps([""])
        if groups.mesh.world_size > 1:
            texts = answer_of_first(groups, "the nodes of ranks", _own_node(groups.rank), json.dumps)
        _nodes[groups] = Nodes.named(json.loads(texts))
    return _nodes[groups]


def _own_node(rank: int) -> str:
    """The name of this rank's node; one of its own if it has no folder for memory checkpoints."""
    try:
        return node_name()
    except OSError:
        return f"rank {rank}"


# --- reading blocks of files on other nodes -------------------------------------------------------------------

ASK, REPLY = 0, 1  # tags
_END = -1


def ask_for(group: dist.ProcessGroup, holder: int, rank: int, start: int, into: Tensor) -> None:
    """Fill a uint8 tensor with the bytes of rank ``rank``'s part from ``start`` on, which the rank ``holder`` has."""
    with explained("reading a checkpoint in the memory of another node", [holder]):
        dist.send(torch.tensor([rank, start, into.numel()]), holder, group=group, tag=ASK)
        dist.recv(into, holder, group=group, tag=REPLY)


def asked(group: dist.ProcessGroup) -> tuple[int, int, int, int] | None:
    """Wait for the next question of any rank: (who asks, rank of the part, start, size); None if there are no more."""
    question = torch.zeros(3, dtype=torch.int64)
    who = dist.recv(question, group=group, tag=ASK)
    rank, start, size = question.tolist()
    return None if rank == _END else (int(who or 0), rank, start, size)


def reply(group: dist.ProcessGroup, to: int, data: Tensor) -> None:
    """Send the bytes that a rank has asked for."""
    dist.send(data, to, group=group, tag=REPLY)


def end_questions(group: dist.ProcessGroup, holder: int) -> None:
    """Tell a rank that answers questions that there is no further one."""
    dist.send(torch.tensor([_END, 0, 0]), holder, group=group, tag=ASK)
