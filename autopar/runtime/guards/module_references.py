"""Objects in the model that refer to its modules: the parallel model has copies of them, the user the originals.

    schedule.model = model; model.schedule = schedule       the copy refers to the parallel model's modules
    schedule.enabled = False                                the next step updates the copy
    callbacks.append(Trace(model))                          refused: this object has no copy

Objects that refer to no module are shared between model and parallel model and need no update. Objects are held weakly.
A list, dict or set, which has no weak references, is held as long as something beside the model refers to it.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from autopar.adapters.copying.fake_deepcopy import children, walk_attributes

_CONTAINERS = (list, dict, set, deque)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type, types.ModuleType)
_NOT_CHANGED = (*_PLAIN, Tensor, nn.Module, tuple, frozenset, types.MethodType, types.BuiltinFunctionType,
                functools.partial, weakref.ref)  # fmt: skip
_INNER = {*nn.Module().__dict__}  # attributes of nn.Module itself: other guards compare those
_OWN = 3  # references to an object that this module itself holds when it counts them
Find = Callable[[], Any]
Translated = Callable[[Any], Any]


class ModuleReferences:
    """Such objects of the original ``model``, and their copies in ``root``, the parallel model's modules."""

    def __init__(self, model: nn.Module, root: nn.Module) -> None:
        twins = dict(walk_attributes(root))
        self._twins: dict[int, tuple[Find, Any]] = {}  # by the ids of originals
        self._watched: list[_Watched] = []
        finds: dict[int, Find] = {}
        edges, reached = Counter[int](), dict[int, tuple[str, Any, int]]()
        for path, x, holder, inner in _reached(model, edges):
            twin = twins.get(path)
            if twin is None or twin is x or type(twin) is not type(x) or isinstance(x, _PLAIN):
                continue
            reached[id(x)] = path, x, holder
            find = finds[id(x)] = _find(x, finds.get(holder))
            self._twins[id(x)] = find, twin
            if inner or isinstance(x, _NOT_CHANGED):
                continue
            for entries in (_items, _attributes) if isinstance(x, _CONTAINERS) else (_attributes,):
                self._watched.append(_Watched(find, twin, path.lstrip("."), entries, self._translated))
        del x
        for number, (_, x, _) in list(reached.items()):
            if isinstance(finds[number], _Within) and sys.getrefcount(x) - _OWN > edges[number]:
                finds[number].held = x  # type: ignore[attr-defined]
        for watched in self._watched:
            watched.remember(self._twins)

    def bring_over(self) -> None:
        """Update the copies, at a step. Raises ValueError for a change that cannot be copied."""
        for watched in self._watched:
            watched.bring_over(self._twins)

    def _translated(self, x: Any) -> Any:
        """The counterpart of ``x`` in the copy. Raises LookupError if there is none."""
        if isinstance(x, _PLAIN):
            return x
        find, twin = self._twins.get(id(x), (None, None))
        if find is not None and find() is x:
            return twin
        if isinstance(x, tuple) and type(x) is tuple:
            return tuple(map(self._translated, x))
        if any(id(y) in self._twins and self._twins[id(y)][0]() is y for _, y in walk_attributes(x)):
            raise LookupError
        return x


def _reached(model: nn.Module, edges: Counter[int]) -> Iterator[tuple[str, Any, int, bool]]:
    """(path, value, id of its holder, whether torch itself put it on the module), in the order of `walk_attributes`.
    ``edges``: counts the references to each."""
    seen, queue = {id(model)}, deque([("", model, 0, False)])
    while queue:
        path, x, holder, inner = queue.popleft()
        yield path, x, holder, inner
        for label, value in children(x):
            edges[id(value)] += 1
            if id(value) not in seen:
                seen.add(id(value))
                own = isinstance(x, nn.Module) and label[1:] in _INNER and isinstance(value, _CONTAINERS)
                queue.append((f"{path}{label}", value, id(x), own))


def _find(x: Any, holder: Find | None) -> Find:
    try:
        return weakref.ref(x)
    except TypeError:
        return _Within(holder, id(x), type(x))


class _Within:
    """Finds an object without weak references through its holder. ``held``: the object, while others refer to it."""

    def __init__(self, holder: Find | None, number: int, kind: type) -> None:
        self._holder, self._number, self._kind = holder, number, kind
        self.held: Any = None

    def __call__(self) -> Any:
        if self.held is not None:
            if sys.getrefcount(self.held) > 2:
                return self.held
            self.held = None
        holder = self._holder() if self._holder is not None else None
        if holder is None:
            return None
        return next((y for _, y in children(holder) if id(y) == self._number and type(y) is self._kind), None)


class _Watched:
    """A mutable original and its copy. ``entries``: returns the items or attributes of either, by key."""

    def __init__(
        self, find: Find, twin: Any, path: str, entries: Callable[[Any], dict[Any, Any]], translated: Translated
    ) -> None:
        self._find, self._twin, self._path, self._entries, self._translated = find, twin, path, entries, translated
        self._then: dict[Any, Any] = {}

    def remember(self, twins: Mapping[int, Any]) -> None:
        """Record what the original refers to, without keeping objects alive that have a copy."""
        x = self._find()
        if x is not None:
            self._then = {key: _Number(id(y)) if id(y) in twins else y for key, y in self._entries(x).items()}

    def bring_over(self, twins: Mapping[int, Any]) -> None:
        """Make the copy refer to what the original refers to."""
        x = self._find()
        if x is None:
            return
        now, then = self._entries(x), self._then
        if len(now) == len(then) and all(map(_same, now.items(), then.items())):
            return
        changed = [key for key, y in now.items() if key not in then or not _same((key, y), (key, then[key]))]
        put = _put_attributes if self._entries is _attributes else _put_items
        wanted = changed if put is _put_attributes or isinstance(x, dict) else now
        try:
            put(self._twin, {key: self._translated(now[key]) for key in wanted}, [*then], [*now])
        except LookupError:
            what = f"attribute {changed[0]}" if put is _put_attributes else f"entry {changed[0]!r}"
            at = f"model.{self._path}"
            raise ValueError(
                f"parallelize: {what} of the object at {at} was set after parallelize to an object that refers to "
                f"modules of the original model, and {at} of the parallel model is a copy that refers to the parallel "
                "model's modules; set it there, referring to those"
            ) from None
        self.remember(twins)


def _put_items(twin: Any, changed: Mapping[Any, Any], before: list[Any], now: list[Any]) -> None:
    """``changed``: the changed items of a dict, all items of another container."""
    if isinstance(twin, dict):
        for key in [key for key in before if key not in now]:
            twin.pop(key, None)
        twin.update(changed)
        if [*twin] != now and len(twin) == len(now):  # in another order
            entries = {key: twin[key] for key in now}
            twin.clear()
            twin.update(entries)
        return
    twin.clear()
    (twin.update if isinstance(twin, set) else twin.extend)(changed.values())


def _put_attributes(twin: Any, changed: Mapping[Any, Any], before: list[Any], now: list[Any]) -> None:
    cells: dict[str, Any] = {}
    if isinstance(twin, types.FunctionType):
        cells = {f"<{name}>": cell for name, cell in zip(twin.__code__.co_freevars, twin.__closure__ or ())}
    for name in [name for name in before if name not in now]:
        delattr(twin, name)
    for name, value in changed.items():
        if name in cells:
            cells[name].cell_contents = value
        elif name == "__class__" or isinstance(getattr(type(twin), name, None), types.MemberDescriptorType):
            object.__setattr__(twin, name, value)
        else:
            vars(twin)[name] = value


class _Number(int):
    """The id of an object that has a copy, so that the object is not kept alive."""


def _same(now: tuple[Any, Any], then: tuple[Any, Any]) -> bool:
    (key, x), (key_then, y) = now, then
    if key is not key_then and key != key_then:
        return False
    return id(x) == y if type(y) is _Number else x is y


def _items(x: Any) -> dict[Any, Any]:
    return dict(x) if isinstance(x, dict) else dict(enumerate(x))


def _attributes(x: Any) -> dict[Any, Any]:
    """Attributes, and the closure variables of a function."""
    if isinstance(x, types.FunctionType):
        found = {name: y for name, y in children(x) if name[1:-1] in x.__code__.co_freevars}
        return {**found, **vars(x)}
    return {"__class__": type(x), **{label[1:]: y for label, y in children(x) if label.startswith(".")}}
