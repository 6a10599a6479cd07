"""Where a pipeline may be cut: the layers of a local graph, in order.

A *unit* is a run of main nodes of one repeated block (``model.layers.3``), or of what stands between blocks (embedding,
final norm, head). Where a model has fewer units than parts are wanted, units are its modules, then single nodes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from autopar.graph import describe, is_call, layer_of, module_path


@dataclass
class Unit:
    """Consecutive main nodes that no cut separates."""

    name: str
    nodes: list[Node] = field(default_factory=list)


def units_of(main: Sequence[Node], least: int = 1) -> list[Unit]:
    """The units of a graph's main nodes, at least as many as ``least`` if there are so many.

    Raises ValueError where not even single nodes are enough.
    """
    found: list[Unit] = []
    for label in (layer_of, module_path, lambda node: node.name):
        found = _runs(main, label)
        if len(found) >= least:
            return found
    raise ValueError(
        f"pipeline: {least} parts need at least as many layers, found a model of {len(found)} operations; use a "
        "smaller pp axis or fewer chunks"
    )


def _runs(main: Sequence[Node], label: Callable[[Node], str]) -> list[Unit]:
    units: list[Unit] = []
    last = None
    for node in main:
        name = label(node)
        joined = is_call(node, operator.getitem) or _is_scalar(node)
        if units and (joined or name == last):
            units[-1].nodes.append(node)
        else:
            units.append(Unit(name or f"before {describe(node)}", [node]))
            last = name
    return _named(units)


def _is_scalar(node: Node) -> bool:
    """Sums and quotients of a loss stay with what they are made of."""
    val = node.meta["val"]
    return isinstance(val, torch.Tensor) and not val.dim()


def _named(units: list[Unit]) -> list[Unit]:
    """Units outside of any block are called by what they stand between."""
    for i, unit in enumerate(units):
        if unit.name.startswith("before "):
            unit.name = module_path(unit.nodes[0]) or ("head" if i else "embedding")
    return units


def cut_at(units: Sequence[Unit], cuts: Sequence[str], parts: int) -> list[int]:
    """First unit of each part, for the user's cuts: the module with which each further part begins.

    Raises ValueError for a wrong number of cuts, modules that no node belongs to, cuts inside of a unit, and cuts that
    are not in order.
    """
    if len(cuts) != parts - 1:
        raise ValueError(
            f"pipeline: {parts} parts need {parts - 1} cuts, found {len(cuts)}; name the module with which each part but "
            "the first begins"
        )
    starts = [0]
    for cut in cuts:
        at = [i for i, unit in enumerate(units) if any(_inside(n, cut) for n in unit.nodes)]
        if not at:
            names = ", ".join(u.name for u in units[:6])
            raise ValueError(
                f"pipeline: no operation belongs to {cut!r}, where a cut was asked for; layers are {names}, ..."
            )
        first = units[at[0]].nodes[0]
        if not _inside(first, cut):
            raise ValueError(
                f"pipeline: a cut at {cut!r} goes through {units[at[0]].name}: {describe(first)} comes before it and "
                f"belongs to the same operation or layer; cut at {units[at[0]].name!r}"
                + (f" or {units[at[0] + 1].name!r}" if at[0] + 1 < len(units) else "")
            )
        if at[0] <= starts[-1]:
            raise ValueError(f"pipeline: cuts must be in the order of the model, found {', '.join(cuts)}")
        starts.append(at[0])
    return starts


def _inside(node: Node, path: str) -> bool:
    found = module_path(node)
    return found == path or found.startswith(path + ".") or node.name == path


def parts_by_node(units: Sequence[Unit], starts: Sequence[int]) -> dict[Node, int]:
    """The part of each main node."""
    out: dict[Node, int] = {}
    for k, start in enumerate(starts):
        end = starts[k + 1] if k + 1 < len(starts) else len(units)
        out |= {node: k for unit in units[start:end] for node in unit.nodes}
    return out
