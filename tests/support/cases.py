"""A subject on a mesh with options, compiled once per process: the simulator and real ranks run the same object.

    cell = Cell("llama", Mesh.of(dp=2, tp=2), Options(zero=3))
    check(simulated(cell))                          all ranks in this process
    check(called(cell))                             real ranks: what users call, given the compiled object
    ran(cell, ["gpipe", "1f1b"], ["ring"])          real ranks: every schedule and algorithm on the compiled object

Ranks are forked after compiling and inherit what was compiled. A pool that is older than a cell is forked anew, after
all cells of the file have been compiled that as many ranks will run (`expect`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import GraphModule

import autopar
from autopar import api
from autopar.adapters.operators import argument_defaults
from autopar.capture.front_end import as_captured
from autopar.compile.model import compile_graph
from autopar.ir.batch import part_of_batch, without_static_inputs
from autopar.ir.mesh import Mesh
from autopar.ir.placement import nested_piece
from autopar.ir.signature import ParameterSpec
from autopar.ir.traffic import Ledger
from autopar.options import Options
from autopar.planner.pipeline.step_order import make_order, owners
from autopar.runtime.comm.context_parallel_comm import OPERATORS
from autopar.runtime.exec import executor as executors
from autopar.runtime.exec.executor import Executor
from autopar.runtime.exec.lowering import Lowered, bind
from autopar.runtime.mesh.process_groups import Groups, init_mesh
from autopar.steps.graphs import Compiled
from autopar.steps.of_rank import backwards
from autopar.testing.harness import MeshRun
from autopar.testing.reference import LIMIT, Errors, compare_step
from tests.support.peaks import measure
from tests.support.ranks import retire_older_than, run_ranks
from tests.support.subjects import SEED, subject

DEFAULTS = Options()


@dataclass(frozen=True)
class Cell:
    """Equal cells are compiled once."""

    name: str
    mesh: Mesh
    options: Options = DEFAULTS

    def __str__(self) -> str:
        names = [f.name for f in dataclasses.fields(Options)]
        given = {name: getattr(self.options, name) for name in names}
        changed = (f"{k}={v}" for k, v in given.items() if v != getattr(DEFAULTS, k))
        return " ".join([self.name, str(self.mesh), *changed])


# --- compiling ----------------------------------------------------------------------------------------------

COMPILED: dict[Cell, tuple[Compiled, float]] = {}  # and when that was done
_EXPECTED: dict[int, dict[Cell, None]] = {}  # by the number of ranks


def compile_cell(cell: Cell) -> Compiled:
    """In this process. Raises ValueError as `compile_graph` does."""
    return compile_graph(subject(cell.name).graph(), cell.mesh, cell.options, outputs=())


def compiled(cell: Cell) -> Compiled:
    """What ranks inherit. Nobody may change it."""
    if cell not in COMPILED:
        COMPILED[cell] = compile_cell(cell), time.monotonic()
    return COMPILED[cell][0]


def expect(cells: Iterable[Cell]) -> None:
    """Cells that ranks will run, no others: to be compiled before so many ranks are forked. Others are forgotten."""
    COMPILED.clear()
    _EXPECTED.clear()
    for cell in cells:
        _EXPECTED.setdefault(cell.mesh.world_size, {})[cell] = None


def on_ranks(cell: Cell, body: Any, *args: Any) -> list[Any]:
    """Results of ``body(cell, *args)`` on ranks that have inherited the cell."""
    count = cell.mesh.world_size
    for one in _EXPECTED.pop(count, ()):
        with contextlib.suppress(Exception):  # its own test will say so
            compiled(one)
    compiled(cell)
    retire_older_than(count, COMPILED[cell][1])
    return run_ranks(count, body, cell, *args, timeout=120.0)


def inherited(cell: Cell) -> Compiled:
    """On a rank: what the test process compiled."""
    assert cell in COMPILED, f"{cell} was not compiled before the ranks were forked"
    return COMPILED[cell][0]


def step_graphs(made: Compiled) -> Iterator[GraphModule]:
    """All that run once per microbatch."""
    for part in made.pipeline.parts:
        yield from (step.graph for step in (part.forward, *backwards(part)))


# --- running ------------------------------------------------------------------------------------------------


def check(found: Sequence[Errors]) -> None:
    """Assert that loss and every gradient are those of one process, on all ranks."""
    bad = [f"rank {i}: {errors}" for i, errors in enumerate(found) if not errors.worst < LIMIT]
    assert not bad, "\n".join(bad)


def simulated(cell: Cell) -> list[Errors]:
    """A step of all ranks in this process. (A mesh without pp.)"""
    known = subject(cell.name)
    return MeshRun(compiled(cell), known.model, known.batch, cell.mesh, SEED).errors(known.expected)


def called(cell: Cell) -> list[Errors]:
    """A step by what users call, on real ranks: init_mesh, parallelize, train_step, full_gradients."""
    return on_ranks(cell, _called)


def _called(cell: Cell) -> Errors:
    known = subject(cell.name)
    mesh = autopar.init_mesh("cpu", 30.0, **cell.mesh.sizes)
    at = cell.mesh.dp_rank_and_size(cell.mesh.coordinate(dist.get_rank()))
    sizes = cell.mesh.data_size, at, cell.mesh.size("ep"), cell.options.microbatches
    part = part_of_batch(known.batch, dict.fromkeys(known.batch, 0), *sizes)
    chosen = {f.name: getattr(cell.options, f.name) for f in dataclasses.fields(Options)}
    with _given(cell):
        parallel = autopar.parallelize(known.model, mesh, lift_to_float64=True, example_batch=part, **chosen)
        loss = parallel.train_step(**part)
    found = parallel.full_gradients()
    more = [n for n in found if known.expected.gradients.get(n) is None]
    assert not more, f"one process has no gradient of {more}"
    total = sum(float(x) for x in (loss if isinstance(loss, tuple) else (loss,)))
    return compare_step(total, found, known.expected, parallel.parameter_specs, lambda spec, whole: whole)


@contextlib.contextmanager
def _given(cell: Cell) -> Iterator[None]:
    """Within: parallelize takes what the parent compiled, if it asks for just that."""
    made, known = inherited(cell), subject(cell.name)
    whole = without_static_inputs(as_captured(known.model, known.batch, cell.options.static_inputs))

    def plan_model(model: nn.Module, batch: Any, mesh: Mesh, options: Options, fixed: Any = None, **_: Any) -> Any:
        assert mesh == made.plan.mesh and options == made.plan.options
        return made.plan, made.parameters

    def compile_model(model: nn.Module, batch: Any, mesh: Mesh, options: Options, **facts: Any) -> Compiled:
        batch = without_static_inputs(batch)
        assert {k: (v.shape, v.dtype) for k, v in batch.items()} == {k: (v.shape, v.dtype) for k, v in whole.items()}
        assert facts["train"] and facts["lift_to_float64"] and facts["outputs"] == ()
        return made

    before = api.stored_plan, api.stored_step
    api.stored_plan, api.stored_step = plan_model, compile_model  # type: ignore[assignment]
    try:
        yield
    finally:
        api.stored_plan, api.stored_step = before


@dataclass(frozen=True)
class Found:
    """What one rank found in one step: errors, and what it kept and sent."""

    errors: Errors
    live: int
    saved: int
    traffic: Ledger


Way = tuple[str, str]  # schedule and attention; "" for what the cell was compiled with


def ran(cell: Cell, schedules: Sequence[str] = ("",), attentions: Sequence[str] = ("",)) -> dict[Way, list[Found]]:
    """A step of the executor on real ranks for every schedule and every attention: what each rank found. All schedules
    must cut the model into the parts of the cell."""
    ways = [(schedule, attention) for schedule in schedules for attention in attentions]
    found = on_ranks(cell, _ran, ways)
    return {way: [of_rank[i] for of_rank in found] for i, way in enumerate(ways)}


def check_ran(found: dict[Way, list[Found]]) -> None:
    """`check` every step."""
    for way, of_ranks in found.items():
        bad = [f"{way}, rank {i}: {one.errors}" for i, one in enumerate(of_ranks) if not one.errors.worst < LIMIT]
        assert not bad, "\n".join(bad)


def _ran(cell: Cell, ways: list[Way]) -> list[Found]:
    groups, out = Groups(init_mesh("cpu", 30.0, **cell.mesh.sizes)), []
    with bound_once():
        for schedule, attention in ways:
            made = with_schedule(inherited(cell), schedule) if schedule else inherited(cell)
            with renamed(made, attention) as calls:
                assert calls or not attention, f"{cell} has no attention over ranks"
                out.append(_step(made, cell.name, groups))
    return out


def _step(made: Compiled, name: str, groups: Groups) -> Found:
    known, executor = subject(name), Executor(made, groups)
    peaks = measure(executor)
    result = executor.run_step(values_of(made, name, groups))
    nodes = {s.node: s.name for s in made.local.meta["signature"].inputs}
    gradients = {nodes[node]: g for node, g in result.gradients.items()}

    def cut(spec: ParameterSpec, whole: Tensor) -> Tensor:
        return nested_piece(whole, spec.placements, groups.mesh.cut_order, groups.coordinate)

    held = {n for s in made.parameters if holds(executor, s.name, groups) for n in (s.name, *s.aliases)}
    loss = sum(float(x) for x in result.losses)
    errors = compare_step(loss, gradients, known.expected, made.parameters, cut, held)
    return Found(errors, peaks.live, peaks.saved, dict(executor.traffic))


def values_of(made: Compiled, name: str, groups: Groups) -> dict[str, Tensor]:
    """Parameters, buffers and inputs of this rank."""
    cut_order, here, known = groups.mesh.cut_order, groups.coordinate, subject(name)
    values = dict(known.model.named_buffers(remove_duplicate=False)) | made.local.meta.get("constants", {})
    parameters = dict(known.model.named_parameters(remove_duplicate=False))
    for spec in made.parameters:
        values[spec.name] = nested_piece(parameters[spec.name].detach(), spec.placements, cut_order, here).clone()
    values = {n: x.double() if x.dtype == torch.float32 else x for n, x in values.items()}
    for key, x in known.batch.items():
        placed = {axis: p for axis, p in made.plan.inputs.get(key, {}).items() if axis != "mb"}
        values[key] = nested_piece(x, placed, cut_order, here)
    seeds = [spec.name for spec in made.local.meta["signature"].inputs if spec.kind == "seed"]
    return values | dict.fromkeys(seeds, torch.tensor(SEED))


def holds(executor: Executor, name: str, groups: Groups) -> bool:
    """Whether a parameter's stage runs on this rank."""
    order, parts = executor.order, executor.compiled.pipeline.parts
    held = [k for k, part in enumerate(parts) if name in part.parameters]
    return any(order.rank_of[chain[k]] == groups.coordinate.get("pp", 0) for chain in order.chains for k in held)


# --- other orders, other algorithms, on the same graphs ------------------------------------------------------


def with_schedule(made: Compiled, name: str) -> Compiled:
    """The same parts in the order of another schedule."""
    assert made.plan.pipeline is not None
    plan = dataclasses.replace(made.plan, pipeline=dataclasses.replace(made.plan.pipeline, schedule=name))
    order, ranks = make_order(plan, made.pipeline.parts, made.pipeline.edges), owners(plan)
    specs = tuple(dataclasses.replace(spec, ranks=ranks[spec.name]) for spec in made.parameters)
    pipeline = dataclasses.replace(made.pipeline, order=order)
    return dataclasses.replace(made, plan=plan, pipeline=pipeline, parameters=specs)


@contextlib.contextmanager
def bound_once() -> Iterator[None]:
    """Within: all executors of a mesh share what is bound of a graph, unless it has attention over ranks, which counts
    what it sends and may be renamed."""
    known: dict[tuple[int, bool], tuple[GraphModule, Lowered]] = {}  # by id, and alive

    def once(gm: GraphModule, *args: Any, first: bool = False) -> Lowered:
        if any(node.target in OPERATORS for node in gm.graph.nodes):
            return bind(gm, *args, first=first)
        key = id(gm), first
        if key not in known:
            known[key] = gm, bind(gm, *args, first=first)
        return known[key][1]

    executors.bind = once  # type: ignore[assignment]
    try:
        yield
    finally:
        executors.bind = bind


@contextlib.contextmanager
def renamed(made: Compiled, attention: str) -> Iterator[int]:
    """Within: every attention over ranks runs other algorithms, unless it is "". Gives how many calls there are.

    Algorithms that exchange no heads differ by nothing but their names in the graphs of one layout."""
    forward, plus, backward = attention.partition("+")
    names = {"forward": forward, "backward": backward if plus else forward} if attention else {}
    nodes = [n for graph in step_graphs(made) for n in graph.graph.nodes if n.target in OPERATORS]
    before = [node.args for node in nodes]
    for node in nodes:
        order = list(argument_defaults(node.target))
        node.args = tuple(names.get(name, x) for name, x in zip(order, node.args, strict=True))
    try:
        yield len(nodes)
    finally:
        for node, args in zip(nodes, before, strict=True):
            node.args = args
