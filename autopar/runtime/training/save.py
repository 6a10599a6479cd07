"""`autopar.save`: one call saves everything that a run needs to resume, synchronously or in the background.

    together   every rank collects what it holds; an error of one rank is raised on all
    agree      check that step, options and replicated states are equal on all ranks
    rank 0     create a folder beside the checkpoints, under a lock
    each rank  write its share of the pieces into one file and sync it  on a thread: asynchronous=True
    rank 0     when all have written: the manifest, the rename, `latest`    on a thread: asynchronous=True

A background save first copies the tensors, before the next optimizer step changes them. Tensors are named

    model.*          parameters, and buffers                     optimizer.0.state.*   states of optimizers
    gradients.*      those that no step has used yet             optimizer.0.group.*   options that are tensors
    average.0.*      of `autopar.ema`                            extra.*, part.3.*     the user's
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.runtime.checkpoint.checkpoint_dir import CheckpointDir
from autopar.runtime.checkpoint.json_tree import encoded
from autopar.runtime.checkpoint.optimizer_state import class_of, names_by_group, options_of, states_of
from autopar.runtime.checkpoint.staging import Slots, StagedFile, slots_of
from autopar.runtime.checkpoint.tensor_storage import (
    Piece,
    TensorToSave,
    file_layout,
    file_of,
    pieces_of,
    written_here,
)
from autopar.runtime.consistency.rank_checks import (
    RankCheck,
    agree_on,
    agree_on_arguments,
    all_alike,
    everywhere,
    on_first_rank,
    raise_on_all_ranks,
)
from autopar.runtime.consistency.tensor_hash import hashes_of
from autopar.runtime.fault.errors import error_context
from autopar.runtime.mesh.host_copies import host_copies_arrived
from autopar.runtime.mesh.process_groups import Groups
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.module.state_dict import RankState
from autopar.runtime.optim.step_hooks import is_pending
from autopar.runtime.params.dtensor_layout import is_here, shards_of
from autopar.runtime.params.parameters import local_tensor
from autopar.runtime.training.async_save import AsyncSave, SaveTarget, wait_for_save
from autopar.runtime.training.disk_save import DiskSave
from autopar.runtime.training.memory_save import MemorySave, check_still_ours, disk_order, memory_run
from autopar.values import a_path, byte_count, whole_number, yes_or_no

# --- the contents of a run -------------------------------------------------------------------------------------


@dataclass
class CheckpointContents:
    """What this rank saves of the run. ``small``: replicated tensors by key, to compare them between ranks."""

    entries: list[TensorToSave] = field(default_factory=list)
    common: dict[str, Any] = field(default_factory=dict)
    of_stage: dict[str, Any] = field(default_factory=dict)
    extra: Any = None
    small: dict[str, Tensor] = field(default_factory=dict)
    stage_small: dict[str, Tensor] = field(default_factory=dict)
    extra_tensors: dict[str, Tensor] = field(default_factory=dict)
    unstable: bool = False  # a training step would change some of the tensors

    def add_extra(self, part: int | None, writes: bool) -> None:
        """Add the tensors of ``extra``, once it is known whether they are equal on all ranks (``part`` None)."""
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
    """Collect everything of a run that is saved. Not collective. Raises ValueError for values that cannot be saved."""
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
            raise ValueError(f"save: {key} is a DTensor, which another mesh could not read; pass x.full_tensor()")
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
    """Add a tensor that is replicated on all ranks; a copy, since a step or the user may change it."""
    copy = local_tensor(x).clone()
    parts.small[key] = copy
    parts.entries.append(TensorToSave(key, copy))


def _extra(parts: CheckpointContents, at: str, x: Tensor) -> str:
    if isinstance(x, DTensor):
        raise ValueError(f"save: {at} is a DTensor, which another mesh could not read; pass x.full_tensor()")
    key = at.removeprefix("extra.")
    parts.extra_tensors[key] = x.detach().clone()
    return key


_LITTLE = 2**16  # bytes up to which a tensor on the host is hashed directly


def digest(told: Any, tensors: Mapping[str, Tensor]) -> str:
    """A digest of values in JSON and of tensors by key."""
    found = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
    large = {}
    for key, x in sorted(tensors.items()):
        found.update(f"{key} {x.dtype} {tuple(x.shape)} ".encode())
        if x.device.type == "cpu" and x.nbytes <= _LITTLE and x.numel():
            found.update(x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif x.numel():
            large[key] = x.detach()
    if large:
        found.update(json.dumps(hashes_of(large)).encode())
    return found.hexdigest()[:16]


# --- saving ----------------------------------------------------------------------------------------------------


def save(
    folder: str | Path,
    model: ParallelModule,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    *,
    scheduler: Any = (),
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    asynchronous: bool = False,
    host_memory: int | None = None,
    memory: bool = False,
) -> AsyncSave:
    """Save a run into its folder as a new checkpoint. Collective.

    A checkpoint contains the model's parameters, buffers, number of training steps and seed; the states of optimizers
    by parameter name; gradients that no optimizer step has used yet; the scale of `autopar.GradScaler` and the averages
    of `autopar.ema` for this model; and the plan. `autopar.load` reads it on any mesh.

    Args:
        folder: the folder of the run, used by this job only, on a file system shared by all ranks.
        optimizer, scheduler: one or several.
        step: names the checkpoint; default: the model's number of training steps.
        extra: other values of the run: tensors, numbers, strings, lists and dicts of these, and objects with a
            ``state_dict``, such as data loaders. Equal on all ranks, or on all ranks with the same shard of the batch.
        keep: number of latest checkpoints to keep; None: all.
        asynchronous: return before the data is copied and written. The next optimizer step waits until everything is
            copied. ``wait()`` of the returned object, or the next save or load, raises errors.
        host_memory: bytes for copies per rank; default: half of the free memory, shared by the ranks of a machine. If a
            rank's share does not fit, the next optimizer step waits until the rest has been written.
        memory: save into host memory instead of the disk: into that of the rank's own node, and of the next one.
            `autopar.load` takes it after a restart if it is newer than what is on disk and complete, which it is as
            long as one of each two neighbouring nodes is left. Always asynchronous. A failure is a warning.

    Raises ValueError for values that cannot be saved, CheckpointError if writing fails: on all ranks; the previous
    checkpoint is unchanged.
    """
    if not isinstance(model, ParallelModule):
        raise ValueError(f"save: needs a model made by autopar.parallelize, found a {type(model).__name__}")
    optimizers, schedulers = several("optimizer", optimizer), several("scheduler", scheduler)
    with error_context("save"), torch.inference_mode(False), torch.no_grad():  # inference tensors have no versions
        path = Path(os.path.abspath(a_path("folder", folder)))
        keep = None if keep is None else whole_number("keep", keep, 1)
        limit = None if host_memory is None else byte_count("host_memory", host_memory)
        yes_or_no("asynchronous", asynchronous)
        yes_or_no("memory", memory)
        held = model.held()
        groups, chosen = held.groups, whole_number("step", held.training_steps if step is None else step)
        options = {"asynchronous": asynchronous, "keep": keep, "extra": sorted(map(str, extra or {})), "memory": memory}
        if memory:
            _check_options_of_memory(keep, host_memory, held)
        agree_on_arguments(groups, "save", options, owed=held.owed)
        wait_for_save()
        host_copies_arrived()

        def collect() -> CheckpointContents:
            if memory and groups.rank == 0:
                check_still_ours(held.line, path)
            return _checked_parts(held, optimizers, schedulers, chosen, extra or {})

        parts = raise_on_all_ranks(groups, "save", collect)
        _agree(groups, parts, str(path))
        target: SaveTarget
        if memory:
            target = _memory_target(path, held, parts)
        else:
            copies = asynchronous or groups.device.type != "cpu"
            slots = slots_of(limit, groups.device.type == "cuda") if copies else None
            target = _disk_target(path, held, parts, chosen, slots, keep)
        made = AsyncSave(groups, target)
        if memory or asynchronous:
            made.start()
            if parts.unstable:
                made.wait_staged()  # the next backward would add to the gradients
        else:
            made.run()
            wait_for_save()
    return made


def _check_options_of_memory(keep: int | None, host_memory: int | None, held: RankState) -> None:
    given = "keep" if keep is not None else "host_memory" if host_memory is not None else ""
    if given:
        raise ValueError(
            f"{given}: of saves to the disk, found it with memory=True, which keeps two generations and writes without "
            "further copies; leave it out"
        )
    if held.line.shared:
        raise ValueError(
            "memory: of runs in one world, found replicas, which have each other's state already; save to the disk"
        )


def _disk_target(
    folder: Path, held: RankState, parts: CheckpointContents, step: int, slots: Slots | None, keep: int | None
) -> DiskSave:
    """A draft in the folder of the run, and this rank's file in it. Collective."""
    groups, run = held.groups, CheckpointDir(folder, held.line)
    try:
        draft = Path(on_first_rank(groups, "save", lambda: str(run.begin(step))))
        head, pieces, told = _share(parts, groups)
        file = draft / file_of(groups.rank)
        staged = raise_on_all_ranks(groups, "save", lambda: StagedFile(file, head, pieces, slots))
    except BaseException:
        if groups.rank == 0:
            run.discard()
            run.close()
        raise
    return DiskSave(groups, run, draft, staged, told, parts.common, keep)


def _memory_target(folder: Path, held: RankState, parts: CheckpointContents) -> MemorySave:
    """Files in memory. Collective at the first call."""
    groups, line, first = held.groups, held.line, held.groups.rank == 0
    run = memory_run(groups, line, folder)
    common = {**parts.common, "run": line.name} if first else {}
    after = disk_order(line, folder) if first else 0
    return MemorySave(groups, run, *_share(parts, groups), common, after)


def _share(parts: CheckpointContents, groups: Groups) -> tuple[bytes, list[Piece], dict[str, Any]]:
    """What this rank writes: the head of its file, the pieces, and its part of the manifest."""
    pieces = pieces_of(written_here(parts.entries, groups))
    head, index = file_layout(pieces, file_of(groups.rank))
    of_stage = parts.of_stage if groups.is_first_of_stage else {}
    return head, pieces, {"index": index, "of_stage": of_stage, "extra": parts.extra}


def several(name: str, given: Any) -> list[Any]:
    """One object, or a list of them, each with a ``state_dict``. Raises ValueError."""
    found = list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]
    for x in found:
        if not callable(getattr(x, "state_dict", None)) or (name == "optimizer" and not isinstance(x, Optimizer)):
            raise ValueError(f"{name}: needs one of torch, or several, found a {type(x).__name__}")
    return found


def _checked_parts(
    held: RankState, optimizers: Sequence[Optimizer], schedulers: Sequence[Any], step: int, extra: Mapping[str, Any]
) -> CheckpointContents:
    if not held.loaded:
        raise ValueError(
            "save: needs weights, found a model that was built without them (meta device); load them first"
        )
    if held.scaler is not None and held.scaler.in_a_step:
        raise ValueError("save: the scaler is between unscale_ and update; call scaler.update() first")
    if not isinstance(extra, Mapping) or not all(isinstance(name, str) for name in extra):
        raise ValueError("extra: needs names with values, such as {'loader': loader}")
    return parts_of_run(held, optimizers, schedulers, step, extra)


def _agree(groups: Groups, parts: CheckpointContents, folder: str) -> None:
    """Check that values which only some ranks write are equal on all of them; find the ranks with equal ``extra``."""
    common = {name: json.dumps(value, sort_keys=True) for name, value in parts.common.items()}
    within = tuple(axis for axis in groups.mesh.sizes if axis != "pp")
    claims = [
        RankCheck(everywhere(groups), {"folder": folder, **common, "tensors": digest(None, parts.small)},
              "save: every rank must save the same run", "call it with the same arguments on every rank"),
        RankCheck(within, {"states": digest(parts.of_stage, parts.stage_small)},
              "save: ranks that step the same parameters must have the same states of optimizers",
              "step optimizers the same way on every rank"),
    ]  # fmt: skip
    agree_on(groups, claims, "save")
    told = digest(parts.extra, parts.extra_tensors)
    if not parts.extra["dict"] or all_alike(groups, "save: extra", told):
        parts.add_extra(None, writes=False)
        parts.extra = {"part": None, "tree": parts.extra} if groups.rank == 0 else {}
        return
    data = {axis for axis in ("dp", "dp_replicate") if axis in groups.mesh.sizes}
    others = tuple(axis for axis in groups.mesh.sizes if axis not in data)
    need = "save: ranks with the same shard of the batch must pass the same extra"
    agree_on(
        groups, [RankCheck(others, {"extra": told}, need, "pass equal values on these ranks")], "save: extra by part"
    )
    first = all(groups.coordinate[axis] == 0 for axis in others)
    part = groups.mesh.dp_rank_and_size(groups.coordinate)
    parts.add_extra(part, writes=first)
    parts.extra = {"part": part, "tree": parts.extra} if first else {}
