"""Compiles a lowered step graph with Inductor; collectives are functional ones.

    pending = start(x); y = mm(a, b); z = finish(pending)
        -->
    buf0 = all_gather(x); buf1 = mm(a, b); buf2 = wait_tensor(buf0)

The generated code keeps starts and waits in the order of the graph. Inductor by itself would put each wait right after
its collective, to save memory; move a wait ahead by fusing its user into an early kernel; and fuse values that are
needed early with kernels that wait. Layout changes around a collective are ordinary operators, which Inductor fuses
with their neighbours.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._inductor import config, custom_graph_pass
from torch._inductor.choices import InductorChoices
from torch._inductor.comms import contains_wait
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

aten = torch.ops.aten
functional = torch.ops._c10d_functional


class AxisGroups(Protocol):
    """Process groups by axis name."""

    def size(self, axis: str) -> int: ...
    def index(self, axis: str) -> int: ...
    def group(self, axis: str) -> dist.ProcessGroup: ...


def _scheduler_pass() -> type:
    """Base class of a scheduler pass. Before 2.13 any callable will do; since then Inductor uses the ``uuid`` of this
    class in the key of its cache, and does not cache with other passes."""
    return getattr(custom_graph_pass, "CustomSchedulerPass", object)


class KeepOrder(_scheduler_pass()):  # type: ignore[misc]
    """Orders kernels as in the graph, as far as dependencies allow: of those that are ready, the first in the graph
    runs next. So no wait moves ahead of earlier nodes."""

    def __call__(self, nodes: list[Any]) -> list[Any]:
        import networkx as nx  # slow to import

        made_by = {name: node for node in nodes for name in node.get_buffer_names()}
        takes = nx.DiGraph()
        takes.add_nodes_from((node, {"place": (node.min_order, i)}) for i, node in enumerate(nodes))
        for node in nodes:
            given = {made_by[dep.name] for dep in node.unmet_dependencies if dep.name in made_by} - {node}
            takes.add_edges_from((maker, node) for maker in given)
        return list(nx.lexicographical_topological_sort(takes, lambda node: takes.nodes[node]["place"]))

    def uuid(self) -> str:
        """For Inductor's cache of compiled graphs."""
        return "autopar: in the order of the graph, 1"


class WaitLate(InductorChoices):
    """Prevents fusions that would make a value needed early wait for a collective."""

    @staticmethod
    def can_fuse(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        may: bool = InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score)
        return may and not (_would_wait(scheduler, node1, node2) or _would_wait(scheduler, node2, node1))

    def uuid(self) -> str:
        """For Inductor's cache of compiled graphs."""
        return "autopar: waits late, 1"


def _would_wait(scheduler: Any, early: Any, late: Any) -> bool:
    """Whether ``late`` waits for a collective that ``early`` and one of its other users need not wait for."""
    more = late.ancestors - early.ancestors
    if not any(contains_wait(scheduler.name_to_fused_node[name]) for name in more):
        return False
    fused = {node.get_name() for node in late.get_nodes()}
    users = (user for buffer in early.get_outputs() for user in buffer.users if not user.is_weak)
    return any(user.get_name() not in fused for user in users)


def _no_own_overlap() -> dict[str, bool]:
    """Config that stops Inductor from sinking waits after all passes, which it does since 2.14."""
    known = hasattr(getattr(config, "aten_distributed_optimizations", None), "enable_simple_overlap")
    return {"aten_distributed_optimizations.enable_simple_overlap": False} if known else {}


ORDERED = {
    **_no_own_overlap(),
    "reorder_for_peak_memory": False,
    "_post_fusion_custom_pass": KeepOrder(),
    "inductor_choices_class": WaitLate,  # for the key of its cache; the handler has the effect
}


def compile_step(
    gm: GraphModule,
    device: torch.device,
    given: Sequence[Any] = (),
    any_strides: Collection[int] = (),
    fused: Mapping[Any, Callable[..., Any]] = MappingProxyType({}),
) -> tuple[Callable[[list[Any]], tuple[Any, ...]], list[Any]]:
    """(compiled code of a lowered step graph, fake values of its results). The code takes one list of inputs and
    empties it.

    Sizes, strides and dtypes of inputs are those of ``given``, the fake results of other graphs, and for None those of
    ``meta["val"]``. The latter describe the CPU, where statistics of a bfloat16 layer norm are bfloat16 (float32 on
    GPUs), and compiled code relies on them. The code is compiled for ``device``.

    ``any_strides``: results whose strides Inductor may choose, as it pads long rows on GPUs; the fake values have the
    strides that it chose. The others have those of the graph. ``fused``: what is traced in place of operators.
    """
    _accept_any_strides(gm)
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    known = given or [None] * len(placeholders)
    values = [n.meta["val"] if value is None else value for n, value in zip(placeholders, known, strict=True)]
    mode = next((v.fake_mode for v in values if hasattr(v, "fake_mode")), None) or FakeTensorMode()
    fakes = [_fake_input(v, mode, device) for v in values]
    with mode, torch.no_grad():
        flat = make_fx(
            lambda *inputs: gm.forward(list(inputs)),
            decomposition_table={**select_decomp_table(), **fused},
            tracing_mode="real",
        )(*fakes)
        with V.set_fake_mode(mode), _in_order() if _waits(flat) else nullcontext():
            joint_graph_passes(flat)
            end = flat.graph.output_node()
            returned: Any = end.args[0]
            end.meta["user_visible_output_idxs"] = [i for i in range(len(returned)) if i not in any_strides]
            values = [n.meta.get("val") if isinstance(n, Node) else n for n in returned]
            with tracing(TracingContext(mode)), TracingContext.report_output_strides() as chosen:
                compiled = compile_fx_inner(flat, fakes)
        made = [_strided(*found) for found in itertools.zip_longest(values, chosen or ())]
    compiled_call: Any = compiled

    def run(inputs: list[Any]) -> tuple[Any, ...]:
        with torch.no_grad():
            return tuple(compiled_call(inputs))

    run.__name__ = "compiled"
    return run, made


def _waits(gm: GraphModule) -> bool:
    return bool(gm.graph.find_nodes(op="call_function", target=functional.wait_tensor.default))


@contextmanager
def _in_order() -> Iterator[None]:
    with V.set_choices_handler(WaitLate()), config.patch(ORDERED):
        yield


def _accept_any_strides(gm: GraphModule) -> None:
    """Replace what only works on the strides of ``meta["val"]``: view -> reshape, as_strided(x) -> as_strided(copy)."""
    for node in gm.graph.nodes:
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
        elif node.target is aten.as_strided.default:
            with gm.graph.inserting_before(node):
                base = gm.graph.call_function(_with_strides, (node.args[0], node.args[0].meta["val"].stride()))
            node.args = (base, *node.args[1:])
    gm.recompile()


def _with_strides(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    return x if x.stride() == strides else x.new_empty_strided(x.shape, strides).copy_(x)


def _strided(value: Any, strides: tuple[int, ...] | None) -> Any:
    """A (fake) value with other strides."""
    if strides is None or value.stride() == strides:
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)


def _fake_input(value: Any, mode: FakeTensorMode, device: torch.device) -> Any:
    if not isinstance(value, Tensor):
        return value
    with mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


class Functional:
    """Functional collectives over axes; results are available after ``wait``."""

    def __init__(self, groups: AxisGroups):
        self.groups = groups

    def all_reduce(self, x: Tensor, axis: str, op: str) -> Tensor:
        return _tensor(functional.all_reduce(x, op, self._name(axis)))

    def all_gather(self, x: Tensor, axis: str) -> Tensor:
        """[n0, ..] -> [ranks * n0, ..]"""
        return _tensor(functional.all_gather_into_tensor(x, self.groups.size(axis), self._name(axis)))

    def reduce_scatter(self, x: Tensor, axis: str) -> Tensor:
        """[ranks * n0, ..] -> [n0, ..]"""
        return _tensor(functional.reduce_scatter_tensor(x, "sum", self.groups.size(axis), self._name(axis)))

    def all_to_all(self, x: Tensor, received: Sequence[int], sent: Sequence[int], axis: str) -> Tensor:
        """All-to-all: rows by destination rank -> rows by source rank."""
        return _tensor(functional.all_to_all_single(x, list(received), list(sent), self._name(axis)))

    def wait(self, x: Tensor) -> Tensor:
        """Wait for the result of a collective."""
        return _tensor(functional.wait_tensor(x))

    def _name(self, axis: str) -> str:
        return str(self.groups.group(axis).group_name)


def _tensor(x: Any) -> Tensor:
    assert isinstance(x, Tensor)
    return x
