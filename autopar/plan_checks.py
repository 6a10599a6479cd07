"""What a plan must satisfy before anybody acts on it: alone when it is read or changed, then against its graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from torch.fx import GraphModule

from autopar.graph import global_shape, placeholders
from autopar.placement import Invariant, Partial, Placement, Shard, check_shard, local_shape

if TYPE_CHECKING:
    from autopar.plan import Plan


def check_plan(plan: Plan) -> None:
    """Axes are axes of the mesh; parameters and inputs are stored whole or cut. Raises ValueError.

    Of the four placements two are no way to store a value: Replicate says that each rank has a gradient of its own,
    Partial that a sum is pending. Nobody would add them up.
    """
    for name, axis, stored in _stored(plan):
        if axis not in plan.mesh.sizes and axis != "mb":
            raise ValueError(f"plan: {name}: no axis {axis!r} in the mesh {plan.mesh}; make a plan for this mesh")
        if axis == "pp":
            raise ValueError(f"plan: {name}: nothing is cut over 'pp', its ranks hold different layers; leave it out")
        if not isinstance(stored, (Invariant, Shard)):
            raise ValueError(
                f"plan: {name} is stored as {stored} on axis {axis!r}, values are stored whole (I) or cut (S); "
                f"use I: what a rank computes with it follows from that"
            )
    for name, axes in plan.parameters.items():
        if any(isinstance(p.used, Partial) for p in axes.values()):
            raise ValueError(
                f"plan: {name} is used as P, a pending sum; use R, or the placement that it is stored with"
            )
        if isinstance(axes["mb"].stored if "mb" in axes else None, Shard):
            raise ValueError(f"plan: {name} is cut on axis 'mb': micro-batches cut the batch, no parameter; use I")
    _check_parts(plan)


def _stored(plan: Plan) -> Iterator[tuple[str, str, Placement]]:
    """(what, axis, placement) of everything that a plan stores."""
    for name, axes in plan.parameters.items():
        yield from ((f"parameter {name}", axis, p.stored) for axis, p in axes.items())
    for name, placed in plan.inputs.items():
        yield from ((f"input {name}", axis, p) for axis, p in placed.items())
    for name, p in plan.slices.items():
        yield f"slice {name}", "tp", p
    for stream in plan.streams:
        yield f"stream {stream.node}", stream.axis, Shard(max(stream.dim, 0))


def _check_parts(plan: Plan) -> None:
    """Streams, and decisions for axes that a mesh may lack: attention over cp, stages over pp."""
    for stream in plan.streams:
        if stream.dim < 0:
            raise ValueError(f"plan: stream {stream.node}: dims count from 0, found {stream.dim}; use an existing dim")
    if plan.attention and plan.mesh.size("cp") == 1:
        name = next(iter(plan.attention))
        raise ValueError(f"plan: attention {name}: no axis 'cp' in the mesh {plan.mesh}; make a plan for this mesh")
    pipeline = plan.pipeline
    if pipeline is None:
        return
    if plan.mesh.size("pp") == 1:
        raise ValueError(f"plan: a pipeline needs an axis 'pp', found the mesh {plan.mesh}; make a plan for this mesh")
    for name, parts in pipeline.holders.items():
        if not parts or not all(0 <= part < pipeline.parts for part in parts):
            raise ValueError(
                f"plan: {name} is held by the parts {list(parts)} of a pipeline, it has 0..{pipeline.parts - 1}; "
                "make a plan for this model"
            )


def check_fits(plan: Plan, gm: GraphModule) -> None:
    """Names are those of a graph's parameters, dims exist, blocks sum up and divide. Raises ValueError.

    Inputs are checked where the graph has them: a plan serves batches with others, too.
    """
    nodes = {n.name: n for n in placeholders(gm)}
    specs = [s for s in gm.meta["signature"].inputs if s.node in nodes]
    parameters = {s.name: global_shape(nodes[s.node]) for s in specs if s.kind == "parameter"}
    inputs = {s.name: global_shape(nodes[s.node]) for s in specs if s.kind == "input"}
    holders = plan.pipeline.holders if plan.pipeline is not None else {}
    for name in (*plan.parameters, *holders):
        if name not in parameters:
            known = ", ".join(list(parameters)[:6])
            raise ValueError(f"plan: no parameter {name!r} in this model; it has {known}, ...")
    for name in plan.overrides:
        if name not in parameters and name not in plan.inputs and name not in inputs:
            raise ValueError(
                f"plan: an override of {name!r}, which is no parameter or input of this model; leave it out"
            )
    for name, dim in plan.batch_dims.items():
        if dim is not None and name in inputs and not -len(inputs[name]) <= dim < len(inputs[name]):
            raise ValueError(
                f"plan: input {name} is cut as S({dim}) on axis 'dp', it has shape {tuple(inputs[name])}; use an "
                "existing dim"
            )
    for name, axes in plan.parameters.items():
        _check_cuts(plan, f"parameter {name}", parameters[name], {a: p.stored for a, p in axes.items()})
    for name, placed in plan.inputs.items():
        if name in inputs:
            _check_cuts(plan, f"input {name}", inputs[name], placed)


def _check_cuts(plan: Plan, name: str, shape: tuple[int, ...], placements: Mapping[str, Placement]) -> None:
    """Each axis cuts what the axes before it left."""
    mesh, left = plan.mesh.with_micro_batches(plan.options.micro_batches), shape
    for axis, pieces in mesh.cut_order.items():
        p = placements.get(axis)
        if not isinstance(p, Shard):
            continue
        if p.dim >= len(shape):
            raise ValueError(
                f"plan: {name} is cut as {p} on axis {axis!r}, it has shape {tuple(shape)}; use an existing dim"
            )
        try:
            check_shard(left[p.dim], p, pieces)
        except ValueError as error:
            why = str(error).removeprefix("placement: ")
            raise ValueError(
                f"plan: {name} of shape {tuple(shape)} on axis {axis!r}: {why}; cut it otherwise, or leave it whole (I)"
            ) from None
        left = local_shape(left, p, pieces)
