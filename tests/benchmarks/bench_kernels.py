"""Kernels that a step launches on a GPU, the bytes that they move, and what the forward keeps, beside torch.compile's.

Of the code that Inductor plans for a GPU that is not there (`bench_expert_bytes`): each kernel reads its operands and
writes its results once. torch.compile's graphs are those that Dynamo and AOTAutograd make of the same model on the CPU,
moved to the GPU: attention is one kernel in both, where the model asks for it.

    python tests/benchmarks/bench_kernels.py [--only llama]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from bench_expert_bytes import planned_gpu
from common import publish
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

import autopar
from autopar.capture.front_end import capture
from autopar.compile.model import compile_graph
from autopar.ir.graph import copy_graph, set_device
from autopar.ir.mesh import Mesh
from autopar.models.tiny import TINY
from autopar.ops.traits import is_view
from autopar.options import Options
from autopar.runtime.exec.lowering import bind
from autopar.runtime.mesh.process_groups import Groups
from tests.cuda.fake_gpu import ROUTES, fake_gpu

_WIDE = {"hidden_size": 512, "intermediate_size": 1536, "vocab_size": 32000}
_HEADS = {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 8}
SIZES: dict[str, dict[str, Any]] = {
    "llama": {**_WIDE, "num_attention_heads": 8, "num_key_value_heads": 8},
    "gpt2": {"n_embd": 512, "n_inner": 2048, "n_head": 8, "vocab_size": 50257},
    "qwen3_moe": {**_WIDE, **_HEADS, "moe_intermediate_size": 512},
    "gemma2": {**_WIDE, **_HEADS},
    "t5": {"d_model": 512, "d_ff": 1536, "d_kv": 64, "num_heads": 8, "vocab_size": 32128},
    "whisper": {"d_model": 512, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048, "vocab_size": 51865},
}


@dataclasses.dataclass(frozen=True)
class Count:
    """kernels: without products. moved: bytes that they read and write. kept: bytes that a graph returns."""

    kernels: int
    products: int
    moved: int
    kept: int


def made(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model of two layers in bfloat16, and a batch of 4 x 512 tokens or as many as it takes."""
    entry = TINY[name]
    sizes = entry.sizes | SIZES[name]
    length = 512 if "max_position_embeddings" in sizes or "n_positions" in sizes else 64
    sizes |= {key: length for key in ("max_position_embeddings", "n_positions") if key in sizes}
    entry = dataclasses.replace(entry, sizes=sizes)
    return entry.build(dtype=torch.bfloat16), entry.batch(4, length, dtype=torch.bfloat16)


def planned(gm: GraphModule, given: list[Any], mode: FakeTensorMode) -> Count:
    """What Inductor makes of a graph."""
    gm.graph.output_node().meta.pop("user_visible_output_idxs", None)
    kept = kept_by(gm)
    with planned_gpu(mode):
        lowering = GraphLowering(gm, example_inputs=given, is_inference=True)
        with V.set_graph_handler(lowering), V.set_extern_kernel_nodes([]), V.set_debug_handler(DebugContext()):
            lowering.run(*given)
            lowering._update_scheduler()
            nodes = [n for n in lowering.scheduler.nodes if type(n).__name__ != "NopKernelSchedulerNode"]
            extern = [n for n in nodes if n.is_extern()]
            moved = sum(n.get_read_write_buffers_sizes() for n in nodes)
    return Count(len(nodes) - len(extern), len(extern), moved, kept)


def kept_by(gm: GraphModule) -> int:
    """Bytes of what a graph computes and returns, of each storage once."""
    found = dict[Node, int]()
    for node in gm.graph.output_node().all_input_nodes:
        size = node.meta["val"].nbytes if isinstance(node.meta.get("val"), Tensor) else 0
        while node.op == "call_function" and is_view(node.target) and isinstance(node.args[0], Node):
            node = node.args[0]
        if node.op == "call_function":
            found[node] = max(found.get(node, 0), size)
    return sum(found.values())


def of_ours(name: str) -> list[Count]:
    """Of the forward and of the backward."""
    model, batch = made(name)
    graph = copy_graph(capture(model, batch))
    options = Options(activation_checkpoint="fused")
    part = compile_graph(graph, Mesh.parse("dp=1"), options, outputs=()).pipeline.parts[0]
    found: list[Count] = []

    def counted(gm: GraphModule, given: list[Any]) -> None:
        found.append(planned(gm, given, next(x.fake_mode for x in given if hasattr(x, "fake_mode"))))

    with on_gpu(counted):
        groups = Groups(autopar.init_mesh("cuda", dp=1))
        for step in (part.forward, part.backward_reduce):
            assert step is not None
            decompose(step.graph)
            set_device(step.graph, groups.device)
            bind(step.graph, groups, "inductor")
    return found


@contextlib.contextmanager
def on_gpu(counted: Callable[[GraphModule, list[Any]], None]) -> Iterator[FakeTensorMode]:
    """Graphs that are bound for Inductor are counted instead."""
    with contextlib.ExitStack() as stack:
        gpu = stack.enter_context(fake_gpu(world=1))
        for method, route in ROUTES.items():
            stack.enter_context(patch.object(Tensor, method.__name__, route))
        stack.enter_context(patch("autopar.adapters.inductor.joint_graph_passes", lambda gm: None))
        stack.enter_context(patch("autopar.adapters.inductor.compile_fx_inner", counted))
        yield gpu


def decompose(gm: GraphModule) -> None:
    """A build for the CPU has no kernel of some backwards for GPUs."""
    for node in gm.graph.nodes:
        if node.target in (torch.ops.aten.silu_backward.default, torch.ops.aten.gelu_backward.default):
            node.target = select_decomp_table()[node.target]


def on_device(x: Any) -> Any:
    """A tensor of the same layout on the current fake GPU."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") if isinstance(x, Tensor) else x


def of_theirs(name: str) -> list[Count]:
    """Of the forward and of the backward."""
    model, batch = made(name)
    graphs: list[tuple[GraphModule, list[Any]]] = []

    def kept(gm: GraphModule, given: list[Any]) -> Any:
        graphs.append((gm, given))
        return make_boxed_func(gm)

    backend = aot_autograd(
        fw_compiler=kept, bw_compiler=kept, partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )  # fmt: skip
    torch._dynamo.reset()
    torch.compile(model, backend=backend)(**batch).loss.backward()
    found = []
    for gm, given in graphs:
        with fake_gpu(world=1) as gpu:
            set_device(gm, torch.device("cuda", 0))
            with gpu, torch.no_grad():
                there = [on_device(x) for x in given]
                flat = make_fx(
                    lambda *inputs, gm=gm: gm(*inputs),  # type: ignore[misc]
                    decomposition_table=select_decomp_table(), tracing_mode="real",
                )(*there)  # fmt: skip
            found.append(planned(flat, there, gpu))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    only = parser.parse_args().only
    lines = ["| model | | kernels | products, attention | moved, MB | kept, MB | moved, of its | kept, of its |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for name in SIZES:
        if only not in ("", name):
            continue
        theirs = of_theirs(name)
        for who, counts in {"torch.compile": theirs, "**autopar**": of_ours(name)}.items():
            kernels, products, moved = (
                sum(getattr(c, key) for c in counts) for key in ("kernels", "products", "moved")
            )
            shares = moved / sum(c.moved for c in theirs), counts[0].kept / theirs[0].kept
            sizes = f"{moved / 1e6:,.0f} | {counts[0].kept / 1e6:,.0f}"
            lines.append(f"| {name} | {who} | {kernels} | {products} | {sizes} | {shares[0]:.2f} | {shares[1]:.2f} |")
            print(lines[-1], flush=True)
    print("\n".join(lines)) if only else publish("kernels", "\n".join(lines))


if __name__ == "__main__":
    main()
