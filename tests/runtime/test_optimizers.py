"""Every optimizer of torch, Adafactor of transformers and Muon on pieces of parameters: three steps are those of one
process. An exponential moving average."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from tests.support.ranks import run_ranks

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
BY_NAME = ("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Rprop", "SGD")
STEPS = 3  # the third takes states that the second has changed


def of_torch(name: str, **options: Any) -> Make:
    return lambda parameters: getattr(torch.optim, name)(parameters, lr=0.01, **options)


def muon(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.01)


def of_transformers(**options: Any) -> Make:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        from transformers.optimization import Adafactor

        return Adafactor(parameters, **options)

    return make


OPTIMIZERS: dict[str, Make] = {
    **{name: of_torch(name) for name in BY_NAME},
    "RMSprop": of_torch("RMSprop", eps=1e-3),  # its division by almost nothing lets roundings grow
    "Adam amsgrad": of_torch("Adam", amsgrad=True),
    "AdamW foreach": of_torch("AdamW", foreach=True),
    "AdamW fused": of_torch("AdamW", fused=True),
    "Adagrad foreach": of_torch("Adagrad", foreach=True),
    "Adagrad fused": of_torch("Adagrad", fused=True),
    "SGD foreach": of_torch("SGD", momentum=0.9, foreach=True),
    "SGD fused": of_torch("SGD", momentum=0.9, nesterov=True, fused=True),
    "Muon": muon,
    "Adafactor of transformers": of_transformers(lr=0.01, relative_step=False, eps=(1e-6, 1e-3)),
    "Adafactor, relative steps": of_transformers(relative_step=True, scale_parameter=True, warmup_init=True),
}  # fmt: skip


class Plain(nn.Module):
    """Tables, matrices, biases and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(16, 8), nn.LayerNorm(8)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 16, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.table(tokens)
        h = h + self.down(torch.tanh(self.up(self.norm(h))))
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), tokens.roll(1, 1).flatten())


def plain() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Plain().double(), {"tokens": torch.randint(0, 16, (8, 4))}


MESHES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp": 2, "tp": 2}, {"zero": 3}),  # cut by one axis, and by two along one dim
    ({"pp": 2, "dp": 2}, {"zero": 1, "microbatches": 2}),
]


def trained(model: nn.Module, make: Make, step: Callable[[], Any]) -> torch.optim.Optimizer:
    optimizer = make([*model.parameters()])
    for _ in range(STEPS):
        step()
        optimizer.step()
        model.zero_grad()  # Muon's own takes matrices only
    return optimizer


def alone(name: str) -> dict[str, Tensor]:
    model, batch = plain()
    trained(model, OPTIMIZERS[name], lambda: model(**batch).backward())
    return model.state_dict()


def on_ranks(sizes: dict[str, int], options: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Weights after the steps of each optimizer, which begin with the same; and the layout of its states."""
    model, batch = plain()
    mesh = autopar.init_mesh("cpu", 60.0, **sizes)
    part, parts = autopar.dp_rank_and_size(mesh)
    mine = {k: v.chunk(parts)[part] for k, v in batch.items()}
    parallel = autopar.parallelize(model, mesh, lift_to_float64=True, example_batch=mine, **options)
    start, found = {n: x.clone() for n, x in parallel.full_state_dict().items()}, {}
    cut = {str(p.placements) for p in parallel.parameters() if isinstance(p, DTensor)}
    assert "pp" in sizes or len(cut) > 2, cut
    for name in names:
        parallel.load_state_dict(start)
        optimizer = trained(parallel, OPTIMIZERS[name], lambda: parallel.train_step(**mine))
        laid = [
            type(x) is type(p) and x.shape == p.shape
            for p, state in optimizer.state.items()
            for x in state.values()
            if isinstance(x, Tensor) and x.shape == p.shape and p.dim() > 1
        ]
        found[name] = dict(parallel.full_state_dict()), all(laid)
    return found


# Whole matrices, norms of parameters, all tensors at once; two more in tests/runtime/test_saving.py.
ON_STAGES = ("Muon", "Adafactor, relative steps", "SGD foreach")


@pytest.mark.parametrize(
    ("sizes", "options", "names"),
    [
        (*MESHES[0], [*OPTIMIZERS]),
        (*MESHES[1], ON_STAGES),
        pytest.param(*MESHES[1], [*OPTIMIZERS], marks=pytest.mark.full),
    ],
    ids=["pieces", "stages", "all on stages"],
)
def test_steps_are_those_of_one_process(sizes: dict[str, int], options: dict[str, Any], names: Iterable[str]) -> None:
    expected = {name: alone(name) for name in names}
    for found in run_ranks(4, on_ranks, sizes, options, [*names], timeout=200):
        assert found.keys() == expected.keys()
        for name, (state, laid_out) in found.items():
            worst = max(float((state[n] - x).abs().max()) for n, x in expected[name].items() if n in state)
            assert worst < 1e-10, (name, worst)
            assert laid_out, f"states of {name} are not cut like their parameters"


class SeesDTensors(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += any(issubclass(t, DTensor) for t in types)
        return func(*args, **kwargs or {})


class Own(torch.optim.SGD):
    """Somebody's, of which nothing is known."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad, alpha=-0.1)


def operators_of_dtensors() -> dict[str, int]:
    """How many an optimizer asks for in its second step."""
    model, batch = plain()
    parallel = autopar.parallelize(
        model, autopar.init_mesh("cpu", 60.0, tp=2), lift_to_float64=True, example_batch=batch
    )
    found = {}
    known = {
        name: make for name, make in OPTIMIZERS.items() if name.split()[0] not in ("Muon", "Adafactor", "Adafactor,")
    }
    for name, make in {**known, "Own": lambda parameters: Own(parameters, lr=0.1)}.items():
        optimizer = make([*parallel.parameters()])
        parallel.train_step(**batch)
        optimizer.step()
        with SeesDTensors() as seen:
            optimizer.step()
        found[name] = seen.count
    return found


def test_steps_of_elements_are_not_dispatched_as_dtensors() -> None:
    for found in run_ranks(2, operators_of_dtensors):
        assert "Own" in found and not any(found.values()), found


# --- what stands around a step ------------------------------------------------------------------------------


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()).square().mean()  # type: ignore[no-any-return]


def around_a_step(**sizes: int) -> dict[str, Any]:
    """Hooks, closures and gradients of an optimizer that gets whole matrices."""
    torch.manual_seed(0)
    x = torch.rand(8, 8)
    parallel = autopar.parallelize(
        Matrices(), autopar.init_mesh("cpu", 30.0, **sizes), example_batch={"x": x}, zero=3 if "dp" in sizes else 0
    )
    optimizer = torch.optim.Muon(parallel.parameters(), lr=0.1)
    hooks: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: hooks.append("before"))
    optimizer.register_step_post_hook(lambda *_: hooks.append("after"))

    def closure() -> Tensor:
        optimizer.zero_grad()
        return parallel.train_step(x=x)

    loss = optimizer.step(closure)
    gradients = [p.grad is not None for p in parallel.parameters()]
    second = optimizer.step(closure)
    steps = [p for p in optimizer.state if not isinstance(p, DTensor)]
    return {"hooks": hooks, "losses": [float(loss), float(second)], "gradients": gradients, "others": len(steps)}


def beside_others() -> tuple[list[Tensor], list[Tensor]]:
    """Two steps of a model that torch's FSDP shards over an equal mesh, before ours exists and with it."""
    x, results = torch.rand(8, 8), []
    for ours in (False, True):
        mesh = autopar.init_mesh("cpu", 30.0, dp=2)
        if ours:
            autopar.parallelize(Matrices(), mesh, example_batch={"x": x})
        torch.manual_seed(0)
        model: Any = fully_shard(Matrices(), mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(2):
            model(x).backward()
            optimizer.step()
        results.append([p.full_tensor().detach() for p in model.parameters()])
    return results[0], results[1]


def test_parameters_of_others_on_an_equal_mesh_are_left_to_torch() -> None:
    for alone, beside in run_ranks(2, beside_others):
        assert all(map(torch.equal, alone, beside))


def hooks_that_matter() -> list[Any]:
    """A hook that takes the gradients away before a step, and one that raises behind it; an optimizer with a further
    parameter."""
    torch.manual_seed(0)
    x = torch.rand(8, 8)
    mesh = autopar.init_mesh("cpu", 30.0, dp=2)
    parallel = autopar.parallelize(Matrices(), mesh, example_batch={"x": x}, zero=3)
    other = nn.Parameter(torch.ones(2, 2))
    optimizer = torch.optim.Muon([*parallel.parameters(), other], lr=0.1)
    parallel.train_step(x=x)
    other.grad = torch.ones(2, 2)
    gradients = [p.grad.clone() for p in parallel.parameters()]  # type: ignore[union-attr]

    def zeroed(*_: Any) -> None:
        for p in parallel.parameters():
            p.grad.zero_()  # type: ignore[union-attr]

    def broken(*_: Any) -> None:
        raise KeyError("behind the step")

    before = {n: v.clone() for n, v in parallel.full_state_dict().items()}
    hook = optimizer.register_step_pre_hook(zeroed)
    optimizer.step()
    hook.remove()
    now, decayed = parallel.full_state_dict(), 1 - 0.1 * 0.1  # by Muon's weight decay alone
    acted = all(torch.allclose(now[n], before[n] * decayed) for n in before)
    for p, gradient in zip(parallel.parameters(), gradients, strict=True):
        p.grad = gradient
    optimizer.register_step_post_hook(broken)
    for _ in range(2):
        with pytest.raises(KeyError):
            optimizer.step()
    kept = [torch.equal(p.grad, g) for p, g in zip(parallel.parameters(), gradients, strict=True)]  # type: ignore[arg-type]
    return [acted, float(other.detach().sum()), kept, len(optimizer.param_groups[0]["params"])]


def test_hooks_act_and_their_errors_lose_nothing() -> None:
    for acted, others, kept, count in run_ranks(2, hooks_that_matter):
        assert acted and others < 3.9 and kept == [True, True] and count == 3


def test_hooks_closures_and_gradients_are_as_in_torch() -> None:
    for found in run_ranks(2, around_a_step_of_two):
        assert found["hooks"] == ["before", "after"] * 2
        assert found["losses"][1] < found["losses"][0]
        assert found["gradients"] == [True, True] and found["others"] == 0


def around_a_step_of_two() -> dict[str, Any]:
    return around_a_step(dp=2)


def lbfgs_on_stages() -> float:
    """The largest difference from one process after two steps."""
    torch.manual_seed(0)
    x, plain = torch.rand(8, 8, dtype=torch.float64), Matrices().double()
    mesh = autopar.init_mesh("cpu", 30.0, pp=2)
    parallel = autopar.parallelize(plain, mesh, example_batch={"x": x}, microbatches=2, split_points=("second",))
    plain = copy.deepcopy(plain)
    for model in (plain, parallel):
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")

        def closure(model: Any = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            if model is not plain:
                return model.train_step(x=x)  # type: ignore[no-any-return]
            loss: Tensor = model(x)
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)  # type: ignore[arg-type]
    whole = parallel.full_state_dict()
    return max(float((whole[n] - p.detach()).abs().max()) for n, p in plain.named_parameters())


def test_one_problem_of_all_parameters_on_stages() -> None:
    assert max(run_ranks(2, lbfgs_on_stages)) < 1e-10


# --- averages -----------------------------------------------------------------------------------------------


def averaged(sizes: dict[str, int], zero: int) -> dict[str, Any]:
    torch.manual_seed(0)
    x = torch.rand(8, 8)
    parallel = autopar.parallelize(
        Matrices().bfloat16(), autopar.init_mesh("cpu", 30.0, **sizes), example_batch={"x": x.bfloat16()}, zero=zero
    )
    average = autopar.ema(parallel, decay=0.5)
    start = {n: v.float() for n, v in parallel.full_state_dict().items()}
    with torch.no_grad():
        for p in parallel.parameters():
            p.add_(1.0)
    average.update()
    now = {n: v.float() for n, v in parallel.full_state_dict().items()}
    with average.applied():
        inside = {n: v.float() for n, v in parallel.full_state_dict().items()}
    after = {n: v.float() for n, v in parallel.full_state_dict().items()}
    state = average.state_dict()
    other = autopar.ema(parallel, decay=0.5)
    other.load_state_dict(state)
    dtypes = {v.dtype for k, v in state.items() if k.startswith("ema.")}
    same = all(torch.equal(a, b) for a, b in zip(average._averages.values(), other._averages.values(), strict=True))
    wrong = [
        n for n, x in start.items()
        if (inside[n] - (x + now[n]) / 2).abs().max() > 2e-2 or not torch.equal(after[n], now[n])
    ]  # fmt: skip
    return {"wrong": wrong, "dtypes": dtypes, "loaded": same and other.updates == 1}


@pytest.mark.parametrize("zero", [0, 3])
def test_averages_follow_and_are_put_in_place(zero: int) -> None:
    for found in run_ranks(2, averaged, {"dp": 2}, zero):
        assert found == {"wrong": [], "dtypes": {torch.float32}, "loaded": True}


def test_bad_averages_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ema: needs a model made by autopar.parallelize, found a Linear"):
        autopar.ema(nn.Linear(2, 2), 0.9)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="decay: expected a number between 0 and 1"):
        autopar.ema(nn.Linear(2, 2), 1.5)  # type: ignore[arg-type]
