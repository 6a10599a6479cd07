"""What a model keeps in closures, hooks, partials and lists is captured with its gradients, or refused by name."""

from __future__ import annotations

import functools
import gc
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.adapters.copying.fake import skeleton_of
from autopar.capture.front_end import capture
from tests.support.plain_models import EXACT, gap, gradients, part
from tests.support.ranks import run_ranks

LOOSE = nn.Parameter(torch.ones(4, dtype=torch.float64))


class Net(nn.Module):
    """Some cases replace the body, others wrap or hook the layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.scale, self.shift = nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(4))
        self.double()

    def body(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(x)))
        return out

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).pow(2).mean()


CASES: list[Callable[[Net], None]] = []
REFUSED: list[tuple[Callable[[Net], None], str]] = []


def case(change: Callable[[Net], None]) -> Callable[[Net], None]:
    CASES.append(change)
    return change


def refused(message: str) -> Any:
    return lambda change: REFUSED.append((change, message))


@case
def kept_function(m: Net) -> None:
    """minGPT's mlpf."""
    up, down = m.up, m.down
    m.mlpf = lambda x: down(torch.tanh(up(x)))
    m.body = lambda x: m.mlpf(x) + m.shift  # type: ignore[method-assign]


@case
def tensors_themselves(m: Net) -> None:
    """Parameters and bound methods of tensors, not modules; a default, a keyword default, a dict."""
    weight, kept, mul = m.up.weight, {"shift": m.shift}, m.scale.mul

    def body(x: Tensor, bias: Tensor = m.up.bias, *, last: nn.Module = m.down) -> Tensor:
        h: Tensor = last(mul(nn.functional.linear(x, weight, bias)))
        return h + kept["shift"]

    m.body = body  # type: ignore[method-assign]


@case
def hooks(m: Net) -> None:
    m.up.register_forward_hook(lambda mod, args, out: out * m.scale)
    m.up.register_forward_hook(lambda mod, args, kw, out: out + m.scale, with_kwargs=True, always_call=True)
    m.up.register_forward_pre_hook(lambda mod, args, kw: ((args[0] + m.shift,), kw), with_kwargs=True)
    m.register_forward_hook(lambda mod, args, out: out * m.scale.sum())
    m.register_forward_pre_hook(lambda mod, args, kw: (args, {"x": kw["x"] * m.shift}), with_kwargs=True)


@case
def hook_of_an_object(m: Net) -> None:
    class Holder:
        __slots__ = ("function", "net")

        def __init__(self, net: Net) -> None:
            self.net, self.function = net, lambda x: x * net.scale

        def __call__(self, mod: nn.Module, args: Any, out: Tensor) -> Tensor:
            return self.function(out) + self.net.scale

    m.up.register_forward_hook(Holder(m))
    m.down.register_forward_hook(functools.partial(lambda shift, mod, args, out: out * shift, m.shift))


@case
def lora_by_patching(m: Net) -> None:
    """As peft and accelerate do: the old forward in a closure, a bound function, an updated partial."""
    m.a, m.b = nn.Parameter(torch.rand(4, 2).double()), nn.Parameter(torch.rand(2, 8).double())
    old = m.up.forward

    def new(self: nn.Module, x: Tensor) -> Tensor:
        return old(x) + x @ m.a @ m.b

    m.up.forward = types.MethodType(new, m.up)  # type: ignore[method-assign]
    before = m.down.forward

    def wrapped(module: Any, *args: Any) -> Tensor:
        out: Tensor = module._old(*args)
        return out * m.shift

    m.down._old = before  # type: ignore[assignment]
    m.down.forward = functools.update_wrapper(functools.partial(wrapped, m.down), before)  # type: ignore[method-assign]


@case
def wrapped_forward(m: Net) -> None:
    def wrapper(fn: Any) -> Any:
        @functools.wraps(fn)
        def inner(*args: Any, **kwargs: Any) -> Any:
            return fn(*args, **kwargs) * m.scale.sum()

        return inner

    m.forward = wrapper(m.forward)  # type: ignore[method-assign]


@case
def shared_and_recursive(m: Net) -> None:
    """Functions in each other's closures, one of them in two modules; a cache; a weak reference; a lock."""
    me = weakref.ref(m)

    def again(x: Tensor, n: int) -> Tensor:
        return x if n == 0 else again(torch.tanh(m.up(x)) @ m.up.weight, n - 1)

    scaled = functools.lru_cache(maxsize=2)(lambda k: k / me().up.out_features)  # type: ignore[union-attr]
    m.again, m.up.again, m.lock = again, again, threading.Lock()  # type: ignore[assignment]
    m.body = lambda x: m.down(m.up(m.up.again(x, 2)) * (m.scale * scaled(3))) + m.again(x, 1)  # type: ignore[operator, method-assign]


@case
def lists_and_views(m: Net) -> None:
    """Registered tensors in lists; .data is a detach; something left over from an earlier forward is replaced."""
    kept = [m.scale, m.up.bias]

    def body(x: Tensor) -> Tensor:
        m.last = m.up(x) * torch.stack(kept).sum(0)
        return m.down(m.last) * m.down.weight.data.norm()  # type: ignore[no-any-return]

    m.body = body  # type: ignore[method-assign]
    m(torch.ones(2, 4).double())


@case
def frozen_teacher(m: Net) -> None:
    """Not registered, so that it does not train."""
    teacher = nn.Linear(4, 4).double()
    m.teacher = [teacher]

    def body(x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = m.teacher[0](x)
        out: Tensor = m.down(m.up(x)) - wanted
        return out

    m.body = body  # type: ignore[method-assign]


@case
def parametrized(m: Net) -> None:
    nn.utils.parametrizations.weight_norm(m.up)
    nn.utils.parametrize.register_parametrization(m.down, "weight", _Halved())


class _Halved(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w / 2


@pytest.mark.parametrize("change", CASES, ids=lambda f: f.__name__)
def test_gradients_are_those_of_eager(change: Callable[[Net], None]) -> None:
    model, x = Net(), torch.rand(3, 4, dtype=torch.float64)
    change(model)
    gm = capture(skeleton_of(model), {"x": x})
    model.zero_grad()
    loss = model(x=x)
    loss.backward()
    state = {**dict(model.named_parameters()), **gm.meta["constants"], "x": x}
    (found,) = gm(*(state[spec.name] for spec in gm.meta["signature"].inputs))
    names, parameters = zip(*model.named_parameters())
    made = torch.autograd.grad(found, parameters, allow_unused=True)
    assert abs(found - loss) < EXACT
    assert gap({n: g for n, g in zip(names, made) if g is not None}, gradients(model)) < EXACT
    assert min(float(g.abs().max()) for g in gradients(model).values()) > 1e-6


@refused(r"uses scale of the model through a global variable or a class")
def global_variable(m: Net) -> None:
    Net.secret = m.scale  # type: ignore[attr-defined]
    m.body = types.MethodType(lambda self, x: self.up(x) * Net.secret, m)  # type: ignore[attr-defined, method-assign]


@refused(
    r"test_closures\.py:\d+ in .*a tensor \(4,\) from outside of the model, which requires grad but is not a parameter"
)
def loose_parameter(m: Net) -> None:
    m.body = lambda x: m.down(m.up(x)) * LOOSE.detach()  # type: ignore[method-assign]


@refused(r"the tensor kept as extra\[0\]\['w'\], which requires grad but is not a parameter.*nn\.ParameterList")
def parameter_in_a_list(m: Net) -> None:
    m.extra = [{"w": nn.Parameter(torch.ones(4).double())}]
    m.body = lambda x: m.down(m.up(x)) * m.extra[0]["w"]  # type: ignore[method-assign]


@refused(r"the tensor kept as detached, which shares the storage of scale and would be a constant")
def storage_of_a_parameter(m: Net) -> None:
    m.detached = m.scale.data[:4]
    m.body = lambda x: m.down(m.up(x)) * m.detached  # type: ignore[method-assign]


@refused(r"the tensor kept as doubled, which was made by MulBackward0 before and would be a constant")
def made_before(m: Net) -> None:
    m.doubled = m.scale * 2
    m.body = lambda x: m.up(x) * m.doubled  # type: ignore[method-assign]


@refused(r"a copy of up is the original, or has other tensors; .*Own, or a module around it, needs a __deepcopy__")
def copies_itself(m: Net) -> None:
    class Own(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            return self

    m.up = Own(4, 8).double()


@refused(r"uses scale of the model through a")
def caught_by_the_forward(m: Net) -> None:
    Net.secret = m.scale  # type: ignore[attr-defined]

    def body(x: Tensor) -> Tensor:
        try:
            return m.up(x) * Net.secret  # type: ignore[attr-defined, no-any-return]
        except ValueError:
            return m.up(x)  # type: ignore[no-any-return]

    m.body = body  # type: ignore[method-assign]


@pytest.mark.parametrize("change, message", REFUSED, ids=[f.__name__ for f, _ in REFUSED])
def test_what_would_lose_its_gradient_is_refused(change: Callable[[Net], None], message: str) -> None:
    model = Net()
    change(model)
    with pytest.raises(ValueError, match=message):
        capture(skeleton_of(model), {"x": torch.ones(3, 4, dtype=torch.float64)})


def test_the_copy_is_apart_and_the_weights_are_free() -> None:
    model = Net()
    hooks(model), kept_function(model), lora_by_patching(model)
    weights = [weakref.ref(p) for p in model.parameters()]
    skeleton = skeleton_of(model)
    assert all(p.is_meta for p in skeleton.parameters()) and not any(p.is_meta for p in model.parameters())
    assert skeleton.mlpf is not model.mlpf and skeleton.down.forward.args[0] is skeleton.down  # type: ignore[union-attr]
    del model
    gc.collect()
    assert not any(w() is not None for w in weights)


# --- on ranks -----------------------------------------------------------------------------------------


def on_ranks(sizes: dict[str, int]) -> None:
    x = torch.rand(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mesh = autopar.init_mesh("cpu", 30.0, **sizes)
    model = Net()
    for change in (kept_function, hooks, lora_by_patching):
        change(model)
    mine = part({"x": x}, sizes)
    parallel = autopar.parallelize(model, mesh, example_batch=mine)
    parallel.train_step(**mine)
    model(x=x).backward()
    assert gap(parallel.full_gradients(), gradients(model)) < EXACT
    assert autopar.verify(model, mesh, {"x": x}).passed


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"tp": 2}], ids=["dp2", "tp2"])
def test_on_ranks(sizes: dict[str, int]) -> None:
    run_ranks(2, on_ranks, sizes)
