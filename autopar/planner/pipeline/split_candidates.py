"""Where a model may be split into stages: the layers of a graph, in order.

A *unit* is a run of main nodes of one repeated block (``model.layers.3``), or of what is between blocks (embedding,
final norm, head). If a model has fewer units than stages, units are its modules, then single nodes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from autopar.ir.custom_backward import glued
from autopar.ir.graph import describe, is_call, layer_of, module_path
from autopar.spelling import did_you_mean


@dataclass
class Unit:
    """Consecutive main nodes that stay in one stage."""

    name: str
    nodes: list[Node] = field(default_factory=list)


LEVELS: tuple[Callable[[Node], str], ...] = (layer_of, module_path, lambda node: node.name)


def units_of(main: Sequence[Node], least: int = 1) -> list[Unit]:
    """The units of a graph's main nodes: the coarsest level with at least ``least`` of them.

    Raises ValueError if even single nodes are too few.
    """
    found: list[Unit] = []
    for level in LEVELS:
        found = units_at(main, level)
        if len(found) >= least:
            return found
    raise ValueError(
        f"pipeline: {least} stages need at least as many layers, found a model of {len(found)} operations; use a "
        "smaller pp axis or fewer virtual stages"
    )


def units_at(main: Sequence[Node], label: Callable[[Node], str]) -> list[Unit]:
    """The units of one of the `LEVELS`."""
    units: list[Unit] = []
    last, together = None, glued(main)
    for node in main:
        name = label(node)
        joined = is_call(node, operator.getitem) or _is_scalar(node) or node in together
        if units and (joined or name == last):
            units[-1].nodes.append(node)
        else:
            units.append(Unit(name, [node]))
            last = name
    counts: dict[str, int] = {}
    for unit in units:  # names of units are unique, so that a plan can say where a stage begins
        name = unit.name or module_path(unit.nodes[0]) or unit.nodes[0].name
        counts[name] = counts.get(name, 0) + 1
        repeated = label is not layer_of or counts[name] > 1
        unit.name = f"{name}#{counts[name]}" if repeated else name
    return units


def _is_scalar(node: Node) -> bool:
    """Scalars, such as sums and quotients of a loss, stay in the unit of the node before them."""
    val = node.meta["val"]
    return isinstance(val, torch.Tensor) and not val.dim()


def resolve(main: Sequence[Node], cuts: Sequence[str]) -> tuple[list[Unit], list[int]]:
    """(units, first unit of each part) for split points of a user or a plan: the unit, or the module, with which each
    part but the first begins. Units are as coarse as the split points allow.

    Raises ValueError for modules without a node, split points inside an operation, and split points out of order.
    """
    _check_known(main, cuts)
    for level in LEVELS:
        units = units_at(main, level)
        try:
            return units, _starts(units, cuts)
        except ValueError as error:
            problem = error
    raise problem


def _check_known(main: Sequence[Node], cuts: Sequence[str]) -> None:
    unknown = set(cuts)
    for level in LEVELS if unknown else ():
        unknown -= {unit.name for unit in units_at(main, level)}
        if not unknown:
            return
    for cut in cuts:
        if cut in unknown and not any(_inside(n, cut) for n in main):
            known = ", ".join(unit.name for unit in units_at(main, layer_of))
            raise ValueError(
                f"pipeline: no operation belongs to the split point {cut!r} (several modules may share one operation); "
                f"layers are {known}{did_you_mean(cut, known.split(', '))}"
            )


def _starts(units: Sequence[Unit], cuts: Sequence[str]) -> list[int]:
    starts = [0]
    names = {unit.name: i for i, unit in enumerate(units)}
    for cut in cuts:
        at = [names[cut]] if cut in names else [i for i, u in enumerate(units) if any(_inside(n, cut) for n in u.nodes)]
        if not at:
            raise ValueError(f"pipeline: no layer begins at {cut!r}")
        first = units[at[0]].nodes[0]
        if cut not in names and not _inside(first, cut):
            raise ValueError(
                f"pipeline: the split point {cut!r} is inside an operation: {describe(first)} comes before it and "
                f"cannot be separated; split at {module_path(first)!r}"
            )
        if at[0] <= starts[-1]:
            raise ValueError(
                "pipeline: split_points must be in the order of the model and leave a layer in every stage, found "
                f"{', '.join(cuts)}"
            )
        starts.append(at[0])
    return starts


def _inside(node: Node, path: str) -> bool:
    found = module_path(node)
    return found == path or found.startswith(path + ".")


def parts_by_node(units: Sequence[Unit], starts: Sequence[int]) -> dict[Node, int]:
    """The part of each main node."""
    out: dict[Node, int] = {}
    for k, start in enumerate(starts):
        end = starts[k + 1] if k + 1 < len(starts) else len(units)
        out |= {node: k for unit in units[start:end] for node in unit.nodes}
    return out
