"""A graph as text: one Python-like line per node, with dtype, shape, placements, module path and bytes on the wire.

linear_3: f32[4,16,32] dp:S(0) tp:P   = linear(view_4, o_proj_weight)      # model.layers.0.self_attn.o_proj
convert_3: f32[4,16,32] dp:S(0)       = convert(linear_3, tp, P -> I)      # all_reduce over tp, 8.0 KiB; model...
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from autopar.cost.attention_costs import is_context_attention, sent_by
from autopar.cost.traffic import transfer
from autopar.ir.conversions import conversion_of, is_conversion
from autopar.ir.graph import arguments, getitem_index, module_path, nbytes
from autopar.ir.mesh import Mesh
from autopar.ir.placement import INVARIANT
from autopar.ir.traffic import KINDS
from autopar.ops.traits import COPIES
from autopar.report.tables import human_bytes

DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}

_OPERATOR = type(torch.ops.aten.add.Tensor)

# Columns have fixed widths, so that a diff shows only lines that changed.
_TYPE_WIDTH, _CALL_WIDTH = 48, 96


def format_graph(gm: GraphModule, mesh: Mesh | None = None) -> str:
    """The text of a graph of any level. Bytes on the wire are shown when the mesh is given."""
    return "\n".join(_lines(gm, mesh)) + "\n"


def _lines(gm: GraphModule, mesh: Mesh | None) -> Iterator[str]:
    signature = gm.meta.get("signature")
    specs = {s.node: s for s in signature.inputs} if signature else {}
    for node in gm.graph.nodes:
        if node.op == "output":
            yield _join("", f"return {format_value(node.args[0])}", _output_note(signature))
        elif node.op == "placeholder":
            spec = specs.get(node.name)
            aliases = f", also {', '.join(spec.aliases)}" if spec and spec.aliases else ""
            yield _join(_typed(node), spec.kind if spec else "input", f"{spec.name}{aliases}" if spec else "")
        else:
            yield _join(_typed(node), _call(node), _note(node, mesh))


def _join(left: str, right: str, note: str) -> str:
    line = f"{left:<{_TYPE_WIDTH}} = {right}" if left else right
    return f"{line:<{_CALL_WIDTH}}  # {note}" if note else line


def _typed(node: Node) -> str:
    placements = format_placements(node.meta.get("placements", {}))
    return f"{node.name}: {format_type(node.meta.get('val'))}" + (f" {placements}" if placements else "")


def format_type(value: Any) -> str:
    """'f32[4,16]' of a tensor, '(f32[4], i64[4])' of several, the type's name of anything else."""
    if isinstance(value, torch.Tensor):
        return f"{DTYPES.get(value.dtype, str(value.dtype))}[{','.join(str(size) for size in value.shape)}]"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(format_type(v) for v in value)})"
    return "?" if value is None else type(value).__name__


def format_placements(placements: Any) -> str:
    """'dp:S(0) tp:P'. Invariant axes are not shown. Several results are in (...)."""
    if isinstance(placements, (tuple, list)):
        return f"({', '.join(format_placements(p) or 'I' for p in placements)})" if any(placements) else ""
    return " ".join(f"{axis}:{p}" for axis, p in placements.items() if p != INVARIANT)


def _call(node: Node) -> str:
    if is_conversion(node):
        axis, src, dst = conversion_of(node)
        return f"{node.target.__name__}({node.args[0]}, {axis}, {src} -> {dst})"  # type: ignore[union-attr]
    index = getitem_index(node)
    if index is not None:
        return f"{node.args[0]}[{index}]"
    parts = [format_value(a) for a in node.args] + [f"{k}={format_value(v)}" for k, v in node.kwargs.items()]
    return f"{_target_name(node)}({', '.join(parts)})"


def _target_name(node: Node) -> str:
    if isinstance(node.target, _OPERATOR):
        # the namespace aten and the overloads default and Tensor are the usual case, so they are left out
        text = str(node.target).removeprefix("aten.")
        return text.removesuffix(".default").removesuffix(".Tensor")
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def format_value(value: Any) -> str:
    """An argument as text."""
    if isinstance(value, Node):
        return value.name
    if isinstance(value, tuple):
        return f"({', '.join(format_value(v) for v in value)}{',' if len(value) == 1 else ''})"
    if isinstance(value, list):
        return f"[{', '.join(format_value(v) for v in value)}]"
    if isinstance(value, torch.dtype):
        return DTYPES.get(value, str(value))
    return str(value) if isinstance(value, (torch.device, torch.layout)) else repr(value)


def _note(node: Node, mesh: Mesh | None) -> str:
    notes = []
    moved = transfer(node, mesh) if mesh else None
    if moved:
        notes.append(
            f"{moved.kind} over {moved.axis}, {human_bytes(moved.bytes)}" if moved.kind in KINDS else moved.kind
        )
    if mesh and is_context_attention(node):
        sent = ", ".join(f"{kind} {human_bytes(size)}" for kind, (_, size) in sent_by(node).items())
        notes.append(f"{sent} over {arguments(node)['axis']}")
    if "kept" in node.meta:
        notes.append(f"saved, {human_bytes(nbytes(node))}")
    if node.target in COPIES:
        notes.append(f"{'to' if node.target is COPIES[0] else 'from'} the host, {human_bytes(nbytes(node))}")
    if "early" in node.meta:
        notes.append("for a loss's gradient of 1")
    if "again" in node.meta:
        notes.append("recomputed")
    if module_path(node):
        notes.append(module_path(node))
    return "; ".join(notes)


def _output_note(signature: Any) -> str:
    if signature is None:
        return ""
    return ", ".join(o.name if o.kind == "output" else f"new {o.name}" for o in signature.outputs)


def diff(before: str, after: str) -> str:
    """Unified diff of two texts, '' when they are equal."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), "before", "after", lineterm="")
    text = "\n".join(lines)
    return text + "\n" if text else ""
