"""What was found out about a call without a rule in the table: which dims of it may be cut together.

    grid_sampler_2d [(a b . .), (a . . .)] -> (a b . .)        `a` cuts both operands and the result, `b` one of each

A dot is a dim that nothing may cut. Nothing is contracted, and nothing passes a pending sum. How that is found out:
`autopar.rules.infer_rule`; the pass `derive_rules` notes it on the call.
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from autopar.ir.graph import tensor_operands, values
from autopar.rules.call import Call
from autopar.rules.rule import Rule

Place = int | None


@dataclass(frozen=True)
class CommonDim:
    """One dim, by where each operand and each result has it; None for those that are the same for all of its rows."""

    operands: tuple[Place, ...]
    results: tuple[Place, ...]


@dataclass(frozen=True)
class DerivedRule:
    """``dims`` may be cut; all others may not. ``why`` tells what stands in the table's place."""

    dims: tuple[CommonDim, ...]
    why: str

    def text(self, operands: Sequence[int], results: Sequence[int]) -> str:
        """For people, and for files: '[(a b . .), (a . . .)] -> (a b . .)', for operands and results of these ranks."""
        taken = [self._letters([d.operands[i] for d in self.dims], n) for i, n in enumerate(operands)]
        made = [self._letters([d.results[i] for d in self.dims], n) for i, n in enumerate(results)]
        return f"[{', '.join(taken)}] -> {', '.join(made)}"

    def _letters(self, places: Sequence[Place], rank: int) -> str:
        named = {place: string.ascii_letters[k] for k, place in enumerate(places) if place is not None}
        return f"({' '.join(named.get(d, '.') for d in range(rank))})"

    def rule(self, call: Call) -> Rule:
        """For the shapes of the call."""
        why: dict[str, str] = {}

        def dims(shape: Sequence[int], places: Sequence[Place], prefix: str) -> tuple[tuple[str, ...], ...]:
            known = {place: f"common{k}" for k, place in enumerate(places) if place is not None}
            for d in range(len(shape)):
                if d not in known:
                    why[f"{prefix}{d}"] = self.why
            return tuple(call.factor(known.get(d, f"{prefix}{d}"), size) for d, size in enumerate(shape))

        operands = [
            dims(call.shape_of(x), [d.operands[i] for d in self.dims], f"o{i}_") for i, x in enumerate(call.operands)
        ]
        results = [dims(r, [d.results[i] for d in self.dims], f"r{i}_") for i, r in enumerate(call.result_shapes)]
        return call.rule(operands, results, blocked=why)


@dataclass(frozen=True)
class NoRule:
    """Nothing was found, and why. ``repeats``: whether the operator gave the same when it was run twice."""

    why: str
    repeats: bool = True


MADE_OF_PARAMETERS = DerivedRule((), "the operator has no rule; it is made of parameters alone and computed whole")


def text_of(node: Node) -> str:
    """What was derived for a call, with a letter for each dim that may be cut."""
    derived: DerivedRule = node.meta["derived"]
    operands = [x.meta["val"].dim() for x in tensor_operands(node)]
    return derived.text(operands, [v.dim() for v in values(node)])


def recorded_calls(gm: GraphModule) -> list[dict[str, Any]]:
    """An entry for each kind of call with a derived rule in a graph of whole values."""
    found: dict[str, dict[str, Any]] = {}
    for node in gm.graph.nodes:
        derived = node.meta.get("derived")
        if isinstance(derived, DerivedRule) and derived != MADE_OF_PARAMETERS:
            try:
                entry = entry_of(node)
            except TypeError:
                continue
            found.setdefault(json.dumps(entry), entry)
    return list(found.values())


def entry_of(node: Node) -> dict[str, Any]:
    """The entry of one call. Raises TypeError for an argument that has no place in a file."""
    kwargs = {name: _written(x) for name, x in node.kwargs.items()}
    return {"op": str(node.target), "args": _written(list(node.args)), "kwargs": kwargs, "rule": text_of(node)}


def _written(x: Any) -> Any:
    if isinstance(x, Node):
        return {_name(x.meta["val"].dtype): list(x.meta["val"].shape)}
    if isinstance(x, (list, tuple)):
        return [_written(y) for y in x]
    if isinstance(x, torch.dtype):
        return {"dtype": _name(x)}
    if x is None or isinstance(x, (bool, int, float, str)):
        return x
    raise TypeError(f"{x!r} has no place in a file of derived rules")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def as_file(entries: Iterable[Mapping[str, Any]]) -> str:
    """One line each."""
    return "[\n" + ",\n".join(json.dumps(entry) for entry in entries) + "\n]\n"
