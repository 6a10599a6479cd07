"""What a run consists of, as it is saved: tensors to write, and values in JSON.

    model.*          parameters, and buffers                     optimizer.0.state.*   what optimizers keep of them
    gradients.*      those that no step has been made with yet   optimizer.0.group.*   options that are tensors
    average.0.*      of `autopar.ema`                            extra.*, part.3.*     the user's

Values that all ranks hold alike are in `CheckpointContents.common`. Those of a stage's parameters are in ``of_stage``,
for all of its ranks alike. ``of_part`` is what ranks that are given the same part of the batch hold alike, such as the
position of a data loader.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.runtime.checkpoint.json_tree import encoded
from autopar.runtime.checkpoint.optimizer_state import class_of, names_by_group, options_of, states_of
from autopar.runtime.checkpoint.tensor_storage import TensorToSave
from autopar.runtime.consistency.tensor_hash import words_of
from autopar.runtime.module.state_dict import RankState
from autopar.runtime.optim.step_events import is_pending
from autopar.runtime.params.dtensor_layout import is_here, shards_of
from autopar.runtime.params.parameters import local_tensor


@dataclass
class CheckpointContents:
    """What this rank knows of the run. ``small``: tensors of which each rank holds a copy, by key, to compare them."""

    entries: list[TensorToSave] = field(default_factory=list)
    common: dict[str, Any] = field(default_factory=dict)
    of_stage: dict[str, Any] = field(default_factory=dict)
    extra: Any = None
    small: dict[str, Tensor] = field(default_factory=dict)
    stage_small: dict[str, Tensor] = field(default_factory=dict)
    extra_tensors: dict[str, Tensor] = field(default_factory=dict)
    unstable: bool = False  # a training step would change some of the tensors

    def add_extra(self, part: int | None, writes: bool) -> None:
        """Once it is known whether all ranks hold it alike (``part`` None): its tensors, and where they are."""
        prefix = "extra" if part is None else f"part.{part}"
        for key, x in self.extra_tensors.items():
            if part is None or writes:
                self.entries.append(TensorToSave(f"{prefix}.{key}", x, stage=0 if part is None else None))


def parts_of_run(
    held: RankState,
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[Any],
    step: int,
    extra: Mapping[str, Any],
) -> CheckpointContents:
    """Everything of a run that is to be saved. Not collective. Raises ValueError for what cannot be."""
    parts = CheckpointContents()
    own, owner = held.own, {s.name: s.ranks[0] for s in held.specs}
    here = {name for name, p in own.items() if is_here(p)}

    def add(key: str, x: Tensor, name: str) -> None:
        cut = frozenset(axis for axis, _ in shards_of(x)) if isinstance(x, DTensor) else frozenset[str]()
        parts.entries.append(TensorToSave(key, x, cut, owner[name]))

    for name, p in own.items():
        add(f"model.{name}", p.detach(), name)
    for name, buffer in held.buffers.items():
        _copy_of_all(parts, f"model.{name}", buffer)
    with_gradient = {n: p for n, p in own.items() if p.grad is not None}
    if any(is_pending(held.last_use, optimizer) for optimizer in optimizers):
        for name, p in with_gradient.items():
            add(f"gradients.{name}", p.grad, name)  # type: ignore[arg-type]
        parts.unstable = bool(with_gradient)
    for i, average in enumerate(held.averages):
        for name, x in average.laid_out().items():
            add(f"average.{i}.{held.canonical[name]}", x, held.canonical[name])

    def put_common(key: str, x: Tensor) -> str:
        if isinstance(x, DTensor):
            raise ValueError(f"save: {key} is a DTensor, which another mesh could not read; give x.full_tensor()")
        _copy_of_all(parts, key, x)
        return key

    told, of_stage = [], []
    for i, optimizer in enumerate(optimizers):

        def put(key: str, x: Tensor, name: str, laid_out: bool) -> str:
            if not laid_out:
                parts.stage_small[key] = x
            add(key, x, name)
            return key

        at = f"optimizer.{i}"
        names = names_by_group(optimizer, own)
        told.append({"kind": class_of(optimizer), "options": options_of(optimizer, put_common, at)})
        states = states_of(optimizer, {n: own[n] for group in names for n in group if n in here}, put, at)
        of_stage.append({"names": names, "states": states})
    parts.of_stage = {"optimizers": of_stage}

    parts.common = {
        "step": step,
        "training_steps": held.training_steps,
        "seed": held.seed,
        "mesh": dict(held.groups.mesh.axes),
        "plan": json.loads(held.plan.to_json()),
        "parameters": {s.name: list(s.aliases) for s in held.specs},
        "buffers": sorted(held.buffers),
        "optimizers": told,
        "schedulers": [encoded(s.state_dict(), put_common, f"scheduler.{i}") for i, s in enumerate(schedulers)],
        "extra_states": {
            path: encoded(m.get_extra_state(), put_common, f"extra_state.{path}") for path, m in held.stateful.items()
        },
        "scaler": held.scaler.state_dict() if held.scaler is not None else {},
        "averages": [{"decay": a.decay, "updates": a.updates} for a in held.averages],
    }
    parts.extra = encoded(dict(extra), lambda key, x: _extra(parts, key, x), "extra")
    return parts


def _copy_of_all(parts: CheckpointContents, key: str, x: Tensor) -> None:
    """All ranks hold it alike; a copy, since a step or the user may change it."""
    copy = local_tensor(x).clone()
    parts.small[key] = copy
    parts.entries.append(TensorToSave(key, copy))


def _extra(parts: CheckpointContents, at: str, x: Tensor) -> str:
    if isinstance(x, DTensor):
        raise ValueError(f"save: {at} is a DTensor, which another mesh could not read; give x.full_tensor()")
    key = at.removeprefix("extra.")
    parts.extra_tensors[key] = x.detach().clone()
    return key


_LITTLE = 2**16  # bytes of a tensor on the host that are hashed as such


def digest(told: Any, tensors: Mapping[str, Tensor]) -> str:
    """Of values in JSON, and of tensors by key."""
    found = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
    large = {}
    for key, x in sorted(tensors.items()):
        found.update(f"{key} {x.dtype} {tuple(x.shape)} ".encode())
        if x.device.type == "cpu" and x.nbytes <= _LITTLE and x.numel():
            found.update(x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif x.numel():
            large[key] = x.detach()
    if large:
        found.update(json.dumps(words_of(large)).encode())
    return found.hexdigest()[:16]
