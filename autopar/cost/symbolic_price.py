"""The seconds and the memory of a layout as expressions of its batch, its sequence and the speeds of its links.

    found = symbolic_price(layout, {4096: costs, 8192: costs, 16384: costs}, cluster, stack)
    found.javascript()      a function of (batch, seq, inside, card), for the page of `autopar plan --auto --dump`

The formulas are those of `autopar.cost.layout_price`, over expressions instead of numbers. Costs at three sequence
lengths give those at any, as all of them are quadratic in it, up to rows of tiles. batch: rows of a step, in
microbatches of the same size. inside, card: factors of the speeds of the cluster's links. Of a pipeline, those critical
paths are known that are the longest at some sequence and speeds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

import numpy as np
import sympy

from autopar.cost.cluster import Cluster
from autopar.cost.efficiency import Stack
from autopar.cost.extremes import most
from autopar.cost.hardware import Device, Links
from autopar.cost.layer_costs import LayerCosts, ModelCosts, Work
from autopar.cost.layout import Layout
from autopar.cost.layout_price import LayoutPricing
from autopar.schedule.critical_path import CriticalPath, Part

Expr: TypeAlias = Any  # sympy.Expr: sympy has no annotations
BATCH, SEQ, INSIDE, CARD = sympy.symbols("batch seq inside card", positive=True)
ARGUMENTS = (BATCH, SEQ, INSIDE, CARD)
LENGTHS = 3  # sequences whose costs are needed
SPEEDS = 0.25, 1.0, 4.0  # of links, at which critical paths are looked for


@dataclass(frozen=True)
class SymbolicPrice:
    """seconds: of a step. flops: of the model and step. memory: bytes of each rank of pp. peak: FLOPs per second of all
    chips."""

    seconds: Expr
    flops: Expr
    memory: tuple[Expr, ...]
    peak: float

    def javascript(self) -> str:
        """A function (batch, seq, inside, card) => [seconds, MFU, bytes of each rank of pp]."""
        rows = [self.seconds, self.flops / (self.seconds * self.peak), *self.memory]
        shared, left = sympy.cse(rows, sympy.numbered_symbols("x"))
        lines = [f"const {name}={sympy.jscode(value)};" for name, value in shared]
        return f"(batch,seq,inside,card)=>{{{''.join(lines)}return [{','.join(map(sympy.jscode, left))}]}}"


def symbolic_price(
    layout: Layout, costs: Mapping[int, ModelCosts], cluster: Cluster, stack: Stack, *, kernel: str = "",
    compute: str = "",
) -> SymbolicPrice:  # fmt: skip
    """Expressions of a layout on equal nodes, from the costs at three sequence lengths. Raises ValueError for less, and
    for costs that differ in their kinds of work."""
    if len(costs) < LENGTHS:
        raise ValueError(f"symbolic price: needs costs at {LENGTHS} sequence lengths, found {len(costs)}; add some")
    if len(set(map(kinds_of_work, costs.values()))) > 1:
        raise ValueError("symbolic price: needs the same products and exchanges at all lengths; take closer ones")
    kernel = kernel or stack.kernel
    stack, cluster = stack.with_kernel(kernel), cluster.with_ranks(layout.ranks)
    group = cluster.group
    faster = replace(cluster, groups=(replace(group, inside=group.inside * INSIDE, card=group.card * CARD),))
    device = Device(cluster.chip_name, cluster.chip, stack, kernel, compute == "fp8")
    found = _Symbolic(layout, costs, device, Links(layout.mesh, faster, stack))
    return SymbolicPrice(found.seconds(), found.flops, found.bytes_of_ranks(), found.peak)


class _Symbolic(LayoutPricing):
    def __init__(self, layout: Layout, costs: Mapping[int, ModelCosts], device: Device, links: Links) -> None:
        self.lengths = sorted(costs)[:LENGTHS]
        of_any = _of_any_length({seq: costs[seq] for seq in self.lengths})
        super().__init__(layout, of_any, device, links, simulated=False, known={})
        self.microbatches = BATCH / (layout.data_size * layout.micro_batch)

    def _seconds_of_paths(self, times: Mapping[Part, Expr]) -> Callable[[CriticalPath], Expr]:
        """The longest of the paths that decide at some point."""
        points = self._points(times)

        def seconds(path: CriticalPath) -> Expr:
            found = dict.fromkeys(tuple(sorted(path.path(point).items())) for point in points)
            return most(*(sum((count * times[part] for part, count in one), sympy.S.Zero) for one in found))

        return seconds

    def _points(self, times: Mapping[Part, Expr]) -> list[dict[Part, float]]:
        """Times at some sequences and speeds of links."""
        shared, left = sympy.cse([*times.values()], sympy.numbered_symbols("x"))
        found = []
        for seq, inside, card in itertools.product(self.lengths, SPEEDS, SPEEDS):
            values: dict[Any, Any] = {BATCH: self.layout.batch, SEQ: seq, INSIDE: inside, CARD: card}
            for name, value in shared:
                values[name] = value.xreplace(values)
            found.append(dict(zip(times, (float(one.xreplace(values)) for one in left), strict=True)))
        return found


def kinds_of_work(costs: ModelCosts) -> object:
    """Equal for costs that differ in amounts alone."""
    works = [work for c in (*costs.layers, costs.rest) for work in (c.forward, c.backward, c.again)]
    return tuple((w.products[:, 0].tobytes(), w.attention[:, 0].tobytes(), tuple(w.sent)) for w in works)


def _of_any_length(costs: Mapping[int, ModelCosts]) -> ModelCosts:
    """Costs whose numbers are the quadratics through those at three lengths."""
    found: ModelCosts = _through([*costs], [*costs.values()])
    return found


def _through(lengths: Sequence[int], values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, (ModelCosts, LayerCosts, Work)):
        made: dict[str, Any] = {f.name: _through(lengths, [getattr(x, f.name) for x in values]) for f in fields(first)}
        return replace(first, **made)
    if isinstance(first, Mapping):
        return {key: _through(lengths, [x[key] for x in values]) for key in first}
    if isinstance(first, np.ndarray):
        found = np.empty(first.shape, dtype=object)
        for place in np.ndindex(first.shape):
            found[place] = _quadratic(lengths, [float(x[place]) for x in values])
        return found
    if isinstance(first, float):
        return _quadratic(lengths, values)
    if isinstance(first, tuple):
        return tuple(_through(lengths, each) for each in zip(*values, strict=True))
    return first


def _quadratic(lengths: Sequence[int], values: Sequence[float]) -> Any:
    """The number, or the polynomial of the sequence."""
    (a, b, c), (fa, fb, fc) = lengths, values
    if fa == fb == fc:
        return fa
    first = (fb - fa) / (b - a)
    second = ((fc - fb) / (c - b) - first) / (c - a)
    if abs(second) * c * c < 1e-12 * max(abs(fa), abs(fc)):
        second = 0.0
    return sympy.expand(fa + (SEQ - a) * (first + (SEQ - b) * second))
