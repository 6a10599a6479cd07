"""Every habit on plain torch and on a mesh, of one process or of two ranks: torch's effect, or the quoted refusal."""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from autopar.runtime.guards.step_cache import STATES
from tests.compat.habit_models import batch, make
from tests.compat.habit_page import PAGE, SECTIONS, page
from tests.compat.habits import PHASES, Habit, Run
from tests.support.cases import bound_once
from tests.support.compile_cache import compiled_once
from tests.support.ranks import run_ranks

ALL = [h for habits in SECTIONS.values() for h in habits]


@dataclass(frozen=True)
class Place:
    """Where habits are tried: a mesh, of one axis, and how parameters lie on it."""

    axis: str
    ranks: int
    zero: int = 0

    @functools.cached_property
    def mesh(self) -> Any:
        """One for all habits, which share what is bound to it."""
        return autopar.init_mesh("cpu", 30.0, **{self.axis: self.ranks})


ALONE, DATA, TENSOR, ZERO = Place("dp", 1), Place("dp", 2), Place("tp", 2), Place("dp", 2, zero=3)


def outcome(habit: Habit, place: Place | None, way: str) -> tuple[list[float], Any, dict[str, Tensor], list[Any]]:
    """(losses, what the habit gave back, state after two steps, state of the optimizer); on no mesh: of plain torch"""
    torch.manual_seed(0)
    model: Any = habit.make()
    returned = habit.do(model) if habit.when == "before" else None
    number, parts = autopar.dp_rank_and_size(place.mesh) if place else (0, 1)

    def part(whole: dict[str, Tensor]) -> dict[str, Tensor]:
        return {k: v.to(next(model.parameters()).dtype).chunk(parts)[number] for k, v in whole.items()}

    if place:
        model = autopar.parallelize(model, place.mesh, example_batch=part(batch()), zero=place.zero)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = Run(model, optimizer, part, on_mesh=bool(place), phases=way == PHASES)
    run.train_step(0)
    if habit.when == "between":
        returned = habit.do(model)
    if habit.when == "loop":
        returned = habit.do(run)
    else:
        run.train_step(1)
    state = model.full_state_dict() if place else {k: detached(v) for k, v in model.state_dict().items()}
    moments = [run.whole(v) for s in run.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    return run.losses, returned, state, moments


def differences(habit: Habit, place: Place, way: str) -> str:
    """What is not as the habit says in one way to step; "" if all is."""
    try:
        expected = outcome(habit, None, way)
    except (RuntimeError, AttributeError, TypeError) as error:
        if habit.refused and not isinstance(error, RuntimeError):
            error = AttributeError(habit.refused)  # torch's own way to fail
        if not re.search(habit.refused or "^$", str(error)):
            return f"torch: {error}"
        expected = None
    try:
        found = outcome(habit, place, way)
    except (ValueError, RuntimeError, AttributeError) as error:
        return "" if habit.refused and re.search(habit.refused, str(error)) else f"{type(error).__name__}: {error}"
    if habit.refused:
        return "was not refused"
    assert expected is not None
    tolerance = habit.tolerance
    if len(found[0]) != len(expected[0]) or max(abs(a - b) for a, b in zip(found[0], expected[0])) > tolerance:
        return f"losses {found[0]}, not {expected[0]}"
    if comparable(found[1]) != comparable(expected[1]):
        return f"gave back {comparable(found[1])}, not {comparable(expected[1])}"
    if found[2].keys() != expected[2].keys():
        return f"state {sorted(found[2].keys() ^ expected[2].keys())} on one side only"
    wrong = [n for n, x in expected[2].items() if not close(found[2][n], x, tolerance)]
    if wrong:
        return f"after two steps {wrong} differ"
    if len(found[3]) != len(expected[3]) or not all(close(a, b, tolerance) for a, b in zip(found[3], expected[3])):
        return "the optimizer's state differs"
    return ""


def comparable(x: Any) -> Any:
    """What can be compared of what a habit gave back: no modules, no tensors."""
    if isinstance(x, (list, tuple)):
        return [comparable(y) for y in x]
    return x if isinstance(x, (int, float, str)) else None


def detached(x: Any) -> Any:
    """A tensor of its own; what else a state has is itself."""
    return x.detach().clone() if isinstance(x, Tensor) else x


def close(a: Any, b: Any, tolerance: float) -> bool:
    if not isinstance(b, Tensor):
        return bool(a == b)
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a.double(), b.double(), atol=tolerance, rtol=0)


MODEL, LOOP = ("before", "between"), ("loop",)  # what is done to the model comes to the same graphs at both times
WHOLE = {time: [h for h in ALL if h.when in time] for time in (MODEL, LOOP)}


def in_turns() -> dict[int, list[Habit]]:
    """By numbers of ranks: every third of what is done to the model, on one; of loops, every fourth on one and every
    fourth on two. Each in one of its ways to step, in turn. All of them run with ``-m full``."""
    turns = {1: WHOLE[MODEL][::3] + WHOLE[LOOP][::4], 2: WHOLE[LOOP][2::4]}
    return {ranks: [in_one_way(h, turn) for turn, h in enumerate(habits)] for ranks, habits in turns.items()}


def in_one_way(habit: Habit, turn: int) -> Habit:
    return dataclasses.replace(habit, ways=(habit.ways[turn % len(habit.ways)],))


def wrong_habits(place: Place, which: tuple[str, ...] | str = "") -> list[str]:
    """Those of some times, of a section, or in turn on as many ranks, that are not as their line says."""
    habits = WHOLE[which] if isinstance(which, tuple) else SECTIONS[which] if which else in_turns()[place.ranks]
    with compiled_once(), bound_once(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [(h, way, differences(h, place, way)) for h in habits for way in h.ways]
    return [f"{h.when}, {h.what}, {way}: {wrong}" for h, way, wrong in found if wrong]


@pytest.mark.timeout(1200)  # hundreds of captures on one rank, beside other tests
@pytest.mark.parametrize("place", [ALONE, DATA], ids=str)
def test_habits(place: Place) -> None:
    for found in run_ranks(place.ranks, wrong_habits, place, timeout=500):
        assert not found, "\n".join(found)


@pytest.mark.parametrize("place", [TENSOR, pytest.param(ZERO, marks=pytest.mark.full)], ids=str)
def test_states_where_parameters_are_cut(place: Place) -> None:
    for found in run_ranks(place.ranks, wrong_habits, place, "States, in files and in plain models", timeout=500):
        assert not found, "\n".join(found)


def test_in_turns_there_is_every_section_time_and_way() -> None:
    found = [h for habits in in_turns().values() for h in habits]
    assert {h.when for h in found} == {*MODEL, *LOOP}
    for section, habits in SECTIONS.items():
        named = {h.what for h in habits}
        ways = {way for h in habits for way in h.ways}
        assert {way for h in found if h.what in named for way in h.ways} >= ways, section


@pytest.mark.full
@pytest.mark.parametrize("place", [ALONE, DATA, TENSOR, ZERO], ids=str)
@pytest.mark.parametrize("times", [MODEL, LOOP])
def test_all_habits(times: tuple[str, ...], place: Place) -> None:
    for found in run_ranks(place.ranks, wrong_habits, place, times, timeout=500):
        assert not found, "\n".join(found)


def test_the_page_is_of_this_table() -> None:
    assert len(ALL) >= 150
    assert PAGE.read_text(encoding="utf-8") == page(), "docs/habits.md is out of date; run make docs"


def old_optimizer() -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallel = autopar.parallelize(model, autopar.init_mesh(dp=1), example_batch=batch())
    parallel.train_step(**batch())
    with pytest.raises(
        ValueError, match="optimizer: this SGD was created from the model's parameters before parallelize"
    ):
        optimizer.step()
    model(**batch())["loss"].backward()
    optimizer.step()  # trains the plain model


def test_an_optimizer_of_the_parameters_before_is_refused() -> None:
    run_ranks(1, old_optimizer)


def many_states() -> None:
    model = make()
    parallel = autopar.parallelize(model, autopar.init_mesh(dp=1), example_batch=batch())
    found = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(STATES + 2):
            parallel.note = step
            found.append(float(parallel.train_step(**batch())))
    words = [str(w.message) for w in told if "compiled for the" in str(w.message)]
    assert len(words) == 1 and "attribute note of Model; move what changes at every step into a buffer" in words[0]
    assert len(parallel.compiled()) == STATES and len(parallel.full_gradients()) == 8
    parallel.note = STATES  # one that is kept
    parallel.train_step(**batch())
    assert len(parallel.compiled()) == STATES


def test_a_state_that_changes_at_every_step_is_told() -> None:
    with compiled_once():  # before the ranks are forked
        run_ranks(1, many_states)
