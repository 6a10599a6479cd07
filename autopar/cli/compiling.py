"""A model of a config, compiled for the arguments of a command."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from torch.fx import GraphModule

from autopar.compile.model import compile_model
from autopar.cost.topology import Topologies
from autopar.ir.mesh import Mesh
from autopar.options import DECLARED, Options
from autopar.rewrite.compilation import Compilation, Observer
from autopar.steps.graphs import Compiled


def asked_mesh(text: str) -> Mesh:
    """Of --mesh."""
    return Mesh.parse(text).planned()


def asked_options(args: argparse.Namespace) -> Options:
    """Of the arguments of `autopar.cli.shared_arguments.add_model`."""
    return Options(**{name: getattr(args, name) for name in DECLARED})


def options_for(args: argparse.Namespace, mesh: Mesh) -> Options:
    """Of these what counts on a mesh, where one command is about several."""
    options = asked_options(args)
    idle = [n for n, o in DECLARED.items() if o.axes and not any(axis in mesh.sizes for axis in o.axes)]
    links = Topologies.parse(options.topology).axes
    mine = {name: links[name] for name in links if re.split("[%/]", name)[0] in (*mesh.sizes, "*", "host")}
    kept = {name: DECLARED[name].default for name in idle} | {"topology": str(Topologies(mine))}
    return dataclasses.replace(options, **kept)


def compile_config(args: argparse.Namespace, observers: Sequence[Observer]) -> tuple[str, Compiled]:
    """(what was planned, the compiled model); losses are the only outputs, as in a training step."""
    return compile_on(asked_mesh(args.mesh), asked_options(args), args, observers)


def compile_on(
    mesh: Mesh, options: Options, args: argparse.Namespace, observers: Sequence[Observer]
) -> tuple[str, Compiled]:
    """The same on a mesh with options that may not be those of the arguments."""
    hf = configs()
    model = hf.build(hf.load_config(args.config), hf.dtype_named(args.dtype))
    rows = args.batch or mesh.data_size * options.microbatches
    batch = hf.batch_of(model, rows, args.seq)
    shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in batch.items())
    compiled = compile_model(model, batch, mesh, options, outputs=(), observers=observers)
    return f"{type(model).__name__} ({args.dtype}), {shapes}", compiled


def configs() -> Any:
    """The adapter, which needs transformers; it loads in seconds, so only when asked for."""
    try:
        return importlib.import_module("autopar.models.hf_configs")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"transformers: configs need the extra autopar[hf], found {error}; pip install 'autopar[hf]'"
        ) from error


@contextmanager
def shown_progress() -> Iterator[Observer]:
    """Shows on stderr what the compiler did last, and for how long it runs."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    console = Console(stderr=True)
    # Where it is no terminal rich would print an empty line at the end.
    with Progress(*columns, console=console, transient=True, disable=not console.is_interactive) as progress:
        task = progress.add_task("model", total=None)

        def observe(name: str, gm: GraphModule, ctx: Compilation) -> None:
            progress.update(task, description=f"compiling; done: {name}, {len(gm.graph.nodes)} nodes")

        progress.update(task, description="compiling: model, capture")
        yield observe
