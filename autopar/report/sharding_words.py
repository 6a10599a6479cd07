"""How a parameter is cut, in words: 'output features over tp', 'in 4 pieces over dp, gathered for each use'."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.expert_layers import axis_of_experts
from autopar.ir.parameter import ParameterSpec
from autopar.ir.placement import Shard
from autopar.plan import ParameterPlan, Plan

# Class of a module -> what the dims of its weight are. A vector has one entry per output.
_FEATURES = ("output features", "input features")
_CHANNELS = ("output channels", "input channels")
DIMS: Mapping[str, tuple[str, ...]] = {
    "Linear": _FEATURES,
    "Conv1D": (_FEATURES[1], _FEATURES[0]),  # transformers' own: its weight lies the other way round
    "Embedding": ("rows of the table (the vocabulary)", "columns of the table"),
    "EmbeddingBag": ("rows of the table (the vocabulary)", "columns of the table"),
    **{f"Conv{n}d": _CHANNELS for n in (1, 2, 3)},
    **{f"ConvTranspose{n}d": (_CHANNELS[1], _CHANNELS[0]) for n in (1, 2, 3)},
}


def cuts_in_words(spec: ParameterSpec, plan: Plan, kind: str) -> list[str]:
    """One text per axis that cuts a parameter of a module of class ``kind``; none: it is whole on every rank."""
    decisions = plan.parameters.get(spec.name, {})
    words = [_words(spec, plan, axis, decision, kind) for axis, decision in decisions.items() if axis != "mb"]
    return [text for text in words if text]


def _words(spec: ParameterSpec, plan: Plan, axis: str, decision: ParameterPlan, kind: str) -> str:
    stored = decision.stored
    if not isinstance(stored, Shard):
        return ""
    if decision.used == stored:
        return f"{dim_in_words(spec, stored, kind, axis == axis_of_experts(plan.experts))} over {axis}"
    when = "once per step" if plan.options.gathers_once else "for each use"
    return f"in {plan.mesh.size(axis)} pieces over {axis}, gathered {when}"


def dim_in_words(spec: ParameterSpec, cut: Shard, kind: str, by_expert: bool) -> str:
    """What lies along the dim that is cut. ``by_expert``: by an axis that cuts experts."""
    names = DIMS.get(kind, ())
    if cut.dim < len(names) and len(spec.shape) > 1:
        found = names[cut.dim]
    elif by_expert and cut.dim == 0:
        found = "experts"
    else:
        found = f"dim {cut.dim}" if len(spec.shape) > 1 else "elements"
    return f"{found}, each of {len(cut.blocks)} blocks" if len(cut.blocks) > 1 else found
