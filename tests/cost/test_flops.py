"""Operations, bytes and seconds of nodes: by hand, against torch's own counter, and over whole step graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from autopar.adapters.operators import OpOverload, name_of
from autopar.compile.model import compile_model
from autopar.cost.flops import COUNTS, flops, memory_bytes, node_seconds, pairs, seconds_of
from autopar.cost.hardware import DEFAULT, Links
from autopar.ir.graph import set_argument
from autopar.ir.mesh import Mesh
from autopar.models import hf as hf
from autopar.ops.mask_spec import MaskSpec
from autopar.options import Options
from tests.support.devices import device

aten = torch.ops.aten


def traced(f: Callable[..., Any], *shapes: Sequence[int], dtype: torch.dtype = torch.float32) -> GraphModule:
    """The aten graph of a function of random tensors."""
    inputs = [torch.rand(*s).to(dtype) for s in shapes]
    gm: GraphModule = make_fx(f, tracing_mode="fake")(*inputs)
    return gm


def calls(gm: GraphModule) -> list[Node]:
    return [n for n in gm.graph.nodes if n.op == "call_function"]


def count(f: Callable[..., Any], *shapes: Sequence[int]) -> int:
    return sum(flops(n) for n in calls(traced(f, *shapes)))


def op_name(node: Node) -> str:
    """'mm' of aten.mm.default; a function's own name."""
    return name_of(node.target).split("::")[1] if isinstance(node.target, OpOverload) else node.name


def product_flops(gm: GraphModule) -> int:
    return sum(flops(n) for n in calls(gm) if op_name(n) in ("mm", "bmm", "addmm", "linear"))


# --- products ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("f", "shapes"),
    [
        (torch.mm, [(3, 5), (5, 7)]),
        (torch.bmm, [(2, 3, 5), (2, 5, 7)]),
        (torch.addmm, [(7,), (3, 5), (5, 7)]),
        (torch.baddbmm, [(2, 3, 7), (2, 3, 5), (2, 5, 7)]),
        (lambda x, w: aten.convolution(x, w, None, [2], [1], [1], False, [0], 2), [(2, 4, 11), (6, 2, 3)]),
        (lambda x, w: aten.convolution(x, w, None, [1, 1], [1, 0], [1, 2], False, [0, 0], 1),
         [(2, 4, 9, 8), (6, 4, 3, 3)]),
        (lambda x, w: aten.convolution(x, w, None, [2], [1], [1], True, [0], 1), [(2, 4, 11), (4, 6, 3)]),
        (lambda g, x, w: aten.convolution_backward(g, x, w, [0], [1], [1], [1], False, [0], 1, [True, True, False]),
         [(2, 6, 11), (2, 4, 11), (6, 4, 3)]),
    ],
)  # fmt: skip
def test_products_are_counted_as_torch_counts_them(f: Callable[..., Any], shapes: list[tuple[int, ...]]) -> None:
    with FlopCounterMode(display=False) as counter:
        f(*(torch.rand(*s) for s in shapes))
    assert count(f, *shapes) == counter.get_total_flops() > 0


def test_products_of_exported_graphs() -> None:
    """linear, matmul and convolutions before decomposition; the bias is left out."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.conv = nn.Linear(6, 10), nn.Conv1d(4, 8, 3)
            self.back = nn.ConvTranspose1d(8, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.matmul(self.back(self.conv(x)), self.up(x).transpose(1, 2)[:, :6, :])

    x = torch.rand(2, 4, 6)
    gm = torch.export.export(Model(), (x,)).module()
    found = {op_name(n): flops(n) for n in calls(gm)}
    assert found["linear"] == 2 * (2 * 4 * 6 * 10)
    assert found["conv1d"] == 2 * (2 * 4 * 4) * 8 * 3
    assert found["conv_transpose1d"] == 2 * (2 * 4 * 4) * 8 * 3
    assert found["matmul"] == 2 * 2 * (4 * 6 * 4)
    with FlopCounterMode(display=False) as counter:
        Model()(x)
    assert sum(flops(n) for n in calls(gm) if f"aten::{op_name(n)}" in COUNTS) == counter.get_total_flops()


@pytest.mark.parametrize(
    ("equation", "shapes", "expected"),
    [
        ("bij,jk->bik", [(2, 3, 4), (4, 5)], 2 * 2 * 3 * 4 * 5),
        ("...i,oi->...o", [(2, 7, 4), (5, 4)], 2 * 14 * 4 * 5),
        ("bhqd,bhkd->bhqk", [(2, 3, 4, 5), (2, 3, 6, 5)], 2 * 6 * 4 * 6 * 5),
    ],
)
def test_einsum(equation: str, shapes: list[tuple[int, ...]], expected: int) -> None:
    graph = torch.fx.Graph()
    xs = [graph.placeholder(f"x{i}") for i in range(len(shapes))]
    node = graph.call_function(aten.einsum.default, (equation, xs))
    for x, s in zip(xs, shapes, strict=True):
        x.meta["val"] = torch.empty(s, device="meta")
    node.meta["val"] = torch.einsum(equation, *(x.meta["val"] for x in xs))
    assert flops(node) == expected


def test_grouped_products_do_not_depend_on_the_routing() -> None:
    """Every row meets one expert; the gradients to rows and to weights cost as much again each."""
    rows, weight = torch.rand(12, 4), torch.rand(3, 6, 4)
    offsets = torch.tensor([2, 7, 12], dtype=torch.int32)

    def step(rows: Tensor, weight: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
        out = torch.ops.autopar.grouped_mm(rows, weight, offsets, False)
        to_rows = torch.ops.autopar.grouped_mm(out, weight, offsets, True)
        return out, to_rows, torch.ops.autopar.grouped_mm_weight_grad(out, rows, offsets, False)

    gm = make_fx(step, tracing_mode="fake")(rows, weight, offsets)
    assert [flops(n) for n in calls(gm)] == [2 * 12 * 4 * 6] * 3


# --- attention -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [0, 1, 3])
@pytest.mark.parametrize("chunk", [0, 4])
@pytest.mark.parametrize(("queries", "keys", "offset"), [(10, 10, 0), (4, 10, 0), (10, 4, 0), (4, 10, 6), (3, 10, 5)])
def test_allowed_pairs_are_those_of_the_mask(
    causal: bool, window: int, chunk: int, queries: int, keys: int, offset: int
) -> None:
    facts = MaskSpec(None, None, None, None, None, causal, window, chunk, offset, 1.0, 0.0, 0.0, 0, [], [], [])
    mask = facts.allowed(queries, keys, torch.device("cpu"))
    expected = queries * keys if mask is None else int(mask.sum())
    assert pairs(queries, keys, causal, window, chunk, offset) == expected


def test_attention() -> None:
    """Grouped heads, values wider than keys; causal is the triangle; the backward computes the scores again."""
    q, k, v, n, d, dv = (2, 8, 16, 4), (2, 2, 16, 4), (2, 2, 16, 6), 16, 4, 6

    def run(causal: bool) -> list[Node]:
        facts = (None, None, None, None, None, causal, 0, 0, 0, 1.0, 0.0, 0.0, 0, [], [], [])

        def step(q: Tensor, k: Tensor, v: Tensor) -> Any:
            out, lse = torch.ops.autopar.attention(q, k, v, *facts)
            return torch.ops.autopar.attention_backward(out, q, k, v, out, lse, *facts, False)

        return [x for x in calls(traced(step, q, k, v)) if "attention" in str(x.target)]

    for causal, allowed in ((False, n * n), (True, n * (n + 1) // 2)):
        forward, backward = run(causal)
        assert flops(forward) == 2 * 2 * 8 * allowed * (d + dv)
        assert flops(backward) == 2 * 2 * 8 * allowed * (3 * d + 2 * dv)


def test_attention_of_any_token_slice() -> None:
    """Where the offset is a value of the graph, the queries are the last tokens of those that the keys know."""
    facts = (None, None, None, None, None, True, 0, 0, 6, 1.0, 0.0, 0.0, 0, [], [], [])
    gm = traced(lambda q, k: torch.ops.autopar.attention(q, k, k, *facts), (1, 1, 4, 8), (1, 1, 10, 8))
    node = next(n for n in calls(gm) if op_name(n) == "attention")
    fixed = flops(node)
    with gm.graph.inserting_before(node):
        set_argument(node, "offset", gm.graph.placeholder("slice_start"))
    assert flops(node) == fixed == 2 * (7 + 8 + 9 + 10) * (8 + 8)


@pytest.mark.parametrize(
    ("requests", "window", "chunk", "allowed", "read"),
    [
        ([(1, 100)], 0, 0, 100, 100),
        ([(1, 100)] * 4, 0, 0, 400, 400),
        ([(1, 100)] * 4, 30, 0, 120, 120),
        ([(4, 10)], 0, 0, 7 + 8 + 9 + 10, 10),
        ([(4, 10)], 3, 0, 4 * 3, 6),  # the first of the four looks back at two
        ([(3, 9), (1, 20)], 0, 8, 7 + 8 + 1 + 4, 9 + 4),
        (None, 0, 0, 4 * 2 * 16, 4 * 2 * 16),  # four requests with full tables
    ],
)
def test_attention_to_pages_of_requests(
    requests: list[tuple[int, int]] | None, window: int, chunk: int, allowed: int, read: int
) -> None:
    """Query heads of one key head read its keys once; pools are not read as a whole."""

    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        ints = (torch.arange(4), *(torch.zeros(shape, dtype=torch.int32) for shape in ((4, 2), (5,), (4,))))
        return torch.ops.autopar.cached_attention(
            q, k, v, keys, values, *ints, None, None, window, chunk, 0.5, 0.0, True
        )

    gm = traced(step, (1, 6, 4, 8), (1, 2, 4, 8), (1, 2, 4, 5), (9, 16, 2, 8), (9, 16, 2, 5))
    node = next(n for n in calls(gm) if op_name(n) == "cached_attention")
    assert flops(node, requests) == 2 * 6 * (8 + 5) * allowed
    own = 2 * 4 * (8 + 5)
    assert memory_bytes(node, requests) == (6 * 4 * (8 + 5) + 2 * own + 2 * read * (8 + 5)) * 4
    expected = max(flops(node, requests) / 25, memory_bytes(node, requests) / 10)
    assert node_seconds(node, DEVICE, requests=requests) == pytest.approx(expected)


def test_torchs_attention_counts_like_ours() -> None:
    shape = (2, 4, 16, 8)
    with FlopCounterMode(display=False) as counter:
        torch.rand(shape[0] * 4, 16, 8) @ torch.rand(8, 8, 16) @ torch.rand(8, 16, 8)
    gm = traced(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), shape, shape, shape)
    assert sum(flops(n) for n in calls(gm) if "attention" in str(n.target)) == counter.get_total_flops()


# --- everything else -----------------------------------------------------------------------------------------


def test_pointwise_counts_elements_and_views_count_nothing() -> None:
    gm = traced(lambda x: (x.relu().transpose(0, 1)[1:].unsqueeze(0) + 1).sum(), (3, 4))
    found = {op_name(n): (flops(n), memory_bytes(n)) for n in calls(gm)}
    assert found["relu"] == (12, 2 * 12 * 4)
    assert found["transpose"] == found["slice"] == found["unsqueeze"] == (0, 0)
    assert found["add"] == (9, 2 * 9 * 4)
    assert found["sum"] == (9, 9 * 4 + 4)


def test_a_lookup_reads_rows_and_its_gradient_writes_the_table() -> None:
    def step(table: Tensor, grad: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        return aten.embedding(table, index), aten.embedding_dense_backward(grad, index, 1000, -1, False)

    index = torch.zeros(6, dtype=torch.int64)
    gm = make_fx(step, tracing_mode="fake")(torch.rand(1000, 4), torch.rand(6, 4), index)
    lookup, back = calls(gm)[:2]
    assert memory_bytes(lookup) == 2 * 6 * 4 * 4
    assert memory_bytes(back) > 1000 * 4 * 4


# --- seconds -------------------------------------------------------------------------------------------------

DEVICE = device("test", 50.0, 10.0, float32=25.0)


def test_the_roofline() -> None:
    """A product is bound by its operations, of whole tiles, pointwise nodes by memory, and all together by launches."""
    (large,) = calls(traced(torch.mm, (512, 512), (512, 512)))
    (thin,) = calls(traced(torch.mm, (1, 4), (4, 4)))
    assert node_seconds(large, DEVICE) == 2 * 512**3 / 25
    assert node_seconds(thin, DEVICE) == 2 * 128 * 128 * 4 / 25
    (half,) = calls(traced(torch.mm, (512, 512), (512, 512), dtype=torch.bfloat16))
    assert node_seconds(half, DEVICE) == 2 * 512**3 / 50
    (sine,) = calls(traced(torch.sin, (512, 512)))
    assert node_seconds(sine, DEVICE) == 2 * 512**2 * 4 / 10
    slow = device("slow", 1e30, 1e30, launch=1.0)
    assert seconds_of([large, thin, half], slow) == 3.0


def test_time_of_a_step_of_a_llama() -> None:
    """Operations of the local step graphs: 2 per weight and token forward, twice that backward; the head counts like
    a layer's matrices, and cutting over tp cuts them."""
    hidden, inner, vocab, batch, length = 32, 64, 96, 4, 16
    config = transformers.LlamaConfig(
        hidden_size=hidden, num_attention_heads=4, num_key_value_heads=2, intermediate_size=inner, vocab_size=vocab,
        num_hidden_layers=1, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    data = {n: torch.zeros((batch, length), dtype=torch.int64, device="meta") for n in ("input_ids", "labels")}
    mesh = Mesh.of(dp=2, tp=2)
    compiled = compile_model(model, data, mesh, Options(), outputs=())
    weights = 3 * hidden * hidden + 3 * hidden * inner + vocab * hidden
    backward = compiled.stage.backward_reduce
    assert backward is not None
    forward = compiled.stage.forward.graph
    assert product_flops(compiled.local) == 2 * weights * batch * length // mesh.world_size
    assert product_flops(forward) == product_flops(compiled.local)
    assert product_flops(backward.graph) == 2 * product_flops(forward)
    for gm in (compiled.local, forward, backward.graph):
        alone, together = seconds_of(gm.graph.nodes, DEFAULT), seconds_of(gm.graph.nodes, DEFAULT, Links(mesh))
        assert 0 < alone < together  # with the mesh, transfers count
