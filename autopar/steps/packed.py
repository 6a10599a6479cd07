"""The graphs that serve a model: the tokens of any requests, per pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autopar.ir.mesh import TokenSlice
from autopar.ir.signature import ParameterSpec, Signature
from autopar.plan import Plan
from autopar.steps.graphs import StepGraph

# Inputs of a packed graph, besides parameters, buffers, constants, tables and the pools of the cache.
POSITIONS, LAST, STARTS, LENGTHS = "positions", "last", "starts", "lengths"
TOKENS, ROWS = "slice_length", "slice_start"  # ints: T, and N of `last`
LOGITS = "logits"


def slots(kind: int) -> str:
    """The input with the places of the tokens' keys, for a kind of window."""
    return f"slots_{kind}"


def pages(kind: int) -> str:
    """The input with the pages of the requests, for a kind of window."""
    return f"pages_{kind}"


@dataclass(frozen=True)
class CachedLayer:
    """The cache of one attention on one rank: names of the inputs that are its pools, keys [pages, page, Hk, D] and
    values [pages, page, Hk, Dv], with their shapes behind the first two dims. kind: index of its window in
    `Packed.windows`."""

    keys: str
    values: str
    key_shape: tuple[int, int]
    value_shape: tuple[int, int]
    dtype: torch.dtype
    kind: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's key and value."""
        numbers = self.key_shape[0] * self.key_shape[1] + self.value_shape[0] * self.value_shape[1]
        return numbers * self.dtype.itemsize


@dataclass(frozen=True)
class SizedValue:
    """A value that a stage sends: its shape for T tokens and N rows of logits is (a + b T + d N) per dim."""

    name: str
    dtype: torch.dtype
    sizes: tuple[tuple[int, int, int], ...]

    def shape(self, tokens: int, rows: int) -> tuple[int, ...]:
        return tuple(a + b * tokens + d * rows for a, b, d in self.sizes)


def sized_value(
    name: str, dtype: torch.dtype, shapes: Sequence[Sequence[int]], samples: Sequence[TokenSlice]
) -> SizedValue:
    """From the shapes in the graphs of the first three sample slices."""
    sizes = []
    (l1, c1), (l2, _), (_, c2) = ((s.length, s.start) for s in samples[:3])
    for x, longer, later in zip(*shapes[:3], strict=True):
        b, d = (longer - x) // (l2 - l1), (later - x) // (c2 - c1)
        sizes.append((x - b * l1 - d * c1, b, d))
    return SizedValue(name, dtype, tuple(sizes))


@dataclass
class PackedStage:
    """One pipeline stage. graph: parameters, tables, pools, the step's inputs and ``received`` -> ``sent``, or the
    logits. tables: parameters, buffers -> the inputs of ``graph`` that they are (None: it has none). rank: its
    coordinate on pp."""

    graph: StepGraph
    received: list[SizedValue]
    sent: list[SizedValue]
    layers: list[CachedLayer]
    tables: StepGraph | None = None
    rank: int = 0


@dataclass
class Packed:
    """A model that can be served, the same on all ranks.

    tokens: the input that is the ids. max_length: positions that the tables have. windows: how far the layers of each
    kind look back, 0 for all tokens (kind 0). equal_sizes: whether replicas must run equally many tokens and rows in a
    step, since they exchange them. vocabulary: size of the logits. vocabulary_axes: mesh axes that shard it, outer
    first. parameters: as the graphs expect them stored.
    """

    signature: Signature
    plan: Plan
    stages: list[PackedStage]
    parameters: tuple[ParameterSpec, ...]
    tokens: str
    max_length: int
    windows: tuple[int, ...]
    vocabulary: int
    vocabulary_axes: tuple[str, ...]
    equal_sizes: bool
    constants: dict[str, Tensor]
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def layers(self) -> list[CachedLayer]:
        return [layer for stage in self.stages for layer in stage.layers]
