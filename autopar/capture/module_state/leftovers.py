"""Removes fake tensors that a captured forward has stored in Python objects outside of its modules.

    CACHE[n] = mask        a global dict; a global, a class attribute, a list, an attribute of an object, a closure
    @lru_cache ...         the cache of a function

A holder of a fake tensor is restored to its state before the capture. A tensor that depends on sizes alone can be
recomputed, so nothing is lost. A tensor that depends on inputs, parameters or mutable buffers would have to be updated
by every step, which compiled steps cannot do: it is refused, with the name of its holder.

Numbers and strings that a forward stores (memos) stay when a step is captured, as after a first forward in torch. A
capture for a plan runs before any forward: it removes them again.
"""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from autopar.adapters.function_caches import CACHED, kept_results, lookup_of
from autopar.adapters.fx.graph_nodes import node_of
from autopar.capture.reads.memos import is_data, memo_text

_FOREIGN = {"torch", "autopar", "numpy", "transformers", "builtins", *sys.stdlib_module_names} - {"__main__"}
_LARGE = 1000  # entries; larger containers are not copied
_DEEP = 4  # depth of nested holders to search
_MOST = 3000  # holders
SIMPLE = {bool, int, float, complex, str}
_CONTAINERS = (dict, list, set, deque)
_FUNCTIONS = (types.FunctionType, CACHED)
OF_SIZES = ("_like", "new_")  # in names of operators that use only the shape of their operand


@contextmanager
def nothing_left(trial: bool = False) -> Iterator[Leftovers]:
    """Context manager around a capture: removes its fake tensors from all holders afterwards, and with ``trial`` its
    memos, too. Raises ValueError for a fake tensor that must not be dropped."""
    left = Leftovers()
    try:
        yield left
    except BaseException:
        left.restore()
        left.take_back()
        list(left.emptied_caches())
        raise
    refused = left.restore()
    if trial:
        left.take_back()
    if refused := refused or left.clear():
        raise ValueError(f"capture: {refused}")


class Leftovers:
    """Holders of one capture: call ``watch(replica)`` before the export, `restore` and then `clear` after it."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}  # name -> text of possible memos, see `memos`
        self.taken_back = False  # whether `take_back` removed a memo
        self._held: list[tuple[Any, str, dict[Any, Any]]] = []
        self._made: list[weakref.ref[Tensor]] = []
        self._steady: set[int] = set()  # ids of tensors at the end that depend on sizes alone
        self._varying: _Varying | None = None
        self._replica: nn.Module | None = None

    def watch(self, replica: nn.Module, model: nn.Module) -> None:
        """Record the holders that the code of ``replica``, a copy of ``model``, can reach."""
        self._held = [(holder, name, _entries(holder)) for name, holder in _holders(replica, model)]
        self._replica, self._varying = replica, _Varying(replica)
        number = id(self)  # hooks must not refer to self: it would count as state of the module
        _CAPTURES[number] = self
        replica.register_forward_hook(lambda *_: _CAPTURES[number]._end())

    def note(self, made: Any) -> None:
        """Record the result of a torch function."""
        if isinstance(made, FakeTensor):
            self._made.append(weakref.ref(made))
        elif isinstance(made, (tuple, list)):
            for x in made:
                self.note(x)

    def _end(self) -> None:
        """After the forward: find which live tensors depend on sizes alone, and memos."""
        mode = get_proxy_mode()
        if mode is not None and self._varying is not None:
            alive = {id(x): node_of(x, mode.tracer) for ref in self._made if (x := ref()) is not None}
            self._steady = {i for i, node in alive.items() if node is None or not self._varying.is_behind(node)}
            self.kept.update(self._memos())

    def _memos(self) -> Iterator[tuple[str, str]]:
        """(name, text) of memos that every capture creates: fake tensors, and cached results for modules of the
        copy."""
        for holder, name, before, changed in self._changes():
            for key in (key for key in changed if before.get(key) is None):
                x, of_copy = _entries(holder).get(key), isinstance(holder, CACHED) and not is_data(key)
                kept = x if of_copy else _fake_in(x)
                if kept is not None and (text := memo_text(kept)) is not None:
                    yield name if of_copy else f"{name}{_label(holder, key)}", text

    def changed(self) -> list[str]:
        """Names of numbers and strings that the forward changed, without caches of functions."""
        changes = (change for change in self._changes() if not isinstance(change[0], CACHED))
        found = ((holder, name, key) for holder, name, _, keys in changes for key in keys)
        return [f"{name}{_label(holder, key)}" for holder, name, key in found if _is_simple(holder, key)]

    def _changes(self) -> Iterator[tuple[Any, str, dict[Any, Any], list[Any]]]:
        """(holder, its name, its old entries, changed keys) of holders with changes."""
        for holder, name, before in self._held:
            now = _entries(holder)
            keys = [key for key in now.keys() | before.keys() if now.get(key, _NONE) is not before.get(key, _NONE)]
            if keys:
                yield holder, name, before, keys

    def restore(self) -> str:
        """Restore recorded holders of fake tensors. Returns the error text if one must not be dropped, else ""."""
        refused = ""
        for holder, name, before, changed in self._changes():
            now = _entries(holder)
            fakes = {key: x for key in changed if (x := _fake_in(now.get(key))) is not None}
            if isinstance(holder, CACHED):  # `clear` handles all caches
                continue
            if not fakes:
                simple = [key for key in changed if type(now.get(key)) in SIMPLE and type(before.get(key)) in SIMPLE]
                if len(simple) == len(changed):
                    _put_back(holder, before, changed)
                continue
            for key, x in fakes.items():
                if not refused and id(x) not in self._steady:
                    refused = _refusal(f"{name}{_label(holder, key)}")
            _put_back(holder, before, changed)
        return refused

    def take_back(self) -> None:
        """Remove memos: numbers, strings and containers of these that the forward has stored."""
        for holder, _, before, changed in self._changes():
            now = _entries(holder)
            kept = {key for key in changed if is_data(now.get(key)) and is_data(before.get(key))}
            if kept:
                left = {key: (before if key in kept else now).get(key, _NONE) for key in (*before, *now)}
                _put_back(holder, {key: x for key, x in left.items() if x is not _NONE}, list(kept))
                self.taken_back = True

    def clear(self) -> str:
        """Remove fake tensors from caches of functions and from all other holders, after `restore` and when the copy of
        the model is gone. Returns as `restore`."""
        for module in list(self._replica.modules()) if self._replica is not None else ():
            module.__dict__.clear()  # its own attributes go with it
        if all(ref() is None for ref in self._made):
            return ""
        gc.collect(1)  # cycles that the export has left
        varying = {id(x) for ref in self._made if (x := ref()) is not None and id(x) not in self._steady}
        held = [f"the cache of {name}" for name, x in self.emptied_caches() if id(x) in varying]
        if left := [x for ref in self._made if (x := ref()) is not None]:
            held += _taken_out(left, varying)
        return _refusal(held[0]) if held else ""

    def emptied_caches(self) -> Iterator[tuple[str, Tensor]]:
        """Clear caches of functions that hold fake tensors. Yields their names, each with a fake tensor."""
        known = [x for _, _, held in self._held for x in held.values()]  # gc does not list frozen objects
        caches = {id(x): x for x in (*known, *gc.get_objects()) if type(x) is CACHED}
        for cache in caches.values():
            if not _is_foreign(cache.__module__ or "") and (x := _fake_in(gc.get_referents(cache))) is not None:
                cache.cache_clear()
                yield f"{cache.__module__}.{cache.__qualname__}", x


_CAPTURES: weakref.WeakValueDictionary[int, Leftovers] = weakref.WeakValueDictionary()
_NONE = object()


def _refusal(holder: str) -> str:
    return (
        f"the forward keeps a tensor that depends on its inputs or weights in {holder}, outside of its modules, which "
        "compiled steps do not update; return it as an output, or write it to a buffer"
    )


class _Varying:
    """Which values may differ between steps."""

    def __init__(self, replica: nn.Module) -> None:
        self._parameters = sum(1 for _ in replica.named_parameters(remove_duplicate=False))
        self._buffers = sum(1 for _ in replica.named_buffers(remove_duplicate=False))

    def is_behind(self, node: Node) -> bool:
        """Whether a node depends on values of an input, a parameter, or a mutable buffer."""
        places = {x: i for i, x in enumerate(n for n in node.graph.nodes if n.op == "placeholder")}
        seen, queue = {node}, [node]
        while queue:
            x = queue.pop()
            if x.op == "placeholder":
                buffer = self._parameters <= places[x] < self._parameters + self._buffers
                if not buffer or any(_writes(user, x) for user in x.users):
                    return True
            if any(part in str(x.target) for part in OF_SIZES):
                continue
            new = [y for y in x.all_input_nodes if y not in seen]
            seen.update(new)
            queue += new
        return False


def _writes(node: Node, x: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable and node.args[:1] == (x,)


# --- holders that can be found before the forward ---------------------------------------------------------------------


def _holders(replica: nn.Module, model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, holder) of objects that code of the modules reaches by name: Python modules, what the copy shares with the
    model, and holders within them."""
    classes = {cls for m in replica.modules() for cls in type(m).__mro__}
    own_functions = [x for m in replica.modules() for held in (m.__dict__, *_hooks(m)) for x in held.values()]
    found = [x for cls in classes for x in (cls, *vars(cls).values())] + own_functions
    homes = {x.__module__ for x in found if isinstance(x, (type, *_FUNCTIONS))}
    files = dict.fromkeys(file for name in sorted(map(str, homes)) if (file := sys.modules.get(name)) is not None)
    own = [file for file in files if not _is_foreign(file.__name__)]
    for file in list(own):
        for value in list(vars(file).values()):
            name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
            home = sys.modules.get(name) if isinstance(name, str) and not _is_foreign(name) else None
            if home is not None and home not in own:
                own.append(home)
    theirs = {id(x) for m in model.modules() for x in m.__dict__.values() if _holds(x)}
    queue: deque[tuple[str, Any, int]] = deque((file.__name__, file, 0) for file in own)
    queue.extend(
        (x.__qualname__, x, 0)
        for x in (*classes, *own_functions)
        if isinstance(x, (type, types.FunctionType)) and _holds(x)
    )
    for path, module in replica.named_modules():
        shared = ((name, x) for name, x in module.__dict__.items() if id(x) in theirs)
        queue.extend((f"{path}.{name}" if path else name, x, 1) for name, x in shared)
    seen: set[int] = set()
    while queue:
        name, holder, depth = queue.popleft()
        if id(holder) in seen or len(seen) > _MOST:
            continue
        seen.add(id(holder))
        yield name, holder
        if depth < _DEEP:
            for key, value in _entries(holder).items():
                if _holds(value):
                    queue.append((f"{name}{_label(holder, key)}", value, depth + 1))


def _hooks(module: nn.Module) -> Iterator[dict[Any, Any]]:
    return (x for name, x in module.__dict__.items() if "_hooks" in name and isinstance(x, dict))


def _is_foreign(module: str) -> bool:
    return module.partition(".")[0] in _FOREIGN


def _holds(x: Any) -> bool:
    """Whether an object may store a tensor."""
    if isinstance(x, _CONTAINERS):
        return len(x) <= _LARGE
    if isinstance(x, (types.ModuleType, nn.Module, Tensor)):
        return False
    if isinstance(x, type):
        return not _is_foreign(x.__module__)
    if isinstance(x, CACHED):
        return not _is_foreign(x.__module__ or "")
    if isinstance(x, types.FunctionType):
        return not _is_foreign(x.__module__ or "") and bool(
            x.__closure__ or x.__dict__ or any(map(_holds, x.__defaults__ or ()))
        )
    return isinstance(x, types.CellType) or (hasattr(x, "__dict__") and not _is_foreign(type(x).__module__))


def _entries(holder: Any) -> dict[Any, Any]:
    """The entries of a holder by key."""
    if isinstance(holder, dict):
        return dict(holder)
    if isinstance(holder, (list, deque)):
        return dict(enumerate(holder))
    if isinstance(holder, set):
        return {id(x): x for x in holder}
    if isinstance(holder, CACHED):
        return kept_results(holder)
    if isinstance(holder, types.CellType):
        try:
            return {"": holder.cell_contents}
        except ValueError:
            return {}
    found = dict(vars(holder))
    if isinstance(holder, type):
        return {name: x.__func__ if isinstance(x, (staticmethod, classmethod)) else x for name, x in found.items()}
    if isinstance(holder, types.FunctionType):
        cells = zip(holder.__code__.co_freevars, holder.__closure__ or ())
        found |= {_Variable(name): cell for name, cell in cells}
        found |= {_Default(i): x for i, x in enumerate(holder.__defaults__ or ())}
    return found


class _Variable(str):
    """Key of a closure variable: its name."""


class _Default(int):
    """Key of a default argument: its index."""


def _label(holder: Any, key: Any) -> str:
    if isinstance(holder, types.CellType):
        return ""
    if isinstance(key, _Variable):
        return f".<{key}>"
    return f"[{key!r}]" if isinstance(holder, _CONTAINERS) else f".{key}"


def _fake_in(x: Any, depth: int = _DEEP) -> Tensor | None:
    """A fake tensor within a value, or None."""
    if isinstance(x, FakeTensor):
        return x
    if depth and isinstance(x, (tuple, frozenset, *_CONTAINERS)):
        held = x.values() if isinstance(x, dict) else x
        return next((found for y in list(held) if (found := _fake_in(y, depth - 1)) is not None), None)
    return None


def _put_back(holder: Any, before: dict[Any, Any], changed: list[Any]) -> None:
    if isinstance(holder, dict):
        holder.clear()
        holder.update(before)
    elif isinstance(holder, list):
        holder[:] = before.values()
    elif isinstance(holder, (set, deque)):
        holder.clear()
        (holder.update if isinstance(holder, set) else holder.extend)(before.values())
    elif isinstance(holder, CACHED):
        for key in changed:
            if key not in before:  # an entry that is gone will be recomputed
                lookup_of(holder).pop(key, None)
    elif isinstance(holder, types.CellType):
        if before:
            holder.cell_contents = before[""]
        else:
            del holder.cell_contents
    else:
        for key in changed:
            if key in before:
                setattr(holder, key, before[key])
            else:
                delattr(holder, key)


# --- all other holders --------------------------------------------------------------------------


def _taken_out(alive: list[Tensor], varying: set[int]) -> Iterator[str]:
    """Remove fake tensors from containers in attributes of objects. Yields the names of attributes that hold one
    themselves, whose old value is unknown, and of containers that hold one of ``varying``."""
    for holder in gc.get_referrers(*alive):
        if holder is alive or type(holder) not in _CONTAINERS:
            continue
        fakes = {key: x for key, x in _entries(holder).items() if issubclass(type(x), FakeTensor)}
        above = gc.get_referrers(holder)
        if (owner := _owner(holder, above)) is not None:
            yield from (f"{type(owner).__name__}.{key}" for key in fakes)
            continue
        attributes = [x for x in above if type(x) is dict and any(value is holder for value in x.values())]
        for found in attributes:
            if (owner := _owner(found, gc.get_referrers(found))) is not None:
                if not varying.isdisjoint(map(id, fakes.values())):
                    yield f"{type(owner).__name__}.{next(key for key, value in found.items() if value is holder)}"
                left = {key: x for key, x in _entries(holder).items() if key not in fakes}
                _put_back(holder, left, [])


def _owner(attributes: Any, referrers: list[Any]) -> Any:
    """The object with this ``__dict__``, if it is the user's."""
    users = (x for x in referrers if not _is_foreign(type(x).__module__) and not isinstance(x, nn.Module))
    return next((x for x in users if getattr(x, "__dict__", None) is attributes), None)


def _is_simple(holder: Any, key: Any) -> bool:
    return type(_entries(holder).get(key)) in SIMPLE
