"""The code that Inductor makes of a step graph: collectives start and are waited for where the graph says so."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

import autopar
from autopar.runtime.exec.lowering import bind
from autopar.runtime.mesh.process_groups import Groups
from tests.cuda import fake_gpu as fake_gpu  # registers the backend
from tests.runtime.test_bind import aten, graph_of, raw

CALLS = {"all_gather_into_tensor": "gather", "all_reduce_": "reduce", "reduce_scatter_tensor": "scatter"}


class Made(Exception):
    """The code is there; to compile it would take longer."""


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
    yield Groups(autopar.init_mesh("cpu", tp=2))
    dist.destroy_process_group()


def calls(groups: Groups, shapes: list[tuple[int, ...]], build: Callable[..., Any]) -> str:
    """Collectives, waits and products in the order of the code."""

    def stop(code: str) -> None:
        raise Made(code)

    saved = patch("torch._inductor.graph.GraphLowering.save_output_code", staticmethod(stop))
    with saved, pytest.raises(Exception) as made:
        bind(graph_of(shapes, build), groups, "inductor")
    code = str(made.value)
    found = re.findall(r"(?:ops\._c10d_functional|extern_kernels)\.(\w+)(?:\.default)?\(", code)
    return " ".join(CALLS.get(name, name.removesuffix("_tensor")) for name in found)


def layer(call: Any, x: Any, a: Any, b: Any, p: Any) -> list[Any]:
    """A gather for later, a sum that a product does not need, and what could be fused across both."""
    gathered = call(raw.all_gather.default, p, 0, [], "tp", 2)
    early = call(aten.relu.default, x)
    total = call(raw.all_reduce.default, call(aten.mm.default, early, a), "tp", "sum")
    other = call(aten.sum.dim_IntList, call(aten.mm.default, b, a), [1], True)
    third = call(aten.mm.default, b, b)
    both = call(aten.add.Tensor, total, other)
    return [call(aten.mm.default, both, gathered), call(aten.mul.Tensor, early, both), third]


def gradients(call: Any, *values: Any) -> list[Any]:
    """Each leaves at the end."""
    pairs = itertools.pairwise(values)
    return [call(raw.reduce_scatter.default, call(aten.mm.default, x, y), 0, [], "tp", 2) for x, y in pairs]


def shared(call: Any, x: Any, a: Any, p: Any) -> list[Any]:
    """Two products of what a value is made into before and behind a wait: one kernel for both would wait for it."""
    gathered = call(raw.all_gather.default, p, 0, [], "tp", 2)
    early = call(aten.mm.default, call(aten.relu.default, x), a)
    return [early, call(aten.mul.Tensor, x, gathered)]


Shapes = list[tuple[int, ...]]
CASES: dict[str, tuple[Shapes, Callable[..., Any], str]] = {
    "what is needed early is not fused with what waits": ([(8, 8), (8, 8), (4, 8)], shared, "gather mm wait"),
    "products run while a collective is on its way": (
        [(8, 8), (8, 8), (8, 8), (4, 8)],
        layer,
        "gather mm reduce mm mm wait wait mm",
    ),
    "reduce-scatters end while others are on their way": (
        [(8, 8)] * 6,
        gradients,
        "mm scatter mm scatter mm scatter wait mm scatter wait mm scatter wait wait wait",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_order(groups: Groups, name: str) -> None:
    shapes, build, expected = CASES[name]
    assert calls(groups, shapes, build) == expected
