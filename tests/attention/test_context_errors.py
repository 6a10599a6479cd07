"""Bad input to context parallelism: a clear error that says need, finding and way out, before anything is sent."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.attention.algorithm_table import ALGORITHMS
from autopar.capture.front_end import capture
from autopar.compile.model import compile_graph, plan_model
from autopar.ir.graph import copy_graph
from autopar.ir.mesh import Mesh
from autopar.models.tiny import TINY
from autopar.options import Options
from autopar.testing.harness import check_model
from tests.support.ranks import run_ranks
from tests.support.subject_models import Small, small_batch


@functools.cache
def graph_of(model: str, tokens: int) -> Any:
    """A captured model, to be copied."""
    if model == "small":
        return capture(Small(), small_batch(tokens))
    if model == "biased":
        return capture(Biased(), {"x": torch.ones(2, tokens, 8)})
    return capture(TINY[model].build(), TINY[model].batch(4, tokens))


class Biased(nn.Module):
    """A bias for each pair of query and key, as T5 has it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.distances = nn.Linear(8, 24), nn.Embedding(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        places = torch.arange(x.shape[1])
        bias = self.distances((places[:, None] - places).abs()).permute(2, 0, 1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).square().mean()


NAMES = ", ".join(name for name, _ in ALGORITHMS.items())
REFUSED: list[tuple[str, int, str, dict[str, Any], str]] = [
    ("small", 18, "cp=4", {}, r'^context_parallel: sequence length 18 of .* does not divide over axis "cp" of size 4; '
     r'pad to 20, as parallelize\(padding="bucket"\) does$'),
    ("small", 12, "cp=4", {"cp_load_balance": "zigzag"},
     "cp_load_balance=zigzag: a sequence of 12 tokens does not divide into 8 chunks "
     "for 4 ranks; pad to 16, or cp_load_balance=contiguous$"),
    ("small", 12, "cp=4", {"attention": "zigzag_ring"}, "12 tokens does not divide into 8 chunks .* pad to 16"),
    ("small", 16, "cp=4", {"attention": "ulysses"}, r'^context_parallel: .*"ulysses": 2 query heads do not divide over '
     r"4 ranks; .* choose fewer ranks, .*\"ring\""),
    ("small", 16, "cp=2,tp=2", {"attention": "ulysses"}, '"ulysses": 1 query heads do not divide over 2 ranks'),
    ("small", 16, "cp=2", {"attention": "hybrid"}, r'"hybrid": needs a group size .* found none; choose "ring"'),
    ("biased", 16, "cp=2", {"attention": "token_ring"}, '"token_ring": needs a bias that is the same for all queries, '
     'since .*; choose "ring"'),
    ("biased", 16, "cp=2", {"attention": "ring+token_ring"}, '"token_ring": needs a bias that is the same'),
    ("small", 16, "cp=2", {"attention": "rings"}, f"attention: unknown name 'rings'; known are {NAMES}; did you mean "
     "'ring'"),
    ("small", 16, "cp=2", {"attention": "ring+"}, f"attention: unknown name ''; known are {NAMES}"),
    ("small", 16, "cp=2", {"attention": "ulysses+ring"}, r"ulysses exchanges heads .*, found ulysses\+ring; use "
     "ulysses for both passes"),
    ("small", 16, "cp=2", {"attention": "ring+ulysses"}, r"found ring\+ulysses; use ulysses for both passes"),
    ("small", 16, "cp=2", {"topology": "cp=donut"}, "topology: .*donut"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "tokens", "mesh", "options", "message"), REFUSED, ids=[
    f"{model}-{tokens}-{mesh}-{''.join(map(str, options.values()))}" for model, tokens, mesh, options, _ in REFUSED
])  # fmt: skip
def test_refused_when_planning(model: str, tokens: int, mesh: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compile_graph(copy_graph(graph_of(model, tokens)), Mesh.parse(mesh), Options(**options), outputs=())


def test_layouts_are_known() -> None:
    with pytest.raises(
        ValueError, match=r"^cp_load_balance: expected 'auto', 'contiguous' or 'zigzag', found .striped."
    ):
        Options(cp_load_balance="striped")


@pytest.mark.parametrize("schedule", ["tera_pipe", "seq1f1b"])
def test_a_sequence_is_not_cut_in_time_and_over_ranks(schedule: str) -> None:
    options = Options(schedule=schedule, microbatches=2)
    message = f'^pipeline: the schedule {schedule} slices the sequence in time, and the axis "cp" shards .*; use a'
    with pytest.raises(ValueError, match=message):
        compile_graph(copy_graph(graph_of("small", 16)), Mesh.of(pp=2, cp=2), options, outputs=())


class Mlp(nn.Module):
    """No attention at all."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(torch.relu(self.up(x))), y)


def test_a_model_without_attention() -> None:
    batch = {"x": torch.ones(4, 8), "y": torch.ones(4, 4)}
    with pytest.raises(ValueError, match=r'^context_parallel: axis "cp" .* found none: .* use no axis "cp"$'):
        plan_model(Mlp(), batch, Mesh.of(cp=2), Options())


# --- on ranks ----------------------------------------------------------------------------------------------


def refused_on_a_rank(tokens: int, options: dict[str, Any], shift: bool) -> tuple[str, int]:
    """The error of parallelize or train_step on a rank, and the bytes it had sent."""
    mesh = autopar.init_mesh("cpu", 30.0, cp=2)
    batch = small_batch(tokens)
    if shift and torch.distributed.get_rank():
        batch = {name: x.roll(1, 1) for name, x in batch.items()}
    parallel = None
    try:
        parallel = autopar.parallelize(Small(), mesh, example_batch=batch, **options)
        parallel.train_step(**batch)
    except ValueError as error:
        return str(error), sum(t.bytes for t in parallel.traffic().values()) if parallel is not None else 0
    return "no error", 0


@pytest.mark.parametrize(("tokens", "options", "shift", "message"), [
    (15, {}, False, "sequence length 15 of"),
    (16, {"attention": "rings"}, False, "attention: unknown name 'rings'"),
    (16, {"attention": "ring"}, True, "batch: the ranks of 'cp' must be given the same batch"),
], ids=["length", "name", "batches"])  # fmt: skip
def test_every_rank_refuses_before_anything_is_sent(
    tokens: int, options: dict[str, Any], shift: bool, message: str
) -> None:
    for error, sent in run_ranks(2, refused_on_a_rank, tokens, options, shift, timeout=120.0):
        assert message in error and sent == 0


class Captioned(nn.Module):
    """A few patches of an image, attended among themselves, beside a text."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.words, self.out = nn.Linear(8, 24), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, image: Tensor, x: Tensor) -> Tensor:
        seen = self.attend(self.patches(image)).mean(1, keepdim=True)
        return self.out(self.attend(self.words(x + seen))).square().mean()

    def attend(self, qkv: Tensor) -> Tensor:
        q, k, v = qkv.unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def test_a_shorter_sequence_that_does_not_divide_stays_whole() -> None:
    torch.manual_seed(0)
    batch = {n: torch.randn(2, m, 8, dtype=torch.float64) for n, m in (("image", 5), ("x", 8))}
    made = check_model(Captioned().double(), batch, Mesh.of(cp=2))
    assert made.worst < 1e-10
    assert "replicated on cp: 5 tokens do not divide over 2 ranks" in [reason for _, reason in made.compiled.plan.notes]
    with pytest.raises(ValueError, match=r"sequence length 9 of .* does not divide .* pad to 10"):
        check_model(Captioned().double(), batch | {"image": torch.randn(2, 9, 8).double()}, Mesh.of(cp=2))
