"""The flight recorder: the last actions, exchanges and waits of this rank, written to a file when a collective fails.

    with flying("action", "0F1"): ...                     an event; its end is None while it goes on

Each rank writes ``rank-N.json`` into one folder: $AUTOPAR_FLIGHT, by default in the user's cache folder, named after
the job. `autopar flight FOLDER` reads them. A rank that dies writes none.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from autopar.files import OFF, cache_root, written_beside

log = logging.getLogger("autopar.flight")

VARIABLE = "AUTOPAR_FLIGHT"
MOST = 1000  # events kept
AGAIN = 60.0  # seconds after which a further failure is written again
LONGEST = 500  # characters of a text in a file


class flying:
    """Context manager: one event, ``what`` describes it; ``ranks``: those that it waits for. A class, since there are
    hundreds in a step. It outlives the model, so it holds words, not what they are of."""

    __slots__ = ("end", "kind", "ranks", "start", "what")

    def __init__(self, kind: str, what: str, ranks: Sequence[int] = ()) -> None:
        self.kind, self.what, self.ranks = kind, what, ranks
        self.end: float | None = None

    def __enter__(self) -> None:
        self.start = time.time()
        _events.append(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.end = time.time()


_events: deque[flying] = deque(maxlen=MOST)
_last_written = -AGAIN


def folder() -> Path | None:
    """Where it is written; None if it is off."""
    given = os.environ.get(VARIABLE, "")
    if given:
        return None if given.lower() in OFF else Path(given).expanduser()
    root = cache_root()
    if root is None:
        return None
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
    job = "-".join(filter(None, (os.environ.get(name) for name in names))) or "job"
    return root / "flight" / re.sub(r"[^\w.-]", "_", job)


def write_flight(rank: int, error: str, numbered: Callable[[Sequence[int]], Sequence[int]]) -> None:
    """Write the events of this rank, which has met ``error``. ``numbered``: the global numbers of ranks as events have
    them. Never raises: another error is on its way."""
    global _last_written
    where, now = folder(), time.monotonic()
    if where is None or now - _last_written < AGAIN:
        return
    _last_written = now
    events = [
        {"kind": x.kind, "what": x.what[:LONGEST], "start": x.start, "end": x.end, "ranks": [*numbered(x.ranks)]}
        for x in list(_events)
    ]
    told = {"rank": rank, "host": socket.gethostname(), "written": time.time(), "error": error[:LONGEST]}
    try:
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        with written_beside(where, json.dumps({**told, "events": events}).encode(), f".rank-{rank}-") as name:
            os.replace(name, where / f"rank-{rank}.json")
    except OSError as failed:
        log.warning("flight: not written to %s: %s", where, failed)
        return
    log.warning("flight: the last %d events are in %s; python -m autopar flight %s", len(events), where, where)
