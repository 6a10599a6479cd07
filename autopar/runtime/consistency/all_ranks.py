"""What each rank does for itself, and all must have done: if one cannot, all raise its error.

plan = together(groups, "load", lambda: read(folder))       ValueError on every rank, in the words of the one
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

from autopar.errors import is_refusal
from autopar.runtime.consistency.rank_checks import all_alike, exchange_texts, text_of_first
from autopar.runtime.fault.error_propagation import CheckpointError
from autopar.runtime.fault.errors import CollectiveError
from autopar.runtime.mesh.process_groups import Groups

T = TypeVar("T")


def together(groups: Groups, what: str, call: Callable[[], T]) -> T:
    """What ``call`` returns here, once it has returned on all ranks. Raises the error of the first rank that has one,
    on all: ValueError for a user's mistake, else CheckpointError. Collective."""
    found, said, cause = attempted(what, call)
    if not all_alike(groups, f"{what}: what came of it", said or "all is well") or said:
        texts = exchange_texts(groups, said, f"{what}: who failed")
        rank = next(r for r, text in enumerate(texts) if text)
        raise _error_of(texts[rank], rank if groups.mesh.world_size > 1 else None) from cause
    assert found is not None
    return found[0]


def by_first(groups: Groups, what: str, call: Callable[[], str]) -> str:
    """The text that ``call`` returns on rank 0, which alone calls it; its error on all ranks."""
    text, cause = "", None
    if groups.rank == 0:
        found, said, cause = attempted(what, call)
        text = said or json.dumps(found)
    if groups.mesh.world_size > 1:
        text = text_of_first(groups, text, what)
    told = json.loads(text)
    if isinstance(told, dict):
        raise _error_of(text, None) from cause
    return str(told[0])


def attempted(what: str, call: Callable[[], T]) -> tuple[tuple[T] | None, str, BaseException | None]:
    """(what it returned, "", None), or (None, its error as a text for other ranks, its error)."""
    try:
        return (call(),), "", None
    except CollectiveError:
        raise
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        mine = is_refusal(error)
        text = first if mine or isinstance(error, CheckpointError) else f"{what}: {type(error).__name__}: {first}"
        return None, json.dumps({"mistake": mine, "text": text}), error


def _error_of(said: str, rank: int | None) -> Exception:
    told = json.loads(said)
    where = "" if rank is None else f" (on rank {rank})"
    return (ValueError if told["mistake"] else CheckpointError)(told["text"] + where)
