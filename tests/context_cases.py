"""Whole models with their sequence cut over ranks: captured once, compiled in the parent, run on real ranks.

    results = run_case(Case("llama", Mesh.of(cp=2), Options(layout="zigzag")), ["ring", "token_ring"])

The parent forks the ranks after it has compiled, so they inherit the graphs. Algorithms that exchange no heads differ
by nothing but their names in the step graphs of one layout (a test of its own compares these), so that one compiled
model serves them all: `rename`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from autopar.adapters.operators import argument_defaults
from autopar.capture import capture
from autopar.compile.model import compile_graph
from autopar.ir.graph import copy_graph
from autopar.ir.mesh import Mesh
from autopar.ir.placement import nested_piece
from autopar.models.tiny import TINY
from autopar.options import Options
from autopar.runtime.attention_comm import OPERATORS
from autopar.runtime.executor import Executor
from autopar.runtime.groups import Groups, init_mesh
from autopar.runtime.module import step_seed
from autopar.steps.graphs import Compiled
from autopar.steps.of_rank import backwards
from autopar.verification import reference
from tests.pipeline_cases import holds, values_of, with_schedule
from tests.ranks import close_pools, run_ranks

LIMIT = 1e-10  # of loss and gradients, in float64
ROWS, TOKENS = 4, 16
LONG_ROWS, LONG = 3, 256
SEED = step_seed(0, 1)
IGNORED = -100
# Algorithms without exchanges of heads, and a mix: they run on any compiled graph.
SAME_GRAPH = ("all_gather", "ring", "bi_ring", "zigzag_ring", "token_ring", "bi_ring+token_ring")

# One layer (of each kind) where two say no more: compiling is what these tests cost.
ONE_LAYER = {
    "qwen3": {"num_hidden_layers": 1},
    "qwen3_moe": {"num_hidden_layers": 1},
    "bert": {"num_hidden_layers": 1},
    "gpt2": {"n_layer": 1},
    "t5": {"num_layers": 1},
    "whisper": {"encoder_layers": 1, "decoder_layers": 1},
}

Subject = tuple[nn.Module, dict[str, Tensor]]


# --- models and batches ----------------------------------------------------------------------------------


class Small(nn.Module):
    """One causal attention with two heads, a residual, and a loss over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(16, 8), nn.Linear(8, 24, bias=False)
        self.head = nn.Linear(8, 16, bias=False)
        self.double()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(x).view(*ids.shape, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x + h).flatten(0, 1), labels.flatten())


def small_batch(tokens: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 16, (2, tokens), generator=torch.Generator().manual_seed(0))
    return {"ids": ids, "labels": ids.roll(-1, 1)}


class TwoLosses(nn.Module):
    """Attention, not causal, with a loss over tokens and another over features."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(16, 16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.tokens, self.features = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, ids: Tensor, labels: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
        h = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        loss = F.cross_entropy(self.tokens(h).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        return loss, F.mse_loss(torch.tanh(self.features(h)), target)


def _tiny(name: str, dropout: float = 0.0, **sizes: Any) -> Subject:
    """A tiny model, with other sizes where given."""
    entry = dataclasses.replace(TINY[name], sizes=TINY[name].sizes | ONE_LAYER.get(name, {}) | sizes)
    return entry.build(dropout=dropout), entry.batch(ROWS, TOKENS)


def _packed() -> Subject:
    """Two or three documents per row; nothing but the last tokens has a label, so some ranks have none."""
    model, batch = _tiny("llama")
    lengths = [(16,), (5, 11), (9, 4, 3), (8, 8)]
    batch["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    batch["labels"][:, :12] = IGNORED
    return model, batch


def _padded(name: str, dropout: float = 0.0) -> Subject:
    """Rows without padding, with padding on the right, and on the left."""
    model, batch = _tiny(name, dropout)
    mask = torch.ones(ROWS, TOKENS, dtype=torch.int64)
    mask[1, 11:], mask[2, :3], mask[3, :9] = 0, 0, 0
    return model, batch | {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, IGNORED)}


def _frozen(name: str) -> Subject:
    """The embedding is frozen."""
    model, batch = _tiny(name)
    model.get_input_embeddings().requires_grad_(False)  # type: ignore[operator]
    return model, batch


def _two_losses() -> Subject:
    torch.manual_seed(0)
    ids = torch.randint(0, 16, (ROWS, TOKENS))
    labels = ids.roll(-1, 1).masked_fill(torch.rand(ROWS, TOKENS) < 0.3, IGNORED)
    return TwoLosses().double(), {"ids": ids, "labels": labels, "target": torch.rand(ROWS, TOKENS, 4).double()}


def _long() -> Subject:
    return _tiny("llama")[0], TINY["llama"].batch(LONG_ROWS, LONG)


OTHERS: dict[str, Callable[[], Subject]] = {
    "long llama": _long,
    "packed llama": _packed,
    "padded llama": lambda: _padded("llama"),
    "multi-query tied llama": lambda: _tiny("llama_tied", num_key_value_heads=1),
    "frozen qwen3_moe": lambda: _frozen("qwen3_moe"),
    "two losses": _two_losses,
    "gpt2 with dropout": lambda: _tiny("gpt2", dropout=0.1),
    "padded bert with dropout": lambda: _padded("bert", dropout=0.1),
}


@dataclass(frozen=True)
class Captured:
    """A model, its batch, its graph (to be copied), and what one process gets."""

    model: nn.Module
    batch: dict[str, Tensor]
    graph: GraphModule
    loss: float
    gradients: dict[str, Tensor | None]


@functools.cache
def captured(name: str) -> Captured:
    """A tiny model, or one of `OTHERS`, in float64."""
    model, batch = OTHERS[name]() if name in OTHERS else _tiny(name)
    loss, gradients = reference(model, batch, seed=SEED)
    return Captured(model, batch, capture(model, batch, exact=True), loss, gradients)


# --- compiling -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model on a mesh."""

    model: str
    mesh: Mesh
    options: Options


def compile_case(case: Case) -> Compiled:
    """In this process. Raises ValueError as `compile_graph` does."""
    return compile_graph(copy_graph(captured(case.model).graph), case.mesh, case.options, outputs=())


compiled = functools.cache(compile_case)


def step_graphs(made: Compiled) -> Iterator[GraphModule]:
    """All that run once per micro-batch."""
    for part in made.pipeline.parts:
        yield from (step.graph for step in (part.forward, *backwards(part)))


def rename(made: Compiled, attention: str) -> int:
    """Let every attention over ranks run other algorithms, in place. Returns how many calls there are."""
    forward, plus, backward = attention.partition("+")
    names = {"forward": forward, "backward": backward if plus else forward}
    nodes = [n for graph in step_graphs(made) for n in graph.graph.nodes if n.target in OPERATORS]
    for node in nodes:
        order = list(argument_defaults(node.target))
        node.args = tuple(names.get(name, x) for name, x in zip(order, node.args, strict=True))
    return len(nodes)


# --- on ranks --------------------------------------------------------------------------------------------


@dataclass
class Found:
    """What one rank found: largest errors, which gradient that is, and gradients that only one side has."""

    loss: float
    gradient: float
    worst: str
    odd: list[str]


_FORKED: set[Case] = set()


def prepare(cases: list[Case]) -> None:
    """Compile cases before the ranks are forked, so that one pool serves them all."""
    for case in cases:
        compiled(case)
    close_pools()
    _FORKED.clear()
    _FORKED.update(cases)


def run_case(case: Case, algorithms: list[str], schedule: str = "") -> dict[str, list[Found]]:
    """Algorithm -> what each rank found. "" stands for what the case was compiled for."""
    if case not in _FORKED:
        prepare([case])
    found = run_ranks(case.mesh.world_size, _on_rank, case, algorithms, schedule, timeout=120.0)
    return {name: [of_rank[name] for of_rank in found] for name in algorithms}


def check(case: Case, algorithms: list[str], schedule: str = "") -> None:
    """Assert that loss and every gradient are those of one process."""
    for name, found in run_case(case, algorithms, schedule).items():
        for rank, of_rank in enumerate(found):
            where = (case.model, str(case.mesh), name or case.options.attention, rank, of_rank)
            assert of_rank.loss < LIMIT and of_rank.gradient < LIMIT and not of_rank.odd, where


def _on_rank(case: Case, algorithms: list[str], schedule: str) -> dict[str, Found]:
    groups = Groups(init_mesh("cpu", 30.0, **case.mesh.sizes))
    made = compiled(case)
    if schedule:
        made = with_schedule(made, schedule)
    out = {}
    for name in algorithms:
        assert not name or rename(made, name), f"{case} has no attention over ranks"
        out[name] = _run(made, captured(case.model), groups)
    return out


def _run(made: Compiled, known: Captured, groups: Groups) -> Found:
    """One training step on this rank, compared with one process."""
    cut_order, here = groups.mesh.cut_order, groups.coordinate
    executor = Executor(made, groups)
    result = executor.train_step(values_of(made, known, groups, SEED))
    specs = {s.name: s for s in made.parameters}
    nodes = {s.node: s.name for s in made.local.meta["signature"].inputs}
    errors: dict[str, float] = {}
    for node, gradient in result.gradients.items():
        spec = specs[nodes[node]]
        names = (spec.name, *spec.aliases)
        whole = next((g for n in names if (g := known.gradients.get(n)) is not None), torch.zeros(spec.shape))
        error = (gradient - nested_piece(whole, spec.placements, cut_order, here)).abs().max()
        errors |= dict.fromkeys(names, float(error))
    mine = {n for s in made.parameters if holds(executor, s.name, here) for n in (s.name, *s.aliases)}
    odd = sorted(n for n, g in known.gradients.items() if g is not None and n in mine and n not in errors)
    worst = max(errors, key=errors.__getitem__)
    return Found(abs(sum(float(x) for x in result.losses) - known.loss), errors[worst], worst, odd)
