"""The folder of a run after saves of all kinds; several models; the end of a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import autopar
from tests.support.ranks import run_ranks
from tests.support.runs import Run


def kept_in(folder: str) -> list[Any]:
    """What lies in the folder after saves of several kinds."""
    run, found = Run({"dp": 2}, zero=1), []
    base = Path(folder)

    def names() -> list[str]:
        return sorted(p.name for p in base.iterdir() if not p.name.startswith("."))

    for step in (1, 2, 3):
        run.save(folder, step=step, keep=2)
    found.append(names())
    run.save(folder, step=3, keep=2)  # again
    found.append(names())
    run.save(folder, step=1, keep=2)  # after loading an earlier one
    found.append((names(), (base / "latest").read_text()))
    dist.barrier()
    if dist.get_rank() == 0:
        (base / "step-00000009").mkdir()
        (base / "step-00000009" / "mine").write_text("of another program")
        (base / ".saving-step-00000008").mkdir()
        (base / "link").symlink_to(base)
        os.mkdir(base / "here")
        (base / "latest.txt").write_text("mine, too")
    dist.barrier()
    first = run.save(f"{folder}/link", step=9, asynchronous=True)
    second = run.save(folder, step=10, asynchronous=True)
    assert first.done, "two saves in flight"
    before = os.getcwd()
    os.chdir(base / "here")
    third = run.save("relative", step=11, asynchronous=True)
    os.chdir(before)
    second.wait(), third.wait(), third.wait()
    found.append((names(), run.load(f"{folder}/here/relative").step, run.load(f"{folder}/link").step))
    return found


def test_folders(tmp_path: Path) -> None:
    found, other = run_ranks(2, kept_in, str(tmp_path))
    assert found == other
    assert found[0] == ["latest", "step-00000002", "step-00000003"]
    assert found[1] == ["latest", "step-00000002", "step-00000003-2"]
    assert found[2] == (["latest", "step-00000001", "step-00000003-2"], "step-00000001\n")
    left = [
        "here",
        "latest",
        "latest.txt",
        "link",
        "step-00000001",
        "step-00000003-2",
        "step-00000009",
        "step-00000009-2",
    ]
    assert found[3] == ([*left, "step-00000010"], 11, 10)
    assert (tmp_path / "step-00000009" / "mine").exists()


def two_runs(folder: str) -> list[Any]:
    """Of one folder: at once, one that goes on from the other's checkpoint, one that begins anew behind it."""
    base, found = Path(folder), list[Any]()

    def tried(run: Run, **how: Any) -> str:
        try:
            run.save(folder, **how).wait()
        except ValueError as error:
            return str(error).replace(folder, "FOLDER").partition(";")[0]
        return ", ".join(sorted(p.name for p in base.iterdir() if p.name.startswith("step")))

    a, b = Run({"dp": 1}), Run({"dp": 1}, seed=1)
    found += [tried(a, step=1), tried(b, step=1, keep=1, asynchronous=True), tried(a, step=2)]
    b.load(folder)
    found += [tried(a, step=3, asynchronous=True), tried(b, step=3, keep=1), tried(a, step=4, keep=3)]
    c = Run({"dp": 1}, seed=2)
    c.step()
    found += [tried(c, step=4, keep=1), tried(c, step=5, keep=1), tried(a, step=5)]
    again = Run({"dp": 1}, seed=3)
    again.load(f"{folder}/step-00000003")
    found += [tried(again, step=3, keep=2), tried(c, step=6)]
    return found


def test_two_runs_do_not_mix(tmp_path: Path) -> None:
    """The one that comes second is refused; nothing of the other is removed."""
    other = "save: another run has saved step-0000000"
    assert run_ranks(1, two_runs, str(tmp_path))[0] == [
        "step-00000001",
        f"{other}1 into FOLDER since this one began",
        "step-00000001, step-00000002",
        "step-00000001, step-00000002, step-00000003",
        f"{other}3 into FOLDER since this one saved or loaded step-00000002",
        "step-00000002, step-00000003, step-00000004",
        "step-00000002, step-00000003, step-00000004, step-00000004-2",
        "step-00000002, step-00000003, step-00000004, step-00000005",
        f"{other}5 into FOLDER since this one saved or loaded step-00000004",
        "step-00000003-2, step-00000004, step-00000005",
        "save: another run has saved step-00000003-2 into FOLDER since this one saved or loaded step-00000005",
    ]


def two_models(folder: str) -> list[float]:
    """Of one process, each with its optimizer, saved beside the training in turn."""
    a, b = Run({"dp": 2}, zero=1), Run({"dp": 2}, seed=1, zero=3)
    for run in (a, b):
        run.step()
    savings = [a.save(f"{folder}/a", asynchronous=True), b.save(f"{folder}/b", asynchronous=True)]
    losses = [a.step(), b.step()]
    for saving in savings:
        saving.wait()
    with torch.inference_mode():
        a.load(a.save(f"{folder}/again").folder)
        a.load(f"{folder}/a")
    b.load(f"{folder}/b")
    return [x - y for x, y in zip(losses, [a.step(), b.step()], strict=True)]


def test_two_models(tmp_path: Path) -> None:
    assert run_ranks(2, two_models, str(tmp_path)) == [[0.0, 0.0]] * 2


AT_THE_END = """
import gc, os, resource, sys, torch
from autopar import init_mesh, parallelize, save
from torch import nn

gc.freeze(), gc.disable()  # the ends take long else
for how in ("whole", "full"):
    if os.fork() == 0:
        break
else:
    os._exit([os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(2)] != [5, 5])

folder = f"{sys.argv[1]}/{how}"
os.dup2(os.open(f"{folder}.log", os.O_WRONLY | os.O_CREAT), 2)
model = parallelize(nn.Linear(64, 64), init_mesh("cpu"), example_batch={"input": torch.rand(2, 64)})
save(folder, model, step=1)
save(folder, model, step=2, asynchronous=True)
if how == "full":
    save(folder, model, step=2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, -1))
    save(folder, model, step=3, asynchronous=True)
sys.exit(5)
"""


def test_the_end_of_a_process_waits_for_its_save(tmp_path: Path) -> None:
    """It is complete then, or the last word is that it is not. (Two processes, of one that has imported.)"""
    run = [sys.executable, "-c", AT_THE_END, str(tmp_path)]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=100, check=False)
    said = {how: (tmp_path / f"{how}.log").read_text() for how in ("whole", "full")}
    assert ended.returncode == 0, (ended.stderr, said)
    for how, text in said.items():
        assert (tmp_path / how / "latest").read_text().startswith("step-00000002")
        assert ("autopar: save: rank 0 could not write step-00000003: OSError" in text) == (how == "full")


def without_a_checkpoint(folder: str) -> list[Any]:
    """What load says where a run has no checkpoint yet, or a damaged one."""
    run, base = Run({"dp": 2}, zero=1), Path(folder)
    before = run.model.full_state_dict()

    def loaded(name: str) -> Any:
        try:
            return autopar.load(base / name, run.model, run.optimizer, missing_ok=True).step
        except ValueError as error:
            return str(error)

    if dist.get_rank() == 0:
        (base / "empty").mkdir()
        (base / "begun" / ".saving-step-00000001").mkdir(parents=True)
        (base / "a file").touch()
    dist.barrier()
    found = [loaded(name) for name in ("absent", "empty", "begun", "a file")]
    after = run.model.full_state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    run.step()
    run.save(str(base / "begun"))
    found.append(loaded("begun"))
    if dist.get_rank() == 0:
        (base / "begun" / "step-00000001" / "checkpoint.json").write_text("{")
    dist.barrier()
    return [*found, loaded("begun")]


def test_a_run_may_have_no_checkpoint_yet(tmp_path: Path) -> None:
    for *found, file, saved, damaged in run_ranks(2, without_a_checkpoint, str(tmp_path)):
        assert found == [0, 0, 0] and saved == 1
        assert "needs a folder that autopar.save has written, found no folder" in file
        assert "checkpoint.json cannot be read" in damaged
