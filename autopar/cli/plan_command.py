"""`autopar plan`: decide placements and pipeline stages; print them with memory and communication per rank."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from autopar.cli.command import Command
from autopar.cli.shared_arguments import add_model

_WIDTH = 160  # of tables when stdout is no terminal


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, seq=2048, batch=None, dtype="bfloat16")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--dump", type=Path, metavar="DIR", help="write every graph and a report into this folder")


def _run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from autopar.cli.compiling import compile_config, shown_progress
    from autopar.report.dump import Dumper
    from autopar.report.summary import show_summary, summarize

    dumper = Dumper(args.dump, title=f"autopar plan: {args.config}") if args.dump else None
    with shown_progress() as observer:
        model, compiled = compile_config(args, [observer, dumper] if dumper else [observer])
        summary = summarize(compiled, model)
        if dumper:
            dumper.add_compiled(compiled, summary=[("model", model)])
    if args.json:
        print(json.dumps(summary, indent=1))
    else:
        show_summary(summary, Console(width=None if sys.stdout.isatty() else _WIDTH))
    return 0


PLAN = Command(
    "plan",
    "decide placements and pipeline stages; print them with memory and communication per rank",
    _add_arguments,
    _run,
)
