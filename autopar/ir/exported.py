"""From the result of torch.export to a signature: the inputs and outputs of the graph, and their names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Graph, GraphModule, Interpreter, Node

from autopar.adapters.grad_fn_paths import GradFnPaths, start_of
from autopar.capture.module_state.assigned import BufferWatch
from autopar.capture.trace.export import flatten, paths, unflatten
from autopar.ir.graph import fake_mode, insert_call, outputs, placeholders, tensor_operands, values
from autopar.ir.meta import signature_of
from autopar.ir.signature import ConstantLeaf, InputSpec, OutputSpec
from autopar.ops.traits import STOPS_GRADIENT

aten = torch.ops.aten


def specs_of_inputs(program: ExportedProgram, replica: nn.Module, leaves: list[str]) -> list[InputSpec]:
    """Input specs in placeholder order; the placeholders of tied names are merged into the first."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    tensors: dict[str, Tensor] = dict(replica.named_parameters(remove_duplicate=False))
    tensors |= dict(replica.named_buffers(remove_duplicate=False))
    names: dict[int, list[str]] = {}
    for name, value in tensors.items():
        names.setdefault(id(value), []).append(name)
    kinds = {InputKind.PARAMETER: "parameter", InputKind.BUFFER: "buffer", InputKind.CONSTANT_TENSOR: "constant"}
    specs: dict[int, InputSpec] = {}
    out: list[InputSpec] = []
    user = iter(leaves)
    for spec in program.graph_signature.input_specs:
        if spec.kind == InputKind.USER_INPUT:
            out.append(InputSpec(spec.arg.name, "input", next(user)))
            continue
        if spec.kind not in kinds:
            raise ValueError(
                "capture: operators must take tensors and Python constants, found an object, such as a torch.Generator "
                f"of the model ({spec.kind.name.lower()}); draw from torch's default generator, or pass in the numbers"
            )
        tensor = tensors.get(spec.target or "")
        if tensor is None:
            out.append(InputSpec(spec.arg.name, "constant", str(spec.target)))
        elif id(tensor) in specs:
            nodes[spec.arg.name].replace_all_uses_with(nodes[specs[id(tensor)].node])
        else:
            first, *aliases = names[id(tensor)]
            kind, persistent = kinds[spec.kind], spec.persistent is not False
            entry = InputSpec(spec.arg.name, kind, first, tuple(aliases), tensor.requires_grad, persistent)
            specs[id(tensor)] = entry
            out.append(entry)
    return out


@dataclass
class Made:
    """What a graph returns: specs and nodes of the flat tensor outputs, then of new values of buffers; ``leaves``: for
    each leaf of the user's structure (``spec``) its position, or the constant that it is."""

    outputs: list[OutputSpec]
    values: list[Node]
    leaves: list[int | ConstantLeaf]
    spec: Any

    @classmethod
    def of(cls, program: ExportedProgram, inputs: Sequence[InputSpec], buffers: BufferWatch) -> Made:
        """``buffers``: the record of the forward. Raises ValueError for a write to anything but a buffer or a
        parameter."""
        nodes: Any = program.graph.output_node().args[0]
        spec = program.call_spec.out_spec
        structure: Any = unflatten([_LEAF] * spec.num_leaves, spec)
        assigned = iter([a.name for a in buffers.assigned if a.value])
        parameters = {name: s for s in inputs if s.kind == "parameter" for name in (s.name, *s.aliases)}
        if buffers.assigned:
            structure, spec = structure[0], flatten(structure[0])[1]
        names = enumerate(path for path, _ in paths(structure))
        made, new = cls([], [], [], spec), list[tuple[OutputSpec, Node]]()
        for node, entry in zip(nodes, program.graph_signature.output_specs, strict=True):
            if entry.kind == OutputKind.BUFFER_MUTATION:
                new.append((OutputSpec("mutation", str(entry.target)), node))
            elif entry.kind == OutputKind.PARAMETER_MUTATION:
                written = parameters[str(entry.target)]
                new.append((OutputSpec("mutation", written.name), node))
                if written.requires_grad:
                    _pass_gradient(written, node)
            elif entry.kind != OutputKind.USER_OUTPUT:
                raise ValueError(
                    f"capture: the forward writes to its input {entry.target!r}; only buffers and parameters "
                    "may be changed by a forward: clone the tensor before writing to it"
                )
            elif (leaf := next(names, None)) is None:
                new.append((OutputSpec("mutation", next(assigned), assigned=True), node))
            elif isinstance(node, Node):
                made.leaves.append(len(made.values))
                made.outputs.append(OutputSpec("output", leaf[1], alias=buffers.outputs.get(leaf[0])))
                made.values.append(node)
            else:
                made.leaves.append(ConstantLeaf(node))
        made.outputs += [s for s, _ in new]
        made.values += [n for _, n in new]
        return made


def _pass_gradient(spec: InputSpec, new: Node) -> None:
    """A trained parameter that the forward writes to, without gradients, is differentiated where its new value is used:
    autograd knows the tensor, whatever its values are.

    w = clamp(detach(p)); y = linear(x, w)   -->   w = clamp(detach(p)); y = linear(x, detach(w) + (p - detach(p)))

    The added zeros are exact. Raises ValueError for a parameter that the forward computes with before it writes."""
    old = next(node for node in new.graph.nodes if node.name == spec.node)
    if new is old or not all(map(_is_detached, old.users)):
        raise ValueError(
            f"capture: the forward writes to parameter {spec.name}, which is trained, after it has computed with it; "
            "write to it before that or between steps, or compute with a new tensor"
        )
    detached = [user for user in new.users if _is_detached(user)]  # also where a no_grad ends
    read = new if not detached or any(x.op != "output" for x in new.users if x not in detached) else detached[0]
    users = [user for user in read.users if user.op != "output" and not _is_detached(user)]
    before = read.next
    zeros = insert_call(before, aten.sub.Tensor, (old, insert_call(before, aten.detach.default, (old,))))
    value = insert_call(before, aten.add.Tensor, (insert_call(before, aten.detach.default, (read,)), zeros))
    for user in users:
        user.replace_input_with(read, value)


def _is_detached(node: Node) -> bool:
    return node.target is aten.detach.default


def buffers_differentiated(graph: Graph, inputs: Iterable[InputSpec], outputs: Sequence[OutputSpec]) -> tuple[str, ...]:
    """The buffers that would get a gradient from an output of the model, if they wanted one."""
    results: Any = graph.output_node().args[0]
    queue = [x for x, spec in zip(results, outputs, strict=True) if spec.kind == "output"]
    reached: set[Node] = set()
    while queue:
        node = queue.pop()
        if node not in reached and node.target is not torch.ops.aten.detach.default and _may_carry(node):
            reached.add(node)
            queue += node.all_input_nodes
    names = {node.name for node in reached if node.op == "placeholder"}
    return tuple(spec.name for spec in inputs if spec.kind == "buffer" and spec.node in names)


def read_again(graph: Graph, inputs: Iterable[InputSpec]) -> tuple[str, ...] | None:
    """State that the model's own `torch.utils.checkpoint` reads, or views of it; None where there are none."""
    checkpointed = [node for node in graph.nodes if "ac_region" in node.meta]
    read = {_viewed(x) for node in checkpointed for x in node.all_input_nodes}
    kinds = ("parameter", "buffer", "constant")
    found = tuple(s.name for s in inputs if s.kind in kinds and any(x.name == s.node for x in read))
    return found if checkpointed else None


def _viewed(x: Node) -> Node:
    """The value whose memory a node's value shares: the first operand of views."""
    while x.op == "call_function" and x.all_input_nodes and _is_view(x):
        x = x.all_input_nodes[0]
    return x


def _is_view(node: Node) -> bool:
    returns = getattr(getattr(node.target, "_schema", None), "returns", ())
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def refuse_writes_again(gm: GraphModule) -> None:
    """Raises ValueError for state that the forward updates from its old value, or computes with, within a
    `torch.utils.checkpoint`: torch's backward runs that a second time, on the updated value."""
    signature = gm.meta["signature"]
    written = {spec.name for spec in signature.outputs if spec.kind == "mutation"}
    state = {s.node: f"{s.kind} {s.name}" for s in signature.inputs if s.name in written and s.kind in _STATE}
    checkpointed = (node for node in gm.graph.nodes if "ac_region" in node.meta) if state else ()
    if found := next((state[x.name] for node in checkpointed for x in _read(node) if x.name in state), None):
        raise ValueError(
            f"capture: the forward writes to {found} and reads it within torch.utils.checkpoint, which torch "
            "recomputes in the backward from the written value; turn the model's checkpoints off, and use "
            'parallelize(..., activation_checkpoint="full") or memory_limit=, which recompute without the write'
        )


def _read(node: Node) -> list[Node]:
    """The operands whose values matter."""
    return node.all_input_nodes[1:] if node.target in _OVERWRITES else node.all_input_nodes


def _may_carry(node: Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex()


_OVERWRITES = (torch.ops.aten.copy.default, torch.ops.aten.fill.Scalar, torch.ops.aten.fill.Tensor)
_STATE = ("buffer", "parameter")
_LEAF = object()


# --- gradients of outputs ------------------------------------------------------------------------------

_SHOWN = 4


def refuse_other_gradients(gm: GraphModule, eager: Sequence[frozenset[str] | None]) -> None:
    """``eager``: for each leaf of the forward's result, the parameters that its backward reaches; None: not known.

    Raises ValueError that names parameters which a step would train differently than torch.
    """
    signature = signature_of(gm)
    expected = {i: names for i, names in zip(signature.leaves, eager, strict=True) if isinstance(i, int)}
    trained = [spec for spec in signature.inputs if spec.kind == "parameter" and spec.requires_grad]
    found = _reached(gm, trained)
    if all(names in (None, found[i]) for i, names in expected.items()):
        return
    found = _reached_exactly(gm, trained)
    for i, names in expected.items():
        if names is not None and names != found[i]:
            _refuse(signature.outputs[i].name, sorted(names - found[i]), sorted(found[i] - names))


def _refuse(output: str, lost: Sequence[str], more: Sequence[str]) -> None:
    names = lost or more
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    here, there = ("does not reach", "does") if lost else ("reaches", "does not")
    raise ValueError(
        f"capture: a step must train what torch trains, found that the backward of {output} {here} {shown} in the "
        f"captured graph, and {there} in torch; the forward acts on autograd other than by torch functions: use an "
        "autograd.Function"
    )


def _reached(gm: GraphModule, trained: Sequence[InputSpec]) -> list[frozenset[str]]:
    """Of each output, the parameters that it depends on; possibly too many, where an operator has several results."""
    numbers = {spec.node: i for i, spec in enumerate(trained)}
    bits: dict[Node, int] = {}
    for node in gm.graph.nodes:
        bits[node] = 1 << numbers[node.name] if node.name in numbers else 0
        if node.op == "call_function" and node.target not in STOPS_GRADIENT and any(map(_is_float, values(node))):
            for x in tensor_operands(node):
                bits[node] |= bits[x]
    return [_names(trained, bits[x] if isinstance(x, Node) else 0) for x in outputs(gm)]


def _reached_exactly(gm: GraphModule, trained: Sequence[InputSpec]) -> list[frozenset[str]]:
    """The same, exactly: by autograd, on a run of the graph with fake tensors."""
    numbers = {spec.node: i for i, spec in enumerate(trained)}
    with torch.enable_grad(), fake_mode(gm.graph):
        given = [
            node.meta["val"].detach().requires_grad_(node.name in numbers)
            if isinstance(node.meta["val"], Tensor)
            else node.meta["val"]
            for node in placeholders(gm)
        ]
        made = Interpreter(gm).run(*given)
    leaves = {numbers[node.name]: x for node, x in zip(placeholders(gm), given) if node.name in numbers}
    paths = GradFnPaths({start_of(x): 1 << i for i, x in leaves.items()})
    return [_names(trained, paths.reached(x) if isinstance(x, Tensor) else 0) for x in made]


def _names(trained: Sequence[InputSpec], bits: int) -> frozenset[str]:
    return frozenset(spec.name for i, spec in enumerate(trained) if bits & 1 << i)


def _is_float(x: Any) -> bool:
    return bool(x.dtype.is_floating_point or x.dtype.is_complex)
