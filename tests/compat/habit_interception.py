"""Habits of forwards: autograd functions under any name, contexts, hooks, questions, parameters made on the way.

Each line is a function of the model and an activation that the forward calls in its middle."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, is_grad_enabled, is_inference_mode_enabled, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.autograd.graph import register_multi_grad_hook, save_on_cpu, saved_tensors_hooks
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from tests.compat.habit_hooks import nothing
from tests.compat.habits import PHASES, STEP, Habit, Run

FORWARDS: list[Habit] = []


class Around(nn.Module):
    """``body(self, h)`` in the middle of a forward."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.mid, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.scale, self.body, self.several = nn.Parameter(torch.ones(6)), body, [Clipped.apply]

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        h = self.body(self, torch.tanh(self.first(x)))
        logits = self.last(h)
        return {"loss": nn.functional.mse_loss(logits, target), "logits": logits}


def made(body: Callable[[Any, Tensor], Tensor], change: Callable[[Any], Any] | None = None) -> Any:
    torch.manual_seed(0)
    model = Around(body).double()
    if change is not None:
        change(model)
    return model


def forward(
    what: str, body: Callable[[Any, Tensor], Any], refused: str = "", change: Callable[[Any], Any] | None = None
) -> None:
    way = (STEP, PHASES)[len(FORWARDS) % 2]  # in turns: it is captured alike
    FORWARDS.append(
        Habit(what, "before", lambda m: None, refused, make=functools.partial(made, body, change), ways=(way,))
    )


# --- autograd functions under other names -----------------------------------------------------------------------


class Clipped(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-1e-3, 1e-3)


class Tripled(Clipped):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3

    @classmethod
    def apply(cls, *args: Any) -> Any:
        return super().apply(*args)  # type: ignore[no-untyped-call]


class Scaled(Function):
    """A keyword and a default, which only a forward without ctx has."""

    @staticmethod
    def forward(x: Tensor, factor: float = 2.0) -> Tensor:
        return x * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * 5 * ctx.factor, None


clip, triple, scaled = Clipped.apply, Tripled.apply, Scaled.apply
TABLE, PARTIAL = {"clip": Clipped.apply}, functools.partial(Clipped.apply)


def with_default(m: Any, h: Tensor, f: Any = Clipped.apply) -> Any:
    return f(h)


def made_within(m: Any, h: Tensor) -> Any:
    local = type("Local", (Clipped,), {"backward": staticmethod(lambda ctx, grad: grad * 7)})
    return local.apply(h)


class OfClass:
    clip, bound = staticmethod(Clipped.apply), functools.partialmethod(Clipped.apply)


class OfWeight(nn.Module):
    def forward(self, w: Tensor) -> Any:
        return clip(w)


APPLY = "clip = Clipped.apply"
forward(f"{APPLY} of a file: clip(h)", lambda m, h: clip(h))
forward(f"{APPLY} in a dict", lambda m, h: TABLE["clip"](h))
forward(f"{APPLY} in a list of the model", lambda m, h: m.several[0](h))
forward(f"{APPLY} as a default", with_default)
forward("functools.partial(Clipped.apply)", lambda m, h: PARTIAL(h))
forward("Clipped.apply as a static method", lambda m, h: OfClass.clip(h))
forward("map(clip, [h])", lambda m, h: next(map(clip, [h])))
forward("clip in a forward hook", lambda m, h: m.mid(h),
        change=lambda m: m.mid.register_forward_hook(lambda *given: clip(given[2])))  # fmt: skip
forward("clip in a parametrization", lambda m, h: m.mid(h),
        change=lambda m: nn.utils.parametrize.register_parametrization(m.mid, "weight", OfWeight()))  # fmt: skip
forward("clip in a checkpoint", lambda m, h: checkpoint(lambda x: clip(m.mid(x)), h, use_reentrant=False))
forward("an apply of its own that calls super().apply", lambda m, h: triple(h))
forward('getattr(Clipped, "apply")', lambda m, h: getattr(Clipped, "apply")(h))  # noqa: B009
forward("a function made in the forward", made_within)
forward("a keyword of an apply: scaled(h, factor=3.0)", lambda m, h: scaled(h, factor=3.0))
forward("CheckpointFunction.apply", lambda m, h, f=CheckpointFunction.apply: f(m.mid, True, h))

# --- contexts ---------------------------------------------------------------------------------------------------


def inferred(m: Any, h: Tensor) -> Tensor:
    with torch.inference_mode():
        found = m.mid(h)
    return h + found.clone()


@torch.inference_mode()
def decorated(m: Any, h: Tensor) -> Any:
    return m.mid(h).tanh()


def inferred_off(m: Any, h: Tensor) -> Any:
    with torch.no_grad(), torch.inference_mode(False):
        return m.mid(h).tanh()


def switched(m: Any, h: Tensor) -> Any:
    torch.set_grad_enabled(False)
    found = m.mid(h)
    torch.set_grad_enabled(True)
    return h + found


@contextlib.contextmanager
def without_gradients() -> Iterator[None]:
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    yield
    torch._C._set_grad_enabled(before)


def of_its_own(m: Any, h: Tensor) -> Any:
    with without_gradients():
        found = m.mid(h)
    return h + found


def packed(m: Any, h: Tensor) -> Any:
    with saved_tensors_hooks(lambda x: x * 2, lambda x: x):
        return m.mid(h).tanh()


def on_cpu(m: Any, h: Tensor) -> Any:
    with save_on_cpu():
        return m.mid(h).tanh()


class Doubled(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {})) * (2 if func is torch.tanh else 1)


class Below(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {})) * (2 if func is torch.ops.aten.tanh.default else 1)


def within(mode: Any, m: Any, h: Tensor) -> Any:
    with mode():
        return torch.tanh(m.scale * h)


forward("with torch.inference_mode() in the forward", inferred)
forward("@torch.inference_mode() of a function", lambda m, h: h + decorated(m, h).clone())
forward("with torch.inference_mode(False) within no_grad", inferred_off)
forward("torch.set_grad_enabled(False) as a statement", switched)
forward("a custom context around torch._C._set_grad_enabled", of_its_own)
forward("with saved_tensors_hooks(pack, unpack)", packed, "saved_tensors_hooks in the forward would not be called")
forward("with save_on_cpu()", on_cpu)
forward("with a custom TorchFunctionMode", functools.partial(within, Doubled))
forward("with a custom TorchDispatchMode", functools.partial(within, Below), "Below, a TorchDispatchMode")

# --- hooks on nodes of autograd -----------------------------------------------------------------------------------

NODE = "a hook on an autograd node would not be called"


def hooked(how: Callable[[Any], Any], m: Any, h: Tensor) -> Any:
    out = m.mid(h).tanh()
    how(out)
    return out


def caught(m: Any, h: Tensor) -> Any:
    with contextlib.suppress(Exception):
        h.grad_fn.register_hook(lambda *_: None)  # type: ignore[union-attr]
    return h


for what, how, refused in (
    ("y.grad_fn.register_hook", lambda y: y.grad_fn.register_hook(lambda into, _: into), NODE),
    ("y.grad_fn.register_prehook", lambda y: y.grad_fn.register_prehook(lambda grads: grads), NODE),
    ("a hook on a node behind", lambda y: y.grad_fn.next_functions[0][0].register_hook(lambda *_: None), NODE),
    (
        "register_multi_grad_hook([y]) in the forward",
        lambda y: register_multi_grad_hook([y], nothing),
        "gradient of an",
    ),
    ("y.grad_fn.name() is read", lambda y: y.grad_fn.name(), ""),
):
    forward(what, functools.partial(hooked, how), refused)
forward("a refusal that the forward catches", caught, NODE)

# --- what a forward asks ------------------------------------------------------------------------------------------


def told(question: Callable[[], bool]) -> Callable[[Any, Tensor], Any]:
    return lambda m, h: h * 3 if question() else m.mid(h)


for what, question in (
    ("torch.compiler.is_compiling()", lambda: torch.compiler.is_compiling()),
    ("from torch.compiler import is_compiling", is_compiling),
    ("torch.compiler.is_exporting()", lambda: torch.compiler.is_exporting()),
    ("torch._dynamo.is_compiling()", lambda: torch._dynamo.is_compiling()),
    ("torch.jit.is_tracing()", torch.jit.is_tracing),
):
    forward(f"if {what}", told(question))


def evaluated(run: Run, training: bool) -> None:
    """Without gradients, then as before."""
    run.model.train(training)
    with torch.no_grad():
        run.forward(1)
    run.model.train()
    run.train_step(2)


for what, question_of in (
    ("torch.is_grad_enabled()", lambda h: torch.is_grad_enabled()),
    ("from torch import is_grad_enabled", lambda h: is_grad_enabled()),
    ("h.requires_grad", lambda h: h.requires_grad),
):
    for mode in (True, False):
        FORWARDS.append(Habit(
            f"if {what}: no_grad, {'train' if mode else 'eval'}()", "loop", functools.partial(evaluated, training=mode),
            make=functools.partial(made, lambda m, h, q=question_of: h * 3 if q(h) else m.mid(h)),
            ways=((STEP, PHASES)[mode],),
        ))  # fmt: skip


def inferred_from(run: Run, training: bool) -> None:
    """Under inference_mode, under no_grad, then as before."""
    run.model.train(training)
    with torch.inference_mode():
        run.forward(1)
    evaluated(run, training)


def told_within(m: Any, h: Tensor) -> Tensor:
    with torch.inference_mode():
        asked = torch.is_inference_mode_enabled()
    return m.mid(h) * (3 if asked and not torch.is_inference_mode_enabled() else 2)


for what, asked, refused in (
    ("torch.is_inference_mode_enabled()", lambda h: torch.is_inference_mode_enabled(), ""),
    ("from torch import is_inference_mode_enabled", lambda h: is_inference_mode_enabled(), ""),
    ("h.is_inference()", lambda h: h.is_inference(), "is_inference.. under inference_mode"),
    ("torch.is_inference(h)", lambda h: torch.is_inference(h), "is_inference.. under inference_mode"),
):
    for mode in (True, False):
        FORWARDS.append(Habit(
            f"if {what}: inference_mode, no_grad, {'train' if mode else 'eval'}()", "loop",
            functools.partial(inferred_from, training=mode), refused,
            make=functools.partial(made, lambda m, h, q=asked: h * 3 if q(h) else m.mid(h)),
            ways=((STEP, PHASES)[mode],),
        ))  # fmt: skip
forward("if torch.is_inference_mode_enabled() within inference_mode()", told_within)
forward("if h.is_inference() in a step with gradients", lambda m, h: h * 3 if h.is_inference() else m.mid(h))


def checkpointed(module: Callable[[], nn.Module], reentrant: bool = False) -> Any:
    def replace(m: Any) -> None:
        m.mid = module().double()

    return {"change": replace, "body": lambda m, h: checkpoint(m.mid, h, use_reentrant=reentrant)}


class Scaled(nn.Module):
    """By a buffer that it writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, h: Tensor) -> Tensor:
        self.seen.copy_(h.detach().mean(0))
        return h * 2


AGAIN = "reads it within torch.utils.checkpoint"
forward("checkpoint(nn.BatchNorm1d)", refused=AGAIN, **checkpointed(lambda: nn.BatchNorm1d(6)))
forward("checkpoint(nn.BatchNorm1d), reentrant", refused=AGAIN, **checkpointed(lambda: nn.BatchNorm1d(6), True))
forward("checkpoint(nn.BatchNorm1d().eval())", **checkpointed(lambda: nn.BatchNorm1d(6).eval()))
forward("checkpoint(nn.BatchNorm1d(track_running_stats=False))",
        **checkpointed(lambda: nn.BatchNorm1d(6, track_running_stats=False)))  # fmt: skip
forward("checkpoint(spectral_norm(nn.Linear))", refused=AGAIN,
        **checkpointed(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))))  # fmt: skip
forward("a checkpoint that writes to a buffer what it does not read", **checkpointed(Scaled))

# --- parameters and derivatives -----------------------------------------------------------------------------------


def late(m: Any, h: Tensor) -> Any:
    if not hasattr(m, "late"):
        m.late = nn.Parameter(torch.full((6,), 2.0, dtype=h.dtype))
    return h * m.late


def registered(m: Any, h: Tensor) -> Any:
    if "late" not in m._parameters:
        m.register_parameter("late", nn.Parameter(torch.ones(6, dtype=h.dtype)))
    return h * m.late


def penalty(m: Any, h: Tensor) -> Any:
    x = h.detach().requires_grad_()
    (found,) = torch.autograd.grad(m.mid(x).tanh().sum(), x, create_graph=True)
    return h + found


def frozen(m: Any, h: Tensor, around: Any = contextlib.nullcontext) -> Any:
    with around():
        m.mid.weight.requires_grad_(False)
        return m.mid(h) + h


def replaced(m: Any, h: Tensor) -> Any:
    m.scale = nn.Parameter(m.scale.detach() * 2)
    return h * m.scale


MADE = "the forward creates parameter late"
forward("self.late = nn.Parameter(...) in the forward", late, MADE)
forward("register_parameter in the forward", registered, MADE)
forward("self.scale = nn.Parameter(...) in place of another", replaced, "the forward replaces parameter scale")
FROZEN = "the forward changes requires_grad of mid.weight"
forward("p.requires_grad_(False) in the forward", frozen, FROZEN)
forward("p.requires_grad_(False) in the forward, under no_grad", lambda m, h: h + frozen(m, h, torch.no_grad), FROZEN)
forward("p.requires_grad_(False) in the forward, under inference_mode",
        lambda m, h: h + frozen(m, h, torch.inference_mode).clone(), FROZEN)  # fmt: skip
forward(
    "p.requires_grad_(False) in the forward, frozen before", frozen, change=lambda m: m.mid.weight.requires_grad_(False)
)
forward("a gradient penalty of a detached value", penalty)
forward("y.detach_()", lambda m, h: h + m.mid(h).tanh().detach_())
forward("h.detach().requires_grad_()", lambda m, h: h + h.detach().requires_grad_() * m.scale)
