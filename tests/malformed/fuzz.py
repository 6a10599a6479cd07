"""A coverage-guided fuzzer of what is read from outside: every input is read, or refused in a sentence.

    pip install -e ".[fuzz]"
    python -m tests.malformed.fuzz plan --seconds 600      # or another reader; "all" by default, each in its turn

JSON is changed as JSON (`tests.malformed.judge.broken`), text and bytes as libFuzzer does. The first input that is
neither read nor refused ends the run; its bytes are written to ``crash-...``.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import atheris
import torch

with atheris.instrument_imports(include=["autopar"]):
    from autopar.auto.priced_layouts import checked, layout_of
    from autopar.auto.stored_costs import _Decoder, _Encoder
    from autopar.cache import entry_file
    from autopar.compile.model import compile_model
    from autopar.cost.cluster import Cluster
    from autopar.cost.efficiency import stack_named, stack_text
    from autopar.cost.topology import Topologies
    from autopar.ir.mesh import Mesh
    from autopar.options import Options
    from autopar.plan import Plan
    from autopar.report.flight_summary import read_flights
    from autopar.runtime.checkpoint.json_tree import decoded
    from autopar.runtime.checkpoint.memory_folder import part_bytes
    from autopar.runtime.checkpoint.tensor_storage import SavedTensors
    from autopar.runtime.training.memory_load import joined_parts

from autopar.errors import is_refusal
from autopar.runtime.fault.error_propagation import CheckpointError
from tests.malformed.judge import broken, unclear
from tests.support.plain_models import Net, build, numbers

MOST_MB = 4096  # of memory
SECRET = b"0" * 32


@dataclass(frozen=True)
class Reader:
    """What reads text or bytes. seeds: inputs that it reads. silent: its refusals are None or an error that its caller
    catches, and no sentence."""

    read: Callable[[bytes], Any]
    seeds: Callable[[], list[bytes]]
    silent: tuple[type[Exception], ...] = ()
    is_json: bool = True


def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="fuzz-"))


def _in_file(name: str, read: Callable[[Path], Any]) -> Callable[[bytes], Any]:
    folder = _folder()

    def of(data: bytes) -> Any:
        (folder / name).write_bytes(data)
        return read(folder / name)

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
    return [b'{"map": {"a": {"tuple": [0.9, 0.999]}, "b": [1, null, "x"], "c": {"tensor": "k"}}}', b'{"a": [1, 2]}']


def _tensors(data: bytes) -> Any:
    folder = Path(tempfile.gettempdir())
    found = SavedTensors(folder, json.loads(data))
    found.check(found.under(""))
    return found


def _manifests() -> list[bytes]:
    piece = {"file": "rank-0.safetensors", "start": [0, 0], "size": [2, 2], "at": 8}
    tensor = {"dtype": "float32", "shape": [2, 2], "pieces": [piece]}
    return [json.dumps({"files": {"rank-0.safetensors": 100}, "tensors": {"a": tensor}, "sums": {"a": [1]}}).encode()]


def _memory_part(data: bytes) -> Any:
    """A part whose checksum is right, whatever somebody has written into it."""
    facts, generation = json.loads(data), "00000001-0123abcd"
    if isinstance(facts, dict):
        found = SavedTensors(Path(tempfile.gettempdir()), joined_parts([part_bytes(generation, 0, facts)], generation))
        found.check(found.under(""))


def _memory_parts() -> list[bytes]:
    file = "rank-00000.safetensors"
    tensor = {"dtype": "float32", "shape": [2, 2], "pieces": [[file, 72, [0, 0], [2, 2]]]}
    index = {"files": {file: 88}, "tensors": {"model.w": tensor}}
    states = {"optimizers": [{"names": [["w"]], "states": {"w": {"dict": {"step": {"tensor": "x"}}}}}]}
    told = {"index": index, "of_stage": states, "extra": {"part": None, "tree": {"dict": {}}}, "sums": [1]}
    common = {"step": 1, "optimizers": [{"kind": "AdamW", "options": []}], "parameters": {"w": []}, "run": "a"}
    return [json.dumps({"ranks": 1, "after": 0, "size": 88, "common": common, "told": told}).encode()]


def _entries() -> list[bytes]:
    return [entry_file.packed_entry(SECRET, "a", {"model": "x"}, {"costs": b"12345" * 40})]


def _signed(data: bytes) -> Any:
    """An entry whose contents somebody with the key has changed."""
    rest = data.partition(b"\n")[2]
    signed = entry_file._MAGIC + entry_file._signature(SECRET, "a", rest) + b"\n" + rest
    entry = entry_file.unpacked_entry(SECRET, "a", signed)
    return entry and {name: entry.sections[name] for name in list(entry.sections._packed)}  # type: ignore[attr-defined]


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
    "manifest": Reader(_tensors, _manifests),
    "memory": Reader(_memory_part, _memory_parts, (CheckpointError,)),
    "entry": Reader(_signed, _entries, (KeyError,), is_json=False),
    "mesh": Reader(lambda data: Mesh.parse(data.decode()), lambda: [b"pp=2,dp=4,tp=8", b"dp=1"], is_json=False),
    "topology": Reader(
        lambda data: Topologies.parse(data.decode()), lambda: [b"tp=ring:300e9,pp=switch:25e9"], is_json=False
    ),
}


def _judged(reader: Reader) -> Callable[[bytes], None]:
    def one(data: bytes) -> None:
        try:
            if reader.is_json:
                json.loads(data)
            else:
                data.decode()
        except (ValueError, RecursionError):
            return
        try:
            reader.read(data)
        except reader.silent:
            return
        except ValueError as error:
            problem = unclear(str(error)) if is_refusal(error) else f"raised {type(error).__name__}: {error}"
            if problem:
                raise RuntimeError(problem) from error

    return one


def _changed() -> Callable[[bytes, int, int], bytes]:
    """A mutator of JSON."""

    def change(data: bytes, longest: int, seed: int) -> bytes:
        rng = random.Random(seed)
        try:
            tree = json.loads(data)
            for _ in range(rng.randrange(1, 4)):
                tree = broken(tree, rng)[1]
            return json.dumps(tree).encode()[:longest]
        except (ValueError, IndexError, TypeError, RecursionError):
            return bytes(atheris.Mutate(data, longest))

    return change


def fuzz(name: str, seconds: int) -> None:
    """Run one reader; ends the process."""
    reader, corpus = READERS[name], _folder()
    for i, seed in enumerate(reader.seeds()):
        (corpus / f"seed-{i}").write_bytes(seed)
        _judged(reader)(seed)
    arguments = [sys.argv[0], str(corpus), f"-max_total_time={seconds}", f"-rss_limit_mb={MOST_MB}", "-timeout=20",
                 f"-max_len={65536 if reader.is_json else 200}", "-verbosity=0", "-print_final_stats=1"]  # fmt: skip
    how = {"custom_mutator": _changed()} if reader.is_json else {}
    atheris.Setup(arguments, _judged(reader), **how)
    atheris.Fuzz()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("reader", nargs="?", default="all", choices=[*READERS, "all"])
    parser.add_argument("--seconds", type=int, default=60, help="of each reader")
    given = parser.parse_args()
    if given.reader != "all":
        fuzz(given.reader, given.seconds)
    command = [sys.executable, "-m", "tests.malformed.fuzz", "--seconds", str(given.seconds)]
    bad = [name for name in READERS if subprocess.run([*command, name], check=False).returncode]
    print("nothing found" if not bad else f"found something in: {', '.join(bad)}")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
