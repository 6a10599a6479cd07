"""What a command of the command line is, and where it prints. Its file loads no torch: `run` loads what it needs."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from rich.console import Console

from autopar.options import OTHER_WORDS
from autopar.spelling import did_you_mean

_CHOICE = re.compile(r"invalid choice: '(.*?)' \(choose from (.*)\)", re.DOTALL)


@dataclass(frozen=True)
class Command:
    """A name, a line for lists, its arguments, and what it does: an exit code, or ValueError for bad input. ``often``:
    the options that its help shows, --help-all the others, too; empty: all of them."""

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    often: Sequence[str] = ()


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and what was probably meant."""

    often: Sequence[str] = ()  # of a command

    def show_first(self, often: Sequence[str]) -> None:
        """Help is about these options; --help-all about all."""
        needed = [a for a in self._actions if a.required]
        words = " ".join(f"{a.option_strings[0]} {a.metavar or a.dest.upper()}" for a in needed)
        self.usage = f"%(prog)s {words} [options]" if words else "%(prog)s [options]"
        self.often = often
        if often:
            self.add_argument("--help-all", action=_HelpAll, help="show all options")

    def format_help(self) -> str:
        shown = {"--help", "--help-all", *self.often}
        rare = [a for a in self._actions if self.often and not shown & {*a.option_strings}]
        before = {a: a.help for a in self._actions}
        self.epilog = f"{len(rare)} more options, and more about these: {self.prog} --help-all" if rare else None
        for action in self._actions if self.often else ():
            action.help = argparse.SUPPRESS if action in rare else getattr(action, "short", action.help)
        try:
            return super().format_help()
        finally:
            for action, words in before.items():
                action.help = words

    def error(self, message: str) -> NoReturn:
        choice = _CHOICE.search(message)
        hint = did_you_mean(choice[1], re.findall(r"[^', ]+", choice[2])) if choice else ""
        print(f"{self.prog}: {' '.join(message.split())}{hint or self._see(message)}", file=sys.stderr)
        raise SystemExit(2)

    def _see(self, message: str) -> str:
        return "" if message.endswith("?") else f"; see {self.prog} --help"

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Of arguments that nobody takes."""
        flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
        typed = next((word.partition("=")[0] for word in unknown if word.startswith("-")), "")
        others = {f"__{word}": f"--{name.replace('_', '-')}" for word, name in OTHER_WORDS.items()}
        hint = did_you_mean(typed, flags, {word: flag for word, flag in others.items() if flag in flags})
        hint = hint if typed else ""
        message = f"unrecognized arguments: {' '.join(' '.join(unknown).split())}"
        print(f"{self.prog}: {message}{hint or self._see(message)}", file=sys.stderr)
        raise SystemExit(2)


class _HelpAll(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, **how: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, **how)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        assert isinstance(parser, Parser)
        parser.often = ()
        parser.print_help()
        parser.exit()


def console_of_results(width: int) -> Console:
    """Where tables of results go: as wide as the terminal, else ``width`` characters."""
    return Console(width=None if sys.stdout.isatty() else width, highlight=False)
