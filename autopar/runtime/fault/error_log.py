"""What ranks tell all others, in one place of the store: a few notices of each kind, those of whoever comes first.

    notices.tell(store, "error", 7, "KeyError: 'boom'")      two questions as a rule; one if there is no room any more
    notices.read(store)["error"]  ->  {7: "KeyError: 'boom'"}      one question

So 16,384 ranks that fail together, and ask who failed, ask as many questions each as two ranks do.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping

import torch.distributed as dist

MOST = 8  # notices of a kind
TRIES = 100  # others may write at the same moment; each of them fills a place


def look(store: dist.Store, key: str) -> str:
    """The text under a key, empty if there is none: one question, which never waits."""
    return store.compare_set(key, "", "").decode()


class ErrorLog:
    """Those under a key. A notice has a kind, the rank that it is about, and a text."""

    def __init__(self, key: str) -> None:
        self._key = key

    def read(self, store: dist.Store) -> Mapping[str, dict[int, str]]:
        """Kind -> rank -> text, the first one of each rank."""
        found: dict[str, dict[int, str]] = defaultdict(dict)
        for line in look(store, self._key).splitlines():
            kind, rank, text = json.loads(line)
            found[kind].setdefault(rank, text)
        return found

    def tell(self, store: dist.Store, kind: str, rank: int, text: str) -> None:
        """Add a notice, unless there are `MOST` of its kind, or the same one."""
        line, start = json.dumps([kind, rank, text]), json.dumps([kind])[:-1] + ","

        def added(lines: list[str]) -> list[str]:
            full = sum(one.startswith(start) for one in lines) >= MOST
            return lines if full or line in lines else [*lines, line]

        self._change(store, added)

    def take_back(self, store: dist.Store, kind: str, rank: int, text: str) -> None:
        """Remove a notice, if it is there."""
        line = json.dumps([kind, rank, text])
        self._change(store, lambda lines: [one for one in lines if one != line])

    def _change(self, store: dist.Store, change: Callable[[list[str]], list[str]]) -> None:
        seen = look(store, self._key)
        for _ in range(TRIES):
            wanted = "\n".join(change(seen.splitlines()))
            if wanted == seen:
                return
            found = store.compare_set(self._key, seen, wanted).decode()
            if found == wanted:
                return
            seen = found
