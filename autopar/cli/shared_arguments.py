"""Arguments that several commands share: the model, the mesh, and the declared options of `autopar.options`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import autopar.passes.attention  # (fills the table of algorithms)
import autopar.runtime.schedules  # noqa: F401  (fills the table of schedules)
from autopar.chips import CHIPS
from autopar.cost.topology import Topologies
from autopar.ir.mesh import Mesh
from autopar.options import DECLARED, DeclaredOption
from autopar.values import DTYPES, byte_rate, dtype_name, one_of

# Options that the help of commands which plan a model shows.
OFTEN = (
    "--config", "--mesh", "--seq", "--batch", "--dtype", "--zero", "--sequence-parallel", "--microbatches",
    "--precision", "--activation-checkpoint", "--schedule", "--attention", "--target-hardware",
)  # fmt: skip
_GROUPS: dict[tuple[str, ...], str] = {
    ("cp",): "context parallelism (axis cp)",
    ("pp",): "pipeline parallelism (axis pp)",
}


def add_model(
    parser: argparse.ArgumentParser, seq: int, batch: int | None, dtype: str, several: bool = False
) -> list[argparse.Action]:
    """Add the model, the mesh, the batch and all options. ``batch``: None for one example per dp rank and microbatch.
    ``several``: the mesh may be given more than once, and is a list. Returns the arguments that are required."""
    default = "%(default)s" if batch else "dp x microbatches"
    add = parser.add_argument
    model = add(
        "--config", required=True, type=config, metavar="CONFIG.json", help="a transformers config.json, or its folder"
    )
    mesh_of_ranks = add(
        "--mesh",
        required=True,
        type=mesh,
        action="append" if several else "store",
        metavar="dp=2,tp=4",
        help="axes (dp_replicate, dp, cp, ep, tp, pp) and sizes" + ("; repeat to compare meshes" if several else ""),
    )
    add("--seq", type=positive, default=seq, help="tokens per example (default: %(default)s)")
    add(
        "--batch",
        type=positive,
        default=batch,
        help=f"examples per step, over all ranks and microbatches (default: {default})",
    )
    add("--dtype", type=dtype_of, default=dtype, help="of weights: bf16, fp16, fp32, fp64 (default: %(default)s)")
    groups: dict[tuple[str, ...], Any] = {axes: parser.add_argument_group(title) for axes, title in _GROUPS.items()}
    for option in DECLARED.values():
        add_option(groups.get(option.axes, parser), option)
    return [model, mesh_of_ranks]


def add_option(parser: Any, option: DeclaredOption, **changes: Any) -> None:
    """A declared option as an argument of a parser, or of a group of one."""
    if option.default is False:
        how: dict[str, Any] = {"action": _Given, "nargs": 0, "const": True, "default": False, "help": option.help}
    else:
        how = {
            "action": _Given,
            "default": option.default,
            "help": option.full_help,
            "metavar": option.kind.shown,
            "type": _reader(option),
        }
    parser.add_argument(option.flag, **how | changes).short = option.help


class _Given(argparse.Action):
    """Stores a value, and notes in ``given`` that there was one."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, self.const if self.nargs == 0 else values)
        namespace.given = {*getattr(namespace, "given", ()), self.dest}


def _reader(option: DeclaredOption) -> Any:
    return _said(lambda text: option.read(_checked(option.name, text)), f"{option.name}: ")


def _checked(name: str, text: str) -> str:
    if name == "topology":
        Topologies.parse(text)
    return text


def _said(read: Callable[[str], Any], prefix: str) -> Callable[[str], Any]:
    """Turn ValueErrors into errors of argparse, which names the argument itself."""

    def reader(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error).removeprefix(prefix)) from None

    return reader


def _mesh(text: str) -> str:
    Mesh.parse(text).planned()
    return text


def _config(text: str) -> str:
    path = Path(text)
    try:
        there = path.is_file() or (path / "config.json").is_file()
    except (OSError, ValueError):  # an invalid file name, or a loop of symbolic links
        there = False
    if not there:
        raise ValueError(f"no file {text!r}; give the path of a transformers config.json")
    return text


# Checks of texts of the command line before anything is loaded. The result is the text itself.
mesh, config = _said(_mesh, "mesh: "), _said(_config, "config: ")
dtype_of = _said(lambda text: str(one_of("dtype", dtype_name(text), tuple(DTYPES))), "dtype: ")


def positive(text: str) -> int:
    """An integer above 0."""
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a positive whole number, found {text!r}")
    return int(text)


def whole(text: str) -> int:
    """An integer, 0 or more."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"expected a whole number, found {text!r}")
    return int(text)


def add_target_hardware(parser: argparse.ArgumentParser, words: str) -> None:
    """The chip of a command that plans no model."""
    words, default = f"{words} (default: %(default)s)", DECLARED["target_hardware"].default
    parser.add_argument("--target-hardware", type=str.upper, choices=tuple(CHIPS), default=default, help=words)


def rate(text: str) -> float:
    """Bytes per second."""
    try:
        return byte_rate(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected bytes per second, such as 50e9 or 50GB, found {text!r}") from None
