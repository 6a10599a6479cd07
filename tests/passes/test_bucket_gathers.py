"""Small gathers and scatters travel together; the graph and its numbers over all ranks stay what they were."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.ir.mesh import Mesh
from autopar.ops import collectives as collectives  # registers the raw collectives
from autopar.passes.step import bucket_gradients
from autopar.passes.step.bucket_gathers import BucketGathers
from autopar.rewrite.compilation import Compilation

raw = torch.ops.autopar


def step(p: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Two gathers, side by side, and the two scatters of their gradients; p [2, 3], q [1, 3], x [4, 3]."""
    w = raw.all_gather(p, 0, [], "dp", 2)
    v = raw.all_gather(q, 0, [], "dp", 2)
    y = x * w
    z = y[:2] * v
    return raw.reduce_scatter(y.exp(), 0, [], "dp", 2), raw.reduce_scatter(z.exp(), 0, [], "dp", 2)


def traced() -> GraphModule:
    return make_fx(step, tracing_mode="fake")(torch.empty(2, 3), torch.empty(1, 3), torch.empty(4, 3))


def names(gm: GraphModule) -> list[str]:
    return [str(getattr(n.target, "__name__", n.target)) for n in gm.graph.nodes if n.op == "call_function"]


def alone(gm: GraphModule, p: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """Run for two ranks that hold the same: a gather repeats, a scatter doubles and takes the first half."""

    class Same(torch.fx.Interpreter):
        def call_function(self, target, args, kwargs):  # type: ignore[no-untyped-def]
            if target is raw.all_gather.default:
                return torch.cat([args[0], args[0]])
            if target is raw.reduce_scatter.default:
                return 2 * args[0].chunk(2)[0]
            return super().call_function(target, args, kwargs)

    found: tuple[Tensor, ...] = Same(gm).run(p, q, x)
    return found


def test_one_gather_and_one_scatter_are_left_and_numbers_stay() -> None:
    inputs = torch.randn(2, 3), torch.randn(1, 3), torch.randn(4, 3)
    gm = traced()
    expected = alone(gm, *inputs)
    gm = BucketGathers().apply(gm, Compilation(Mesh.of(dp=2)))
    gm.graph.lint()
    assert names(gm).count("all_gather.default") == names(gm).count("reduce_scatter.default") == 1
    assert names(gm).index("split_with_sizes.default") < names(gm).index("mul.Tensor")
    assert all(torch.equal(a, b) for a, b in zip(alone(gm, *inputs), expected, strict=True))


def test_what_two_axes_cut_travels_together_over_each() -> None:
    def over_both(p: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        w, v = (raw.all_gather(raw.all_gather(part, 0, [], "dp", 2), 0, [], "cp", 2) for part in (p, q))
        y, z = (x * w).exp(), x[:4] * v
        return tuple(raw.reduce_scatter(raw.reduce_scatter(g, 0, [], "cp", 2), 0, [], "dp", 2) for g in (y, z))  # type: ignore[return-value]

    inputs = torch.randn(2, 3), torch.randn(1, 3), torch.randn(8, 3)
    gm = make_fx(over_both, tracing_mode="fake")(*inputs)
    expected = alone(gm, *inputs)
    gm = BucketGathers().apply(gm, Compilation(Mesh.of(dp=2, cp=2)))
    gm.graph.lint()
    moved = (raw.all_gather.default, raw.reduce_scatter.default)
    assert [(n.target, n.args[3]) for n in gm.graph.nodes if n.target in moved] == [
        (raw.all_gather.default, "dp"),
        (raw.all_gather.default, "cp"),
        (raw.reduce_scatter.default, "cp"),
        (raw.reduce_scatter.default, "dp"),
    ]
    assert all(torch.equal(a, b) for a, b in zip(alone(gm, *inputs), expected, strict=True))


def test_large_ones_and_other_dims_stay_alone(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(bucket_gradients, "LONE_BYTES", 0)
    gm = traced()
    before = names(gm)
    assert names(BucketGathers().apply(gm, Compilation(Mesh.of(dp=2)))) == before

    def columns(p: Tensor, q: Tensor) -> Tensor:
        return raw.all_gather(p, 1, [], "dp", 2) + raw.all_gather(q, 1, [], "dp", 2)

    monkeypatch.undo()
    gm = make_fx(columns, tracing_mode="fake")(torch.empty(2, 3), torch.empty(2, 3))
    before = names(gm)
    assert names(BucketGathers().apply(gm, Compilation(Mesh.of(dp=2)))) == before
