"""Costs of layers, and what searches found, on disk, in the compile cache: a question asked again compiles nothing.

Keys are values: the model's config, the sequence, what is asked, and the versions of all that computes the answer.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from typing import TypeVar, cast

import numpy as np
import torch

from autopar.cache.disk_cache import entry_folder
from autopar.cache.own_sources import changed_autopar, own_digest, versions
from autopar.cache.value_codec import Damaged, Decoder, Encoder, Unstorable
from autopar.cost.layer_costs import ModelCosts
from autopar.cost.layout import Placement

VALUE = "costs"  # section of an entry

T = TypeVar("T")
CostsByRows = tuple[tuple[int, ModelCosts], ...]  # (from so many rows on, costs), ascending


def stored_costs(model: str, placement: Placement, make: Callable[[], CostsByRows]) -> CostsByRows:
    """The costs of a model on a placement, from the folder if it has them. model: its values as text; "" to store
    nothing."""

    def good(found: object) -> bool:
        return isinstance(found, tuple) and bool(found) and all(isinstance(costs, ModelCosts) for _, costs in found)

    return stored(model, placement, make, good, str(placement.mesh), "costs of layers")


def stored(model: str, asked: object, make: Callable[[], T], good: Callable[[object], bool], mesh: str, kind: str) -> T:
    """What ``make`` returns, from the folder if it has it. asked: a value whose text tells questions about the model
    apart. good: whether a stored value is an answer. mesh, kind: said of the entry."""
    folder = entry_folder() if model and own_digest() and changed_autopar() is None else None
    if folder is None:
        return make()
    key = hashlib.sha1(repr((model, asked, versions())).encode()).hexdigest()
    entry = folder.read(key)
    if entry is not None and good(found := _read(entry.sections)):
        return cast(T, found)
    made = make()
    try:
        data = json.dumps(_Encoder().encode(made)).encode()
    except Unstorable:
        return made
    folder.write(key, {"model": "", "mesh": mesh, "kind": kind, "created": time.time()}, {VALUE: data})
    return made


def _read(sections: Mapping[str, bytes]) -> object:
    """The value of an entry; None for an entry that is none."""
    try:
        return _Decoder().decode(json.loads(sections[VALUE]))
    except (Damaged, LookupError, ValueError, RecursionError):
        return None


class _Encoder(Encoder):
    """Also of arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds[np.float64] = lambda x: ["f", float(x).hex()]
        self.kinds[np.ndarray] = lambda x: ["array", self.encode(torch.from_numpy(np.ascontiguousarray(x)))]


class _Decoder(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.kinds["array"] = lambda x: self.decode(x[1]).numpy()
