"""Habits of autograd functions whose `apply` is C's own, by whatever name a model keeps it.

From torch 2.14 on `clip = Clipped.apply` is such a one; what `super` gives is one with every torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from tests.compat.habit_interception import Clipped, made
from tests.compat.habits import PHASES, STEP, Habit

FUNCTIONS: list[Habit] = []

clip = super(Function, Clipped).apply
TABLE, PARTIAL = {"clip": clip}, functools.partial(clip)


def function(what: str, body: Callable[[Any, Tensor], Any], change: Callable[[Any], Any] | None = None) -> None:
    way = (STEP, PHASES)[len(FUNCTIONS) % 2]
    FUNCTIONS.append(Habit(what, "before", lambda m: None, make=functools.partial(made, body, change), ways=(way,)))


def with_default(m: Any, h: Tensor, f: Any = clip) -> Any:
    return f(h)


def closed_over(f: Any) -> Callable[[Any, Tensor], Any]:
    return lambda m, h: f(h)


class OfClass:
    function = Clipped


class OfWeight(nn.Module):
    def forward(self, w: Tensor) -> Any:
        return clip(w)


def asked_of_class(m: Any, h: Tensor) -> Any:
    """A Function is a class like others, by way of an object, too."""
    cls = OfClass().function
    assert cls is Clipped and isinstance(cls, type) and cls.__name__ == "Clipped"
    return cls.apply(h)  # type: ignore[no-untyped-call]


C = "clip = super(Function, Clipped).apply"
function(f"{C} of a file: clip(h)", lambda m, h: clip(h))
function(f"{C} in a dict", lambda m, h: TABLE["clip"](h))
function(f"{C} as a default", with_default)
function(f"{C} in a closure", closed_over(clip))
function("functools.partial of it", lambda m, h: PARTIAL(h))
function("self.clip = clip", lambda m, h: m.clip(h), change=lambda m: setattr(m, "clip", clip))
function("map(clip, [h]) of it", lambda m, h: next(map(clip, [h])))
function("functools.partial of it in a forward hook", lambda m, h: m.mid(h),
         change=lambda m: m.mid.register_forward_hook(lambda *given: PARTIAL(given[2])))  # fmt: skip
function("it in a parametrization", lambda m, h: m.mid(h),
         change=lambda m: nn.utils.parametrize.register_parametrization(m.mid, "weight", OfWeight()))  # fmt: skip
function("a Function as an attribute of a class", lambda m, h: OfClass.function.apply(h))  # type: ignore[no-untyped-call]
function("what a Function is, by way of an object", asked_of_class)
