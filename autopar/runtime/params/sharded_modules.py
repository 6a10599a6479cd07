"""The user's modules on the mesh: with their classes, attributes and modes, and this rank's shards as parameters.

They are the submodules of `ParallelModule`. So ``model.bn.eval()``, ``isinstance(m, nn.Dropout)``, ``m.p = 0.0`` and
``p.requires_grad_(False)`` have the same effect as in torch; `ModuleGuards` detects the changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.adapters.copying.fake import copy_with, geometry_of, note_overlaps
from autopar.adapters.dtensor import local_of, storage_of
from autopar.adapters.module_calls import allow_calls, refuse_calls
from autopar.adapters.tensors.tags import free_tags, keep_tags
from autopar.capture.reads.module_reads import allow_reads, refuse_reads
from autopar.ir.signature import ParameterSpec
from autopar.runtime.params.dtensor_layout import is_here
from autopar.runtime.params.parameters import is_alike


def _no_call(path: str, name: str) -> ValueError:
    at = f" at {path}" if path else ""
    return ValueError(
        f"parallelize: a {name}{at} holds only this rank's shards of its weights, so it cannot be called by itself; "
        "call the whole model (train_step, eval_step, model(**batch)), or load full_state_dict() into a model in one "
        "process"
    )


def _not_kept(path: str, name: str) -> ValueError:
    return ValueError(
        f"parallelize: the forward sets the attribute {path + '.' if path else ''}{name}, which compiled steps do not "
        "do, since they only return outputs and write buffers; return it as an output, or register it as a buffer"
    )


_WANTS_GRADIENT = operator.attrgetter("requires_grad")


class ShardedModules:
    """``own``: name of each parameter -> this rank's shard of it."""

    def __init__(
        self,
        skeleton: nn.Module,
        specs: Iterable[ParameterSpec],
        own: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
    ) -> None:
        """``skeleton``: the modules with parameters and buffers on the meta device; not changed."""
        self._specs, self._own = tuple(specs), dict(own)
        tied = {name: s.name for s in self._specs for name in (s.name, *s.aliases)}
        memo: dict[int, Tensor] = {}  # other references to a parameter, such as a list, get its shard
        for name, parameter in skeleton.named_parameters(remove_duplicate=False):
            memo[id(parameter)] = own[tied[name]]
        for name, buffer in skeleton.named_buffers(remove_duplicate=False):
            memo[id(buffer)] = buffers[name]
        self.root = copy_with(skeleton, memo, shared=True)
        for path, module in self.root.named_modules():
            refuse_calls(module, functools.partial(_no_call, path, type(module).__name__))
            keep_tags(module)
        self._devices = {name: p.device.type for name, p in self._own.items()}
        self._remember()

    @property
    def own(self) -> dict[str, nn.Parameter]:
        """This rank's shards by name, as the modules have them now. Raises ValueError as `refresh` does."""
        if self._moved():
            self.refresh()
        return self._own

    @property
    def here(self) -> dict[str, nn.Parameter]:
        """`own` without the parameters that other pipeline stages hold."""
        return {name: p for name, p in self.own.items() if is_here(p)}

    @property
    def held(self) -> Mapping[str, nn.Parameter]:
        return self._own

    def pieces(self) -> dict[str, Tensor]:
        """The local tensors that step graphs compute with, by name. Raises ValueError as `refresh` does."""
        pieces = list(map(local_of, self.own.values()))  # type: ignore[arg-type]
        if any(map(_WANTS_GRADIENT, pieces)):
            pieces = [x.detach() for x in pieces]
        return dict(zip(self._own, pieces, strict=True))

    def buffers(self) -> dict[str, Tensor]:
        """The current buffers of the modules, by name. Read `own` first: modules may have changed."""
        return {
            prefix + name: b
            for prefix, held in self._buffer_owners.items()
            if held
            for name, b in held.items()
            if b is not None
        }

    def bind(self, name: str, tensor: Tensor | None) -> None:
        """Replace a buffer by another tensor, as an assignment to the attribute does."""
        path, dot, key = name.rpartition(".")
        self._buffer_owners[path + dot][key] = tensor

    def leave_out(self, unkept: Iterable[tuple[str, str]]) -> None:
        """Make attributes that a forward sets, and steps do not, raise an error. ``unkept``: (module path, name)."""
        for path, name in unkept:
            refuse_reads(self.root.get_submodule(path), [name], functools.partial(_not_kept, path))

    @property
    def specs(self) -> tuple[ParameterSpec, ...]:
        """The specs of the parameters. Raises ValueError as `refresh` does."""
        if self._moved():
            self.refresh()
        return self._specs

    def _remember(self) -> None:
        self._children = [(m._modules, dict(m._modules)) for m in self.root.modules()]
        self._owners = [m._parameters for m in self.root.modules()]
        self._buffer_owners = {path + "." if path else "": m._buffers for path, m in self.root.named_modules()}
        parameters = self._parameters_now()
        self._ids, self._ids_of_pieces = _ids(parameters), _ids(map(local_of, parameters))

    def _moved(self) -> bool:
        """Whether modules or parameters have been replaced."""
        if any(itertools.starmap(operator.ne, self._children)):
            return True
        parameters = self._parameters_now()  # not `pieces`: a new parameter may not be a DTensor
        return _ids(parameters) != self._ids or _ids(map(local_of, parameters)) != self._ids_of_pieces

    def _parameters_now(self) -> list[Any]:
        return [p for p in itertools.chain.from_iterable(map(dict.values, self._owners)) if p is not None]

    def structure(self) -> nn.Module:
        """A copy of the current modules, with unsharded parameters and buffers on the meta device."""
        memo: dict[int, Tensor] = {}
        for _, parameter in self.root.named_parameters():
            meta = torch.empty(tuple(parameter.shape), dtype=parameter.dtype, device="meta")
            memo[id(parameter)] = nn.Parameter(meta, parameter.requires_grad)
        tied: dict[Any, tuple[str, Tensor, Tensor]] = {}  # by memory: two tensors may share a buffer's memory
        for name, buffer in self.root.named_buffers():
            key = (storage_of(buffer), *geometry_of(buffer)) if buffer.numel() else id(buffer)
            made = torch.empty_like(buffer, device="meta") if key not in tied else tied[key][2]
            memo[id(buffer)] = tied.setdefault(key, (name, buffer, made))[2]
        copy = copy_with(self.root, memo)
        note_overlaps(copy, {name: buffer for name, buffer, _ in tied.values()})
        for module in copy.modules():
            allow_calls(module)
            allow_reads(module)
            free_tags(module)
        return copy

    @contextlib.contextmanager
    def whole(self, values: Mapping[str, Tensor]) -> Iterator[nn.Module]:
        """Context manager: the modules have full parameters with these values, by name; on exit the shards return."""
        held = [(m._parameters, dict(m._parameters)) for m in self.root.modules()]
        made: dict[int, nn.Parameter] = {}
        for name, parameter in self.root.named_parameters(remove_duplicate=False):
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(values[name], requires_grad=parameter.requires_grad)
        try:
            for entries, _ in held:
                entries.update({key: made[id(p)] for key, p in entries.items() if p is not None})
            yield self.root
        finally:
            for entries, before in held:
                entries.clear()
                entries.update(before)

    def refresh(self) -> None:
        """Read the parameters again. Another DTensor of the same layout replaces the old one; changed dtypes and
        removed parameters are recorded.

        Raises ValueError for parameters that were added, or replaced by something else.
        """
        now = dict(self.root.named_parameters(remove_duplicate=False))
        left = []
        for spec in self._specs:
            found = {name: now.pop(name) for name in (spec.name, *spec.aliases) if name in now}
            if not found:
                del self._own[spec.name]
                continue
            left.append(self._taken(spec, found))
        for name in now:
            raise ValueError(
                f"parallelize: parameter {name} was added to the model after parallelize, so it is on no mesh; add it "
                "before parallelize"
            )
        self._specs = tuple(left)
        self._check_ties()
        self._remember()

    def _check_ties(self) -> None:
        names: dict[int, str] = {}
        for name, parameter in self._own.items():
            if (first := names.setdefault(id(parameter), name)) != name:
                raise ValueError(
                    f"parallelize: {first} and {name} were two parameters and are now one; tie them before parallelize"
                )

    def _taken(self, spec: ParameterSpec, found: Mapping[str, nn.Parameter]) -> ParameterSpec:
        """The spec of a parameter as it is now."""
        name, own = spec.name, self._own[spec.name]
        parameter = next(iter(found.values()))
        if any(p is not parameter for p in found.values()):
            raise ValueError(
                f"parallelize: {' and '.join(found)} were one parameter and are no longer; untie them before "
                "parallelize"
            )
        if parameter is not own and not is_alike(parameter, own):
            raise ValueError(
                f"parallelize: parameter {name} was replaced by one that is not laid out on the mesh; "
                f"write the new values into it (load_state_dict({{{name!r}: value}}, strict=False)), "
                "or replace it before parallelize"
            )
        if parameter.device.type != self._devices[name]:
            raise ValueError(f"parallelize: parameter {name} must stay on its mesh, found it on {parameter.device}")
        self._own[name] = parameter
        return dataclasses.replace(spec, dtype=parameter.dtype, requires_grad=parameter.requires_grad)


def _ids(values: Iterable[Any]) -> list[int]:
    return list(map(id, values))
