"""The policy "fused": the backward recomputes within kernels what costs more to keep, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch.partitioners import min_cut_rematerialization_partition

from autopar.api import for_backend
from autopar.compile.model import compile_model
from autopar.ir.mesh import Mesh
from autopar.ops.traits import COLLECTIVES, PRODUCTS, is_fusible
from autopar.options import Options
from autopar.planner.recompute.layer_solver import RecomputableValue, cheapest_way
from autopar.steps.graphs import Compiled, is_a
from tests.cuda.loops import in_type
from tests.support.cases import Cell, check, check_ran, compile_cell, ran, simulated
from tests.support.subjects import tiny

FUSED = {"activation_checkpoint": "fused"}
MODELS = ("llama", "gpt2", "qwen3_moe", "gemma2", "t5", "whisper")


# --- bytes ----------------------------------------------------------------------------------------------------


def kept(compiled: Compiled) -> int:
    """Bytes that F keeps."""
    (part,) = compiled.pipeline.parts
    made = part.forward.graph.graph.output_node().args[0]
    values = [n.meta["val"] for n, name in zip(made, part.forward.outputs, strict=True) if is_a(name, "saved")]
    return sum(x.numel() * x.itemsize for x in values)


def kept_by_torch(model: Any, batch: dict[str, Tensor]) -> int:
    """Bytes that torch.compile keeps: its partitioner's choice for Inductor, run operator by operator."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    def partition(*args: Any, **how: Any) -> Any:
        return min_cut_rematerialization_partition(*args, compiler="inductor", **how)

    def as_it_is(gm: Any, _: Any) -> Any:
        return gm

    backend = aot_autograd(
        fw_compiler=as_it_is, bw_compiler=as_it_is, partition_fn=partition, decompositions=select_decomp_table()
    )
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        torch.compile(model.forward, backend=backend)(**batch)
    own = (*model.parameters(), *model.buffers(), *batch.values())
    return sum(found.values()) - sum(found.get(x.untyped_storage().data_ptr(), 0) for x in own)


@pytest.mark.parametrize("name", [*MODELS[:3], *(pytest.param(name, marks=pytest.mark.full) for name in MODELS[3:])])
def test_no_more_is_kept_than_torch_compile_keeps(name: str) -> None:
    model, batch = in_type(*tiny(name, 2), torch.bfloat16)
    mine = kept(compile_model(model, batch, Mesh.of(), Options(**FUSED), outputs=()))
    assert mine <= kept_by_torch(model, batch)
    assert mine <= kept(compile_model(model, batch, Mesh.of(), Options(), outputs=()))


# --- numbers --------------------------------------------------------------------------------------------------

CELLS = [
    *(Cell(name, Mesh.of(), Options(**FUSED)) for name in MODELS),
    Cell("one-layer llama", Mesh.of(dp=2), Options(zero=3, **FUSED)),
    Cell("one-layer llama", Mesh.of(tp=2), Options(sequence_parallel=True, **FUSED)),
    Cell("one-layer llama", Mesh.of(cp=2), Options(**FUSED)),
    Cell("one-layer qwen3_moe", Mesh.of(dp=2, tp=2), Options(microbatches=2, **FUSED)),
    Cell("one-layer llama", Mesh.of(pp=2), Options(microbatches=4, schedule="zb_h1", **FUSED)),
    Cell("one-layer llama", Mesh.of(pp=2), Options(microbatches=2, schedule="tera_pipe", token_slices=2, **FUSED)),
    Cell("one-layer gpt2", Mesh.of(tp=2), Options(loss_chunks=2, **FUSED)),
]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_gradients_are_those_of_one_process(cell: Cell) -> None:
    check_ran(ran(cell)) if cell.mesh.size("pp") > 1 else check(simulated(cell))


# --- what is recomputed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_only_what_kernels_compute_is_recomputed(cell: Cell) -> None:
    found = compile_cell(cell)
    assert found.plan.checkpoints
    targets = {
        node.target
        for part in found.pipeline.parts
        for step in (part.backward, part.backward_input, part.backward_weight, part.backward_reduce)
        if step is not None
        for node in step.graph.graph.nodes
        if node.meta.get("again") and "chunk" not in node.meta
    }
    assert targets and not targets & {*PRODUCTS, *COLLECTIVES}
    others = {target for target in targets if not is_fusible(target)}
    assert all(getattr(target, "__name__", "") == "getitem" for target in others), others


def test_a_product_that_reads_a_value_twice_keeps_it() -> None:
    """What both products need in memory is written once; what only kernels read is recomputed."""
    model, batch = in_type(*tiny("llama", 1), torch.bfloat16)
    (part,) = compile_model(model, batch, Mesh.of(), Options(**FUSED), outputs=()).pipeline.parts
    made = {n.name: n for n in part.forward.graph.graph.nodes}
    names = [name.partition(":")[2] for name in part.forward.outputs if is_a(name, "saved")]
    targets = [str(made[name].target) for name in names]
    assert "aten.silu.default" not in targets and "aten.mul.Tensor" in targets


def test_the_cheapest_way() -> None:
    """0 -> 1 -> 2, of which the backward reads 1 and 2."""
    chain = [
        RecomputableValue(9.0, 8, pinned=True),
        RecomputableValue(1.0, 8, operands=(0,)),
        RecomputableValue(1.0, 8, operands=(1,)),
    ]
    assert cheapest_way(chain, [1, 2], [2.0, 5.0, 5.0]) == {1, 2}
    assert cheapest_way(chain, [1, 2], [9.0, 5.0, 5.0]) == {2}
    assert cheapest_way(chain, [1, 2], [9.0, 0.5, 0.5]) == set()
    assert cheapest_way(chain, [], [1.0, 1.0, 1.0]) == set()


# --- by default -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["inductor", "inductor+cudagraphs"])
def test_the_default_of_compiled_steps(backend: str) -> None:
    assert for_backend(backend, Options()) == Options(**FUSED)
    for asked in (Options(activation_checkpoint="none"), Options(activation_checkpoint="model")):
        assert for_backend(backend, asked) == asked
    limited = Options(memory_limit=10**9)
    assert for_backend(backend, limited) == limited


@pytest.mark.parametrize("backend", ["eager", "cudagraphs"])
def test_the_default_of_steps_that_are_not(backend: str) -> None:
    assert for_backend(backend, Options()) == Options()


def test_a_model_that_checkpoints_itself_decides() -> None:
    model, batch = tiny("llama", 1)
    model.gradient_checkpointing_enable()
    found = [compile_model(model, batch, Mesh.of(), Options(**how)) for how in (FUSED, {})]
    again = [[layer.again for layer in one.plan.checkpoints] for one in found]
    assert again[0] == again[1] and again[0]
