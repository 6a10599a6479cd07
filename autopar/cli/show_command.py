"""`autopar show`: print the graph of any level."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import textwrap
from contextlib import suppress
from typing import TYPE_CHECKING

from autopar.cli.command import Command
from autopar.cli.shared_arguments import OFTEN, add_model, whole

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from autopar.rewrite.compilation import Compilation

# --level -> the name under which the compiler shows the graph to its observers.
LEVELS = {
    "global": "derive_rules",
    "typed": "propagate_placements",
    "local": "lower_to_local",
    "gather": "gather",
    "forward": "forward",
    "backward": "backward_reduce",  # with the sums of gradients over ranks
}
# Levels of a pipeline stage, whose names have a prefix such as part0.
LEVELS_OF_PARTS = (
    "part",
    "gather",
    "gather_forward",
    "forward",
    "backward",
    "backward_input",
    "backward_weight",
    "reduce",
)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, seq=2048, batch=None, dtype="bfloat16")
    levels = list(dict.fromkeys([*LEVELS, *LEVELS_OF_PARTS]))
    parser.add_argument(
        "--level",
        choices=levels,
        default="local",
        metavar="LEVEL",
        help=f"which graph: {', '.join(levels)}; with pp, those from gather on are of one stage (default: %(default)s)",
    )
    parser.add_argument("--part", type=whole, metavar="K", help="with pp: which stage of the model (default: 0)")


class _Shown(Exception):
    """The graph is compiled, so the rest is not needed."""


def _run(args: argparse.Namespace) -> int:
    from autopar.cli.compiling import asked_mesh, compile_config, shown_progress
    from autopar.report.graph_text import format_graph

    texts: list[str] = []
    wanted = _level(args, asked_mesh(args.mesh).size("pp") > 1)

    def stop(name: str, gm: GraphModule, ctx: Compilation) -> None:
        if name == wanted:
            texts.append(format_graph(gm, ctx.mesh))
            raise _Shown

    with shown_progress() as observer, suppress(_Shown):
        compile_config(args, [observer, stop])
    if not texts:
        raise ValueError(f"show: there is no {wanted} graph; {_missing(args.level)}")
    print(texts[0] if not sys.stdout.isatty() else _wrapped(texts[0], shutil.get_terminal_size().columns), end="")
    return 0


def _wrapped(text: str, width: int) -> str:
    """Wrap lines, with an indent, for a narrower terminal; comments are then not aligned."""
    lines = text.splitlines()
    if all(len(line) <= width for line in lines):
        return text
    plain = (re.sub(r"\s+(?=# )", "  ", line) for line in lines)
    how = {"subsequent_indent": " " * 8, "break_on_hyphens": False, "drop_whitespace": True}
    return "".join(f"{textwrap.fill(line, max(width, 20), **how)}\n" for line in plain)  # type: ignore[arg-type]


def _level(args: argparse.Namespace, stages: bool) -> str:
    """The name that the compiler gives to the requested graph."""
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
    """Why there is no such graph."""
    return {
        "gather": "this stage uses its parameters as they are stored, or gathers them for each use",
        "reduce": "the gradients of this stage are not reduced",
        "part": "the model has fewer stages",
        "forward": "the model has fewer stages",
    }.get(level, "nothing there has a gradient, or the model has fewer stages")


SHOW = Command("show", "print the graph of any level", _add_arguments, _run, (*OFTEN, "--level", "--part"))
