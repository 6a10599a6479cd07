"""Which way anybody's optimizer steps is found on small copies: the way, the numbers of one process, or a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.runtime.optim import step_trials
from autopar.runtime.optim.step_trials import Way
from tests.runtime.test_optimizers import plain
from tests.support.ranks import run_ranks

STEPS = 5


class Base(torch.optim.Optimizer):
    """``update`` returns what is subtracted from a parameter, times lr."""

    def __init__(self, parameters: Any, lr: float = 0.01, **options: Any) -> None:
        super().__init__(parameters, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        self.begin()
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.update(p, self.state[p], group))
        return loss

    def begin(self) -> None:
        """Before any parameter is stepped."""

    def update(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        raise AssertionError("of a subclass")


class Momenta(Base):
    """Elementwise, with states in a list and counts in its attributes and groups."""

    calls = 0

    def begin(self) -> None:
        self.calls += 1

    def update(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        found = state.setdefault("momenta", [torch.zeros_like(p), torch.zeros_like(p)])
        for momentum, beta in zip(found, (0.9, 0.5), strict=True):
            momentum.mul_(beta).add_(p.grad)  # type: ignore[arg-type]
        return sum(found) / group["steps"] / self.calls  # type: ignore[return-value]


class Norms(Base):
    """Norms of each parameter, its rows and columns, and a table of products."""

    def update(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        g: Any = p.grad
        state["norm"] = 0.9 * state.get("norm", 0.0) + g.norm()
        if p.dim() == 2:
            state["products"] = state.get("products", 0.0) + g @ g.T
            g = state["products"] @ g / state["products"].norm()
        return g / state["norm"] * group["steps"]  # type: ignore[no-any-return]


class Clipped(Base):
    """By the norm of all gradients, in torch's own words."""

    def begin(self) -> None:
        self.norm = torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"]]).norm()

    def update(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return p.grad / self.norm.clamp_min(0.1)  # type: ignore[operator]


class Sorted(Base):
    """Moves of all parameters in one vector, kept as a state of the first one; by code for plain tensors alone, as
    kernels are."""

    def begin(self) -> None:
        first = self.param_groups[0]["params"][0]
        gradients = [p.grad for p in self.param_groups[0]["params"]]
        if any(type(g) is not Tensor for g in gradients):
            raise TypeError("needs plain tensors")
        moves = torch.cat([g.flatten() for g in gradients])
        self.state[first]["moves"] = self.state[first].get("moves", torch.zeros_like(moves)) + moves
        self.median = self.state[first]["moves"].median()

    def update(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return p.grad - self.median  # type: ignore[operator]


class Noisy(Base):
    def update(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return p.grad + 0.1 * torch.randn(p.shape, dtype=p.dtype)  # type: ignore[operator]


class Factored(Base):
    """Elementwise for small matrices alone."""

    def update(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        g: Any = p.grad
        if p.dim() == 2 and p.shape[0] > 400:
            state["rows"] = g.square().mean(1, keepdim=True)
            return g / state["rows"].sqrt().add(0.1)  # type: ignore[no-any-return]
        state["squares"] = g.square()
        return g / state["squares"].sqrt().add(0.1)  # type: ignore[no-any-return]


class Ranked(Base):
    """Of what is stored outside of its state, by the object of a parameter."""

    def update(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        seen = self.__dict__.setdefault("seen", {})
        seen[id(p)] = seen.get(id(p), 0) + 1
        return p.grad.cumsum(0).cpu().numpy().sum() * seen[id(p)] * torch.ones_like(p)  # type: ignore[union-attr]


WAYS: dict[type[Base], Way | None] = {
    Momenta: Way.SHARDS, Norms: Way.OWNERS, Clipped: Way.GLOBALLY, Sorted: Way.TOGETHER, Noisy: Way.TOGETHER,
}  # fmt: skip


def trained(model: nn.Module, kind: type[Base], step: Any, steps: int = STEPS) -> Base:
    torch.manual_seed(1)
    optimizer = kind([*model.parameters()])
    for _ in range(steps):
        optimizer.zero_grad()
        step()
        optimizer.step()
    return optimizer


def alone(kind: type[Base]) -> dict[str, Tensor]:
    model, batch = plain()
    trained(model, kind, lambda: model(**batch).backward())
    return model.state_dict()


def on_ranks(sizes: dict[str, int], options: dict[str, Any], kinds: list[type[Base]]) -> list[Any]:
    model, batch = plain()
    mesh = autopar.init_mesh("cpu", 60.0, **sizes)
    part, parts = autopar.dp_rank_and_size(mesh)
    mine = {k: v.chunk(parts)[part] for k, v in batch.items()}
    parallel = autopar.parallelize(model, mesh, lift_to_float64=True, example_batch=mine, **options)
    start, found = {n: x.clone() for n, x in parallel.full_state_dict().items()}, []
    for kind in kinds:
        parallel.load_state_dict(start)
        optimizer = trained(parallel, kind, lambda: parallel.train_step(**mine))
        laid = {type(x).__name__ for p, s in optimizer.state.items() for x in s.values() if isinstance(x, Tensor)}
        found.append(
            (
                step_trials._WAYS[optimizer][1].way,
                dict(parallel.full_state_dict()),
                optimizer.param_groups[0]["steps"],
                laid,
            )
        )
    return found


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"dp": 2, "tp": 2}, {"zero": 3}),
        ({"pp": 2, "dp": 2}, {"zero": 1, "microbatches": 2}),
    ],
    ids=str,
)
def test_each_steps_in_its_way_as_one_process(sizes: dict[str, int], options: dict[str, Any]) -> None:
    expected = {kind: alone(kind) for kind in WAYS}
    for found in run_ranks(4, on_ranks, sizes, options, [*WAYS], timeout=200):
        for kind, (way, state, steps, _) in zip(WAYS, found, strict=True):
            assert way is WAYS[kind], (kind, way)
            assert steps == STEPS
            worst = max(float((state[n] - x).abs().max()) for n, x in expected[kind].items())
            assert worst < 1e-10, (kind, worst)


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 512, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).square().mean()  # type: ignore[no-any-return]


def of_large() -> list[Any]:
    torch.manual_seed(0)
    x, model = torch.rand(8, 4, dtype=torch.float64), Large().double()
    expected = {n: p.detach().clone() for n, p in model.named_parameters()}
    parallel = autopar.parallelize(
        model, autopar.init_mesh("cpu", 60.0, tp=2), example_batch={"x": x}, lift_to_float64=True
    )
    other = Large().double()
    other.load_state_dict(expected)
    trained(other, Factored, lambda: other(x).backward())
    optimizer = trained(parallel, Factored, lambda: parallel.train_step(x=x))
    found = parallel.full_state_dict()
    worst = max(float((found[n] - p.detach()).abs().max()) for n, p in other.named_parameters())
    return [step_trials._WAYS[optimizer][1].way, worst]


def test_what_steps_large_parameters_otherwise_gets_them_whole() -> None:
    for way, worst in run_ranks(2, of_large):
        assert way is Way.OWNERS and worst < 1e-10


def refused() -> list[str]:
    """The words of a refusal, on the first step and on the second; weights are as they were."""
    model, batch = plain()
    parallel = autopar.parallelize(
        model, autopar.init_mesh("cpu", 60.0, tp=2), lift_to_float64=True, example_batch=batch
    )
    optimizer = Ranked([*parallel.parameters()])
    before, words = {n: x.clone() for n, x in parallel.full_state_dict().items()}, []
    for _ in range(2):
        parallel.train_step(**batch)
        with pytest.raises(ValueError, match="optimizer: needs one that steps") as error:
            optimizer.step()
        words.append(str(error.value))
    now = parallel.full_state_dict()
    assert all(torch.equal(now[n], x) for n, x in before.items())
    return words


def test_what_has_no_way_is_refused_by_name() -> None:
    for first, second in run_ranks(2, refused):
        assert first == second and "found Ranked, which with its shards" in first


def saved_and_loaded(folder: str) -> float:
    """The largest difference of a run that was saved and loaded from one that went on."""
    worst, batch = 0.0, plain()[1]
    mesh = autopar.init_mesh("cpu", 60.0, dp=2)
    mine = {k: v.chunk(2)[autopar.dp_rank_and_size(mesh)[0]] for k, v in batch.items()}
    for kind in (Momenta, Norms):
        parallel = autopar.parallelize(plain()[0], mesh, lift_to_float64=True, example_batch=mine, zero=3)
        optimizer = trained(parallel, kind, lambda parallel=parallel: parallel.train_step(**mine), 2)
        autopar.save(f"{folder}/{kind.__name__}", parallel, optimizer)
        other = autopar.parallelize(plain()[0], mesh, lift_to_float64=True, example_batch=mine, zero=3)
        resumed = kind([*other.parameters()])
        autopar.load(f"{folder}/{kind.__name__}", other, resumed)
        for one, steps in ((parallel, optimizer), (other, resumed)):
            if kind is Momenta:
                steps.calls = 2  # type: ignore[attr-defined] # an attribute, which no state_dict has
            steps.zero_grad()
            one.train_step(**mine)
            steps.step()
        a, b = parallel.full_state_dict(), other.full_state_dict()
        worst = max(worst, *(float((a[n] - b[n]).abs().max()) for n in a))
    return worst


def test_states_are_saved_and_loaded(tmp_path: Path) -> None:
    assert max(run_ranks(2, saved_and_loaded, str(tmp_path))) < 1e-12
