"""Bytes that a layer of experts moves beside its grouped products on a GPU, forward and backward, in bfloat16.

Of the kernels that Inductor makes for a GPU that is not there: each reads its operands and writes its results once.
autopar's own kernels (`autopar.ops.kernels.fused_expert_rows`) do, too. *least*: rows are gathered, activated and
summed by one kernel each, in the forward and in the backward, which does not need the results of the second product.

    python tests/benchmarks/bench_expert_bytes.py
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from common import publish
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from transformers.integrations import moe

import autopar
from autopar.capture.front_end import capture
from autopar.compile.model import compile_graph
from autopar.ir.graph import copy_graph, set_device
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.runtime.exec.lowering import bind
from autopar.runtime.mesh.process_groups import Groups
from tests.cuda.fake_gpu import ROUTES, fake_gpu

aten, ops = torch.ops.aten, torch.ops.autopar
SIZES = {  # tokens, experts of each, experts, width, width of an expert
    "32 experts of 768, top 4, width 1024, 8192 tokens": (8192, 4, 32, 1024, 768),
    "DeepSeek-V3: 256 of 2048, top 8, width 7168, 4096 tokens": (4096, 8, 256, 7168, 2048),
}
CHIP = SimpleNamespace(
    name="H100", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, warp_size=32, gcnArchName="",
    max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472, L2_cache_size=50 << 20,
)  # fmt: skip
Sizes = tuple[int, int, int, int, int]


def gated(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return nn.functional.silu(gate) * up


class Ours(nn.Module):
    """A layer; everything that has a gradient is a parameter, and the gradient of the result is given."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        tokens, k, self.experts, width, inner = sizes
        shapes = (tokens, width), (self.experts, 2 * inner, width), (self.experts, width, inner), (tokens, k)
        made = [nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta")) for shape in shapes]
        self.x, self.up, self.down, self.weights = made

    def forward(self, expert: Tensor, grad: Tensor) -> Tensor:
        rows, order, ends = ops.moe_dispatch(self.x, expert, self.experts)
        made = ops.grouped_mm(gated(ops.grouped_mm(rows, self.up, ends, False)), self.down, ends, False)
        return (ops.moe_combine(made, order, self.weights) * grad).sum()


def theirs(sizes: Sizes) -> list[tuple[GraphModule, list[Any]]]:
    """Forward and backward of transformers' layer, as torch.compile parts them."""
    tokens, k, experts, width, inner = sizes
    layer = SimpleNamespace(
        num_experts=experts, has_gate=True, has_bias=False, is_transposed=False, _is_expert_parallel=False,
        has_post_expert_norm=False, _apply_gate=gated,
    )  # fmt: skip

    def forward(x: Tensor, up: Tensor, down: Tensor, expert: Tensor, weights: Tensor) -> Tensor:
        layer.gate_up_proj, layer.down_proj = up, down
        with patch.object(moe, "_grouped_mm", lambda x, w, offs: torch._grouped_mm(x, w, offs=offs)):
            out: Tensor = moe.grouped_mm_experts_forward(layer, x, expert, weights)
        return out

    found: list[tuple[GraphModule, list[Any]]] = []

    def kept(gm: GraphModule, given: list[Any]) -> GraphModule:
        found.append((gm, given))
        return gm

    shapes = (tokens, width), (experts, 2 * inner, width), (experts, width, inner), (tokens, k)
    with FakeTensorMode():
        x, up, down, weights = (torch.empty(s, dtype=torch.bfloat16, requires_grad=True) for s in shapes)
        expert = torch.empty(tokens, k, dtype=torch.int64)
        run = aot_function(
            forward, kept, kept, partition_fn=min_cut_rematerialization_partition, decompositions=select_decomp_table()
        )
        out = run(x, up, down, expert, weights)
        out.backward(torch.empty_like(out))
    return found


@contextlib.contextmanager
def planned_gpu(mode: FakeTensorMode) -> Iterator[None]:
    """Inductor plans kernels for a GPU, and compiles none."""
    with contextlib.ExitStack() as stack:
        for name in ("_get_device_properties", "get_device_properties"):
            stack.enter_context(patch.object(torch.cuda, name, lambda *_: CHIP, create=True))
        stack.enter_context(patch("torch._inductor.scheduler.has_triton", lambda *_: True))
        stack.enter_context(V.set_fake_mode(mode))
        yield


def moved(gm: GraphModule, given: list[Any], mode: FakeTensorMode) -> int:
    """Bytes of all kernels of a graph but grouped products, and the loss of ours."""
    gm.graph.output_node().meta.pop("user_visible_output_idxs", None)
    with planned_gpu(mode):
        lowering = GraphLowering(gm, example_inputs=given, is_inference=True)
        with V.set_graph_handler(lowering), V.set_extern_kernel_nodes([]), V.set_debug_handler(DebugContext()):
            lowering.run(*given)
            lowering._update_scheduler()
            return sum(n.get_read_write_buffers_sizes() for n in lowering.scheduler.nodes if not _left_out(n))


def _left_out(kernel: Any) -> bool:
    names = {str(x.target) for node in kernel.get_nodes() if node.node for x in node.node.get_origins()}
    product = any("grouped_mm" in name for name in names)
    of_loss = names <= {
        "aten.mul.Tensor",
        "aten.sum.default",
        "aten.expand.default",
        "autopar.moe_combine_backward.default",
    }
    return product or (of_loss and type(kernel).__name__ == "SchedulerNode")


def bytes_of_ours(sizes: Sizes) -> list[int]:
    """Of the forward and of the backward."""
    tokens, k, _, width, _ = sizes
    expert = torch.zeros(tokens, k, dtype=torch.int64)
    batch = {"expert": expert, "grad": torch.zeros(tokens, width, dtype=torch.bfloat16)}
    graph = copy_graph(capture(Ours(sizes), batch))
    part = compile_graph(graph, Mesh.parse("dp=1"), Options(activation_checkpoint="fused"), outputs=()).pipeline.parts[
        0
    ]
    found: list[int] = []

    def counted(gm: GraphModule, given: list[Any]) -> None:
        found.append(moved(gm, given, next(x.fake_mode for x in given if hasattr(x, "fake_mode"))))

    with contextlib.ExitStack() as stack:
        stack.enter_context(fake_gpu(world=1))
        for method, route in ROUTES.items():
            stack.enter_context(patch.object(Tensor, method.__name__, route))
        stack.enter_context(patch("autopar.adapters.inductor.joint_graph_passes", lambda gm: None))
        stack.enter_context(patch("autopar.adapters.inductor.compile_fx_inner", counted))
        groups = Groups(autopar.init_mesh("cuda", dp=1))
        for step in (part.forward, part.backward_reduce):
            assert step is not None
            for node in step.graph.graph.nodes:
                if node.target is aten.silu_backward.default:  # a build for the CPU has no kernel of it for GPUs
                    node.target = select_decomp_table()[node.target]
            set_device(step.graph, groups.device)
            bind(step.graph, groups, "inductor")
    return found


def bytes_of_theirs(sizes: Sizes) -> list[int]:
    """Of the forward and of the backward."""
    found = []
    for gm, given in theirs(sizes):
        with fake_gpu(world=1) as gpu:
            set_device(gm, torch.device("cuda", 0))
            run: Callable[..., Any] = lambda *inputs, gm=gm: gm(*inputs)  # noqa: E731
            with gpu, torch.no_grad():
                there = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") for x in given]
                flat = make_fx(run, decomposition_table=select_decomp_table(), tracing_mode="real")(*there)
            found.append(moved(flat, there, gpu))
    return found


def least(sizes: Sizes) -> list[int]:
    """Of the forward and of the backward, in bfloat16."""
    tokens, k, _, width, inner = sizes
    gathered, activated = tokens * (1 + k) * width, tokens * k * inner
    return [2 * (2 * gathered + 3 * activated), 2 * (2 * gathered + 5 * activated)]


def main() -> None:
    lines = ["| layer | | forward, MB | backward, MB | of the least |", "|---|---|---|---|---|"]
    for name, sizes in SIZES.items():
        fewest = least(sizes)
        rows = {"least": fewest, "**autopar**": bytes_of_ours(sizes), "transformers, compiled": bytes_of_theirs(sizes)}
        for who, (forward, backward) in rows.items():
            share = (forward + backward) / sum(fewest)
            lines.append(f"| {name} | {who} | {forward / 1e6:,.0f} | {backward / 1e6:,.0f} | {share:.2f} |")
    publish("expert bytes", "\n".join(lines))


if __name__ == "__main__":
    main()
