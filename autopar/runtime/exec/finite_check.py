"""``check="finite"``: a step whose loss or gradients are not finite stops on all ranks, with where that arose.

Each step is asked at its end, before an optimizer has seen its gradients: a maximum of each gradient, and one number
over all ranks. Only a step that is not finite runs again, with every value looked at (`value_probe`); a step is
repeatable bit for bit, so it makes the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.adapters.foreach import norms
from autopar.runtime.exec.value_probe import Origin, ValueProbe, probing
from autopar.runtime.fault.error_propagation import ranks_named
from autopar.runtime.mesh.process_groups import Groups

FINITE = "finite"
Again = Callable[[], Sequence[Tensor]]  # runs the step once more, returns its results


class FiniteCheck:
    """Asks the steps of one model. ``gradients``: whether they must be finite; a loss scaler skips steps itself."""

    def __init__(self, groups: Groups, gradients: Callable[[], bool]) -> None:
        self._groups, self._gradients = groups, gradients

    def check(
        self, losses: Mapping[str, Tensor], gradients: Mapping[str, Tensor], given: Mapping[str, Tensor], again: Again
    ) -> None:
        """Raises FloatingPointError on all ranks if a loss or a gradient of any rank is not finite. ``given``: what the
        step has read, by name. Collective."""
        asked = [*losses.values(), *(gradients.values() if self._gradients() else ())]
        if not self._anywhere(_not_finite(asked, self._groups.device)):
            return
        what = next((f"the loss is {float(x)}" for x in losses.values() if not bool(x.isfinite().all())), "")
        what = what or "its gradients are not finite"
        found = self._of_all(self._read(given))
        found = found if any(found) else self._of_all(self._made(again))
        raise FloatingPointError(
            f"{what}: {_told(found)}. The weights are those of before the step; skip the batch, lower the learning "
            "rate, or compute this part in float32"
        )

    def _anywhere(self, flag: Tensor) -> bool:
        if self._groups.mesh.world_size > 1:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def _read(self, given: Mapping[str, Tensor]) -> str:
        """What of the weights and the batch is not finite; inputs and buffers may be masks, and hold infinities."""
        wrong = [name for name, x in given.items() if bool(_not_finite([x], self._groups.device))]
        wrong = [name for name in wrong if name.startswith("parameter ") or bool(given[name].isnan().any())]
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return f"{wrong[0]}{more} was not finite before the step" if wrong else ""

    def _made(self, again: Again) -> Origin | None:
        probe = ValueProbe()
        with probing(probe):
            return probe.first(again())

    def _of_all(self, own: Origin | str | None) -> list[Origin | str | None]:
        """What the ranks have found, in their order."""
        found: list[Any] = [own]
        if self._groups.mesh.world_size > 1:
            found = [None] * self._groups.mesh.world_size
            dist.all_gather_object(found, own)
        return found


def _told(found: Sequence[Origin | str | None]) -> str:
    """In words, for ranks that have found the same together."""
    by_text: dict[str, list[int]] = {}
    for rank, one in enumerate(found):
        if one:
            by_text.setdefault(str(one), []).append(rank)
    said = "; ".join(f"{text} on {ranks_named(ranks)}" for text, ranks in by_text.items())
    return said or "no operator of the step has made it of finite values"


def _not_finite(values: Sequence[Tensor], device: torch.device) -> Tensor:
    """[] float32: 1 if one of the values is not finite. The largest magnitude of a tensor keeps NaN and infinities."""
    found = [x for x in values if x.is_floating_point()]
    if not found:
        return torch.zeros((), device=device)
    return (~torch.stack([x.to(torch.float64) for x in norms(found, float("inf"))]).isfinite().all()).to(torch.float32)
