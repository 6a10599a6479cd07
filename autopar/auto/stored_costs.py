"""Costs of layers on disk, in the compile cache: a search that is repeated compiles nothing.

Keys are values: the model's config, the sequence, the placement, and the versions of all that computes costs.
"""

from __future__ import annotations

import hashlib
import pickle
import time
from collections.abc import Callable

from autopar.cache.disk_cache import entry_folder
from autopar.cache.own_sources import changed_autopar, own_digest, versions
from autopar.cost.layer_costs import ModelCosts
from autopar.cost.layout import Placement

COSTS = "costs"  # section of an entry


def stored_costs(model: str, placement: Placement, make: Callable[[], ModelCosts]) -> ModelCosts:
    """The costs of a model on a placement, from the folder if it has them. model: its values as text; "" to store
    nothing."""
    folder = entry_folder() if model and own_digest() and changed_autopar() is None else None
    if folder is None:
        return make()
    key = hashlib.sha1(repr((model, placement, versions())).encode()).hexdigest()
    entry = folder.read(key)
    if entry is not None and COSTS in entry.sections:
        found: ModelCosts = pickle.loads(entry.sections[COSTS])
        return found
    costs = make()
    about = {"model": "", "mesh": str(placement.mesh), "kind": "costs of layers", "created": time.time()}
    folder.write(key, about, {COSTS: pickle.dumps(costs)})
    return costs
