"""Who takes part in which step: one record in a store, which changes by compare-and-set.

    epoch    changes with the members; each has process groups of its own
    step     the number of steps that are done; all members compute this one next
    members  index of the replica -> the name of its present start
    fresh    members without the state of this step: another member gives it to them before

    a step is done      all members have voted: the last one writes step + 1; replicas that wait to join come in
    a member is lost    any other one writes epoch + 1 without it; the step is repeated

Both are the same compare-and-set on the same text, so all members see the same one, whatever a member has done when it
is lost: either the step is done, on all that are left, or it is not, on any.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from autopar.runtime.fault.error_propagation import CollectiveError
from autopar.runtime.fault.store_client import StoreClient, StoreError, look

T = TypeVar("T")


@dataclass(frozen=True)
class Record:
    """``claims``: how many replicas had asked to join when it was written."""

    epoch: int
    step: int
    members: Mapping[int, str]
    fresh: tuple[int, ...] = ()
    claims: int = 0

    @staticmethod
    def of(text: str) -> Record | None:
        """From its text in the store; "": there is none."""
        if not text:
            return None
        told = json.loads(text)
        members = {int(index): name for index, name in told["members"].items()}
        return Record(told["epoch"], told["step"], members, tuple(told["fresh"]), told["claims"])

    def __str__(self) -> str:
        return json.dumps({**vars(self), "members": dict(self.members), "fresh": list(self.fresh)})

    @property
    def order(self) -> list[int]:
        """The indices of the members; a member's place here is its rank in the groups over replicas."""
        return sorted(self.members)

    @property
    def donor(self) -> int | None:
        """The member that gives its state to the fresh ones."""
        return next((index for index in self.order if index not in self.fresh), None)

    def shards(self, index: int, count: int, repeat: bool) -> list[int]:
        """Which of ``count`` shards of the batch a member computes: its own, and with ``repeat`` its share of those of
        absent replicas."""
        absent = [shard for shard in range(count) if shard not in self.members] if repeat else []
        return [index, *absent[self.order.index(index) :: len(self.members)]]

    def next(self, done: bool, lost: Iterable[int], joining: Mapping[int, str], claims: int) -> Record:
        """The record that follows. ``done``: whether the step is done. ``joining``: replicas that come in."""
        lost = {*lost}
        stay = {index: name for index, name in self.members.items() if index not in lost and index not in joining}
        fresh = sorted({*(() if done else self.fresh)} & stay.keys() | joining.keys())
        same = done and stay == self.members and not joining
        return Record(self.epoch + (not same), self.step + done, {**stay, **joining}, tuple(fresh), claims)


@dataclass(frozen=True)
class Claim:
    """A replica that asks to join: the name of its start, the number of steps in the state that it has loaded, and its
    options, which must be those of all."""

    name: str
    step: int
    options: str = ""


class MembershipStore:
    """The keys of a run in the store. Raises CollectiveError where the store does not answer.

    where: the store as the subject of a sentence. count: of replicas, those that are absent included.
    """

    def __init__(self, store: dist.Store, where: str, count: int) -> None:
        self.store, self.where, self.count = store, where, count
        self._line = StoreClient(store, host=where)

    def ask(self, question: Callable[[dist.Store], T]) -> T:
        """What ``question(store)`` returns."""
        try:
            return self._line.ask(question)
        except StoreError as error:
            raise store_lost(str(error)) from error

    def record(self) -> Record | None:
        return Record.of(self.ask(lambda store: look(store, "record")))

    def change(self, old: Record | None, new: Record) -> Record:
        """Write a record in place of another; returns the one that is there now, which may be somebody else's."""
        before, after = "" if old is None else str(old), str(new)
        found = Record.of(self.ask(lambda store: store.compare_set("record", before, after)).decode())
        assert found is not None, "there is a record"
        return found

    def vote(self, record: Record) -> int:
        """Vote for a step; returns the number of votes."""
        return self.ask(lambda store: store.add(f"votes/{record.epoch}/{record.step}", 1))

    def forget_votes(self, record: Record) -> None:
        """The keys of a step that is done, or given up: a vote that comes later does not count."""
        self.ask(lambda store: store.delete_key(f"votes/{record.epoch}/{record.step}"))

    def claim(self, index: int, claim: Claim) -> None:
        def tell(store: dist.Store) -> None:
            store.set(f"claim/{index}", json.dumps(vars(claim)))
            store.add("claims", 1)

        self.ask(tell)

    def number_of_claims(self) -> int:
        return self.ask(lambda store: store.add("claims", 0))

    def claims(self) -> dict[int, Claim]:
        """By index, the last of each replica; of those that are not lost."""

        def read(store: dist.Store) -> dict[int, Claim]:
            texts = {index: look(store, f"claim/{index}") for index in range(self.count)}
            found = {index: Claim(**json.loads(text)) for index, text in texts.items() if text}
            return {index: claim for index, claim in found.items() if not look(store, f"lost/{claim.name}")}

        return self.ask(read)


def store_lost(said: str) -> CollectiveError:
    """The error of a store that does not answer. said: a sentence about it."""
    return CollectiveError(
        f"replicas: {said}, and replicas agree there on every step; start it on a host that outlives them "
        "(python -m autopar replica-store), and the replicas from a checkpoint"
    )
