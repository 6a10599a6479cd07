"""Workspace of a Python function: the memory beyond its operands and results, measured on tensors without values."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from autopar.adapters.copying.fake import new_mode


def workspace_bytes(function: Callable[..., Any], given: Mapping[str, Any], fake: bool = True) -> int:
    """Peak bytes of the storages that a function allocates, without those of its results. ``given``: its arguments, in
    order; only shapes, strides and dtypes of tensors matter. Values that it reads from tensors are 0. fake: its tensors
    say that they are on the CPU; otherwise they are on meta, where an operator takes a tenth of the time."""
    device: AbstractContextManager[Any] = new_mode() if fake else torch.device("meta")
    with device, torch.no_grad():
        operands = tree_map_only(Tensor, _like, dict(given))
        with _Alive(x for x in tree_leaves(operands) if isinstance(x, Tensor)) as alive:
            results = function(*operands.values())
    made = {id(x.untyped_storage()): x.untyped_storage().nbytes() for x in tree_leaves(results)}
    return max(alive.most - sum(made.values()), 0)


def _like(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)


class _Alive(TorchDispatchMode):
    """``most``: see `workspace_bytes`, results included."""

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()
        self.most = self._now = 0
        self._given = {id(s): s for s in (x.untyped_storage() for x in given)}  # kept alive, so that ids are not reused
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0
        out = func(*args, **(kwargs or {}))
        for x in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(x, Tensor):
                self._add(x.untyped_storage())
        self.most = max(self.most, self._now)
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._given or key in self._made:
            return

        def freed(_: object) -> None:
            del self._made[key]
            self._now -= size

        self._made[key] = weakref.ref(storage, freed)
        self._now += size
