"""Inductor as a function from a step graph to a compiled callable; collectives become functional ones.

    autopar.all_gather(x, dim, ...)  -->  rows = wait(_c10d_functional.all_gather(x)); permute, reshape

The layout around a collective is made of ordinary operators here, which Inductor fuses with its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx

functional = torch.ops._c10d_functional


class AxisGroups(Protocol):
    """Process groups by axis name, and this rank's device."""

    @property
    def device(self) -> torch.device: ...
    def size(self, axis: str) -> int: ...
    def index(self, axis: str) -> int: ...
    def group(self, axis: str) -> dist.ProcessGroup: ...


Lowering = Callable[..., Tensor]


def compile_step(
    gm: GraphModule, groups: AxisGroups, lowerings: Mapping[Any, Lowering]
) -> Callable[[list[Any]], tuple[Any, ...]]:
    """A step graph, with fake values in ``meta["val"]``, as compiled code called with one list, which it empties. They
    say sizes and dtypes, and where the graph was captured; the code is made for the device of ``groups``.

    ``lowerings``: raw collective -> function of (functional collectives, its tensor and arguments); see `Functional`.
    """
    values = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    mode = next((v.fake_mode for v in values if hasattr(v, "fake_mode")), None) or FakeTensorMode()
    fakes = [_fake_input(v, mode, groups.device) for v in values]
    with mode, torch.no_grad():
        flat = make_fx(
            _Lowering(gm, Functional(groups), lowerings).boxed,
            decomposition_table=select_decomp_table(),
            tracing_mode="real",
        )(*fakes)
        with V.set_fake_mode(mode):
            joint_graph_passes(flat)
            compiled = compile_fx_inner(flat, fakes)
    compiled_call: Any = compiled

    def run(inputs: list[Any]) -> tuple[Any, ...]:
        with torch.no_grad():
            return tuple(compiled_call(inputs))

    run.__name__ = "compiled"
    return run


def _fake_input(value: Any, mode: FakeTensorMode, device: torch.device) -> Any:
    if not isinstance(value, Tensor):
        return value
    with mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


class Functional:
    """Functional collectives over axes, waited for at once: Inductor moves the wait down to the first use."""

    def __init__(self, groups: AxisGroups):
        self.groups = groups

    def all_reduce(self, x: Tensor, axis: str, op: str) -> Tensor:
        return self._wait(functional.all_reduce(x, op, self._name(axis)))

    def all_gather(self, x: Tensor, axis: str) -> Tensor:
        """[n0, ..] -> [ranks * n0, ..]"""
        return self._wait(functional.all_gather_into_tensor(x, self.groups.size(axis), self._name(axis)))

    def reduce_scatter(self, x: Tensor, axis: str) -> Tensor:
        """[ranks * n0, ..] -> [n0, ..]"""
        return self._wait(functional.reduce_scatter_tensor(x, "sum", self.groups.size(axis), self._name(axis)))

    def all_to_all(self, x: Tensor, received: Sequence[int], sent: Sequence[int], axis: str) -> Tensor:
        """Rows by rank -> rows by rank."""
        return self._wait(functional.all_to_all_single(x, list(received), list(sent), self._name(axis)))

    def _name(self, axis: str) -> str:
        return str(self.groups.group(axis).group_name)

    @staticmethod
    def _wait(x: Tensor) -> Tensor:
        waited: Tensor = functional.wait_tensor(x)
        return waited


class _Lowering(Interpreter):
    """Runs a graph with the raw collectives replaced."""

    def __init__(self, gm: GraphModule, collectives: Functional, lowerings: Mapping[Any, Lowering]):
        super().__init__(gm)
        self.collectives, self.lowerings = collectives, lowerings

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in self.lowerings:
            return self.lowerings[target](self.collectives, *args, **kwargs)
        return super().call_function(target, args, kwargs)

    def boxed(self, *inputs: Any) -> Any:
        return self.run(*inputs)
