"""`RoleWeights`: the parameters and buffers that the graphs of one role use, as a server uses them.

    weights = RoleWeights(model, roles, groups, buffers, folder)
    weights.agree()                     # both roles have the same model
    packed = ...(weights.structure())   # the role's graphs say which parameters they use, and how they are placed
    weights.hold(packed.parameters)

Values are those of the model on this process, or are read from a folder for a model on the meta device: of the files a
rank reads only its shards of its role's parameters.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from autopar.adapters.autograd import version_of
from autopar.adapters.copying.fake import skeleton_of
from autopar.ir.signature import ParameterSpec
from autopar.runtime.checkpoint.hf_io import Files, Recipes, Stored, checked_pretrained, stored_in
from autopar.runtime.consistency.rank_checks import raise_on_all_ranks
from autopar.runtime.consistency.tensor_hash import hashes_of
from autopar.runtime.mesh.process_groups import Groups
from autopar.runtime.mesh.roles import Roles
from autopar.runtime.params.parameters import local_piece, own_buffers
from autopar.version import VERSION

# What all ranks need alike, in the order of the lines that they compare, and what to do.
_ALIKE = (
    ("versions", "install the same ones"),
    ("model", "build it alike"),
    ("weights", "set the same seed before building the model, or load the same checkpoint"),
)


class RoleWeights:
    """See the module's docstring. ``buffers``: all of the model, with values, by name; persistent ones are read from
    the ``folder`` as well. ``recipes``: as of `checked_pretrained`. ``dtypes``: as of `skeleton_of`, by id of the
    model's parameters."""

    def __init__(
        self,
        model: nn.Module,
        roles: Roles,
        groups: Groups,
        buffers: Mapping[str, Tensor],
        folder: str | Path | None = None,
        recipes: Recipes | None = None,
        dtypes: Mapping[int, torch.dtype] | None = None,
    ) -> None:
        self.groups, self._roles, self._recipes = groups, roles, recipes
        self._folder = None if folder is None else Path(folder)
        self._skeleton = skeleton_of(model, dtypes).eval().requires_grad_(False)
        self._given: dict[str, Tensor] = {n: p.detach() for n, p in model.named_parameters(remove_duplicate=False)}
        self._persistent = set(model.state_dict()) - self._given.keys()
        self._buffers = own_buffers(buffers, groups)
        self._held: dict[str, Tensor] = {}
        self._names = list(self._given)

    def structure(self) -> nn.Module:
        """The modules in eval mode, with unsharded parameters without gradients on the meta device."""
        return self._skeleton

    def agree(self) -> None:
        """Check that all ranks of both roles have the same versions, model and weights. Collective over both roles.

        Raises ValueError, the same on all ranks, that names those with others, or without weights."""
        problem, lines = "", [f"autopar {VERSION}, torch {torch.__version__}", self._model_text(), ""]
        try:
            lines[2] = self._checksum()
        except ValueError as error:
            problem = str(error)
        text = "\n".join(["the weights of both roles", json.dumps([problem, *lines])])
        found = self._roles.agree("weights", text, lambda texts: _difference(self._roles, texts))
        if found:
            raise ValueError(found)

    def hold(self, specs: Iterable[ParameterSpec]) -> None:
        """Take this rank's shards of these parameters, and let go of all others. Collective over the role. Raises
        ValueError for a checkpoint that does not fit."""
        specs, given = list(specs), self._given
        if self._folder is None:
            self._held = {spec.name: local_piece(given[spec.name], spec, self.groups) for spec in specs}
        else:
            self._held = self._read(self._folder, specs)
        self._given = {}

    def values(self) -> dict[str, Tensor]:
        """This rank's shards of the parameters held, and all buffers, by name."""
        return {**self._held, **self._buffers}

    def versions(self) -> list[tuple[int, ...]]:
        """Equal to those of another moment if nothing was written since, as far as tensors record it."""
        return [(x.data_ptr(), version_of(x)) for x in self.values().values()]

    def _read(self, folder: Path, specs: Sequence[ParameterSpec]) -> dict[str, Tensor]:
        prefix = getattr(self._skeleton, "base_model_prefix", "")
        ignore = getattr(self._skeleton, "_keys_to_ignore_on_load_unexpected", None) or ()
        buffers = {name: x for name, x in self._buffers.items() if name in self._persistent}
        with Files() as files:
            given = files, folder, specs, self.groups, buffers, prefix, tuple(ignore), None, self._recipes
            fill = raise_on_all_ranks(self.groups, "serve", lambda: checked_pretrained(*given, elsewhere=self._names))
            return raise_on_all_ranks(self.groups, "serve", fill)

    def _model_text(self) -> str:
        tensors = {name: [list(x.shape), str(x.dtype)] for name, x in {**self._given, **self._buffers}.items()}
        return f"{type(self._skeleton).__name__} with {len(tensors)} tensors [{_digest(tensors)}]"

    def _checksum(self) -> str:
        if self._folder is not None:
            return f"a folder [{_digest(_samples(self._folder))}]"
        if missing := [name for name, x in self._given.items() if x.is_meta]:
            raise ValueError(
                f"serve: needs weights, found {missing[0]} on the meta device; pass weights=folder, or a model with "
                "values"
            )
        return f"those in memory [{_digest(hashes_of({**self._given, **self._buffers}))}]"


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def _samples(folder: Path) -> dict[str, list[object]]:
    """Name -> shape, dtype, first and last number of each tensor in the files, which are not read for it."""
    found: dict[str, list[object]] = {}
    with Files() as files:
        for name, stored in stored_in(folder).items():
            shape, dtype = files.outline(stored)
            ends = (_number(files, stored, shape, last) for last in (False, True))
            found[name] = [list(shape), str(dtype), *ends]
    return found


def _number(files: Files, stored: Stored, shape: tuple[int, ...], last: bool) -> str:
    if 0 in shape:
        return ""
    window = tuple(slice(size - 1, size) if last else slice(0, 1) for size in shape)
    one = files.stored(stored, window).reshape(1)
    return one.view(torch.uint8).numpy().tobytes().hex()


def _difference(roles: Roles, texts: Sequence[str]) -> str:
    """What differs between the texts of all ranks, in a sentence, or ""."""
    told = [json.loads(text.partition("\n")[2]) for text in texts]
    if refused := [rank for rank, (problem, *_) in enumerate(told) if problem]:
        some = f"on {roles.named(*refused)}: " if len(refused) < len(told) else ""
        return some + str(told[refused[0]][0])
    for i, (what, way_out) in enumerate(_ALIKE, 1):
        given = [lines[i] for lines in told]
        common, _ = Counter(given).most_common(1)[0]
        if odd := [rank for rank, value in enumerate(given) if value != common]:
            return (
                f"serve: all ranks of both roles need the same {what}, found {given[odd[0]]} on {roles.named(*odd)}, "
                f"{common} on the others; {way_out} on every rank"
            )
    return ""
