"""`autopar plan --auto`: choose mesh and options of a model on a number of GPUs; print them and why."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from autopar.auto.choice import Asked, choose
from autopar.auto.costed_model import CostedModel
from autopar.auto.explanation import Explanation, chosen_options, gigabytes, seconds
from autopar.auto.sliders import sliders
from autopar.chips import DEFAULT
from autopar.cli.compiling import asked_mesh, configs
from autopar.cost.cluster import Cluster
from autopar.cost.efficiency import stack_named
from autopar.ir.mesh import Mesh
from autopar.options import DECLARED, Options
from autopar.precision import Precision
from autopar.report.html.choice_page import choice_page
from autopar.report.tables import show_table, table_of

SHOWN = 8  # candidates of a table
Summary = Callable[[argparse.Namespace, Mesh, Options, Path | None], Any]


def run_auto(args: argparse.Namespace, console: Console, summary: Summary) -> int:
    """Print the choice; ``--dump`` also writes it, with a page and the graphs of the plan (by ``summary``)."""
    explanation = explanation_of(args)
    if args.dump is not None:
        _write(args, explanation, summary)
    if args.json:
        print(json.dumps(explanation.as_dict() | {"command": command_of(args, explanation)}, indent=1))
    else:
        _show(args, explanation, console)
    return 0


def explanation_of(args: argparse.Namespace) -> Explanation:
    """The choice for the arguments of a command. Raises ValueError."""
    if args.batch is None:
        raise ValueError("auto: needs a batch, the rows of a step; add --batch 1024")
    if args.serve:
        raise ValueError("auto: chooses layouts to train, found --serve; name the mesh")
    given: set[str] = getattr(args, "given", set())
    cluster = Cluster.parse(
        args.target_hardware if "target_hardware" in given and args.cluster == DEFAULT else args.cluster
    )
    stack = stack_named(args.stack, cluster.chip_name)
    fixed = {name: getattr(args, name) for name in DECLARED if name in given}
    for text in args.mesh or ():
        fixed |= asked_mesh(text).sizes
    asked = Asked(args.gpus or 0, args.batch, args.seq, fixed, args.compute or "")
    return choose(_model(args, args.seq), asked, cluster, stack)


def _model(args: argparse.Namespace, seq: int) -> CostedModel:
    return CostedModel.from_config(configs().load_config(args.config).to_dict(), seq, args.dtype, args.documents)


def command_of(args: argparse.Namespace, explanation: Explanation) -> str:
    """The command that plans the choice."""
    words = ["autopar", "plan", "--config", str(args.config), "--mesh", str(explanation.choice.layout.mesh)]
    words += ["--seq", str(args.seq), "--batch", str(args.batch)]
    for name, value in explanation.options.items():
        option = DECLARED[name]
        if name in explanation.carried:
            value = getattr(args, name, value)
        text = value.name if isinstance(value, Precision) else str(value)
        words += [option.flag] if value is True and option.default is False else [option.flag, text]
    return shlex.join(words)


def _show(args: argparse.Namespace, explanation: Explanation, console: Console) -> None:
    for line in explanation.headline():
        console.print(line, markup=False)
    price = explanation.choice.price
    table = table_of(
        "time of a step", "cause", "axis", "exposed", "share", "in all", right=("exposed", "share", "in all")
    )
    for cause in sorted(price.causes, key=lambda c: -c.exposed):
        table.add_row(
            cause.name,
            cause.axis,
            seconds(cause.exposed),
            f"{cause.exposed / price.seconds:.0%}",
            seconds(cause.seconds),
        )
    show_table(console, table)
    table = table_of(
        "within the band, the simplest first", "mesh", "time", "memory", "options", right=("time", "memory")
    )
    for one in explanation.found.close[:SHOWN]:
        table.add_row(
            str(one.layout.mesh), seconds(one.seconds), gigabytes(one.memory), _options_text(chosen_options(one.layout))
        )
    show_table(console, table)
    for title, lines in (
        ("one value changed", [n.sentence for n in explanation.neighbours]),
        ("what limits", explanation.limits),
        ("what was pruned", explanation.pruned),
        ("remarks", explanation.remarks),
    ):
        if lines:
            console.print(title, style="bold", markup=False)
        for line in lines:
            console.print(f"  {line}", markup=False)
    console.print(f"\nplan it: {command_of(args, explanation)}", markup=False, soft_wrap=True)


def _options_text(options: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in options.items())


def _write(args: argparse.Namespace, explanation: Explanation, summary: Summary) -> None:
    summary(args, explanation.choice.layout.mesh, Options(**explanation.options), args.dump)
    found = explanation.as_dict() | {"command": command_of(args, explanation)}
    varied = sliders(explanation, lambda seq: _model(args, seq))
    (args.dump / "choice.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    page = choice_page(found | {"sliders": varied}, f"autopar plan --auto: {args.config}")
    (args.dump / "choice.html").write_text(page, encoding="utf-8")
