"""Which rows ranks read: the same order on every mesh, and exactly the next batch after a checkpoint."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset

import autopar
from autopar.runtime.training.sampler import ShardSampler
from tests.support.ranks import refusal, run_ranks
from tests.support.subject_models import Mlp

Sizes = dict[str, int]


class Rows:
    """As of Hugging Face: a length, rows by number (not of torch's class)."""

    def __init__(self, count: int = 28) -> None:
        self.numbers = torch.arange(count, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        x = torch.sin(self.numbers[row] * torch.arange(1, 13))
        return {"number": self.numbers[row], "x": x, "target": x[:8] ** 2}


def numbers(sizes: Sizes, batches: int, **how: Any) -> tuple[int, list[list[float]]]:
    """The part of the batch that this rank has, and the rows it reads."""
    mesh = autopar.init_mesh("cpu", **sizes)
    assert (mesh.data_rank, mesh.data_size) == autopar.dp_rank_and_size(mesh)
    loader = autopar.sampler(Rows(), mesh, batch_size=8, **how).loader()
    assert len(loader) == (3 if how.get("drop_last", True) else 4)
    found: list[list[float]] = []
    while len(found) < batches:
        found += [batch["number"].tolist() for batch in loader]
    return mesh.data_rank, found[:batches]


def keyed(sizes: Sizes, how: dict[str, Any]) -> tuple[int, list[list[float]]]:
    return numbers(sizes, 8, **how)


def test_parts_are_the_batches_of_one_process() -> None:
    for how in ({}, {"seed": 3}, {"shuffle": False}, {"shuffle": False, "drop_last": False}):
        _, expected = run_ranks(1, keyed, {"dp": 1}, how)[0]
        if not how.get("shuffle", True):
            assert expected[0] == list(range(8))
        else:
            rows = list(chain(*expected[:3]))
            assert len(set(rows)) == 24 and sorted(rows) != rows and expected[:3] != expected[3:6]
        for sizes in ({"dp": 2, "tp": 2}, {"tp": 2, "dp": 2}, {"pp": 2, "ep": 2}, {"dp_replicate": 2, "dp": 2}):
            parts: dict[int, list[list[float]]] = {}
            for part, rows in run_ranks(4, keyed, sizes, how):
                assert parts.setdefault(part, rows) == rows  # ranks of a part read the same
            assert [list(chain(*pieces)) for pieces in zip(*(parts[i] for i in sorted(parts)), strict=True)] == expected


def trained(sizes: Sizes, folder: str, first: int, last: int) -> list[float]:
    """Steps of a run; it saves itself in the midst of an epoch."""
    mesh = autopar.init_mesh("cpu", **sizes)
    data = autopar.sampler(Rows(), mesh, batch_size=8, seed=1)
    torch.manual_seed(0)
    example = {name: x[None].expand(8 // mesh.data_size, -1) for name, x in Rows()[0].items() if x.dim()}
    model = autopar.parallelize(Mlp().double(), mesh, example_batch=example)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if first:
        autopar.load(folder, model, optimizer, extra={"data": data})
    losses: list[float] = []
    while len(losses) < last - first:
        for batch in data.loader():
            losses.append(float(model.train_step(x=batch["x"], target=batch["target"])))
            optimizer.step()
            optimizer.zero_grad()
            if len(losses) == last - first:
                break
    autopar.save(folder, model, optimizer, extra={"data": data})
    return losses


def test_a_run_goes_on_with_the_next_batch_on_another_mesh(tmp_path: Path) -> None:
    expected = run_ranks(1, trained, {"dp": 1}, str(tmp_path / "one"), 0, 7)[0]
    folder = str(tmp_path / "run")
    found = run_ranks(2, trained, {"dp": 2}, folder, 0, 2)[0]
    found += run_ranks(4, trained, {"dp": 2, "tp": 2}, folder, 2, 5)[0]
    found += run_ranks(1, trained, {"dp": 1}, folder, 5, 7)[0]
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-10


def test_workers_that_have_read_ahead_count_for_nothing() -> None:
    data = ShardSampler(Rows(), (0, 1), 8, shuffle=True, seed=1, drop_last=True)
    epochs = [[batch["number"].tolist() for batch in data.loader()] for _ in range(2)]
    data.resume(0)
    first = next(iter(data.loader(num_workers=1, prefetch_factor=3)))["number"].tolist()
    assert data.state_dict()["batch"] == 1
    rest = [batch["number"].tolist() for batch in data.loader(num_workers=1)]
    assert [first, *rest] == epochs[0] and data.epoch == 1
    assert [batch["number"].tolist() for batch in data.loader()] == epochs[1]


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(())


def said() -> list[str]:
    mesh = autopar.init_mesh("cpu", dp=2)
    data = autopar.sampler(Rows(), mesh, batch_size=8)
    data.resume(7)
    assert (data.epoch, data.batch) == (2, 1)
    other = {**data.state_dict(), "seed": 5}
    return [
        refusal(autopar.sampler, Stream(), mesh, batch_size=8),
        refusal(autopar.sampler, Rows(), mesh, batch_size=7),
        refusal(autopar.sampler, Rows(9), mesh, batch_size=8, drop_last=False),
        refusal(autopar.sampler, Rows(4), mesh, batch_size=8),
        refusal(data.loader, shuffle=True),
        refusal(data.load_state_dict, other),
        refusal(data.resume, -1),
    ]


def test_refusals() -> None:
    words = [
        "found a Stream; of a stream take this rank's shard", "does not divide by 2 data-parallel ranks; use 6 or 8",
        "the last batch has 1 rows", "has 4 rows, fewer than batch_size 8", "shuffle is set by the sampler",
        "found seed=5 where this one has 0", "batches: expected a whole number",
    ]  # fmt: skip
    for text, word in zip(run_ranks(2, said)[0], words, strict=True):
        assert word in text
