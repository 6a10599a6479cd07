"""Rows that a mask picks: the graph keeps all of them, and loss and gradients are those of the picked ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture.front_end import capture
from tests.support.plain_models import part, put
from tests.support.ranks import run_ranks

Body = Callable[[nn.Module, Tensor, Tensor, Tensor, Tensor], Tensor]


class Picking(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.embed, self.head, self.body = nn.Linear(6, 4), nn.Linear(4, 4), body

    def forward(self, x: Tensor, t: Tensor, mask: Tensor) -> Tensor:
        return self.body(self, self.embed(x), x, t, mask)


def gaussian(s: Any, h: Tensor, x: Tensor, t: Tensor, m: Tensor) -> Tensor:
    """Poles in rows that are left out would show as NaN gradients."""
    scale = F.softplus(h[m]).reciprocal().sqrt()
    return ((h[m] - x[m][:, :4]).square() * scale + h[m].softmax(-1).log() + scale.log()).mean()


def of_picked(s: Any, h: Tensor, x: Tensor, t: Tensor, m: Tensor) -> Tensor:
    picked, classes = h[m], t[m]
    return picked[classes > 1].sum() / classes.numel() + picked.shape[0] * picked.size(1) * s.head.weight.sum()


def put_back(s: Any, h: Tensor, x: Tensor, t: Tensor, m: Tensor) -> Tensor:
    out = x[..., :4] * 1.0
    out[m] = s.head(h[m]).tanh()
    out[~m] += h[~m] * 2
    for i in range(3):
        out[t == i] -= h[t == i].exp() * t[t == i].unsqueeze(-1)
    return out.square().sum()


def changed_by_another_name(s: Any, h: Tensor, x: Tensor, t: Tensor, m: Tensor) -> Tensor:
    picked = h[m]
    same = picked
    picked += 1
    return same.mean()


BODIES: dict[str, Body] = {
    "classes": lambda s, h, x, t, m: F.cross_entropy(h[m], t[m], label_smoothing=0.1),
    "equal masks": lambda s, h, x, t, m: F.cross_entropy(h[t > 1], t[t > 1], reduction="sum"),
    "flat": lambda s, h, x, t, m: F.cross_entropy(h.view(-1, 4)[m.view(-1)], t.view(-1)[m.view(-1)]),
    "losses of rows": lambda s, h, x, t, m: (F.cross_entropy(h[m], t[m], reduction="none") * x[m][:, 0]).mean(),
    "shifted": lambda s, h, x, t, m: F.cross_entropy(h[:, :-1][m[:, 1:]], t[:, 1:][m[:, 1:]]),
    "squares": lambda s, h, x, t, m: F.mse_loss(h[m], x[m, :][:, :4]),
    "entries": lambda s, h, x, t, m: F.l1_loss(
        h.masked_select(m.unsqueeze(-1)), x[..., :4].masked_select(m.unsqueeze(-1))
    ),
    "layers": lambda s, h, x, t, m: (F.layer_norm(s.head(h[m]), (4,)).tanh() - x[m][..., 2:]).abs().mean(),
    "distances": lambda s, h, x, t, m: (h[m] - x[m][:, :4]).norm(dim=-1).mean(),
    "divergence": lambda s, h, x, t, m: F.kl_div(h[m].log_softmax(-1), x[m][:, :4].softmax(-1), reduction="batchmean"),
    "bits": lambda s, h, x, t, m: F.binary_cross_entropy(h[m].sigmoid(), (x[m] > 0)[:, :4].to(h.dtype)),
    "over rows": lambda s, h, x, t, m: h[m].mean(0).square().sum() + h[m].sum(dim=0, keepdim=True).max(),
    "gaussian": gaussian,
    "of picked ones": of_picked,
}


def batch() -> dict[str, Tensor]:
    """Unselected rows are NaN, as unknown targets are."""
    torch.manual_seed(0)
    mask = torch.rand(4, 7) > 0.5
    x = torch.randn(4, 7, 6, dtype=torch.float64)
    return {"x": x, "t": torch.randint(0, 4, (4, 7)), "mask": mask}


def loss_and_gradients(model: nn.Module, given: dict[str, Tensor], graph: Any = None) -> list[Tensor]:
    weights = dict(model.named_parameters())
    if graph is None:
        loss = model(**given)
    else:
        held = {**weights, **given}
        (loss,) = graph(*(held[s.name] for s in graph.meta["signature"].inputs))
    found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True, materialize_grads=True)
    return [loss, *found]


@pytest.mark.parametrize("name", BODIES)
def test_equal_to_the_picked_rows(name: str) -> None:
    torch.manual_seed(1)
    model, given = Picking(BODIES[name]).double(), batch()
    graph = capture(model, given)
    for shift in (0, 1):  # other rows, and another number of them, in the same graph
        given["mask"] = given["mask"].roll(shift, 1) | (given["t"] == 3 * shift)
        eager = loss_and_gradients(model, given)
        ours = loss_and_gradients(model, given, graph)
        assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(eager, ours, strict=True))


MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp": ({"dp": 2}, {}),
    "parts": ({"dp": 2}, {"zero": 3, "microbatches": 2}),
    "tp": ({"tp": 2}, {"microbatches": 2}),
}
ON_MESHES = {
    "dp": ("classes", "over rows", "of picked ones", "put back"),
    "parts": ("flat", "entries", "put back"),
    "tp": ("equal masks", "layers"),
}
MORE = {"dp": ("squares",), "parts": ("gaussian",), "tp": ("bits", "put back")}


def _on_ranks(mesh: str, names: tuple[str, ...]) -> dict[str, float]:
    sizes, options = MESHES[mesh]
    errors = {}
    for name in names:
        torch.manual_seed(1)
        model, given = Picking({**BODIES, "put back": put_back}[name]).double(), batch()
        expected = loss_and_gradients(model, given)
        parallel = put(model, given, sizes, **options)
        loss = parallel.train_step(**part(given, sizes))
        grads = parallel.full_gradients()
        found = [loss.detach(), *(grads[n] for n, _ in model.named_parameters() if n in grads)]
        wanted = [
            expected[0],
            *(g for (n, _), g in zip(model.named_parameters(), expected[1:], strict=True) if n in grads),
        ]
        errors[name] = max(float((a - b).detach().abs().max()) for a, b in zip(found, wanted, strict=True))
    return errors


@pytest.mark.parametrize("mesh", MESHES)
def test_on_ranks(mesh: str) -> None:
    check_on_ranks(mesh, ON_MESHES[mesh])


def check_on_ranks(mesh: str, names: tuple[str, ...]) -> None:
    for errors in run_ranks(2, _on_ranks, mesh, names, timeout=200):
        assert all(e < 1e-10 for e in errors.values()), errors


@pytest.mark.full
@pytest.mark.parametrize("mesh", MESHES)
def test_more_on_ranks(mesh: str) -> None:
    check_on_ranks(mesh, MORE[mesh])


def test_targets_that_are_no_numbers_have_no_part() -> None:
    model, given = (
        Picking(lambda s, h, x, t, m: F.mse_loss(h[m], t.to(h.dtype)[m].log().unsqueeze(-1) + h[m] * 0)),
        batch(),
    )
    model.double()
    graph = capture(model, given)
    given["t"] = torch.where(given["mask"], given["t"] + 1, -7)
    eager, ours = loss_and_gradients(model, given), loss_and_gradients(model, given, graph)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(eager, ours, strict=True))


def test_no_rows() -> None:
    model, given = Picking(lambda s, h, x, t, m: h[m].sum() + h.sum()).double(), batch()
    graph = capture(model, given)
    given["mask"] = torch.zeros_like(given["mask"])
    eager, ours = loss_and_gradients(model, given), loss_and_gradients(model, given, graph)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(eager, ours, strict=True))


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise AssertionError(grads)


def written(s: Any, h: Tensor, x: Tensor, t: Tensor, m: Tensor) -> Tensor:
    picked = x[m]
    picked.add_(1)
    return picked.mean() + h.mean()


REFUSED: dict[str, tuple[Body, str]] = {
    "unlike masks": (lambda s, h, x, t, m: F.mse_loss(h[m], x[t > 1][:, :4]), "tensors of data-dependent size"),
    "masks that are drawn": (
        lambda s, h, x, t, m: F.mse_loss(*(y[torch.rand_like(h[..., 0]) > 0.5][:, :4] for y in (h, x))),
        "tensors of data-dependent size",
    ),
    "a mask that is changed": (
        lambda s, h, x, t, m: F.mse_loss(h[m], x[m.logical_not_()][:, :4]),
        "tensors of data-dependent size|writes to",
    ),
    "rows that meet": (lambda s, h, x, t, m: h[m].softmax(0).square().mean(), "result depends on tensor values"),
    "one row": (lambda s, h, x, t, m: h[m].select(0, 3).mean(), "depends on tensor values|data-dependent"),
    "rows turned around": (
        lambda s, h, x, t, m: (h[m].flip(1, 0) * x[m][:, :4]).mean(),
        "depends on tensor values|data-dependent",
    ),
    "rows returned": (lambda s, h, x, t, m: h[m], "the forward returns rows selected by a mask"),
    "rows counted in Python": (lambda s, h, x, t, m: h[m].sum() / len(h[m]), "a data-dependent size"),
    "rows written to": (written, "are read after an in-place change"),
    "rows zeroed": (lambda s, h, x, t, m: h[m].zero_().sum() + h.sum(), "zero_ writes in place to rows selected"),
    "rows changed": (changed_by_another_name, "are read after an in-place change"),
    "vmap": (lambda s, h, x, t, m: torch.vmap(lambda r: r.square())(h[m]).mean(), "mask|values"),
    "an own function": (lambda s, h, x, t, m: Own.apply(h[m]), "mask|values"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    body, words = REFUSED[name]
    with pytest.raises(ValueError, match=r"^capture: ") as found:
        capture(Picking(body).double(), batch())
    assert re.search(words, str(found.value)), str(found.value)[:500]
