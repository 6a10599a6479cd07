"""Inputs whose values decide the graph: compared as shapes are, part of the key of what is kept, alike on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.cache.step_key import step_key
from autopar.capture.front_end import capture
from autopar.compile.model import compile_model
from autopar.ir.batch import facts_of, static_inputs_of, whole_batch, with_static_inputs, without_static_inputs
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.testing.harness import check_model
from tests.support.plain_models import EXACT, gap, gradients, part
from tests.support.ranks import RankError, run_ranks

SIZES = {"dp": 2}


class Packed(nn.Module):
    """Rows of several lengths behind one another; each piece is weighed by its own length."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4).double()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        pieces = self.inner(x).tanh().split(lengths.tolist(), 1)
        return sum(piece.pow(2).sum() / piece.shape[1] for piece in pieces)  # type: ignore[return-value]


def batch_of(*lengths: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(4, 6, 4, generator=generator).double(), "lengths": torch.tensor(lengths)}


GIVEN: dict[str, Any] = {"static_inputs": ("lengths",), "batch_dims": {"lengths": None}}
ASKED = Options(**GIVEN)


@pytest.mark.parametrize("mesh", [Mesh.of(dp=2), Mesh.of(dp=2, tp=2)], ids=str)
def test_the_graph_is_that_of_the_values(mesh: Mesh) -> None:
    torch.manual_seed(0)
    for lengths in ((1, 5), (2, 1, 3)):
        assert check_model(Packed(), batch_of(*lengths), mesh, ASKED).worst < EXACT


def test_without_them_the_error_offers_them() -> None:
    with pytest.raises(ValueError, match=r"test_static_inputs.py:\d+ in forward.*static_inputs=\(.name.,\)"):
        compile_model(Packed(), batch_of(2, 4), Mesh.of(dp=2), Options())


def other_values() -> None:
    torch.manual_seed(0)
    alone, mesh = Packed(), autopar.init_mesh("cpu", 30.0, **SIZES)
    first, second = batch_of(2, 4), batch_of(3, 2, 1, seed=1)
    parallel = autopar.parallelize(alone, mesh, example_batch=cut(first), **GIVEN)
    for batch in (first, second, first, batch_of(2, 4, seed=2)):
        alone.zero_grad(), parallel.zero_grad()
        alone(**batch).backward()
        parallel.train_step(**cut(batch))
        assert gap(parallel.full_gradients(), gradients(alone)) < EXACT
    assert len(parallel.compiled()) == 2, "once for each value"


def differing() -> None:
    torch.manual_seed(0)
    mesh, first, second = autopar.init_mesh("cpu", 30.0, **SIZES), batch_of(2, 4), batch_of(3, 2, 1)
    parallel = autopar.parallelize(Packed(), mesh, example_batch=cut(first), **GIVEN)
    parallel.train_step(**cut(first) | {"lengths": first["lengths"] if mesh.get_rank() else second["lengths"]})


def cut(batch: dict[str, Any]) -> dict[str, Any]:
    return {**part({"x": batch["x"]}, SIZES), "lengths": batch["lengths"]}


def test_another_value_is_compiled_as_another_shape_is() -> None:
    run_ranks(2, other_values)


def test_all_ranks_have_the_same() -> None:
    told = r"the same on all ranks, found lengths: rank \d: constant int64 \[\d\] \[[\d, ]+\]; against rank"
    with pytest.raises(RankError, match=told):
        run_ranks(2, differing)


def verified() -> None:
    torch.manual_seed(0)
    mesh = autopar.init_mesh("cpu", 30.0, **SIZES)
    autopar.verify(Packed(), mesh, batch_of(2, 4), **GIVEN).raise_for_mismatch()


def test_verify_takes_them() -> None:
    run_ranks(2, verified)


class Spliced(nn.Module):
    """As LLaVA's own code does: pieces of the text of each row, split at the values of ``ids``, with an image between
    them; no operator has a dim of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.image = nn.Embedding(9, 4).double(), nn.Linear(3, 4).double()

    def forward(self, ids: Tensor, images: Tensor) -> Tensor:
        seen, rows = self.image(images), []
        for row, image in zip(ids, seen, strict=True):
            at = int(torch.where(row == 0)[0][0])
            rows.append(torch.cat([self.words(row[:at]), image, self.words(row[at + 1 :])]))
        return torch.stack(rows).tanh().pow(2).mean()


def spliced(equal: bool) -> float:
    torch.manual_seed(0)
    alone, mesh = Spliced(), autopar.init_mesh("cpu", 30.0, **SIZES)
    ids = torch.tensor([[1, 0, 2, 3], [4, 5, 0, 6]] * 2 if equal else [[1, 0, 2, 3]] * 2 + [[4, 5, 0, 6]] * 2)
    mine = part(batch := {"ids": ids, "images": torch.randn(4, 2, 3).double()}, SIZES)
    parallel = autopar.parallelize(alone, mesh, example_batch=mine, static_inputs=("ids",))
    alone(**batch).backward()
    parallel.train_step(**mine)
    return gap(parallel.full_gradients(), gradients(alone))


def test_rows_that_are_taken_apart_by_their_values() -> None:
    assert max(run_ranks(2, spliced, True)) < EXACT
    with pytest.raises(RankError, match=r"agree: .* and equal values of the static inputs ids, .*\(or no dp and ep\)"):
        run_ranks(2, spliced, False)


def test_the_key_of_what_is_kept_has_their_values() -> None:
    def key(*lengths: int) -> str:
        marked = with_static_inputs(batch_of(*lengths), ("lengths",))
        return step_key("step", capture(Packed(), marked), Mesh.of(dp=2), options=ASKED, train=True)

    assert key(2, 4) == key(2, 4) != key(4, 2)


def test_a_part_of_the_batch_is_repeated_for_the_whole() -> None:
    marked = with_static_inputs({"x": torch.zeros(2, 3), "grid": torch.tensor([[1, 2], [3, 4]])}, ("grid",))
    whole = whole_batch(marked, {"x": 0, "grid": 0}, 2)
    assert whole["x"].shape == (4, 3) and static_inputs_of(whole)["grid"].tolist() == [[1, 2], [3, 4]] * 2
    assert whole_batch(marked, {"x": 0, "grid": None}, 2)["grid"] == marked["grid"]


def test_they_are_told_apart_by_values_shapes_and_dtypes() -> None:
    tensors = [
        torch.tensor([1, 2]), torch.tensor([1, 3]), torch.tensor([[1, 2]]), torch.tensor([1, 2], dtype=torch.int32),
        torch.tensor([]), torch.tensor(True), torch.arange(40), torch.arange(40).roll(1),
        torch.tensor(1.5, dtype=torch.bfloat16),
    ]  # fmt: skip
    facts = [facts_of(with_static_inputs({"x": [x, 3]}, ("x",))) for x in tensors]
    assert len(set(facts)) == len(tensors)
    assert torch.equal(without_static_inputs(with_static_inputs({"x": tensors[0]}, ("x",)))["x"], tensors[0])


def test_bad_names_and_tensors_without_values() -> None:
    with pytest.raises(ValueError, match="static_inputs: no input 'length'; the inputs of the batch are x, lengths"):
        compile_model(Packed(), batch_of(2, 4), Mesh.of(dp=2), Options(static_inputs=("length",)))
    meta = {"x": torch.zeros(4, 6, 4), "lengths": torch.zeros(2, dtype=torch.int64, device="meta")}
    with pytest.raises(ValueError, match="static_inputs: input lengths needs values, found it on the meta device"):
        compile_model(Packed(), meta, Mesh.of(dp=2), ASKED)
