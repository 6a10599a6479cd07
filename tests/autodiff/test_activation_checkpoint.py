"""Recomputation changes no bit of any gradient, and memory as predicted.

Every policy on every kind of model, with dropout; limits; B and W; the model's own checkpoints; the rewritten graphs.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.ac_policies import AC_POLICIES, ForwardValue
from autopar.capture.front_end import capture
from autopar.compile.model import compile_graph, compile_model
from autopar.cost.memory import memories, memory
from autopar.cost.traffic import step_communication
from autopar.ir.graph import copy_graph
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.plan import Plan
from autopar.report.graph_text import format_graph
from autopar.steps.graphs import Compiled
from autopar.testing.harness import MeshRun
from tests.benchmarks.meter import Meter
from tests.support.cases import Cell, check, compile_cell, simulated
from tests.support.ranks import run_ranks
from tests.support.subjects import SEED, make, tiny

DROPPING = ("llama", "gpt2", "t5", "bert", "mixtral", "whisper", "vit", "falcon", "gemma2", "deepseek_v3")
MODELS = (*DROPPING, "cnn", "mlp", "padded llama")
OTHERS = ("none", "model", "offload", "auto")  # nothing is recomputed, or what the model or the limit asks for
POLICIES = (*(name for name in AC_POLICIES if name not in OTHERS), "every second")
ALWAYS = {"gpt2": POLICIES, "t5": ("full",), "mixtral": ("full",), "cnn": ("full",), "padded llama": ("selective",)}


def every_second(value: ForwardValue) -> bool:
    """Products and all else, whatever the layer: recomputed chains are long."""
    return len(value.target) % 2 == 0


@pytest.fixture(autouse=True)
def _known_policy() -> Iterator[None]:
    AC_POLICIES.add("every second", every_second)
    yield
    AC_POLICIES.remove("every second")


@functools.cache
def captured(name: str) -> tuple[nn.Module, Any, GraphModule]:
    model, batch = tiny(name, layers=1, dropout=0.1) if name in DROPPING else make(name)
    return model, batch, capture(model, batch, lift_to_float64=True)


@functools.cache
def made(name: str, **options: Any) -> Compiled:
    return compile_graph(copy_graph(captured(name)[2]), Mesh.of(), Options(**options), outputs=())


@functools.cache
def step_of(name: str, policy: str = "none", limit: int = 0) -> tuple[list[float], dict[str, list[torch.Tensor]]]:
    model, batch, _ = captured(name)
    return MeshRun(made(name, activation_checkpoint=policy, memory_limit=limit), model, batch, Mesh.of(), SEED).step()


def peak(compiled: Compiled) -> int:
    return max(found.peak for found in memories(compiled))


@functools.cache
def least(name: str) -> int:
    with pytest.raises(ValueError, match="no choice of what to recompute") as error:
        made(name, memory_limit=1)
    found = re.search(r"least that would do is ([\d,]+) bytes", str(error.value))
    assert found is not None
    return int(found[1].replace(",", ""))


def differing(name: str, policy: str, limit: int = 0) -> list[str]:
    expected, found = step_of(name), step_of(name, policy, limit)
    assert expected[0] == found[0] and expected[1].keys() == found[1].keys()
    pairs = ((key, x, y) for key, xs in expected[1].items() for x, y in zip(xs, found[1][key], strict=True))
    return [key for key, x, y in pairs if not torch.equal(x, y)]


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_every_model_are_the_same_bits(name: str) -> None:
    test_gradients_are_the_same_bits(name, POLICIES, (0.0, 0.5))


@pytest.mark.parametrize("name", ALWAYS)
def test_gradients_are_the_same_bits(name: str, policies: Sequence[str] = (), shares: Sequence[float] = (0.0,)) -> None:
    for policy in policies or ALWAYS[name]:
        assert made(name, activation_checkpoint=policy).plan.checkpoints or name in ("mlp", "cnn")
        assert not differing(name, policy)
    none = peak(made(name, activation_checkpoint="none"))
    for share in shares:
        limit = round(least(name) + share * (none - least(name)))
        assert not differing(name, "auto", limit)


# --- limits -------------------------------------------------------------------------------------------------

LIMITED: dict[str, tuple[str, Mesh, dict[str, Any]]] = {
    "one rank": ("one-layer llama", Mesh.of(), {}),
    "zero 3": ("one-layer llama", Mesh.of(dp=2), {"zero": 3}),
    "sequence parallel": ("one-layer llama", Mesh.of(tp=2), {"sequence_parallel": True}),
    "an encoder": ("one-layer t5", Mesh.of(dp=2, tp=2), {}),
    "sharded sequences": ("one-layer llama", Mesh.of(cp=2), {}),
    "1f1b": ("one-layer llama", Mesh.of(pp=2), {"microbatches": 4, "schedule": "1f1b"}),
    "zb_h1": ("one-layer llama", Mesh.of(pp=2), {"microbatches": 4, "schedule": "zb_h1"}),
    "zb_auto": ("llama", Mesh.of(pp=2), {"microbatches": 4, "schedule": "zb_auto"}),
    "interleaved": ("llama", Mesh.of(pp=2), {"microbatches": 4, "schedule": "interleaved"}),
    "dual_pipe_v": ("llama", Mesh.of(pp=2), {"microbatches": 4, "schedule": "dual_pipe_v"}),
    "token slices": ("one-layer llama", Mesh.of(pp=2), {"microbatches": 2, "schedule": "tera_pipe", "token_slices": 2}),
}


# The other two meshes, and schedules whose orders and parts are those of two of these, with -m full.
OFTEN = ("zero 3", "sequence parallel", "sharded sequences", "zb_auto", "token slices")


SHARES = (1.0, 0.4, 0.0)  # of what a limit gives back
LIMITS = [
    *((kind, SHARES if kind == "zb_auto" else (1.0, 0.0)) for kind in OFTEN),
    *(pytest.param(kind, SHARES, marks=pytest.mark.full) for kind in LIMITED if kind != "zb_auto"),
]


@pytest.mark.parametrize("kind, shares", LIMITS)
def test_a_limit_is_kept(kind: str, shares: Sequence[float]) -> None:
    """Under every limit from all down to the least that the refusal names, with no less time under a lower one."""
    name, mesh, options = LIMITED[kind]

    def under(limit: int) -> Compiled:
        return compile_cell(Cell(name, mesh, Options(memory_limit=limit, **options)))

    everything = peak(compile_cell(Cell(name, mesh, Options(activation_checkpoint="none", **options))))
    with pytest.raises(ValueError, match="activation_checkpoint: no choice of what to recompute fits") as error:
        under(1000)
    found = re.search(r"least that would do is ([\d,]+) bytes", str(error.value))
    assert found is not None
    assert ("an example_batch of these sizes, for which stages are split" in str(error.value)) == ("pp" in mesh.sizes)
    lowest, seconds = int(found[1].replace(",", "")), []
    assert lowest < everything
    for share in shares:
        limit = round(lowest + share * (everything - lowest))
        compiled = under(limit)
        assert peak(compiled) <= limit
        seconds.append(sum(layer.seconds for layer in compiled.plan.checkpoints))
    assert seconds[0] == 0
    assert seconds == sorted(seconds) and seconds[-1] > 0
    with pytest.raises(ValueError, match=re.escape(f"least that would do is {lowest:,}")):
        under(round(0.99 * lowest))


def test_early_stages_make_more_again() -> None:
    """1F1B holds more microbatches on early stages, so the same limit asks more of them."""
    model, batch = tiny("llama", layers=4)
    options: dict[str, Any] = {"microbatches": 4, "schedule": "1f1b"}
    cuts = ("model.layers.1", "model.layers.2", "model.layers.3")

    def compiled(**more: Any) -> Compiled:
        return compile_model(model, batch, Mesh.of(pp=4), Options(split_points=cuts, **options, **more), outputs=())

    def of_parts(found: Compiled) -> list[float]:
        layers = found.plan.checkpoints
        return [sum(layer.seconds for layer in layers if layer.part == k) for k in range(4)]

    none, full = compiled(activation_checkpoint="none"), compiled(activation_checkpoint="full")
    limited = compiled(memory_limit=round(0.5 * peak(none) + 0.5 * peak(full)))
    seconds = of_parts(limited)
    assert seconds[0] > seconds[1] >= seconds[2] >= seconds[3]
    assert sum(seconds) < 0.5 * sum(of_parts(full))


HELD = [*(pytest.param(p, marks=pytest.mark.full) for p in ("none", "selective", "full")), "auto"]


@pytest.mark.parametrize("policy", HELD)
def test_what_is_held_is_what_was_predicted(policy: str) -> None:
    """As policies that choose nothing: more of them in tests/cost/test_workspace.py."""
    found = run_ranks(1, _held, policy)[0]
    print(policy, found)
    assert 0.99 < found[0] / found[1] < 1.03


def _held(policy: str) -> tuple[int, int]:
    """(predicted, measured) bytes of a step whose layers are wide enough to set the peak."""
    model, batch = tiny("llama", layers=1, hidden_size=64, intermediate_size=160)
    mesh = autopar.init_mesh("cpu", 30.0, dp=1)
    limit = 0
    if policy == "auto":
        some = [
            compile_model(model, batch, Mesh.of(dp=1), Options(activation_checkpoint=name), outputs=())
            for name in ("none", "full")
        ]
        limit = round(sum(map(peak, some)) / 2)
    parallel = autopar.parallelize(model, mesh, activation_checkpoint=policy, memory_limit=limit)
    parallel.train_step(**batch)
    for p in parallel.parameters():
        p.grad = None
    with Meter([list(parallel.parameters()), list(parallel.buffers()), batch]) as meter:
        parallel.train_step(**batch)
    predicted = memory(parallel.compiled()[0])
    dist.barrier()
    return predicted.peak - predicted.optimizer, meter.peak


# --- B and W ------------------------------------------------------------------------------------------------


def test_what_both_would_make_again_is_made_once() -> None:
    """B hands it to W."""
    options: dict[str, Any] = {"microbatches": 4, "schedule": "zb_h1"}
    compiled = compile_cell(Cell("llama", Mesh.of(pp=2), Options(activation_checkpoint="full", **options)))
    for part in compiled.pipeline.parts:
        assert part.backward_input is not None and part.backward_weight is not None
        first, second = (
            [str(n.target) for n in step.graph.graph.nodes if "again" in n.meta and n.target != operator.getitem]
            for step in (part.backward_input, part.backward_weight)
        )
        assert first.count("autopar.attention.default") == 1 and first.count("aten.mm.default") >= 6
        assert set(second) <= {"aten.mul.Tensor"}, "the product that the last matrix takes, which B does not need"
        assert any(n.startswith("stash:") for n in part.backward_weight.inputs)


# --- graphs -------------------------------------------------------------------------------------------------


def test_the_dump_says_what_is_saved_and_what_is_made_again() -> None:
    stage = made("llama", activation_checkpoint="full").stage
    assert stage.backward_reduce is not None
    forward, backward = (format_graph(step.graph) for step in (stage.forward, stage.backward_reduce))
    kept = re.findall(r"# saved, ([\d.]+ \w+)", forward)
    assert kept and "recomputed" not in forward
    again = [line for line in backward.splitlines() if "# recomputed" in line]
    assert any("silu" in line and "model.layers.0.mlp" in line for line in again)
    assert any("attention" in line for line in again)
    none = made("llama", activation_checkpoint="none").stage
    assert none.backward_reduce is not None
    texts = [format_graph(step.graph) for step in (none.forward, none.backward_reduce)]
    assert not any("recomputed" in text or "# saved" in text for text in texts)


def test_gathers_are_made_again_and_sums_are_not() -> None:
    """Under sequence parallelism, as Megatron does: the piece is saved, and gathered in the backward as well."""
    mesh = Mesh.of(tp=2)
    options = {name: Options(sequence_parallel=True, activation_checkpoint=name) for name in ("none", "full")}
    sent = {name: step_communication(compile_cell(Cell("one-layer llama", mesh, o)), 0) for name, o in options.items()}
    calls = {name: {kind: v.calls for (_, kind), v in volumes.items()} for name, volumes in sent.items()}
    assert calls["full"]["reduce_scatter"] == calls["none"]["reduce_scatter"]
    assert calls["full"]["all_gather"] == calls["none"]["all_gather"] + 2  # of a layer
    for name in options:
        check(simulated(Cell("one-layer llama", mesh, options[name])))


def test_choices_of_experts_are_kept() -> None:
    """A tie that goes the other way the second time would be silent."""
    stage = made("mixtral", activation_checkpoint="full").stage
    assert stage.backward_reduce is not None
    names = [str(n.target) for n in stage.backward_reduce.graph.graph.nodes if "again" in n.meta]
    assert names and not any("topk" in name or "sort" in name for name in names)


# --- the model's own ----------------------------------------------------------------------------------------


class Blocks(nn.Module):
    """Calls some of what it does within a checkpoint, of either kind, and hands a keyword through."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=torch.float64) for _ in range(3))

    def block(self, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        y = torch.tanh(layer(x))
        return torch.sin(y) * y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = checkpoint(self.block, x, layer, use_reentrant=self.reentrant) if i else self.block(x, layer)  # type: ignore[assignment]
        return x.square().mean()


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_models_own_checkpoints(reentrant: bool) -> None:
    batch = {"x": torch.randn(4, 8, dtype=torch.float64)}
    model = Blocks(reentrant)
    asked = compile_model(model, batch, Mesh.of())
    assert [layer.layer for layer in asked.plan.checkpoints] == ["layers.1", "layers.2"]
    for policy, saved in (("none", 0), ("model", 0)):
        found = compile_model(model, batch, Mesh.of(), Options(activation_checkpoint=policy))
        saved = memory(found).saved
        assert (saved > memory(asked).saved) == (policy == "none")
        assert bool(found.plan.checkpoints) == (policy == "model")


def test_transformers_own_checkpoints(recwarn: pytest.WarningsRecorder) -> None:
    model, batch = tiny("llama", layers=1)
    model.train()
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    asked, full = (
        compile_model(model, batch, Mesh.of(), Options(activation_checkpoint=name), outputs=())
        for name in ("model", "full")
    )
    assert [layer.layer for layer in asked.plan.checkpoints] == ["model.layers.0"]
    assert {x for layer in asked.plan.checkpoints for x in layer.again} == {
        x for layer in full.plan.checkpoints for x in layer.again
    }
    assert memory(asked).saved == memory(full).saved
    assert not [w for w in recwarn if "capture" in str(w.message)]


# --- plans and bad input ------------------------------------------------------------------------------------


def test_a_plan_holds_what_was_decided() -> None:
    compiled = made(
        "llama", memory_limit=round(0.5 * (peak(made("llama", activation_checkpoint="none")) + least("llama")))
    )
    plan = Plan.from_json(compiled.plan.to_json())
    assert plan == compiled.plan and plan.checkpoints
    text = str(plan)
    assert re.search(r"checkpoint model\.layers\.0\b.* recomputes \d+ values, keeps \d+ bytes; the least time", text)
    again = compile_graph(copy_graph(captured("llama")[2]), Mesh.of(), plan=plan, outputs=())
    assert again.plan.checkpoints == plan.checkpoints and again.stage.forward.outputs == compiled.stage.forward.outputs


BAD: list[tuple[dict[str, Any], str]] = [
    (
        {"activation_checkpoint": "sometimes"},
        "activation_checkpoint: unknown name 'sometimes'; known are none, full, selective, model, fused, offload, auto",
    ),
    (
        {"activation_checkpoint": "auto"},
        "activation_checkpoint: auto keeps the memory of a rank under a limit, found no memory_limit; set one",
    ),
    (
        {"memory_limit": 5},
        "activation_checkpoint: no choice of what to recompute fits a memory_limit of 5 bytes; the least that",
    ),
    (
        {"activation_checkpoint": "undecided"},
        "the policy 'undecided' must say of each value whether the backward recomputes it, found",
    ),
]


@pytest.mark.parametrize("options, message", BAD, ids=[str(o) for o, _ in BAD])
def test_bad_input(options: dict[str, Any], message: str) -> None:
    AC_POLICIES.add("undecided", lambda value: None)  # type: ignore[arg-type, return-value]
    try:
        with pytest.raises(ValueError, match=message):
            made("llama", **options)
    finally:
        AC_POLICIES.remove("undecided")


def test_a_plan_of_another_graph_is_refused() -> None:
    plan = made("llama", activation_checkpoint="full").plan
    text = plan.to_json().replace('"silu"', '"no_such_value"')
    with pytest.raises(
        ValueError, match="activation_checkpoint: a plan names no_such_value, which the graph does not have"
    ):
        compile_graph(copy_graph(captured("llama")[2]), Mesh.of(), plan=Plan.from_json(text), outputs=())
