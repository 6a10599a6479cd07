"""Which dim of which input is the batch: decided, shown, given; and what the ranks must be fed alike."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import autopar
from autopar.compile.model import plan_model
from autopar.compile.parameters import for_whole_batch
from autopar.ir.batch import part_of_batch, whole_batch
from autopar.ir.mesh import Mesh
from autopar.models.hf_batches import batch_dims
from autopar.models.tiny import TINY
from autopar.options import Options
from autopar.plan import Plan
from autopar.testing.harness import check_model
from tests.support.plain_models import EXACT, gap, gradients
from tests.support.ranks import refusal, run_ranks

S, B, D = 6, 8, 8


class SequenceFirst(nn.Module):
    """[S, B, D] as nn.Transformer takes it by default, with positions of its own; labels [S, B]; a table for all."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(D, 2, 16, dropout=0.0)
        self.positions, self.head = nn.Parameter(torch.randn(S, 1, D)), nn.Linear(D, 5)

    def forward(self, x: Tensor, labels: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        h = self.encoder(x + self.positions)
        logits = self.head(h + F.embedding(labels, table))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(D, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(torch.tanh(self.head(x)).mean(0), y)


class Small(nn.Module):
    """Sequence first, a target per sample, and a table for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x: Tensor, y: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        out = self.head(torch.tanh(self.body(x))).mean(0) + table.mean(0)
        return F.mse_loss(out, y), out


class Scores(nn.Module):
    """Scores of rows against the rows of a table, which has no batch dim."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(D, D)

    def forward(self, table: Tensor, x: Tensor) -> Tensor:
        return (self.body(x) @ table.t()).logsumexp(1).mean()


class Pair(nn.Module):
    """Nothing tells the rows of x from those of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return (self.a(x) @ self.b(other).t()).square().mean()


def sequences() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(S, B, D, generator=g, dtype=torch.float64),
        "labels": torch.randint(0, 5, (S, B), generator=g),
        "table": torch.randn(16, D, generator=g, dtype=torch.float64),
    }


def planned(model: nn.Module, part: dict[str, Any], **options: Any) -> Plan:
    """The plan of a dp rank's batch."""
    mesh, chosen = Mesh.of(dp=2), Options(**options)
    return for_whole_batch(
        lambda whole: plan_model(model, whole, mesh, chosen)[0], lambda plan: plan, model, part, mesh, chosen
    )


class Loop(nn.Module):
    """Each example by itself, in a Python loop."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(D, D)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        made = [self.body(row) for row in x]
        return torch.stack([F.mse_loss(r, t) for r, t in zip(made, y, strict=True)]).mean()


def test_a_loop_over_examples_needs_batch_dims() -> None:
    """No operator sees a dim of examples."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 7, D).double(), "y": torch.randn(4, 7, D).double()}
    with pytest.raises(ValueError, match=r"batch of 7 \(dim 1 of input x\) .*say which is: batch_dims=\{'x': 0, ...\}"):
        check_model(Loop().double(), batch, Mesh.of(dp=2))
    for mesh in ("dp=2", "tp=2"):
        said = Options(batch_dims={"x": 0, "y": 0})
        assert check_model(Loop().double(), batch, Mesh.parse(mesh), said).worst < 1e-10


ROWS = {"x": torch.zeros(4, D), "table": torch.zeros(16, D)}
DECIDED = {
    "table of more rows": (Scores, {"table": ROWS["table"], "x": ROWS["x"]}, {"table": None, "x": 0}),
    "pooled over the sequence": (Pooled, {"x": torch.zeros(S, 4, D), "y": torch.zeros(4, 3)}, {"x": 1, "y": 0}),
    "pooled, as many steps as samples": (Pooled, {"x": torch.zeros(4, 4, D), "y": torch.zeros(4, 3)}, {"x": 1, "y": 0}),
}


@pytest.mark.parametrize("what", DECIDED)
def test_the_graph_tells_the_batch_from_other_dims(what: str) -> None:
    kind, part, expected = DECIDED[what]
    plan = planned(kind(), part)
    assert dict(plan.batch_dims) == expected
    assert Plan.from_json(plan.to_json()) == plan
    shown = {name: "no part of the batch" if dim is None else f"batch: dim {dim}" for name, dim in expected.items()}
    lines = str(plan).splitlines()
    assert all(any(line.startswith(f"  input {n} ") and line.endswith(t) for line in lines) for n, t in shown.items())


def test_what_is_given_counts_and_what_is_not_clear_is_asked_for() -> None:
    part = {"x": torch.zeros(4, D), "other": torch.zeros(6, D)}
    with pytest.raises(
        ValueError, match=r"^batch_dims: cannot tell which dim of which input is the batch: it may be dim 0 of x"
    ):
        planned(Pair(), part)
    given = {"x": None, "other": 0}
    plan = planned(Pair(), part, batch_dims=given)
    assert dict(plan.batch_dims) == given and str(plan.inputs["other"]["dp"]) == "S(0)" and not plan.inputs["x"]
    assert dict(planned(Pair(), part, batch_dims={"x": -2}).batch_dims) == {"x": 0, "other": None}
    for wrong, why in (
        ({"z": 0}, r"batch_dims: no input 'z'; the tensors of the batch are x, other"),
        ({"x.0": 0}, r"batch_dims: no input 'x.0'"),
        ({"x": 2}, r"batch_dims: the batch is dim 2 of input x, found a tensor of shape \[4, 8\]; pass a row for"),
        ({"x": -3}, r"the batch is dim -3 of input x"),
        ({"x": "0"}, r"batch_dims: expected the number of a dim or None for 'x', found '0'"),
    ):
        with pytest.raises(ValueError, match=why):
            planned(Pair(), part, batch_dims=wrong)
    nested = {"past": (torch.zeros(3, 4), {"k": torch.zeros(4, 2)}), "flag": True}
    dims = {"past.0": 1, "past.1.k": 0}
    whole = whole_batch(nested, dims, 2)
    assert whole["past"][0].shape == (3, 8) and whole["past"][1]["k"].shape == (8, 2) and whole["flag"] is True
    again = part_of_batch(whole, dims, 2, 1)
    assert again["past"][0].shape == (3, 4) and again["past"][1]["k"].shape == (4, 2)
    with pytest.raises(ValueError, match=r"the batch of 3 \(dim 0 of input past.0\) does not divide"):
        part_of_batch(nested, {"past.0": 0}, 2, 0)


def test_transformers_inputs_are_known() -> None:
    model, rows = TINY["llama"].build(), torch.zeros(2, 8, dtype=torch.int64)
    batch = {"input_ids": rows, "attention_mask": rows, "position_ids": rows[:1], "cache_position": rows[0]}
    assert batch_dims(model, batch) == {
        "input_ids": 0,
        "attention_mask": 0,
        "position_ids": None,
        "cache_position": None,
    }
    rotary = rows.expand(3, 2, 8)
    assert batch_dims(model, {"input_ids": rows, "position_ids": rotary})["position_ids"] == 1


@pytest.mark.parametrize(
    "mesh, count", [pytest.param("dp=2", 1, marks=pytest.mark.full), ("dp=2", 2), ("dp=2,tp=2", 2)]
)
def test_sequence_first_models_are_exact(mesh: str, count: int) -> None:
    torch.manual_seed(0)
    result = check_model(SequenceFirst().double(), sequences(), Mesh.parse(mesh), Options(microbatches=count))
    assert result.worst < EXACT
    assert dict(result.compiled.plan.batch_dims) == {"x": 1, "labels": 1, "table": None}


# --- on ranks -----------------------------------------------------------------------------------------------


def table_of_as_many_rows() -> list[str]:
    """Whether the rows of the table are those of the batch is for the user to say, unless what ranks are given does."""
    torch.manual_seed(0)
    model, rank = Scores().double(), dist.get_rank()
    g = torch.Generator().manual_seed(1)
    x, table = torch.randn(8, D, generator=g).double(), torch.randn(8, D, generator=g).double()
    mine, mesh = {"x": x.chunk(2)[rank], "table": table[:4]}, autopar.init_mesh("cpu", 30.0, dp=2)

    def step(batch: dict[str, Tensor], **how: Any) -> float:
        return float(autopar.parallelize(model, mesh, example_batch=mine, **how).train_step(**batch))

    refused = refusal(step, mine)
    assert abs(step(mine, batch_dims={"table": None}) - float(model(x=x, table=table[:4]))) < EXACT
    parts = {**mine, "table": table.chunk(2)[rank]}
    assert abs(step(parts) - float(model(x=x, table=table))) < EXACT
    with warnings.catch_warnings(record=True) as caught:
        step(parts, check_replica_inputs=False)
    return [refused, *(str(w.message) for w in caught if "has as many rows" in str(w.message))]


def test_a_table_of_as_many_rows_as_the_batch_is_asked_about() -> None:
    for refused, warned in run_ranks(2, table_of_as_many_rows, timeout=200):
        assert refused.startswith("batch: input table has as many rows as the batch, and nothing in the graph tells")
        assert "found the same on all ranks; set batch_dims={'table': None} if" in refused
        assert "found check_replica_inputs=False; set" in warned


def sequence_first(tp: int) -> list[str]:
    """Exact on ranks, in microbatches; then each rank is fed something of its own."""
    torch.manual_seed(0)
    model, rank, dims = Small().double(), dist.get_rank(), {"x": 1, "y": 0, "table": None}
    whole = {"x": sequences()["x"], "y": torch.randn(B, 3).double(), "table": sequences()["table"][:, :3]}
    loss, logits = model(**whole)
    loss.backward()
    mesh, mine = autopar.init_mesh("cpu", 30.0, dp=2, tp=tp), part_of_batch(whole, dims, 2, rank // tp)
    put = lambda **how: autopar.parallelize(copy.deepcopy(model), mesh, example_batch=mine, microbatches=2, **how)  # noqa: E731
    parallel, loose = put(), put(check_replica_inputs=False, batch_dims=dims)
    assert abs(float(parallel.train_step(**mine)) - float(loss)) < EXACT
    assert dict(parallel.plan.batch_dims) == dims
    assert gap(parallel.full_gradients(), gradients(model)) < EXACT
    found = parallel.eval_step(**mine)[1]
    assert isinstance(found, DTensor) and torch.allclose(found.full_tensor(), logits, atol=EXACT)

    table = {**mine, "table": mine["table"] + 1e-14 * (rank == 1)}
    x = mine["x"].clone()
    x[0, 0, 0] = float("nan")
    nans = {**mine, "x": x}
    odd = {**mine, "x": torch.where(x.isnan(), 1.0, x) if rank == 2 * tp - 1 else x}
    ragged = {**mine, "x": mine["x"][:, : 4 - rank // tp], "y": mine["y"][: 4 - rank // tp]}
    empty = {**mine, "x": mine["x"][:, :0], "y": mine["y"][:0]}
    out = [refusal(parallel.train_step, **batch) for batch in (table, nans, odd)]
    parallel.eval_step(**mine)  # what follows is not expected
    out += [refusal(parallel.train_step, **batch) for batch in (ragged, empty)]
    return [*out, refusal(loose.train_step, **table)]


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.full), 2])
def test_sequence_first_on_ranks_and_batches_that_differ(tp: int) -> None:
    every = run_ranks(2 * tp, sequence_first, tp, timeout=200)
    assert all(found == every[0] for found in every)
    table, nans, odd, ragged, empty, unchecked = every[0]
    assert table.startswith("batch: inputs without a batch dim must be the same on all ranks, found table: rank ")
    assert "rank 1: " in table and "batch_dims" in table and "check_replica_inputs=False" in table
    assert nans == unchecked == "no error"
    if tp == 2:
        assert odd.startswith("batch: the ranks of 'tp' must be given the same batch, found x: rank 3: ")
        assert "against rank 2: " in odd and "dp coordinate" in odd
    assert "shapes of the batch must be the same on all ranks, found x: rank " in ragged
    assert f"(6, 3, 8) torch.float64; against rank 0{', 1' if tp == 2 else ''}: (6, 4, 8)" in ragged
    assert "data_parallel: the batch of 0 " in empty
