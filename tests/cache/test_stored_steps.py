"""Steps by way of the folder: in this process, in another one, and on ranks, they are what compiling makes."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.adapters.copying.fake import skeleton_of
from autopar.cache import compile_cache, disk_cache
from autopar.cache.compile_cache import stored_plan, stored_step
from autopar.cache.entry_file import packed_entry, read_entry
from autopar.cache.step_codec import StoredStep, step_sections
from autopar.ir.mesh import Mesh
from autopar.models.tiny import TINY
from autopar.options import Options
from autopar.steps.graphs import Compiled
from tests.support.compile_cache import compiled_by_each
from tests.support.launched import in_fresh
from tests.support.plain_models import Net, numbers
from tests.support.subjects import SPECIAL, make

CELLS: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("one-layer llama", "dp=2,tp=2", {"sequence_parallel": True}, {}),
    ("one-layer llama", "dp=2,tp=2", {}, {"train": False, "outputs": None}),
    ("one-layer llama", "dp=2", {"zero": 3}, {"outputs": None}),
    ("gpt2 with dropout", "pp=2", {"microbatches": 2}, {}),
    ("one-layer vit", "tp=2", {}, {}),
    ("two losses", "dp=2", {}, {}),
    ("mlp", "dp=2", {"microbatches": 2}, {"autocast": torch.bfloat16}),
]
KINDS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("dp=2,tp=2", {"sequence_parallel": True}, {"train": False, "outputs": None}),
    ("dp=2", {"zero": 3}, {"outputs": None}),
    ("pp=2,dp=2", {"microbatches": 2}, {}),
]
MORE = [(name, *kind) for name in [*TINY, *SPECIAL] for kind in KINDS]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("AUTOPAR_CACHE_CHECK", "0")
    return tmp_path / "cache"


class _Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What the cache logs. (pytest looks at no logs: it would at three moments of every test.)"""
    handler, logger = _Said(), logging.getLogger("autopar.cache")
    before = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    yield handler.texts
    logger.removeHandler(handler)
    logger.setLevel(before)


def step(name: str, mesh: str, options: dict[str, Any], how: dict[str, Any]) -> Compiled:
    model, batch = make(name)
    return stored_step(
        skeleton_of(model),
        batch,
        Mesh.parse(mesh),
        Options(**options),
        **{"outputs": (), "lift_to_float64": True, **how},
    )


def run_cells(cells: list[Any], checked: int = 0) -> list[str]:
    """What was compiled, and not read from the folder; and what was refused. The first ``checked`` cells are compiled
    as well, and compared."""
    told = []
    for i, cell in enumerate(cells):
        for check in ("0", "1")[: 1 + (i < checked)]:
            os.environ["AUTOPAR_CACHE_CHECK"] = check
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    if isinstance(step(*cell), StoredStep) == (check == "1"):
                        told.append(f"{cell}: compiled")
            except ValueError as error:
                told.append(f"{cell}: {str(error).partition(':')[0]}")
    return told


def first_run(folder: str, cells: list[Any]) -> list[str]:
    """`run_cells` of a process in which no other test has changed anything, with hashes of any seed."""
    os.environ["AUTOPAR_CACHE"] = folder
    return run_cells(cells)


def elsewhere(cells: str, checked: int) -> list[str]:
    """`run_cells` of a new process in which hashes are others; no other test has changed anything there."""
    code = (
        "import os, torch, tests.conftest\n"
        "torch.set_num_threads(1); os.environ['AUTOPAR_CACHE'] = os.environ['FOLDER']\n"
        "from tests.cache.test_stored_steps import *\n"
        f"print('found', *run_cells({cells}, {checked}), sep='\\n')\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "FOLDER": os.environ["AUTOPAR_CACHE"]}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=3000)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout.partition("found\n")[2].split("\n")[:-1]


def test_another_process_reads_what_compiling_there_would_make(folder: Path) -> None:
    made = in_fresh(first_run, str(folder), CELLS)
    before = {path: path.stat().st_size for path in folder.rglob("*.step")}
    assert made == [f"{cell}: compiled" for cell in CELLS] and len(before) == len(CELLS)
    assert elsewhere("CELLS", 3) == []
    assert {path: path.stat().st_size for path in folder.rglob("*.step")} == before


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_another_process_and_the_zoo(folder: Path) -> None:
    made = in_fresh(first_run, str(folder), MORE)
    refused = [line for line in made if not line.endswith("compiled")]
    assert len(list(folder.rglob("*.step"))) + len(refused) == len(MORE) == len(made)
    assert [line for line in elsewhere("MORE", len(MORE)) if line not in refused] == []
    assert len(list(folder.rglob("*.step"))) + len(refused) == len(MORE)


def test_the_second_time_nothing_is_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = make("mlp")
    first = stored_plan(skeleton_of(model), batch, Mesh.of(dp=2), Options())
    made = step("mlp", "dp=2", {}, {})

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("this was there")

    monkeypatch.setattr(compile_cache, "compile_graph", never)
    monkeypatch.setattr(compile_cache, "plan_graph", never)
    monkeypatch.setattr(compile_cache, "step_key", uncached_names(compile_cache.step_key))
    assert stored_plan(skeleton_of(model), batch, Mesh.of(dp=2), Options()) == first
    found = step("mlp", "dp=2", {}, {})
    assert isinstance(found, StoredStep) and step_sections(found) == step_sections(made)
    with pytest.raises(AssertionError, match="this was there"):
        step("mlp", "dp=4", {}, {})


def uncached_names(make_key: Callable[..., str]) -> Callable[..., str]:
    """The key as it would be if this file had put nothing into autopar."""

    def key(*args: Any, **kwargs: Any) -> str:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("autopar.cache.step_key.changed_autopar", lambda: None)
            return make_key(*args, **kwargs)

    return key


def test_off_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", "off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert type(step("mlp", "dp=2", {}, {})) is Compiled and list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_made_again(folder: Path) -> None:
    step("mlp", "dp=2", {}, {})
    (path,) = folder.rglob("*.step")
    good, secret = path.read_bytes(), (path.parent / "key").read_bytes()
    entry = read_entry(secret, path)
    assert entry is not None
    packed = partial(packed_entry, secret, path.stem)
    main = entry.sections["main"]
    others = {name: entry.sections[name] for name in ("graph 0", "graph 1")}
    for bad in (b"", good[:-7], packed({}, {"main": b"[]"}), packed({}, {"main": main}), b"\x80\x04." * 9,
                packed({}, {"main": main.replace(b"autopar.plan", b"os"), **others})):  # fmt: skip
        path.write_bytes(bad)
        assert not isinstance(step("mlp", "dp=2", {}, {}), StoredStep)
        assert isinstance(step("mlp", "dp=2", {}, {}), StoredStep)


def test_a_check_finds_another_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step("mlp", "dp=2", {}, {})
    monkeypatch.setenv("AUTOPAR_CACHE_CHECK", "1")
    assert type(step("mlp", "dp=2", {}, {})) is Compiled
    (path,) = folder.rglob("*.step")
    secret = (path.parent / "key").read_bytes()
    entry = read_entry(secret, path)
    assert entry is not None
    sections = {name: entry.sections[name] for name in ("main", "graph 0", "graph 1", "graph 2")}
    sections["graph 1"] = sections["graph 1"].replace(b"tanh", b"sinh", 1).replace(b"relu", b"silu", 1)
    path.write_bytes(packed_entry(secret, path.stem, entry.about, sections))
    with pytest.raises(ValueError, match=r"cache: AUTOPAR_CACHE_CHECK: the train step of .* in graph 1"):
        step("mlp", "dp=2", {}, {})


# --- what compiling does besides --------------------------------------------------------------------------


class Counting(nn.Module):
    """Its forward moves a number, of which the user is told."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x).mean()


def test_warnings_are_told_again(folder: Path) -> None:
    for kind in (Compiled, StoredStep):
        with pytest.warns(UserWarning, match="the forward changes Python state: calls"):
            found = stored_step(skeleton_of(Counting()), {"x": torch.zeros(8, 4)}, Mesh.of(dp=2), outputs=())
        assert type(found) is kind


def test_errors_are_not_stored(folder: Path) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="does not divide"):
            stored_step(skeleton_of(Counting()), {"x": torch.zeros(7, 4)}, Mesh.of(dp=2), outputs=())
    assert not list(folder.rglob("*.step"))


def test_who_watches_sees_it_compiled(folder: Path) -> None:
    seen: list[str] = []
    for _ in range(2):
        model, batch = make("mlp")
        stored_step(
            skeleton_of(model), batch, Mesh.of(dp=2), outputs=(), observed=True,
            observers=[lambda name, gm, ctx: seen.append(name)],
        )  # fmt: skip
    assert seen.count("capture") == 2 and not list(folder.rglob("*.step"))


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "file"))
    assert type(step("mlp", "dp=2", {}, {})) is Compiled


class Reads(Counting):
    """Its forward computes with a tensor that is no buffer, which the user may write to."""

    table = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.table).mean()


def test_constants_are_those_of_the_model_at_hand(folder: Path) -> None:
    """A file has none of them: the step that is read computes with what the model has, and another value is another
    step."""
    for kind in (Compiled, StoredStep):
        found = stored_step(skeleton_of(Reads()), {"x": torch.zeros(8, 4)}, Mesh.of(dp=2), outputs=())
        assert type(found) is kind and [x.data_ptr() for x in found.constants.values()] == [Reads.table.data_ptr()]
    Reads.table.mul_(2)
    found = stored_step(skeleton_of(Reads()), {"x": torch.zeros(8, 4)}, Mesh.of(dp=2), outputs=())
    assert type(found) is Compiled


def test_what_the_key_cannot_tell_is_compiled(folder: Path, said: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("autopar.cache.step_key.unknown_modes", lambda: ["Mode"])
        patched.setattr(compile_cache, "step_key", uncached_names(compile_cache.step_key))
        for _ in range(2):
            assert type(step("mlp", "dp=2", {}, {})) is Compiled
    assert "is not cached: the active mode Mode" in str(said)


# --- on ranks ---------------------------------------------------------------------------------------------


def steps_on_a_rank(folder: str, sizes: dict[str, int], options: dict[str, Any]) -> Any:
    """Two training steps, an evaluation and (without stages) a forward: all that comes out, and what was read."""
    os.environ["AUTOPAR_CACHE"] = folder
    try:
        torch.manual_seed(0)
        batch = numbers()
        rank_batch = {name: x[: len(x) // sizes.get("dp", 1)] for name, x in batch.items()}
        with compiled_by_each():
            model = autopar.parallelize(
                Net().double(), autopar.init_mesh(**sizes), example_batch=rank_batch, lift_to_float64=True, **options
            )
            found = [model.train_step(**rank_batch).item() for _ in range(2)]
            gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
            evaluated = model.eval_step(**rank_batch)
        read = [isinstance(c, StoredStep) for c in model.compiled()]
        return found, gradients, str(evaluated), read
    finally:
        os.environ["AUTOPAR_CACHE"] = "off"


@pytest.mark.parametrize(
    ("sizes", "options"), [({"dp": 2}, {"zero": 3}), ({"tp": 2}, {}), ({"pp": 2}, {"microbatches": 2})], ids=str
)
def test_ranks(ranks: Any, tmp_path: Path, sizes: dict[str, int], options: dict[str, Any]) -> None:
    """One of two compiles; a restart compiles nothing; numbers are the same bit for bit."""
    cold, warm, off = (
        ranks(2, steps_on_a_rank, where, sizes, options) for where in (str(tmp_path), str(tmp_path), "off")
    )
    assert all(not any(read) for *_, read in off) and all(all(read) for *_, read in warm)
    made = [sum(not read[i] for *_, read in cold) for i in range(2)]
    assert made == [1, 1]
    for (a, b, c, _), (x, y, z, _), (p, q, r, _) in zip(cold, warm, off, strict=True):
        assert a == x == p and c == z == r
        assert b.keys() == y.keys() == q.keys() and all(torch.equal(b[n], y[n]) and torch.equal(b[n], q[n]) for n in b)
    assert disk_cache.DiskCache(tmp_path).entries()
