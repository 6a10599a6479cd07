"""Recurrences over a sharded sequence run on all tokens of some heads: graph, numbers, traffic, decisions, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.compile.model import compile_model
from autopar.cost.flops import PRODUCT, flops, kind_of
from autopar.cost.traffic import step_communication
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.plan import Plan
from autopar.steps.graphs import Compiled
from autopar.testing.harness import check_model
from autopar.testing.reference import eager
from tests.support.cases import step_graphs
from tests.support.ranks import refusal, run_ranks
from tests.support.recurrent_models import CONFIGS, Made, recurrent, scan, text
from tests.support.steps_on_ranks import step_on_rank

LIMIT = 1e-10
CHANNELS, REPLICATED = Options(cp_recurrences="channels"), Options(cp_recurrences="replicate")


def made_of(made: Made, mesh: str, options: Options, **how: Any) -> Compiled:
    return compile_model(*made, Mesh.parse(mesh), options, lift_to_float64=True, outputs=(), **how)


def channels_of(plan: Plan) -> list[tuple[str, int, int]]:
    return [(s.node, s.dim, s.units) for s in plan.streams if s.channels]


# --- the graph ----------------------------------------------------------------------------------------------


BEFORE = """
transpose = transpose(getitem, 1, 2)
token_conv1d = token_conv1d(transpose, p_conv_weight, p_conv_bias, 2, 0, 1, 4)
stack = stack([add, add_1, add_2, add_3], 1)
reshape_default_1 = reshape(stack, [4, 4, 4])
"""
AFTER = """
transpose = transpose(getitem, 1, 2)
transpose_s = convert(transpose, 'cp', 'S(2)', 'S(1)')
p_conv_weight_s = convert(p_conv_weight, 'cp', 'I', 'S(0)')
p_conv_bias_s = convert(p_conv_bias, 'cp', 'I', 'S(0)')
token_conv1d = token_conv1d(transpose_s, p_conv_weight_s, p_conv_bias_s, 2, 0, 1, 4)
stack = stack([add, add_1, add_2, add_3], 1)
stack_s = convert(stack, 'cp', 'S(2)', 'S(1)')
reshape_default_1 = reshape(stack_s, [4, 4, 4])
"""


def text_of(gm: Any) -> list[str]:
    calls = (n for n in gm.graph.nodes if n.op == "call_function")
    return [f"{n.name} = {getattr(n.target, '__name__', '').partition('.')[0]}{n.args}" for n in calls]


def test_an_exchange_in_front_and_one_behind() -> None:
    """The gate stays on tokens: that is one exchange less."""
    texts: dict[str, list[str]] = {}
    made_of(scan(), "cp=2", CHANNELS, observers=[lambda name, gm, ctx: texts.update({name: text_of(gm)})])
    names = list(texts)
    before, after = texts[names[names.index("propagate_placements") - 1]], texts["propagate_placements"]
    for found, expected in ((before, BEFORE), (after, AFTER)):
        lines = expected.strip().splitlines()
        assert [line for line in found if line.split()[0] in expected.split()] == lines
    exchanges = [line for line in after if "'S(1)', 'S(" in line or "'S(2)', 'S(" in line]
    assert [line.split()[0] for line in exchanges] == ["transpose_s", "stack_s"]


# --- numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "mesh", "options", "channels"),
    [
        (2, "cp=2", {}, ("stack", 2, 0)),
        (3, "cp=2", {}, ("stack", 2, 3)),  # two heads and one
        (6, "cp=4", {"microbatches": 2}, ("stack", 2, 6)),
        (1, "cp=2", {}, ("stack", 3, 0)),  # the width of one head
        (3, "dp=2,cp=2", {"zero": 3}, ("stack", 2, 3)),
        (4, "cp=2,tp=2", {}, ("stack", 2, 0)),
    ],
    ids=str,
)
def test_loss_and_gradients_of_a_scan(heads: int, mesh: str, options: Any, channels: Any) -> None:
    found = check_model(*scan(heads=heads, width=1 + (heads % 3 > 0)), Mesh.parse(mesh), replace(CHANNELS, **options))
    assert channels_of(found.compiled.plan) == [channels]
    assert found.worst < LIMIT, str(found)


class Grouped(nn.Module):
    """A state of four heads, which read and write it by keys that all share: tp shards the heads, too."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.x, self.keys = nn.Embedding(64, 8), nn.Linear(8, 8), nn.Linear(8, 6)
        self.decay, self.out, self.head = nn.Linear(8, 4), nn.Linear(8, 8), nn.Linear(8, 64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        h = self.words(input_ids)
        x, decay = self.x(h).unflatten(-1, (4, 2)), self.decay(h).sigmoid()
        write, read = (part.unsqueeze(2).repeat_interleave(4, 2) for part in self.keys(h).chunk(2, -1))
        state, ys = torch.zeros_like(write[:, 0, :, :, None] * x[:, 0, :, None]), []
        for t in range(x.shape[1]):
            state = decay[:, t, :, None, None] * state + write[:, t, :, :, None] * x[:, t, :, None]
            ys.append((read[:, t, :, :, None] * state).sum(2))
        h = h + self.out(torch.stack(ys, 1).flatten(2))
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), labels.flatten(), ignore_index=-100)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_heads_over_tp_and_then_over_cp(sequence_parallel: bool) -> None:
    torch.manual_seed(0)
    options = replace(CHANNELS, sequence_parallel=sequence_parallel)
    found = check_model(Grouped().double(), text(4, 8), Mesh.of(cp=2, tp=2), options)
    assert found.worst < LIMIT, str(found)
    (share,) = [share for share in found.compiled.plan.shares if share.axis == "cp"]
    assert share.flops is not None and share.flops > 0.95, str(share)


MESHES = ("cp=2", "cp=4", "dp=2,cp=2", "cp=2,tp=2")
FEW = [("mamba2", "cp=4"), ("falcon_h1", "cp=2,tp=2")]


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, marks=() if (name, mesh) in FEW else pytest.mark.full)
        for name in CONFIGS
        for mesh in MESHES
    ],
)
def test_models_equal_one_process_and_cut_their_work(name: str, mesh: str) -> None:
    made = recurrent(name)
    found = check_model(*made, Mesh.parse(mesh), replace(CHANNELS, zero=3 if "dp" in mesh else 0))
    assert found.worst < LIMIT, str(found)
    assert max(float(g.abs().max()) for g in eager(*made).gradients.values() if g is not None) > 1e-3
    assert channels_of(found.compiled.plan)
    (share,) = [share for share in found.compiled.plan.shares if share.axis == "cp"]
    assert share.flops is not None and share.flops > 0.98, str(share)


def stepped(make: str, sizes: dict[str, int], options: dict[str, Any]) -> float:
    """On a rank: the largest error, as users call it."""
    made = scan(heads=3, width=1) if make == "scan" else recurrent(make)
    worst, parallel = step_on_rank(*made, sizes, {"cp_recurrences": "channels", **options})
    assert any(stream.channels for stream in parallel.plan.streams)
    return worst


RANKS: list[Any] = [
    ("scan", {"cp": 2}, {"microbatches": 2}),
    ("falcon_h1", {"cp": 2}, {"cp_load_balance": "zigzag", "attention": "ring"}),
    ("mamba2", {"dp": 2, "cp": 2}, {"zero": 3}),
    *(
        pytest.param(name, sizes, {}, marks=pytest.mark.full)
        for name in CONFIGS
        for sizes in ({"cp": 2}, {"cp": 4}, {"dp": 2, "cp": 2}, {"cp": 2, "tp": 2})
    ),
]


@pytest.mark.parametrize(("make", "sizes", "options"), RANKS, ids=str)
def test_steps_on_ranks_are_those_of_one_process(make: str, sizes: dict[str, int], options: dict[str, Any]) -> None:
    count = torch.Size(sizes.values()).numel()
    assert max(run_ranks(count, stepped, make, sizes, options, timeout=240)) < LIMIT


# --- traffic and work ---------------------------------------------------------------------------------------


def test_bytes_and_work() -> None:
    """4 x 4 tokens of 4 channels, 8 bytes: 512. A rank sends a quarter, in front and behind, in both passes;
    replicated, the convolution runs on tokens, with a halo of two of them, and half of its result is gathered."""
    channels, whole, one = (
        made_of(scan(), *how) for how in (("cp=2", CHANNELS), ("cp=2", REPLICATED), ("dp=1", Options()))
    )
    assert not channels_of(whole.plan)
    sent, before = step_communication(channels), step_communication(whole)
    assert sent["cp", "all_to_all"].bytes == 4 * 512 // 4
    assert ("cp", "all_to_all") not in before
    assert before["cp", "all_gather"].bytes == 2 * 4 * 4 * 8 + 512 // 2
    per_rank, all_of_it, of_one = (work(compiled) for compiled in (channels, whole, one))
    assert 2 * per_rank == 2 * all_of_it < of_one  # one process convolves two rows more, and crops them


def work(compiled: Compiled) -> int:
    """FLOPs of the products and convolutions of a rank's step."""
    nodes = (node for gm in step_graphs(compiled) for node in gm.graph.nodes)
    return sum(flops(node) for node in nodes if kind_of(node) == PRODUCT)


# --- decisions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", ["cp=2", "cp=4"])
def test_what_one_group_gives_to_all_heads_is_gathered_before_it_is_repeated(mesh: str) -> None:
    """B and C of Mamba-2, of one group: gathered once each, forward and back, instead of exchanged for each head."""
    model, batch = recurrent("mamba2", num_heads=16, head_dim=8, state_size=40, n_groups=1, hidden_size=64)
    known, ranks = Mesh.parse(mesh), Mesh.parse(mesh).size("cp")
    found = check_model(model, batch, known, Options(cp_recurrences="channels"))
    assert found.worst < LIMIT
    sent = step_communication(found.compiled)
    of_b_and_c = 2 * batch["input_ids"].numel() * 40 * 4 * (ranks - 1) // ranks  # float32, each way
    both = [sent["cp", kind].bytes for kind in ("all_gather", "reduce_scatter")]
    of_heads = batch["input_ids"].numel() * 16 * 40 * 4 // ranks
    assert min(both) >= of_b_and_c and sent["cp", "all_to_all"].bytes < of_heads * ranks


def test_regions_run_on_channels_where_it_saves_time() -> None:
    fast, slow = (made_of(scan(), "cp=2", Options(topology=f"cp=mesh:1e12:{s}")).plan for s in ("0", "1"))
    assert channels_of(fast) and not channels_of(slow)
    assert "on channels a rank computes" in str(fast)
    (why,) = [reason for subject, reason in slow.notes if reason.startswith("replicated on cp: ")]
    assert "on channels a rank computes" in why and " replicated it gathers for " in why


def test_what_is_replicated_is_said() -> None:
    plan = made_of(scan(), "cp=2", REPLICATED).plan
    assert [r for _, r in plan.notes] == ["replicated on cp, as it needs tokens of all ranks: asked for"]


def test_plans_are_kept_as_text() -> None:
    plan = made_of(scan(), "cp=2", CHANNELS).plan
    assert Plan.from_json(plan.to_json()).streams == plan.streams


# --- without channels ---------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Words, and what all words so far have in common in all their channels: no channel is computed by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.over, self.out = nn.Embedding(64, 4), nn.Linear(4, 4), nn.Linear(4, 64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(input_ids)
        state, states = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = torch.tanh(self.over(state) + x[:, t])
            states.append(state)
        return nn.functional.cross_entropy(self.out(torch.stack(states, 1)).flatten(0, 1), labels.flatten())


def test_a_region_whose_channels_mix_is_right() -> None:
    torch.manual_seed(0)
    found = check_model(Mixed().double(), text(4, 4), Mesh.of(cp=2), CHANNELS)
    assert found.worst < LIMIT, str(found)


class BothWays(nn.Module):
    """Running sums from the left and, over flipped words, from the right, each after and before a product."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.left, self.right = nn.Embedding(64, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.out = nn.Linear(4, 64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(input_ids)
        h = self.left(self.left(x).cumsum(1)) + self.right(self.right(x.flip(1)).tanh().cumsum(1)).flip(1)
        return nn.functional.cross_entropy(self.out(h).flatten(0, 1), labels.flatten())


def test_products_between_what_mixes_run_on_tokens() -> None:
    torch.manual_seed(0)
    found = check_model(BothWays().double(), text(4, 4), Mesh.of(cp=2), CHANNELS)
    assert found.worst < LIMIT, str(found)
    assert work(found.compiled) * 2 == work(made_of((BothWays().double(), text(4, 4)), "dp=1", Options()))


def refused() -> str:
    model, batch = scan(tokens=3)
    mesh = autopar.init_mesh("cpu", 30.0, cp=2)
    return refusal(autopar.parallelize, model, mesh, example_batch=batch)


def test_tokens_that_do_not_divide_are_refused() -> None:
    for told in run_ranks(2, refused):
        assert told == (
            'context_parallel: sequence length 3 of input input_ids does not divide over axis "cp" of size 2; pad to '
            '4, as parallelize(padding="bucket") does'
        )
