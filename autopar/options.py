"""The options of `autopar.parallelize`: each declared once, with its values, its help and the mesh axes it needs.

The command line (`autopar.cli.shared_arguments`), docs/options.md, the docstring of `Options` and the check that a mesh
uses an option (`autopar.planner.plan_fits`) read the declarations. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from autopar.ac_policies import AC_POLICIES, AUTO, MODEL
from autopar.attention.algorithm_table import ALGORITHMS
from autopar.attention.layouts import LAYOUTS
from autopar.chips import CHIPS
from autopar.precision import PRECISIONS, Precision, a_precision
from autopar.schedule.request import SCHEDULES
from autopar.spelling import did_you_mean
from autopar.token_dispatchers import TOKEN_DISPATCHERS
from autopar.values import (
    a_text,
    byte_count,
    dims_by_name,
    number,
    number_or_lengths,
    one_of,
    refuse,
    texts,
    whole_number,
    yes_or_no,
)
from autopar.zero_stages import ZERO_STAGES

EXPERT_AXES = ("ep", "dp", "cp", "tp")  # on which experts may be sharded


@dataclass(frozen=True)
class ValueKind:
    """The type of an option. ``check(name, value)`` validates and converts a value, ``read`` parses a text of the
    command line; both raise ValueError. ``shown`` is the placeholder in help."""

    check: Callable[[str, Any], Any]
    read: Callable[[str], Any] = str
    shown: str = ""


@dataclass(frozen=True)
class DeclaredOption:
    """A declared option. help: what it does. default_help: what the default means, where its value does not show it.
    axes: the option has an effect only on a mesh with at least one of these axes (empty: on every mesh). names: the
    registry that its values come from."""

    name: str
    default: Any
    kind: ValueKind
    help: str
    default_help: str = ""
    axes: tuple[str, ...] = ()
    names: Iterable[str] = ()

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def shown_default(self) -> str:
        """What the default means."""
        return self.default_help or str(self.default)

    @property
    def full_help(self) -> str:
        """Help, possible values and default, in one line."""
        names = f": {', '.join(self.names)}" if list(self.names) else ""
        return f"{self.help}{names} (default: {self.shown_default})"

    def read(self, text: str) -> Any:
        """Parse and check a text of the command line. Raises ValueError."""
        try:
            value = self.kind.read(text)
        except ValueError:
            value = text  # the check below raises the error
        value = self.kind.check(self.name, value)
        for part in value.split("+") if isinstance(value, str) and value and list(self.names) else ():
            if part not in (*self.names, self.default):
                raise refuse(self.name, f"one of {', '.join(self.names)}", value, did_you_mean(part, self.names))
        return value


def _number(text: str) -> int | float:
    return int(text) if text.isdecimal() else float(text)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _lengths(text: str) -> int | tuple[int, ...]:
    lengths = tuple(int(length) for length in text.split(","))
    return lengths if len(lengths) > 1 else lengths[0]


def _dims(text: str) -> tuple[tuple[str, int | None], ...]:
    pairs = (pair.rpartition("=") for pair in text.split(","))
    return tuple((name.strip(), None if dim.strip().lower() == "none" else int(dim)) for name, _, dim in pairs)


def _chip(name: str, value: Any) -> str:
    return str(one_of(name, a_text(name, value).upper(), known=tuple(CHIPS)))


def _token_dispatcher(name: str, value: Any) -> str:
    meant = {"plain": "alltoall", "two_level": "hierarchical"}
    return str(one_of(name, value, known=("auto", *TOKEN_DISPATCHERS), meant=meant))


def _choice(*known: Any, meant: Mapping[str, str] | None = None) -> ValueKind:
    by_text = {str(value): value for value in known}
    return ValueKind(
        partial(one_of, known=known, meant=meant), lambda text: by_text.get(text, text), f"{{{','.join(by_text)}}}"
    )


FLAG, NAME, LENGTHS = (
    ValueKind(yes_or_no),
    ValueKind(a_text, shown="NAME"),
    ValueKind(number_or_lengths, _lengths, "N|L1,L2"),
)
COUNT, POSITIVE = ValueKind(whole_number, int, "N"), ValueKind(partial(whole_number, least=1), int, "N")
NAMES, BYTES = ValueKind(texts, _names, "A,B"), ValueKind(byte_count, shown="BYTES")
DIMS, LINKS = ValueKind(dims_by_name, _dims, "x=1,table=none"), ValueKind(a_text, shown="cp=ring:50e9:5e-6")


def _option(default: Any, kind: ValueKind, text: str, default_help: str = "", **more: Any) -> Any:
    return field(default=default, metadata={"kind": kind, "help": text, "default_help": default_help, **more})


_DP, _CP, _PP = ("dp", "ep", "cp"), ("cp",), ("pp",)


@dataclass(frozen=True)
class Options:
    """Keyword arguments of `autopar.parallelize`; on the command line with dashes."""

    zero: int = _option(
        0, _choice(*ZERO_STAGES),
        "what is sharded on dp: 1 parameters, gradients and optimizer state at rest; 2 also accumulated gradients; 3 "
        "also frees gathered parameters after each use",
        axes=_DP,
    )  # fmt: skip
    sequence_parallel: bool = _option(
        False,
        FLAG,
        "shard the residual stream along the sequence on tp",
        axes=("tp",),
    )
    async_tp: bool | str = _option(
        "auto", _choice("auto", False, True),
        "run products next to exchanges over tp in chunks, beside the exchange of the other chunks (async tensor "
        "parallelism): auto where it saves time by estimate, True wherever the shapes allow it", axes=("tp",),
    )  # fmt: skip
    share_encoders: bool | str = _option(
        "auto", _choice("auto", False, True),
        "share the rows (images, clips) of an encoder that all ranks of tp, cp or dp would run alike: auto where it "
        "saves time by estimate, True wherever the shapes allow it",
    )  # fmt: skip
    deal_images: bool | str = _option(
        "auto", _choice("auto", False, True),
        "let ranks of dp compute images of each other's batches, dealt by their cost, where padding makes their sizes "
        "free: auto from the first batch on that has less padding so, True from the first one on",
    )  # fmt: skip
    microbatches: int = _option(1, POSITIVE, "microbatches of a train_step (gradient accumulation)")
    replicas: int = _option(
        1,
        POSITIVE,
        "worlds with a mesh of their own that train together, each on its shard of the batch: `autopar.Replicas`",
    )
    precision: Precision = _option(  # noqa: RUF009  (frozen)
        PRECISIONS["none"],
        ValueKind(a_precision, shown=f"{{{','.join(PRECISIONS)}}}"),
        "dtypes in which parameters are stored and used, and gradients reduced: a name or an autopar.Precision",
        "the dtypes of the model",
        names=PRECISIONS,
    )
    replicate_ops: tuple[str, ...] = _option(
        (),
        NAMES,
        "operators that run replicated, on gathered inputs, even if they have a sharding rule: aten.foo.default",
        "none",
    )
    bucket_bytes: int = _option(25 * 2**20, BYTES, "largest bucket in which small gradients are reduced together")
    schedule: str = _option("", NAME, "pipeline schedule", "the fastest in simulation", axes=_PP, names=SCHEDULES)
    split_points: tuple[str, ...] = _option(
        (),
        NAMES,
        "paths of the modules at which pipeline stages begin, without the first stage",
        "balanced by estimated time",
        axes=_PP,
    )
    virtual_stages: int = _option(
        0, COUNT, "pipeline stages per rank, for interleaved schedules", "chosen with the schedule", axes=_PP
    )
    token_slices: int | tuple[int, ...] = _option(
        0,
        LENGTHS,
        "for schedules over token slices: the number of slices of a microbatch, or their lengths",
        "by estimated time",
        axes=_PP,
    )
    reshard_after_forward: bool | str = _option(
        "auto", _choice("auto", False, True),
        "True: free gathered parameters after use and gather them again in the backward; False: gather once per step",
        "True with zero=3, else False", axes=_DP,
    )  # fmt: skip
    reduce_grads: str = _option(
        "auto", _choice("auto", "step", "microbatch"),
        "when gradients are reduced over ranks: once per step, or after each microbatch",
        "microbatch with zero=2 and 3, else step", axes=_DP,
    )  # fmt: skip
    memory_limit: int = _option(
        0, BYTES,
        "memory of a rank, such as 80e9 or 80GB: activation checkpointing, split points, loss chunks and some "
        "schedules are chosen to fit",
        "no limit",
    )  # fmt: skip
    activation_offload: int = _option(
        0, BYTES, "host memory per rank for offloaded activations; used only where memory_limit asks for it", "none",
    )  # fmt: skip
    optimizer_cpu_offload: bool = _option(
        False,
        FLAG,
        "keep optimizer states in host memory; a step copies those of one bucket of parameters at a time",
    )
    activation_checkpoint: str = _option(
        "", NAME, "which activations are recomputed in the backward or offloaded, instead of kept",
        "auto with a memory_limit, else fused with backend='inductor' and model without", names=AC_POLICIES,
    )  # fmt: skip
    loss_chunks: int = _option(
        0, COUNT,
        "compute the loss in this many chunks of tokens, with the logits of one chunk in memory; 1: all at once",
        "with a memory_limit as many as it needs, else 8 for logits of 1 GiB or more if that costs no time",
    )  # fmt: skip
    tiles: int = _option(
        0, COUNT,
        "compute what treats every token by itself (MLPs with their norms) in this many tiles of tokens, forward and "
        "backward, with the inner values of one tile in memory; 1: all tokens at once",
        "with a memory_limit as many as it needs, else 1",
    )  # fmt: skip
    attention: str = _option(
        "auto",
        ValueKind(a_text, shown="NAME|F+B"),
        "context-parallel attention algorithm; F+B: one for forward, one for backward",
        "the fastest by estimate",
        axes=_CP,
        names=ALGORITHMS,
    )
    cp_recurrences: str = _option(
        "auto",
        _choice("auto", "channels", "replicate"),
        "recurrences, convolutions and shifts over the tokens that cp shards: channels gives each rank all tokens of "
        "some heads or channels, replicate lets every rank run all of them",
        "the faster by estimate",
        axes=_CP,
    )
    cp_load_balance: str = _option(
        "auto",
        _choice("auto", *LAYOUTS),
        "how a causal sequence is dealt to the ranks of cp",
        "the faster by estimate",
        axes=_CP,
    )
    expert_axis: str = _option(
        "ep", _choice("auto", *EXPERT_AXES),
        "mesh axis that experts are sharded on: ep, or one shared with dp, cp or tp; auto: ep if the mesh has it, else "
        "the fastest by estimate, which may be none", axes=EXPERT_AXES,
    )  # fmt: skip
    token_dispatcher: str = _option(
        "auto", ValueKind(_token_dispatcher, shown="NAME"), "how tokens reach experts on other ranks",
        "the fastest by estimate", axes=EXPERT_AXES, names=TOKEN_DISPATCHERS,
    )  # fmt: skip
    target_hardware: str = _option(
        "A100", ValueKind(_chip, shown="NAME"), "GPU that times are estimated for", names=CHIPS,
    )  # fmt: skip
    capacity_factor: float = _option(
        0.0, ValueKind(partial(number, least=0.0), _number, "FACTOR"),
        "an expert takes at most this many times its even share of a training step's tokens, in the order of the "
        "global batch, and drops the others", "no token is dropped",
    )  # fmt: skip
    aux_loss_scope: str = _option(
        "global_batch", _choice("global_batch", "microbatch", meant={"exact": "global_batch"}),
        "scope of the load-balancing loss: global_batch takes token counts of the whole batch, at the cost of an extra "
        "forward of every microbatch; microbatch takes those of each microbatch, and averages",
    )  # fmt: skip
    topology: str = _option(
        "",
        LINKS,
        "links of each axis, for estimates: ring, mesh or switch; bytes per second; latency in seconds",
        "those of target_hardware, within and between nodes",
    )
    documents: int | tuple[int, ...] = _option(
        0, LENGTHS,
        "documents of a packed row that estimates of attention assume: how many of equal length, or their lengths",
        "unknown: all pairs of a row are counted",
    )  # fmt: skip
    batch_dims: tuple[tuple[str, int | None], ...] = _option(
        (),
        DIMS,
        "batch dim of inputs, which dp and microbatches split; none for an input without one; nested inputs by path "
        "(past.0)",
        "inferred from the graph",
    )
    static_inputs: tuple[str, ...] = _option(
        (), NAMES,
        "small inputs whose values may specialize the graph, such as grid sizes: each new value compiles a step, and "
        "all ranks must pass the same", "none",
    )  # fmt: skip

    @property
    def ac_policy(self) -> str:
        """Name of the policy of activation checkpointing."""
        return self.activation_checkpoint or (AUTO if self.memory_limit else MODEL)

    @property
    def shards_parameters(self) -> bool:
        """Whether parameters and optimizer state are sharded on the axes of data parallelism."""
        return ZERO_STAGES[self.zero].shards

    @property
    def gathers_once(self) -> bool:
        """Whether sharded parameters are gathered, and cast, once per step (else for each use)."""
        stage = ZERO_STAGES[self.zero]
        return stage.gathers_once if self.reshard_after_forward == "auto" else not self.reshard_after_forward

    @property
    def all_microbatches(self) -> int:
        """The microbatches of a step, those of all replicas."""
        return self.microbatches * self.replicas

    @property
    def reduces_once(self) -> bool:
        """Whether gradients are reduced over ranks once per step (else after each microbatch)."""
        return ZERO_STAGES[self.zero].reduces_once if self.reduce_grads == "auto" else self.reduce_grads == "step"

    def __post_init__(self) -> None:
        for name, option in DECLARED.items():
            object.__setattr__(self, name, option.kind.check(name, getattr(self, name)))


OTHER_WORDS = {
    "gradient_accumulation_steps": "microbatches", "accumulation_steps": "microbatches", "grad_accum": "microbatches",
    "micro_batches": "microbatches", "num_microbatches": "microbatches", "dtype": "precision", "amp": "precision",
    "checkpoint": "activation_checkpoint", "checkpointing": "activation_checkpoint",
    "gradient_checkpointing": "activation_checkpoint", "activation_checkpointing": "activation_checkpoint",
    "recompute": "activation_checkpoint", "remat": "activation_checkpoint", "fsdp": "zero", "stage": "zero",
    "cuts": "split_points", "chunks": "virtual_stages", "slices": "token_slices", "gathers": "reshard_after_forward",
    "reductions": "reduce_grads", "host_memory": "activation_offload", "optimizer_on_host": "optimizer_cpu_offload",
    "offload_optimizer": "optimizer_cpu_offload", "cpu_offload": "optimizer_cpu_offload", "experts": "expert_axis",
    "dispatch": "token_dispatcher", "capacity": "capacity_factor", "aux_loss": "aux_loss_scope",
    "layout": "cp_load_balance", "device": "target_hardware", "whole_ops": "replicate_ops",
    "constants": "static_inputs", "exact": "lift_to_float64", "sync": "broadcast_weights",
    "check_batches": "check_replica_inputs", "shapes": "padding", "compile": "backend",
    "inputs": "example_batch", "tiled_mlp": "tiles", "tiled_mlp_num_shards": "tiles", "sequence_tiles": "tiles",
}  # names in other libraries and earlier versions -> option, or argument of parallelize  # fmt: skip
DECLARED = {f.name: DeclaredOption(f.name, f.default, **f.metadata) for f in fields(Options)}
Options.__doc__ = "\n".join([f"{Options.__doc__}\n", *(f"{o.name}: {o.full_help}." for o in DECLARED.values())])
