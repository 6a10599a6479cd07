"""The instructions of the pre-pass before a step's first action: rounds of forwards without gradients, which compute
global statistics.

    for each round:    post all its receives
                       for each stage here, for each microbatch: wait, run, add to the totals, send
                       sum the totals over all stages

All ranks of the pp axis take part in all rounds: a stage begins as soon as the one before it has sent a microbatch, and
totals are known everywhere before the next round. If two chains of a bidirectional schedule hold a stage, that of the
first one runs it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar.ir.graph import outputs
from autopar.runtime.comm.p2p import Channels
from autopar.runtime.exec.instructions import BoundAction, Instruction, accumulate
from autopar.runtime.exec.value_slots import ValueSlots
from autopar.schedule.order import Action, Order, P2PEdge
from autopar.schedule.order_checks import Link
from autopar.steps.graphs import GlobalStatistics, Pipeline, StepGraph

Run = Callable[[BoundAction, StepGraph, list[int], list[int]], None]


def pre_pass_links(pipeline: Pipeline, order: Order) -> set[Link]:
    """(sending, receiving) coordinates on pp."""
    homes = _homes(order)
    return {(homes[h.source], homes[h.target]) for one in pipeline.pre_pass for h in one.edges if _moves(h, homes)}


def _homes(order: Order) -> list[int]:
    return [order.rank_of[stage] for stage in order.chains[0]]


def _moves(edge: P2PEdge, homes: Sequence[int]) -> bool:
    return homes[edge.source] != homes[edge.target]


@dataclass
class StatisticsProgram:
    """Adds the instructions of one rank. ``run``: adds a graph. ``share``: sums over stages, if there are several."""

    values: ValueSlots
    channels: Channels
    device: torch.device
    run: Run
    share: Callable[[list[Tensor]], list[Tensor]] | None
    made: set[str | None] = field(default_factory=set)  # names of values passed between graphs

    def add(self, entry: BoundAction) -> None:
        graphs = [g for one in self.values.pipeline.pre_pass for g in one.graphs if g is not None]
        self.made = {name for g in graphs for name in g.outputs} - self.values.learned
        for one in self.values.pipeline.pre_pass:
            self._round(entry, one)

    def _round(self, entry: BoundAction, one: GlobalStatistics) -> None:
        order, channels, slot = self.values.order, self.channels, self.values.slot
        receives, sends = (dict(self._transfers(one, kind)) for kind in ("RF", "SF"))
        for action, edges in receives.items():
            kinds = [(edge.shapes[0], edge.dtype) for edge in edges]
            post = channels.receiving(action, order.rank_of[action.peer], kinds)
            entry.instructions.append(Instruction(post, [], [slot("pending pre_pass", action)]))

        def moved(transfers: Mapping[Action, list[P2PEdge]], k: int, i: int) -> Iterator[tuple[Action, list[int]]]:
            for action, edges in transfers.items():
                if action.stage == order.chains[0][k] and action.microbatch == i:
                    yield action, [self._slot(edge.value, i) for edge in edges]

        mine = [k for k, rank in enumerate(_homes(order)) if rank == self.values.rank]
        for k, i in itertools.product(mine, range(order.microbatches)):
            for action, slots in moved(receives, k, i):
                wait = Instruction(lambda pending: channels.wait(pending[0]), [slot("pending pre_pass", action)], slots)
                entry.instructions.append(wait)
            if (graph := one.graphs[k]) is not None:
                self._run(entry, one, graph, i)
            for action, slots in moved(sends, k, i):
                entry.instructions.append(Instruction(channels.sending(action, order.rank_of[action.peer]), slots))
        if self.share is not None:
            self._share(entry, one)

    def _transfers(self, one: GlobalStatistics, kind: str) -> Iterator[tuple[Action, list[P2PEdge]]]:
        """The values that this rank sends (SF) or receives (RF), in an order that both ends share."""
        order, me = self.values.order, self.values.rank
        homes, stages = _homes(order), order.chains[0]
        pairs = sorted({(h.source, h.target) for h in one.edges if _moves(h, homes)})
        for source in dict.fromkeys(source for source, _ in pairs):
            for i in range(order.microbatches):
                for target in (t for s, t in pairs if s == source):
                    here, there = (source, target) if kind == "SF" else (target, source)
                    if homes[here] == me:
                        edges = [h for h in one.edges if (h.source, h.target) == (source, target)]
                        yield Action(stages[here], kind, i, peer=stages[there]), edges

    def _slot(self, name: str, microbatch: int) -> int:
        return self.values.slot("pre_pass", microbatch, name)

    def _run(self, entry: BoundAction, one: GlobalStatistics, graph: StepGraph, i: int) -> None:
        reads = [self._slot(n, i) if n in self.made else self.values.shared(n, i) for n in graph.inputs]
        places = [self._slot(str(n), i) if n in self.made else self.values.slot("addend", n) for n in graph.outputs]
        self.run(entry, graph, reads, places)
        own = [n for n in graph.outputs if n in one.totals]
        if not own:
            return
        sums, addends = ([self.values.slot(kind, n) for n in own] for kind in ("step", "addend"))
        entry.instructions.append(Instruction(accumulate, [*sums, *addends], sums))

    def _share(self, entry: BoundAction, one: GlobalStatistics) -> None:
        """Sum the totals of a round over all stages; names of transfers can be reused in the next round."""
        named = (pair for g in one.graphs if g is not None for pair in zip(g.outputs, outputs(g.graph), strict=True))
        likes = {name: x.meta["val"] for name, x in named if name in one.totals}
        kinds = [(tuple(likes[name].shape), likes[name].dtype) for name in one.totals]
        channels, device, share = self.channels, self.device, self.share
        assert share is not None

        def summed(sums: list[Any]) -> list[Tensor]:
            channels.flush()
            zeros = (torch.zeros(s, dtype=d, device=device) for s, d in kinds)
            return share([z if x is None else x for x, z in zip(sums, zeros, strict=True)])

        slots = [self.values.slot("step", name) for name in one.totals]
        entry.instructions.append(Instruction(summed, slots, slots))
