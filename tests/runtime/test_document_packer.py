"""Packed rows: every token once, the same on every mesh, resumable, and as many pairs on each rank and microbatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from autopar.attention.layouts import LAYOUTS
from autopar.attention.problem import spans_of
from autopar.lift_to_float64 import LiftFloat32
from autopar.runtime.training.document_packer import IGNORED, DocumentPacker, _pairs, _pairs_of_rank
from autopar.verification import Report
from tests.support.ranks import run_ranks
from tests.support.subjects import tiny

TOKENS = 64


def documents(count: int = 90, longest: int = 100) -> list[Tensor]:
    """Token ids that say their document and place."""
    lengths = torch.randint(1, longest, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    return [torch.arange(n) + 1000 * (i + 1) for i, n in enumerate(lengths)]


def packed(part: tuple[int, int] = (0, 1), **changes: Any) -> DocumentPacker:
    how: dict[str, Any] = dict(
        documents=documents(), tokens=TOKENS, rows=8, microbatches=1, cp=1, layout="zigzag", shuffle=True, seed=3,
        pad=0, lengths=None,
    )  # fmt: skip
    return DocumentPacker(part=part, **(how | changes))


def test_every_token_comes_once_and_documents_begin_at_0() -> None:
    data, known = packed(), documents()
    seen: list[int] = []
    for batch in data:
        ids, positions, labels = (batch[n] for n in ("input_ids", "position_ids", "labels"))
        assert ids.shape == positions.shape == labels.shape == (8, TOKENS)
        seen += ids[ids != 0].tolist()
        starts = positions == 0
        assert bool((labels[starts] == IGNORED).all())
        assert torch.equal(labels[~starts & (ids != 0)], ids[~starts & (ids != 0)])
        assert bool((labels[ids == 0] == IGNORED).all())
        follow = ids[:, 1:] == ids[:, :-1] + 1
        assert torch.equal(positions[:, 1:][follow], positions[:, :-1][follow] + 1)
    assert len(seen) == len(set(seen)) and set(seen) <= {int(x) for d in known for x in d}
    left_out = sum(map(len, known)) - len(seen)
    assert 0 <= left_out < 2 * 8 * TOKENS and data.epoch == 1 and data.batch == 0


def test_little_padding() -> None:
    batches = list(packed(documents=documents(400)))
    padding = sum(int((b["input_ids"] == 0).sum()) for b in batches) / (len(batches) * 8 * TOKENS)
    assert padding < 0.05


def test_offsets_say_where_documents_begin() -> None:
    """As positions do; rows have a fixed number of them, so that few fit."""
    batches = list(packed(offsets=4))
    assert len(batches) > 3
    for batch in batches:
        ends, positions = batch["cu_seqlens"], batch["position_ids"]
        assert ends.shape == (8, 5) and ends.dtype == torch.int32 and bool((ends[:, -1] == TOKENS).all())
        for row, starts in zip(positions, ends.tolist(), strict=True):
            assert sorted({s for s in starts if s < TOKENS}) == (row == 0).nonzero().flatten().tolist()
    most = max(int((b["position_ids"] == 0).sum(1).max()) for b in packed())
    assert most > 4, "without a limit rows have more"


def test_ranks_read_their_part_of_what_one_process_reads() -> None:
    """Two ranks of dp with two microbatches each, and one process with four."""
    whole = [b["input_ids"] for b in packed(microbatches=4)]
    parts = [[b["input_ids"] for b in packed((rank, 2), microbatches=2)] for rank in range(2)]
    assert len(whole) > 3
    for one, *shares in zip(whole, *parts, strict=True):
        assert torch.equal(one, torch.cat(shares))


def test_a_resumed_run_reads_on() -> None:
    data, other = packed(), packed()
    stream = iter(data)
    for _ in range(2):
        next(stream)
    other.load_state_dict(data.state_dict())
    rest, again = list(stream), list(other)
    assert len(rest) == len(again) > 0
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(rest, again, strict=True))
    assert data.state_dict() == other.state_dict() and data.epoch == 1
    first, second = next(iter(packed())), next(iter(data))
    assert not torch.equal(first["input_ids"], second["input_ids"]), "each epoch has its own order"
    with pytest.raises(ValueError, match="found rows=8 where this one has 4"):
        packed(rows=4).load_state_dict(data.state_dict())


def test_microbatches_of_all_ranks_have_as_many_pairs() -> None:
    """Against rows in the order in which they were packed."""
    data = packed(documents=documents(600), rows=32, microbatches=4)
    data._groups = 8
    worst, before = 0.0, 0.0
    for rows in data._planned():
        for order, place in ((rows, 0), (sorted(rows, key=lambda row: min(row)), 1)):
            pairs = [sum(map(_pairs, order[n * 4 : n * 4 + 4])) for n in range(8)]
            uneven = max(pairs) * 8 / sum(pairs)
            worst, before = (max(worst, uneven), before) if place == 0 else (worst, max(before, uneven))
    assert worst < 1.05 < before


def test_documents_are_ordered_for_the_ranks_of_cp() -> None:
    """The busiest of four ranks has less to do than with the longest document first."""
    held = [spans_of(TOKENS, LAYOUTS["zigzag"], 4, rank) for rank in range(4)]

    def busiest(data: DocumentPacker) -> float:
        shares = [[_pairs_of_rank(row, spans) for spans in held] for rows in data._planned() for row in rows]
        return sum(max(share) * 4 / sum(share) for share in shares) / len(shares)

    assert sum(_pairs_of_rank(((0, 0, 5), (1, 0, 20)), spans) for spans in held) == 15 + 210
    assert busiest(packed(cp=4)) < 0.9 * busiest(packed())


def test_lengths_are_not_read_where_they_are_known() -> None:
    class Unread(list[Tensor]):
        def __getitem__(self, index: Any) -> Any:
            raise AssertionError("a document was read")

    known = documents()
    data = packed(documents=Unread(known), lengths=[len(d) for d in known])
    assert len(data) == len(packed())


def refusals() -> list[str]:
    mesh = autopar.init_mesh("cpu", 30.0, dp=2)
    found = []
    for how in ({"rows": 6, "microbatches": 2}, {"rows": 4, "layout": "striped"}, {"rows": 4, "offsets": 1}):
        with pytest.raises(ValueError) as error:
            autopar.packer(documents(), mesh, tokens=TOKENS, **how)
        found.append(str(error.value))
    return found


def test_refusals() -> None:
    rows, layout, offsets = run_ranks(2, refusals, timeout=60.0)[0]
    assert "offsets needs at least 2" in offsets
    assert "needs a multiple of 4" in rows and "found 6; choose 8" in rows
    assert "needs one of contiguous, zigzag, found 'striped'" in layout


# --- a model ---------------------------------------------------------------------------------------------------


def ids() -> list[Tensor]:
    return [document % 16 for document in documents(60, 50)]


def trained(axes: dict[str, int]) -> tuple[list[dict[str, Tensor]], Report, float]:
    """This rank's rows of the first batch, the comparison with one process, and the loss of a step."""
    mesh = autopar.init_mesh("cpu", 60.0, **axes)
    how: dict[str, Any] = {"tokens": TOKENS, "rows": 4, "shuffle": False}
    model, _ = tiny("llama", layers=2, max_position_embeddings=TOKENS)
    mine = next(iter(autopar.packer(ids(), mesh, microbatches=2, **how)))
    whole = next(iter(packed(documents=ids(), rows=4, shuffle=False, seed=0, microbatches=2 * axes.get("dp", 1))))
    report = autopar.verify(model, mesh, whole, microbatches=2)
    with LiftFloat32():
        made = autopar.parallelize(model, mesh, microbatches=2)
        return [mine, whole], report, float(made.train_step(**mine))


@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 2, "pp": 2}], ids=str)
def test_a_step_of_packed_rows(axes: dict[str, int]) -> None:
    """Rows of the ranks are those of one process, and so are loss and gradients."""
    found = run_ranks(2 * axes.get("pp", 1), trained, axes, timeout=120.0)
    shares = {tuple(batches[0]["input_ids"].flatten().tolist()): batches[0]["input_ids"] for batches, _, _ in found}
    whole = found[0][0][1]["input_ids"]
    assert len(shares) == 2 and torch.equal(torch.cat([*shares.values()]), whole)
    for _, report, loss in found:
        report.raise_for_mismatch()
        assert report.exact and abs(loss - report.reference_loss) < 1e-6
