"""Indexing with a boolean mask in a graph of static shapes: all rows are kept, and reductions skip the masked ones.

    mse_loss(y[mask], x[mask])     the number of selected rows is known at run time only, so all rows are kept, with
                                   safe numbers in those that are not selected, and
    --> where(mask, mse_loss(y', x', reduction="none"), 0).sum() / mask.sum() / width
    cross_entropy(h[mask], t[mask])  -->  cross_entropy(h', where(mask, t, -100))
    h[mask] += f(h[mask])            -->  h.copy_(where(mask, h' + f(h'), h))
    h[mask] = features               -->  h.copy_(where(mask, filled_rows(features, mask), h))

A tensor that meets selected rows and has a fixed number of rows has one for each of them, in order: its rows are put at
the true entries. Two masks are equal if they are the same tensor, or the same comparisons of the same tensors. Row-wise
functions run on all rows. An unknown function gets the selected rows themselves, so that capture names the line that
needs a data-dependent size. A row that is not selected contributes nothing to the result and has no gradient.
"""

from __future__ import annotations

import inspect
import itertools
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.capture.branches import rowwise_ops as known
from autopar.capture.branches.chosen_loops import ChosenLoops
from autopar.capture.branches.known_values import count_answer, writes
from autopar.capture.branches.mask_positions import MaskPositions
from autopar.capture.branches.mask_writes import MaskWrites
from autopar.capture.branches.row_branches import UPDATES, Lines, skipped_lines
from autopar.capture.branches.row_views import RowViews, Sizes

_TENSOR: Any = Tensor
_PLAIN = (int, float, bool, str, slice, type(None), type(Ellipsis), torch.dtype, torch.device)
_PICKS = (_TENSOR.__getitem__,)
_COUNTS = ("any", "sum", "count_nonzero")
_SELECTS = (torch.masked_select, _TENSOR.masked_select)
# (comparison of a number of rows, with what) -> whether it holds if there are rows
_SOME = {("eq", 0): False, ("ne", 0): True, ("gt", 0): True, ("le", 0): False, ("ge", 1): True, ("lt", 1): False}
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class MaskIndexing:
    """Boolean-mask indexing in one traced forward. ``refuse(text)`` raises."""

    def __init__(self, refuse: Callable[[str], None]) -> None:
        self._refuse = refuse
        self._masks: WeakTensorKeyDictionary = (
            WeakTensorKeyDictionary()
        )  # tensor of all rows -> mask of the selected ones
        self._fresh: WeakTensorKeyDictionary = (
            WeakTensorKeyDictionary()
        )  # tensor of all rows -> computes the selected ones
        self._keys: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # mask -> how it was computed
        self._viewed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # mask -> the one that it is a view of
        self._some: WeakTensorKeyDictionary = (
            WeakTensorKeyDictionary()
        )  # number -> whether it is true if there are rows, their mask
        # (running frame, lines that a branch in it skips where there are no rows) -> their mask, flattened
        self._skipped: dict[tuple[int, Lines], Tensor] = {}
        self._wide: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # mask[..., None] -> the mask
        self._within: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # mask -> the one some of whose rows it has
        self._flat: dict[Any, Tensor] = {}  # key of a mask -> the mask, flattened
        self._shapes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # mask, flattened -> its shape
        self._changed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # tensors that an in-place call has replaced
        self._numbers = itertools.count()
        self._positions, self._loops = MaskPositions(self, refuse), ChosenLoops(self._skipped)
        self._conditional: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # tensor -> masks of its branches
        self._updates: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # what `if_taken` has made
        self._masks_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # mask, flattened -> as it was given
        self._writes, self._views = MaskWrites(self, self._positions), RowViews(self)
        self._python: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # tensors that stand for Python numbers
        self._ours: set[Any] = set()  # nodes of calls that `called` handled
        self._of_rows: set[Any] = set()  # those of them that may hold all rows

    # --- calls --------------------------------------------------------------------------------------------

    def called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """(result of a call on selected rows, ); () for a call without them, whose arguments `handed_on` returns."""
        if self._conditional:
            self.check_conditional(getattr(function, "__name__", "a function"), (args, kwargs))
        found = self._positions.called(function, args, kwargs) or self._called(function, args, kwargs)
        if not found and self._skipped:
            found = self._updated(function, args, kwargs)
        if found:
            self._positions.note(function, args, found[0])
            if known.plain_name(function) not in UPDATES:
                self._note_conditional((args, kwargs), found[0])
        elif self._skipped and writes(function):
            found = self._written(function, args, kwargs)
        return found

    def _note_conditional(self, arguments: Any, made: Any) -> None:
        """Record values that exist only where a branch is taken: all that is made in it but rows and what is written to
        tensors of before."""
        if not self._skipped or not (masks := self._branches()):
            return
        given = {id(x) for x in pytree.tree_leaves(arguments)}
        for x in pytree.tree_leaves(made):
            if isinstance(x, Tensor) and id(x) not in given and x not in self._masks and x not in self._updates:
                self._conditional[x] = masks

    def check_conditional(self, name: str, arguments: Any) -> None:
        """Refuse the use of a value that is computed in a branch outside of it; ``name``: who uses it."""
        found = [x for x in pytree.tree_leaves(arguments) if isinstance(x, Tensor) and x in self._conditional]
        if not found:
            return
        now = {id(mask) for mask in self._branches()}
        if any(id(mask) not in now for x in found for mask in self._conditional[x]):
            self._refuse(
                f"{name} reads a value that a branch on a mask computes, only where the mask has entries; compute it "
                "outside of the branch, or write to rows of the mask alone"
            )

    def _updated(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """y.masked_scatter(...) and the like, which leave y where a branch around them is not taken"""
        name = known.plain_name(function)
        before = args[0] if name in UPDATES and args else args[2] if name == "where" and len(args) == 3 else None
        if not isinstance(before, Tensor) or not self._branches() or self._rows_in((args, kwargs)):
            return ()
        with self.looked_at(rows=False):
            made = function(*args, **kwargs)
            if made.shape != before.shape and name == "where":
                return (made,)
            return (self.if_taken(made, before, None),)

    def _written(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """y.masked_fill_(...) and the like, in a branch. Refuses other writes there."""
        name = getattr(function, "__name__", "a function")
        plain = getattr(Tensor, name[:-1]) if name[:-1] in UPDATES else None
        if plain is None or not (found := self._updated(plain, args, kwargs)):
            self._check_skipped(name)
            return ()
        with self.looked_at(rows=False):
            return (args[0].copy_(found[0]),)

    def truth(self, function: Any, x: Any, frame: Any) -> bool | None:
        """What ``if mask.any()`` or ``if rows.shape[0] == 0`` takes to be: that there are rows, if nothing but work on
        rows depends on it. None for any other condition."""
        if function is not _TENSOR.__bool__ or not isinstance(x, Tensor) or x not in self._some or frame is None:
            return None
        some, mask = self._some[x]
        lines = skipped_lines(frame, some)
        if lines is None:
            return None
        count_answer()
        self._skipped[id(frame), lines] = mask if mask in self._shapes else self.mask_of_rows(mask)
        return bool(some)

    def turns(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: Any, number: Callable[[Any], Any]
    ) -> Any:
        """What ``for e in hit`` runs over, where ``hit`` are the positions of a mask; None for any other call.
        ``number``: makes a known tensor."""
        found = self._positions.chosen(function, args, kwargs)
        if found is None:
            return None
        chosen, table = found
        return self._loops.turns(chosen, frame, lambda e: number([e] if table else e))

    @property
    def in_turn(self) -> bool:
        """Whether the forward is in a loop over the positions of a mask."""
        return bool(self._loops.running)

    def if_taken(self, made: Tensor, before: Tensor, flat: Tensor | None) -> Tensor:
        """What a write to rows of a mask leaves: ``before`` where a branch around it, on another mask, skips it."""
        while flat is not None and flat in self._within:
            flat = self._within[flat]
        for mask in self._branches():
            if mask is not flat and not (flat in self._masks_of and self._loops.implied(mask, self._masks_of[flat])):
                made = torch.where(mask.any(), made, before)
        self._updates[made] = True
        return made

    def _branches(self) -> list[Tensor]:
        """The masks of the branches that the forward is in."""
        found, frame = [], sys._getframe(1)
        while self._skipped and frame is not None:
            found += [
                mask
                for (owner, (code, lines)), mask in self._skipped.items()
                if owner == id(frame) and code is frame.f_code and frame.f_lineno in lines
            ]
            frame = frame.f_back  # type: ignore[assignment]
        return found

    def _check_skipped(self, name: str) -> None:
        if self._branches():
            self._refuse(
                f"{name} writes to a tensor where a mask selects rows, which a branch on the mask decides; write "
                "to rows of the mask alone, or do it outside of the branch"
            )

    def note_number(self, number: Tensor, flat: Tensor) -> None:
        """Record a tensor that stands for a Python number, of rows of this mask."""
        self._some[number] = True, flat
        self.note_python(number)

    def note_python(self, number: Tensor) -> None:
        """Record a tensor that stands for a Python number."""
        self._python[number] = True

    def is_number(self, x: Any) -> bool:
        """Whether a tensor stands for a Python number."""
        return isinstance(x, Tensor) and x in self._python

    def counted(self, number: Any) -> Tensor | None:
        """The mask, flattened, whose true entries a number counts."""
        found = self._views.mask_counted(number)
        return found if found is not None else self._writes.mask_counted(number)

    def placed(self, source: Tensor, places: Tensor) -> Tensor:
        """Rows at the true entries of a mask that is not theirs [*M]: [*M, ...], zeros elsewhere."""
        text = "x[mask] has {found} more rows than there are places for them"
        made: Tensor = torch.ops.autopar.placed_rows(source, self._masks[source], places, text)
        return made

    def shape_of(self, flat: Tensor) -> tuple[int, ...]:
        """The shape of a mask before it was flattened."""
        return tuple(self._shapes[flat])

    def note_flat(self, flat: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Record the mask of rows that a tensor is, and the shape of the mask that it flattens."""
        self._shapes[flat] = shape
        return flat

    def note_same_number(self, made: Tensor, number: Tensor) -> None:
        """Record that a tensor is a number of rows, as another one is."""
        self._some[made] = self._some[number]

    def _note_count(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], made: Tensor) -> None:
        """Record whether there are rows: mask.any(), mask.sum(), and comparisons of a number of rows with 0."""
        name, x = known.plain_name(function), args[0] if args else None
        whole = len(args) == 1 and not kwargs
        if whole and name in _COUNTS and isinstance(x, Tensor) and x.dtype == torch.bool:
            self._some[made] = True, x
            if name != "any":
                self._writes.note_count(made, x)
        elif len(args) == 2 and isinstance(x, Tensor) and x in self._some:
            if name in ("bool", "item"):
                self._some[made] = self._some[x]
            elif x.dtype != torch.bool and (name, args[1]) in _SOME:
                self._some[made] = _SOME[name, args[1]], self._some[x][1]

    def _called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        picked = _picked(function, args, kwargs)
        if picked is not None and self._may_pick(*picked, whole=function in _SELECTS):
            with self.looked_at(rows=True):
                given = _spread(*picked) if function in _SELECTS else picked
                key = (
                    self._key_of_rows(picked[1]) if given[1] is picked[1] else (self._key_of(picked[1]), given[1].shape)
                )
                made = self._pick(*given, key)
            versions = [x._version for x in picked]
            self._fresh[made] = lambda: (
                function(*args, **kwargs) if versions == [x._version for x in picked] else made[self._masks[made]]
            )
            self._positions.read(made, picked[0], self._masks[made])
            return (made,)
        if picked is None and (parts := _picked_in_part(function, args)) is not None:
            x, mask, rest = parts
            return self.called(function, (self.called(function, (x, mask), {})[0], rest), {})
        if found := self._writes.called(function, args, kwargs):
            return found
        rows = self._rows_in((args, kwargs))
        self._check_alive(rows)
        if found := self._views.called(function, args, kwargs):
            return found
        if not rows:
            return ()
        if function in known.IN_PLACE and self.are_rows(args[0]):
            found = self.called(known.IN_PLACE[function], args, kwargs)
            self._changed[args[0]] = True
            return found
        mask = self._masks[rows[0]]
        if any(self._masks[x] is not mask for x in rows):
            return ()
        args, kwargs = self._writes.filled_in(function, args, kwargs, rows[0], mask)
        for way in (self._asked, self._reduced, self._lost, self._by_row):
            found = way(function, args, kwargs, rows, mask)
            if found:
                return found
        return ()

    def handed_on(self, function: Any, arguments: Arguments) -> Arguments:
        """Arguments for a call that `called` did not handle: with the selected rows themselves."""
        arguments = self._writes.as_numbers(function, arguments)
        if not self._rows_in(arguments):
            return arguments
        if writes(function) and self.are_rows(arguments[0][0]):
            name = getattr(function, "__name__", "a function")
            self._refuse(f"{name} writes in place to rows selected by a mask, x[mask]; use its out-of-place form")
        return pytree.tree_map(lambda x: self._themselves(x) if self.are_rows(x) else x, arguments)

    def note(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], made: Any) -> None:
        """Record the result of a call, if it is a mask, or the number of its rows."""
        self._views.note(function, args, kwargs, made)
        self._note_conditional((args, kwargs), made)
        if isinstance(made, Tensor) and not made.dim():
            self._note_count(function, args, kwargs, made)
        of_masks = (
            isinstance(made, Tensor) and made.dtype == torch.bool and known.plain_name(function) in known.OF_MASKS
        )
        if of_masks and not any(made is x for x in args):  # mask.to(device) may be the mask
            self._keys[made] = (known.plain_name(function), self._key_of((args, kwargs)))
            if args[0].dtype == torch.bool and _is_view(function, args, made):
                self._viewed[made] = args[0]
            self._note_wide(function, args[0], made)

    def _note_wide(self, function: Any, x: Any, made: Tensor) -> None:
        """Record mask[..., None], what expands it along this dim, and its opposite."""
        if (
            isinstance(x, Tensor)
            and x in self._wide
            and known.plain_name(function) in ("invert", "bitwise_not", "logical_not")
        ):
            with self.looked_at(rows=False):
                opposite = function(self._wide[x])
            self.note(function, (self._wide[x],), {}, opposite)
            self._wide[made] = opposite
            return
        base = self._wide.get(x, x) if isinstance(x, Tensor) and x.dtype == torch.bool else None
        if base is None or made.dim() != base.dim() + 1 or made.shape[:-1] != base.shape:
            return
        if x is not base or (made.shape[-1] == 1 and made.stride()[:-1] == base.stride()):
            self._wide[made] = base

    def is_wide(self, mask: Tensor) -> bool:
        """Whether a mask is the same along its last dim."""
        return mask.shape[-1] == 1 or mask.stride(-1) == 0 or mask in self._wide

    def narrow(self, mask: Tensor) -> Tensor:
        """A mask that is the same along its last dim, without this dim."""
        found: Tensor | None = self._wide.get(mask)
        return found if found is not None else mask[..., 0]

    def in_branch(self) -> bool:
        """Whether the forward is in a branch that is taken where a mask has entries."""
        return bool(self._branches())

    def are_in(self, made: Any) -> bool:
        """Whether the result of a forward contains selected rows."""
        return bool(self._rows_in(made))

    def mask_of(self, x: Any) -> Tensor | None:
        """The mask of rows."""
        return self._masks.get(x) if isinstance(x, Tensor) else None

    def mask_of_rows(self, mask: Tensor) -> Tensor:
        """A mask, flattened: the same tensor for equal masks."""
        if mask in self._shapes:
            return mask
        key = self._key_of_rows(mask)
        if key not in self._flat:
            with self.looked_at(rows=False):
                self._flat[key] = (mask.flatten() if mask.dim() > 1 else mask).clone()
            self._shapes[self._flat[key]] = self._origin(mask).shape
            self._masks_of[self._flat[key]] = mask
        return self._flat[key]

    def _key_of_rows(self, mask: Tensor) -> Any:
        """A key that masks share whose entries, in order, are the same."""
        mask = self._origin(mask)
        return self._key_of(mask), mask.shape

    def _origin(self, mask: Tensor) -> Tensor:
        while mask in self._viewed:
            mask = self._viewed[mask]
        return mask

    def filled(self, values: Tensor, flat: Tensor) -> Tensor:
        """values [K, ...], one row for each entry of a flattened mask -> all rows, zeros beside the mask. A branch on
        the mask skips it where it has no entry, however many values there are."""
        shape, around = self._shapes[flat], self._branches()
        places = flat.view(shape)
        for mask in around:
            places = places if mask is flat else places & mask.any()
        made: Tensor = torch.ops.autopar.filled_rows(values, places, "{found} for {rows}", bool(around))
        return self._keep(made.flatten(0, len(shape) - 1) if len(shape) > 1 else made, flat)

    def changed(self, rows: Tensor) -> None:
        """Note that rows were written to."""
        self._fresh.pop(rows, None)

    def keep(self, made: Tensor, mask: Tensor, fresh: Callable[[], Any] | None = None) -> None:
        """Record a tensor of all rows. ``fresh``: computes the selected ones."""
        self._masks[made] = mask
        if fresh is not None:
            self._fresh[made] = fresh

    def leak(self) -> Node | None:
        """A node whose operator took all rows for the selected ones, because no torch function was seen calling it."""
        return next((user for node in self._of_rows for user in node.users if user not in self._ours), None)

    # --- picking ------------------------------------------------------------------------------------------

    def _may_pick(self, x: Tensor, mask: Tensor, whole: bool) -> bool:
        """``whole``: entries are selected, as by masked_select, after broadcasting x and the mask."""
        if self.are_rows(x) or self.are_rows(mask):
            both = self.are_rows(x) and self.are_rows(mask) and self._masks[x] is self._masks[mask]
            return both and mask.dim() == 1 and not (whole and x.dim() > 1)
        return whole or (0 < mask.dim() <= x.dim() and x.shape[: mask.dim()] == mask.shape)

    def _pick(self, x: Tensor, mask: Tensor, key: Any) -> Tensor:
        """All rows of x, with safe numbers in those that are not selected."""
        if self.are_rows(x):
            flat = self.among(self._masks[x], mask)
        else:
            x = x.flatten(0, mask.dim() - 1) if mask.dim() > 1 else x
            if key not in self._flat:
                self._flat[key] = (mask.flatten() if mask.dim() > 1 else mask).clone()
                self._shapes[self._flat[key]] = self._origin(mask).shape
            self._masks_of[self._flat[key]] = mask
            flat = self._flat[key]
        return self._keep(self.harmless(x, flat), flat)

    def among(self, before: Tensor, mask: Tensor) -> Tensor:
        """Of the rows that a mask selects, those that ``mask``, of these rows, selects."""
        key = ("both", self._key_of(before), self._key_of_rows(mask))
        if key not in self._flat:
            self._flat[key] = before & mask
            self._within[self._flat[key]] = before
            self._shapes[self._flat[key]] = self._shapes[before]
        return self._flat[key]

    def _check_alive(self, rows: list[Tensor]) -> None:
        if any(x in self._changed for x in rows):
            self._refuse("rows selected by a mask, x[mask], are read after an in-place change; change a copy instead")

    def harmless(self, x: Tensor, mask: Tensor) -> Tensor:
        """x, with numbers between 0 and 1 in the rows that are not selected, which differ between columns and tensors:
        a logarithm, or the root of a difference, has no pole there, so its gradient times zero is not nan. Integers are
        one and masks true, so that no softmax is over nothing and no length is zero."""
        if not x.is_floating_point():
            return torch.where(_beside(mask, x), x, torch.ones((), dtype=x.dtype))
        low, shape = 0.3 + 0.017 * (next(self._numbers) % 13), (1, *x.shape[1:])
        other = torch.linspace(low, low + 0.2, math.prod(shape), dtype=x.dtype).view(shape)
        return torch.where(_beside(mask, x), x, other)

    def _keep(self, made: Any, mask: Tensor) -> Any:
        for x in pytree.tree_leaves(made):
            if isinstance(x, Tensor):
                self._masks[x] = mask
        return made

    def _themselves(self, x: Tensor) -> Tensor:
        """The selected rows themselves: a tensor of data-dependent size."""
        count_answer()
        fresh = self._fresh.get(x)
        with self.looked_at(rows=False):
            return fresh() if fresh is not None else x[self._masks[x]]

    # --- what a call makes of rows --------------------------------------------------------------------------

    def _asked(self, function: Any, args: Any, kwargs: Any, rows: list[Tensor], mask: Tensor) -> tuple[Any, ...]:
        """Shapes, whose first size is a tensor, and properties that all rows share."""
        if function in known.SAME:
            return (function(*args, **kwargs),)
        x: Any = args[0] if args else None
        if function not in known.SIZES or not self.are_rows(x):
            return ()
        if function in known.NUMELS:
            return (self._views.number(mask, math.prod(x.shape[1:])),)
        count, dim = self._views.number(mask), args[1] if len(args) > 1 else kwargs.get("dim")
        if dim is None:
            return (Sizes((count, *x.shape[1:])),)
        return (count if dim % x.dim() == 0 else x.shape[dim],)

    def _reduced(self, function: Any, args: Any, kwargs: Any, rows: list[Tensor], mask: Tensor) -> tuple[Any, ...]:
        """sum and mean over rows."""
        name = known.plain_name(function)
        if name not in ("sum", "mean") or not self.are_rows(args[0] if args else None):
            return ()
        x, given = args[0], dict(zip(("dim", "keepdim"), args[1:], strict=False)) | kwargs
        dims = given.get("dim")
        over = {d % x.dim() for d in ((dims,) if isinstance(dims, int) else dims or range(x.dim()))}
        if 0 not in over or not set(given) <= {"dim", "keepdim", "dtype"}:
            return ()
        with self.looked_at(rows=False):
            x = x if given.get("dtype") is None else x.to(given["dtype"])
            total = self._total(x, mask, sorted(over), bool(given.get("keepdim")))
            return (total if name == "sum" else total / self._count(x, mask, over).to(total.dtype),)

    def _total(self, x: Tensor, mask: Tensor, dims: list[int], keepdim: bool = False) -> Tensor:
        return self.with_zeros(x, mask).sum(dims, keepdim)

    def with_zeros(self, x: Tensor, mask: Tensor) -> Tensor:
        """All rows, zeros in those that are not selected."""
        return torch.where(_beside(mask, x), x, torch.zeros((), dtype=x.dtype))

    def _count(self, x: Tensor, mask: Tensor, over: set[int]) -> Tensor:
        return mask.sum() * math.prod(x.shape[d] for d in over - {0})

    def _lost(self, function: Any, args: Any, kwargs: Any, rows: list[Tensor], mask: Tensor) -> tuple[Any, ...]:
        """Losses."""
        if function not in known.LOSSES:
            return ()
        given = inspect.signature(function).bind(*args, **kwargs)
        given.apply_defaults()
        values = given.arguments
        reduction = values.get("reduction")
        legacy = any(values.get(name) is not None for name in ("size_average", "reduce"))
        x, target = values["input"], values["target"]
        weighed = values.get("weight") is not None and function not in known.OF_CLASSES
        if legacy or weighed or not self.are_rows(x) or reduction not in ("none", "mean", "sum", "batchmean"):
            return ()
        if function in known.OF_CLASSES and not target.is_floating_point():
            if x.dim() != 2 or not self.are_rows(target):
                return ()
            with self.looked_at(rows=reduction == "none"):
                ignored = torch.full((), values["ignore_index"], dtype=target.dtype)
                loss = function(**{**values, "target": torch.where(mask, target, ignored)})
            return (self._keep(loss, mask) if reduction == "none" else loss,)
        if function in known.OF_CLASSES and (values.get("weight") is not None or function is F.nll_loss):
            return ()
        if not self._fit(args, kwargs, x):
            return ()
        with self.looked_at(rows=True):
            values = {n: self.harmless(v, mask) if n in ("input", "target") and self.are_rows(v) else v
                      for n, v in values.items()}  # fmt: skip
            losses = self._keep(function(**{**values, "reduction": "none"}), mask)
        if reduction == "none":
            return (losses,)
        with self.looked_at(rows=False):
            total = self._total(losses, mask, list(range(losses.dim())))
            over = set(range(losses.dim())) if reduction == "mean" else {0}
            return (total if reduction == "sum" else total / self._count(losses, mask, over).to(total.dtype),)

    def _by_row(self, function: Any, args: Any, kwargs: Any, rows: list[Tensor], mask: Tensor) -> tuple[Any, ...]:
        """Row-wise functions."""
        if not known.by_row(function, args, kwargs, self.are_rows):
            return ()
        name = known.plain_name(function)
        if name in known.POINTWISE and not self._fit(args, kwargs, rows[0]):
            return ()
        with self.looked_at(rows=True):
            if name in known.WITH_POLES:
                args, kwargs = pytree.tree_map(
                    lambda x: self.harmless(x, mask) if self.are_rows(x) else x, (args, kwargs)
                )
            if name in known.BY_INDEX:
                args, kwargs = pytree.tree_map(
                    lambda x: self.with_zeros(x, mask) if self.are_rows(x) and not x.is_floating_point() else x,
                    (args, kwargs),
                )
            return (self._keep(function(*args, **kwargs), mask),)

    def _fit(self, args: Any, kwargs: Any, x: Tensor) -> bool:
        """Whether tensors of rows have equal rank, and other tensors are broadcast over the rows."""
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        return all(
            t.dim() == x.dim() if self.are_rows(t) else t.dim() < x.dim() or (t.dim() == x.dim() and t.shape[0] == 1)
            for t in tensors
        )

    # --- helpers ------------------------------------------------------------------------------------------

    def are_rows(self, x: Any) -> bool:
        """Whether a tensor has all rows, of which a mask selects some."""
        return isinstance(x, Tensor) and x in self._masks

    def _rows_in(self, arguments: Any) -> list[Tensor]:
        return [x for x in pytree.tree_leaves(arguments) if self.are_rows(x)] if self._masks else []

    def _key_of(self, arguments: Any) -> Any:
        """A key that is equal for equal masks: how they were computed, and their versions."""
        leaves, spec = pytree.tree_flatten(arguments)
        keys: list[Any] = []
        for x in leaves:
            if isinstance(x, Tensor):
                key = self._keys.get(x)
                if key is None:
                    key = self._keys[x] = ("tensor", next(self._numbers))
                keys.append((key, x._version))
            else:
                keys.append((type(x), repr(x) if isinstance(x, _PLAIN) else next(self._numbers)))
        return tuple(keys), str(spec)

    def looked_at(self, rows: bool) -> _Noted:
        count_answer()
        return _Noted(self._ours, self._of_rows if rows else set())


class _Noted:
    """Within: nodes that are made are put into both sets."""

    def __init__(self, *sets: set[Any]) -> None:
        self._sets = sets

    def __enter__(self) -> None:
        mode: Any = get_proxy_mode()
        self._graph = mode.tracer.graph if mode is not None else None
        self._last = self._graph._root._prev if self._graph is not None else None

    def __exit__(self, *_: Any) -> None:
        node: Any = self._graph._root._prev if self._graph is not None else None
        while node is not self._last:
            for found in self._sets:
                found.add(node)
            node = node._prev


def _is_view(function: Any, args: tuple[Any, ...], made: Tensor) -> bool:
    """Whether a mask has all entries of the first argument in their order: mask.flatten(), mask.to(device), and
    mask[..., 0] of a dim of one."""
    if known.plain_name(function) != "getitem":
        return known.plain_name(function) in ("view", "reshape", "flatten", "unsqueeze", "to")
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return made.numel() == args[0].numel() and all(i is Ellipsis or (type(i) is int and i == 0) for i in index)


def _picked(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    """(x, mask) of x[mask], x[mask, ...], x[mask, :], and of masked_select."""
    if function in _SELECTS:
        given = [*args, *kwargs.values()]
        if len(given) == 2 and all(isinstance(x, Tensor) for x in given):
            return kwargs.get("input", given[0]), kwargs.get("mask", given[-1])
    if function in _PICKS and len(args) == 2 and isinstance(args[0], Tensor):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        mask, rest = index[0] if index else None, index[1:]
        whole = all(i is Ellipsis or i == slice(None) for i in rest if not isinstance(i, Tensor))
        if (
            isinstance(mask, Tensor)
            and mask.dtype == torch.bool
            and whole
            and not any(isinstance(i, Tensor) for i in rest)
        ):
            return args[0], mask
    return None


def _picked_in_part(function: Any, args: tuple[Any, ...]) -> tuple[Tensor, Tensor, tuple[Any, ...]] | None:
    """(x, mask, index of the rows) of x[mask, i] and x[mask, None]"""
    index = args[1] if function in _PICKS and len(args) == 2 else None
    if not isinstance(index, tuple) or len(index) < 2 or not isinstance(index[0], Tensor):
        return None
    x, mask = args[0], index[0]
    plain = all(i is None or isinstance(i, (int, slice)) or i is Ellipsis for i in index[1:])
    if mask.dtype != torch.bool or not plain or x.shape[: mask.dim()] != mask.shape or not mask.dim():
        return None
    return x, mask, (slice(None), *index[1:])


def _spread(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """x and the mask, broadcast to one shape."""
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    spread = (t if t.shape == shape else t.expand(shape) for t in (x, mask))
    return next(spread), next(spread)


def _beside(mask: Tensor, x: Tensor) -> Tensor:
    """A mask of rows, viewed with the rank of x."""
    return mask.view(-1, *[1] * (x.dim() - 1)) if x.dim() > 1 else mask
