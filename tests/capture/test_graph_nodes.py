"""Nodes made without torch's look through their arguments are those that torch makes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import Graph, Node
from torch.fx.graph import _Namespace

from autopar.adapters.fx.graph_nodes import _free_name, copied_node, new_node

aten = torch.ops.aten


def _source() -> Graph:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("input")
    both = graph.call_function(aten.cat.default, ([x, y, x], 0))
    half = graph.call_function(aten.slice.Tensor, (both,), {"dim": 0, "start": 1}, torch.Tensor)
    half.meta["note"] = "kept"
    graph.output((half, graph.call_method("t", (half,))))
    return graph


def _facts(graph: Graph) -> list[object]:
    return [
        (
            n.op,
            n.name,
            n.target,
            str(n.args),
            str(n.kwargs),
            n.type,
            n.meta,
            [u.name for u in n.users],
            n.all_input_nodes,
        )
        for n in graph.nodes
    ]


def _copied(copy: object) -> list[object]:
    graph, new = Graph(), dict[Node, Node]()
    for node in _source().nodes:
        new[node] = copy(graph, node, new.__getitem__)  # type: ignore[operator]
    graph.lint()
    named = {n: n.name for n in graph.nodes}
    return [(*fact[:-1], [named[n] for n in fact[-1]]) for fact in _facts(graph)]  # type: ignore[index]


def test_copies_are_torchs() -> None:
    assert _copied(copied_node) == _copied(Graph.node_copy)


@given(st.lists(st.from_regex(r"\A(_|x|if|input|a_b|x_0)?_{0,2}([0-9]{1,2}|_1)?(_[0-9])?[ .é]?\Z"), max_size=12))
def test_names_are_torchs(wanted: list[str]) -> None:
    ours, torchs = _Namespace(), _Namespace()
    for name in wanted:
        assert not name or _free_name(ours, name) == torchs.create_name(name, None)
    assert vars(ours) == vars(torchs)


def test_a_copy_has_notes_of_its_own() -> None:
    node = next(n for n in _source().nodes if n.meta)
    made = copied_node(graph := Graph(), node, lambda x: graph.placeholder(x.name))
    made.meta["note"] = "changed"
    assert node.meta == {"note": "kept"}


def test_a_new_node_stands_at_the_insertion_point_under_a_name_of_its_own() -> None:
    graph = _source()
    first = next(n for n in graph.nodes if n.op == "call_function")
    with graph.inserting_before(first):
        made = new_node(graph, "call_function", aten.neg.default, (first.args[0][0],), name="cat_default")  # type: ignore[index]
    assert made.next is first and made.name == "cat_default_1" and made in first.args[0][0].users  # type: ignore[index]
    assert graph.find_nodes(op="call_function", target=aten.neg.default) == [made]
    assert new_node(graph, "call_function", aten.neg.default, (made,)).name == "neg_default"
    assert len(graph.nodes) == len([*graph.nodes])
    graph.lint()
