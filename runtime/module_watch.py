"""Does what a compiled step was made from still hold?

A step is compiled from the modules as they are: their modes, attributes, hooks, the code of their classes, and which
parameters want a gradient. A `ModuleWatch` remembers all of it and compares at each step, mostly by identity and
within C: about 1 us per module. What cannot be compared counts as changed; a step is then compiled anew, which is
never wrong. Which parameters these are is for `tree.Tree` to see: a step takes any of the same layout.

Attributes are compared by value, containers and plain objects (a ``config``) by their contents. Not seen: what a
forward reads from elsewhere, such as a global variable of its file.
"""

from __future__ import annotations

import contextlib
import operator
import types
from collections.abc import Callable
from itertools import chain, starmap
from typing import Any

from torch import Tensor, nn

from autopar.adapters.autograd import version_of
from autopar.adapters.dtensor import storage_of
from autopar.adapters.fake import geometry_of
from autopar.adapters.hooks import hooks_of_all, hooks_so_far
from autopar.runtime.tag_watch import TagWatch

# What nn.Module keeps in a module: of these only hooks and children matter to a forward; state is looked at by itself.
_INNER = {*nn.Module().__dict__} - {"training"}
_HOOKS = sorted(k for k in _INNER if k.startswith(("_forward", "_backward")))
_FACTS: tuple[Callable[[Any], Any], ...] = (operator.attrgetter("requires_grad"), operator.attrgetter("dtype"))

_LARGE = 1000  # entries; a larger container (a vocabulary) is compared by identity


class ModuleWatch:
    """``ModuleWatch(root).holds()``: whether modules, attributes and parameters are as they were when it was made;
    ``modes``: whether the modules' ``training`` counts."""

    def __init__(self, root: nn.Module, modes: bool = True) -> None:
        modules = list(root.modules())
        self._paths = [path or type(root).__name__ for path, _ in root.named_modules()]
        self._names: list[list[str]] = []  # of the attributes of each module
        seen = {id(x) for m in modules for x in (m, *m._parameters.values(), *m._buffers.values())}
        objects: list[dict[str, Any]] = []
        self._tensors: list[Tensor] = []
        self._live: list[Any] = []
        self._then: list[Any] = []
        self._getters, self._dicts, self._values = [], [], []
        self._hooks: list[dict[Any, Any]] = []  # most are empty, and stay so
        for module in modules:
            names = [k for k in module.__dict__ if k not in _INNER and (modes or k != "training")]
            self._names.append(names)
            self._getters.append(operator.itemgetter(*names, "_modules", "_non_persistent_buffers_set"))
            self._dicts.append(module.__dict__)
            values = [self._frozen(module.__dict__[k], seen, objects) for k in names]
            self._values.append(
                (*values, dict(module.__dict__["_modules"]), set(module.__dict__["_non_persistent_buffers_set"]))
            )
            self._hooks += [h for name in _HOOKS if isinstance(h := module.__dict__.get(name), dict)]
        self._hooks += hooks_of_all()
        for hooks in filter(None, self._hooks):
            self._live.append(hooks)
            self._then.append(dict(hooks))
        self._hooks_so_far = hooks_so_far()
        self._sizes, self._hook_counts = list(map(len, self._dicts)), list(map(len, self._hooks))
        for live in objects:  # grows while it is read
            self._live.append(live)
            self._then.append({k: self._frozen(v, seen, objects) for k, v in live.items()})
        for cls in {c for m in modules for c in type(m).__mro__ if c not in (object, nn.Module)}:
            self._live.append(vars(cls))
            self._then.append(dict(vars(cls)))
        self._versions = list(map(version_of, self._tensors))
        self._owners = [m._parameters for m in modules]
        self._facts = self._facts_now()
        self._buffers = [m._buffers for m in modules]
        self._tags = TagWatch(root)
        self._buffer_facts = self._buffers_now()

    def holds(self) -> bool:
        try:
            return (
                list(map(len, self._dicts)) == self._sizes
                and self._same_hooks()
                and list(map(operator.call, self._getters, self._dicts)) == self._values
                and all(map(operator.eq, self._live, self._then))
                and list(map(version_of, self._tensors)) == self._versions
                and self._facts_now() == self._facts
                and self._buffers_now() == self._buffer_facts
                and self._tags.holds()
            )
        except Exception:  # an attribute is gone, or is now something that has no plain ==
            return False

    def _same_hooks(self) -> bool:
        """Those that were there are looked at one by one; of others none is there until somebody registers one."""
        if (now := hooks_so_far()) == self._hooks_so_far:
            return True
        if list(map(len, self._hooks)) != self._hook_counts:
            return False
        self._hooks_so_far = now
        return True

    def changed(self) -> str:
        """What does not hold, in words: the first attribute that is another, if it is one."""
        for path, names, now, then in zip(self._paths, self._names, self._dicts, self._values):
            for name, value in zip(names, then):
                with contextlib.suppress(Exception):
                    if now.get(name) == value:
                        continue
                return f"attribute {name} of {path}"
        return "an attribute of an object that a module holds, a hook, a module or what wants a gradient"

    def _facts_now(self) -> list[Any]:
        parameters = [p for p in chain.from_iterable(map(dict.values, self._owners)) if p is not None]
        return [list(map(fact, parameters)) for fact in _FACTS]

    def _buffers_now(self) -> list[Any]:
        found = list(chain.from_iterable(map(dict.items, self._buffers)))
        first: dict[int, int] = {}  # where each memory was seen first: a step has tied ones once
        ties = [first.setdefault(storage_of(b), i) for i, (_, b) in enumerate(found) if b is not None]
        return [ties, *starmap(lambda name, b: (name, None if b is None else geometry_of(b)), found)]

    def _frozen(self, value: Any, seen: set[int], objects: list[dict[str, Any]]) -> Any:
        """A copy of containers; other values as they are. Objects with attributes and tensors are watched as well."""
        if isinstance(value, Tensor):
            if id(value) not in seen and not value.is_inference():  # a parameter or buffer, or one without versions
                self._tensors.append(value)
        elif isinstance(value, (dict, list, tuple, set)) and len(value) > _LARGE:
            return value
        elif type(value) is dict:
            return {k: self._frozen(v, seen, objects) for k, v in value.items()}
        elif type(value) in (list, tuple):
            return type(value)(self._frozen(v, seen, objects) for v in value)
        elif type(value) is set:
            return set(value)
        elif _has_attributes(value) and id(value) not in seen:
            seen.add(id(value))
            objects.append(vars(value))
        return value


def _has_attributes(value: Any) -> bool:
    opaque = (nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType)
    return hasattr(value, "__dict__") and not isinstance(value, opaque)
