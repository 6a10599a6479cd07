"""Derived rules as a file: the call, and what was found, such that it can be found again.

    {"op": "aten.sinc.default", "args": [{"float32": [8, 16]}], "kwargs": {}, "rule": "[(a b)] -> (a b)"}

A tensor is its dtype and shape. What is no number, text, dtype or list of them has no place in a file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from autopar.adapters.operators import OpOverload
from autopar.ir.graph import tensor_operands, values
from autopar.rules.derived import MADE_OF_PARAMETERS, DerivedRule


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


def call_of(entry: Mapping[str, Any]) -> tuple[OpOverload, list[Any], dict[str, Any]]:
    """(operator, arguments, keywords) of an entry, with empty tensors on the CPU. Raises AttributeError for an operator
    that is not there."""
    op: Any = torch.ops
    for part in entry["op"].split("."):
        op = getattr(op, part)
    return op, [_read(x) for x in entry["args"]], {name: _read(x) for name, x in entry["kwargs"].items()}


def _read(x: Any) -> Any:
    if isinstance(x, list):
        return [_read(y) for y in x]
    if isinstance(x, dict):
        ((name, value),) = x.items()
        return (
            getattr(torch, value) if name == "dtype" else torch.zeros(value, dtype=getattr(torch, name), device="cpu")
        )
    return x


def as_file(entries: Iterable[Mapping[str, Any]]) -> str:
    """One line each."""
    return "[\n" + ",\n".join(json.dumps(entry) for entry in entries) + "\n]\n"
