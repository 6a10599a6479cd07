"""Estimates with documents: the pairs, the bytes over cp and the choice are those of a run on such rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Node

from autopar.attention.algorithm_table import ALGORITHMS
from autopar.attention.attend import KernelCall
from autopar.attention.layouts import LAYOUTS
from autopar.attention.problem import Mask, Problem
from autopar.attention.program import ComputeEvent, trace
from autopar.compile.model import compile_model
from autopar.cost.attention_costs import busiest_share, is_context_attention
from autopar.cost.flops import flops, node_seconds, pairs
from autopar.cost.hardware import DEFAULT
from autopar.cost.layer_costs import graph_work
from autopar.cost.traffic import graph_runs, step_communication
from autopar.ir.mesh import Mesh
from autopar.models.tiny import TINY
from autopar.ops.mask_spec import MaskSpec
from autopar.options import Options
from autopar.passes import attention as attention  # fills ALGORITHMS
from autopar.planner.assumed_documents import lengths_in_row
from autopar.steps.graphs import Compiled
from autopar.testing.attention_ranks import Case, attend_and_differentiate

LENGTHS = (300, 7, 121, 500, 64, 33, 700, 323)  # 2,048 tokens
TOKENS = sum(LENGTHS)


def test_lengths_fill_a_row() -> None:
    assert lengths_in_row(0, 16) == lengths_in_row(3, 0) == ()
    assert lengths_in_row(3, 16) == (5, 5, 6)
    assert lengths_in_row(40, 16) == (1,) * 16
    assert lengths_in_row((9, 2), 16) == (9, 2, 5)
    assert lengths_in_row((9, 2), 22) == (9, 2, 9, 2)
    assert lengths_in_row((9,), 4) == (4,)


def segments() -> Tensor:
    return torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).unsqueeze(0)


@pytest.mark.parametrize("more", [{}, {"window": 50}, {"causal": False}, {"chunk": 256}, {"offset": 1000}], ids=str)
def test_pairs_are_those_of_the_mask(more: dict[str, Any]) -> None:
    known = {"causal": True, "window": 0, "chunk": 0, "offset": 0} | more
    rows = TOKENS - known["offset"]
    facts = MaskSpec(None, None, segments(), None, None, **known, scale=1.0, softcap=0.0, dropout=0.0, site=0,
                     index=[], shape=[])  # fmt: skip
    mask = facts.allowed(rows, TOKENS, torch.device("cpu"))
    assert mask is not None
    assert pairs(rows, TOKENS, **known, documents=LENGTHS) == int(mask.sum())


def problem(size: int, layout: str, documents: tuple[int, ...] = LENGTHS) -> Problem:
    return Problem(
        batch=1, heads=4, kv_heads=2, queries=TOKENS, keys=TOKENS, width=2, value_width=2, dtype=torch.float64,
        size=size, mask=Mask(causal=True), query_blocks=LAYOUTS[layout], key_blocks=LAYOUTS[layout], segments=True,
        documents=documents,
    )  # fmt: skip


def test_pairs_of_a_problem() -> None:
    assert (
        problem(2, "zigzag").pairs
        == pairs(TOKENS, TOKENS, True, documents=LENGTHS)
        == sum(n * (n + 1) // 2 for n in LENGTHS)
    )
    assert problem(2, "zigzag", ()).pairs == pairs(TOKENS, TOKENS, True)


CELLS = [(name, 4, "zigzag") for name in ALGORITHMS if name != "ring"] + [
    (name, 2, "contiguous") for name in ALGORITHMS if name not in ("hybrid", "zigzag_ring")
]


@pytest.mark.parametrize(("name", "size", "layout"), CELLS)
def test_estimates_equal_a_run(name: str, size: int, layout: str) -> None:
    """Rank by rank, forward and backward: pairs per kernel call and bytes by way. All pairs within 5 % of those that
    exist: short neighbours are computed together."""
    known = problem(size, layout)
    case = Case.of(dataclasses.replace(known, documents=()))
    case.facts = dataclasses.replace(case.facts, segments=segments())
    run, heads = attend_and_differentiate(name, name, case), ALGORITHMS[name].head_ranks(known)
    for backward, comms in ((False, run.forward), (True, run.backward)):
        total = 0
        for comm in comms:
            planned = trace(ALGORITHMS[name], known, backward, comm.rank * heads)
            found = [e.pairs for e in comm.events if isinstance(e, KernelCall)]
            assert [e.pairs for e in planned.events if isinstance(e, ComputeEvent)] == found
            total += sum(e.pairs * e.heads for e in comm.events if isinstance(e, KernelCall)) * heads
            sent = {way: comm.bytes(way) for way in ("up", "down", "home")}
            assert sent == {way: planned.sent.get(way, 0) for way in sent}
        assert total / known.heads == pytest.approx(known.pairs, rel=0.05)


def compiled(mesh: Mesh, packed: bool = True, tokens: int = 64, **options: Any) -> Compiled:
    model, batch = TINY["llama"].build(), TINY["llama"].batch(4, tokens)
    if packed:
        batch["position_ids"] = torch.arange(tokens).remainder(16).expand(4, -1).clone()
    return compile_model(model, batch, mesh, Options(**options), outputs=())


def attention_flops(step: Compiled) -> list[int]:
    nodes: list[Node] = [n for gm, _ in graph_runs(step).values() for n in gm.graph.nodes]
    return [flops(n) for n in nodes if "attention" in str(n.target)]


@pytest.mark.parametrize("mesh", [Mesh.of(dp=2), Mesh.of(cp=2), Mesh.of(tp=2, dp=2)], ids=str)
def test_a_plan_counts_them(mesh: Mesh) -> None:
    """In every step graph: a quarter of 64 tokens is 136 of 2,080 pairs, four times."""
    whole, packed = attention_flops(compiled(mesh)), attention_flops(compiled(mesh, documents=4))
    assert len(whole) == len(packed) >= 4
    assert all(few * 2080 == many * 4 * 136 for few, many in zip(packed, whole, strict=True))


def test_attention_takes_the_time_of_the_busiest_rank() -> None:
    """Of 192, 32 and 32 tokens the second rank has the longest rows, 10,272 pairs, and the last two together, 2,080."""
    how = {"attention": "ring", "cp_load_balance": "contiguous", "documents": (192, 32, 32)}
    graphs = [gm for gm, _ in graph_runs(compiled(Mesh.of(cp=2), tokens=256, **how)).values()]
    found = [n for gm in graphs for n in gm.graph.nodes if is_context_attention(n)]
    assert len(found) >= 4
    for node in found:
        backward = "backward" in str(node.target)
        assert busiest_share(node) == pytest.approx((10_272 + 2_080) / ((18_528 + 2 * 528) / 2))
        speed = DEFAULT.peak(torch.float32) * DEFAULT.attention_share(backward)
        assert node_seconds(node) == pytest.approx(flops(node) * busiest_share(node) / speed)
    priced = sorted(one[0] for gm in graphs for one in graph_work(gm, Mesh.of(cp=2)).attention)
    assert priced == pytest.approx(sorted(flops(n) * busiest_share(n) for n in found)), "of plan --auto"


def test_rings_send_nothing_between_documents() -> None:
    """Bytes of a step over cp: those of the gradients alone, where documents end with a rank's tokens."""
    how = {"attention": "ring", "cp_load_balance": "contiguous"}
    plain, packed, crossing = (step_communication(compiled(Mesh.of(cp=2), documents=d, **how)) for d in (0, 4, 3))
    sent = [
        sum(c.bytes for (_, kind), c in found.items() if kind.startswith("send")) for found in (plain, packed, crossing)
    ]
    assert sent[1] == 0 < sent[2] < sent[0]


def test_notes() -> None:
    found = [text for what, text in compiled(Mesh.of(cp=2), documents=(16, 32)).plan.notes if what == "attention"]
    assert found == ["3 documents in rows of 64 tokens: 800 pairs are counted, 0.385 of those of one document, 2 times"]
    found = [text for what, text in compiled(Mesh.of(cp=2), False, documents=8).plan.notes if what == "attention"]
    assert found == ["documents=8: no attention is over packed documents; pass position_ids"]


def test_only_estimates_change() -> None:
    """The graphs are those without the option but for this argument, and so is what they compute."""
    plain, packed = compiled(Mesh.of(dp=2)), compiled(Mesh.of(dp=2), documents=4)
    text = str(packed.local.graph)
    assert "[16, 16, 16, 16]" in text
    assert text.replace("[16, 16, 16, 16]", "[]") == str(plain.local.graph)
