"""What is read from outside, each reader with inputs that it reads: for the fuzzer, and for a test with a few seeds.

Each input is read, or refused in a sentence.
"""

from __future__ import annotations

import functools
import importlib
import io
import json
import struct
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save

import autopar
from autopar.auto.priced_layouts import checked, layout_of
from autopar.auto.stored_costs import _Decoder, _Encoder
from autopar.cache import entry_file
from autopar.cache.step_codec import step_of_sections, step_sections
from autopar.cache.value_codec import Damaged
from autopar.compile.model import compile_model
from autopar.cost.cluster import Cluster
from autopar.cost.efficiency import stack_named, stack_text
from autopar.cost.topology import Topologies
from autopar.errors import is_refusal
from autopar.integrations.http.engine import ServedModel
from autopar.integrations.http.errors import ApiError
from autopar.integrations.http.parsed_request import read_completion
from autopar.ir.mesh import Mesh
from autopar.models.hf_peft import FILE, AdapterFolder
from autopar.models.tiny import TINY
from autopar.options import Options
from autopar.plan import Plan
from autopar.report.flight_summary import read_flights
from autopar.runtime.checkpoint.checkpoint_dir import LATEST, MANIFEST, checkpoint_at, read_manifest, with_sum
from autopar.runtime.checkpoint.json_tree import decoded, encoded
from autopar.runtime.checkpoint.memory_folder import part_bytes
from autopar.runtime.checkpoint.storage_layout import SavedPiece, SavedTensor, check_head
from autopar.runtime.checkpoint.tensor_storage import SavedTensors
from autopar.runtime.fault.error_propagation import CheckpointError
from autopar.runtime.training.memory_load import joined_parts
from tests.malformed import test_checkpoints, test_configs
from tests.malformed.judge import unclear
from tests.support.plain_models import Net, build, numbers
from tests.support.runs import Run

SECRET = b"0" * 32
GENERATION = "00000001-0123abcd"


@dataclass(frozen=True)
class Reader:
    """What reads an input of a kind: JSON, text or bytes. seeds: inputs that it reads. silent: its refusals are None or
    an error that its caller catches, and no sentence."""

    read: Callable[[bytes], Any]
    seeds: Callable[[], list[bytes]]
    silent: tuple[type[Exception], ...] = ()
    kind: str = "json"


_folders: list[tempfile.TemporaryDirectory[str]] = []  # removed at the end of the process


def new_folder() -> Path:
    _folders.append(tempfile.TemporaryDirectory(prefix="fuzz-"))
    return Path(_folders[-1].name)


def _in_file(name: str, read: Callable[[Path], Any]) -> Callable[[bytes], Any]:
    """A reader of a file."""
    made = functools.cache(new_folder)

    def of(data: bytes) -> Any:
        (made() / name).write_bytes(data)
        return read(made() / name)

    return of


def _plans() -> list[bytes]:
    model = build(Net)
    meshes = (Mesh.of(dp=2, tp=2), Options(zero=3)), (Mesh.of(pp=2, dp=2), Options(microbatches=2))
    return [compile_model(model, numbers(), *how).plan.to_json().encode() for how in meshes]


def _clusters() -> list[bytes]:
    groups = [{"chip": "H100", "nodes": 2}, {"chip": "A100", "nodes": 2, "card": 12.5e9, "per_node": 8, "cards": 4}]
    return [json.dumps({"groups": groups}).encode()]


def _layouts() -> list[bytes]:
    row: dict[str, Any] = {"config": {"model_type": "llama"}, "mesh": "dp=2,tp=2", "seq": 64, "batch": 4}
    more = {"cluster": "A100", "measured": 0.1, "stack": "fsdp-2023", "attention": "flash2", "compute": "fp8"}
    options = {"options": {"zero": 3, "microbatches": 2, "activation_checkpoint": "full", "schedule": "1f1b"}}
    return [json.dumps(row | extra).encode() for extra in ({}, more, options)]


def _read_layout(data: bytes) -> Any:
    row = json.loads(data)
    checked(row)
    return layout_of(row)


def _flights() -> list[bytes]:
    event = {"kind": "wait", "what": "all_reduce of dp", "start": 1.0, "end": None, "ranks": [0, 1]}
    flight = {"rank": 0, "host": "a", "written": 5.0, "error": "x", "events": [event, event | {"end": 2.0}]}
    return [json.dumps(flight).encode()]


def _values() -> list[bytes]:
    values = {"a": (1, 2.5, None), "b": [torch.float32, torch.ops.aten.add.Tensor], "c": Mesh.of(dp=2, tp=2)}
    return [json.dumps(_Encoder().encode(x)).encode() for x in (values, torch.ones(2, 3), Options(zero=3))]


def _trees() -> list[bytes]:
    value = {"a": (0.9, torch.float32), "b": [1, None, "x", b"y"], "c": torch.ones(()), "d": {2: 1j}, "e": {3, 4}}
    return [json.dumps(encoded(value, lambda at, x: at, "")).encode(), b'{"counter": [["a", 2]]}', b"[1, 2]"]


def _tensors(data: bytes) -> Any:
    found = SavedTensors(_run()[1], json.loads(data))
    found.check(found.under(""))
    return found


def _memory_part(data: bytes) -> Any:
    """A part whose checksum is right, whatever somebody has written into it."""
    facts = json.loads(data)
    if isinstance(facts, dict):
        _read_part(part_bytes(GENERATION, 0, facts))


def _read_part(data: bytes) -> None:
    found = SavedTensors(_part_folder(), joined_parts([data], GENERATION))
    found.check(found.under(""))


@functools.cache
def _part_folder() -> Path:
    """With the file of a part."""
    folder = new_folder()
    (folder / "rank-00000.safetensors").write_bytes(save({"model.w": torch.ones(2, 2)}))
    return folder


def _memory_parts() -> list[bytes]:
    file = _part_folder() / "rank-00000.safetensors"
    size = file.stat().st_size
    tensor = {"dtype": "float32", "shape": [2, 2], "pieces": [[file.name, size - 16, [0, 0], [2, 2]]]}
    index = {"files": {file.name: size}, "tensors": {"model.w": tensor}}
    states = {"optimizers": [{"names": [["w"]], "states": {"w": {"dict": {"step": {"tensor": "x"}}}}}]}
    told = {"index": index, "of_stage": states, "extra": {"part": None, "tree": {"dict": {}}}, "sums": [1]}
    common = {"step": 1, "optimizers": [{"kind": "AdamW", "options": []}], "parameters": {"w": []}, "run": "a"}
    return [json.dumps({"ranks": 1, "after": 0, "size": size, "common": common, "told": told}).encode()]


def _entries() -> list[bytes]:
    return [entry_file.packed_entry(SECRET, "a", {"model": "x"}, {"costs": b"12345" * 40})]


def _signed(data: bytes) -> Any:
    """An entry whose contents somebody with the key has changed."""
    rest = data.partition(b"\n")[2]
    signed = entry_file._MAGIC + entry_file._signature(SECRET, "a", rest) + b"\n" + rest
    entry = entry_file.unpacked_entry(SECRET, "a", signed)
    return entry and {name: entry.sections[name] for name in list(entry.sections._packed)}  # type: ignore[attr-defined]


def _heads() -> list[bytes]:
    return [json.dumps({"model.w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}).encode()]


def _head(data: bytes) -> str:
    """The head of a file of a checkpoint."""
    tensor = SavedTensor("model.w", torch.float32, (2, 2), None)
    piece = SavedPiece("rank-00000.safetensors", 8 + len(data), (0, 0), (2, 2))
    file = struct.pack("<Q", len(data)) + data + bytes(16)
    return check_head(io.BytesIO(file), len(file), [(tensor, piece)])


@functools.cache
def _run() -> tuple[Run, Path]:
    """A run in one process, and its checkpoint."""
    run = Run({"dp": 1})
    run.step()
    return run, run.save(str(new_folder())).folder


def _checkpoint(data: bytes) -> Any:
    """The manifest of a whole checkpoint, whose sum is right."""
    (run, good), told = _run(), json.loads(data)
    if isinstance(told, dict):
        told.pop("sum", None)
        (good / MANIFEST).write_bytes(with_sum(json.dumps(told)) if told else data)
        autopar.load(good, run.model, run.optimizer, scheduler=run.scheduler)


def _checkpoints() -> list[bytes]:
    return [(_run()[1] / MANIFEST).read_bytes()]


def _marked(data: bytes) -> Any:
    """The folder of a run, by the bytes of a manifest."""
    folder = _folder_of_run()
    (folder / "step-00000001" / MANIFEST).write_bytes(data)
    return read_manifest(checkpoint_at(folder)[0])


@functools.cache
def _folder_of_run() -> Path:
    folder = new_folder()
    (folder / "step-00000001").mkdir()
    (folder / LATEST).write_text("step-00000001")
    return folder


def _latest(data: bytes) -> Any:
    """The folder of a run, by the file that names its newest checkpoint."""
    folder = _folder_of_run()
    (folder / "step-00000001" / MANIFEST).write_bytes(_marks()[0])
    (folder / LATEST).write_bytes(data)
    return checkpoint_at(folder)


def _marks() -> list[bytes]:
    return [with_sum(json.dumps({"format": 1, "order": 3, "run": "ab12", "step": 4}))]


def _steps() -> list[bytes]:
    """Compiled steps: their sections."""
    compiled = compile_model(build(Net), numbers(), Mesh.of(dp=2, tp=2), Options(zero=3))
    return [json.dumps({name: json.loads(text) for name, text in step_sections(compiled).items()}).encode()]


def _step(data: bytes) -> Any:
    told = json.loads(data)
    if isinstance(told, dict):
        sections = {name: json.dumps(tree).encode() for name, tree in told.items()}
        found = step_of_sections(sections, _AnyConstant())
        return [found.local, *(part.forward.graph for part in found.pipeline.parts)]
    return None


class _AnyConstant(dict[str, torch.Tensor]):
    def __missing__(self, name: str) -> torch.Tensor:
        return torch.ones(())


@functools.cache
def _adapter() -> tuple[AdapterFolder, Path]:
    peft: Any = importlib.import_module("peft")
    model = peft.get_peft_model(TINY["llama"].build(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(folder := new_folder())
    return AdapterFolder(model), folder


def _adapters() -> list[bytes]:
    """The heads of the files of adapters."""
    data = (_adapter()[1] / FILE).read_bytes()
    return [data[8 : 8 + struct.unpack("<Q", data[:8])[0]]]


def _read_adapter(data: bytes) -> Any:
    adapter, folder = _adapter()
    (folder / FILE).write_bytes(struct.pack("<Q", len(data)) + data + bytes(_adapter_bytes()))
    return adapter.read(folder)


@functools.cache
def _adapter_bytes() -> int:
    """Of its tensors."""
    head = json.loads(_adapters()[0])
    return max(told["data_offsets"][1] for name, told in head.items() if name != "__metadata__")


def _requests() -> list[bytes]:
    request = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0.5, "stop": ["x"], "n": 2}
    more = {"seed": 3, "logit_bias": {"5": -100}, "stream": True, "stream_options": {"include_usage": True}}
    return [json.dumps(request | extra).encode() for extra in ({}, more)]


def _tokenized(texts: list[str], **_: Any) -> Any:
    return {"input_ids": [[len(word) % 100 for word in text.split()] for text in texts]}


def _request(data: bytes) -> Any:
    engine: Any = SimpleNamespace(vocabulary=100, max_length=64, eos_token_ids=(0,))
    return read_completion(json.loads(data), ServedModel("m", engine, _tokenized))


@functools.cache
def _weights_folder() -> Path:
    return new_folder()


def _weights(data: bytes) -> Any:
    """The head of a file of transformers."""
    (_weights_folder() / "model.safetensors").write_bytes(test_checkpoints.with_header(data))
    return test_checkpoints.load(_weights_folder())


@functools.cache
def _parts_folder() -> Path:
    return test_checkpoints.in_parts(new_folder() / "parts", "{}")


def _index(data: bytes) -> Any:
    (_parts_folder() / "model.safetensors.index.json").write_bytes(data)
    return test_checkpoints.load(_parts_folder())


def _indices() -> list[bytes]:
    names = (*test_checkpoints.WHOLE, "count")
    files = {name: ("one.safetensors", "two.safetensors")[name == "up.bias"] for name in names}
    return [json.dumps({"metadata": {"total_size": 1}, "weight_map": files}).encode()]


READERS: Mapping[str, Reader] = {
    "plan": Reader(lambda data: Plan.from_json(data.decode()), _plans),
    "cluster": Reader(_in_file("c.json", lambda path: Cluster.parse(str(path))), _clusters),
    "stack": Reader(
        _in_file("s.json", lambda path: stack_named(str(path), "H100")),
        lambda: [stack_text(stack_named("autopar-eager", "H100")).encode()],
    ),
    "layout": Reader(_read_layout, _layouts),
    "flight": Reader(_in_file("rank-0.json", lambda path: read_flights(path.parent)), _flights),
    "values": Reader(
        lambda data: _Decoder().decode(json.loads(data)), _values, (ValueError, LookupError, RecursionError)
    ),
    "tree": Reader(lambda data: decoded(json.loads(data), lambda key: torch.ones(())), _trees, (ValueError,)),
    "manifest": Reader(_tensors, _checkpoints, (CheckpointError,)),
    "memory": Reader(_memory_part, _memory_parts, (CheckpointError,)),
    "part": Reader(
        _read_part,
        lambda: [part_bytes(GENERATION, 0, json.loads(_memory_parts()[0]))],
        (CheckpointError,),
        kind="bytes",
    ),
    "head": Reader(_head, _heads),
    "checkpoint": Reader(_checkpoint, _checkpoints, (CheckpointError,)),
    "mark": Reader(_marked, _marks, kind="bytes"),
    "latest": Reader(_latest, lambda: [b"step-00000001"], kind="bytes"),
    "weights": Reader(_weights, lambda: [test_checkpoints.GOOD[8 : test_checkpoints.HEADER_END]]),
    "index": Reader(_index, _indices),
    "config": Reader(_in_file("config.json", test_configs.model_of), lambda: [json.dumps(test_configs.LLAMA).encode()]),
    "adapter": Reader(_read_adapter, _adapters),
    "request": Reader(_request, _requests, (ApiError,)),
    "step": Reader(_step, _steps, (Damaged,)),
    "entry": Reader(_signed, _entries, (KeyError,), kind="bytes"),
    "mesh": Reader(lambda data: Mesh.parse(data.decode()), lambda: [b"pp=2,dp=4,tp=8", b"dp=1"], kind="text"),
    "topology": Reader(
        lambda data: Topologies.parse(data.decode()), lambda: [b"tp=ring:300e9,pp=switch:25e9"], kind="text"
    ),
}


def problem_with(reader: Reader, data: bytes) -> str:
    """What is wrong with how an input is read or refused, or ""."""
    try:
        if reader.kind == "json":
            json.loads(data)
        elif reader.kind == "text":
            data.decode()
    except (ValueError, RecursionError):
        return ""
    try:
        reader.read(data)
    except reader.silent:
        return ""
    except ValueError as error:
        return unclear(str(error)) if is_refusal(error) else f"raised {type(error).__name__}: {error}"
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"
    return ""
