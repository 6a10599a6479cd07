"""schedule_collectives: start collectives early and wait for them late, by price and within memory.

Consumes    a step graph whose calls stand in an order that suits memory, gathers of parameters and copies from the
            host right before their first use.
Guarantees  beside a transfer that computation would wait for run calls that neither lead to it nor depend on it, as
            many as its estimated time asks for (gathers and copies from the host: twice that: estimates are wrong). A
            collective starts once its operand is computed. The peak of live values stays that of the given order; where
            no memory limit is set it may grow by the tokens that two layers exchange. Of gathered weights and copies no
            more than one layer waits for its first use.
Leaves      what is computed; the order of calls where there is nothing to wait for.

    w = weight_grad(a, b); x = all_reduce(dx, "tp"); y = f(x); v = all_gather(p); z = mm(y, v)
        -->
    x = all_reduce(dx, "tp"); v = all_gather(p); w = weight_grad(a, b); y = f(x); z = mm(y, v)

List scheduling from the end of the graph to its beginning, as in XLA's latency hiding scheduler. Of the calls whose
users all have their place, the one that came last in the given order is next, unless it is a transfer that would end
too late; then the one before it is, and so on. So computation only ever moves behind transfers, which keeps its
operands longer but its results shorter. The order is a function of the graph and of the options: it is the same on all
ranks.
"""

from __future__ import annotations

import heapq
import itertools
import math
import operator
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch.fx import GraphModule, Node

from autopar.adapters.operators import mutates
from autopar.cost.flops import node_seconds
from autopar.cost.graph_times import transfer_of
from autopar.cost.hardware import Device, Links, device_of
from autopar.ir.graph import is_call, layer_of, nbytes, output_node
from autopar.ir.live_values import buffers_of, bytes_alive, peak_of_values
from autopar.ir.storages import Storage, size_of, storages
from autopar.ir.waits import is_started
from autopar.ops.traits import ASKS, COLLECTIVES, PASSING, SUMS
from autopar.options import Options
from autopar.passes.step.bucket_gradients import ends_in_output
from autopar.rewrite.compilation import Compilation
from autopar.rewrite.pass_manager import Pass

MARGIN = 2.0  # of the estimated time of gathers and copies, which cost memory but nothing else when they are early
LOOK = 16  # calls that are tried in place of a transfer
aten, ours = torch.ops.aten, torch.ops.autopar
TOKENS = (ours.all_to_all_rows.default, ours.all_to_all.default, *ASKS)
MOVES = (
    aten.cat.default, aten.split_with_sizes.default, operator.getitem,
    ours.largest.default, ours.scale_of.default, ours.delayed_scale.default, ours.quantized.default,
)  # beside views: what joins parameters, and rounds them  # fmt: skip
ATTEMPTS = 4  # at an order within memory: schedules count without the buffers of transfers


class ScheduleCollectives(Pass):
    """Reorders the calls of a step graph."""

    name = "schedule_collectives"
    requires = ("step",)

    def apply(self, gm: GraphModule, ctx: Compilation) -> GraphModule:
        if ctx.draft or not any(map(is_started, gm.graph.nodes)):
            return gm
        options = ctx.plan.options if ctx.plan is not None else Options()
        held = {n.name for n in gm.graph.nodes if n.op == "placeholder"} - set(gm.meta.get("freed", ()))
        given = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
        names = tuple(node.name for node in given)
        if ctx.mesh.slice is not None and names in ctx.orders:
            by_name = {node.name: node for node in given}
            _put(gm, [by_name[name] for name in ctx.orders[names]])
            gm.recompile()
            return gm
        run = _Backwards(gm, given, held, device_of(options), Links.of(options, ctx.mesh))
        most = bound = run.peak + (0 if options.memory_limit else run.spare)
        for _ in range(ATTEMPTS):
            _put(gm, _started_at_once(run.order(bound)))
            over = peak_of_values(gm, held) - most
            if over <= 0:
                break
            bound -= over
        else:
            _put(gm, given)
        ctx.orders[names] = [node.name for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
        gm.recompile()
        return gm


def _put(gm: GraphModule, calls: Iterable[Node]) -> None:
    end = output_node(gm)
    for node in calls:
        end.prepend(node)


def _waits_for_nothing(node: Node) -> bool:
    """Whether a transfer may start at any time: what it moves is an input, cast or rounded or not, or several."""
    return all(x.op == "placeholder" or (_only_moves(x) and _waits_for_nothing(x)) for x in node.all_input_nodes)


def _only_moves(node: Node) -> bool:
    return is_started(node) or node.target in PASSING or is_call(node, *MOVES)


def _started_at_once(calls: list[Node]) -> list[Node]:
    """Transfers of computed values move up, right behind the last of their operands."""
    place = {node: i for i, node in enumerate(calls)}
    moved: dict[int, list[Node]] = {}
    for node in calls:
        if is_started(node) and not _waits_for_nothing(node):
            moved.setdefault(max(place.get(x, -1) for x in node.all_input_nodes), []).append(node)
    early = {node for found in moved.values() for node in found}
    found = []
    for i, node in enumerate(calls):
        if node not in early:
            found.append(node)
            found += _chain(i, moved, place)
    return found


def _chain(i: int, moved: dict[int, list[Node]], place: dict[Node, int]) -> list[Node]:
    return [x for node in moved.get(i, ()) for x in (node, *_chain(place[node], moved, place))]


class _Backwards:
    """Schedules from the end, from where seconds are counted. A transfer keeps its operand and its buffers until its
    first user. given: bytes alive at each place of the given order. unseen: those of them that this class does not see,
    of reductions of gradients that are on their way."""

    def __init__(self, gm: GraphModule, calls: list[Node], held: set[str], device: Device, links: Links) -> None:
        self.gm, self.calls, self.held = gm, calls, held
        self.place = {node: i for i, node in enumerate(calls)}
        self.behind = storages(gm, in_place=True)
        self.seconds, self.transfers = dict[Node, float](), dict[Node, tuple[str, float]]()
        for node in calls:
            if not is_started(node):
                self.seconds[node] = node_seconds(node, device)
                continue
            link, seconds = transfer_of(node, device, links)
            self.transfers[node] = link, math.inf if node.target in ASKS else seconds
            if ends_in_output(node) or (node.target in SUMS and node.meta.get("bucket")):  # nothing waits for it
                self.seconds[node] = 0.0
        writes = [node for node in calls if mutates(node.target)]  # stay in their order
        self.after = dict(itertools.pairwise(writes))
        self.before = {b: a for a, b in self.after.items()}
        self.early = {node for node in self.transfers if _waits_for_nothing(node)}
        self.layer = self._largest_layer(n for n in calls if n in self.early)
        self.spare = 2 * self._largest_layer(n for n in calls if n.target in TOKENS)
        self.waiting = {n for n in self.transfers if n not in self.seconds and n not in self.early}
        self.waiting |= {user for node in self.waiting for user in node.users}
        for node in calls:  # and views of what they make
            if not self.seconds.get(node, 1.0) and not self.waiting.isdisjoint(node.all_input_nodes):
                self.waiting.add(node)
        left = iter(reversed(calls))
        self._walk(lambda: next(left))
        alive = bytes_alive(gm, held)
        self.given = np.array([alive[node] for node in calls])
        self.unseen = self.given - self.during

    def _largest_layer(self, transfers: Iterable[Node]) -> int:
        """Bytes of what the layer with the most of it receives."""
        return max((sum(map(nbytes, layer)) for _, layer in itertools.groupby(transfers, self._layer)), default=0)

    def _layer(self, node: Node) -> str:
        """That of a value's first user; a bucket is of no layer."""
        users = [user for user in node.users if user in self.place]
        if layer_of(node) or not users:
            return layer_of(node)
        return self._layer(min(users, key=self.place.__getitem__))

    @property
    def peak(self) -> int:
        """Of the given order."""
        return int(self.given.max(initial=0))

    def order(self, most: int) -> list[Node]:
        """The calls in their new order, with ``most`` bytes alive, or what the given order needs."""
        self.most, self.alive_at, self.end = most, self.given.copy(), len(self.calls)
        return self._walk(self._next)

    def _walk(self, pick: Callable[[], Node]) -> list[Node]:
        end, found = output_node(self.gm), dict[Node, None]()
        self.left = {node: len(node.users) - (end in node.users) + (node in self.after) for node in self.calls}
        self.alive: set[Storage] = {s for x in end.all_input_nodes for s in self.behind[x]}
        self.live = sum(map(self._size, self.alive))
        self.during = np.zeros(len(self.calls), dtype=np.int64)
        self.now, self.placed = 0.0, found
        self.free: list[tuple[int, Node]] = []  # computation whose users have their place, the last of all first
        self.late: list[tuple[int, Node]] = []  # of that, what waits for a transfer of computed values
        self.pending: dict[Node, tuple[float, int]] = {}  # transfers likewise -> when they may start, their buffers
        self.links: dict[str, float] = {}  # when they are free
        for node in self.calls:
            self._offer(node)
        while len(found) < len(self.calls):
            node = pick()
            self.live -= self.pending.pop(node, (0.0, 0))[1]
            self._take(node)
            found[node] = None
            if node in self.seconds and node in self.transfers:
                self._occupy(*self.transfers[node])
            self.now += self.seconds.get(node, 0.0)
            for x in self._needs(node):
                self.left[x] -= 1
                self._offer(x)
        return [*reversed(found)]

    def _needs(self, node: Node) -> list[Node]:
        """The calls that stay ahead of one."""
        found = dict.fromkeys([*node.all_input_nodes, *([self.before[node]] if node in self.before else [])])
        return [x for x in found if x in self.place]

    def _size(self, storage: Storage) -> int:
        return 0 if storage[0].op == "placeholder" and storage[0].name in self.held else size_of(storage)

    def _offer(self, node: Node) -> None:
        if self.left.get(node) != 0:
            return
        if node in self.seconds:
            heapq.heappush(self.late if node in self.waiting else self.free, (-self.place[node], node))
            return
        link, seconds = self.transfers[node]
        end = max(self.now, self.links.get(link, 0.0))
        self.links[link] = end + seconds
        copied, buffers, late = buffers_of(node) if node.target in COLLECTIVES else (False, 0, 0)
        if not copied:
            self._revive(node.all_input_nodes)
        self.live += buffers - late
        self.pending[node] = end + seconds * (MARGIN if node in self.early else 1.0), buffers - late

    def _occupy(self, link: str, seconds: float) -> None:
        """A link is taken by a transfer that nothing waits for: others have to start earlier."""
        self.links[link] = max(self.links.get(link, 0.0), self.now) + seconds
        for node, (when, buffers) in self.pending.items():
            if self.transfers[node][0] == link:
                self.pending[node] = when + seconds, buffers

    def _next(self) -> Node:
        due = [node for node, (when, _) in self.pending.items() if when <= self.now]
        if not due and sum(nbytes(node) for node in self.pending if node in self.early) > self.layer:
            due = [node for node in self.pending if node in self.early]
        last = max(due or self.pending, key=self.place.__getitem__, default=None)
        if last is not None and due:
            return last
        if self.late and (first := self._fitting(self.late)) is not None:
            return first
        if last is None or any(-heap[0][0] > self.place[last] for heap in (self.free, self.late) if heap):
            return heapq.heappop(min((heap for heap in (self.free, self.late) if heap), key=lambda heap: heap[0]))[1]
        return self._fitting(self.free) or last

    def _fitting(self, heap: list[tuple[int, Node]]) -> Node | None:
        """The last call of a heap that memory allows to come next."""
        passed, found = list[tuple[int, Node]](), None
        while heap and len(passed) < LOOK and found is None:
            one = heapq.heappop(heap)
            cost = self._cost(one[1])
            if cost is None:
                passed.append(one)
                continue
            found = one[1]
            if self.place[found] < self.end - 1:
                self.alive_at[self.place[found] : self.end] += cost
        for one in passed:
            heapq.heappush(heap, one)
        return found

    def _cost(self, node: Node) -> int | None:
        """Bytes that are alive longer if a call comes next, as its operands now live until here, and its results do not
        live before; None where memory does not allow it."""
        while self.calls[self.end - 1] in self.placed:
            self.end -= 1
        added = self._bytes((node, *node.all_input_nodes))
        where, more = self.alive_at[self.place[node] : self.end], added - sum(map(self._size, self._made(node)))
        here = self.live + added + int(self.unseen[self.place[node]])
        return None if here > self.most or (more > 0 and int(where.max(initial=0)) + more > self.most) else more

    def _bytes(self, nodes: Iterable[Node]) -> int:
        """That are alive from here on because of values."""
        return sum(map(self._size, {s for x in nodes for s in self.behind[x]} - self.alive))

    def _made(self, node: Node) -> list[Storage]:
        return [s for s in dict.fromkeys(self.behind[node]) if s[0] is node]

    def _revive(self, nodes: Iterable[Node]) -> None:
        nodes = list(nodes)
        self.live += self._bytes(nodes)
        self.alive |= {s for x in nodes for s in self.behind[x]}

    def _take(self, node: Node) -> None:
        self._revive((node, *node.all_input_nodes))
        self.during[self.place[node]] = self.live
        made = self._made(node)
        self.alive -= set(made)
        self.live -= sum(map(self._size, made))
