"""Costs that a placement has at least, from those of others that are compiled: bounds for a search.

    seed(placement)                            the same axes at their smallest sizes, without checkpoints
    at_size(costs, seed, placement)            as if an axis shared all work equally
    with_policy(costs, plain, saving)          as far as a checkpoint policy goes on the placement Placement()

An axis divides a layer's work, what it keeps and its exchanges at best: norms, routers and repeated heads that ranks
hold alike stay whole. Of n ranks each sends (n - 1) / n of its values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from autopar.cost.layer_costs import SCALARS, Floats, LayerCosts, ModelCosts, Way, Work
from autopar.cost.layout import Placement

AXES = ("tp", "cp", "ep")
SURE = 0.9  # of what a policy keeps and computes again on other placements


def seed(placement: Placement) -> Placement:
    """The placement whose costs bound those of this one."""
    tp, cp, ep = (_least_factor(getattr(placement, axis)) for axis in AXES)
    return replace(placement, tp=tp, cp=cp, ep=ep, policy="none", loss_chunks=1)


def is_within(small: Placement, placement: Placement) -> bool:
    """Whether the costs of one placement bound those of another: on the same axes, in larger parts."""
    same = replace(placement, policy="none", loss_chunks=1)
    if replace(small, tp=same.tp, cp=same.cp, ep=same.ep) != same:
        return False
    pairs = [(getattr(small, axis), getattr(placement, axis)) for axis in AXES]
    return all(large % size == 0 and (size == 1) == (large == 1) for size, large in pairs)


def _least_factor(size: int) -> int:
    return next((n for n in range(2, size + 1) if size % n == 0), 1)


def at_size(costs: ModelCosts, placement: Placement) -> ModelCosts:
    """Costs with other sizes of the axes of their placement."""
    times = {axis: getattr(placement, axis) / getattr(costs.placement, axis) for axis in AXES}
    parts = times["tp"] * times["cp"]
    tables = {
        axis: (1 - 1 / getattr(placement, axis)) / (1 - 1 / getattr(costs.placement, axis))
        for axis in AXES
        if getattr(costs.placement, axis) > 1
    }

    def sent(way: Way, values: Floats) -> Floats:
        axis = way[0].split("%")[0].split("/")[0]
        grown = tables.get(axis, 1.0)
        beside = times["cp"] if axis == "tp" else parts  # tp gathers the tokens that it divides
        found = values.copy()
        found[1] *= grown / beside
        return found

    def of(one: LayerCosts) -> LayerCosts:
        forward, backward, again = (
            _divided(w, parts, times["ep"], sent) for w in (one.forward, one.backward, one.again)
        )
        return LayerCosts(
            forward, backward, again, one.dense / times["tp"], one.experts / (times["tp"] * times["ep"]),
            one.first / times["tp"], one.saved / parts,
        )  # fmt: skip

    return replace(
        costs, placement=placement, layers=tuple(map(of, costs.layers)), rest=of(costs.rest), peak=costs.peak / parts,
        layer_peak=costs.layer_peak / parts, hop=costs.hop / parts, logits=costs.logits / parts,
    )  # fmt: skip


def _divided(work: Work, parts: float, experts: float, sent: Callable[[Way, Floats], Floats]) -> Work:
    """All but the number of kernels is divided, and so are weights that products read, which experts may be."""

    def table(values: Floats) -> Floats:
        found = values.copy()
        found[:, 1:7] /= parts
        return found

    products = table(work.products)
    products[:, 5] /= experts
    exchanges = {way: sent(way, values) for way, values in work.sent.items()}
    moved = [1.0 if "kernels" in name else parts for name in SCALARS]
    return Work(products, table(work.attention), work.scalars / np.array(moved)[:, None], exchanges)


def with_policy(costs: ModelCosts, plain: ModelCosts, saving: ModelCosts) -> ModelCosts:
    """Costs with the policy and the loss chunks of their placement. plain, saving: costs on `Placement`(), without and
    with the policy."""
    rows = 1.0

    def of(one: LayerCosts, before: LayerCosts, after: LayerCosts) -> LayerCosts:
        kept = SURE * _share(_at(after.saved, rows), _at(before.saved, rows))
        again = SURE * _share(after.again.flops(rows), before.forward.flops(rows))
        return replace(one, saved=one.saved * kept, again=_times(one.forward, again))

    chunked = costs.placement.loss_chunks > 1
    pairs = zip(costs.layers, plain.layers, saving.layers, strict=True)
    rest = costs.rest if not chunked else replace(costs.rest, saved=np.zeros(2))
    return replace(
        costs, layers=tuple(of(*three) for three in pairs), rest=rest,
        peak=np.zeros(2) if chunked else costs.peak, logits=np.zeros(2) if chunked else costs.logits,
    )  # fmt: skip


def _times(work: Work, share: float) -> Work:
    def table(values: Floats) -> Floats:
        found = values.copy()
        found[:, 0] *= share
        return found

    return Work(table(work.products), table(work.attention), work.scalars * share, {})


def _share(part: float, whole: float) -> float:
    return min(1.0, part / whole) if whole else 0.0


def _at(pair: Floats | Sequence[float], rows: float) -> float:
    return float(pair[0] + rows * pair[1])
