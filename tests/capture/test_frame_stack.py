"""With room on Python's stack no loop maps memory in each turn, however deep it stands."""

from __future__ import annotations

import inspect
import resource
from collections.abc import Callable

import pytest

from autopar.capture.trace.frame_stack import with_large_stack

TURNS, DEPTHS = 200, range(20, 320)


def _leaf(a: int, b: int, c: int) -> int:
    return a + b + c


def _faults_at(depth: int) -> int:
    """Pages that a loop of calls so deep down has to be given."""
    if depth:
        return _faults_at(depth - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for i in range(TURNS):
        _leaf(i, i, i)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _worst() -> int:
    _faults_at(DEPTHS[-1])
    return max(map(_faults_at, DEPTHS))


def test_no_loop_maps_memory_in_each_turn() -> None:
    assert with_large_stack(_worst)() < TURNS // 2


def test_it_is_the_same_function() -> None:
    def some(a: int, *, b: int = 2) -> tuple[int, int]:
        """Two numbers."""
        return a, b

    same: Callable[..., tuple[int, int]] = with_large_stack(some)
    assert same(1) == (1, 2) and same(3, b=4) == (3, 4)
    assert same.__name__ == "some" and same.__doc__ == some.__doc__
    assert inspect.signature(same) == inspect.signature(some)


def test_errors_pass() -> None:
    def fails() -> None:
        raise ValueError("it is said")

    with pytest.raises(ValueError, match="it is said"):
        with_large_stack(fails)()
