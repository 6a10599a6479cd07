"""What can only be said when a process ends: nobody waits for anybody there, and no call of the user's will come."""

from __future__ import annotations

import atexit
import functools
import json
import sys
from typing import Any

from autopar.runtime.consistency.rank_checks import RankCheck
from autopar.runtime.fault import errors
from autopar.runtime.mesh.process_groups import Groups

_register = functools.cache(atexit.register)
_asked: dict[int, Any] = {}  # which may be all that is left of a model


def ask_at_end(watch: Any) -> None:
    """It has something to say."""
    _asked[id(watch)] = watch
    _register(_say)  # behind the board of failures: handlers run last in, first out


def no_longer_ask(watch: Any) -> None:
    """It has nothing to say."""
    _asked.pop(id(watch), None)


def found_at_end() -> str:
    """The first thing that is wrong; "" if nothing is, or if this rank ends with an error, which says more."""
    return next(filter(None, (watch.last_words() for watch in list(_asked.values()))), "")


def _say() -> None:
    try:
        found = found_at_end()
    except Exception as error:  # the accelerator may be gone already
        found = f"what is left to be compared at the end of a process was not: {type(error).__name__}: {error}"
    if found:
        print(f"autopar: {found}", file=sys.stderr, flush=True)


def difference_at_end(groups: Groups, claim: RankCheck) -> str:
    """The claim's error, where the first of the ranks which make it that has ended claimed something else; else ""."""
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
