"""Which of transformers' TrainingArguments mean something on a mesh: the rest is refused in words."""

from __future__ import annotations

from typing import Any

from autopar.runtime.module import ParallelModule

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
