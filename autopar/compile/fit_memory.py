"""What the backward of each part makes again: as a policy says, or the least under a limit, checked on what comes out.

    parts, nothing made again  -->  memory of each rank  -->  choice for each layer  -->  parts  -->  memory ...

The choice counts bytes of layers, the walk over the graphs that were made (`autopar.cost.memory`) counts what a rank
holds. What the first does not see (parameters, buckets, what passes change) is the difference between the two; it is
taken from the limit, and the choice is made again until it fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from torch.fx import Node

from autopar.checkpoint_policies import AUTO, CHECKPOINTS, LayerCheckpoint
from autopar.compile.parts import PipelineMaker
from autopar.compile.recompute_facts import JointFacts, chosen_by, layers_of
from autopar.compile.recompute_ways import Known, cost_of, find_ways
from autopar.cost.hardware import DEFAULT
from autopar.cost.memory import memories
from autopar.cost.topology import Topologies
from autopar.cost.traffic import Links
from autopar.plan import Plan
from autopar.planner.recompute_layers import LayerWay
from autopar.planner.recompute_parts import Choice, Moment, best_choice, fullest, moments, smallest_choice
from autopar.steps.graphs import Compiled, Pipeline

ATTEMPTS = 6
LESS = 0.99  # of the least that was found: worth another search


class LimitError(ValueError):
    """Nothing fits. least: bytes that would do."""

    def __init__(self, text: str, least: int) -> None:
        super().__init__(text)
        self.least = least


def with_checkpoints(maker: PipelineMaker, finished: Callable[[Plan, Pipeline], Compiled]) -> Compiled:
    """The compiled model. Raises ValueError where no choice fits the limit, with the least that one would fit."""
    plan = maker.plan
    name = plan.options.checkpoints
    if not maker.train:
        return finished(replace(plan, checkpoints=()), maker.make())
    if plan.checkpoints:
        return finished(plan, maker.make(_by_part(plan.checkpoints)))
    fitting = _Fitting(maker, finished)
    with maker.ctx.unobserved() as watched:
        made = fitting.under_limit(plan.options.memory_limit) if name == AUTO else fitting.by_policy(name)
    return finished(made.plan, maker.make(_by_part(made.plan.checkpoints))) if watched else made


def _by_part(layers: Sequence[LayerCheckpoint]) -> dict[int, frozenset[str]]:
    found: dict[int, frozenset[str]] = {}
    for layer in layers:
        found[layer.part] = found.get(layer.part, frozenset()) | set(layer.again)
    return found


class _Fitting:
    """The search of one compilation."""

    def __init__(self, maker: PipelineMaker, finished: Callable[[Plan, Pipeline], Compiled]) -> None:
        self.maker, self.finished, self.first = maker, finished, maker.first_like()
        plan, self.splits = maker.plan, False  # whether backwards come in two
        self.links = Links(plan.mesh, Topologies.parse(plan.options.topology, DEFAULT.links))

    @cached_property
    def facts(self) -> list[JointFacts]:
        """Of each part; equal parts share them."""
        found: dict[int, JointFacts] = {}
        for k in dict.fromkeys(self.first):
            derived = self.maker.derived(k)
            first = derived.first if self.splits else None
            units = layers_of(derived.calls, asked=self.maker.plan.options.checkpoints == "model")
            found[k] = JointFacts(derived.joint, units, self.links, first)
        return [found[k] for k in self.first]

    @cached_property
    def ways(self) -> list[list[list[LayerWay]]]:
        """Part -> layer -> what it has to choose from."""
        known: Known = {}
        found = {facts: find_ways(facts, known) for facts in dict.fromkeys(self.facts)}
        return [found[facts] for facts in self.facts]

    # --- a policy ------------------------------------------------------------------------------------------

    def by_policy(self, name: str) -> Compiled:
        policy = CHECKPOINTS[name]
        if not self.maker.asks(name):
            return self.finished(self.maker.plan, self.maker.make())
        chosen = {facts: chosen_by(policy, name, facts) | facts.joint.always for facts in dict.fromkeys(self.facts)}
        return self.compiled([chosen[facts] for facts in self.facts], f"checkpoint={name}")

    # --- a limit -------------------------------------------------------------------------------------------

    def under_limit(self, limit: int) -> Compiled:
        """Raises ValueError where nothing fits."""
        nothing = self.by_policy("none")
        self.splits = any(action.kind == "W" for row in nothing.pipeline.order.ranks for action in row)
        found = self.search(nothing, limit)
        if found is not None:
            return found
        least = self.smallest(nothing)
        if _peak(least) <= limit:
            return least
        zero = self.maker.plan.options.zero
        raise LimitError(
            f"checkpoint: no choice of what to make again fits a memory_limit of {limit:,} bytes; the least that would "
            f"do is {_peak(least):,} bytes; use more ranks{'' if zero == 3 else ', zero=3,'} or smaller micro-batches",
            _peak(least),
        )

    def search(self, made: Compiled, limit: float) -> Compiled | None:
        """From what makes nothing again, by what the graphs hold."""
        choice: Choice | None = [[0] * len(layers) for layers in self.ways] if _peak(made) > limit else []
        for _ in range(ATTEMPTS):
            held = [found.peak for found in memories(made)]
            if max(held) <= limit:
                return made
            events = self.events(made.pipeline)
            assert choice
            unseen = [peak - fullest(self.ways, choice, events, rank) for rank, peak in enumerate(held)]
            choice = best_choice(self.ways, events, [limit - bytes_ for bytes_ in unseen])
            if choice is None:
                return None
            made = self.by_choice(choice, limit)
        return None

    def smallest(self, nothing: Compiled) -> Compiled:
        """What holds least: made again can be more than kept, where W comes late; and what the choice does not see may
        leave room below the smallest that it sees."""
        smallest = self.by_choice(smallest_choice(self.ways, self.events(nothing.pipeline)), 0)
        found = min((nothing, smallest), key=_peak)
        while (less := self.search(nothing, LESS * _peak(found))) is not None:
            found = less
        return found

    def events(self, pipeline: Pipeline) -> list[Moment]:
        """When what is held counts. A sample of a token slice stands for all of them."""
        if not pipeline.slices:
            return moments(pipeline.order)
        return moments(pipeline.order, [length / self.maker.slices[0].length for length in pipeline.slices])

    def by_choice(self, choice: Choice, limit: float) -> Compiled:
        again = [
            [layer.way(k) for layer, k in zip(facts.layers, ways, strict=True)]
            for facts, ways in zip(self.facts, choice, strict=True)
        ]
        reason = f"the least time under {limit:,.0f} bytes" if limit else "the least bytes"
        return self.compiled(
            [frozenset().union(facts.joint.always, *x) for facts, x in zip(self.facts, again, strict=True)], reason
        )

    # --- graphs --------------------------------------------------------------------------------------------

    def compiled(self, remade: Sequence[frozenset[Node]], reason: str) -> Compiled:
        """``remade``: of each part, nodes of its joint graph, or of that of an equal part."""
        names = {k: frozenset(n.name for n in nodes) for k, nodes in enumerate(remade)}
        pipeline = self.maker.make(names)
        layers = tuple(found for k, nodes in enumerate(remade) for found in self._layers(k, nodes, reason))
        return self.finished(replace(self.maker.plan, checkpoints=layers), pipeline)

    def _layers(self, k: int, nodes: frozenset[Node], reason: str) -> list[LayerCheckpoint]:
        facts, found = self.facts[k], []
        nodes = frozenset(facts.joint.closure(facts.joint.wanted, nodes)[1]) & nodes  # B may need fewer
        names = self.maker.names_at(k, [layer.forward[0].meta["call"] for layer in facts.layers])
        for layer, name in zip(facts.layers, names, strict=True):
            again = [n for n in layer.forward if n in nodes]
            if again:
                cost, values = cost_of(facts, layer, frozenset(again)), tuple(n.name for n in again)
                found.append(LayerCheckpoint(k, name, values, cost.saved, cost.seconds, reason))
        return found


def _peak(compiled: Compiled) -> int:
    return max(found.peak for found in memories(compiled))
