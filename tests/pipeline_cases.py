"""Whole models as pipelines on real ranks, compiled once.

The parent captures a model once, compiles it for every mesh, and forks the ranks afterwards: they inherit the compiled
graphs, run every schedule on them, and compare loss and gradients with one process.

    results = run_case(Case("llama", Mesh.of(pp=2), Options(micro_batches=4), parts=2), ["gpipe", "1f1b"])
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from autopar.capture import capture
from autopar.compile.model import compile_graph
from autopar.ir.graph import copy_graph
from autopar.ir.mesh import Mesh
from autopar.ir.placement import nested_piece
from autopar.models.tiny import TINY
from autopar.options import Options
from autopar.planner.step_order import make_order
from autopar.runtime.comm import Ledger
from autopar.runtime.executor import Executor
from autopar.runtime.groups import Groups, init_mesh
from autopar.steps.graphs import Compiled
from tests.harness import eager
from tests.ranks import close_pools, run_ranks


@dataclass(frozen=True)
class Case:
    """A model on a mesh, cut for ``chunks`` parts per rank."""

    model: str
    mesh: Mesh
    options: Options
    rows: int = 8
    tokens: int = 16


@dataclass
class Captured:
    """A model, its batch, its graph (to be copied), and what one process gets."""

    model: nn.Module
    batch: dict[str, Any]
    graph: GraphModule
    loss: float
    gradients: dict[str, Tensor | None]


@dataclass
class Found:
    """What one rank found under one schedule: largest errors, gradients that are missing or too many, and counts."""

    loss: float
    gradient: float
    odd: list[str]
    live: int
    saved: int
    traffic: Ledger


@functools.cache
def captured(name: str, rows: int, tokens: int) -> Captured:
    """Capture a tiny model in float64."""
    model = TINY[name].build(dtype=torch.float64)
    batch = TINY[name].batch(rows, tokens)
    graph = capture(model, batch, exact=True)
    return Captured(model, batch, graph, *eager(model, batch))


@functools.cache
def compiled(case: Case) -> Compiled:
    """Compile a case in this process."""
    graph = copy_graph(captured(case.model, case.rows, case.tokens).graph)
    return compile_graph(graph, case.mesh, case.options, outputs=())


def run_case(case: Case, schedules: list[str], timeout: float = 120.0) -> dict[str, list[Found]]:
    """Schedule -> what each rank found. All schedules must cut the model into the parts of the case."""
    compiled(case)  # before the fork, so that the ranks have it
    if not _inherited(case):
        close_pools()
        _FORKED.clear()
    _FORKED.add(case)
    found = run_ranks(case.mesh.world_size, run_schedules, case, schedules, timeout=timeout)
    return {name: [of_rank[name] for of_rank in found] for name in schedules}


_FORKED: set[Case] = set()


def prepare(cases: list[Case]) -> None:
    """Compile many cases before the ranks are forked, so that one pool serves them all."""
    for case in cases:
        compiled(case)
    close_pools()
    _FORKED.clear()
    _FORKED.update(cases)


def _inherited(case: Case) -> bool:
    return case in _FORKED


def run_schedules(case: Case, schedules: list[str]) -> dict[str, Found]:
    """On a rank."""
    groups = Groups(init_mesh(**case.mesh.sizes))
    known, made = captured(case.model, case.rows, case.tokens), compiled(case)
    return {name: _run(with_schedule(made, name), known, groups) for name in schedules}


def with_schedule(made: Compiled, name: str) -> Compiled:
    """The same parts in the order of another schedule."""
    assert made.plan.pipeline is not None
    plan = dataclasses.replace(made.plan, pipeline=dataclasses.replace(made.plan.pipeline, schedule=name))
    order = make_order(plan, made.pipeline.parts, made.pipeline.hops)
    return dataclasses.replace(made, plan=plan, pipeline=dataclasses.replace(made.pipeline, order=order))


def values_of(made: Compiled, known: Any, groups: Groups, seed: int = 0) -> dict[str, Tensor]:
    """Parameters, buffers and inputs of this rank; ``known`` has a model and a batch."""
    cut_order, here = groups.mesh.cut_order, groups.coordinate
    values = dict(known.model.named_buffers(remove_duplicate=False)) | made.local.meta.get("constants", {})
    parameters = dict(known.model.named_parameters(remove_duplicate=False))
    for spec in made.parameters:
        values[spec.name] = nested_piece(parameters[spec.name].detach(), spec.placements, cut_order, here).clone()
    values = {n: x.double() if x.dtype == torch.float32 else x for n, x in values.items()}
    for name, x in known.batch.items():
        placed = {axis: p for axis, p in made.plan.inputs.get(name, {}).items() if axis != "mb"}
        values[name] = nested_piece(x, placed, cut_order, here)
    seeds = [spec.name for spec in made.local.meta["signature"].inputs if spec.kind == "seed"]
    return values | dict.fromkeys(seeds, torch.tensor(seed))


def holds(executor: Executor, name: str, here: dict[str, int]) -> bool:
    """Whether a parameter's stage runs on this rank."""
    order, parts = executor.order, executor.compiled.pipeline.parts
    held = [k for k, part in enumerate(parts) if name in part.parameters]
    return any(order.rank_of[chain[k]] == here.get("pp", 0) for chain in order.chains for k in held)


def _run(made: Compiled, known: Captured, groups: Groups) -> Found:
    executor = Executor(made, groups, measure=True)
    mesh, here = groups.mesh, groups.coordinate
    specs = {s.name: s for s in made.parameters}
    result = executor.train_step(values_of(made, known, groups))
    names = {s.node: s.name for s in made.local.meta["signature"].inputs}
    errors, held = [0.0], set()
    for node, gradient in result.gradients.items():
        spec = specs[names[node]]
        held |= {spec.name, *spec.aliases}
        whole = next(
            (known.gradients[n] for n in (spec.name, *spec.aliases) if known.gradients.get(n) is not None), None
        )
        expected = torch.zeros(spec.shape) if whole is None else whole
        errors.append(float((gradient - nested_piece(expected, spec.placements, mesh.cut_order, here)).abs().max()))
    mine = {n for s in specs.values() if holds(executor, s.name, here) for n in (s.name, *s.aliases)}
    odd = [n for n, g in known.gradients.items() if g is not None and n in mine and n not in held]
    loss = abs(sum(float(x) for x in result.losses) - known.loss)
    return Found(loss, max(errors), odd, executor.peaks.live, executor.peaks.saved, dict(executor.traffic))
