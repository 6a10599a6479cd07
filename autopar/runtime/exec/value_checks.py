"""Errors about values: an operator that fails in a step is reported with the model's own line, and values noted by
kernels (`autopar.ops.value_checks`) are checked without waiting for an accelerator.

    step: ids of "tokens" must lie in 0 .. 15, the rows of its embedding, found 16 (aten.embedding.default at
    model.py:9 in forward, `self.embed(tokens)`); correct the batch

On the CPU, notes of kernels are reported at once. Otherwise the ranges are copied to the host asynchronously, and the
first call that finds them there raises, with the number of their step: usually the next step.
"""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from autopar.capture.trace.export import line_of
from autopar.errors import refusal_like
from autopar.ir.graph import ancestors, tensor_operands
from autopar.ops.value_checks import ValueNote, take_notes
from autopar.runtime.mesh.host_copies import to_host
from autopar.runtime.mesh.process_groups import Groups

GENERATED = "<eval_with_key>"


class OpError(ValueError):
    """An operator has refused its inputs. ``said``: the message without the number of the step."""

    def __init__(self, said: str) -> None:
        super().__init__(f"step: {said}")
        self.said = said


def operator_explained(error: BaseException, graph: Graph) -> Exception | None:
    """The error of an operator in the generated code of ``graph``, explained; None if it was raised elsewhere. A
    LinAlgError of torch.linalg stays one: callers retry with another matrix."""
    frames = [f for f in _frames(error) if f[0].filename.startswith(GENERATED)]
    singular = isinstance(error, torch.linalg.LinAlgError)
    if not frames or (type(error).__module__ != "builtins" and not singular):
        return None  # a failed collective or out of memory: the error explains itself
    summary, values = frames[-1]
    name = (summary.line or "").partition(" ")[0].rstrip(";")
    node = next((n for n in graph.nodes if n.name == name), None)
    if node is None:
        return OpError(f"{summary.line}: {_reason(error)}; give this call inputs that it takes")
    place = f"{operator_of(node)} at {line_of(node)}"
    if singular:
        return torch.linalg.LinAlgError(f"step: {place}: {_reason(error)}")
    found = _out_of_range(node, values)
    if found:
        return OpError(f"{found} ({place}); correct the batch")
    return OpError(f"{place}: {_reason(error)}; give this call inputs that it takes")


def _frames(error: BaseException) -> list[tuple[traceback.FrameSummary, Mapping[str, Any]]]:
    """Where the error came from, outermost first, each with its variables."""
    summaries = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [(summary, frame.f_locals) for summary, frame in zip(summaries, frames, strict=True)]


def _reason(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")


def operator_of(node: Node) -> str:
    """Bindings and kernels that stand for an operator have its name."""
    return str(node.meta.get("original_aten") or getattr(node.target, "__name__", node.target))


def _out_of_range(node: Node, values: Mapping[str, Any]) -> str:
    """What is wrong with the ids of a lookup, or with the labels of a loss; '' for another operator."""
    operands = tensor_operands(node)
    given = [values.get(x.name) for x in operands]
    if len(given) < 2 or not isinstance(given[0], Tensor) or not isinstance(given[1], Tensor):
        return ""
    name = operator_of(node)
    if re.search(r"\bembedding\b", name):
        return _range(operands[1], given[1], len(given[0]), None, "ids", "the rows of its embedding")
    if "cross_entropy" in name and isinstance(ignored := node.args[2], int):
        return _range(operands[1], given[1], given[0].shape[-1], ignored, "labels", f"or be {ignored}")
    return ""


def _range(x: Node, ids: Tensor, size: int, ignored: int | None, what: str, rest: str) -> str:
    wrong = (ids < 0) | (ids >= size)
    wrong = wrong & (ids != ignored) if ignored is not None else wrong
    sources = [n.name for n in x.graph.nodes if n.op == "placeholder" and n in ancestors([x])]
    of = f" of {' and '.join(f'{chr(34)}{name}{chr(34)}' for name in sources)}" if sources else ""
    return f"{what}{of} must lie in 0 .. {size - 1}, {rest}, found {int(ids[wrong][0])}" if wrong.any() else ""


@dataclass
class PendingRanges:
    """Ranges on their way to the host."""

    notes: list[ValueNote]
    extremes: Tensor  # [notes, 2] on the host
    there: torch.Event | None  # None: they are there
    step: int


@dataclass
class ValueChecks:
    """Checks of values noted in one model's steps. A warning is issued once, by one of the ranks with the same data."""

    groups: Groups
    _arriving: list[PendingRanges] = field(default_factory=list)
    _said: set[str] = field(default_factory=set)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around the run of a step: an operator's error gets its number, and what kernels noted is taken."""
        try:
            yield
        except OpError as error:
            take_notes()  # of a step that has no result: the next one would report them as its own
            raise refusal_like(error.__cause__ or error, f"step {number}: {error.said}") from error.__cause__
        self.settle(number)

    def settle(self, step: int) -> None:
        """Take the notes of a step that has run. Raises ValueError for the first error among those that are here."""
        notes = take_notes()
        if notes:
            self._arriving.append(self._send(notes, step))
        self.look()

    def _send(self, notes: list[ValueNote], step: int) -> PendingRanges:
        extremes = torch.stack([note.extremes.to(torch.float64) for note in notes])
        return PendingRanges(notes, *to_host(extremes), step)

    def check_size(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """Warn of a batch without examples, the first time."""
        empty = [f"{name} {list(x.shape)}" for name, x in tensors.items() if not x.numel()]
        if empty:
            self.said_once(f"the batch is empty ({', '.join(empty)}), so that a mean over it is 0/0 = nan", step)

    def look(self) -> None:
        while self._arriving and ((event := self._arriving[0].there) is None or event.query()):
            found = self._arriving.pop(0)
            for note, extremes in zip(found.notes, found.extremes, strict=True):
                self._say(note, extremes, found.step)

    def said_once(self, text: str, step: int) -> None:
        if text not in self._said and self.groups.is_first_of_stage:
            warnings.warn(f"step {step}: {text}", stacklevel=3)
        self._said.add(text)

    def _say(self, note: ValueNote, extremes: Tensor, step: int) -> None:
        problem = note.problem(extremes)
        if problem and note.fatal:
            raise ValueError(f"step {step}: {problem}; correct the batch")
        if problem:
            self.said_once(problem, step)
