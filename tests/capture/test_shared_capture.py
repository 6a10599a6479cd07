"""`parallelize` and the first step share one capture, unless anything that a capture sees has changed in between."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import api
from autopar.compile import shared_capture
from autopar.compile.shared_capture import SharedCapture
from tests.support.plain_models import EXACT, gap, gradients
from tests.support.ranks import run_ranks

SCALE, TABLE, SETTINGS = 1.0, [1.0, 2.0], types.SimpleNamespace(scale=1.0)


def helper(x: Tensor) -> Tensor:
    return x * SCALE * sum(TABLE)


class Gain(torch.autograd.Function):
    """Not a module: its functions are reached by the name of the class."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 1.0


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.factor = nn.Linear(4, 4), nn.Dropout(0.0), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return Gain.apply(helper(self.drop(self.linear(x)))) * self.factor * SETTINGS.scale  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = Inner(), nn.Linear(4, 3)
        self.double()

    def forward(self, x: Tensor, y: Tensor, half: bool = False) -> Tensor:
        return nn.functional.mse_loss(torch.tanh(self.head(self.inner(x))), y) * (0.5 if half else 1.0)


def batch(rows: int = 4, **more: Any) -> dict[str, Any]:
    g = torch.Generator().manual_seed(1)
    made = {n: torch.randn(rows, w, generator=g, dtype=torch.float64) for n, w in (("x", 4), ("y", 3))}
    return made | more


def set_global(name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: globals().__setitem__(name, value)


def patched(model: Any) -> None:
    old = Inner.forward
    Inner.forward = lambda self, x: old(self, x) + 1  # type: ignore[method-assign]


def doubled(model: Any) -> None:
    Gain.forward = staticmethod(lambda ctx, x: x * 2.0)  # type: ignore[method-assign]
    Gain.backward = staticmethod(lambda ctx, gradient: gradient * 2.0)  # type: ignore[method-assign]


def first_evaluated(model: Any) -> None:
    model.eval_step(**batch()) if hasattr(model, "eval_step") else None


# What is done between, and whether the first step captures anew. All but the last are undone.
CHANGES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "nothing": (lambda m: None, False),
    "an optimizer": (lambda m: torch.optim.SGD(m.parameters(), lr=0.1), False),
    "a mode and back": (lambda m: (m.eval(), m.train()), False),
    "weights": (lambda m: m.load_state_dict({n: x + 0 for n, x in m.state_dict().items()}), False),
    "frozen": (lambda m: m.inner.linear.requires_grad_(False), True),
    "an attribute": (lambda m: setattr(m.inner, "factor", 2.0), True),
    "another module": (lambda m: setattr(m.inner, "drop", nn.Tanh()), True),
    "a mode": (lambda m: m.inner.eval(), True),
    "a hook": (lambda m: m.head.register_forward_hook(lambda module, given, out: out * 2), True),
    "a method": (patched, True),
    "a name of the file": (set_global("SCALE", 2.0), True),
    "an entry of a list": (lambda m: TABLE.append(3.0), True),
    "an attribute of an object of the file": (lambda m: setattr(SETTINGS, "scale", 3.0), True),
    "a function of the file": (set_global("helper", torch.sin), True),
    "a function of a class of the file": (doubled, True),
    "an evaluation": (first_evaluated, True),
}


def outcomes() -> dict[str, str]:
    """On a rank: by change, what is not as it should be."""
    with pytest.MonkeyPatch.context() as patched:
        return _outcomes(patched)


def _outcomes(patched: pytest.MonkeyPatch) -> dict[str, str]:
    mesh, captures, made, out = autopar.init_mesh("cpu", 60.0, dp=1), [], [], {}
    own = Gain.forward, Gain.backward
    trace, saved = shared_capture.capture, (SCALE, helper, Inner.forward)
    noted = lambda *args, **how: captures.append(1) or trace(*args, **how)  # type: ignore[func-returns-value] # noqa: E731
    patched.setattr(shared_capture, "capture", noted)

    class Seen(SharedCapture):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    patched.setattr(api, "SharedCapture", Seen)
    for what, (change, again) in CHANGES.items():
        plain = Net()
        parallel = autopar.parallelize(copy.deepcopy(plain), mesh, example_batch=batch())
        before = len(captures)
        change(plain), change(parallel) if "list" not in what and "method" not in what else None
        loss = parallel.train_step(**batch())
        expected = plain(**batch())
        expected.backward()
        wrong = [f"off by {abs(float(loss) - float(expected))}"] if abs(float(loss) - float(expected)) > EXACT else []
        wrong += ["gradients"] if gap(parallel.full_gradients(), gradients(plain)) > EXACT else []
        wrong += ["captures"] if (len(captures) > before) != again else []
        wrong += ["kept"] if made[-1]._graph is not None else []
        globals().update(SCALE=saved[0], helper=saved[1])
        Inner.forward = saved[2]  # type: ignore[method-assign]
        Gain.forward, Gain.backward = map(staticmethod, own)  # type: ignore[method-assign, assignment]
        TABLE[2:], SETTINGS.scale = [], 1.0
        out[what] = " ".join(wrong)
    return out


def test_what_is_captured_once_and_what_anew() -> None:
    (found,) = run_ranks(1, outcomes, timeout=300)
    assert not {what: wrong for what, wrong in found.items() if wrong}


@pytest.mark.parametrize(
    ("batches", "how", "same"),
    [
        ((batch(), batch()), ({}, {}), True),
        ((batch(), batch(8)), ({}, {}), False),
        ((batch(), {**batch(), "x": batch()["x"].float()}), ({}, {}), False),
        ((batch(), batch(half=True)), ({}, {}), False),
        ((batch(), batch()), ({"lift_to_float64": True}, {}), False),
        ((batch(), batch()), ({}, {"autocast": torch.bfloat16}), False),
        ((batch(), batch()), ({}, {"train": False}), False),
    ],
)
def test_of_the_same_batch_and_surroundings(
    monkeypatch: pytest.MonkeyPatch, batches: tuple[Any, Any], how: tuple[Any, Any], same: bool
) -> None:
    """And once: the second time nothing is kept."""
    count: list[int] = []
    graph = torch.fx.GraphModule(nn.Module(), torch.fx.Graph())
    graph.graph.output(())
    graph.meta["kept"] = False
    monkeypatch.setattr(shared_capture, "capture", lambda *_, **__: count.append(1) or graph)
    shared = SharedCapture()
    shared.first(Net(), batches[0], **how[0])
    shared.again(Net(), batches[1], **how[1])
    assert len(count) == (1 if same else 2)
    shared.again(Net(), batches[1], **how[1])
    assert len(count) == (2 if same else 3)
    shared.first(Net(), batches[0])
    with torch.device("cpu"):  # a mode: what it does is not known
        shared.again(Net(), batches[0])
    assert len(count) == (4 if same else 5)


VALUE: list[float] = [0.5]
NUMBERS: dict[int, float] = {3: 0.1}


@functools.lru_cache(4)
def cached(times: int) -> float:
    return VALUE[0] * times


class Keeping(Net):
    @staticmethod
    @functools.cache
    def number() -> float:
        return VALUE[0]

    def forward(self, x: Tensor, y: Tensor, half: bool = False) -> Tensor:
        if 2 not in NUMBERS:
            NUMBERS[2] = VALUE[0]
        return super().forward(x * cached(1) * cached(2) * self.number() * NUMBERS[2], y, half)


def test_what_a_forward_keeps_is_of_the_first_step() -> None:
    """A capture for a plan is no forward: it leaves caches and dicts as they were, and its graph to nobody."""
    assert cached(1) == 0.5
    shared = SharedCapture()
    shared.first(Keeping(), batch())
    assert cached.cache_info().currsize == 1 and not Keeping.number.cache_info().currsize and NUMBERS == {3: 0.1}
    VALUE[0] = 1.5
    text = shared.again(Keeping(), batch()).code
    assert NUMBERS == {3: 0.1, 2: 1.5} and all(f", {number})" in text for number in (0.5, 3.0, 1.5))
    VALUE[0] = 2.5
    assert (cached(1), cached(2), Keeping.number()) == (0.5, 3.0, 1.5)
