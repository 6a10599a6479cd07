"""Decomposes torch's training graph into a flat functional graph, node by node where possible.

    torch.export  --`ExportedProgram.run_decompositions`-->  flat graph        traces the whole graph again
                  --`decompose`-->                           the same graph    traces decomposed operators only

`run_decompositions` makes in-place operators functional, inlines grad-mode regions, decomposes composite operators
whose result may alias an operand (reshape, to, chunk, contiguous), and keeps the others (linear, layer_norm, sdpa).
All of that is local to one node, unless a tensor that is written to has views. In that case, and where `decompose`
meets anything unknown, it falls back to `run_decompositions`.

    q = mm(x, w); q.div_(z); y = reshape(q, [4, 8])   -->   q = mm(x, w); div = div(q, z); y = view(div, [4, 8])
    count.add_(1); return y                           -->   add = add(count, 1); return add, y
    z[1:].copy_(x); return z                          -->   z' = slice_scatter(z, copy(z[1:], x), 0, 1); return z'

The second example writes to a buffer: its new value is an output of the graph, and in the signature.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._export.utils import _is_cia_op, _is_preservable_cia_op
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, OutputSpec, TensorArgument
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from autopar.adapters.ac_regions import decomposed
from autopar.adapters.fx.graph_nodes import copied_node
from autopar.adapters.keys import told_apart
from autopar.adapters.operators import mutates, returns_alias
from autopar.capture.trace.call_recorder import CallRecorder

REGION = torch.ops.higher_order.wrap_with_set_grad_enabled
_BATCH_NORM = torch.ops.aten.batch_norm.default  # writes to its statistics, though its schema does not say so


class _Unsupported(Exception):
    """`decompose` cannot handle a node; fall back to `run_decompositions`."""


def decompose(program: ExportedProgram, table: Mapping[Any, Callable[..., Any]]) -> ExportedProgram:
    """`run_decompositions` with ``table``; may change ``program`` and return it."""
    bodies = _Bodies()
    graph, known = bodies.graph, _Known(_buffers(program))
    try:
        returned = _copied(program.graph, program.graph_module, bodies, known, table)
    except _Unsupported:
        return decomposed(program, table)
    written = {name: known[node] for node, name in known.buffers.items() if node in known.written}
    graph.output((*written.values(), *returned))
    _keep_metas(graph.output_node(), program.graph_module.graph.output_node())
    graph.eliminate_dead_code()
    program.graph_module.graph = graph
    parameters = program.graph_signature.parameters
    program.graph_signature.output_specs[:0] = [
        OutputSpec(
            OutputKind.PARAMETER_MUTATION if name in parameters else OutputKind.BUFFER_MUTATION,
            TensorArgument(node.name),
            name,
        )
        for name, node in written.items()
    ]
    return program


class _Known(dict[Any, Any]):
    """Node of the old graph -> its value in the new one. ``buffers``: those that may be written to; ``written``: those
    that were."""

    def __init__(self, buffers: Mapping[Node, str], given: Mapping[Node, Any] | None = None) -> None:
        super().__init__(given or {})
        self.buffers, self.written = buffers, set[Node]()

    def write(self, node: Node, value: Any, at: Node) -> None:
        """Make ``value`` the value of the tensor of ``node`` after ``at``, under all its names. Unsupported if a view
        from before is used later, since it would have to change as well."""
        root, names = _names(node)
        if root.op not in ("call_function", "placeholder") or (root.op == "placeholder" and root not in self.buffers):
            raise _Unsupported
        if root.op == "call_function" and may_alias(root):
            raise _Unsupported
        before = {user for name in names for user in name.users if user < at and user not in names}
        if any(may_alias(user) and _used_after(user, at) for user in before):
            raise _Unsupported
        self.written.add(root)
        self.update(dict.fromkeys([n for n in names if n in self or n is root], value))


def _names(node: Node) -> tuple[Node, list[Node]]:
    """(node that created a tensor, all nodes for this tensor): in-place operators return it."""
    while mutates(node.target):
        node = _written(node)
    names = [node]
    for name in names:
        names += [user for user in name.users if mutates(user.target) and _written(user) is name]
    return node, names


def _used_after(view: Node, at: Node) -> bool:
    """Whether a view, or a view of it, is used after a node, or through the result of that node."""
    later = {user for user in view.users if user > at or (user is at and at.users)}
    return bool(later) or any(_used_after(user, at) for user in view.users if user < at and may_alias(user))


def _written(node: Node) -> Node:
    """The operand that an operator writes to."""
    if not node.args or not isinstance(node.args[0], Node):
        raise _Unsupported
    return node.args[0]


def _buffers(program: ExportedProgram) -> dict[Node, str]:
    """The placeholders of buffers and frozen parameters that share storage with no other input."""
    signature, tensors = program.graph_signature, {**program.constants, **program.state_dict}
    given = (tensors.get(str(spec.target)) for spec in signature.input_specs)
    shared = Counter(x.untyped_storage()._cdata for x in given if isinstance(x, Tensor))
    names = {
        spec.arg.name: str(spec.target)
        for spec in signature.input_specs
        if spec.kind in (InputKind.BUFFER, InputKind.PARAMETER)
        and not (spec.kind == InputKind.PARAMETER and tensors[spec.target].requires_grad)
        and shared[tensors[spec.target].untyped_storage()._cdata] == 1
    }
    return {n: names[n.name] for n in program.graph.nodes if n.op == "placeholder" and n.name in names}


def _copied(source: Graph, gm: GraphModule | None, to: _Bodies, known: _Known, table: Mapping[Any, Any]) -> Any:
    """Append a graph, of a module with regions, to ``to``; returns its result. ``known``: nodes with values."""
    for node in source.nodes:
        if node in known or node.op == "get_attr":
            continue
        if node.op == "output":
            return pytree.tree_map_only(Node, known.__getitem__, node.args[0])
        if node.op == "placeholder":
            known[node] = copied_node(to.graph, node, known.__getitem__)
            known[node].name = node.name  # keep the name of the signature, even a Python builtin such as input
        elif node.target is REGION:
            known[node] = _inlined(node, gm, to, known, table)
        elif node.target is operator.getitem and isinstance(known[node.args[0]], (tuple, list)):
            known[node] = known[node.args[0]][node.args[1]]
        else:
            known[node] = _call(node, to, known, table)
    raise AssertionError("a graph returns")


def _call(node: Node, to: _Bodies, known: _Known, table: Mapping[Any, Any]) -> Any:
    """The value of an operator in the new graph."""
    if node.target is operator.getitem:
        return copied_node(to.graph, node, known.__getitem__)
    if not isinstance(node.target, OpOverload) or node.target in table:
        raise _Unsupported
    if node.target in LIFTS:
        return _traced(torch.ops.aten.clone.default, node, to, known)
    if node.target is torch.ops.aten.detach_.default and node.all_input_nodes[0].target in LIFTS:
        known[node.args[0]] = known[node.all_input_nodes[0]]
        return known[node.all_input_nodes[0]]
    if mutates(node.target):
        value, written = _functional(node, to, known), _written(node)
        if written.target in _SCATTERS:
            written, value = _scattered(written, value, node, to, known)
        if value is not known[written]:
            known.write(written, value, node)
        return value
    if node.target is _BATCH_NORM and _keeps_statistics(*node.args):
        return _batch_norm(node, to, known)
    if _is_cia_op(node.target) and not _is_preservable_cia_op(node.target):
        return _traced(node.target, node, to, known)
    return copied_node(to.graph, node, known.__getitem__)


def _keeps_statistics(x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: Any, *_: Any) -> bool:
    """Whether a batch norm writes to its running statistics."""
    return bool(training) and isinstance(mean, Node) and isinstance(var, Node)


def _batch_norm(node: Node, to: _Bodies, known: _Known) -> Any:
    """batch_norm(x, ..., mean, var) --> its result, and the new running statistics."""

    def call(*args: Any) -> Any:
        return torch.ops.aten._native_batch_norm_legit_functional.default(*args[:-1])  # without cudnn_enabled

    result, _, _, *statistics = _traced(call, node, to, known)
    for operand, value in zip(node.args[3:5], statistics, strict=True):
        assert isinstance(operand, Node)
        known.write(operand, value, node)
    return result


def _functional(node: Node, to: _Bodies, known: Mapping[Node, Any]) -> Any:
    """div_(x, y) --> div(x, y)"""
    assert isinstance(node.target, OpOverload)
    values = [known[x] for x in node.all_input_nodes]
    if node.target is torch.ops.aten.copy_.default and len(values) == 2 and values[0] is values[1]:
        return values[0]  # m.count += 1 calls m.count = m.count.add_(1), which copies the result to itself
    functional = _functional_overload(node.target)
    asked = {a.name for a in functional._schema.arguments if not a.has_default_value()}
    for argument in node.target._schema.arguments[len(node.args) :]:  # bernoulli_(x) is bernoulli(x, 0.5)
        if argument.name in asked and argument.name not in node.kwargs:
            node.args = (*node.args, argument.default_value)
    return _traced(functional, node, to, known)


@functools.cache
def _functional_overload(in_place: OpOverload) -> OpOverload:
    """The functional form of an in-place operator, with the same argument types: pow.Tensor_Scalar for pow_.Scalar, not
    pow.Scalar."""
    name = in_place._schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, name[:-1], None) if name.endswith("_") else None
    overloads = [in_place._overloadname, *packet.overloads()] if packet is not None else []
    for overload in overloads:
        found = getattr(packet, overload, None)
        if found is not None and _taken(found) == _taken(in_place):
            return cast(OpOverload, found)
    raise _Unsupported


def _taken(overload: OpOverload) -> list[tuple[str, bool]]:
    return [(str(a.type), a.is_out) for a in overload._schema.arguments]


def _scattered(view: Node, value: Any, at: Node, to: _Bodies, known: Mapping[Node, Any]) -> tuple[Node, Any]:
    """(base of a view, its new value), after ``at`` has written ``value`` to the view."""
    while view.target in _SCATTERS:
        if _used_after(view, at):
            raise _Unsupported
        base, *where = view.args
        assert isinstance(base, Node)
        if view.kwargs or not isinstance(known[base], Node):
            raise _Unsupported
        scattered = to.graph.call_function(_SCATTERS[view.target], (known[base], value, *where))
        scattered.meta["val"] = scattered.target(known[base].meta["val"], value.meta["val"], *where)  # type: ignore[operator]
        _keep_metas(scattered, at)
        if _meta(scattered.meta["val"]) != _meta(known[base].meta["val"]):
            raise _Unsupported
        view, value = base, scattered
    return view, value


def may_alias(node: Node) -> bool:
    """Whether the result of a node may be a view of an operand."""
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        return may_alias(node.args[0])
    if not isinstance(node.target, OpOverload):
        return node.op == "call_function"
    if node.target is _BATCH_NORM or node.target in _FRESH:
        return False
    return _is_cia_op(node.target) or returns_alias(node.target)


def _inlined(node: Node, gm: GraphModule | None, to: _Bodies, known: _Known, table: Mapping[Any, Any]) -> Any:
    """no_grad(f, x) --> f(x); its operands have been detached before."""
    _, function, *operands = node.args
    assert isinstance(function, Node)
    body = getattr(gm, str(function.target))
    inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
    places = dict(zip(inputs, operands, strict=True))
    inner = _Known(dict.fromkeys(inputs, ""), {x: known[y] for x, y in places.items()})
    returned = _copied(body.graph, body, to, inner, table)
    for x in inner.written & places.keys():
        known.write(places[x], inner[x], node)
    return returned


def _traced(target: Callable[..., Any], node: Node, to: _Bodies, known: Mapping[Node, Any]) -> Any:
    """Append the decomposition of ``target`` for the operands of ``node``; returns its result."""
    body, operands = to.body(target, node, known)
    before = len(to.graph.nodes)
    # No buffers to write to: decompositions write only to tensors that they create, such as a dropout mask.
    result = _copied(body.graph, None, to, _Known({}, dict(zip(body.inputs, operands, strict=True))), {})
    for new in itertools.islice(reversed(to.graph.nodes), len(to.graph.nodes) - before):
        _keep_metas(new, node)
        value = new.meta["val"]  # the body shares its values between all copies
        new.meta["val"] = (
            value.detach() if isinstance(value, Tensor) else pytree.tree_map_only(Tensor, Tensor.detach, value)
        )
    if isinstance(result, Node):
        made, kept = _meta(result.meta["val"]), _meta(node.meta["val"])
        into = node.args[0].target if mutates(node.target) and isinstance(node.args[0], Node) else None
        if made != kept and (into not in _SCATTERS or made[:2] != kept[:2]):
            # An in-place operator keeps the dtype; a view is scattered into its base, so its strides may differ.
            raise _Unsupported
    return result


class _Bodies:
    """The new graph, and decompositions of operators, cached by their operands."""

    def __init__(self) -> None:
        self.graph = Graph()
        self._known: dict[Any, _Body] = {}

    def body(self, target: Callable[..., Any], node: Node, known: Mapping[Node, Any]) -> tuple[_Body, list[Any]]:
        """(decomposition of ``target`` for the operands of ``node``, these operands)."""
        leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Node)]
        operands = [known[leaves[i]] for i in places]
        values = [x.meta["val"] for x in operands]
        same = tuple(operands.index(x) for x in operands)  # which operands are the same
        fixed = tuple(told_apart(x) for x in leaves if not isinstance(x, Node))
        key = target, spec, fixed, tuple(places), same, tuple((_meta(x), x.storage_offset()) for x in values)
        hashable = isinstance(target, OpOverload) and all(isinstance(x, Hashable) for x in leaves)
        if not hashable or key not in self._known:
            for i, value in zip(places, values, strict=True):
                leaves[i] = value
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            body = _recorded(target, args, kwargs, values)
            if not hashable:
                return body, operands
            self._known[key] = body
        return self._known[key], operands


def _recorded(target: Callable[..., Any], args: Any, kwargs: Any, values: Sequence[Tensor]) -> _Body:
    with enable_python_dispatcher(), _Body(values) as body:  # some decompositions are in Python
        returned = body.named(target(*args, **kwargs))
    if not body.complete:
        raise _Unsupported
    body.graph.output(returned)
    return body


class _Body(CallRecorder):
    """Records calls as a graph with an input for each of ``given``."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self.graph = Graph()
        self.inputs = [self.graph.placeholder(f"x{i}") for i in range(len(given))]
        for x, node in zip(given, self.inputs, strict=True):
            self._add(x, node)

    def note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        node = self.graph.call_function(func, args, kwargs)
        if isinstance(out, Tensor):
            self._add(out, node)
        else:
            self.complete &= isinstance(out, (tuple, list)) and all(isinstance(x, Tensor) for x in out)
            for i, x in enumerate(out if self.complete else ()):
                self._add(x, self.graph.call_function(operator.getitem, (node, i)))
            node.meta["val"] = tuple(n.meta["val"] for n in node.users)

    def _add(self, x: Tensor, node: Node) -> None:
        self.known[x], node.meta["val"] = node, x.detach()


def _meta(value: Any) -> Any:
    return (value.dtype, value.shape, value.stride(), value.device) if isinstance(value, Tensor) else None


def _keep_metas(new: Node, old: Node) -> None:
    """Copy the meta of a node, such as its line in the model, but not its value."""
    new.meta = {**old.meta, **({"val": new.meta["val"]} if "val" in new.meta else {})}


_SCATTERS: dict[Any, OpOverload] = {
    torch.ops.aten.slice.Tensor: torch.ops.aten.slice_scatter.default,
    torch.ops.aten.select.int: torch.ops.aten.select_scatter.default,
}
# Composite operators whose result never aliases an operand.
_FRESH = {torch.ops.aten.matmul.default, torch.ops.aten.linear.default}
LIFTS = (torch.ops.aten.lift_fresh_copy.default,)
