"""Token slices: loss and gradients of any slicing equal eager, and what cannot be sliced is refused by name."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from autopar.compile.model import compile_model
from autopar.ir.graph import has_gradient, outputs, placeholders
from autopar.ir.mesh import Mesh, TokenSlice
from autopar.models.tiny import TINY
from autopar.options import Options
from autopar.passes.autodiff.joint import Joint
from autopar.passes.stage.slice_sizes import sample_slices, symbolic
from autopar.passes.stage.slice_tokens import of_slice
from autopar.planner import make_plan
from autopar.planner.pipeline.slice_lengths import token_count
from autopar.report.graph_text import format_graph
from autopar.testing.harness import MeshRun
from tests.support.slices import SlicedModel, check_slices, normalized, sliced
from tests.support.subjects import tiny

EXACT = 1e-10
B, S, H, HEADS = 4, 16, 16, 4


class Causal(nn.Module):
    """One decoder layer with one key head; subclasses change a part of it."""

    KEYS = 1

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.position = nn.Embedding(20, H), nn.Parameter(torch.randn(1, S, H))
        self.qkv, self.out = nn.Linear(H, H + 2 * self.KEYS * H // HEADS), nn.Linear(H, H)
        self.head = nn.Linear(H, 20, bias=False)
        self.double()

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        h = self.stem(self.embed(tokens) + self.position)
        h = h + self.attend(h)
        return self.loss(self.head(h).flatten(0, 1), labels.flatten(), h)

    def stem(self, h: Tensor) -> Tensor:
        return h

    def heads(self, h: Tensor) -> list[Tensor]:
        parts = self.qkv(h).split([H, self.KEYS * H // HEADS, self.KEYS * H // HEADS], -1)
        return [x.unflatten(-1, (-1, H // HEADS)).transpose(1, 2) for x in parts]

    def attend(self, h: Tensor) -> Tensor:
        q, k, v = self.heads(h)
        k, v = (x.repeat_interleave(HEADS // self.KEYS, 1) for x in (k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def loss(self, logits: Tensor, labels: Tensor, h: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels)

    def batch(self) -> dict[str, Tensor]:
        torch.manual_seed(1)
        labels = torch.randint(20, (B, S)).masked_fill(torch.rand(B, S) < 0.3, -100)
        return {"tokens": torch.randint(20, (B, S)), "labels": labels}


class Grouped(Causal):
    KEYS = 2


class Biased(Causal):
    """A learned bias of every pair of positions, as T5's, made of parameters alone, and a window."""

    def __init__(self) -> None:
        super().__init__()
        self.distance = nn.Embedding(S, HEADS).double()

    def attend(self, h: Tensor) -> Tensor:
        at = torch.arange(S)
        bias = self.distance((at[:, None] - at).abs()).permute(2, 0, 1).unsqueeze(0)
        facts = (bias, None, None, None, None, True, 9, 0, 0, 0.5, 0.0, 0.0, 0, [], [], [])
        return self.out(torch.ops.autopar.attention(*self.heads(h), *facts)[0].transpose(1, 2).flatten(2))


class Means(Causal):
    """Losses of all kinds: means over tokens and width, a frozen projection, a penalty on parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.frozen = nn.Linear(H, H).requires_grad_(False).double()

    def loss(self, logits: Tensor, labels: Tensor, h: Tensor) -> Tensor:
        penalty = self.out.weight.square().sum() + self.head.weight.abs().mean()
        return h.square().mean() + self.frozen(h).sin().mean(1).sum() + 2 * penalty - logits.mean((0, 1)).sum()


class Conditioned(Causal):
    """Every token also sees one vector per example; dropout of activations and probabilities."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.rate, self.classes = rate, nn.Embedding(4, H).double()

    def forward(self, tokens: Tensor, labels: Tensor, kind: Tensor) -> Tensor:
        self.shift = torch.tanh(self.classes(kind)).unsqueeze(1)
        return super().forward(tokens, labels)

    def stem(self, h: Tensor) -> Tensor:
        return F.dropout(h + self.shift, self.rate)

    def attend(self, h: Tensor) -> Tensor:
        q, k, v = self.heads(h)
        k, v = (x.repeat_interleave(HEADS // self.KEYS, 1) for x in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=self.rate, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))

    def batch(self) -> dict[str, Tensor]:
        return {**super().batch(), "kind": torch.tensor([3, 1, 0, 1])}


@pytest.mark.parametrize("model", [Causal, Biased, Means, Conditioned])
def test_plain_models_equal_eager(model: type[Causal]) -> None:
    made = model()
    run = SlicedModel(made, made.batch())
    assert len(run.caches) == 2
    for lengths in ((7, 5, 4), (1, 15), (16,)):
        assert max(run.errors(lengths).values()) < EXACT


@pytest.mark.parametrize("name", ["gpt2", "mistral"])
def test_models_equal_eager(name: str) -> None:
    """gpt2 with padding on the left; mistral with packed documents, a sliding window and grouped keys."""
    batch: dict[str, Any] = TINY[name].batch(3, 16)
    if name == "gpt2":
        batch["attention_mask"] = torch.ones(3, 16, dtype=torch.int64)
        batch["attention_mask"][2, :9] = 0
    else:
        documents = torch.cat([torch.arange(6), torch.arange(10)])
        batch |= {"position_ids": documents.expand(3, 16).clone(), "use_cache": False}
    run = SlicedModel(tiny(name, layers=1)[0], batch)
    for lengths in ((7, 5, 4), (3, 9, 4)):
        assert max(run.errors(lengths).values()) < EXACT


def test_slices_on_a_mesh() -> None:
    """Tensor parallelism cuts the tokens of a slice; ZeRO gathers; microbatches are tested by the pipeline."""
    model, options = Grouped(), Options(zero=3, sequence_parallel=True)
    run = SlicedModel(model, model.batch(), Mesh.of(dp=2, tp=2), options, unit=2)
    for lengths in ((6, 8, 2), (16,)):
        assert max(run.errors(lengths).values()) < EXACT


def test_dropout_masks_follow_tokens() -> None:
    """The same masks, whatever the slices: as in the model that runs whole."""
    model, mesh = Conditioned(0.4), Mesh.of()
    compiled = compile_model(model, model.batch(), mesh, lift_to_float64=True, outputs=())
    (loss,), expected = MeshRun(compiled, model, model.batch(), mesh).step()
    (found,), gradients = SlicedModel(model, model.batch()).step((5, 8, 3))
    assert abs(loss - found) < EXACT
    for name, (g,) in gradients.items():
        torch.testing.assert_close(g, expected[name][0], rtol=0, atol=EXACT)


# --- what is refused --------------------------------------------------------------------------------------------------


class Convolved(Causal):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(H, H, 3, padding=1).double()

    def stem(self, h: Tensor) -> Tensor:
        return self.conv(h.transpose(1, 2)).transpose(1, 2)


class Normed(Causal):
    """Statistics over the tokens."""

    def stem(self, h: Tensor) -> Tensor:
        return (h - h.mean(1, keepdim=True)) / h.var(1, keepdim=True)


class Balanced(Causal):
    """A product of two means over tokens, as auxiliary losses of experts have."""

    def loss(self, logits: Tensor, labels: Tensor, h: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels) + (h.mean((0, 1)) * h.square().mean((0, 1))).sum()


class Shifted(Causal):
    def loss(self, logits: Tensor, labels: Tensor, h: Tensor) -> Tensor:
        return self.head(h)[:, 1:].square().sum()


class Bidirectional(Causal):
    def attend(self, h: Tensor) -> Tensor:
        q = self.heads(h)[0]
        later = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)
        return super().attend(later)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (Convolved, r"aten.conv1d.default .*windows of a convolution overlap"),
        (Normed, r"aten.sub.Tensor|aten.var"),
        (Balanced, r"aten.mul.Tensor .* sum over all tokens"),
        (Shifted, r"aten.slice.Tensor .* slices or reorders it"),
        (Bidirectional, r"autopar.attention.default .* no causal flag"),
    ],
)
def test_refused(model: type[Causal], named: str) -> None:
    made = model()
    with pytest.raises(ValueError, match=rf"(?s)token_slices: .*({named}).*use a schedule without token slices"):
        check_slices(made, made.batch())


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("bert", "bert.encoder.layer.0.attention.self"),
        ("vit", "vit.layers.0.attention"),
        ("t5", "encoder.block.0.layer.0.SelfAttention"),
        ("whisper", "model.encoder.conv2"),
    ],
)
def test_models_refused(name: str, module: str) -> None:
    with pytest.raises(ValueError, match=rf"token_slices: .*{module}"):
        check_slices(tiny(name, layers=1)[0], TINY[name].batch(2, 16))


# --- graphs -----------------------------------------------------------------------------------------------------------


def test_graph_of_a_slice() -> None:
    model = Causal()
    gm = normalized(model, model.batch())
    assert token_count(gm) == S
    local, caches = sliced(gm, TokenSlice(5, 4, S), make_plan(gm, Mesh.of()))
    text = format_graph(local)
    assert "exchange_slice" not in text and text.count("autopar.extend") == 2
    nodes = {n.name: n for n in local.graph.nodes}
    for c in caches:
        assert nodes[c.past].meta["val"].shape == (B, 1, 4, H // HEADS) and has_gradient(nodes[c.past])
        assert nodes[c.own].meta["val"].shape == (B, 1, 5, H // HEADS) and nodes[c.own] in outputs(local)
    marked = [n for n in local.graph.nodes if of_slice(n)]
    assert marked and all(not has_gradient(n) for n in marked)


def test_what_is_saved_grows_with_the_slice_alone() -> None:
    """The keys of earlier slices are not saved again: the backward joins them anew."""
    model = Causal()
    gm = normalized(model, model.batch())
    sizes = []
    for start in (4, 8):
        local, _ = sliced(gm, TokenSlice(5, start, S), make_plan(gm, Mesh.of()))
        fixed = [s.node for s in local.meta["signature"].inputs if s.kind == "parameter"]
        joint = Joint(local, [has_gradient(n) for n in placeholders(local)], fixed, {})
        sizes.append([tuple(n.meta["val"].shape) for n in joint.saved])
    assert sizes[0] == sizes[1]


def test_microbatches_come_first() -> None:
    """Types on four axes at once; the counts of microbatches stay inputs."""
    mesh, options = Mesh.of(dp=2, tp=2), Options(microbatches=2, sequence_parallel=True)
    gm = normalized(Grouped(), Grouped().batch(), mesh)
    local, _ = sliced(gm, sample_slices(S, 2)[0], make_plan(gm, mesh, options))
    assert "total_0" in {n.name for n in placeholders(local)}
    loss = outputs(local)[0]
    assert not loss.meta["val"].shape and has_gradient(loss)


def _view(size: int, factor: float = 2.0) -> GraphModule:
    graph = Graph()
    x = graph.placeholder("x")
    x.meta = {"val": torch.empty(size, 6)}
    y = graph.call_function(torch.ops.aten.view.default, (x, [size // 2, 2, 6]))
    graph.output((graph.call_function(operator.mul, (y, factor)),))
    return GraphModule(nn.Module(), graph)


def test_symbolic_sizes() -> None:
    samples = sample_slices(24, 2)
    gm = symbolic([_view(3 * s.length + s.start + 4) for s in samples], samples)
    assert [n.name for n in placeholders(gm)] == ["x", "slice_length", "slice_start"]
    (found,) = gm(torch.ones(14, 6), 2, 4)
    assert found.shape == (7, 2, 6)
    with pytest.raises(ValueError, match="no affine function"):
        symbolic([_view(s.length * s.start) for s in samples], samples)
    with pytest.raises(ValueError, match=r"arguments \[10.0, 14.0"):
        symbolic([_view(4, float(s.length)) for s in samples], samples)


def test_sample_slices() -> None:
    assert all(s.start + s.length <= 9 and s.length > 1 for s in sample_slices(9))
    with pytest.raises(ValueError, match=r"at least 9 tokens.*found 8"):
        sample_slices(8)
    with pytest.raises(ValueError, match=r"a multiple of 4, found 42"):
        sample_slices(42, 4)
    with pytest.raises(ValueError, match="within its 8 tokens"):
        TokenSlice(5, 4, 8)
