"""Checks at process exit, where no rank may wait for another one and no further call will follow; and what is done
after a good end."""

from __future__ import annotations

import atexit
import functools
import json
import sys
from collections.abc import Callable
from typing import Any

from autopar.adapters.processes import program_end
from autopar.runtime.consistency.rank_checks import RankCheck
from autopar.runtime.fault import errors
from autopar.runtime.mesh.process_groups import Groups

_register = functools.cache(atexit.register)
_asked: dict[int, Any] = {}  # strong references: the model itself may be gone
_after_good_end: list[Callable[[], None]] = []


def ask_at_end(watch: Any) -> None:
    """Ask ``watch`` at exit: it has an open check."""
    _asked[id(watch)] = watch
    _register(_say)  # registered after the error board, so it runs before it


def no_longer_ask(watch: Any) -> None:
    """Do not ask ``watch`` at exit: it has no open check."""
    _asked.pop(id(watch), None)


def after_good_end(action: Callable[[], None]) -> None:
    """Call ``action()`` when this rank has ended with exit code 0."""
    _after_good_end.append(action)
    program_end()
    _register(_say)


def found_at_end(is_good: bool = True) -> str:
    """The first failed check; "" if there is none, or if this rank ends with an error, which explains more. If the end
    is good, what is to follow it is done."""
    found = next(filter(None, (watch.exit_errors() for watch in list(_asked.values()))), "")
    while is_good and _after_good_end:
        _after_good_end.pop()()
    return found


def _say() -> None:
    try:
        found = found_at_end(not _after_good_end or program_end().is_good)
    except Exception as error:  # the accelerator may be gone already
        found = f"the checks at the end of the process could not run: {type(error).__name__}: {error}"
    if found:
        print(f"autopar: {found}", file=sys.stderr, flush=True)


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
