"""Options that several commands share: the model, the mesh, and what `autopar.options.Options` takes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import autopar.passes.attention  # (fills the table of algorithms)
import autopar.runtime.schedules  # noqa: F401  (fills the table of schedules)
from autopar.attention.algorithm_table import ALGORITHMS
from autopar.attention.layouts import LAYOUTS
from autopar.schedule.request import SCHEDULES


def add_model(parser: argparse.ArgumentParser, seq: int, batch: int | None, dtype: str) -> None:
    """The options that say what is planned. ``batch``: None for one example per dp rank and micro-batch."""
    default = "%(default)s" if batch else "dp x micro-batches"
    add = parser.add_argument
    add("--config", required=True, metavar="CONFIG.json", help="a transformers config.json, or its folder")
    add("--mesh", required=True, metavar="dp=2,tp=4", help="axes (dp, cp, tp, pp) and their sizes; any size works")
    add("--seq", type=positive, default=seq, help="tokens per example (default: %(default)s)")
    add(
        "--batch",
        type=positive,
        default=batch,
        help=f"examples of a whole step, over all ranks and micro-batches (default: {default})",
    )
    add(
        "--micro-batches",
        type=positive,
        default=1,
        metavar="N",
        help="gradient accumulation steps, which also fill a pipeline (default: 1)",
    )
    add("--zero", type=int, choices=(0, 3), default=0, help="3: parameters are cut over dp, too (default: 0)")
    add("--sequence-parallel", action="store_true", help="cut the residual stream along the sequence over tp")
    add("--dtype", default=dtype, help="of parameters: bfloat16, float16, float32, float64 (default: %(default)s)")
    _context(parser.add_argument_group("sequences cut over ranks (axis cp)").add_argument)
    _pipeline(parser.add_argument_group("pipeline stages (axis pp)").add_argument)


def _context(add: Callable[..., Any]) -> None:
    """The options of context parallelism."""
    add(
        "--attention",
        default="auto",
        metavar="NAME|F+B",
        help=f"{', '.join(ALGORITHMS)}, or two, for forward and backward (default: the fastest by estimate)",
    )
    add(
        "--layout",
        choices=("auto", *LAYOUTS),
        default="auto",
        help="how a sequence is dealt to the ranks (default: the faster by estimate)",
    )
    add(
        "--topology",
        default="",
        metavar="cp=ring:50e9:5e-6",
        help="links of each axis: ring, mesh or switch, bytes per second, seconds of a message (default: switch)",
    )


def _pipeline(add: Callable[..., Any]) -> None:
    """The options of pipelines."""
    add("--schedule", default="", metavar="NAME", help=f"{', '.join(SCHEDULES)} (default: the fastest by simulation)")
    add(
        "--cuts",
        type=_names,
        default=(),
        metavar="A,B",
        help="modules with which each part but the first begins (default: balanced by estimated time)",
    )
    add("--chunks", type=positive, default=0, metavar="V", help="parts per rank (default: the schedule's own)")
    add(
        "--slices",
        type=_slices,
        default=0,
        metavar="N|L1,L2",
        help="for schedules over token slices: their number, or their lengths (default: chosen)",
    )
    add(
        "--memory-limit",
        type=_bytes,
        default=0,
        metavar="BYTES",
        help="what a rank may hold, such as 80e9; for cuts and for schedules that search (default: no limit)",
    )
    add(
        "--gathers",
        choices=("step", "layer"),
        default="step",
        help="with --zero 3: gather parameters once per step, or for each use (default: %(default)s)",
    )


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a positive whole number, found {text!r}")
    return int(text)


def whole(text: str) -> int:
    """A whole number from 0 on."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"expected a whole number, found {text!r}")
    return int(text)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _slices(text: str) -> int | tuple[int, ...]:
    lengths = tuple(positive(length.strip()) for length in text.split(","))
    return lengths if len(lengths) > 1 else lengths[0]


def _bytes(text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of bytes such as 80e9, found {text!r}")
    return int(value)
