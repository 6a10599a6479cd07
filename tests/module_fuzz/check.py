"""What becomes of a program: equal, refused, a crash, or wrong."""

from __future__ import annotations

import contextlib
import re
import signal
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import autopar
from tests.module_fuzz.program import Program
from tests.module_fuzz.side import compared

EQUAL, REFUSED, CRASH, WRONG, INVALID = "equal", "refused", "crash", "wrong", "invalid"  # invalid: torch fails, too
FAILURES = CRASH, WRONG
SECONDS = 60  # for a program; a longer one hangs
_ROOT = Path(autopar.__file__).resolve().parent.parent
_OURS = (_ROOT / "autopar",)


@dataclass(frozen=True)
class Result:
    kind: str
    text: str = ""
    where: str = ""  # of a crash: the stack

    @property
    def failed(self) -> bool:
        return self.kind in FAILURES

    @property
    def error(self) -> str:
        """The type of a crash."""
        return self.text.partition(":")[0] if self.kind == CRASH else ""


class Hung(Exception):
    """A program that takes too long."""


def checked(program: Program, name: str) -> Result:
    """``name``: of the module, that of no other."""
    with tempfile.TemporaryDirectory(prefix="module-fuzz-") as folder, warnings.catch_warnings(), _limited():
        warnings.simplefilter("ignore")
        path = Path(folder) / f"{name}.py"
        path.write_text(program.source(), encoding="utf-8")
        try:
            wrong, plain, mesh = compared(path, program.statements(), program.way)
        except Hung as error:
            return Result(CRASH, f"Hung: {error}")
    if plain is not None:
        return Result(INVALID, f"{type(plain).__name__}: {plain}")
    if wrong:
        return Result(WRONG, wrong)
    if mesh is None:
        return Result(EQUAL)
    text = f"{type(mesh).__name__}: {mesh}"
    if is_refusal(mesh):
        return Result(REFUSED, str(mesh))
    return Result(CRASH, text, "".join(traceback.format_exception(mesh)[-12:]))


def is_refusal(error: BaseException) -> bool:
    """A ValueError that autopar raises in a sentence."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    ours = any(Path(last.filename).resolve().is_relative_to(folder) for folder in _OURS)
    return isinstance(error, ValueError) and ours and "\n" not in str(error)


def summary(text: str) -> str:
    """A message without what is the program's own: for counting."""
    text = re.sub(r"\b(\w+?)_\d+(_mesh)?\b", r"\1_N", text)
    text = re.sub(r"/\S+/|0x[0-9a-f]+", "", text)
    return re.sub(r"\d+(\.\d+)?(e-?\d+)?", "#", text)[:160]


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def over(_signal: int, _frame: FrameType | None) -> None:
        raise Hung(f"still running after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
