"""What compiling makes, and what the runtime runs: step graphs, and the facts that go with them."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import GraphModule

from autopar.capture import Signature
from autopar.parameter import ParameterSpec
from autopar.pass_manager import Context
from autopar.plan import Plan


@dataclass
class StepGraphs:
    """What one rank runs for one micro-batch.

    forward: placeholders are ``inputs``; returns the outputs, then the saved values.
    backward: placeholders are ``backward_inputs``: names of ``inputs``, of saved values, then one tangent per loss;
    returns a gradient for each of ``gradients`` (names of placeholders of the local graph), reduced.
    losses: indices of the outputs that have a tangent. backward is None when nothing has a gradient.
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
class Compiled:
    """Everything before `bind`: the same on all ranks.

    ``local``: the typed local graph. ``steps``: its forward and backward. ``prologue``: what is computed once per
    step from the inputs of all micro-batches (None without micro-batches). ``context``: what the passes knew, and how
    long they took.
    """

    signature: Signature
    plan: Plan
    local: GraphModule
    steps: StepGraphs
    prologue: Prologue | None
    parameters: tuple[ParameterSpec, ...]
    train: bool
    context: Context

    @property
    def timings(self) -> dict[str, float]:
        """Seconds per stage of the compiler."""
        return self.context.timings
