"""Guards on Python values, compared by identity in C code.

    guards.attributes(vars(config), ["gain"], where)       one guard for each value that the forward may read
    guards.container([1.0, 2.0], where)
    guards.holds()                                         about 40 ns per dict, and per other guard

CPython has versions of dicts, so a dict is checked only after a write. From Python 3.12 on torch counts the writes, but
misses those to attributes of an object with at most 30, and updates of an empty dict; there small dicts are always
checked.

A value that is another object now is compared by content: a number by type and bits, a container by its entries (1 is
not True, 0.0 is not -0.0). Other objects are compared by identity.
"""

from __future__ import annotations

import contextlib
import gc
import operator
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence, Set, ValuesView
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch._C._dynamo.guards import dict_version

from autopar.adapters.autograd import version_of
from autopar.adapters.dtensor import storage_of
from autopar.adapters.keys import told_apart

_SMALL = 30 if sys.version_info >= (3, 12) else -1  # entries of a dict whose writes may not be counted
_ATOMS = (bool, int, float, complex, str, bytes, type(None))


class Where(NamedTuple):
    """The position of a value, for messages: path "CFG.gain", place "mymodel.py"."""

    path: str
    place: str
    kind: str = ""
    own: bool = True  # whether it is in the user's code, not a library

    def attribute(self, name: str) -> Where:
        """The position of an attribute of this value."""
        return self._replace(path=f"{self.path}.{name}" if self.path else name)

    def entry(self, key: Any) -> Where:
        """The position of an entry of this container."""
        return self._replace(path=f"{self.path}[{key!r}]")

    def __str__(self) -> str:
        return f"{self.kind}{self.path} of {self.place}"


@dataclass(slots=True)
class _Guarded:
    """Values that are read together. read: function of the holder that returns them in a fixed order; then: the values
    when the guard was set; names: of the values; keys: of a holder that may grow, when the guard was set; new: added
    names that matter (None: all); equal: compare values by equality, such as bytes; within: the dict that contains
    them."""

    read: Callable[[Any], Iterable[Any]]
    holder: Any
    then: list[Any]
    where: Where
    names: Sequence[Any] | None = None
    keys: frozenset[Any] | None = None
    new: Set[str] | None = frozenset()
    equal: bool = False
    within: dict[Any, Any] | None = None
    writes: int = 0  # version of ``within`` when ``then`` was recorded

    def note(self) -> None:
        """Record the current values."""
        self.writes = dict_version(self.within) if self.within is not None else 0
        self.then = list(self.read(self.holder))

    @property
    def is_counted(self) -> bool:
        """Whether dict versions show all writes to it."""
        return self.within is not None and len(self.within) > _SMALL

    def word(self, i: int) -> Where:
        if self.names is None:
            return self.where.entry(i) if isinstance(self.holder, (list, deque)) else self.where
        name = self.names[i] if i < len(self.names) else None
        if name is None:
            return self.where
        return self.where.entry(name.key) if isinstance(name, _Key) else self.where.attribute(name)


class ReadGuards:
    """A set of guards: add values, call `done`, then compare with `holds`."""

    def __init__(self) -> None:
        self.replaced = False  # whether a container was replaced by an equal one, so that guards refer to the old one
        self._places: list[_Guarded] = []
        self._tensors: list[Tensor] = []
        self._tensors_at: list[Where] = []
        self._contents: dict[int, _Guarded] = {}  # id of a container -> guard of its contents

    # --- adding guards -----------------------------------------------------------------------------------

    def attributes(self, holder: Any, names: Sequence[str], where: Where, new: Set[str] | None = frozenset()) -> None:
        """Guard entries of a namespace (a dict, or variables of a class). ``new``: names that matter if they are added;
        None: all."""
        if names or new is None or new:
            read = operator.itemgetter(*names, names[0]) if names else _nothing
            keys = frozenset(holder) if new is None or new else None
            within = gc.get_referents(holder)[0] if isinstance(holder, types.MappingProxyType) else holder
            self._add(_Guarded(read, holder, [], where, [*names, *names[:1]], keys, new, within=within))

    def slots(self, holder: Any, names: Sequence[str], where: Where) -> None:
        """Guard attributes that are not in a dict."""
        self._add(_Guarded(operator.attrgetter(*names, names[0]), holder, [], where, [*names, names[0]]))

    def container(self, x: Any, where: Where) -> None:
        """Guard the entries of a list, dict, set or deque, and their order."""
        if isinstance(x, dict):
            keys, values = views_of(x)
            within = None if isinstance(x, OrderedDict) else x  # reordering does not change its version
            self._add(_Guarded(iter, keys, [], where, within=within))
            names = list(map(_Key, keys))
            self._contents[id(x)] = self._add(_Guarded(iter, values, [], where, names, within=within))
        else:
            self._contents[id(x)] = self._add(_Guarded(iter, x, [], where))

    def kept(self, table: dict[Any, Any], where: Where) -> None:
        """Guard the current results of a cache, and whether it is empty; results may be added."""
        keys = list(table)
        self._add(_Guarded(lambda now: (bool(now), *map(now.get, keys)), table, [], where, within=table))

    def contents(self, x: Any, where: Where) -> None:
        """Guard the bytes of an array, or of another object with the buffer protocol."""
        self._contents[id(x)] = self._add(_Guarded(shown_bytes, x, [], where, equal=True))

    def value(self, read: Callable[[Any], Iterable[Any]], holder: Any, where: Where, equal: bool = False) -> None:
        """Guard the values that ``read`` returns for an object. ``equal``: compare by equality, since they are created
        anew."""
        self._add(_Guarded(read, holder, [], where, equal=equal))

    def tensor(self, x: Tensor, where: Where) -> None:
        """Guard a tensor against writes."""
        if not x.is_inference():  # inference tensors have no version counter
            self._tensors.append(x)
            self._tensors_at.append(where)

    def _add(self, place: _Guarded) -> _Guarded:
        place.note()
        self._places.append(place)
        return place

    def done(self) -> None:
        """Finish adding, and prepare the comparison."""
        self._in_dicts = [p for p in self._places if p.is_counted]
        self._dicts = [p.within for p in self._in_dicts if p.within is not None]
        self._writes = [p.writes for p in self._in_dicts]
        left = [p for p in self._places if not p.is_counted]
        self._names = [p.holder.keys() for p in left if p.keys is not None]
        self._names_then = [p.keys for p in left if p.keys is not None]
        entries, equal = [p for p in left if p.read is iter], [p for p in left if p.equal]
        read = [p for p in left if p.read is not iter and not p.equal]
        self._entries, self._sizes = [p.holder for p in entries], [len(p.then) for p in entries]
        self._getters, self._holders = [p.read for p in read], [p.holder for p in read]
        self._then = list(chain.from_iterable(p.then for p in (*entries, *read)))
        self._equal_getters, self._equal_holders = [p.read for p in equal], [p.holder for p in equal]
        self._equal = [tuple(p.then) for p in equal]
        self._versions = self._versions_now()

    def _versions_now(self) -> list[Any]:
        return [list(map(read, self._tensors)) for read in _TENSOR_STATE]

    @property
    def count(self) -> int:
        """Number of guards."""
        return sum(len(p.then) for p in self._places) + len(self._tensors)

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Tensors that are guarded against writes."""
        return self._tensors

    def values(self) -> Iterator[tuple[Where, Any]]:
        """(position, value when the guard was set) of all guarded values."""
        return ((place.word(i), value) for place in self._places for i, value in enumerate(place.then))

    # --- comparing ------------------------------------------------------------------------------------------

    def holds(self) -> bool:
        """Whether all guards hold. Reading a value that is gone may raise anything."""
        if self._tensors and self._versions_now() != self._versions:
            return False
        if (
            self._same_dicts()
            and all(map(operator.eq, self._names, self._names_then))
            and list(map(len, self._entries)) == self._sizes
            and list(map(operator.call, self._equal_getters, self._equal_holders)) == self._equal
            and all(
                map(
                    operator.is_,
                    chain(
                        chain.from_iterable(self._entries),
                        chain.from_iterable(map(operator.call, self._getters, self._holders)),
                    ),
                    self._then,
                )
            )
        ):
            return True
        return self._holds_by_content()

    def _same_dicts(self) -> bool:
        """Whether dicts with new versions still have the guarded entries."""
        now = list(map(dict_version, self._dicts))
        if now == self._writes:
            return True
        for place, version, then in zip(self._in_dicts, now, self._writes):
            if version != then and (not _is_same(place.read(place.holder), place.then) or self._grown(place)):
                return False
        self._writes = now
        return True

    def _holds_by_content(self) -> bool:
        """As `holds`, but accept equal objects in place of the old ones, and guard those from now on."""
        self.replaced = False
        if not all(map(self._is_alike, self._places)):
            return False
        for place in self._places:
            place.note()
            place.keys = None if place.keys is None else frozenset(place.holder)
        self.done()
        return True

    def _is_alike(self, place: _Guarded) -> bool:
        now = list(place.read(place.holder))
        return len(now) == len(place.then) and all(map(self._alike, now, place.then)) and not self._grown(place)

    def _grown(self, place: _Guarded) -> set[Any]:
        """Names that were added to a holder and matter."""
        if place.keys is None:
            return set()
        new = {*place.holder} - place.keys
        return new if place.new is None else new & place.new

    def _alike(self, now: Any, then: Any) -> bool:
        """Whether a value equals another one as it was when the guard was set."""
        if now is then:
            return True
        if type(now) is not type(then):
            return False
        if isinstance(now, _ATOMS):
            return bool(told_apart(now) == told_apart(then))
        if isinstance(now, numpy.generic):
            return bool(now.tobytes() == then.tobytes())
        if isinstance(now, (tuple, frozenset)) and not isinstance(now, torch.Size):
            return len(now) == len(then) and all(map(self._alike, now, then))
        if isinstance(now, torch.Size):
            return bool(now == then)
        known = self._contents.get(id(then))
        if known is None or vars_of(now) or vars_of(then):
            return False
        self.replaced = True
        if known.equal:
            return list(shown_bytes(now)) == known.then
        entries = list(views_of(now)[1]) if isinstance(now, dict) else list(now)
        if isinstance(now, dict) and list(views_of(now)[0]) != [entry.key for entry in known.names or ()]:
            return False
        if isinstance(now, set):
            return bool({*map(told_apart, now)} == {*map(told_apart, known.then)})
        return len(entries) == len(known.then) and all(map(self._alike, entries, known.then))

    def changed(self) -> list[Where]:
        """Positions of guards that do not hold."""
        versions = zip(self._tensors_at, zip(*self._versions_now()), zip(*self._versions))
        found = [where for where, now, then in versions if now != then]
        for place in self._places:
            try:
                values = list(place.read(place.holder))
            except Exception:  # a value that is gone
                found.append(place.word(self._missing(place)))
                continue
            if len(values) != len(place.then):
                found.append(place.where)
                continue
            found += [place.word(i) for i, pair in enumerate(zip(values, place.then)) if not self._known_alike(*pair)]
            found += [place.where.attribute(str(name)) for name in self._grown(place)]
        return list(dict.fromkeys(found))

    def _known_alike(self, now: Any, then: Any) -> bool:
        with contextlib.suppress(Exception):
            return self._alike(now, then)
        return False

    def _missing(self, place: _Guarded) -> int:
        names, holder = place.names or (), place.holder
        gone = (i for i, name in enumerate(names) if not (name in holder if place.keys else hasattr(holder, name)))
        with contextlib.suppress(TypeError):
            return next(gone, len(names))
        return len(names)


class _Key:
    """The key of a dict entry, used as a name."""

    __slots__ = ("key",)

    def __init__(self, key: Any) -> None:
        self.key = key


def views_of(x: dict[Any, Any]) -> tuple[KeysView[Any], ValuesView[Any]]:
    """Live views of keys and values of a dict, whatever its subclass overrides."""
    return (
        (OrderedDict.keys(x), OrderedDict.values(x)) if isinstance(x, OrderedDict) else (dict.keys(x), dict.values(x))
    )


def vars_of(x: Any) -> Mapping[str, Any]:
    """The ``__dict__`` of an object, or {}."""
    found = getattr(x, "__dict__", None)
    return found if isinstance(found, dict) else {}


def shown_bytes(x: Any) -> tuple[Any, ...]:
    """Format, shape and bytes of an object with the buffer protocol."""
    view = memoryview(x)
    return view.format, view.shape, view.tobytes()


def shows_memory(x: Any) -> bool:
    """Whether `shown_bytes` can read an object."""
    if isinstance(x, numpy.ndarray):
        return not x.dtype.hasobject
    if isinstance(x, (type, str, bytes, Tensor)):
        return False
    with contextlib.suppress(Exception):  # of many types
        return bool(memoryview(x).nbytes >= 0)
    return False


def _nothing(_: Any) -> tuple[()]:
    return ()


def _is_same(now: Iterable[Any], then: Sequence[Any]) -> bool:
    """Whether these are the same objects."""
    now = list(now)
    return len(now) == len(then) and all(map(operator.is_, now, then))


CONTAINERS = (list, dict, set, deque)


def _storage(x: Tensor) -> int:
    return storage_of(x) if x.layout == torch.strided else 0


_TENSOR_STATE: tuple[Callable[[Any], Any], ...] = (version_of, _storage, operator.attrgetter("requires_grad", "dtype"))
