"""`varlen_attn` in a model: rows of documents by offsets, equal to documents one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

import autopar
from autopar.capture.front_end import capture
from autopar.compile.model import compile_model
from autopar.ir.graph import arguments, calls_of
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.passes.canonicalize.normalize import Normalize
from autopar.runtime.fault.error_propagation import CollectiveError
from autopar.testing.harness import MeshRun
from autopar.testing.reference import eager
from tests.support.ranks import run_ranks

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


# --- rows of a batch, joined by the model ---------------------------------------------------------------

ROWS = torch.tensor([[0, 5, 9, 16], [0, 7, 16, 16], [0, 3, 4, 16], [0, 2, 16, 16]], dtype=torch.int32)


class Joined(nn.Module):
    """Rows [R, S] as one row for `varlen_attn`; torch's own runs on GPUs only, so ``written`` has the mask."""

    def __init__(self, offsets: str, written: bool = False) -> None:
        super().__init__()
        self.offsets, self.written = offsets, written
        self.embed, self.qkv = nn.Embedding(32, HEADS * D), nn.Linear(HEADS * D, 3 * HEADS * D)
        self.head = nn.Linear(HEADS * D, 32)

    def forward(self, ids: Tensor, ends: Tensor, labels: Tensor) -> Tensor:
        rows, size = ids.shape
        if self.offsets == "flat ids":
            q, k, v = (x.unflatten(-1, (HEADS, D)) for x in self.qkv(self.embed(ids.flatten())).chunk(3, -1))
        else:
            q, k, v = (x.reshape(-1, HEADS, D) for x in self.qkv(self.embed(ids)).chunk(3, -1))
        if self.offsets == "lengths":
            offsets = nn.functional.pad(ends.diff(dim=1).flatten().cumsum(0), (1, 0)).int()
        elif self.offsets == "one row":
            offsets = ends
        else:
            starts = (ends[:, :-1] + size * torch.arange(rows)[:, None]).flatten()
            offsets = torch.cat([starts, starts.new_full((1,), rows * size)])
        if self.written:
            number = (torch.arange(len(q))[:, None] >= offsets).sum(-1)
            seen = (number[:, None] == number).tril()
            heads = (x.transpose(0, 1)[None] for x in (q, k, v))
            out = nn.functional.scaled_dot_product_attention(*heads, seen)[0].transpose(0, 1)
        else:
            out = varlen_attn(q, k, v, offsets, offsets, 16, 16, window_size=(-1, 0))  # type: ignore[assignment]
        return nn.functional.cross_entropy(self.head(out.reshape(rows * size, -1)), labels.flatten())


def joined(offsets: str, ends: Tensor = ROWS) -> tuple[Joined, Joined, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, written = Joined(offsets).double(), Joined(offsets, written=True).double()
    written.load_state_dict(model.state_dict())
    ids = torch.randint(0, 32, (4, 16))
    return model, written, {"ids": ids, "ends": ends, "labels": ids.roll(-1, 1)}


@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,cp=2", "tp=2"])
@pytest.mark.parametrize("offsets", ["starts", "lengths", "flat ids"])
def test_rows_stay_with_their_ranks(offsets: str, mesh: str) -> None:
    model, written, batch = joined(offsets)
    compiled = compile_model(model, batch, Mesh.parse(mesh), Options(), lift_to_float64=True, outputs=())
    errors = MeshRun(compiled, model, batch, Mesh.parse(mesh)).errors(eager(written, batch))
    assert max(one.worst for one in errors) < 1e-10
    assert all(share.flops > 0.98 for share in compiled.plan.shares if share.axis != "tp")


def test_offsets_in_one_row_may_join_rows() -> None:
    """Of the batch: a document that begins in one row and ends in the next."""
    model, written, batch = joined("one row", torch.tensor([0, 5, 20, 64], dtype=torch.int32))
    options = Options(batch_dims={"ids": 0, "labels": 0, "ends": None})
    compiled = compile_model(model, batch, Mesh.of(dp=2), options, lift_to_float64=True, outputs=())
    errors = MeshRun(compiled, model, batch, Mesh.of(dp=2)).errors(eager(written, batch))
    assert max(one.worst for one in errors) < 1e-10


def step_of_rows(axes: dict[str, int], options: dict[str, Any], ends: Tensor) -> float:
    """The difference of the loss and all gradients to those of one process."""
    model, written, batch = joined("starts", ends)
    loss = written(**batch)
    loss.backward()
    mesh = autopar.init_mesh("cpu", 60.0, **axes)
    mine = {name: x.chunk(mesh.data_size)[mesh.data_rank] for name, x in batch.items()}
    parallel = autopar.parallelize(model, mesh, example_batch=mine, **options)
    worst = abs(float(parallel.train_step(**mine)) - loss.item())
    found = parallel.full_gradients()
    assert found.keys() == {name for name, _ in written.named_parameters()}
    return max(worst, *(float((found[name] - p.grad).abs().max()) for name, p in written.named_parameters()))


def test_rows_of_microbatches_and_stages() -> None:
    options = {"microbatches": 2, "schedule": "1f1b", "split_points": ["head"]}
    assert max(run_ranks(2, step_of_rows, {"dp": 2}, {"microbatches": 2}, ROWS, timeout=60.0)) < 1e-10
    assert max(run_ranks(2, step_of_rows, {"pp": 2}, options, ROWS, timeout=60.0)) < 1e-10


def refused_rows(axes: dict[str, int], options: dict[str, Any]) -> None:
    ends = ROWS.clone()
    ends[1, 0] = 2  # two tokens of the last document of the row before
    with pytest.raises((ValueError, CollectiveError), match="found one that goes on in the next row"):
        step_of_rows(axes, options, ends)


def test_a_document_of_two_rows_is_found() -> None:
    run_ranks(2, refused_rows, {"dp": 2}, {}, timeout=60.0)
    run_ranks(1, refused_rows, {"dp": 1}, {"microbatches": 2}, timeout=60.0)
