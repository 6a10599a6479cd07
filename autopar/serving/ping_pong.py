"""`PingPongRunner`: a `PackedRunner` whose experts are on ranks of their own (MegaScale-Infer, Zhu et al. 2025, 4.1).

    attention  A1 A2 A3 A1 A2 A3 ...        requests of a step are dealt to microbatches, each a coroutine of the graph
    experts       E1 E2 E3 E1 E2 E3 ...     that pauses where it waits for experts, and the next one goes on

Both roles go through (layer, microbatch) in the same order. A microbatch without tokens, and a rank without requests,
tell the experts so.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.cost.ping_pong import Interval
from autopar.ir.traffic import Ledger
from autopar.runtime.comm.pairs import AskingPairs
from autopar.serving.packed_runner import PackedRunner
from autopar.serving.step import Chosen, Row, Step
from autopar.steps.packed import LOGITS

Turns = Generator[None, None, Tensor | None]  # returns rows of logits


class PingPongRunner(PackedRunner):
    """pairs: the way to the experts. layers: how often a step asks them. Other arguments as of `PackedRunner`."""

    has_other_roles = True

    def __init__(self, *given: Any, pairs: AskingPairs, layers: int, microbatches: int, **more: Any) -> None:
        super().__init__(*given, **{**more, "experts": pairs})
        self._pairs, self._layers, self._microbatches = pairs, layers, microbatches

    @property
    def traffic(self) -> Ledger:
        """Bytes sent to experts so far."""
        return self._pairs.traffic

    @property
    def timeline(self) -> list[Interval]:
        """When this rank computed what in the last step; seconds of `time.time`."""
        return self._pairs.timeline

    @torch.no_grad()
    def run(self, step: Step) -> list[Chosen] | None:
        """As `PackedRunner.run`. Ranks without rows take part in each step that has some."""
        rows = step.rows[self.replica]
        if not any(step.rows):
            return []
        dealt = deal([len(row.tokens) for row in rows], self._microbatches)
        logits = self._in_turn([self._microbatch([rows[i] for i in part]) for part in dealt])
        self._steps += 1
        places = [i for part in dealt for i in part if rows[i].choice is not None]
        found = [x[: sum(rows[i].choice is not None for i in part)] for x, part in zip(logits, dealt) if x is not None]
        if not places:
            return []
        order = torch.tensor(sorted(range(len(places)), key=places.__getitem__), device=found[0].device)
        return self._chosen(rows, torch.cat(found).index_select(0, order))

    def end(self, error: BaseException | None = None) -> None:
        """Tell the experts that there are no more steps."""
        if error is None:
            self._pairs.end()
        else:
            self._pairs.fail(error)

    def _in_turn(self, microbatches: Sequence[Turns]) -> list[Tensor | None]:
        """Resume them one after the other, until all have ended."""
        ended: list[Tensor | None] = [None] * len(microbatches)
        running = dict(enumerate(microbatches))
        while running:
            for i, turns in list(running.items()):
                self._pairs.resume(self._steps, i)
                try:
                    next(turns)
                except StopIteration as end:
                    ended[i] = end.value
                    del running[i]
        return ended

    def _microbatch(self, rows: Sequence[Row]) -> Turns:
        """The rows of logits, [N, V]."""
        if not rows:
            for layer in range(self._layers):
                self._pairs.empty(layer)
                yield
            return None
        tokens, chosen = sum(len(row.tokens) for row in rows), sum(row.choice is not None for row in rows)
        values = self._inputs.of(rows, *self._sizes_of(tokens, chosen))
        (stage,) = self._stages
        results = yield from stage.steps(values)
        logits: Tensor = dict(zip(stage.stage.graph.outputs, results, strict=True))[LOGITS]
        return logits[0]


def deal(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Indices of requests for each microbatch, in ascending order: the largest first, each to the one that has the
    fewest tokens."""
    dealt: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        least = tokens.index(min(tokens))
        dealt[least].append(i)
        tokens[least] += sizes[i]
    return [sorted(part) for part in dealt]
