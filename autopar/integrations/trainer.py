"""transformers' Trainer on a mesh.

    trainer = Trainer(model=model, args=args, mesh=mesh, options={"zero": 3}, train_dataset=data)
    trainer.train()

The trainer parallelizes the model when it is created. A "device" in its arguments (per_device_train_batch_size) is a
data-parallel rank: ranks that differ only in tp, cp or pp count once. A step is `train_step`, on every mesh.
Checkpoints have the files that transformers reads, and in a separate folder the sharded weights and optimizer state,
for any mesh.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils import find_batch_size
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer import TRAINING_ARGS_NAME

from autopar.adapters.versions import refuse_older
from autopar.integrations.accelerator import STATE, Accelerator
from autopar.integrations.training_arguments import (
    behind,
    check_losses,
    check_methods,
    check_training_arguments,
    count_data_parallel,
)
from autopar.runtime.inputs.padding import IGNORED
from autopar.runtime.mesh.process_groups import dp_rank_and_size
from autopar.runtime.training.load import load
from autopar.runtime.training.save import save

_BASE: Any = object  # a trainer, at run time
_TRAINER: Any = transformers.Trainer
_METHODS = dict(vars(_TRAINER))  # as transformers has them


class MeshTrainerMixin(_BASE):
    """Puts a subclass of transformers.Trainer on a mesh: ``class Mine(MeshTrainerMixin, Theirs): ...``

    mesh: from `autopar.init_mesh`. options: keyword arguments of `autopar.parallelize`, such as {"zero": 3,
    "microbatches": 4}; ``bf16=True`` in the training arguments sets ``precision="bf16"``. model: a transformers model,
    unsharded, on the CPU or the meta device.

    A ``compute_loss`` or ``training_step`` in front of the mixin or behind it is called as under DDP:
    ``model(**inputs)`` returns plain tensors of this rank's examples, from which each data-parallel rank computes its
    own loss. The model's own loss, and other outputs without a batch dim, are those of the global batch. Raises
    ValueError for training arguments that have no meaning on a mesh, and for methods of base classes that the mixin
    would hide.
    """

    model: Any  # parallelized by __init__

    def __init__(
        self, *args: Any, mesh: DeviceMesh | None = None, options: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if mesh is None:
            raise ValueError("Trainer: needs a mesh, found none; pass mesh=autopar.init_mesh(dp=2, tp=2)")
        refuse_older("transformers", (5, 23), "Trainer")  # 5.10 computes other losses with label smoothing
        self._mesh, self._mesh_options = mesh, dict(options or {})
        self._part, self._parts = dp_rank_and_size(mesh)
        check_methods(type(self), MeshTrainerMixin, _METHODS)
        with contextlib.ExitStack() as self._construction:
            super().__init__(*args, **kwargs)
        self._set_signature_columns_if_needed()  # while the model still has its original class
        self._to_mesh()

    def _to_mesh(self) -> None:
        self._losses, self._traced = (self.compute_loss_func, self.label_smoother), not self._overrides("compute_loss")
        if not self._traced:
            pass  # that method decides what becomes of the others
        elif self.compute_loss_func is not None:
            self.accelerator.options["loss"] = functools.partial(_of_outputs, self.compute_loss_func)
        elif self.label_smoother is not None:
            inner = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model  # peft's
            shifts = type(inner).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
            self.accelerator.options["loss"] = functools.partial(_smoothed, self.label_smoother.epsilon, shifts)
        self.model = self.model_wrapped = self.accelerator.place(self.model)[0]
        self.callback_handler.model = self.model

    def create_accelerator_and_postprocess(self) -> None:
        """Check the arguments and create the accelerator of `autopar.integrations`."""
        check_training_arguments(self, self._parts)
        count_data_parallel(self.args, self._parts)
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = Accelerator
        self.accelerator.on_mesh(self._mesh, self._mesh_options)
        self._construction.enter_context(self.accelerator.over_data())

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """No effect: shards are moved to devices when the model is sharded."""

    def get_total_train_batch_size(self, args: Any) -> int:
        """Examples of one optimizer step, over all data-parallel ranks."""
        return self._train_batch_size * args.gradient_accumulation_steps * self._parts

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        """This rank's share of the operations for its batch; transformers sums over all ranks."""
        found: float = super().floating_point_ops(inputs)
        return found * self._parts / self.args.world_size

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers."""
        with self.accelerator.over_data():
            return super().train(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers."""
        with self.accelerator.over_data():
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers."""
        with self.accelerator.over_data():
            return super().predict(*args, **kwargs)

    # --- steps ------------------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """`train_step`; with a ``compute_loss`` or ``training_step`` of another class the step of transformers."""
        check_losses(self, self._losses, self._traced, self._overrides("compute_loss"))
        if self._overrides("compute_loss") or self._overrides("training_step"):
            found: Tensor = super().training_step(model, inputs, num_items_in_batch)
            return found
        model.train()
        inputs, scaled = self._with_count(self._prepare_inputs(inputs), num_items_in_batch)
        chosen = getattr(self, "loss_is_scaled_for_ga", None)
        scaled = scaled or self.compute_loss_func is not None if chosen is None else chosen
        weight = 1.0 if scaled else 1 / self.current_gradient_accumulation_steps
        with model.loss_weight(weight):
            loss = model.train_step(**inputs)
        first = loss[0] if isinstance(loss, tuple) else loss
        return first.detach() * weight

    def _overrides(self, name: str) -> bool:
        """Whether the trainer, or a class in front of the mixin or behind it, has this method in place of
        transformers' own."""
        mixin, found = vars(MeshTrainerMixin)[name], getattr(getattr(self, name), "__func__", None)
        return found is not mixin or behind(type(self), MeshTrainerMixin, name) is not _METHODS[name]

    def _with_count(self, inputs: dict[str, Any], count: Any) -> tuple[dict[str, Any], bool]:
        """Add ``num_items_in_batch``, the count over all batches of an optimizer step, if the model divides its loss
        by it."""
        if count is None or not (self.model_accepts_loss_kwargs or self.compute_loss_func):
            return inputs, False
        return {**inputs, "num_items_in_batch": torch.as_tensor(count, device=self.args.device)}, True

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of the model, over all data-parallel ranks; or that of the class behind the mixin."""
        if behind(type(self), MeshTrainerMixin, "compute_loss") is not _METHODS["compute_loss"]:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)
        named, counted = self._with_count(inputs, num_items_in_batch)
        outputs = model(**named)
        if isinstance(outputs, dict) and "loss" not in outputs:
            raise ValueError(
                f"Trainer: needs a model that returns a loss, found {', '.join(outputs)} for {', '.join(inputs)}; pass "
                "labels, or whatever else the model computes its loss from"
            )
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        loss = loss * self._parts if counted else loss  # a rank's share of it
        return (loss, outputs) if return_outputs else loss

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As in transformers. Labels of examples that only fill the last batch do not count."""
        if not self._overrides("compute_loss"):
            inputs = self._without_padding(inputs, find_batch_size(inputs))
        return super().prediction_step(model, inputs, *args, **kwargs)

    def _without_padding(self, inputs: dict[str, Any], rows: int | None) -> dict[str, Any]:
        """Ignore labels of examples that only pad the last batch; transformers drops them from metrics."""
        state, labels = self.accelerator.gradient_state, inputs.get("labels")
        if not state.end_of_dataloader or state.remainder <= 0 or rows is None:
            return inputs
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return inputs
        labels = labels.clone()
        labels[max(0, state.remainder - self._part * rows) :] = IGNORED
        return {**inputs, "labels": labels}

    def _clip_grad_norm(self, model: Any) -> Tensor:
        found: Tensor = model.clip_grad_norm_(self.args.max_grad_norm)
        return found

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return model.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    # --- checkpoints ------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Collective, on all ranks: transformers 5.10 and 5.17 call it on the first rank only."""
        self._save(output_dir)
        self._save = lambda *_, **__: None  # type: ignore[method-assign]  # done above
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            del self._save

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write the folder of the model as transformers does. Collective."""
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        self.model.save_pretrained(folder)
        if not self.args.should_save:
            return
        processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processing is not None:
            processing.save_pretrained(folder)
        torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save sharded weights, optimizer and scheduler with `autopar.save`."""
        save(Path(output_dir) / STATE, self.model, _plain(self.optimizer), scheduler=self.lr_scheduler)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load weights; sharded weights are loaded later, with the optimizer."""
        folder = Path(resume_from_checkpoint)
        if (folder / STATE).is_dir():
            return
        if (folder / "optimizer.pt").exists():
            raise ValueError(
                f"resume_from_checkpoint: needs a checkpoint of a trainer on a mesh, found {folder} with the "
                "optimizer.pt of one process; start from its weights: from_pretrained(folder)"
            )
        self.model.load_pretrained(folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # transformers' own finds no optimizer.pt
        if checkpoint is not None and (folder := Path(checkpoint) / STATE).is_dir():
            load(folder, self.model, _plain(self.optimizer), scheduler=self.lr_scheduler)

    def _load_best_model(self) -> None:
        folder = Path(self.state.best_model_checkpoint)
        if (folder / STATE).is_dir():
            load(folder / STATE, self.model)
        else:
            self.model.load_pretrained(folder)


class Trainer(MeshTrainerMixin, _TRAINER):
    """transformers.Trainer with ``mesh=`` and ``options=``: see `MeshTrainerMixin`."""


def _of_outputs(loss: Any, outputs: Any, batch: Mapping[str, Any]) -> Tensor:
    """Call a ``compute_loss_func`` as transformers does."""
    found: Tensor = loss(outputs, batch.get("labels"), num_items_in_batch=batch.get("num_items_in_batch"))
    return found


def _smoothed(epsilon: float, shifts: bool, outputs: Any, batch: Mapping[str, Any]) -> Tensor:
    """transformers' `LabelSmoother`, with labels shifted by one for causal models."""
    if not isinstance(labels := batch.get("labels"), Tensor):
        raise ValueError(
            f"Trainer: label_smoothing_factor needs labels, found a batch of {', '.join(batch)}; pass labels, "
            "or remove the argument"
        )
    logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
    if shifts:
        labels = nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    count = batch.get("num_items_in_batch")
    found = nn.functional.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), label_smoothing=epsilon, reduction="mean" if count is None else "sum"
    )
    return found if count is None else found / count


def _plain(optimizer: Any) -> Any:
    """The optimizer inside of accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
