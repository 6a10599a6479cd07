"""Rows of a fixed number that meet the entries of a mask, in a graph of static shapes.

    h[mask] = features              -->  h.copy_(where(mask, filled_rows(features, mask), h))
    h[mask] + features              -->  h' + filled_rows(features, mask)
    new_zeros(mask.sum(), width)    -->  zeros for all entries, as rows of `mask_indexing`
    x.masked_scatter(mask, y[other])                       where(mask, placed_rows(y', other, mask), x)
    if mask.sum().item() != len(features): raise ...       item() is left out

A tensor with one row for each true entry, in order, as features of images have for the places of images in a text. The
number of true entries is checked in each step (`autopar::filled_rows`).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.capture.branches import rowwise_ops as known
from autopar.capture.branches.mask_positions import MaskPositions, put_arguments

_TENSOR: Any = Tensor
_SETS = _TENSOR.__setitem__
_PUTS = {torch.index_put: False, _TENSOR.index_put: False, _TENSOR.index_put_: True, torch.index_put_: True}
_SCATTERS = (torch.masked_scatter, _TENSOR.masked_scatter, _TENSOR.masked_scatter_)
_COMPARED = known.POINTWISE | {"bool", "__bool__", "__get__", "__format__", "__repr__", "__str__"}
_READS = (_TENSOR.__index__, _TENSOR.__int__, _TENSOR.__float__, _TENSOR.item, _TENSOR.tolist)
_JOINS = ("cat", "stack", "concat")
# function -> whether it is a method of a tensor, whose dtype it takes
_FACTORIES = {
    **dict.fromkeys((torch.zeros, torch.ones, torch.empty, torch.full), False),
    **dict.fromkeys((_TENSOR.new_zeros, _TENSOR.new_ones, _TENSOR.new_empty, _TENSOR.new_full), True),
}


class MaskWrites:
    """In one traced forward. ``rows``: its `MaskIndexing`."""

    def __init__(self, rows: Any, positions: MaskPositions) -> None:
        self._rows, self._positions = rows, positions
        self._items: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # what stands for number.item() -> number
        # number -> (the mask whose entries it counts, its version then)
        self._counted: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def note_count(self, number: Tensor, mask: Tensor) -> None:
        """Record that a number counts the entries of a mask."""
        self._counted[number] = mask, mask._version

    def mask_counted(self, number: Any) -> Tensor | None:
        """The mask, flattened, whose entries a number counts."""
        if not isinstance(number, Tensor) or number not in self._counted:
            return None
        mask, version = self._counted[number]
        flat: Tensor | None = self._rows.mask_of_rows(mask) if mask._version == version else None
        return flat

    def called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """(result of a write to entries of a mask, or of a factory of rows, ); () for any other call."""
        if function in _FACTORIES:
            return self._made(function, args, kwargs)
        if function is _TENSOR.item and args[0] in self._counted:
            return (self._item(args[0]),)
        if function in _SCATTERS:
            return self._scattered(function, args, kwargs)
        if function is _SETS:
            out, index, values = args
            return self._put(out, index, values, adds=False) and (None,)
        if function in _PUTS:
            given = put_arguments(args, kwargs)
            index = given["indices"]
            if len(index) == 1 and isinstance(index[0], Tensor):
                out = given["input"] if _PUTS[function] else given["input"].clone()
                return self._put(out, index[0], given["values"], adds=bool(given.get("accumulate")))
        return ()

    def _item(self, number: Tensor) -> Tensor:
        """mask.sum().item() as a tensor: where it is compared, the branch is answered as one on a tensor is."""
        with self._rows.looked_at(rows=False):
            made = number.clone()
        self._counted[made], self._items[made] = self._counted[number], number
        self._rows.note_same_number(made, number)
        self._rows.note_python(made)
        return made

    def as_numbers(self, function: Any, arguments: Any) -> Any:
        """Arguments of a call that `called` did not handle: with Python numbers that torch reads where item() was
        left out, but for a comparison."""
        if not self._items or known.plain_name(function) in _COMPARED:
            return arguments

        def number(x: Any) -> Any:
            if isinstance(x, slice):
                return slice(number(x.start), number(x.stop), number(x.step))
            if not isinstance(x, Tensor) or x not in self._items:
                return x
            return self._items[x] if function in _READS else self._items[x].item()

        return pytree.tree_map(number, arguments)

    def filled_in(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor, flat: Tensor
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of a call on rows x, with all rows in place of tensors that have a row for each selected one."""
        name = known.plain_name(function)
        if function in known.LOSSES:
            given = inspect.signature(function).bind(*args, **kwargs).arguments
            rank = {"input": x.dim(), "target": x.dim()}
            if function in known.OF_CLASSES:
                rank = {"input": 2, "target": 1}
            return (), {n: self._all(v, flat, rank[n]) if n in rank else v for n, v in given.items()}
        if name not in known.POINTWISE and name not in _JOINS:
            return args, kwargs
        found: tuple[Any, dict[str, Any]] = pytree.tree_map(lambda t: self._all(t, flat, x.dim()), (args, kwargs))
        return found

    def _all(self, values: Any, flat: Tensor, rank: int) -> Any:
        own = isinstance(values, Tensor) and values.dim() == rank > 0 and values.shape[0] != 1
        if not own or self._rows.are_rows(values):
            return values
        with self._rows.looked_at(rows=True):
            return self._rows.filled(values, flat)

    def _made(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """new_zeros(mask.sum(), width)"""
        first = int(_FACTORIES[function])
        if "size" in kwargs:
            args, kwargs = (*args[:first], kwargs["size"]), {n: v for n, v in kwargs.items() if n != "size"}
        listed = len(args) > first and isinstance(args[first], (tuple, list))
        sizes = args[first] if listed else args[first:]
        flat = self._rows.counted(sizes[0]) if sizes else None
        if flat is None or any(isinstance(n, Tensor) for n in sizes[1:]):
            return ()
        shape = (flat.shape[0], *sizes[1:])
        with self._rows.looked_at(rows=True):
            made = function(*args[:first], shape, *(args[first + 1 :] if listed else ()), **kwargs)
        self._rows.keep(made, flat)
        return (made,)

    def _scattered(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """x.masked_scatter(places, y[mask]): each place takes the row of y that has its number among the selected ones.
        torch would leave out rows for which there is no place."""
        given: dict[str, Any] = dict(zip(("input", "mask", "source"), args, strict=False)) | kwargs
        x, mask, source = given["input"], given["mask"], given["source"]
        rows = self._rows.are_rows(source)
        if not (rows or self._rows.in_branch()) or self._rows.are_rows(x) or self._rows.are_rows(mask):
            return ()
        alike = mask.dim() == x.dim() > 1 and self._rows.is_wide(mask)
        if not alike or source.shape[-1:] != x.shape[-1:] or mask.shape[:-1] != x.shape[:-1]:
            return ()
        if rows and source.dim() != 2:
            return ()
        with self._rows.looked_at(rows=False):
            places = self._rows.narrow(mask)
            flat = None if rows else self._rows.mask_of_rows(places)
            if rows and self._rows.mask_of_rows(mask) is self._rows.mask_of(source):  # each place has its own row
                taken = source.view(x.shape)
            elif rows:
                taken = self._rows.placed(source, places)
            else:
                taken = self._rows.filled(source.reshape(-1, x.shape[-1]), flat).view(x.shape)
            made = self._rows.if_taken(torch.where(places.unsqueeze(-1), taken, x), x, flat)
            return (x.copy_(made) if function is _TENSOR.masked_scatter_ else made,)

    def _put(self, out: Tensor, index: Any, values: Any, adds: bool) -> tuple[Any, ...]:
        """out[mask] = values, out[mask, :] = values, out[i, mask] = values; () where there is one value for all, whose
        write has static shapes."""
        index = index if isinstance(index, tuple) else (index,)
        while index and type(index[0]) is int and out.dim() > 1 and not self._rows.are_rows(out):
            out, index = out[index[0]], index[1:]
        mask, rest = index[0] if index else None, index[1:]
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or not mask.dim():
            return ()
        if any(i is not Ellipsis and i != slice(None) for i in rest) or out.shape[: mask.dim()] != mask.shape:
            return ()
        inner = self._rows.are_rows(out)
        if inner != self._rows.are_rows(mask) or (inner and self._rows.mask_of(out) is not self._rows.mask_of(mask)):
            return ()
        with self._rows.looked_at(rows=inner):
            flat = self._rows.among(self._rows.mask_of(out), mask) if inner else self._rows.mask_of_rows(mask)
        rows = self._values(values, flat, out.shape[mask.dim() :], one_too=inner or self._rows.in_branch())
        if rows is None:
            return ()
        with self._rows.looked_at(rows=inner):
            plain = adds or inner or not isinstance(values, Tensor)
            added = None if plain else self._positions.added_to(out, values, flat)
            if adds or added is not None:
                more = self._rows.with_zeros(rows if added is None else added, flat)
                made = out + more.view(out.shape).to(out.dtype)
            else:
                beside = flat.view(*mask.shape, *[1] * (out.dim() - mask.dim()))
                made = torch.where(beside, rows.view(out.shape).to(out.dtype), out)
            out.copy_(self._rows.if_taken(made, out, flat))
        if inner:
            self._rows.changed(out)
        return (out,)

    def _values(self, values: Any, flat: Tensor, width: torch.Size, one_too: bool) -> Tensor | None:
        """What is written to each entry, [n, *width]; None for a single value, unless ``one_too``."""
        if not isinstance(values, Tensor):
            return torch.tensor(values).expand(flat.shape[0], *width) if one_too else None
        if self._rows.are_rows(values):
            if values.shape[1:] != width or self._rows.mask_of(values) is flat:
                return values if values.shape[1:] == width else None
            with self._rows.looked_at(rows=True):
                shape = self._rows.shape_of(flat)
                placed = self._rows.placed(values, flat.view(shape))
                placed = placed.flatten(0, len(shape) - 1) if len(shape) > 1 else placed
                self._rows.keep(placed, flat)
            return placed
        if values.dim() == len(width) + 1 and values.shape[0] != 1:
            with self._rows.looked_at(rows=True):
                return self._rows.filled(values.expand(values.shape[0], *width), flat)
        return values.expand(flat.shape[0], *width) if one_too else None
