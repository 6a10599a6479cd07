"""Rows that a mask selects, as images that are no padding: encoded, cut into pieces, joined, and placed in a text."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.capture.front_end import capture
from autopar.ir.mesh import Mesh
from autopar.ops.value_checks import take_notes
from autopar.options import Options
from autopar.passes.canonicalize.normalize import Normalize
from autopar.testing.harness import check_model
from tests.capture.test_mask_indexing import loss_and_gradients
from tests.support.ranks import run_ranks

ROWS, IMAGES, PARTS, WIDTH, TOKENS = 4, 2, 4, 8, 12
Body = Callable[["Reading", Tensor, Tensor, Tensor, Tensor], Tensor]


class Reading(nn.Module):
    """Images [rows, images, 3, 4, 4], of which those of zeros are padding, in texts [rows, tokens]. Each image becomes
    ``PARTS`` features, for the tokens with number 1."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.embed, self.patches = nn.Embedding(16, WIDTH), nn.Conv2d(3, WIDTH, 2, 2)
        self.qkv, self.out, self.head = (nn.Linear(WIDTH, n) for n in (3 * WIDTH, WIDTH, WIDTH))
        self.norm, self.query = nn.LayerNorm(WIDTH), nn.Parameter(torch.randn(PARTS, WIDTH))
        self.body = body

    def forward(self, ids: Tensor, images: Tensor, target: Tensor) -> Tensor:
        flat = images.flatten(0, 1)
        real = (flat != 0).flatten(1).any(1)
        h = self.body(self, self.embed(ids), flat, real, ids == 1)
        return F.mse_loss(self.head(h).tanh(), target)

    def encoded(self, x: Tensor) -> Tensor:
        """Images [n, 3, 4, 4] -> [n, parts, width]"""
        h = self.patches(x).flatten(2).transpose(1, 2)
        n, s, _ = h.shape
        q, k, v = (y.view(n, s, 2, WIDTH // 2).transpose(1, 2) for y in self.qkv(self.norm(h)).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, s, WIDTH)
        return h + self.out(F.gelu(out))


def batch(drop: tuple[tuple[int, int], ...] = ((0, 1), (3, 0)), rows: int = ROWS) -> dict[str, Tensor]:
    """``drop``: the images that are padding."""
    torch.manual_seed(3)
    images = torch.randn(rows, IMAGES, 3, 4, 4, dtype=torch.float64)
    for row, image in drop:
        images[row, image] = 0
    ids = torch.randint(2, 16, (rows, TOKENS))
    for row, own in enumerate(images):
        ids[row, 1 : 1 + PARTS * int((own != 0).flatten(1).any(1).sum())] = 1
    return {"ids": ids, "images": images, "target": torch.randn(rows, TOKENS, WIDTH, dtype=torch.float64)}


DROPS: dict[str, tuple[tuple[int, int], ...]] = {
    "some": ((0, 1), (3, 0)),
    "all of a row": ((1, 0), (1, 1), (2, 0)),
    "no image is padding": (),
    "every image is padding": tuple((r, i) for r in range(ROWS) for i in range(IMAGES)),
}


def placed(h: Tensor, f: Tensor, m: Tensor) -> Tensor:
    return h.masked_scatter(m.unsqueeze(-1).expand_as(h), f.to(h.dtype))


def pieces(s: Reading, h: Tensor, x: Tensor, real: Tensor, m: Tensor) -> Tensor:
    """As Idefics does it."""
    counts = real.view(-1, IMAGES).sum(dim=1)
    found = [f.reshape(-1, f.shape[-1]) for f in s.encoded(x[real].contiguous()).split(counts.tolist())]
    return torch.cat(found, dim=0)


def pieces_of_parts(s: Reading, h: Tensor, x: Tensor, real: Tensor, m: Tensor) -> Tensor:
    counts = (real.view(-1, IMAGES).sum(-1) * PARTS).tolist()
    found = torch.split(s.encoded(x[real]).flatten(0, 1), counts)
    return torch.cat([F.relu(f) * (i + 1) for i, f in enumerate(found)])


def whole(s: Reading, h: Tensor, x: Tensor, real: Tensor, m: Tensor) -> Tensor:
    return s.encoded(x[real]).reshape(-1, WIDTH)


def by_sizes(s: Reading, h: Tensor, x: Tensor, real: Tensor, m: Tensor) -> Tensor:
    """Latents for each image, masks and positions of its size."""
    f = s.encoded(x[real])
    n, parts, width = f.size()
    q = s.query.unsqueeze(0).expand(n, -1, -1)
    seen = torch.ones(size=(n, parts), dtype=torch.bool)
    scores = torch.bmm(q, f.transpose(1, 2)).masked_fill(~seen[:, None, :], float("-inf")).softmax(-1)
    at = torch.full((n, parts), 3)
    f = torch.einsum("bqk,bkd->bqd", scores, f) + s.embed(at) + torch.zeros(n, 1, width, dtype=f.dtype)
    heads = f.view(n, parts, 2, width // 2).permute(0, 2, 1, 3).reshape(n * 2, parts, width // 2)
    heads = torch.matmul(heads, heads.transpose(-1, -2)).softmax(-1) @ heads
    assert heads.shape == (n * 2, parts, width // 2)
    return heads.view(n, 2, parts, width // 2).transpose(1, 2).reshape(n * parts, width)


def by_row(s: Reading, h: Tensor, x: Tensor, real: Tensor, m: Tensor) -> Tensor:
    """A mask of rows in a loop."""
    own, masks = x.view(ROWS, IMAGES, *x.shape[1:]), real.view(ROWS, IMAGES)
    return torch.cat([s.encoded(own[i][masks[i]]).flatten(0, 1) for i in range(ROWS)], 0)


def assigned(s: Reading, h: Tensor, x: Tensor, real: Tensor, m: Tensor) -> Tensor:
    h = h.clone()
    h[m] = whole(s, h, x, real, m)
    return h


def nested(s: Reading, h: Tensor, x: Tensor, real: Tensor, m: Tensor) -> Tensor:
    """Of the selected images those whose first number is positive."""
    kept = x[real]
    bright = kept[kept[:, 0, 0, 0] > 0]
    return h + s.encoded(bright).sum((0, 1)) + s.encoded(kept).mean((0, 1)) / 3


def two_masks(s: Reading, h: Tensor, x: Tensor, real: Tensor, m: Tensor) -> Tensor:
    f = whole(s, h, x, real, m)
    dark = x[real & (x[:, 0, 0, 0] <= 0)]
    return placed(h, f, m) + s.encoded(dark).flatten(1).sum(0).view(PARTS, WIDTH).mean(0)


def same_mask_twice(s: Reading, h: Tensor, x: Tensor, real: Tensor, m: Tensor) -> Tensor:
    f, g = s.encoded(x[real]), s.encoded(x[real] * 2)
    return placed(h, torch.where(f > g, f, g * 0.5).flatten(0, 1), m)


def sizes_in_numbers(s: Reading, h: Tensor, x: Tensor, real: Tensor, m: Tensor) -> Tensor:
    f = s.encoded(x[real])
    n = f.shape[0]
    more = n
    more += 1
    return h + f.sum((0, 1)) / (n + 2) + h * (1 / more) + h * 0.1 * (n * PARTS) ** 0.5 + h * f.numel() / 100


def joined_with_others(s: Reading, h: Tensor, x: Tensor, real: Tensor, m: Tensor) -> Tensor:
    f = torch.cat([s.encoded(x[real]), s.query.unsqueeze(0) * 2], 0)
    return h + (f * f).mean((0, 1))


def by_number(s: Reading, h: Tensor, x: Tensor, real: Tensor, m: Tensor) -> Tensor:
    f = s.encoded(torch.cat([x[real], x[:1] + 1]))
    return h + f[0].mean(0) + f[-1, 0] + f[m[:2, :2].long() * 0].sum((0, 1, 2))


def counted_up(s: Reading, h: Tensor, x: Tensor, real: Tensor, m: Tensor) -> Tensor:
    f = s.encoded(x[real])
    return placed(h, (f + s.embed(torch.arange(f.shape[0]) % 16).unsqueeze(1)).flatten(0, 1), m)


def two_tables(s: Reading, h: Tensor, x: Tensor, real: Tensor, m: Tensor) -> Tensor:
    """Tokens beyond a table are in another one, as in torchtune."""
    tokens = torch.where(m, 3, m.cumsum(1) + 7)
    mask = tokens < 5
    low, high = torch.masked_select(tokens, mask), torch.masked_select(tokens, ~mask) - 5
    wide = mask.unsqueeze(-1).expand(*h.shape)
    out = torch.empty(*h.shape, dtype=h.dtype).masked_scatter(wide, F.embedding(low, s.embed.weight[:5]))
    out = out.masked_scatter(~wide, F.embedding(high, s.embed.weight[5:]))
    return h + out + s.patches(x).mean() * 0.1 + s.query.sum() * 0.1


def in_eval_mode(s: Reading, h: Tensor, x: Tensor, real: Tensor, m: Tensor) -> Tensor:
    f = s.encoded(x[real]).transpose(1, 2)
    f = F.batch_norm(f, s.query[0].detach(), s.query[0].detach() ** 2, training=False)
    return placed(h, F.max_pool1d(F.pad(f, (1, 0)), 2, 1).transpose(1, 2).flatten(0, 1), m)


FEATURES = {f.__name__: f for f in (pieces, pieces_of_parts, whole, by_sizes, by_row)}
BODIES: dict[str, Body] = {
    **{n: lambda s, h, x, r, m, f=f: placed(h, f(s, h, x, r, m), m) for n, f in FEATURES.items()},
    **{f.__name__: f for f in (assigned, nested, two_masks, same_mask_twice, sizes_in_numbers, joined_with_others,
                               by_number, counted_up, two_tables, in_eval_mode)},
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_equal_to_the_selected_rows(name: str) -> None:
    torch.manual_seed(1)
    model = Reading(BODIES[name]).double()
    graph = Normalize().apply(capture(model, batch()))
    for drop in DROPS.values():  # in one graph
        given = batch(drop)
        if name == "nested" and drop == DROPS["every image is padding"]:
            continue  # a mean of nothing
        eager = loss_and_gradients(model, given)
        ours = loss_and_gradients(model, given, graph)
        assert not [note.text for note in take_notes()]
        assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(eager, ours, strict=True)), drop


MESHES: dict[str, dict[str, Any]] = {
    "dp=2": {"zero": 3}, "tp=2": {}, "dp=2,tp=1": {"microbatches": 2}
}  # fmt: skip
ON_MESHES = {"dp=2": ("pieces", "nested", "by_number"), "tp=2": ("pieces", "two_masks"),
             "dp=2,tp=1": ("whole", "assigned")}  # fmt: skip


@pytest.mark.parametrize(("mesh", "name"), [(mesh, name) for mesh, names in ON_MESHES.items() for name in names])
def test_same_numbers(mesh: str, name: str) -> None:
    torch.manual_seed(1)
    assert check_model(Reading(BODIES[name]).double(), batch(), Mesh.parse(mesh), Options(**MESHES[mesh])).worst < 1e-10


def _in_stages(names: tuple[str, ...]) -> dict[str, float]:
    errors = {}
    for name in names:
        torch.manual_seed(1)
        model, given = Reading(BODIES[name]).double(), batch()
        loss, *grads = loss_and_gradients(model, given)
        mesh = autopar.init_mesh("cpu", 30.0, pp=2)
        parallel = autopar.parallelize(model, mesh, example_batch=given, microbatches=2)
        found, own = parallel.train_step(**given), parallel.full_gradients()
        wanted = zip(dict(model.named_parameters()), grads, strict=True)
        differences = [found.detach() - loss, *(own[n] - g for n, g in wanted if n in own)]
        errors[name] = max(float(d.detach().abs().max()) for d in differences)
    return errors


def test_in_stages() -> None:
    for errors in run_ranks(2, _in_stages, ("pieces", "same_mask_twice"), timeout=200):
        assert all(e < 1e-10 for e in errors.values()), errors


REFUSED: dict[str, tuple[Body, str]] = {
    "a sum over images": (lambda s, h, x, r, m: h + s.encoded(x[r]).softmax(0).sum(), "data-dependent|tensor values"),
    "a largest image": (lambda s, h, x, r, m: h + s.encoded(x[r]).max(), "data-dependent|tensor values"),
    "statistics of a batch": (
        lambda s, h, x, r, m: h + F.batch_norm(s.encoded(x[r]).mT, None, None, training=True).square().sum(),
        "data-dependent|tensor values",
    ),
    "a loop over a count": (lambda s, h, x, r, m: h + sum(range(x[r].shape[0])), "data-dependent|a number from a"),
    "a branch on a count": (lambda s, h, x, r, m: h * 2 if x[r].shape[0] > 3 else h, "branch|reads the value"),
    "images side by side": (
        lambda s, h, x, r, m: h + s.encoded(x[r]).transpose(0, 1).softmax(1).sum(), "data-dependent|tensor values"
    ),
    "images of two masks": (
        lambda s, h, x, r, m: h + (s.encoded(x[r]) - s.encoded(x[x[:, 0, 0, 0] > 0])).square().sum(),
        "data-dependent|tensor values",
    ),
    "a view by a fixed number": (
        lambda s, h, x, r, m: h + s.encoded(x[r]).view(3, -1, WIDTH).softmax(0).sum(), "data-dependent|tensor values"
    ),
    "turned around": (lambda s, h, x, r, m: h + s.encoded(x[r].flip(1, 0))[0].sum(), "data-dependent|tensor values"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    body, words = REFUSED[name]
    with pytest.raises(ValueError, match=r"^capture: ") as found:
        capture(Reading(body).double(), batch())
    assert re.search(words, str(found.value)), str(found.value)[:500]


@pytest.mark.parametrize("drop", [((0, 0),), ((0, 0), (0, 1), (1, 0), (2, 1))])
def test_other_numbers_of_features_than_places_are_noted(drop: tuple[tuple[int, int], ...]) -> None:
    torch.manual_seed(1)
    model, given = Reading(BODIES["pieces"]).double(), batch()
    graph = Normalize().apply(capture(model, given))
    loss_and_gradients(model, given | {"images": batch(drop)["images"]}, graph)
    assert [re.search(r"-?\d+", n.text.format(found=int(n.extremes[0]))) for n in take_notes()]


def test_a_row_beyond_the_selected_ones_is_noted() -> None:
    model, given = Reading(lambda s, h, x, r, m: h + s.encoded(x[r])[5].sum()).double(), batch()
    graph = Normalize().apply(capture(model, given))
    loss_and_gradients(model, given, graph)
    assert not take_notes()
    loss_and_gradients(model, batch(DROPS["every image is padding"][:4]), graph)
    assert [n.text for n in take_notes()] == ["x[mask][index] reads a row beyond those that the mask selects"]


class Returning(Reading):
    def forward(self, ids: Tensor, images: Tensor, target: Tensor) -> Any:
        kept = images.flatten(0, 1)[(images != 0).flatten(2).any(2).flatten()]
        return {"loss": super().forward(ids, images, target), "kept": kept}


def test_rows_beside_a_loss_are_left_out() -> None:
    model = Returning(BODIES["pieces"]).double()
    with pytest.warns(UserWarning, match=r"output\['kept'\] holds rows selected by a mask"):
        graph = capture(model, batch())
    assert [spec.kind for spec in graph.meta["signature"].outputs] == ["output"]
