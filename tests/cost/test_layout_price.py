"""Prices of layouts: clusters, costs of layers from short models, and what a price must not do."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.auto.costed_model import ROWS, CostedModel, sample_of
from autopar.auto.layer_lists import first
from autopar.auto.priced_layouts import LayoutPricer, answers, layout_of
from autopar.cost.cluster import Cluster
from autopar.cost.efficiency import stack_named, stacks
from autopar.cost.layer_costs import ModelCosts, RawWork, Work
from autopar.cost.layout import Layout, Placement
from autopar.cost.layout_price import Price, layer_seconds
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.schedule.request import SCHEDULES

SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_hidden_layers": 8, **SIZES},
    "windows": {"model_type": "gpt_oss", "num_hidden_layers": 6, "num_local_experts": 4, "num_experts_per_tok": 2,
                "head_dim": 16, "sliding_window": 16, **SIZES},
    "dense first": {"model_type": "deepseek_v3", "num_hidden_layers": 5, "first_k_dense_replace": 2, "n_group": 1,
                    "topk_group": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
                    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
                    "v_head_dim": 16, **SIZES},
}  # fmt: skip
MODELS["tables"] = {"model_type": "gemma3_text", "num_hidden_layers": 6, "head_dim": 16, "sliding_window": 16,
                    "sliding_window_pattern": 3, **SIZES}  # fmt: skip
MODELS["bias"] = {"model_type": "t5", "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 3, "num_decoder_layers": 4,
                  "num_heads": 4, "vocab_size": 256, "decoder_start_token_id": 0}  # fmt: skip
MODELS["encoded"] = {"model_type": "bart", "d_model": 64, "encoder_layers": 3, "decoder_layers": 4,
                     "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 128,
                     "decoder_ffn_dim": 128, "vocab_size": 256}  # fmt: skip
MODELS["one dense"] = MODELS["dense first"] | {"first_k_dense_replace": 1}
H100, EAGER = Cluster.parse("H100"), stack_named("autopar-eager", "H100")


@functools.cache
def model(name: str, seq: int = 64) -> CostedModel:
    return CostedModel.from_config(MODELS[name], seq=seq)


@functools.cache
def large(layers: int = 16, vocabulary: int = 32000) -> CostedModel:
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_hidden_layers": layers}
    return CostedModel.from_config({"model_type": "llama", "vocab_size": vocabulary, **sizes}, seq=2048)


def price(layout: Layout, cluster: Cluster = H100, **changes: Any) -> Price:
    found = large().price(layout, cluster, dataclasses.replace(EAGER, **changes))
    assert not found.refused, found.refused
    return found


# --- costs of layers -----------------------------------------------------------------------------------------


def summed(works: list[Work], rows: int) -> dict[Any, float]:
    found: dict[Any, float] = {"flops": sum(w.flops(rows) for w in works)}
    found["moved"] = sum(w.scalar("moved", rows) for w in works)
    for w in works:
        for way, values in w.sent.items():
            found[way] = found.get(way, 0.0) + float(values[1] @ (1, rows))
    return {key: value for key, value in found.items() if value}


def counted(raw: RawWork) -> dict[Any, float]:
    flops = sum(p[1] for p in raw.products) + sum(a[0] for a in raw.attention)
    sent = {way: size for way, (_, size) in raw.sent.items()}
    found = {"flops": flops, "moved": raw.scalars[0], **sent}
    return {key: value for key, value in found.items() if value}


def all_layers(costs: ModelCosts) -> list[Any]:
    return [costs.rest, *(costs.layers[kind] for kind in costs.kinds)]


@pytest.mark.parametrize(
    ("name", "placement"),
    [
        ("llama", Placement(tp=2, sequence_parallel=True)),
        ("llama", Placement(cp=2, attention="ring", policy="full")),
        ("windows", Placement(ep=2)),
        pytest.param("dense first", Placement(tp=2, policy="selective"), marks=pytest.mark.full),
        pytest.param("dense first", Placement(ep=2), marks=pytest.mark.full),
        ("dense first", Placement(ep=2, tp=2, sequence_parallel=True, policy="full")),
        ("one dense", Placement(tp=2, ep=2)),
        pytest.param("tables", Placement(policy="full"), marks=pytest.mark.full),
        ("bias", Placement(policy="full")),
        pytest.param("encoded", Placement(tp=2, sequence_parallel=True, policy="full"), marks=pytest.mark.full),
        ("dense first", Placement(cp=2, expert_axis="cp")),
        pytest.param("dense first", Placement(tp=2, expert_axis="tp", sequence_parallel=True), marks=pytest.mark.full),
    ],
)
def test_a_few_layers_tell_the_costs_of_all(name: str, placement: Placement) -> None:
    """FLOPs, bytes on the wire, bytes kept and parameters are exactly those of the whole model."""
    one = model(name)
    sizes = MODELS[name]
    assert len(one.kinds) == sum(n for key, n in sizes.items() if key.endswith("_layers"))
    check_costs(one, placement)


@pytest.mark.parametrize(
    ("name", "unlike"),
    [("llama", ()), ("one dense", ()), ("tables", ((1, 1),)), ("bias", ((1, 1), (3, 1))), ("encoded", ((1, 2),))],
)
def test_layers_that_make_what_the_next_ones_read(name: str, unlike: tuple[tuple[int, int], ...]) -> None:
    """A table of positions for one kind, a bias that goes from layer to layer, the encoder's output."""
    assert model(name)._unlike == unlike


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama", {"tp": 2}),
        ("dense first", {"ep": 2}),
        *(pytest.param(name, {axis: 2}, marks=pytest.mark.full) for name in MODELS for axis in ("tp", "cp", "ep")),
        *(pytest.param("dense first", {"cp": 2, "ep": 2, axis: 2}, marks=pytest.mark.full) for axis in ("cp", "tp")),
    ],
    ids=str,
)
def test_more_ranks_of_data_change_sums_of_gradients_alone(name: str, sizes: dict[str, int]) -> None:
    """Nothing in a rank's graphs is as large as the batch of all ranks, but for masks of a few bytes for each row."""
    one = model(name)
    if "ep" in sizes and not one.experts:
        return
    found = []
    for dp in (2, 4):
        mesh = Mesh.of(dp=dp, **sizes)
        entries = one._samples(one._unlike)[-1]
        compiled = one._compiled(entries, mesh.data_size, mesh, Options(sequence_parallel="tp" in sizes))
        found.append(sample_of([compiled], ()))
    few, many = found
    assert few.memory[0].saved == pytest.approx(many.memory[0].saved, rel=1e-3)
    for a, b in zip(few.works[0], many.works[0], strict=True):
        assert (a.products, a.attention) == (b.products, b.attention)
        assert a.scalars == pytest.approx(b.scalars, rel=1e-3)
        assert a.sent.keys() == b.sent.keys()
        assert all(value == b.sent[way] for way, value in a.sent.items() if "dp" not in way[0])


@pytest.mark.full
@pytest.mark.parametrize("axis", ["tp", "cp", "ep"])
@pytest.mark.parametrize("name", MODELS)
def test_a_few_layers_tell_the_costs_on_every_axis(name: str, axis: str) -> None:
    one = model(name)
    how = {"tp": {"sequence_parallel": True}, "cp": {"attention": "all_gather"}, "ep": {}}[axis]
    placement = Placement(**{axis: 2}, **how)
    try:
        one.costs(placement)
    except ValueError as error:
        assert axis in str(error) or "sequence" in str(error) or "experts" in str(error)
        return
    check_costs(one, placement)


@pytest.mark.parametrize("placement", [Placement(), Placement(tp=2, ep=2), Placement(policy="full")], ids=str)
def test_a_first_layer_of_its_own_kind_is_told_from_the_head(placement: Placement) -> None:
    """It is in every sample with layers, so one has none. (Rotary tables, which only layers read, count as its own.)"""
    costs, others = model("one dense").costs(placement), model("dense first").costs(placement)
    for found, expected in zip((costs.rest, *costs.layers), (others.rest, *others.layers), strict=True):
        assert (found.dense, found.experts, found.first) == (expected.dense, expected.experts, expected.first)
        for way in ("forward", "backward", "again"):
            one, other = (summed([getattr(costs_of, way)], 2) for costs_of in (found, expected))
            assert one | {"moved": 0.0} == pytest.approx(other | {"moved": 0.0}), way


def test_experts_are_sharded_on_the_axis_that_the_placement_names() -> None:
    whole, sharded = (model("dense first").costs(Placement(cp=2, expert_axis=on)) for on in ("ep", "cp"))
    assert (whole.total("experts"), sharded.total("experts")) == (0, 3 * 4 * 3 * 64 * 64 / 2)  # layers, experts
    assert whole.total("dense") == sharded.total("dense") + 2 * sharded.total("experts")


def check_costs(one: CostedModel, placement: Placement) -> None:
    """Compare costs with those of all layers, compiled."""
    costs = one.costs(placement)
    assert len(costs.layers) == len(set(one.kinds))
    layers = first([len(x.kinds) for x in one.lists])
    mesh = placement.mesh
    whole = [one._compiled(layers, rows * mesh.data_size, mesh, placement.options) for rows in ROWS]
    sample = sample_of(whole, ())
    for place, rows in enumerate(ROWS):
        for i, way in enumerate(("forward", "backward", "again")):
            found = summed([getattr(c, way) for c in all_layers(costs)], rows)
            assert found == pytest.approx(counted(sample.works[place][i]), rel=1e-6), (rows, way)
        saved = sum(float(c.saved @ (1, rows)) for c in all_layers(costs))
        assert saved == pytest.approx(sample.memory[place].saved, rel=1e-6)
    assert (costs.total("dense"), costs.total("experts")) == (sample.dense, sample.experts)


# --- prices --------------------------------------------------------------------------------------------------


def test_causes_add_up_and_one_rank_sends_nothing() -> None:
    found = price(Layout(microbatches=4))
    assert found.seconds == pytest.approx(sum(c.exposed for c in found.causes))
    assert not [c for c in found.causes if c.axis], "one rank"
    assert 0 < found.mfu < EAGER.products
    assert found.fits and len(found.memory) == 1


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=8, dp=2, microbatches=4, sequence_parallel=True),
        Layout(dp=64, zero=3, activation_checkpoint="full"),
        Layout(pp=4, tp=2, dp=2, microbatches=16, zero=1),
        Layout(cp=2, dp=4, attention="ring", microbatches=2),
    ],
)
def test_faster_hardware_is_never_slower(layout: Layout) -> None:
    before = price(layout).seconds
    for name in ("products", "memory", "inside", "network"):
        assert price(layout, **{name: getattr(EAGER, name) * 1.2}).seconds <= before + 1e-12, name
    group = H100.groups[0]
    for name in ("inside", "card"):
        faster = Cluster("faster", (dataclasses.replace(group, **{name: 2 * getattr(group, name)}),))
        assert price(layout, faster).seconds <= before + 1e-12, name


LAYOUTS = [
    Layout(pp=pp, dp=dp, microbatches=m, zero=zero, schedule=name, virtual_stages=parts, **how)
    for pp, name, parts in ((1, "", 1), (2, "zb_v", 2), (4, "1f1b", 1), (4, "interleaved", 2), (8, "zb_h1", 1))
    for dp, zero in ((1, 0), (16, 1), (16, 3))
    for m in (16, 64)
    for how in ({}, {"tp": 8, "sequence_parallel": True}, {"cp": 2, "attention": "ring"})
]


@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from(LAYOUTS),
    st.sampled_from(["products", "memory", "inside", "card", "cards", "launch"]),
    st.floats(1.0, 8.0),
)
def test_better_hardware_is_never_slower(layout: Layout, what: str, times: float) -> None:
    """Without launches where the chip gets faster: where the host sets the time of all else, gradients of weights that
    take less time fill less of a bubble."""
    group, stack = H100.groups[0], EAGER
    if what in ("products", "memory"):
        stack = dataclasses.replace(stack, launch=0.0, **{what: 0.75})
    before = large().price(layout, H100, stack).seconds
    if what == "launch":
        stack = dataclasses.replace(stack, launch=stack.launch / times)
    elif what in ("products", "memory"):
        stack = dataclasses.replace(stack, **{what: min(1.5, 0.75 * times)})
    else:
        group = dataclasses.replace(group, **{what: getattr(group, what) * (int(times) if what == "cards" else times)})
    assert large().price(layout, Cluster("better", (group,)), stack).seconds <= before * (1 + 1e-12)


@given(st.sampled_from(LAYOUTS[::7]), st.permutations([("H100", 2), ("H100", 2), ("H100", 4)]))
@settings(deadline=None, max_examples=30)
def test_the_order_of_equal_nodes_does_not_matter(layout: Layout, order: list[tuple[str, int]]) -> None:
    group = H100.groups[0]
    nodes = layout.ranks / group.per_node
    assume(nodes >= 8 and nodes % 8 == 0)
    parts = tuple(dataclasses.replace(group, chip=name, nodes=int(n * nodes / 8)) for name, n in order)
    assert price(layout, Cluster("renamed", parts)).seconds == price(layout).seconds


def test_a_slow_card_slows_what_goes_through_it() -> None:
    group = H100.groups[0]
    slow = Cluster("slow", (dataclasses.replace(group, nodes=3), dataclasses.replace(group, nodes=1, card=1e9)))
    layout = Layout(dp=32, zero=3, microbatches=2)
    whole, one = price(layout), price(layout, slow)
    assert one.seconds > 2 * whole.seconds
    assert max(one.causes, key=lambda c: c.exposed).axis == "dp"


@pytest.mark.parametrize("first", [False, True])
def test_slow_cards_slow_the_stage_on_their_nodes(first: bool) -> None:
    """Also with chips that are equal."""
    group = dataclasses.replace(H100.groups[0], nodes=2)
    groups = group, dataclasses.replace(group, card=1e9)
    layout = Layout(pp=2, cp=16, microbatches=8, attention="ring")
    costs = large().costs(layout.placement, 1)
    near, far = layer_seconds(layout, costs, Cluster("slow", groups[::-1] if first else groups), EAGER)
    slow, fast = (near, far) if first else (far, near)
    assert slow[0] > 2 * fast[0] and slow[-1] == fast[-1]


def test_a_pipeline_has_a_bubble_that_more_microbatches_make_smaller() -> None:
    few, many = (price(Layout(pp=4, dp=2, microbatches=m)) for m in (4, 32))
    shares = [next(c.exposed for c in p.causes if c.name == "bubble") / p.seconds for p in (few, many)]
    assert shares[0] > 0.3 > 0.12 > shares[1]
    assert few.memory[0] > few.memory[2], "the first stage keeps most microbatches"


@pytest.mark.parametrize("how", [{}, {"activation_checkpoint": "full"}, {"zero": 3, "dp": 4}], ids=str)
@pytest.mark.parametrize("name", [name for name, entry in SCHEDULES.items() if not entry.searches])
def test_the_closed_form_is_what_a_simulation_takes(name: str, how: dict[str, Any]) -> None:
    """Within 3 % of a step, with a long head and few layers, too: stages are not alike."""
    for layers, pp, each, chunks in itertools.product((8, 16), (2, 4, 8), (2, 8), (2, 4)):
        parts = chunks if name == "interleaved" else SCHEDULES[name].virtual_stages
        if pp * parts > layers or (chunks > 2 and name != "interleaved"):
            continue
        layout = Layout(pp=pp, microbatches=each * pp, schedule=name, virtual_stages=parts, **how)
        one = large(layers, 128000 if layers == 8 else 32000)
        closed, simulated = (one.price(layout, H100, EAGER, simulated=on).seconds for on in (False, True))
        assert closed == pytest.approx(simulated, rel=0.03), (layers, pp, each, chunks)


def test_a_schedule_that_cannot_run_is_refused() -> None:
    found = large().price(Layout(pp=4, microbatches=6, schedule="dual_pipe"), H100, EAGER)
    assert found.refused.startswith("schedule: dual_pipe needs an even number of microbatches, at least 8")


@pytest.mark.parametrize("placement", [Placement(), Placement(cp=2), Placement(tp=2, sequence_parallel=True)], ids=str)
def test_what_goes_between_layers_is_a_hidden_state(placement: Placement) -> None:
    costs = large().costs(placement)
    assert list(costs.hop) == [0.0, 2048 * 2048 * 2 / (placement.cp * placement.tp)]


def test_recomputation_takes_time_and_saves_memory() -> None:
    kept, again = (price(Layout(dp=8, micro_batch=4, activation_checkpoint=p)) for p in ("none", "full"))
    assert again.memory[0] < 0.6 * kept.memory[0]
    assert again.seconds > 1.15 * kept.seconds
    assert [c.name for c in again.causes if c.name == "recomputation"] == ["recomputation"]


def test_tensor_parallelism_across_nodes_goes_at_the_speed_of_cards() -> None:
    near, far = (price(Layout(tp=8), Cluster.parse(text)) for text in ("H100:1x8", "H100:8x1"))
    sent = [next(c.seconds for c in p.causes if c.name == "tp") for p in (near, far)]
    assert 5 < sent[1] / sent[0] < 12


def test_what_cannot_run_is_refused_in_a_sentence() -> None:
    for layout, words in (
        (Layout(pp=32), "pp: 32 stages need as many layers"),
        (Layout(pp=2, layers=(3, 4)), "counts that sum up to 16 layers"),
        (Layout(pp=2, schedule="nosuch"), "unknown schedule 'nosuch'"),
    ):
        found = large().price(layout, H100, EAGER)
        assert words in found.refused and not found.fits, found.refused


# --- clusters and stacks -------------------------------------------------------------------------------------


def test_links_of_an_axis_follow_from_rank_order() -> None:
    cluster = Cluster.parse("H100:64x8")
    assert cluster.ranks == 512
    assert cluster.links(8, 1).bandwidth == 450e9, "tp within a node"
    assert cluster.links(64, 8).bandwidth == 50e9, "dp behind tp=8 has one card"
    assert cluster.links(64, 1).bandwidth == 400e9, "dp alone has all eight"
    assert cluster.links(8, 4).bandwidth == 100e9, "two neighbours on each node"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("H101", "unknown chip 'H101'; the chips are"),
        ("H100:0x8", "above 0"),
        ("H100:64", "expected CHIP"),
        ("missing.json", "cannot be read"),
    ],
)
def test_a_wrong_cluster_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Cluster.parse(text)


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ({"chip": "H101"}, "unknown chip"),
        ({"chip": "H100", "card": 0}, "above 0"),
        ({"chip": "H100", "nodes": 0}, "nodes"),
        ({"chip": "H100", "speed": 1}, "found speed"),
        ({}, "needs a chip"),
    ],
)
def test_a_wrong_cluster_file_is_refused(group: dict[str, Any], words: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps({"groups": [group]}))
    with pytest.raises(ValueError, match=words):
        Cluster.parse(str(file))


def test_groups_of_different_chips(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps({"groups": [{"chip": "H100", "nodes": 2}, {"chip": "A100-40", "nodes": 2}]}))
    cluster = Cluster.parse(str(file))
    assert (cluster.ranks, cluster.chip_name, cluster.capacity, cluster.is_uniform) == (32, "A100-40", 40e9, False)


def test_every_stack_says_where_its_values_are_from() -> None:
    for name in stacks():
        for chip in ("A100", "H100"):
            try:
                stack = stack_named(name, chip)
            except ValueError as error:
                assert f"{name} is of" in str(error)
                continue
            assert stack.source and 0 < stack.error < 1
            assert stack.kernel in stack.attention and stack.attention.keys() == stack.attention_backward.keys()
    with pytest.raises(ValueError, match="did you mean 'megatron-2021'"):
        stack_named("megatron-2020", "A100")


# --- files of layouts ----------------------------------------------------------------------------------------


def test_each_line_of_a_file_has_an_answer() -> None:
    row = {"config": MODELS["llama"], "mesh": "dp=2", "seq": 64, "batch": 4, "cluster": "A100", "measured": 0.01}
    lines = [
        json.dumps(row), "", "{", json.dumps({"mesh": "dp=2"}), json.dumps(row | {"batch": 3}),
        json.dumps(row | {"stack": "fsdp-2023", "attention": "flash9"}), json.dumps(row | {"measured": -1}),
        json.dumps(row | {"options": {"zeros": 1}}), json.dumps(row | {"mesh": {"dp": 2}, "options": {"zero": 3}}),
        json.dumps(row | {"options": {"documents": -8}}), json.dumps(row | {"options": {"documents": 8}}),
    ]  # fmt: skip
    found = list(answers(lines, LayoutPricer()))
    words = ["", "not JSON", "config, seq, batch missing", "batch", "flash9", "measured", "zeros", "", "documents", ""]
    assert len(found) == len(words)
    for answer, word in zip(found, words, strict=True):
        assert ("refused" in answer) == bool(word) and word in answer.get("refused", ""), answer
    assert found[0]["error"] == pytest.approx(found[0]["seconds"] / 0.01 - 1) and found[0]["fits"]
    assert found[0]["guesses"], "an A100 was not measured"


def test_pairs_within_documents_have_a_price() -> None:
    row = {"config": MODELS["llama"], "mesh": "cp=2", "seq": 2048, "batch": 4}
    options: list[dict[str, Any]] = [{"attention": "ring"}, {"attention": "ring", "documents": 16}]
    whole, packed = answers([json.dumps(row | {"options": how}) for how in options], LayoutPricer())
    by_cause = [{c["name"]: c["seconds"] for c in one["causes"]} for one in (whole, packed)]
    assert by_cause[1]["attention"] < by_cause[0]["attention"] / 4
    assert "cp" not in by_cause[1] or by_cause[1]["cp"] < by_cause[0]["cp"], "rings skip what no document needs"
    assert by_cause[1]["products"] == by_cause[0]["products"]


def test_a_layout_gives_the_options_back() -> None:
    row = {
        "mesh": "pp=2,dp=2,tp=2", "batch": 16,
        "options": {"zero": 1, "microbatches": 4, "sequence_parallel": True, "schedule": "1f1b"},
    }  # fmt: skip
    layout = layout_of(row)
    assert (layout.ranks, layout.batch, layout.micro_batch) == (8, 16, 2)
    options = layout.options()
    assert {name: getattr(options, name) for name in row["options"]} == row["options"]  # type: ignore[attr-defined]
