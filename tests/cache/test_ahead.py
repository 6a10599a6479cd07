"""The next longer step is compiled by a process beside the training; a restart compiles nothing at all."""

from __future__ import annotations

import io
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.adapters.copying.fake import skeleton_of
from autopar.cache import background_compile
from autopar.cache.compile_cache import stored_step
from autopar.cache.disk_cache import DiskCache
from autopar.cache.step_codec import StoredStep
from autopar.ir.mesh import Mesh
from autopar.options import Options
from tests.support.launched import serve
from tests.support.subjects import make

PATIENCE = 120.0  # seconds for a process that imports torch, on a machine that others use


def ragged(ranks: int, folder: str, waits: bool, program: str) -> tuple[list[float], list[bool]]:
    """Steps of 40 and of 100 tokens, on ranks as users start them: losses, and which training steps were read."""
    os.environ["AUTOPAR_CACHE"], sys.executable = folder, program or sys.executable
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4))
    mesh = autopar.init_mesh("cpu", 60.0, dp=ranks)
    parallel = autopar.parallelize(model, mesh, padding="bucket")
    losses = []
    for tokens in (40, 100):
        ids = torch.randint(0, 30, (2, tokens), generator=torch.Generator().manual_seed(mesh.data_rank))
        losses.append(float(parallel.train_step(input_ids=ids, labels=ids)))
        end = time.monotonic() + PATIENCE
        while waits and tokens == 40 and len(trained_steps(folder)) < 2 and time.monotonic() < end:
            time.sleep(0.2)
    return losses, [isinstance(c, StoredStep) for c in parallel.compiled() if c.train]


def trained_steps(folder: str) -> list[Any]:
    return [entry for entry in DiskCache(Path(folder)).entries() if entry.about["kind"] == "train"]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_the_longer_step_is_there_when_it_is_needed(tmp_path: Path, ranks: int) -> None:
    """Where the process fails the step is compiled when it is needed; the numbers are the same."""
    serve()
    there, broken = str(tmp_path / "there"), str(tmp_path / "broken")
    one_compiles = [False, True][:ranks]
    found = autopar.launch(ragged, ranks, [ranks, there, True, ""], device="cpu")
    assert all(read[1] for _, read in found)
    assert sorted(read[0] for _, read in found) == one_compiles
    without = autopar.launch(ragged, ranks, [ranks, broken, False, "/bin/false"], device="cpu")
    assert sorted(read[1] for _, read in without) == one_compiles
    again = autopar.launch(ragged, ranks, [ranks, there, False, "/bin/false"], device="cpu")
    assert all(all(read) for _, read in again)
    assert found[0][0] == without[0][0] == again[0][0]


def test_who_cannot_find_the_step_at_hand_makes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    model, batch = make("mlp")
    longer = {name: torch.cat([x, x]) for name, x in batch.items()}
    how: dict[str, Any] = {"outputs": (), "lift_to_float64": True}
    request = background_compile._LongerStep(skeleton_of(model), (), batch, longer, Mesh.of(dp=1), Options(), how)
    assert background_compile.serve(
        io.BytesIO(background_compile._dumped(request))
    ) == background_compile.ABSENT and not trained_steps(str(tmp_path))
    stored_step(skeleton_of(model), batch, Mesh.of(dp=1), Options(), **how)
    assert (
        background_compile.serve(io.BytesIO(background_compile._dumped(request))) == 0
        and len(trained_steps(str(tmp_path))) == 2
    )


def test_what_cannot_be_sent_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    model, batch = make("mlp")
    model.held = (x for x in ())  # type: ignore[assignment]
    asked = background_compile.BackgroundCompile(Mesh.of(dp=1), Options(), True)
    longer = {name: torch.cat([x, x]) for name, x in batch.items()}
    asked.ask(model, batch, longer, {})
    asked.ask(model, batch, None, {})
    assert asked._worker is None
