"""`autopar.load`: resumes a run from a checkpoint of `autopar.save`, on any mesh.

Rank 0 chooses the checkpoint. Every rank checks that it fits, reads everything beside the model, verifies the checksums
of the model's tensors, and passes their states to schedulers and the user's objects; if one of these refuses, they get
their old states back. Up to this point nothing is changed, and all ranks agree that nothing is wrong. Then each rank
fills the model's tensors and puts the rest in place.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from autopar.errors import is_refusal
from autopar.runtime.checkpoint.checkpoint_dir import (
    MANIFEST,
    MemoryRun,
    SavedStep,
    checkpoint_at,
    holds_checkpoints,
    newest_in,
    read_manifest,
)
from autopar.runtime.checkpoint.json_tree import decoded, names_with_values
from autopar.runtime.checkpoint.memory_folder import token_of
from autopar.runtime.checkpoint.optimizer_state import Restored, class_of
from autopar.runtime.checkpoint.tensor_storage import SavedTensors
from autopar.runtime.consistency.rank_checks import agree_on_arguments, on_first_rank, raise_on_all_ranks
from autopar.runtime.fault.error_propagation import CheckpointError
from autopar.runtime.fault.errors import error_context
from autopar.runtime.mesh.host_copies import host_copies_arrived
from autopar.runtime.mesh.process_groups import Groups
from autopar.runtime.module.argument_checks import MOST_SEED
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.module.state_dict import RankState
from autopar.runtime.optim.step_hooks import note_step
from autopar.runtime.params.parameters import MOST_STEPS, other_kind
from autopar.runtime.training.async_save import wait_for_save
from autopar.runtime.training.memory_load import MemoryReads, MemoryTensors, found_in_memory
from autopar.runtime.training.save import several
from autopar.values import a_path

_MOST_SHOWN = 8


@dataclass(frozen=True)
class Loaded:
    """The result of `load`: the path of the checkpoint, its step, and the values saved as ``extra``. ``plan`` and
    ``mesh`` (its axes) are those of the run that saved it. ``memory``: whether it was in host memory
    (`autopar.save(memory=True)`). Of a run without a checkpoint: its folder, step 0, and nothing else."""

    folder: Path
    step: int
    extra: dict[str, Any]
    mesh: dict[str, int]
    plan: dict[str, Any] = field(repr=False)
    memory: bool = False


def load(
    folder: str | Path,
    model: ParallelModule,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    *,
    scheduler: Any = (),
    extra: Mapping[str, Any] | None = None,
    missing_ok: bool = False,
) -> Loaded:
    """Load a checkpoint of `autopar.save`. ``folder``: a checkpoint, or the folder of a run, of which the latest
    checkpoint is loaded, on disk or in the memory of the nodes that are left. Collective.

    The mesh, ``zero``, the precision and the number of stages may differ from those of the run that saved it. Averages
    of `autopar.ema` and the `autopar.GradScaler` of the model are loaded with it.

    Args:
        optimizer, scheduler: as they were saved, in the same order; they need not have made a step. If they are left
            out, their states are not loaded.
        extra: objects with ``load_state_dict``, such as data loaders, by the names under which they were saved.
        missing_ok: whether a run may have no checkpoint yet; then nothing is changed, and the step is 0.

    Raises ValueError, on all ranks and before anything is changed, if there is no checkpoint, or it is damaged, of a
    newer format or of another model. Raises CheckpointError if reading fails or a checksum differs, also before
    anything is changed, unless a disk fails in the last phase: then load the model again.
    """
    if not isinstance(model, ParallelModule):
        raise ValueError(f"load: needs a model made by autopar.parallelize, found a {type(model).__name__}")
    optimizers, schedulers = several("optimizer", optimizer), several("scheduler", scheduler)
    with error_context("load"), torch.inference_mode(False), torch.no_grad():
        path, held = Path(os.path.abspath(a_path("folder", folder))), model.held()
        groups = held.groups
        given = {"optimizers": list(map(class_of, optimizers)), "schedulers": len(schedulers)}
        given |= {"folder": str(path), "extra": sorted(map(str, extra or {})), "missing_ok": bool(missing_ok)}
        agree_on_arguments(groups, "load", given, owed=held.owed)
        wait_for_save()
        host_copies_arrived()
        newest: list[SavedStep | None] = []  # on rank 0 only, which needs it to save
        chosen = json.loads(on_first_rank(groups, "load", functools.partial(_chosen, path, newest, missing_ok)))
        run_folder = path if chosen["is_run"] else path.parent

        def put(checkpoint: Path, read: Callable[[], tuple[Mapping[str, Any], SavedTensors]], memory: bool) -> Loaded:
            make = lambda: Loading(str(checkpoint), *read(), held, optimizers, schedulers, extra or {})  # noqa: E731
            loading = put_in_place(model, optimizers, make)
            held.line.name = loading.run or held.line.name
            held.line.seen[run_folder.resolve()] = newest[0] if newest else None
            return Loaded(checkpoint, loading.counts["step"], loading.extra, *loading.of_run, memory)

        if chosen["token"]:
            loaded, run = _load_from_memory(groups, chosen, put)
            held.line.memory[path] = run
            if loaded is not None:
                return loaded
        if chosen["error"]:
            raise ValueError(chosen["error"])
        if not chosen["disk"]:
            return Loaded(path, 0, {}, {}, {})
        checkpoint = Path(chosen["disk"])

        def read() -> tuple[Mapping[str, Any], SavedTensors]:
            manifest = read_manifest(checkpoint)
            return manifest, SavedTensors(checkpoint, manifest)

        return put(checkpoint, read, False)


Put = Callable[[Path, Callable[[], tuple[Mapping[str, Any], SavedTensors]], bool], Loaded]


def _load_from_memory(groups: Groups, chosen: Mapping[str, Any], put: Put) -> tuple[Loaded | None, MemoryRun]:
    """The newest memory checkpoint of a run, put in place; None if none is complete and undamaged, or the disk has a
    newer one. And what this rank then knows of them. Collective."""
    found = found_in_memory(groups, chosen["token"], chosen["order"])
    run = MemoryRun(chosen["token"], found.generation, found.order)
    loaded, why = None, f"{found.apart} are on no node that is left" if found.apart else ""
    if found.generation:
        with contextlib.ExitStack() as stack:
            try:
                reads = stack.enter_context(MemoryReads(groups, run.token, found))
                manifest = raise_on_all_ranks(groups, "load", reads.manifest)
                reads.answer()
                name = found.generation
                read = lambda: (manifest, MemoryTensors(reads, name, manifest))  # noqa: E731
                loaded = put(reads.memory.folder / name, read, True)
            except (ValueError, CheckpointError) as error:
                if chosen["error"] or not chosen["disk"]:
                    raise
                run.complete, why = "", str(error).removeprefix("load: ")
    if why and groups.rank == 0:
        took = f"memory, step {loaded.step}" if loaded is not None else chosen["disk"] or "nothing"
        warnings.warn(f"load: of the newest checkpoint in memory, {why}; loaded from {took}", stacklevel=3)
    return loaded, run


def put_in_place(model: ParallelModule, optimizers: Sequence[Optimizer], make: Callable[[], Loading]) -> Loading:
    """Put a state in place, once all ranks have found that it fits. Collective. Raises the errors of `Loading`."""
    groups = model.held().groups
    loading = raise_on_all_ranks(groups, "load", make)
    raise_on_all_ranks(groups, "load", loading.read)
    try:
        raise_on_all_ranks(groups, "load", loading.give_states)
    except Exception:
        loading.take_states_back()
        raise
    model.begin_loading()
    raise_on_all_ranks(groups, "load", loading.fill)
    loading.put()
    counts = loading.counts
    model.end_loading(counts["training_steps"], counts["seed"], bool(loading.gradients))
    if not loading.gradients:
        for optimizer in optimizers:
            note_step(optimizer)
    return loading


def _chosen(folder: Path, newest: list[SavedStep | None], missing_ok: bool) -> str:
    """On rank 0, as JSON: the path of the checkpoint on disk to load ("": none, which is fine; or "error" says why that
    is not), the number of the newest one, and the token of the memory checkpoints of the run ("": none)."""
    is_run, order = not (folder / MANIFEST).is_file(), 0
    token = token_of(folder) if is_run else ""
    with contextlib.suppress(OSError):  # raised for a folder that this run cannot save into either
        newest.append(newest_in(folder if is_run else folder.parent))
        order = newest[0].order if newest[0] is not None else 0
    found, error = "", ""
    if not (missing_ok and not holds_checkpoints(folder)):
        try:
            path, warning = checkpoint_at(folder)
        except ValueError as refusal:
            if not token:
                raise
            error = str(refusal)
        else:
            found = str(path)
            if warning:
                warnings.warn(f"load: {warning}", stacklevel=2)
    return json.dumps({"disk": found, "order": order, "token": token, "is_run": is_run, "error": error})


class Loading:
    """One load on this rank: the constructor checks, `read` and `fill` read tensors, `put` puts states in place.
    ``checkpoint``: its name in errors. ``saved``: its tensors; for the interface see `SavedTensors`."""

    def __init__(
        self,
        checkpoint: str,
        manifest: Mapping[str, Any],
        saved: Any,
        held: RankState,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[Any],
        stateful: Mapping[str, Any],
    ) -> None:
        self.manifest, self._saved, self._held = manifest, saved, held
        self._schedulers, self._stateful = schedulers, stateful
        self._before: list[tuple[Callable[[Any], Any], Any]] = []
        with _in_words(f"the manifest of {checkpoint} is damaged"):
            self.counts = {name: _whole(self.manifest[name], name, *bounds) for name, bounds in _COUNTS.items()}
            self.run = self.manifest.get("run", "")
            if re.fullmatch(r"\w*", self.run, re.ASCII) is None:
                raise ValueError(f"run is {self.run!r:.40}, needs a name")
            self._where = self._names()
            self._targets = self._of_model() + self._of_averages()
            self._restored = self._of_optimizers(optimizers)
            self._scheduler_states = self._of_schedulers()
            self.gradients = self._of_gradients()
            self._parts = {told["part"]: told["tree"] for told in self.manifest["extra"]}
            self._check_extra()
            self._extra_prefix = "extra" if None in self._parts else f"part.{self._part}"
            self._options = [f"optimizer.{i}.group." for i in range(len(optimizers))]
            self.of_run = dict(self.manifest["mesh"]), dict(self.manifest["plan"])
            self._updates = [_whole(told["updates"], "updates") for told in self.manifest["averages"]]
            if held.scaler is not None and self.manifest["scaler"]:
                held.scaler.check_state(self.manifest["scaler"])
        used = {key for key, _ in self._all_targets()}
        missing = [key for key in used if key not in self._saved]
        if missing:
            raise ValueError(f"load: {checkpoint} has no tensor {missing[0]} (damaged); load an older one")
        self._saved.check(
            [*used, *self._saved.under(f"{self._extra_prefix}.", "scheduler.", "extra_state.", *self._options)]
        )

    def _all_targets(self) -> Iterable[tuple[str, Tensor]]:
        yield from self._targets
        yield from self.gradients
        for restored in self._restored:
            yield from restored.targets

    # --- does it fit? -----------------------------------------------------------------------------------------

    def _names(self) -> dict[str, str]:
        """Own name of each parameter -> its name in the checkpoint: a tied parameter may have any of its names. Raises
        ValueError for a checkpoint of another model."""
        told: dict[str, list[str]] = self.manifest["parameters"]
        known = {name: first for first, aliases in told.items() for name in (first, *aliases)}
        where, problems, used = {}, [], set()
        for spec in self._held.specs:
            name = next((known[n] for n in (spec.name, *spec.aliases) if n in known), None)
            if name is None:
                problems.append(f"missing {spec.name}")
                continue
            where[spec.name] = name
            used.add(name)
            problems += self._unlike(f"model.{name}", tuple(spec.shape), spec.dtype)
        problems += [f"unexpected {name}" for name in told if name not in used]
        buffers = set(self.manifest["buffers"])
        for name, buffer in self._held.buffers.items():
            if name not in buffers:
                problems.append(f"missing {name}")
            else:
                problems += self._unlike(f"model.{name}", tuple(buffer.shape), buffer.dtype)
        problems += [f"unexpected {name}" for name in sorted(buffers - self._held.buffers.keys())]
        if problems:
            listed = "; ".join(problems[:_MOST_SHOWN])
            more = f"; and {len(problems) - _MOST_SHOWN} more" if len(problems) > _MOST_SHOWN else ""
            raise ValueError(
                f"load: the checkpoint is of another model: {listed}{more}; build the same model that was saved"
            )
        return where

    def _unlike(self, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> list[str]:
        name, saved = key.removeprefix("model."), self._saved
        if key not in saved:
            return [f"missing {name}"]
        if saved.shapes[key] != shape:
            return [f"{name} has shape {saved.shapes[key]}, needs {shape}"]
        return [f"{name} is {saved.dtypes[key]}, needs {dtype}"] if other_kind(saved.dtypes[key], dtype) else []

    def _of_model(self) -> list[tuple[str, Tensor]]:
        held = self._held
        parameters = [(f"model.{self._where[name]}", p.detach()) for name, p in held.own.items()]
        return parameters + [(f"model.{name}", buffer) for name, buffer in held.buffers.items()]

    def _of_averages(self) -> list[tuple[str, Tensor]]:
        told, averages = self.manifest["averages"], self._held.averages
        if len(averages) > len(told):
            raise ValueError(
                f"load: the model has {len(averages)} moving averages, the checkpoint {len(told)}; create further ones "
                "with autopar.ema after loading"
            )
        where, canonical = self._where, self._held.canonical
        return [
            (f"average.{i}.{where[canonical[name]]}", x)
            for i, average in enumerate(averages)
            for name, x in average.laid_out().items()
        ]

    def _of_optimizers(self, optimizers: Sequence[Optimizer]) -> list[Restored]:
        told = self.manifest["optimizers"]
        if optimizers and len(optimizers) != len(told):
            raise ValueError(f"load: the checkpoint has {len(told)} optimizers, found {len(optimizers)}; pass as many")
        device = self._held.groups.device
        return [
            Restored(optimizer, t, self._held.own, self._where, self._saved, device)
            for optimizer, t in zip(optimizers, told)
        ]

    def _of_schedulers(self) -> list[Any]:
        told = self.manifest["schedulers"]
        if self._schedulers and len(self._schedulers) != len(told):
            raise ValueError(
                f"load: the checkpoint has {len(told)} schedulers, found {len(self._schedulers)}; pass as many"
            )
        return list(told) if self._schedulers else []

    def _of_gradients(self) -> list[tuple[str, Tensor]]:
        found = []
        for name, p in self._held.own.items():
            if (key := f"gradients.{self._where[name]}") in self._saved:
                found.append((key, torch.empty_like(p.detach())))
        return found

    def _check_extra(self) -> None:
        parts = {n for n in self._parts if n is not None}
        here = self._held.groups.mesh.data_size
        if parts and len(parts) != here:
            raise ValueError(
                f"load: extra was saved by {len(parts)} data-parallel ranks, found {here}; save a position that is the "
                "same on all ranks, such as the number of samples, or load on as many"
            )
        names = self._tree_of_extra()["dict"]
        for name, x in self._stateful.items():
            if name not in names:
                raise ValueError(f"load: the checkpoint has no extra {name!r}, only {', '.join(names) or 'none'}")
            if not callable(getattr(x, "load_state_dict", None)):
                raise ValueError(
                    f"load: extra {name!r} is a {type(x).__name__}, needs load_state_dict; read plain values from "
                    "the result of load"
                )

    def _tree_of_extra(self) -> Any:
        return self._parts[None] if None in self._parts else self._parts[self._part]

    @property
    def _part(self) -> int:
        groups = self._held.groups
        return groups.mesh.dp_rank_and_size(groups.coordinate)

    # --- reading ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def read(self) -> None:
        """Read everything beside the model into new tensors; verify checksums of the model's tensors."""
        saved = self._saved
        with _in_words(f"{saved.folder} is damaged"):
            saved.read([*self.gradients, *(target for restored in self._restored for target in restored.targets)])
            for restored in self._restored:
                restored.read_options()
            self.extra = decoded(self._tree_of_extra(), lambda key: saved.tensor(f"{self._extra_prefix}.{key}"))
            self._states = [names_with_values(decoded(tree, saved.tensor)) for tree in self._scheduler_states]
            states: Mapping[str, Any] = self.manifest.get("extra_states", {})
            self._extra_states = {path: decoded(tree, saved.tensor) for path, tree in states.items()}
            saved.check_data(self._targets)

    def give_states(self) -> None:
        """Pass states to schedulers, the user's objects and modules with non-tensor state. Raises their errors."""
        given = self._given()
        self._before = [(take, copy.deepcopy(tell())) for tell, take, _ in given if callable(tell)]
        for _, take, state in given:
            take(state)

    def take_states_back(self) -> None:
        for take, state in self._before:
            with contextlib.suppress(Exception):  # an object that refuses its own state keeps what it has
                take(state)

    def _given(self) -> list[tuple[Any, Callable[[Any], Any], Any]]:
        """(function that returns a state, or None; function that loads one; the state to load)"""
        given = [*zip(self._schedulers, self._states), *((x, self.extra[name]) for name, x in self._stateful.items())]
        modules = ((module, self._extra_states.get(path, self)) for path, module in self._held.stateful.items())
        return [
            *((getattr(x, "state_dict", None), x.load_state_dict, state) for x, state in given),
            *((m.get_extra_state, m.set_extra_state, state) for m, state in modules if state is not self),
        ]

    @torch.no_grad()
    def fill(self) -> None:
        with _in_words(f"{self._saved.folder} is damaged"):
            self._saved.read(self._targets)

    def put(self) -> None:
        held = self._held
        gradients = dict(self.gradients)
        for name, p in held.own.items():
            p.grad = gradients.get(f"gradients.{self._where[name]}")
        for restored in self._restored:
            restored.put()
        if held.scaler is not None and self.manifest["scaler"]:
            held.scaler.load_state_dict(self.manifest["scaler"])
        for average, updates in zip(held.averages, self._updates):
            average.updates = updates


_SAID = ("load: ", "save: ", "optimizer_cpu_offload: ")  # prefixes of errors that need no further context
_COUNTS = {"step": (0, math.inf), "training_steps": (0, MOST_STEPS), "seed": (0, MOST_SEED)}


@contextlib.contextmanager
def _in_words(what: str) -> Iterator[None]:
    """Context manager: errors of Python and torch for invalid values in a checkpoint become ValueErrors."""
    try:
        yield
    except (CheckpointError, OSError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"load: reading failed: {type(error).__name__}: {error}") from error
    except (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, ValueError) as error:
        if is_refusal(error) and str(error).startswith(_SAID):
            raise
        raise ValueError(f"load: {what}: {_first_line(error)}; load an older one") from error


def _first_line(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"it has no entry {str(error.args[0])[:80]!r}" if error.args else "an entry is missing"
    if isinstance(error, (TypeError, AttributeError, IndexError, RecursionError)):
        return "a value in it has the wrong type"
    return (str(error).splitlines() or ["it cannot be read"])[0][:200]


def _whole(found: Any, name: str, least: int = 0, most: float = math.inf) -> int:
    if type(found) is not int or not least <= found <= most:
        raise ValueError(f"{name} is {found!r:.40}, needs an integer from {least} to {most}")
    return found
