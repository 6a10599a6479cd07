"""Constant folding while tracing: values that a forward may read, because they depend on no input and no weight.

    grid = <a constant of the user's>               a real tensor: its values are part of the graph
    lengths = (grid[:, 1] * grid[:, 2]).tolist()    computed on real tensors, outside of the trace
    mask = torch.ones(2, 8); if mask.all(): ...     results of factories are known, too
    x[mask]                                         a known mask becomes the indices at which it is True

The calls that lead to a fake tensor are recorded, and run on real tensors only when the forward reads its values. A
tensor that is written to becomes unknown, unless a function writes known values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.adapters.dispatch import without_modes
from autopar.capture.branches.buffer_values import BufferValues

MOST = 2**22  # elements of a value that is folded
REAL = (Tensor, nn.Parameter)
_METHODS: Any = Tensor
_FACTORIES = {
    torch.arange, torch.zeros, torch.ones, torch.full, torch.tensor, torch.as_tensor, torch.eye, torch.linspace,
    torch.tril_indices, torch.triu_indices,
}  # fmt: skip
_OF_SHAPES = {
    torch.zeros_like, torch.ones_like, torch.full_like, _METHODS.new_zeros, _METHODS.new_ones, _METHODS.new_full,
}  # fmt: skip  # only the shape of the first argument matters
_ZEROS = {
    torch.empty: torch.zeros, torch.empty_like: torch.zeros_like, _METHODS.new_empty: _METHODS.new_zeros
}  # fmt: skip  # what has no values yet is filled later; that of any other values would do
_ASKED = {
    _METHODS.item, _METHODS.tolist, _METHODS.__bool__, _METHODS.__int__, _METHODS.__float__, _METHODS.__index__,
    _METHODS.numpy, torch.is_nonzero, _METHODS.is_nonzero, torch.equal, _METHODS.equal, torch.allclose,
    _METHODS.allclose, _METHODS.__format__,
}  # fmt: skip  # they return Python values
_SIZED = {
    torch.nonzero, _METHODS.nonzero, torch.argwhere, _METHODS.argwhere, torch.unique, _METHODS.unique,
    torch.unique_consecutive, _METHODS.unique_consecutive, torch.masked_select, _METHODS.masked_select,
    torch.bincount, _METHODS.bincount, torch.repeat_interleave, _METHODS.repeat_interleave, torch.where,
    _METHODS.__getitem__,
}  # fmt: skip  # results may have a data-dependent size
_SIZES_FROM = {
    **dict.fromkeys((torch.arange, torch.zeros, torch.ones, torch.full, torch.eye, torch.empty), 0),
    **dict.fromkeys((*_OF_SHAPES, _METHODS.new_empty, _METHODS.view, _METHODS.reshape, torch.reshape), 1),
    **dict.fromkeys((_METHODS.expand, _METHODS.repeat, _METHODS.narrow, torch.narrow, torch.split, _METHODS.split), 1),
    **dict.fromkeys((functional.interpolate, functional.adaptive_avg_pool2d, functional.pad), 1),
}  # function -> index of the first argument that is a size
_FROM_LISTS = (torch.tensor, torch.as_tensor)
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)
_REPEATS = (torch.repeat_interleave, _METHODS.repeat_interleave)
_COMPARED = (_METHODS.__eq__, _METHODS.eq, torch.eq)
_INDEXED = (_METHODS.__getitem__, _METHODS.__setitem__)
_IN_PLACE = {f"__{name}__" for name in ("setitem", "iadd", "isub", "imul", "itruediv", "iand", "ior", "ixor")}

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]
Written = tuple[Tensor, Tensor]  # (tensor, its new values)


@dataclass
class _Origin:
    """How a tensor was computed: result ``index`` of a call, or a folded ``value``. ``versions``: of the operands at
    the call; ``version``: of the tensor itself."""

    version: int
    function: Callable[..., Any] | None = None
    arguments: Arguments = ((), {})
    versions: tuple[int, ...] = ()
    index: int = 0
    value: Tensor | None = None


_reads = 0


def answers() -> int:
    """How many folded values forwards have read so far."""
    return _reads


def count_answer() -> None:
    """Count a read: the graph now depends on more than the arguments of a module."""
    global _reads
    _reads += 1


class KnownValues:
    """The constant values of one traced forward. ``buffers``: those of its model."""

    def __init__(self, buffers: BufferValues) -> None:
        self._buffers = buffers
        self._origins: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    # --- asking -------------------------------------------------------------------------------------------

    def answer(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """(result of a call that reads values, ) if they are known; () for any other call."""
        if function in _ASKED or (function in _SIZED and self._has_open_size(function, args, kwargs)):
            given = self._real((args, kwargs))
            if given is not None and (found := _run(function, given)) is not None:
                count_answer()
                return found
        return ()

    def with_places(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], numbers: bool = False
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """A call with known masks and counts replaced by indices and numbers: x[mask] by x[indices], repeat_interleave
        by index_select, new_zeros(count) by new_zeros(3), tensor([count]) by tensor([3]). ``numbers``: known
        indices of one element by numbers, too, x[e] by x[3]. Other calls are unchanged."""
        if function in _FROM_LISTS and args and isinstance(args[0], (list, tuple)):
            return function, (self._with_numbers(args[0], any_dtype=True), *args[1:]), kwargs
        if function in _SIZES_FROM and any(isinstance(x, Tensor) for x in pytree.tree_leaves((args, kwargs))):
            first = _SIZES_FROM[function]
            return function, (*args[:first], *self._with_numbers(args[first:])), self._with_numbers(kwargs)
        if numbers and function in _COMPARED and len(args) == 2 and not kwargs:
            return function, (args[0], *self._with_numbers(args[1:])), kwargs
        if function in _INDEXED:
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            if numbers and (found := self._at_numbers(function, args, indices)) is not None:
                return found
            if any(map(_is_mask, indices)):
                places = [self._places(i) for i in indices]
                if all(p is not None for p in places):
                    count_answer()
                    return function, (args[0], tuple(x for p in places for x in p or ()), *args[2:]), kwargs
        if function in _REPEATS and len(args) > 1 and isinstance(args[1], Tensor):
            counts, dim = self.value(args[1]), args[2] if len(args) > 2 else kwargs.get("dim")
            if counts is not None and dim is not None and not is_real(args[0]):
                count_answer()
                with without_modes():
                    rows = torch.arange(len(counts)).repeat_interleave(counts)
                return torch.index_select, (args[0], dim, rows), {}
        return function, args, kwargs

    def _at_numbers(
        self, function: Any, args: tuple[Any, ...], indices: tuple[Any, ...]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
        """x[e] and x[e[None]] as select and as a copy of one row."""
        (index, *rest) = indices
        if rest or function is not _METHODS.__getitem__ or not isinstance(index, Tensor) or index.dtype == torch.uint8:
            return None
        if index.dtype not in _WHOLE or index.numel() != 1 or index.dim() > 1 or (value := self.value(index)) is None:
            return None
        count_answer()
        place = int(value) % args[0].shape[0]
        if not index.dim():
            return torch.select, (args[0], 0, place), {}
        return torch.narrow_copy, (args[0], 0, place, 1), {}

    def _with_numbers(self, arguments: Any, any_dtype: bool = False) -> Any:
        """Arguments with Python numbers (integers, or any) in place of known scalar tensors."""
        leaves, spec = pytree.tree_flatten(arguments)
        for i, x in enumerate(leaves):
            if isinstance(x, Tensor) and not x.dim() and (any_dtype or x.dtype in _WHOLE):
                value = self.value(x)
                if value is not None:
                    count_answer()
                    leaves[i] = value.item()
        return pytree.tree_unflatten(leaves, spec)

    def _places(self, index: Any) -> tuple[Any, ...] | None:
        if not _is_mask(index):
            return (index,)
        mask = self.value(index)
        if mask is None:
            return None
        with without_modes():
            return mask.nonzero(as_tuple=True)

    def _has_open_size(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        if function is _METHODS.__getitem__:
            return any(map(_is_mask, args[1] if isinstance(args[1], tuple) else (args[1],)))
        if function is torch.where:
            return len(args) + len(kwargs) == 1
        return function not in _REPEATS or (len(args) > 1 and isinstance(args[1], Tensor)) or len(args) == 1

    def value(self, x: Tensor) -> Tensor | None:
        """The values of a tensor as a real tensor, or None if they are unknown. The caller must not change it."""
        if is_real(x):
            return x
        origin = self._origins.get(x)
        if origin is None:
            return self._buffers.value(x)
        if origin.version != x._version or _is_large(x):
            return None
        if origin.value is None and origin.function is not None:
            origin.value = self._computed(origin)
        return origin.value

    def _computed(self, origin: _Origin) -> Tensor | None:
        operands = _tensors(origin.arguments)
        if any(not is_real(x) and x._version != v for x, v in zip(operands, origin.versions, strict=True)):
            return None
        of_shape = origin.function in _OF_SHAPES
        given = self._real(origin.arguments, shapes=1 if of_shape else 0)
        found = _run(origin.function, given) if given is not None else None
        made = pytree.tree_leaves(found[0])[origin.index] if found else None
        return made if isinstance(made, Tensor) and not _is_large(made) else None

    def _real(self, arguments: Any, shapes: int = 0) -> Any:
        """Arguments as real tensors; None if one is unknown. Of the first ``shapes`` tensors only the shape matters."""
        leaves, spec = pytree.tree_flatten(arguments)
        seen = 0
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                seen += 1
                if seen <= shapes:
                    with without_modes():
                        leaves[i] = torch.empty((), dtype=leaf.dtype).expand(leaf.shape)  # one element in memory
                elif (value := self.value(leaf)) is None:
                    return None
                else:
                    leaves[i] = value
            elif isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                return None
        return pytree.tree_unflatten(leaves, spec)

    # --- noting -------------------------------------------------------------------------------------------

    def before_write(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Written]:
        """The new values of the tensor that a function is about to write to, and of its views and base; empty if they
        are unknown."""
        x = args[0] if args else None
        if not writes(function) or not isinstance(x, Tensor) or is_real(x) or x not in self._origins:
            return []
        base = _base(x)
        for made, origin in list(self._origins.items()):
            if origin.value is None and any(_base(o) is base for o in _tensors(origin.arguments)):
                self.value(made)  # from the values before the write
        given, whole = self._real((args, kwargs)), self.value(base)
        if given is None or whole is None:
            return []
        with without_modes():
            whole = whole.clone()
        own = self._view(x, base, whole)
        views = [(v, self._view(v, base, whole)) for v in list(self._origins) if _base(v) is base]
        if own is None or not _run(function, ((own, *given[0][1:]), given[1])):
            return []
        return [(v, value) for v, value in views if value is not None]

    def _view(self, x: Tensor, base: Tensor, whole: Tensor) -> Tensor | None:
        """The same view of ``whole`` as x is of its base."""
        origin = self._origins.get(x)
        if x is base or origin is None or origin.function is None:
            return whole if x is base else None
        (args, kwargs), index = origin.arguments, origin.index
        inner = self._view(args[0], base, whole) if args and isinstance(args[0], Tensor) else None
        rest = self._real((args[1:], kwargs))
        if inner is None or rest is None:
            return None
        found = _run(origin.function, ((inner, *rest[0]), rest[1]))
        own = pytree.tree_leaves(found)[index] if found else None
        return own if isinstance(own, Tensor) and own._base is not None else None

    def note(
        self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], made: Any, written: list[Written]
    ) -> None:
        """Record the result of a call, and what it has ``written`` (from `before_write`)."""
        if writes(function):
            for x, value in written:
                self._origins[x] = replace(self._origins[x], version=x._version, value=value)
            return
        function = _ZEROS.get(function, function)
        results = [x for x in pytree.tree_leaves(made) if isinstance(x, Tensor) and not is_real(x)]
        operands = _tensors((args, kwargs))
        free = function in _FACTORIES and not operands
        if not results or "out" in kwargs or not (free or (operands and self._may_know(function, operands))):
            return
        versions = tuple(x._version for x in operands)
        for i, x in enumerate(pytree.tree_leaves(made)):
            if isinstance(x, Tensor) and not is_real(x) and not x.requires_grad and not any(x is o for o in operands):
                self._origins[x] = _Origin(x._version, function, (args, kwargs), versions, i)

    def _may_know(self, function: Any, operands: list[Tensor]) -> bool:
        needed = operands[1:] if function in _OF_SHAPES else operands
        return all(is_real(x) or x in self._origins or self._buffers.has(x) for x in needed)


def is_real(x: Any) -> bool:
    """Whether a tensor has values: neither a fake tensor nor one within vmap."""
    return type(x) in REAL and not is_functorch_wrapped_tensor(x)


def _base(x: Tensor) -> Tensor:
    return x._base if x._base is not None else x


def _is_large(x: Tensor) -> bool:
    """Whether a value is not folded: real tensors would take the memory of all ranks' batches."""
    size = x.numel()
    return isinstance(size, int) and size > MOST


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.bool


def writes(function: Any) -> bool:
    """Whether a function writes to its first argument."""
    name = getattr(function, "__name__", "")
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _tensors(arguments: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(arguments) if isinstance(x, Tensor)]


def _run(function: Any, given: Arguments) -> tuple[Any, ...]:
    """(result of a function on real tensors, ); () if it raises, or draws random numbers."""
    args, kwargs = given
    state = torch.random.get_rng_state()
    with without_modes(), torch.no_grad(), contextlib.suppress(Exception):
        found = function(*args, **kwargs)
        if torch.equal(state, torch.random.get_rng_state()):
            return (found,)
        torch.random.set_rng_state(state)
    return ()
