"""Sums over ranks and microbatches in the dtype of a policy: 1 + 2^-10 stays what it is on every axis."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node

import autopar
from autopar.compile.model import compile_model
from autopar.cost.step_traffic import step_communication
from autopar.ir.compute_dtypes import torch_dtype
from autopar.ir.graph import outputs
from autopar.ir.mesh import Mesh
from autopar.ops.traits import SUMS
from autopar.options import Options
from autopar.passes.autodiff.widen_reductions import behind_sums
from autopar.precision import Precision
from autopar.rewrite.tidy_checks import is_parameter_gather
from autopar.steps.graphs import Compiled
from autopar.steps.of_rank import GRAPHS, graph_of
from autopar.steps.value_names import is_a, of
from tests.support.ranks import run_ranks
from tests.support.subjects import tiny


class Witness(nn.Module):
    """The gradient of its weights is the mean of x: of 1 and 1 + 2^-6 it has 8 bits, their half sum has not."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.matrix = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).float().sum() + (x @ self.matrix).float().sum()


VALUES = (1.0, 2.0**-10)  # in bfloat16 their sum is 1.0


def witnessed(sizes: dict[str, int], policy: str, options: dict[str, Any]) -> list[float]:
    """On a rank: the gradients that have to be 1 + 2^-10, of a vector and of a matrix."""
    mesh = autopar.init_mesh("cpu", 60.0, **sizes)
    at, parts = autopar.dp_rank_and_size(mesh)
    values = [*VALUES, *[0.0] * (parts - 2)]
    part = torch.tensor(values)[:, None].expand(-1, 4).contiguous().chunk(parts)[at]
    parallel = autopar.parallelize(Witness(), mesh, example_batch={"x": part}, precision=policy, **options)
    parallel.train_step(x=part)
    found = parallel.full_gradients()
    return [float(found["scale"][0]), float(found["matrix"][0, 0])]


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"dp": 2}, {}),
        ({"dp": 2}, {"zero": 3}),
        ({"dp": 2}, {"zero": 1}),
        ({"dp_replicate": 2, "dp": 1}, {}),
        ({"dp_replicate": 2, "dp": 2}, {"zero": 3}),
        ({"dp_replicate": 2, "dp": 2}, {"zero": 0}),
        ({"dp": 1}, {"microbatches": 2}),
    ],
    ids=str,
)
def test_sums_keep_what_half_precision_would_lose(sizes: dict[str, int], options: dict[str, Any]) -> None:
    for policy in ("bf16", Precision("bfloat16", "float32", "bfloat16")):
        for found in run_ranks(math.prod(sizes.values()), witnessed, sizes, policy, options):
            kept = policy == "bf16" or sizes == {"dp": 1}  # over microbatches always
            assert found == [1.0 + 2.0**-10 if kept else 1.0] * 2, (policy, found)


class TokenWitness(nn.Module):
    """The gradient of ``scale`` is the sum of x over the tokens, which cp or sequence parallelism cuts: attention and
    the pair of linears add nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.out = nn.Parameter(torch.ones(4)), nn.Linear(4, 4, bias=False)
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)
        nn.init.zeros_(self.out.weight), nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = x * self.scale
        heads = h.unsqueeze(1)
        h = h + self.out(nn.functional.scaled_dot_product_attention(heads, heads, heads).squeeze(1))
        return (h + self.down(self.up(h).relu())).float().sum()


def token_witnessed(sizes: dict[str, int], policy: str, options: dict[str, Any]) -> float:
    """On a rank: the gradient that has to be 1 + 2^-10. Each rank has one of the addends, however tokens are cut."""
    x = torch.tensor([VALUES[0], 0.0, VALUES[1], 0.0])[None, :, None].expand(1, 4, 4).contiguous()
    mesh = autopar.init_mesh("cpu", 60.0, **sizes)
    parallel = autopar.parallelize(TokenWitness(), mesh, example_batch={"x": x}, precision=policy, **options)
    parallel.train_step(x=x)
    return float(parallel.full_gradients()["scale"][0])


@pytest.mark.parametrize(
    ("sizes", "options"), [({"cp": 2}, {}), ({"cp": 2}, {"zero": 3}), ({"tp": 2}, {"sequence_parallel": True})], ids=str
)
def test_sums_over_tokens_keep_it_too(sizes: dict[str, int], options: dict[str, Any]) -> None:
    for policy in ("bf16", Precision("bfloat16", "float32", "bfloat16")):
        expected = 1.0 + 2.0**-10 if policy == "bf16" else 1.0
        assert run_ranks(2, token_witnessed, sizes, policy, options) == [expected] * 2, policy


def sums_and_gathers(made: Compiled) -> tuple[set[torch.dtype], set[torch.dtype]]:
    """Dtypes of sums over ranks that end in gradients of parameters, and of gathers of parameters."""
    sums, gathers = set(), set()
    names = {s.node for s in made.signature.inputs if s.kind == "parameter"}
    for part in made.pipeline.parts:
        for kind in GRAPHS:
            step = graph_of(part, kind)
            if step is None:
                continue
            for name, x in zip(step.outputs, outputs(step.graph), strict=True):
                if name is not None and is_a(name, "grad") and of(name) in names and isinstance(x, Node):
                    _, chain = behind_sums(x)
                    sums |= {n.meta["val"].dtype for n in chain if n.target in SUMS}
            gathers |= {n.meta["val"].dtype for n in step.graph.graph.nodes if is_parameter_gather(n)}
    return sums, gathers


EVERYWHERE: list[tuple[Mesh, dict[str, Any]]] = [
    (Mesh.of(dp=2, tp=2), {"zero": 3, "sequence_parallel": True}),
    (Mesh.of(dp=2, tp=2), {"zero": 0, "sequence_parallel": True, "microbatches": 2}),
    (Mesh.of(dp=2, cp=2), {"zero": 2, "microbatches": 2}),
    (Mesh.of(dp=2, pp=2, tp=2), {"zero": 1, "microbatches": 4, "sequence_parallel": True}),
]
POLICIES = ("bf16", "bf16_pure", Precision("float16", "float32", "float16"))
SUMMED = [(*case, policy, (i + j) % 2) for i, case in enumerate(EVERYWHERE) for j, policy in enumerate(POLICIES)]


def test_every_policy_meets_batches_and_pieces_and_every_mode_a_policy() -> None:
    often = [case for *case, rare in SUMMED if not rare]
    assert {str(p) for *_, p in often} == {*map(str, POLICIES)} and {o["zero"] for _, o, _ in often} == {0, 1, 2, 3}
    for policy in POLICIES:
        assert {"dp", "tp"} <= {axis for mesh, _, p in often if p == policy for axis in mesh.sizes}
    assert {axis for mesh, *_ in often for axis in mesh.sizes} == {"dp", "tp", "cp", "pp"}


@pytest.mark.parametrize(
    ("mesh", "options", "policy"),
    [pytest.param(*case, marks=pytest.mark.full if rare else ()) for *case, rare in SUMMED],
    ids=str,
)
def test_sums_over_every_axis(mesh: Mesh, options: dict[str, Any], policy: Any) -> None:
    """In the dtype of the policy, parameters are gathered in the one they are used in. With buckets of no size, so that
    chains can be followed."""
    model, batch = tiny("llama", layers=1)
    found = compile_model(model.float(), batch, mesh, Options(precision=policy, bucket_bytes=0, **options))
    chosen = found.plan.options.precision
    sums, gathers = sums_and_gathers(found)
    assert sums == {torch_dtype(chosen.reduce)}
    assert gathers == ({torch_dtype(chosen.compute)} if options["zero"] else set())


def test_bytes_are_those_of_the_dtypes() -> None:
    """Gathers move half of what they move in float32, sums as much."""
    model, batch = tiny("llama", layers=1)
    found = {}
    for policy in ("none", "bf16"):
        options = Options(zero=3, precision=policy, microbatches=2)  # type: ignore[arg-type]
        volumes = step_communication(compile_model(model.float(), batch, Mesh.of(dp=2), options))
        found[policy] = {kind: v.bytes for (_, kind), v in volumes.items()}
    assert found["bf16"]["all_gather"] * 2 == found["none"]["all_gather"]
    assert found["bf16"]["reduce_scatter"] == found["none"]["reduce_scatter"]


def test_the_models_own_dtype_is_left_alone() -> None:
    """model.bfloat16() without a policy: all as before."""
    model, batch = tiny("llama", layers=1)
    found = compile_model(model.bfloat16(), batch, Mesh.of(dp=2), Options(zero=3, bucket_bytes=0))
    assert sums_and_gathers(found) == ({torch.bfloat16}, {torch.bfloat16})
