"""Sizes that do not divide, on real ranks: steps, optimizers, states and files are those of one process."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.api import load_adapters
from autopar.capture.front_end import adapter_for
from autopar.lift_to_float64 import LiftFloat32
from tests.support.ranks import run_ranks
from tests.support.subjects import tiny
from tests.support.uneven import odd

LIMIT = 1e-10
STEPS = 2


def mine(batch: dict[str, Tensor], mesh: Any) -> dict[str, Tensor]:
    """This rank's shard of the batch."""
    at, parts = autopar.dp_rank_and_size(mesh)
    return {n: x.tensor_split(parts)[at] for n, x in batch.items()}


def difference(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0


def own_experts(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Within: the experts of a plain model run in float64 on the CPU, too, where torch has no grouped product."""
    load_adapters(model)
    adapter = adapter_for(model)
    return contextlib.nullcontext() if adapter is None else adapter.reference(model)


def alone(name: str, tokens: int, steps: int) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Losses, last gradients, weights, and norms before clipping, of one process."""
    model, batch = odd(name, tokens=tokens, layers=2)
    optimizer, losses, norms = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), list[float](), list[float]()
    for _ in range(steps):
        optimizer.zero_grad()
        with LiftFloat32(), own_experts(model):
            loss = model(**batch).loss
            loss.backward()
        losses.append(float(loss))
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return losses, gradients, {n: x.detach() for n, x in model.state_dict().items()}, norms


def trained(
    name: str, sizes: dict[str, int], options: dict[str, Any], tokens: int = 16
) -> tuple[float, dict[str, float]]:
    """The largest error of steps, and of what a ShardedTensor says of itself."""
    model, batch = odd(name, tokens=tokens, layers=2)
    mesh = autopar.init_mesh("cpu", 60.0, **sizes)
    parallel = autopar.parallelize(model, mesh, lift_to_float64=True, **options)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.1, momentum=0.9)
    losses, gradients, weights, norms = alone(name, tokens, STEPS)
    errors = {}
    for i in range(STEPS):
        optimizer.zero_grad()
        errors[f"loss {i}"] = abs(float(parallel.train_step(**mine(batch, mesh))) - losses[i])
        errors[f"norm {i}"] = abs(float(torch.nn.utils.clip_grad_norm_(parallel.parameters(), 0.5)) - norms[i])
        found = parallel.full_gradients()
        optimizer.step()
    errors |= {f"gradient {n}": difference(found[n], x) for n, x in gradients.items()}
    errors |= {f"weight {n}": difference(x, weights[n]) for n, x in parallel.full_state_dict().items()}
    for n, p in parallel.named_parameters():
        x = weights[n]
        told = {
            "mean": (p.mean(), x.mean()),
            "max": (p.max(), x.max()),
            "min": (p.min(), x.min()),
            "sum": (p.sum(), x.sum()),
        }
        told["rows"] = (p.amax(0).full_tensor(), x.amax(0)) if x.dim() > 1 else (p.norm(), x.norm())  # type: ignore[operator]
        errors |= {f"{what} of {n}": difference(torch.as_tensor(a), b) for what, (a, b) in told.items()}
    return max(errors.values()), {n: e for n, e in errors.items() if not e < LIMIT}


CASES: list[tuple[str, dict[str, int], dict[str, Any], int]] = [
    ("llama_mha", {"tp": 4}, {}, 16),  # three heads on four ranks: the last one stores no rows
    ("llama_tied", {"dp": 2, "tp": 2}, {"zero": 3}, 16),
    ("gpt2", {"tp": 2}, {"sequence_parallel": True}, 7),
    ("llama_tied", {"pp": 2, "tp": 2}, {"microbatches": 2}, 16),
]
MORE: list[tuple[str, dict[str, int], dict[str, Any], int]] = [
    ("llama", {"tp": 4}, {"sequence_parallel": True}, 7),
    ("bert", {"dp": 2, "tp": 2}, {"zero": 1}, 16),
    ("t5", {"tp": 4}, {}, 16),
    ("phi3", {"dp": 2, "tp": 2}, {"zero": 2, "microbatches": 2}, 16),
    ("mixtral", {"ep": 2, "tp": 2}, {}, 16),
    ("gpt2", {"pp": 2, "dp": 2}, {"zero": 1, "microbatches": 2}, 16),
    ("llama_mha", {"cp": 2, "tp": 2}, {}, 16),
    ("gpt2", {"tp": 3}, {"backend": "inductor"}, 16),
]


def on_ranks(name: str, sizes: dict[str, int], options: dict[str, Any], tokens: int) -> None:
    ranks = int(torch.Size(sizes.values()).numel())
    for worst, wrong in run_ranks(ranks, trained, name, sizes, options, tokens, timeout=120):
        assert worst < LIMIT, wrong


@pytest.mark.parametrize(("name", "sizes", "options", "tokens"), CASES, ids=str)
def test_steps_are_those_of_one_process(name: str, sizes: dict[str, int], options: dict[str, Any], tokens: int) -> None:
    on_ranks(name, sizes, options, tokens)


@pytest.mark.full
@pytest.mark.parametrize(("name", "sizes", "options", "tokens"), MORE, ids=str)
def test_more_steps_are_those_of_one_process(
    name: str, sizes: dict[str, int], options: dict[str, Any], tokens: int
) -> None:
    on_ranks(name, sizes, options, tokens)


REDUCTIONS: dict[str, Callable[[Any], Tensor]] = {
    "sum": lambda p: p.sum(0), "mean": lambda p: p.mean(), "mean of rows": lambda p: p.mean(1, keepdim=True),
    "max": lambda p: p.amax(0), "min": lambda p: p.min(), "any": lambda p: (p > 0.3).any(0),
    "all": lambda p: (p < 9).all(), "norm": lambda p: p.norm(), "largest": lambda p: p.norm(math.inf),
    "least": lambda p: p.norm(-math.inf), "var": lambda p: p.float().var(0), "median": lambda p: p.median(),
    "foreach": lambda p: torch._foreach_norm([p], 3)[0],
}  # fmt: skip


def reduced(dtype: torch.dtype) -> list[str]:
    """Which reductions of weights differ from those of the whole by more than a rounding."""
    batch = {"input": torch.ones(4, 8, dtype=dtype)}
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 5, bias=False), nn.Tanh(), nn.Linear(5, 8, bias=False)).to(dtype)
    mesh = autopar.init_mesh("cpu", 60.0, tp=4)  # two rows, two, one, none
    parallel = autopar.parallelize(copy.deepcopy(plain), mesh, example_batch=batch)
    wrong = []
    for (name, x), p in zip(plain.named_parameters(), parallel.parameters(), strict=True):
        for what, function in REDUCTIONS.items():
            with torch.no_grad():
                found, right = function(p), function(x)
            found = found.full_tensor() if isinstance(found, DTensor) else torch.as_tensor(found)
            rounding = 2**-8 if dtype == torch.bfloat16 else 2**-20  # sums of float32 are in another order
            error = (found.float() - right.float()).abs()
            if found.shape != right.shape or bool((error > rounding * right.float().abs().clamp_min(0.01)).any()):
                wrong.append(f"{what} of {name}: {found} for {right}")
    return wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reductions_count_no_padding(dtype: torch.dtype) -> None:
    assert run_ranks(4, reduced, dtype) == [[], [], [], []]


def loads() -> list[list[int]]:
    model, batch = tiny("mixtral", layers=1, num_experts=3, num_local_experts=3)
    mesh = autopar.init_mesh("cpu", 60.0, ep=2)
    parallel = autopar.parallelize(model, mesh, lift_to_float64=True)
    parallel.train_step(**mine(batch, mesh))
    return [count.tolist() for count in parallel.expert_load().values()]


def test_counts_are_of_the_experts_that_exist() -> None:
    (counts,), other = run_ranks(2, loads)
    assert [counts] == other and len(counts) == 3 and sum(counts) == 8 * 16 * 2


# --- files ----------------------------------------------------------------------------------------------------


def leg(sizes: dict[str, int], options: dict[str, Any], folder: str, first: bool) -> tuple[float, float]:
    """(the loss of a step, the error of the weights before it) of a run that goes on from a folder, and saves it."""
    model, batch = odd("gpt2", layers=2)
    if not first:
        for p in model.parameters():
            torch.nn.init.zeros_(p)
    mesh = autopar.init_mesh("cpu", 60.0, **sizes)
    parallel = autopar.parallelize(model, mesh, lift_to_float64=True, **options)
    optimizer = torch.optim.AdamW(parallel.parameters(), 1e-2)
    if not first:
        autopar.load(folder, parallel, optimizer)
    loss = parallel.train_step(**mine(batch, mesh))
    optimizer.step()
    optimizer.zero_grad()
    autopar.save(folder, parallel, optimizer)
    return float(loss), 0.0


LEGS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"tp": 4}, {}),
    ({"dp": 2, "tp": 2}, {"zero": 3}),
    ({"dp": 1}, {}),
    ({"tp": 2}, {}),
]


def test_a_run_moves_over_meshes_that_pad_otherwise(tmp_path: Path) -> None:
    model, batch = odd("gpt2", layers=2)
    optimizer, expected = torch.optim.AdamW(model.parameters(), 1e-2), []
    for _ in LEGS:
        with LiftFloat32():
            loss = model(**batch).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss))
    for i, (sizes, options) in enumerate(LEGS):
        ranks = int(torch.Size(sizes.values()).numel())
        found = run_ranks(ranks, leg, sizes, options, str(tmp_path), not i, timeout=120)
        assert all(loss == pytest.approx(expected[i], abs=1e-9) for loss, _ in found), (i, found, expected)


def through_files(folder: str) -> float:
    """The largest difference between weights and what came through a folder of transformers."""
    model, _ = odd("gpt2", layers=1)
    mesh = autopar.init_mesh("cpu", 60.0, tp=4)
    parallel = autopar.parallelize(model, mesh, lift_to_float64=True)
    before = {n: x.clone() for n, x in parallel.full_state_dict().items()}
    parallel.save_pretrained(folder)
    with torch.no_grad():
        for p in parallel.parameters():
            p.zero_()
    parallel.load_pretrained(folder)
    return max(difference(x, before[n]) for n, x in parallel.full_state_dict().items())


def test_folders_of_transformers_have_no_padding(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    assert max(run_ranks(4, through_files, str(tmp_path))) == 0.0
    plain = GPT2LMHeadModel.from_pretrained(tmp_path, dtype=torch.float64)
    model, _ = odd("gpt2", layers=1)
    assert all(torch.equal(x, plain.state_dict()[n]) for n, x in model.state_dict().items())


# --- optimizers that need whole matrices ------------------------------------------------------------------------


def stepped(kind: str) -> float:
    model, batch = odd("gpt2", layers=1)
    twin, _ = odd("gpt2", layers=1)
    mesh = autopar.init_mesh("cpu", 60.0, tp=2)
    parallel = autopar.parallelize(model, mesh, lift_to_float64=True)
    made = {
        "adafactor": lambda ps: torch.optim.Adafactor(ps, 1e-2),
        "muon": lambda ps: torch.optim.Muon([p for p in ps if p.dim() == 2], 1e-2),
    }[kind]
    one, other = made(list(twin.parameters())), made(list(parallel.parameters()))
    for _ in range(2):
        with LiftFloat32():
            twin(**batch).loss.backward()
        parallel.train_step(**batch)
        for optimizer in (one, other):
            optimizer.step()
            optimizer.zero_grad()
    errors = {n: (x - twin.state_dict()[n]).abs() for n, x in parallel.full_state_dict().items()}
    # the gradient of a bias of keys is zero but for rounding, which Adafactor divides by its own size
    errors |= {n: torch.cat([x.chunk(3)[0], x.chunk(3)[2]]) for n, x in errors.items() if n.endswith("c_attn.bias")}
    return max(float(x.max()) for x in errors.values())


@pytest.mark.parametrize(("kind", "limit"), [("adafactor", LIMIT), ("muon", 1e-4)])
def test_optimizers_of_whole_matrices(kind: str, limit: float) -> None:
    assert max(run_ranks(2, stepped, kind)) < limit, kind  # Muon steps in bfloat16
