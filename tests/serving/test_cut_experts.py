"""Experts in a role of their own: the graphs of both roles together compute the bits of the whole graph, and only
tokens, their experts and weights go from one to the other."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.compile.expert_role import compile_experts
from autopar.compile.serving import Apart, compile_packed
from autopar.ir.graph import arguments, calls_of, placeholders
from autopar.ir.mesh import Mesh
from autopar.ir.placement import INVARIANT, Shard
from autopar.rules import RuleError, rule_of
from autopar.runtime.exec.lowering import bind
from autopar.steps.packed import Packed
from autopar.steps.packed_experts import PackedExperts
from tests.experts.written_out import SPELLINGS
from tests.serving.halves import ALONE, Answers, built, given, halves, run
from tests.serving.test_pack_tokens import Causal, Seen, operators
from tests.serving.test_pack_tokens import H as WIDTH
from tests.support.ranks import refusal

ours = torch.ops.autopar
ASK, DISPATCH = ours.ask_experts.default, ours.moe_dispatch.default
SOME = ["mixtral", "deepseek_v3", "gpt_oss", "llama4_text"]
OTHERS = [
    "qwen3_moe", "dbrx", "qwen2_moe", "olmoe", "deepseek_v2", "glm4_moe", "granitemoe", "afmoe", "aria_text",
    "axk1", "cohere2_moe",
    "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe_lite", "granitemoe_swa", "granitemoeshared",
    "hunyuan_v1_moe", "hy_v3", "hy_v4", "laguna", "longcat_flash", "mimo_v2_flash", "minimax_m2", "phimoe",
    "solar_open",
]  # fmt: skip


def far(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(found, expected, strict=True))


def check_halves(whole: Packed, cut: Packed, experts: PackedExperts, model: nn.Module) -> None:
    (stage,) = cut.stages
    asks, answers = calls_of(stage.graph.graph.graph, ASK), Answers(experts, model)
    found, expected = run(cut, model, answers), run(whole, model)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True)), far(found, expected)
    assert [arguments(node)["layer"] for node in asks] == [*range(len(experts.layers))]
    assert all(len(node.all_input_nodes) == 3 for node in asks), "three values cross"
    assert not calls_of(stage.graph.graph.graph, DISPATCH)
    of_experts, left = ({spec.name for spec in x.parameters} for x in (experts, cut))
    assert of_experts and not of_experts & left
    assert of_experts | left == {spec.name for spec in whole.parameters}
    assert not of_experts & {spec.name for spec in cut.signature.inputs}, "the rest has no input for an expert's weight"
    for layer, (x, expert, weights) in answers.asked:
        assert x is not None and expert is not None and weights is not None
        known = experts.layers[layer]
        assert (x.shape[1], x.dtype, weights.dtype) == (known.hidden, known.dtype, known.weights_dtype)
        assert expert.shape == weights.shape == (x.shape[0], known.top_k)
        assert expert.dtype == torch.int64


@pytest.mark.parametrize("kind", SOME)
def test_halves_are_the_whole_bit_for_bit(kind: str) -> None:
    model = built(kind)
    check_halves(*halves(model), model)


@pytest.mark.full
@pytest.mark.parametrize("kind", OTHERS)
def test_halves_of_every_type_with_experts(kind: str) -> None:
    model = built(kind)
    check_halves(*halves(model), model)


@pytest.mark.full
def test_experts_inside_of_attention_are_refused() -> None:
    found = refusal(halves, built("jetmoe"))
    assert re.search(r"experts that return tokens as they get them, found \[48, 32\] .* to .*self_attention", found)


NODES: list[dict[str, int]] = [{"ep": 4}, {"ep": 2, "tp": 2}, {"tp": 2}]


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", pytest.param("llama4_text", marks=pytest.mark.full)])
def test_sums_of_nodes_are_the_whole(kind: str) -> None:
    model = built(kind)
    whole, cut, _ = halves(model)
    expected = run(whole, model)
    for sizes in NODES:
        experts = compile_experts(**given(model), mesh=Mesh.of(**sizes))
        assert experts.nodes == sizes.get("ep", 1)
        for parts in ((), (1,), (3, 0, 1)):  # tokens of several askers, uneven, and none
            steps = run(cut, model, Parted(experts, model, parts))
            assert far(steps, expected) < 1e-13


class Parted(Answers):
    """Steps with fewer tokens than ``parts`` say go in one."""

    def finish(self, pending: Any) -> Tensor:
        parts, tokens = self.parts, len(pending[1])
        self.parts = parts if sum(parts) <= tokens else ()
        try:
            return super().finish(pending)
        finally:
            self.parts = parts


def test_a_node_adds_nothing_for_tokens_without_its_experts() -> None:
    model = built("mixtral")
    experts = compile_experts(**given(model), mesh=Mesh.of(ep=2))
    answers, hidden = Answers(experts, model), experts.layers[0].hidden
    x, weights = torch.randn(5, hidden, dtype=torch.float64), torch.rand(5, 2, dtype=torch.float64)
    for first in (0, 2):  # of the first node, of the second one
        chosen = first + torch.randint(2, (5, 2))
        found = answers.of_nodes(0, (x, chosen, weights))
        assert found[0 if first else 1].abs().max() == 0 < found[1 if first else 0].abs().max()
    nobody = answers.of_nodes(0, (x[:0], torch.empty(0, 2, dtype=torch.int64), weights[:0]))
    assert [y.shape for y in nobody] == [(0, hidden)] * 2


class Unlike(Causal):
    """Layers of (experts, experts of a token, width): each other ones."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = ((6, 3, 24), (4, 1, 40))
        self.embed, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32)
        self.routers = nn.ModuleList(nn.Linear(WIDTH, experts, bias=False) for experts, *_ in self.sizes)
        self.up, self.down = nn.ParameterList(), nn.ParameterList()
        for experts, _, width in self.sizes:
            self.up.append(torch.randn(experts, width, WIDTH))
            self.down.append(torch.randn(experts, WIDTH, width))
        self.double()

    def forward(self, input_ids: Tensor) -> Any:
        return super().forward(input_ids)

    def logits(self, h: Tensor) -> Tensor:
        for (experts, top_k, _), router, up, down in zip(self.sizes, self.routers, self.up, self.down):
            x = h.flatten(0, 1)
            weights, expert = router(x).softmax(-1).topk(top_k)
            rows, order, offsets = ours.moe_dispatch(x, expert, experts)
            inner = F.relu(ours.grouped_mm(rows, up, offsets, False))
            h = h + ours.moe_combine(ours.grouped_mm(inner, down, offsets, False), order, weights).view(h.shape)
        out: Tensor = self.head(h)
        return out


def test_layers_of_several_kinds() -> None:
    model = Unlike()
    whole, cut, experts = halves(model)
    check_halves(whole, cut, experts, model)
    assert [(layer.num_experts, layer.top_k) for layer in experts.layers] == [(6, 3), (4, 1)]
    nodes = compile_experts(**given(model), mesh=Mesh.of(ep=2, tp=2))
    assert far(run(cut, model, Parted(nodes, model, (1,))), run(whole, model)) < 1e-13
    found = refusal(compile_experts, **given(model), mesh=Mesh.of(ep=3))
    assert found == "serve: 4 experts do not divide over 3 nodes of the role experts; use ep of 1, 2, 4"


def test_equal_layers_share_a_graph() -> None:
    experts = compile_experts(**given(built("mixtral")), mesh=Mesh.of(ep=2, tp=2))
    first, second = experts.layers
    assert first.graph is second.graph and first.names != second.names
    assert first.graph.inputs[:3] == ["x", "expert", "weights"] and first.graph.outputs == ["y"]
    assert len(first.graph.inputs) == 3 + len(first.names) == len(placeholders(first.graph.graph))
    shards = {spec.name: spec.placements for spec in experts.parameters}
    assert shards.keys() == {*first.names, *second.names}
    assert all(found == {"ep": Shard(0), "tp": found["tp"]} for found in shards.values())
    assert [shards[name] for name in first.names] == [shards[name] for name in second.names]


class Written(Causal):
    """A layer of experts as people write it out."""

    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.layer, self.embed, self.head = layer(), nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32)
        self.double().eval()

    def forward(self, input_ids: Tensor) -> Any:
        return super().forward(input_ids)

    def logits(self, h: Tensor) -> Tensor:
        out: Tensor = self.head(h + self.layer(h))
        return out


@pytest.mark.parametrize(
    "name",
    ["MakeMoE"]
    + [pytest.param(name, marks=pytest.mark.full) for name in ("OldMixtral", "MistralReference", "SortedTitan")],
)
def test_experts_that_are_written_out(name: str) -> None:
    """A node computes rows whose number is known when they are there."""
    model = Written(SPELLINGS[name])
    whole, cut, experts = halves(model)
    check_halves(whole, cut, experts, model)
    for sizes in ({"ep": 2}, {"ep": 2, "tp": 2}):
        nodes = compile_experts(**given(model), mesh=Mesh.of(**sizes))
        assert far(run(cut, model, Parted(nodes, model, (1,))), run(whole, model)) < 1e-13


# --- text --------------------------------------------------------------------------------------------------


class Routed(Causal):
    """A layer of three experts with two products; ``extra`` changes what they compute."""

    def __init__(self, extra: Callable[[Routed, dict[str, Tensor]], Tensor] | None = None) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.up, self.down = (nn.Parameter(torch.randn(4, *shape)) for shape in ((24, WIDTH), (WIDTH, 24)))
        self.extra = extra
        self.double()

    def logits(self, h: Tensor) -> Tensor:
        x = h.flatten(0, 1)
        weights, expert = self.router(x).softmax(-1).topk(2)
        rows, order, offsets = ours.moe_dispatch(x, expert, 4)
        hidden = F.relu(ours.grouped_mm(rows, self.up, offsets, False))
        known = {"x": x, "rows": rows, "order": order, "offsets": offsets, "hidden": hidden, "h": h}
        if self.extra is not None:
            known["hidden"] = self.extra(self, known)
        out: Tensor = ours.moe_combine(ours.grouped_mm(known["hidden"], self.down, offsets, False), order, weights)
        h = h + known["beside"] if "beside" in known else h
        return self.head(h + out.view(h.shape))


BEFORE = """
moe_dispatch = autopar.moe_dispatch(reshape_default_4, getitem_4, 4)
getitem_5 = moe_dispatch[0]
getitem_6 = moe_dispatch[1]
getitem_7 = moe_dispatch[2]
grouped_mm = autopar.grouped_mm(getitem_5, p_up, getitem_7, False)
relu = relu(grouped_mm)
grouped_mm_1 = autopar.grouped_mm(relu, p_down, getitem_7, False)
moe_combine = autopar.moe_combine(grouped_mm_1, getitem_6, getitem_3)
"""


def texts(model: nn.Module, role: str, apart: Apart = "experts", mesh: Mesh | None = None) -> dict[str, str]:
    """The graphs of a role by the names of passes, without types."""
    seen = Seen()
    known: dict[str, Any] = {
        **given(model), "tokens": "tokens", "apart": apart, "observers": [seen],
        "batch": {"tokens": torch.zeros(1, 24, dtype=torch.int64)},
    }  # fmt: skip
    if role == "attention":
        compile_packed(**known, mesh=mesh or Mesh.of(dp=1))
    else:
        compile_experts(**known, mesh=mesh or Mesh.of(ep=1))
    return {name: operators(text) for name, text in seen.graphs.items()}


def test_text_before_and_after() -> None:
    graphs = texts(Routed(), "attention")
    before, after = graphs["derive_rules"].splitlines(), graphs["cut_experts"].splitlines()
    place = after.index("ask_experts_default = autopar.ask_experts(reshape_default_4, getitem_4, getitem_3, 0)")
    assert after[:place] == before[:place] and before[place : place + 8] == BEFORE.strip().splitlines()
    assert [x.replace("ask_experts_default", "moe_combine") for x in after[place + 1 :]] == before[place + 8 :]
    of_experts = texts(Routed(), "experts")["experts0.cut"]
    moved = BEFORE.replace("reshape_default_4", "x").replace("getitem_4", "expert").replace("getitem_3", "weights")
    assert of_experts == moved.strip() + "\nreturn (moe_combine,)"


def test_text_of_a_node() -> None:
    found = texts(Routed(), "experts", mesh=Mesh.of(ep=2))["experts0.packed"].splitlines()
    assert "shard_slice = autopar.shard_slice(arange, 0, [], 'ep', 2)" in found
    assert any(line.startswith("moe_dispatch_own = autopar.moe_dispatch_own(x, sub, 2") for line in found)
    assert found[-1] == "return (moe_combine,)", "nothing is summed over nodes"


# --- when experts are asked --------------------------------------------------------------------------------


def test_shared_experts_stand_between_asking_and_the_first_use() -> None:
    cut = compile_packed(**given(built("deepseek_v3")), mesh=Mesh.of(dp=1), apart="experts")
    nodes = [*cut.stages[0].graph.graph.graph.nodes]
    (asked,) = calls_of(nodes[0].graph, ASK)
    between = nodes[nodes.index(asked) + 1 : min(map(nodes.index, asked.users))]
    names = {str(x) for node in between for x in node.all_input_nodes if x.op == "placeholder"}
    assert {f"p_model_layers_1_mlp_shared_experts_{part}_proj_weight" for part in ("gate", "up", "down")} <= names


def test_two_microbatches_take_turns() -> None:
    """Each pauses right before it waits, and the bits are those of one after the other."""
    model = built("mixtral")
    _, cut, experts = halves(model)
    answers, log = Answers(experts, model), list[str]()

    class Logged:
        def start(self, layer: int, *given: Tensor | None) -> Any:
            log.append(f"ask {layer}")
            return answers.start(layer, *given)

        def finish(self, pending: Any) -> Tensor:
            log.append(f"wait {pending[0]}")
            return answers.finish(pending)

    bound = bind(cut.stages[0].graph.graph, ALONE, experts=Logged())
    from_run = list[list[Any]]()

    class Kept:
        def start(self, *given: Any) -> Any:
            return answers.start(*given)

        def finish(self, pending: Any) -> Tensor:
            return answers.finish(pending)

    expected = run(cut, model, Kept(), keep=from_run)
    going = [bound.steps(list(from_run[0])), bound.steps(list(from_run[0]))]
    ends = list[Tensor]()
    while going:
        for steps in list(going):
            try:
                next(steps)
                log.append("pause")
            except StopIteration as end:
                ends.append(end.value[0][0])
                going.remove(steps)
    turn = ["wait 0", "ask 1", "pause"]
    assert log == ["ask 0", "pause"] * 2 + turn * 2 + ["wait 1"] * 2
    assert all(torch.equal(x, expected[0]) for x in ends)


def test_rule() -> None:
    cut = compile_packed(**given(built("mixtral"), 2), mesh=Mesh.of(dp=2), apart="experts")
    node = calls_of(cut.stages[0].graph.graph.graph, ASK)[0]
    mesh = Mesh.of(dp=2, tp=2)
    for axis, tokens in (("dp", True), ("tp", False)):
        rule = rule_of(node, axis, mesh)
        dims = rule.operands[0]
        assert dims is not None and rule.results == (dims,)
        rule = type(rule)(rule.operands, rule.results, {**rule.sizes, "t": 8, "h": 8}, blocked=rule.blocked)
        for dim, may in ((0, tokens), (1, False)):
            with contextlib.nullcontext() if may else pytest.raises(RuleError):
                assert rule.produced(rule.cut_of(dims, Shard(dim), 2)) == [Shard(dim)]
        assert not rule.linear, "sums are complete before experts are asked"
    assert node.meta["placements"]["dp"] == Shard(0) and node.meta["placements"].get("tp", INVARIANT) == INVARIANT


def test_eager_call_and_compiled_graph_are_refused() -> None:
    x = torch.ones(2, 4)
    assert "run it by autopar.serve(model, roles)" in refusal(ours.ask_experts, x, None, None, 3)
    cut = compile_packed(**given(built("mixtral")), mesh=Mesh.of(dp=1), apart="experts")
    graph = cut.stages[0].graph.graph
    assert 'use backend="eager"' in refusal(bind, graph, ALONE, "inductor")


# --- MLPs --------------------------------------------------------------------------------------------------

ROUNDED = 1e-15  # the bias of the last product is added by itself, and the rows of logits are selected elsewhere


@pytest.mark.parametrize(
    "kind", ["gpt2", "phi3", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("llama", "falcon", "gpt_neox"))]
)
def test_mlps_apart(kind: str) -> None:
    model = built(kind)
    whole, cut, experts = halves(model, "mlp")
    expected, answers = run(whole, model), Answers(experts, model)
    assert far(run(cut, model, answers), expected) < ROUNDED
    assert len(experts.layers) == 2 and experts.layers[0].graph is experts.layers[1].graph
    assert all((x.num_experts, x.top_k, x.weights_dtype) == (0, 0, None) for x in experts.layers)
    assert all(expert is None and weights is None for _, (_, expert, weights) in answers.asked), "one value crosses"
    names = {spec.name for spec in experts.parameters}
    assert names and not names & {spec.name for spec in cut.parameters}
    assert names | {spec.name for spec in cut.parameters} == {spec.name for spec in whole.parameters}
    assert all(len(spec.shape) == 1 or "mlp" in spec.name or "dense" in spec.name for spec in experts.parameters)
    for sizes in ({"ep": 2}, {"ep": 2, "tp": 2}):
        nodes = compile_experts(**given(model), mesh=Mesh.of(**sizes), apart="mlp")
        assert all(isinstance(spec.placements["ep"], Shard) for spec in nodes.parameters), "each holds its slice"
        assert far(run(cut, model, Parted(nodes, model, (2,))), expected) < 1e-13


def test_text_of_an_mlp() -> None:
    graphs = texts(Gated(), "attention", "mlp")
    (asked,) = (line for line in graphs["cut_mlp"].splitlines() if "autopar.ask_experts" in line)
    assert asked == "ask_experts_default = autopar.ask_experts(reshape_default_4, None, None, 0)"
    assert "p_down_weight" not in graphs["cut_mlp"] and "p_down_bias" in graphs["cut_mlp"]
    found = texts(Gated(), "experts", "mlp")["experts0.cut"]
    assert found.splitlines()[0] == "reshape_default_5 = reshape(x, [1, 24, 16])"
    assert "p_up_weight, p_up_bias" in found and "p_down_weight" in found and "p_down_bias" not in found


class Gated(Causal):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 24).double() for _ in range(2))
        self.down = nn.Linear(24, WIDTH).double()

    def logits(self, h: Tensor) -> Tensor:
        return self.head(h + self.down(F.silu(self.gate(h)) * self.up(h)))


# --- refusals ----------------------------------------------------------------------------------------------


def beside(change: Callable[[Routed, dict[str, Tensor]], Tensor]) -> Callable[[Routed, dict[str, Tensor]], Tensor]:
    """Adds to the residual stream."""

    def extra(model: Routed, known: dict[str, Tensor]) -> Tensor:
        known["beside"] = change(model, known)
        return known["hidden"]

    return extra


def of_rows(model: Routed, known: dict[str, Tensor]) -> Tensor:
    return known["hidden"] * known["h"].mean(-1).flatten().repeat_interleave(2).view(-1, 1)


WAY_OUT = "serve the model without roles"
CROSSING: dict[str, tuple[Callable[[Routed, dict[str, Tensor]], Tensor], str]] = {
    "goes in": (of_rows, r"mul\.Tensor \(\w+\) reads aten\."),
    "comes out": (beside(lambda m, known: known["hidden"].sum()), r"sum\.default \(\w+\) reads aten\.relu"),
    "a weight": (beside(lambda m, known: known["h"] * m.up.mean()), r"mean\.default \(\w+\) reads up, a parameter of"),
}


@pytest.mark.parametrize("name", CROSSING)
def test_what_crosses_is_named(name: str) -> None:
    extra, words = CROSSING[name]
    for role in ("attention", "experts"):
        found = refusal(texts, Routed(extra), role)
        assert re.search(f"only tokens, their experts and weights may cross, found that .*{words}", found), found
        assert found.startswith("serve: ") and found.endswith(WAY_OUT) and found.count(". ") == 0


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no experts": (lambda: texts(Causal(), "attention"), rf"found none; {WAY_OUT}"),
    "no MLP": (lambda: texts(Causal(), "attention", "mlp"), rf"found none; {WAY_OUT}"),
    "experts in a dense model's place": (lambda: texts(Routed(), "experts", "mlp"), r'use apart="experts"'),
    "experts do not divide": (
        lambda: texts(Routed(), "experts", mesh=Mesh.of(ep=3)), "4 experts do not divide over 3 nodes .* ep of 1, 2, 4",
    ),
    "a width that does not divide": (
        lambda: texts(Gated(), "experts", "mlp", Mesh.of(ep=5)), "width of an MLP does not divide over 5 nodes",
    ),
    "other axes": (lambda: texts(Routed(), "experts", mesh=Mesh.of(ep=2, dp=2)), "on ep and tp, found axis dp=2"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    call, words = REFUSED[name]
    found = refusal(call)
    assert found.startswith("serve: ") and re.search(words, found), found
