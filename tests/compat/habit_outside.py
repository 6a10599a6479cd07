"""Habits with what lies outside of the model: clocks, entropy and files that a forward asks, objects that hold modules of
the model, and memory of its tensors that the user has besides. In both ways to step."""

from __future__ import annotations

import datetime
import functools
import os
import random
import sys
import time
import types
import uuid
from collections.abc import Callable
from random import random as draw
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.compat.habit_buffers import BOTH, Body, Left, made, nothing
from tests.compat.habits import Habit, Run, put

OUTSIDE: list[Habit] = []


def asks(what: str, answer: Callable[[Any], Any], refused: str = "") -> None:
    """A forward that computes with an answer."""
    make = functools.partial(made, lambda m, h: h * answer(m))
    OUTSIDE.append(Habit(f"the forward: h * {what}", "before", nothing, refused, make=make))


# --- clocks, entropy, files, processes ----------------------------------------------------------------------

GENERATOR, DRAWS = np.random.default_rng(0), random.Random(0)
SAME, CALLED = "would be the same in every step", "is captured, and the result would be the same"
clock = time.perf_counter


def exists(_: Any) -> float:
    return 2.0 if os.path.exists(__file__) else 1.0


def first_line(_: Any) -> float:
    with open(__file__) as file:
        return float(len(file.readline()))


asks("time.time()", lambda m: time.time() % 1, f"the result of time.time, which {SAME}")
asks("clock(), a name of time.perf_counter", lambda m: clock() % 1, f"the result of time.perf_counter, which {SAME}")
asks("datetime.now().microsecond", lambda m: datetime.datetime.now().microsecond, "the result of datetime.now")
asks("draw(), a name of random.random", lambda m: draw(), f"calls random.random while it {CALLED}")
asks("random.Random().random()", lambda m: random.Random().random(), "calls random.Random while it is captured")
asks("random.Random(7).random()", lambda m: random.Random(7).random())
asks("a global random.Random", lambda m: DRAWS.random(), "calls random.random while it is captured")
asks("a global numpy Generator", lambda m: GENERATOR.random(), "the forward draws from GENERATOR of habit_outside.py")
asks("os.urandom(1)[0]", lambda m: os.urandom(1)[0], f"calls os.urandom while it {CALLED}")
asks("uuid.uuid4().int % 7", lambda m: uuid.uuid4().int % 7, f"calls uuid.uuid4 while it {CALLED}")
asks("open(path).readline()", first_line, f"calls open while it {CALLED}")
asks("2.0 if os.path.exists(path)", exists, "calls os.path.exists while it is captured")


def with_setting() -> Left:
    sys.setswitchinterval(0.005)
    return made(lambda m, h: h * sys.getswitchinterval() * 200)


OUTSIDE.append(Habit("sys.setswitchinterval(0.01), which the forward asks for", "between", lambda m: (
    sys.setswitchinterval(0.01)), make=with_setting, ways=BOTH))  # fmt: skip


def timed(m: Any, h: Tensor) -> Tensor:
    start = time.time()
    out = h * 2
    m.kept_time = time.time() - start
    return out


OUTSIDE.append(Habit("the forward times itself", "before", nothing, make=functools.partial(made, timed), ways=BOTH))


# --- objects that hold modules of the model -----------------------------------------------------------------


class Controller:
    """Knows the model that it controls."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.gain = model, 1.0

    def scaled(self, h: Tensor) -> Tensor:
        return h * self.gain


HELD: dict[str, Any] = {}


def with_handle(give: Callable[[Any], Any], body: Body) -> Left:
    """The user keeps what the model has been given."""
    m = made(body)
    HELD["it"] = m.given = give(m)  # type: ignore[assignment]
    return m


def handle(what: str, give: Callable[[Any], Any], body: Body, change: Callable[[Any], Any], refused: str = "") -> None:
    def do(run: Run) -> None:
        change(HELD["it"])
        run.train_step(1)

    make = functools.partial(with_handle, give, body)
    OUTSIDE.append(Habit(what, "loop", do, refused, make=make, ways=BOTH))


def appended(callbacks: list[Any]) -> None:
    callbacks.append(Controller(callbacks[0].model))


handle("controller.gain = 2 of an object that holds the model", Controller, lambda m, h: m.given.scaled(h),
       lambda x: put(x, gain=2.0))  # fmt: skip
handle("registry['gain'] = 2 of a dict that holds a module", lambda m: {"layer": m.first, "gain": 1.0},
       lambda m, h: h * m.given["gain"], lambda x: x.update(gain=2.0))  # fmt: skip
handle("callbacks[0].gain = 2 in a list", lambda m: [Controller(m)], lambda m, h: m.given[0].scaled(h),
       lambda x: put(x[0], gain=2.0))  # fmt: skip
handle("callbacks.clear()", lambda m: [m.first], lambda m, h: h * (1.0 + len(m.given)), lambda x: x.clear())
handle("config.scaled, a bound method: its object's gain = 2", lambda m: types.SimpleNamespace(
    scaled=Controller(m).scaled), lambda m, h: m.given.scaled(h), lambda x: put(x.scaled.__self__, gain=2.0))  # fmt: skip
handle("callbacks.append(Controller(model)) of the old model", lambda m: [Controller(m)], lambda m, h: h * len(m.given),
       appended, "was set after parallelize to an object that refers to modules of the original model")  # fmt: skip


# --- memory that the user has -------------------------------------------------------------------------------


def counts(m: Any, h: Tensor) -> Tensor:
    out = h * m.c.clone()
    m.c.mul_(0.5)
    return out


def of_tensor(view: bool) -> Left:
    m = made(counts)
    HELD["it"] = torch.ones(12 if view else 6, dtype=torch.float64)
    m.register_buffer("c", HELD["it"][6:] if view else HELD["it"])
    return m


def of_array() -> Left:
    m = made(counts)
    HELD["it"] = np.ones(6)
    m.register_buffer("c", torch.from_numpy(HELD["it"]))
    return m


def of_weight() -> Left:
    m = made(lambda m, h: h * m.weight)
    HELD["it"] = torch.ones(6, dtype=torch.float64)
    m.weight = nn.Parameter(HELD["it"])
    return m


def seen(run: Run) -> float:
    """What the user's own handle shows after two steps."""
    run.train_step(1)
    return round(float(HELD["it"].sum()), 8)


def written(run: Run) -> None:
    HELD["it"][:] = 3.0
    run.train_step(1)


for what, make in (
    ("a buffer made of t: t after steps", functools.partial(of_tensor, False)),
    ("a buffer that is a view of t: t after steps", functools.partial(of_tensor, True)),
    ("a buffer made of a numpy array: the array after steps", of_array),
    ("nn.Parameter(t): t after steps", of_weight),
):
    OUTSIDE.append(Habit(what, "loop", seen, make=make, ways=BOTH))
OUTSIDE.append(Habit("a buffer made of a numpy array: array[:] = 3", "loop", written, make=of_array, ways=BOTH))
