"""`autopar demo`: a small model, from plan to training, on local processes."""

from __future__ import annotations

import argparse
from pathlib import Path

from autopar.cli.command import Command
from autopar.cli.shared_arguments import add_option, mesh
from autopar.options import DECLARED


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--steps", type=int, default=100, help="optimizer steps of each run (default %(default)s)")
    add("--mesh", type=mesh, default="dp=2,tp=2", help="axes and sizes (default %(default)s)")
    add_option(parser, DECLARED["zero"], default=3, help=f"{DECLARED['zero'].help} (default: %(default)s)")
    add("--out", type=Path, default=Path("demo_output"), help="results (default ./%(default)s)")


def _run(args: argparse.Namespace) -> int:
    from autopar.cli.demo import run_demo

    return run_demo(args.steps, args.mesh, args.zero, args.out)


DEMO = Command("demo", "a small model, from plan to training, on local processes", _add_arguments, _run)
