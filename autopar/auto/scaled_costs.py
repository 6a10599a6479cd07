"""Costs that a placement has at least, from those of others that are compiled: bounds for a search.

    seed(placement)                            the same axes at their smallest sizes, without checkpoints
    at_size(costs, seed, placement)            as if an axis shared all work equally
    with_policy(costs, saving)                 as far as a checkpoint policy goes on one rank

An axis divides a layer's work, what it keeps and its exchanges at best: norms, routers and repeated heads that ranks
hold alike stay whole. Of n ranks each sends (n - 1) / n of its values. What attention sends over cp is left out where
another algorithm may be chosen: for other ranks of cp, or other heads on one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from autopar.cost.layer_costs import SCALARS, Floats, LayerCosts, ModelCosts, Way, Work
from autopar.cost.layout import Placement

AXES = ("tp", "cp", "ep")


def seed(placement: Placement) -> Placement:
    """The placement whose costs bound those of this one."""
    tp, cp, ep = (_least_factor(getattr(placement, axis)) for axis in AXES)
    return replace(placement, tp=tp, cp=cp, ep=ep, policy="none", loss_chunks=1)


def unsharded(placement: Placement) -> Placement:
    """Its policy and loss chunks on one rank."""
    return Placement(policy=placement.policy, loss_chunks=placement.loss_chunks)


@functools.cache
def axes(placement: Placement) -> Placement:
    """Equal for placements on the same axes, of any sizes and policies."""
    tp, cp, ep = (min(2, getattr(placement, axis)) for axis in AXES)
    return replace(placement, tp=tp, cp=cp, ep=ep, policy="none", loss_chunks=1)


def is_within(small: Placement, placement: Placement) -> bool:
    """Whether the costs of one placement bound those of another on the same axes: it has larger parts."""
    if axes(small) != axes(placement) or small.policy != "none" or small.loss_chunks > 1:
        return False
    return all(getattr(placement, axis) % getattr(small, axis) == 0 for axis in AXES)


def is_alike(one: Placement, other: Placement) -> bool:
    """Whether two placements differ in loss chunks alone."""
    return one != other and replace(one, loss_chunks=other.loss_chunks) == other


def _least_factor(size: int) -> int:
    return next((n for n in range(2, size + 1) if size % n == 0), 1)


def at_size(costs: ModelCosts, placement: Placement) -> ModelCosts:
    """Costs with other sizes of the axes of their placement, at least."""
    times = {axis: getattr(placement, axis) / getattr(costs.placement, axis) for axis in AXES}
    parts = times["tp"] * times["cp"]
    tables = {
        axis: (1 - 1 / getattr(placement, axis)) / (1 - 1 / getattr(costs.placement, axis))
        for axis in AXES
        if getattr(costs.placement, axis) > 1
    }

    def sent(way: Way, values: Floats) -> Floats | None:
        axis = way[0].split("%")[0].split("/")[0]
        if axis == "cp" and (times["tp"], times["cp"]) != (1, 1) and placement.attention == "auto":
            return None
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


def _divided(work: Work, parts: float, experts: float, sent: Callable[[Way, Floats], Floats | None]) -> Work:
    """All but the number of kernels is divided, and so are weights that products read, which experts may be."""

    def table(values: Floats) -> Floats:
        found = values.copy()
        found[:, 1:7] /= parts
        return found

    products = table(work.products)
    products[:, 5] /= experts
    exchanges = {way: found for way, values in work.sent.items() if (found := sent(way, values)) is not None}
    moved = [1.0 if "kernels" in name else parts for name in SCALARS]
    return Work(products, table(work.attention), work.scalars / np.array(moved)[:, None], exchanges)


def with_policy(costs: ModelCosts, saving: ModelCosts, again: bool = False) -> ModelCosts:
    """Costs with the policy and the loss chunks of their placement. saving: costs with these, `unsharded`. again:
    whether the costs are of that policy already."""
    other = at_size(saving, costs.placement)

    def of(one: LayerCosts, saved: LayerCosts) -> LayerCosts:
        forward, backward = _fewer(one.forward, saved.forward), _fewer(one.backward, saved.backward)
        kept = np.minimum(one.saved, saved.saved)
        return replace(one, forward=forward, backward=backward, again=one.again if again else saved.again, saved=kept)

    pairs = zip(costs.layers, other.layers, strict=True)
    return replace(
        costs, layers=tuple(of(*pair) for pair in pairs), rest=of(costs.rest, other.rest),
        peak=np.minimum(costs.peak, other.peak), layer_peak=np.minimum(costs.layer_peak, other.layer_peak),
        logits=np.minimum(costs.logits, other.logits),
    )  # fmt: skip


def _fewer(one: Work, other: Work) -> Work:
    """The same with at most the element-wise work of the other."""
    return replace(one, scalars=np.minimum(one.scalars, other.scalars))
