"""Token slices: keys of earlier slices are kept, their gradients come back in reverse; against autograd."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.ir.graph import outputs, placeholders
from autopar.ir.placement import Shard
from autopar.ir.signature import InputSpec, OutputSpec, ParameterSpec
from autopar.options import Options
from autopar.runtime.exec.executor import Executor
from autopar.runtime.mesh.process_groups import Groups, init_mesh
from autopar.schedule.order import P2PEdge
from autopar.schedule.request import SCHEDULES, Request
from autopar.schedule.simulate import simulate
from autopar.steps.graphs import Cache, Pipeline, Stage
from tests.runtime.hand_made import adding, graph
from tests.support.peaks import measure
from tests.support.ranks import run_ranks

ROWS, WIDTH, LENGTHS, MICROBATCHES = 2, 4, (3, 2, 1), 3
NAMES = ("wk0", "wq0", "wk1", "wq1")


def attend(x: Tensor, wk: Tensor, wq: Tensor, past: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(output, keys, query, sum of all keys so far)"""
    k, q = x @ wk, x @ wq
    so_far = past.sum(1, keepdim=True) + k.sum(1, keepdim=True)
    return torch.tanh(q * so_far), k, q, so_far


def part(i: int) -> Stage:
    """h = tanh(q * sum of keys up to this slice). Part 0 cuts its slice out of x, part 1 makes the loss."""
    k, past = f"k{i}", f"past{i}"

    def backward(x: Tensor, wk: Tensor, wq: Tensor, past: Tensor, g: Tensor, later: Tensor) -> Any:
        out, _, q, so_far = attend(x, wk, wq, past)
        du = g * (1 - out * out)
        dq, ds = du * so_far, (du * q).sum(1, keepdim=True)
        dk = later + ds
        dx = dk @ wk.t() + dq @ wq.t()
        return dx, (x.transpose(1, 2) @ dk).sum(0), (x.transpose(1, 2) @ dq).sum(0), ds.expand_as(past)

    weights = [f"grad:wk{i}", f"grad:wq{i}", f"grad:{past}"]
    given = [f"wk{i}", f"wq{i}", past]
    if i == 0:
        f = graph(
            lambda x, s, n, wk, wq, p: attend(x.narrow(1, s, n), wk, wq, p)[:2],
            ["x", "slice_start", "slice_length", *given],
            ["h0", k],
        )
        b = graph(
            lambda x, s, n, wk, wq, p, g, later: backward(x.narrow(1, s, n), wk, wq, p, g, later)[1:],
            ["x", "slice_start", "slice_length", *given, "grad:h0", f"grad:{k}"],
            weights,
        )
    else:
        f = graph(
            lambda x, wk, wq, p: ((out := attend(x, wk, wq, p))[0].square().sum(), *out[:2]),
            ["h0", *given],
            ["output:0", k, "saved:out"],
        )
        # entries: loss, output, keys -> loss, keys, output
        result = f.graph.graph.output_node()
        loss, out, keys = result.args[0]
        result.args = ((loss, keys, out),)
        f.graph.recompile()
        outputs(f.graph)[0].meta["val"] = torch.zeros((), dtype=torch.float64)
        b = graph(
            lambda x, wk, wq, p, out, later: backward(x, wk, wq, p, 2 * out, later),
            ["h0", *given, "saved:out", f"grad:{k}"],
            ["grad:h0", *weights],
        )
    node = placeholders(f.graph)[f.inputs.index(past)]
    node.meta["val"] = torch.zeros(ROWS, 1, WIDTH, dtype=torch.float64)
    held = [f"wk{i}", f"wq{i}"]
    b = adding(b, {f"grad:{n}": (WIDTH, WIDTH) for n in held})
    return Stage(f, backward=b, losses=["output:0"] if i else [], parameters=held, caches=[Cache(past, k, 1)])


def values() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    found = {n: torch.randn(WIDTH, WIDTH, generator=g, dtype=torch.float64) / 2 for n in NAMES}
    x = torch.randn(ROWS * MICROBATCHES, sum(LENGTHS), WIDTH, generator=g, dtype=torch.float64)
    return {**found, "x": x}


def expected() -> tuple[float, dict[str, Tensor]]:
    """The same slices, differentiated by autograd."""
    given = values()
    weights = {n: given[n].requires_grad_() for n in NAMES}
    h = given["x"]
    for i in range(2):
        pasts, outs = [h.new_zeros(len(h), 0, WIDTH)], []
        for piece in h.split(LENGTHS, 1):
            out, k, _, _ = attend(piece, weights[f"wk{i}"], weights[f"wq{i}"], torch.cat(pasts, 1))
            pasts.append(k)
            outs.append(out)
        h = torch.cat(outs, 1)
    loss = h.square().sum()
    loss.backward()
    return float(loss.detach()), {n: w.grad for n, w in weights.items() if w.grad is not None}


def train(schedule: str) -> tuple[float, dict[str, Tensor], int, int]:
    groups = Groups(init_mesh("cpu", 20.0, pp=2))
    order = SCHEDULES[schedule].make(Request(2, MICROBATCHES, 1, len(LENGTHS)))
    shapes = tuple((ROWS, n, WIDTH) for n in LENGTHS)
    edges = [P2PEdge("h0", 0, 1, True, shapes, torch.float64)]
    inputs = [InputSpec(n, "parameter", n, requires_grad=True) for n in NAMES] + [InputSpec("x", "input", "x")]
    compiled: Any = SimpleNamespace(
        pipeline=Pipeline([part(0), part(1)], edges, order, token_slices=LENGTHS),
        train=True,
        prologue=None,
        plan=SimpleNamespace(experts={}, options=Options(microbatches=MICROBATCHES), inputs={"x": {"mb": Shard(0)}}),
        signature=SimpleNamespace(inputs=inputs, outputs=[OutputSpec("output", "loss")], assigned=(), unkept=()),
        constants={},
        known=None,
        parameters=[ParameterSpec(n, (WIDTH, WIDTH), torch.float64) for n in NAMES],
    )
    executor = Executor(compiled, groups)
    peaks = measure(executor)
    result = executor.run_step(values())
    assert peaks.live == simulate(order).live[groups.rank]
    sent = executor.traffic["pp", "send"]
    return float(result.losses[0]), result.gradients, sent.calls, sent.bytes


@pytest.mark.parametrize("schedule", ["tera_pipe", "seq1f1b"])
def test_slices_of_unequal_length(schedule: str) -> None:
    loss, gradients = expected()
    found = run_ranks(2, train, schedule)
    for rank, (value, ours, calls, sent) in enumerate(found):
        assert abs(value - loss) < 1e-12 * abs(loss)
        assert set(ours) == {f"wk{rank}", f"wq{rank}"}
        assert all((g - gradients[n]).abs().max() < 1e-11 for n, g in ours.items())
        assert (calls, sent) == (len(LENGTHS) * MICROBATCHES, ROWS * sum(LENGTHS) * WIDTH * 8 * MICROBATCHES)
