"""Whole models with their sequence cut over ranks, on real ranks: loss and every gradient equal one process.

Every model meets every mesh, every algorithm meets every model and every mesh; two of the models run with ``-m full``
only. A cell of models x meshes is compiled in one way; the ways rotate:

              cp=2        cp=4                 cp=2,tp=2    dp=2,cp=2    pp=2,cp=2
    llama     zigzag      contiguous, hybrid   ulysses      auto         zigzag         zigzag, contiguous: run with
    qwen3     contiguous  ulysses, hybrid      auto         zigzag       zigzag         all `SAME_GRAPH`
    ...

Options rotate along: ZeRO, sequence parallelism, micro-batches. The whole product is in
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
from autopar.exact import LiftFloat32
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Shard, piece, scaled_blocks
from autopar.models.tiny import TINY
from autopar.options import Options
from autopar.verification import Report
from tests.context_cases import (
    LIMIT,
    ROWS,
    SAME_GRAPH,
    TOKENS,
    Case,
    captured,
    check,
    compile_case,
    prepare,
    rename,
    step_graphs,
)
from tests.ranks import run_ranks

MODELS = ("llama", "qwen3", "gemma3", "gpt2", "bert", "t5", "whisper")
RARE = ("gemma3", "whisper")  # run with -m full only
MESHES = {"cp2": "cp=2", "cp4": "cp=4", "cp2-tp2": "cp=2,tp=2", "dp2-cp2": "dp=2,cp=2", "pp2-cp2": "pp=2,cp=2"}
WAYS = ("zigzag", "contiguous", "ulysses", "auto", "zigzag")
LAYOUTS = ("zigzag", "contiguous")
BIASED = ("t5",)  # a bias for each pair of query and key, which does not travel
CIRCULATING_QUERIES = ("token_ring", "bi_ring+token_ring")


def case(model: str, mesh: str, way: str = "") -> Case:
    """A cell, compiled in its own way if no other is asked for."""
    i, j = MODELS.index(model), list(MESHES).index(mesh)
    way = way or WAYS[(i + j) % len(WAYS)]
    options: dict[str, Any] = {"layout": way, "attention": "ring"} if way in LAYOUTS else {"attention": way}
    if mesh == "dp2-cp2":
        options["zero"] = 3 * (i % 2)
    if mesh == "cp2-tp2":
        options["sequence_parallel"] = i % 2 == 0
    if mesh == "pp2-cp2":
        options["schedule"] = "1f1b"
    if mesh == "pp2-cp2" or (mesh in ("cp2", "dp2-cp2") and i // 2 % 2):
        options["micro_batches"] = 2
    return Case(model, Mesh.parse(MESHES[mesh]), Options(**options))


def algorithms(case: Case) -> list[str]:
    """What the compiled graph of a case is run with."""
    if case.options.attention != "ring":
        return [""]
    return [name for name in SAME_GRAPH if case.model not in BIASED or name not in CIRCULATING_QUERIES]


@pytest.fixture(scope="module", params=[pytest.param(m, marks=pytest.mark.full if m in RARE else ()) for m in MODELS])
def model(request: pytest.FixtureRequest) -> str:
    prepare([case(request.param, mesh) for mesh in MESHES] + [case(request.param, "cp4", "hybrid")])
    return str(request.param)


@pytest.mark.parametrize("mesh", MESHES)
def test_equals_one_process(model: str, mesh: str) -> None:
    check(case(model, mesh), algorithms(case(model, mesh)))


def test_heads_within_groups_and_a_ring_over_them(model: str) -> None:
    check(case(model, "cp4", "hybrid"), [""])


def test_zero_bubble_schedule() -> None:
    check(case("llama", "pp2-cp2"), ["ring", "zigzag_ring", "token_ring", "bi_ring+token_ring"], schedule="zb_h1")


# --- the design ------------------------------------------------------------------------------------------


def test_every_algorithm_meets_every_model_and_every_mesh() -> None:
    names = {*SAME_GRAPH, "ulysses", "auto"}
    cells = [(model, mesh, case(model, mesh)) for model, mesh in itertools.product(MODELS, MESHES)]
    ran = {(model, mesh, n or c.options.attention) for model, mesh, c in cells for n in algorithms(c)}
    refused = set(itertools.product(BIASED, CIRCULATING_QUERIES))
    assert {(m, n) for m, _, n in ran} == set(itertools.product(MODELS, names)) - refused
    assert {(mesh, n) for _, mesh, n in ran} == set(itertools.product(MESHES, names))
    assert {n for name in names for n in name.split("+")} | {"hybrid"} == {*(n for n, _ in ALGORITHMS.items()), "auto"}
    for option, mesh in (("zero", "dp2-cp2"), ("sequence_parallel", "cp2-tp2"), ("micro_batches", "cp2")):
        assert len({getattr(c.options, option) for _, m, c in cells if m == mesh}) == 2


@pytest.mark.parametrize(("model", "mesh"), list(zip(MODELS, itertools.cycle(m for m in MESHES if m != "cp4"))))
def test_two_ranks_have_no_groups(model: str, mesh: str) -> None:
    with pytest.raises(ValueError, match=r'^context_parallel: .*"hybrid": needs a size of groups that divides 2 ranks'):
        compile_case(case(model, mesh, "hybrid"))


@pytest.mark.parametrize("name", CIRCULATING_QUERIES)
def test_queries_do_not_circulate_with_a_bias(name: str) -> None:
    with pytest.raises(ValueError, match=r'^context_parallel: .*"token_ring": a bias that differs between queries'):
        compile_case(case("t5", "cp2", name))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_graphs_of_algorithms_differ_in_their_names_only(layout: str) -> None:
    """What lets one compiled model serve several algorithms."""
    mesh = Mesh.of(cp=2)
    ours = compile_case(Case("llama", mesh, Options(attention="ring", layout=layout)))
    for name in ("token_ring", "bi_ring+all_gather"):
        own = compile_case(Case("llama", mesh, Options(attention=name, layout=layout)))
        assert rename(ours, name) == 2 * TINY["llama"].sizes["num_hidden_layers"]
        assert [str(g.graph) for g in step_graphs(ours)] == [str(g.graph) for g in step_graphs(own)]


# --- other models and batches ----------------------------------------------------------------------------


OTHERS = [
    ("packed llama", "cp=2", "contiguous"),
    ("packed llama", "cp=2", "ulysses"),
    ("padded llama", "cp=2", "zigzag"),
    ("multi-query tied llama", "cp=4", "zigzag"),
    ("multi-query tied llama", "cp=4", "ulysses"),
    ("frozen qwen3_moe", "cp=2", "zigzag"),
    ("gpt_oss", "cp=4", "zigzag"),
    ("two losses", "cp=2", "contiguous"),
    ("gpt2 with dropout", "cp=2", "zigzag"),
    ("gpt2 with dropout", "cp=2", "ulysses"),
    ("padded bert with dropout", "cp=2", "contiguous"),
    ("padded bert with dropout", "cp=2", "ulysses"),
]


def other(name: str, mesh: str, way: str) -> Case:
    options = {"layout": way, "attention": "ring"} if way in LAYOUTS else {"attention": way}
    return Case(name, Mesh.parse(mesh), Options(**options))


@pytest.fixture(scope="module")
def others() -> None:
    prepare([other(*cell) for cell in OTHERS])


@pytest.mark.parametrize("cell", OTHERS, ids=" ".join)
def test_other_models_and_batches(others: None, cell: tuple[str, str, str]) -> None:
    check(other(*cell), algorithms(other(*cell)))


def test_what_these_batches_are_for() -> None:
    """Documents, padding and dropout change the loss; one rank has no label at all; a frozen weight no gradient."""
    for name in ("packed llama", "padded llama", "gpt2 with dropout", "padded bert with dropout"):
        known = captured(name)
        plain = {k: x for k, x in known.batch.items() if k in ("input_ids", "labels")}
        with torch.no_grad():
            assert abs(float(known.model.eval()(**plain).loss) - known.loss) > 1e-6, name
        known.model.train()
    assert (captured("packed llama").batch["labels"][:, : TOKENS // 2] == -100).all()
    frozen = captured("frozen qwen3_moe").gradients
    assert [n for n, g in frozen.items() if g is None] == ["model.embed_tokens.weight"]


# --- what users call -------------------------------------------------------------------------------------


def verified(attention: str) -> Report:
    mesh = autopar.init_mesh("cpu", 30.0, cp=2)
    model, batch = TINY["llama"].build(dropout=0.1), TINY["llama"].batch(ROWS, TOKENS)
    return autopar.verify(model, mesh, batch, attention=attention, layout="zigzag")


def test_verify() -> None:
    reports = run_ranks(2, verified, "bi_ring+token_ring", timeout=120.0)
    assert reports[0] == reports[1]
    reports[0].raise_for_mismatch()
    assert reports[0].passed and len(reports[0].parameters) > 20


def logits() -> tuple[Tensor, Tensor, Tensor]:
    """On a rank: the logits that it holds, those of the mesh, and those of one process."""
    model, batch = TINY["llama"].build(), TINY["llama"].batch(ROWS, TOKENS)
    mesh = autopar.init_mesh("cpu", 30.0, cp=2)
    parallel = autopar.parallelize(model, mesh, example_batch=batch, exact=True, layout="zigzag").eval()
    with torch.no_grad(), LiftFloat32():
        expected = model.eval()(**batch).logits
        found = parallel(**batch).logits
    return found.to_local(), found.full_tensor(), expected


def test_outputs_are_pieces_whose_whole_is_in_the_order_of_the_tokens() -> None:
    cut = Shard(1, scaled_blocks(ZIGZAG, TOKENS))
    for rank, (held, whole, expected) in enumerate(run_ranks(2, logits, timeout=120.0)):
        torch.testing.assert_close(whole, expected, rtol=LIMIT, atol=LIMIT)
        torch.testing.assert_close(held, piece(expected, cut, 2, rank), rtol=LIMIT, atol=LIMIT)
