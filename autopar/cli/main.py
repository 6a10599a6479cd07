"""The command line: show a plan and its graphs, verify a model, run a demo. Any mesh, one process, no weights.

    autopar plan   --config CONFIG.json --mesh dp=8,tp=8 --seq 8192 --batch 8
    autopar plan   --config CONFIG.json --mesh pp=4,dp=2 --microbatches 8 --schedule 1f1b
    autopar plan   --config CONFIG.json --mesh tp=8 --serve --max-length 8192 --cache 40GB
    autopar show   --config CONFIG.json --mesh dp=2,tp=2 --level typed
    autopar show   --config CONFIG.json --mesh pp=2 --microbatches 4 --part 1 --level backward_input
    autopar verify --config CONFIG.json --mesh dp=2,tp=2 --zero 3
    autopar schedule --name zb_h1 --stages 8 --microbatches 24 --times F=18.5,B=18.1,W=9.3,comm=0.6
    autopar attention --ranks 8 --seq 131072 --heads 32 --kv-heads 8 --topology ring
    autopar experts --ranks 64 --per-node 8 --experts 256 --top-k 8 --hidden 7168 --tokens 4096
    autopar experts --apart --config CONFIG.json --target-hardware H20 --experts-on L40S --limit 150ms
    autopar serve FOLDER --mesh tp=2 --port 8000 --max-length 8192 --cache 20GB
    autopar calibrate --ranks 4 --out machine.json
    autopar cache --clear
    autopar flight ~/.cache/autopar/flight/JOB
    autopar replica-store --port 29600
    autopar env
    autopar demo

Results go to stdout, progress and errors to stderr. Exit code 0: success; 1: verify found a difference; 2: bad input;
130: interrupted; 141: the reader of stdout has gone.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from autopar.cli.attention_command import ATTENTION
from autopar.cli.cache_command import CACHE
from autopar.cli.calibrate_command import CALIBRATE
from autopar.cli.command import Command, Parser
from autopar.cli.experts_command import EXPERTS
from autopar.cli.flight_command import FLIGHT
from autopar.cli.plan_command import PLAN
from autopar.cli.replica_store_command import REPLICA_STORE
from autopar.cli.schedule_command import SCHEDULE
from autopar.cli.serve_command import SERVE
from autopar.cli.shared_arguments import OFTEN, add_model, add_option, mesh
from autopar.cli.show_command import SHOW
from autopar.options import DECLARED
from autopar.version import VERSION


def _env_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def _run_env(args: argparse.Namespace) -> int:
    from autopar.cli.environment import environment_lines  # loads torch

    for line in environment_lines():
        print(line)
    return 0


ENV = Command("env", "print versions, devices, backends, and supported features", _env_arguments, _run_env)


def _demo_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--steps", type=int, default=100, help="optimizer steps of each run (default %(default)s)")
    add("--mesh", type=mesh, default="dp=2,tp=2", help="axes and sizes (default %(default)s)")
    add_option(parser, DECLARED["zero"], default=3, help=f"{DECLARED['zero'].help} (default: %(default)s)")
    add("--out", type=Path, default=Path("demo_output"), help="folder of the results (default ./%(default)s)")


def _run_demo(args: argparse.Namespace) -> int:
    from autopar.cli.demo import run_demo

    return run_demo(args.steps, args.mesh, args.zero, args.out)


DEMO = Command("demo", "plan and train a small model on local processes", _demo_arguments, _run_demo)


def _verify_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, seq=16, batch=4, dtype="float64")


def _run_verify(args: argparse.Namespace) -> int:
    from autopar.cli.compiling import asked_mesh, asked_options, configs

    hf = configs()
    from autopar.cli.verify_run import verify_config  # needs transformers

    config, mesh, options = hf.load_config(args.config), asked_mesh(args.mesh), asked_options(args)
    return verify_config(config, mesh, options, seq=args.seq, batch=args.batch, dtype=hf.dtype_named(args.dtype))


VERIFY = Command(
    "verify",
    "run on local processes and compare with one process; exit 1 on mismatch",
    _verify_arguments,
    _run_verify,
    OFTEN,
)


INTERRUPTED, UNREAD = 130, 141  # exit codes, as of a program that SIGINT or SIGPIPE ends
COMMANDS = (PLAN, SHOW, VERIFY, SERVE, SCHEDULE, ATTENTION, EXPERTS, CALIBRATE, CACHE, FLIGHT, REPLICA_STORE, ENV, DEMO)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; see the module. Returns the exit code."""
    gc.set_threshold(50_000, 20, 100)  # torch's modules and graphs are many objects, and most of them stay
    atexit.register(gc.freeze)  # a last garbage collection would take a second
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
    """The reader of stdout (``| head -1``) has gone: discard the rest of the results without an error."""
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
