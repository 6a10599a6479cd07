"""What a command of the command line is, and where it prints. Its file loads no torch: `run` loads what it needs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from rich.console import Console


@dataclass(frozen=True)
class Command:
    """A name, a line for lists, its arguments, and what it does: an exit code, or ValueError for bad input."""

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {' '.join(message.split())}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)


def console_of_results(width: int) -> Console:
    """Where tables of results go: as wide as the terminal, else ``width`` characters."""
    return Console(width=None if sys.stdout.isatty() else width, highlight=False)
