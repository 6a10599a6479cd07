"""Plans: what is cut and why, what is refused and what the user can do, and that names never matter."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from autopar.capture.front_end import capture
from autopar.ir.graph import copy_graph, mark_gradients
from autopar.ir.mesh import Mesh
from autopar.ir.placement import INVARIANT, Shard
from autopar.models.tiny import TINY
from autopar.options import Options
from autopar.passes.pipelines import GLOBAL_PASSES
from autopar.plan import Plan
from autopar.planner import make_plan
from autopar.rewrite.compilation import Compilation
from autopar.rewrite.pass_manager import PassManager
from autopar.testing.harness import check_model


def plan_graph(captured: GraphModule, mesh: str, fixed: Plan | None = None, **options: Any) -> Plan:
    on = Mesh.parse(mesh)
    gm = PassManager(GLOBAL_PASSES).run(copy_graph(captured), Compilation(on))
    mark_gradients(gm, [s.node for s in gm.meta["signature"].inputs if s.requires_grad])
    return make_plan(gm, on, Options(**options), fixed)


def plan(model: nn.Module, batch: dict[str, Any], mesh: str, **options: Any) -> Plan:
    return plan_graph(capture(model, batch), mesh, **options)


@functools.cache
def tiny_graph(name: str, seq: int) -> GraphModule:
    return capture(TINY[name].build(), TINY[name].batch(4, seq))


def tiny(name: str, mesh: str, seq: int = 8, **options: Any) -> Plan:
    return plan_graph(tiny_graph(name, seq), mesh, **options)


def cuts(found: Plan, axis: str = "tp", layer: str = ".0.") -> dict[str, str]:
    """Last two parts of the name -> stored placement, of what is cut in one layer and outside of layers."""
    out = {}
    for name, axes in found.parameters.items():
        p = axes.get(axis)
        if p is not None and p.stored != INVARIANT and (layer in name or not any(c.isdigit() for c in name.split("."))):
            out[".".join(name.split(".")[-2:])] = str(p.stored)
    return out


GOLDEN: dict[str, dict[str, str]] = {
    "llama": {
        "embed_tokens.weight": "S(0)",
        "q_proj.weight": "S(0)",
        "k_proj.weight": "S(0)",
        "v_proj.weight": "S(0)",
        "o_proj.weight": "S(1)",
        "gate_proj.weight": "S(0)",
        "up_proj.weight": "S(0)",
        "down_proj.weight": "S(1)",
        "lm_head.weight": "S(0)",
    },
    "gpt2": {
        "wte.weight": "S(0)",
        "wpe.weight": "S(0)",
        "c_attn.weight": "S(1;32x3)",
        "c_attn.bias": "S(0;32x3)",
        "c_proj.weight": "S(0)",
        "c_fc.weight": "S(1)",
        "c_fc.bias": "S(0)",
    },
    "phi3": {
        "embed_tokens.weight": "S(0)",
        "qkv_proj.weight": "S(0;32,16x2)",
        "o_proj.weight": "S(1)",
        "gate_up_proj.weight": "S(0;64x2)",
        "down_proj.weight": "S(1)",
        "lm_head.weight": "S(0)",
    },
}


@pytest.mark.parametrize("name", GOLDEN)
def test_columns_rows_vocabulary_and_fused_blocks(name: str) -> None:
    assert cuts(tiny(name, "tp=2")) == GOLDEN[name]


def test_fewer_kv_heads_than_ranks() -> None:
    found = tiny("llama", "tp=4")
    kv = found.parameter("model.layers.0.self_attn.k_proj.weight", "tp")
    assert (str(kv.stored), str(kv.used)) == ("I", "R")
    assert "fewer kv heads than ranks" in kv.reason
    assert cuts(found)["q_proj.weight"] == "S(0)"


def test_reasons_are_shown() -> None:
    text = str(tiny("gpt2", "tp=2"))
    assert "column: by heads, fused blocks (32, 32, 32)" in text
    assert "row: contracted at" in text
    assert "vocabulary: sharded classes end in the loss" in str(tiny("llama", "tp=2"))


def test_data_parallel_plans() -> None:
    ddp = tiny("llama", "dp=2").parameter("lm_head.weight", "dp")
    assert (str(ddp.stored), str(ddp.used)) == ("I", "R")
    zero = tiny("llama", "dp=2,tp=2", zero=3)
    assert str(zero.parameter("lm_head.weight", "dp").stored) == "S(0)"
    assert str(zero.parameter("model.norm.weight", "dp").stored) == "I"
    assert {k: str(v) for k, v in zero.inputs["input_ids"].items()} == {"dp": "S(0)"}


# --- the user's choices -----------------------------------------------------------------------------------------------


def test_override_and_json() -> None:
    found = tiny("llama", "dp=2,tp=2", zero=3, sequence_parallel=True, microbatches=2)
    assert Plan.from_json(found.to_json()) == found
    changed = found.override({"lm_head.weight": {"tp": "I"}, "input_ids": {"dp": "I"}})
    assert changed.parameter("lm_head.weight", "tp").stored == INVARIANT
    assert changed.inputs["input_ids"]["dp"] == INVARIANT
    assert found.parameter("lm_head.weight", "tp").stored != INVARIANT
    for wrong, why in (
        ({"head": {"tp": "I"}}, "no parameter or input 'head'"),
        ({"lm_head.weight": {"cp": "I"}}, "no axis 'cp'"),
    ):
        with pytest.raises(ValueError, match=why):
            found.override(wrong)
    for text in ("{}", "[1]", "no"):
        with pytest.raises(ValueError, match="expected the JSON of a plan"):
            Plan.from_json(text)


def test_plan_of_another_graph_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"plan: made for a graph with parameters \w+, this one has \w+; make a new plan"
    ):
        tiny("llama", "tp=2", fixed=tiny("gpt2", "tp=2"))
    tiny_plan = tiny("llama", "tp=2")
    again = tiny("llama", "tp=2", seq=16, fixed=tiny_plan)
    assert all(again.stored(n) == tiny_plan.stored(n) for n in again.parameters)


# --- what does not divide ---------------------------------------------------------------------------------------------


def test_heads_that_do_not_divide_are_padded() -> None:
    found = tiny("llama", "tp=3")  # two key heads with two query heads each: on the first rank and on the second
    stored = {name: str(found.parameter(f"model.layers.0.self_attn.{name}_proj.weight", "tp").stored) for name in "qko"}
    assert stored == {"q": "S(0/2)", "k": "S(0/2)", "o": "S(1/2)"}


class Towers(nn.Module):
    """Attention of four heads, and of so many others; each with its own projections."""

    def __init__(self, *others: int) -> None:
        super().__init__()
        self.heads = (4, *others)
        self.towers = nn.ModuleList([nn.ModuleDict({n: nn.Linear(12, 12) for n in "qkvo"}) for _ in self.heads])

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for heads, tower in zip(self.heads, self.towers):
            q, k, v = (tower[n](x).unflatten(-1, (heads, -1)).transpose(1, 2) for n in "qkv")
            x = x + tower["o"](nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return nn.functional.mse_loss(x, target)


def test_one_attention_with_one_head_stays_whole() -> None:
    torch.manual_seed(0)
    batch = {n: torch.randn(4, 6, 12, dtype=torch.float64) for n in ("x", "target")}
    model = Towers(1).double()
    made = check_model(model, batch, Mesh.of(tp=2))
    assert made.worst < 1e-10
    assert made.compiled.plan.parameter("towers.0.q.weight", "tp").stored == Shard(0)
    assert made.compiled.plan.parameter("towers.1.q.weight", "tp").stored == INVARIANT
    whole = [reason for _, reason in made.compiled.plan.notes if "heads" in reason]
    assert whole == ["replicated on tp: 1 heads (1 kv heads) in the model do not divide over 2 ranks"], whole


def test_sequence_that_does_not_divide_is_padded() -> None:
    found = tiny("llama", "tp=2", seq=7, sequence_parallel=True)
    assert [(stream.dim, stream.units) for stream in found.streams] == [(1, 7)]
    assert "tp: S(1/7)" in str(found) and Plan.from_json(found.to_json()) == found


def test_batch_that_does_not_divide() -> None:
    with pytest.raises(ValueError, match=r"the batch of 4 .*does not divide into 6 pieces .* use a batch of 6"):
        tiny("llama", "dp=3", microbatches=2)


class Decoder(nn.Module):
    """A plain pre-norm transformer; the names of its parts are arguments."""

    def __init__(self, names: str = "embed norm1 qkv out norm2 up down head", vocabulary: int = 24) -> None:
        super().__init__()
        self.names = names.split()
        sizes = [(vocabulary, 16), (16,), (16, 48), (16, 16), (16,), (16, 32), (32, 16), (16, vocabulary)]
        for name, size in zip(self.names, sizes, strict=True):
            kind = nn.LayerNorm(16) if len(size) == 1 else nn.Linear(*size)
            self.add_module(name, nn.Embedding(*size) if name == self.names[0] else kind)

    def forward(self, ids: Tensor) -> Tensor:
        embed, norm1, qkv, out, norm2, up, down, head = (getattr(self, n) for n in self.names)
        x = embed(ids)
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in qkv(norm1(x)).chunk(3, -1))
        x = x + out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + down(F.gelu(up(norm2(x))))
        return F.cross_entropy(head(x).flatten(0, 1), ids.flatten())


IDS = {"ids": torch.zeros(4, 8, dtype=torch.int64)}


def test_names_never_matter() -> None:
    plain, odd = Decoder(), Decoder("a down b c d lm_head embed q_proj")
    one, two = (plan(m, IDS, "dp=2,tp=2", zero=3, sequence_parallel=True) for m in (plain, odd))
    renamed = dict(zip(odd.names, plain.names, strict=True))
    assert {
        f"{renamed[n.split('.')[0]]}.{n.split('.')[1]}": {a: (p.stored, p.used) for a, p in x.items()}
        for n, x in two.parameters.items()
    } == {n: {a: (p.stored, p.used) for a, p in x.items()} for n, x in one.parameters.items()}
    assert str(one.parameter("qkv.weight", "tp").stored) == "S(0;16x3)"
    assert str(one.parameter("down.weight", "tp").stored) == "S(1)"


def test_odd_vocabulary_is_padded() -> None:
    found = plan(Decoder(vocabulary=25), IDS, "tp=2")
    assert str(found.parameter("head.weight", "tp").stored) == "S(0/25)"
    assert not any("head.weight" in name for name, _ in found.notes)


def test_nothing_to_cut() -> None:
    with pytest.raises(ValueError, match=r"no weight can be sharded on axis 'tp' of size 2: .*; choose another size"):
        plan(nn.Sequential(nn.Linear(1, 1)), {"input": torch.zeros(2, 1)}, "tp=2")
