"""What is no checkpoint, does not fit or cannot be written: one clear sentence, the same on every rank, and the
checkpoint before it is as it was."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.runtime.checkpoint.checkpoint_dir import MANIFEST
from tests.support.ranks import run_ranks
from tests.support.runs import Run, Tied, adamw

Said = dict[str, str]


def told(call: Callable[[], Any]) -> str:
    """Its error, in words."""
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class Other(Tied):
    """Another width, another name, and one parameter less."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].up, self.blocks[0].down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.blocks[1].normed = self.blocks[1].norm
        del self.blocks[1].norm
        self.blocks[1].norm = nn.Identity()


def on_first(call: Callable[[], Any]) -> None:
    """By rank 0, before the others go on."""
    if dist.get_rank() == 0:
        call()
    dist.barrier()


def flip(file: Path, at: int) -> None:
    """One bit of a byte."""
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def damaged(folder: str) -> Said:
    """Checkpoints that were good, one fault each."""
    run, base = Run({"dp": 2}, zero=1), Path(folder)
    run.step()
    good = run.save(str(base / "good")).folder
    kept = run.model.full_state_dict()
    said: Said = {}
    manifest = json.loads((good / MANIFEST).read_text())

    def change(name: str, fault: Callable[[Path], Any]) -> None:
        copy = base / name.replace(" ", "_")
        on_first(lambda: (shutil.copytree(good, copy), fault(copy)))
        said[name] = told(lambda: run.load(str(copy)))

    def write(copy: Path, **new: Any) -> None:
        (copy / MANIFEST).write_text(json.dumps({k: v for k, v in manifest.items() if k != "sum"} | new))

    change("missing file", lambda copy: (copy / "rank-00001.safetensors").unlink())
    change("truncated file", lambda copy: os.truncate(copy / "rank-00001.safetensors", 1000))
    change("flipped bit", lambda copy: flip(copy / "rank-00001.safetensors", -1))
    change("flipped in the head", lambda copy: flip(copy / "rank-00000.safetensors", 20))
    change(
        "flipped in the manifest",
        lambda copy: flip(copy / MANIFEST, (good / MANIFEST).read_text().index('"seed": ') + 8),
    )
    change("no sums", lambda copy: write(copy, sums={name: [] for name in manifest["sums"]}))
    change("text for sums", lambda copy: write(copy, sums="many"))
    change("half a manifest", lambda copy: os.truncate(copy / MANIFEST, 500))
    change("empty manifest", lambda copy: (copy / MANIFEST).write_text(""))
    change("list as a manifest", lambda copy: (copy / MANIFEST).write_text("[]"))
    change("newer format", lambda copy: write(copy, format=99))
    change("no tensors", lambda copy: write(copy, tensors=None))
    change("no optimizers", lambda copy: write(copy, optimizers=3))
    change("text for a count", lambda copy: write(copy, training_steps="many"))
    tensors = {k: v for k, v in manifest["tensors"].items() if k != "optimizer.0.state.blocks.0.up.weight.exp_avg"}
    change("lost moment", lambda copy: write(copy, tensors=tensors))
    outside = {
        k: {**v, "pieces": [[f"../{f}", *rest] for f, *rest in v["pieces"]]} for k, v in manifest["tensors"].items()
    }
    change("files elsewhere", lambda copy: write(copy, tensors=outside))
    beyond = {
        k: {**v, "pieces": [[f, 10**9, *rest] for f, _, *rest in v["pieces"]]} for k, v in manifest["tensors"].items()
    }
    change("beyond its file", lambda copy: write(copy, tensors=beyond))
    said["trains after that"] = told(lambda: run.step())
    run.load(str(good))
    said["no manifest"] = told(lambda: run.load(str(base / "good" / "step-00000001" / "nothing")))
    now = run.model.full_state_dict()
    assert all(torch.equal(now[n], x) for n, x in kept.items())
    return said


def test_damaged_checkpoints_are_named(tmp_path: Path) -> None:
    said, other = run_ranks(2, damaged, str(tmp_path))
    assert said == other
    expected = {
        "missing file": "ValueError: load: .*rank-00001.safetensors is missing: the checkpoint is damaged",
        "truncated file": "rank-00001.safetensors has 1000 bytes, needs",
        "flipped bit": r"CheckpointError: load: .*rank-00001.safetensors has other bytes than were saved, after byte 0"
        r".*load an older one \(on rank [01]\)",
        "flipped in the head": "rank-00000.safetensors has other bytes than were saved",
        "flipped in the manifest": "ValueError: load: .*checkpoint.json has other bytes than were saved",
        "no sums": "rank-0000[01].safetensors has other bytes than were saved",
        "text for sums": "has no entries of tensors",
        "half a manifest": "checkpoint.json cannot be read: no JSON at line 1",
        "empty manifest": "cannot be read",
        "list as a manifest": "is not the manifest of a checkpoint",
        "newer format": "has format 99, this version of autopar reads up to 1; install",
        "no tensors": "has no entries of tensors",
        "no optimizers": "is damaged",
        "text for a count": "is damaged",
        "lost moment": "optimizer.0.state.blocks.0.up.weight.exp_avg",
        "files elsewhere": "not one of its files",
        "beyond its file": "has another .* than the manifest",
        "trains after that": "no error",
        "no manifest": "found no folder",
    }
    wrong = {n: said[n] for n, text in expected.items() if not re.search(text, said[n])}
    assert not wrong and said.keys() == expected.keys(), wrong
    assert all("\n" not in text for text in said.values())


def unfit(folder: str) -> Said:
    """Checkpoints of other models, optimizers and runs; calls that differ between ranks."""
    run = Run({"dp": 2}, zero=1)
    run.step()
    run.save(folder)
    model, rank, said = run.model, dist.get_rank(), {}
    other = Run({"dp": 2}, build=Other)
    said["another model"] = told(lambda: other.load(folder))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    alike = torch.optim.AdamW([{"params": [p]} for p in model.parameters()])
    swapped = adamw([*model.parameters()])
    first, second = swapped.param_groups
    first["params"], second["params"] = second["params"], first["params"]
    foreign = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3))], lr=0.1)
    one = [p for p in model.parameters() if p.dim() > 1][:1]
    fewer = torch.optim.AdamW([{"params": one}, {"params": []}])
    for name, optimizer in (("kind", sgd), ("groups", alike), ("swapped", swapped), ("fewer", fewer)):
        said[name] = told(lambda optimizer=optimizer: autopar.load(folder, model, optimizer))
    said["foreign"] = told(lambda: autopar.save(folder, model, foreign))
    said["optimizers"] = told(lambda: autopar.load(folder, model, [sgd, sgd]))
    said["schedulers"] = told(lambda: autopar.load(folder, model, scheduler=[run.scheduler, run.scheduler]))
    said["no optimizer"] = told(lambda: autopar.load(folder, model, run.scheduler))
    said["function"] = told(lambda: run.save(folder, extra={"f": print}))
    said["on one rank"] = told(lambda: run.save(folder, extra={"f": print if rank else 1}))
    said["mesh tensor"] = told(lambda: run.save(folder, extra={"p": next(model.parameters()).detach()}))
    said["step"] = told(lambda: run.save(folder, step=rank))
    said["keep"] = told(lambda: run.save(folder, keep=0))
    said["names"] = told(lambda: run.save(folder, extra=[1]))
    said["extra"] = told(lambda: run.load(folder, extra={"loader": run.scheduler}))
    said["not stateful"] = told(lambda: run.load(folder, extra={"number": 3}))
    said["plain model"] = told(lambda: autopar.save(folder, nn.Linear(2, 2)))  # type: ignore[arg-type]
    said["plain model to load"] = told(lambda: autopar.load(folder, nn.Linear(2, 2)))  # type: ignore[arg-type]
    average = autopar.ema(model)
    said["averages"] = told(lambda: run.load(folder))
    average.drop()
    run.load(folder)
    assert [p.name for p in Path(folder).iterdir() if not p.name.startswith(".")].count("step-00000001") == 1
    return said


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    said, other = run_ranks(2, unfit, str(tmp_path))
    assert said == other
    expected = {
        "another model": "another model: blocks.0.up.weight has shape (16, 8), needs (32, 8)",
        "kind": "has the state of AdamW, found SGD",
        "groups": "AdamW had 2 parameter groups, found",
        "swapped": "in group 0 of AdamW, was in group 1",
        "fewer": "in a group, found it in none",
        "foreign": "group 0 of SGD has a parameter of shape (3,) that is not in the model",
        "optimizers": "the checkpoint has 1 optimizers, found 2",
        "schedulers": "the checkpoint has 1 schedulers, found 2",
        "no optimizer": "optimizer: needs one of torch, or several, found a CosineAnnealingLR",
        "function": "save: extra.f is a builtin_function_or_method, needs tensors",
        "on one rank": "extra.f is a builtin_function_or_method, needs tensors, numbers, strings, or lists and dicts",
        "mesh tensor": "extra.p is a DTensor",
        "step": "save: every rank must save the same run, found step: rank 1: 1; against rank 0: 0",
        "keep": "keep: expected a whole number of at least 1, found 0",
        "names": "extra: needs names with values",
        "extra": "has no extra 'loader', only number",
        "not stateful": "extra 'number' is a int, needs load_state_dict",
        "plain model": "made by autopar.parallelize, found a Linear",
        "plain model to load": "made by autopar.parallelize, found a Linear",
        "averages": "the model has 2 moving averages, the checkpoint 1",
    }
    wrong = {n: said[n] for n, text in expected.items() if text not in said[n] or "ValueError" not in said[n]}
    assert not wrong and said.keys() == expected.keys(), wrong


# --- where it cannot be written -----------------------------------------------------------------------------


@contextmanager
def small_files(here: bool, most: int) -> Iterator[None]:
    """On this rank no file may be larger: as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]) if here else before)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def unwritable(folder: str) -> Said:
    run, rank = Run({"dp": 2}, zero=1), dist.get_rank()
    run.step()
    run.save(folder)
    kept = run.model.full_state_dict()
    run.step()
    said: Said = {}
    for victim in (0, 1):
        with small_files(rank == victim, 3000):
            said[f"full on rank {victim}"] = told(lambda: run.save(folder))
    with small_files(rank == 1, 3000):
        saving = run.save(folder, asynchronous=True)
        run.step()
    said["full, beside"] = told(lambda: run.save(folder))
    said["once only"] = told(lambda: run.save(folder, step=9))
    said["waited for"] = told(saving.wait)
    for name in ("fsync", "rename", "replace"):
        with patch.object(os, name, full_disk if rank == 0 else getattr(os, name)):
            said[f"no room at {name}"] = told(lambda: run.save(folder))
    on_first(lambda: (Path(folder) / "file").write_text(""))
    said["a file"] = told(lambda: run.save(f"{folder}/file"))
    said["below a file"] = told(lambda: run.save(f"{folder}/file/deeper"))
    said["read-only"] = told(lambda: run.save("/proc/run"))
    holder = None
    if rank == 0:
        code = (
            f"import fcntl, time; f = open('{folder}/.lock', 'a+'); fcntl.lockf(f, fcntl.LOCK_EX); print(1, flush=True)"
        )
        code += "; time.sleep(60)"
        holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert holder.stdout is not None and holder.stdout.readline()
    dist.barrier()
    said["two jobs"] = told(lambda: run.save(folder))
    if holder is not None:
        holder.kill()
        holder.wait()
    dist.barrier()
    on_first(lambda: shutil.rmtree(Path(folder) / "step-00000009"))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        run.load(folder)
    said["removed"] = "; ".join(str(w.message) for w in warned if "names no checkpoint" in str(w.message))
    now = run.model.full_state_dict()
    assert all(torch.equal(now[n], x) for n, x in kept.items())
    assert not list(Path(folder).glob(".saving-*"))
    return said


def test_what_cannot_be_written_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    said, other = run_ranks(2, unwritable, str(tmp_path))
    assert "step-00000009" in said.pop("removed") and not other.pop("removed")
    assert said == other
    full = "CheckpointError: save: rank {} could not write step-00000002: OSError: [Errno 27] File too large"
    expected = {
        "full on rank 0": full.format(0),
        "full on rank 1": full.format(1),
        "full, beside": full.format(1),
        "once only": "no error",
        "waited for": full.format(1),
        "no room at fsync": "rank 0 could not write step-00000003: OSError: [Errno 28] No space left on device",
        "no room at rename": "rank 0 could not complete step-00000003: OSError: [Errno 28] No space left on device",
        "no room at replace": "rank 0 could not complete step-00000003: OSError: [Errno 28] No space left on device",
        "a file": "CheckpointError: save: FileExistsError",
        "below a file": "CheckpointError: save: NotADirectoryError",
        "read-only": "CheckpointError: save: FileNotFoundError",
        "two jobs": "another process is saving into",
    }
    wrong = {n: said[n] for n, text in expected.items() if text not in said[n]}
    assert not wrong and said.keys() == expected.keys(), wrong
