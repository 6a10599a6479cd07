"""Autograd functions of a model are differentiated by their own backward, on every mesh."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import autopar
from autopar.capture.front_end import capture
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.runtime.mesh.process_groups import init_mesh
from autopar.steps.of_rank import backwards
from autopar.testing.harness import check_model
from tests.support import custom_functions as own
from tests.support.ranks import run_ranks


class Rounded(torch.autograd.Function):
    """A straight-through estimator with a learned scale; clipped; one input without gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(x, scale)
        ctx.limit = limit
        return torch.round(x) * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, scale = ctx.saved_tensors
        grad *= 3.0  # in place
        return grad * scale * (x.abs() < ctx.limit), (grad * x).sum((0, 1)), None


class Twins(torch.autograd.Function):
    """Two results, one without gradient; setup_context, a keyword, a default; a backward that forbids derivatives."""

    @staticmethod
    def forward(x: Tensor, factor: float = 1.0, shift: float = 0.5) -> tuple[Tensor, Tensor]:
        return (x * factor + shift).sin(), x.argmax(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.factor, ctx.shift = inputs[1:]
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grad * x * ctx.factor + grad * ctx.shift, None, None


class Mixed(torch.autograd.Function):
    """A backward that mixes positions: a product with a parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return torch.sign(x) @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad @ w.t() * 2.0, torch.tanh(x).flatten(0, 1).t() @ grad.flatten(0, 1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.scale, self.mix = nn.Parameter(torch.rand(12)), nn.Parameter(torch.rand(12, 12))

    def forward(self, x: Tensor) -> Tensor:
        h = Rounded.apply(self.up(x), self.scale, 0.8)
        h, index = Twins.apply(h, factor=2.0)  # type: ignore[no-untyped-call]
        h = Mixed.apply(h, self.mix) + index.unsqueeze(-1)  # type: ignore[no-untyped-call]
        out: Tensor = self.down(h).square().mean()
        return out


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1)).double()}


def check(model: nn.Module, mesh: str, **options: Any) -> Any:
    result = check_model(model.double(), batch(), Mesh.parse(mesh), Options(**options))
    assert result.worst < 1e-12
    return result


@pytest.mark.parametrize(("mesh", "options"), [("tp=2", {}), ("dp=2,tp=2", {"zero": 3, "microbatches": 2})])
def test_gradients_are_those_of_the_backward(mesh: str, options: dict[str, Any]) -> None:
    stage = check(Net(), mesh, **options).compiled.stage
    for step in (stage.forward, *backwards(stage)):
        names = {str(n.target) for n in step.graph.graph.nodes if n.op == "call_function"}
        assert not any("backward" in name or "gradient_of" in name for name in names if "autopar" in name)
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
    assert sum(n.target in products for n in stage.forward.graph.graph.nodes) == 3  # no backward runs in the forward


class Block(nn.Module):
    """Backwards that are not linear in the gradient or span its rows; weights that a function changes; an auxiliary
    loss."""

    def __init__(self, over_batch: bool) -> None:
        super().__init__()
        self.up, self.down, self.gate = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 4)
        self.scale, self.over_batch = nn.Parameter(torch.rand(12)), over_batch

    def forward(self, x: Tensor) -> Tensor:
        u = nn.functional.linear(x, own.Quantised.apply(self.up.weight), self.up.bias)  # type: ignore[no-untyped-call]
        h = own.Signed.apply(own.Clamped.apply(u, 4e-3)) + own.Normalised.apply(u.cos())  # type: ignore[no-untyped-call]
        h = own.Recomputed.apply(h + u, self.scale)  # type: ignore[no-untyped-call]
        a, b, where = own.Pair.apply(h, u.sin())  # type: ignore[no-untyped-call]
        share = self.gate(x).softmax(-1)
        h = own.Injected.apply(torch.where(where, a, b), share.square().mean())  # type: ignore[no-untyped-call]
        if not self.over_batch:
            return x + self.down(h)
        h = own.Injected.apply(own.TotalNorm.apply(h), share.mean((0, 1)).square().sum())  # type: ignore[no-untyped-call]
        made: Tensor = own.Affine.apply(h, own.Clipped.apply(self.down.weight), self.down.bias)  # type: ignore[no-untyped-call]
        return made


class Stack(nn.Module):
    def __init__(self, over_batch: bool = False, blocks: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(over_batch) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        loss: Tensor = own.CustomLoss.apply(x)  # type: ignore[no-untyped-call]
        return loss


@pytest.mark.parametrize(
    ("mesh", "options"), [pytest.param("dp=1", {}, marks=pytest.mark.full), ("dp=2", {"zero": 3}), ("tp=2", {})]
)
def test_backwards_of_any_kind(mesh: str, options: dict[str, Any]) -> None:
    check(Stack(over_batch=True), mesh, **options)


def errors(cases: list[tuple[dict[str, int], dict[str, Any]]]) -> list[float]:
    """On a rank: the largest error of any gradient, relative to its largest value."""
    found = []
    for sizes, options in cases:
        part = {k: v.chunk(sizes.get("dp", 1))[0] for k, v in batch().items()}
        model = Stack(blocks=2).double()
        report = autopar.verify(model, init_mesh(**sizes), batch(), example_batch=part, **options)
        assert report.passed, str(report)
        found.append(max(e.error / e.reference for e in report.entries))
    return found


def test_on_ranks() -> None:
    cases = [({"pp": 2}, {"microbatches": 2, "schedule": "zb_h1"})]
    for found in run_ranks(2, errors, cases, timeout=300):
        assert max(found) < 1e-10


class One(nn.Module):
    """One function between two layers."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.up, self.function = nn.Linear(8, 8), function
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.function(self.up(x), self).square().mean()
        return out


def test_what_needs_all_microbatches_is_refused() -> None:
    for function, name in ((own.TotalNorm, "TotalNorm"), (own.Clipped, "Clipped")):
        on_weight = name == "Clipped"
        model = One(lambda x, net, f=function, w=on_weight: x @ f.apply(net.up.weight) if w else f.apply(x))
        with pytest.raises(ValueError, match=rf"the autograd function {name} .*all microbatches.* use microbatches=1"):
            check(model, "dp=1", microbatches=2)


class Written(torch.autograd.Function):
    """Keeps what it saw in a buffer, in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: Tensor) -> Tensor:
        ctx.seen = seen
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.seen.copy_(grad.sum((0, 1)))
        return grad, None


class Untraceable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * float(grad.sum())


class Remade(torch.autograd.Function):
    """An activation checkpoint of its own, with the state of the random numbers."""

    @staticmethod
    def forward(ctx: Any, run: Any, x: Tensor) -> Tensor:
        ctx.run, ctx.seeds = run, torch.get_rng_state()
        ctx.save_for_backward(x)
        made: Tensor = run(x)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        torch.set_rng_state(ctx.seeds)
        with torch.enable_grad():
            out = ctx.run(x)
        torch.autograd.backward((out,), (grad,))
        return None, x.grad


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Few(Dirty):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return x * y


REFUSED: list[tuple[Any, str]] = [
    (lambda x, net: Untraceable.apply(x), "backward of the autograd function Untraceable cannot be traced .*float"),
    (lambda x, net: Written.apply(x, net.seen), "Written cannot be traced .*writes to a tensor of shape .8. that it"),
    (lambda x, net: Dirty.apply(x), "Dirty writes to its inputs"),
    (lambda x, net: Few.apply(x, x), "Few cannot be traced .it returns 1 gradients for 2 inputs"),
    (lambda x, net: torch.func.vmap(own.TotalNorm.apply)(x), "TotalNorm is called under a torch.func transform"),
    (lambda x, net: Remade.apply(net.up, x), "Remade calls torch.autograd.backward .*use torch.utils.checkpoint"),
]


@pytest.mark.parametrize(("function", "message"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_what_cannot_be_captured_is_refused(function: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"capture: .*{message}"):
        capture(One(function).double(), batch())


class Either(torch.autograd.Function):
    """Two results, of which a model may use one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, zeros: bool) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(zeros)
        return x * 2.0, x * 3.0

    @staticmethod
    def backward(ctx: Any, a: Tensor | None, b: Tensor | None) -> Any:
        if a is None or b is None:
            return a, None
        return a + 5.0 * b + 1e-3, None


def test_a_result_that_is_not_used() -> None:
    check(One(lambda x, net: Either.apply(x, True)[0]), "dp=1")  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match="Either asks for None instead of gradients of zeros"):
        check(One(lambda x, net: Either.apply(x, False)[0]), "dp=1")  # type: ignore[no-untyped-call]


class Two(torch.autograd.Function):
    """Two results, whose gradients a backward may be given as None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(w)
        return x * w, x @ x.new_ones(8, 8)

    @classmethod
    def given(cls, way: Callable[..., Any]) -> Any:
        """The function with a backward (a, b, w) -> gradients of x and of w."""

        def backward(ctx: Any, a: Tensor | None, b: Tensor | None) -> Any:
            return way(a, b, *ctx.saved_tensors)

        return type("Two", (cls,), {"backward": staticmethod(backward)})


def added(a: Tensor | None, b: Tensor | None, w: Tensor) -> Any:
    gx, gw = None, None
    if a is not None:
        gx, gw = a * w, a.sum((0, 1))
    if b is not None:
        more = b @ w.new_ones(8, 8).t()
        gx = more if gx is None else gx + more
    return gx, gw


def filled(a: Tensor | None, b: Tensor | None, w: Tensor) -> Any:
    a = torch.zeros_like(b) if a is None else a  # type: ignore[arg-type]
    b = torch.zeros_like(a) if b is None else b
    return w * a + (b / 2.0).reshape(b.shape), (a - b).sum(dim=(0, 1))


def from_nothing(a: Tensor | None, b: Tensor | None, w: Tensor) -> Any:
    return sum(g * f for g, f in ((a, w), (b, 3.0)) if g is not None), None


def another_factor(a: Tensor | None, b: Tensor | None, w: Tensor) -> Any:
    if b is None:
        return a * 5.0, None  # type: ignore[operator]
    return (b if a is None else a * w + b), None


def a_constant(a: Tensor | None, b: Tensor | None, w: Tensor) -> Any:
    return (a if b is None else (a + b if a is not None else b) + 1.0), None


def divided(a: Tensor | None, b: Tensor | None, w: Tensor) -> Any:
    if a is None or b is None:
        return (1.0 - w) * (b if a is None else a), None  # type: ignore[operator]
    return (1.0 / w) * (a + b), None


def in_place(a: Tensor | None, b: Tensor | None, w: Tensor) -> Any:
    gx = torch.zeros_like(b if a is None else a)  # type: ignore[arg-type]
    for g in (a, b):
        gx = gx if g is None else gx.add_(g)
    return gx, None


PICKS = [
    pytest.param(lambda y: y[0], id="the first"),
    pytest.param(lambda y: y[1], id="the second"),
    pytest.param(lambda y: y[0] + y[1], id="both"),
]


@pytest.mark.parametrize("pick", PICKS)
@pytest.mark.parametrize("way", [added, filled, from_nothing, in_place])
def test_none_is_as_good_as_zeros(way: Any, pick: Any) -> None:
    function = Two.given(way)
    check(One(lambda x, net: pick(function.apply(x, net.up.weight[0]))), "dp=2")


@pytest.mark.parametrize("way", [another_factor, a_constant, divided])
def test_none_is_not_zeros(way: Any) -> None:
    """Torch gives None where a result is not used, and the backward does something else then, or it is not seen."""
    function = Two.given(way)
    with pytest.raises(ValueError, match="Two asks for None instead of gradients of zeros"):
        check(One(lambda x, net: function.apply(x, net.up.weight[0])[0]), "dp=2")
    check(One(lambda x, net: torch.add(*function.apply(x, net.up.weight[0]))), "dp=1")


class Checkpointed(nn.Module):
    """Blocks in checkpoints of torch. The first one has no gradient in torch either, where a reentrant checkpoint
    is given none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        checkpoint = torch.utils.checkpoint.checkpoint
        h = checkpoint(self.first, x, use_reentrant=True)
        for block, reentrant in zip(self.blocks, (False, True, True)):
            h = h + checkpoint(lambda h, b=block: b(h).tanh(), h, use_reentrant=reentrant)
        loss: Tensor = h.square().mean()
        return loss


@pytest.mark.parametrize(("mesh", "options"), [("dp=2", {"microbatches": 2}), ("tp=2", {})])
def test_checkpoints_are_differentiated(mesh: str, options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")  # said by torch
        check(Checkpointed(), mesh, **options)


def test_functions_are_left_alone_afterwards() -> None:
    before = vars(torch.autograd.Function)["apply"], torch.autograd.grad, torch.autograd.backward
    capture(Net().double(), batch())
    assert (vars(torch.autograd.Function)["apply"], torch.autograd.grad, torch.autograd.backward) == before
