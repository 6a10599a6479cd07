"""What a page of a choice can vary: the batch, the sequence, the GPUs and the speeds of links, with the chosen options.

For each number of GPUs (the size of dp varies) there is a function in JavaScript (`autopar.cost.symbolic_price`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

from autopar.auto.costed_model import CostedModel
from autopar.auto.explanation import Explanation
from autopar.cost.cluster import Cluster
from autopar.cost.layer_costs import ModelCosts
from autopar.cost.layout import Layout
from autopar.cost.symbolic_price import kinds_of_work, symbolic_price

STEADY = ("1f1b", "interleaved")  # schedules that take as long for each further microbatch, from the first one on
TIMES = tuple(Fraction(x) for x in ("1/8", "1/4", "1/2", "1", "2", "4", "8"))  # GPUs, of those of the choice
LENGTHS = ((Fraction(1, 2), 1, 2), (Fraction(1, 4), Fraction(1, 2), 1))  # of sequences, of that of the choice


def sliders(explanation: Explanation, model_of: Callable[[int], CostedModel]) -> dict[str, Any]:
    """Ranges and functions of a page; {} for a choice that has no expressions. model_of: the model, for a sequence."""
    layout, pricing = explanation.choice.layout, explanation.pricing
    seq = explanation.found.question.seq
    if pricing.what_if.get("topology") or not pricing.cluster.is_uniform:
        return {}
    costs = _costs(pricing.model, layout, seq, model_of)
    if not costs:
        return {}
    what_if = {name: value for name, value in pricing.what_if.items() if name != "topology"}
    nodes = Cluster(pricing.cluster.name, (replace(pricing.cluster.groups[0], nodes=0),))
    gpus = []
    for times in TIMES:
        dp = layout.dp * times
        if dp.denominator == 1:
            other = replace(layout, dp=int(dp))
            found = symbolic_price(other, costs, nodes, pricing.stack, **what_if)
            rows = other.data_size * other.micro_batch
            gpus.append({"ranks": other.ranks, "rows": rows, "price": found.javascript()})
    steady = layout.pp == 1 or (layout.schedule or "1f1b") in STEADY
    return {
        "gpus": gpus, "ranks": layout.ranks, "seq": [min(costs), seq, max(costs)], "limit": pricing.limit,
        "microbatches": layout.microbatches, "step": layout.pp if layout.schedule == "interleaved" else 1,
        "least": 1 if steady else min(layout.microbatches, 2 * layout.pp),
    }  # fmt: skip


def _costs(
    model: CostedModel, layout: Layout, seq: int, model_of: Callable[[int], CostedModel]
) -> Mapping[int, ModelCosts]:
    """By sequence; {} if the placement does not run at three lengths, or not alike."""
    for lengths in LENGTHS:
        try:
            found = {seq: model.costs(layout.placement, layout.micro_batch)}
            for one in lengths:
                length = int(seq * one)
                if length not in found:
                    found[length] = model_of(length).costs(layout.placement, layout.micro_batch)
        except ValueError:
            continue
        if len(found) == len(lengths) and len(set(map(kinds_of_work, found.values()))) == 1:
            return found
    return {}
