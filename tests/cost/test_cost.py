"""Memory and communication of compiled models against the formulas of their papers, and of small graphs by hand."""

from __future__ import annotations

import functools
import operator
from typing import Any

import pytest
import torch
import transformers
from torch.fx import Graph, GraphModule, Node

from autopar.compile.model import compile_model
from autopar.cost.memory import memory, optimizer_bytes
from autopar.cost.traffic import communication, graph_runs, step_communication
from autopar.ir.live_values import peak_of_values
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Shard
from autopar.ir.signature import ParameterSpec
from autopar.ir.storages import storage_bytes, storages
from autopar.ir.traffic import Traffic
from autopar.models import hf as hf
from autopar.options import Options
from autopar.steps.graphs import Compiled

aten = torch.ops.aten
HIDDEN, HEADS, KEYS, INNER, VOCAB, SEQ, BATCH = 64, 8, 4, 128, 256, 32, 8
WIDTH_OF_KEYS = HIDDEN // HEADS * KEYS
MATRICES_OF_LAYER = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * WIDTH_OF_KEYS + 3 * HIDDEN * INNER
TABLES = 2 * VOCAB * HIDDEN


def compiled(mesh: str = "dp=2,tp=2", layers: int = 1, **options: Any) -> Compiled:
    """A llama whose every dim divides over the mesh."""
    return _compiled(mesh, layers, tuple(sorted((name, value) for name, value in options.items() if value)))


@functools.cache
def _compiled(mesh: str, layers: int, options: tuple[tuple[str, Any], ...]) -> Compiled:
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=KEYS, intermediate_size=INNER,
        vocab_size=VOCAB, num_hidden_layers=layers, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    shape = (BATCH, SEQ)
    batch = {name: torch.zeros(shape, dtype=torch.int64, device="meta") for name in ("input_ids", "labels")}
    return compile_model(model, batch, Mesh.parse(mesh), Options(**dict(options)), outputs=())


# --- what is stored ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "zero", "pieces"), [("dp=4", 0, 1), ("tp=4", 0, 4), ("dp=2,tp=2", 0, 2), ("dp=2,tp=2", 3, 4)]
)
def test_tp_cuts_matrices_and_zero_3_cuts_them_again(mesh: str, zero: int, pieces: int) -> None:
    found = memory(compiled(mesh, zero=zero))
    elements = (MATRICES_OF_LAYER + TABLES) // pieces + 3 * HIDDEN  # norms are whole everywhere
    assert found.parameters == found.gradients == 2 * elements
    assert found.optimizer == 4 * elements  # in bfloat16; with float32 masters (precision="bf16") ZeRO's k = 12
    assert found.steady == found.parameters + found.buffers + found.inputs + found.optimizer
    assert found.inputs == 2 * 8 * BATCH * SEQ // Mesh.parse(mesh).size("dp")


@pytest.mark.parametrize(("dtype", "per_element"), [(torch.bfloat16, 4), (torch.float32, 8), (torch.float64, 16)])
def test_adamw_keeps_two_moments_like_the_parameter(dtype: torch.dtype, per_element: int) -> None:
    spec = ParameterSpec("w", (8, 4), dtype, placements={"tp": Shard(0), "dp": Shard(1)})
    assert optimizer_bytes(spec, Mesh.of(dp=2, tp=2)) == per_element * 8


# --- activations ---------------------------------------------------------------------------------------------


def saved_of_layer(**options: Any) -> int:
    two, one = (memory(compiled("dp=2,tp=2", layers, **options)).saved for layers in (2, 1))
    return two - one


def test_saved_activations_of_a_llama_layer() -> None:
    """Per token: two norms save their float32 input (4h), the scale (4), x̂ (2h) and what the products read (2h); the
    rest is on tp shards: q, out (2h each), k, v, log-sum-exp (4 per head), and gate, silu, up, product (2f each)."""
    tokens, t = BATCH * SEQ // 2, 2
    norms = 2 * (4 * HIDDEN + 4 + 2 * HIDDEN)
    read = 2 * 2 * HIDDEN
    cut = (2 * 2 * HIDDEN + 2 * 2 * WIDTH_OF_KEYS + 4 * HEADS + 4 * 2 * INNER) // t
    assert saved_of_layer() == tokens * (norms + read + cut)
    assert saved_of_layer(sequence_parallel=True) == tokens * (norms // t + read + cut)


def test_microbatches_divide_activations_and_keep_gradient_sums() -> None:
    one, two = memory(compiled(layers=1, zero=3)), memory(compiled(layers=1, zero=3, microbatches=2))
    assert (one.accumulated, two.inputs) == (0, one.inputs)
    # before they are reduced, gradients are unsharded on dp; with zero=3 each microbatch reduces its own
    assert two.accumulated == two.gradients
    once = memory(compiled(layers=1, zero=3, microbatches=2, reduce_grads="step"))
    assert once.accumulated == 2 * ((MATRICES_OF_LAYER + TABLES) // 2 + 3 * HIDDEN)
    assert two.saved < 0.6 * one.saved
    assert two.forward_peak >= two.saved + two.accumulated


def test_peaks_hold_at_least_what_must_be_there() -> None:
    found = memory(compiled(layers=2))
    assert found.forward_peak >= found.saved
    assert found.backward_peak >= max(found.saved, found.gradients)
    assert found.peak == found.steady + max(found.forward_peak, found.backward_peak)


# --- small graphs by hand ------------------------------------------------------------------------------------


def call(graph: Graph, target: object, *args: object, like: object) -> Node:
    node = graph.call_function(target, args)  # type: ignore[arg-type]
    node.meta["val"] = like
    return node


def chain() -> GraphModule:
    """w held, x given: a = x + w; b = view(a); c = relu(b); d = relu(c); returns (d, b). 16 bytes each."""
    flat, square = torch.empty(4, device="meta"), torch.empty(2, 2, device="meta")
    graph = Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    x.meta["val"] = w.meta["val"] = flat
    a = call(graph, aten.add.Tensor, x, w, like=flat)
    b = call(graph, aten.view.default, a, [2, 2], like=square)
    c = call(graph, aten.relu.default, b, like=square)
    d = call(graph, aten.relu.default, c, like=square)
    graph.output((d, b))
    return GraphModule({}, graph)


def test_a_value_lives_from_its_node_to_the_last_use_of_a_view() -> None:
    gm = chain()
    nodes = {n.name: n for n in gm.graph.nodes}
    assert storages(gm)[nodes["view_default"]] == ((nodes["add_tensor"], 0),)
    assert peak_of_values(gm, held={"w"}) == 48  # a (kept as b), c and d; x is gone
    assert peak_of_values(gm, held={"w", "x"}) == 48
    assert peak_of_values(gm, held=()) == 48  # x, w and a
    assert storage_bytes(gm, [1], held={"w"}) == 16
    assert storage_bytes(gm, [0, 1], held={"w"}) == 32


def test_results_of_one_call_are_counted_one_by_one() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, device="meta")
    several = call(graph, aten.native_layer_norm.default, x, like=(x.meta["val"], None, x.meta["val"][:1]))
    first = call(graph, operator.getitem, several, 0, like=x.meta["val"])
    last = call(graph, operator.getitem, several, 2, like=x.meta["val"][:1])
    graph.output((first, last, first))
    gm = GraphModule({}, graph)
    assert storage_bytes(gm, [1, 2], held={"x"}) == 20
    assert peak_of_values(gm, held={"x"}) == 20


# --- communication -------------------------------------------------------------------------------------------


def ring(kind: str, size: int, n: int) -> int:
    return (2 if kind == "all_reduce" else 1) * size * (n - 1) // n


def test_tensor_parallel_layer_all_reduces_four_times() -> None:
    """Megatron-LM: after each row-parallel product forward, and before each column-parallel one backward."""
    two, one = (step_communication(compiled("tp=4", layers))["tp", "all_reduce"] for layers in (2, 1))
    assert (two.calls - one.calls, two.bytes - one.bytes) == (4, 4 * ring("all_reduce", 2 * BATCH * SEQ * HIDDEN, 4))


def test_data_parallel_sends_twice_the_gradients() -> None:
    found = step_communication(compiled("dp=4"))
    gradients = memory(compiled("dp=4")).gradients
    assert {kind for _, kind in found} == {"all_reduce"}
    assert found["dp", "all_reduce"].bytes - ring("all_reduce", gradients, 4) in range(64)  # the loss and its count


@pytest.mark.parametrize("microbatches", [1, 2])
def test_zero_3_gathers_and_scatters_in_every_microbatch(microbatches: int) -> None:
    """All-gather in F and B of each microbatch, a reduce-scatter in B, whole norms all-reduced: 3Ψ(n-1)/n and more."""
    found = step_communication(compiled("dp=4", zero=3, microbatches=microbatches))
    matrices = 2 * (MATRICES_OF_LAYER + TABLES)
    # B gathers all but the table of the embedding, which it does not read: 2 bytes for V h elements
    gathered = microbatches * (2 * matrices - 2 * VOCAB * HIDDEN)
    assert found["dp", "all_gather"].bytes == ring("all_gather", gathered, 4)
    assert found["dp", "reduce_scatter"].bytes == microbatches * ring("reduce_scatter", matrices, 4)


def test_a_step_counts_each_graph_as_often_as_it_runs() -> None:
    two = compiled(layers=1, zero=3, microbatches=2, reduce_grads="step")
    assert {name: n for name, (_, n) in graph_runs(two).items()} == {
        "prologue": 2,
        "forward": 2,
        "backward": 1,
        "backward_reduce": 1,
    }
    one = {name: communication(gm, two.plan.mesh) for name, (gm, _) in graph_runs(two).items()}
    key = ("dp", "all_gather")
    sums = [one[name].get(key, Traffic()) for name in ("forward", "forward", "backward", "backward_reduce")]
    assert step_communication(two)[key] == functools.reduce(operator.add, sums)
    assert Traffic(2, 3).times(2) == Traffic(4, 6)
