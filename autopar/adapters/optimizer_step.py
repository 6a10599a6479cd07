"""The step of an optimizer between its hooks, which a function calls that torch wraps around the step of each class."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer


def own_step(optimizer: Optimizer) -> Callable[..., Any]:
    """The step of its class without hooks, which run once per step."""
    step: Callable[..., Any] = type(optimizer).step
    return getattr(step, "__wrapped__", step)


def run_step_by(optimizer: Optimizer, run: Callable[..., Any]) -> None:
    """From now on ``run(step, optimizer, *args, **kwargs)`` is called in place of ``step(optimizer, *args, **kwargs)``
    for optimizers of this class: after their pre-hooks, before their post-hooks, also by a call that is in a pre-hook
    now."""
    hooked: Any = type(optimizer).step
    if "func" not in hooked.__code__.co_freevars:
        return  # a class that calls the hooks by itself
    held = hooked.__closure__[hooked.__code__.co_freevars.index("func")]
    if held.cell_contents is hooked.__wrapped__:
        held.cell_contents = functools.partial(run, hooked.__wrapped__)


def copied(optimizer: Optimizer, groups: list[dict[str, Any]], exchanged: dict[int, Any]) -> Optimizer:
    """A copy with other groups, without states and hooks. ``exchanged``: id -> what stands in the copy in place of an
    object. What cannot be copied, and modules, are shared."""
    made: Optimizer = object.__new__(type(optimizer))
    state: Any = defaultdict(dict)
    memo = {**exchanged, id(optimizer): made, id(optimizer.state): state, id(optimizer.param_groups): groups}
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):
            vars(made)[name] = OrderedDict()
        elif isinstance(value, nn.Module):
            vars(made)[name] = value
        else:
            try:
                vars(made)[name] = copy.deepcopy(value, memo)
            except Exception:  # whatever their __deepcopy__ raises
                vars(made)[name] = value
    vars(made).update(param_groups=groups, state=state)
    return made
