"""Which of transformers' TrainingArguments mean something on a mesh: the rest is refused in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.runtime.module.parallel_module import ParallelModule

_EVAL = "evaluation computes in the precision of the model; leave it out"
_CUTS = 'the mesh cuts weights: options={"zero": 3}'
_REFUSED = {
    "fp16": "use bf16=True, or a loop of your own with autopar.GradScaler",
    "fp16_full_eval": _EVAL,
    "bf16_full_eval": _EVAL,
    "torch_compile": 'steps are compiled already; options={"backend": "inductor"} compiles their code',
    "fsdp": _CUTS,
    "deepspeed": _CUTS,
    "parallelism_config": "the mesh says how work is cut; leave it out",
    "auto_find_batch_size": "ranks would try other sizes; python -m autopar plan shows the memory of a rank",
    "use_liger_kernel": "apply it to the model before the trainer is made",
    "neftune_noise_alpha": "register its hook on the model before the trainer is made",
}  # name -> what to do instead
_WITHIN_BACKWARD = ("lomo", "adalomo")
_HANDED_ON = {"__init__", "prediction_step", "floating_point_ops", "create_accelerator_and_postprocess"}


def check_training_arguments(trainer: Any, parts: int) -> None:
    """``trainer``: with its model and arguments. Raises ValueError."""
    args = trainer.args
    if trainer.model is None:
        raise ValueError("Trainer: needs the model itself, found model_init, which makes others; pass model=")
    if isinstance(trainer.model, ParallelModule):
        raise ValueError(
            "Trainer: needs the model before parallelize, found one on a mesh; pass that model, mesh= and options="
        )
    for name, way_out in _REFUSED.items():
        if value := getattr(args, name, None):
            raise ValueError(f"Trainer: {name} has no meaning on a mesh, found {value!r}; {way_out}")
    if (optimizer := getattr(args.optim, "value", args.optim)) in _WITHIN_BACKWARD:
        raise ValueError(
            f"Trainer: optim={optimizer!r} steps within the backward, found a mesh, where gradients are summed after "
            "it; use adamw_torch"
        )
    if parts > 1 and not args.average_tokens_across_devices:
        raise ValueError(
            "Trainer: a mesh has one loss, the mean over the targets of all parts of the batch, found "
            "average_tokens_across_devices=False; leave it out"
        )
    if args.train_sampling_strategy == "batch_rebalance":
        raise ValueError(
            'Trainer: train_sampling_strategy="batch_rebalance" gives ranks batches of different sizes; use '
            '"group_by_length" and pad to one length'
        )
    if args.accelerator_config.dispatch_batches:
        raise ValueError(
            "Trainer: dispatch_batches=True sends each process another batch, found a mesh, whose ranks read their own "
            "parts; leave it out"
        )


def check_methods(kind: type, front: type, known: Mapping[str, Any]) -> None:
    """``front``: the class for meshes, which stands before others in ``kind``. Raises ValueError for methods of those
    that it would hide; ``known``: what transformers.Trainer has under these names."""
    behind = kind.__mro__[kind.__mro__.index(front) + 1 :]
    for name in vars(front).keys() & known.keys() - _HANDED_ON:
        owner = next((cls for cls in behind if name in vars(cls)), object)
        if callable(known[name]) and not name.startswith("__") and vars(owner)[name] is not known[name]:
            raise ValueError(
                f"Trainer: {owner.__name__}.{name} stands behind {front.__name__}, which does it in another way on a "
                f"mesh and would hide it; write it in the class in front: class Mine({front.__name__}, "
                f"transformers.Trainer) with a {name} of its own"
            )


def check_losses(trainer: Any, placed: tuple[Any, Any], has_own: bool) -> None:
    """``placed``: the loss function and the smoothing of labels that the model was put on the mesh with; ``has_own``:
    whether the trainer has a ``compute_loss`` of its own. Raises ValueError where a loss would not be the one meant."""
    names = "compute_loss_func", "label_smoother"
    for name, loss in zip(names, placed, strict=True):
        if getattr(trainer, name) is not loss:
            raise ValueError(
                f"Trainer: {name} is traced with the model when the trainer is made, found another one since; give it "
                "to the trainer, compute_loss_func=fn or label_smoothing_factor of its arguments"
            )
        if loss is not None and has_own:
            raise ValueError(
                f"Trainer: needs one loss, found {name} and a compute_loss of {type(trainer).__name__}, whose outputs "
                "would have the other loss in them; leave one of them out"
            )
