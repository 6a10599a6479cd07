"""Costs of layers on disk, in the compile cache: a search that is repeated compiles nothing.

Keys are values: the model's config, the sequence, the placement, and the versions of all that computes costs.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch

from autopar.cache.disk_cache import entry_folder
from autopar.cache.own_sources import changed_autopar, own_digest, versions
from autopar.cache.value_codec import Damaged, Decoder, Encoder
from autopar.cost.layer_costs import ModelCosts
from autopar.cost.layout import Placement

COSTS = "costs"  # section of an entry


CostsByRows = tuple[tuple[int, ModelCosts], ...]  # (from so many rows on, costs), ascending


def stored_costs(model: str, placement: Placement, make: Callable[[], CostsByRows]) -> CostsByRows:
    """The costs of a model on a placement, from the folder if it has them. model: its values as text; "" to store
    nothing."""
    folder = entry_folder() if model and own_digest() and changed_autopar() is None else None
    if folder is None:
        return make()
    key = hashlib.sha1(repr((model, placement, versions())).encode()).hexdigest()
    entry = folder.read(key)
    if entry is not None and (found := _read(entry.sections)) is not None:
        return found
    costs = make()
    about = {"model": "", "mesh": str(placement.mesh), "kind": "costs of layers", "created": time.time()}
    folder.write(key, about, {COSTS: json.dumps(_Encoder().encode(costs)).encode()})
    return costs


def _read(sections: Mapping[str, bytes]) -> CostsByRows | None:
    """The costs of an entry; None for an entry that is none."""
    try:
        found = _Decoder().decode(json.loads(sections[COSTS]))
    except (Damaged, LookupError, ValueError, RecursionError):
        return None
    good = isinstance(found, tuple) and found and all(isinstance(costs, ModelCosts) for _, costs in found)
    return found if good else None


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
