"""What the user may ask for: each option declared once, with its values, its words and the axes that it is about.

The command line (`autopar.cli.shared_arguments`), docs/options.md, the docstring of `Options` and the check that an
option counts on a mesh (`autopar.planner.option_checks`) read the declarations. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from autopar.ac_policies import AC_POLICIES, AUTO
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

EXPERT_AXES = ("ep", "dp", "cp", "tp")  # over which experts may be cut


@dataclass(frozen=True)
class ValueKind:
    """What values an option takes. ``check(name, value)`` gives a value in its own type, ``read`` makes one of a text;
    both raise ValueError. ``shown`` stands for a value in help."""

    check: Callable[[str, Any], Any]
    read: Callable[[str], Any] = str
    shown: str = ""


@dataclass(frozen=True)
class DeclaredOption:
    """A declared option. help: what it says. left_out: what holds without it, where the default does not say that.
    axes: with any of them it counts, without all of them it would be ignored (none: it always counts). names: a table
    that its values come from."""

    name: str
    default: Any
    kind: ValueKind
    help: str
    left_out: str = ""
    axes: tuple[str, ...] = ()
    names: Iterable[str] = ()

    @property
    def flag(self) -> str:
        """On the command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def without(self) -> str:
        """What holds without it."""
        return self.left_out or str(self.default)

    @property
    def words(self) -> str:
        """What it says, what it takes, and what holds without it, in a line."""
        names = f": {', '.join(self.names)}" if list(self.names) else ""
        return f"{self.help}{names} (default: {self.without})"

    def read(self, text: str) -> Any:
        """The value that a text of the command line means. Raises ValueError."""
        try:
            value = self.kind.read(text)
        except ValueError:
            value = text  # the check says what it should have been
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


def _option(default: Any, kind: ValueKind, words: str, left_out: str = "", **more: Any) -> Any:
    return field(default=default, metadata={"kind": kind, "help": words, "left_out": left_out, **more})


_DP, _CP, _PP = ("dp", "ep", "cp"), ("cp",), ("pp",)


@dataclass(frozen=True)
class Options:
    """What the user may ask for: keyword arguments of `autopar.parallelize`, on the command line with dashes."""

    zero: int = _option(
        0, _choice(*ZERO_STAGES),
        "cut over dp: 1 parameters and optimizer states, 2 also sums of gradients, 3 also what is gathered",
        axes=_DP,
    )  # fmt: skip
    sequence_parallel: bool = _option(False, FLAG, "cut the residual stream along the sequence over tp", axes=("tp",))
    microbatches: int = _option(1, POSITIVE, "gradient accumulation steps of a train_step, which also fill a pipeline")
    precision: Precision = _option(  # noqa: RUF009  (frozen)
        PRECISIONS["none"],
        ValueKind(a_precision, shown=f"{{{','.join(PRECISIONS)}}}"),
        "dtypes of parameters as stored and as used, and of sums of gradients; a name or an autopar.Precision",
        "as the model is",
        names=PRECISIONS,
    )
    replicate_ops: tuple[str, ...] = _option(
        (), NAMES, "operators that run on whole values, with or without a rule: aten.foo.default", "none"
    )
    bucket_bytes: int = _option(25 * 2**20, BYTES, "size of a bucket of small gradients")
    schedule: str = _option(
        "", NAME, "how microbatches run through the stages", "the fastest by simulation", axes=_PP, names=SCHEDULES
    )
    split_points: tuple[str, ...] = _option(
        (), NAMES, "modules with which each part but the first begins", "balanced by estimated time", axes=_PP
    )
    virtual_stages: int = _option(
        0, COUNT, "parts per rank, for schedules that take several", "the schedule's own number", axes=_PP
    )
    token_slices: int | tuple[int, ...] = _option(
        0, LENGTHS, "for schedules over token slices: their number, or their lengths", "by estimated time", axes=_PP
    )
    reshard_after_forward: bool | str = _option(
        "auto", _choice("auto", False, True),
        "True: gather sharded parameters for each use, in forward and backward; False: once per step",
        "True with zero=3, else False", axes=_DP,
    )  # fmt: skip
    reduce_grads: str = _option(
        "auto", _choice("auto", "step", "microbatch"), "sum gradients over ranks per step, or per microbatch",
        "after each microbatch with zero=2 and 3, else once per step", axes=_DP,
    )  # fmt: skip
    memory_limit: int = _option(
        0, BYTES, "what a rank may hold, such as 80e9 or 80GB: for recompute, split points and schedules that search",
        "no limit",
    )  # fmt: skip
    activation_offload: int = _option(
        0, BYTES, "what a rank may hold of activations in host memory, where a memory_limit asks for it", "nothing",
    )  # fmt: skip
    optimizer_cpu_offload: bool = _option(
        False, FLAG, "states of optimizers lie in host memory; a step brings those of a bucket of parameters at a time"
    )
    activation_checkpoint: str = _option(
        "", NAME, "which activations are recomputed or offloaded instead of kept",
        "auto with a memory_limit, else what the model asks for", names=AC_POLICIES,
    )  # fmt: skip
    loss_chunks: int = _option(
        0, COUNT, "chunks of tokens in which losses are computed: the logits of one exist at once; 1: whole",
        "as many as help, with a memory_limit; else whole",
    )  # fmt: skip
    attention: str = _option(
        "auto",
        ValueKind(a_text, shown="NAME|F+B"),
        "how attention runs over a cut sequence, one name or two, for forward and backward",
        "the fastest by estimate",
        axes=_CP,
        names=ALGORITHMS,
    )
    cp_load_balance: str = _option(
        "auto",
        _choice("auto", *LAYOUTS),
        "how causal sequences are dealt to the ranks",
        "the faster by estimate",
        axes=_CP,
    )
    expert_axis: str = _option(
        "ep", _choice("auto", *EXPERT_AXES),
        "the axis over which experts are cut: one of their own, or one that there is for something else; auto: ep, or "
        "without it what takes least time by estimate, not cutting them included", axes=EXPERT_AXES,
    )  # fmt: skip
    token_dispatcher: str = _option(
        "auto", ValueKind(_token_dispatcher, shown="NAME"), "how tokens get to experts on other ranks",
        "the fastest by estimate", axes=EXPERT_AXES, names=TOKEN_DISPATCHERS,
    )  # fmt: skip
    target_hardware: str = _option(
        "A100", ValueKind(_chip, shown="NAME"), "the chip that times are estimated for", names=CHIPS,
    )  # fmt: skip
    capacity_factor: float = _option(
        0.0, ValueKind(partial(number, least=0.0), _number, "FACTOR"),
        "an expert takes this many times its even share of a training step's tokens, the first ones of the whole batch",
        "all that choose it",
    )  # fmt: skip
    aux_loss_scope: str = _option(
        "global_batch", _choice("global_batch", "microbatch", meant={"exact": "global_batch"}),
        "what a loss that balances experts counts: the choices of the whole batch, for which a forward of every "
        "microbatch goes ahead, or of each microbatch, times their number",
    )  # fmt: skip
    topology: str = _option(
        "",
        LINKS,
        "links of each axis, for estimates: ring, mesh or switch, bytes per second, seconds of a message",
        "those of target_hardware, by a switch",
    )
    batch_dims: tuple[tuple[str, int | None], ...] = _option(
        (),
        DIMS,
        "which dim of an input is the batch, over dp and microbatches; none for one that is no part; nested ones "
        "by path (past.0)",
        "found in the graph",
    )
    static_inputs: tuple[str, ...] = _option(
        (), NAMES,
        "small inputs whose values the graph may depend on, such as sizes of grids; like shapes, other values compile "
        "again, and all ranks have the same", "none",
    )  # fmt: skip

    @property
    def ac_policy(self) -> str:
        """Name of the policy of activation checkpointing."""
        return self.activation_checkpoint or (AUTO if self.memory_limit else "model")

    @property
    def shards_parameters(self) -> bool:
        """Whether parameters and optimizer state are sharded on the axes of data parallelism."""
        return ZERO_STAGES[self.zero].shards

    @property
    def gathers_once(self) -> bool:
        """Whether cut parameters are gathered, and cast, once per step (else for each use)."""
        stage = ZERO_STAGES[self.zero]
        return stage.gathers_once if self.reshard_after_forward == "auto" else not self.reshard_after_forward

    @property
    def reduces_once(self) -> bool:
        """Whether gradients are summed over ranks once per step (else after each microbatch)."""
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
    "check_batches": "check_replica_inputs", "shapes": "padding", "compile": "backend", "batch": "example_batch",
    "inputs": "example_batch",
}  # of other libraries and earlier versions for these options, and for arguments of parallelize  # fmt: skip
DECLARED = {f.name: DeclaredOption(f.name, f.default, **f.metadata) for f in fields(Options)}
Options.__doc__ = "\n".join([f"{Options.__doc__}\n", *(f"{o.name}: {o.words}." for o in DECLARED.values())])
