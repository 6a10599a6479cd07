"""Runs the step graphs of one compiled model on this rank: feed, prologue, forward, backward, micro-batches.

    prologue(all micro-batches)  ->  totals
    for each micro-batch:            F -> outputs, saved;  B(saved) -> gradients, summed over micro-batches
    once:                            R(gradients) -> reduced gradients

Without micro-batches the reductions are part of B, so that they overlap with it. With them the last micro-batch's B
takes the sums of the earlier ones, adds its own and reduces: once per step, and overlapped as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar.ir.graph import set_device
from autopar.runtime.bind import Bound, bind
from autopar.runtime.comm import Ledger, add_ledgers
from autopar.runtime.feed import Feed
from autopar.runtime.groups import Groups
from autopar.steps.graphs import Compiled


@dataclass
class Result:
    """Outputs of a step (flat, in signature order), gradients by placeholder name of the local graph, and the losses.

    A pipeline has only losses and new buffers among its outputs; others are None.
    """

    outputs: list[Any]
    gradients: dict[str, Tensor]
    losses: list[Tensor] = field(default_factory=list)


class Executor:
    """The bound step graphs of one batch shape."""

    def __init__(self, compiled: Compiled, groups: Groups, backend: str = "eager") -> None:
        self.compiled, self.groups = compiled, groups
        steps = compiled.steps
        prologue = compiled.prologue.graph if compiled.prologue is not None else None
        for graph in (steps.forward, steps.backward, steps.backward_local, prologue):
            if graph is not None and groups.device.type != "cpu":
                set_device(graph, groups.device)
        self.forward = bind(steps.forward, groups, backend)
        self.backward = bind(steps.backward, groups, backend) if steps.backward is not None else None
        self.accumulate = bind(steps.backward_local, groups, backend) if steps.backward_local is not None else None
        self.prologue = bind(compiled.prologue.graph, groups, backend) if compiled.prologue is not None else None
        self.feed = Feed(compiled, groups.device)
        self.specs, self.micro_batches = self.feed.specs, self.feed.micro_batches
        self._traffic: Ledger = {}

    @property
    def traffic(self) -> Ledger:
        """Calls and bytes sent by this rank so far, by (axis, kind)."""
        bounds = (self.forward, self.backward, self.accumulate, self.prologue)
        return add_ledgers(self._traffic, *(bound.comms.traffic for bound in bounds if bound is not None))

    def _run(self, bound: Bound, inputs: list[Any]) -> tuple[Any, ...]:
        self._traffic = add_ledgers(self._traffic, bound.traffic)
        return bound(inputs)

    # --- steps --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def run_forward(self, values: Mapping[str, Tensor], micro_batch: int = 0) -> tuple[list[Any], list[Any]]:
        """(outputs, saved values) of one micro-batch."""
        steps = self.compiled.steps
        out = self._run(self.forward, self.feed.many(steps.inputs, values, micro_batch))
        return list(out[: steps.outputs]), list(out[steps.outputs :])

    @torch.no_grad()
    def run_backward(
        self,
        values: Mapping[str, Tensor],
        saved: list[Any],
        tangents: Sequence[Tensor],
        micro_batch: int = 0,
        sums: list[Tensor | None] | None = None,
        last: bool = True,
    ) -> list[Tensor | None]:
        """Gradients of one micro-batch, in the order of ``steps.gradients``; empties ``saved``.

        ``last``: reduce them over the mesh, together with ``sums`` of earlier micro-batches. Otherwise they are this
        rank's own, added to ``sums`` in place.
        """
        steps = self.compiled.steps
        available = {**values, **dict(zip(steps.saved, saved, strict=True))}
        saved.clear()
        fixed = steps.backward_inputs[: len(steps.backward_inputs) - steps.tangents]
        inputs = self.feed.many(fixed, available, micro_batch) + list(tangents)
        available.clear()
        if last:
            assert self.backward is not None
            if self.micro_batches > 1:
                inputs += [x for x in sums or [] if x is not None]
            return list(self._run(self.backward, inputs))
        assert self.accumulate is not None
        found = list(self._run(self.accumulate, inputs))
        if sums is None:
            return found
        return [f if s is None or f is None else s.add_(f) for s, f in zip(sums, found, strict=True)]

    def train_step(self, values: Mapping[str, Tensor]) -> Result:
        """Forward and backward of all micro-batches."""
        values = self.with_totals(values)
        outputs: list[Any] = []
        sums: list[Tensor | None] | None = None
        losses = self.compiled.steps.losses
        for i in range(self.micro_batches):
            out, saved = self.run_forward(values, i)
            for k in losses:
                out[k] = out[k].clone()
            tangents = [torch.ones_like(out[k]) for k in losses]
            sums = self.run_backward(values, saved, tangents, i, sums, last=i == self.micro_batches - 1)
            outputs = out if not outputs else self._summed(outputs, out)
        names = self.compiled.steps.gradients
        gradients = {n: g for n, g in zip(names, sums or [], strict=True) if g is not None}
        return Result(outputs, gradients, [outputs[k] for k in losses])

    def _summed(self, total: list[Any], more: list[Any]) -> list[Any]:
        """Losses of micro-batches add up; buffers keep their newest value; other outputs are those of the last one."""
        losses = self.compiled.steps.losses
        return [total[k] + value if k in losses else value for k, value in enumerate(more)]

    @torch.no_grad()
    def with_totals(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The values, and what the prologue sums over all micro-batches."""
        out = dict(values)
        prologue = self.compiled.prologue
        if prologue is None:
            return out
        assert self.prologue is not None
        for i in range(self.micro_batches):
            found = self._run(self.prologue, self.feed.many(prologue.inputs, values, i))
            for name, value in zip(prologue.totals, found, strict=True):
                out[name] = out[name] + value if name in out else value
        return out


def has_losses(compiled: Compiled) -> bool:
    """Whether there is anything to differentiate."""
    if compiled.pipeline is not None:
        return any(part.losses for part in compiled.pipeline.parts)
    return bool(compiled.steps.losses)
