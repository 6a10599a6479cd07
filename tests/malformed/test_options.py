"""Options of the wrong type, range or name."""

from __future__ import annotations

import typing
from typing import Any

import autopar
from tests.malformed.judge import ANY, Case, failures

KINDS = typing.get_type_hints(autopar.Options)


def case(name: str, value: Any) -> Case:
    def right(options: autopar.Options) -> bool:
        found = getattr(options, name)
        given = tuple(value.items()) if isinstance(value, dict) else tuple(value) if isinstance(value, list) else value
        same = found == given
        return same and isinstance(found, bool) == (KINDS[name] is bool)

    return Case(f"{name}={value!r:.60}", lambda: autopar.Options(**{name: value}), right)


def test_options() -> None:
    cases = [case(name, value) for name in KINDS for value in ANY]
    assert len(cases) >= 400
    found = failures(cases)
    assert not found, "\n".join(found)
