"""`autopar env`: versions, devices, backends, and what of it is supported here, to paste into a bug report."""

from __future__ import annotations

import argparse

from autopar.cli.command import Command


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def _run(args: argparse.Namespace) -> int:
    from autopar.cli.environment import environment_lines  # loads torch

    for line in environment_lines():
        print(line)
    return 0


ENV = Command("env", "print versions, devices, backends, and what is supported here", _add_arguments, _run)
