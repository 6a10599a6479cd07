"""Checkpoints of `autopar.save` with one thing wrong: refused, alike on all ranks, and nothing is changed; or
what was wrong is nothing that a load reads."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

import autopar
from autopar.runtime.checkpoint.checkpoint_dir import MANIFEST
from autopar.runtime.checkpoint.tensor_storage import SavedTensors
from autopar.runtime.fault.error_propagation import CheckpointError
from tests.malformed.judge import JSON, broken, unclear
from tests.support.ranks import run_ranks
from tests.support.runs import Run

KEY = "model.blocks.0.up.weight"  # of shape (16, 8): two pieces, eight rows each, at two ranks with zero=1
Change = Callable[[dict[str, Any]], Any]


class Loader:
    """Refuses a position below zero, and on some ranks whatever it is asked to."""

    def __init__(self) -> None:
        self.position, self.refuses = 3, False

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "order": torch.arange(4)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        if self.position < 0 or self.refuses:
            raise ValueError("load: the loader has no such position")


def _pieces(manifest: dict[str, Any], key: str = KEY) -> list[Any]:
    return manifest["tensors"][key]["pieces"]  # type: ignore[no-any-return]


def _shape(manifest: dict[str, Any], shape: list[Any]) -> None:
    manifest["tensors"][KEY]["shape"] = shape


def _told(key: str, value: Any) -> Change:
    return lambda manifest: manifest.__setitem__(key, value)


def _piece(number: int, place: int, value: Any) -> Change:
    return lambda manifest: _pieces(manifest)[number].__setitem__(place, value)


def _of(path: str, value: Any) -> Change:
    """Sets what lies at a path such as 'optimizers/0/options/0'."""
    *parents, last = [int(part) if part.isdigit() else part for part in path.split("/")]

    def change(manifest: dict[str, Any]) -> None:
        here: Any = manifest
        for part in parents:
            here = here[part]
        here[last] = value

    return change


def _moved(manifest: dict[str, Any], by: int) -> None:
    for piece in _pieces(manifest):
        piece[1] += by


WRONG: dict[str, Change] = {  # what every rank refuses
    **{f"{name} {value!r:.20}": _told(name, value) for name in ("training_steps", "step", "seed")
       for value in (1.0, True, "3", None, [1], {}, 1e400)},
    **{f"training steps {n}": _told("training_steps", n) for n in (-1, 2**41, 2**70)},
    "steps -1": _told("step", -1), "seed 2**63": _told("seed", 2**63),
    "a piece less": lambda manifest: _pieces(manifest).pop(), "no piece": lambda manifest: _pieces(manifest).clear(),
    "a piece twice": lambda manifest: _pieces(manifest).append(_pieces(manifest)[0]),
    "one for another": lambda manifest: _pieces(manifest).__setitem__(1, _pieces(manifest)[0]),
    "pieces overlap": _piece(1, 2, [7, 0]), "a piece elsewhere": _piece(0, 2, [8, 0]),
    "a negative start": _piece(0, 2, [-8, 0]), "negative sizes": _piece(0, 3, [-8, -8]),
    "sizes that are fewer": _piece(0, 3, [4, 8]), "sizes that are more": _piece(0, 3, [80, 8]),
    "other dims": _piece(0, 3, [64]), "a size that is not a number": _piece(0, 3, ["8", 8]),
    "a size that is a bool": _piece(0, 3, [True, 8]), "a size that is a float": _piece(0, 3, [8.0, 8]),
    "huge sizes": _piece(0, 3, [2**70, 8]), "in the head": _piece(0, 1, 8), "before the file": _piece(0, 1, -8),
    "behind the file": _piece(0, 1, 2**40), "a place of text": _piece(0, 1, "100"),
    "elsewhere in the file": lambda manifest: _moved(manifest, 8),
    "the next tensor's bytes": lambda manifest: _moved(manifest, 512),
    **{f"the file {name[:12]!r}": _piece(0, 0, name) for name in ("../x", "/etc/passwd", "", ".", "..", "a\0", "gone",
       "latest", MANIFEST)},
    "a file of a number": _piece(0, 0, 3), "a piece of three": lambda manifest: _pieces(manifest)[0].pop(),
    "a shape of more": lambda manifest: _shape(manifest, [32, 8]),
    "a shape of floats": lambda manifest: _shape(manifest, [16.0, 8]),
    "a negative shape": lambda manifest: _shape(manifest, [-16, -8]), "no shape": lambda manifest: _shape(manifest, []),
    "another dtype": _of(f"tensors/{KEY}/dtype", "float32"), "an integer's": _of(f"tensors/{KEY}/dtype", "int64"),
    "no dtype": _of(f"tensors/{KEY}/dtype", "nn"), "a dtype that is a list": _of(f"tensors/{KEY}/dtype", ["float64"]),
    "a tensor that is text": _of(f"tensors/{KEY}", "x"), "no files": _told("files", {}),
    "a file's size": lambda manifest: manifest["files"].update(dict.fromkeys(manifest["files"], 100)),
    "a negative file": lambda manifest: manifest["files"].update(dict.fromkeys(manifest["files"], -1)),
    "no parameters": _told("parameters", {}), "buffers of text": _told("buffers", "abc"),
    "states of text": _of("optimizers/0/states", {KEY.removeprefix("model."): {"tuple": [1]}}),
    "fewer options": lambda manifest: manifest["optimizers"][0]["options"].pop(),
    "options of parameters": _of("optimizers/0/options/0", {"dict": {"params": []}}),
    "options that are a list": _of("optimizers/0/options/0", [1]),
    "an unknown value": _of("optimizers/0/options/0", {"pickle": "gASV"}),
    "no base64": _of("optimizers/0/options/0", {"dict": {"lr": {"bytes": "?"}}}),
    "a complex of three": _of("optimizers/0/options/0", {"dict": {"lr": {"complex": [1, 2, 3]}}}),
    "a tensor that is none": _of("optimizers/0/options/0", {"dict": {"lr": {"tensor": "gone"}}}),
    "a key that is a list": _of("optimizers/0/options/0", {"items": [[[1], 2]]}),
    "a rate of another shape": _of("optimizers/0/options/0", {"dict": {"lr": {"tensor": KEY}}}),
    "a state that is another's": _of(f"optimizers/0/states/{KEY.removeprefix('model.')}/dict/exp_avg/tensor/note",
                                     "model.embed.weight"),
    "a state of nothing": _of(f"optimizers/0/states/{KEY.removeprefix('model.')}/dict/exp_avg/tensor", 3),
    "updates": _of("averages/0/updates", -1), "updates of text": _of("averages/0/updates", "many"),
    "a scale of text": _of("scaler/scale", "big"), "a scale that is none": _of("scaler/scale", math.nan),
    "a scaler without": lambda manifest: manifest["scaler"].pop("growth_factor"),
    "a growth of -1": _of("scaler/growth_interval", -1), "extra that is a dict": _told("extra", {"part": 1}),
    "an extra less": _of("extra/0/tree/dict", {}), "a run of code": _told("run", '"; import os'),
    "a position below zero": _of("extra/0/tree/dict/loader/dict/position", -1), "no plan": _told("plan", None),
    "a scheduler of nothing": _of("schedulers/0", 3),
    "sums of text": _told("sums", {"rank-00000.safetensors": "x"}), "no schedulers": _told("schedulers", []),
    "brackets": _of("plan", json.loads("[" * 400 + "]" * 400)),
}  # fmt: skip


def state_of(run: Run, loader: Loader, scaler: Any) -> dict[str, Any]:
    """All that a load may change, on this rank."""
    optimizer = run.optimizer.state_dict()
    tensors = {f"model {name}": x for name, x in run.model.state_dict().items() if isinstance(x, Tensor)}
    tensors |= {f"grad {name}": p.grad for name, p in run.model.named_parameters() if p.grad is not None}
    tensors |= {f"ema {name}": x for name, x in run.average.state_dict().items()}
    for i, state in optimizer["state"].items():
        tensors |= {f"state {i} {name}": x for name, x in state.items()}
    assert run.scheduler is not None
    rest = {"groups": optimizer["param_groups"], "scheduler": run.scheduler.state_dict(), "loader": loader.position,
            "steps": run.model.training_steps, "scaler": scaler.state_dict(), "updates": run.average.updates,
            "drawn": torch.get_rng_state()}  # fmt: skip
    local = {n: (x.to_local() if hasattr(x, "to_local") else x).detach() for n, x in tensors.items()}
    return {name: copy.deepcopy(x) for name, x in (local | rest).items()}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(x, b[name]) for name, x in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def attacked(folder: str) -> list[str]:
    """What became of each malformed checkpoint that was neither refused nor left everything as it was."""
    run, loader, base, rank = Run({"dp": 2}, zero=1), Loader(), Path(folder), dist.get_rank()
    scaler = autopar.GradScaler(run.model)
    found: list[str] = []
    run.step()
    good = run.save(str(base / "good"), extra={"loader": loader, "number": 1}).folder
    manifest = json.loads((good / MANIFEST).read_text())
    run.step()
    loader.position = 5
    run.model.train_step(**run.batch(2))  # gradients, which a load would take away
    before = state_of(run, loader, scaler)

    def load(path: Path) -> Any:
        return run.load(str(path), extra={"loader": loader})

    def judge(name: str, path: Path, may_load: bool = False) -> None:
        said = ""
        try:
            load(path)
        except (ValueError, CheckpointError) as error:
            said = unclear(str(error))
        except Exception as error:
            said = f"raised {type(error).__name__}: {str(error)[:200]}"
        else:
            if may_load:
                restore()
                return
            said = "loaded"
        now = state_of(run, loader, scaler)
        changed = (
            [key for key in before if not same(before[key], now[key])] if before.keys() == now.keys() else ["keys"]
        )
        if said or changed:
            found.append(f"{name}: {said}; changed {changed[:4]}")
            restore()

    def restore() -> None:
        load(base / "kept")
        nonlocal before
        run.model.train_step(**run.batch(2))
        before = state_of(run, loader, scaler)

    def prepared(name: str, fault: Callable[[Path], Any], source: Path = good) -> Path:
        path = base / f"case-{len(list(base.iterdir()))}-{rank * 0}"
        dist.barrier()
        if rank == 0:
            shutil.copytree(source, path, symlinks=True)
            fault(path)
        dist.barrier()
        return path

    def with_mark(change: Change) -> Callable[[Path], None]:
        def write(path: Path) -> None:
            new = copy.deepcopy(manifest)
            change(new)
            new.pop("sum")
            text = json.dumps(new)[:-1]
            (path / MANIFEST).write_text(f'{text}, "sum": {zlib.crc32(text.encode())}}}')

        return write

    autopar.save(str(base / "kept"), run.model, run.optimizer, scheduler=run.scheduler, step=2,
                 extra={"loader": loader, "number": 2})  # fmt: skip
    for name, change in WRONG.items():
        judge(name, prepared(name, with_mark(change)))
    rng = random.Random(0)
    for i in range(40):
        seen = {name: value for name, value in manifest.items() if name != "sum"}
        what, other = broken(seen, rng, (*JSON, "rank-00001.safetensors", [[8, 0]], -8))
        judge(
            f"{i} {what[:80]}",
            prepared("", with_mark(lambda m, other=other: (m.clear(), m.update(other | {"sum": 0})))),
            True,
        )

    first = "rank-00000.safetensors"
    outside = base / "outside"
    if rank == 0:
        outside.mkdir()
        for file in (first, MANIFEST):
            shutil.copy(good / file, outside / file)

    def link(path: Path, name: str) -> None:
        (path / name).unlink()
        (path / name).symlink_to(outside / name)

    def headed(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
        """Another head of the same length."""
        data = (path / first).read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        head = json.loads(data[8 : 8 + length])
        change(head)
        (path / first).write_bytes(data[:8] + json.dumps(head).encode().ljust(length)[:length] + data[8 + length :])

    faults: dict[str, Callable[[Path], Any]] = {
        "a link": lambda path: link(path, first), "a manifest that is a link": lambda path: link(path, MANIFEST),
        "a folder": lambda path: ((path / first).unlink(), (path / first).mkdir()),
        "a pipe": lambda path: ((path / first).unlink(), os.mkfifo(path / first)),
        "another dtype in the head": lambda path: headed(path, lambda h: h[f"{KEY}@0,0"].update(dtype="I64")),
        "another place in the head": lambda path: headed(path, lambda h: h[f"{KEY}@0,0"].update(data_offsets=[0, 8])),
        "a long head": lambda path: (path / first).write_bytes(b"\xff" * 8 + (path / first).read_bytes()[8:]),
    }  # fmt: skip
    for name, fault in faults.items():
        judge(name, prepared(name, fault))
    deep = "[" * 100000
    judge(
        "deep", prepared("deep", lambda path: (path / MANIFEST).write_text(f'{{"format": 1, "order": 1, "a": {deep}'))
    )

    def linked(path: Path) -> None:
        (path.parent / "of links").mkdir()
        (path.parent / "of links" / "step-00000001").symlink_to(path)

    prepared("", linked)
    judge("a folder of links", base / "of links")

    # what one rank alone sees
    def fails(*_: Any) -> None:
        raise CheckpointError("load: a disk has changed them")

    for method in ("check_data", "check"):
        with patch.object(SavedTensors, method, fails if rank == 1 else getattr(SavedTensors, method)):
            judge(f"{method} on rank 1", good)
    loader.refuses = rank == 1
    judge("a loader on rank 1", good)
    loader.refuses = False
    load(good)
    if loader.position != 3 or run.model.training_steps != 1:
        found.append("the good one was not loaded")
    return found


def test_saved_runs(tmp_path: Path) -> None:
    first, second = run_ranks(2, attacked, str(tmp_path), timeout=120)
    assert not first and not second, "\n".join([*first, "--", *second])
