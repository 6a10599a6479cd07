"""Saving and loading the state of a ParallelModule: weights, buffers and the count of training steps.

parallel.state_dict()                    DTensors over the mesh: torch.save on each rank, distributed checkpoint
parallel.full_state_dict()               full tensors under the original names
parallel.save_pretrained(folder)         files that transformers loads
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.adapters.quantized_weights import check_whole_weights
from autopar.adapters.state_dict import IncompatibleKeys, unsaved_buffers
from autopar.capture.front_end import OwnFolder, adapter_for
from autopar.ir.signature import ParameterSpec
from autopar.plan import Plan
from autopar.runtime.checkpoint.checkpoint_dir import RunLineage
from autopar.runtime.checkpoint.hf_io import (
    Files,
    Recipes,
    check_habits,
    checked_pretrained,
    save_pretrained,
    saved_steps,
)
from autopar.runtime.consistency.rank_checks import RankCheck, agree_on_arguments, agree_on_pieces, raise_on_all_ranks
from autopar.runtime.fault.errors import error_context
from autopar.runtime.guards.step_cache import StepCache
from autopar.runtime.inputs.loss_fn import of_the_model
from autopar.runtime.mesh.process_groups import Groups
from autopar.runtime.module import state_dict_hooks
from autopar.runtime.optim.grad_scaler import GradScaler
from autopar.runtime.optim.step_hooks import about_to_write, now
from autopar.runtime.params import parameters as state
from autopar.runtime.params.dtensor_layout import is_here
from autopar.runtime.params.sharded_modules import ShardedModules
from autopar.runtime.params.sharded_tensor import all_written
from autopar.values import a_path, whole_number, yes_or_no


@dataclass(frozen=True)
class RankState:
    """The state of a model that a rank holds, for `autopar.save` and `autopar.load`.

    own: its shards of parameters by name. canonical: any name of a parameter, tied ones too -> its name. buffers: the
    persistent ones. last_use: when the last training step began (`autopar.runtime.optim.step_hooks`). averages: those
    of `autopar.ema`, in order of creation. owed: checks that earlier calls have deferred. line: the run whose
    checkpoints it saves. stateful: by path, modules with a state beside tensors (`get_extra_state`),
    and "delayed scales".
    """

    groups: Groups
    own: dict[str, nn.Parameter]
    specs: tuple[ParameterSpec, ...]
    canonical: dict[str, str]
    buffers: dict[str, Tensor]
    loaded: bool
    training_steps: int
    seed: int
    plan: Plan
    scaler: GradScaler | None
    averages: list[Any]
    last_use: int
    owed: list[RankCheck]
    line: RunLineage
    stateful: Mapping[str, Any]


class Stateful(nn.Module):
    """The state methods of a ParallelModule."""

    _tree: ShardedModules
    _cache: StepCache
    _groups: Groups
    _steps: int
    _loaded: bool
    _seed: int
    _scaler: GradScaler | None
    _averages: list[Any]
    _line: RunLineage
    _last_use: int

    @property
    def plan(self) -> Plan:
        """The plan of the last compiled step; before the first step, that of the parameters."""
        return self._cache.runners[-1].compiled.plan if self._cache.runners else self._cache.plan

    def held(self) -> RankState:
        """The current state that a checkpoint contains."""
        own, specs = self._tree.own, self._tree.specs
        scales = {"delayed scales": self._cache.scales} if self._cache.scales is not None else {}
        return RankState(
            self._groups,
            own,
            specs,
            {name: s.name for s in specs for name in (s.name, *s.aliases)},
            self._persistent(),
            self._loaded,
            self.training_steps,
            self._seed,
            self.plan,
            self._scaler,
            list(self._averages),
            self._last_use,
            self._cache.owed(),
            self._line,
            state_dict_hooks.with_extra_state(self._tree.root) | scales,
        )

    def take_average(self, average: Any) -> None:
        """Save this average with the model from now on; called by `autopar.ema`."""
        self._averages.append(average)

    def drop_average(self, average: Any) -> None:
        """No longer save this average."""
        self._averages = [known for known in self._averages if known is not average]

    def begin_loading(self) -> None:
        """Mark the parameters as invalid until `end_loading`."""
        self._loaded = False

    def end_loading(self, training_steps: int, seed: int, pending: bool) -> None:
        """Everything is loaded. ``pending``: including gradients that no optimizer step has used yet."""
        self.training_steps, self._seed = training_steps, seed
        self._last_use = now() if pending else 0
        self._finish_loading("load")

    def full_state_dict(self, rank0_only: bool = False) -> dict[str, Tensor]:
        """Original name (tied names too) -> full tensor on the CPU. Hooks of state dicts and `get_extra_state` of
        modules apply. Collective."""
        persistent, own, specs = self._persistent(), self._tree.own, self._tree.specs
        with error_context("full_state_dict"):
            yes_or_no("rank0_only", rank0_only)
            owed = self._cache.owed()
            agree_on_arguments(self._groups, "full_state_dict", {"rank0_only": rank0_only}, owed=owed)
            whole = state.full_state_dict(own, specs, self._groups, persistent, rank0_only)
            if state_dict_hooks.says_itself(self._tree.root) and (whole or not rank0_only):
                whole = state_dict_hooks.said(self._tree, whole)
        found: dict[str, Tensor] = state.note_steps(whole, self.training_steps)
        return found

    def full_gradients(self, rank0_only: bool = False) -> dict[str, Tensor]:
        """Original name -> full gradient on the CPU, for parameters that have one. Collective."""
        with error_context("full_gradients"):
            yes_or_no("rank0_only", rank0_only)
            has = [name for name, p in self._tree.own.items() if p.grad is not None]
            agree_on_arguments(self._groups, "full_gradients", {"rank0_only": rank0_only}, has, self._cache.owed())
            return state.full_gradients(self._tree.own, self._tree.specs, self._groups, rank0_only)

    def load_state_dict(
        self, state_dict: Mapping[str, Tensor], strict: bool = True, assign: bool = False
    ) -> IncompatibleKeys:
        """Load full tensors, or the DTensors of a `state_dict` of this mesh, by original names. Returns the missing and
        the unexpected keys (``strict=False``), as torch does.

        Missing or unexpected keys and other shapes raise torch's own error text, after everything else has been loaded,
        as in torch; the error is a ValueError and a RuntimeError. Raises ValueError for another kind of dtype (integers
        into floats) and for values that differ between ranks. Collective.
        """
        if assign:
            raise ValueError(
                "load_state_dict: assign=True would replace this rank's shards by full tensors; leave it out, values "
                "are copied"
            )
        with error_context("load_state_dict"):
            by_itself = state_dict_hooks.loads_itself(self._tree.root)
            if not by_itself:
                state.check_tensors(state_dict)
            about_to_write()
            yes_or_no("strict", strict)
            own, specs = self._tree.own, self._tree.specs
            agree_on_arguments(self._groups, "load_state_dict", {"strict": strict}, state_dict, self._cache.owed())
            values = state_dict.values() if isinstance(state_dict, Mapping) else ()
            loaded, misfits, refused = self._loaded, list[str](), None
            if any(isinstance(v, torch.distributed.tensor.DTensor) for v in values):
                whole = self._tree.root.state_dict()
                state.check_kinds(state_dict, {n: x.dtype for n, x in whole.items() if isinstance(x, Tensor)})
                found, refused = state_dict_hooks.load_or_refuse(self._tree.root, state_dict, strict)
            elif by_itself:
                whole = state.full_state_dict(own, specs, self._groups)
                found, refused, now = state_dict_hooks.loaded(self._tree, whole, state_dict, strict)
                state.load_state_dict(now, own, specs)
            else:
                found, misfits = state.load_state_dict(state_dict, own, specs, self._persistent())
            if (steps := state.steps_noted(state_dict)) is not None:
                self.training_steps = steps
            self._finish_loading("load_state_dict")
            try:
                if refused is not None:
                    raise refused
                state.refuse_others(found, misfits, strict, type(self._tree.root).__name__)
            except RuntimeError:
                self._loaded = loaded
                raise
        return found

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's state dict, with DTensors for parameters, and the count of steps (`training_steps`)."""
        found = self._tree.root.state_dict(*args, **kwargs)
        return state.note_steps(found, self.training_steps, kwargs.get("prefix", args[1] if len(args) > 1 else ""))

    def _finish_loading(self, who: str) -> None:
        """Check that ranks with the same shard have the same values."""
        all_written()
        own = {name: state.local_tensor(p) for name, p in self._tree.here.items()}
        shared = {**self._persistent(), "the count of training steps": torch.tensor(self._steps)}
        need, way_out = f"{who}: every rank must be given the same values", "read the same checkpoint on every rank"
        agree_on_pieces(self._groups, own, self._tree.specs, shared, need, way_out)
        self._loaded = True

    @property
    def training_steps(self) -> int:
        """Number of training steps so far. Dropout masks depend on it, so it is saved with every state: beside the
        tensors of `state_dict` and `full_state_dict`, where `torch.save` keeps it and torch's own loading ignores it,
        and in the files of `save_pretrained`. Copies made tensor by tensor and torch's distributed checkpoints do not
        contain it, nor the state of torch's random number generators: save it yourself there, or use `autopar.save`."""
        return self._steps

    @training_steps.setter
    def training_steps(self, steps: Any) -> None:
        self._steps = whole_number("training_steps", steps, 0, state.MOST_STEPS)

    def load_pretrained(self, folder: str | Path) -> None:
        """Load a folder in the format of transformers (safetensors); each rank reads only its own shards.

        Tensors are renamed, merged (experts), split and transposed as transformers does. Raises ValueError for missing,
        unexpected and truncated tensors, and for other shapes.
        """
        skeleton = self._tree.root
        prefix = getattr(skeleton, "base_model_prefix", "")
        own, specs = self._own_of_model(), self._specs_of_model()
        ignore = getattr(skeleton, "_keys_to_ignore_on_load_unexpected", None) or ()
        with error_context("load_pretrained"):
            folder = a_path("folder", folder)
            if (of_library := self._own_folder()) is not None:
                given = raise_on_all_ranks(self._groups, "load_pretrained", lambda: of_library.read(folder))
                self.load_state_dict(given, strict=False)
                return
            about_to_write()
            into = {name: state.local_tensor(p) for name, p in own.items() if is_here(p)}
            buffers = {name: x for name, x in self._persistent().items() if of_the_model(name)}
            recipes = self._recipes(load=True)
            with Files() as files:

                def check() -> tuple[Callable[[], Any], int | None]:
                    given = files, folder, specs, self._groups, buffers, prefix, tuple(ignore), into, recipes
                    return checked_pretrained(*given), saved_steps(folder)

                fill, steps = raise_on_all_ranks(self._groups, "load_pretrained", check)
                self.begin_loading()
                raise_on_all_ranks(self._groups, "load_pretrained", fill)
            if steps is not None:
                self.training_steps = steps
            self._finish_loading("load_pretrained")

    def save_pretrained(self, folder: str | Path, max_shard_size: int | str = "5GB", **how: Any) -> None:
        """Write the folder that transformers would write: safetensors with its names, and the configs. Collective; rank
        0 writes. ``how``: arguments that scripts for accelerate pass (is_main_process, save_function, state_dict).
        Raises ValueError for arguments that would change what is written."""
        skeleton, own, specs = self._tree.root, self._own_of_model(), self._specs_of_model()
        configs = [c for name in ("config", "generation_config") if (c := getattr(skeleton, name, None)) is not None]
        with error_context("save_pretrained"):
            folder = a_path("folder", folder)
            same = {"folder": str(folder), "max_shard_size": max_shard_size, "further": sorted(how)}
            agree_on_arguments(self._groups, "save_pretrained", same, owed=self._cache.owed())
            if how:
                raise_on_all_ranks(self._groups, "save_pretrained", lambda: check_habits(how, own, specs))
            if (of_library := self._own_folder()) is not None:
                mine = [s for s in specs if of_library.names & {s.name, *s.aliases}]
                held = {n: x for n, x in self._persistent().items() if n in of_library.names}
                whole = state.full_state_dict(own, mine, self._groups, held, rank0_only=True)
                raise_on_all_ranks(
                    self._groups, "save_pretrained", lambda: of_library.write(folder, whole) if whole else None
                )
                return
            check_whole_weights(skeleton)
            save_pretrained(
                folder,
                own,
                specs,
                self._groups,
                self._persistent(),
                configs,
                max_shard_size,
                self.training_steps,
                self._recipes(load=False),
            )

    def _own_folder(self) -> OwnFolder | None:
        adapter = adapter_for(self._tree.root)
        return adapter.own_folder(self._tree.structure()) if adapter is not None else None

    def _recipes(self, load: bool) -> Recipes | None:
        """The model library's conversions between tensors in files and in the model."""
        if (adapter := adapter_for(self._tree.root)) is None:
            return None
        return functools.partial(adapter.recipes_to_load if load else adapter.recipes_to_save, self._tree.structure())

    def _persistent(self) -> dict[str, Tensor]:
        apart, named = unsaved_buffers(self._tree.root), self._tree.root.named_buffers(remove_duplicate=False)
        return {name: buffer for name, buffer in named if name not in apart}

    def _own_of_model(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self._tree.own.items() if of_the_model(name)}

    def _specs_of_model(self) -> tuple[ParameterSpec, ...]:
        return tuple(s for s in self._tree.specs if of_the_model(s.name))
