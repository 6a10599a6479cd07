"""Memory of one rank of a pipeline while it runs its actions one after another.

    G       parameters that stay unsharded until their last use; it may be part of the first F of a stage
    F       adds what its backward reads: saved values, and received values
    B       leaves what W reads; W and BW leave only accumulated gradients
    R       reduces the accumulated gradients of a stage

At every action: what is allocated already, with values on their way to and from other stages, and the live values of
the graph that it runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from autopar.ir.graph import outputs, placeholders
from autopar.ir.live_values import peak_of_values
from autopar.ir.storages import bytes_of, storage_bytes, storages
from autopar.precision import PRECISIONS, Precision
from autopar.schedule.order import BACKWARD, COMPUTE, PARAMETERS, TRANSFERS, Action, Order
from autopar.schedule.order_checks import acknowledged
from autopar.steps.graphs import Pipeline, StepGraph, is_a, of
from autopar.steps.of_rank import (
    backwards,
    comes_back,
    edge_bytes,
    exchanges_tokens,
    graph_of,
    lowered_order,
    slice_shares,
    sum_dtypes,
)


@dataclass
class MemoryProfile:
    """Peak bytes of each kind separately. saved: kept between F, B and W; received: of these, what other ranks have
    sent. gradients: at the end of the step. trained: placeholders of stored parameters that get a gradient. host: in
    host memory."""

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
    """Run the actions of one coordinate on pp. ``precision``: has the dtype in which gradients are accumulated."""
    order = lowered_order(pipeline)
    run = _RankWalk(pipeline, order, rank, precision)
    totals, pre_pass = pre_pass_memory(pipeline, order, rank)
    run.once += totals
    run.peak("F", pre_pass)
    for action in order.ranks[rank]:
        run.act(action)
    run.found.gradients = round(run.there)
    return run.found


class _Part:
    """Bytes of the values of one part's graphs, by name."""

    def __init__(self, pipeline: Pipeline, index: int) -> None:
        self.part = part = pipeline.parts[index]
        self.received = {h.value for h in pipeline.edges if h.target == index}
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
        self.same: dict[str, str] = {}  # value that B leaves for W -> another one in the same storage
        self.left = self._left_by_b()
        self.caches = [
            bytes_of([x])
            for c in part.caches
            for n, x in zip(part.forward.outputs, outputs(part.forward.graph))
            if n == c.own
        ]

    def kept_by(self, graph: StepGraph | None) -> set[str]:
        """Names of values kept by F or B that a backward reads."""
        names = graph.inputs if graph is not None else ()
        return {n for n in names if is_a(n, "saved", "stash") or n in self.received}

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
        """Their total size."""
        return sum(self.sizes[n] for n in {self.same.get(n, n) for n in names})

    def peak(self, step: StepGraph, others: Collection[str] = (), dying: Collection[str] = ()) -> int:
        """Peak bytes of live values in a run: its own and its inputs, except those counted elsewhere (parameters,
        values of the prologue, inputs of the step) and ``others``. ``dying``: gathered parameters that it is the last
        to read."""
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
        self.rank, self.beside = rank, 0.0  # bytes of the first half of a cell while the second runs
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
        """Gathered parameters that an action reads."""
        gathered = self.pipeline.parts[self.order.part_of(action.stage)].gathered
        return [n for n in self._graph_inputs(action) if n in gathered] if gathered else []

    def part(self, stage: int) -> _Part:
        index = self.order.part_of(stage)
        if index not in self.parts:
            self.parts[index] = _Part(self.pipeline, index)
        return self.parts[index]

    @property
    def there(self) -> float:
        """Bytes allocated between two actions."""
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
        if graph is not None and any(is_a(name, "sum") for name in graph.inputs) and action.kind != "BWR":
            self.sums.setdefault(action.stage, {}).update(self.gradients(part, graph))  # zeros at first
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
            trained, several = self.gradients(part, graph), self.order.microbatches * self.order.slices > 1
            self.sums.setdefault(action.stage, {}).update(trained)
            total = sum(size for of_stage in self.sums.values() for size in of_stage.values())
            self.found.accumulated = max(self.found.accumulated, total if several else 0)
            self.found.trained |= {part.part.aliases.get(n, n) for n in map(of, trained)}
        self.leave(action)

    def takes_turns(self, action: Action) -> bool:
        """Whether the two halves of a cell, the first of which is this action, take turns."""
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
            kept = part.kept_by(graph) - later | {n for n in graph.inputs if is_a(n, "sum")}
            extra = part.arrived if kind == "F" else 0
            self.peaks[key] = part.peak(graph, later, dying) + extra, part.bytes_of(kept) if kind != "F" else 0
        return self.peaks[key]

    def keep(self, part: _Part, kind: str, share: float) -> None:
        """Update the bytes that are kept."""
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
        """Add what G, or the first F, has gathered for later actions."""
        assert graph is not None
        for name, x in zip(graph.outputs, outputs(graph.graph), strict=True):
            if name in part.part.gathered and self.last.get((action.stage, name), action) != action:
                self.gathered[action.stage, name] = bytes_of([x])
        self.found.gathered = max(self.found.gathered, sum(self.gathered.values()))

    def become_gradients(self, graph: StepGraph) -> None:
        """Add the gradients of BWR or R, which stay until the end of the step."""
        self.found.trained |= {of(n) for n in graph.outputs if n}
        self.reduced += storage_bytes(graph.graph, range(len(graph.outputs)))

    def leave(self, action: Action) -> None:
        """Free what is not used after the last action of a microbatch on this rank."""
        self.left[action.microbatch] -= 1
        if not self.left[action.microbatch]:
            self.micro.pop(action.microbatch, None)

    def peak(self, kind: str, size: float) -> None:
        if kind == "F":
            self.found.forward_peak = max(self.found.forward_peak, round(size))
        else:
            self.found.backward_peak = max(self.found.backward_peak, round(size))


def _made(step: StepGraph | None, wanted: Collection[str]) -> int:
    """Bytes of the results of a prologue that other graphs read."""
    if step is None:
        return 0
    return storage_bytes(step.graph, [i for i, name in enumerate(step.outputs) if name in wanted])


# --- values on their way between stages ----------------------------------------------------------------

Key = tuple[str, int, int, int]  # F or B, stage, microbatch, slice


class P2PBuffers:
    """``size``: bytes of all that is on its way to or from a rank, or between stages of it. A posted receive has its
    buffers until the action that waits for it takes them over. A send keeps its tensors until a message tells that
    they have arrived (`acknowledged`). What a stage hands on to another of its own rank waits for that."""

    def __init__(self, pipeline: Pipeline, order: Order, rank: int) -> None:
        self._pipeline, self._order, self._rank = pipeline, order, rank
        self._acknowledged = acknowledged(order, rank)
        self._posted: dict[Key, list[Action]] = {}
        self._sizes: dict[Action | Key, int] = {}  # a transfer, or what a unit will take from its own rank
        self._known: dict[tuple[int, int, str, int], int] = {}

    @property
    def size(self) -> int:
        return sum(self._sizes.values())

    def transfer(self, action: Action) -> None:
        """A send or a receive is started."""
        here, there = self._order.part_of(action.stage), self._order.part_of(action.peer)
        self._sizes[action] = self._between(min(here, there), max(here, there), action)
        if action.kind[0] == "R":
            self._posted.setdefault(_key(action, action.kind[1]), []).append(action)

    def before(self, action: Action) -> None:
        """Hand over the values that an F or a backward waits for: from here on they are its own."""
        key = _key(action, action.kind[0])
        for receive in self._posted.pop(key, ()):
            del self._sizes[receive]
            for send in self._acknowledged.get(receive, ()):
                self._sizes.pop(send, None)
        self._sizes.pop(key, None)

    def after(self, action: Action) -> None:
        """Add the values that an F or a backward hands on to stages of the same rank."""
        if action.kind != "F" and action.kind not in BACKWARD:
            return
        part = self._order.part_of(action.stage)
        chain = self._order.chains[self._order.chain_of[action.microbatch]]
        for other in range(len(chain)):
            if other == part or self._order.rank_of[chain[other]] != self._rank:
                continue
            if (other > part) == (action.kind == "F"):
                key = (action.kind[0], chain[other], action.microbatch, action.slice)
                size = self._between(min(part, other), max(part, other), action)
                self._sizes[key] = self._sizes.get(key, 0) + size

    def _between(self, source: int, target: int, action: Action) -> int:
        """Bytes that a part sends to a later one or back, without values that F of the sender saves anyway."""
        way = "back" if "B" in action.kind else "received" if action.kind == "RF" else "sent"
        key = (source, target, way, action.slice)
        if key not in self._known:
            edges = [h for h in self._pipeline.edges if (h.source, h.target) == (source, target)]
            if way == "back":
                edges = [h for h in edges if comes_back(self._pipeline, h)]
            elif way == "sent":
                edges = [h for h in edges if not self._is_saved(source, h.value)]
            self._known[key] = sum(edge_bytes(h, action.slice) for h in edges)
        return self._known[key]

    def _is_saved(self, part: int, value: str) -> bool:
        """Whether F of a part keeps the storage of a value that it sends."""
        forward = self._pipeline.parts[part].forward
        if value not in forward.outputs:  # it was received
            return False
        saved = [i for i, name in enumerate(forward.outputs) if is_a(name, "saved")]
        sent = forward.outputs.index(value)
        return storage_bytes(forward.graph, [*saved, sent]) == storage_bytes(forward.graph, saved)


def _key(action: Action, kind: str) -> Key:
    return kind, action.stage, action.microbatch, action.slice


# --- rounds before a step ------------------------------------------------------------------------------


def pre_pass_memory(pipeline: Pipeline, order: Order, rank: int) -> tuple[int, int]:
    """(bytes of all totals, most bytes at once in any round) of the ranks at a coordinate of pp."""
    here = [order.rank_of[stage] == rank for stage in order.chains[0]]
    sizes: dict[str, int] = {}  # of everything that graphs of rounds make
    totals, most = 0, 0
    for one in pipeline.pre_pass:
        for graph in (g for g in one.graphs if g is not None):
            sizes |= {str(n): bytes_of([x]) for n, x in zip(graph.outputs, outputs(graph.graph), strict=True)}
        totals += sum(sizes.pop(name) for name in one.totals)
        mine = [g for k, g in enumerate(one.graphs) if g is not None and here[k]]
        live = max((peak_of_values(g.graph, {x.name for x in placeholders(g.graph)}) for g in mine), default=0)
        most = max(most, live)
    kept = max((_kept(pipeline, here, sizes, r) for r in range(len(pipeline.pre_pass))), default=0)
    return totals, totals + order.microbatches * kept + most


def _kept(pipeline: Pipeline, here: list[bool], sizes: dict[str, int], number: int) -> int:
    """Bytes of the values of a microbatch that are made or received by a round, or before it, and taken in it or
    later."""
    there, later = set[str](), set[str]()
    for r, one in enumerate(pipeline.pre_pass):
        mine = [g for k, g in enumerate(one.graphs) if g is not None and here[k]]
        if r <= number:
            there |= {str(n) for g in mine for n in g.outputs} | {h.value for h in one.edges if here[h.target]}
        if r >= number:
            later |= {n for g in mine for n in g.inputs} | {h.value for h in one.edges if here[h.source]}
    return sum(sizes[name] for name in there & later & sizes.keys())
