"""What compiling makes, and what the runtime runs: step graphs, and the facts that go with them."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import GraphModule

from autopar.ir.parameter import ParameterSpec
from autopar.ir.signature import Signature
from autopar.plan import Plan
from autopar.schedule.order import Hop, Order


@dataclass
class StepGraphs:
    """What one rank runs for one micro-batch.

    forward: placeholders are ``inputs``; returns the outputs, then the saved values.
    backward: placeholders are ``backward_inputs``: names of ``inputs``, of saved values, then one tangent per loss;
    returns a gradient for each of ``gradients`` (names of placeholders of the local graph), reduced.
    losses: indices of the outputs that have a tangent. backward is None when nothing has a gradient. dependent: indices
    of all outputs that depend on a trainable parameter, whether or not there is a backward for them.
    backward_local: with micro-batches, the backward of all but the last: gradients are this rank's own; ``backward``
    then takes their sums as further inputs.
    """

    forward: GraphModule
    backward: GraphModule | None
    inputs: list[str]
    outputs: int
    saved: list[str] = field(default_factory=list)
    backward_inputs: list[str] = field(default_factory=list)
    tangents: int = 0
    losses: list[int] = field(default_factory=list)
    dependent: list[int] = field(default_factory=list)
    gradients: list[str] = field(default_factory=list)
    backward_local: GraphModule | None = None


@dataclass
class Prologue:
    """``graph`` takes the placeholders named in ``inputs`` and returns one value per name in ``totals``, to be summed
    over micro-batches and fed to the main graph."""

    graph: GraphModule
    inputs: list[str]
    totals: list[str]


@dataclass
class StepGraph:
    """A graph that takes the values named in ``inputs`` and makes those named in ``outputs`` (None: no value).

    A value of the model has its node's name, ``grad:NAME`` is the gradient of NAME, ``saved:NAME`` is what F keeps for
    B and W, ``stash:NAME`` what B keeps for W. Ints ``slice_start`` and ``slice_length`` say which token slice runs.
    """

    graph: GraphModule
    inputs: list[str]
    outputs: list[str | None]


@dataclass(frozen=True)
class Cache:
    """Keys (or values) that later token slices attend to: F of a slice takes those of earlier slices as ``past`` and
    makes its ``own``; both lie along ``dim``. B makes ``grad:past`` and takes ``grad:own``."""

    past: str
    own: str
    dim: int


@dataclass
class Stage:
    """The step graphs of one part of the model.

    forward (F): used parameters, buffers, prologue values, received values -> sent values, losses, mutations, saved.
    backward (BW): saved values, used parameters, ``grad:`` of sent values -> ``grad:`` of received values and of used
    parameters. backward_input (B), backward_weight (W): the same in two. None where nothing has a gradient.
    gather (G): stored -> used parameters; ``aliases``: used -> stored name where nothing is to do.
    reduce (R): ``grad:`` of used parameters, summed over micro-batches -> ``grad:`` of stored ones.
    losses: names in F's outputs, which every micro-batch adds to. mutations: F's output -> buffer name.
    parameters: original names of what it holds. caches: of token slices.
    """

    forward: StepGraph
    backward: StepGraph | None = None
    backward_input: StepGraph | None = None
    backward_weight: StepGraph | None = None
    gather: StepGraph | None = None
    reduce: StepGraph | None = None
    aliases: dict[str, str] = field(default_factory=dict)
    losses: list[str] = field(default_factory=list)
    mutations: dict[str, str] = field(default_factory=dict)
    parameters: list[str] = field(default_factory=list)
    caches: list[Cache] = field(default_factory=list)


@dataclass
class Pipeline:
    """A model cut into parts.

    hops: what goes between parts. once: graph of the values that are the same for all micro-batches and depend on no
    parameter; each: the same per micro-batch. A rank runs what its stages need of them. order: compute actions.
    slices: lengths of the token slices (empty: none). notes: (subject, reason) of every decision.
    """

    parts: list[Stage]
    hops: list[Hop]
    order: Order
    once: StepGraph | None = None
    each: StepGraph | None = None
    slices: tuple[int, ...] = ()
    notes: tuple[tuple[str, str], ...] = ()


@dataclass
class Compiled:
    """Everything before `bind`: the same on all ranks.

    ``local``: the typed local graph. ``graphs``: its forward and backward, or ``pipeline``: those of its parts.
    ``prologue``: what is computed once per step from the inputs of all micro-batches (None without micro-batches).
    ``timings``: seconds per stage of the compiler.
    """

    signature: Signature
    plan: Plan
    local: GraphModule
    graphs: StepGraphs | None
    prologue: Prologue | None
    parameters: tuple[ParameterSpec, ...]
    train: bool
    timings: dict[str, float]
    pipeline: Pipeline | None = None

    @property
    def steps(self) -> StepGraphs:
        """The step graphs of a model that is not cut into parts."""
        assert self.graphs is not None, "a pipeline has the graphs of its parts"
        return self.graphs
