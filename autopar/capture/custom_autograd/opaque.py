"""Autograd functions that cannot be traced, because they launch kernels on memory: one operator each.

    class Scaled(Function):                       y = autopar_functions::Scaled_3f(x)
        def forward(ctx, x):                          its backward: Scaled_3f_backward(ticket, saved, gradients)
            y = torch.empty_like(x)
            kernel[grid](x, y, x.numel())

The operator runs the function's own forward and backward. Shapes come from running the forward on fake tensors, with
launches of Triton left out; where it needs memory, on random tensors of the same shapes. What it saves are results of
the operator ``..._saving``, that the derivative calls in its place; what else it keeps on ctx stays in this process,
under a number (the ticket). A rule is derived by trials, as for every unknown operator.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar.adapters.copying.fake import new_mode, silent_fakes
from autopar.adapters.dispatch import without_modes
from autopar.adapters.operators import returns_alias

NAMESPACE = "autopar_functions"
PLAIN = (int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.Size, enum.Enum, slice, bytes)
MOST_ELEMENTS = 2**30  # of the tensors of a run that only finds shapes
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
_KNOWN: dict[Any, OpaqueFunction] = {}
_BY_NAME: dict[str, OpaqueFunction] = {}


class OpaqueError(ValueError):
    """An autograd function that can be neither traced nor called as an operator."""


@dataclass(frozen=True)
class _Of:
    """Stands for a tensor that a function keeps: number i of its ``inputs``, ``results`` or ``saved``."""

    kind: str
    i: int


@dataclass
class _Run:
    """One forward. ``state``: what ctx keeps, with `_Of` for tensors."""

    result: Any
    results: list[Tensor]
    saved: list[Tensor]
    state: dict[str, Any]
    without_gradient: tuple[int, ...]


@dataclass
class OpaqueFunction:
    """A function with its arguments but for tensors. ``needs``: which tensors want gradients. ``wanting``: of these,
    those that get one."""

    cls: Any
    make_ctx: Callable[[Any], Any]
    own: frozenset[str]
    leaves: tuple[Any, ...]  # its arguments; None for a tensor
    places: tuple[int, ...]
    needs: tuple[bool, ...]
    dense: tuple[bool, ...]
    name: str = ""
    wanting: tuple[int, ...] = ()
    changed: tuple[int, ...] = ()  # inputs that it writes to
    spoilt: tuple[int, ...] = ()  # of what its backward is given, what that writes to
    first: Any = None
    states: list[Any] = field(default_factory=list)
    shapes: dict[Any, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"the autograd function {self.cls.__qualname__}"

    @property
    def numbers(self) -> list[int]:
        """Integers among the arguments, which may be sizes."""
        found = pytree.tree_leaves(self.leaves)
        return [x for x in found if isinstance(x, int) and not isinstance(x, bool)]

    # --- running ------------------------------------------------------------------------------------------------

    def run(self, tensors: Sequence[Tensor]) -> _Run:
        """The forward, on clones: it may write to them. Raises whatever it raises; at first, OpaqueError for a tensor
        from outside."""
        given = [self._own(x, i) for i, x in enumerate(tensors)]
        leaves = list(self.leaves)
        for place, x in zip(self.places, given, strict=True):
            leaves[place] = x
        args = tuple(leaves)
        ctx = self.make_ctx(self._needs())
        with torch.no_grad(), contextlib.nullcontext() if self.first is not None else _Foreign():
            if self.cls.setup_context is not Function.setup_context:
                made = self.cls.forward(*args)
                self.cls.setup_context(ctx, args, made)
            else:
                made = self.cls.forward(ctx, *args)
        found = made if isinstance(made, tuple) else (made,)
        results = [x for x in found if isinstance(x, Tensor)]
        outer = {id(x): _Of("inputs", i) for i, x in enumerate(given)}
        outer |= {id(x): _Of("results", i) for i, x in enumerate(results) if id(x) not in outer}
        saved: list[Tensor] = []

        def kept(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if id(x) not in outer:
                saved.append(x)
                outer[id(x)] = _Of("saved", len(saved) - 1)
            return outer[id(x)]

        own = {name: value for name, value in vars(ctx).items() if name not in self.own}
        state = pytree.tree_map(kept, {"saved": ctx.saved_tensors, "own": own, "zeros": ctx.materialize_grads})
        used = {x.i for x in pytree.tree_leaves(state) if isinstance(x, _Of) and x.kind == "inputs"}
        if self.first is None:
            self.changed = tuple(i for i, x in enumerate(given) if self._changes(x, tensors[i]))
        for i in sorted(used & {*self.changed}):  # what it has written to its inputs is a value of its own
            saved.append(given[i])
            state = pytree.tree_map(lambda x, i=i: _Of("saved", len(saved) - 1) if x == _Of("inputs", i) else x, state)
        marked = tuple(i for i, x in enumerate(results) if id(x) in ctx.without_gradient or not _is_float(x))
        memory = {_memory(x) for x in tensors}
        return _Run(made, _apart(results, memory), _apart(saved, memory), state, marked)

    def _needs(self) -> list[bool]:
        """``ctx.needs_input_grad``."""
        needs = dict(zip(self.places, self.needs, strict=True))
        return [needs.get(i, False) for i in range(len(self.leaves))]

    def _own(self, x: Tensor, i: int) -> Tensor:
        x = x.detach()
        return x.clone(memory_format=torch.contiguous_format) if self.dense[i] else x.clone()

    def _changes(self, given: Tensor, before: Tensor) -> bool:
        if isinstance(given, FakeTensor):
            return given._version > 0
        return not same_bits(given, before)

    def full(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Results, saved tensors, and the ticket."""
        found = self._elsewhere(tensors)
        if found.state not in self.states:
            self.states.append(found.state)
        expected: _Run = self.first
        if (len(found.results), len(found.saved)) != (len(expected.results), len(expected.saved)):
            raise ValueError(f"{self.label} has saved another number of tensors than when it was captured")
        return [*found.results, *found.saved, torch.tensor(self.states.index(found.state))]

    def _elsewhere(self, tensors: Sequence[Tensor]) -> _Run:
        """A run; of CPU tensors on the GPU if the kernel refuses them."""
        try:
            return self.run(tensors)
        except Exception:
            if any(x.device.type != "cpu" for x in tensors) or not torch.cuda.is_available():
                raise
            found = self.run([x.cuda() for x in tensors])
            found.results, found.saved = [x.cpu() for x in found.results], [x.cpu() for x in found.saved]
            return found

    def known(self, tensors: Sequence[Tensor], made: Sequence[Tensor]) -> list[Tensor]:
        """What the backward needs of inputs, results and saved tensors."""
        return [self._value(x, tensors, made) for x in self.used]

    @property
    def used(self) -> list[_Of]:
        state = self.first.state
        return list(dict.fromkeys(x for x in pytree.tree_leaves(state) if isinstance(x, _Of)))

    def _value(self, x: _Of, tensors: Sequence[Tensor], made: Sequence[Tensor]) -> Tensor:
        count = len(self.first.results)
        return tensors[x.i] if x.kind == "inputs" else made[x.i] if x.kind == "results" else made[count + x.i]

    def backward(self, ticket: int, known: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Any]:
        """One gradient, or None, for each tensor argument."""
        try:
            return self._backward(ticket, known, grads)
        except Exception:
            tensors = [x for x in (*known, *grads) if x is not None]
            if any(x.device.type != "cpu" for x in tensors) or not torch.cuda.is_available():
                raise
            over = [x if x is None else x.cuda() for x in grads]
            found = self._backward(ticket, [x.cuda() for x in known], over)
            return [x if x is None else x.cpu() for x in found]

    def _backward(self, ticket: int, known: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Any]:
        state = self.states[ticket]
        known = [x.clone() if i in self.spoilt else x for i, x in enumerate(known)]
        values = dict(zip(self.used, known, strict=True))
        state = pytree.tree_map(lambda x: values[x] if isinstance(x, _Of) else x, state)
        leaves: list[Any] = list(self.leaves)
        ctx = self.make_ctx(self._needs())
        ctx.saved_tensors, ctx.materialize_grads = state["saved"], state["zeros"]
        vars(ctx).update(state["own"])
        function = self.cls.backward if self.cls.vjp is Function.vjp else self.cls.vjp
        given = iter(grads)
        found = self.first.result if isinstance(self.first.result, tuple) else (self.first.result,)
        with torch.no_grad():
            made = function(ctx, *(_copy(next(given)) if isinstance(x, Tensor) else None for x in found))
        made = made if isinstance(made, tuple) else (made,)
        if len(made) < len(leaves) or any(g is not None for g in made[len(leaves) :]):
            raise ValueError(f"{self.label} returns {len(made)} gradients for {len(leaves)} inputs")
        return [made[place] for place in self.places]


def _copy(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.clone(memory_format=torch.contiguous_format)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bytes."""
    return torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b))) if a.numel() else True


def _memory(x: Tensor) -> Any:
    return x.untyped_storage()._cdata


def _apart(tensors: Sequence[Tensor], taken: set[Any]) -> list[Tensor]:
    """Tensors that share memory with no other, nor with ``taken``."""
    found = []
    for x in tensors:
        found.append(x.detach().clone() if _memory(x) in taken else x.detach())
        taken.add(_memory(x))
    return found


def _is_float(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


# --- shapes ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _no_launches() -> Iterator[None]:
    """Context manager: launches of Triton do nothing."""
    kept = []
    for module, names in (
        ("triton.runtime.jit", ("JITFunction",)),
        ("triton.runtime.autotuner", ("Autotuner", "Heuristics")),
        ("triton.runtime.interpreter", ("InterpretedFunction",)),
    ):
        for name in names if module in sys.modules else ():
            cls = getattr(sys.modules[module], name, None)
            if cls is not None and "run" in vars(cls):
                kept.append((cls, cls.run))
                cls.run = _nothing
    try:
        yield
    finally:
        for cls, run in kept:
            cls.run = run


def _nothing(self: Any, *args: Any, **kwargs: Any) -> None:
    return None


class _Foreign(TorchFunctionMode):
    """Raises OpaqueError for tensors with a gradient that are no arguments: their values would be those of today."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in pytree.tree_leaves((args, kwargs or {})):
            if isinstance(x, Tensor) and x.requires_grad:
                raise OpaqueError("it uses a tensor with a gradient that is not among its arguments; pass it in")
        return func(*args, **(kwargs or {}))


def example(x: Tensor) -> Tensor:
    """Random numbers, or zeros, of a tensor's shape and dtype."""
    if x.is_floating_point() or x.is_complex():
        return torch.randn(tuple(x.shape), dtype=x.dtype, device="cpu")
    return torch.zeros(tuple(x.shape), dtype=x.dtype, device="cpu")


def _facts(tensors: Sequence[Tensor]) -> Any:
    return tuple((tuple(x.shape), x.dtype) for x in tensors)


def _shapes(function: OpaqueFunction, tensors: Sequence[Tensor]) -> tuple[list[Any], list[Any]]:
    """((shape, dtype) of results, of saved tensors) for tensors of these shapes."""
    key = _facts(tensors)
    if key not in function.shapes:
        found = _on_fakes(function, tensors) or _on_memory(function, tensors)
        function.shapes[key] = _facts(found.results), _facts(found.saved)
    made: tuple[list[Any], list[Any]] = function.shapes[key]
    return made


def _on_fakes(function: OpaqueFunction, tensors: Sequence[Tensor]) -> _Run | None:
    with without_modes(), silent_fakes(), new_mode(), _no_launches(), contextlib.suppress(Exception):
        found = function.run([torch.empty(tuple(x.shape), dtype=x.dtype, device="cpu") for x in tensors])
        expected = function.first
        if expected is None or (len(found.results), len(found.saved)) == (len(expected.results), len(expected.saved)):
            return found
    return None


def _on_memory(function: OpaqueFunction, tensors: Sequence[Tensor]) -> _Run:
    if sum(x.numel() for x in tensors) > MOST_ELEMENTS:
        raise OpaqueError("its kernel has to run to find the shapes of results, and its inputs are too large for that")
    with without_modes(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return function._elsewhere([example(x) for x in tensors])


# --- capture --------------------------------------------------------------------------------------------------


def opaque(cls: Any, args: tuple[Any, ...], needs: Sequence[bool], make_ctx: Callable[[Any], Any]) -> Any:
    """Call an autograd function as an operator. Raises OpaqueError."""
    leaves = list(args)
    places = tuple(i for i, x in enumerate(leaves) if isinstance(x, Tensor))
    tensors = [leaves[i] for i in places]
    others = pytree.tree_leaves([x for x in leaves if not isinstance(x, Tensor)])
    if any(isinstance(x, Tensor) for x in others):
        raise OpaqueError("it takes tensors in a list or a dict; pass each as an argument")
    odd = next((x for x in others if not isinstance(x, PLAIN)), None)
    if odd is not None:
        raise OpaqueError(f"it takes a {type(odd).__name__}; pass tensors and numbers")
    if not tensors:
        raise OpaqueError("it takes no tensor")
    constants = tuple(None if isinstance(x, Tensor) else x for x in leaves)
    grads = tuple(bool(needs[i]) for i in places)
    dense = tuple(x.is_contiguous() for x in tensors)
    key = cls, repr(constants), places, grads, dense, tuple(x.dtype for x in tensors)
    if key not in _KNOWN:
        own = frozenset(vars(make_ctx([])))
        function = OpaqueFunction(cls, make_ctx, own, constants, places, grads, dense)
        _define(function, tensors, key)
        _KNOWN[key] = function
    function = _KNOWN[key]
    made = getattr(torch.ops, NAMESPACE).__getattr__(function.name)(*tensors)
    results = iter(made if isinstance(made, tuple | list) else [made])
    found = function.first.result
    if not isinstance(found, tuple):
        return next(results)
    return tuple(next(results) if isinstance(x, Tensor) else x for x in found)


def opaque_function(target: Any) -> OpaqueFunction | None:
    """The function that an operator calls."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != NAMESPACE:
        return None
    return _BY_NAME.get(target.name().partition("::")[2])


def check_written(graph: torch.fx.Graph) -> None:
    """Raises ValueError where a kernel writes to a value that anything else uses: an operator leaves it as it is."""
    for node in graph.nodes:
        function = opaque_function(node.target) if node.op == "call_function" else None
        if function is None:
            continue
        for i in function.changed:
            x = node.args[i]
            while len(x.users) == 1 and x.op == "call_function" and _is_view(x.target):
                x = x.all_input_nodes[0]
            if len(x.users) > 1 or x.op != "call_function":
                raise ValueError(
                    f"capture: {function.label} writes to argument {i} in place, which others use; let it write to a "
                    "clone"
                )


def _is_view(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and returns_alias(target)


def _define(function: OpaqueFunction, tensors: Sequence[Tensor], key: Any) -> None:
    """Find out what it makes, and register its operators."""
    try:
        function.first = _on_memory(function, tensors)
        _check_runs(function, tensors)
    except OpaqueError:
        raise
    except Exception as error:
        fake = _on_fakes(function, tensors)
        if fake is None:
            raise OpaqueError(f"it runs neither on fake tensors nor here ({_line(error)})") from error
        function.first = fake
        function.wanting = tuple(i for i, need in enumerate(function.needs) if need)
    digest = hashlib.sha256(repr((function.cls.__module__, *key[1:])).encode()).hexdigest()[:8]
    name = f"{re.sub(r'[^0-9a-zA-Z_]', '_', function.cls.__qualname__)[-60:]}_{digest}"
    while name in _BY_NAME:
        name += "_"
    function.name = name
    _BY_NAME[name] = function
    _register(function)


def _line(error: Exception) -> str:
    return next((x for x in str(error).splitlines() if x.strip()), type(error).__name__)


def _check_runs(function: OpaqueFunction, tensors: Sequence[Tensor]) -> None:
    """Which inputs get gradients; raises OpaqueError for random numbers."""
    with without_modes(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        examples = [example(x) for x in tensors]
        before = torch.random.get_rng_state()
        made = function.full(examples)
        if not torch.equal(before, torch.random.get_rng_state()):
            raise OpaqueError("it draws random numbers, which ranks would draw differently; pass them in")
        if not any(function.needs):
            return
        count = len(function.first.results)
        marked = function.first.without_gradient
        grads = [None if i in marked else torch.randn_like(x) for i, x in enumerate(made[:count])]
        if function.first.state["zeros"]:
            grads = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, made[:count], strict=True)]
        before = torch.random.get_rng_state()
        known = [x.clone() for x in function.known(examples, made)]
        kept = [x.clone() for x in known]
        found = function.backward(int(made[-1]), known, grads)
        function.spoilt = tuple(i for i, (x, y) in enumerate(zip(known, kept, strict=True)) if not same_bits(x, y))
        if not torch.equal(before, torch.random.get_rng_state()):
            raise OpaqueError("its backward draws random numbers, which ranks would draw differently; pass them in")
    pairs = enumerate(zip(found, function.needs, strict=True))
    function.wanting = tuple(i for i, (g, need) in pairs if need and g is not None)


_DTYPES = [x for x in vars(torch).values() if isinstance(x, torch.dtype)]


def _register(function: OpaqueFunction) -> None:
    """The operators: forward, forward with what it saves, backward."""
    name, count = function.name, len(function.first.results)
    takes = ", ".join(f"Tensor x{i}" for i in range(len(function.places)))
    _LIBRARY.define(f"{name}({takes}) -> {_returns(count)}")
    _LIBRARY.define(f"{name}_saving({takes}) -> {_returns(count + len(function.first.saved) + 1)}")
    _LIBRARY.define(
        f"{name}_backward(Tensor ticket, Tensor[] known, Tensor?[] grads, int[] sizes, int[] ranks, int[] dtypes) -> "
        f"{_returns(max(len(function.wanting), 1))}"
    )

    def forward(*tensors: Tensor) -> Any:
        return _given(function.full(tensors)[:count])

    def fake(*tensors: Tensor) -> Any:
        results, _ = _shapes(function, tensors)
        return _given([tensors[0].new_empty(s, dtype=t) for s, t in results])

    def fake_saving(*tensors: Tensor) -> Any:
        results, saved = _shapes(function, tensors)
        ticket = torch.empty((), dtype=torch.int64, device="cpu")
        return tuple(tensors[0].new_empty(s, dtype=t) for s, t in (*results, *saved)), ticket

    def run_backward(
        ticket: Tensor, known: list[Tensor], grads: list[Any], sizes: list[int], ranks: list[int], dtypes: list[int]
    ) -> Any:
        found = function.backward(int(ticket), known, grads)
        made = []
        for i, (shape, dtype) in zip(function.wanting, _cut(sizes, ranks, dtypes), strict=True):
            g = found[i]
            if g is None:
                g = torch.zeros(shape, dtype=dtype, device=next(x.device for x in grads if x is not None))
            g = g if tuple(g.shape) == shape else g.sum_to_size(shape)
            made.append(g.to(dtype))
        kept = {_memory(x) for x in (*known, *(g for g in grads if g is not None))}
        return _given(_apart(made, kept))

    def fake_backward(
        ticket: Tensor, known: list[Tensor], grads: list[Any], sizes: list[int], ranks: list[int], dtypes: list[int]
    ) -> Any:
        like = next(x for x in grads if x is not None)
        return _given([like.new_empty(shape, dtype=dtype) for shape, dtype in _cut(sizes, ranks, dtypes)])

    def run_saving(*tensors: Tensor) -> Any:
        return tuple(function.full(tensors))

    def whole_fake_saving(*tensors: Tensor) -> Any:
        made, ticket = fake_saving(*tensors)
        return (*made, ticket)

    _LIBRARY.impl(name, forward, "CompositeExplicitAutograd")
    _LIBRARY.impl(f"{name}_saving", run_saving, "CompositeExplicitAutograd")
    _LIBRARY.impl(f"{name}_backward", run_backward, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    torch.library.register_fake(f"{NAMESPACE}::{name}_saving", whole_fake_saving, lib=_LIBRARY)
    torch.library.register_fake(f"{NAMESPACE}::{name}_backward", fake_backward, lib=_LIBRARY)
    if function.wanting:
        _LIBRARY.impl(name, _differentiable(function, count), "Autograd")


def _differentiable(function: OpaqueFunction, count: int) -> Callable[..., Any]:
    """What the operator does where autograd records: its forward that saves, and its backward."""
    ops, name = getattr(torch.ops, NAMESPACE), function.name
    saving, backward = getattr(ops, f"{name}_saving").default, getattr(ops, f"{name}_backward").default

    class Opaque(Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Tensor) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                made = saving(*tensors)
            ctx.save_for_backward(*function.known(tensors, made), made[-1])
            ctx.inputs = [tensors[i].shape for i in function.wanting], [tensors[i].dtype for i in function.wanting]
            ctx.mark_non_differentiable(*(made[i] for i in function.first.without_gradient))
            ctx.set_materialize_grads(function.first.state["zeros"])
            return _given(made[:count])

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            if not function.wanting or all(g is None for g in grads):
                return (None,) * len(function.places)
            *known, ticket = ctx.saved_tensors
            shapes, dtypes = ctx.inputs
            made = backward(
                ticket, known, list(grads), [int(n) for s in shapes for n in s], [len(s) for s in shapes],
                [_DTYPES.index(t) for t in dtypes],
            )  # fmt: skip
            made = made if isinstance(made, tuple | list) else [made]
            by_input = dict(zip(function.wanting, made, strict=True))
            return tuple(by_input.get(i) for i in range(len(function.places)))

    Opaque.__name__ = Opaque.__qualname__ = name
    Opaque.__module__ = "torch._library.autograd"  # the derivative of an operator, not a function of the model

    return lambda *tensors: Opaque.apply(*tensors)


def _cut(sizes: Sequence[int], ranks: Sequence[int], dtypes: Sequence[int]) -> list[tuple[tuple[int, ...], Any]]:
    found, at = [], 0
    for rank, dtype in zip(ranks, dtypes, strict=True):
        found.append((tuple(sizes[at : at + rank]), _DTYPES[dtype]))
        at += rank
    return found


def _given(made: Sequence[Tensor]) -> Any:
    return made[0] if len(made) == 1 else tuple(made)


def _returns(count: int) -> str:
    return "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"
