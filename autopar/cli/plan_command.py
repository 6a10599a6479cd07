"""`autopar plan`: plan placements and pipeline stages; print them with memory, communication and time of a step.
Several meshes are compared side by side."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.cli.command import Command, console_of_results
from autopar.cli.shared_arguments import OFTEN, add_model

if TYPE_CHECKING:
    from autopar.ir.mesh import Mesh

_WIDTH = 160  # of tables when stdout is no terminal


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, seq=2048, batch=None, dtype="bfloat16", several=True)
    parser.add_argument("--json", action="store_true", help="print JSON, a list for several meshes")
    parser.add_argument(
        "--dump", type=Path, metavar="DIR", help="write every graph and an HTML report into this folder"
    )


def _run(args: argparse.Namespace) -> int:
    from autopar.cli.compiling import asked_mesh, asked_options
    from autopar.report.summary import show_summary

    if len(args.mesh) > 1:
        return _run_several(args, [asked_mesh(text) for text in args.mesh])
    summary = _summary(args, asked_mesh(args.mesh[0]), asked_options(args), args.dump)
    _remark(args)
    if args.json:
        print(json.dumps(summary, indent=1))
    else:
        show_summary(summary, console_of_results(_WIDTH))
    return 0


def _summary(args: argparse.Namespace, mesh: Mesh, options: Any, folder: Path | None) -> dict[str, Any]:
    from autopar.cli.compiling import compile_on, shown_progress
    from autopar.report.dump.dump import Dumper
    from autopar.report.summary import summarize

    dumper = Dumper(folder, title=f"autopar plan: {args.config} on {mesh}") if folder else None
    with shown_progress() as observer:
        model, compiled = compile_on(mesh, options, args, [observer, dumper] if dumper else [observer])
        if dumper:
            dumper.add_compiled(compiled, summary=[("model", model)])
        return summarize(compiled, model)


def _remark(args: argparse.Namespace) -> None:
    """Print a remark on input that can be planned, but is probably a mistake."""
    from autopar.cli.compiling import configs

    if remark := configs().beyond_positions(args.config, args.seq):
        print(f"autopar: {remark}", file=sys.stderr)


def _run_several(args: argparse.Namespace, meshes: list[Mesh]) -> int:
    """Plan each mesh with one batch size that divides over all of them; each ignores options of axes that it lacks."""
    from autopar.cli.compiling import options_for
    from autopar.report.summary import show_side_by_side

    args.batch = args.batch or max(mesh.data_size for mesh in meshes) * args.microbatches
    found: list[dict[str, Any]] = []
    for mesh in meshes:
        folder = args.dump / str(mesh).replace(",", "-") if args.dump else None
        try:
            found.append(_summary(args, mesh, options_for(args, mesh), folder))
        except ValueError as error:
            found.append({"model": str(args.config), "mesh": mesh.sizes, "refused": " ".join(str(error).split())})
    _remark(args)
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        show_side_by_side(found, args.batch, args.seq, console_of_results(_WIDTH))
    return 2 if all("refused" in row for row in found) else 0


PLAN = Command(
    "plan",
    "plan placements and pipeline stages; print them with memory, communication and time of a step",
    _add_arguments,
    _run,
    (*OFTEN, "--json", "--dump"),
)
