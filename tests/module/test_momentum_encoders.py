"""Momentum encoders: frozen parameters that the forward itself updates, as papers of self-supervision write them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.capture.front_end import capture
from autopar.compile.model import compile_model
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.precision import Precision
from autopar.testing.harness import MeshRun
from autopar.testing.reference import eager
from tests.support.ranks import run_ranks

M, STEPS, ROWS = 0.9, 3, 4
Pairs = Iterator[tuple[Any, Any]]


def data_is_set(pairs: Pairs) -> None:
    for q, k in pairs:
        k.data = k.data * M + q.data * (1 - M)


def old_data_is_named(pairs: Pairs) -> None:
    for q, k in pairs:
        old, new = k.data, q.data
        k.data = old * M + (1 - M) * new


def data_is_scaled(pairs: Pairs) -> None:
    for q, k in pairs:
        k.data.mul_(M).add_(q.data, alpha=1 - M)


def data_is_augmented(pairs: Pairs) -> None:
    for q, k in pairs:
        k.data *= M
        k.data += q.data * (1 - M)


@torch.no_grad()
def copied(pairs: Pairs) -> None:
    for q, k in pairs:
        k.copy_(k * M + q * (1 - M))


@torch.no_grad()
def lerped(pairs: Pairs) -> None:
    for q, k in pairs:
        k.lerp_(q, 1 - M)


@torch.no_grad()
def all_together(pairs: Pairs) -> None:
    q, k = zip(*pairs, strict=True)
    torch._foreach_mul_(k, M)
    torch._foreach_add_(k, q, alpha=1 - M)


def net(width: int = 8, hidden: int = 12) -> nn.Sequential:
    layers = nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, 8)
    return nn.Sequential(*layers)


class Momentum(nn.Module):
    """A pair of encoders. ``late``: the second is updated after its use."""

    def __init__(self, update: Callable[[Pairs], None], late: bool = False, hidden: int = 12) -> None:
        super().__init__()
        self.update, self.late = update, late
        self.q, self.head = net(hidden=hidden), nn.Linear(8, 8)
        self.k = copy.deepcopy(self.q).requires_grad_(False)
        with torch.no_grad():
            for p in self.k.parameters():
                p.add_(0.1 * torch.randn_like(p))

    def pairs(self) -> Pairs:
        return zip(self.q.parameters(), self.k.parameters(), strict=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if not self.late:
            self.update(self.pairs())
        a = F.normalize(self.head(self.q(x)), dim=-1)
        with torch.no_grad():
            b = F.normalize(self.k(y), dim=-1)
        if self.late:
            self.update(self.pairs())
        return (2 - 2 * (a * b).sum(-1)).mean()


class Moco(Momentum):
    """With a queue of keys, which each batch replaces a part of."""

    def __init__(self, update: Callable[[Pairs], None], **sizes: Any) -> None:
        super().__init__(update, **sizes)
        self.register_buffer("queue", F.normalize(torch.randn(8, 12), dim=0))
        self.register_buffer("ptr", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q = F.normalize(self.q(x), dim=1)
        with torch.no_grad():
            self.update(self.pairs())
            k = F.normalize(self.k(y), dim=1)
        same = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        others = torch.einsum("nc,ck->nk", q, self.queue.clone().detach())
        logits = torch.cat([same, others], dim=1) / 0.2
        ptr = int(self.ptr)
        assert self.queue.shape[1] % len(k) == 0
        self.queue[:, ptr : ptr + len(k)] = k.T
        self.ptr[0] = (ptr + len(k)) % self.queue.shape[1]
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))


class Dino(Momentum):
    """A teacher whose outputs are centered by a running mean."""

    def __init__(self, update: Callable[[Pairs], None], **sizes: Any) -> None:
        super().__init__(update, **sizes)
        self.register_buffer("center", torch.zeros(1, 8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        student = F.log_softmax(self.q(x) / 0.1, dim=-1)
        with torch.no_grad():
            teacher = self.k(y)
            target = F.softmax((teacher - self.center) / 0.04, dim=-1)
            self.center = self.center * M + teacher.mean(0, keepdim=True) * (1 - M)
        self.update(self.pairs())
        return -(target * student).sum(-1).mean()


def model_of(kind: type[Momentum], update: Callable[[Pairs], None], **sizes: Any) -> Momentum:
    torch.manual_seed(0)
    return kind(update, **sizes).double()


def batches() -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    return [{n: torch.randn(ROWS, 8, dtype=torch.float64) for n in "xy"} for _ in range(STEPS)]


def trained(model: Any, parts: int, part: int, step: Callable[[dict[str, Tensor]], Tensor]) -> list[float]:
    """Losses of some steps on a part of each batch."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    losses = []
    for batch in batches():
        losses.append(float(step({n: x.chunk(parts)[part] for n, x in batch.items()})))
        optimizer.step()
        optimizer.zero_grad()
    return losses


Case = tuple[type[Momentum], Callable[[Pairs], None], dict[str, Any]]


def on_a_mesh(sizes: dict[str, int], options: dict[str, Any], cases: list[Case]) -> list[Any]:
    mesh = autopar.init_mesh(**sizes)
    parts = sizes.get("dp", 1)
    part = mesh.get_local_rank("dp") if parts > 1 else 0
    found = []
    for kind, update, how in cases:
        own = {n: x.chunk(parts)[part] for n, x in batches()[0].items()}
        model: Any = autopar.parallelize(model_of(kind, update, **how), mesh, example_batch=own, **options)
        losses = trained(model, parts, part, lambda batch, model=model: model.train_step(**batch))
        found.append((losses, model.full_state_dict()))
    return found


def alone(kind: type[Momentum], update: Callable[[Pairs], None], how: dict[str, Any]) -> Any:
    model = model_of(kind, update, **how)

    def step(batch: dict[str, Tensor]) -> Tensor:
        loss = model(**batch)
        loss.backward()
        return loss

    return trained(model, 1, 0, step), model.state_dict()


SPELLINGS = [
    data_is_set, old_data_is_named, data_is_scaled, data_is_augmented, copied, lerped, all_together
]  # fmt: skip
EVERY: list[Case] = [(Momentum, update, {}) for update in SPELLINGS]
KINDS: list[Case] = [
    (Momentum, lerped, {"late": True}), (Momentum, lerped, {"hidden": 13}), (Moco, data_is_set, {}),
    (Dino, data_is_scaled, {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "options", "cases"),
    [
        ({"dp": 2}, {}, EVERY),
        ({"tp": 2}, {}, KINDS),
        ({"dp": 2}, {"zero": 3}, KINDS),
        ({"dp": 2}, {"zero": 1, "microbatches": 2}, KINDS),
        ({"pp": 2}, {"microbatches": 2}, KINDS),
        ({"dp": 2, "tp": 2}, {"zero": 3}, KINDS),
        ({"dp": 2, "pp": 2}, {"zero": 2, "microbatches": 2, "schedule": "zb_h1"}, KINDS),
    ],
    ids=str,
)
def test_as_one_process(sizes: dict[str, int], options: dict[str, Any], cases: list[Case]) -> None:
    ranks = 1
    for n in sizes.values():
        ranks *= n
    expected = [alone(*case) for case in cases]
    for found in run_ranks(ranks, on_a_mesh, sizes, options, cases):
        for case, (losses, state), (right, after) in zip(cases, found, expected, strict=True):
            name = f"{case[0].__name__} {case[1].__name__} {case[2]}"
            assert losses == pytest.approx(right, abs=1e-10), name
            assert state.keys() == after.keys()
            assert all((state[n] - x).abs().max() < 1e-10 for n, x in after.items()), name


class Counted(nn.Module):
    """Numbers of a buffer, read as Python numbers. ``body``: what the forward does with the module and its number."""

    def __init__(self, body: Callable[[Any, Any], None]) -> None:
        super().__init__()
        self.body, self.w = body, nn.Linear(8, 8)
        self.register_buffer("n", torch.tensor([3]))
        self.register_buffer("held", torch.arange(48.0).view(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        loss = (self.w(x) * self.held.sum()).square().mean()
        self.body(self, self.n.item())
        return loss


def read_and_scaled(m: Any, n: Any) -> None:
    m.held.add_(m.held[:, n - 1 : n + 1].sum() * 0.9**n / (n + 1))
    m.n += 1


def written_to_a_view(m: Any, n: Any) -> None:
    m.held.T[n : n + 2] = m.held[:, :2].T * 2
    m.n.fill_((n + 2) % 4)


@pytest.mark.parametrize("body", [read_and_scaled, written_to_a_view])
def test_numbers_of_buffers_compute_as_pythons(body: Callable[[Any, Any], None]) -> None:
    torch.manual_seed(0)
    model, batch = Counted(body).double(), {"x": torch.randn(4, 8, dtype=torch.float64)}
    mesh = Mesh.of(dp=2)
    made = compile_model(model, batch, mesh, Options(), lift_to_float64=True, outputs=())
    run, expected = MeshRun(made, model, batch, mesh), eager(model, batch)
    assert max(e.worst for e in run.errors(expected)) < 1e-10
    assert not run.wrong_buffers(expected) and expected.buffers["n"] != 3


class Joined(nn.Module):
    """A buffer that is the rows of the batch before those that it has held: blocks of unlike sizes of one dim."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.k = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("held", torch.randn(24, 8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            keys = self.k(x)
            self.held.copy_(torch.cat([keys, self.held[:-8]]))
        return (self.w(x) - keys).square().mean()


@pytest.mark.parametrize(("axes", "parts"), [({"dp_replicate": 2, "dp": 2}, 1), ({"dp": 2}, 2)])
def test_rows_of_the_batch_beside_others_keep_their_order(axes: dict[str, int], parts: int) -> None:
    torch.manual_seed(0)
    model, batch, mesh = Joined().double(), {"x": torch.randn(8, 8, dtype=torch.float64)}, Mesh.of(**axes)
    how = Options(microbatches=parts, batch_dims={"x": 0})
    made = compile_model(model, batch, mesh, how, lift_to_float64=True, outputs=())
    run, expected = MeshRun(made, model, batch, mesh), eager(model, batch)
    assert max(e.worst for e in run.errors(expected)) < 1e-10 and not run.wrong_buffers(expected)


class Updated(nn.Module):
    """``update``: what the forward does with its trained layer and its frozen one."""

    def __init__(self, update: Callable[[nn.Linear, nn.Linear], Any]) -> None:
        super().__init__()
        self.update, self.w, self.k = update, nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.update(self.w, self.k)
        return self.w(x).sum() + self.k(x).sum()


def memory_is_shared(w: nn.Linear, k: nn.Linear) -> None:
    k.weight.data = w.weight.data


def old_view_is_read(w: nn.Linear, k: nn.Linear) -> None:
    old = k.weight.data
    k.weight.data = old * M
    k.bias.data.add_(old.sum())


def value_is_written(w: nn.Linear, k: nn.Linear) -> None:
    new = k.weight.data * M
    k.weight.data = new
    new.mul_(2)


def dtype_is_changed(w: nn.Linear, k: nn.Linear) -> None:
    k.weight.data = k.weight.data.double()


@pytest.mark.parametrize(
    ("update", "words"),
    [
        (memory_is_shared, "to memory of w.weight, with which it would change"),
        (old_view_is_read, "reads a view of k.weight from before"),
        (value_is_written, "writes to a tensor that it has set as k.weight.data"),
        (dtype_is_changed, "steps have one shape and dtype"),
    ],
)
def test_what_a_write_cannot_stand_for_is_refused(update: Callable[..., Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        capture(Updated(update), {"x": torch.ones(2, 4)})


def test_an_average_is_not_rounded_to_what_the_step_computes_in() -> None:
    model, batch = Momentum(lerped), {n: torch.randn(ROWS, 8) for n in "xy"}
    with pytest.raises(ValueError, match=r"precision: the forward writes to parameter k\.0\.weight"):
        capture(model, batch, precision=Precision(compute="bfloat16", stored="float32"))
    kept = capture(model, batch, precision=Precision(compute="bfloat16", stored="float32", keep=("k", "q")))
    assert len([s for s in kept.meta["signature"].outputs if s.kind == "mutation"]) == 6
