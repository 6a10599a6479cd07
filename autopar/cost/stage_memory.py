"""What one rank of a pipeline holds while it runs its actions one after another.

    G       parameters that stay whole until their last use; it may be part of the first F of a stage
    F       adds what its backward takes: saved values, and what it received
    B       leaves what W takes; W and BW leave nothing but gradient sums
    R       turns the gradient sums of a stage into gradients

At every action: what is there already, values on their way to and from other stages included
(`autopar.cost.p2p_buffers`), and the live values of the graph that it runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from autopar.cost.p2p_buffers import P2PBuffers
from autopar.cost.statistics_memory import memory_ahead
from autopar.ir.graph import outputs, placeholders
from autopar.ir.live_values import peak_of_values
from autopar.ir.storages import bytes_of, storage_bytes, storages
from autopar.precision import PRECISIONS, Precision
from autopar.schedule.order import COMPUTE, PARAMETERS, TRANSFERS, Action, Order
from autopar.steps.graphs import Pipeline, StepGraph
from autopar.steps.of_rank import backwards, exchanges_tokens, graph_of, lowered_order, slice_shares, sum_dtypes
from autopar.steps.value_names import is_a, of


@dataclass
class MemoryProfile:
    """Most bytes at once, of each kind for itself. saved: all that is kept between F, B and W; received: of this, what
    other ranks have sent. gradients: that are there at the end. trained: placeholders of stored parameters that get a
    gradient. host: in host memory."""

    gathered: int = 0
    accumulated: int = 0
    saved: int = 0
    received: int = 0
    forward_peak: int = 0
    backward_peak: int = 0
    gradients: int = 0
    host: int = 0
    trained: set[str] = field(default_factory=set)


def walk_rank(pipeline: Pipeline, rank: int, precision: Precision = PRECISIONS["none"]) -> MemoryProfile:
    """Run the actions of one coordinate on pp. ``precision``: says in what gradients of microbatches are added up."""
    order = lowered_order(pipeline)
    run = _RankWalk(pipeline, order, rank, precision)
    totals, ahead = memory_ahead(pipeline, order, rank)
    run.once += totals
    run.peak("F", ahead)
    for action in order.ranks[rank]:
        run.act(action)
    run.found.gradients = round(run.there)
    return run.found


class _Part:
    """Bytes of the values of one part's graphs, by name."""

    def __init__(self, pipeline: Pipeline, index: int) -> None:
        self.part = part = pipeline.parts[index]
        self.received = {h.value for h in pipeline.hops if h.target == index}
        self.backwards = backwards(part)
        self.sizes = {n: bytes_of([x]) for g in self.backwards for n, x in zip(g.inputs, placeholders(g.graph))}
        saved = [i for i, n in enumerate(part.forward.outputs) if is_a(n, "saved")]
        self.saved = storage_bytes(part.forward.graph, saved)
        made = zip(part.forward.outputs, outputs(part.forward.graph), strict=True)
        hosted = {name: bytes_of([x]) for name, x in made if is_a(name, "host")}
        self.host = sum(hosted.values())
        late = part.backward_weight.inputs if part.backward_weight is not None else ()
        self.host_late = sum(size for name, size in hosted.items() if name in late)
        self.arrived = sum(self.sizes[n] for n in self.received if n in self.sizes)
        self.later = self.kept_by(part.backward_weight)
        self.same: dict[str, str] = {}  # what B leaves for W -> what else it leaves in the same storage
        self.left = self._left_by_b()
        self.caches = [
            bytes_of([x])
            for c in part.caches
            for n, x in zip(part.forward.outputs, outputs(part.forward.graph))
            if n == c.own
        ]

    def kept_by(self, graph: StepGraph | None) -> set[str]:
        """Names of what a backward takes that F or B has kept."""
        names = graph.inputs if graph is not None else ()
        return {n for n in names if is_a(n, "saved", "stash", "sum") or n in self.received}

    def _left_by_b(self) -> int:
        """Bytes that B leaves for W, each storage once."""
        step = self.part.backward_input
        if step is None:
            return self.bytes_of(self.later)
        stash = [i for i, n in enumerate(step.outputs) if n in self.later]
        names = dict(zip(placeholders(step.graph), step.inputs, strict=True))
        behind, results = storages(step.graph), outputs(step.graph)
        viewed = {names[node] for i in stash for node, _ in behind[results[i]] if node in names}
        first: dict[object, str] = {(node, 0): n for node, n in names.items() if n in self.later}
        self.same = {n: first.setdefault(behind[results[i]][0], n) for i in stash if (n := step.outputs[i])}
        own = storage_bytes(step.graph, stash, {n.name for n in names})
        return own + self.bytes_of(viewed | {n for n in self.later if not is_a(n, "stash")})

    def bytes_of(self, names: Collection[str]) -> int:
        """Their size in all."""
        return sum(self.sizes[n] for n in {self.same.get(n, n) for n in names})

    def largest(self, graph: StepGraph, sums: Mapping[str, int]) -> int:
        """Of the results of a graph that become ``sums`` by a cast, the largest; 0 where all are what they are."""
        made = {n: bytes_of([x]) for n, x in zip(graph.outputs, outputs(graph.graph)) if n is not None and n in sums}
        return max((size for n, size in made.items() if size != sums[n]), default=0)

    def peak(self, step: StepGraph, others: Collection[str] = (), dying: Collection[str] = ()) -> int:
        """Live values of a run: own ones and those it is given, but for what is there anyway (parameters, values of
        the prologue, inputs) and ``others``. ``dying``: gathered parameters that it is the last to take."""
        transient = {n for n in step.inputs if is_a(n, "saved", "stash", "grad", "sum") or n in self.received}
        transient |= {*dying}
        nodes = dict(zip(step.inputs, placeholders(step.graph), strict=True))
        same = {x: nodes[self.same[n]] for n, x in nodes.items() if self.same.get(n, n) != n}
        return peak_of_values(step.graph, {x.name for n, x in nodes.items() if n not in transient or n in others}, same)


class _RankWalk:
    def __init__(self, pipeline: Pipeline, order: Order, rank: int, precision: Precision) -> None:
        self.order, self.found, self.precision = order, MemoryProfile(), precision
        self.pipeline, self.parts = pipeline, dict[int, _Part]()
        self.shares, self.moving = slice_shares(pipeline), P2PBuffers(pipeline, order, rank)
        self.peaks: dict[tuple[int, str, frozenset[str]], tuple[int, int]] = {}
        self.rank, self.beside = rank, 0.0  # what the first half of a cell may hold while the second runs
        self.saved = self.received = self.reduced = self.host = 0.0
        self.gathered: dict[tuple[int, str], int] = {}  # stage, used parameter -> bytes
        self.gathers: set[int] = set()  # stages whose next F gathers
        self.sums: dict[int, dict[str, int]] = {}  # stage -> gradient -> bytes
        self.micro: dict[int, int] = {}  # microbatch -> bytes of its prologue values and caches
        mine = [a for a in order.ranks[rank] if a.kind not in TRANSFERS and a.kind not in PARAMETERS]
        self.left = Counter(a.microbatch for a in mine)
        self.last = {(a.stage, n): a for a in mine for n in self._used(a)}
        taken = {n for a in mine for n in self._graph_inputs(a)}
        self.once = _made(pipeline.once, taken)
        self.each = _made(pipeline.each, taken)

    def _graph_inputs(self, action: Action) -> list[str]:
        graph = graph_of(self.pipeline.parts[self.order.part_of(action.stage)], action.kind)
        return graph.inputs if graph is not None else []

    def _used(self, action: Action) -> list[str]:
        """Gathered parameters that an action takes."""
        gathered = self.pipeline.parts[self.order.part_of(action.stage)].gathered
        return [n for n in self._graph_inputs(action) if n in gathered] if gathered else []

    def part(self, stage: int) -> _Part:
        index = self.order.part_of(stage)
        if index not in self.parts:
            self.parts[index] = _Part(self.pipeline, index)
        return self.parts[index]

    @property
    def there(self) -> float:
        """Everything between two actions."""
        sums = sum(size for of_stage in self.sums.values() for size in of_stage.values())
        kept = self.once + self.saved + self.reduced + sum(self.micro.values()) + sum(self.gathered.values())
        return kept + self.moving.size + sums

    def act(self, action: Action) -> None:
        if action.kind in TRANSFERS:
            self.moving.transfer(action)
            return
        part = self.part(action.stage)
        graph = graph_of(part.part, action.kind)
        if action.kind in PARAMETERS:
            self.parameters(action, part, graph)
            return
        share = self.shares[action.slice]
        if action.kind == "F":
            self.micro.setdefault(action.microbatch, self.each + round(sum(part.caches) * sum(self.shares)))
            if action.stage in self.gathers:
                graph = part.part.gather_forward
        self.moving.before(action)
        taken = [n for n in self._used(action) if self.last[action.stage, n] == action]
        dying = {n: size for n in taken if (size := self.gathered.pop((action.stage, n), 0))}
        live, own = self.live(part, action.kind, graph, frozenset(dying))
        before = self.there
        more = (live - own - sum(dying.values())) * share + sum(dying.values())
        self.peak(action.kind, before + more + self.beside)
        if action.kind == "F" and action.stage in self.gathers:
            self.gathers.remove(action.stage)
            self.keep_gathered(action, part, graph)
        self.keep(part, action.kind, share)
        self.beside = max(more - (self.there - before), 0.0) if action.paired and self.takes_turns(action) else 0.0
        self.moving.after(action)
        if graph is not None and action.kind == "BWR":
            self.sums.pop(action.stage, None)
            self.become_gradients(graph)
        elif graph is not None and action.kind != "F":
            sums, trained = self.sums.setdefault(action.stage, {}), self.gradients(part, graph)
            casts = not trained.keys() <= sums.keys()
            sums |= trained
            if casts:  # the first sums, in a dtype of their own: addends are let go of one by one
                self.peak(action.kind, self.there + part.largest(graph, trained))
            several = self.order.microbatches * self.order.slices > 1
            total = sum(size for of_stage in self.sums.values() for size in of_stage.values())
            self.found.accumulated = max(self.found.accumulated, total if several else 0)
            self.found.trained |= {part.part.aliases.get(n, n) for n in map(of, trained)}
        self.leave(action)

    def takes_turns(self, action: Action) -> bool:
        """Whether the two halves of a cell, of which this is the first, run by turns."""
        row = self.order.ranks[self.rank]
        back = next(a for a in row[row.index(action) + 1 :] if a.kind in COMPUTE)
        return any(exchanges_tokens(self.part(a.stage).part) for a in (action, back))

    def live(self, part: _Part, kind: str, graph: StepGraph | None, dying: frozenset[str]) -> tuple[int, int]:
        """(live values of the graph, of these what was there before): what later actions of the unit need stays."""
        key = (id(graph), kind, dying)
        if graph is None:
            return 0, 0
        if key not in self.peaks:
            later = part.received & set(part.sizes) if kind == "F" else part.later if kind == "B" else set()
            kept = part.kept_by(graph) - later
            extra = part.arrived if kind == "F" else 0
            self.peaks[key] = part.peak(graph, later, dying) + extra, part.bytes_of(kept) if kind != "F" else 0
        return self.peaks[key]

    def keep(self, part: _Part, kind: str, share: float) -> None:
        """What is kept changes."""
        arrived_later = part.bytes_of(part.later & part.received)
        change = {
            "F": (part.saved + part.arrived, part.arrived),
            "BW": (-part.saved - part.arrived, -part.arrived),
            "BWR": (-part.saved - part.arrived, -part.arrived),
            "B": (part.left - part.saved - part.arrived, arrived_later - part.arrived),
            "W": (-part.left, -arrived_later),
        }[kind]
        freed = part.host_late - part.host if kind == "B" else -part.host_late if kind == "W" else -part.host
        self.host += (part.host if kind == "F" else freed) * share
        self.found.host = max(self.found.host, round(self.host))
        self.saved += change[0] * share
        self.received += change[1] * share
        self.found.saved = max(self.found.saved, round(self.saved))
        self.found.received = max(self.found.received, round(self.received))

    def gradients(self, part: _Part, graph: StepGraph) -> dict[str, int]:
        """Bytes of the sums of the parameters' gradients that a backward makes."""
        named = zip(graph.outputs, outputs(graph.graph), strict=True)
        others = {c.past for c in part.part.caches} | part.received
        found = {n: x for n, x in named if x is not None and is_a(n, "grad") and of(n) not in others}
        dtypes = sum_dtypes(part.part, self.precision)
        return {n: bytes_of([x]) // x.meta["val"].itemsize * dtypes[n].itemsize for n, x in found.items()}

    def parameters(self, action: Action, part: _Part, graph: StepGraph | None) -> None:
        if graph is None:
            return
        if action.kind == "G":
            if part.part.gather_forward is not None:
                self.gathers.add(action.stage)
                return
            self.peak("F", self.there + part.peak(graph))
            self.keep_gathered(action, part, graph)
            return
        sums = self.sums.get(action.stage, {})
        self.peak("R", self.there - sum(sums.get(n, 0) for n in graph.inputs) + part.peak(graph))
        self.sums[action.stage] = {n: size for n, size in sums.items() if n not in graph.inputs}
        self.found.trained -= set(map(of, graph.inputs))
        self.become_gradients(graph)

    def keep_gathered(self, action: Action, part: _Part, graph: StepGraph | None) -> None:
        """What G, or the first F, has gathered for later actions."""
        assert graph is not None
        for name, x in zip(graph.outputs, outputs(graph.graph), strict=True):
            if name in part.part.gathered and self.last.get((action.stage, name), action) != action:
                self.gathered[action.stage, name] = bytes_of([x])
        self.found.gathered = max(self.found.gathered, sum(self.gathered.values()))

    def become_gradients(self, graph: StepGraph) -> None:
        """What BWR or R makes stays until the end of the step."""
        self.found.trained |= {of(n) for n in graph.outputs if n}
        self.reduced += storage_bytes(graph.graph, range(len(graph.outputs)))

    def leave(self, action: Action) -> None:
        """What dies with the last action of a microbatch on this rank."""
        self.left[action.microbatch] -= 1
        if not self.left[action.microbatch]:
            self.micro.pop(action.microbatch, None)

    def peak(self, kind: str, size: float) -> None:
        if kind == "F":
            self.found.forward_peak = max(self.found.forward_peak, round(size))
        else:
            self.found.backward_peak = max(self.found.backward_peak, round(size))


def _made(step: StepGraph | None, wanted: Collection[str]) -> int:
    """Bytes of the results of a prologue that somebody takes."""
    if step is None:
        return 0
    return storage_bytes(step.graph, [i for i, name in enumerate(step.outputs) if name in wanted])
