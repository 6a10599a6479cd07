"""What the user may ask for, and what each option may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from autopar.attention.layouts import LAYOUTS
from autopar.values import a_text, byte_count, dims_by_name, number_or_lengths, one_of, texts, whole_number, yes_or_no

CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "zero": partial(one_of, known=(0, 3)),
    "sequence_parallel": yes_or_no,
    "micro_batches": partial(whole_number, least=1),
    "whole_ops": texts,
    "bucket_bytes": byte_count,
    "schedule": a_text,
    "cuts": texts,
    "chunks": whole_number,
    "slices": number_or_lengths,
    "gathers": partial(one_of, known=("step", "layer")),
    "memory_limit": byte_count,
    "attention": a_text,
    "layout": partial(one_of, known=("auto", *LAYOUTS)),
    "topology": a_text,
    "batch_dims": dims_by_name,
}


def checked_option(name: str, value: Any) -> Any:
    """The value of an option in its own type. Raises ValueError."""
    return CHECKS[name](name, value)


@dataclass(frozen=True)
class Options:
    """What the user may ask for.

    zero: 0 (parameters whole on dp) or 3 (cut over dp, gathered for use).
    sequence_parallel: cut the residual stream along the sequence on tp.
    micro_batches: number of gradient accumulation steps of one `train_step`.
    whole_ops: operators without a rule (or with one) that shall run on whole values, by name ("aten.foo.default").
    bucket_bytes: size of a gradient bucket.

    With pipeline stages (axis pp):
    schedule: a name of `autopar.schedule.request.SCHEDULES`; "" lets the plan choose.
    cuts: the module with which each part but the first begins; () lets the plan choose.
    chunks: parts per rank, for schedules that take several; 0: as many as the schedule takes by default.
    slices: for schedules over token slices: their number, or their lengths; 0 lets the plan choose.
    gathers: "step" gathers parameters that ZeRO cuts once per step, "layer" for each use.
    memory_limit: bytes that one rank may hold, for the cut and for schedules that search; 0: no limit.

    With a sequence that is cut over ranks (axis cp):
    attention: an algorithm of `autopar.attention.algorithm_table.ALGORITHMS`, "FORWARD+BACKWARD", or "auto": the
    fastest by estimate.
    layout: how causal sequences are dealt, "contiguous" or "zigzag"; "auto" lets the plan choose.
    topology: links per axis, such as "cp=ring:50e9:5e-6,tp=switch:450e9" (`autopar.cost.topology`); "": a default.

    batch_dims: which dim of an input is the batch, over dp and micro-batches: ``{"x": 1, "table": None}``, None for an
    input that is no part of it. Names of nested inputs are paths ("past.0"). What is left out is decided by the plan.
    """

    zero: int = 0
    sequence_parallel: bool = False
    micro_batches: int = 1
    whole_ops: tuple[str, ...] = ()
    bucket_bytes: int = 25 * 2**20
    schedule: str = ""
    cuts: tuple[str, ...] = ()
    chunks: int = 0
    slices: int | tuple[int, ...] = 0
    gathers: str = "step"
    memory_limit: int = 0
    attention: str = "auto"
    layout: str = "auto"
    topology: str = ""
    batch_dims: tuple[tuple[str, int | None], ...] = ()

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            object.__setattr__(self, name, checked_option(name, getattr(self, name)))
