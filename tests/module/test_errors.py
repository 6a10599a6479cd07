"""Refusals that are also errors of another class."""

from __future__ import annotations

import pickle
import subprocess

import pytest

from autopar.errors import refusal_like


class Coded(Exception):
    """One that a model raises, with a code."""

    def __init__(self, code: int, _: str) -> None:
        super().__init__("in its own words")
        self.code = code


ERRORS = [KeyError("a"), TypeError("b"), RuntimeError("c"), IndexError("d"), AssertionError("e"), Coded(3, "f")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_both_classes_catch_it(error: Exception) -> None:
    found = refusal_like(error, "it's refused")
    assert isinstance(found, type(error)) and isinstance(found, ValueError) and str(found) == "it's refused"
    assert type(found).__name__ == "ValueError" and found.__dict__ == error.__dict__
    again = refusal_like(found, "in other words")
    assert isinstance(again, type(error)) and str(again) == "in other words"
    assert str(pickle.loads(pickle.dumps(again))) == "in other words"


@pytest.mark.parametrize("error", [OSError(2, "a"), ValueError("b"), StopIteration(1),
                                   subprocess.CalledProcessError(1, "c")], ids=lambda e: type(e).__name__)  # fmt: skip
def test_of_any_error_there_is_a_refusal(error: Exception) -> None:
    assert isinstance(refusal_like(error, "refused"), ValueError)
