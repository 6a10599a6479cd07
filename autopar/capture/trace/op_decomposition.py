"""Decomposition of an operator call and of its derivative into core operators, in the order in which autograd runs
them.

    record(lambda x, w: linear(x, w), [x, w], tangents=[g])
        t(1)  mm(0, 2)  |  t(4)  mm(5, 0) ...              values are numbered: operands, tangents, results

A dispatch mode records the operators on fake tensors. What it cannot record (a value from elsewhere, an operator that
writes to its operand or has no result) is left to AOTAutograd, which functionalizes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.effects import has_effects
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule
from torch.fx.node import map_arg

from autopar.adapters.copying.fake import new_mode
from autopar.capture.trace.aot import explain, traced_joint
from autopar.capture.trace.call_recorder import MADE, CallRecorder


@dataclass(frozen=True)
class TensorMeta:
    """Metadata of a fake tensor: shape, strides, storage offset, dtype."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> TensorMeta:
        return cls(tuple(x.shape), x.stride(), int(x.storage_offset()), x.dtype)

    def fake(self, mode: FakeTensorMode) -> Tensor:
        """A new fake tensor, made without the dispatcher for speed: graphs have one per node."""
        return FakeTensor(mode, self._meta(), torch.device("cpu"))

    def _meta(self) -> Tensor:
        if not self.offset:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        last = sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True)) if 0 not in self.shape else 0
        whole = torch.empty(self.offset + last + 1, dtype=self.dtype, device="meta")
        return whole.as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True)
class Value:
    """Refers to a value by its number."""

    number: int


@dataclass(frozen=True)
class CoreCall:
    """A call of a core operator, with `Value` for tensors. number: of its result. original: the operator it
    decomposes."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    number: int
    original: Any


# Metadata of a tensor, of several tensors, or None for an unused tangent.
ResultMeta = TensorMeta | tuple[TensorMeta | None, ...] | None


@dataclass(frozen=True)
class Recorded:
    """A recorded decomposition. likes: metadata of all values, by number. calls: in order; the first ``forward`` of
    them are the forward. results: one Value per tensor, None for other results. needs: which results require grad.
    gradients: of operands, or None. several: whether the operator returns a tuple."""

    likes: tuple[ResultMeta, ...]
    calls: tuple[CoreCall, ...]
    forward: int
    results: tuple[Value | None, ...]
    needs: tuple[bool, ...]
    gradients: tuple[Value | None, ...]
    several: bool

    def metas(self, values: Sequence[Value | None]) -> list[TensorMeta | None]:
        """Metadata of values, each one tensor."""
        return [None if v is None else self.likes[v.number] for v in values]  # type: ignore[misc]


class _CallList(CallRecorder):
    """Records calls as a list, with numbered values."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self.calls: list[CoreCall] = []
        self.likes: list[ResultMeta] = []
        for x in given:
            self._add(x)

    def note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        self.complete &= not func._schema.is_mutable and bool(func._schema.returns) and not has_effects(func)
        if isinstance(out, Tensor):
            self.calls.append(CoreCall(func, args, kwargs, self._add(out), func))
        elif isinstance(out, (tuple, list)) and all(x is None or isinstance(x, Tensor) for x in out):
            several = Value(len(self.likes))
            self.likes.append(like_of(out))
            self.calls.append(CoreCall(func, args, kwargs, several.number, func))
            for i, x in enumerate(out):
                if x is not None:
                    self.calls.append(CoreCall(operator.getitem, (several, i), {}, self._add(x), func))
        else:
            self.complete = False

    def _add(self, x: Tensor) -> int:
        number = len(self.likes)
        self.known[x] = Value(number)
        self.likes.append(TensorMeta.of(x))
        return number


def like_of(val: Any) -> ResultMeta:
    """Metadata of a result: one tensor, or several."""
    return (
        TensorMeta.of(val) if isinstance(val, Tensor) else tuple(None if x is None else TensorMeta.of(x) for x in val)
    )


def fake_of(likes: ResultMeta, mode: FakeTensorMode) -> Any:
    """New fake tensors for metadata."""
    return likes.fake(mode) if isinstance(likes, TensorMeta) else tuple(x and x.fake(mode) for x in likes or ())


MODE = new_mode()
# Whole recordings are cached, so torch's own cache of fake results would only see misses, which take longer than
# running most operators.
MODE.cache_enabled = False


def record(
    run: Callable[..., Any],
    operands: Sequence[TensorMeta],
    needs: Sequence[bool],
    tangents: Sequence[TensorMeta | None] | None,
    checked: Any,
) -> Recorded:
    """Record the calls of ``run(*operands)`` and of the gradients of the operands that need one.

    ``tangents``: metadata of the gradient of each result, or None for a result without; None: no derivative. Values are
    numbered from the operands, then the tangents. ``checked``: see `autopar.capture.trace.effects`. Raises ValueError
    where torch has no backward.
    """
    given = [like.fake(MODE).requires_grad_(wanted) for like, wanted in zip(operands, needs, strict=True)]
    arriving = [like.fake(MODE) for like in tangents or () if like is not None]
    recorder = _CallList([*given, *arriving])
    with torch.inference_mode(False), torch.enable_grad(), MODE, recorder:
        results, several = _flat(run(*given))
        forward = len(recorder.calls)
        found = _gradients(results, given, needs, tangents, arriving)
    values, gradients = tuple(recorder.named(results)), tuple(recorder.named(found))
    if not recorder.complete:
        return _traced(run, given, needs, tangents, arriving, checked)
    live = tuple(x is not None and x.requires_grad for x in results)
    return Recorded(tuple(recorder.likes), tuple(recorder.calls), forward, values, live, gradients, several)


def _flat(out: Any) -> tuple[list[Any], bool]:
    return (list(out), True) if isinstance(out, (tuple, list)) else ([out], False)


def _gradients(results: Any, given: Any, needs: Any, tangents: Any, arriving: Any) -> Sequence[Tensor | None]:
    if tangents is None:
        return ()
    ends = [x for x, t in zip(results, tangents, strict=True) if t is not None]
    wanted = [x for x, w in zip(given, needs, strict=True) if w]
    try:
        found = iter(torch.autograd.grad(ends, wanted, arriving, allow_unused=True))
    except RuntimeError as error:
        explain(error)
        raise
    return [next(found) if w else None for w in needs]


# --- fallback to AOTAutograd -----------------------------------------------------------


class _WithTangent(torch.autograd.Function):
    """x with ``gradient`` as its incoming gradient: AOTAutograd's own tangents would have the strides of results."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient, None


def _traced(run: Any, given: list[Tensor], needs: Any, tangents: Any, arriving: list[Tensor], checked: Any) -> Recorded:
    found: dict[str, Any] = {}

    def function(*tensors: Tensor) -> list[Tensor]:
        results, found["several"] = _flat(run(*tensors[: len(given)]))
        found["needs"] = tuple(x is not None and x.requires_grad for x in results)
        found["there"] = [x is not None for x in results]
        given_tangents = iter(tensors[len(given) :])
        live = tangents or [None] * len(results)
        pairs = [(x, t) for x, t in zip(results, live, strict=True) if x is not None]
        return [x.detach().clone() if t is None else _WithTangent.apply(x, next(given_tangents)) for x, t in pairs]

    derives = bool(arriving)
    inputs = [*(x if derives else x.detach() for x in given), *arriving]
    with torch.inference_mode(False), torch.enable_grad():
        gm = traced_joint(function, inputs, checked)
    if not derives:  # for requires_grad of the results
        with torch.inference_mode(False), torch.enable_grad(), MODE:
            function(*given)
    return _as_recorded(gm, found, len(given), needs if derives else ())


def _as_recorded(gm: GraphModule, found: Mapping[str, Any], operands: int, wanted: Sequence[bool]) -> Recorded:
    """``operands``: how many inputs of the graph are operands; incoming gradients follow them."""
    numbers: dict[Any, Any] = {}
    likes: list[ResultMeta] = []
    calls: tuple[list[CoreCall], list[CoreCall]] = [], []  # of the forward, of the backward
    late: set[Any] = set()  # not all nodes of the backward are tagged as such
    for number, node in enumerate(n for n in gm.graph.nodes if n.op != "output"):
        numbers[node] = Value(number)  # placeholders: inputs, then AOTAutograd's own tangents, which are unused
        likes.append(like_of(node.meta["val"]))
        if node.op == "call_function":
            args, kwargs = map_arg((node.args, node.kwargs), numbers.__getitem__)
            backward = node.meta.get("partitioner_tag") == "is_backward" or not late.isdisjoint(node.all_input_nodes)
            late |= {node} if backward else set()
            target = MADE.get(node.target, node.target)
            calls[backward].append(CoreCall(target, args, kwargs, number, node.meta.get("original_aten")))
        elif number >= operands:
            late.add(node)
    copies: Any = iter(gm.graph.output_node().args[0])  # type: ignore[arg-type]
    # results are clones, since AOTAutograd cannot return views
    results = tuple(numbers[next(copies).args[0]] if there else None for there in found["there"])
    gradients = tuple(numbers.get(x) if w else None for w, x in zip(wanted, copies))  # one for every input
    assert all(x is None for x in copies), "tangents have no gradients"
    every = (*calls[0], *calls[1])
    return Recorded(tuple(likes), every, len(calls[0]), results, found["needs"], gradients, found["several"])
