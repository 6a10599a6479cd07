"""Twelve cases of the campaign; more by hand, see docs/reliability.md."""

from __future__ import annotations

import os
import time

import pytest

from tests.faults import rank
from tests.faults.campaign import TIMEOUT, run
from tests.faults.cases import ACTIONS, PHASES, SUBJECTS, Case, make_cases

SEED, COUNT = 1, 12


def test_cases_cover_what_can_happen() -> None:
    cases = make_cases(SEED, 2 * COUNT)
    assert cases == make_cases(SEED, 2 * COUNT) != make_cases(SEED + 1, 2 * COUNT)
    assert {c.subject for c in cases} == set(SUBJECTS) and {c.phase for c in cases} == set(PHASES)
    assert {c.action for c in cases} == set(ACTIONS) and {c.hosts for c in cases} == {True, False}


def test_no_fault_ends_in_a_hang_a_nameless_error_or_a_torn_checkpoint() -> None:
    busy = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))  # others at work: ranks come late to what they agree on
    results = run(make_cases(SEED, COUNT), at_once=6, slack=2.0, timeout=TIMEOUT * min(busy, 3.0))
    assert not [f"{r.case}: {r.problems}" for r in results if r.problems]


def test_an_error_that_is_handled_where_it_arises_ends_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a run must be that of one process; and an error that ends one of its ranks must end the others."""
    case = Case("dp2", 1, "raise", "step", 1, hosts=False)
    monkeypatch.setattr(rank.Fault, "_strike", lambda self: self._note.write_text(str(time.time())))
    (result,) = run([case], at_once=1, slack=4.0)
    assert result.problems == [] and result.errors == {}
