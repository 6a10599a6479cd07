"""The layout that a model gets on a cluster: asked, searched, checked by the compiler, explained.

model = CostedModel.from_config("config.json", seq=8192)
explanation = choose(model, Asked(gpus=512, batch=1024, seq=8192), cluster, stack)
explanation.choice.layout.mesh, explanation.choice.layout.options()
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.auto.costed_model import CostedModel
from autopar.auto.explanation import Explanation, explain
from autopar.auto.layer_lists import first, with_layers
from autopar.auto.pricing import Pricing
from autopar.auto.search import FINALISTS, Found, search
from autopar.auto.space import SEARCHED, Question, Space
from autopar.auto.stored_costs import stored
from autopar.compile.model import compile_model
from autopar.cost.cluster import Cluster
from autopar.cost.efficiency import Stack
from autopar.cost.layout import Layout
from autopar.options import Options

CARRIED = (
    "precision", "replicate_ops", "bucket_bytes", "capacity_factor", "aux_loss_scope", "documents", "batch_dims",
    "static_inputs", "target_hardware", "topology", "memory_limit",
)  # options that are not searched: the step runs with the user's values  # fmt: skip
PRICED = ("target_hardware", "topology", "memory_limit", "documents")  # of these, what the price knows


@dataclass(frozen=True)
class Asked:
    """What a layout is asked for. gpus: 0 for those of the cluster. given: the user's options and sizes of axes by
    name. compute: "fp8" for a what-if. finish: layouts that will be measured."""

    gpus: int
    batch: int
    seq: int
    given: Mapping[str, Any] = field(default_factory=dict)
    compute: str = ""
    finish: int = 1

    @property
    def fixed(self) -> dict[str, Any]:
        """Values that the search keeps."""
        return {name: value for name, value in self.given.items() if name not in CARRIED}

    @property
    def carried(self) -> dict[str, Any]:
        """Options that go with every layout."""
        return {name: value for name, value in self.given.items() if name in CARRIED}


def choose(model: CostedModel, asked: Asked, cluster: Cluster, stack: Stack) -> Explanation:
    """The layout of a model, and why. Raises ValueError for a question without an answer."""
    cluster = cluster if cluster.is_uniform else cluster.memory_rich_first()
    question = question_of(model, asked, cluster)
    options = Options(**asked.carried)
    eight = "fp8" if options.precision.product and options.precision.scaling != "block" else ""
    what_if = {"compute": asked.compute or eight, "topology": options.topology}
    pricing = Pricing(model, cluster, stack, {k: v for k, v in what_if.items() if v}, float(options.memory_limit))
    found = stored(
        model.values,
        (question, cluster, [group.data for group in cluster.groups], stack, pricing.what_if, pricing.memory_limit,
         asked.finish, sorted(asked.carried.items())),
        lambda: _checked(search(Space(question), pricing, asked.finish), model, asked.carried),
        lambda value: isinstance(value, Found), "", "a search",
    )  # fmt: skip
    if found.choice is not None:
        found = replace(found, choice=replace(found.choice, layout=pricing.cut(found.choice.layout)))
    explanation = explain(found, pricing)
    unpriced = [name for name in asked.carried if name not in PRICED and not (name == "precision" and eight)]
    remarks = [f"{', '.join(unpriced)}: not priced, the step runs with them"] if unpriced else []
    if eight:
        remarks.append("all products are priced in float8; rounding operands, and layers that stay wide, are not")
    elif asked.compute:
        remarks.append(f"products in {asked.compute} are a what-if: parallelize runs them with precision='fp8'")
    return replace(explanation, remarks=(*explanation.remarks, *remarks), carried=asked.carried)


def question_of(model: CostedModel, asked: Asked, cluster: Cluster) -> Question:
    """The question. Raises ValueError, also for another number of GPUs than the cluster has."""
    if not asked.gpus and not cluster.ranks:
        raise ValueError(f"auto: needs a number of GPUs, found none in {cluster.name}; say --gpus 512 or H100:64x8")
    ranks = asked.gpus or cluster.ranks
    cluster.with_ranks(ranks)  # for its refusal
    group = min(cluster.groups, key=lambda group: group.per_node)
    unknown = sorted(asked.fixed.keys() - {*SEARCHED})
    if unknown and unknown[0] not in Options.__dataclass_fields__:
        raise ValueError(f"auto: unknown option {unknown[0]!r}")
    per_node = min(group.per_node, ranks)
    question = Question(ranks, asked.batch, asked.seq, model.layers, per_node, fixed=asked.fixed)
    return replace(question, experts=model.experts)  # compiles layers, so a question without an answer is refused first


# --- the choice is what the compiler takes --------------------------------------------------------------------


def _checked(found: Found, model: CostedModel, carried: Mapping[str, Any]) -> Found:
    """The same with the simplest layout that the compiler takes as the choice."""
    refusals, close = found.refusals.copy(), list(found.close)
    others = (c for c in found.priced if c.price.fits and c not in close)
    slower = sorted(others, key=lambda c: c.seconds)[:FINALISTS]  # each is compiled
    while close and (reason := refusal_of(model, close[0].layout, carried)):
        refusals[reason] += 1
        close.pop(0)
        if not close and slower:
            close.append(slower.pop(0))
    if found.close and not close:
        raise ValueError(f"auto: the compiler refuses the fastest layouts that fit: {refusals.most_common(1)[0][0]}")
    return replace(found, choice=close[0] if close else None, close=tuple(close), refusals=refusals)


def refusal_of(model: CostedModel, layout: Layout, carried: Mapping[str, Any]) -> str:
    """Why the compiler does not take a layout, tried on a model with few layers; "" if it does."""
    small = _small(layout)
    lengths = [
        min(len(one.kinds), max(small.parts, *(one.kinds.index(k) + 1 for k in set(one.kinds)))) for one in model.lists
    ]
    try:
        with with_layers(model.model, model.lists, first(lengths)):
            compile_model(
                model.model, model.make_batch(small.batch), small.mesh, small.options(**carried), outputs=()
            )  # fmt: skip
    except ValueError as error:
        return " ".join(str(error).split())
    return ""


def _small(layout: Layout) -> Layout:
    """The same axes and options on a shorter pipeline."""
    pp = min(layout.pp, 2)
    return replace(layout, pp=pp, microbatches=min(layout.microbatches, 4 * pp), layers=())
