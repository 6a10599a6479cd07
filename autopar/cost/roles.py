"""What attention and experts of a served mixture of experts cost, each on a group of tp ranks of its own.

A `RoleCost` says it for any number of rows, node by node: seconds are the sum of max(operations / speed,
bytes / bandwidth), and the sums over tp. It comes from sizes (`layers_of_sizes`) or from the graph that would run
(`autopar.cost.packed_roles`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.chips import Chip
from autopar.cost.ping_pong import LayerTimes

TP = (1, 2, 4, 8)  # ranks of a node that share its weights


@dataclass(frozen=True)
class RoleCost:
    """A layer's part on one of the tp ranks of a node. Rows: tokens of a microbatch, or those of one expert.

    operations, bytes: [nodes, 2], (fixed, per row). count: [nodes], how often a layer has each of them. sent: bytes per
    row that the rank sends to the others of its node. weights, cache: bytes of all layers; the latter of one request.
    """

    operations: Any
    bytes: Any
    count: Any
    sent: float
    weights: float
    cache: float = 0.0

    def seconds(self, rows: Any, chip: Chip) -> Any:
        """Seconds of one layer; ``rows``: a number or an array."""
        rows = np.asarray(rows, dtype=float)
        each = np.maximum(_of_rows(self.operations, rows) / chip.flops, _of_rows(self.bytes, rows) / chip.memory)
        return each @ np.asarray(self.count, dtype=float) + self.sent * rows / chip.inside


def _of_rows(affine: Any, rows: Any) -> Any:
    affine = np.asarray(affine, dtype=float)
    return affine[:, 0] + affine[:, 1] * rows[..., None]


@dataclass(frozen=True)
class ExpertLayers:
    """The layers of a model. row: bytes of a token's activations. attention, experts: tp -> cost; ``experts`` is one
    expert's."""

    layers: int
    num_experts: int
    top_k: int
    row: float
    attention: Mapping[int, RoleCost]
    experts: Mapping[int, RoleCost]

    def rows_of_expert(self, tokens: Any) -> Any:
        """Rows of one expert, with even routing."""
        return tokens * self.top_k / self.num_experts

    def apart(self, tokens: Any, nodes: Any, tp: tuple[int, int], chips: tuple[Chip, Chip]) -> LayerTimes:
        """With ``tokens`` per attention node and microbatch on so many nodes, and a node for each expert. tp, chips: of
        attention and of experts."""
        rows = self.rows_of_expert(tokens * nodes)
        exchange = self.row * np.maximum(
            tokens * self.top_k / (tp[0] * chips[0].links), rows / (tp[1] * chips[1].links)
        )
        return LayerTimes(
            self.attention[tp[0]].seconds(tokens, chips[0]), self.experts[tp[1]].seconds(rows, chips[1]), exchange
        )

    def together(self, tokens: Any, nodes: int, tp: int, chip: Chip) -> LayerTimes:
        """With ``tokens`` per node on so many nodes, each of which has attention and an equal share of the experts."""
        rows = self.rows_of_expert(tokens * nodes)
        own = self.num_experts / nodes
        exchange = self.row * tokens * self.top_k * (nodes - 1) / nodes / (tp * chip.links)
        return LayerTimes(
            self.attention[tp].seconds(tokens, chip), own * self.experts[tp].seconds(rows, chip), exchange
        )


def layers_of_sizes(
    *,
    layers: int,
    hidden: int,
    intermediate: int,
    num_experts: int,
    top_k: int,
    query_group: int,
    vocabulary: int,
    keys: int,
    size: int = 2,
    tps: Sequence[int] = TP,
) -> ExpertLayers:
    """A decoder with grouped-query attention and gated experts, by the sizes of its products alone.

    query_group: query heads per key head; keys: tokens that a request has; size: bytes of a number.
    """
    qkv = hidden * (1 + 2 / query_group)
    key = 2 * size * hidden / query_group  # bytes of a token's key and value

    def product(inputs: float, outputs: float) -> tuple[Sequence[float], Sequence[float]]:
        return (0, 2 * inputs * outputs), (size * inputs * outputs, size * (inputs + outputs))

    def cost(nodes: Sequence[Any], count: Sequence[int], tp: int, weights: float, cache: float = 0.0) -> RoleCost:
        sent = 2 * (tp - 1) / tp * hidden * size
        return RoleCost([n[0] for n in nodes], [n[1] for n in nodes], count, sent, weights / tp, cache / tp)

    def attention(tp: int) -> RoleCost:
        scores = (0, 4 * keys * hidden / tp), (0, keys * key / tp)
        weights = size * (layers * (2 * hidden**2 + 2 * hidden**2 / query_group) + 2 * vocabulary * hidden)
        nodes = [product(hidden, qkv / tp), scores, product(hidden / tp, hidden)]
        return cost(nodes, [1, 1, 1], tp, weights, layers * keys * key)

    def expert(tp: int) -> RoleCost:
        nodes = [product(hidden, intermediate / tp), product(intermediate / tp, hidden)]
        return cost(nodes, [2, 1], tp, size * 3 * layers * hidden * intermediate)

    return ExpertLayers(
        layers, num_experts, top_k, hidden * size, {tp: attention(tp) for tp in tps}, {tp: expert(tp) for tp in tps}
    )
