"""At process exit: checks that were left open, for which no rank may wait for another one since no further call will
follow; and whether all ranks end well."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from autopar.adapters.processes import program_end
from autopar.runtime.consistency.rank_checks import RankCheck
from autopar.runtime.fault import errors
from autopar.runtime.fault.error_propagation import ErrorBoard, RoleBoard
from autopar.runtime.fault.store_client import StoreError, look
from autopar.runtime.mesh.process_groups import Groups

_register = functools.cache(atexit.register)
_asked: dict[int, Any] = {}  # strong references: the model itself may be gone
_at_end: list[Callable[[bool], None]] = []


def ask_at_end(watch: Any) -> None:
    """Ask ``watch`` at exit: it has an open check."""
    _asked[id(watch)] = watch
    _register(_say)  # registered after the error board, so it runs before it


def no_longer_ask(watch: Any) -> None:
    """Do not ask ``watch`` at exit: it has no open check."""
    _asked.pop(id(watch), None)


def at_end(action: Callable[[bool], None]) -> None:
    """Call ``action(whether the exit code is 0)`` when the program of this rank ends; not after a signal."""
    _at_end.append(action)
    program_end()
    _register(_say)


def found_at_end(is_good: bool = True) -> str:
    """The first failed check; "" if there is none, or if this rank ends with an error, which explains more. Then the
    actions of `at_end` are called."""
    found = next(filter(None, (watch.exit_errors() for watch in list(_asked.values()))), "")
    while _at_end:
        _at_end.pop()(is_good)
    return found


def _say() -> None:
    try:
        found = found_at_end(not _at_end or program_end().is_good)
    except Exception as error:  # the accelerator may be gone already
        found = f"the checks at the end of the process could not run: {type(error).__name__}: {error}"
    if found:
        print(f"autopar: {found}", file=sys.stderr, flush=True)


class CommonEnd:
    """Whether all ranks of a mesh end well, which those that end first wait for. ``key``: its name in the store."""

    def __init__(self, groups: Groups, key: str) -> None:
        self._board: ErrorBoard | RoleBoard = errors.board()  # the groups may be gone when it is asked
        self._world, self._limit = groups.mesh.world_size, groups.timeout.total_seconds()
        self._good, self._bad = (f"{self._board.keys}/{key}/{how}" for how in ("good", "bad"))

    def say(self, is_good: bool) -> None:
        """Tell the others how this rank ends, and that it makes no further call."""
        if self._world == 1:
            return
        self._board.finished()
        with contextlib.suppress(StoreError):
            if is_good:
                self._board.line.ask(lambda store: store.add(self._good, 1))
            else:
                self._board.line.ask(lambda store: store.set(self._bad, "bad"))

    def is_good(self) -> bool:
        """After this rank has said that it ends well: wait until all have. False once one ends otherwise, is dead, or
        does not end within the mesh's timeout."""
        if self._world == 1:
            return True
        start, found = time.monotonic(), None
        try:
            while found is None and not self._board.verdict and time.monotonic() < start + self._limit:
                found = self._board.line.ask(self._known)
                time.sleep(0.0 if found is not None else min(0.5, 0.02 + (time.monotonic() - start) / 20))
        except StoreError:
            return False
        return bool(found)

    def _known(self, store: dist.Store) -> bool | None:
        if store.add(self._good, 0) == self._world:
            return True
        return False if look(store, self._bad) else None


def difference_at_end(groups: Groups, claim: RankCheck) -> str:
    """The error of a check that differs from that of the first of its ranks that has ended; else ""."""
    if not claim.facts:
        return ""
    first = groups.mesh.along(claim.axes, groups.rank)[0]
    mine: dict[str, Any] = {"rank": groups.rank, "facts": dict(claim.facts)}
    key = f"{groups.name}/batches/{'.'.join(claim.axes)}/{first}"
    said = errors.first_to_say(key, json.dumps(mine))
    other = mine if said is None else json.loads(said)
    differ = [name for name, fact in claim.facts.items() if other["facts"].get(name) != fact]
    if not differ:
        return ""
    found = f"{', '.join(differ)}: ranks {other['rank']} and {groups.rank} differ"
    return f"{claim.need}, found {found}; {claim.way_out}"
