"""What the user passes to a step: arguments by name, what a compiled step depends on, tensors by path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.adapters.export import flatten, one_level, paths, unflatten
from autopar.runtime.groups import Groups, agree


def facts_of(batch: Mapping[str, Any]) -> tuple[str, ...]:
    """What a compiled step depends on: shapes and dtypes of tensors, values of everything else, how they are nested."""
    return tuple(f"{name}: {described(value)}" for name, value in batch.items())


def described(value: Any) -> str:
    """A nested value in words, its tensors by dtype and shape: (float32 [2, 3], {'mask': None})"""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    children, kind = one_level(value)
    if kind is None:
        return repr(value)
    inside = list(map(described, children))
    if isinstance(kind, tuple):  # the keys of a dict
        return "{" + ", ".join(f"{key!r}: {child}" for key, child in zip(kind, inside, strict=True)) + "}"
    opening, closing = {"tuple": ("(", ")"), "list": ("[", "]")}.get(kind, (f"{kind}(", ")"))
    return f"{opening}{', '.join(inside)}{closing}"


def shapes_of(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with its tensors on the meta device."""
    leaves, spec = flatten(batch)
    out: dict[str, Any] = unflatten([_shape(x) if isinstance(x, Tensor) else x for x in leaves], spec)
    return out


def _shape(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def tensors_of(batch: Any) -> dict[str, Tensor]:
    """Tensors of a nested batch by path: {'past': (a, b)} -> past.0, past.1."""
    return {path: x for path, x in paths(batch) if isinstance(x, Tensor)}


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
