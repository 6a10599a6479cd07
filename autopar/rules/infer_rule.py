"""Derives a rule for a call that the table does not have: which dims may be sharded, by trials on small shards.

A dim may be sharded if the operator commutes with selecting some of its rows: from operands that are sharded together,
and from results that then have as many rows, forward and backward. Nothing else is derived: no reductions, no changes
of arguments.

What could make such a rule unsound, and what prevents it:

- Shapes that happen to agree. The dims of a candidate are resized to sizes that nothing else has; each result must
  follow in exactly one dim, the one of that size in the model. Rows that are not adjacent are selected too, and as many
  as another dim has.
- Arguments that are sizes or positions (``roll(4)`` of 4 rows, ``triu(10)`` of 8 columns). They stay as they are, and
  no dim is tried only at sizes below its own, unless four times the largest number among the arguments is less.
- Sampled values that agree by accident. Several kinds of draws (`autopar.rules.rule_trials`) in double precision, with
  ties, rows of very different magnitude, and a row of NaN; integers must differ, and so must each result's numbers.
- Kernels that read memory where an argument says (`autopar.capture.custom_autograd.opaque`). A dim whose size is among
  the arguments is not tried, and indices are small.
- State, randomness, in-place writes. Operators that declare random numbers or writes are refused; two runs must give
  the same results, advance no generator, and leave the operands alone.
- Used results without the dim are refused. So are sizes known at run time only.

The rule depends on the call alone (operator, arguments, shapes, dtypes, which gradients are wanted) and on the
libraries' versions: caches of compiled models are keyed by these.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from autopar.adapters.copying.fake import new_mode, silent_fakes
from autopar.adapters.dispatch import has_kernel, without_modes
from autopar.adapters.keys import told_apart
from autopar.adapters.operators import OpOverload, mutates
from autopar.capture.custom_autograd.opaque import opaque_function
from autopar.capture.trace.export import flatten
from autopar.ir.graph import frozen, getitem_index, has_gradient, tensor_operands
from autopar.ir.meta import remembered
from autopar.ops.traits import is_random
from autopar.rules.derived import CommonDim, DerivedRule, NoRule, Place
from autopar.rules.rule_trials import CallForm, NoTrial, Rows, Slot, Trial, call_result, draws, same_bits, shapes_made

FOREIGN = ("autopar", "_c10d_functional", "c10d", "c10d_functional", "symm_mem", "higher_order", "prim", "profiler")
TAGS = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
MOST = 2**16  # elements of the operands in a trial, if they can be shrunk to that
TOO_MANY = 2**22
FAR = 4  # times the largest number among the arguments: the least size that a dim may be shrunk to
FEW = 16  # the least that counts as that number
WAYS = 48  # to shard the other operands together with a dim
LEAST_DRAWS = 2  # that must be conclusive
ODD = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43)


_known: dict[Any, DerivedRule | NoRule] = {}


def derive(node: Node) -> DerivedRule | NoRule:
    """Derive the rule of a call of a functional operator on fake tensors, or look it up."""
    refused = _refused(node)
    if refused:
        return NoRule(refused)
    form = CallForm.of(node)
    used = _used(node)
    key = _key(form, used)
    try:
        known = _known.get(key)
    except TypeError:  # an argument without a hash
        return _searched(node, form, used)
    if known is None:
        known = _known[key] = _searched(node, form, used)
    return known


def _refused(node: Node) -> str:
    op = node.target
    if not isinstance(op, OpOverload) or op.namespace in FOREIGN:
        return "it is not an operator that can be tried out"
    if mutates(op) or is_random(op) or any(tag in op.tags for tag in TAGS):
        return "it writes in place, draws random numbers, or its result has a data-dependent size"
    if not tensor_operands(node):
        return "it has no operand"
    return "its backward is not linear in the gradient" if has_nonlinear_backward(node) else ""


def _used(node: Node) -> tuple[bool, ...]:
    """Which of the results are used."""
    val = node.meta["val"]
    if isinstance(val, Tensor):
        return (True,)
    places = {getitem_index(user) for user in node.users}
    return tuple(i in places or None in places for i in range(len(val)))


def _key(form: CallForm, used: tuple[bool, ...]) -> Any:
    def leaf(x: Any) -> Any:
        return x if isinstance(x, Slot) else told_apart(x)

    args = frozen(form.args, leaf), frozen(form.kwargs, leaf)
    return form.target, args, form.shapes, form.dtypes, form.wanted, used


def _searched(node: Node, form: CallForm, used: tuple[bool, ...]) -> DerivedRule | NoRule:
    val = node.meta["val"]
    results = [val] if isinstance(val, Tensor) else list(val)
    if not all(isinstance(r, Tensor) for r in results):
        return NoRule("it returns something that is not a tensor")
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    try:
        torch.set_num_threads(1)  # shards are small
        with without_modes(), silent_fakes(), torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a filter that turns them into errors would change the rules
            return _RuleSearch(form, [tuple(r.shape) for r in results], used).run()
    except (NoTrial, RuntimeError, TypeError, ValueError) as error:  # a custom operator may raise anything
        return NoRule(str(error).splitlines()[0] if str(error) else "it cannot be tried out")
    finally:
        torch.random.set_rng_state(state)
        torch.set_num_threads(threads)


class _RuleSearch:
    """The search for one call. ``results``: their shapes in the model."""

    def __init__(self, form: CallForm, results: list[tuple[int, ...]], used: tuple[bool, ...]) -> None:
        self.real, self.results, self.used, self.mode = form, results, used, new_mode()
        opaque = opaque_function(form.target)
        self.told = {abs(n) for n in opaque.numbers} if opaque is not None else set()
        self.least = FAR * max([*form.numbers, FEW // FAR])
        self.form = self._smaller(form)

    def run(self) -> DerivedRule | NoRule:
        """Raises NoTrial."""
        dims: list[CommonDim] = []
        products = {
            math.prod(shape[a:b])
            for shape in self.real.shapes
            for a in range(len(shape))
            for b in range(a + 2, len(shape) + 1)
        }
        if self.told & products - {n for shape in self.real.shapes for n in shape}:
            raise NoTrial("an argument is a number of entries of an operand, which a shard has fewer of")
        for i, shape in enumerate(self.real.shapes):
            for d, size in enumerate(shape):
                if size > 1 and size not in self.told and not any(c.operands[i] == d for c in dims):
                    found = self._common(i, d, dims)
                    dims += [found] if found is not None else []
        if not dims:
            repeats = self._repeats()
            return NoRule("no dim can be sharded" if repeats else "two runs gave different results", repeats)
        return DerivedRule(tuple(dims), f"the rule of {self.real.target} was derived, and it does not shard this dim")

    def _repeats(self) -> bool:
        """Whether two runs of the operator, on the first draw that it accepts, give the same results."""
        for draw in draws(self.form):
            tensors = draw.tensors(self.form)
            with contextlib.suppress(NoTrial):
                state, first = torch.random.get_rng_state(), call_result(self.form, tensors).results
                again, after = call_result(self.form, tensors).results, torch.random.get_rng_state()
                return torch.equal(state, after) and all(map(same_bits, first, again))
        return True

    # --- sizes --------------------------------------------------------------------------------------------

    def _smaller(self, form: CallForm) -> CallForm:
        """The sizes of a trial: the call's own, or smaller ones, as far as arguments allow. Raises NoTrial."""
        if (
            form.target.namespace == "aten" or opaque_function(form.target) is not None
        ):  # a custom operator may hold sizes of its own
            for size in sorted({n for shape in form.shapes for n in shape if n > self.least}, reverse=True):
                if form.elements > MOST:
                    form = self._with_less_than(size, form)
        if form.elements > TOO_MANY:
            raise NoTrial(f"its operands have {form.elements} elements, too many for a trial")
        return form

    def _with_less_than(self, size: int, form: CallForm) -> CallForm:
        there = {n for shape in form.shapes for n in shape}
        for less in (*range(self.least, self.least + 4), *(self.least * 2**k for k in range(1, 8))):
            if less < size and less not in there:
                shapes = tuple(tuple(less if n == size else n for n in shape) for shape in form.shapes)
                tried = replace(form, shapes=shapes)
                if shapes_made(tried, self.mode) is not None:
                    return tried
        return form

    # --- one dim ------------------------------------------------------------------------------------------

    def _common(self, i: int, d: int, others: list[CommonDim]) -> CommonDim | None:
        """The dim d of operand i, and the dims sharded with it; None if it cannot be sharded."""
        for places in itertools.islice(self._ways(i, d, others), WAYS):
            found = self._followed(places, self.real.shapes[i][d])
            if found is not None and self._commutes(found, self.real.shapes[i][d]):
                return found
        return None

    def _ways(self, i: int, d: int, others: list[CommonDim]) -> Iterator[tuple[Place, ...]]:
        """Dims of the other operands that may be sharded together with one: the same dim of all first."""
        size = self.real.shapes[i][d]
        options: list[list[Place]] = []
        for j, shape in enumerate(self.real.shapes):
            equal = [e for e, n in enumerate(shape) if n == size and not any(c.operands[j] == e for c in others)]
            equal.sort(key=lambda e: e != d)
            options.append([d] if j == i else [*equal, None])
        yield from itertools.product(*options)

    def _followed(self, places: tuple[Place, ...], own: int) -> CommonDim | None:
        """The dim of each result that grows with these to the same size; None if there is no such dim."""
        sizes = self._odd_sizes()
        small, large = (shapes_made(self.form.resized(places, size), self.mode) for size in sizes)
        if small is None or large is None or not len(small) == len(large) == len(self.results):
            return None
        found: list[Place] = []
        for a, b, real, used in zip(small, large, self.results, self.used, strict=True):
            if not len(a) == len(b) == len(real):
                return None
            grown = [e for e, (n, m) in enumerate(zip(a, b, strict=True)) if n != m]
            right = len(grown) == 1 and (a[grown[0]], b[grown[0]], real[grown[0]]) == (*sizes, own)
            if not right and (used or grown):
                return None
            found.append(grown[0] if right else None)
        return CommonDim(places, tuple(found)) if any(f is not None for f in found) else None

    def _odd_sizes(self) -> tuple[int, int]:
        """Two sizes that no other dim has."""
        there = {n for shape in (*self.form.shapes, *self.results) for n in shape}
        first, second, *_ = (n for n in ODD if n not in there)
        return first, second

    # --- whole and sharded --------------------------------------------------------------------------------

    def _commutes(self, dim: CommonDim, own: int) -> bool:
        """Whether every conclusive draw confirms it, at every size."""
        first, second = self._odd_sizes()
        sizes = {first: _splits(first), second: _splits(second)[2:], 2: [[[0], [1]]]}
        large = self._large(dim, own)
        sizes.setdefault(large, _splits(large)[:1])
        for n in sorted(
            {n for shape in self.form.shapes for n in shape if n > 1}
        ):  # a shard may be as large as another dim
            if self.form.resized(dim.operands, n + 2).elements <= MOST:
                sizes.setdefault(n + 2, [[list(range(n)), [n, n + 1]]])
        seen = _Seen(len(self.results))
        for size, splits in sizes.items():
            form = self.form.resized(dim.operands, size)
            few = LEAST_DRAWS + 1 if size != first else None
            heard = self._heard(form.wide(), dim, splits, seen, few)
            if heard is not None and form != form.wide() and (size == first or not heard):
                own_dtypes = self._heard(form, dim, splits[:1], seen, few, rough=heard > 0)
                heard = None if own_dtypes is None else heard or own_dtypes
            if heard is None or (heard < LEAST_DRAWS and size in (first, second, 2, large)):
                return False
        return seen.enough(self.used)

    def _large(self, dim: CommonDim, own: int) -> int:
        """The dim's own size, or the largest in a trial."""
        size = min(own, self.least + 1)
        while size < own and self.form.resized(dim.operands, 2 * size).elements <= MOST:
            size *= 2
        return max(min(size, own), 2)

    def _heard(
        self,
        form: CallForm,
        dim: CommonDim,
        splits: list[list[Rows]],
        seen: _Seen,
        few: int | None,
        rough: bool = False,
    ) -> int | None:
        """How many draws have confirmed it, up to as many as are enough; None if one refutes it."""
        heard: Counter[Any] = Counter()
        for draw in draws(form):
            if heard[draw.floats] >= LEAST_DRAWS or (few is not None and heard.total() >= few):
                continue
            try:
                trial = Trial(form, dim, draw, rough)
            except NoTrial:
                continue
            if not trial.holds(splits):
                return None
            seen.see(trial.whole.results, trial.tensors)
            heard[draw.floats] += 1
        return heard.total()


def _splits(size: int) -> list[list[Rows]]:
    """Ways to divide rows: two halves, one and the rest, every other one."""
    rows, half = list(range(size)), size // 2
    return [[rows[:half], rows[half:]], [rows[:1], rows[1:]], [rows[::2], rows[1::2]]]


class _Seen:
    """Whether each result, and each integer operand, had more than one distinct number."""

    def __init__(self, results: int) -> None:
        self.results: list[set[Any]] = [set() for _ in range(results)]
        self.integers: dict[int, set[Any]] = {}

    def see(self, results: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Record some numbers of one draw."""
        for numbers, r in zip(self.results, results, strict=True):
            numbers.update(
                torch.view_as_real(r).flatten()[:64].tolist() if r.is_complex() else r.flatten()[:64].tolist()
            )
        for i, x in enumerate(tensors):
            if not (x.is_floating_point() or x.is_complex()):
                self.integers.setdefault(i, set()).update(x.flatten()[:64].tolist())

    def enough(self, used: Sequence[bool]) -> bool:
        """Whether they differ."""
        told = all(len(numbers) > 1 for numbers, u in zip(self.results, used, strict=True) if u)
        return told and all(len(numbers) > 1 for numbers in self.integers.values())


# --- backwards of custom operators ---------------------------------------------------------------------

OURS = ("aten", "prims", "autopar", "_c10d_functional", "higher_order")
MOST_ELEMENTS = 2**26  # elements of the operands in a trial
SIZES = (1e-5, 1.0, 1e5)
AUTOGRAD = ("Autograd", "AutogradCPU", "AutogradCUDA")


def has_nonlinear_backward(node: Node) -> bool:
    """Whether the operator of a call has a registered backward that is not linear in the gradient. One that cannot be
    tried is assumed to be linear, with a warning."""
    return _has_backward(node) and remembered(node, "nonlinear", _tried)


def _has_backward(node: Node) -> bool:
    op = node.target
    if not isinstance(op, OpOverload) or op.namespace in OURS or not has_gradient(node):
        return False
    return any(has_kernel(op.name(), key) for key in AUTOGRAD)


def _tried(node: Node) -> bool:
    try:
        size = sum(math.prod(x.meta["val"].shape) for x in node.all_input_nodes)
        if size > MOST_ELEMENTS:
            raise ValueError(f"its operands have {size} elements")
        with without_modes(), torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            return _is_nonlinear(node)
    except Exception as error:
        warnings.warn(
            f"the backward of {node.target} cannot be tried out on the CPU ({error}); it is assumed to be linear in "
            "the gradient, as a derivative is; if it is not, write it as a torch.autograd.Function, which is captured",
            stacklevel=2,
        )
        return False


def _is_nonlinear(node: Node) -> bool:
    args, kwargs = map_arg((node.args, node.kwargs), _example)
    made = node.target(*args, **kwargs)  # type: ignore[operator]
    results = [y for y in flatten(made)[0] if isinstance(y, Tensor) and y.requires_grad]
    inputs = [x for x in flatten((args, kwargs))[0] if isinstance(x, Tensor) and x.requires_grad]

    def backward(grads: Sequence[Tensor]) -> Tensor:
        found = torch.autograd.grad(results, inputs, grads, retain_graph=True, allow_unused=True)
        return torch.cat([x.double().flatten() for x in found if x is not None])

    for size in SIZES:
        a, b = ([torch.randn_like(y) * size for y in results] for _ in range(2))
        apart = backward(a), backward(b)
        together = backward([x + y for x, y in zip(a, b, strict=True)])
        least = max(float(x.abs().max()) for x in apart)
        if not math.isfinite(least):
            raise ValueError("it returns numbers that are not finite")
        exact = max(torch.finfo(y.dtype).eps for y in results) ** 0.5
        if float((together - sum(apart)).abs().max()) > exact * least:
            return True
    return False


def _example(x: Node) -> Any:
    """Random numbers, or zeros, of an operand's shape and dtype."""
    val = x.meta["val"]
    if not isinstance(val, Tensor):
        return val
    shape = tuple(val.shape)
    if val.dtype.is_floating_point or val.dtype.is_complex:
        return torch.randn(shape, dtype=val.dtype).requires_grad_(has_gradient(x))
    return torch.zeros(shape, dtype=val.dtype)
