"""Checks of transformers' TrainingArguments: those without a meaning on a mesh are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autopar.runtime.module.parallel_module import ParallelModule

_EVAL = "evaluation computes in the precision of the model; remove it"
_SHARDS = 'the mesh shards weights: use options={"zero": 3}'
_REFUSED = {
    "fp16": "use bf16=True, or a custom loop with autopar.GradScaler",
    "fp16_full_eval": _EVAL,
    "bf16_full_eval": _EVAL,
    "torch_compile": 'steps are compiled already; options={"backend": "inductor"} uses Inductor',
    "fsdp": _SHARDS,
    "deepspeed": _SHARDS,
    "parallelism_config": "the mesh determines parallelism; remove it",
    "auto_find_batch_size": "ranks would try different sizes; python -m autopar plan shows the memory of a rank",
    "use_liger_kernel": "apply it to the model before creating the trainer",
    "use_vllm": "the model generates on its mesh, with the weights of the last step; remove it",
    "neftune_noise_alpha": "register its hook on the model before creating the trainer",
}  # argument -> way out
_WITHIN_BACKWARD = ("lomo", "adalomo")
_CALL_SUPER = {
    "__init__", "prediction_step", "floating_point_ops", "create_accelerator_and_postprocess", "compute_loss",
    "training_step", "train", "evaluate", "predict", "_load_optimizer_and_scheduler",
}  # fmt: skip


def check_training_arguments(trainer: Any, parts: int) -> None:
    """Raises ValueError for a model or arguments that a mesh does not support. ``parts``: data-parallel ranks."""
    args = trainer.args
    if trainer.model is None:
        raise ValueError("Trainer: needs a model, found model_init, which creates new ones; pass model=")
    if isinstance(trainer.model, ParallelModule):
        raise ValueError(
            "Trainer: needs a model before parallelize, found a parallelized one; pass the original model, mesh= and "
            "options="
        )
    for name, way_out in _REFUSED.items():
        if value := getattr(args, name, None):
            raise ValueError(f"Trainer: {name} has no meaning on a mesh, found {value!r}; {way_out}")
    if (optimizer := getattr(args.optim, "value", args.optim)) in _WITHIN_BACKWARD:
        raise ValueError(
            f"Trainer: optim={optimizer!r} steps during the backward, but a mesh reduces gradients after it; use "
            "adamw_torch"
        )
    if parts > 1 and not args.average_tokens_across_devices:
        raise ValueError(
            "Trainer: the loss on a mesh is the mean over the targets of all data-parallel ranks, found "
            "average_tokens_across_devices=False; remove it"
        )
    if args.train_sampling_strategy == "batch_rebalance":
        raise ValueError(
            'Trainer: train_sampling_strategy="batch_rebalance" gives ranks batches of different sizes; use '
            '"group_by_length" and pad to one length'
        )
    if args.accelerator_config.dispatch_batches:
        raise ValueError(
            "Trainer: dispatch_batches=True sends batches from the main process, but ranks of a mesh read their own "
            "shards; remove it"
        )


def count_data_parallel(args: Any, parts: int) -> None:
    """TRL's arguments have counted all ranks as devices. Raises ValueError if the batch holds no whole groups."""
    if not (steps := getattr(args, "steps_per_generation", None)):
        return
    args.generation_batch_size = args.per_device_train_batch_size * parts * steps
    evaluated = args.per_device_eval_batch_size * parts if args.eval_strategy != "no" else 0
    groups = {"num_generations": args.generation_batch_size, "num_generations_eval": evaluated}
    for name, batch in groups.items():
        size = getattr(args, name, None) or args.num_generations
        if batch % size:
            raise ValueError(
                f"Trainer: needs whole groups of {name}={size} completions, found a batch of {batch} on {parts} "
                "data-parallel ranks, which are the devices of a mesh; change the batch size of a device"
            )


def check_methods(kind: type, front: type, known: Mapping[str, Any]) -> None:
    """Raises ValueError for overridden methods that the mixin ``front`` would hide, because their class comes after it
    in the bases of ``kind``. ``known``: the methods of transformers.Trainer."""
    for name in vars(front).keys() & known.keys() - _CALL_SUPER:
        if callable(known[name]) and not name.startswith("__") and behind(kind, front, name) is not known[name]:
            owner = next(cls for cls in _after(kind, front) if name in vars(cls))
            raise ValueError(
                f"Trainer: {owner.__name__}.{name} would be hidden by {front.__name__}.{name}, which comes first; "
                f"define {name} in a subclass of the mixin: class Mine({front.__name__}, transformers.Trainer)"
            )


def _after(kind: type, front: type) -> Sequence[type]:
    return kind.__mro__[kind.__mro__.index(front) + 1 :]


def behind(kind: type, front: type, name: str) -> Any:
    """The method that the class ``front`` would hide in ``kind``."""
    return next((vars(cls)[name] for cls in _after(kind, front) if name in vars(cls)), None)


def check_losses(trainer: Any, placed: tuple[Any, Any], traced: bool, has_own: bool) -> None:
    """Raises ValueError if the loss would not be the intended one. ``placed``: the loss function and label smoother of
    the trainer when it was created, ``traced`` with the model. ``has_own``: there is a ``compute_loss`` by now."""
    for name, loss in zip(("compute_loss_func", "label_smoother"), placed if traced else (), strict=False):
        if getattr(trainer, name) is not loss:
            raise ValueError(
                f"Trainer: {name} is traced with the model when the trainer is created, found another one later; pass "
                "it to the trainer as compute_loss_func=fn, or as label_smoothing_factor in its arguments"
            )
        if loss is not None and has_own:
            raise ValueError(
                f"Trainer: needs one loss, found {name}, which is traced with the model, and a compute_loss that was "
                "set later; define compute_loss in the class, or leave the other out"
            )
