"""What the user passes to a step: arguments by name, what a compiled step depends on, tensors by path."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.adapters.export import flatten, unflatten
from autopar.runtime.groups import Groups, agree


def by_name(model: nn.Module, args: tuple[Any, ...], batch: dict[str, Any]) -> dict[str, Any]:
    """Positional arguments by their names in the model's forward."""
    if not args:
        return batch
    names = [n for n, p in inspect.signature(model.forward).parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(args) > len(names):
        raise ValueError(f"model: its forward takes {len(names)} positional arguments, found {len(args)}")
    return {**dict(zip(names, args, strict=False)), **batch}


def facts_of(batch: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a compiled step depends on: shapes and dtypes of tensors, values of everything else."""
    leaves, spec = flatten(dict(batch))
    facts = tuple((tuple(x.shape), str(x.dtype)) if isinstance(x, Tensor) else repr(x) for x in leaves)
    return (*facts, str(spec))


def shapes_of(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with its tensors on the meta device."""
    leaves, spec = flatten(batch)
    out: dict[str, Any] = unflatten([x.to("meta") if isinstance(x, Tensor) else x for x in leaves], spec)
    return out


def tensors_of(batch: Any, path: str = "") -> dict[str, Tensor]:
    """Tensors of a nested batch by path: {'past': (a, b)} -> past.0, past.1."""
    if isinstance(batch, Tensor):
        return {path: batch}
    items = (
        batch.items() if isinstance(batch, Mapping) else enumerate(batch) if isinstance(batch, (tuple, list)) else ()
    )
    out: dict[str, Tensor] = {}
    for key, value in items:
        out |= tensors_of(value, f"{path}.{key}" if path else str(key))
    return out


# --- the same contents on the ranks that share a sequence -----------------------------------------------


def agree_on_contents(groups: Groups, batch: Mapping[str, Any]) -> None:
    """The ranks of axis "cp" must hold the same tokens, positions and masks: each of them cuts its own piece out of
    what it was given, and reads from its own copy where documents and padding lie.

    Raises the same ValueError on each of them.
    """
    if groups.mesh.size("cp") > 1:
        agree(
            groups,
            ", ".join(f"{name} {word & 0xFFFFFFFF:08x}" for name, word in _words_of(batch).items()),
            "the contents of the batch",
            axis="cp",
            need='context_parallel: the ranks of axis "cp" must be given the same batch',
            way_out="feed every rank of this axis the whole sequences of its dp coordinate; they are cut here",
        )


def _words_of(batch: Mapping[str, Any]) -> dict[str, int]:
    """A number for the contents of each tensor of integers or bools; they are moved off a device at once."""
    tensors = {n: x for n, x in tensors_of(batch).items() if not (x.is_floating_point() or x.is_complex())}
    out: dict[str, int] = {}
    for device in {x.device for x in tensors.values()}:
        here = {name: _word(x) for name, x in tensors.items() if x.device == device}
        out |= dict(zip(here, torch.stack(list(here.values())).tolist()))
    return {name: out[name] for name in tensors}


def _word(x: Tensor) -> Tensor:
    """sum(x[i] * weight[i]) in 64 bits that wrap around; the weights are the finalizer of splitmix64 of i, so that
    contents with a regular difference, such as shifted documents, have different sums."""
    weight = torch.arange(1, x.numel() + 1, device=x.device) * (0x9E3779B97F4A7C15 - (1 << 64))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        weight = (weight ^ (weight >> shift)) * (factor - (1 << 64))
    return (x.reshape(-1).to(torch.int64) * (weight ^ (weight >> 31))).sum()
