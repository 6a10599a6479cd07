"""From what torch.export makes to a signature: what goes into the graph and what comes out of it, under which names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Graph, GraphModule, Node

from autopar.capture.module_state.assigned import BufferWatch
from autopar.capture.trace.export import flatten, paths, unflatten
from autopar.ir.signature import ConstantLeaf, InputSpec, OutputSpec


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
                f"of the model ({spec.kind.name.lower()}); draw from torch's own generator, or pass in what is drawn"
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
    each leaf of the user's structure (``spec``) its place, or the constant that it is."""

    outputs: list[OutputSpec]
    values: list[Node]
    leaves: list[int | ConstantLeaf]
    spec: Any

    @classmethod
    def of(cls, program: ExportedProgram, buffers: BufferWatch) -> Made:
        """``buffers``: what it saw of the forward. Raises ValueError for a write to what is no buffer."""
        nodes: Any = program.graph.output_node().args[0]
        spec = program.call_spec.out_spec
        structure: Any = unflatten([_LEAF] * spec.num_leaves, spec)
        assigned = iter([a.name for a in buffers.assigned if a.value])
        if buffers.assigned:
            structure, spec = structure[0], flatten(structure[0])[1]
        names = enumerate(path for path, _ in paths(structure))
        made, new = cls([], [], [], spec), list[tuple[OutputSpec, Node]]()
        for node, entry in zip(nodes, program.graph_signature.output_specs, strict=True):
            if entry.kind == OutputKind.BUFFER_MUTATION:
                new.append((OutputSpec("mutation", str(entry.target)), node))
            elif entry.kind != OutputKind.USER_OUTPUT:
                raise ValueError(
                    f"capture: the model writes to {entry.target!r} ({entry.kind.name.lower()}); only buffers may be "
                    "changed by a forward: clone the tensor before writing to it"
                )
            elif (leaf := next(names, None)) is None:
                new.append((OutputSpec("mutation", next(assigned), assigned=True), node))
            elif isinstance(node, Node):
                made.leaves.append(len(made.values))
                made.outputs.append(OutputSpec("output", leaf[1], lying=buffers.outputs.get(leaf[0])))
                made.values.append(node)
            else:
                made.leaves.append(ConstantLeaf(node))
        made.outputs += [s for s, _ in new]
        made.values += [n for _, n in new]
        return made


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
    """State that the model's own `torch.utils.checkpoint` read, or views of it; None where there are none."""
    asked = [node for node in graph.nodes if "asked" in node.meta]
    read = {_viewed(x) for node in asked for x in node.all_input_nodes}
    kinds = ("parameter", "buffer", "constant")
    found = tuple(s.name for s in inputs if s.kind in kinds and any(x.name == s.node for x in read))
    return found if asked else None


def _viewed(x: Node) -> Node:
    """What lies in the memory of a node's value: the first operand of views."""
    while x.op == "call_function" and x.all_input_nodes and _is_view(x):
        x = x.all_input_nodes[0]
    return x


def _is_view(node: Node) -> bool:
    returns = getattr(getattr(node.target, "_schema", None), "returns", ())
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def refuse_writes_again(gm: GraphModule) -> None:
    """Raises ValueError for a buffer that the forward updates by what is in it, or computes with, within a
    `torch.utils.checkpoint`: torch's backward runs that again, with what is in the buffer then."""
    signature = gm.meta["signature"]
    written = {spec.name for spec in signature.outputs if spec.kind == "mutation"}
    buffers = {spec.node: spec.name for spec in signature.inputs if spec.kind == "buffer" and spec.name in written}
    asked = (node for node in gm.graph.nodes if "asked" in node.meta) if buffers else ()
    if buffer := next((buffers[x.name] for node in asked for x in _read(node) if x.name in buffers), None):
        raise ValueError(
            f"capture: the forward writes to buffer {buffer} and reads it within torch.utils.checkpoint, which torch "
            "runs again in the backward, with what was written; turn the model's checkpoints off, and let "
            'parallelize(..., activation_checkpoint="full") or memory_limit= make values again, which write once'
        )


def _read(node: Node) -> list[Node]:
    """The operands whose values matter."""
    return node.all_input_nodes[1:] if node.target in _OVERWRITES else node.all_input_nodes


def _may_carry(node: Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex()


_OVERWRITES = (torch.ops.aten.copy.default, torch.ops.aten.fill.Scalar, torch.ops.aten.fill.Tensor)
_LEAF = object()
