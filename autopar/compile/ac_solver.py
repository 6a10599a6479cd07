"""Activation checkpointing: which values of each stage are recomputed or offloaded to host memory, by a policy, or so
that a step is fastest under a memory limit, checked on the compiled graphs.

    stages without recomputation  -->  memory of each rank  -->  choice for each layer  -->  stages  -->  memory ...

The choice counts bytes of layers; the memory model of the compiled graphs (`autopar.cost.memory`) counts what a rank
needs. Their difference is what the choice does not see (parameters, buckets, effects of passes): it is subtracted from
the limit, and the choice is repeated until it fits. Choices are compared as drafts, whose collectives keep their
places: scheduling them takes most of the time of a compilation, and does not raise the peak under a limit.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch.fx import Node

from autopar.ac_policies import AC_POLICIES, AUTO, FUSED, NOTHING, LayerCheckpoint, StageCheckpoints
from autopar.compile.layer_options import Known, cost_of, find_ways, fused_values
from autopar.compile.layer_tensors import ChosenValues, JointInfo, chosen_by, layers_of
from autopar.compile.stages import StageBuilder
from autopar.cost.hardware import Links, device_of, host_link
from autopar.cost.memory import Memory, memories
from autopar.plan import Plan
from autopar.planner.recompute.layer_solver import RecomputeOption
from autopar.planner.recompute.stage_solver import (
    Choice,
    ScheduleSlot,
    fullest,
    moments,
    most_hosted,
    smallest_within_host,
    within_host,
)
from autopar.steps.graphs import Compiled, Pipeline

ATTEMPTS = 6
LESS = 0.99  # of the least found so far: worth another search
NEAR = 1.25  # of a limit: what the choice does not see may make the difference


class LimitError(ValueError):
    """Nothing fits the limit, or is as fast as another way that does. least: bytes that would fit (about as many, if
    there are alternatives). plan: the plan whose stages are too large."""

    def __init__(self, text: str, least: int, plan: Plan) -> None:
        super().__init__(text)
        self.least, self.plan = least, plan


def with_checkpoints(builder: StageBuilder, finished: Callable[[Plan, Pipeline], Compiled]) -> Compiled:
    """The compiled model. Raises ValueError where no choice fits the limit, with the least limit that would do."""
    plan = builder.plan
    name = builder.policy
    if not builder.train:
        return finished(replace(plan, checkpoints=()), builder.make())
    if plan.checkpoints:
        return finished(plan, builder.make(_by_part(plan.checkpoints)))
    search = _PolicySearch(builder, finished)
    with builder.ctx.unobserved() as watched:
        made = search.under_limit(plan.options.memory_limit) if name == AUTO else search.by_policy(name)
    if not watched:
        return made
    shown = builder.make(_by_part(made.plan.checkpoints))
    return finished(made.plan, replace(shown, order=made.pipeline.order))


def within_limit(made: Compiled) -> bool:
    """Whether every rank stays below the limits of the options."""
    options, held = made.plan.options, memories(made)
    return all(x.peak <= options.memory_limit and x.host <= options.activation_offload for x in held)


def has_drafts(plan: Plan) -> bool:
    """Whether choices are compared as drafts: with stages the order depends on the times of finished graphs."""
    return plan.options.ac_policy == AUTO and plan.pipeline is None


def _by_part(layers: Sequence[LayerCheckpoint]) -> dict[int, StageCheckpoints]:
    found: dict[int, StageCheckpoints] = {}
    for layer in layers:
        before = found.get(layer.part, NOTHING)
        found[layer.part] = StageCheckpoints(before.again | set(layer.again), before.host | set(layer.host))
    return found


@dataclass(frozen=True)
class _Candidate:
    """A compiled model, the choice that it was compiled with (None: nothing is recomputed), and the limit in bytes that
    asked for it."""

    made: Compiled
    choice: Choice | None = None
    limit: float = 0.0

    @cached_property
    def held(self) -> tuple[Memory, ...]:
        """The memory of each rank."""
        return memories(self.made)

    @property
    def peak(self) -> int:
        """Bytes of the fullest rank."""
        return max(found.peak for found in self.held)

    @property
    def seconds(self) -> float:
        """The time spent on recomputation and copies, over all stages."""
        return sum(layer.seconds for layer in self.made.plan.checkpoints)


class _PolicySearch:
    """The search of one compilation."""

    def __init__(self, builder: StageBuilder, finished: Callable[[Plan, Pipeline], Compiled]) -> None:
        self.builder, self.finished, self.first, self.ctx = builder, finished, builder.first_like(), builder.ctx
        plan, self.splits = builder.plan, False  # whether the backward is split into B and W
        self.device, self.links = device_of(plan.options), Links.of(plan.options, plan.mesh)
        self.host = host_link(self.links.named, self.device)

    @property
    def host_limit(self) -> int:
        """Bytes of host memory that a rank may use."""
        return self.builder.plan.options.activation_offload

    @cached_property
    def facts(self) -> list[JointInfo]:
        """The joint graph's layers of each stage; equal stages share them."""
        found: dict[int, JointInfo] = {}
        for k in dict.fromkeys(self.first):
            derived = self.builder.derived(k)
            first = derived.first if self.splits else None
            units = layers_of(derived.calls, asked=self.builder.policy == "model")
            found[k] = JointInfo(derived.joint, units, self.links, first, self.device, self.host, self.host_limit > 0)
        return [found[k] for k in self.first]

    @cached_property
    def ways(self) -> list[list[list[RecomputeOption]]]:
        """Stage -> layer -> its options."""
        known: Known = {}
        found = {facts: find_ways(facts, known) for facts in dict.fromkeys(self.facts)}
        return [found[facts] for facts in self.facts]

    # --- a policy ------------------------------------------------------------------------------------------

    def by_policy(self, name: str) -> Compiled:
        policy = AC_POLICIES[name]
        if not self.builder.asks(name):
            return self.finished(self.builder.plan, self.builder.make())
        known: dict[Hashable, frozenset[int]] = {}
        chosen = {
            facts: fused_values(facts, known) if name == FUSED else chosen_by(policy, name, facts)
            for facts in dict.fromkeys(self.facts)
        }
        made = self.compiled([chosen[facts] for facts in self.facts], f"activation_checkpoint={name}")
        hosted = max(found.host for found in memories(made)) if self.host_limit else 0
        if hosted > self.host_limit:
            raise ValueError(
                f"activation_checkpoint: {name} offloads {hosted:,} bytes of a rank to host memory, found an "
                f"activation_offload of {self.host_limit:,}; allow more, or let a memory_limit choose"
            )
        return made

    # --- a limit -------------------------------------------------------------------------------------------

    def under_limit(self, limit: int) -> Compiled:
        """Raises ValueError where nothing fits."""
        nothing = _Candidate(self.by_policy("none"))
        if self.ctx.draft or not has_drafts(self.builder.plan):
            return self.fitting(nothing, limit).made
        if self.fits(nothing, limit):
            return nothing.made
        with self.ctx.having(draft=True):
            draft = self.fitting(nothing, limit)
        assert draft.choice is not None
        made = self.by_choice(draft.choice, draft.limit)
        return (made if self.fits(made, limit) else self.fitting(nothing, limit)).made

    def fitting(self, nothing: _Candidate, limit: int) -> _Candidate:
        """What fits, given that with no recomputation. Raises LimitError."""
        self.splits = any(action.kind == "W" for row in nothing.made.pipeline.order.ranks for action in row)
        if (pipeline := self.builder.more_in_flight(nothing.made.pipeline)) is not None:
            more = _Candidate(self.finished(nothing.made.plan, pipeline))
            if self.fits(more, limit):
                return more
        if self.fits(nothing, limit):
            return nothing
        found, bound = None, self.ctx.bound
        for host in dict.fromkeys((self.host_limit, 0)) if nothing.seconds < bound else ():
            found = self.search(nothing, limit, host, found.seconds if found else bound) or found
        if found is None and bound < math.inf:
            raise self.refused(limit, nothing.peak)
        if found is None:
            least = self.smallest(nothing, limit)
            if not self.fits(least, limit):
                raise self.refused(limit, least.peak)
            found = self.search(least, limit, self.host_limit) or least
        return found

    def refused(self, limit: int, least: int) -> LimitError:
        plan = self.builder.plan
        more = ["more ranks"] + ["zero=3"] * (plan.options.zero < 3) + ["smaller microbatches"]
        more += ["an example_batch of these sizes, for which stages are split"] * (plan.pipeline is not None)
        return LimitError(
            f"activation_checkpoint: no choice of what to recompute fits a memory_limit of {limit:,} bytes; the least "
            f"that would do is {least:,} bytes; use {', '.join(more[:-1])}{',' * (len(more) > 2)} or {more[-1]}",
            least,
            plan,
        )

    def fits(self, tried: _Candidate, limit: float) -> bool:
        return tried.peak <= limit and max(found.host for found in tried.held) <= self.host_limit

    def search(self, start: _Candidate, limit: float, host: int, seconds: float = math.inf) -> _Candidate | None:
        """A choice that fits, judged by the memory of the compiled graphs, and takes less than so many seconds.
        ``host``: bytes of host memory."""
        tried = start
        for _ in range(ATTEMPTS):
            choice = tried.choice or [[0] * len(layers) for layers in self.ways]
            events, hosted = self.events(tried.made.pipeline), 0.0
            counted = most_hosted(self.ways, choice, events)
            rooms = []
            for rank, held in enumerate(tried.held):
                rooms.append(limit - (held.peak - fullest(self.ways, choice, events, rank)))
                hosted = max(hosted, held.host - counted.get(rank, 0.0))
            found = within_host(self.ways, events, rooms, max(host - hosted, 0.0))
            if found is None or self.seconds(found) >= seconds:
                return None
            tried = self.by_choice(found, limit)
            if self.fits(tried, limit):
                return tried
        return None

    def seconds(self, choice: Choice) -> float:
        """The time that a choice spends on recomputation and copies."""
        pairs = zip(self.ways, choice, strict=True)
        return sum(ways[k].seconds for layers, ks in pairs for ways, k in zip(layers, ks, strict=True))

    def smallest(self, nothing: _Candidate, limit: float) -> _Candidate:
        """A choice that fits, or the one with the least memory: if there are alternatives, about that. Recomputing can
        take more than saving, where W runs late; and what the choice does not see may leave room below the smallest
        choice that it sees."""
        events = self.events(nothing.made.pipeline)
        tried = [nothing]
        for host in dict.fromkeys((0, self.host_limit)):
            tried.append(self.by_choice(smallest_within_host(self.ways, events, host), 0))
        found = min((x for x in tried if self.fits(x, math.inf)), key=lambda x: x.peak)
        near = limit * NEAR if self.ctx.alternatives else math.inf
        while limit < found.peak <= near and (less := self._below(nothing, found) or self._below(found, found)):
            found = less
        return found

    def _below(self, start: _Candidate, found: _Candidate) -> _Candidate | None:
        """A choice with less memory than the one found."""
        hosts = dict.fromkeys((self.host_limit, 0))
        return next((x for host in hosts if (x := self.search(start, LESS * found.peak, host)) is not None), None)

    def events(self, pipeline: Pipeline) -> list[ScheduleSlot]:
        """The slots of the schedule at which memory is counted. A sample of a token slice stands for all of them."""
        if not pipeline.token_slices:
            return moments(pipeline.order)
        return moments(pipeline.order, [length / self.builder.slices[0].length for length in pipeline.token_slices])

    def by_choice(self, choice: Choice, limit: float) -> _Candidate:
        chosen = []
        for facts, ways in zip(self.facts, choice, strict=True):
            of_layers = (layer.way(k) for layer, k in zip(facts.layers, ways, strict=True))
            chosen.append(functools.reduce(operator.or_, of_layers, ChosenValues(facts.joint.always)))
        reason = f"the least time under {limit:,.0f} bytes" if limit else "the least bytes"
        return _Candidate(self.compiled(chosen, reason), choice, limit)

    # --- graphs --------------------------------------------------------------------------------------------

    def compiled(self, chosen: Sequence[ChosenValues], reason: str) -> Compiled:
        """``chosen``: per stage, nodes of its joint graph, or of that of an equal stage."""
        pairs = [(facts, facts.needed(values)) for facts, values in zip(self.facts, chosen, strict=True)]
        pipeline = self.builder.make(
            {
                k: StageCheckpoints(frozenset(_names(values.again)), frozenset(_names(needed.host)))
                for k, (values, (_, needed)) in enumerate(zip(chosen, pairs, strict=True))
            }
        )
        layers = tuple(found for k, (_, needed) in enumerate(pairs) for found in self._layers(k, needed, reason))
        return self.finished(replace(self.builder.plan, checkpoints=layers), pipeline)

    def _layers(self, k: int, chosen: ChosenValues, reason: str) -> list[LayerCheckpoint]:
        facts, found = self.facts[k], []
        names = self.builder.names_at(k, [layer.forward[0].meta["call"] for layer in facts.layers])
        for layer, name in zip(facts.layers, names, strict=True):
            again, host = ([n for n in layer.forward if n in nodes] for nodes in (chosen.again, chosen.host))
            if again or host:
                cost = cost_of(facts, layer, ChosenValues(frozenset(again), frozenset(host)))
                values = tuple(_names(again)), cost.saved, cost.seconds, reason, tuple(_names(host)), cost.host
                found.append(LayerCheckpoint(k, name, *values))
        return found


def _names(nodes: Iterable[Node]) -> list[str]:
    return [n.name for n in nodes]
