"""Inputs of a forward that have no effect on it: numbers that it never reads, tensors that it never asks for anything.

    model(input_ids, position_ids, cu_seq_lens_q=offsets, max_length_q=17)    attention reads position_ids alone

The forward is captured as it is, and once more with other numbers and without the tensors. The numbers remember that
they were compared or became plain (`compared_sizes`), and an operator that is called with one is called with another
value. So equal graphs, and logs without one of the numbers, mean that no value has an effect.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch.fx import GraphModule

from autopar.capture.reads.compared_sizes import Asked, Number, SizeLog

Capture = Callable[[dict[str, Any], SizeLog], GraphModule]


def unused_inputs(capture: Capture, batch: Mapping[str, Any], names: Collection[str]) -> set[str]:
    """Those of ``names`` that have no effect: numbers, and tensors that the forward can do without."""

    def unused(some: Collection[str]) -> bool:
        before = _seen(capture, dict(batch), some)
        return before is not None and before == _seen(capture, _changed(batch, some), some)

    return {*names} if unused(names) else {name for name in names if len(names) > 1 and unused([name])}


def _changed(batch: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Without the tensors, and with other numbers."""
    numbers = {name: 2 * batch[name] + 3 for name in names if isinstance(batch[name], (int, float))}
    return {name: numbers.get(name, x) for name, x in batch.items() if name in numbers or name not in names}


def _seen(capture: Capture, batch: dict[str, Any], names: Collection[str]) -> tuple[str, list[Any]] | None:
    """The graph, and what the forward decides by sizes; None if it decides by one of the numbers, or cannot run."""
    log = SizeLog([name for name in names if isinstance(batch.get(name), (int, float))])
    try:
        graph = capture(batch, log)
    except ValueError:
        return None
    if any(not isinstance(event, Asked) and _is_given(event.found) for event in log.events):
        return None
    return str(graph.graph), log.events


def _is_given(number: Any) -> bool:
    """Whether it is computed from a number that the forward was given."""
    if not isinstance(number, Number):
        return False
    return isinstance(number.parts[0], str) if number.made is None else any(map(_is_given, number.parts))
