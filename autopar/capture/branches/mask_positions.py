"""Positions of true entries, torch.where(mask) and nonzero, in a graph of static shapes: those of all entries.

    token, k = torch.where(mask)             # mask [T, K]: all T * K positions, of which the mask selects some
    x[token], w[token, k]                    --> x repeated K times, w flattened: rows of `mask_indexing`
    y[token] += f(x[token])                  --> y + sum over K of where(mask, f(rows), 0)
    y.index_add_(0, token, rows)                 the same

So loops over experts are captured with every token computed by every expert;
`autopar.passes.canonicalize.experts.group_experts` makes grouped products of them. A position
that is used in another way has a data-dependent size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.capture.branches.expert_masks import are_distinct
from autopar.capture.branches.known_values import writes

_TENSOR: Any = Tensor
_WHERE = (torch.where, _TENSOR.where)
_NONZERO = (torch.nonzero, _TENSOR.nonzero, torch.argwhere, _TENSOR.argwhere)
_INDEX_ADD = {torch.index_add: False, _TENSOR.index_add: False, _TENSOR.index_add_: True}  # -> whether in place
_SCATTER_ADD = {torch.scatter_add: False, _TENSOR.scatter_add: False, _TENSOR.scatter_add_: True}
_SCATTER_REDUCE = {torch.scatter_reduce: False, _TENSOR.scatter_reduce: False, _TENSOR.scatter_reduce_: True}
_PUTS = (torch.index_put, _TENSOR.index_put, torch.index_put_, _TENSOR.index_put_)
_INDEX_COPY = (torch.index_copy, _TENSOR.index_copy, _TENSOR.index_copy_)
_SCATTERS = (torch.scatter, _TENSOR.scatter, _TENSOR.scatter_)
_SELECTS = (torch.index_select, _TENSOR.index_select)
_ADDS = (torch.add, _TENSOR.add, _TENSOR.__add__, _TENSOR.__radd__, _TENSOR.__iadd__, _TENSOR.add_)
_SPREADS = _TENSOR.expand, _TENSOR.expand_as, _TENSOR.repeat
_COLUMNS = (_TENSOR.unsqueeze, torch.unsqueeze, _TENSOR.view, _TENSOR.reshape, torch.reshape, *_SPREADS)


def put_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of index_put by name."""
    return dict(zip(("input", "indices", "values", "accumulate"), args, strict=False)) | kwargs


def _place_written(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, tuple[Any, ...], Any, bool] | None:
    """(y, index, values, whether they are added) of y[index] = values, index_put and index_copy along dim 0."""
    if function is _TENSOR.__setitem__:
        y, index, values = args
        return y, index if isinstance(index, tuple) else (index,), values, False
    if function in _PUTS:
        given = put_arguments(args, kwargs)
        return given["input"], tuple(given["indices"]), given["values"], bool(given.get("accumulate"))
    if function in _INDEX_COPY or function in _SCATTERS:
        source = "source" if function in _INDEX_COPY else "src"
        given = dict(zip(("input", "dim", "index", source), args, strict=False)) | kwargs
        if given["dim"] == 0 and given.keys() == {"input", "dim", "index", source}:
            return given["input"], (given["index"],), given[source], False
    return None


@dataclass(frozen=True)
class _Position:
    """Dim ``dim`` of the positions of a mask of this shape; ``flat``: the mask of rows. ``mask``: as it was given."""

    shape: tuple[int, ...]
    dim: int
    flat: Tensor
    mask: Tensor


class MaskPositions:
    """Positions in one traced forward. ``rows``: its `MaskIndexing`. ``refuse(text)`` raises."""

    def __init__(self, rows: Any, refuse: Callable[[str], None]) -> None:
        self._rows, self._refuse = rows, refuse
        self._known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # [n] -> its position
        self._tables: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # [n, dims], of nonzero -> positions
        self._columns: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # [n, 1] or [n, width] -> its position
        self._led: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # [1, n, ...], of x[None, token] -> rows
        self._read: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # rows -> (y, version, positions) of y[token]
        self._sums: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # rows -> (the same, what was added)

    def called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """(result of a call on positions, ); () for any other."""
        if found := self._located(function, args, kwargs):
            return found
        if not (self._known or self._tables):
            return ()
        for way in (self._followed, self._picked, self._put, self._added):
            if found := way(function, args, kwargs):
                return found
        return ()

    def note(self, function: Any, args: tuple[Any, ...], made: Any) -> None:
        """Record y[token] + rows."""
        if function in _ADDS and len(args) == 2 and isinstance(made, Tensor):
            for x, other in (args, args[::-1]):
                if isinstance(x, Tensor) and x in self._read and self._rows.are_rows(other):
                    self._sums[made] = (*self._read[x], other)

    def read(self, rows: Tensor, y: Tensor, flat: Tensor) -> None:
        """Record that rows are y[mask]."""
        self._read[rows] = y, y._version, flat

    def added_to(self, y: Tensor, rows: Tensor, flat: Any) -> Tensor | None:
        """What was added to y[mask], or y[positions], to make these rows; None if they are something else."""
        before = self._sums.get(rows)
        same = before is not None and before[0] is y and before[1] == y._version
        kept = same and (before[2] is flat if isinstance(flat, Tensor) else before[2] == flat)
        return before[3] if kept and before is not None else None

    def chosen(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, bool] | None:
        """(mask [E], whether each entry is [1]) if a call makes what a loop over its positions runs over."""
        x = args[0] if args else None
        along = function in (_TENSOR.unbind, torch.unbind) and args[1:] in ((), (0,)) and not kwargs
        if not along or not isinstance(x, Tensor):
            return None
        table = x in self._tables
        if not table and x not in self._known:
            return None
        position = self._tables[x][0] if table else self._known[x]
        return (position.mask, table) if len(position.shape) == 1 else None

    # --- where and nonzero ----------------------------------------------------------------------------------

    def _located(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        mask = args[0] if args else kwargs.get("condition", kwargs.get("input"))
        if not isinstance(mask, Tensor) or not mask.dim() or self._rows.are_rows(mask):
            return ()
        split = bool(kwargs.get("as_tuple")) or function in _WHERE
        if function not in (*_WHERE, *_NONZERO) or len(args) + len(set(kwargs) - {"as_tuple"}) != 1:
            return ()
        mask = mask if mask.dtype == torch.bool else mask != 0
        shape, flat = tuple(mask.shape), self._rows.mask_of_rows(mask)
        with self._rows.looked_at(rows=True):
            places = [self._numbers(shape, d) for d in range(len(shape))]
            made = torch.stack(places, -1) if not split else None
        positions = [_Position(shape, d, flat, mask) for d in range(len(shape))]
        if made is not None:
            self._rows.keep(made, flat, lambda: function(*args, **kwargs))
            self._tables[made] = positions
            return (made,)
        for d, (x, position) in enumerate(zip(places, positions, strict=True)):
            self._rows.keep(x, flat, lambda d=d: mask.nonzero(as_tuple=True)[d])
            self._known[x] = position
        return (tuple(places),)

    def _numbers(self, shape: tuple[int, ...], dim: int) -> Tensor:
        view = [-1 if d == dim else 1 for d in range(len(shape))]
        return torch.arange(shape[dim]).view(view).expand(shape).flatten().clone()

    def _followed(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Views of positions: columns of a table, [n, 1] and [n, width] for scatters."""
        x = args[0] if args else None
        known = self._tables, self._known, self._columns, self._led
        if not isinstance(x, Tensor) or not any(x in them for them in known):
            return ()
        if x in self._led:
            return self._unled(function, x, args[1:], kwargs)
        if x in self._tables:
            return self._column_of(function, x, args[1:], kwargs)
        shaped = function in _COLUMNS or (
            function is _TENSOR.__getitem__ and args[1] in ((slice(None), None), (Ellipsis, None))
        )
        position = self._known[x] if x in self._known else self._columns[x]
        if not shaped:
            same = function in (
                _TENSOR.long,
                _TENSOR.cpu,
                _TENSOR.squeeze,
                torch.squeeze,
                _TENSOR.to,
                _TENSOR.clone,
                _TENSOR.detach,
            )
            if not same or x not in self._known:
                return ()
        with self._rows.looked_at(rows=True):
            made = function(*args, **kwargs)
        n = math.prod(position.shape)
        if made is x:
            return (made,)
        if not 0 < made.dim() < 3 or made.shape[0] != n:
            return ()
        self._rows.keep(made, position.flat)
        (self._known if made.dim() == 1 else self._columns)[made] = position
        return (made,)

    def _column_of(self, function: Any, x: Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """table[:, 0], table.squeeze(-1), table.unbind(1), table.t()"""
        positions = self._tables[x]
        if function is _TENSOR.__getitem__ and isinstance(rest[0], tuple) and len(rest[0]) == 2:
            chosen = [rest[0][1]] if rest[0][0] in (slice(None), Ellipsis) and type(rest[0][1]) is int else None
        elif function in (
            _TENSOR.squeeze,
            torch.squeeze,
            _TENSOR.flatten,
            torch.flatten,
            _TENSOR.view,
            _TENSOR.reshape,
        ):
            one = len(positions) == 1 and (not rest or rest[0] in (-1, 1) or not callable(rest[0]))
            chosen = [0] if one else None
        elif function in (_TENSOR.unbind, torch.unbind) and rest in ((1,), (-1,)):
            chosen = list(range(len(positions)))
        else:
            return ()
        if chosen is None:
            return ()
        found = []
        for d in chosen:
            position = positions[d]
            with self._rows.looked_at(rows=True):
                made = self._numbers(position.shape, position.dim)
            self._rows.keep(made, position.flat, lambda d=d, mask=position.mask: mask.nonzero(as_tuple=True)[d])
            self._known[made] = position
            found.append(made)
        return (tuple(found) if function in (_TENSOR.unbind, torch.unbind) else found[0],)

    def _unled(self, function: Any, x: Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """[1, n, ...] without its first dim"""
        rows = self._led[x]
        size = rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest
        flattened = function in (_TENSOR.reshape, _TENSOR.view, torch.reshape) and tuple(size) == (-1, *rows.shape[1:])
        squeezed = function in (_TENSOR.squeeze, torch.squeeze) and rest == (0,)
        return (rows,) if flattened or squeezed or (function is _TENSOR.__getitem__ and rest == (0,)) else ()

    # --- reading ------------------------------------------------------------------------------------------

    def _picked(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """x[token], x[token, k], x[token, k, None], x[None, token]"""
        if function in _SELECTS:
            given = dict(zip(("input", "dim", "index"), args, strict=False)) | kwargs
            x, index = given["input"], (given["index"],)
            if given["dim"] % x.dim():
                return ()
        elif function is _TENSOR.__getitem__:
            x, index = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
        else:
            return ()
        led = len(index) > 1 and index[0] is None
        found = self._positions(x, index[1:] if led else index)
        if found is None:
            return ()
        positions, rest = found
        with self._rows.looked_at(rows=True):
            rows = self._rows.harmless(self._spread(x, positions), positions[0].flat)
        self._rows.keep(rows, positions[0].flat, lambda: function(*args, **kwargs))
        self._read[rows] = x, x._version, positions
        if rest:
            further = self._rows.called(_TENSOR.__getitem__, (rows, (slice(None), *rest)), {})
            return further
        if not led:
            return (rows,)
        with self._rows.looked_at(rows=True):
            made = rows.unsqueeze(0)
        self._rows.keep(made, positions[0].flat, lambda: function(*args, **kwargs))
        self._led[made] = rows
        return (made,)

    def _positions(self, x: Any, index: tuple[Any, ...]) -> tuple[list[_Position], tuple[Any, ...]] | None:
        """(positions that an index begins with, the rest of it); None where they are not those of dims of x."""
        found: list[_Position] = []
        for i in index:
            if not isinstance(i, Tensor) or i not in self._known:
                break
            found.append(self._known[i])
        rest = index[len(found) :]
        dims = [p.dim for p in found]
        fit = found and not self._rows.are_rows(x) and isinstance(x, Tensor) and x.dim() >= len(found)
        if not fit or any(isinstance(i, Tensor) for i in rest) or len({*dims}) < len(dims):
            return None
        same = all(p.flat is found[0].flat and p.shape[p.dim] == n for p, n in zip(found, x.shape, strict=False))
        return (found, rest) if same else None

    def _spread(self, x: Tensor, positions: list[_Position]) -> Tensor:
        """x [s of each position, ...] -> [n, ...]: its entry at each position of the mask."""
        shape, rest = positions[0].shape, tuple(x.shape[len(positions) :])
        order = sorted(range(len(positions)), key=lambda i: positions[i].dim)
        if order != list(range(len(order))):
            x = x.permute(*order, *range(len(order), x.dim()))
        dims = {p.dim for p in positions}
        if len(dims) < len(shape):
            view = [n if d in dims else 1 for d, n in enumerate(shape)]
            x = x.reshape(*view, *rest).expand(*shape, *rest)
        return x.reshape(math.prod(shape), *rest) if len(shape) > 1 else x.clone()

    # --- writing ------------------------------------------------------------------------------------------

    def _put(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """y[token] = rows, where rows are y[token] + others, or each row of y is chosen once."""
        place = _place_written(function, args, kwargs)
        if place is None:
            return ()
        y, index, rows, accumulated = place
        found = self._positions(y, index) if function not in _SCATTERS else self._of_columns(y, index[0])
        if found is None or any(i not in (slice(None), Ellipsis) for i in found[1]):
            return ()
        positions, flat = found[0], found[0][0].flat
        whole = len(positions) == len(positions[0].shape)
        rows = self._values(rows, flat, y.shape[len(positions) :]) if whole else rows
        if self._rows.mask_of(rows) is not flat:
            return ()
        if not whole and not are_distinct(positions[0].mask):
            self._refuse(
                "rows are written to positions of which one may be chosen several times (two of a token's experts may "
                "be the same); use index_add_, or choose the experts of a token by topk"
            )
        adds = rows if accumulated else self.added_to(y, rows, positions)
        with self._rows.looked_at(rows=False):
            total = self._total(rows if adds is None else adds, positions, y)
            made = torch.where(self._any(positions, y), total, y) if adds is None else y + total
            made = self._rows.if_taken(made, y, flat)
            if not writes(function):
                return (made,)
            y.copy_(made)
        return (None,) if function is _TENSOR.__setitem__ else (y,)

    def _of_columns(self, y: Tensor, index: Any) -> tuple[list[_Position], tuple[Any, ...]] | None:
        """The position that all columns of an index [n, width] are."""
        if not isinstance(index, Tensor) or index not in self._columns or self._rows.are_rows(y):
            return None
        position = self._columns[index]
        fit = index.shape[1:] == y.shape[1:] and y.shape[0] == position.shape[position.dim]
        return ([position], ()) if fit else None

    def _values(self, values: Any, flat: Tensor, width: torch.Size) -> Any:
        """What is written to each position: rows, a row for each selected position, or one value for all."""
        if self._rows.are_rows(values):
            return values
        with self._rows.looked_at(rows=True):
            if not isinstance(values, Tensor):
                values = torch.tensor(values)
            if values.dim() == len(width) + 1 and values.shape[0] != 1:
                return self._rows.filled(values.expand(values.shape[0], *width), flat)
            made = values.expand(flat.shape[0], *width).clone()
            self._rows.keep(made, flat)
            return made

    def _added(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """index_add, scatter_add, scatter_reduce by sum, at positions along dim 0."""
        table = next((t for t in (_INDEX_ADD, _SCATTER_ADD, _SCATTER_REDUCE) if function in t), None)
        if table is None:
            return ()
        names = "input", "dim", "index", "source" if table is _INDEX_ADD else "src", "reduce"
        given: dict[str, Any] = dict(zip(names, args, strict=False)) | kwargs
        y: Any
        rows: Any
        y, index, rows = (given.get(name) for name in ("input", "index", names[3]))
        places = self._known if table is _INDEX_ADD else self._columns
        if not isinstance(index, Tensor) or index not in places or not set(given) <= {*names}:
            return ()
        position = places[index]
        if len(position.shape) == 1 and isinstance(rows, Tensor) and not self._rows.are_rows(rows):
            if rows.shape[1:] != y.shape[1:]:
                return ()
            with self._rows.looked_at(rows=True):
                rows = self._rows.filled(rows, position.flat)
        right = given.get("dim") == 0 and isinstance(y, Tensor) and not self._rows.are_rows(y)
        right = right and given.get("reduce", "sum") == "sum" and self._rows.mask_of(rows) is position.flat
        if not right or y.shape[0] != position.shape[position.dim] or rows.shape[1:] != y.shape[1:]:
            return ()
        if table is not _INDEX_ADD and index.shape != rows.shape:
            return ()
        with self._rows.looked_at(rows=False):
            made = self._rows.if_taken(y + self._total(rows, [position], y), y, position.flat)
            return (y.copy_(made) if table[function] else made,)

    def _total(self, rows: Tensor, positions: list[_Position], y: Tensor) -> Tensor:
        """Rows [n, ...] -> [s of each position, ...], summed over the other dims of the mask."""
        shape, dims = positions[0].shape, [p.dim for p in positions]
        flat = positions[0].flat.view(-1, *[1] * (rows.dim() - 1))
        kept = torch.where(flat, rows, torch.zeros((), dtype=rows.dtype)).view(*shape, *rows.shape[1:])
        others = [d for d in range(len(shape)) if d not in dims]
        kept = kept.sum(others) if others else kept
        order = [sorted(dims).index(d) for d in dims]
        if order != sorted(order):
            kept = kept.permute(*order, *range(len(order), kept.dim()))
        return kept.to(y.dtype)

    def _any(self, positions: list[_Position], y: Tensor) -> Tensor:
        mask, dims = positions[0].flat.view(positions[0].shape), [p.dim for p in positions]
        for d in reversed(range(mask.dim())):
            mask = mask.any(d) if d not in dims else mask
        order = [sorted(dims).index(d) for d in dims]
        mask = mask.permute(order) if order != sorted(order) else mask
        return mask.view(*mask.shape, *[1] * (y.dim() - mask.dim()))
