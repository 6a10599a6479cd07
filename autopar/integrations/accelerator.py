"""accelerate's Accelerator on a mesh.

    accelerator = Accelerator(mesh=mesh, options={"zero": 3})
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

`prepare` parallelizes the model, replaces the parameters of the optimizer, and gives each rank its shard of the data. A
process, to accelerate, is a data-parallel rank: ranks that differ only in tp, cp or pp count once.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import extract_model_from_parallel, operations, other, random, recursively_apply
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from autopar.api import parallelize
from autopar.precision import a_precision
from autopar.runtime.mesh.process_groups import data_groups, dp_rank_and_size, gathered_objects, mesh_of
from autopar.runtime.module.module_facade import outermost
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.training.load import load
from autopar.runtime.training.save import save

STATE = "mesh"  # folder of a checkpoint with the sharded state
_PRECISIONS = {"no": {}, "bf16": {"precision": "bf16"}}


class Accelerator(accelerate.Accelerator):
    """accelerate.Accelerator on a mesh. Arguments are those of accelerate, and:

    mesh: from `autopar.init_mesh`. options: keyword arguments of `autopar.parallelize` for prepared models, such as
    {"zero": 3, "example_batch": batch}; ``mixed_precision="bf16"`` sets ``precision="bf16"``, and
    "fp8", also that of `accelerate launch`, ``precision="fp8"``, without a library that converts layers. gather,
    gather_for_metrics, reduce: over data-parallel ranks.

    Raises ValueError for arguments that have no meaning on a mesh.
    """

    _models: list[Any]
    _optimizers: list[Any]
    _schedulers: list[Any]
    _dataloaders: list[Any]

    def __init__(self, *args: Any, mesh: DeviceMesh, options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        asked = kwargs.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        if str(asked) == "fp8":  # accelerate's own would replace the layers that steps scale
            kwargs["mixed_precision"], options = "bf16", {"precision": "fp8"} | dict(options or {})
        super().__init__(*args, **kwargs)
        self.on_mesh(mesh, options)

    def on_mesh(self, mesh: DeviceMesh, options: Mapping[str, Any] | None = None) -> None:
        """Set the mesh of an accelerator that exists already, as `__init__` does."""
        axes = mesh_of(mesh)
        seen = accelerate.PartialState().num_processes
        if seen != axes.world_size:
            there = dist.is_initialized() and dist.get_world_size() == axes.world_size
            way_out = "start the ranks with torchrun or autopar.launch, and create the mesh first"
            if there and mesh.device_type == "cpu":
                way_out = (
                    "on the CPU pass cpu=True, without which accelerate ignores other processes, and create the mesh "
                    "before any object of accelerate"
                )
            raise ValueError(f"accelerate: found {seen} processes, but the mesh has {axes.world_size} ranks; {way_out}")
        if self.mixed_precision not in _PRECISIONS:
            way_out = "a custom loop with autopar.GradScaler"
            if self.mixed_precision == "fp8":
                way_out = "options={'precision': 'fp8'} with it"
            raise ValueError(
                f"accelerate: a mesh supports mixed_precision 'no' or 'bf16', found {self.mixed_precision!r}; use "
                f"'bf16', or {way_out}"
            )
        if self.dispatch_batches:
            raise ValueError(
                "accelerate: dispatch_batches=True sends batches from the main process, but ranks of a mesh read "
                "their own shards; remove it"
            )
        asked: dict[str, Any] = _PRECISIONS[self.mixed_precision] | dict(options or {})
        padding = "auto" if a_precision("precision", asked.get("precision", "none")).scales_by_token else "exact"
        self.mesh, self.options = mesh, {"outputs_with_grad": "rank", "padding": padding} | asked
        self._part, self._parts = dp_rank_and_size(mesh)

    @property
    def num_processes(self) -> int:
        """Number of data-parallel ranks."""
        return self._parts if "_parts" in self.__dict__ else super().num_processes

    @property
    def process_index(self) -> int:
        """Which data-parallel rank this is."""
        return self._part if "_part" in self.__dict__ else super().process_index

    # --- prepare ----------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As in accelerate. Optimizers of the original parameters get those on the mesh."""
        placed = {}
        for model in args:
            if isinstance(model, nn.Module) and not isinstance(model, ParallelModule):
                placed[id(model)] = self.place(model)
        moved = {old: new for parallel, names in placed.values() for old, new in _moved(parallel, names).items()}
        for optimizer in args:
            if isinstance(optimizer, Optimizer) and moved:
                _take_parameters(optimizer, moved)
        args = tuple(placed[id(x)][0] if id(x) in placed else x for x in args)
        return super().prepare(*args, device_placement=device_placement)

    def place(self, model: nn.Module) -> tuple[ParallelModule, dict[str, int]]:
        """(the parallelized model, name -> id of the original parameter)."""
        names = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
        return parallelize(model, self.mesh, **self.options), names

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> ParallelModule:
        """Parallelize a model, unless it is already."""
        parallel = model if isinstance(model, ParallelModule) else self.place(model)[0]
        if all(known is not parallel for known in self._models):
            self._models.append(parallel)
        return parallel

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """Each rank reads its shard of the batch."""
        if any(known is data_loader for known in self._dataloaders):
            return data_loader
        prepared = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=self._parts,
            process_index=self._part,
            split_batches=self.split_batches,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=self.rng_types.copy(),
            dispatch_batches=False,
            even_batches=self.even_batches,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        self._dataloaders.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """As in accelerate, with one step per data-parallel rank."""
        known = any(made is scheduler for made in self._schedulers)
        prepared = super().prepare_scheduler(scheduler)
        if known or not isinstance(prepared, AcceleratedScheduler):
            return prepared
        steps = _ScheduleOnMesh(
            prepared.scheduler, prepared.optimizers, prepared.step_with_optimizer, prepared.split_batches
        )
        steps.parts = self._parts
        self._schedulers[-1] = steps
        return steps

    # --- steps ------------------------------------------------------------------------------------------------

    def train_step(self, model: ParallelModule, **batch: Any) -> Tensor:
        """``loss = model(**batch).loss; self.backward(loss)`` in one call, which also works with pipelines."""
        with model.loss_weight(1 / self.gradient_accumulation_steps):
            return model.train_step(**batch)

    def autocast(self, *_: Any, **__: Any) -> contextlib.AbstractContextManager[None]:
        """No effect: steps compute in the precision that they were compiled for."""
        return contextlib.nullcontext()

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip by the norm over all ranks and pipeline stages."""
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for model in self._models:
            if set(map(id, given)) == set(map(id, model.parameters())):
                return model.clip_grad_norm_(max_norm, norm_type)
        found: Tensor = super().clip_grad_norm_(given, max_norm, norm_type)
        return found

    # --- values of all data-parallel ranks
    # ----------------------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Tensors of all data-parallel ranks, concatenated, on every rank."""
        return recursively_apply(self._gathered, tensor, error_on_other_type=True)

    def _gathered(self, tensor: Tensor) -> Tensor:
        if self._parts == 1:
            return tensor
        rows = torch.atleast_1d(tensor).contiguous()
        for group in data_groups(self.mesh):
            found = [torch.empty_like(rows) for _ in range(group.size())]
            dist.all_gather(found, rows, group=group)
            rows = torch.cat(found)
        return rows

    def _gathered_objects(self, own: Any) -> list[Any]:
        """The lists of all data-parallel ranks, one after the other."""
        return [x for part in gathered_objects(self.mesh, own) for x in part]

    @contextlib.contextmanager
    def over_data(self) -> Iterator[None]:
        """Context manager for accelerate's functions that trainers import by name: processes are data-parallel ranks
        for ``gather``, ``gather_object`` and ``set_seed(device_specific=True)``; ``is_peft_model`` sees the model."""
        ours = (
            (operations, "_gpu_gather", self.gather),
            (operations, "_gpu_gather_object", self._gathered_objects),
            (random, "AcceleratorState", lambda: self),
            (other, "extract_model_from_parallel", _extracted),
        )
        kept = [getattr(module, name) for module, name, _ in ours]
        for module, name, function in ours:
            setattr(module, name, function)
        try:
            yield
        finally:
            for (module, name, _), function in zip(ours, kept, strict=True):
                setattr(module, name, function)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As in accelerate, over data-parallel ranks: examples that only pad the last batch are dropped."""
        try:
            recursively_apply(lambda x: x, input_data, error_on_other_type=True)
        except TypeError:
            use_gather_object = True
        if not use_gather_object:
            return super().gather_for_metrics(input_data)
        rows = self._gathered_objects(list(input_data))
        state = self.gradient_state
        return rows[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else rows

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce over data-parallel ranks: "sum", "mean" or "none"."""

        def reduced(x: Tensor) -> Tensor:
            if reduction == "none":
                return x
            total = self._gathered(x[None]).sum(0) * scale if self._parts > 1 else x * scale
            return total / self._parts if reduction == "mean" else total

        return recursively_apply(reduced, tensor, error_on_other_type=True)

    # --- state ------------------------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Unsharded weights by original name, on the CPU of every rank. Collective."""
        found: dict[str, Tensor] = self.prepare_model(model).full_state_dict()
        return found

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **how: Any) -> str:
        """As in accelerate, with the model and its optimizers saved by `autopar.save` for any mesh. Collective."""

        model = self._only_model("save_state")  # before accelerate creates the folder

        def write(_: Any, __: Any, folder: str) -> None:
            save(Path(folder) / STATE, model, optimizers, scheduler=schedulers)

        with self._by_hook(self.register_save_state_pre_hook, write) as (optimizers, schedulers):
            folder: str = super().save_state(output_dir, safe_serialization=safe_serialization, **how)
        return folder

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **how: Any) -> None:
        """Load what `save_state` wrote, on this mesh or another. Collective."""

        model = self._only_model("load_state")

        def read(_: Any, folder: str) -> None:
            load(Path(folder) / STATE, model, optimizers, scheduler=schedulers)

        with self._by_hook(self.register_load_state_pre_hook, read) as (optimizers, schedulers):
            super().load_state(input_dir, load_kwargs, **how)

    def _only_model(self, call: str) -> ParallelModule:
        if len(self._models) != 1:
            raise ValueError(
                f"{call}: needs exactly one prepared model, found {len(self._models)}; call autopar.save or "
                "autopar.load for each model"
            )
        only: ParallelModule = self._models[0]
        return only

    @contextlib.contextmanager
    def _by_hook(
        self, register: Callable[..., Any], hook: Callable[..., None]
    ) -> Iterator[tuple[list[Any], list[Any]]]:
        """Context manager: accelerate sees no models, optimizers and schedulers; the hook handles them."""
        kept = self._models, self._optimizers, self._schedulers
        handle = register(hook)
        self._models, self._optimizers, self._schedulers = [], [], []
        try:
            yield [x.optimizer for x in kept[1]], [getattr(x, "scheduler", x) for x in kept[2]]
        finally:
            handle.remove()
            self._models, self._optimizers, self._schedulers = kept


def _extracted(model: Any, *how: Any, **more: Any) -> Any:
    """accelerate's `extract_model_from_parallel`, for a model on the mesh, too."""
    return outermost(model) if isinstance(model, ParallelModule) else extract_model_from_parallel(model, *how, **more)


class _ScheduleOnMesh(AcceleratedScheduler):
    """Steps once per data-parallel rank, where accelerate steps once per process."""

    parts = 1

    def step(self, *args: Any, **kwargs: Any) -> None:
        if not self.step_with_optimizer or self.split_batches or not self.gradient_state.sync_gradients:
            super().step(*args, **kwargs)
        elif not any(optimizer.step_was_skipped for optimizer in self.optimizers):
            last = getattr(self.scheduler, "total_steps", None)
            for _ in range(self.parts):
                if last is None or self.scheduler.last_epoch < last:
                    self.scheduler.step(*args, **kwargs)


def _moved(parallel: ParallelModule, names: Mapping[str, int]) -> dict[int, nn.Parameter]:
    """id of an original parameter -> the parameter on the mesh."""
    own = parallel.named_parameters(remove_duplicate=False)
    return {names[name]: p for name, p in own if name in names}


def _take_parameters(optimizer: Optimizer, moved: Mapping[int, nn.Parameter]) -> None:
    """Replace the original parameters of an optimizer by those on the mesh. Raises ValueError if it has state."""
    ids = [id(p) for group in optimizer.param_groups for p in group["params"]]
    if not any(i in moved for i in ids):
        return
    if optimizer.state:
        raise ValueError(
            "prepare: needs an optimizer without state, found one with state of unsharded parameters; prepare it "
            "before its first step"
        )
    for group in optimizer.param_groups:
        group["params"] = [moved.get(id(p), p) for p in group["params"]]
