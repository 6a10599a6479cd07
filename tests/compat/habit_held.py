"""Memory of weights that the user has besides, errors that code for torch catches, and what time it is."""

from __future__ import annotations

import datetime
import functools
import operator
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.compat.habit_buffers import BOTH, Body, Left, made, nothing
from tests.compat.habit_models import make
from tests.compat.habits import Habit, Run

HELD: list[Habit] = []
KEPT: dict[str, Any] = {}


# --- memory of weights --------------------------------------------------------------------------------------


def held(what: str, take: Callable[[Any], Any], write: Callable[[Any], Any] | None = None, alive: bool = True) -> None:
    """The user takes hold of memory before `parallelize`; ``write``: there, between two steps. ``alive``: the original
    model is, too."""

    def built() -> Left:
        m = made(lambda m, h: h * m.weight)
        m.weight = nn.Parameter(torch.ones(6, dtype=torch.float64))
        KEPT["memory"] = take(m)
        KEPT["model"] = m if alive else None
        return m

    def do(run: Run) -> float:
        if write is not None:
            write(KEPT["memory"])
        run.train_step(1)
        return round(float(KEPT["memory"].sum()), 8)

    HELD.append(Habit(what, "loop", do, make=built, ways=BOTH))


def from_array(m: Any) -> Any:
    array = np.ones(6)
    m.weight = nn.Parameter(torch.from_numpy(array))
    return array


def of_flat(m: Any) -> Any:
    flat = torch.arange(12, dtype=torch.float64) / 10
    m.weight = nn.Parameter(flat[3:9])
    return flat


held("state = model.state_dict(): state['weight'] after steps", lambda m: m.state_dict()["weight"])
held("the same, state['weight'].zero_()", lambda m: m.state_dict()["weight"], lambda x: x.zero_())
held("the same, once the original is gone", lambda m: m.state_dict()["weight"], lambda x: x.mul_(2.0), alive=False)
held("w = p.data: w.mul_(2)", lambda m: m.weight.data, lambda x: x.mul_(2.0))
held("a = p.detach().numpy(): a[0] = 3", lambda m: m.weight.detach().numpy(), lambda x: operator.setitem(x, 0, 3.0))
held("nn.Parameter(flat[3:9]): flat.mul_(2)", of_flat, lambda x: x.mul_(2.0))
held("nn.Parameter(torch.from_numpy(a)): a after steps", from_array, alive=False)
held("the same, a[2] = 3", from_array, lambda x: operator.setitem(x, 2, 3.0), alive=False)


def with_buffer(body: Body) -> Callable[[], Left]:
    def built() -> Left:
        m = made(body)
        KEPT["memory"], KEPT["model"] = torch.ones(6, dtype=torch.float64), m
        m.c = KEPT["memory"]
        return m

    return built


def written_between(run: Run) -> float:
    """The backward has what torch's saved: `1 + c` of before."""
    loss = run.forward()["loss"]
    KEPT["memory"].fill_(0.5)
    loss.backward()
    run.optimizer.step()
    return float(KEPT["memory"].sum())


between = "c = torch.ones(6), a buffer, in h * (1 + c): loss, c.fill_(0.5), loss.backward()"
HELD.append(Habit(between, "loop", written_between, make=with_buffer(lambda m, h: h * (1 + m.c)), ways=BOTH))


# --- errors that code for torch catches ---------------------------------------------------------------------


def caught(what: str, kind: type[Exception], act: Callable[[Any], Any]) -> None:
    def do(model: Any) -> bool:
        try:
            act(model)
        except kind:
            return True
        return False

    HELD.append(Habit(f"except {kind.__name__}: {what}", "between", do, ways=BOTH))


def other(**entries: Tensor) -> dict[str, Tensor]:
    """A state that does not fit: half of each value, ``entries``, and no scale."""
    state = {name: (x * 0.5).to(x.dtype) for name, x in make().state_dict().items() if name != "scale"}
    return {**state, **entries}


caught("load_state_dict of missing and unexpected names; the others are loaded", RuntimeError, lambda m: (
    m.load_state_dict(other(more=torch.ones(2)))))  # fmt: skip
caught("load_state_dict of another shape; the others are loaded", RuntimeError, lambda m: (
    m.load_state_dict(other(mean=torch.ones(2)), strict=False)))  # fmt: skip
caught("load_state_dict of a list", TypeError, lambda m: m.load_state_dict([1]))
caught("model(x): an argument is missing", TypeError, lambda m: m(torch.ones(2, 4)))
caught("model(x, target, more=1)", TypeError, lambda m: m(torch.ones(2, 4), torch.ones(2, 4), more=1))
caught("model(rows of another size)", RuntimeError, lambda m: m(x=torch.ones(2, 5).double(), target=torch.ones(2, 4)))
caught("get_parameter of no parameter", AttributeError, lambda m: m.get_parameter("first.none"))
caught("get_submodule of no module", AttributeError, lambda m: m.get_submodule("none"))


# --- what time it is ----------------------------------------------------------------------------------------

clock, here = functools.partial(time.time), time.localtime
SAME = "which would be the same in every step"


def asks(what: str, body: Body, refused: str = "") -> None:
    HELD.append(Habit(f"the forward: {what}", "before", nothing, refused, make=functools.partial(made, body)))


def logs(m: Any, h: Tensor) -> Tensor:
    if time.time() - KEPT.get("logged", 0.0) > 10:
        KEPT["logged"] = 0.0
    return h * 2


asks("2 * h if datetime.now().hour == 3", lambda m, h: 2 * h if datetime.datetime.now().hour == 3 else h, SAME)
asks("2 * h if localtime().tm_min % 2", lambda m, h: 2 * h if here().tm_min % 2 else h, SAME)
asks("2 * h if date.today() > a date", lambda m, h: 2 * h if datetime.date.today() > datetime.date(2020, 1, 1) else h,
     SAME)  # fmt: skip
asks("h * partial(time.time)()", lambda m, h: h * (clock() % 1), SAME)
asks("h * operator.call(time.time)", lambda m, h: h * (operator.call(time.time) % 1), SAME)
asks("h * next(iter(time.time, None))", lambda m, h: h * (next(iter(time.time, None)) % 1), SAME)
asks("if time.time() - last > 10: a log", logs)
