"""A layout: how a model is spread over ranks, in the words of the mesh and of the options. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.schedule.request import SCHEDULES
from autopar.zero_stages import ZERO_STAGES

OUTER_TO_INNER = ("pp", "dp_replicate", "dp", "cp", "ep", "tp")  # rank order of a layout's mesh
DATA_AXES = ("dp_replicate", "dp", "cp", "ep")  # over which gradients of weights outside experts are summed


@dataclass(frozen=True)
class Placement:
    """What the cost of one layer depends on, besides rows: everything that changes the graphs of a layer.

    policy: of activation checkpointing. loss_chunks: of the loss.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    attention: str = "auto"
    cp_load_balance: str = "auto"
    expert_axis: str = "ep"
    token_dispatcher: str = "auto"
    policy: str = "none"
    loss_chunks: int = 1

    @property
    def mesh(self) -> Mesh:
        """The axes that shard a layer."""
        sizes = {"cp": self.cp, "ep": self.ep, "tp": self.tp}
        return Mesh(tuple((axis, size) for axis, size in sizes.items() if size > 1) or (("tp", 1),))

    @property
    def options(self) -> Options:
        """The options that a layer is compiled with."""
        chosen: dict[str, Any] = {"activation_checkpoint": self.policy, "loss_chunks": self.loss_chunks}
        if self.tp > 1:
            chosen["sequence_parallel"] = self.sequence_parallel
        if self.cp > 1:
            chosen |= {"attention": self.attention, "cp_load_balance": self.cp_load_balance}
        if self.ep > 1 or self.expert_axis != "ep":
            chosen |= {"expert_axis": self.expert_axis, "token_dispatcher": self.token_dispatcher}
        return Options(**chosen)


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh axes, and the options that change the price; names and values are those of `Options`.

    micro_batch: rows of one microbatch on one data-parallel rank. layers: layers of each stage, in
    the model's order ((): equal, those that are left over in the middle). ``schedule`` "" is 1f1b with pp.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1
    microbatches: int = 1
    micro_batch: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    schedule: str = ""
    virtual_stages: int = 1
    layers: tuple[int, ...] = ()
    attention: str = "auto"
    cp_load_balance: str = "auto"
    expert_axis: str = "ep"
    token_dispatcher: str = "auto"
    activation_checkpoint: str = "none"
    loss_chunks: int = 1
    optimizer_cpu_offload: bool = False
    reduce_grads: str = "auto"
    reshard_after_forward: bool | str = "auto"

    def __post_init__(self) -> None:
        for axis in OUTER_TO_INNER:
            if getattr(self, axis) < 1:
                raise ValueError(f"layout: axis {axis} needs a size of at least 1, found {getattr(self, axis)}")
        for name in ("microbatches", "micro_batch", "virtual_stages", "loss_chunks"):
            if getattr(self, name) < 1:
                raise ValueError(f"layout: {name} needs at least 1, found {getattr(self, name)}")

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return math.prod(getattr(self, axis) for axis in OUTER_TO_INNER)

    @property
    def data_size(self) -> int:
        """Ranks with different rows."""
        return self.dp_replicate * self.dp * self.ep

    @property
    def batch(self) -> int:
        """Rows of a step."""
        return self.data_size * self.microbatches * self.micro_batch

    @property
    def parts(self) -> int:
        """Stages of the pipeline, over all virtual ones."""
        return self.pp * self.virtual_stages

    @property
    def mesh(self) -> Mesh:
        """The mesh, without axes of size 1."""
        sizes = tuple((axis, getattr(self, axis)) for axis in OUTER_TO_INNER if getattr(self, axis) > 1)
        return Mesh(sizes or (("dp", 1),))

    @cached_property
    def placement(self) -> Placement:
        """What the costs of its layers depend on."""
        shared = {f.name: getattr(self, f.name) for f in fields(Placement) if f.name != "policy"}
        return Placement(**shared, policy=self.activation_checkpoint)

    @cached_property
    def gathers_once(self) -> bool:
        """Whether sharded parameters are gathered once per step, as `Options.gathers_once`."""
        return (
            ZERO_STAGES[self.zero].gathers_once
            if self.reshard_after_forward == "auto"
            else not self.reshard_after_forward
        )

    @cached_property
    def reduces_once(self) -> bool:
        """Whether gradients are reduced once per step, as `Options.reduces_once`."""
        return ZERO_STAGES[self.zero].reduces_once if self.reduce_grads == "auto" else self.reduce_grads == "step"

    def options(self, **others: Any) -> Options:
        """The options of `autopar.parallelize` for it, without those of axes that it lacks; ``others`` are added."""
        chosen: dict[str, Any] = {
            "microbatches": self.microbatches,
            "activation_checkpoint": self.activation_checkpoint,
            "loss_chunks": self.loss_chunks,
            "optimizer_cpu_offload": self.optimizer_cpu_offload,
        }
        if self.dp * self.ep * self.cp > 1:
            chosen |= {name: getattr(self, name) for name in ("zero", "reduce_grads", "reshard_after_forward")}
        if self.tp > 1:
            chosen["sequence_parallel"] = self.sequence_parallel
        if self.pp > 1:
            chosen["schedule"] = self.schedule or "1f1b"
            if self.virtual_stages > 1:
                chosen["virtual_stages"] = self.virtual_stages
        if self.cp > 1:
            chosen |= {"attention": self.attention, "cp_load_balance": self.cp_load_balance}
        if self.ep > 1 or self.expert_axis != "ep":
            chosen |= {"expert_axis": self.expert_axis, "token_dispatcher": self.token_dispatcher}
        return Options(**(chosen | others))

    @classmethod
    def of(cls, sizes: Mapping[str, int], options: Options, batch: int, **more: Any) -> Layout:
        """The layout of a mesh, options and the rows of a step. Raises ValueError for rows that do not divide."""
        shared = {f.name for f in fields(cls)} & {f.name for f in fields(Options)}
        chosen: dict[str, Any] = {name: getattr(options, name) for name in shared - {"virtual_stages", "loss_chunks"}}
        chosen |= {
            "virtual_stages": options.virtual_stages or _fewest_stages(options.schedule),
            "loss_chunks": options.loss_chunks or 1,
            "activation_checkpoint": options.activation_checkpoint or "none",
        }
        chosen |= {**sizes, **more}
        found = cls(**chosen)
        rows, left = divmod(batch, found.data_size * found.microbatches)
        if left or not rows:
            raise ValueError(
                f"batch: {found.data_size} data-parallel ranks x {found.microbatches} microbatches need a batch that "
                f"divides, found {batch}; choose a multiple of {found.data_size * found.microbatches}"
            )
        return cls(**chosen, micro_batch=rows)


def known_schedule(layout: Layout) -> str:
    """Why its schedule cannot be priced; "" if it can."""
    name, found = layout.schedule or "1f1b", layout.virtual_stages
    if layout.pp == 1:
        return ""
    if name not in SCHEDULES:
        return f"schedule: unknown schedule {name!r}"
    if name != "interleaved" and found != (needed := SCHEDULES[name].virtual_stages):
        return f"schedule: {name} runs {needed} parts per rank, found virtual_stages={found}"
    return ""


def _fewest_stages(schedule: str) -> int:
    """Parts per rank of a schedule, if nobody says how many."""
    return SCHEDULES[schedule].virtual_stages if schedule in SCHEDULES else 1
