"""Whether every number of tokens takes a way through the forward that has been compared with that of the graph.

    if ids.shape[1] == 2: h = h.relu()         another graph for 2 tokens: found without trying all numbers

Logs of two numbers of tokens (`SizeLog`) say how each size depends on the number, so each comparison in them can be
answered for all. Where the answers differ, numbers part; of each part that has no log, forwards are captured and
compared, which may decide by further sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from autopar.capture.reads.compared_sizes import Asked, Compared, Event, MadePlain, Number, SizeLog

_MOST = 16  # captures
Sizes = dict[tuple[int, int], Any]  # (event, dim) -> the size, or its array over numbers of tokens


def check_other_ways(logs: Mapping[int, SizeLog], check: Callable[[int], object], total: int) -> None:
    """Call ``check`` of further numbers of tokens, which adds their logs, until all from 2 to ``total`` go a way that
    has been checked. ``logs``: of the numbers that have been. Raises ValueError where there are too many ways, and
    where ``check`` does."""
    _Ways(logs, check).part(np.arange(2, total + 1), 0, {})


class _Unknown(Exception):
    """A size that is no affine function of the number of tokens."""


class _Ways:
    def __init__(self, logs: Mapping[int, SizeLog], check: Callable[[int], object]) -> None:
        self.logs, self.check = logs, check

    def part(self, counts: np.ndarray, begin: int, sizes: Sizes) -> None:
        """Follow numbers of tokens that have the same events before ``begin``; ``sizes``: of these events."""
        a, b = self._two(counts)
        one, other = self.logs[a].events, self.logs[b].events
        for k in range(begin, max(len(one), len(other)) if a < b else 0):
            if k >= min(len(one), len(other)) or not _alike(one[k], other[k]):
                self._unseen((one if k < len(one) else other)[k], a, b)
            event = one[k]
            if isinstance(event, Asked):
                for i, (x, y) in enumerate(zip(event.values, other[k].values)):  # type: ignore[union-attr]
                    sizes[k, i] = _affine(x, y, a, b, counts)
            elif isinstance(event, MadePlain):
                self._try(event, counts, sizes)
            elif (truth := self._truth(event, counts, sizes)) is not None and truth.any() != truth.all():
                self.part(counts[truth], k + 1, {key: _of(x, truth) for key, x in sizes.items()})
                self.part(counts[~truth], k + 1, {key: _of(x, ~truth) for key, x in sizes.items()})
                return

    def _two(self, counts: np.ndarray) -> tuple[int, int]:
        """The smallest and the largest number with a log; of one number alone, that twice."""
        for n in (int(counts[0]), int(counts[-1])):
            if len(self._known(counts)) < min(2, len(counts)):
                self._add(n)
        found = self._known(counts)
        return found[0], found[-1]

    def _known(self, counts: np.ndarray) -> list[int]:
        return sorted(set(self.logs) & set(counts.tolist()))

    def _add(self, count: int) -> None:
        if count in self.logs:
            return
        if len(self.logs) >= _MOST:
            raise ValueError(
                f"serve: the forward decides by the number of tokens in more than {_MOST} ways; generate with the "
                "model itself"
            )
        self.check(count)

    def _truth(self, event: Compared, counts: np.ndarray, sizes: Sizes) -> np.ndarray | None:
        """The answers for all numbers of tokens; None if it does not depend on them."""
        try:
            found = value_of(event.found, sizes)
        except _Unknown:
            return None
        return found.astype(bool) if isinstance(found, np.ndarray) else None

    def _try(self, event: MadePlain, counts: np.ndarray, sizes: Sizes) -> None:
        """A number of tokens that became a plain int may be compared with any integer of the code."""
        try:
            found = value_of(event.found, sizes)
        except _Unknown:
            found = counts
        if isinstance(found, np.ndarray):
            for c in event.constants:
                for n in counts[(found == c) | (found == c + 1)][:2].tolist():
                    self._add(n)

    def _unseen(self, event: Event, a: int, b: int) -> None:
        code, line = event.place
        raise ValueError(
            f"serve: the forward goes another way for {a} tokens than for {b}, from {code.co_filename}:{line} in "
            f"{code.co_name} on; generate with the model itself"
        )


def _alike(a: Event, b: Event) -> bool:
    return type(a) is type(b) and a.place == b.place and (
        not isinstance(a, Asked) or len(a.values) == len(b.values)  # type: ignore[union-attr]
    )  # fmt: skip


def _affine(x: int, y: int, a: int, b: int, counts: np.ndarray) -> Any:
    """A size for all numbers of tokens, if it is x for a of them and y for b."""
    if x == y:
        return x
    slope, rest = divmod(y - x, b - a)
    return None if rest else x + slope * (counts - a)


def _of(x: Any, chosen: np.ndarray) -> Any:
    return x[chosen] if isinstance(x, np.ndarray) else x


def value_of(x: Any, sizes: Sizes) -> Any:
    """The value of a number: an array where it depends on the number of tokens. Raises _Unknown."""
    if not isinstance(x, Number):
        return x
    if x.made is None:
        found = sizes[x.parts]
        if found is None:
            raise _Unknown
        return found
    parts = [value_of(part, sizes) for part in x.parts]
    if not any(isinstance(part, np.ndarray) for part in parts):
        return x.made(*parts)
    with np.errstate(all="ignore"):
        try:
            return np.asarray(x.made(*parts))
        except (TypeError, ValueError):
            return np.asarray(np.frompyfunc(x.made, len(parts), 1)(*parts).tolist())
