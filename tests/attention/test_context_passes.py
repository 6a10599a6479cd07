"""What context parallelism makes of a graph and of a plan, as text; and what a step sends outside of attention."""

from __future__ import annotations

import functools
import math
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from autopar.capture.front_end import capture
from autopar.compile.model import compile_graph
from autopar.cost.traffic import communication
from autopar.ir.graph import outputs
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Shard
from autopar.options import Options
from autopar.plan import Plan
from autopar.report.graph_text import format_graph
from autopar.rewrite.compilation import Compilation
from autopar.steps.graphs import Compiled
from autopar.testing.harness import check_model
from tests.support.cases import Cell, compiled, step_graphs
from tests.support.subject_models import Small, small_batch
from tests.support.subjects import subject

ROWS, TOKENS, WIDTH = 2, 16, 8


@functools.cache
def rewritten(layout: str, attention: str) -> tuple[Compiled, dict[str, str]]:
    """The small model over two ranks: what was made of it, and its text after every pass."""
    texts: dict[str, str] = {}

    def watch(name: str, gm: GraphModule, ctx: Compilation) -> None:
        texts[name] = format_graph(gm, Mesh.of(cp=2))

    graph = capture(Small(), small_batch(TOKENS), lift_to_float64=True)
    options = Options(attention=attention, cp_load_balance=layout)
    return compile_graph(graph, Mesh.of(cp=2), options, outputs=(), observers=[watch]), texts


def calls(text: str, *operators: str) -> list[str]:
    """Lines that call one of some operators, in order; columns and what follows them left out."""
    lines = [" ".join(line.partition("  # ")[0].split()) for line in text.splitlines()]
    return [line for line in lines if any(f"= {name}(" in line for name in operators)]


WATCHED = ("embedding", "autopar.attention", "attention_of_piece", "linear", "autopar.cross_entropy", "sum", "div")

BEFORE = """
embedding: f64[2,16,8] = embedding(p_embed_weight, ids)
linear: f64[2,16,24] = linear(embedding, p_qkv_weight)
attention_default: (f64[2,2,16,4], f64[2,2,16]) = autopar.attention(getitem, getitem_1, getitem_2, None, None, None, \
None, None, True, 0, 0, 0, 0.5, 0.0, 0.0, 0, [], [], [])
linear_1: f64[2,16,16] = linear(add, p_head_weight)
cross_entropy_default: (f64[32], f64[32]) = autopar.cross_entropy(reshape_default_4, reshape_default_5, -100, 0.0)
sum_default: f64[] = sum(getitem_5)
sum_default_1: i64[] = sum(ne_scalar)
div_tensor: f64[] = div(sum_default, watch_default)
"""

AFTER = """
p_embed_weight_r: f64[16,8] cp:R = exchange(p_embed_weight, cp, I -> R)
ids_s: i64[2,8] cp:S(1;8,-8) = exchange(ids, cp, I -> S(1;8,-8))
embedding: f64[2,8,8] cp:S(1;8,-8) = embedding(p_embed_weight_r, ids_s)
p_qkv_weight_r: f64[24,8] cp:R = exchange(p_qkv_weight, cp, I -> R)
linear: f64[2,8,24] cp:S(1;8,-8) = linear(embedding, p_qkv_weight_r)
attention_default: (f64[2,2,8,4], f64[2,2,8]) = attention_of_piece(getitem, getitem_1, getitem_2, None, None, None, \
None, None, True, 0, 0, 0, 0.5, 0.0, 0.0, 0, [], [], [], 'ring', 'token_ring', [1, -1], [1, -1], 'cp', 2, 1)
p_head_weight_r: f64[16,8] cp:R = exchange(p_head_weight, cp, I -> R)
linear_1: f64[2,8,16] cp:S(1;8,-8) = linear(add, p_head_weight_r)
reshape_default_5_s: i64[16] cp:S(0;(8,-8)x2) = exchange(reshape_default_5, cp, I -> S(0;(8,-8)x2))
cross_entropy_default: (f64[16], f64[16]) = autopar.cross_entropy(reshape_default_4, reshape_default_5_s, -100, 0.0)
sum_default: f64[] cp:P = sum(getitem_5)
sum_default_1: i64[] = sum(ne_scalar)
div_tensor: f64[] cp:P = div(sum_default, watch_default)
div_tensor_i: f64[] = exchange(div_tensor, cp, P -> I)
"""


def test_tokens_are_sliced_once_and_the_loss_is_summed() -> None:
    """Ids and labels are cut in zigzag, and nothing in between is exchanged but by attention. All ranks have all
    labels, so each of them knows how many there are."""
    _, texts = rewritten("zigzag", "ring+token_ring")
    assert calls(texts["normalize"], *WATCHED, "exchange") == BEFORE.strip().splitlines()
    assert calls(texts["lower_to_local"], *WATCHED, "exchange") == AFTER.strip().splitlines()


def test_a_contiguous_layout_is_plain() -> None:
    made, texts = rewritten("contiguous", "ring")
    assert "ids_s: i64[2,8] cp:S(1) = exchange(ids, cp, I -> S(1))" in calls(texts["lower_to_local"], "exchange")
    assert made.plan.streams[0].blocks == () and "'ring', 'ring', [], [], 'cp', 2, 1)" in texts["lower_to_local"]


def test_algorithms_stand_in_forward_and_backward() -> None:
    """Both step graphs name both; the forward keeps q, k, v (as one value), out and lse, each a piece."""
    made, _ = rewritten("zigzag", "ring+token_ring")
    forward, backward = (format_graph(graph) for graph in step_graphs(made))
    assert "'ring', 'token_ring', [1, -1], [1, -1], 'cp', 2)" in calls(forward, "autopar.context_attention")[0]
    (call,) = calls(backward, "autopar.context_attention_backward")
    assert "'ring', 'token_ring', [1, -1], [1, -1], 'cp', 2, False)" in call
    assert call.startswith("context_attention_backward: (f64[2,2,8,4], f64[2,2,8,4], f64[2,2,8,4], f64[0], f64[0])")
    kept = [tuple(n.meta["val"].shape) for n in outputs(made.stage.forward.graph)]
    assert kept.count((ROWS * TOKENS // 2, 3 * WIDTH)) == 1  # q, k and v
    assert kept.count((ROWS, 2, TOKENS // 2, 4)) == kept.count((ROWS, 2, TOKENS // 2)) == 1


def test_heads_are_exchanged_around_ulysses() -> None:
    """q, k and v exchange heads for sequence, plain attention sees half of the heads, and its output goes back."""
    _, texts = rewritten("auto", "ulysses")
    forward = calls(texts["forward"], "autopar.all_to_all", "autopar.attention", "autopar.context_attention")
    assert [line.partition(" = autopar.")[2].partition("(")[0] for line in forward] == (
        ["all_to_all"] * 3 + ["attention", "all_to_all"]
    )
    assert "(f64[2,1,16,4], f64[2,1,16])" in forward[3]


# --- plans -----------------------------------------------------------------------------------------------


def test_the_text_of_a_plan_has_streams_algorithms_and_candidates() -> None:
    made, _ = rewritten("auto", "auto")
    text = str(made.plan)
    (stream,) = [line for line in text.splitlines() if line.startswith("  stream from attention_default.q")]
    chosen = made.plan.attention["attention_default"]
    assert "cp: S(2; 1,-1)" in stream and "zigzag takes" in stream and "contiguous takes" in stream
    assert f"forward {chosen.forward}, backward {chosen.backward}  " in text and "by estimate" in chosen.reason
    assert "  candidates of attention_default:" in text
    table = {tuple(line.split()[:2]) for line in text.partition("candidates")[2].splitlines()[1:]}
    for name in ("all_gather", "bi_ring", "zigzag_ring", "token_ring", "ulysses", "hybrid"):
        assert {(name, "forward"), (name, "backward")} <= table
    assert 'hybrid                     forward   context_parallel: attention "hybrid": needs a group size' in text


@pytest.mark.parametrize(
    ("layout", "attention"), [("auto", "auto"), ("zigzag", "ring+token_ring"), ("auto", "ulysses")]
)
def test_plans_with_attention_survive_json(layout: str, attention: str) -> None:
    plan = rewritten(layout, attention)[0].plan
    assert plan.attention and any(s.axis == "cp" for s in plan.streams)
    assert Plan.from_json(plan.to_json()) == plan


def test_a_plan_from_json_makes_the_same_graphs() -> None:
    cell = Cell("llama", Mesh.of(cp=2), Options(attention="bi_ring+token_ring", cp_load_balance="zigzag"))
    first = compiled(cell)
    graph = subject("llama").graph()
    again = compile_graph(graph, cell.mesh, plan=Plan.from_json(first.plan.to_json()), outputs=())
    assert [g.code for g in step_graphs(again)] == [g.code for g in step_graphs(first)]


# --- beside tensor parallelism -----------------------------------------------------------------------------


def llama(mesh: str, **options: object) -> Compiled:
    return compiled(Cell("llama", Mesh.parse(mesh), Options(attention="ring", **options)))  # type: ignore[arg-type]


def test_sequence_parallelism_cuts_every_chunk() -> None:
    """tp cuts each of the four chunks that zigzag deals to cp=2, so every rank of tp holds a part of both of its own:
    gathering over tp alone gives back what cp dealt."""
    made = llama("cp=2,tp=2", cp_load_balance="zigzag", sequence_parallel=True)
    (stream,) = [s for s in made.plan.streams if s.axis == "tp"]
    assert stream.blocks == (4, 4, 4, 4)
    found = Counter(
        (str(p["tp"]), str(p["cp"]))
        for n in made.local.graph.nodes
        if isinstance(p := n.meta.get("placements"), dict) and all(isinstance(p.get(a), Shard) for a in ("cp", "tp"))
    )
    residual = found["S(1;4x4)", "S(1;4,-4)"]
    assert residual > 20 and found["S(1)", "S(2;8,-8)"] > 20, found
    assert not any(tp == "S(1)" and cp.startswith("S(1;") for tp, cp in found)


# --- communication -----------------------------------------------------------------------------------------


def moved_on_cp(made: Compiled) -> list[dict[str, float]]:
    """Bytes over cp by kind, of the forward and the backward; what attention sends left out."""
    ledgers = [communication(graph, made.plan.mesh) for graph in step_graphs(made)]
    on_cp = [{kind: v.bytes for (axis, kind), v in ledger.items() if axis == "cp"} for ledger in ledgers]
    assert all(any(kind.startswith("send") for kind in of) for of in on_cp), "a ring sends from rank to rank"
    return [{kind: v for kind, v in of.items() if not kind.startswith("send")} for of in on_cp]


@pytest.mark.parametrize(("mesh", "options"), [
    ("cp=2", {"cp_load_balance": "zigzag"}), ("cp=4", {}), ("cp=2,tp=2", {"sequence_parallel": True}),
], ids=str)  # fmt: skip
def test_outside_of_attention_only_gradients_and_the_loss_are_summed(mesh: str, options: dict[str, object]) -> None:
    made = llama(mesh, **options)
    ranks = made.plan.mesh.size("cp")
    each = 2 * (ranks - 1) / ranks  # times the bytes: a ring's all-reduce
    gradients = sum(math.prod(p.local_shape(made.plan.mesh)) * p.dtype.itemsize for p in made.parameters)
    assert moved_on_cp(made) == [{"all_reduce": each * 8}, {"all_reduce": each * gradients}]


def test_zero_cuts_parameters_over_cp_too() -> None:
    """They are gathered for the forward and again for the backward, but for those of the last layers; their gradients
    are scattered. What is too small to cut is summed."""
    made = llama("dp=2,cp=2", zero=3)
    cut = sum(p.nbytes() for p in made.parameters if "cp" in p.placements)
    rest = sum(p.nbytes() for p in made.parameters if "cp" not in p.placements)
    forward, backward = moved_on_cp(made)
    assert cut > 100 * rest > 0
    assert forward == {"all_gather": cut / 2, "all_reduce": 8}
    assert 0 < backward.pop("all_gather") <= cut / 2
    assert backward == {"reduce_scatter": cut / 2, "all_reduce": rest}


class Prefixed(nn.Module):
    """Tokens of a table before those of the batch, in front of an attention; and the batch twice, behind it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.last = nn.Parameter(torch.randn(2, 4, 8)), nn.Linear(8, 8)
        self.register_buffer("memory", torch.randn(2, 4, 8))
        self.memory: Tensor
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.cat([self.table, self.memory, torch.tanh(self.last(x))], 1)
        q = h.unflatten(2, (2, 4)).transpose(1, 2)
        h = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
        return ((torch.cat([h, h.sin()], 1)[:, 12:20] - y) ** 2).mean()


@pytest.mark.parametrize("attention", ["zigzag_ring", "ring", "ulysses"])
def test_sequences_that_are_dealt_otherwise_are_concatenated(attention: str) -> None:
    """Each part of the result is dealt as it was: a table in one piece, the batch in chunks."""
    batch = {k: torch.randn(2, 8, 8).double() for k in ("x", "y")}
    assert check_model(Prefixed(), batch, Mesh.of(cp=2), Options(attention=attention)).worst < 1e-10
