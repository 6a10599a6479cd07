"""`autopar bootstrap`: what the start of a world costs, whatever its size: store questions, bytes, groups, seconds.

autopar bootstrap --mesh pp=16,dp=16,cp=8,tp=8
"""

from __future__ import annotations

import argparse

from autopar.cli.command import Command
from autopar.cli.shared_arguments import mesh


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--mesh", required=True, type=mesh, metavar="dp=8,tp=8", help="axes and sizes: pp, dp_replicate, dp, cp, ep, tp"
    )
    add("--ranks", type=int, default=1, metavar="N", help="that really run; each takes as long (default: %(default)s)")


def _run(args: argparse.Namespace) -> int:
    from autopar.runtime.training.bootstrap_simulation import simulate_start  # loads torch

    print(simulate_start(args.mesh, args.ranks))
    return 0


BOOTSTRAP = Command(
    "bootstrap", "simulate how the ranks of a mesh meet at the start: store, bytes, groups", _add_arguments, _run
)
