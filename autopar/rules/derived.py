"""A rule derived for a call that the table does not have: which of its dims may be sharded together.

    grid_sampler_2d [(a b . .), (a . . .)] -> (a b . .)        `a` shards both operands and the result, `b` one of each

A dot is a dim that may not be sharded. Nothing is contracted, and no partial value passes. How a rule is derived:
`autopar.rules.infer_rule`; the pass `derive_rules` annotates the call with it.
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
    """One dim, by its position in each operand and result; None for those that all of its rows share."""

    operands: tuple[Place, ...]
    results: tuple[Place, ...]


@dataclass(frozen=True)
class DerivedRule:
    """``dims`` may be sharded; all others may not. ``why``: the reason, for messages."""

    dims: tuple[CommonDim, ...]
    why: str

    def text(self, operands: Sequence[int], results: Sequence[int]) -> str:
        """For messages and files: '[(a b . .), (a . . .)] -> (a b . .)', for operands and results of these ranks."""
        taken = [self._letters([d.operands[i] for d in self.dims], n) for i, n in enumerate(operands)]
        made = [self._letters([d.results[i] for d in self.dims], n) for i, n in enumerate(results)]
        return f"[{', '.join(taken)}] -> {', '.join(made)}"

    def _letters(self, places: Sequence[Place], rank: int) -> str:
        named = {place: string.ascii_letters[k] for k, place in enumerate(places) if place is not None}
        return f"({' '.join(named.get(d, '.') for d in range(rank))})"

    def rule(self, call: Call) -> Rule:
        """The rule for the shapes of a call."""
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
    """No rule could be derived, and why. ``repeats``: whether two runs gave the same results."""

    why: str
    repeats: bool = True


MADE_OF_PARAMETERS = DerivedRule((), "the operator has no rule; it depends on parameters alone and is replicated")


def text_of(node: Node) -> str:
    """The derived rule of a call, with a letter for each dim that may be sharded."""
    derived: DerivedRule = node.meta["derived"]
    operands = [x.meta["val"].dim() for x in tensor_operands(node)]
    return derived.text(operands, [v.dim() for v in values(node)])


def recorded_calls(gm: GraphModule) -> list[dict[str, Any]]:
    """An entry for each kind of call with a derived rule in a global graph."""
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
    """The entry of one call. Raises TypeError for an argument that a file cannot represent."""
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
    raise TypeError(f"{x!r} cannot be written to a file of derived rules")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def as_file(entries: Iterable[Mapping[str, Any]]) -> str:
    """One line each."""
    return "[\n" + ",\n".join(json.dumps(entry) for entry in entries) + "\n]\n"
