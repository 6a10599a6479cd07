"""Rows of several documents on real ranks: exact, and what is sent is what documents of other ranks need."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import autopar
from autopar.attention.layouts import LAYOUTS
from autopar.attention.problem import spans_of
from autopar.ir.mesh import Mesh
from autopar.lift_to_float64 import LiftFloat32
from autopar.options import Options
from autopar.testing.harness import check_model
from autopar.verification import Report
from tests.support.ranks import run_ranks
from tests.support.subjects import tiny

TOKENS = 512
ROWS = [(200, 57, 1, 130, 124), (70, 442)]  # lengths of the documents of each row, longer than what is joined
SAME_RANK = [(64,) * 8] * 2  # within the chunks of any layout over 4 ranks


def packed(rows: list[tuple[int, ...]]) -> tuple[Any, dict[str, Tensor]]:
    """A Llama in float64 and rows of documents, whose first tokens have no label."""
    model, _ = tiny("llama", layers=1, max_position_embeddings=TOKENS)
    ids = torch.randint(0, model.config.vocab_size, (len(rows), TOKENS), generator=torch.Generator().manual_seed(1))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    return model, {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}


@cache
def alone() -> float:
    """The loss of the documents one by one, on one process."""
    model, batch = packed(ROWS)
    total = count = 0.0
    with torch.no_grad(), LiftFloat32():
        for row, lengths in zip(batch["input_ids"], ROWS, strict=True):
            for ids in row.split(lengths):
                if len(ids) > 1:
                    total += float(model(input_ids=ids[None], labels=ids[None]).loss) * (len(ids) - 1)
                    count += len(ids) - 1
    return total / count


def verified(attention: str, layout: str, axes: dict[str, int]) -> Report:
    model, batch = packed(ROWS)
    mesh = autopar.init_mesh("cpu", 60.0, **axes)
    return autopar.verify(model, mesh, batch, attention=attention, cp_load_balance=layout)


FEW = [
    ("ring", "contiguous", {"cp": 2}),
    ("bi_ring+token_ring", "zigzag", {"cp": 2}),
    ("ulysses", "contiguous", {"cp": 2}),
    ("zigzag_ring", "zigzag", {"cp": 4}),
    ("ring", "contiguous", {"dp": 2, "cp": 2}),
]
MORE = [
    ("zigzag_ring", "zigzag", {"cp": 2}),
    ("all_gather", "zigzag", {"cp": 2}),
    ("ring", "zigzag", {"cp": 4}),
    ("token_ring", "contiguous", {"cp": 4}),
    ("hybrid", "zigzag", {"cp": 4}),
]


@pytest.mark.parametrize("cell", [*FEW, *(pytest.param(cell, marks=pytest.mark.full) for cell in MORE)], ids=str)
def test_loss_and_gradients_are_those_of_documents_alone(cell: tuple[str, str, dict[str, int]]) -> None:
    _, _, axes = cell
    reports = run_ranks(torch.tensor([*axes.values()]).prod().item(), verified, *cell, timeout=120.0)
    reports[0].raise_for_mismatch()
    assert abs(reports[0].loss - alone()) < 1e-10


# --- what is sent ------------------------------------------------------------------------------------------


def sent(attention: str, layout: str, rows: list[tuple[int, ...]]) -> int:
    """Bytes that the exchanges of attention sent in a step."""
    model, batch = packed(rows)
    made = autopar.parallelize(model, autopar.init_mesh("cpu", 60.0, cp=4), attention=attention, cp_load_balance=layout)
    made.train_step(**batch)
    return sum(one.bytes for (_, kind), one in made.traffic().items() if kind.startswith("send"))


def needed(layout: str, rows: list[tuple[int, ...]]) -> int:
    """Keys that a rank needs of others, summed over the ranks: of a position, if a document of any row needs it."""
    mine = [
        torch.cat([torch.arange(s.start, s.stop) for s in spans_of(TOKENS, LAYOUTS[layout], 4, rank)])
        for rank in range(4)
    ]
    number = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows])
    pairs = (number.unsqueeze(-1) == number.unsqueeze(-2)).tril().any(0)
    return sum(int(pairs[mine[a]][:, mine[b]].any(0).sum()) for a, b in itertools.permutations(range(4), 2))


@pytest.mark.parametrize(("attention", "layout"), [("ring", "contiguous"), ("zigzag_ring", "zigzag")])
def test_what_documents_of_other_ranks_need_is_sent(attention: str, layout: str) -> None:
    """Keys and values in both passes, and the gradients of both."""
    config = packed(ROWS)[0].config
    token = 2 * config.num_key_value_heads * (config.hidden_size // config.num_attention_heads) * 8
    found = sum(run_ranks(4, sent, attention, layout, ROWS, timeout=120.0))
    assert found == 3 * needed(layout, ROWS) * len(ROWS) * token


@pytest.mark.parametrize(("attention", "layout"), [("ring", "contiguous"), ("token_ring", "zigzag")])
def test_documents_of_one_rank_send_nothing(attention: str, layout: str) -> None:
    assert run_ranks(4, sent, attention, layout, SAME_RANK, timeout=120.0) == [0] * 4


def test_offsets_of_transformers_collator() -> None:
    """Beside positions they change nothing; alone they would be ignored, and are refused."""
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    documents = [{"input_ids": list(range(1, n + 1))} for n in (7, 9)]
    model, _ = tiny("llama", layers=1)
    batch = dict(collator(documents))
    assert check_model(model.double(), batch, Mesh.of(cp=2), Options()).worst < 1e-10
    del batch["position_ids"]
    with pytest.raises(ValueError, match="found cu_seq_lens_q without them; use DataCollatorWithFlattening"):
        check_model(model, batch, Mesh.of(cp=2), Options())
