"""What a step gives back: flat local outputs become the user's structure of DTensors and scalars."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.ir.graph import outputs
from autopar.ir.placement import PARTIAL, Placement, Placements, Shard
from autopar.ir.signature import ParameterSpec
from autopar.rules import result_placements
from autopar.runtime.inputs.batch_outputs import batch_output
from autopar.runtime.mesh.process_groups import Groups
from autopar.runtime.params import parameters
from autopar.steps.graphs import Compiled


def rebuild_outputs(
    compiled: Compiled,
    values: list[Any],
    groups: Groups,
    watch: Callable[[str, Tensor], None] | None = None,
    whole: bool = False,
) -> Any:
    """The user's structure. Tensors are DTensors as they are cut, through which gradients flow; scalars are plain.
    ``watch`` is shown each of them. ``whole``: plain tensors instead, of the whole batch. Collective."""
    flat, names = [], []
    for i, (spec, value) in enumerate(zip(compiled.signature.outputs, values, strict=True)):
        if spec.kind == "output":
            flat.append(batch_output(_wrapped(compiled, i, value, groups)) if value.dim() else value)
            names.append(spec.name)
    if whole:
        flat = [x.full_tensor() if isinstance(x, DTensor) else x for x in flat]
    if watch is not None:
        for name, x in zip(names, flat, strict=True):
            watch(name, x)
    return compiled.signature.rebuild(flat)


def placements_of(compiled: Compiled, i: int) -> Placements:
    """How output i lies on the mesh."""
    node = _source(outputs(compiled.local)[i])
    return {a: result_placements(node, a)[0] for a in compiled.plan.mesh.cut_order}


def _wrapped(compiled: Compiled, i: int, value: Tensor, groups: Groups) -> DTensor:
    found, node = placements_of(compiled, i), _source(outputs(compiled.local)[i])
    assert PARTIAL not in found.values(), f"module: output {node.name} is {found}, its sum is pending"
    cuts: dict[str, Placement] = {a: p for a, p in found.items() if isinstance(p, Shard)}
    spec = ParameterSpec("output", tuple(node.meta["global_shape"]), value.dtype, False, (), cuts)
    return parameters.wrap(value, spec, groups)


def _source(node: Any) -> Any:
    """Behind the detach that separates an output from the losses' graph."""
    while "global_shape" not in node.meta:
        node = node.args[0]
    return node
