"""An operator that fails in a step, such as a lookup of a token that is not there: said with the model's own line.

bound([weight, ids])   -->   OpError: step: ids of "tokens" must lie in 0 .. 15, the rows of its embedding, found 16
                             (aten.embedding.default at model.py:9 in forward, `self.embed(tokens)`); correct the batch
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from autopar.capture.trace.export import line_of
from autopar.ir.graph import ancestors, tensor_operands

GENERATED = "<eval_with_key>"


class OpError(ValueError):
    """An operator has refused its inputs. ``said``: the message without the step, which who runs steps knows."""

    def __init__(self, said: str) -> None:
        super().__init__(f"step: {said}")
        self.said = said


def operator_explained(error: BaseException, graph: Graph) -> Exception | None:
    """The error of an operator in the generated code of ``graph``, in words; None for what was raised elsewhere. What
    torch.linalg says of a matrix stays a LinAlgError: callers try again with another matrix."""
    frames = [f for f in _frames(error) if f[0].filename.startswith(GENERATED)]
    singular = isinstance(error, torch.linalg.LinAlgError)
    if not frames or (type(error).__module__ != "builtins" and not singular):
        return None  # a collective that failed, or memory that is out: it has its own words
    summary, values = frames[-1]
    name = (summary.line or "").partition(" ")[0].rstrip(";")
    node = next((n for n in graph.nodes if n.name == name), None)
    if node is None:
        return OpError(f"{summary.line}: {_reason(error)}; give this call inputs that it takes")
    place = f"{_operator(node)} at {line_of(node)}"
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


def _operator(node: Node) -> str:
    """Bindings and kernels that stand for an operator have its name."""
    return str(node.meta.get("original_aten") or getattr(node.target, "__name__", node.target))


def _out_of_range(node: Node, values: Mapping[str, Any]) -> str:
    """What is wrong with the ids of a lookup, or with the labels of a loss; '' for another operator."""
    operands = tensor_operands(node)
    given = [values.get(x.name) for x in operands]
    if len(given) < 2 or not isinstance(given[0], Tensor) or not isinstance(given[1], Tensor):
        return ""
    name = _operator(node)
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
