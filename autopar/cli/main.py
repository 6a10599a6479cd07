"""The command line: look at a plan and its graphs, check a model, see a demo. Any mesh, one process, no weights.

    autopar plan   --config CONFIG.json --mesh dp=8,tp=8 --seq 8192 --batch 8
    autopar plan   --config CONFIG.json --mesh pp=4,dp=2 --microbatches 8 --schedule 1f1b
    autopar show   --config CONFIG.json --mesh dp=2,tp=2 --level typed
    autopar show   --config CONFIG.json --mesh pp=2 --microbatches 4 --part 1 --level backward_input
    autopar verify --config CONFIG.json --mesh dp=2,tp=2 --zero 3
    autopar schedule --name zb_h1 --stages 8 --microbatches 24 --times F=18.5,B=18.1,W=9.3,comm=0.6
    autopar attention --ranks 8 --seq 131072 --heads 32 --kv-heads 8 --topology ring
    autopar experts --ranks 64 --per-node 8 --experts 256 --top-k 8 --hidden 7168 --tokens 4096
    autopar bootstrap --mesh pp=16,dp=16,cp=8,tp=8
    autopar cache --clear
    autopar env
    autopar demo

Results go to stdout, progress and errors to stderr. Exit code 0: fine; 1: verify found a difference; 2: bad input; 130:
interrupted; 141: nobody reads the results.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
from collections.abc import Sequence

from autopar.cli.attention_command import ATTENTION
from autopar.cli.bootstrap_command import BOOTSTRAP
from autopar.cli.cache_command import CACHE
from autopar.cli.command import Parser
from autopar.cli.demo_command import DEMO
from autopar.cli.env_command import ENV
from autopar.cli.experts_command import EXPERTS
from autopar.cli.plan_command import PLAN
from autopar.cli.schedule_command import SCHEDULE
from autopar.cli.show_command import SHOW
from autopar.cli.verify_command import VERIFY
from autopar.version import VERSION

INTERRUPTED, UNREAD = 130, 141  # exit codes, as of a program that a signal ends
COMMANDS = (PLAN, SHOW, VERIFY, SCHEDULE, ATTENTION, EXPERTS, BOOTSTRAP, CACHE, ENV, DEMO)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; see the module. Returns the exit code."""
    gc.set_threshold(50_000, 20, 100)  # torch's modules and graphs are many objects, and most of them stay
    atexit.register(gc.freeze)  # a last look for garbage among them would take a second
    try:
        args, unknown = _parser().parse_known_args(arguments)
        if unknown:
            args.parser.refuse(unknown)
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        return _unread()
    except KeyboardInterrupt:
        print("autopar: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, OSError) as error:
        return _said(str(error))
    except RuntimeError as error:  # of `launch`, which this does not import
        if not getattr(error, "refusal", ""):
            raise
        return _said(error.refusal)  # type: ignore[attr-defined]


def _said(text: str) -> int:
    print(f"autopar: {' '.join(text.split())}", file=sys.stderr)
    return 2


def _unread() -> int:
    """Whoever read the results (``| head -1``) has gone: what is left of them goes nowhere, without a word."""
    with contextlib.suppress(OSError, ValueError):  # stdout may be no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return UNREAD


def _parser() -> Parser:
    parser = Parser(prog="autopar", description="A graph compiler for parallel training.")
    parser.add_argument("--version", action="version", version=f"autopar {VERSION}")
    commands = parser.add_subparsers(required=True, metavar="|".join(command.name for command in COMMANDS))
    for command in COMMANDS:
        own = commands.add_parser(command.name, help=command.help, description=command.help)
        command.add_arguments(own)
        own.show_first(command.often)
        own.set_defaults(run=command.run, parser=own)
    return parser
