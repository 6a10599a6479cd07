"""The command line: look at a plan and its graphs, check a model, see a demo. Any mesh, one process, no weights.

    autopar plan   --config CONFIG.json --mesh dp=8,tp=8 --seq 8192 --batch 8
    autopar show   --config CONFIG.json --mesh dp=2,tp=2 --level typed
    autopar verify --config CONFIG.json --mesh dp=2,tp=2 --zero 3
    autopar schedule --name zb_h1 --stages 8 --micro-batches 24 --times F=18.5,B=18.1,W=9.3,comm=0.6
    autopar demo

Results go to stdout, progress and errors to stderr. Exit code 0: fine; 1: verify found a difference; 2: bad input.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from torch.fx import GraphModule

import autopar.runtime.schedules  # noqa: F401  (fills the table of schedules)
from autopar import schedule_command
from autopar.compile import compile_model
from autopar.dump import Dumper
from autopar.mesh import Mesh
from autopar.pass_manager import Context, Observer
from autopar.passes import GLOBAL_PASSES
from autopar.plan import Options
from autopar.printing import format_graph
from autopar.steps import Compiled
from autopar.summary import show, summarize

# The axes that plans know.
AXES = ("dp", "tp")
# --level -> the name under which the compiler shows the graph to its observers.
LEVELS = {
    "global": GLOBAL_PASSES[-1].name,
    "typed": "propagate_placements",
    "local": "localize_shapes",
    "forward": "forward",
    "backward": "backward",
}
_WIDTH = 160  # of tables when stdout is no terminal


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; see the module. Returns the exit code."""
    try:
        parser = _parser()
        args, args_of_demo = parser.parse_known_args(arguments)
        if args_of_demo and args.run is not _demo:
            parser.error(f"unrecognized arguments: {' '.join(args_of_demo)}")
        args.rest = args_of_demo
        code: int = args.run(args)
        return code
    except (ValueError, BrokenPipeError) as error:
        print(f"autopar: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="autopar", description="A graph compiler for parallel training.")
    commands = parser.add_subparsers(required=True, metavar="plan|show|verify|schedule|demo")
    plan = _command(commands, "plan", _plan, "decide placements; print them with memory and communication per rank")
    _model(plan, seq=2048, batch=None, dtype="bfloat16")
    plan.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    plan.add_argument("--dump", type=Path, metavar="DIR", help="write every graph and a report into this folder")
    graph = _command(commands, "show", _show, "print a graph")
    _model(graph, seq=2048, batch=None, dtype="bfloat16")
    graph.add_argument("--level", choices=LEVELS, default="local", help="which graph (default: %(default)s)")
    check = _command(
        commands, "verify", _verify, "run on local processes and compare with one process; exits 1 on mismatch"
    )
    _model(check, seq=16, batch=4, dtype="float64")
    pipeline = _command(commands, "schedule", schedule_command.command, "simulate and draw a pipeline schedule")
    schedule_command.add_arguments(pipeline)
    _command(commands, "demo", _demo, "a small model, from plan to training, on local processes", add_help=False)
    return parser


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str, **more: Any) -> _Parser:
    parser: _Parser = commands.add_parser(name, help=text, description=text, **more)
    parser.set_defaults(run=run)
    return parser


def _model(parser: argparse.ArgumentParser, seq: int, batch: int | None, dtype: str) -> None:
    """The arguments that say what is planned."""
    default = "%(default)s" if batch else "dp x micro-batches"
    add = parser.add_argument
    add("--config", required=True, metavar="CONFIG.json", help="a transformers config.json, or its folder")
    add("--mesh", required=True, metavar="dp=2,tp=4", help="axes and their sizes; any size works")
    add("--seq", type=_positive, default=seq, help="tokens per example (default: %(default)s)")
    add(
        "--batch",
        type=_positive,
        default=batch,
        help=f"examples of a whole step, over all ranks and micro-batches (default: {default})",
    )
    add("--micro-batches", type=_positive, default=1, metavar="N", help="gradient accumulation steps (default: 1)")
    add("--zero", type=int, choices=(0, 3), default=0, help="3: parameters are cut over dp, too (default: 0)")
    add("--sequence-parallel", action="store_true", help="cut the residual stream along the sequence over tp")
    add("--dtype", default=dtype, help="of parameters: bfloat16, float16, float32, float64 (default: %(default)s)")


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a positive whole number, found {text!r}")
    return int(text)


# --- what the arguments mean ---------------------------------------------------------------------------------


def _mesh(text: str) -> Mesh:
    mesh = Mesh.parse(text)
    for axis, size in mesh.axes:
        if axis not in AXES and size > 1:
            raise ValueError(f"mesh: plans know the axes {' and '.join(AXES)}, found {axis}={size}; leave it out")
    return mesh


def _options(args: argparse.Namespace) -> Options:
    return Options(zero=args.zero, sequence_parallel=args.sequence_parallel, micro_batches=args.micro_batches)


def _compile(args: argparse.Namespace, observers: Sequence[Observer]) -> tuple[str, Compiled]:
    """(what was planned, the compiled model); losses are the only outputs, as in a training step."""
    mesh, options = _mesh(args.mesh), _options(args)
    hf = _transformers()
    model = hf.build(hf.load_config(args.config), hf.dtype_named(args.dtype))
    rows = args.batch or mesh.size("dp") * options.micro_batches
    batch = hf.batch_of(model, rows, args.seq)
    shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in batch.items())
    compiled = compile_model(model, batch, mesh, options, outputs=(), observers=observers)
    return f"{type(model).__name__} ({args.dtype}), {shapes}", compiled


def _transformers() -> Any:
    """The adapter, which needs transformers; it loads in seconds, so only when asked for."""
    try:
        return importlib.import_module("autopar.models.hf_configs")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"transformers: configs need the extra autopar[hf], found {error}; pip install 'autopar[hf]'"
        ) from error


@contextmanager
def _progress() -> Iterator[Observer]:
    """Shows on stderr what the compiler did last, and for how long it runs."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("model", total=None)

        def observe(name: str, gm: GraphModule, ctx: Context) -> None:
            progress.update(task, description=f"compiling; done: {name}, {len(gm.graph.nodes)} nodes")

        progress.update(task, description="compiling: model, capture")
        yield observe


# --- commands ------------------------------------------------------------------------------------------------


def _plan(args: argparse.Namespace) -> int:
    dumper = Dumper(args.dump, title=f"autopar plan: {args.config}") if args.dump else None
    with _progress() as observer:
        model, compiled = _compile(args, [observer, dumper] if dumper else [observer])
        summary = summarize(compiled, model)
        if dumper:
            dumper.finish(compiled.context, parameters=compiled.parameters, summary=[("model", model)])
    if args.json:
        print(json.dumps(summary, indent=1))
    else:
        show(summary, Console(width=None if sys.stdout.isatty() else _WIDTH))
    return 0


class _Found(Exception):
    """The wanted graph is there: no need to compile further."""


def _show(args: argparse.Namespace) -> int:
    texts: list[str] = []

    def stop(name: str, gm: GraphModule, ctx: Context) -> None:
        if name == LEVELS[args.level]:
            texts.append(format_graph(gm, ctx.mesh))
            raise _Found

    with _progress() as observer, suppress(_Found):
        _compile(args, [observer, stop])
    if not texts:
        raise ValueError(f"show: there is no {args.level} graph; nothing in this model has a gradient")
    print(texts[0], end="")
    return 0


def _verify(args: argparse.Namespace) -> int:
    """`autopar.verify.main(config, mesh, options, seq, batch, dtype) -> exit code`"""
    hf = _transformers()
    config = hf.load_config(args.config)
    run = importlib.import_module("autopar.verify").main
    code: int = run(
        config, _mesh(args.mesh), _options(args), seq=args.seq, batch=args.batch, dtype=hf.dtype_named(args.dtype)
    )
    return code


def _demo(args: argparse.Namespace) -> int:
    """`autopar.demo.main(arguments) -> exit code`: it has arguments, and a --help, of its own."""
    code: int = importlib.import_module("autopar.demo").main(args.rest)
    return code
