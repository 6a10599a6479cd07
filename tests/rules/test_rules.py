"""Every sharding rule is true: what the types accept computes on pieces what the operator computes on the whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from autopar.ir.conversions import convert
from autopar.ir.mesh import Mesh
from autopar.ir.placement import INVARIANT, PARTIAL, REPLICATE, Placement, Shard
from autopar.rules import RULES, Rule, RuleError, apply, rule_of, space
from autopar.rules import special as sp
from autopar.rules.builders import blocks_dims, einsum_rule, factory, named_dims, pointwise, reduction
from autopar.rules.special import attention_rule as attention_rule
from autopar.testing.soundness import (
    Ref,
    Sample,
    SampleCall,
    Whole,
    accepted,
    call,
    in_turn,
    possible_placements,
    sample_graph,
    typed,
    unsound,
    wrong_pieces,
)
from tests.support.pointwise_samples import complex_, integer, normal
from tests.support.rule_samples import ASKED, DYNAMIC, SAMPLES, STRUCTURE, attention, experts

aten, ours = torch.ops.aten, torch.ops.autopar


def name(target: Any) -> str:
    return str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))


def test_every_rule_has_a_sample() -> None:
    missing = [name(t) for t in RULES if t not in SAMPLES and t not in (*STRUCTURE, *DYNAMIC, *ASKED)]
    assert not missing, f"add samples to tests/support/rule_samples.py for {missing}"


MANY = 4  # samples of one rule try every choice of dims, and take turns with the ways to cut these
VERY_MANY = 18  # as many operators of one rule take turns with the dims as well


def function_of(target: Any) -> Any:
    """What is equal where the rules of two operators are one function, made with the same arguments."""
    rule: Any = RULES.get(target, target)
    made_with = [cell.cell_contents for cell in getattr(rule, "__closure__", None) or ()]
    return f"{rule.__module__}.{rule.__qualname__} {made_with}" if hasattr(rule, "__qualname__") else target


SOUND = [t for t in SAMPLES if SAMPLES[t]]
SHARING: dict[Any, list[Any]] = {}
for _target in SOUND:
    SHARING.setdefault(function_of(_target), []).append(_target)


def check_sound(target: Any, turn: int | None, dims_too: bool = False) -> None:
    torch.manual_seed(0)
    for i, sample in enumerate(SAMPLES[target]):
        if not sample.tensors:
            node = next(n for n in graph_of_constant(sample).nodes if n.op == "call_function")
            assert apply(rule_of(node, "dp", Mesh.of(dp=2)), [], [], 2) == [INVARIANT]
            continue
        tried, wrong = unsound(sample, Mesh.of(dp=2), None if turn is None else turn + i, dims_too)
        assert tried, "the types accept not even whole operands"
        assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("target", SOUND, ids=name)
def test_rule_is_sound(target: Any) -> None:
    others = SHARING[function_of(target)]
    many = sum(len(SAMPLES[t]) for t in others) >= MANY
    check_sound(target, others.index(target) if many else None, len(others) >= VERY_MANY)


@pytest.mark.full
@pytest.mark.parametrize("target", SOUND, ids=name)
def test_rule_is_sound_however_it_is_cut(target: Any) -> None:
    check_sound(target, None)


def test_in_as_many_turns_as_there_are_ways_each_is_tried() -> None:
    """A dim is cut in at most four ways (`possible_placements`): as many operators as share a rule try all of them."""
    sample = call(aten.exp.default, normal(12, 6))
    found = [*accepted(sample, Mesh.of(dp=2))]
    assert {str(p) for turn in range(MANY) for p in in_turn(found, turn)} == {str(p) for p in found}
    assert all({0, 1} <= {getattr(p["dp"], "dim", None) for (p,) in in_turn(found, t)} for t in range(MANY))
    for some in (some for some in SHARING.values() if len(some) >= VERY_MANY):
        found = [*accepted(SAMPLES[some[0]][0], Mesh.of(dp=2))]
        assert {str(p) for turn in range(len(some)) for p in in_turn(found, turn, True)} == {str(p) for p in found}


def graph_of_constant(sample: Sample) -> torch.fx.Graph:
    graph = torch.fx.Graph()
    (step,) = sample.steps
    node = graph.call_function(step.target, step.args, dict(step.kwargs))
    node.meta["val"] = step.target(*step.args, **step.kwargs)
    return graph


THREE = (
    "linear.default",
    "matmul",
    "conv1d",
    "reshape",
    "split_with_sizes",
    "cat.default",
    "mean",
    "embedding",
    "cross_entropy",
    "attention",
)


@pytest.mark.parametrize("in_turns", [True, pytest.param(False, marks=pytest.mark.full)], ids=["in turns", "all ways"])
@pytest.mark.parametrize("target", [t for t in SAMPLES if any(part in name(t) for part in THREE)], ids=name)
def test_rule_is_sound_over_three_ranks(target: Any, in_turns: bool) -> None:
    torch.manual_seed(1)
    many = in_turns and len(SAMPLES[target]) >= MANY
    for i, sample in enumerate(SAMPLES[target]):
        _, wrong = unsound(sample, Mesh.of(dp=3), i if many else None)
        assert not wrong, "\n".join(wrong)


R, I, P = REPLICATE, INVARIANT, PARTIAL  # noqa: E741
EXPERT_CUTS: dict[str, tuple[Placement, ...]] = {
    "whole": (I, I, I, I, I, I),
    "tokens": (Shard(0), Shard(0), R, R, R, Shard(0)),
    "rows and columns": (R, I, Shard(1), Shard(1), Shard(2), R),
    "second product's columns": (R, I, R, R, Shard(1), R),
}


@pytest.mark.parametrize("cut", EXPERT_CUTS)
def test_experts_are_sound(cut: str) -> None:
    """Dispatch to combination as one chain: rows mean something only to the rank that sorted them."""
    torch.manual_seed(2)
    mesh = Mesh.of(dp=2)
    for sample in experts():
        placements = EXPERT_CUTS[cut]
        if sample.steps[1].args[3]:  # weights are (experts, in, out)
            placements = tuple(
                Shard(3 - p.dim) if isinstance(p, Shard) and i in (2, 4) else p for i, p in enumerate(placements)
            )
        found = wrong_pieces(sample, tuple({"dp": p} for p in placements), mesh, Whole.of(sample))
        assert not found


def test_tensor_parallel_gathers_tokens_before_experts() -> None:
    sample = next(iter(experts()))
    with pytest.raises(RuleError, match="tokens are gathered before sharded experts"):
        typed(sample, tuple({"tp": p} for p in EXPERT_CUTS["tokens"]), Mesh.of(tp=2))


@pytest.mark.parametrize("target", DYNAMIC, ids=name)
def test_ops_of_dynamic_size_run_whole(target: Any) -> None:
    graph = graph_of_constant(call(target, integer(6)))
    node = next(n for n in graph.nodes if n.op == "call_function")
    x = graph.placeholder("x")
    x.meta["val"] = integer(6)
    node.args = (x,)
    with pytest.raises(RuleError, match="size depends on values"):
        apply(rule_of(node, "dp", Mesh.of(dp=2)), [Shard(0)], [False], 2)


# --- two axes: what localisation makes, and conversions, as another axis sees them ------------------------------------


def both(sample: Sample, tp: tuple[Placement, ...]) -> tuple[int, list[str]]:
    """With fixed placements on tp, all that the types accept on dp."""
    mesh, whole = Mesh.of(dp=2, tp=2), Whole.of(sample)
    wrong, tried = [], 0
    for dp in product(*(possible_placements(x, 2, sample.wants(x)) for x in sample.tensors)):
        placements = tuple({"tp": a, "dp": b} for a, b in zip(tp, dp, strict=True))
        try:
            typed(sample, placements, mesh)
        except (RuleError, ValueError):
            continue
        if tp[0] == dp[0] and sample.steps[0].target in (aten.embedding.default, ours.cross_entropy.default):
            continue  # refused when it is localised: a vocabulary is sharded on one axis
        tried += 1
        problem = wrong_pieces(sample, placements, mesh, whole)
        wrong += [f"{dp}: {problem}"] if problem else []
    return tried, wrong


CONVERSIONS: list[tuple[Placement, Placement]] = [
    (INVARIANT, REPLICATE),
    (PARTIAL, INVARIANT),
    (PARTIAL, REPLICATE),
    (PARTIAL, Shard(1)),
    (Shard(1), REPLICATE),
    (Shard(0), INVARIANT),
    (INVARIANT, Shard(1)),
    (REPLICATE, Shard(0)),
    (Shard(0), Shard(1)),
    (Shard(1), PARTIAL),
    (REPLICATE, PARTIAL),
    (Shard(1, (6, 6)), REPLICATE),
    (INVARIANT, Shard(1, (6, 6))),
]


@pytest.mark.parametrize("src, dst", CONVERSIONS, ids=str)
def test_conversion_as_another_axis_sees_it(src: Placement, dst: Placement) -> None:
    tried, wrong = both(call(convert, normal(12, 12), "tp", str(src), str(dst)), (src,))
    assert tried >= 3
    assert not wrong, "\n".join(wrong)


def test_cut_vocabulary_as_another_axis_sees_it() -> None:
    tried, wrong = both(call(aten.embedding.default, normal(12, 6), integer(4, 2, high=12)), (Shard(0), INVARIANT))
    assert tried >= 3
    assert not wrong, "\n".join(wrong)
    loss = call(ours.cross_entropy.default, normal(6, 12), integer(6, high=12), -100, 0.1)
    tried, wrong = both(loss, (Shard(1), INVARIANT))
    assert tried >= 3
    assert not wrong, "\n".join(wrong)


def test_heads_and_batch_cut_together() -> None:
    sample = attention(
        normal(2, 4, 3, 2),
        normal(2, 2, 3, 2),
        normal(2, 2, 3, 2),
        causal=True,
        dropout=0.3,
        seed=torch.tensor(1),
        shape=[2, 4, 3, 3],
    )
    tried, wrong = both(sample, (Shard(1), Shard(1), Shard(1), INVARIANT))
    assert tried >= 1
    assert not wrong, "\n".join(wrong)


# --- zigzag -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [(4, -4), (-4, 2, 2), (-8,)], ids=str)
def test_a_flattened_batch_keeps_how_its_sequence_is_dealt(blocks: tuple[int, ...]) -> None:
    """[B, S, H] -> [B·S, H] -> linear -> [B, S, O]: the pattern stands once per row of the batch, and then alone."""
    torch.manual_seed(3)
    sample = Sample(
        [
            SampleCall(aten.view.default, (normal(3, 8, 4), [24, 4])),
            SampleCall(aten.linear.default, (Ref(0), normal(6, 4), normal(6))),
            SampleCall(aten.view.default, (Ref(1), [3, 8, 6])),
        ]
    )
    mesh, placements = Mesh.of(cp=2), ({"cp": Shard(1, blocks)}, {"cp": R}, {"cp": R})
    found = [n.meta["placements"]["cp"] for n in typed(sample, placements, mesh).graph.nodes if n.op == "call_function"]
    assert found == [Shard(0, blocks * 3), Shard(0, blocks * 3), Shard(1, blocks)]
    assert not wrong_pieces(sample, placements, mesh, Whole.of(sample))


def test_zigzag_is_no_pair_of_equal_blocks() -> None:
    """(8, -8) of [2·8]: the two rows are dealt differently, so no dim of [2, 8] is cut."""
    with pytest.raises(RuleError, match="does not divide over 2"):
        typed(call(aten.view.default, normal(16), [2, 8]), ({"cp": Shard(0, (8, -8))},), Mesh.of(cp=2))
    with pytest.raises(RuleError, match="does not divide over 2"):
        typed(call(aten.view.default, normal(24), [3, 8]), ({"cp": Shard(0, (8, -8, -8))},), Mesh.of(cp=2))


@pytest.mark.parametrize("blocks", [(6, -6), (-12,)], ids=str)
def test_a_vocabulary_is_not_dealt_backwards(blocks: tuple[int, ...]) -> None:
    embedding = call(aten.embedding.default, normal(12, 4), integer(6, high=12))
    with pytest.raises(RuleError, match="consecutive entries of v"):
        typed(embedding, ({"tp": Shard(0, blocks)}, {}), Mesh.of(tp=2))


# --- a wrong rule is caught -------------------------------------------------------------------------------------------


def without_blocks(build: Callable[[Any], Rule]) -> Callable[[Any], Rule]:
    """The rule, as if any dim might be cut."""
    return lambda c: dataclasses.replace(build(c), blocked={}, one_block=frozenset())


WRONG: dict[str, tuple[Sample, Callable[[Any], Rule]]] = {
    "attention with its sequence cut": (SAMPLES[ours.attention.default][0], without_blocks(attention_rule)),
    "softmax over a sharded dim": (call(aten.softmax.int, normal(2, 6), -1), blocks_dims(lambda c: [], "")),
    "norm over a sharded dim": (call(aten.layer_norm.default, normal(2, 6), [6]), without_blocks(sp.layer_norm_rule)),
    "maximum as a contraction": (call(aten.amax.default, normal(2, 6), [1]), reduction(linear=True)),
    "variance as a contraction": (call(aten.var.dim, normal(2, 6), [1]), reduction(linear=True)),
    "bias inside of a cut contraction": (
        call(aten.linear.default, normal(2, 6), normal(4, 6), normal(4)),
        without_blocks(einsum_rule("... i, o i -> ... o", "input weight", bias="bias")),
    ),
    "gelu of a partial value": (call(aten.gelu.default, normal(2, 6)), pointwise("unary")),
    "product of two partial values": (call(aten.mul.Tensor, normal(2, 6), normal(2, 6)), pointwise("sum")),
    "quotient by a partial value": (call(aten.div.Tensor, normal(2, 6), normal(2, 6)), pointwise("product")),
    "matmul with swapped factors": (
        call(aten.matmul.default, normal(4, 4), normal(4, 4)),
        einsum_rule("m k, n k -> m n", "self other"),
    ),
    "shift as if nothing moved": (call(aten.constant_pad_nd.default, normal(2, 6), [1, -1]), pointwise("unary")),
    "reshape that mixes dims": (call(aten.view.default, normal(4, 6), [6, 4]), lambda c: _named(c)),
    "vocabulary in blocks": (
        call(aten.embedding.default, normal(12, 4), integer(6, high=12)),
        without_blocks(sp.embedding_rule),
    ),
    "pairs of a complex number": (call(aten.view_as_real.default, complex_(2, 2)), pointwise()),
    "a copy whose operand does not matter": (call(aten.lift_fresh_copy.default, normal(6)), factory),
    "rounding of a partial value": (call(aten.to.dtype, normal(64) * 5, torch.int64), pointwise("unary")),
    "pooling over a cut window": (
        call(aten.max_pool1d.default, normal(2, 2, 8), [2], [1]),
        without_blocks(space.pooling_rule),
    ),
}


def _named(c: Any) -> Rule:
    return c.rule([named_dims(c, c.shape("self"))], [named_dims(c, c.result, "r")])


@pytest.mark.parametrize("mistake", WRONG)
def test_wrong_rule_is_caught(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    sample, rule = WRONG[mistake]
    monkeypatch.setitem(RULES, sample.steps[0].target, rule)
    _, wrong = unsound(sample, Mesh.of(dp=2))
    assert wrong


def test_missing_rule_names_op_and_way_out() -> None:
    sample = Sample([SampleCall(aten.sinc.default, (normal(6),))])
    with pytest.raises(ValueError, match=r"no sharding rule for aten\.sinc.*'dp'.*x0: S\(0\).*replicate_ops"):
        typed(sample, ({"dp": Shard(0)},), Mesh.of(dp=2))


# --- apply: the type rule itself --------------------------------------------------------------------------------------


def rule_for(sample: Sample) -> Rule:
    node = next(n for n in sample_graph(sample).graph.nodes if n.op == "call_function")
    return rule_of(node, "tp", Mesh.of(tp=2))


LINEAR = call(aten.linear.default, normal(2, 6), normal(4, 6), None)
S0, S1 = Shard(0), Shard(1)


@pytest.mark.parametrize(
    "operands, result",
    [((R, S0), S1), ((S1, S1), P), ((S0, R), S0), ((I, I), I), ((R, R), R), ((P, R), P), ((R, P), P)],
    ids=str,
)
def test_types_of_linear(operands: tuple[Placement, ...], result: Placement) -> None:
    assert apply(rule_for(LINEAR), operands, [True, True], 2) == [result]


@pytest.mark.parametrize(
    "operands, why",
    [
        ((I, S0), "operand 0 is I, but sharding .* needs R"),
        ((S1, S0), "sharded on different factors"),
        ((S1, R), "operand 1 is R"),
        ((P, P), "not linear in its Partial operands"),
        ((P, I), "next to a Partial operand, but needs R"),
        ((I, R), "mix Replicate and Invariant"),
    ],
    ids=str,
)
def test_types_that_linear_refuses(operands: tuple[Placement, ...], why: str) -> None:
    with pytest.raises(RuleError, match=why):
        apply(rule_for(LINEAR), operands, [True, True], 2)
