"""The command line: look at a plan and its graphs, check a model, see a demo. Any mesh, one process, no weights.

    autopar plan   --config CONFIG.json --mesh dp=8,tp=8 --seq 8192 --batch 8
    autopar plan   --config CONFIG.json --mesh pp=4,dp=2 --micro-batches 8 --schedule 1f1b
    autopar show   --config CONFIG.json --mesh dp=2,tp=2 --level typed
    autopar show   --config CONFIG.json --mesh pp=2 --micro-batches 4 --part 1 --level backward_input
    autopar verify --config CONFIG.json --mesh dp=2,tp=2 --zero 3
    autopar schedule --name zb_h1 --stages 8 --micro-batches 24 --times F=18.5,B=18.1,W=9.3,comm=0.6
    autopar attention --ranks 8 --seq 131072 --heads 32 --kv-heads 8 --topology ring
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

from autopar.cli import attention_command, schedule_command
from autopar.cli.shared_arguments import add_model, whole
from autopar.compile.model import compile_model
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.passes.in_order import GLOBAL_PASSES
from autopar.report.dump import Dumper
from autopar.report.graph_text import format_graph
from autopar.report.summary import show_summary, summarize
from autopar.rewrite.compilation import Compilation, Observer
from autopar.steps.graphs import Compiled

# --level -> the name under which the compiler shows the graph to its observers.
LEVELS = {
    "global": GLOBAL_PASSES[-1].name,
    "typed": "propagate_placements",
    "local": "localize_shapes",
    "forward": "forward",
    "backward": "backward",
}
# Those that a part of a pipeline has, with a prefix such as part0.
LEVELS_OF_PARTS = ("part", "gather", "forward", "backward", "backward_input", "backward_weight", "reduce")
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
        print(f"{self.prog}: {' '.join(message.split())}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="autopar", description="A graph compiler for parallel training.")
    commands = parser.add_subparsers(required=True, metavar="plan|show|verify|schedule|attention|demo")
    plan = _command(
        commands,
        "plan",
        _plan,
        "decide placements and pipeline stages; print them with memory and communication per rank",
    )
    add_model(plan, seq=2048, batch=None, dtype="bfloat16")
    plan.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    plan.add_argument("--dump", type=Path, metavar="DIR", help="write every graph and a report into this folder")
    graph = _command(commands, "show", _show, "print a graph")
    add_model(graph, seq=2048, batch=None, dtype="bfloat16")
    levels = list(dict.fromkeys([*LEVELS, *LEVELS_OF_PARTS]))
    graph.add_argument(
        "--level",
        choices=levels,
        default="local",
        metavar="LEVEL",
        help=f"which graph: {', '.join(levels)}; with pp, those from forward on are of a part (default: %(default)s)",
    )
    graph.add_argument("--part", type=whole, metavar="K", help="with pp: which part of the model (default: 0)")
    check = _command(
        commands, "verify", _verify, "run on local processes and compare with one process; exits 1 on mismatch"
    )
    add_model(check, seq=16, batch=4, dtype="float64")
    pipeline = _command(commands, "schedule", schedule_command.command, "simulate and draw a pipeline schedule")
    schedule_command.add_arguments(pipeline)
    attention = _command(commands, "attention", attention_command.command, "compare algorithms of context parallelism")
    attention_command.add_arguments(attention)
    _command(commands, "demo", _demo, "a small model, from plan to training, on local processes", add_help=False)
    return parser


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str, **more: Any) -> _Parser:
    parser: _Parser = commands.add_parser(name, help=text, description=text, **more)
    parser.set_defaults(run=run)
    return parser


# --- what the arguments mean ---------------------------------------------------------------------------------


def _mesh(text: str) -> Mesh:
    return Mesh.parse(text).planned()


def _options(args: argparse.Namespace) -> Options:
    names = (
        "zero", "sequence_parallel", "micro_batches", "schedule", "cuts", "chunks", "slices", "memory_limit", "gathers",
        "attention", "layout", "topology",
    )  # fmt: skip
    return Options(**{name: getattr(args, name) for name in names})


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

        def observe(name: str, gm: GraphModule, ctx: Compilation) -> None:
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
            dumper.add_attention(compiled)
            dumper.add_pipeline(compiled)
            dumper.finish(compiled.context, parameters=compiled.parameters, summary=[("model", model)])
    if args.json:
        print(json.dumps(summary, indent=1))
    else:
        show_summary(summary, Console(width=None if sys.stdout.isatty() else _WIDTH))
    return 0


class _Found(Exception):
    """The wanted graph is there: no need to compile further."""


def _show(args: argparse.Namespace) -> int:
    texts: list[str] = []
    wanted = _level(args)

    def stop(name: str, gm: GraphModule, ctx: Compilation) -> None:
        if name == wanted:
            texts.append(format_graph(gm, ctx.mesh))
            raise _Found

    with _progress() as observer, suppress(_Found):
        _compile(args, [observer, stop])
    if not texts:
        raise ValueError(f"show: there is no {wanted} graph; {_missing(args.level)}")
    print(texts[0], end="")
    return 0


def _level(args: argparse.Namespace) -> str:
    """The name under which the compiler shows the wanted graph."""
    stages = _mesh(args.mesh).size("pp") > 1
    level = str(args.level)
    if stages and level in LEVELS_OF_PARTS:
        return f"part{args.part or 0}.{level}"
    if args.part is not None:
        need = "one of the levels " + ", ".join(LEVELS_OF_PARTS) if stages else "a mesh with an axis pp"
        raise ValueError(f"--part: needs {need}, found {'--level ' + level if stages else args.mesh}")
    if level not in LEVELS:
        raise ValueError(
            f"--level {level}: needs a mesh with an axis pp, found {args.mesh}; the levels are {', '.join(LEVELS)}"
        )
    return LEVELS[level]


def _missing(level: str) -> str:
    """Why a graph is not there."""
    return {
        "gather": "this part uses its parameters as they are stored, or gathers them for each use",
        "reduce": "the gradients of this part need no sum",
        "part": "the model has fewer parts",
        "forward": "the model has fewer parts",
    }.get(level, "nothing there has a gradient, or the model has fewer parts")


def _verify(args: argparse.Namespace) -> int:
    """`autopar.verify.verify_config(config, mesh, options, seq, batch, dtype) -> exit code`"""
    hf = _transformers()
    config = hf.load_config(args.config)
    run = importlib.import_module("autopar.verify").main
    code: int = run(
        config, _mesh(args.mesh), _options(args), seq=args.seq, batch=args.batch, dtype=hf.dtype_named(args.dtype)
    )
    return code


def _demo(args: argparse.Namespace) -> int:
    """`autopar.cli.demo_command.run_demo(arguments) -> exit code`: it has arguments, and a --help, of its own."""
    code: int = importlib.import_module("autopar.cli.demo_command").main(args.rest)
    return code
