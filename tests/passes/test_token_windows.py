"""What reads a few tokens beside its own, or sums all before, over cp: graph, numbers, traffic, spellings, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.compile.model import compile_model
from autopar.cost.traffic import step_communication
from autopar.ir.halo import shift_of_piece, token_conv1d_of_piece
from autopar.ir.mesh import Mesh
from autopar.ir.scans import scan_of_piece
from autopar.options import Options
from autopar.steps.graphs import Compiled
from autopar.testing.harness import check_model
from autopar.testing.soundness import unsound
from tests.support.ranks import run_ranks
from tests.support.recurrent_models import text
from tests.support.space_samples import scans, token_windows
from tests.support.steps_on_ranks import step_on_rank

LIMIT, WIDTH, TOKENS = 1e-10, 4, 16


class Mixing(nn.Module):
    """Words, a product, what a way of mixing makes of their tokens, a product."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.words, self.into, self.out = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 64)
        self.causal = nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH, padding=3)
        self.valid = nn.Conv1d(WIDTH, WIDTH, 4, groups=2)
        self.wide = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, dilation=2)
        self.same = nn.Conv1d(WIDTH, WIDTH, 3, padding="same")
        self.pad = nn.ZeroPad2d((0, 0, 1, -1))
        self.taps = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.into(self.words(input_ids))
        h = self.into(torch.tanh((WAYS | OTHER_WAYS)[self.way](self, x)))
        return F.cross_entropy(self.out(h + x).flatten(0, 1), labels.flatten(), ignore_index=-100)


def turned(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return function(x.transpose(1, 2)).transpose(1, 2)


def by_taps(m: Any, x: Tensor) -> Tensor:
    padded = F.pad(x, (0, 0, 3, 0))
    terms = [m.taps[i] * padded[:, i : i + x.shape[1]] for i in range(4)]
    return terms[0] + terms[1] + terms[2] + terms[3]


def linear_attention(m: Any, x: Tensor) -> Tensor:
    k = m.into(x).exp()
    states = (k.unsqueeze(-1) * x.unsqueeze(-2)).cumsum(1)
    return torch.einsum("btk,btkv->btv", x.exp(), states) / (x.exp() * k.cumsum(1)).sum(-1, keepdim=True)


WAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "conv, slice": lambda m, x: turned(lambda y: m.causal(y)[..., : x.shape[1]], x),
    "conv, silu, slice": lambda m, x: turned(lambda y: F.silu(m.causal(y))[:, :, :-3], x),
    "pad, conv": lambda m, x: turned(lambda y: m.valid(F.pad(y, (3, 0))), x),
    "cat, conv": lambda m, x: turned(lambda y: m.valid(torch.cat([y.new_zeros(4, WIDTH, 3), y], -1)), x),
    "dilated": lambda m, x: turned(m.wide, x),
    "same": lambda m, x: turned(m.same, x),
    "unfold": lambda m, x: torch.einsum("btwk,kw->btw", F.pad(x, (0, 0, 3, 0)).unfold(1, 4, 1), m.taps),
    "taps": by_taps,
    "negative padding": lambda m, x: m.pad(x),
    "pad, slice": lambda m, x: F.pad(x, (0, 0, 1, 0))[:, :-1],
    "cat of zeros": lambda m, x: torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1),
    "next token": lambda m, x: F.pad(x[:, 1:], (0, 0, 0, 1)),
    "roll, mask": lambda m, x: x.roll(1, 1) * (torch.arange(x.shape[1]) > 0).unsqueeze(-1),
    "cumsum": lambda m, x: turned(lambda y: y.cumsum(-1), x),
    "cumprod": lambda m, x: (x.sigmoid() + 0.5).cumprod(1),
    "logcumsumexp": lambda m, x: x.logcumsumexp(1),
    "reversed cumsum": lambda m, x: x.flip(1).cumsum(1).flip(1),
    "reversed conv, slice": lambda m, x: turned(lambda y: m.causal(y.flip(-1))[..., : x.shape[1]].flip(-1), x),
    "linear attention": linear_attention,
}
OTHER_WAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {  # exact, without a halo
    "first row lost": lambda m, x: F.pad(x[:, 1:], (0, 0, 1, 0)),
    "conv of a shift": lambda m, x: turned(lambda y: m.valid(F.pad(y[..., :-1], (4, 0))), x),
    "ones": lambda m, x: F.pad(x, (0, 0, 1, -1), value=1.0),
    "first row twice": lambda m, x: torch.cat([x[:, :1], x[:, :-1]], 1),
    "strided": lambda m, x: F.pad(x, (0, 0, 1, 0))[:, 0:-1:2].repeat_interleave(2, 1),
    "a halo of most tokens": lambda m, x: F.pad(x, (0, 0, 11, -11)),
    "both directions": lambda m, x: x.cumsum(1) + x.flip(1).cumprod(1),
    "beside its reverse": lambda m, x: x.cumsum(1) + x.flip(1).cumsum(1),
    "flipped alone": lambda m, x: x.flip(1),
    "all dims flipped": lambda m, x: x.flip(0, 1, 2).cumsum(1).flip(0, 1, 2),
}


def made(way: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Mixing(way).double(), text(4, TOKENS)


def sent_by(compiled: Compiled) -> dict[str, int]:
    """Bytes of a rank over cp, without sums of gradients."""
    return {kind: t.bytes for (axis, kind), t in step_communication(compiled).items() if kind != "all_reduce"}


# --- the operators ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sample", [*token_windows(), *scans()], ids=lambda s: f"{s.steps[0].target} {s.steps[0].args[1:]}"[-40:]
)
def test_shards_of_tokens_and_of_zigzags(sample: Any) -> None:
    """Chunks of equal length, one or more for each rank, dealt forwards or back; and all other dims."""
    for ranks in (2, 3):
        tried, wrong = unsound(sample, Mesh.of(cp=ranks))
        assert tried > 2 and not wrong, "\n".join(wrong)


# --- the graph ----------------------------------------------------------------------------------------------


def test_a_convolution_and_its_slice_become_one_call() -> None:
    texts: dict[str, list[str]] = {}

    def keep(name: str, gm: Any, ctx: Any) -> None:
        texts[name] = [f"{getattr(n.target, '__name__', n.target)}{n.args}" for n in gm.graph.nodes if n.op != "output"]

    compile_model(*made("conv, slice"), Mesh.of(cp=2), Options(), lift_to_float64=True, outputs=(), observers=[keep])
    assert "token_conv1d(transpose, p_causal_weight, p_causal_bias, 3, 0, 1, 4)" in texts["token_windows"]
    assert not [line for line in texts["token_windows"] if "slice" in line or "conv1d.default" in line]
    local = [line for line in texts["lower_to_local"] if line.startswith("token_conv1d")]
    assert [line.partition("(")[0] for line in local] == ["token_conv1d_of_piece"]
    assert local[0].endswith("3, 0, 1, 4, 'cp', 2, [])")
    assert not [line for line in texts["propagate_placements"] if "'S(1)', 'S(" in line or "'S(2)', 'S(" in line]


def test_without_cp_nothing_changes() -> None:
    names: set[Any] = set()
    see = lambda name, gm, ctx: names.update(n.target for n in gm.graph.nodes)  # noqa: E731
    compile_model(*made("conv, slice"), Mesh.of(dp=2), Options(), lift_to_float64=True, outputs=(), observers=[see])
    assert not {token_conv1d_of_piece, shift_of_piece, scan_of_piece} & names
    assert torch.ops.aten.conv1d.default in names


def test_zeros_of_a_wider_type_widen_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """So they are no padding."""
    monkeypatch.setitem(
        OTHER_WAYS,
        "wider",
        lambda m, x: torch.cat([x.new_zeros(4, 1, WIDTH, dtype=torch.float64), x[:, :-1]], 1).float(),
    )
    torch.manual_seed(0)
    names: set[Any] = set()
    see = lambda name, gm, ctx: names.update(n.target for n in gm.graph.nodes)  # noqa: E731
    compile_model(Mixing("wider"), text(4, TOKENS), Mesh.of(cp=2), Options(), outputs=(), observers=[see])
    assert shift_of_piece not in names


# --- numbers and traffic ------------------------------------------------------------------------------------

ROW = 4 * WIDTH * 8  # bytes of one token of all rows


@pytest.mark.parametrize("way", list(WAYS))
def test_ways_are_exact_and_send_few_rows(way: str) -> None:
    """A rank sends the rows of its neighbours' halo, once in each pass, and no activation."""
    found = check_model(*made(way), Mesh.of(cp=2), Options(cp_recurrences="channels"))
    assert found.worst < LIMIT, str(found)
    assert not [s for s in found.compiled.plan.streams if s.channels]
    sent = sent_by(found.compiled)
    assert sent.keys() == {"all_gather", "reduce_scatter"}
    if way != "linear attention":
        rows = {"dilated": 4, "same": 2, "unfold": 6, "taps": 6, "roll, mask": 1}
        expected = rows.get(way, 3 if "conv" in way else 1) * ROW
        assert sent == {"all_gather": expected, "reduce_scatter": expected}
    (share,) = [share for share in found.compiled.plan.shares if share.axis == "cp"]
    assert share.flops is not None and share.flops > 0.98, str(share)


@pytest.mark.parametrize("way", OTHER_WAYS)
def test_other_ways_are_exact_too(way: str) -> None:
    assert check_model(*made(way), Mesh.of(cp=2), Options(cp_recurrences="channels")).worst < LIMIT


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("cp=4", {}),
        ("dp=2,cp=2", {"zero": 3}),
        ("cp=2,tp=2", {"sequence_parallel": True}),
        ("cp=2", {"microbatches": 2}),
    ],
    ids=str,
)
def test_other_meshes(mesh: str, options: dict[str, Any]) -> None:
    for way in ("conv, slice", "cat of zeros", "linear attention"):
        assert check_model(*made(way), Mesh.parse(mesh), Options(**options)).worst < LIMIT


def test_a_halo_that_costs_more_than_all_to_alls_is_not_taken() -> None:
    """16 tokens on cp=4: both all-to-alls of a pass send 2 * 16 * 3 / 16 = 6 tokens, the halo of three 3 * 3."""
    for tokens, channels in ((16, True), (64, False)):
        model, _ = made("conv, slice")
        found = check_model(model, text(4, tokens), Mesh.of(cp=4), Options(cp_recurrences="channels"))
        assert found.worst < LIMIT, str(found)
        assert bool([s for s in found.compiled.plan.streams if s.channels]) == channels
        assert ("all_to_all" in sent_by(found.compiled)) == channels


class Attending(nn.Module):
    """A causal convolution, a shift and a running sum beside causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.qkv, self.out = nn.Embedding(64, 8), nn.Linear(8, 24), nn.Linear(8, 64)
        self.conv = nn.Conv1d(8, 8, 4, groups=8, padding=3)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(input_ids)
        x = x + F.silu(turned(lambda y: self.conv(y)[..., : y.shape[-1]], x)) + F.pad(x, (0, 0, 1, -1))
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x + 0.1 * x.cumsum(1)).chunk(3, -1))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.out(h).flatten(0, 1), labels.flatten(), ignore_index=-100)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_chunk_of_a_zigzag_has_a_halo(ranks: int) -> None:
    torch.manual_seed(0)
    options = Options(cp_load_balance="zigzag", attention="ring")
    found = check_model(Attending().double(), text(2, 16 * ranks), Mesh.of(cp=ranks), options)
    assert found.worst < LIMIT, str(found)
    assert any(s.blocks for s in found.compiled.plan.streams)
    assert "all_to_all" not in sent_by(found.compiled)


def stepped(way: str, sizes: dict[str, int], options: dict[str, Any]) -> float:
    """On a rank: the largest error, as users call it."""
    return step_on_rank(*made(way), sizes, options)[0]


@pytest.mark.parametrize(
    ("way", "sizes", "options"),
    [
        ("conv, slice", {"cp": 2}, {}),
        ("linear attention", {"cp": 2}, {"zero": 3, "microbatches": 2}),
        ("both directions", {"cp": 2}, {}),
    ],
    ids=str,
)
def test_steps_on_ranks_are_those_of_one_process(way: str, sizes: dict[str, int], options: dict[str, Any]) -> None:
    count = torch.Size(sizes.values()).numel()
    assert max(run_ranks(count, stepped, way, sizes, options, timeout=240)) < LIMIT
