"""What values on their way between stages take on one rank, while it runs its actions one after another.

A posted receive has its buffers until the action that waits for it takes them over. A send keeps its tensors until a
message tells that they have arrived (`acknowledged`). What a stage hands on to another of its own rank waits for that.
"""

from __future__ import annotations

from autopar.ir.storages import storage_bytes
from autopar.schedule.order import BACKWARD, Action, Order
from autopar.schedule.order_checks import acknowledged
from autopar.steps.graphs import Pipeline
from autopar.steps.of_rank import comes_back, hop_bytes
from autopar.steps.value_names import is_a

Key = tuple[str, int, int, int]  # F or B, stage, microbatch, slice


class P2PBuffers:
    """``size``: bytes of all that is on its way to or from a rank, or between stages of it."""

    def __init__(self, pipeline: Pipeline, order: Order, rank: int) -> None:
        self._pipeline, self._order, self._rank = pipeline, order, rank
        self._acknowledged = acknowledged(order, rank)
        self._posted: dict[Key, list[Action]] = {}
        self._sizes: dict[Action | Key, int] = {}  # a transfer, or what a unit will take from its own rank
        self._known: dict[tuple[int, int, str, int], int] = {}

    @property
    def size(self) -> int:
        return sum(self._sizes.values())

    def transfer(self, action: Action) -> None:
        """A send or a receive is started."""
        here, there = self._order.part_of(action.stage), self._order.part_of(action.peer)
        self._sizes[action] = self._between(min(here, there), max(here, there), action)
        if action.kind[0] == "R":
            self._posted.setdefault(_key(action, action.kind[1]), []).append(action)

    def before(self, action: Action) -> None:
        """What an F or a backward waits for is its own from here on."""
        key = _key(action, action.kind[0])
        for receive in self._posted.pop(key, ()):
            del self._sizes[receive]
            for send in self._acknowledged.get(receive, ()):
                self._sizes.pop(send, None)
        self._sizes.pop(key, None)

    def after(self, action: Action) -> None:
        """What an F or a backward hands on to stages of the same rank."""
        if action.kind != "F" and action.kind not in BACKWARD:
            return
        part = self._order.part_of(action.stage)
        chain = self._order.chains[self._order.chain_of[action.microbatch]]
        for other in range(len(chain)):
            if other == part or self._order.rank_of[chain[other]] != self._rank:
                continue
            if (other > part) == (action.kind == "F"):
                key = (action.kind[0], chain[other], action.microbatch, action.slice)
                size = self._between(min(part, other), max(part, other), action)
                self._sizes[key] = self._sizes.get(key, 0) + size

    def _between(self, source: int, target: int, action: Action) -> int:
        """Bytes of what goes from a part to a later one, or comes back; what F of the sender saves anyway left out."""
        way = "back" if "B" in action.kind else "received" if action.kind == "RF" else "sent"
        key = (source, target, way, action.slice)
        if key not in self._known:
            hops = [h for h in self._pipeline.hops if (h.source, h.target) == (source, target)]
            if way == "back":
                hops = [h for h in hops if comes_back(self._pipeline, h)]
            elif way == "sent":
                hops = [h for h in hops if not self._is_saved(source, h.value)]
            self._known[key] = sum(hop_bytes(h, action.slice) for h in hops)
        return self._known[key]

    def _is_saved(self, part: int, value: str) -> bool:
        """Whether F of a part keeps the storage of a value that it sends."""
        forward = self._pipeline.parts[part].forward
        if value not in forward.outputs:  # it was received
            return False
        saved = [i for i, name in enumerate(forward.outputs) if is_a(name, "saved")]
        sent = forward.outputs.index(value)
        return storage_bytes(forward.graph, [*saved, sent]) == storage_bytes(forward.graph, saved)


def _key(action: Action, kind: str) -> Key:
    return kind, action.stage, action.microbatch, action.slice
