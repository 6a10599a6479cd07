"""Entries of function caches. `functools.lru_cache` shows only their number; gc shows the entries.

@functools.lru_cache
def scale(n): return GAIN * n         kept_results(scale) is {3: 1.5}, once scale(3) was called
"""

from __future__ import annotations

import functools
import gc
from typing import Any

CACHED = type(functools.cache(len))


def lookup_of(cache: Any) -> dict[Any, Any]:
    """The lookup dict of a cache: a deleted entry is recomputed."""
    return next(x for x in gc.get_referents(cache) if type(x) is dict and x is not vars(cache))


def kept_results(cache: Any) -> dict[Any, Any]:
    """Cached results by key."""
    held, table = gc.get_referents(cache), lookup_of(cache)
    if cache.cache_parameters()["maxsize"] is None:
        return dict(table)
    keys, found = {id(key) for key in table}, {}  # referents are key, result, type in turn
    for key, result, kind in zip(held[1::3], held[2::3], held[3::3]):
        if id(key) not in keys or not isinstance(kind, type):
            break
        found[key] = result
    return found
