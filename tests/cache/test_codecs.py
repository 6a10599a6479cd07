"""What a file of the cache holds comes back as it was; what no encoder writes is refused, and runs nothing."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import re
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.utils._pytree import tree_flatten

from autopar.adapters.copying.fake import fake_like, new_mode
from autopar.adapters.operators import argument_types, mutates, name_of
from autopar.cache.graph_codec import GraphDecoder, GraphEncoder
from autopar.cache.step_codec import StoredStep, plan_of_sections, plan_sections, step_of_sections, step_sections
from autopar.cache.value_codec import Damaged, Decoder, Encoder, Unstorable, find_operator
from autopar.compile.model import compile_graph, plan_model
from autopar.ir.graph import placeholders
from autopar.ir.mesh import Mesh, TokenSlice
from autopar.ir.meta import NODES
from autopar.ir.placement import PARTIAL, Shard
from autopar.options import Options
from autopar.rules.core import CORE
from autopar.schedule.order import Action
from autopar.steps.of_rank import GRAPHS, graphs_of_all
from tests.support.subjects import subject

VALUES = [
    None, True, False, 0, -1, 10**30, "", "ä\udc80\n\0", 0.1, -0.0, math.inf, -math.inf, 5e-324, 2.5j, b"\0\xff",
    (), (1, (2.0, [None])), [], [1, [2]], {}, {1: "a", (2, "b"): [3], None: 0.5}, {1, 2}, frozenset({"a"}),
    slice(None, -1, 2), ..., Fraction(1, 3), torch.float32, torch.device("cuda:1"), torch.strided,
    torch.channels_last, torch.Size([2, 3]), collections.OrderedDict(b=1, a=2), collections.Counter({("x", "y"): 3}),
    torch.ops.aten.add.Tensor, torch.ops.aten.__and__.Tensor, torch.ops.autopar.all_reduce.default, dict, nn.Linear,
    Shard(1, (4, -4)), PARTIAL, Action(1, "F", 2, paired=True), Mesh.of(dp=2, tp=4), TokenSlice(1, 2, 4),
    Options(zero=3),
]  # fmt: skip


def back(value: Any) -> Any:
    return Decoder().decode(json.loads(json.dumps(Encoder().encode(value))))


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_values_come_back(value: Any) -> None:
    found = back(value)
    assert type(found) is type(value) and found == value
    assert repr(found) == repr(value)  # the sign of a zero, the order of a dict


def test_not_a_number_comes_back() -> None:
    assert math.isnan(back(float("nan")))


@pytest.mark.parametrize(
    "made",
    [
        torch.arange(6).reshape(2, 3), torch.randn(4, 2).t(), torch.tensor(True), torch.empty(0, 3),
        torch.tensor([float("nan"), -0.0, math.inf]).bfloat16(), torch.randn(2, dtype=torch.complex64),
        torch.randn(3, 1).expand(3, 4), torch.arange(40.0)[3:20:4], torch.randn(2, 3)[:, 1:].t(),
    ],
    ids=lambda x: f"{x.dtype} {list(x.shape)}",
)  # fmt: skip
def test_constants_come_back_bit_for_bit(made: Tensor) -> None:
    found = back(made)
    assert found.dtype == made.dtype and found.stride() == made.stride()
    assert Encoder().encode(found) == Encoder().encode(made)
    if made.dtype is not torch.bfloat16:
        assert torch.equal(found, made)


@dataclasses.dataclass
class Foreign:
    x: int = 0


def spec(value: Any) -> Any:
    return tree_flatten(value)[1]


def test_operators_that_reach_beyond_their_operands() -> None:
    """No operator of torch that a stored step may call takes a file, a device or a storage, or writes to anything."""
    allowed = []
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        op = getattr(getattr(getattr(torch.ops, space), packet, None), overload or "default", None)
        known = op is not None and find_operator(space, packet, overload or "default") is not None
        allowed += [op] if known else []
    assert {space for space in (name_of(op).partition("::")[0] for op in allowed)} == {"aten", "autopar"}
    assert len(allowed) > 500 and not any(map(mutates, allowed))
    beyond = [op for op in allowed if op not in CORE and name_of(op).startswith("aten")]
    taken = {kind for op in beyond for kind in argument_types(op)}
    assert not [kind for kind in taken if re.search("str|Device|Storage|Stream|Generator|Any|Class", kind)]
    assert not [op for op in allowed if re.search("file|pin_memory|storage|stream|data_ptr", str(op))]
    aten = torch.ops.aten
    for op in (aten.upsample_bilinear2d_backward.default, aten.native_group_norm.default, aten.diagonal.default):
        assert op in allowed


@pytest.mark.parametrize(
    "value",
    [
        object(), Foreign(), lambda: 0, print, torch.ops.quantized.add.default, nn.Parameter(torch.zeros(2)),
        torch.zeros(2).to_sparse(), range(3), iter([]), Exception(),
        type("Local", (), {}), [1, {2: object()}], torch.ops.aten.from_file.default, torch.ops.aten.fill_.Scalar,
        torch.ops.aten.set_.source_Tensor, torch.ops.aten._pin_memory.default, torch.ops.aten._reshape_alias.default,
        spec(collections.defaultdict(Foreign)),
    ],
    ids=lambda x: type(x).__name__,
)  # fmt: skip
def test_other_things_cannot_be_stored(value: Any) -> None:
    with pytest.raises(Unstorable):
        Encoder().encode(value)


@pytest.mark.parametrize(
    "tree",
    [
        ["O", "aten", "__class__", "default"], ["O", "autopar", "all_reduce", "__init__"], ["O", "os", "system", "x"],
        ["O", "aten", "add.Tensor", "default"], ["F", "os.system"], ["F", "operator.attrgetter"], ["F", "eval"],
        ["c", "os", "system"], ["c", "builtins", "eval"], ["c", "torch.nn", "Linear.__init__"],
        ["c", "not_loaded", "A"], ["c", "os", "__dict__"], ["D", "subprocess", "Popen", "ls"],
        ["D", "autopar.plan", "json.JSONDecoder"], ["D", "autopar.options", "Options", 1],
        ["D", "autopar.ir.mesh", "AXES"],
        ["e", "autopar.options", "Options", "zero"], ["N", "collections", "namedtuple", "a", "b"],
        ["T", ["c", "os", "PathLike"], None], ["T", ["c", "torch.nn", "Linear"], None, None], ["T", "namedtuple"],
        ["x", "float32", [1 << 60], [1], "AAAA"], ["x", "float32", [2], [1], "AAAA"], ["x", "nn", [1], [1], None],
        ["x", "float32", [-1], [1], None], ["y", "nn"], ["y", "_dynamo"], ["y", "__loader__"], ["v", "the moon"],
        ["f", "1.0.0"],
        ["f", []], ["b", "?"], ["/", 1, 0], ["d", 1], ["d", ["l"], 1], ["s", ["l"]], ["?"], [], [["l"]], ["l", ["?"]],
        ["n", 0], ["k", 0], ["i", 1], ["O", "aten", "from_file", "default"], ["O", "aten", "fill_", "Scalar"],
        ["O", "aten", "set", "source_Tensor"], ["O", "prims", "device_put", "default"],
        ["T", "namedtuple", ["c", "pathlib", "PosixPath"], ["T", None, None]],
        ["T", ["c", "collections", "defaultdict"], ["l", ["c", "subprocess", "Popen"], ["l"]]],
        ["T", ["c", "torch._higher_order_ops.flat_apply", "_ConstantFunction"], ["t"]],
        ["D", "autopar.cache.disk_cache", "Path"], ["c", "autopar.cache.background_compile", "subprocess.Popen"],
        ["x", "float32", [2], [1 << 40], "AAAAAAAAAAA="], ["x", "float32", [2], [-1], "AAAAAAAAAAA="],
        ["x", "float32", [2, 2], [1], "AAAAAAAAAAA="], ["x", "float32", [2.5], [1], "AAAA"],
    ],
    ids=str,
)  # fmt: skip
def test_what_no_encoder_writes_is_refused(tree: Any) -> None:
    with pytest.raises(Damaged):
        Decoder().decode(tree)


# --- graphs -----------------------------------------------------------------------------------------------

CELLS: list[tuple[str, str, dict[str, Any], bool]] = [
    ("llama", "dp=2,tp=2", {"sequence_parallel": True}, True),
    ("one-layer mixtral", "dp=2", {"zero": 3}, True),
    ("gpt2 with dropout", "pp=2,dp=2", {"microbatches": 4, "schedule": "zb_h1"}, True),
    ("packed llama", "cp=2", {}, True),
    ("t5", "tp=2", {}, False),
    ("cnn", "dp=2", {"microbatches": 2}, True),
    ("llama", "pp=2", {"microbatches": 2, "schedule": "tera_pipe", "token_slices": 4}, True),
    ("two losses", "dp=2", {}, True),
]


@pytest.mark.parametrize(("name", "mesh", "options", "train"), CELLS, ids=str)
def test_steps_come_back(name: str, mesh: str, options: dict[str, Any], train: bool) -> None:
    """Code, notes and order of every graph; nothing is made before it is asked for."""
    made = compile_graph(subject(name).graph(), Mesh.parse(mesh), Options(**options), train=train)
    sections = step_sections(made)
    found = step_of_sections(sections, made.constants)
    assert isinstance(found, StoredStep) and "local" not in vars(found)
    assert found.plan == made.plan and found.signature == made.signature and found.parameters == made.parameters
    assert found.signature.leaves == made.signature.leaves and found.signature.spec == made.signature.spec
    assert found.pipeline.order == made.pipeline.order and found.pipeline.edges == made.pipeline.edges
    assert not any("graph" in vars(step) for part in found.pipeline.parts for step in steps_of(part))
    pairs = zip(graphs_of_all(made.pipeline, made.prologue), graphs_of_all(found.pipeline, found.prologue), strict=True)
    for old, new in [(made.local, found.local), *pairs]:
        same_graphs(old, new)
    assert step_sections(found) == sections


def steps_of(part: Any) -> list[Any]:
    return [step for kind in GRAPHS.values() if (step := getattr(part, kind)) is not None]


def same_graphs(old: GraphModule, new: GraphModule) -> None:
    assert old.code == new.code
    new.graph.lint()
    for a, b in zip(old.graph.nodes, new.graph.nodes, strict=True):
        assert (a.op, a.name, str(a.target)) == (b.op, b.name, str(b.target))
        assert [x.name for x in a.all_input_nodes] == [x.name for x in b.all_input_nodes]
        assert {x.name for x in a.users} == {x.name for x in b.users}  # in an order that nothing depends on
        assert facts({k: v for k, v in a.meta.items() if k in NODES}) == facts(b.meta)


def facts(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.storage_offset(), type(x)
    if isinstance(x, dict):
        return [(key, facts(value)) for key, value in x.items()]
    return [type(x), *map(facts, x)] if isinstance(x, (list, tuple)) else x if not callable(x) else str(x)


def test_inputs_that_are_equal_stay_apart() -> None:
    """A compiler takes equal inputs for one tensor; results of calls may be one."""
    graph = small_graph()
    new = GraphDecoder(new_mode()).graph(GraphEncoder().graph(graph))
    a, b = (node.meta["val"] for node in placeholders(new))
    assert a is not b and a.shape == b.shape


def small_graph() -> GraphModule:
    graph, mode = Graph(), new_mode()
    nodes = [graph.placeholder(name) for name in ("a", "b")]
    total = graph.call_function(torch.ops.aten.add.Tensor, (*nodes,), {"alpha": 2})
    graph.output((total,))
    for node in (*nodes, total):
        node.meta["val"] = fake_like(torch.zeros(2), mode)
    return GraphModule(nn.Module(), graph)


def damaged(change: Any) -> Any:
    tree = json.loads(json.dumps(GraphEncoder().graph(small_graph())))
    change(tree)
    return tree


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t["nodes"][0].__setitem__(1, "a; import os"),
        lambda t: t["nodes"][0].__setitem__(1, "lambda"),
        lambda t: t["nodes"][0].__setitem__(1, "ａ"),
        lambda t: t["nodes"][0].__setitem__(2, "a=print()"),
        lambda t: t["nodes"][1].__setitem__(1, "a"),
        lambda t: t["nodes"][2].__setitem__(2, -1),
        lambda t: t["nodes"][2].__setitem__(2, 9),
        lambda t: t["nodes"][2].__setitem__(3, ["t", ["n", 5]]),
        lambda t: t["nodes"][2].__setitem__(3, ["t", ["n", 2]]),
        lambda t: t["nodes"][2].__setitem__(4, ["d", "alpha=print(", 1]),
        lambda t: t["nodes"][2].__setitem__(0, "get_attr"),
        lambda t: t["nodes"].append(t["nodes"][0]),
        lambda t: t["targets"].__setitem__(0, "print"),
        lambda t: t["targets"].__setitem__(0, ["c", "subprocess", "Popen"]),
        lambda t: t["notes"].append(["forward", 1]),
        lambda t: t["nodes"][1].__setitem__(2, "a"),
        lambda t: t["nodes"][2].__setitem__(3, ["t", ["n", 0], ["D", "autopar.ir.mesh", "Mesh", "a", "b"]]),
        lambda t: t["nodes"][2].__setitem__(3, ["t", ["n", 0], ["c", "subprocess", "Popen"]]),
        lambda t: t["nodes"][2].__setitem__(3, ["t", ["n", 0], ["O", "aten", "add", "Tensor"]]),
        lambda t: t["nodes"][2].__setitem__(4, ["M", "alpha", ["C", "x", 1]]),
        lambda t: t["nodes"][3].__setitem__(3, ["t", ["F", "max"]]),
        lambda t: t["fakes"][0].__setitem__(3, "nn"),
        lambda t: t["fakes"][0].__setitem__(0, [-5]),
        lambda t: t.pop("meta"),
        lambda t: t.__setitem__("nodes", 5),
    ],
)
def test_damaged_graphs_are_refused(change: Any) -> None:
    tree = damaged(change)
    with pytest.raises(Damaged):
        GraphDecoder(new_mode()).graph(tree)


def test_arguments_that_code_cannot_have_are_not_stored() -> None:
    for argument in (Shard(0), torch.ops.aten.add.Tensor, nn.Linear, Fraction(1, 2), {1, 2}):
        graph = small_graph()
        (call,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
        call.args = (call.args[0], [argument])
        with pytest.raises(Unstorable, match="a call with a "):
            GraphEncoder().graph(graph)


def test_graphs_with_attributes_cannot_be_stored() -> None:
    module = nn.Linear(2, 2)
    with pytest.raises(Unstorable):
        GraphEncoder().graph(torch.fx.symbolic_trace(module))


def test_plans_come_back() -> None:
    s = subject("llama")
    made = plan_model(s.model, s.batch, Mesh.of(dp=2, tp=2), Options())
    assert plan_of_sections(plan_sections(made)) == made


def test_a_step_without_its_parts_is_refused() -> None:
    made = compile_graph(subject("mlp").graph(), Mesh.of(dp=2), Options())
    sections = step_sections(made)
    for lost in sections:
        with pytest.raises(Damaged):
            step_of_sections({name: data for name, data in sections.items() if name != lost}, made.constants)
    s = subject("mlp")
    plan = plan_sections(plan_model(s.model, s.batch, Mesh.of(dp=2), Options()))
    with pytest.raises(Damaged):
        step_of_sections(sections | plan, made.constants)
