"""Habits with buffers that a forward writes to or assigns, in both ways to step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.compat.habit_models import Model
from tests.compat.habits import PHASES, STEP, Habit, Run, full

BUFFERS: list[Habit] = []
BOTH = (STEP, PHASES)

Body = Callable[[Any, Tensor], Tensor]


class Left(Model):
    """The model of all habits, with a function of its hidden values [B, 6] in the midst."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.register_buffer("c", torch.ones(6))
        self.register_buffer("d", torch.full((6,), 0.5))
        self.last_hidden: Any = None
        self.calls, self.kept = 0, dict[str, Tensor]()

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        h = self.body(self, torch.tanh(self.first(x)))
        logits = torch.tanh(self.last(self.block(h)) * self.scale)
        return {"loss": nn.functional.mse_loss(logits, target), "logits": logits, "hidden": h, "buffer": self.c}


def made(body: Body) -> Left:
    torch.manual_seed(0)
    return Left(body).double()


def habit(when: str, what: str, body: Body, do: Callable[[Any], Any], refused: str = "", ways: Any = BOTH) -> None:
    BUFFERS.append(Habit(what, when, do, refused, make=functools.partial(made, body), ways=ways))


def nothing(_: Any) -> None:
    return None


# --- buffers that a forward writes to or assigns --------------------------------------------------------------


def written(m: Any, h: Tensor) -> Tensor:
    """A queue, a moving average: what the backward reads is the old value."""
    out = h * m.c.clone()
    m.c.mul_(0.5).add_(h.detach().mean(0))
    return out


def assigned(m: Any, h: Tensor) -> Tensor:
    out = h * m.c
    m.c = m.c * 0.5 + h.detach().mean(0)
    return out


def written_in_part(m: Any, h: Tensor) -> Tensor:
    out = h * m.c.clone().detach()
    m.c[:3] = h.detach().mean(0)[:3]
    return out


def swapped(m: Any, h: Tensor) -> Tensor:
    out = h * m.c + m.d
    m.c, m.d = m.d, m.c
    return out


def swapped_in_place(m: Any, h: Tensor) -> Tensor:
    out = h * m.c.clone() + m.d.clone()
    old = m.c.clone()
    m.c.copy_(m.d)
    m.d.copy_(old)
    return out


def shifted(m: Any, h: Tensor) -> Tensor:
    out = h * m.c + m.d
    m.d = m.c
    m.c = h.detach().mean(0)
    return out


def shifted_and_written(m: Any, h: Tensor) -> Tensor:
    out = h * m.c.clone() + m.d.clone()
    m.d = m.c
    m.c.add_(0.5)
    return out


def written_then_assigned(m: Any, h: Tensor) -> Tensor:
    out = h * m.c.clone()
    m.c.mul_(2.0)
    m.c = m.c + 1
    return out


def into_the_dict(m: Any, h: Tensor) -> Tensor:
    out = h * m.c
    m._buffers["c"] = m.c * 0.5
    return out


def registered_again(m: Any, h: Tensor) -> Tensor:
    out = h * m.c
    m.register_buffer("c", m.c * 0.5)
    return out


def grown(m: Any, h: Tensor) -> Tensor:
    out = h * m.c.mean()
    m.c = torch.cat([m.c, h.detach().mean(0)])
    return out


def cast(m: Any, h: Tensor) -> Tensor:
    out = h * m.c
    m.c = m.c.float() * 0.5
    return out


def put_out(m: Any, h: Tensor) -> Tensor:
    out = h if m.d is None else h * m.d
    m.d = None
    return out


def one_for_two(m: Any, h: Tensor) -> Tensor:
    out = h * m.c + m.d
    m.c = m.d = h.detach().mean(0)
    return out


def with_graph(m: Any, h: Tensor) -> Tensor:
    out = h * m.c
    m.c = h.mean(0)
    return out


def detached_when_read(m: Any, h: Tensor) -> Tensor:
    out = h * m.c.detach()
    m.c = h.mean(0)
    return out


def written_with_graph(m: Any, h: Tensor) -> Tensor:
    m.c.mul_(0.9).add_(h.mean(0), alpha=0.1)
    return h - m.c


def view_of_a_weight(m: Any, h: Tensor) -> Tensor:
    out = h * m.c
    m.c = m.first.bias.detach()
    return out


def replaces_a_parameter(m: Any, h: Tensor) -> Tensor:
    m.first.bias = nn.Parameter(m.first.bias * 0.5)
    return h


def masked(m: Any, h: Tensor) -> Tensor:
    gram = h.t() @ h
    return h @ gram.fill_diagonal_(0.0)


BODIES: list[tuple[str, Body]] = [
    ("self.c.mul_(0.5)", written),
    ("self.c = self.c * 0.5", assigned),
    ("self.c[:3] = h", written_in_part),
    ("self.c, self.d = self.d, self.c", swapped),
    ("copies of two buffers into each other", swapped_in_place),
    ("self.d = self.c; self.c = new", shifted),
    ("self.d = self.c; self.c.add_(0.5)", shifted_and_written),
    ("self.c.mul_(2); self.c = self.c + 1", written_then_assigned),
    ('self._buffers["c"] = new', into_the_dict),
    ('self.register_buffer("c", new) again', registered_again),
    ("self.c = torch.cat([self.c, new]): grows", grown),
    ("self.c = self.c.float()", cast),
    ("self.d = None", put_out),
    ("self.c = self.d = new", one_for_two),
    ("self.c = h, read as self.c.detach()", detached_when_read),
    ("gram.fill_diagonal_(0)", masked),
]
for what, body in BODIES:
    habit("before", f"the forward: {what}", body, nothing)

habit("between", "the forward: self.c = h with its graph, read by the next", with_graph, nothing,
      "requires grad, but steps compute gradients of parameters only|through the graph a second time")  # fmt: skip
habit("before", "the forward: self.c.add_(h) with its graph, then used", written_with_graph, nothing,
      "depends on parameters into buffer c|through the graph a second time")  # fmt: skip
habit("before", "the forward: self.c = self.weight.detach()", view_of_a_weight, nothing,
      "shares memory with parameter first.bias")  # fmt: skip
habit("before", "the forward: self.bias = nn.Parameter(...)", replaces_a_parameter, nothing,
      "replaces parameter first.bias")  # fmt: skip


def observed(run: Run, also: Callable[[Any], Any] = nothing) -> list[float]:
    """What references to buffers see of a step."""
    old, view = run.model.c, run.model.c[:2]
    found = also(run.model)
    run.train_step(1)
    now = run.model.c
    seen = [old.sum(), view.sum(), now.sum(), *(x.sum() for x in (found or ()))]
    return [old is now, *(round(float(x), 10) for x in seen)]


for what, body in [BODIES[i] for i in (0, 1, 3, 5, 6, 7)]:
    habit("loop", f"old = model.c; a step with {what}", body, observed)
habit("loop", "two names of one buffer: self.c.mul_(0.5)", written, lambda run: observed(
    run, lambda m: (setattr(m, "d", m.c), (m.d,))[1]))  # fmt: skip
habit("loop", "two names of one buffer: self.c = self.c * 0.5", assigned, lambda run: observed(
    run, lambda m: (setattr(m, "d", m.c), (m.d,))[1]))  # fmt: skip
habit("loop", "model.c = other, then a step with self.c = new", assigned, lambda run: observed(
    run, lambda m: setattr(m, "c", torch.full((6,), 2.0, dtype=torch.float64))))  # fmt: skip


# --- between forward and backward -----------------------------------------------------------------------------


def finish(run: Run, *losses: Tensor) -> None:
    torch.stack(losses).sum().backward()
    run.optimizer.step()
    run.optimizer.zero_grad()


def two_forwards(run: Run) -> None:
    first, second = run.forward(1), run.forward(2)
    finish(run, first["loss"], second["loss"])


def in_reverse(run: Run) -> None:
    first, second = run.forward(1), run.forward(2)
    second["loss"].backward()
    finish(run, first["loss"])


def retained(run: Run) -> None:
    out = run.forward(1)
    out["loss"].backward(retain_graph=True)
    finish(run, out["loss"])


def without_gradients_between(run: Run) -> None:
    out = run.forward(1)
    with torch.no_grad():
        run.forward(2)
    finish(run, out["loss"])


def another_output(run: Run) -> None:
    """A gradient that the first forward has no backward for."""
    first, second = run.forward(1), run.forward(2)
    finish(run, full(first["hidden"].square().sum()), second["loss"])


def user_writes(run: Run) -> None:
    out = run.forward(1)
    run.model.c.zero_()
    finish(run, out["loss"])


def old_is_written(run: Run) -> None:
    old = run.model.c
    out = run.forward(1)
    old.zero_()
    finish(run, out["loss"])


def loaded_between(run: Run) -> None:
    out = run.forward(1)
    run.model.load_state_dict({"c": torch.full((6,), 3.0, dtype=torch.float64)}, strict=False)
    finish(run, out["loss"])


def replaced_between(run: Run) -> None:
    out = run.forward(1)
    run.model.c = torch.full((6,), 3.0, dtype=torch.float64)
    finish(run, out["loss"], run.forward(2)["loss"])


def outputs_that_are_buffers(run: Run) -> list[float]:
    first = run.forward(1)
    second = run.forward(2)
    run.model.c.add_(1.0)
    found = [round(float(full(out["buffer"].detach()).sum()), 10) for out in (first, second)]
    finish(run, first["loss"], second["loss"])
    return found


BETWEEN: list[tuple[str, Callable[[Run], Any]]] = [
    ("two forwards, one backward", two_forwards),
    ("two forwards, backwards in reverse", in_reverse),
    ("backward twice: retain_graph", retained),
    ("a forward without gradients before the backward", without_gradients_between),
    ("a backward from another output", another_output),
    ("model.c.zero_() before the backward", user_writes),
    ("load_state_dict before the backward", loaded_between),
    ("model.c = other before the backward", replaced_between),
    ("outputs that are the buffer", outputs_that_are_buffers),
]
for what, do in BETWEEN:
    habit("loop", f"{what}; self.c.mul_(0.5)", written, do, ways=(PHASES,))
    habit("loop", f"{what}; self.c = self.c * 0.5", assigned, do, ways=(PHASES,))
habit("loop", "old.zero_() before the backward; self.c = self.c * 0.5", assigned, old_is_written,
      "modified by an inplace operation", ways=(PHASES,))  # fmt: skip
