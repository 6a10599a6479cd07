"""Whole models with a sharded sequence, on real ranks: loss and every gradient equal one process.

Every algorithm meets every model and every mesh, in some cells of models x meshes, and "auto", which is one of them,
three of each; the others, and two of the models, run with ``-m full`` only. There a cell is compiled in one way; the
ways rotate:

              cp=2        cp=4                 cp=2,tp=2    dp=2,cp=2    pp=2,cp=2
    llama     zigzag      contiguous, hybrid   ulysses      auto         zigzag         zigzag, contiguous: run with
    qwen3     contiguous  ulysses, hybrid      auto         zigzag       zigzag         some of `SAME_GRAPH`
    ...

Options rotate along: ZeRO, sequence parallelism, microbatches. The whole product is in
tests/hf/test_context_product.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from autopar.attention.algorithm_table import ALGORITHMS
from autopar.attention.layouts import ZIGZAG
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Shard, piece, scaled_blocks
from autopar.lift_to_float64 import LiftFloat32
from autopar.options import Options
from autopar.testing.reference import LIMIT
from autopar.verification import Report
from tests.support.cases import Cell, check_ran, compile_cell, ran, renamed, step_graphs
from tests.support.ranks import run_ranks
from tests.support.subjects import TOKENS, subject, tiny

# Algorithms without exchanges of heads, and a mix: they run on any compiled graph.
SAME_GRAPH = ("all_gather", "ring", "bi_ring", "zigzag_ring", "token_ring", "bi_ring+token_ring")
RARE = ("gemma3", "one-layer whisper")  # run with -m full only
MODELS = ("one-layer llama", "one-layer qwen3", RARE[0], "one-layer gpt2", "one-layer bert", "one-layer t5", RARE[1])
MESHES = ("cp=2", "cp=4", "cp=2,tp=2", "dp=2,cp=2", "pp=2,cp=2")
WAYS = ("zigzag", "contiguous", "ulysses", "auto", "zigzag")
LAYOUTS = ("zigzag", "contiguous")
BIASED = ("one-layer t5",)  # a bias for each pair of query and key, which does not travel
CIRCULATING_QUERIES = ("token_ring", "bi_ring+token_ring")


def cell_of(model: str, mesh: str, way: str = "") -> Cell:
    """Compiled in its own way if no other is asked for."""
    i, j = MODELS.index(model), MESHES.index(mesh)
    options = way_of(way or WAYS[(i + j) % len(WAYS)])
    if mesh == "dp=2,cp=2":
        options["zero"] = 3 * (i % 2)
    if mesh == "cp=2,tp=2":
        options["sequence_parallel"] = i % 2 == 0
    if mesh == "pp=2,cp=2":
        options["schedule"] = "1f1b"
    if mesh == "pp=2,cp=2" or (mesh in ("cp=2", "dp=2,cp=2") and i // 2 % 2):
        options["microbatches"] = 2
    return Cell(model, Mesh.parse(mesh), Options(**options))


def way_of(name: str) -> dict[str, Any]:
    return {"cp_load_balance": name, "attention": "ring"} if name in LAYOUTS else {"attention": name}


def possible(cell: Cell) -> list[str]:
    """What the compiled graph of a cell can be run with."""
    if cell.options.attention != "ring":
        return [""]
    return [name for name in SAME_GRAPH if cell.name not in BIASED or name not in CIRCULATING_QUERIES]


def algorithms_of(cells: list[Cell]) -> dict[Cell, list[str]]:
    """What each cell is run with: every algorithm that is possible meets every model, mesh and layout, and every cell
    runs; whatever meets most that have not met comes first."""
    left = {
        (c, name): {(c.name, name), (str(c.mesh), name), (c.options.cp_load_balance, name)}
        for c in cells
        for name in possible(c)
    }
    chosen: dict[Cell, list[str]] = {}
    while left:
        cell, name = max(left, key=lambda pair: (len(left[pair]), pair[0] not in chosen))
        met = left.pop((cell, name))
        if met or cell not in chosen:
            chosen.setdefault(cell, []).append(name)
        for pairs in left.values():
            pairs -= met
    return chosen


def often(few: list[Cell], cells: list[Cell]) -> list[Any]:
    return [pytest.param(c, marks=() if c in few else pytest.mark.full) for c in cells]


CELLS = [cell_of(model, mesh) for model in MODELS for mesh in MESHES]
FEW = [
    cell_of(model, mesh, way)
    for model, ways in {
        "one-layer llama": {"pp=2,cp=2": "zigzag", "cp=2,tp=2": "ulysses", "dp=2,cp=2": "auto"},
        "one-layer qwen3": {"cp=4": "contiguous", "cp=2": "ulysses", "cp=2,tp=2": "auto"},
        "one-layer gpt2": {"dp=2,cp=2": "contiguous", "pp=2,cp=2": "ulysses", "cp=2": "auto"},
        "one-layer bert": {"cp=2,tp=2": "contiguous", "dp=2,cp=2": "ulysses"},
        "one-layer t5": {"cp=2": "zigzag", "cp=4": "ulysses"},
    }.items()
    for mesh, way in ways.items()
]
CHOSEN = algorithms_of(FEW)
HYBRID = [cell_of(model, "cp=4", "hybrid") for model in MODELS]


@pytest.mark.parametrize("cell", often(FEW, [*dict.fromkeys([*FEW, *CELLS])]), ids=str)
def test_equals_one_process(cell: Cell) -> None:
    check_ran(ran(cell, attentions=CHOSEN.get(cell) or possible(cell)))


@pytest.mark.parametrize("cell", often([c for c in HYBRID if c.name in ("one-layer qwen3", *BIASED)], HYBRID), ids=str)
def test_heads_within_groups_and_a_ring_over_them(cell: Cell) -> None:
    check_ran(ran(cell))


@pytest.mark.parametrize("cell", [cell_of("one-layer llama", "pp=2,cp=2")], ids=str)
def test_zero_bubble_schedule(cell: Cell) -> None:
    check_ran(ran(cell, ["zb_h1"], ["ring", "zigzag_ring", "token_ring", "bi_ring+token_ring"]))


# --- the design ------------------------------------------------------------------------------------------


def test_every_algorithm_meets_every_model_and_every_mesh() -> None:
    """As these cells run by default; on two ranks alone, with one of the models whose queries circulate nowhere, these
    do in `OTHERS`."""
    names, models = {*SAME_GRAPH, "ulysses"}, [name for name in MODELS if name not in RARE]
    met = {(c, n or c.options.attention) for c, chosen in CHOSEN.items() for n in chosen}
    refused = set(itertools.product(BIASED, CIRCULATING_QUERIES))
    assert {(c.name, n) for c, n in met if n != "auto"} == set(itertools.product(models, names)) - refused
    beside = {(str(c.mesh), n) for c, chosen in HALVES.items() for n in chosen}
    assert {(str(c.mesh), n) for c, n in met} | beside >= set(itertools.product(MESHES, names))
    assert {(c.options.cp_load_balance, n) for c, n in met} >= set(itertools.product(LAYOUTS, SAME_GRAPH))
    assert len({c.name for c, n in met if n == "auto"}) == len({c.mesh for c, n in met if n == "auto"}) == 3
    rotated = {(str(c.mesh), c.options.attention) for c in CELLS}
    assert rotated >= set(itertools.product(MESHES, ("ulysses", "auto"))), "with -m full"
    assert {*CHOSEN} == {*FEW}
    assert {n for name in names for n in name.split("+")} | {"hybrid"} == {n for n, _ in ALGORITHMS.items()}
    for option, mesh in (("zero", "dp=2,cp=2"), ("sequence_parallel", "cp=2,tp=2"), ("microbatches", "cp=2")):
        assert len({getattr(c.options, option) for c in FEW if str(c.mesh) == mesh}) == 2


REFUSED = [cell_of(*of, "hybrid") for of in zip(MODELS, itertools.cycle(m for m in MESHES if m != "cp=4"))]


@pytest.mark.parametrize("refused", often([c for c in REFUSED if c.name not in RARE], REFUSED), ids=str)
def test_two_ranks_have_no_groups(refused: Cell) -> None:
    with pytest.raises(ValueError, match=r'^context_parallel: .*"hybrid": needs a group size between 1 and 2'):
        compile_cell(refused)


@pytest.mark.parametrize("refused", [cell_of(BIASED[0], "cp=2", name) for name in CIRCULATING_QUERIES], ids=str)
def test_queries_do_not_circulate_with_a_bias(refused: Cell) -> None:
    with pytest.raises(ValueError, match=r'^context_parallel: .*"token_ring": needs a bias that is the same'):
        compile_cell(refused)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_graphs_of_algorithms_differ_in_their_names_only(layout: str) -> None:
    """What lets one compiled model serve several algorithms."""
    of = cell_of("one-layer qwen3", "cp=2", layout)
    ours = compile_cell(of)
    for name in ("token_ring", "bi_ring+all_gather"):
        own = compile_cell(Cell(of.name, of.mesh, Options(attention=name, cp_load_balance=layout)))
        with renamed(ours, name) as calls:
            assert calls == 2
            assert [str(g.graph) for g in step_graphs(ours)] == [str(g.graph) for g in step_graphs(own)]


# --- other models and batches ----------------------------------------------------------------------------


# One of two of each kind runs with half of `SAME_GRAPH`, the other with the other half: documents and padding, one head
# for all queries and sinks, what has no gradient and several losses, dropout.
OTHERS = [
    ("packed llama", "cp=2", "contiguous"),
    ("padded llama", "cp=2", "zigzag"),
    ("multi-query tied llama", "cp=2", "zigzag"),
    ("gpt_oss", "cp=2", "zigzag"),
    ("frozen qwen3_moe", "cp=2", "zigzag"),
    ("two losses", "cp=2", "contiguous"),
    ("gpt2 with dropout", "cp=2", "zigzag"),
    ("padded bert with dropout", "cp=2", "contiguous"),
]
HEADS = [  # one of each kind that has rules of its own there
    ("packed llama", "cp=2", "ulysses"),
    ("multi-query tied llama", "cp=2", "ulysses"),
    ("padded bert with dropout", "cp=2", "ulysses"),
]
LARGER = [
    ("gpt2 with dropout", "cp=2", "ulysses"),
    ("multi-query tied llama", "cp=4", "zigzag"),
    ("multi-query tied llama", "cp=4", "ulysses"),
    ("gpt_oss", "cp=4", "zigzag"),
]


def others(*of: tuple[str, str, str]) -> list[Cell]:
    return [Cell(name, Mesh.parse(mesh), Options(**way_of(way))) for name, mesh, way in of]


HALVES = {cell: possible(cell)[i % 2 :: 2] for i, cell in enumerate(others(*OTHERS))}


@pytest.mark.parametrize("cell", others(*OTHERS, *HEADS), ids=str)
def test_other_models_and_batches(cell: Cell) -> None:
    check_ran(ran(cell, attentions=HALVES.get(cell, [""])))


@pytest.mark.full
@pytest.mark.parametrize("cell", others(*OTHERS, *LARGER), ids=str)
def test_other_models_and_batches_with_all_algorithms(cell: Cell) -> None:
    check_ran(ran(cell, attentions=possible(cell)))


def test_every_algorithm_meets_one_of_each_kind() -> None:
    chosen = list(HALVES.values())
    assert all({*chosen[i], *chosen[i + 1]} == {*SAME_GRAPH} for i in range(0, len(chosen), 2))


def test_what_these_batches_are_for() -> None:
    """Documents, padding and dropout change the loss; one rank has no label at all; a frozen weight no gradient."""
    for name in ("packed llama", "padded llama", "gpt2 with dropout", "padded bert with dropout"):
        known = subject(name)
        plain = {k: x for k, x in known.batch.items() if k in ("input_ids", "labels")}
        with torch.no_grad():
            assert abs(float(known.model.eval()(**plain).loss) - known.expected.loss) > 1e-6, name
        known.model.train()
    assert (subject("packed llama").batch["labels"][:, : TOKENS // 2] == -100).all()
    frozen = subject("frozen qwen3_moe").expected.gradients
    assert [n for n, g in frozen.items() if g is None] == ["model.embed_tokens.weight"]


# --- what users call -------------------------------------------------------------------------------------


def verified(attention: str) -> Report:
    mesh = autopar.init_mesh("cpu", 30.0, cp=2)
    model, batch = tiny("llama", layers=1, dropout=0.1)
    return autopar.verify(model, mesh, batch, attention=attention, cp_load_balance="zigzag")


def test_verify() -> None:
    reports = run_ranks(2, verified, "bi_ring+token_ring", timeout=120.0)
    assert reports[0] == reports[1]
    reports[0].raise_for_mismatch()
    assert reports[0].passed and len(reports[0].parameters) > 10


def logits() -> tuple[Tensor, Tensor, Tensor]:
    """On a rank: the logits that it holds, those of the mesh, and those of one process."""
    model, batch = tiny("llama", layers=1)
    mesh = autopar.init_mesh("cpu", 30.0, cp=2)
    parallel = autopar.parallelize(
        model, mesh, example_batch=batch, lift_to_float64=True, cp_load_balance="zigzag"
    ).eval()
    with torch.no_grad(), LiftFloat32():
        expected = model.eval()(**batch).logits
        found = parallel(**batch).logits
    return found.to_local(), found.full_tensor(), expected


def test_outputs_are_pieces_whose_whole_is_in_the_order_of_the_tokens() -> None:
    cut = Shard(1, scaled_blocks(ZIGZAG, TOKENS))
    for rank, (held, whole, expected) in enumerate(run_ranks(2, logits, timeout=120.0)):
        torch.testing.assert_close(whole, expected, rtol=LIMIT, atol=LIMIT)
        torch.testing.assert_close(held, piece(expected, cut, 2, rank), rtol=LIMIT, atol=LIMIT)
