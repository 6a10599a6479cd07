"""Two parallel models that were made of the same parameters: each has pieces of its own, so they would train apart.

    parallel_d = autopar.parallelize(d, mesh)
    parallel_gan = autopar.parallelize(Gan(g, d), mesh)     in one process both would train the one d

A step of one is refused once the other, while both were there, has changed what they have in common. So comparisons of
steps are possible, frozen modules can be in many models, and a model that nobody holds any more counts for nothing.
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

_HOLDERS = WeakIdKeyDictionary()  # parameter or buffer of an original -> those that have a piece of it


class SharedParameters:
    """Of one parallel model, which was made of ``models``, by paths."""

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
            if other._root() is self._root():  # two runs of one model may be compared: steps write to buffers
                names = [(here, there) for here, there in names if here in tree.held]
            self._others.append(_Other(other, [there for _, there in names]))
            other._others.append(_Other(self, [here for here, _ in names]))

    def versions(self, names: list[str]) -> list[int]:
        """How often this rank's pieces, and buffers, were written to."""
        pieces: Mapping[str, Any] = self._tree.held
        tensors = {name: local_of(p) for name, p in pieces.items()} | self._tree.buffers()
        return [version_of(tensors[name]) for name in names if name in tensors]

    def check(self) -> None:
        """Raises ValueError where another model has changed what they have in common."""
        if not self._others or not self._changed():
            return
        gc.collect()  # one that nobody holds may still be there
        if changed := self._changed():
            raise ValueError(
                f"parallelize: {changed} is in two parallel models, and the other one has changed its own since: on a "
                "mesh each has weights of its own, and they would train apart; parallelize one module that has all "
                "that trains together, copy.deepcopy(model) for each, or drop the other model"
            )

    def _changed(self) -> str:
        self._others = [other for other in self._others if other.ref() is not None]
        return next(filter(None, (other.changed() for other in self._others)), "")


class _Other:
    """What another model has in common with this one, as it was when both were there."""

    def __init__(self, holder: SharedParameters, names: list[str]) -> None:
        self.ref, self._names = weakref.ref(holder), names
        self._then = holder.versions(names)

    def changed(self) -> str:
        """A name of what it has written to since."""
        holder = self.ref()
        now = holder.versions(self._names) if holder is not None else self._then
        if now == self._then:
            return ""
        at = next((i for i, (a, b) in enumerate(zip(now, self._then)) if a != b), 0)
        return self._names[min(at, len(self._names) - 1)]
