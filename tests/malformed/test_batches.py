"""Batches of other keys, kinds, shapes and numbers: refused, or trained on as by plain torch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import autopar
from autopar.runtime.fault.errors import CollectiveError
from tests.malformed.judge import Case, failures, unclear
from tests.support.compile_cache import compiled_once
from tests.support.plain_models import EXACT, Net, Tied, build, numbers, tokens
from tests.support.ranks import run_ranks

INT, FLOAT = torch.int64, torch.float64


class Marked(Tensor):
    """A subclass that does nothing of its own."""


class Dispatched(Tensor):
    """One that does: what a step computes would not be what it computes."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def dispatched(x: Tensor) -> Tensor:
    return torch.Tensor._make_subclass(Dispatched, x)


# What is no tensor of numbers: for every input alike.
KINDS: dict[str, Callable[[Tensor], Any]] = {
    "a list": lambda x: x.tolist(),
    "a list of tensors": lambda x: list(x),
    "a tuple": lambda x: tuple(x),
    "a dict": lambda x: {"x": x},
    "a set": lambda x: {1},
    "numpy": lambda x: x.numpy(),
    "a numpy number": lambda x: np.float64(1.0),
    "None": lambda x: None,
    "text": lambda x: "x",
    "bytes": lambda x: b"x",
    "a number": lambda x: 3,
    "a float": lambda x: 0.5,
    "True": lambda x: True,
    "an object": lambda x: object(),
    "a function": lambda x: print,
    "a dtype": lambda x: torch.float32,
    "a generator": lambda x: (i for i in x),
    "sparse": lambda x: x.to_sparse(),
    "sparse rows": lambda x: x.to_sparse_csr(),
    "nested": lambda x: torch.nested.nested_tensor(list(x)),
    "jagged": lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged),
    "quantized": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.quint8),
    "meta": lambda x: x.to("meta"),
    "a parameter": lambda x: torch.nn.Parameter(x.clone(), requires_grad=x.is_floating_point()),
    "another dispatch": dispatched,
}
# The same numbers, laid out in another way.
SAME: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t().contiguous().t(),
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
    "a slice": lambda x: torch.cat([x, x])[: len(x)],
    "offset": lambda x: torch.cat([x, x])[len(x) :],
    "a subclass": lambda x: x.as_subclass(Marked),
    "from numpy": lambda x: torch.from_numpy(x.numpy()),
    "shared memory": lambda x: x.clone().share_memory_(),
    "detached": lambda x: x.clone().requires_grad_(x.is_floating_point()).detach(),
    "conjugated twice": lambda x: x.conj().conj(),
    "in inference": lambda x: torch.inference_mode()(x.clone)(),
}
# Other numbers of the same shape and dtype.
NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "of one row": lambda x: x[:1].expand_as(x),
    "of one number": lambda x: x[0, 0].expand_as(x),
    "zeros": torch.zeros_like,
    "flipped": lambda x: x.flip(0),
    "negative view": lambda x: (
        torch.view_as_complex(torch.stack([x, -x], -1)).conj().imag if x.is_floating_point() else x
    ),
}
SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "a number": lambda x: x[0, 0],
    "one row": lambda x: x[0],
    "fewer rows": lambda x: x[:3],
    "more columns": lambda x: torch.cat([x, x], 1),
    "one more dim": lambda x: x.unsqueeze(-1),
    "turned": lambda x: x.t(),
}
DTYPES = (torch.float32, torch.float16, torch.bool, torch.int32, torch.complex128, torch.uint8)
IDS = (-1, 16, 17, -17, 2**31, 2**62, -(2**62), -(2**63))


def cases_of(batch: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Batches by what is wrong with them: one change of one input."""
    out: dict[str, dict[str, Any]] = {}
    for name, x in batch.items():
        changes = {**KINDS, **SAME, **NUMBERS, **SHAPES}
        changes |= {str(dtype): lambda x, dtype=dtype: x.to(dtype) for dtype in DTYPES}  # type: ignore[misc]
        if not x.is_floating_point():
            changes |= {f"the id {i}": lambda x, i=i: _with(x, i) for i in IDS}  # type: ignore[misc]
        else:
            changes |= {n: lambda x, n=n: _with(x, float(n)) for n in ("nan", "inf", "-inf", "1e308")}  # type: ignore[misc]
            changes["requires a gradient"] = lambda x: x.clone().requires_grad_()
        for what, change in changes.items():
            out[f"{name}: {what}"] = {**batch, name: change(x)}
        out[f"{name}: missing"] = {n: v for n, v in batch.items() if n != name}
        out[f"{name}: renamed"] = {(f"{n}_" if n == name else n): v for n, v in batch.items()}
    out["an extra tensor"] = {**batch, "extra": torch.ones(2)}
    out["an extra None"] = {**batch, "extra": None}
    out["nothing"] = {}
    out["all rows left out"] = {n: x[:0] for n, x in batch.items()}
    return out


def _with(x: Tensor, value: Any) -> Tensor:
    out = x.clone()
    out[1, 1] = value
    return out


def in_turns(names: Iterable[str]) -> set[str]:
    """Each change of an input, of one of the inputs, in turns."""
    by_change: dict[str, list[str]] = {}
    for name in names:
        by_change.setdefault(name.rpartition(": ")[2], []).append(name)
    return {same[i % len(same)] for i, same in enumerate(by_change.values())}


def test_in_turns_there_is_every_change() -> None:
    names = [*cases_of(numbers())]
    few = in_turns(names)
    assert {name.rpartition(": ")[2] for name in few} == {name.rpartition(": ")[2] for name in names}
    assert {name.partition(": ")[0] for name in few} == {name.partition(": ")[0] for name in names}


def case(
    name: str, model: torch.nn.Module, parallel: Any, batch: dict[str, Any], whole: Callable[[], dict[str, Any]]
) -> Case:
    """A step, and whether plain torch says the same of the whole batch: of the loss, and of every gradient."""

    def run() -> Any:
        parallel.zero_grad()
        loss = parallel.train_step(**batch)
        return loss, parallel.full_gradients()

    def right(found: Any) -> bool:
        plain = copy.deepcopy(model)
        try:
            out = plain(**{n: x.clone() if isinstance(x, Tensor) else x for n, x in whole().items()})
        except Exception:
            return False  # what torch refuses is not to be trained on
        expected = out["loss"] if isinstance(out, dict) else out
        expected.backward()
        known = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
        pairs = [(found[0], expected), *((found[1][n], g) for n, g in known.items())]
        return all(torch.allclose(a.double(), b.double(), EXACT, EXACT, equal_nan=True) for a, b in pairs)

    return Case(name, run, right)


def judged(whole: bool) -> tuple[int, list[str]]:
    """(how many batches, what became of those that were neither refused nor right)"""
    mesh, cases = autopar.init_mesh("cpu", 30.0, dp=1), []
    for kind, batch in ((Net, numbers()), (Tied, tokens())):
        model = build(kind)
        parallel = autopar.parallelize(model, mesh, example_batch=batch)
        wrongs = cases_of(batch)
        for name in wrongs if whole else sorted(in_turns(wrongs)):
            right = partial(dict, wrongs[name])
            cases.append(case(f"{kind.__name__} {name}", model, parallel, wrongs[name], right))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return len(cases), failures(cases)


# --- two ranks --------------------------------------------------------------------------------------------


def judged_alike(axis: str, whole: bool) -> tuple[int, list[str]]:
    """As `judged`: both ranks are given what is wrong."""
    mesh, cases, good = autopar.init_mesh("cpu", 30.0, **{axis: 2}), [], numbers()
    mine = {k: x.chunk(2)[dist.get_rank()].contiguous() if axis == "dp" else x for k, x in good.items()}
    others = {k: x.chunk(2)[1 - dist.get_rank()].contiguous() if axis == "dp" else x for k, x in good.items()}
    model = build(Net)
    parallel = autopar.parallelize(model, mesh, example_batch=mine)
    wrongs, theirs = cases_of(mine), cases_of(others)
    for name in wrongs if whole else sorted(in_turns(wrongs)):
        wrong, other = wrongs[name], theirs[name]
        parts = [wrong, other] if dist.get_rank() == 0 else [other, wrong]
        batch = partial(_joined, *parts) if axis == "dp" else partial(dict, wrong)
        cases.append(case(name, model, parallel, wrong, batch))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return len(cases), failures(cases)


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """What both ranks were given, as one batch where that can be."""
    return {k: torch.cat([x, second[k]]).detach() if isinstance(x, Tensor) else x for k, x in first.items()}


def given_to_one(axis: str, what: Sequence[str]) -> list[str]:
    """Rank 1 is given what is wrong; what any rank made of that, if it was no error that tells why."""
    with compiled_once():
        return _given_to_one(axis, what)


def _given_to_one(axis: str, what: Sequence[str]) -> list[str]:
    found = []
    for name in what:
        mesh, good = autopar.init_mesh("cpu", 30.0, **{axis: 2}), tokens()
        mine = {k: x.chunk(2)[dist.get_rank()].contiguous() if axis == "dp" else x for k, x in good.items()}
        parallel = autopar.parallelize(build(Tied), mesh, example_batch=mine)
        try:
            parallel.train_step(**(cases_of(mine)[name] if dist.get_rank() else mine))
            found.append(f"{name}: accepted")
        except ValueError as error:
            problem = unclear(str(error))
            found += [f"{name}: {problem}"] if problem else []
        except CollectiveError as error:
            if dist.get_rank() or "rank 1 failed: ValueError: batch: " not in str(error):
                found.append(f"{name}: {error}")
        dist.barrier()  # a rank that goes on has no error any more
    return found


ONE = ("tokens: a set", "tokens: numpy", "tokens: meta", "labels: sparse", "labels: fewer rows", "tokens: turned")
ALONE = (*ONE, "tokens: a list", "labels: missing", "an extra tensor", "tokens: a number", "tokens: torch.int32")


@pytest.mark.parametrize(
    "axis, whole", [("dp", False), *(pytest.param(axis, True, marks=pytest.mark.full) for axis in ("dp", "tp"))]
)
def test_both_ranks_are_given_what_is_wrong(axis: str, whole: bool) -> None:
    count, found = run_ranks(2, judged_alike, axis, whole, timeout=400)[0]
    assert count >= (100 if whole else 50) and not found, f"{count} batches\n" + "\n".join(found)


@pytest.mark.parametrize("axis, what", [("dp", ALONE), ("tp", (*ALONE, "tokens: flipped", "labels: zeros"))])
def test_one_rank_is_given_what_is_wrong(axis: str, what: tuple[str, ...]) -> None:
    found = run_ranks(2, given_to_one, axis, what, timeout=400)
    assert not any(found), found


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.full)])
def test_batches(whole: bool) -> None:
    count, found = run_ranks(1, judged, whole, timeout=400)[0]
    assert count >= (200 if whole else 100) and not found, f"{count} batches\n" + "\n".join(found)
