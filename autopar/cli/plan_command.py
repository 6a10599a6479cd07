"""`autopar plan`: plan placements and pipeline stages; print them with memory, communication and time of a step.
Several meshes are compared side by side.

    autopar plan --config CONFIG.json --mesh dp=8,tp=8 --seq 8192 --batch 8
    autopar plan --config CONFIG.json --mesh tp=8 --serve --max-length 8192 --target-hardware h100
    autopar plan --layouts FILE.jsonl --json          prices of many layouts, one answer a line
    autopar plan --auto --config CONFIG.json --gpus 512 --cluster H100 --seq 8192 --batch 1024       the layout chosen
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.chips import DEFAULT
from autopar.cli.command import Command, console_of_results
from autopar.cli.shared_arguments import OFTEN, add_model, positive

if TYPE_CHECKING:
    from autopar.ir.mesh import Mesh

_RARE = ("--precision", "--attention", "--dtype")  # of options that other commands show first
_OF_SERVING = ("max_length", "cache", "step_tokens")
_WIDTH = 160  # of tables when stdout is no terminal


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    needed = add_model(parser, seq=2048, batch=None, dtype="bfloat16", several=True)
    parser.add_argument("--json", action="store_true", help="print JSON, a list for several meshes")
    parser.add_argument(
        "--dump", type=Path, metavar="DIR", help="write every graph and an HTML report into this folder"
    )
    parser.add_argument("--serve", action="store_true", help="plan autopar.serve: cache, requests that fit, times")
    group = parser.add_argument_group("prices of layouts (--auto, --layouts)")
    group.add_argument(
        "--auto", action=_Replaces, instead_of=needed[1:], nargs=0, default=False,
        help="choose mesh and options; those that are given stay",
    )  # fmt: skip
    group.add_argument("--gpus", type=positive, metavar="N", help="GPUs (default: those of --cluster)")
    group.add_argument(
        "--layouts", action=_Replaces, instead_of=needed, metavar="FILE.jsonl",
        help="price the layouts of a file, one JSON object a line",
    )  # fmt: skip
    group.add_argument("--compute", choices=("fp8",), help="what if products were in fp8 (--auto)")
    group.add_argument(
        "--cluster",
        default=DEFAULT,
        metavar="H100:64x8",
        help="chip, chip:NODESxCHIPS, file (default: %(default)s)",
    )
    group.add_argument(
        "--stack",
        default="autopar-eager",
        metavar="NAME",
        help="software whose speed is assumed: a name or a file (default: %(default)s)",
    )
    group = parser.add_argument_group("serving (--serve)")
    add = group.add_argument
    add("--max-length", type=positive, metavar="N", help="most tokens of a request (default: 4096, or all positions)")
    add("--cache", metavar="BYTES", help="of keys and values per rank, 40GB (default: what the weights leave)")
    add("--step-tokens", type=positive, metavar="N", help="most tokens of a step (default: 512)")


class _Replaces(argparse.Action):
    """An argument that replaces required ones."""

    def __init__(self, *args: Any, instead_of: Sequence[argparse.Action], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.instead_of = instead_of

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, True if self.nargs == 0 else values)
        for action in self.instead_of:
            action.required = False


def _run_layouts(args: argparse.Namespace) -> int:
    """Print an answer for each line of a file."""
    from autopar.auto.priced_layouts import LayoutPricer, answers, lines_of
    from autopar.cost.cluster import Cluster
    from autopar.cost.efficiency import stack_named

    if args.config is not None or args.mesh is not None:
        raise ValueError("--layouts: the lines of the file have their config and mesh; leave out --config and --mesh")
    stack_named(args.stack, Cluster.parse(args.cluster).chip_name)  # for its refusals
    refused = []
    for number, found in enumerate(answers(lines_of(args.layouts), LayoutPricer(args.cluster, args.stack)), 1):
        refused.append("refused" in found)
        print(json.dumps(found) if args.json else _line_of(number, found), flush=True)
    return 2 if refused and all(refused) else 0


def _line_of(number: int, found: Mapping[str, Any]) -> str:
    if "refused" in found:
        return f"{number}: refused: {found['refused']}"
    fits = "fits" if found["fits"] else "does not fit"
    memory, limit = max(found["memory"]) / 1e9, found["limit"] / 1e9
    measured = f", measured {found['measured']:.4g} s ({found['error']:+.0%})" if "measured" in found else ""
    return (
        f"{number}: {found['seconds']:.4g} s, MFU {found['mfu']:.0%}, {memory:.1f} of {limit:.0f} GB ({fits}){measured}"
    )


def _run(args: argparse.Namespace) -> int:
    if args.layouts is not None:
        return _run_layouts(args)
    if args.auto:
        from autopar.cli.auto_plan import run_auto

        return run_auto(args, console_of_results(_WIDTH), _summary)
    from autopar.cli.compiling import asked_mesh, asked_options
    from autopar.report.summary import show_summary

    _check_serving(args)
    if args.serve:
        return _run_serving(args)
    if len(args.mesh) > 1:
        return _run_several(args, [asked_mesh(text) for text in args.mesh])
    summary = _summary(args, asked_mesh(args.mesh[0]), asked_options(args), args.dump)
    _remark(args)
    if args.json:
        print(json.dumps(summary, indent=1))
    else:
        show_summary(summary, console_of_results(_WIDTH))
    return 0


def _check_serving(args: argparse.Namespace) -> None:
    """Raises ValueError for options of serving without --serve, and for those of training with it."""
    given = next((name for name in _OF_SERVING if getattr(args, name) is not None), "")
    if given and not args.serve:
        raise ValueError(f"--{given.replace('_', '-')} is of plans to serve a model, found none; add --serve")
    if args.serve and args.batch is not None:
        raise ValueError(f"--serve needs no batch, found --batch {args.batch}; leave it out")


def _run_serving(args: argparse.Namespace) -> int:
    """Plan to serve on each mesh."""
    from autopar.cli.compiling import asked_mesh, asked_options, options_for
    from autopar.cli.serving_plan import serving_summary
    from autopar.report.serving_summary import show_serving

    meshes, found = [asked_mesh(text) for text in args.mesh], list[dict[str, Any]]()
    if len(meshes) == 1:
        found.append(serving_summary(args, meshes[0], asked_options(args), args.dump))
    for mesh in meshes if len(meshes) > 1 else ():
        folder = args.dump / str(mesh).replace(",", "-") if args.dump else None
        try:
            found.append(serving_summary(args, mesh, options_for(args, mesh), folder))
        except ValueError as error:
            found.append(_refused(args, mesh, error))
    if args.json:
        print(json.dumps(found if len(found) > 1 else found[0], indent=1))
    else:
        show_serving(found, console_of_results(_WIDTH))
    return 2 if all("refused" in row for row in found) else 0


def _refused(args: argparse.Namespace, mesh: Mesh, error: ValueError) -> dict[str, Any]:
    return {"model": str(args.config), "mesh": mesh.sizes, "refused": " ".join(str(error).split())}


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
            found.append(_refused(args, mesh, error))
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
    (
        *(name for name in OFTEN if name not in _RARE),
        "--json",
        "--dump",
        "--serve",
        "--auto",
        "--gpus",
        "--cluster",
        "--stack",
        "--layouts",
    ),
)
