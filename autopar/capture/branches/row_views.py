"""Shapes of rows that a mask selects, x[mask], in a graph that keeps all rows.

    count = x[mask].shape[0]                          a tensor; where it is a size, the number of all rows is used
    x[mask].view(count, -1), .flatten(0, 1)           views of all rows; where rows are merged with what is in them, the
                                                      mask has an entry for each part
    zeros(count, n), latents.expand(count, -1, -1)    rows, too
    x[mask].split(mask.view(b, n).sum(1).tolist())    n rows for each of b groups; a mask selects those of a piece
    cat([x[mask], y[other], z])                       rows of the joined masks; pieces in order are the whole again
    x[mask][3], x[mask][index]                        the rows with these numbers among the selected ones, with a check

A mask of rows is described by `_Part`: a part of the entries of another mask, each repeated. Any other shape has a
data-dependent size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.capture.branches import rowwise_ops as known

_TENSOR: Any = Tensor
_MOST = 2**62
_VIEWS = (_TENSOR.view, _TENSOR.reshape, torch.reshape)
_FLATTENS = (_TENSOR.flatten, torch.flatten)
_UNFLATTENS = (_TENSOR.unflatten, torch.unflatten)
_EXPANDS = (_TENSOR.expand, torch.broadcast_to, _TENSOR.broadcast_to)
_REPEATS = (_TENSOR.repeat, torch.tile, _TENSOR.tile)
_LIKE = {_TENSOR.view_as: _TENSOR.view, _TENSOR.reshape_as: _TENSOR.reshape, _TENSOR.expand_as: _TENSOR.expand}
_SPLITS = (_TENSOR.split, torch.split, _TENSOR.split_with_sizes, torch.split_with_sizes)
_JOINS = (torch.cat, torch.concat, torch.concatenate)
_SAME_COUNTS = frozenset({"to", "cpu", "cuda", "long", "int", "clone", "detach", "flatten", "contiguous"})
_SELECTS = (torch.index_select, _TENSOR.index_select)
_COMPARES = {"eq": True, "le": True, "ge": True, "ne": False, "lt": False, "gt": False}


class Sizes(tuple[Any, ...]):
    """The shape of rows: like torch.Size, with a tensor for the number of rows."""

    def numel(self) -> Any:
        """The product of all sizes."""
        return math.prod(self[1:]) * self[0] if self else 1


@dataclass(frozen=True, eq=False)
class _Part:
    """Entries start .. stop of a flattened mask, each ``times`` in a row."""

    root: Tensor
    times: int
    start: int
    stop: int

    def whole(self) -> bool:
        return (self.start, self.stop) == (0, self.root.shape[0])

    def key(self) -> tuple[int, ...]:
        """Equal for equal parts."""
        return id(self.root), self.times, self.start, self.stop

    def repeated(self, times: int) -> _Part:
        return replace(self, times=self.times * times)


@dataclass(frozen=True)
class _Groups:
    """How many entries of a mask [groups, size] are true in each group, ``times`` some number."""

    mask: Tensor
    version: int
    times: int


class RowViews:
    """In one traced forward. ``rows``: its `MaskIndexing`."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows
        self._parts: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # mask of rows -> its part
        self._made: dict[Any, Tensor] = {}  # part -> its mask
        self._sizes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # number of rows -> the part of a mask
        self._numbers: dict[Any, Tensor] = {}  # key of a part -> the number
        self._groups: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # numbers of rows in groups -> what they are
        self._cut: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # piece of rows -> (rows, its place there)
        self._whole_views: dict[Any, Any] = {}  # (number of rows, shape) -> their view

    # --- numbers of rows ----------------------------------------------------------------------------------

    def number(self, flat: Tensor, times: int = 1) -> Tensor:
        """The number of rows of a mask, times another, which stands for a Python number: the same tensor each time."""
        part = self._part(flat).repeated(times)
        if part.key() not in self._numbers:
            with self._rows.looked_at(rows=False):
                made = flat.sum()
                self._numbers[part.key()] = self._note_size(made * times if times > 1 else made, part)
        return self._numbers[part.key()]

    def _note_size(self, number: Tensor, part: _Part) -> Tensor:
        self._sizes[number] = part
        self._rows.note_number(number, part.root)
        return number

    def mask_counted(self, number: Any) -> Tensor | None:
        """The mask whose rows a number counts."""
        if isinstance(number, Tensor) and number in self._sizes:
            return self._mask(self._sizes[number])
        return None

    def note(self, function: Any, args: tuple[Any, ...], kwargs: Any, made: Any) -> None:
        """Record numbers of true entries in groups: mask.view(groups, size).sum(1)."""
        x, name = (args[0] if args else None), known.plain_name(function)
        if not isinstance(x, Tensor) or not isinstance(made, Tensor):
            return
        if name in ("sum", "count_nonzero") and x.dtype == torch.bool and x.dim() > 1 and made.dim() == 1:
            dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
            over = {d % x.dim() for d in ((dims,) if isinstance(dims, int) else dims or ())}
            if over == {*range(1, x.dim())}:
                self._groups[made] = _Groups(x, x._version, 1)
        elif x in self._groups and name == "mul" and len(args) == 2 and type(args[1]) is int and args[1] > 0:
            before = self._groups[x]
            self._groups[made] = _Groups(before.mask, before.version, before.times * args[1])
        elif x in self._groups and name in _SAME_COUNTS:
            self._groups[made] = self._groups[x]

    # --- calls --------------------------------------------------------------------------------------------

    def called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """(result of a call that changes the shape of rows, ); () for any other call."""
        grouped = self._groups and args and isinstance(args[0], Tensor) and args[0] in self._groups
        if grouped and (found := self._counts(function, args)):
            return found
        if self._sizes and (found := self._computed(function, args, kwargs)):
            return found
        if function in _JOINS:
            return self._joined(args, kwargs)
        x: Any = args[0] if args else kwargs.get("input")
        if function in (*_EXPANDS, *_REPEATS) and isinstance(x, Tensor) and not self._rows.are_rows(x):
            return self._spread(function, x, _sizes(args[1:], kwargs))
        if function is torch.arange and self._sizes and len(args) == 1 and not isinstance(args[0], int):
            return self._counted_up(args[0], kwargs)
        if not self._rows.are_rows(x):
            return ()
        return self._of_rows(function, x, args[1:], kwargs)

    def _of_rows(self, function: Any, x: Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        if function in _LIKE and len(rest) == 1 and self._rows.are_rows(rest[0]):
            like: Tensor = rest[0]
            function, rest = _LIKE[function], (self.number(self._rows.mask_of(like)), *like.shape[1:])
        if function in _VIEWS:
            return self._viewed(x, _sizes(rest, kwargs))
        if function in _FLATTENS:
            given = dict(zip(("start_dim", "end_dim"), rest, strict=False)) | kwargs
            start, end = given.get("start_dim", 0) % x.dim(), given.get("end_dim", -1) % x.dim()
            return () if start else self._viewed(x, (-1, *x.shape[end + 1 :]))
        if function in _UNFLATTENS and len(rest) == 2 and rest[0] % x.dim() == 0:
            return self._viewed(x, (*rest[1], *x.shape[1:]))
        if function in _EXPANDS:
            return self._expanded(x, _sizes(rest, kwargs))
        if function in _SPLITS:
            return self._split(x, rest, kwargs)
        return self._indexed(function, x, rest, kwargs)

    def _computed(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Arithmetic with numbers of rows alone: as Python's, so that count += 1 changes no other number and 1 / count
        has all digits."""
        found = [x for x in args if isinstance(x, Tensor)]
        if not found or kwargs or not all(self._rows.is_number(x) for x in found):
            return ()
        if function is _TENSOR.item:
            return (args[0],)
        function = known.IN_PLACE.get(function, function)
        name = known.plain_name(function)
        if len(found) == 2 and all(x in self._sizes for x in found):
            same = self._sizes[found[0]].key() == self._sizes[found[1]].key()
            if same and name in ("maximum", "minimum"):  # of Python, while torch.export traces
                return (found[0],)
            if same and name in _COMPARES:
                return (_COMPARES[name],)
        if name not in known.ARITHMETIC:
            return ()
        whole = all(type(x) is int or (isinstance(x, Tensor) and not x.is_floating_point()) for x in args)
        with self._rows.looked_at(rows=False):
            if not whole or name in known.WITH_POLES:
                args = tuple(x.to(torch.float64) if isinstance(x, Tensor) else x for x in args)
            made = function(*args)
        self._rows.note_python(made)
        others = [x for x in args if type(x) is int]
        if name == "mul" and others and others[0] > 0 and found[0] in self._sizes:
            self._note_size(made, self._sizes[found[0]].repeated(others[0]))
        return (made,)

    # --- masks --------------------------------------------------------------------------------------------

    def _part(self, flat: Tensor) -> _Part:
        found: _Part = self._parts.get(flat) or _Part(flat, 1, 0, flat.shape[0])
        return found

    def _mask(self, part: _Part) -> Tensor:
        """The mask of a part: the same tensor for equal ones."""
        if part.times == 1 and part.whole():
            return part.root
        key = part.key()
        if key not in self._made:
            with self._rows.looked_at(rows=False):
                made = part.root if part.whole() else part.root[part.start : part.stop]
                if part.times > 1:
                    made = made.unsqueeze(1).expand(-1, part.times).reshape(-1)
            self._made[key] = self._rows.note_flat(made, (made.shape[0],))
            self._parts[made] = part
        return self._made[key]

    def _kept(self, made: Tensor, flat: Tensor) -> tuple[Tensor]:
        self._rows.keep(made, flat)
        return (made,)

    # --- views --------------------------------------------------------------------------------------------

    def _viewed(self, x: Tensor, shape: Sequence[Any]) -> tuple[Any, ...]:
        """view, with the number of rows, times some number, as its first size, or -1"""
        part, rest = self._part(self._rows.mask_of(x)), list(shape[1:])
        entries = math.prod(x.shape[1:]) * part.times  # for each entry of the mask
        if not shape or any(isinstance(n, Tensor) for n in rest) or not entries:
            return ()
        if isinstance(shape[0], Tensor):
            other = self._part(flat) if (flat := self._rows.counted(shape[0])) is not None else None
            if other is None or (other.root, other.start, other.stop) != (part.root, part.start, part.stop):
                return ()
            times = other.times
            if rest.count(-1) == 1 and (left := -math.prod(rest)) and not entries % (left * times):
                rest[rest.index(-1)] = entries // times // left
        elif type(shape[0]) is not int or shape[0] != -1 or -1 in rest or not math.prod(rest):
            return ()
        else:
            times = entries // math.prod(rest)
        if times * math.prod(rest) != entries:
            return ()
        flat = self._mask(_Part(part.root, times, part.start, part.stop))
        with self._rows.looked_at(rows=True):
            made = self._kept(x.reshape(flat.shape[0], *rest), flat)
        self._note_view(x, made[0])
        return made

    def _note_view(self, piece: Tensor, made: Tensor) -> None:
        """Record the view of a piece as a piece of the same view of the whole."""
        if piece in self._cut:
            whole, i = self._cut[piece]
            shape = (-1, *made.shape[1:])
            if (id(whole), shape) not in self._whole_views:
                self._whole_views[id(whole), shape] = whole, self._viewed(whole, shape)[0]
            self._cut[made] = self._whole_views[id(whole), shape][1], i

    def _expanded(self, x: Tensor, sizes: Sequence[Any]) -> tuple[Any, ...]:
        flat = self._rows.mask_of(x)
        if (
            len(sizes) != x.dim()
            or not self._is_number(sizes[0], flat)
            or any(isinstance(n, Tensor) for n in sizes[1:])
        ):
            return ()
        with self._rows.looked_at(rows=True):
            return self._kept(x.expand(-1, *sizes[1:]), flat)

    def _is_number(self, size: Any, flat: Tensor) -> bool:
        return self._rows.counted(size) is flat if isinstance(size, Tensor) else type(size) is int and size == -1

    def _spread(self, function: Any, x: Tensor, sizes: Sequence[Any]) -> tuple[Any, ...]:
        """latents.expand(count, -1, -1), latents.repeat(count, 1, 1)"""
        flat = self._rows.counted(sizes[0]) if sizes and isinstance(sizes[0], Tensor) else None
        if flat is None or any(isinstance(n, Tensor) for n in sizes[1:]):
            return ()
        if len(sizes) < x.dim() or (len(sizes) == x.dim() and x.shape[0] != 1):
            return ()
        with self._rows.looked_at(rows=True):
            spread = x.expand if function in _EXPANDS else x.repeat
            return self._kept(spread(flat.shape[0], *sizes[1:]), flat)

    def _counted_up(self, size: Any, kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """torch.arange(count): the number of each row."""
        flat = self._rows.counted(size) if isinstance(size, Tensor) else None
        if flat is None or set(kwargs) - {"device", "dtype"}:
            return ()
        with self._rows.looked_at(rows=True):
            return self._kept((flat.cumsum(0) - 1).clamp(min=0).to(kwargs.get("dtype") or torch.int64), flat)

    # --- pieces -------------------------------------------------------------------------------------------

    def _counts(self, function: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """counts.tolist(), counts.unbind(), counts[i]"""
        groups: _Groups = self._groups[args[0]]
        if groups.mask._version != groups.version or self._rows.are_rows(groups.mask):
            return ()
        one = function is _TENSOR.__getitem__ and len(args) == 2 and type(args[1]) is int
        if not one and (function not in (_TENSOR.tolist, _TENSOR.unbind, torch.unbind) or args[1:] not in ((), (0,))):
            return ()
        flat = self._rows.mask_of_rows(groups.mask)
        size, count = math.prod(groups.mask.shape[1:]), groups.mask.shape[0]
        numbers = []
        for i in (args[1] % count,) if one else range(count):
            part = _Part(flat, groups.times, i * size, (i + 1) * size)
            with self._rows.looked_at(rows=False):
                number = args[0].select(0, i)
            numbers.append(self._note_size(number, part))
        return (numbers[0] if one else numbers if function is _TENSOR.tolist else tuple(numbers),)

    def _split(self, x: Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """x.split(counts): pieces that together are all rows."""
        given = dict(zip(("sizes", "dim"), rest, strict=False)) | kwargs
        sizes = given.get(
            "sizes", given.get("split_size", given.get("split_sizes", given.get("split_size_or_sections")))
        )
        if given.get("dim", 0) % x.dim() or not isinstance(sizes, (list, tuple)):
            return ()
        flats: list[Any] = [self._rows.counted(n) if isinstance(n, Tensor) else None for n in sizes]
        if any(f is None for f in flats) or self._whole(flats) is not self._rows.mask_of(x):
            return ()
        with self._rows.looked_at(rows=True):
            pieces = x.split([f.shape[0] for f in flats])
        for i, (piece, flat) in enumerate(zip(pieces, flats, strict=True)):
            self._rows.keep(piece, flat)
            self._cut[piece] = x, (i, len(flats))
        return (pieces,)

    def _whole(self, flats: Sequence[Any]) -> Tensor | None:
        """The mask of which these are the pieces, in order."""
        parts = [self._part(f) for f in flats]
        first = parts[0]
        follow = all(a.stop == b.start for a, b in itertools.pairwise(parts))
        if not follow or any(p.root is not first.root or p.times != first.times for p in parts):
            return None
        return self._mask(_Part(first.root, first.times, first.start, parts[-1].stop))

    def _joined(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """cat along the rows"""
        given: dict[str, Any] = dict(zip(("tensors", "dim"), args, strict=False)) | kwargs
        parts, dim = given.get("tensors"), given.get("dim", given.get("axis", 0))
        if not isinstance(parts, (list, tuple)) or not any(map(self._rows.are_rows, parts)) or "out" in given:
            return ()
        if dim % parts[0].dim() or any(p.dim() != parts[0].dim() for p in parts):
            return ()
        cuts = [self._cut.get(p, (None, None)) for p in parts]
        if cuts[0][0] is not None and all(w is cuts[0][0] and i == (n, len(parts)) for n, (w, i) in enumerate(cuts)):
            return (cuts[0][0],)
        with self._rows.looked_at(rows=False):
            flats = [self._rows.mask_of(p) if self._rows.are_rows(p) else self._all_of(p.shape[0]) for p in parts]
            flat = self._whole(flats)
            if flat is None:
                key = ("joined", *map(id, flats))
                if key not in self._made:
                    self._made[key] = self._rows.note_flat(torch.cat(flats), (sum(f.shape[0] for f in flats),))
                flat = self._made[key]
        with self._rows.looked_at(rows=True):
            return self._kept(torch.cat(list(parts)), flat)

    def _all_of(self, count: int) -> Tensor:
        """A mask that selects all rows of a tensor."""
        if ("all", count) not in self._made:
            self._made["all", count] = self._rows.note_flat(torch.ones(count, dtype=torch.bool), (count,))
        return self._made["all", count]

    # --- rows by their number ---------------------------------------------------------------------------

    def _indexed(self, function: Any, x: Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """x[mask][3], x[mask][index], x[mask].index_select(0, index)"""
        if function in _SELECTS:
            given: dict[str, Any] = dict(zip(("dim", "index"), rest, strict=False)) | kwargs
            indices: tuple[Any, ...] = () if given["dim"] % x.dim() else (given["index"],)
        else:
            indices = rest[0] if rest and isinstance(rest[0], tuple) else rest[:1]
        if not indices or (function not in _SELECTS and function is not _TENSOR.__getitem__):
            return ()
        index, more = indices[0], indices[1:]
        of_rows = isinstance(index, Tensor) and (self._rows.are_rows(index) or self._rows.is_number(index))
        whole = index.dtype in (torch.int64, torch.int32) if isinstance(index, Tensor) else type(index) is int
        if not whole or of_rows or any(isinstance(other, Tensor) for other in more):
            return ()
        with self._rows.looked_at(rows=False):
            index = torch.as_tensor(index)
            taken = self.taken(x, index)
        return (taken[(slice(None),) * index.dim() + more] if more else taken,)

    def taken(self, x: Tensor, index: Tensor) -> Tensor:
        """The rows with these numbers, of any shape, among the selected ones. A number beyond them is recorded."""
        flat = self._rows.mask_of(x)
        last = flat.sum() - 1
        index = torch.where(index < 0, index + last + 1, index)
        checked = torch.ops.autopar.watch(torch.minimum(index, last - index), 0, _MOST, None, _BEYOND, True)
        number = torch.where(checked < 0, 0, index).clamp(0, flat.shape[0] - 1)
        made = x.index_select(0, order_of(flat).index_select(0, number.flatten()))
        return made.view(*index.shape, *x.shape[1:])


def order_of(flat: Tensor) -> Tensor:
    """The numbers of all rows, the selected ones first."""
    return flat.logical_not().to(torch.int64).argsort(stable=True)


def _sizes(rest: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The sizes of x.view(a, b), x.view((a, b)) and x.expand(size=...)"""
    given = kwargs.get("shape", kwargs.get("size", kwargs.get("dims", rest)))
    return tuple(given[0]) if len(given) == 1 and isinstance(given[0], (list, tuple)) else tuple(given)


_BEYOND = "x[mask][index] reads a row beyond those that the mask selects"
