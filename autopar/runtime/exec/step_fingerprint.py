"""What a compiled step consists of, as facts that ranks compare before one of them binds it.

Compiling is the same computation on every rank, pipelines included: each compiles all parts, and runs some. So every
graph, the order of a pipeline and the constants must be the same on all ranks, whatever their coordinates. (What is
made of them when they are bound, such as the index of a device, is a rank's own, and not compared.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from autopar.adapters.operators import OpOverload
from autopar.ir.graph import placeholders
from autopar.runtime.consistency.tensor_hash import hashes_of
from autopar.runtime.exec.lowering import axes_of
from autopar.steps.graphs import Compiled, GlobalStatistics, StepDigests, StepGraph
from autopar.steps.of_rank import graphs_of_all


def step_digests(compiled: Compiled) -> dict[str, str]:
    """Name of a part -> digest: two ranks run the same step exactly if all are equal."""
    if compiled.known is not None:
        return compiled.known.digests
    found = {name: _digest(_text(part)) for name, part in _parts(compiled)}
    hashes = hashes_of({name: x for name, x in compiled.constants.items() if not x.is_meta})
    return found | {f"the contents of the constant {name}": digest for name, digest in hashes.items()}


def axes_of_step(compiled: Compiled) -> tuple[set[str], set[str]]:
    """`axes_of` all graphs of a step."""
    known = compiled.known
    if known is not None:
        return {*known.axes}, {*known.along}
    return axes_of(graphs_of_all(compiled.pipeline, compiled.prologue))


def known_digests(compiled: Compiled) -> StepDigests:
    """What others need not find out again."""
    axes, along = axes_of_step(compiled)
    return StepDigests(step_digests(compiled), tuple(sorted(axes)), tuple(sorted(along)))


def _parts(compiled: Compiled) -> Iterator[tuple[str, Any]]:
    yield "plan", compiled.plan.to_json()
    yield "parameters", compiled.parameters
    yield "outputs", [(s.kind, s.name) for s in compiled.signature.outputs]
    yield from _fields("", compiled.prologue)
    yield from _fields("", compiled.pipeline, but=("parts", "notes"))
    for k, part in enumerate(compiled.pipeline.parts):
        yield from _fields(f"part {k} ", part)


def _fields(of: str, what: Any, but: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Those of a dataclass, by name; a field more is compared as well."""
    for field in fields(what) if what is not None else ():
        if field.name not in but:
            name = "prologue" if field.name == "graph" else field.name
            yield of + name, getattr(what, field.name)


def _text(part: Any) -> str:
    if isinstance(part, StepGraph):
        return f"{part.inputs} {part.outputs} {_text(part.graph)}"
    if isinstance(part, (list, tuple)):
        return "\n".join(map(_text, part))
    if isinstance(part, GlobalStatistics):
        return f"{_text(part.graphs)} {part.edges} {part.totals}"
    if isinstance(part, GraphModule):
        values = [node.meta.get("val") for node in placeholders(part)]
        shapes = [(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in values]
        return "\n".join([str(shapes), *map(_line, part.graph.nodes)])  # its code would be compiled, too
    return repr(part)


def _line(node: Node) -> str:
    target = node.target
    if not isinstance(target, (str, OpOverload)):
        target = f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"
    return f"{node.name} {node.op} {target} {node.args} {node.kwargs}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
