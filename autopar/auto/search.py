"""The layout with the least time that fits, of all that a space has.

    found = search(Space(question), pricing)
    found.choice.layout, found.choice.price

Candidates wait in a queue by the least time that they can take. A family (axes and microbatches) waits with what its
layers and their exchanges take, by those of smaller axes while its own are not compiled; its members (ZeRO, replicas,
schedules) with what these add; a member that does not fit gives way to the same with checkpoints, chunks of the loss or
an offloaded optimizer, each of which waits by its own bound. The search ends when what waits
takes longer than the best that fits by more than the band, so nothing within the band is missed.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from autopar.auto.pricing import certain, exposed
from autopar.auto.space import POLICIES, SAVING, Question, Space
from autopar.cost.layout import Layout
from autopar.cost.layout_price import Price
from autopar.cost.parts import way_of_parts
from autopar.ir.mesh import Mesh

BAND = 0.05  # of the least time: within it the simplest layout is chosen
OF_A_MESH = 2  # layouts, while others wait to be measured
FINALISTS = 10  # whose pipelines are simulated
SLACK = 0.02  # of a bound that is summed up from prices of other layouts
DATA, PIPELINE = ("dp", "optimizer"), ("bubble", "pp")  # causes of ZeRO and replicas, and of the schedule


class Pricer(Protocol):
    """What prices layouts; see `autopar.auto.pricing.Pricing`."""

    @property
    def limit(self) -> float: ...
    def price(self, layout: Layout, simulated: bool = False) -> Price: ...
    def bound(self, layout: Layout) -> Price | None: ...
    def memory(self, layout: Layout) -> Price: ...
    def weights(self, layout: Layout) -> float: ...
    def is_close(self, layout: Layout) -> bool: ...


@dataclass(frozen=True)
class Candidate:
    """A layout and its price."""

    layout: Layout
    price: Price

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.price.seconds

    @property
    def memory(self) -> float:
        """Bytes of the fullest rank."""
        return self.price.most_memory

    @property
    def simplicity(self) -> tuple[float, ...]:
        """The less the simpler."""
        layout = self.layout
        saving = POLICIES.index(layout.activation_checkpoint), layout.loss_chunks > 1, layout.optimizer_cpu_offload
        axes = sum(size > 1 for _, size in layout.mesh.axes)
        return (axes, layout.tp, *saving, self.memory, self.seconds)


@dataclass(frozen=True)
class Found:
    """What a search found. choice: None if nothing fits. close: within the band of the least time, the simplest first.
    priced: every layout with a price, those that do not fit among them. counts: layouts by what became of them: "all",
    "weights" (which do not fit, with the least that layers keep), "slower" (by a bound), "too large", "refused",
    "priced". refusals: sentences of the compiler, with the layouts that they refuse. nearest: that exceeds the memory
    least."""

    question: Question
    choice: Candidate | None
    close: tuple[Candidate, ...]
    priced: tuple[Candidate, ...]
    counts: Counter[str]
    refusals: Counter[str]
    nearest: Candidate | None

    @property
    def least(self) -> float:
        """Seconds of the fastest that fits."""
        return min((c.seconds for c in self.close), default=0.0)


def search(space: Space, pricer: Pricer, wanted: int = 1) -> Found:
    """The search over a space. wanted: layouts that fit, `OF_A_MESH` of a mesh, among those that are priced."""
    return _Search(space, pricer, wanted).run()


@dataclass
class _Search:
    space: Space
    pricer: Pricer
    wanted: int = 1
    waiting: list[tuple[float, int, Callable[[float, Layout], None], Layout]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    priced: dict[Layout, Candidate] = field(default_factory=dict)
    fitting: list[Candidate] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    hopeless: dict[Layout, int] = field(default_factory=dict)  # axes -> rows of a microbatch from which nothing fits
    saves: dict[Layout, Layout] = field(default_factory=dict)  # a layout -> the member that it saves memory of
    enough: dict[Layout, list[tuple[int, ...]]] = field(default_factory=dict)  # member -> what makes it fit
    leanest: tuple[float, Layout] = (float("inf"), Layout())  # bytes, of those of families that do not fit
    of_mesh: dict[Mesh, list[float]] = field(default_factory=dict)  # seconds of the fastest that fit
    most: float = float("inf")  # seconds of a layout that is worth pricing

    def run(self) -> Found:
        for family in self.space.families():
            size = self._size(family)
            self.counts["all"] += size
            if min(map(self.pricer.weights, self._leanest(family))) > self.pricer.limit:
                self.counts["weights"] += size
            else:
                self._wait(0.0, self._family, family)
        while self.waiting and self.waiting[0][0] <= self.most:
            bound, _, price, layout = heapq.heappop(self.waiting)
            price(bound, layout)
        if not self.fitting and self.leanest[0] < float("inf"):
            self._price(self.leanest[1])  # the nearest
        return self._found()

    def _wait(self, bound: float, price: Callable[[float, Layout], None], layout: Layout) -> None:
        heapq.heappush(self.waiting, (bound, next(self.numbers), price, layout))

    def _found(self) -> Found:
        close = self._simulated(sorted(self._within_band(self.fitting), key=lambda c: c.simplicity))
        counts = self.counts
        counts["priced"] = len(self.priced)
        counts["too large"] = sum(not c.price.fits for c in self.priced.values())
        counts["slower"] = counts["all"] - counts["weights"] - counts["refused"] - counts["priced"]
        over = [c for c in self.priced.values() if not c.price.fits]
        return Found(
            self.space.question, close[0] if close else None, tuple(close), tuple(self.priced.values()), counts,
            self.refusals, min(over, key=lambda c: c.memory, default=None),
        )  # fmt: skip

    def _within_band(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        best = min((c.seconds for c in candidates), default=0.0)
        return [c for c in candidates if c.seconds <= best * (1 + BAND)]

    def _simulated(self, close: list[Candidate]) -> list[Candidate]:
        """The finalists' pipelines run action by action, instead of by formulas."""
        first = [Candidate(c.layout, self.pricer.price(c.layout, simulated=True)) for c in close[:FINALISTS]]
        return self._within_band([*first, *close[FINALISTS:]])

    # --- from families to layouts --------------------------------------------------------------------------

    def _family(self, bound: float, family: Layout) -> None:
        """Bound a family: first by costs of smaller axes that are compiled already, then by its own."""
        least = self.pricer.bound(family)
        if least is not None:
            policy = self._policy_that_may_fit(family)
            if policy is None:
                self.counts["weights"] += self._size(family)
                return
            seconds = self._least(replace(family, activation_checkpoint=policy)) * (1 - SLACK)
            if seconds > bound * (1 + 1e-9):
                self._wait(seconds, self._family, family)
                return
        found = self.pricer.price(family)
        if found.refused:
            size = self._size(family)
            self.counts["refused"] += size
            self.refusals[found.refused] += size
            if family.sequence_parallel and "sequence_parallel" not in self.space.question.fixed:
                self.counts["all"] += size
                self._wait(0.0, self._family, replace(family, sequence_parallel=False))
            return
        self._wait(max(bound, self._least(family)), self._members, family)

    def _least(self, family: Layout) -> float:
        """Seconds that the members of a family take at least, with the pipeline that wastes the least."""
        pipelines = {_pipeline(member): member for member in self.space.members(family)}
        layouts = [_with_schedule(family, member) for member in pipelines.values()]
        prices = [self.pricer.bound(layout) or self.pricer.price(layout) for layout in layouts]
        return min((certain(p) + exposed(p, *PIPELINE) for p in prices if not p.refused), default=0.0)

    def _members(self, bound: float, family: Layout) -> None:
        """Price the members of a family that may be within the band."""
        members = list(self.space.members(family))
        plain = certain(self.pricer.price(family))
        pipelines = {_pipeline(m): self._seconds(_with_schedule(family, m), *PIPELINE) for m in members}
        ways = {_way(m): self._seconds(_with_way(family, m), *DATA) - plain for m in members}
        for member in members:
            least = pipelines[_pipeline(member)] + ways[_way(member)]
            if least * (1 - SLACK) > self.most:
                continue
            candidate = self._price(member)
            if candidate is not None and not candidate.price.fits:
                self._wait(candidate.seconds, self._savings, member)
            elif candidate is not None and member.pp > 1:
                self._wait(candidate.seconds * (1 - SLACK), self._chunks, member)

    def _savings(self, bound: float, member: Layout) -> None:
        """Wait with what a member can do to need less memory."""
        if not self._is_hopeless(member):
            self._wait_for(bound, member, self.space.savings(member))

    def _chunks(self, bound: float, member: Layout) -> None:
        """Wait with what may make a pipeline faster, of what saves memory: a loss in chunks takes time of the last
        part's backward to its forward."""
        same = (one for one in self.space.savings(member) if replace(one, loss_chunks=member.loss_chunks) == member)
        self._wait_for(bound, member, same)

    def _wait_for(self, bound: float, member: Layout, savings: Iterable[Layout]) -> None:
        for layout in savings:
            if layout.optimizer_cpu_offload and self.pricer.weights(layout) > self.pricer.limit:
                continue
            least = self.pricer.bound(layout)
            if least is None or _may_fit(least):
                seconds = 0.0 if least is None else (least.seconds - exposed(least, "dp")) * (1 - SLACK)
                self.saves[layout] = member
                self._wait(max(bound, seconds), self._saving, layout)

    def _saving(self, bound: float, layout: Layout) -> None:
        """Price a layout that needs less memory, unless less of the same is enough."""
        member, steps = self.saves[layout], _steps(layout)
        enough = self.enough.setdefault(member, [])
        if any(_is_slower(steps, one, layout.pp) for one in enough):
            return
        least = self.pricer.bound(layout)  # closer by now, if the same is compiled with other loss chunks
        if least is not None and self.pricer.is_close(layout):
            if not _may_fit(least):
                return
            if (seconds := least.seconds * (1 - SLACK)) > bound * (1 + 1e-9):
                self._wait(seconds, self._saving, layout)
                return
        candidate = self._price(layout)
        if candidate is not None and candidate.price.fits:
            enough.append(steps)

    def _is_hopeless(self, member: Layout) -> bool:
        """Whether no member of its family fits, whatever it saves. Larger microbatches then do not fit either."""
        axes = replace(member, zero=0, dp=member.dp * member.dp_replicate, dp_replicate=1, reduce_grads="auto",
                       schedule="", virtual_stages=1, microbatches=1, micro_batch=1)  # fmt: skip
        if self.hopeless.get(axes, member.micro_batch + 1) <= member.micro_batch:
            return True
        found = self._policy_that_may_fit(member) is None
        if found:
            self.hopeless[axes] = member.micro_batch
        return found

    def _policy_that_may_fit(self, layout: Layout) -> str | None:
        """The first checkpoint policy with which a member of its family may fit, with all else that saves memory."""
        leanest = self._leanest(layout)
        first, last = (POLICIES.index(one.activation_checkpoint) for one in (layout, leanest[-1]))
        for policy in POLICIES[first : last + 1]:
            for lean in (replace(one, activation_checkpoint=policy) for one in leanest):
                price = self.pricer.memory(lean)
                if _may_fit(price):
                    return policy
                if price.most_memory < self.leanest[0]:
                    self.leanest = price.most_memory, lean
        return None

    def _leanest(self, layout: Layout) -> list[Layout]:
        """The members of its family that need the least memory, one for each way of ZeRO and to spread layers."""
        found: dict[object, Layout] = {}
        for member in self.space.members(layout):
            found.setdefault((_way(member), way_of_parts(member)), member)
        first = next(iter(found.values()))
        *_, last = (first, *self.space.savings(first))
        saved: dict[str, Any] = {entry.name: getattr(last, entry.name) for entry in SAVING}
        return [replace(member, **saved) for member in found.values()]

    # --- prices --------------------------------------------------------------------------------------------

    def _price(self, layout: Layout) -> Candidate | None:
        """Price a layout and note it; None if it is refused."""
        if layout in self.priced:
            return self.priced[layout]
        return self._add(layout, self.pricer.price(layout))

    def _add(self, layout: Layout, price: Price) -> Candidate | None:
        if price.refused:
            self.refusals[price.refused] += 1
            self.counts["refused"] += 1
            return None
        if layout in self.priced:
            return self.priced[layout]
        candidate = self.priced[layout] = Candidate(layout, price)
        if price.fits:
            self.fitting.append(candidate)
            self._note_seconds(candidate)
        return candidate

    def _note_seconds(self, candidate: Candidate) -> None:
        """Of a layout that fits."""
        before = self.of_mesh.get(candidate.layout.mesh, [])
        self.of_mesh[candidate.layout.mesh] = sorted([*before, candidate.seconds])[:OF_A_MESH]
        fastest = sorted(itertools.chain(*self.of_mesh.values()))
        if len(fastest) >= self.wanted:
            self.most = max(fastest[0] * (1 + BAND), fastest[self.wanted - 1])

    def _seconds(self, layout: Layout, *causes: str) -> float:
        """Seconds that members cannot avoid, with those of some causes."""
        found = self.pricer.price(layout)
        return 0.0 if found.refused else certain(found) + exposed(found, *causes)

    def _size(self, family: Layout) -> int:
        """Layouts of a family."""
        members = list(self.space.members(family))
        return len(members) * (1 + sum(1 for _ in self.space.savings(members[0]))) if members else 0


def _may_fit(bound: Price) -> bool:
    """Whether a layout may fit, by a bound. One that is refused may: pricing it counts that."""
    return bool(bound.refused) or all(share * (1 - SLACK) <= 1 for share in bound.over)


def _way(member: Layout) -> tuple[object, ...]:
    """What a member does with parameters and gradients."""
    return member.zero, member.dp_replicate, member.reduce_grads, member.reshard_after_forward


def _pipeline(member: Layout) -> tuple[object, ...]:
    """How a member runs its pipeline."""
    return member.schedule, member.virtual_stages


def _with_schedule(family: Layout, member: Layout) -> Layout:
    return replace(family, schedule=member.schedule, virtual_stages=member.virtual_stages)


def _with_way(family: Layout, member: Layout) -> Layout:
    return replace(member, schedule=family.schedule, virtual_stages=family.virtual_stages)


def _steps(layout: Layout) -> tuple[int, ...]:
    """How far a layout goes in each way of saving memory."""
    known = {"activation_checkpoint": POLICIES.index(layout.activation_checkpoint)}
    return tuple(int(known.get(entry.name, getattr(layout, entry.name))) for entry in SAVING)


def _is_slower(steps: tuple[int, ...], enough: tuple[int, ...], pp: int) -> bool:
    """Whether what saves more memory than is needed takes more time. Chunks of the loss alone may take less in a
    pipeline (`_Search._chunks`)."""
    further = [entry.name for entry, a, b in zip(SAVING, enough, steps, strict=True) if a < b]
    return all(a <= b for a, b in zip(enough, steps, strict=True)) and (pp == 1 or further != ["loss_chunks"])


def brute_force(layouts: Iterable[Layout], pricer: Pricer) -> Candidate | None:
    """The choice among layouts, each priced."""
    found = [Candidate(layout, pricer.price(layout)) for layout in layouts]
    fitting = [c for c in found if c.price.fits]
    least = min((c.seconds for c in fitting), default=0.0)
    close = [c for c in fitting if c.seconds <= least * (1 + BAND)]
    return min(close, key=lambda c: c.simplicity, default=None)
