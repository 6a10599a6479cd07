"""`autopar calibrate`: measure what this machine reaches of its peaks, or fit a stack to measured steps.

    autopar calibrate --ranks 4 --out machine.json                 on CPU ranks, all of them busy
    torchrun --nproc-per-node 8 -m autopar calibrate --out machine.json            on the ranks of a world
    autopar calibrate --layouts measured.jsonl --stack machine.json --cluster H100 --out fitted.json

The file is a stack, which `autopar plan --stack FILE` takes.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autopar.chips import DEFAULT
from autopar.cli.command import Command
from autopar.cli.shared_arguments import positive


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--layouts", metavar="FILE.jsonl", help="fit to measured layouts, one JSON object a line, instead of measuring")
    add("--stack", metavar="NAME", help="whose other values are taken: a name or a file (default: autopar-eager)")
    add("--cluster", metavar="H100:64x8", help=f"of the layouts (default: {DEFAULT})")
    add("--ranks", type=positive, metavar="N", help="CPU ranks that measure (default: those of torchrun, or 1)")
    add("--out", type=Path, metavar="FILE.json", help="write the stack into this file")
    add("--json", action="store_true", help="print the stack instead of sentences")


def _run(args: argparse.Namespace) -> int:
    from autopar.cost.efficiency import stack_text

    if args.layouts is not None and args.ranks is not None:
        raise ValueError("calibrate: --layouts measures nothing, found --ranks as well; leave one of them out")
    if args.layouts is None and args.cluster is not None:
        raise ValueError("calibrate: measures the machine it runs on, found --cluster; leave it out, or add --layouts")
    if args.out is not None and not args.out.absolute().parent.is_dir():
        raise ValueError(f"calibrate: needs a folder for {str(args.out)!r}, found none; make it first")
    stack, lines = _fitted(args) if args.layouts is not None else _measured(args)
    if int(os.environ.get("RANK", "0")):
        return 0
    if args.out is not None:
        args.out.write_text(stack_text(stack), encoding="utf-8")
    for line in [stack_text(stack)] if args.json else lines:
        print(line)
    return 0


def _fitted(args: argparse.Namespace) -> tuple[Any, Sequence[str]]:
    """(stack, sentences) of a file of measured layouts."""
    from autopar.auto.priced_layouts import LayoutPricer, lines_of
    from autopar.auto.stack_fit import fitted, measured_rows
    from autopar.cost.cluster import Cluster
    from autopar.cost.efficiency import DEFAULT_STACK, stack_named

    cluster, name = args.cluster or DEFAULT, args.stack or DEFAULT_STACK
    steps = measured_rows(lines_of(args.layouts), LayoutPricer(cluster, name))
    chips = sorted({step.cluster.chip_name for step in steps}) or [Cluster.parse(cluster).chip_name]
    if len(chips) > 1:
        raise ValueError(f"calibrate: a stack is fitted to steps of one chip, found {', '.join(chips)}; split the file")
    fit = fitted(stack_named(name, chips[0]), steps)
    return fit.stack, fit.lines()


def _measured(args: argparse.Namespace) -> tuple[Any, Sequence[str]]:
    """(stack, sentences) of this machine."""
    from autopar.cli.calibration_ranks import calibrated
    from autopar.cost.efficiency import DEFAULT_STACK, stack_from
    from autopar.runtime.training.launch import launch

    task = (args.stack or DEFAULT_STACK,)
    if args.ranks is None:
        text, lines = calibrated(*task)
    elif "RANK" in os.environ:
        raise ValueError(f"calibrate: the world has its ranks, found --ranks {args.ranks}; leave it out")
    else:
        text, lines = launch(calibrated, args.ranks, task, device="cpu")[0]
    ((chip, row),) = json.loads(text).items()
    return stack_from("measured", chip, row), lines


CALIBRATE = Command(
    "calibrate", "measure what a machine reaches of its peaks, or fit that to measured steps", _add_arguments, _run
)
