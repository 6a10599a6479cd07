"""Checks of an exported program: plain tensors that the forward replaces, and tensors that share memory."""

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
                f"capture: the forward reads and replaces {spec.target}, a plain tensor, but only buffers carry state "
                "from step to step; register it with register_buffer"
            )


def refuse_overlaps(
    program: ExportedProgram, parameters: Mapping[str, nn.Parameter], overlaps: Collection[tuple[str, str]]
) -> None:
    """Raises ValueError for tensors that a step changes and that share memory with another tensor of the model."""
    kinds = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION)
    written = {s.target for s in program.graph_signature.output_specs if s.kind in kinds}
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    for pair in overlaps:
        if not {*pair}.isdisjoint(written | trained):
            raise ValueError(
                f"capture: parameters and buffers that change need separate memory, found that {pair[0]} and {pair[1]} "
                "share it but are two tensors; tie them as one tensor (a.weight = b.weight, not .data), or clone one"
            )
