"""What the compiler produces and the runtime runs: step graphs, and their metadata."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from torch import Tensor
from torch.fx import GraphModule

from autopar.ir.signature import ParameterSpec, Signature
from autopar.plan import Plan
from autopar.schedule.order import Order, P2PEdge


@dataclass
class Prologue:
    """``graph`` takes the placeholders named in ``inputs`` and returns one value per name in ``totals``, to be summed
    over microbatches and fed to the main graph."""

    graph: GraphModule
    inputs: list[str]
    totals: list[str]


@dataclass
class StepGraph:
    """A graph that takes the values named in ``inputs`` and returns those named in ``outputs`` (None: no value).

    Names are those of `autopar.steps.graphs`. ``grad:`` of a loss is 1 in a training step, and what autograd passes
    after ``model(**batch)``. Ints ``slice_start`` and ``slice_length`` say which token slice runs.
    """

    graph: GraphModule
    inputs: list[str]
    outputs: list[str | None]

    @property
    def unnamed(self) -> GraphModule:
        """The graph, for callers that need no node names."""
        return self.graph


class LazyGraph:
    """A mixin for graphs that are built on first access to ``graph``."""

    _make: Callable[[], GraphModule]

    def __getattr__(self, name: str) -> Any:
        if name != "graph" or "_make" not in self.__dict__:
            raise AttributeError(name)
        made = self.__dict__["graph"] = self._make()
        return made


class CopiedStepGraph(LazyGraph, StepGraph):
    """A graph that equals another except for names. A rank builds only those of its own stages."""

    def __init__(
        self, like: StepGraph, make: Callable[[], GraphModule], inputs: list[str], outputs: list[str | None]
    ) -> None:
        self._make, self._like, self.inputs, self.outputs = make, like, inputs, outputs

    @property
    def unnamed(self) -> GraphModule:
        """The graph, for callers that need no node names: an existing one."""
        made: GraphModule | None = self.__dict__.get("graph")
        return self._like.unnamed if made is None else made


@dataclass(frozen=True)
class Cache:
    """Keys (or values) that later token slices attend to: F of a slice takes those of earlier slices as ``past`` and
    returns its ``own``; both lie along ``dim``. B returns ``grad:past`` and takes ``grad:own``."""

    past: str
    own: str
    dim: int


@dataclass
class Stage:
    """The step graphs of one stage of the model.

    forward (F): parameters, buffers, prologue values, received values -> sent values, losses, mutations, saved.
    backward (BW): saved values, parameters, ``grad:`` of sent values and of outputs -> ``grad:`` of received values and
    of parameters. backward_input (B), backward_weight (W): the same, split. None where nothing has a gradient.
    losses: names in F's outputs, accumulated over microbatches. dependent: names of all outputs of the model that
    depend on a trainable parameter, whether or not there is a backward for them. roots: gradient -> the outputs that
    it depends on, where these are not all that have a gradient. mutations: F's output -> buffer name.
    parameters: original names of its parameters. caches: of token slices.

    The conversions of parameters between stored and used, and of their gradients on the way back, are
      split off   gather (G): stored -> used parameters; ``aliases``: used -> stored name where nothing is to do,
                  ``gathered``: of the others.
                  gather_forward (GF): G and F in one, for the first F of a step; returns the results of both.
                  reduce (R): ``grad:`` of used parameters, accumulated over microbatches -> ``grad:`` of stored ones.
      or inside   of F and of backward_reduce (BWR): the last backward of a step, which takes ``sum:`` of the earlier
                  ones and reduces, so that reductions overlap with it. BW then returns unreduced gradients.
      or inside   of every backward: microbatches then accumulate shards.
    """

    forward: StepGraph
    backward: StepGraph | None = None
    backward_input: StepGraph | None = None
    backward_weight: StepGraph | None = None
    backward_reduce: StepGraph | None = None
    gather: StepGraph | None = None
    gather_forward: StepGraph | None = None
    reduce: StepGraph | None = None
    aliases: dict[str, str] = field(default_factory=dict)
    gathered: dict[str, str] = field(default_factory=dict)
    losses: list[str] = field(default_factory=list)
    dependent: list[str] = field(default_factory=list)
    roots: dict[str, list[str]] = field(default_factory=dict)
    mutations: dict[str, str] = field(default_factory=dict)
    parameters: list[str] = field(default_factory=list)
    caches: list[Cache] = field(default_factory=list)


@dataclass
class GlobalStatistics:
    """The pre-pass that a step runs before its first F, on every microbatch, without gradients: a graph for each stage
    that has one. It takes stored parameters, totals of earlier rounds and values by name; it returns values, and
    addends to the ``totals`` of this round, summed over microbatches. edges: values sent to later stages."""

    graphs: list[StepGraph | None]
    edges: list[P2PEdge]
    totals: list[str]


@dataclass
class Pipeline:
    """A model split into stages; one stage without pipeline parallelism.

    edges: values sent between stages. once: graph of the values that are the same for all microbatches and depend on no
    parameter; each: the same per microbatch. A rank runs what its stages need of them. order: compute actions.
    token_slices: their lengths (empty: none). notes: (subject, reason) of every decision. pre_pass: rounds of the
    pre-pass that runs before the first action, for totals that depend on weights.
    """

    parts: list[Stage]
    edges: list[P2PEdge]
    order: Order
    once: StepGraph | None = None
    each: StepGraph | None = None
    token_slices: tuple[int, ...] = ()
    notes: tuple[tuple[str, str], ...] = ()
    pre_pass: list[GlobalStatistics] = field(default_factory=list)


@dataclass(frozen=True)
class StepDigests:
    """Metadata of a model that was compiled before, which would otherwise need all graphs of a step. ``digests``: by
    name of a stage; axes: over which its graphs communicate; along: those on which attention exchanges shards."""

    digests: dict[str, str]
    axes: tuple[str, ...]
    along: tuple[str, ...]


@dataclass
class Compiled:
    """Everything before lowering: the same on all ranks.

    ``local``: the local graph with placements. ``pipeline``: the step graphs of its stages. ``prologue``: what is
    computed once per step from the inputs of all microbatches (None without microbatches, or if there is nothing to
    compute). ``timings``: seconds per stage of the compiler.
    """

    signature: Signature
    plan: Plan
    local: GraphModule
    pipeline: Pipeline
    prologue: Prologue | None
    parameters: tuple[ParameterSpec, ...]
    train: bool
    timings: dict[str, float]
    known: StepDigests | None = None

    @property
    def constants(self) -> dict[str, Tensor]:
        """Values of the inputs of kind constant, by name."""
        found: dict[str, Tensor] = self.local.meta.get("constants", {})
        return found

    @property
    def stage(self) -> Stage:
        """The step graphs of a model without pipeline parallelism."""
        (only,) = self.pipeline.parts
        return only

    @property
    def losses(self) -> list[str]:
        """Names of the outputs that a training step differentiates."""
        return list(dict.fromkeys(name for part in self.pipeline.parts for name in part.losses))


# h0              a value of the model, by its node's name
# output:0        an output of the model, by its place
# grad:h0         the gradient of h0; grad:output:0 that of an output
# saved:relu      what F saves for the backward
# host:relu       the same, in host memory
# stash:mm        what B saves for W
# sum:weight      grad:weight accumulated over the earlier backwards of a step


def grad(name: str) -> str:
    """The gradient of a value."""
    return f"grad:{name}"


def saved(name: str) -> str:
    """The name of a value that F saves."""
    return f"saved:{name}"


def on_host(name: str) -> str:
    """The name of a value that F saves in host memory."""
    return f"host:{name}"


def stash(name: str) -> str:
    """The name of a value that B saves for W."""
    return f"stash:{name}"


def earlier_sum(name: str) -> str:
    """The name of a value's accumulated gradient."""
    return f"sum:{name}"


def output(place: int) -> str:
    """An output of the model, by its place."""
    return f"output:{place}"


def is_a(name: object, *kinds: str) -> TypeGuard[str]:
    """Whether this is the name of a value of one of ``kinds``: "grad", "saved", "host", "stash", "sum",
    "output"."""
    return isinstance(name, str) and ":" in name and name.partition(":")[0] in kinds


def of(name: str) -> str:
    """The value that this is the gradient, the saved copy, ... of."""
    return name.partition(":")[2]


def output_place(name: str) -> int:
    """The place of an output."""
    return int(of(name))
