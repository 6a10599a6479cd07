"""What steps of optimizers mean for a save: they write to parameters, and they use gradients.

A save on a thread has copied what a step writes to before that begins. One that comes between two backwards of an
accumulation keeps the gradients, with which no step has been made.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

_events = itertools.count(1)
_stepped = WeakIdKeyDictionary()  # optimizer -> when it has made its last step
_before: list[Callable[[], None]] = []


def now() -> int:
    """A number that is greater than all before."""
    return next(_events)


def note_step(optimizer: Optimizer) -> None:
    """It has made a step, or skipped one: the gradients have been used."""
    _stepped[optimizer] = now()


def is_pending(last_use: int, optimizer: Optimizer) -> bool:
    """Whether gradients of a model that was last used then are later than the last step of an optimizer."""
    return last_use > _stepped.get(optimizer, 0)


def before_writes(call: Callable[[], None]) -> None:
    """Call it before parameters or averages are written to, by a step of any optimizer for one."""
    _before.append(call)


def about_to_write() -> None:
    """Parameters or averages are written to now: what is being saved must have been copied."""
    for call in _before:
        call()


@functools.cache
def watch_steps() -> Any:
    """From now on steps of optimizers are noted."""
    return (
        register_optimizer_step_pre_hook(lambda *_: about_to_write()),
        register_optimizer_step_post_hook(lambda optimizer, *_: note_step(optimizer)),
    )
