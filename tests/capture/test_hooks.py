"""Hooks: those of parameters are called with the gradients of a step, those of modules are traced or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.modules.module as torch_module
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.tensor import DTensor

import autopar
from autopar.adapters.copying.fake import skeleton_of
from autopar.adapters.hooks import observed
from autopar.capture.front_end import capture
from tests.support.plain_models import EXACT, Net, build, gap, gradients, numbers, part, put
from tests.support.ranks import run_ranks
from tests.support.subjects import tiny


def hooks_of_parameters() -> None:
    sizes = {"dp": 2}
    model, batch = build(Net), numbers()
    model(**batch)["loss"].backward()
    expected = gradients(model)
    mine = part(batch, sizes)
    parallel = put(model, batch, sizes, zero=3)
    trained = {n: p for n, p in parallel.named_parameters() if n in expected}
    weight = trained["first.weight"]
    calls: list[str] = []

    def double(g: Tensor) -> Tensor:
        assert isinstance(g, DTensor) and g.shape == weight.shape
        calls.append("before")
        return g * 2

    def after(p: Tensor) -> None:
        assert p is weight and p.grad is not None
        calls.append("after")

    handles = [weight.register_hook(double), weight.register_post_accumulate_grad_hook(after)]
    handles.append(register_multi_grad_hook(list(trained.values()), lambda found: calls.append(f"{len(found)}")))
    wanted = {n: g * (2 if n == "first.weight" else 1) for n, g in expected.items()}
    parallel.train_step(**mine)
    assert calls == ["before", "after", "4"] or sorted(calls) == ["4", "after", "before"]
    assert gap(parallel.full_gradients(), wanted) < EXACT
    parallel(**mine)["loss"].backward()  # adds: the hook sees this backward's gradient only
    assert gap(parallel.full_gradients(), {n: 2 * g for n, g in wanted.items()}) < EXACT
    for handle in handles:
        handle.remove()
    parallel.zero_grad()
    parallel.train_step(**mine)
    assert gap(parallel.full_gradients(), expected) < EXACT and len(calls) == 6

    hooks_of_nodes(parallel, mine, expected)

    optimizers = {p: torch.optim.SGD([p], 0.5) for p in trained.values()}  # the optimizer within the backward

    def step(p: Tensor) -> None:
        optimizers[p].step()  # type: ignore[index]
        p.grad = None

    for p in trained.values():
        p.register_post_accumulate_grad_hook(step)
    before = parallel.full_state_dict()
    parallel.zero_grad()
    parallel.train_step(**mine)
    now = parallel.full_state_dict()
    assert all(p.grad is None for p in trained.values())
    assert gap({n: now[n] for n in expected}, {n: before[n] - 0.5 * g for n, g in expected.items()}) < EXACT

    parallel.zero_grad()
    traced = parallel.get_submodule("first").register_forward_hook(lambda m, given, out: out * 2)
    traced_too = model.get_submodule("first").register_forward_hook(lambda m, given, out: out * 2)
    model.zero_grad()
    model.load_state_dict(now)
    expected_loss = model(**batch)["loss"]
    assert abs(parallel.train_step(**mine).item() - expected_loss.item()) < EXACT  # compiled once more, with the hook
    traced.remove(), traced_too.remove()
    assert abs(parallel.train_step(**mine).item() - model(**batch)["loss"].item()) > 1e-3
    with pytest.raises(ValueError, match="has its own backward"):
        parallel.register_full_backward_hook(print)
    handle = parallel.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="does not call hooks of the parallel model"):
        parallel.train_step(**mine)
    handle.remove()


def hooks_of_nodes(parallel: Any, mine: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """As libraries put them there that reduce gradients while a backward runs: they hold the node, or a graph."""
    weight, bias = parallel.first.weight, parallel.first.bias
    calls: list[str] = []
    node = node_of(weight)
    node.register_prehook(lambda grads: (grads[0] * 2,))
    node.register_hook(lambda *_: calls.append("weight"))
    graph = bias.expand_as(bias)
    graph.grad_fn.next_functions[0][0].register_hook(lambda *_: calls.append("bias"))
    wanted = {n: g * (2 if n == "first.weight" else 1) for n, g in expected.items()}
    for run in (lambda: parallel.train_step(**mine), lambda: parallel(**mine)["loss"].backward()):
        parallel.zero_grad()
        run()
        assert gap(parallel.full_gradients(), wanted) < EXACT
    assert sorted(calls) == ["bias", "bias", "weight", "weight"]
    assert observed([weight, bias, parallel.head.weight]) == [True, True, False]
    del node, graph  # the hooks go with them, as in torch
    parallel.zero_grad()
    parallel.train_step(**mine)
    assert gap(parallel.full_gradients(), expected) < EXACT and len(calls) == 4


def node_of(parameter: Tensor) -> Any:
    return parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def test_hooks_of_parameters() -> None:
    run_ranks(2, hooks_of_parameters)


def hooks_that_keep() -> None:
    """A gradient that somebody else holds is copied by torch: of a fused weight, too."""
    model, batch = tiny("gpt2", layers=1)
    parallel = autopar.parallelize(model, autopar.init_mesh(tp=2), example_batch=batch)
    parallel.train_step(**batch)
    expected = parallel.full_gradients()
    parallel.zero_grad()
    kept: list[Tensor] = []
    for p in parallel.parameters():
        p.register_hook(kept.append)
    parallel.train_step(**batch)
    assert len(kept) == len(expected)
    assert all(torch.equal(g, expected[name]) for name, g in parallel.full_gradients().items())


def test_hooks_that_keep_gradients() -> None:
    run_ranks(2, hooks_that_keep)


def on_a_module(m: Net) -> Any:
    return m.first.register_full_backward_hook(lambda *_: None)


def before_a_module(m: Net) -> Any:
    return m.first.register_full_backward_pre_hook(lambda *_: None)


def on_all_modules(m: Net) -> Any:
    return torch_module.register_module_full_backward_hook(lambda *_: None)


def on_a_parameter(m: Net) -> Any:
    return m.first.weight.register_hook(lambda g: g)


def after_a_parameter(m: Net) -> Any:
    return m.first.weight.register_post_accumulate_grad_hook(lambda p: None)


class OnANode:
    """A hook on the node that adds up a gradient, which goes when nobody holds the node."""

    def __init__(self, model: Net) -> None:
        self.node = node_of(model.first.weight)
        self.node.register_hook(lambda *_: None)

    def remove(self) -> None:
        del self.node


@pytest.mark.parametrize(
    "register, message",
    [
        (OnANode, "hooks: parameter first.weight has a hook on its AccumulateGrad node, .*of the parallelized model"),
        (on_a_module, r"hooks: module first has a backward hook \(on_a_module"),
        (before_a_module, "hooks: module first has a backward hook"),
        (on_all_modules, "backward hook for all modules"),
        (on_a_parameter, "hooks: parameter first.weight has a gradient hook.*on the parameter of the same name"),
        (after_a_parameter, "hooks: parameter first.weight has a gradient hook"),
    ],
)
def test_hooks_that_cannot_be_kept_are_refused(register: Callable[[Net], Any], message: str) -> None:
    model = build(Net)
    handle = register(model)  # type: ignore[arg-type]
    try:
        with pytest.raises(ValueError, match=message):
            skeleton_of(model)
    finally:
        handle.remove()
    skeleton_of(model)


def test_forward_hooks_for_all_modules_are_traced() -> None:
    model, batch = build(Net), numbers()
    with torch_module.register_module_forward_hook(lambda m, a, out: out * 2 if isinstance(m, nn.Linear) else None):
        gm = capture(model, batch)
    assert sum(n.target is torch.ops.aten.mul.Tensor for n in gm.graph.nodes) == 3


class Intermediate(Net):
    def __init__(self, what: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        h = self.first(x)
        self.what(h)
        return super().forward(x, target)


@pytest.mark.parametrize(
    "what, message",
    [
        (lambda h: h.register_hook(lambda g: g * 2), "a hook on the gradient of an intermediate value"),
        (lambda h: h.retain_grad(), "the gradient of an intermediate value would not be kept"),
        (lambda h: h.sum().backward(), "a backward within the forward cannot be captured"),
    ],
    ids=["register_hook", "retain_grad", "backward"],
)
def test_what_acts_on_the_backward_of_a_forward_is_refused(what: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"capture: .*test_hooks\.py:\d+ in .*{message}"):
        capture(Intermediate(what), {n: t.float() for n, t in numbers().items()})


class TwoHeads(Net):
    """ "other" does not belong to the loss."""

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {**super().forward(x, target), "other": self.first(x)}


def hooks_of_outputs(sizes: dict[str, int]) -> None:
    batch = numbers()
    mine = part(batch, sizes)
    parallel = put(build(TwoHeads), batch, sizes)
    name = next(n for n in parallel(**mine) if n not in ("loss", "other"))
    for ask in (Tensor.retain_grad, lambda x: x.register_hook(lambda g: g)):
        for of_both in (False, True):
            out = parallel(**mine)
            ask(out[name])
            loss = out["loss"] + out[name].sum() if of_both else out["loss"]
            with pytest.raises(ValueError, match=f"asks for the gradient of output {name}, found"):
                loss.backward()
        out = parallel(**mine)
        ask(out["other"])
        out["loss"].backward()
        assert out["other"].grad is None  # as in torch
        out = parallel(**mine)
        ask(out[name])
        out[name].sum().backward()
    out = parallel(**mine)
    out[name].retain_grad()
    out[name].sum().backward()
    assert torch.equal(out[name].grad.full_tensor(), torch.ones_like(out[name].full_tensor()))


@pytest.mark.parametrize("sizes", [{"dp": 1}, {"tp": 2}, {"dp": 2}], ids=str)
def test_the_gradient_of_an_output_that_the_loss_is_made_of_is_refused(sizes: dict[str, int]) -> None:
    run_ranks(max(sizes.values()), hooks_of_outputs, sizes)
