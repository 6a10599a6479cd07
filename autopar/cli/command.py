"""A command of the command line, and where it prints. Files of commands load no torch: `run` loads what it needs."""

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
    """A name, a line of help, its arguments, and ``run``, which returns an exit code or raises ValueError for bad
    input. ``often``: the options that --help shows; --help-all shows all. Empty: --help shows all."""

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    often: Sequence[str] = ()


class Parser(argparse.ArgumentParser):
    """Reports errors in one line, with a suggestion for misspelled words."""

    often: Sequence[str] = ()  # of a command

    def show_first(self, often: Sequence[str]) -> None:
        """Show only these options in --help, and all in --help-all."""
        needed = [a for a in self._actions if a.required]
        words = " ".join(" ".join([*a.option_strings[:1], str(a.metavar or a.dest.upper())]) for a in needed)
        self.usage = f"%(prog)s {words} [options]" if words else "%(prog)s [options]"
        self.often = often
        if often:
            self.add_argument("--help-all", action=_HelpAll, help="show all options")

    def format_help(self) -> str:
        shown = {"--help", "--help-all", *self.often}
        rare = [a for a in self._actions if self.often and not shown & {*a.option_strings}]
        before = {a: a.help for a in self._actions}
        self.epilog = f"{len(rare)} more options, and details of these: {self.prog} --help-all" if rare else None
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
        """Exit with an error about unknown arguments."""
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
