"""Graphs as JSON tables: one row per node; call targets and metadata in tables of their own, each once.

    {"targets": [...], "notes": [[key, value], ...], "fakes": [...], "meta": ..., "nodes": [
        ["p", "x", "x", 0, 0, [0, 3]],                      placeholder x
        ["c", "mm", 4, ["t", ["n", 0], ["n", 1]], 0, [1]],  mm = targets[4](nodes[0], nodes[1])
        ["o", "output", ...]]}

Metadata ("notes") of nodes and graphs is what `autopar.ir.meta` lists. Equal fake values of calls become one object;
those of placeholders stay separate, since a compiler would treat identical inputs as one.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.immutable_collections import immutable_dict, immutable_list

from autopar.adapters.fx.graph_data import append_node, fake_tensor, is_fake
from autopar.adapters.fx.lazy import graph_module
from autopar.cache.value_codec import Damaged, Decoder, Encoder, Json, Unstorable, kind_of_torch
from autopar.ir.meta import GRAPHS, NODES, note_all

_OPS = {"placeholder": "p", "call_function": "c", "output": "o"}
# types in arguments of calls; their repr becomes code, so only harmless ones are allowed
_ARGUMENTS: dict[type, str] = {
    **dict.fromkeys((type(None), bool, int, str), ""), float: "f", complex: "i", tuple: "t", list: "l",
    immutable_list: "L", torch.Size: "S", dict: "d", immutable_dict: "M", slice: ":", type(...): "...",
    **dict.fromkeys((torch.dtype, torch.layout, torch.memory_format), "y"), torch.device: "v",
}  # fmt: skip
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


class _ArgumentEncoder(Encoder):
    """Encodes arguments of calls other than nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = {kind: known for kind, known in self.kinds.items() if kind in _ARGUMENTS}

    def _other(self, value: Any) -> Json:
        raise Unstorable(f"a call with a {type(value).__qualname__} as argument")


class GraphEncoder(Encoder):
    """Encodes one graph. ``left_out``: keys of its meta to omit."""

    def __init__(self, left_out: Collection[str] = ()) -> None:
        super().__init__()
        self._left_out = left_out
        self._places: dict[Node, int] = {}
        self._targets: dict[Any, int] = {}
        self._notes: list[Json] = []
        self._places_of_notes: dict[str, int] = {}
        self._places_by_id: dict[Any, int] = {}
        self._fakes: dict[Any, int] = {}
        self._kept: list[Any] = []  # kept alive, since their ids are keys
        self._owner: Node | None = None  # the placeholder whose fake values are being encoded
        self._arguments = _ArgumentEncoder()
        self.kinds[Node] = self._arguments.kinds[Node] = lambda x: ["n", self._places[x]]

    def graph(self, gm: GraphModule) -> Json:
        """The graph as JSON. Raises Unstorable."""
        rows = [self._row(i, node) for i, node in enumerate(gm.graph.nodes)]
        return {
            "nodes": rows,
            "meta": self.encode({k: x for k, x in gm.meta.items() if k in GRAPHS and k not in self._left_out}),
            "targets": [self._target(target) for target in self._targets],
            "notes": self._notes,
            "fakes": [list(facts) for facts, _ in self._fakes],
        }

    def _row(self, i: int, node: Node) -> Json:
        if node.op not in _OPS or node.type is not None:
            raise Unstorable(f"a node {node.op} of type {node.type}")
        self._places[node] = i
        called = node.op == "call_function"
        target = self._targets.setdefault(node.target, len(self._targets)) if called else node.target
        kwargs = self._arguments.encode(node.kwargs) if node.kwargs else 0
        args = self._arguments.encode(node.args) if node.args else 0
        notes = [self._note(node, key, value) for key, value in node.meta.items() if key in NODES]
        return [_OPS[node.op], node.name, target, args, kwargs, notes]

    def _target(self, target: Any) -> Json:
        found = self.encode(target)
        if found[0] not in ("O", "F"):
            raise Unstorable(f"the call target {target}")
        return found

    def _note(self, node: Node, key: str, value: Any) -> int:
        self._owner = node if node.op == "placeholder" else None
        known = self._places_by_id.get((key, id(value), self._owner))
        if known is None:
            tree = [key, self.encode(value)]
            known = self._places_of_notes.setdefault(json.dumps(tree), len(self._notes))
            self._notes += [tree] if known == len(self._notes) else []
            self._places_by_id[key, id(value), self._owner] = known
            self._kept.append(value)
        return known

    def _other(self, value: Any) -> Json:
        if is_fake(value):
            facts = (
                tuple(value.shape), tuple(value.stride()), value.storage_offset(), str(value.dtype)[6:],
                str(value.device), value.requires_grad, isinstance(value, nn.Parameter),
            )  # fmt: skip
            return ["k", self._fakes.setdefault((facts, self._owner), len(self._fakes))]
        return super()._other(value)


class GraphDecoder(Decoder):
    """Decodes one graph, with fake values in ``mode``."""

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self._mode = mode
        self._nodes: list[Node] = []
        self._fakes: list[Tensor] = []
        self._arguments = Decoder()
        known = self._arguments.kinds
        self._arguments.kinds = {kind: known[kind] for kind in _ARGUMENTS.values() if kind}
        self.kinds["n"] = self._arguments.kinds["n"] = lambda x: self._nodes[_place(x[1])]
        self.kinds["k"] = lambda x: self._fakes[_place(x[1])]

    def graph(self, tree: Json) -> GraphModule:
        """The graph of its JSON. Raises Damaged."""
        try:
            return self._graph(tree)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, AssertionError) as error:
            raise error if isinstance(error, Damaged) else Damaged(f"no graph: {error}") from error

    def _graph(self, tree: Mapping[str, Any]) -> GraphModule:
        decode, argument, nodes = self.decode, self._arguments.decode, self._nodes
        self._fakes = [self._fake(*facts) for facts in tree["fakes"]]
        if any(target[0] not in ("O", "F") for target in tree["targets"]):
            raise Damaged("a call target that is not allowed")
        targets = [decode(target) for target in tree["targets"]]
        notes = [(key, decode(value)) for key, value in tree["notes"]]
        if not {key for key, _ in notes} <= NODES.keys():
            raise Damaged("unknown metadata")
        graph, taken, given, ended = Graph(), set[str](), set[str](), False
        for kind, name, target, args, kwargs, noted in tree["nodes"]:
            if ended or not is_name(name) or name in taken:
                raise Damaged(f"a node {name!r}")
            taken.add(name)
            args, kwargs = argument(args) if args else (), argument(kwargs) if kwargs else {}
            if kind == "c":
                _check_keywords(kwargs)
                node = append_node(graph, "call_function", name, targets[_place(target)], args, kwargs)
            elif kind == "p" and is_name(target) and target not in given:
                given.add(target)
                node = append_node(graph, "placeholder", name, target, args, kwargs)
            elif kind == "o" and target == "output":
                node, ended = append_node(graph, "output", name, target, args, kwargs), True
            else:
                raise Damaged(f"a node of kind {kind!r}")
            note_all(node, [notes[_place(i)] for i in noted])
            nodes.append(node)
        gm = graph_module(graph)
        gm.meta = decode(tree["meta"])
        return gm

    def _fake(
        self, size: Any, stride: Any, offset: Any, dtype: Any, device: Any, requires_grad: Any, parameter: Any
    ) -> Tensor:
        kind = kind_of_torch(dtype)
        made = fake_tensor(
            self._mode, size, stride, offset, kind, torch.device(device), requires_grad and not parameter
        )
        return nn.Parameter(made, requires_grad) if parameter else made


def is_name(text: object) -> bool:
    """Whether a text may be a name in generated code. This keeps code from a file out of generated code."""
    return isinstance(text, str) and _NAME.fullmatch(text) is not None and not keyword.iskeyword(text)


def _check_keywords(kwargs: Any) -> None:
    if not isinstance(kwargs, dict) or not all(map(is_name, kwargs)):
        raise Damaged("arguments without names")


def _place(i: Any) -> int:
    """Check an index into a table."""
    if type(i) is not int or i < 0:
        raise Damaged(f"no place {i!r}")
    return i
