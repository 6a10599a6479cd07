"""What the caches of functions hold. `functools.lru_cache` tells how much; the collector tells what.

@functools.lru_cache
def scale(n): return GAIN * n         kept_results(scale) is {3: 1.5}, once scale(3) was called
"""

from __future__ import annotations

import functools
import gc
from typing import Any

CACHED = type(functools.cache(len))


def lookup_of(cache: Any) -> dict[Any, Any]:
    """The dict that the cache looks arguments up in: a result that is deleted there is made anew."""
    return next(x for x in gc.get_referents(cache) if type(x) is dict and x is not vars(cache))


def kept_results(cache: Any) -> dict[Any, Any]:
    """Results by arguments, as the cache tells them apart."""
    held, table = gc.get_referents(cache), lookup_of(cache)
    if cache.cache_parameters()["maxsize"] is None:
        return dict(table)
    keys, found = {id(key) for key in table}, {}  # it holds a list of arguments, result, type
    for key, result, kind in zip(held[1::3], held[2::3], held[3::3]):
        if id(key) not in keys or not isinstance(kind, type):
            break
        found[key] = result
    return found
