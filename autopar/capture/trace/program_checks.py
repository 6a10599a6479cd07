"""What an exported program says that no step can do: plain tensors that a forward replaces, memory that two share."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind


def refuse_running_values(program: ExportedProgram, changed: Collection[str]) -> None:
    """Raises ValueError for a plain tensor attribute that the forward reads and replaces, such as a running mean."""
    for spec in program.graph_signature.input_specs:
        if spec.kind == InputKind.CONSTANT_TENSOR and spec.target in changed:
            raise ValueError(
                f"capture: the forward reads {spec.target} and replaces it, but only buffers may be changed by a "
                "forward, found a plain tensor; register it with register_buffer"
            )


def refuse_overlaps(
    program: ExportedProgram, parameters: Mapping[str, nn.Parameter], overlaps: Collection[tuple[str, str]]
) -> None:
    """Raises ValueError for a change of a tensor, by steps or in them, that another one of the model would see."""
    written = {s.target for s in program.graph_signature.output_specs if s.kind == OutputKind.BUFFER_MUTATION}
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    for pair in overlaps:
        if not {*pair}.isdisjoint(written | trained):
            raise ValueError(
                f"capture: parameters and buffers that change need memory of their own, found that {pair[0]} and "
                f"{pair[1]} share some and are two tensors; tie them by one tensor (a.weight = b.weight, not .data), "
                "or clone one"
            )
