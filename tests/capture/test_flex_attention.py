"""`flex_attention` in a model: what is read of its functions, and that results are those of torch's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as flex
from torch import Tensor, nn
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention, or_masks

import autopar
from autopar.attention.operator import attention_of_piece
from autopar.capture.flex import mask_arguments as mask_arguments_module
from autopar.capture.flex.expressions import expression_of
from autopar.capture.flex.mask_arguments import Sizes, mask_arguments
from autopar.capture.front_end import capture
from autopar.compile.model import compile_model
from autopar.ir.graph import arguments, calls_of
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.passes.canonicalize.normalize import Normalize
from autopar.testing.harness import MeshRun, check_model
from autopar.testing.reference import eager
from autopar.verification import Report
from tests.support.ranks import run_ranks

B, H, S, D = 2, 4, 16, 4
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 11, [0] * 9 + [1] * 4 + [2] * 3])
Mask = Callable[[Any, Any, Any, Any], Any]


@contextmanager
def torchs_own() -> Iterator[None]:
    """Torch's flex_attention as plain operators with a backward on CPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "_validate_device", lambda *_: None)
        patch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        yield


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


MASKS: dict[str, Callable[[Tensor, Tensor], Mask]] = {  # of documents [B, S] and lengths [B]
    "causal": lambda doc, n: causal,
    "window": lambda doc, n: lambda b, h, q, k: (q >= k) & (q - k < 5),
    "both sides": lambda doc, n: lambda b, h, q, k: (q - k < 4) & (k - q < 4),
    "chunks": lambda doc, n: and_masks(causal, lambda b, h, q, k: q // 4 == k // 4),
    "documents": lambda doc, n: and_masks(causal, lambda b, h, q, k: doc[b, q] == doc[b, k]),
    "full documents": lambda doc, n: lambda b, h, q, k: doc[b, k] == doc[b, q],
    "one row": lambda doc, n: lambda b, h, q, k: (doc[0][q] == doc[0][k]) & (k <= q),
    "padding": lambda doc, n: lambda b, h, q, k: (q >= k) & (k < n[b]),
    "prefix": lambda doc, n: or_masks(causal, lambda b, h, q, k: k < n[b]),
    "prefix of all": lambda doc, n: or_masks(causal, lambda b, h, q, k: k < 3),
    "documents with a prefix": lambda doc, n: and_masks(
        or_masks(causal, lambda b, h, q, k: k < 3), lambda b, h, q, k: doc[b, q] == doc[b, k]
    ),
    "heads": lambda doc, n: lambda b, h, q, k: (q >= k) & (q - k < 2 * h + 3),
    "rows without keys": lambda doc, n: lambda b, h, q, k: (q >= k) & (q < n[b]) & (k < n[b]),
    "dilated": lambda doc, n: lambda b, h, q, k: (q >= k) & ((q - k) % 3 == 0),
    "chosen": lambda doc, n: lambda b, h, q, k: torch.where(doc[b, q] == 0, q >= k, q - k == 0),
}
SAYS: dict[str, set[str]] = {
    "causal": {"causal"},
    "window": {"causal", "window"},
    "both sides": {"window"},
    "chunks": {"causal", "chunk"},
    "documents": {"causal", "segments"},
    "full documents": {"segments"},
    "one row": {"causal", "segments"},
    "padding": {"causal", "key_mask"},
    "documents with a prefix": {"segments", "bias"},
    "heads": {"causal", "bias"},
    "rows without keys": {"causal", "key_mask", "bias"},
}  # all others: a bias, which causal may stand beside
SCORES: dict[str, Any] = {
    "softcap": lambda s, b, h, q, k: 3.0 * torch.tanh(s / 3.0),
    "distance": lambda s, b, h, q, k: s + (k - q) * 0.125,
    "by head": lambda s, b, h, q, k: s - (h + 1) * (q - k) * 0.0625,
    "scaled": lambda s, b, h, q, k: s * 0.5,
    "softcap and distance": lambda s, b, h, q, k: torch.tanh(s / 2.0) * 2.0 + (k - q) * 0.125,
    "window": lambda s, b, h, q, k: torch.where(q - k < 5, s, -float("inf")),
    "distance elsewhere": lambda s, b, h, q, k: torch.where(q - k >= 5, -torch.inf, s + (k - q) * 0.125),
    "filled": lambda s, b, h, q, k: s.masked_fill((q - k) % 3 == 1, float("-inf")) * 0.5,
    "softcap in a window": lambda s, b, h, q, k: torch.where(q - k < 5, 3.0 * torch.tanh(s / 3.0), -torch.inf),
}


class Flex(nn.Module):
    """One attention with a mask, or with a score function that may read a weight."""

    def __init__(self, mask: str = "causal", score: str = "", kv_heads: int = H) -> None:
        super().__init__()
        self.mask, self.score, self.kv_heads = mask, score, kv_heads
        self.embed, self.q = nn.Embedding(32, H * D), nn.Linear(H * D, H * D)
        self.kv, self.head = nn.Linear(H * D, 2 * kv_heads * D), nn.Linear(H * D, 32)
        self.table = nn.Parameter(torch.randn(H, S))

    def forward(self, ids: Tensor, doc: Tensor, length: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        q = self.q(x).view(B, S, H, D).transpose(1, 2)
        k, v = (t.view(B, S, self.kv_heads, D).transpose(1, 2) for t in self.kv(x).chunk(2, -1))
        mask = create_block_mask(MASKS[self.mask](doc, length), B, H, S, S, device=x.device.type)
        table = self.table
        score = SCORES.get(self.score) or ((lambda s, b, h, q, k: s + table[h, k]) if self.score else None)
        out = self.attend(q, k, v, score, mask)
        logits = self.head(out.transpose(1, 2).reshape(B, S, H * D))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def attend(self, q: Tensor, k: Tensor, v: Tensor, score: Any, mask: Any) -> Tensor:
        return flex_attention(q, k, v, score, mask, enable_gqa=self.kv_heads < H)


class Written(Flex):
    """The learned score function written out: torch's own differentiates no weight in it on CPUs."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, score: Any, mask: Any) -> Tensor:
        k, v = (x.repeat_interleave(H // self.kv_heads, 1) for x in (k, v))
        bias = self.table[:, None].expand(H, S, S).masked_fill(torch.ones(S, S).triu(1).bool(), float("-inf"))
        return nn.functional.scaled_dot_product_attention(q, k, v, bias)


def made(*args: Any) -> tuple[Flex, dict[str, Tensor]]:
    torch.manual_seed(0)
    ids = torch.randint(0, 32, (B, S))
    batch = {"ids": ids, "doc": DOCUMENTS, "length": torch.tensor([7, 12]), "labels": ids.roll(-1, 1)}
    return Flex(*args).double(), batch


MESHES = ("tp=2", "cp=2", "dp=2")
CELLS = [
    *((mask, "", H, MESHES[i % 3]) for i, mask in enumerate(MASKS)),
    *((mask, "", H, "cp=2") for mask in ("documents", "padding", "prefix", "heads")),
    *(("causal", score, H, MESHES[i % 3]) for i, score in enumerate(SCORES)),
    ("documents", "softcap", 2, "cp=2"),
]


@pytest.mark.parametrize("cell", CELLS, ids=str)
@pytest.mark.filterwarnings("ignore:flex_attention. its mask is computed")
def test_loss_and_gradients_are_those_of_torch(cell: tuple[str, str, int, str]) -> None:
    *args, mesh = cell
    model, batch = made(*args)
    with torchs_own():
        assert check_model(model, batch, Mesh.parse(mesh), Options()).worst < 1e-10


@pytest.mark.parametrize(("mesh", "kv_heads"), [("tp=2", 2), ("cp=2", H), ("dp=2", H)])
def test_a_learned_score_function(mesh: str, kv_heads: int) -> None:
    model, batch = made("causal", "learned", kv_heads)
    written = Written("causal", "learned", kv_heads).double()
    written.load_state_dict(model.state_dict())
    compiled = compile_model(model, batch, Mesh.parse(mesh), Options(), lift_to_float64=True, outputs=())
    errors = MeshRun(compiled, model, batch, Mesh.parse(mesh)).errors(eager(written, batch))
    assert max(one.worst for one in errors) < 1e-10


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.filterwarnings("ignore:flex_attention. its mask is computed")
def test_what_is_read(mask: str) -> None:
    model, batch = made(mask)
    gm = Normalize().apply(capture(model, batch, lift_to_float64=True))
    (node,) = calls_of(gm.graph, torch.ops.autopar.attention.default)
    known = arguments(node)
    names = ("causal", "window", "chunk", "segments", "key_mask", "bias")
    assert {name for name in names if known[name] not in (None, False, 0)} == SAYS.get(mask, {"bias"})
    shapes = {"key_mask": (B, S), "segments": (B, S)}
    assert all(tuple(known[n].meta["val"].shape) == shapes[n] for n in shapes if known[n] is not None)


def test_a_mask_that_no_argument_says_is_named() -> None:
    model, batch = made("prefix")
    with pytest.warns(
        UserWarning, match=r"computed for all pairs.*: or\(ge\(q, k\), lt\(k, getitem\(tensor, b\)\)\) dep"
    ):
        capture(model, batch)


@pytest.mark.parametrize("large", [48, 5000])
def test_positions_are_recognised_by_their_values(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = Sizes(1, 1, large, large)
    monkeypatch.setattr(mask_arguments_module, "_AT_ONCE", large * 40)  # several blocks of rows

    def read(mask: Mask) -> tuple[bool, int, int, bool]:
        with warnings.catch_warnings():
            found = mask_arguments([expression_of(mask, "b", "h", "q", "k")], sizes, torch.device("cpu"))
        return found.causal, found.window, found.chunk, found.whole is not None

    assert read(lambda b, h, q, k: ~(q < k)) == (True, 0, 0, False)
    assert read(lambda b, h, q, k: (q - k).abs() <= 7) == (False, 8, 0, False)
    assert read(lambda b, h, q, k: (k <= q) & (k > q - 9)) == (True, 9, 0, False)
    assert read(lambda b, h, q, k: q // 6 == k // 6) == (False, 0, 6, False)
    assert read(lambda b, h, q, k: (q >= k) & (q < large)) == (True, 0, 0, False)
    assert read(lambda b, h, q, k: (q >= k) & (q != large - 1))[3]  # but for its last row


class Asks(nn.Module):
    """Attention with a function that cannot be read."""

    def __init__(self, mask: Any = None, score: Any = None, **more: Any) -> None:
        super().__init__()
        self.mask, self.score, self.more, self.linear = mask, score, more, nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q = self.linear(x)
        mask = None if self.mask is None else create_block_mask(self.mask, None, None, S, self.more.pop("keys", S))
        out = flex_attention(q, q, q, self.score, mask, **self.more)
        return (out[0] if isinstance(out, tuple) else out).sum()


REFUSED: list[tuple[dict[str, Any], str]] = [
    (dict(mask=lambda b, h, q, k: q >= k and k > 1), "found that it branches on a position"),
    (dict(mask=lambda b, h, q, k: torch.cumsum(q - k, 0) > 0), "found that it calls 'cumsum'"),
    (dict(mask=causal, keys=S + 4), "made for .16, 20. queries and keys, found .16, 16."),
    (dict(score=lambda s, b, h, q, k: torch.exp(s)), "needs the form cap"),
    (dict(score=lambda s, b, h, q, k: s * (q - k)), "needs the form cap"),
    (dict(score=lambda s, b, h, q, k: 3 * torch.tanh(torch.where(q >= k, s, -torch.inf) / 3)), "found where"),
    (dict(score=lambda s, b, h, q, k: torch.where(q >= k, -s, -torch.inf)), "found neg"),
    (dict(return_lse=True), "found return_lse"),
]


@pytest.mark.parametrize(("how", "says"), REFUSED, ids=str)
def test_what_is_refused(how: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        capture(Asks(**how), {"x": torch.randn(B, H, S, D)})


class Given(nn.Module):
    """Attention with the mask that it is given."""

    def forward(self, x: Tensor, masks: list[Any]) -> Tensor:
        out: Tensor = flex_attention(x, x, x, block_mask=masks[0])
        return out


def test_a_mask_as_an_input_is_refused() -> None:
    """Its function is not a value of the batch."""
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, S, S, device="cpu")
    with pytest.raises(ValueError, match=r"found input 'masks\.0', a BlockMask; pass the tensors"):
        capture(Given(), {"x": torch.randn(B, H, S, D), "masks": [mask]})


def test_functions_are_torchs_own_afterwards() -> None:
    codes = [function.__code__ for function in (flex_attention, create_block_mask)]
    model, batch = made("causal")
    capture(model, batch)
    assert [function.__code__ for function in (flex_attention, create_block_mask)] == codes
    with pytest.raises(ValueError):
        capture(Asks(score=lambda s, b, h, q, k: torch.exp(s)), {"x": torch.randn(B, H, S, D)})
    assert [function.__code__ for function in (flex_attention, create_block_mask)] == codes


class Outside(nn.Module):
    """Its block mask is made once, outside of the forward, and its function is compiled."""

    def __init__(self) -> None:
        super().__init__()
        ends = torch.arange(S) // 6
        self.block_mask = create_block_mask(lambda b, h, q, k: (q >= k) & (ends[q] == ends[k]), None, None, S, S, "cpu")
        self.linear, self.attend = nn.Linear(D, D), torch.compile(flex_attention)

    def forward(self, x: Tensor) -> Tensor:
        q = self.linear(x)
        out: Tensor = self.attend(q, q, q, block_mask=self.block_mask)
        return out.square().sum()


def test_a_block_mask_from_outside() -> None:
    gm = Normalize().apply(capture(Outside(), {"x": torch.randn(B, H, S, D)}))
    (node,) = calls_of(gm.graph, torch.ops.autopar.attention.default)
    known = arguments(node)
    assert known["causal"] and known["segments"] is not None and known["bias"] is None


# --- on real ranks -------------------------------------------------------------------------------------------


def verified(axes: dict[str, int], mask: str, score: str) -> Report:
    model, batch = made(mask, score, 2)
    with torchs_own():
        return autopar.verify(model, autopar.init_mesh("cpu", 60.0, **axes), batch)


@pytest.mark.parametrize("axis", ["tp", "cp", "dp"])
@pytest.mark.filterwarnings("ignore:flex_attention. its mask is computed")
def test_on_real_ranks(axis: str) -> None:
    for mask, score in (("documents", "softcap"), ("prefix", "distance")):
        for report in run_ranks(2, verified, {axis: 2}, mask, score, timeout=120.0):
            report.raise_for_mismatch()
            assert report.exact


# --- layers that share a mask ---------------------------------------------------------------------------------


class Layer(nn.Module):
    """An attention that is given its block mask."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(H * D, 3 * H * D), nn.Linear(H * D, H * D)

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        q, k, v = (t.view(*t.shape[:2], H, D).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        out: Tensor = flex_attention(q, k, v, block_mask=mask)
        return x + self.out(out.transpose(1, 2).reshape(x.shape))


class Layers(nn.Module):
    """Layers that alternate between documents and a window."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, H * D), nn.Linear(H * D, 32)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, ids: Tensor, doc: Tensor, labels: Tensor) -> Tensor:
        x, (rows, size) = self.embed(ids), ids.shape
        shared = and_masks(causal, lambda b, h, q, k: doc[b, q] == doc[b, k])
        near = and_masks(causal, lambda b, h, q, k: q - k < 3)
        masks = [create_block_mask(f, rows, None, size, size, device=x.device.type) for f in (shared, near)]
        for number, layer in enumerate(self.layers):
            x = layer(x, masks[number % 2])
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def layers() -> tuple[Layers, dict[str, Tensor]]:
    torch.manual_seed(0)
    ids = torch.randint(0, 32, (4, S))
    return Layers().double(), {"ids": ids, "doc": DOCUMENTS.repeat(2, 1), "labels": ids.roll(-1, 1)}


def test_identical_layers_with_masks_of_their_own() -> None:
    """Layers are traced once, and each reads the mask that it is given."""
    model, batch = layers()
    with torchs_own():
        result = check_model(model, batch, Mesh.parse("cp=2"), Options())
    assert result.worst < 1e-10
    nodes = [n for n in result.compiled.local.graph.nodes if n.target is attention_of_piece]
    read = [(arguments(n)["window"], arguments(n)["segments"] is not None) for n in nodes]
    assert read == [(0, True), (3, False)] * 2


class Counting(Layers):
    """It changes Python state, so capture runs its forward once more."""

    seen: dict[int, int] = {}  # noqa: RUF012

    def forward(self, ids: Tensor, doc: Tensor, labels: Tensor) -> Tensor:
        self.seen[len(self.seen)] = 1
        return super().forward(ids, doc, labels)


def test_a_model_that_counts_its_calls() -> None:
    _, batch = layers()
    with torchs_own():
        gm = capture(Counting().double(), batch, lift_to_float64=True)
    assert len(list(calls_of(gm.graph, torch.ops.autopar.attention.default))) == 4


def verified_layers(axes: dict[str, int]) -> Report:
    model, batch = layers()
    with torchs_own():
        return autopar.verify(model, autopar.init_mesh("cpu", 60.0, **axes), batch, microbatches=2)


def test_stages_of_a_pipeline_share_a_mask() -> None:
    for report in run_ranks(2, verified_layers, {"pp": 2}, timeout=120.0):
        report.raise_for_mismatch()
