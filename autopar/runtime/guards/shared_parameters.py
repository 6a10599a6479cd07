"""Two parallel models made from the same parameters: each has its own shards, so their values would diverge.

    parallel_d = autopar.parallelize(d, mesh)
    parallel_gan = autopar.parallelize(Gan(g, d), mesh)     in one process both would train the one d

A step of one is refused once the other has changed shared parameters while both are alive. So steps can be compared,
frozen modules can be in many models, and a model that was deleted does not count.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from autopar.adapters.autograd import version_of
from autopar.adapters.dtensor import local_of
from autopar.runtime.params.sharded_modules import ShardedModules

_HOLDERS = WeakIdKeyDictionary()  # parameter or buffer of an original -> models with a shard of it


class SharedParameters:
    """Of one parallel model. ``models``: the originals, by path."""

    def __init__(self, models: Mapping[str, nn.Module], tree: ShardedModules) -> None:
        self._tree = tree
        self._others: list[_Other] = []
        canonical = {name: s.name for s in tree.specs for name in (s.name, *s.aliases)}
        common: dict[SharedParameters, list[tuple[str, str]]] = {}
        own: list[tuple[str, Tensor]] = []
        for above, model in models.items():
            for name, x in (*model.named_parameters(), *model.named_buffers()):
                path = ".".join(filter(None, (above, name)))
                own.append((canonical.get(path, path), x))
        for name, x in own:
            held = [(other, there) for ref, there in _HOLDERS.get(x, ()) if (other := ref()) is not None]
            for other, there in held:
                common.setdefault(other, []).append((name, there))
            _HOLDERS[x] = [*((weakref.ref(other), there) for other, there in held), (weakref.ref(self), name)]
        self._root = weakref.ref(models[""])
        for other, names in common.items():
            if other._root() is self._root():  # of the same model: two runs may be compared, and steps write buffers
                names = [(here, there) for here, there in names if here in tree.held]
            self._others.append(_Other(other, [there for _, there in names]))
            other._others.append(_Other(self, [here for here, _ in names]))

    def versions(self, names: list[str]) -> list[int]:
        """Version counters of this rank's shards and buffers."""
        pieces: Mapping[str, Any] = self._tree.held
        tensors = {name: local_of(p) for name, p in pieces.items()} | self._tree.buffers()
        return [version_of(tensors[name]) for name in names if name in tensors]

    def check(self) -> None:
        """Raises ValueError where another model has changed a shared parameter."""
        if not self._others or not self._changed():
            return
        gc.collect()  # a deleted model may still be in a reference cycle
        if changed := self._changed():
            raise ValueError(
                f"parallelize: {changed} is in two parallel models, and the other one has changed its shards: each "
                "has its own, so the two would diverge; parallelize one module that contains everything that trains "
                "together, use copy.deepcopy(model) for each, or delete the other model"
            )

    def _changed(self) -> str:
        self._others = [other for other in self._others if other.ref() is not None]
        return next(filter(None, (other.changed() for other in self._others)), "")


class _Other:
    """What another model shares with this one, as it was when the second one was created."""

    def __init__(self, holder: SharedParameters, names: list[str]) -> None:
        self.ref, self._names = weakref.ref(holder), names
        self._then = holder.versions(names)

    def changed(self) -> str:
        """The name of a tensor that it has written to since, or ""."""
        holder = self.ref()
        now = holder.versions(self._names) if holder is not None else self._then
        if now == self._then:
            return ""
        at = next((i for i, (a, b) in enumerate(zip(now, self._then)) if a != b), 0)
        return self._names[min(at, len(self._names) - 1)]
