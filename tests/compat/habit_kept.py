"""Habits with what a forward leaves in Python objects: tensors that it keeps, attributes that it sets. In both ways to
step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.compat.habit_buffers import BOTH, Body, made, nothing
from tests.compat.habits import PHASES, Habit, Run

KEPT: list[Habit] = []


def kept(when: str, what: str, body: Body, do: Callable[[Any], Any], refused: str = "") -> None:
    KEPT.append(Habit(what, when, do, refused, make=functools.partial(made, body), ways=BOTH))


# --- what a forward keeps in Python objects -------------------------------------------------------------------

CACHE: dict[Any, Any] = {}
ENTRIES: list[Tensor] = []
ONE: Any = None


class Held:
    """An object that is no module."""

    mask: Any = None


HELD = Held()


def triangle() -> Tensor:
    return torch.tril(torch.ones(6, 6, dtype=torch.float64))


@functools.lru_cache(4)
def cached(size: int) -> Tensor:
    return torch.tril(torch.ones(size, size, dtype=torch.float64))


def in_a_dict(m: Any, h: Tensor) -> Tensor:
    if h.shape[1] not in CACHE:
        CACHE[h.shape[1]] = triangle()
    return h @ CACHE[h.shape[1]]


def in_a_list(m: Any, h: Tensor) -> Tensor:
    if not ENTRIES:
        ENTRIES.append(triangle())
    return h @ ENTRIES[0]


def in_a_global(m: Any, h: Tensor) -> Tensor:
    global ONE
    if ONE is None:
        ONE = triangle()
    return h @ ONE


def in_a_class(m: Any, h: Tensor) -> Tensor:
    if Held.mask is None:
        Held.mask = triangle()
    return h @ Held.mask


def in_an_object(m: Any, h: Tensor) -> Tensor:
    if "mask" not in vars(HELD):
        HELD.mask = triangle()
    return h @ HELD.mask


def in_a_default(m: Any, h: Tensor, known: dict[int, Tensor] = {}) -> Tensor:  # noqa: B006 - a habit
    if 6 not in known:
        known[6] = triangle()
    return h @ known[6]


def in_an_attribute(m: Any, h: Tensor) -> Tensor:
    if m.last_hidden is None:
        m.last_hidden = triangle()
    return h @ m.last_hidden


def in_a_new_attribute(m: Any, h: Tensor) -> Tensor:
    if not hasattr(m, "mask"):
        m.mask = triangle()
    return h @ m.mask


def of_the_last_forward(m: Any, h: Tensor) -> Tensor:
    out = h if m.last_hidden is None else h + m.last_hidden
    m.last_hidden = h.detach().mean(0)
    return out


def of_the_last_forward_in_a_dict(m: Any, h: Tensor) -> Tensor:
    out = h + m.kept.get("last", 0.0)
    m.kept["last"] = h.detach().mean(0)
    return out


def of_the_last_forward_in_a_global(m: Any, h: Tensor) -> Tensor:
    CACHE["last"] = h.detach().mean(0)
    return h


def counted(m: Any, h: Tensor) -> Tensor:
    m.calls += 1
    return h * m.calls


def plain_still_runs(run: Run) -> None:
    """What was kept is no fake: the plain model computes with it."""
    run.train_step(1)
    made(run.model.body)(**run.batch(2))["loss"].backward()


MASKS: list[tuple[str, Body]] = [
    ("in a global dict", in_a_dict),
    ("in a global list", in_a_list),
    ("in a global variable", in_a_global),
    ("in an attribute of a class", in_a_class),
    ("in an attribute of an object", in_an_object),
    ("in a default of a function", in_a_default),
    ("by functools.lru_cache", lambda m, h: h @ cached(h.shape[1])),
    ("in self.mask, None at first", in_an_attribute),
    ("in self.mask, unless hasattr(self, 'mask')", in_a_new_attribute),
]
for what, body in MASKS:
    kept("loop", f"a mask kept {what}; then the plain model", body, plain_still_runs)
kept("before", "the forward adds self.last of the forward before", of_the_last_forward, nothing,
      "a tensor that an earlier forward kept in last_hidden")  # fmt: skip
kept("before", 'the forward adds self.kept["last"] of the forward before', of_the_last_forward_in_a_dict, nothing,
      "a tensor that an earlier forward kept in kept")  # fmt: skip
kept("before", "the forward keeps hidden values in a global dict", of_the_last_forward_in_a_global, nothing,
      r"keeps a tensor that depends on its inputs or weights in .*CACHE\['last'\]")  # fmt: skip
kept("before", "the forward: self.calls += 1; h * self.calls", counted, nothing,
      "computes with calls, which it changes")  # fmt: skip


# --- numbers that a forward keeps -----------------------------------------------------------------------------

VALUE = [0.5]
NUMBERS: dict[str, float] = {}


@functools.lru_cache
def cached_number(times: int) -> float:
    return VALUE[0] * times


class Config:
    @functools.cached_property
    def number(self) -> float:
        return VALUE[0]


CONFIG = [Config()]


def number_in_a_dict(m: Any, h: Tensor) -> Tensor:
    if "a" not in NUMBERS:
        NUMBERS["a"] = VALUE[0]
    return h * NUMBERS["a"]


def number_in_an_attribute(m: Any, h: Tensor) -> Tensor:
    if m.last_hidden is None:
        m.last_hidden = VALUE[0]
    return h * m.last_hidden


def table_in_an_attribute(m: Any, h: Tensor) -> Tensor:
    if m.last_hidden is None:
        m.last_hidden = torch.full((6,), VALUE[0], dtype=torch.float64)
    return h * m.last_hidden


def with_nothing_kept(body: Body) -> Any:
    VALUE[0], CONFIG[0] = 0.5, Config()
    NUMBERS.clear(), cached_number.cache_clear()
    return made(body)


def another_value(_: Any) -> None:
    VALUE[0] = 1.5


ANEW = "torch would go on with the value of an earlier forward"
for what, number, said in (
    ("by functools.lru_cache", lambda m, h: h * cached_number(2), ""),
    ("by functools.cached_property of an object", lambda m, h: h * CONFIG[0].number, ""),
    ("in a global dict", number_in_a_dict, ""),
    ("in self.scale, None at first", number_in_an_attribute, ANEW),
    ("in self.table, None at first: torch.full((n,), VALUE)", table_in_an_attribute, ANEW),
):
    anew: Any = functools.partial(with_nothing_kept, number)
    KEPT.append(Habit(f"VALUE = 1.5, kept {what}", "between", another_value, said, make=anew, ways=BOTH))


# --- what a checkpoint reads again ----------------------------------------------------------------------------


def checkpointed(m: Any, h: Tensor) -> Tensor:
    return checkpoint(lambda x: torch.sin(x * VALUE[0]) * m.c, h, use_reentrant=False)


def between_forward_and_backward(change: Callable[[Run], Any]) -> Callable[[Run], None]:
    def step(run: Run) -> None:
        loss = run.forward(1)["loss"]
        change(run)
        loss.backward()
        run.optimizer.step()

    return step


AGAIN = "torch.utils.checkpoint would recompute the forward"
for what, change, said in (
    ("nothing", nothing, ""),
    ("VALUE = 1.5", another_value, f"{AGAIN}.*VALUE"),
    ("model.c.fill_(2)", lambda run: run.model.c.fill_(2), "c is at version"),
    ("model.c = torch.ones(6)", lambda run: setattr(run.model, "c", torch.full((6,), 2.0).double()), AGAIN),
):
    anew = functools.partial(with_nothing_kept, checkpointed)
    KEPT.append(
        Habit(
            f"{what} between forward and backward of a checkpoint",
            "loop",
            between_forward_and_backward(change),
            said,
            make=anew,
            ways=(PHASES,),
        )
    )


# --- attributes that a forward sets ---------------------------------------------------------------------------


def sets_attributes(m: Any, h: Tensor) -> Tensor:
    m.last_hidden, m.block.attention = h * 2, torch.softmax(h, -1)
    m.kept["h"] = h
    return m.last_hidden * m.block.attention + m.kept["h"]


NOT_KEPT = "which compiled steps do not do, since they only return outputs and write buffers"
kept("before", "the forward sets attributes and reads them", sets_attributes, nothing)
kept("between", "model.last_hidden, set by the forward, is read", sets_attributes,
      lambda m: m.last_hidden is not None, f"last_hidden, {NOT_KEPT}")  # fmt: skip
kept("between", "model.block.attention, set by the forward, is read", sets_attributes,
      lambda m: m.block.attention is not None, f"block.attention, {NOT_KEPT}")  # fmt: skip
kept("between", 'model.kept["h"], set by the forward, is read', sets_attributes,
      lambda m: m.kept["h"] is not None, f"kept, {NOT_KEPT}")  # fmt: skip
kept("between", "model.calls = 5, which the forward does not set, is read", sets_attributes,
      lambda m: (setattr(m, "calls", 5), m.calls)[1])  # fmt: skip
