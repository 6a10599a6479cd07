"""The graphs of the experts' role: what answers `autopar::ask_experts` of the graphs that serve a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autopar.ir.signature import ParameterSpec
from autopar.plan import Plan
from autopar.steps.graphs import StepGraph


@dataclass
class ExpertLayer:
    """One layer. graph: x [T, H], expert and weights [T, K] (those that there are), then the values of ``names``
    -> y [T, H], for any T. Nodes hold consecutive experts, or slices of an MLP's width: the y of all are added, and
    all ranks of a node have the same. names: of parameters, buffers and constants of the model. num_experts, top_k: 0
    for an MLP. hidden, dtype: of a token. weights_dtype: of the weights of a token's experts, None for an MLP."""

    graph: StepGraph
    names: tuple[str, ...]
    num_experts: int
    top_k: int
    hidden: int
    dtype: torch.dtype
    weights_dtype: torch.dtype | None


@dataclass
class PackedExperts:
    """The experts' role of a model, the same on all of its ranks.

    layers: the k-th answers layer k; equal layers share a graph. parameters: as the graphs expect them stored on the
    role's mesh. nodes: how many share the experts of a layer.
    """

    layers: list[ExpertLayer]
    parameters: tuple[ParameterSpec, ...]
    nodes: int
    plan: Plan
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
