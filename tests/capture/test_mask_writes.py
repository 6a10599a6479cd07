"""A fixed number of rows, as features of images, at the true entries of a mask: as other people write it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture.front_end import capture
from autopar.ir.mesh import Mesh
from autopar.ops.value_checks import take_notes
from autopar.options import Options
from autopar.passes.canonicalize.normalize import Normalize
from autopar.testing.harness import check_model
from tests.capture.test_mask_indexing import loss_and_gradients

WIDTH, ROWS, TOKENS, PLACES = 4, 4, 7, 2
Body = Callable[[Tensor, Tensor, Tensor], Tensor]


class Filling(nn.Module):
    """Features of two images for each row of tokens, [rows * 2, width]."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.embed, self.image, self.head = nn.Embedding(16, WIDTH), nn.Linear(6, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.body = body

    def forward(self, ids: Tensor, pixels: Tensor, target: Tensor) -> Tensor:
        h = self.body(self.embed(ids), ids == 1, self.image(pixels).flatten(0, 1))
        return F.mse_loss(self.head(h).tanh(), target)


def assigned(h: Tensor, m: Tensor, f: Tensor) -> Tensor:
    h = h.clone()
    h[m] = f
    return h


def assigned_whole_rows(h: Tensor, m: Tensor, f: Tensor) -> Tensor:
    h = h.clone()
    h[m, :] = f.to(h.dtype)
    return h


def deepstack(h: Tensor, m: Tensor, f: Tensor) -> Tensor:
    h = h.clone()
    h[m, :] = h[m, :] + f
    return h


def added(h: Tensor, m: Tensor, f: Tensor) -> Tensor:
    h = h * 1
    h[m] += f
    return h


def flattened(h: Tensor, m: Tensor, f: Tensor) -> Tensor:
    flat = h.reshape(-1, WIDTH).clone()
    flat[m.reshape(-1)] = flat[m.reshape(-1)] * 0.5 + f
    return flat.view(h.shape)


def flattened_first(h: Tensor, m: Tensor, f: Tensor) -> Tensor:
    flat, mask = h.flatten(0, 1), m.flatten()
    flat = flat.clone()
    flat[mask] = f
    return flat.reshape(h.shape)


def positions(h: Tensor, m: Tensor, f: Tensor) -> Tensor:
    h, (row, token) = h.clone(), torch.where(m)
    h[row, token] = f
    return h


def positions_of_nonzero(h: Tensor, m: Tensor, f: Tensor) -> Tensor:
    h, at = h.clone(), m.nonzero()
    h[at[:, 0], at[:, 1], :] = f
    return h


def positions_added(h: Tensor, m: Tensor, f: Tensor) -> Tensor:
    h, at = h.clone(), m.nonzero(as_tuple=True)
    h[at] += f
    return h


def one_index(h: Tensor, m: Tensor, f: Tensor) -> Tensor:
    flat = h.view(-1, WIDTH).clone()
    at = m.view(-1).nonzero().squeeze(-1)
    flat[at] = f
    return flat.view_as(h)


def index_copied(h: Tensor, m: Tensor, f: Tensor) -> Tensor:
    at = torch.nonzero(m.view(-1), as_tuple=True)[0]
    return h.view(-1, WIDTH).index_copy(0, at, f).view_as(h)


def index_added(h: Tensor, m: Tensor, f: Tensor) -> Tensor:
    at = torch.where(m.view(-1))[0]
    return h.view(-1, WIDTH).index_add(0, at, f).view_as(h)


def scattered(h: Tensor, m: Tensor, f: Tensor) -> Tensor:
    at = torch.where(m.view(-1))[0]
    return h.view(-1, WIDTH).scatter(0, at[:, None].expand(-1, WIDTH), f).view_as(h)


def index_put(h: Tensor, m: Tensor, f: Tensor) -> Tensor:
    return h.index_put((m,), f) + h.index_put(torch.where(m), f, accumulate=True)


def index_put_in_place(h: Tensor, m: Tensor, f: Tensor) -> Tensor:
    h = h.clone()
    h.index_put_((m,), f).mul_(2)
    h.index_put_(m.nonzero(as_tuple=True), f * 2, accumulate=True)
    return h


def row_by_row(h: Tensor, m: Tensor, f: Tensor) -> Tensor:
    h = h.clone()
    for i, own in enumerate(f.view(h.shape[0], -1, WIDTH)):
        h[i, m[i]] = own
    return h


def row_by_row_in_a_list(h: Tensor, m: Tensor, f: Tensor) -> Tensor:
    rows = []
    for text, places, own in zip(h.unbind(0), m.unbind(0), f.view(h.shape[0], -1, WIDTH).unbind(0), strict=True):
        text = text.clone()
        text[places] = own
        rows.append(text)
    return torch.stack(rows)


def views_of_rows(h: Tensor, m: Tensor, f: Tensor) -> Tensor:
    h = h.clone()
    for i in range(h.size(0)):
        h[i][m[i]] += f.view(h.size(0), -1, WIDTH)[i]
    return h


def gathered_by_count(h: Tensor, m: Tensor, f: Tensor) -> Tensor:
    at = (m.flatten().cumsum(0) - 1).clamp(min=0).view(m.shape)
    return torch.where(m.unsqueeze(-1), f[at], h)


def select_of_all(h: Tensor, m: Tensor, f: Tensor) -> Tensor:
    spread = m.unsqueeze(-1).expand_as(h)
    out = h.clone()
    out[spread] = f.reshape(-1)
    return out


def mixed(h: Tensor, m: Tensor, f: Tensor) -> Tensor:
    """Two kinds of places, joined as Qwen3-VL joins images and videos."""
    first = m & (m.cumsum(1) == 1)
    second = m & ~first
    both = first | second
    joint = f.new_zeros(both.sum(), f.shape[-1])
    joint[first[both], :] = f.view(-1, 2, WIDTH)[:, 0]
    joint[second[both]] = f.view(-1, 2, WIDTH)[:, 1] * 2
    h = h.clone()
    h[both, :] = h[both, :] + joint
    return h


def mixed_by_torch(h: Tensor, m: Tensor, f: Tensor) -> Tensor:
    joint = torch.zeros(m.sum(), WIDTH, dtype=h.dtype, device=h.device)
    joint += f
    h = h.clone()
    h[m] = joint
    return h


def loss_of_places(h: Tensor, m: Tensor, f: Tensor) -> Tensor:
    return h + F.mse_loss(h[m], f) + F.l1_loss(f, h[m], reduction="sum")


def gate_of_places(h: Tensor, m: Tensor, f: Tensor) -> Tensor:
    joined = torch.cat([h[m], f], -1).sum(-1, keepdim=True).sigmoid()
    h = h.clone()
    h[m] = joined * f + (1 - joined) * torch.where(f > 0, f, h[m])
    return h


def checked(h: Tensor, m: Tensor, f: Tensor) -> Tensor:
    if m.sum() != f.shape[0]:
        raise ValueError(f"{m.sum()} places and {f.shape[0]} features")
    h = h.clone()
    h[m] = f
    return h


def asserted(h: Tensor, m: Tensor, f: Tensor) -> Tensor:
    assert m.sum().item() == f.shape[0], "places and features"
    return h.masked_scatter(m[..., None], f)


def of_another_mask(h: Tensor, m: Tensor, f: Tensor) -> Tensor:
    """Sounds of several lengths, of which as many steps are kept as there are places."""
    wide = torch.stack([f, f * 2, f - 1], 1).flatten(0, 1)
    kept = torch.arange(3, device=h.device).repeat(len(f)) == 1
    kept = kept & (f.detach().sum() < 1e9)
    return h.masked_scatter(m.unsqueeze(-1), wide[kept].to(h.dtype) * 3)


def narrow(h: Tensor, m: Tensor, f: Tensor) -> Tensor:
    h = h.clone()
    h[m] = f.mean(-1, keepdim=True)
    h[m] = 0.5 * h[m]
    h[~m] *= 2
    return h


def zeroed_first(h: Tensor, m: Tensor, f: Tensor) -> Tensor:
    h = h.clone()
    h[m] = 0
    at = torch.where(m)
    h[at] = 1.0
    h[m] += f
    return h


def rows_of_the_same_places(h: Tensor, m: Tensor, f: Tensor) -> Tensor:
    """What the places hold already, and a mask that is handed about."""
    rows = torch.cat((torch.tanh(h[m]) * f,), 0)
    h = h.masked_scatter(m.unsqueeze(-1), rows).clone()
    again = m.unsqueeze(-1)[..., 0].to(h.device)
    h[again, :] = h[again, :] + rows
    return h


def rows_of_one_of_two_masks(h: Tensor, m: Tensor, f: Tensor) -> Tensor:
    """The places of one mask take, in order, what those of another one hold."""
    both = torch.stack([m, m.roll(1, 1)], -1)
    return h.masked_scatter(both[..., 0].unsqueeze(-1), h[both[..., 1]] * 3) + f.sum()


BODIES: dict[str, Body] = {
    f.__name__: f
    for f in (
        assigned, assigned_whole_rows, deepstack, added, flattened, flattened_first, positions, positions_of_nonzero,
        positions_added, one_index, index_copied, index_added, scattered, index_put, index_put_in_place, row_by_row,
        row_by_row_in_a_list, views_of_rows, gathered_by_count, select_of_all, mixed, mixed_by_torch, loss_of_places,
        gate_of_places, checked, asserted, of_another_mask, narrow, zeroed_first,
        rows_of_the_same_places, rows_of_one_of_two_masks,
    )
}  # fmt: skip


def made(body: Body) -> nn.Module:
    torch.manual_seed(1)
    return Filling(body).double()


def batch(*counts: int, seed: int = 0, images: int = ROWS * PLACES) -> dict[str, Tensor]:
    """One number per row: how many of its tokens are places."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 16, (len(counts), TOKENS), generator=g)
    for row, count in enumerate(counts):
        ids[row, torch.randperm(TOKENS, generator=g)[:count]] = 1
    pixels = torch.randn(len(counts), images // len(counts), 6, generator=g, dtype=torch.float64)
    target = torch.randn(len(counts), TOKENS, WIDTH, generator=g, dtype=torch.float64)
    return {"ids": ids, "pixels": pixels, "target": target}


@pytest.mark.parametrize("name", BODIES)
def test_equal_to_the_written_rows(name: str) -> None:
    model = made(BODIES[name])
    graph = Normalize().apply(capture(model, batch(2, 2, 2, 2)))
    for seed in (0, 1):  # other places in the same graph
        given = batch(2, 2, 2, 2, seed=seed)
        eager, ours = loss_and_gradients(model, given), loss_and_gradients(model, given, graph)
        assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(eager, ours, strict=True))
    assert not take_notes()


def test_rows_of_the_same_places_are_not_counted() -> None:
    graph = capture(made(rows_of_the_same_places), batch(2, 2, 2, 2))
    sorts = [str(n.target) for n in graph.graph.nodes if "sort" in str(n.target) or "cumsum" in str(n.target)]
    assert not sorts, "each place has its own row"


MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp": ({"dp": 2}, {"zero": 3}), "tp": ({"tp": 2}, {}), "parts": ({"dp": 2}, {"microbatches": 2})
}  # fmt: skip


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["deepstack", "mixed", "positions"])
def test_same_numbers(name: str, mesh: str) -> None:
    """Each rank puts the features of its own images at its own places."""
    sizes, options = MESHES[mesh]
    found = check_model(made(BODIES[name]), batch(2, 2, 2, 2), Mesh.of(**sizes), Options(**options))
    assert found.worst < 1e-10 and not take_notes()
    targets = [str(node.target) for node in found.compiled.local.graph.nodes]
    assert any("filled_rows" in t for t in targets) and not any("all_gather" in t for t in targets if mesh != "dp")


@pytest.mark.full
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", BODIES)
def test_all_have_the_same_numbers(name: str, mesh: str) -> None:
    sizes, options = MESHES[mesh]
    dims = {"ids": 0, "pixels": 0, "target": 0}
    found = check_model(made(BODIES[name]), batch(2, 2, 2, 2), Mesh.of(**sizes), Options(**options, batch_dims=dims))
    assert found.worst < 1e-10 and not take_notes()


@pytest.mark.parametrize("counts", [(3, 2, 2, 2), (1, 2, 2, 2)], ids=["more", "fewer"])
def test_another_number_of_places_is_noticed(counts: tuple[int, ...]) -> None:
    """torch refuses it: a shape mismatch."""
    graph = capture(made(deepstack), batch(2, 2, 2, 2))
    loss_and_gradients(made(deepstack), batch(*counts), Normalize().apply(graph))
    (note,) = take_notes()
    assert note.problem(note.extremes) == f"{sum(counts)} for 8"


def test_examples_with_unlike_numbers_of_places() -> None:
    """What counts is how many places a rank has."""
    assert check_model(made(deepstack), batch(1, 3, 4, 0), Mesh.of(dp=2)).worst < 1e-10
    assert not take_notes()
    check_model(made(deepstack), batch(1, 2, 4, 1), Mesh.of(dp=2))
    said = [str(note.problem(note.extremes)) for note in take_notes()]
    assert 'a mask of "ids" selects 3 entries for the 4 rows' in said[0]


def if_any(h: Tensor, m: Tensor, f: Tensor) -> Tensor:
    h = h.clone()
    if m.any():
        h[m] = f
    return h


def if_some(h: Tensor, m: Tensor, f: Tensor) -> Tensor:
    h = h.clone()
    if m.sum() > 0:
        h[m] = h[m] + f
    if m.sum().item() > 0:
        h.view(-1, WIDTH).index_add_(0, torch.where(m.flatten())[0], f)
    return h


def if_any_third(h: Tensor, m: Tensor, f: Tensor) -> Tensor:
    """A branch on another mask."""
    h, third = h.clone(), m & (m.cumsum(1) == 3)
    if third.any():
        h[m] = h[m] * 2
        h[torch.where(m)] += f
    return h


def if_any_scattered(h: Tensor, m: Tensor, f: Tensor) -> Tensor:
    places = m.unsqueeze(-1).expand_as(h)
    if m.any():
        h = h.masked_scatter(places, f.to(h.dtype))
    return h


def if_any_updated(h: Tensor, m: Tensor, f: Tensor) -> Tensor:
    """Values that have static shapes: a function that returns the changed tensor."""
    if m.sum() > 0:
        h = torch.masked_fill(h, m[..., None], 0.5)
        h = torch.where(m[..., None], h + f.mean(0), h)
        h = h.index_put((m,), f)
    return h


def if_any_third_scattered(h: Tensor, m: Tensor, f: Tensor) -> Tensor:
    """A branch on another mask."""
    third = m & (m.cumsum(1) == 3)
    if third.any():
        h = h.masked_fill(~m[..., None], 0.25)
        h = torch.where(m[..., None], h * 2, h)
        h = h.masked_scatter(m[..., None], f)
    return h


def if_any_one(h: Tensor, m: Tensor, f: Tensor) -> Tensor:
    """One value for all places, in branches on this mask and on another."""
    h, third = h.clone(), m & (m.cumsum(1) == 3)
    if m.any():
        h[m] = f[0]
    if third.any():
        h[m] = 0.5
        h[~m, :] = f[1] * 2
    return h


def if_any_third_filled(h: Tensor, m: Tensor, f: Tensor) -> Tensor:
    """Values that have static shapes, written in place; a view of the same memory."""
    h, third = h + f.sum(), m & (m.cumsum(1) == 3)
    before = h[0]
    if third.any():
        h.masked_fill_(~m[..., None], 0.25)
        h[1].masked_fill_(mask=m[1][..., None], value=0.5)
    return h + before


BRANCHES = (
    if_any_one,
    if_any_third_filled,
    if_any,
    if_some,
    if_any_third,
    if_any_scattered,
    if_any_updated,
    if_any_third_scattered,
)


@pytest.mark.parametrize("body", BRANCHES)
def test_a_branch_on_a_mask_skips_writes(body: Body) -> None:
    model = made(body)
    graph = Normalize().apply(capture(model, batch(2, 2, 2, 2)))
    for counts in ((2, 2, 2, 2), (0, 0, 0, 0) if "third" not in body.__name__ else (3, 2, 2, 1)):
        given = batch(*counts)
        eager, ours = loss_and_gradients(model, given), loss_and_gradients(model, given, graph)
        assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(eager, ours, strict=True))
        assert not take_notes()
    if body in BRANCHES[:2]:
        return  # needs no number of places
    loss_and_gradients(model, batch(3, 2, 2, 2), graph)
    assert "9 for 8" in [note.problem(note.extremes) for note in take_notes()]


@pytest.mark.parametrize("counts", [(0, 0, 0, 0), (2, 2, 2, 2)])
def test_a_branch_on_a_mask_of_a_sharded_batch(counts: tuple[int, ...]) -> None:
    for body in (if_any, if_any_third, if_any_scattered):
        assert check_model(made(body), batch(*counts), Mesh.of(dp=2), Options(microbatches=2)).worst < 1e-10
        assert not take_notes()


def test_a_branch_is_decided_by_the_whole_batch() -> None:
    assert check_model(made(if_any_third), batch(3, 1, 2, 2), Mesh.of(dp=2)).worst < 1e-10


def test_features_without_places_are_noticed_beside_the_branch() -> None:
    def beside(h: Tensor, m: Tensor, f: Tensor) -> Tensor:
        h = if_any(h, m, f)
        h[m] += f
        return h

    loss_and_gradients(made(beside), batch(0, 0, 0, 0), Normalize().apply(capture(made(beside), batch(2, 2, 2, 2))))
    assert [note.problem(note.extremes) for note in take_notes()] == ["0 for 8"]


def paired(h: Tensor, m: Tensor, f: Tensor) -> Tensor:
    rows, columns = zip(*torch.stack([m.sum(1), m.sum(1)], 1), strict=True)
    h = h.clone()
    h[rows, columns] = 0.0
    return h


REFUSED: dict[str, Body] = {
    "paired": paired,
    "joined": lambda h, m, f: h + torch.cat([h[m], f]).softmax(0)[: m.shape[0], None],
    "sorted": lambda h, m, f: h + (h[m].sort(0).values * f).sum(),
    "turned": lambda h, m, f: h + (h[m].flip(0) * f).sum(),
    "looped": lambda h, m, f: h + sum(f[i] for i in range(m.sum().item())),
    "sliced": lambda h, m, f: h + f[: m[0].sum().item()].sum(),
    "split": lambda h, m, f: h + torch.split(f, m.sum(1).tolist())[0].sum(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_words_of_our_own(name: str) -> None:
    with pytest.raises(ValueError, match=r"^capture: .*(on tensor values|reads (the|a) (value|number)|data-dependent)"):
        check_model(made(REFUSED[name]), batch(2, 2, 2, 2), Mesh.of(dp=2))
