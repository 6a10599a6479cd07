"""Pipelines whose step graphs are written by hand, and the same computation under autograd in one process.

    part k      h_k = tanh(h_(k-1) @ w_k + b_k [+ h_0 where the skip goes])      h_(-1) = x
    last part   loss = sum((h - 2 target)^2) / total,    total = number of rows in all microbatches

Used weights are twice the stored ones (G, R); biases are aliases. `2 target` comes from the prologue.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Proxy
from torch.fx.node import map_aggregate

import autopar.runtime.schedules  # noqa: F401 - fills SCHEDULES
from autopar.ir.graph import add_placeholder, output_node, outputs, placeholders
from autopar.ir.placement import Shard
from autopar.ir.signature import InputSpec, OutputSpec, ParameterSpec
from autopar.options import Options
from autopar.schedule.lowering import lower
from autopar.schedule.order import Order, P2PEdge
from autopar.schedule.request import SCHEDULES, Request
from autopar.schedule.simulate import simulate
from autopar.steps.graphs import Pipeline, Prologue, Stage, StepGraph, earlier_sum, of

WIDTH = 6


@dataclass(frozen=True)
class Case:
    """A hand-made model. skips: parts that add h_0. way: how it gets there: from user to user ("chain"), through part
    1, which does not use it ("relay"), or from part 0 to each ("star"). tied: parts that share their weight."""

    parts: int
    microbatches: int
    rows: int = 3  # of a microbatch
    skips: tuple[int, ...] = ()
    way: str = "chain"
    tied: tuple[int, ...] = ()
    slices: tuple[int, ...] = ()

    def weight(self, part: int) -> str:
        return "w_tied" if part in self.tied else f"w{part}"


def graph(run: Callable[..., Any], inputs: Sequence[str], results: Sequence[str | None]) -> StepGraph:
    """Traced by proxies alone: fx's own tracer patches every function that anybody has wrapped, for each graph anew."""
    traced = Graph()
    out = run(*(Proxy(traced.placeholder(name)) for name in inspect.signature(run).parameters))
    traced.output(map_aggregate(out, lambda x: x.node if isinstance(x, Proxy) else x))
    return StepGraph(GraphModule(nn.Module(), traced), list(inputs), list(results))


def part_of(case: Case, k: int) -> Stage:
    """F, BW, B, W, G and R of a part."""
    first, last, skip = k == 0, k == case.parts - 1, k in case.skips
    h, used = "x" if first else f"h{k - 1}", f"{case.weight(k)}_used"
    given = [used, f"b{k}_used", h, *(["h0"] if skip else [])]

    def through(w: Tensor, b: Tensor, h: Tensor, more: Any) -> Tensor:
        return torch.tanh(h @ w + b + more)

    def forward(w: Tensor, b: Tensor, h: Tensor, more: Any) -> Any:
        out = through(w, b, h, more)
        return out, out.clone()

    def forward_last(w: Tensor, b: Tensor, h: Tensor, more: Any, target: Tensor, total: Tensor) -> Any:
        out = through(w, b, h, more)
        return ((out - target) ** 2).sum() / total, out

    def last_tangent(out: Tensor, target: Tensor, total: Tensor) -> Tensor:
        return 2 * (out - target) / total

    def before(out: Tensor, g: Tensor) -> Tensor:
        return g * (1 - out * out)

    saved = f"saved:h{k}"
    if last:
        f = graph(_with(forward_last, skip), [*given, "doubled", "total_0"], ["output:0", saved])
        loss = outputs(f.graph)[0]
        loss.meta["val"] = torch.zeros((), dtype=torch.float64)
        source = ["doubled", "total_0"]
        inner: Callable[..., Tensor] = lambda out, *rest: before(out, last_tangent(out, *rest))  # noqa: E731
    else:
        f = graph(_with(forward, skip), given, [f"h{k}", saved])
        source, inner = [f"grad:h{k}"], before
    to_input = [] if first else [f"grad:{h}"]
    to_skip = ["grad:h0"] if skip else []
    names = [saved, *source]

    def both(w: Tensor, h: Tensor, *rest: Tensor) -> Any:
        du = inner(*rest)
        grads = [du @ w.t()] * (not first) + [du.clone()] * skip
        return (*grads, h.t() @ du, du.sum(0), None)

    def to_inputs(w: Tensor, *rest: Tensor) -> Any:
        du = inner(*rest)
        return (*([du @ w.t()] * (not first)), *([du.clone()] * skip), du)

    def to_weights(h: Tensor, du: Tensor) -> Any:
        return h.t() @ du, du.sum(0)

    weights = [f"grad:{used}", f"grad:b{k}_used"]
    stored = case.weight(k)
    own = {n: (WIDTH, WIDTH) if k == 0 else (WIDTH,) for k, n in enumerate(weights)}
    whole = graph(_fixed(both, 2 + len(names)), [used, h, *names], [*to_input, *to_skip, *weights, None])
    return Stage(
        f,
        backward=adding(whole, own),
        backward_input=graph(_fixed(to_inputs, 1 + len(names)), [used, *names], [*to_input, *to_skip, f"stash:{k}"]),
        backward_weight=adding(graph(to_weights, [h, f"stash:{k}"], weights), own),
        gather=graph(lambda w: (w * 2,), [stored], [used]),
        gathered={used: stored},
        reduce=graph(lambda g: (g * 2,), [f"grad:{used}"], [f"grad:{stored}"]),
        aliases={f"b{k}_used": f"b{k}"},
        losses=["output:0"] if last else [],
        parameters=[stored, f"b{k}"],
    )


def adding(step: StepGraph, shapes: dict[str, tuple[int, ...]]) -> StepGraph:
    """A backward that adds to the gradients of earlier microbatches."""
    gm, results, inputs = step.graph, list(outputs(step.graph)), list(step.inputs)
    for i, name in enumerate(step.outputs):
        if name in shapes:
            earlier = add_placeholder(gm.graph, f"earlier_{of(name)}", placeholders(gm)[-1])
            earlier.meta["val"] = torch.zeros(shapes[name], dtype=torch.float64)
            with gm.graph.inserting_before(output_node(gm)):
                results[i] = gm.graph.call_function(operator.add, (results[i], earlier))
            inputs.append(earlier_sum(of(name)))
    output_node(gm).args = (tuple(results),)
    gm.recompile()
    return StepGraph(gm, inputs, step.outputs)


def _with(run: Callable[..., Any], skip: bool) -> Callable[..., Any]:
    """A function that takes ``more`` only if there is a skip; without star arguments, which fx cannot trace."""
    if run.__code__.co_argcount == 4:
        return run if skip else lambda w, b, h: run(w, b, h, 0.0)
    return run if skip else lambda w, b, h, target, total: run(w, b, h, 0.0, target, total)


def _fixed(run: Callable[..., Any], count: int) -> Callable[..., Any]:
    return {
        3: lambda a, b, c: run(a, b, c),
        4: lambda a, b, c, d: run(a, b, c, d),
        5: lambda a, b, c, d, e: run(a, b, c, d, e),
    }[count]


def edges_of(case: Case) -> list[P2PEdge]:
    shape = ((case.rows, WIDTH),)
    found = [P2PEdge(f"h{k}", k, k + 1, True, shape, torch.float64) for k in range(case.parts - 1)]
    at = 1 if case.way == "relay" else 0
    for part in (p for p in case.skips if p > 1):
        found.append(P2PEdge("h0", at, part, True, shape, torch.float64))
        at = 0 if case.way == "star" else part
    return found


def compiled_of(case: Case, order: Order, bucket_bytes: int = 2**20) -> Any:
    """What `Executor` reads of a `Compiled`."""
    names = {case.weight(k): (WIDTH, WIDTH) for k in range(case.parts)} | {f"b{k}": (WIDTH,) for k in range(case.parts)}
    inputs = [InputSpec(n, "parameter", n, requires_grad=True) for n in names]
    inputs += [InputSpec(n, "input", n) for n in ("x", "target")]
    inputs += [InputSpec("total_0", "total", "total_0")]
    cut = {"mb": Shard(0)} if case.microbatches > 1 else {}
    prologue = graph(lambda target: (target.sum() * 0 + target.shape[0],), ["target"], ["total_0"])
    pipeline = Pipeline(
        [part_of(case, k) for k in range(case.parts)],
        edges_of(case),
        order,
        each=graph(lambda target, x: (target * 2, x * 3), ["target", "x"], ["doubled", "junk"]),
        token_slices=case.slices,
    )
    return SimpleNamespace(
        train=True,
        pipeline=pipeline,
        prologue=Prologue(prologue.graph, prologue.inputs, ["total_0"]),
        plan=SimpleNamespace(
            experts={},
            options=Options(microbatches=case.microbatches, bucket_bytes=bucket_bytes),
            inputs={"x": cut, "target": cut},
        ),
        signature=SimpleNamespace(inputs=inputs, outputs=[OutputSpec("output", "loss")], assigned=(), unkept=()),
        constants={},
        known=None,
        parameters=[
            ParameterSpec(n, shape, torch.float64, ranks=holders(case, order, n)) for n, shape in names.items()
        ],
    )


def holders(case: Case, order: Order, name: str) -> tuple[int, ...]:
    """The ranks whose stages use a parameter."""
    return tuple(sorted({r for s, r in enumerate(order.rank_of) if name in weights_of(case, order.part_of(s))}))


def weights_of(case: Case, part: int) -> tuple[str, str]:
    return case.weight(part), f"b{part}"


def values_of(case: Case) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64) / 2  # noqa: E731
    rows = case.rows * case.microbatches
    found = {"x": draw(rows, WIDTH), "target": draw(rows, WIDTH)}
    for k in range(case.parts):
        found.setdefault(case.weight(k), draw(WIDTH, WIDTH))
        found[f"b{k}"] = draw(WIDTH)
    return found


def expected(case: Case, detached: bool = False) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients by autograd, the whole batch at once. detached: h_0 passes no gradient on."""
    values = values_of(case)
    weights = {n: v.requires_grad_() for n, v in values.items() if n not in ("x", "target")}
    made: list[Tensor] = []
    h = values["x"]
    for k in range(case.parts):
        more = made[0] if k in case.skips else 0.0
        h = torch.tanh(h @ (2 * weights[case.weight(k)]) + weights[f"b{k}"] + more)
        h = h.detach() if detached and k == 0 else h
        made.append(h)
    loss = ((h - 2 * values["target"]) ** 2).sum() / len(h)
    loss.backward()
    return float(loss.detach()), {n: w.grad for n, w in weights.items() if w.grad is not None}


def mine(case: Case, order: Order, rank: int) -> dict[str, Tensor]:
    """Inputs, and the parameters of one rank's stages."""
    parts = [order.part_of(s) for s, r in enumerate(order.rank_of) if r == rank]
    held = {n for k in parts for n in weights_of(case, k)}
    return {n: v for n, v in values_of(case).items() if n in ("x", "target") or n in held}


def order_of(case: Case, schedule: str, ranks: int) -> Order:
    """An entry of the schedules' table, lowered, and run through the simulator."""
    request = Request(ranks, case.microbatches, case.parts // ranks, max(1, len(case.slices)))
    return lowered(case, SCHEDULES[schedule].make(request))


def lowered(case: Case, order: Order) -> Order:
    everybody = set(range(case.parts))
    found = lower(order, edges_of(case), everybody, everybody)
    simulate(found)
    return found
