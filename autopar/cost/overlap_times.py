"""Seconds of step graphs that exchange tokens with other ranks while they compute, alone or by turns in a cell.

    F    compute, start 1, compute, wait 1, ...      up to each wait for an exchange of tokens one half goes on, then
    BW   compute, start 2, wait 2, compute, ...      the other (`autopar.runtime.exec.overlapped_fb`); exchanges share
    one link

What no exchange of tokens is, other collectives too, takes its time where it stands, as in `autopar.cost.flops`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule, Node

from autopar.cost.flops import node_seconds
from autopar.cost.hardware import Device
from autopar.cost.traffic import Links
from autopar.ir.waits import WaitPlaces, is_started, pauses_at


@dataclass(frozen=True)
class Stretch:
    """``computes`` seconds, and then starts exchanges, (which, seconds) each, or waits for some."""

    computes: float
    started: tuple[tuple[int, float], ...] = ()
    waits: tuple[int, ...] = ()


Stretches = tuple[Stretch, ...]


def stretches_of(gm: GraphModule, axis: str, device: Device, links: Links) -> Stretches:
    """Of a step graph, with experts over an axis."""
    places, found, computes = WaitPlaces(gm), list[Stretch](), 0.0
    numbers: dict[Node, int] = {}

    def wait(collectives: list[Node]) -> None:
        nonlocal computes
        if ours := tuple(numbers[node] for node in collectives if node in numbers):
            found.append(Stretch(computes, waits=ours))
            computes = 0.0

    for node in gm.graph.nodes:
        wait(places.before(node))
        took = node_seconds(node, device, links)
        if not is_started(node):
            computes += took
            continue
        if pauses_at([node], axis):
            numbers[node] = len(numbers)
            found.append(Stretch(computes, ((numbers[node], took),)))
            computes = 0.0
        else:
            computes += took
        wait(places.started(node))
    return (*found, Stretch(computes))


def seconds_by_turns(*halves: Stretches) -> float:
    """Of one graph, or of two that take turns."""
    now = link = 0.0
    ends: list[dict[int, float]] = [{} for _ in halves]
    at, paused = [0] * len(halves), [False] * len(halves)
    while any(i < len(half) for i, half in zip(at, halves, strict=True)):
        for k, half in enumerate(halves):
            while at[k] < len(half):
                stretch = half[at[k]]
                if not paused[k]:
                    now += stretch.computes
                    for number, took in stretch.started:
                        link = ends[k][number] = max(now, link) + took
                    paused[k] = bool(stretch.waits)
                    if paused[k]:
                        break
                else:
                    paused[k] = False
                    now = max([now, *(ends[k][number] for number in stretch.waits)])
                at[k] += 1
    return now
