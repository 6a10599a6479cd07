"""The most of what was alive at a time in a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from autopar.runtime.exec.executor import Executor
from autopar.runtime.exec.value_slots import unit_of
from autopar.schedule.order import BACKWARD


@dataclass
class Peaks:
    """live: most units (stage, microbatch, slice) between F and B. saved: most bytes of what F and B keep."""

    live: int = 0
    saved: int = 0


def measure(executor: Executor) -> Peaks:
    """Those of an executor's last step, from now on."""
    peaks, live = Peaks(), set[Any]()
    start, counted = executor._start, executor._run_action

    def started(values: Mapping[str, Tensor]) -> list[Any]:
        peaks.live = peaks.saved = 0
        live.clear()
        return start(values)

    def measured(entry: Any, slots: list[Any]) -> float:
        begun = counted(entry, slots)
        for action in entry.actions:
            if action.kind == "F":
                live.add(unit_of(action))
            elif action.kind in BACKWARD:
                live.discard(unit_of(action))
            kept = [slots[i] for i in executor.program.saved if isinstance(slots[i], Tensor)]
            storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
            peaks.live = max(peaks.live, len(live))
            peaks.saved = max(peaks.saved, sum(storages.values()))
        return begun

    executor._start, executor._run_action = started, measured  # type: ignore[method-assign]
    return peaks
