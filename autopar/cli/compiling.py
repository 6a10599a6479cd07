"""Builds a model from a config and compiles it for the arguments of a command."""

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
    """The mesh of --mesh."""
    return Mesh.parse(text).planned()


def asked_options(args: argparse.Namespace) -> Options:
    """The options of the arguments of `autopar.cli.shared_arguments.add_model`."""
    return Options(**{name: getattr(args, name) for name in DECLARED})


def options_for(args: argparse.Namespace, mesh: Mesh) -> Options:
    """The same for one of several meshes, without options of axes that it lacks."""
    options = asked_options(args)
    idle = [n for n, o in DECLARED.items() if o.axes and not any(axis in mesh.sizes for axis in o.axes)]
    links = Topologies.parse(options.topology).axes
    mine = {name: links[name] for name in links if re.split("[%/]", name)[0] in (*mesh.sizes, "*", "host")}
    kept = {name: DECLARED[name].default for name in idle} | {"topology": str(Topologies(mine))}
    return dataclasses.replace(options, **kept)


def compile_config(args: argparse.Namespace, observers: Sequence[Observer]) -> tuple[str, Compiled]:
    """(description of model and batch, the compiled model); losses are the only outputs, as in a training step."""
    return compile_on(asked_mesh(args.mesh), asked_options(args), args, observers)


def compile_on(
    mesh: Mesh, options: Options, args: argparse.Namespace, observers: Sequence[Observer]
) -> tuple[str, Compiled]:
    """The same for another mesh and other options than those of the arguments."""
    hf = configs()
    model = hf.build(hf.load_config(args.config), hf.dtype_named(args.dtype))
    rows = args.batch or mesh.data_size * options.microbatches
    batch = hf.batch_of(model, rows, args.seq, packed=bool(options.documents))
    shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in batch.items())
    compiled = compile_model(model, batch, mesh, options, outputs=(), observers=observers)
    return f"{type(model).__name__} ({args.dtype}), {shapes}", compiled


def configs() -> Any:
    """The adapter of transformers, loaded on first use, because that takes seconds. Raises ValueError without it."""
    try:
        return importlib.import_module("autopar.models.hf_configs")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"transformers: configs need the extra autopar[hf], found {error}; pip install 'autopar[hf]'"
        ) from error


@contextmanager
def shown_progress() -> Iterator[Observer]:
    """Show on stderr the last pass that the compiler has run, and the time so far."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    console = Console(stderr=True)
    # Without a terminal, rich would print an empty line at the end.
    with Progress(*columns, console=console, transient=True, disable=not console.is_interactive) as progress:
        task = progress.add_task("model", total=None)

        def observe(name: str, gm: GraphModule, ctx: Compilation) -> None:
            progress.update(task, description=f"compiling; done: {name}, {len(gm.graph.nodes)} nodes")

        progress.update(task, description="compiling: model, capture")
        yield observe
