"""Pieces of a checkpoint, read without a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from autopar.ir.signature import ParameterSpec
from autopar.runtime.checkpoint.hf_io import Files, Recipes, checked_pretrained
from autopar.runtime.mesh.process_groups import Groups


def load_pretrained(
    folder: str | Path,
    specs: Iterable[ParameterSpec],
    groups: Groups,
    buffers: Mapping[str, Tensor] | None = None,
    prefix: str = "",
    ignore: Sequence[str] = (),
    into: Mapping[str, Tensor] | None = None,
    recipes: Recipes | None = None,
) -> dict[str, Tensor]:
    """This rank's."""
    with Files() as files:
        return checked_pretrained(files, folder, specs, groups, buffers, prefix, ignore, into, recipes)()
