"""How many tokens chose each expert: counted on every mesh as one process would count them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from autopar.api import parallelize
from autopar.compile.model import compile_model
from autopar.ir.mesh import Mesh
from autopar.models.hf import exact_experts
from autopar.options import Options
from autopar.runtime.exec.expert_stats import layers_of_experts
from autopar.runtime.mesh.process_groups import dp_rank_and_size, init_mesh
from autopar.runtime.training.expert_bias import BIAS
from tests.experts.test_experts import Layer, routed
from tests.support.ranks import run_ranks
from tests.support.subjects import ROWS, TOKENS, make, tiny

Load = dict[str, list[int]]


@functools.cache
def chosen(name: str, steps: int = 1, bias: Tensor | None = None) -> Load:
    """What one process chooses, over some equal steps; ``bias``: of its only router."""
    model, batch = make(name)
    found: dict[str, Tensor] = {}

    def look(path: str) -> Any:
        def hook(module: Any, args: tuple[Any, ...]) -> None:
            found[path] = torch.bincount(args[1].flatten(), minlength=module.num_experts)

        return hook

    for path, module in model.named_modules():
        if type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(look(path))
    for path, x in model.named_buffers():
        if bias is not None and path.endswith(BIAS):
            x.copy_(bias)
    with exact_experts(model):
        model(**batch)
    return {path: (steps * count).tolist() for path, count in found.items()}


def counted(name: str, sizes: dict[str, int], options: dict[str, Any], steps: int) -> tuple[Load, Load, Load]:
    """After some steps, after an evaluation, and after a reset and one ``model(**batch)`` where there are no parts."""
    model, batch = make(name)
    mesh = init_mesh("cpu", 60.0, **sizes)
    part, parts = dp_rank_and_size(mesh)
    mine = {key: x.chunk(parts)[part] for key, x in batch.items()}
    parallel = parallelize(model, mesh, example_batch=mine, lift_to_float64=True, **options)
    for _ in range(steps):
        parallel.train_step(**mine)
    first = parallel.expert_load()
    parallel.eval_step(**mine)
    second = parallel.expert_load(reset=True)
    if "pp" not in sizes and "microbatches" not in options:
        parallel(**mine).loss.backward()
    else:
        parallel.train_step(**mine)
    return _lists(first), _lists(second), _lists(parallel.expert_load())


def _lists(load: dict[str, Tensor]) -> Load:
    assert all(count.dtype == torch.int64 and count.device.type == "cpu" for count in load.values())
    return {name: count.tolist() for name, count in load.items()}


CASES = [
    ("one-layer qwen3_moe", {"ep": 2}, {"activation_checkpoint": "full"}),
    (
        "one-layer qwen3_moe",
        {"ep": 2},
        {"token_dispatcher": "alltoall_dedup", "activation_checkpoint": "full", "microbatches": 2},
    ),
    ("one-layer qwen3_moe", {"tp": 2}, {}),
    ("qwen3_moe", {"pp": 2}, {"microbatches": 4}),
]
MORE = [
    ("one-layer qwen3_moe", {"dp": 2}, {"microbatches": 2}),
    (
        "qwen3_moe",
        {"ep": 2},
        {"token_dispatcher": "alltoall_dedup", "activation_checkpoint": "full"},
    ),  # by ``model(**batch)`` as well
    ("deepseek_v3", {"dp": 2}, {"microbatches": 2}),  # by default, what moves its bias
    ("qwen3_moe", {"pp": 2, "ep": 2}, {"microbatches": 4, "schedule": "dual_pipe"}),  # each part twice
    ("qwen3_moe", {"cp": 2, "ep": 2}, {"token_dispatcher": "alltoall_dedup"}),
    ("qwen3_moe", {"pp": 2, "ep": 2}, {"microbatches": 4, "schedule": "dual_pipe_v", "activation_checkpoint": "full"}),
    ("qwen3_moe", {"dp": 2, "tp": 2}, {"sequence_parallel": True, "zero": 3}),
]


@pytest.mark.parametrize(
    ("name", "sizes", "options"), [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)]
)
def test_counts_are_those_of_one_process(name: str, sizes: dict[str, int], options: dict[str, Any]) -> None:
    ranks = torch.tensor(list(sizes.values())).prod().item()
    once, twice = chosen(name), chosen(name, 2)
    for first, second, third in run_ranks(int(ranks), counted, name, sizes, options, 2):
        assert first == second == twice
        assert third == once
        assert all(sum(count) == 2 * ROWS * TOKENS * 2 for count in first.values())


def test_equal_stages_have_layers_of_their_own() -> None:
    model, batch = tiny("qwen3_moe")
    made = compile_model(model, batch, Mesh.of(pp=2), Options(microbatches=2), lift_to_float64=True, outputs=())
    found = [layers_of_experts(part.forward.graph) for part in made.pipeline.parts]
    assert found == [[f"model.layers.{i}.mlp.experts"] for i in range(2)]


def balanced(steps: int) -> list[list[float]]:
    """The bias after each step."""
    model, batch = make("deepseek_v3")
    mesh = init_mesh("cpu", 60.0, ep=2)
    part, parts = dp_rank_and_size(mesh)
    mine = {key: x.chunk(parts)[part] for key, x in batch.items()}
    parallel = parallelize(model, mesh, example_batch=mine, lift_to_float64=True, token_dispatcher="alltoall_dedup")
    found = []
    for _ in range(steps):
        parallel.train_step(**mine)
        autopar.balance_experts(parallel, rate=0.25)
        (bias,) = [x for name, x in parallel.named_buffers() if name.endswith(BIAS)]
        found.append(bias.tolist())
    return found


def test_biases_of_routers_follow_the_counts() -> None:
    first, second = run_ranks(2, balanced, 3)
    assert first == second
    model, _ = make("deepseek_v3")
    (bias,) = [x for name, x in model.named_buffers() if name.endswith(BIAS)]
    for found in first:
        (counts,) = chosen("deepseek_v3", bias=bias).values()
        mean = sum(counts) / len(counts)
        bias = bias + 0.25 * torch.tensor([float((mean > n) - (mean < n)) for n in counts]).to(bias)
        assert found == bias.tolist()


def one_rank(batch: dict[str, Tensor]) -> tuple[Load, str]:
    """A custom module without a router's bias."""
    parallel = parallelize(Layer(8), init_mesh("cpu", 60.0, dp=1), example_batch=batch)
    before = parallel.expert_load()
    assert before == {}
    parallel.train_step(**batch)
    try:
        autopar.balance_experts(parallel)
    except ValueError as error:
        return _lists(parallel.expert_load()), str(error)
    return {}, ""


def test_experts_of_ones_own_and_none_at_all() -> None:
    batch = routed(8, 8, 2, "lower half")
    ((load, words),) = run_ranks(1, one_rank, batch)
    assert list(load.values()) == [torch.bincount(batch["expert"].flatten(), minlength=8).tolist()]
    assert words.startswith("balance_experts: needs buffers whose names end with 'e_score_correction_bias', found none")
