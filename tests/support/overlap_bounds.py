"""How long a step graph takes at least, in whatever order its calls stand and with memory for all of it.

One machine computes, the links of an axis are one each. What leads to a call takes as long as its busiest machine does,
the call's head; what it leads to, its tail. Of any set of jobs of one machine, the smallest head, all the jobs, and the
smallest tail follow each other. The largest such sum is found by running, at any time, the job with the longest tail of
those that may start (Carlier 1982, "The one-machine sequencing problem").
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping

from torch.fx import GraphModule, Node

from autopar.cost.flops import node_seconds
from autopar.cost.graph_times import transfer_of
from autopar.cost.hardware import Device, Links
from autopar.ir.waits import is_started

COMPUTES = "kernels"
Work = tuple[str, float]  # which machine, seconds on it
Job = tuple[float, float, float]  # head, seconds, tail


def least_seconds(gm: GraphModule, device: Device, links: Links) -> float:
    """Of one run. Transfers are waited for where data need them, and nowhere else."""
    works = {node: _work(node, device, links) for node in gm.graph.nodes if node.op == "call_function"}
    heads = _led_to(works, works, lambda node: node.all_input_nodes)
    tails = _led_to(reversed(works), works, lambda node: node.users)
    jobs = defaultdict[str, list[Job]](list)
    for node, (machine, seconds) in works.items():
        if seconds:
            jobs[machine].append((heads[node], seconds, tails[node]))
    return max(map(_one_machine, jobs.values()), default=0.0)


def _work(node: Node, device: Device, links: Links) -> Work:
    return transfer_of(node, device, links) if is_started(node) else (COMPUTES, node_seconds(node, device))


def _led_to(
    order: Iterable[Node], works: Mapping[Node, Work], neighbours: Callable[[Node], Iterable[Node]]
) -> dict[Node, float]:
    """Seconds of the busiest machine for all that leads to a node."""
    reached, found = dict[Node, set[Node]](), dict[Node, float]()
    for node in order:
        before = [x for x in neighbours(node) if x in reached]
        reached[node] = set(before).union(*(reached[x] for x in before))
        busy = Counter[str]()
        for x in reached[node]:
            busy[works[x][0]] += works[x][1]  # type: ignore[assignment]
        found[node] = max(busy.values(), default=0.0)
    return found


def _one_machine(jobs: Iterable[Job]) -> float:
    """The longest of head, work and tail, where a job may be interrupted."""
    todo, ready = sorted(jobs, reverse=True), list[tuple[float, float]]()
    now = most = 0.0
    while todo or ready:
        now = now if ready else max(now, todo[-1][0])
        while todo and todo[-1][0] <= now:
            _, seconds, tail = todo.pop()
            heapq.heappush(ready, (-tail, seconds))
        tail, seconds = heapq.heappop(ready)
        runs = min(seconds, todo[-1][0] - now) if todo else seconds
        now += runs
        if runs < seconds:
            heapq.heappush(ready, (tail, seconds - runs))
        else:
            most = max(most, now - tail)
    return most
