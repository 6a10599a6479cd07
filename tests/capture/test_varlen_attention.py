"""`varlen_attn` in a model: rows of documents by offsets, equal to documents one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from autopar.capture.front_end import capture
from autopar.compile.model import compile_model
from autopar.ir.graph import arguments, calls_of
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.passes.canonicalize.normalize import Normalize
from autopar.testing.harness import MeshRun
from autopar.testing.reference import eager

LENGTHS, HEADS, D = (5, 1, 8, 2), 4, 4
TOKENS = sum(LENGTHS)
WINDOWS = {(-1, -1): {"segments"}, (-1, 0): {"segments", "causal"}, (2, 0): {"segments", "causal", "window"},
           (3, 3): {"segments", "window"}, (0, 0): {"segments", "causal", "window"}}  # fmt: skip


class Varlen(nn.Module):
    """One attention over a flat row."""

    def __init__(self, window: tuple[int, int] = (-1, 0), kv_heads: int = HEADS) -> None:
        super().__init__()
        self.window, self.kv_heads = window, kv_heads
        self.embed, self.q = nn.Embedding(32, HEADS * D), nn.Linear(HEADS * D, HEADS * D)
        self.kv, self.head = nn.Linear(HEADS * D, 2 * kv_heads * D), nn.Linear(HEADS * D, 32)

    def forward(self, ids: Tensor, offsets: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        q = self.q(x).view(TOKENS, HEADS, D)
        k, v = (t.view(TOKENS, self.kv_heads, D) for t in self.kv(x).view(TOKENS, -1).chunk(2, -1))
        out = self.attend(q, k, v, offsets).reshape(1, TOKENS, HEADS * D)
        return nn.functional.cross_entropy(self.head(out).flatten(0, 1), labels.flatten())

    def attend(self, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
        out = varlen_attn(q, k, v, offsets, offsets, 8, 8, window_size=self.window, enable_gqa=self.kv_heads < HEADS)
        assert isinstance(out, Tensor)
        return out


class OneByOne(Varlen):
    """The documents apart: torch's own runs on GPUs only."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
        left, right = self.window
        out = []
        for mine in zip(*(x.transpose(0, 1).split(LENGTHS, 1) for x in (q, k, v)), strict=True):
            n = mine[0].shape[1]
            distance = torch.arange(n)[:, None] - torch.arange(n)
            seen = (distance <= (left if left >= 0 else n)) & (-distance <= (right if right >= 0 else n))
            one = nn.functional.scaled_dot_product_attention(*(x[None] for x in mine), seen, enable_gqa=True)
            out.append(one[0].transpose(0, 1))
        return torch.cat(out)


def made(*args: Any) -> tuple[Varlen, OneByOne, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Varlen(*args).double()
    written = OneByOne(*args).double()
    written.load_state_dict(model.state_dict())
    ids = torch.randint(0, 32, (1, TOKENS))
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    return model, written, {"ids": ids, "offsets": offsets, "labels": ids.roll(-1, 1)}


@pytest.mark.parametrize("mesh", ["tp=2", "cp=2"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_equal_to_documents_one_by_one(window: tuple[int, int], mesh: str) -> None:
    model, written, batch = made(window, 2)
    compiled = compile_model(model, batch, Mesh.parse(mesh), Options(), lift_to_float64=True, outputs=())
    errors = MeshRun(compiled, model, batch, Mesh.parse(mesh)).errors(eager(written, batch))
    assert max(one.worst for one in errors) < 1e-10


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_what_is_read(window: tuple[int, int]) -> None:
    model, _, batch = made(window)
    gm = Normalize().apply(capture(model, batch, lift_to_float64=True))
    (node,) = calls_of(gm.graph, torch.ops.autopar.attention.default)
    known = arguments(node)
    found = {n for n in ("causal", "window", "segments", "bias", "key_mask") if known[n] not in (None, False, 0)}
    assert found == WINDOWS[window]


class Asks(nn.Module):
    """A call that cannot be read."""

    def __init__(self, **more: Any) -> None:
        super().__init__()
        self.linear, self.more = nn.Linear(D, D), more

    def forward(self, x: Tensor, offsets: Tensor, others: Tensor) -> Tensor:
        of_keys = others if self.more.pop("others", False) else offsets
        return varlen_attn(self.linear(x), x, x, offsets, of_keys, 4, 4, **self.more).sum()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"window_size": (2, 1)}, r"needs a window_size of .*, found \(2, 1\)"),
        ({"others": True}, "found other offsets of the keys"),
    ],
    ids=str,
)
def test_what_is_refused(how: dict[str, Any], says: str) -> None:
    offsets = torch.tensor([0, 4, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match=says):
        capture(Asks(**how), {"x": torch.randn(8, 2, D), "offsets": offsets, "others": offsets + 0})
