"""Ranks that must be given the same batch are: compared at every step, without waiting for an accelerator.

    watch = BatchContents(groups)
    with watch.agreeing():
        agree_on(groups, watch.claims(batch, inputs), "the batch")

Of tensors on the host a step compares what it is given. Of those on an accelerator the first step of its kind does;
the others start the words for the host, and the next call compares them: a step, `clip_grad_norm_`, what reads or
writes whole states. By then they are there: they stand in the accelerator's queue before the step that goes on
meanwhile, so what waits for them never lets the queue run dry. Behind the last step of a process no call may come; its
words are compared when the process ends, without waiting for the others: whoever comes later finds the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from autopar.ir.batch import tensors_of
from autopar.ir.mesh import DATA
from autopar.ir.placement import Placements, Shard
from autopar.runtime.consistency.exit_checks import ask_at_end, difference_at_end, no_longer_ask
from autopar.runtime.consistency.rank_checks import RankCheck, everywhere
from autopar.runtime.consistency.tensor_hash import start_words, words_of
from autopar.runtime.mesh.process_groups import Groups

LATER = "to be compared in the next step"
SKIP = "check_replica_inputs=False skips this check"


@dataclass(frozen=True)
class _Underway:
    """Words on their way: of inputs that ``shared`` ranks hold alike, and of those that are no part of the batch."""

    shared: list[str]
    uncut: list[str]
    arrived: Callable[[], dict[str, str]]


@dataclass
class BatchContents:
    """Of one model."""

    groups: Groups
    _last: _Underway | None = None
    _next: _Underway | None = None

    def claims(
        self, batch: Mapping[str, Any], inputs: Mapping[str, Placements], at_once: bool = False
    ) -> list[RankCheck]:
        """Ranks with the same coordinates on dp and dp_replicate hold the same of inputs that these cut (``inputs``:
        their placements), and
        all ranks the same of the others: each computes with its own copy. Any dtype counts, bit by bit.

        Where no two ranks must hold the same, nothing is hashed. ``at_once``: nothing is left for the next call.
        """
        tensors = {name: x for name, x in tensors_of(batch).items() if name in inputs}
        cutting = [axis for axis in DATA if self.groups.mesh.size(axis) > 1]
        uncut = [n for n in tensors if cutting and not isinstance(inputs[n].get(cutting[0]), Shard)]
        shared = [n for n in tensors if n not in uncut] if self._others() else []
        later = [n for n in (*shared, *uncut) if _arrives(tensors[n]) and not at_once]
        words = words_of({n: tensors[n] for n in (*shared, *uncut) if n not in later}) | dict.fromkeys(later, LATER)
        found = self._claims(shared, uncut, words) + self._of_last()
        self._next = _Underway(
            [n for n in shared if n in later],
            [n for n in uncut if n in later],
            start_words({n: tensors[n] for n in later}),
        )
        return found

    def owed(self) -> list[RankCheck]:
        """What the last step has left for the next call, which this is."""
        found = self._of_last()
        self._keep(None)
        return found

    def _of_last(self) -> list[RankCheck]:
        if (last := self._last) is None:
            return []
        return self._claims(last.shared, last.uncut, last.arrived(), ", in the step before")

    def last_words(self) -> str:
        """What is wrong with the batch of the last step, as far as other ranks that have ended say; "" if nothing."""
        found = (difference_at_end(self.groups, claim, "batches") for claim in self.owed())
        return next(filter(None, found), "")

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """Around one call's agreement. What was started for the next one is forgotten where it fails."""
        self._next = None
        try:
            yield
        except BaseException:
            self._next = None
            raise
        finally:
            self._keep(self._next)

    def _keep(self, last: _Underway | None) -> None:
        self._last = last
        (ask_at_end if last is not None and (last.shared or last.uncut) else no_longer_ask)(self)

    def _others(self) -> tuple[str, ...]:
        return tuple(axis for axis, size in self.groups.mesh.axes if axis not in DATA and size > 1)

    def _claims(self, shared: list[str], uncut: list[str], words: Mapping[str, str], when: str = "") -> list[RankCheck]:
        others = self._others()
        return [
            RankCheck(
                others,
                {n: words[n] for n in shared},
                f"batch: the ranks of {' and '.join(map(repr, others))} must be given the same batch{when}",
                "feed every rank the batch of its dp coordinate (shuffle and augment by that, not by the rank); "
                + SKIP,
            ),
            RankCheck(
                everywhere(self.groups),
                {n: words[n] for n in uncut},
                f"batch: what is no part of the batch must be the same on all ranks{when}",
                "feed it alike, or name its batch dim, batch_dims={...}, if each rank of 'dp' has its own part; "
                + SKIP,
            ),
        ]


def _arrives(x: Tensor) -> bool:
    """Whether the host would have to wait for its values."""
    return x.device.type != "cpu"
