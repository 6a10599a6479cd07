"""A program that fails, made small: pieces, events, blocks are left out as long as it fails in the same way."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

from tests.module_fuzz.check import Hung, Result, checked
from tests.module_fuzz.program import PHASES, PLAIN, TRAIN_STEP, Block, Program

MOST = 60  # programs that are tried


def small(program: Program, result: Result, name: str) -> tuple[Program, Result]:
    """The program made small, and what is wrong with it. One that hangs stays as it is: each try would hang, too."""
    if result.error == Hung.__name__:
        return program, result
    numbers = itertools.count()

    def fails(smaller: Program) -> bool:
        nonlocal result
        found = checked(smaller, f"{name}_{next(numbers)}")
        if (found.kind, found.error) != (result.kind, result.error):
            return False
        result = found
        return True

    return shrunk(program, fails), result


def shrunk(program: Program, fails: Callable[[Program], bool]) -> Program:
    """The smallest that is found in `MOST` tries."""
    tries = 0
    while True:
        for smaller in smaller_ones(program):
            if tries == MOST:
                return program
            tries += 1
            if fails(smaller):
                program = smaller
                break
        else:
            return program


def smaller_ones(program: Program) -> Iterator[Program]:
    """With one thing less, what takes most away first."""
    items, events = program.items, program.events
    for i, item in enumerate(items):
        before, after = items[:i], items[i + 1 :]
        yield dataclasses.replace(program, items=(*before, *after))
        if isinstance(item, Block):
            yield dataclasses.replace(program, items=(*before, *item.items, *after))
            if item.call != PLAIN:
                yield dataclasses.replace(program, items=(*before, dataclasses.replace(item, call=PLAIN), *after))
            for k in range(len(item.items)):
                fewer = dataclasses.replace(item, items=item.items[:k] + item.items[k + 1 :])
                yield dataclasses.replace(program, items=(*before, fewer, *after))
    for i, event in enumerate(events):
        yield dataclasses.replace(program, events=events[:i] + events[i + 1 :])
        for text in _simpler(event.text):
            yield dataclasses.replace(
                program, events=(*events[:i], dataclasses.replace(event, text=text), *events[i + 1 :])
            )
    if program.way not in (TRAIN_STEP, PHASES):
        yield from (dataclasses.replace(program, way=way) for way in (TRAIN_STEP, PHASES))


def _simpler(text: str) -> Iterator[str]:
    if text.startswith("begin(5)\n"):
        yield text.removeprefix("begin(5)\n").removesuffix("\nend()")
    elif text.startswith(("accumulate(", "two(", "retained(", "own_loss(", "keep(", "begin(")) or "rows=" in text:
        yield "step(1)"
