"""The product that is a gradient adds to the sum of earlier microbatches in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.compile.model import compile_model
from autopar.cost.memory import memory
from autopar.ir.graph import calls_of, placeholders
from autopar.ir.mesh import Mesh
from autopar.ir.storages import storages
from autopar.ir.waits import PRODUCT_OF
from autopar.options import Options
from autopar.passes.step.fuse_accumulation import FuseAccumulation
from autopar.rewrite.compilation import Compilation
from autopar.rewrite.step_checks import StepError, check_step_types
from autopar.testing.harness import check_model
from tests.support.ranks import run_ranks

aten = torch.ops.aten
EXACT = 1e-10


def fused(function: Callable[..., Any], *inputs: Tensor) -> tuple[list[str], bool]:
    """The operators of a graph after the pass, which must give the same numbers; whether its last input, a sum, is
    written over."""
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    expected, earlier = gm(*inputs), placeholders(gm)[-1]
    earlier.meta["donated"] = True
    gm = FuseAccumulation().apply(gm, Compilation(Mesh.of()))
    torch.testing.assert_close(gm(*inputs), expected, rtol=1e-12, atol=1e-12)
    names = [str(n.target).removeprefix("aten.") for n in gm.graph.nodes if n.op == "call_function"]
    behind = storages(gm, in_place=True)
    return names, any(behind[n] == ((earlier, 0),) for n in calls_of(gm.graph, *PRODUCT_OF))


A, B = torch.randn(4, 3).double(), torch.randn(3, 5).double()
SUM = torch.randn(4, 5).double()


def test_a_product() -> None:
    assert fused(lambda a, b, s: aten.mm(a, b) + s, A, B, SUM) == (["addmm.default"], True)


def test_a_chain_of_products() -> None:
    """As a weight that is used several times, or a head whose loss is computed in chunks, has it."""
    chain = lambda a, b, s: aten.addmm(aten.addmm(aten.mm(a, b), a, b), a, b) + s  # noqa: E731
    assert fused(chain, A, B, SUM) == (["addmm.default"] * 3, True)


def test_a_product_of_elements() -> None:
    """As the gradient of a head that the forward has made is scaled."""
    scaled = lambda a, b, s: aten.mul(a, b) + s  # noqa: E731
    for scale in (torch.tensor(2.0), torch.tensor(2.0).double(), torch.rand(5).double()):
        assert fused(scaled, SUM.clone(), scale, SUM) == (["addcmul.default"], True)
    names, over = fused(scaled, SUM.float(), torch.rand(5).double(), SUM)
    assert names == ["mul.Tensor", "add.Tensor"] and not over


@pytest.mark.parametrize(
    "function, given",
    [
        (lambda a, b, s: (aten.mm(a, b) + s, s * 2), SUM),  # somebody else reads the sum
        (lambda a, b, s: (x := aten.mm(a, b), x + s), SUM),  # or the product
        (lambda a, b, s: aten.mm(a, b) + s, SUM.float()),  # the sum has another dtype
        (lambda a, b, s: aten.mm(a, b) + s, SUM[:1]),  # or another shape
        (lambda a, b, s: aten.t(aten.mm(a, b)) + s, SUM.t().contiguous()),
        (lambda a, b, s: torch.relu(aten.mm(a, b)) + s, SUM),
        (lambda a, b, s: aten.add(aten.mm(a, b), s, alpha=2), SUM),
    ],
)
def test_what_is_left(function: Callable[..., Any], given: Tensor) -> None:
    names, over = fused(function, A, B, given)
    assert "mm.default" in names and "addmm.default" not in names and not over


class Net(nn.Module):
    """Weights whose gradients are a product, a chain of two, a product and something else, and no product."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(10, 6)
        self.up, self.twice, self.down = nn.Linear(6, 14), nn.Linear(14, 14), nn.Linear(14, 6)
        self.norm = nn.LayerNorm(6)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        h = self.down(torch.tanh(self.twice(torch.tanh(self.twice(self.up(h))))))
        logits = self.norm(h) @ self.embed.weight.t()  # tied
        penalty = (self.up.weight**2).sum() * 1e-2
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()) + penalty


def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"ids": torch.randint(0, 10, (12, 4))}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("mesh", ["dp=2", "tp=2", "cp=2", "dp=2,tp=2"])
def test_gradients_are_those_of_one_process(mesh: str, zero: int) -> None:
    options = Options(zero=zero if "dp" in mesh else 0, microbatches=3, batch_dims={"ids": 0})
    result = check_model(Net(), batch(), Mesh.parse(mesh), options)
    assert result.worst < EXACT, result


def graphs(microbatches: int) -> Any:
    options = Options(microbatches=microbatches, batch_dims={"ids": 0})
    return compile_model(Net(), batch(), Mesh.of(dp=2), options, outputs=())


def sums(gm: GraphModule) -> dict[str, str]:
    """Donated input -> the operator that adds to it."""
    return {n.name: str(next(iter(n.users)).target) for n in placeholders(gm) if n.meta.get("donated")}


def test_the_text_of_a_step() -> None:
    stage = graphs(3).stage
    for step in (stage.backward, stage.backward_reduce):
        found = sums(step.graph)
        products = {name for name, target in found.items() if target == "aten.addmm.default"}
        assert products == {"earlier_p_twice_weight", "earlier_p_down_weight"}, found
        assert len(found) == 9


def test_no_gradient_lies_beside_its_sum() -> None:
    """A wide head: the peak of later microbatches has its sum, and not its product as well."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(64, 4096, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return (self.head(x) ** 2).mean()

    given, options = {"x": torch.randn(4, 64)}, Options(microbatches=2, batch_dims={"x": 0})
    compiled = compile_model(Head(), given, Mesh.of(), options, outputs=())
    weight, found = 64 * 4096 * 4, memory(compiled)
    assert weight < found.accumulated + found.backward_peak - weight < 1.1 * weight, found


def test_a_missing_reduction_is_found_behind_a_sum() -> None:
    compiled, mesh = graphs(3), Mesh.of(dp=2)
    stage = compiled.stage
    check_step_types([stage], compiled.local, mesh)
    gm = stage.backward_reduce.graph
    for node in calls_of(gm.graph, torch.ops.autopar.all_reduce.default):
        node.replace_all_uses_with(node.args[0])
    with pytest.raises(StepError, match=r"axis 'dp'"):
        check_step_types([stage], compiled.local, mesh)


class _Products(TorchDispatchMode):
    """Counts products that make a gradient of `twice`'s shape, and those that add to one in place."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.added = 0, list[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        over = func in (aten.addmm_.default, torch.ops.autopar.add_product.default)
        result = args[0] if over else out
        if isinstance(result, Tensor) and result.shape == (14, 14) and not isinstance(result, FakeTensor):
            self.made += func in (aten.mm.default, aten.addmm.default)
            self.added += [result.data_ptr()] if over else []
        return out


def on_ranks(sizes: dict[str, int], options: dict[str, Any], backend: str) -> tuple[int, list[int]]:
    """Steps on real ranks, equal to one process; products of the last step."""
    plain, data = Net(), batch()
    mesh = autopar.init_mesh("cpu", 240.0, **sizes)
    count, mine = sizes.get("dp", 1), data
    if count > 1:
        mine = {n: x.chunk(count)[mesh.get_local_rank("dp")] for n, x in data.items()}
    model = autopar.parallelize(Net(), mesh, example_batch=mine, backend=backend, batch_dims={"ids": 0}, **options)
    expected = plain(**data)
    expected.backward()
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        with _Products() as seen:
            loss = model.train_step(**mine)
        assert abs(float(loss) - float(expected)) < EXACT
        found = model.full_gradients()
        for name, p in plain.named_parameters():
            assert float((found[name] - p.grad).abs().max()) < EXACT, name  # type: ignore[operator]
    return seen.made, seen.added


def test_on_ranks_the_first_microbatch_makes_the_sum() -> None:
    """Of two products per microbatch for `twice`, the first one of the first microbatch makes a tensor, to which all
    others add."""
    for made, added in run_ranks(2, on_ranks, {"dp": 2}, {"microbatches": 3}, "eager"):
        assert made == 1 and len(added) == 5 and len(set(added)) == 1


@pytest.mark.parametrize(
    "sizes, options",
    [
        ({"pp": 2}, {"microbatches": 4, "schedule": "zb_h1"}),
        ({"pp": 2}, {"microbatches": 4, "schedule": "zb_v"}),
        ({"pp": 2}, {"microbatches": 4, "schedule": "gpipe"}),
        ({"dp": 2}, {"microbatches": 3, "zero": 2}),
        ({"dp": 2}, {"microbatches": 3, "precision": "none", "activation_checkpoint": "full"}),
    ],
)
def test_on_ranks(sizes: dict[str, int], options: dict[str, Any]) -> None:
    """Also where the backward for weights continues a sum that the one for inputs has begun (`up`'s, with zb)."""
    run_ranks(2, on_ranks, sizes, options, "eager")


def test_compiled_code_adds_in_place() -> None:
    for _, added in run_ranks(2, on_ranks, {"dp": 2}, {"microbatches": 2}, "inductor", timeout=240.0):
        assert len(set(added)) == 1 and len(added) >= 2
