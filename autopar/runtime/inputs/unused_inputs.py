"""Inputs without effect that vary: numbers, and lists of whole numbers of any length.

    max_length_q=17, cu_seq_lens_q [5]     on rank 0, in this step
    max_length_q=32, cu_seq_lens_q [3]     on rank 1

A step is compiled for the numbers and shapes of its batch. Where some of these differ between ranks or steps, the model
is captured without them (`autopar.capture.reads.unused_inputs`): those without effect are left out from then on, as
long as the modules stay as they are.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autopar.capture.front_end import capture
from autopar.capture.reads.unused_inputs import Capture, unused_inputs

Names = tuple[str, ...]
Extremes = Callable[[Mapping[str, int]], tuple[dict[str, int], dict[str, int]]]  # over all ranks


class Modules(NamedTuple):
    """structure: a copy of the modules as they are. watch: a function that says whether they are as they are now."""

    structure: Callable[[], nn.Module]
    watch: Callable[[], Callable[[], bool]]


class UnusedInputs:
    """how: further arguments of `capture`."""

    def __init__(self, modules: Modules, extremes: Extremes, how: Mapping[str, Any]) -> None:
        self._modules, self._extremes, self._how = modules, extremes, how
        self._unchanged: Callable[[], bool] = lambda: True
        self._first: dict[Names, dict[str, int]] = {}
        self._unused: dict[Names, set[str]] = {}

    def left_out(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The batch without them, collective where there are numbers."""
        names, facts = tuple(batch), _facts(batch)
        if self._unused and not self._unchanged():
            self._unused = {}
        if names not in self._unused and any(_is_number(batch[name]) for name in facts):
            least, most = self._extremes(facts)
            first = self._first.setdefault(names, most)
            if any(not least[name] == most[name] == first[name] for name in facts):
                self._unchanged = self._modules.watch()
                self._unused[names] = self._found(batch, [*facts])
        return self.without(batch)

    def without(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The batch without those that are known."""
        unused = self._unused.get(tuple(batch), set())
        numbers = {name: type(batch[name])(1) for name in unused if _is_number(batch[name])}
        return {name: numbers.get(name, x) for name, x in batch.items() if name in numbers or name not in unused}

    def _found(self, batch: Mapping[str, Any], names: list[str]) -> set[str]:
        """Without effect in training and in evaluation."""
        model = self._modules.structure()
        taken = inspect.signature(model.forward).parameters
        needed = {n for n, p in taken.items() if p.default is p.empty}
        names = [name for name in names if _is_number(batch[name]) or name not in needed]
        shapes = {n: torch.empty_like(x, device="meta") if isinstance(x, Tensor) else x for n, x in batch.items()}
        for train in (True, False):
            names = [*unused_inputs(self._capture(model, train), shapes, names)]
        return {*names}

    def _capture(self, model: nn.Module, train: bool) -> Capture:
        return lambda given, log: capture(model, given, train=train, sizes=log, trial=True, **self._how)


def _is_number(x: Any) -> bool:
    return type(x) in (int, float)


def _facts(batch: Mapping[str, Any]) -> dict[str, int]:
    """Of each number a digest, and of each list of whole numbers its length."""
    found = {name: zlib.crc32(repr(x).encode()) for name, x in batch.items() if _is_number(x)}
    lists = {n: x for n, x in batch.items() if isinstance(x, Tensor) and x.dim() == 1 and not x.is_floating_point()}
    return found | {name: len(x) for name, x in lists.items()}
