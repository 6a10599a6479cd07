"""Do Python values hold what they held? A watch compares within C: attributes and entries by identity.

    watch.attributes(vars(config), ["gain"], where)       each value that the forward may read is a guard
    watch.container([1.0, 2.0], where)
    watch.holds()                                          about 40 ns per dict, and per other guard

CPython counts the writes to a dict: what is in one is looked at only where it was written to. From Python 3.12 on torch
counts them, and is not told of all: of writes to the attributes of an object that has no more than 30, and of an update
of a dict that is empty. There small dicts are looked at each time.

What is another object now is compared by content: a number by type and bits, a container by its entries (1 is not True,
0.0 is not -0.0). An object of which nothing is known is equal to itself alone.
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
    """Where a value stands, in words: path "CFG.gain", place "mymodel.py"."""

    path: str
    place: str
    kind: str = ""
    own: bool = True  # whether the user's code, not a library's, put it there

    def attribute(self, name: str) -> Where:
        """An attribute of what stands here."""
        return self._replace(path=f"{self.path}.{name}" if self.path else name)

    def entry(self, key: Any) -> Where:
        """An entry of the container that stands here."""
        return self._replace(path=f"{self.path}[{key!r}]")

    def __str__(self) -> str:
        return f"{self.kind}{self.path} of {self.place}"


@dataclass(slots=True)
class _Guarded:
    """Values that are read together. ``read``: of the holder, in one order; ``names``: of each, where they have some;
    ``keys``: of a holder that may grow, those that it had; ``new``: which others matter (None: all); ``equal``: values
    without an identity, such as bytes; ``within``: the dict that all of it is in."""

    read: Callable[[Any], Iterable[Any]]
    holder: Any
    then: list[Any]
    where: Where
    names: Sequence[Any] | None = None
    keys: frozenset[Any] | None = None
    new: Set[str] | None = frozenset()
    equal: bool = False
    within: dict[Any, Any] | None = None
    writes: int = 0  # to it, when ``then`` was noted

    def note(self) -> None:
        """What is there now counts."""
        self.writes = dict_version(self.within) if self.within is not None else 0
        self.then = list(self.read(self.holder))

    @property
    def is_counted(self) -> bool:
        """Whether the writes to all of it are."""
        return self.within is not None and len(self.within) > _SMALL

    def word(self, i: int) -> Where:
        if self.names is None:
            return self.where.entry(i) if isinstance(self.holder, (list, deque)) else self.where
        name = self.names[i] if i < len(self.names) else None
        if name is None:
            return self.where
        return self.where.entry(name.key) if isinstance(name, _Key) else self.where.attribute(name)


class ReadGuards:
    """Empty at first; compares from `done` on."""

    def __init__(self) -> None:
        self.replaced = False  # whether a container is another one, with equal entries: guards are of the old one
        self._places: list[_Guarded] = []
        self._tensors: list[Tensor] = []
        self._tensors_at: list[Where] = []
        self._contents: dict[int, _Guarded] = {}  # of containers, by their ids

    # --- what is compared -----------------------------------------------------------------------------------

    def attributes(self, holder: Any, names: Sequence[str], where: Where, new: Set[str] | None = frozenset()) -> None:
        """Entries of a namespace (a dict, a class's variables). ``new``: names that matter if they come to it; None:
        all."""
        if names or new is None or new:
            read = operator.itemgetter(*names, names[0]) if names else _nothing
            keys = frozenset(holder) if new is None or new else None
            within = gc.get_referents(holder)[0] if isinstance(holder, types.MappingProxyType) else holder
            self._add(_Guarded(read, holder, [], where, [*names, *names[:1]], keys, new, within=within))

    def slots(self, holder: Any, names: Sequence[str], where: Where) -> None:
        """Attributes that are in no dict."""
        self._add(_Guarded(operator.attrgetter(*names, names[0]), holder, [], where, [*names, names[0]]))

    def container(self, x: Any, where: Where) -> None:
        """The entries of a list, dict, set or deque, in their order."""
        if isinstance(x, dict):
            keys, values = views_of(x)
            within = None if isinstance(x, OrderedDict) else x  # another order is no write
            self._add(_Guarded(iter, keys, [], where, within=within))
            names = list(map(_Key, keys))
            self._contents[id(x)] = self._add(_Guarded(iter, values, [], where, names, within=within))
        else:
            self._contents[id(x)] = self._add(_Guarded(iter, x, [], where))

    def kept(self, table: dict[Any, Any], where: Where) -> None:
        """Results that a cache has by now, and whether it has some; others may come to it."""
        keys = list(table)
        self._add(_Guarded(lambda now: (bool(now), *map(now.get, keys)), table, [], where, within=table))

    def contents(self, x: Any, where: Where) -> None:
        """Bytes of an array, or of another object that shows its memory."""
        self._contents[id(x)] = self._add(_Guarded(shown_bytes, x, [], where, equal=True))

    def value(self, read: Callable[[Any], Iterable[Any]], holder: Any, where: Where, equal: bool = False) -> None:
        """Whatever ``read`` tells of an object. ``equal``: in values that are made anew each time."""
        self._add(_Guarded(read, holder, [], where, equal=equal))

    def tensor(self, x: Tensor, where: Where) -> None:
        """That nobody writes to it."""
        if not x.is_inference():  # such a one counts no writes
            self._tensors.append(x)
            self._tensors_at.append(where)

    def _add(self, place: _Guarded) -> _Guarded:
        place.note()
        self._places.append(place)
        return place

    def done(self) -> None:
        """All is added: from now on it is compared."""
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
        return [list(map(fact, self._tensors)) for fact in _TENSOR_FACTS]

    @property
    def count(self) -> int:
        """Of guards."""
        return sum(len(p.then) for p in self._places) + len(self._tensors)

    @property
    def tensors(self) -> Sequence[Tensor]:
        """That are compared by whether somebody has written to them."""
        return self._tensors

    def values(self) -> Iterator[tuple[Where, Any]]:
        """What is compared, as it was when it was noted, and where it stood."""
        return ((place.word(i), value) for place in self._places for i, value in enumerate(place.then))

    # --- comparing ------------------------------------------------------------------------------------------

    def holds(self) -> bool:
        """Whether nothing is another. Raises whatever reading something that is gone raises."""
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
        """Whether the dicts that somebody has written to have what they had where it is read."""
        now = list(map(dict_version, self._dicts))
        if now == self._writes:
            return True
        for place, version, then in zip(self._in_dicts, now, self._writes):
            if version != then and (not _is_same(place.read(place.holder), place.then) or self._grown(place)):
                return False
        self._writes = now
        return True

    def _holds_by_content(self) -> bool:
        """As `holds`; what is equal and another object is taken for the one that was there."""
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
        """Names that are new in a holder and may be read."""
        if place.keys is None:
            return set()
        new = {*place.holder} - place.keys
        return new if place.new is None else new & place.new

    def _alike(self, now: Any, then: Any) -> bool:
        """Whether a value is what another one was when it was noted."""
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
        """What does not hold."""
        versions = zip(self._tensors_at, zip(*self._versions_now()), zip(*self._versions))
        found = [where for where, now, then in versions if now != then]
        for place in self._places:
            try:
                values = list(place.read(place.holder))
            except Exception:  # what is gone
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
    """The key of an entry of a dict, in the place of a name."""

    __slots__ = ("key",)

    def __init__(self, key: Any) -> None:
        self.key = key


def views_of(x: dict[Any, Any]) -> tuple[KeysView[Any], ValuesView[Any]]:
    """Keys and values of a dict, as they are at any time, in its order, whatever its class makes of them."""
    return (
        (OrderedDict.keys(x), OrderedDict.values(x)) if isinstance(x, OrderedDict) else (dict.keys(x), dict.values(x))
    )


def vars_of(x: Any) -> Mapping[str, Any]:
    """Attributes of an object that has some in a dict."""
    found = getattr(x, "__dict__", None)
    return found if isinstance(found, dict) else {}


def shown_bytes(x: Any) -> tuple[Any, ...]:
    """What an array or another object that shows its memory holds."""
    view = memoryview(x)
    return view.format, view.shape, view.tobytes()


def shows_memory(x: Any) -> bool:
    """Whether an object has contents that `shown_bytes` tells."""
    if isinstance(x, numpy.ndarray):
        return not x.dtype.hasobject
    if isinstance(x, (type, str, bytes, Tensor)):
        return False
    with contextlib.suppress(Exception):  # of many kinds
        return bool(memoryview(x).nbytes >= 0)
    return False


def _nothing(_: Any) -> tuple[()]:
    return ()


def _is_same(now: Iterable[Any], then: Sequence[Any]) -> bool:
    """Whether these are the very objects."""
    now = list(now)
    return len(now) == len(then) and all(map(operator.is_, now, then))


CONTAINERS = (list, dict, set, deque)


def _storage(x: Tensor) -> int:
    return storage_of(x) if x.layout == torch.strided else 0


_TENSOR_FACTS: tuple[Callable[[Any], Any], ...] = (version_of, _storage, operator.attrgetter("requires_grad", "dtype"))
