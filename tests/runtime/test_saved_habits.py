"""What is done with saved runs: accumulations, scalers, precisions, frozen and untied weights, loaders."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import autopar
from tests.support.compile_cache import compiled_once
from tests.support.ranks import run_ranks
from tests.support.runs import Run, Tied, batch_of

EXACT = 1e-10


# --- between steps ------------------------------------------------------------------------------------------


def accumulating(sizes: dict[str, int], folder: str, resume: bool) -> list[float]:
    """Two backwards for each step of the optimizer; saved, and resumed, between these two. ``folder`` "": neither."""
    run, losses = Run(sizes, seed=0 if not resume else 4, zero=1 if "dp" in sizes else 0), []
    if resume:
        run.load(folder)
    for number in range(4)[run.number :]:
        losses.append(float(run.model.train_step(**run.batch(number))))
        run.number = number + 1
        if number % 2:
            run.optimizer.step()
            run.optimizer.zero_grad()
        if number == 2 and folder and not resume:
            run.save(folder, asynchronous=True).wait()
            return losses
    return [*losses, float(run.model.train_step(**run.batch(9)))]


def test_a_save_within_an_accumulation_keeps_its_gradients(tmp_path: Path) -> None:
    expected = run_ranks(1, accumulating, {"dp": 1}, "", False)[0]
    found = run_ranks(2, accumulating, {"dp": 2}, str(tmp_path), False)[0]
    found += run_ranks(1, accumulating, {"dp": 1}, str(tmp_path), True)[0]
    assert found == pytest.approx(expected, abs=EXACT)


def gradients_that_were_used(folder: str) -> list[bool]:
    """Gradients with which a step has been made are not state, be they set to None or not."""
    run, found = Run({"dp": 2}, zero=1), []
    run.model.train_step(**run.batch(0))
    run.optimizer.step()
    for name in ("stepped", "pending"):
        manifest = (run.save(f"{folder}/{name}").folder / "checkpoint.json").read_text()
        found.append('"gradients.' in manifest)
        run.model.train_step(**run.batch(1))
    run.load(f"{folder}/stepped")
    found.append(any(p.grad is not None for p in run.model.parameters()))
    return found


def test_gradients_that_were_used_are_not_saved(tmp_path: Path) -> None:
    assert run_ranks(2, gradients_that_were_used, str(tmp_path)) == [[False, True, False]] * 2


# --- precision ----------------------------------------------------------------------------------------------


def rounded(folder: str, precision: str, resume: bool, steps: int) -> tuple[list[float], dict[str, Any]]:
    """A run in float32 with another precision."""
    torch.manual_seed(0)
    mesh = autopar.init_mesh("cpu", 60.0, dp=2)
    part, parts = autopar.dp_rank_and_size(mesh)
    batches = [{n: x.chunk(parts)[part] for n, x in batch_of(i).items()} for i in range(6)]
    model = autopar.parallelize(Tied(), mesh, example_batch=batches[0], precision=precision, zero=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = autopar.GradScaler(model, init_scale=2.0**40, growth_interval=3) if precision == "fp16" else None
    number = 0
    if resume:
        number = autopar.load(folder, model, optimizer).extra["number"]
    losses = []
    for batch in batches[number : number + steps]:
        losses.append(float(model.train_step(**batch)))
        scaler.step(optimizer) if scaler is not None else optimizer.step()
        if scaler is not None:
            scaler.update()
        number += 1
        if number == 3 and not resume:
            autopar.save(folder, model, optimizer, extra={"number": number})
        optimizer.zero_grad()
    state = next(iter(optimizer.state.values()), {})
    facts = {
        "scale": scaler.get_scale() if scaler is not None else None,
        "dtype": state["exp_avg"].dtype if state else None,
    }
    return losses, facts


def both(folder: str, before: str, after: str) -> list[tuple[list[float], dict[str, Any]]]:
    """A run, and another one that goes on with the state of its middle; ranks of one call, which compile once."""
    with compiled_once():
        return [rounded(folder, before, False, 6), rounded(folder, after, True, 3)]


def test_a_scale_that_backs_off_goes_on(tmp_path: Path) -> None:
    """All steps are skipped, since the scale is far too large; each halves it."""
    (whole, facts), (rest, again) = run_ranks(2, both, str(tmp_path), "fp16", "fp16")[0]
    assert rest == whole[3:] and again == facts and facts["scale"] == 2.0**34


@pytest.mark.parametrize(("before", "after", "near"), [("bf16", "bf16", 0.0), ("none", "bf16_pure", 0.05)])
def test_other_precisions_load(tmp_path: Path, before: str, after: str, near: float) -> None:
    (whole, _), (rest, facts) = run_ranks(2, both, str(tmp_path), before, after)[0]
    assert rest == pytest.approx(whole[3:], abs=near)
    assert facts["dtype"] == (torch.bfloat16 if after == "bf16_pure" else torch.float32)


# --- models -------------------------------------------------------------------------------------------------


class Untied(Tied):
    """The same function with a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(self.embed.weight.detach().clone())


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Tied().double()


def frozen_and_others(folder: str) -> dict[str, bool]:
    """One run each: frozen parameters, an optimizer of some, none; a model on the meta device, one that is not tied."""
    found = {}

    def some(parameters: list[nn.Parameter]) -> Optimizer:
        return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=0.01)

    def frozen() -> nn.Module:
        model = Tied()
        model.blocks[0].up.weight.requires_grad_(False)
        return model

    run = Run({"dp": 2}, some, frozen, zero=3)
    run.step()
    run.save(folder)
    expected = [run.step(), run.step()]
    again = Run({"dp": 2}, some, frozen, seed=3, zero=1)
    again.load(folder)
    found["frozen"] = [again.step(), again.step()] == pytest.approx(expected, abs=EXACT)

    run = Run({"dp": 2}, zero=3)
    run.step()
    run.save(folder)
    expected = [run.step(), run.step()]
    again = Run({"dp": 2}, build=on_meta, zero=1)
    with pytest.raises(ValueError, match="needs weights"):
        again.save(folder)
    again.load(folder)
    found["meta"] = [again.step(), again.step()] == pytest.approx(expected, abs=EXACT)
    untied = Run({"dp": 2}, build=Untied, seed=3)
    autopar.load(folder, untied.model)
    batch = run.batch(0)
    run.load(folder)
    losses = [float(r.model.eval_step(**batch)) for r in (run, untied)]
    found["untied"] = losses[0] == pytest.approx(losses[1], abs=EXACT)
    autopar.save(f"{folder}/alone", run.model)
    other = Run({"dp": 2}, seed=8)
    autopar.load(f"{folder}/alone", other.model)
    found["no optimizer"] = float(other.model.eval_step(**batch)) == pytest.approx(losses[0], abs=EXACT)
    return found


def test_frozen_tied_and_empty_models(tmp_path: Path) -> None:
    for found in run_ranks(2, frozen_and_others, str(tmp_path)):
        assert found == dict.fromkeys(("frozen", "meta", "untied", "no optimizer"), True)


class Normed(nn.Module):
    """A batch norm, whose buffers steps write to, and two blocks for two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x))).square().mean()  # type: ignore[no-any-return]


def buffers(folder: str) -> bool:
    """Saved beside a step that writes to them; and the rest of what belongs to several optimizers."""
    torch.manual_seed(0)
    mesh = autopar.init_mesh("cpu", 60.0, dp=2)
    batches = [torch.rand(4, 4) for _ in range(4)]

    def make(seed: int) -> tuple[autopar.ParallelModule, list[Optimizer], list[Any]]:
        torch.manual_seed(seed)
        model = autopar.parallelize(Normed(), mesh, example_batch={"x": batches[0]}, broadcast_weights=True)
        params = [*model.parameters()]
        matrices, vectors = [p for p in params if p.dim() == 2], [p for p in params if p.dim() == 1]
        optimizers = [torch.optim.Muon(matrices, lr=0.01), torch.optim.SGD(vectors, lr=0.01, momentum=0.9)]
        plans = [torch.optim.lr_scheduler.MultiStepLR(o, [1, 3]) for o in optimizers]
        return model, optimizers, plans

    def steps(model: Any, optimizers: Any, plans: Any, inputs: list[Tensor]) -> list[float]:
        found = []
        for x in inputs:
            found.append(float(model.train_step(x=x)))
            for o, s in zip(optimizers, plans, strict=True):
                o.step()
                o.zero_grad()
                s.step()
        return [*found, float(model.eval_step(x=batches[0]))]

    one = make(0)
    steps(*one, batches[:2])
    saving = autopar.save(folder, one[0], one[1], scheduler=one[2], asynchronous=True)
    expected = steps(*one, batches[2:])
    saving.wait()
    other = make(1)
    autopar.load(folder, other[0], other[1], scheduler=other[2])
    return steps(*other, batches[2:]) == expected


def test_buffers_and_several_optimizers(tmp_path: Path) -> None:
    assert run_ranks(2, buffers, str(tmp_path)) == [True, True]


# --- what the user gives ------------------------------------------------------------------------------------


class Loader:
    """A position, as a data loader has one."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "order": torch.arange(self.at)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert len(state["order"]) == state["at"]
        self.at = state["at"]


def values() -> dict[str, Any]:
    random.seed(3)
    return {
        "plain": [1, 2.5, "x", None, True, float("inf"), -0.0],
        "nested": {"a": {"b": (1, [2, (3,)])}, 3: {"c": b"\0\xff"}},
        "counter": Counter({5: 2}),
        "set": {1, 2},
        "dtype": torch.bfloat16,
        "complex": 1 + 2j,
        "tensors": [torch.arange(3), torch.tensor(2.5, dtype=torch.bfloat16), torch.empty(0, 3), torch.ones(2, 2).t()],
        "halves": torch.tensor([1 + 2j, 3.0]),
        "random": random.getstate(),
        "numpy": [np.float32(0.5), np.arange(4).reshape(2, 2)],
        "generator": torch.random.get_rng_state(),
        "like a key": {"dict": 1, "tensor": "no"},
        "": "",
    }


def is_like(a: Any, b: Any) -> bool:
    if isinstance(a, (Tensor, np.ndarray)):
        same = torch.equal if isinstance(a, Tensor) else np.array_equal
        return type(a) is type(b) and a.dtype == b.dtype and same(a, b)
    if isinstance(a, dict):
        return type(a) is type(b) and a.keys() == b.keys() and all(is_like(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(is_like, a, b))
    return bool(a == b)


def of_users(sizes: dict[str, int], folder: str, first: bool) -> dict[str, Any]:
    run = Run(sizes, zero=int(sizes.get("dp", 1) > 1))
    if first:
        run.save(f"{folder}/same", extra={"number": 0, "values": values(), "loader": Loader(5)})
        parts = {"number": 0, "loader": Loader(10 + run.part)}
        run.save(f"{folder}/parts", extra=parts)
        return {}
    found: dict[str, Any] = {}
    loader = Loader(0)
    extra = run.load(f"{folder}/same", extra={"loader": loader}).extra
    found["same"] = is_like(extra["values"], values()) and loader.at == 5
    try:
        run.load(f"{folder}/parts", extra={"loader": loader})
        found["parts"] = loader.at - run.part
    except ValueError as error:
        found["parts"] = str(error)
    return found


def test_what_users_give_comes_back(tmp_path: Path) -> None:
    """Alike on all ranks, or by part of the batch: then on as many parts."""
    run_ranks(4, of_users, {"dp": 2, "tp": 2}, str(tmp_path), True)
    for found in run_ranks(2, of_users, {"dp_replicate": 2}, str(tmp_path), False):
        assert found == {"same": True, "parts": 10}
    (found,) = run_ranks(1, of_users, {"dp": 1}, str(tmp_path), False)
    assert found["same"] and "extra was saved by 2 data-parallel ranks, found 1" in found["parts"]
