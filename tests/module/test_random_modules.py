"""Random modules have torch's effect in both ways to step, or are refused: see `tests.module_fuzz`."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

from tests.module_fuzz.check import CRASH, EQUAL, INVALID, REFUSED, WRONG, checked
from tests.module_fuzz.piece import Piece
from tests.module_fuzz.program import CALLS, PHASES, PIECES, WAYS, Block, Event, Placed, Program, programs
from tests.module_fuzz.script import script
from tests.module_fuzz.shrink import small
from tests.module_fuzz.side import Side, imported
from tests.module_fuzz.tally import Tally
from tests.support.compile_cache import compiled_by_each
from tests.support.ranks import run_ranks

SEED, PROGRAMS, PARTS = 0, 500, 4  # a program takes 0.2 s
SHRUNK = 3  # of those that fail: the others are reported as they are
PATIENCE = 60.0  # seconds after which none is made small any more


def numbered_programs(new: bool) -> list[tuple[int, Program]]:
    """Those in which there is a piece, a call or an event that no program before has; or the others."""
    found, seen = [], set[str]()
    for i, program in enumerate(programs(SEED, PROGRAMS)):
        shown = {*program.names(), *(re.sub(r"\d+", "N", event.text) for event in program.events)}
        if new != (shown <= seen):
            found.append((i, program))
        seen |= shown
    return found


def failures(new: bool, part: int) -> tuple[str, list[str]]:
    """(counts, what fails: the first as scripts)"""
    tally, found, start = Tally(), [], time.monotonic()
    with compiled_by_each():  # what is remembered for others would hide what is stale
        for i, program in numbered_programs(new)[part::PARTS]:
            result = checked(program, f"fuzz_{i}")
            tally.add(result)
            if result.failed and len(found) < SHRUNK and time.monotonic() < start + PATIENCE:
                program, result = small(program, result, f"fuzz_{i}")
                told = f"program {i} of seed {SEED}, {result.kind}: {result.text}\n{result.where}"
                found.append(script(program, told))
            elif result.failed:
                found.append(f"program {i} of seed {SEED}, {result.kind}: {program.names()}: {result.text[:150]}")
    return str(tally), found


@pytest.mark.parametrize("new", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize("part", [p if p % 2 == 0 else pytest.param(p, marks=pytest.mark.full) for p in range(PARTS)])
def test_random_modules_have_torchs_effect_or_are_refused(part: int, new: bool) -> None:
    [(counts, found)] = run_ranks(1, failures, new, part, timeout=280)
    assert not found, "\n\n".join([*found, counts])


# --- the fuzzer itself ----------------------------------------------------------------------------------------


def test_every_piece_runs_on_plain_torch(tmp_path: Path) -> None:
    for i, piece in enumerate(PIECES):
        program = Program((Placed(piece, i),), (Event("step(0)"),))
        path = tmp_path / f"piece_{i}.py"
        path.write_text(program.source())
        with imported(path, f"piece_{i}") as mod, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            side = Side(mod, PHASES, on_mesh=False)
            side.play(program.statements())
        assert all(torch.isfinite(x).all() for _, x in side.log if isinstance(x, torch.Tensor)), piece.name


GOOD = Piece("a scale", "P", "x = x * self.w_N", "", "self.w_N = nn.Parameter(torch.rand(3))")
WRONG_PIECE = Piece("a scale by the name of the file", "D", "x = x * (2 if 'mesh' in __name__ else 1)")
RAISES = Piece("an error", "D", "", init="if 'mesh' in __name__:\n    raise KeyError('planted')")
REFUSES = Piece("a value", "D", "if x.sum() > 1e9:\n    x = -x")
FAILS = Piece("an error of torch", "D", "x = x @ x")
STEPS = Event("step(0)"), Event("net.note = 1"), Event("step(1)")


def planted(piece: Piece) -> Program:
    return Program((Placed(GOOD, 0), Block(1, CALLS[1], (Placed(piece, 2), Placed(GOOD, 3)))), STEPS, WAYS[2])


def of_planted() -> list[tuple[str, list[str], int]]:
    found = []
    for i, piece in enumerate((GOOD, WRONG_PIECE, RAISES, REFUSES, FAILS)):
        program, result = planted(piece), checked(planted(piece), f"planted_{i}")
        if result.failed:
            program, result = small(program, result, f"planted_{i}")
        found.append((result.kind, program.names(), len(program.events)))
    return found


def test_what_is_wrong_is_found_and_made_small() -> None:
    [found] = run_ranks(1, of_planted)
    assert [kind for kind, *_ in found] == [EQUAL, WRONG, CRASH, REFUSED, INVALID]
    assert [names for kind, names, _ in found if kind in (WRONG, CRASH)] == [[WRONG_PIECE.name], [RAISES.name]]
    assert [events for kind, _, events in found if kind in (WRONG, CRASH)] == [1, 0], "a crash needs no step"


def test_a_program_as_a_script_runs_by_itself(tmp_path: Path) -> None:
    program = dataclasses.replace(planted(WRONG_PIECE), way=PHASES)
    file = tmp_path / "found.py"
    file.write_text(script(program, "wrong: loss"))
    ran = subprocess.run([sys.executable, file], capture_output=True, text=True, cwd=Path(__file__).parents[2],
                         env={**os.environ, "PYTHONPATH": "."})  # fmt: skip
    assert "on the mesh: loss: float64" in ran.stdout, ran.stdout + ran.stderr


def test_the_same_seed_is_the_same_programs() -> None:
    one, other = ([p.source() + str(p.statements()) for p in programs(3, 20)] for _ in range(2))
    assert one == other and len(set(one)) == 20
