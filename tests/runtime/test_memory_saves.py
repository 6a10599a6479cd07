"""Checkpoints in host memory: a restart resumes from them bit for bit, whatever node was lost, and reads no disk."""

from __future__ import annotations

import itertools
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.runs import Run, Sizes, undisturbed

EXACT = 1e-10


def on_node(memory: str, ranks_of_node: int) -> int:
    """This rank's memory is that of its node."""
    rank = int(os.environ["RANK"])
    os.environ["AUTOPAR_MEMORY"] = str(Path(memory) / f"node{rank // ranks_of_node}")
    return rank


def begun(folder: str, memory: str, steps: int, sizes: Sizes, per_node: int, disk: int, options: Any) -> list[float]:
    """On a rank: steps, each saved in memory; and on disk before the step ``disk``."""
    on_node(memory, per_node)
    run, losses = Run(sizes, **options), []
    for number in range(steps):
        if number == disk:
            run.save(folder)
        losses.append(run.step())
        run.save(folder, memory=True)
    run.save(folder, memory=True).wait()
    return losses


def resumed(folder: str, memory: str, steps: int, sizes: Sizes, per_node: int, options: Any) -> tuple[Any, ...]:
    """On a rank: where the run was loaded from, what was said, and the further losses."""
    on_node(memory, per_node)
    run = Run(sizes, seed=5, **options)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = run.load(folder)
        losses = [run.step() for _ in range(steps)]
        run.save(folder, memory=True).wait()
    words = [str(w.message) for w in said]
    return found.memory, found.step, losses, [text for text in words if text.startswith(("load:", "save:"))]


def spoil_disk(folder: Path) -> None:
    """No tensor of the disk can be read any more."""
    for file in folder.rglob("*.safetensors"):
        file.unlink()


FOUR = [({"dp": 4}, {"zero": 3}), ({"dp": 2, "tp": 2}, {"zero": 1}), ({"pp": 2, "dp": 2}, {})]


LOST: list[list[int]] = [[0], [1], []]


@pytest.mark.parametrize(
    ("sizes", "options", "lost"),
    [
        pytest.param(*FOUR[i], LOST[j], marks=[pytest.mark.full] if i != j else [], id=f"{FOUR[i][0]} {LOST[j]}")
        for i, j in itertools.product(range(3), range(3))
    ],
)
def test_resumes_without_the_disk_after_a_node_is_lost(
    tmp_path: Path, sizes: Sizes, options: Any, lost: list[int]
) -> None:
    folder, memory = tmp_path / "run", tmp_path / "memory"
    memory.mkdir()
    before = run_ranks(4, begun, str(folder), str(memory), 3, sizes, 2, 1, options)[0]
    for node in lost:
        shutil.rmtree(memory / f"node{node}")
    spoil_disk(folder)
    whole = run_ranks(4, undisturbed_on, 5, sizes, options)[0]
    for in_memory, step, after, said in run_ranks(4, resumed, str(folder), str(memory), 2, sizes, 2, options):
        assert in_memory and step == 3 and not said
        assert before + after == whole


def undisturbed_on(steps: int, sizes: Sizes, options: Any) -> list[float]:
    run = Run(sizes, **options)
    return [run.step() for _ in range(steps)]


# --- what is lost, and what is damaged -------------------------------------------------------------------------


class Kept:
    """A run on four ranks of ``nodes`` nodes: checkpoint 1 on disk, 2 and 3 in memory; and what one process does."""

    def __init__(self, base: Path, per_node: int = 1) -> None:
        self.folder, self.memory, self.per_node = base / "run", base / "memory", per_node
        self.memory.mkdir()
        self.before = self.on_ranks(4, begun, 3, {"dp": 4}, per_node, 1, {"zero": 1})[0]
        self.expected = run_ranks(1, undisturbed, 6)[0][0]

    def on_ranks(self, n: int, what: Any, *args: Any) -> list[Any]:
        return run_ranks(n, what, str(self.folder), str(self.memory), *args)

    def files(self, kind: str, rank: int | str = "*") -> list[Path]:
        """Of the newest generation, on all nodes."""
        names = sorted(self.memory.glob("*/*/*.json"), key=lambda path: path.name)
        newest = names[-1].name.partition(".")[0]
        return sorted(self.memory.glob(f"*/*/{newest}.{rank:05}.{kind}" if rank != "*" else f"*/*/{newest}.*.{kind}"))

    def check(self, sizes: Sizes, in_memory: bool, step: int, said: str = "") -> None:
        """Resume on another mesh: from where, from which step, with which warning, and with the right losses."""
        ranks = 1
        for size in sizes.values():
            ranks *= size
        results = self.on_ranks(ranks, resumed, 2, sizes, self.per_node, {})
        for found, at, losses, _ in results:
            assert (found, at) == (in_memory, step)
            assert losses == pytest.approx(self.expected[at : at + 2], abs=EXACT)
        assert said in "".join(results[0][3]) and bool(said) == bool(results[0][3]), results[0][3]


def spoil(file: Path) -> None:
    """Another byte near the end of a file, in the data of tensors."""
    with file.open("r+b") as data:
        data.seek(-5, os.SEEK_END)
        byte = data.read(1)[0]
        data.seek(-5, os.SEEK_END)
        data.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("sizes", [{"dp": 1}, {"tp": 2}, {"pp": 2}], ids=str)
def test_another_mesh_on_fewer_nodes(tmp_path: Path, sizes: Sizes) -> None:
    """Two nodes of two ranks become one; of the other one's parts this has copies."""
    kept = Kept(tmp_path, per_node=2)
    spoil_disk(kept.folder)
    kept.check(sizes, True, 3)


def test_parts_come_from_the_nodes_that_have_them(tmp_path: Path) -> None:
    """Four nodes; the second is replaced by an empty one, and the nodes come back in another order."""
    kept = Kept(tmp_path)
    spoil_disk(kept.folder)
    shutil.rmtree(kept.memory / "node1")
    os.rename(kept.memory / "node0", kept.memory / "node1")
    kept.check({"dp": 2, "tp": 2}, True, 3)


def test_two_neighbours_lost_means_the_disk(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    for node in (1, 2):
        shutil.rmtree(kept.memory / f"node{node}")
    kept.check({"dp": 4}, False, 1, "1 of the 4 parts of")


def test_a_damaged_copy_is_read_from_the_other_node(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    spoil_disk(kept.folder)
    for rank in (0, 2):
        spoil(kept.files("tensors", rank)[0])
        spoil(kept.files("json", rank + 1)[1])
    kept.check({"dp": 4}, True, 3)


def test_a_damaged_part_without_a_second_copy_means_the_disk(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    for file in kept.files("tensors", 2):
        spoil(file)
    kept.check({"dp": 4}, False, 1, "no node has")


def test_a_torn_generation_means_the_one_before(tmp_path: Path) -> None:
    """The manifest comes last: without it, a part does not exist."""
    kept = Kept(tmp_path)
    spoil_disk(kept.folder)
    for file in kept.files("json", 3):
        file.unlink()
    kept.check({"dp": 4}, True, 3, "1 of the 4 parts of")  # the one before has the same step


def test_a_newer_checkpoint_on_disk_is_taken(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.on_ranks(4, resumed_and_saved, {"dp": 4}, 1)
    for file in kept.files("tensors"):
        spoil(file)
    kept.check({"dp": 2}, False, 4)


def resumed_and_saved(folder: str, memory: str, sizes: Sizes, per_node: int) -> None:
    on_node(memory, per_node)
    run = Run(sizes, zero=1)
    run.load(folder)
    run.step()
    run.save(folder, memory=True)
    run.save(folder)


def test_two_generations_and_no_more(tmp_path: Path) -> None:
    """Of each rank, its share and that of one neighbour; nobody else may read them."""
    kept = Kept(tmp_path, per_node=2)
    for node in kept.memory.iterdir():
        (run,) = node.iterdir()
        names = sorted(file.name for file in run.iterdir())
        assert len(names) == 4 * 2 * 2 and len({name.partition(".")[0] for name in names}) == 2
        assert {path.stat().st_mode & 0o777 for path in run.iterdir()} == {0o600}
        assert {path.stat().st_mode & 0o777 for path in (node, run)} == {0o700}
    for _ in range(2):  # all ranks are on the first node now
        for in_memory, _, _, said in kept.on_ranks(2, resumed, 1, {"dp": 2}, 2, {}):
            assert in_memory and not said, said
    (run,) = (kept.memory / "node0").iterdir()
    assert {file.name.split(".")[1] for file in run.iterdir()} == {"00000", "00001"}
    assert len({file.name.partition(".")[0] for file in run.iterdir()}) == 2
