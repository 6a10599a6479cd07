"""`torch.autograd.grad` within a forward, as operators of the graph: physics-informed nets, gradient penalties, forces.

    u = net(t)                                            u = net(t)
    du = torch.autograd.grad(u.sum(), t, create_graph=True)    -->    du = sum, mm, mul, ... of t and the weights

While a forward is captured, autograd saves values that the tracer does not see (intermediates of composite operators),
so its backward would not be recorded in the graph. Instead the nodes between inputs and outputs are traced again, with
their derivative, as primitive operators, and the result is added to the graph. So the path from inputs to outputs is
computed a second time, and once more for each order of derivative.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._functorch import eager_transforms
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Interpreter, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from autopar.adapters.fx.graph_nodes import node_of
from autopar.adapters.grad_fn_paths import continues_at
from autopar.adapters.operators import mutates, overload_of, returns_alias
from autopar.adapters.traced_threads import traced_by_this_thread
from autopar.capture.layer_dedup.layer_template import result_like, set_node

_AUTOGRAD: Any = torch.autograd
_ENGINES_NAME = "_engine_run_backward"
_ENGINE = getattr(_AUTOGRAD, _ENGINES_NAME)
_VJP: Any = eager_transforms._vjp_with_argnums  # behind vjp, jacrev and hessian, perhaps under vmap
_NO_TRANSFORM = (
    "torch.func.grad, vjp and jacrev cannot be captured within a forward; use torch.autograd.grad(outputs, inputs, "
    "create_graph=True) instead"
)
_aten = torch.ops.aten
# Their formulas treat the saved statistics as constants, which would lose second derivatives.
_TAKEN_APART = (_aten.native_layer_norm, _aten.native_group_norm, _aten.native_batch_norm)
_EQUAL_RESULTS = {
    "split",
    "split_with_sizes",
    "unbind",
    "var_mean",
    "std_mean",
}  # all of their results are differentiable


class DerivativeError(ValueError):
    """A derivative within the forward that cannot be captured."""


@contextlib.contextmanager
def captured_derivatives() -> Iterator[None]:
    """Context manager: `torch.autograd.grad`, under any name, returns values of the graph; backward is refused."""
    traced = traced_by_this_thread()

    def asked(*args: Any, **kwargs: Any) -> Any:
        return _asked(*args, **kwargs) if traced() else _ENGINE(*args, **kwargs)

    def vjp(*args: Any, **kwargs: Any) -> Any:
        if traced():
            raise DerivativeError(_NO_TRANSFORM)
        return _VJP(*args, **kwargs)

    with _replaced(_AUTOGRAD, _ENGINES_NAME, asked), _replaced(eager_transforms, "_vjp_with_argnums", vjp):
        yield


@contextlib.contextmanager
def _replaced(module: Any, name: str, function: Any) -> Iterator[None]:
    """Context manager: replace a function that torch calls by this name, such as the autograd engine."""
    before = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, before)


def _asked(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    keep_graph: bool,
    create_graph: bool,
    inputs: Sequence[Any],
    allow_unused: bool = True,
    accumulate_grad: bool = False,
    allow_unreachable: bool = True,
) -> tuple[Tensor | None, ...]:
    """Replaces the autograd engine."""
    mode: Any = get_proxy_mode()
    if torch._C._are_functorch_transforms_active():
        raise DerivativeError(_NO_TRANSFORM)
    if accumulate_grad:
        raise DerivativeError(
            "backward() within a forward adds to .grad of tensors, which a graph cannot return; use "
            "torch.autograd.grad(loss, tensors, create_graph=True) instead"
        )
    found = _derivative(mode.tracer, outputs, gradients, inputs)
    if not allow_unused and any(x is None for x in found):
        raise DerivativeError(
            "torch.autograd.grad differentiates with respect to a tensor that the outputs do not depend on; pass "
            "allow_unused=True if that is intended"
        )
    return tuple(x if x is None or create_graph else x.detach() for x in found)


def _derivative(
    tracer: Any, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: Sequence[Any]
) -> list[Tensor | None]:
    """The gradient of each input; None for one that the outputs do not depend on."""
    starts = [_known(x, tracer) for x in inputs]
    pairs = [(_known(x, tracer), gradient) for x, gradient in zip(outputs, gradients, strict=True)]
    between = _between(tracer.graph, starts, [x for x, _ in pairs])
    inner = set(between)
    pairs = [(x, gradient) for x, gradient in pairs if x in inner or x in starts]
    if not pairs:
        return [None for _ in inputs]
    around = (x for node in between for x in node.all_input_nodes)
    first = list(dict.fromkeys(x for x in (*around, *starts) if x not in inner))
    _check(tracer.graph, {*starts}, inner, {*first, *inner})
    seeds, used = [gradient for _, gradient in pairs if gradient is not None], list[bool]()

    def run(values: list[Tensor], given: list[Tensor]) -> list[Tensor]:
        known, left = dict(zip(first, values, strict=True)), iter(given)
        with torch.enable_grad():
            known |= {node: known[node].detach().requires_grad_() for node in starts if node not in inner}
            for node in between:
                args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
                known[node] = _functional(node.target)(*args, **kwargs)
            found = torch.autograd.grad(
                [known[x] for x, _ in pairs],
                [known[x] for x in starts],
                [next(left) if gradient is not None else None for _, gradient in pairs],
                allow_unused=True,
            )
        used[:] = [x is not None for x in found]
        return [x for x in found if x is not None]

    taken = [_bound(node, tracer) for node in first]
    with _disable_current_modes(), FakeTensorMode(), torch.no_grad(), _replaced(_AUTOGRAD, _ENGINES_NAME, _ENGINE):
        alike = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in (*taken, *seeds)]
        graph = make_fx(run, _primitives())(alike[: len(first)], alike[len(first) :])
    graph.graph.eliminate_dead_code()
    _check_derivative(graph.graph)
    found = iter(Interpreter(graph).run(taken, seeds))
    return [next(found) if taking_part else None for taking_part in used]


def _known(x: Any, tracer: Any) -> Node:
    node = node_of(x, tracer) if isinstance(x, Tensor) else None
    if node is None:
        raise DerivativeError(_refusal("a tensor that depends on no input and no weight"))
    return node


def _refusal(what: str) -> str:
    return (
        f"torch.autograd.grad goes through {what}, whose derivative cannot be captured within a forward; write the "
        "derivative explicitly, or compute this part outside of the model"
    )


def _between(graph: Any, starts: Sequence[Node], ends: Sequence[Node]) -> list[Node]:
    """Nodes on differentiable paths from the starts to the ends, in order, including starts that depend on other
    starts. Detached values are not on such a path."""
    reached, after, enabled = set(starts), set[Node](), True
    for node in graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            enabled = bool(node.args[0])
        elif enabled and _passes_gradients(node) and any(x in reached for x in node.all_input_nodes):
            reached.add(node)
            after.add(node)
    behind = set(ends)
    for node in reversed(graph.nodes):
        if node in behind:
            behind.update(node.all_input_nodes)
    return [node for node in graph.nodes if node in after and node in behind]


def _passes_gradients(node: Node) -> bool:
    if node.op != "call_function" or node.target in (torch.ops.aten.detach.default, torch.ops.aten.detach_.default):
        return False
    made = (x for x in pytree.tree_leaves(node.meta.get("val")) if isinstance(x, Tensor))
    return any(x.is_floating_point() or x.is_complex() for x in made)


def _check(graph: Any, starts: set[Node], inner: set[Node], read: set[Node]) -> None:
    """Raises DerivativeError for calls that would compute something else when traced a second time."""
    roots, reached = {_root(node) for node in read}, set(starts)
    for node in graph.nodes:
        if any(x in reached for x in node.all_input_nodes):
            reached.add(node)
        name = str(node.target)
        if "autocast" in name:
            raise DerivativeError(_refusal("a forward with an autocast inside"))
        writes = mutates(node.target) and not (node in inner and _is_fresh(node))
        if writes and (node in reached or _root(node.args[0]) in roots):
            raise DerivativeError(_refusal(f"a forward that writes in place ({name})"))
        if node not in inner or node.target is operator.getitem:
            continue
        if not isinstance(node.target, OpOverload) or node.target.namespace == "autopar":
            raise DerivativeError(_refusal(name))
        if torch.Tag.nondeterministic_seeded in node.target.tags and not _draws_nothing(node):
            raise DerivativeError(_refusal(f"random numbers ({name})"))


def _root(node: Any) -> Any:
    """The base of a view."""
    while isinstance(node, Node) and isinstance(node.target, OpOverload) and returns_alias(node.target):
        node = node.args[0]
    return node


def _is_fresh(node: Node) -> bool:
    """Whether an in-place operator writes to a temporary without other users, so that it can be made functional:
    relu_(conv(x))."""
    written = node.args[0] if node.args else None
    if not isinstance(written, Node) or written.op != "call_function" or len(written.users) != 1:
        return False
    alone = isinstance(written.target, OpOverload) and (mutates(written.target) or not returns_alias(written.target))
    return alone and _functional(node.target) is not node.target


def _functional(op: Any) -> Any:
    """relu for relu_; the operator itself if it does not write, or has no functional form."""
    if not mutates(op):
        return op
    packet = getattr(torch.ops.aten, str(op).split(".")[1].removesuffix("_"), None)
    return getattr(packet, overload_of(op) or "default", op)


def _check_derivative(graph: Any) -> None:
    """Raises DerivativeError for a derivative that cannot itself be differentiated."""
    for node in graph.nodes:
        if mutates(node.target):
            raise DerivativeError(_refusal("an operator that writes to a buffer, as batch norm does"))
        if node.target is not operator.getitem or not node.args[1]:
            continue
        made, source = node.meta.get("val"), str(node.args[0].target)
        if isinstance(made, Tensor) and made.is_floating_point() and source.split(".")[1] not in _EQUAL_RESULTS:
            raise DerivativeError(_refusal(f"{source}, of which {node.name} is used"))


@functools.cache
def _primitives() -> dict[Any, Any]:
    """Decompositions of operators and their derivatives into differentiable operators."""
    return {
        **core_aten_decompositions(),
        **get_decompositions(_TAKEN_APART),
        _aten.convolution_backward.default: _convolution,
    }


def _convolution(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Any,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    wanted: list[bool],
) -> Any:
    """The gradient of the input alone, as a convolution; for those of the weights torch's decomposition is used."""
    if wanted[1] or wanted[2]:
        return NotImplemented
    left = [0] * len(stride)
    if not transposed:
        windows = [s * (n - 1) - 2 * p + d * (k - 1) + 1 for s, n, p, d, k in zip(
            stride, grad.shape[2:], padding, dilation, weight.shape[2:], strict=True
        )]  # fmt: skip
        left = [size - n for size, n in zip(x.shape[2:], windows, strict=True)]
    made = torch.ops.aten.convolution(grad, weight, None, stride, padding, dilation, not transposed, left, groups)
    return made, None, None


def _draws_nothing(node: Node) -> bool:
    """dropout(x, 0.0, True), dropout(x, 0.1, False)"""
    return node.target is torch.ops.aten.dropout.default and (not node.args[1] or not node.args[2])


def _bound(node: Node, tracer: Any) -> Any:
    """A tensor that the tracer maps to a node."""
    made = result_like(node.meta["val"], requires_grad=node.meta["val"].is_floating_point())
    set_node(made, node, tracer)
    continues_at(made, None)
    return made
