"""Step graphs whose rows Inductor pads, as it does on GPUs: what reads a value is compiled for its strides."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.lift_to_float64 import LiftFloat32
from autopar.runtime.exec.lowering import Lowered, bind
from autopar.runtime.mesh.process_groups import Groups, init_mesh
from tests.runtime.test_bind import aten, graph_of
from tests.runtime.test_cuda_graphs import STEPS, played
from tests.support.plain_models import EXACT, gap, gradients
from tests.support.ranks import run_ranks
from tests.support.scalar_kernels import scalar_kernels
from tests.support.subjects import tiny

ALIGNED = 16  # float64 in 128 bytes

# Nothing divides by what rows are aligned to.
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 50_257, "n_embd": 33, "n_head": 1, "n_inner": 67},
    "bert": {"vocab_size": 30_522, "hidden_size": 35, "num_attention_heads": 1, "intermediate_size": 69},
    "whisper": {"vocab_size": 51_865, "d_model": 34, "encoder_attention_heads": 2, "decoder_attention_heads": 2},
}


@contextmanager
def padding() -> Iterator[list[Lowered]]:
    """Context manager: Inductor pads on the CPU, short rows too. Gives the graphs that are bound."""
    from torch._inductor import config  # of which most processes of the tests make no use

    from autopar.runtime.exec import executor

    bound: list[Lowered] = []

    def seen(*args: Any, **how: Any) -> Lowered:
        bound.append(bind(*args, **how))
        return bound[-1]

    settings = {"disable_padding_cpu": False, "padding_stride_threshold": 32}
    with scalar_kernels(), config.patch(settings), pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "bind", seen)
        yield bound


def is_padded(x: Any) -> bool:
    """Whether there are gaps between its elements."""
    return isinstance(x, Tensor) and 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride())) > x.numel() > 0


def padded_values(bound: list[Lowered]) -> int:
    return sum(is_padded(x) for lowered in bound for x in lowered.made or ())


def test_only_results_that_may_be_padded_are() -> None:
    run_ranks(1, only_what_may_be_padded)


def only_what_may_be_padded() -> None:
    """The graph is the same both times: what Inductor has compiled before is not used for other strides."""
    groups = Groups(init_mesh(dp=1))
    gm = graph_of([(6, 40), (40, 33)], lambda call, x, w: [call(aten.relu.default, call(aten.mm.default, x, w))])
    given = [torch.rand(6, 40, dtype=torch.float64), torch.rand(40, 33, dtype=torch.float64)]
    right = torch.relu(given[0] @ given[1])
    strides = []
    with padding():
        for free in ((), (0,), ()):
            lowered = bind(gm, groups, "inductor", any_strides=free)
            (found,) = lowered(list(given))
            torch.testing.assert_close(found, right)
            assert lowered.made is not None and lowered.made[0].stride() == found.stride()
            strides.append(found.stride())
    assert strides == [(33, 1), (48, 1), (33, 1)]


def takes_padded_rows() -> None:
    """Views and as_strided of a graph that was captured for other strides."""
    groups = Groups(init_mesh(dp=1))

    def build(call: Any, x: Any) -> list[Any]:
        return [call(aten.view.default, x, [99, 2]), call(aten.as_strided.default, x, [6, 33], [33, 1], 0)]

    rows = torch.rand(6, 48, dtype=torch.float64)[:, :33]
    lowered = bind(graph_of([(6, 33)], build), groups, "inductor", [rows])
    for found, right in zip(lowered([rows]), (rows.reshape(99, 2), rows), strict=True):
        assert torch.equal(found, right) and found.is_contiguous()


def test_a_graph_takes_rows_that_were_padded() -> None:
    run_ranks(1, takes_padded_rows)


def taken(model: nn.Module) -> dict[str, Tensor]:
    """The gradients, which the model has no more."""
    found = gradients(model)
    model.zero_grad()
    return found


def a_step(name: str) -> None:
    model, batch = tiny(name, 1, **SIZES[name])
    with LiftFloat32():
        expected = model(**batch)
        expected.loss.backward()
    right = taken(model)
    with padding() as bound:
        parallel = autopar.parallelize(
            model, autopar.init_mesh("cpu", 60.0, dp=1), backend="inductor", lift_to_float64=True
        )
        loss = parallel.train_step(**batch)
        assert padded_values(bound) > 3
        assert abs(float(loss) - float(expected.loss)) < EXACT
        assert gap(parallel.full_gradients(), right) < EXACT
        assert all(p.grad.is_contiguous() for p in parallel.parameters() if p.grad is not None)
        parallel.zero_grad()
        out = parallel(**batch)  # what leaves a step is as torch makes it
        assert torch.allclose(out.logits.full_tensor(), expected.logits, atol=EXACT)
        assert out.logits.to_local().is_contiguous()
        out.loss.backward()
        assert gap(parallel.full_gradients(), right) < EXACT


@pytest.mark.parametrize("name", SIZES)
def test_gradients_of_padded_values(name: str) -> None:
    run_ranks(1, a_step, name, timeout=240)


def recorded() -> None:
    told = []
    for backend in ("eager", "inductor+cudagraphs"):
        model, batch = tiny("gpt2", 1, **SIZES["gpt2"])
        with padding() as bound, played() as graphs:
            parallel = autopar.parallelize(
                model, autopar.init_mesh("cpu", 60.0, dp=1), backend=backend, lift_to_float64=True
            )
            losses = []
            for _ in range(STEPS):
                parallel.zero_grad()
                losses.append(float(parallel.train_step(**batch)))
        told.append((losses, parallel.full_gradients()))
    assert graphs[0].replays and padded_values(bound) > 3
    assert max(abs(a - b) for a, b in zip(told[0][0], told[1][0], strict=True)) < EXACT
    assert gap(told[0][1], told[1][1]) < EXACT


def test_a_recorded_step_of_padded_values() -> None:
    run_ranks(1, recorded, timeout=240)


def on_a_mesh(sizes: dict[str, int], held: bool, options: dict[str, Any]) -> None:
    model, batch = tiny("gpt2", 2, **SIZES["gpt2"])
    with LiftFloat32():
        model(**batch).loss.backward()
    right = taken(model)
    with padding() as bound:
        mesh = autopar.init_mesh("cpu", 60.0, **sizes)
        parallel = autopar.parallelize(
            model, mesh, backend="inductor", example_batch=batch, lift_to_float64=True, **options
        )
        cut = batch if "pp" in sizes else {k: v.chunk(2)[dist.get_rank()] for k, v in batch.items()}
        if held:
            with parallel.keep_unsharded():
                for _ in range(2):
                    parallel.zero_grad()
                    parallel.train_step(**cut)
        else:
            parallel.train_step(**cut)
        assert gap(parallel.full_gradients(), right) < EXACT
        assert (padded_values(bound) == 0) == held


@pytest.mark.parametrize(
    "sizes, held, options",
    [
        ({"pp": 2}, False, {"schedule": "zb_h1", "microbatches": 2}),
        pytest.param({"dp": 2}, True, {"zero": 1, "microbatches": 2}, marks=pytest.mark.full),
    ],
    ids=["B to W", "F alone after F with gathers"],
)
def test_every_pair_of_graphs(sizes: dict[str, int], held: bool, options: dict[str, Any]) -> None:
    run_ranks(2, on_a_mesh, sizes, held, options, timeout=300)
