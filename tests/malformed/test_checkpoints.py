"""Checkpoints with something wrong in a header, a file, an index or a state: refused, or read rightly."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from autopar.ir.mesh import Mesh
from autopar.ir.signature import ParameterSpec
from autopar.runtime.checkpoint.hf_io import saved_steps
from tests.malformed.judge import JSON, Case, broken, failures
from tests.support.hf_loading import load_pretrained

GROUPS: Any = SimpleNamespace(mesh=Mesh.of(dp=1), device=torch.device("cpu"), coordinate={"dp": 0})
WHOLE = {
    "up.weight": torch.arange(12.0).reshape(4, 3),
    "up.bias": torch.tensor([1.0, 0.0, 1.0, 1.0]),
    "scale": torch.tensor(3.0, dtype=torch.bfloat16),
    "down.weight": torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.float64),
}
COUNT = torch.tensor([3, 4])
SPECS = [ParameterSpec(name, tuple(x.shape), x.dtype, True) for name, x in WHOLE.items()]
DTYPES = (torch.float64, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64,
          torch.float8_e4m3fn, torch.uint16)  # fmt: skip


def load(folder: Path) -> tuple[dict[str, Tensor], Tensor, int | None]:
    count = torch.zeros_like(COUNT)
    found = load_pretrained(folder, SPECS, GROUPS, {"count": count})
    return found, count, saved_steps(folder)


def right(loaded: Any) -> bool:
    """Every number as it was saved; a buffer that the files lack keeps its own."""
    found, count, steps = loaded
    same = all(found[name].dtype == x.dtype and torch.equal(found[name], x) for name, x in WHOLE.items())
    return same and (torch.equal(count, COUNT) or not count.any()) and steps in (None, 7)


def content(**changes: Tensor | None) -> bytes:
    """The bytes of a file, with tensors replaced, added or (None) left out."""
    tensors = {**WHOLE, "count": COUNT, **changes}
    return save(
        {n: x.contiguous() for n, x in tensors.items() if x is not None}, {"format": "pt", "autopar_steps": "7"}
    )


GOOD = content()
HEADER_END = 8 + struct.unpack("<Q", GOOD[:8])[0]


def with_header(header: str | bytes) -> bytes:
    text = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(text)) + text + GOOD[HEADER_END:]


def files() -> dict[str, bytes]:
    """A single file, by what is wrong with it."""
    header = json.loads(GOOD[8:HEADER_END])
    out = {f"cut to {n}": GOOD[:n] for n in (0, 1, 7, 8, 9, 40, HEADER_END - 1, HEADER_END, len(GOOD) - 1)}
    out |= {
        f"header of {n}": struct.pack("<Q", n) + GOOD[8:] for n in (0, 1, HEADER_END - 9, HEADER_END, 2**40, 2**64 - 1)
    }
    out |= {"more behind": GOOD + b"x", "zeros": bytes(len(GOOD)), "text": b"weights", "pickle": b"PK\x03\x04" + GOOD}
    rng = random.Random(1)
    for _ in range(60):
        what, data = broken(header, rng)
        out[f"header {what}"] = with_header(json.dumps(data))
    text = json.dumps(header)
    for name in ("up.weight", "count", "__metadata__"):
        out[f"{name} twice"] = with_header(text.replace("{", f'{{"{name}": {json.dumps(header["scale"])}, ', 1))
    for bad in (b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"a": NaN}', b"[" * 5000):
        out[f"header {bad[:8]!r}"] = with_header(bad)
    for steps in ("", "-1", "x", "1.5", "\u00b2", "9" * 5000, " 7"):
        out[f"steps {steps[:5]!r}"] = with_header(json.dumps(header | {"__metadata__": {"autopar_steps": steps}}))
    return out


def tensors() -> dict[str, bytes]:
    """A whole file of other tensors."""
    shaped: dict[str, Callable[[Tensor], Tensor | None]] = {
        "missing": lambda x: None,
        "flat": lambda x: x.reshape(-1) if x.dim() != 1 else x.reshape(1, -1),
        "of one more dim": lambda x: x.unsqueeze(0),
        "empty": lambda x: x.flatten()[:0],
        "longer": lambda x: torch.cat([x.flatten(), x.flatten()]),
    }
    names = (*WHOLE, "count")
    known = {**WHOLE, "count": COUNT}
    out = {f"{n} {how}": content(**{n: change(known[n])}) for n in names for how, change in shaped.items()}
    out |= {f"{n} as {d}": content(**{n: known[n].to(d)}) for n in names for d in DTYPES}
    return out | {
        f"and {n!r}": content(**{n: COUNT.clone()}) for n in ("extra", "", "up", "up.weight.", "Up.weight", "π")
    }


def indices() -> dict[str, str]:
    """The text of an index, by what is wrong with it."""
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys((*WHOLE, "count"), "one.safetensors")}
    out, rng = {}, random.Random(2)
    for _ in range(50):
        what, data = broken(index, rng, (*JSON, "two.safetensors", "gone.safetensors"))
        out[what] = json.dumps(data)
    for file in ("/etc/passwd", "../one.safetensors", "sub/../one.safetensors", "link.safetensors", "cycle.safetensors",
                 "sub", ".", "", "one.safetensors/", "a" * 300, "sub/one.safetensors", "a\0b"):  # fmt: skip
        out[f"file {file[:20]!r}"] = json.dumps({"weight_map": index["weight_map"] | {"scale": file}})
    text = json.dumps(index)
    out["a name twice"] = text.replace('"scale"', '"scale": "two.safetensors", "scale"')
    return out | {f"{n} characters": text[:n] for n in (0, 1, 30)} | {"brackets": "[" * 5000}


def in_one_file(folder: Path, data: bytes) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(data)
    return folder


def in_parts(folder: Path, index: str) -> Path:
    folder.mkdir()
    (folder / "one.safetensors").write_bytes(GOOD)
    (folder / "two.safetensors").write_bytes(content(scale=None))
    (folder / "sub").mkdir()
    (folder / "sub" / "one.safetensors").write_bytes(GOOD)
    (folder / "link.safetensors").symlink_to("/dev/zero")
    (folder / "cycle.safetensors").symlink_to("cycle.safetensors")
    (folder / "model.safetensors.index.json").write_text(index)
    return folder


def folders(root: Path) -> dict[str, Path]:
    """Folders that hold none, or hold it in another way."""
    for name in ("empty", "is a folder", "broken link", "cycle", "bytes"):
        (root / name).mkdir()
    (root / "is a folder" / "model.safetensors").mkdir()
    (root / "broken link" / "model.safetensors").symlink_to("gone")
    (root / "cycle" / "model.safetensors").symlink_to("model.safetensors")
    (root / "bytes" / "model.safetensors.index.json").write_bytes(b"\xff\xfe{}")
    (root / "outside").write_bytes(content(scale=torch.tensor(4.0, dtype=torch.bfloat16)))
    (root / "link out").mkdir()
    (root / "link out" / "model.safetensors").symlink_to(root / "outside")
    (root / "file").write_bytes(GOOD)
    names = ("link out", "empty", "is a folder", "broken link", "cycle", "bytes", "file", "gone", "a" * 300)
    return {name: root / name for name in names}


def test_checkpoints(tmp_path: Path) -> None:
    places = folders(tmp_path)
    places |= {
        what: in_one_file(tmp_path / f"a{i}", data) for i, (what, data) in enumerate((files() | tensors()).items())
    }
    places |= {what: in_parts(tmp_path / f"b{i}", text) for i, (what, text) in enumerate(indices().items())}
    cases = [Case(what, lambda folder=folder: load(folder), right) for what, folder in places.items()]  # type: ignore[misc]
    assert right(load(in_one_file(tmp_path / "good", GOOD))) and len(cases) >= 150
    found = failures(cases)
    assert not found, "\n".join(found)


def test_the_cache_of_hugging_face_is_links(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "123").write_bytes(GOOD)
    (snapshot / "model.safetensors").symlink_to("../../blobs/123")
    assert right(load(snapshot))
