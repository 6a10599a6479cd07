"""`autopar.monitor`: what it says of steps on real ranks, and where it writes."""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from torch import nn

import autopar
from autopar.compile.model import compile_model
from autopar.cost.step_estimate import model_flops
from autopar.integrations import metric_writers, monitor
from autopar.integrations.metric_writers import kept_from_failing, writer_for
from autopar.ir.mesh import Mesh
from autopar.options import Options
from tests.support.ranks import refusal, run_ranks
from tests.support.subjects import ROWS, TOKENS, make

Readings = list[tuple[int, dict[str, float]]]


def trained(name: str, sizes: dict[str, int], calls: int, **how: Any) -> tuple[Readings, Any]:
    """Four steps of ``calls`` forwards each, read every second one; what rank 0 wrote, and the last load of experts."""
    model, batch = make(name)
    mesh = autopar.init_mesh("cpu", **sizes)
    parallel = autopar.parallelize(model, mesh, **how)
    mine, of = autopar.dp_rank_and_size(mesh)
    shard = {key: x.chunk(of)[mine] for key, x in batch.items()}
    found: Readings = []
    middle: dict[str, Any] = {}

    def write(step: int, values: Mapping[str, float]) -> None:
        found.append((step, dict(values)))

    with autopar.monitor(parallel, write, every=2, progress=False) as seen:
        for step in range(4):
            for _ in range(calls):
                loss = parallel.train_step(**shard)
            parallel.eval_step(**shard)  # does not count
            seen.step(loss=loss, rate=torch.tensor([0.1]))
            middle = parallel.expert_load() if step == 1 else middle
    assert set(seen.values) >= {"loss", "rate"}, "on every rank"
    after = parallel.expert_load()
    parallel.train_step(**shard)
    return found, [(after[layer] - middle[layer]).tolist() for layer in after]


@pytest.mark.parametrize(
    ("name", "sizes", "calls", "how"),
    [
        ("llama", {"dp": 2}, 1, {}),
        ("llama", {"tp": 2}, 2, {}),
        ("llama", {"pp": 2}, 1, {"microbatches": 2}),
        ("mixtral", {"ep": 2}, 1, {}),
        ("llama", {"cp": 2}, 1, {"backend": "aot_eager"}),
    ],
    ids=str,
)
def test_readings(name: str, sizes: dict[str, int], calls: int, how: dict[str, Any]) -> None:
    (found, load), (nothing, _) = run_ranks(2, trained, name, sizes, calls, timeout=240)
    assert not nothing and [step for step, _ in found] == [2, 4]
    for _, values in found:
        seconds = values["seconds_per_step"]
        assert values["samples_per_second"] * seconds == pytest.approx(ROWS * calls)
        assert values["tokens_per_second"] * seconds == pytest.approx(ROWS * TOKENS * calls)
        assert values["tflops_per_rank"] * seconds * 2e12 == pytest.approx(calls * flops_of(name), rel=0.01)
        assert values["peak_memory_gib"] > 0.05 and "mfu" not in values and values["rate"] == pytest.approx(0.1)
    if load:
        assert found[-1][1]["expert_imbalance"] == pytest.approx(max(max(x) * len(x) / sum(x) for x in load))
    else:
        assert "expert_imbalance" not in found[-1][1]


def flops_of(name: str) -> float:
    """FLOPs of forward and backward of the whole batch, from the graph on one rank."""
    model, batch = make(name)
    return model_flops(compile_model(model, batch, Mesh.of(dp=1), Options()))[0]


class Recorded:
    """A library's object with one method that takes numbers."""

    def __init__(self, method: str) -> None:
        self.calls: list[Any] = []
        setattr(self, method, lambda *args, **more: self.calls.append((args, more)))


VALUES = {"loss": 2.0, "waiting_for_tp": 0.25}


def test_writers(tmp_path: Path) -> None:
    board, run, experiment, registry = (*map(Recorded, ("add_scalar", "log", "log_metrics")), CollectorRegistry())
    seen, file = [], tmp_path / "runs" / "metrics.jsonl"
    for target in (board, run, experiment, registry, file, str(file), lambda *given: seen.append(given)):
        writer_for(target)(7, VALUES)
    assert board.calls == [(("loss", 2.0, 7), {}), (("waiting_for_tp", 0.25, 7), {})]
    assert run.calls == experiment.calls == [((VALUES,), {"step": 7})] or run.calls[0][0] == (VALUES,)
    assert seen == [(7, VALUES)]
    assert [json.loads(line) for line in file.read_text().splitlines()] == [{"step": 7, **VALUES}] * 2
    text = generate_latest(registry).decode()
    assert "autopar_loss 2.0" in text and "autopar_waiting_for_tp 0.25" in text and "autopar_step 7.0" in text


def test_a_writer_that_fails_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(metric_writers.log, "warning", lambda text, *args: said.append(text % args))
    calls = []

    def broken(step: int, values: Mapping[str, float]) -> None:
        calls.append(step)
        raise OSError("no space left")

    write = kept_from_failing(broken, "Run")
    for step in (3, 4):
        write(step, VALUES)
    assert calls == [3]
    assert said == ["monitor: writing to Run failed at step 3 and is given up: no space left"]


def refusals() -> list[str]:
    model, batch = make("mlp")
    parallel = autopar.parallelize(model, autopar.init_mesh("cpu", dp=1), example_batch=batch)
    given: list[dict[str, Any]] = [{"to": 3}, {"to": "wandb"}, {"to": Path.cwd()}, {"every": 0}, {"total": -1},
                                   {"start": "first"}, {"progress": "much"}]  # fmt: skip
    found = [refusal(autopar.monitor, parallel, **how) for how in given]
    with autopar.monitor(parallel, every=1, progress=False) as seen:
        return [*found, *(refusal(seen.step, loss=loss) for loss in (torch.zeros(2), "much"))]


def test_refused() -> None:
    assert "made by autopar.parallelize, found a Linear" in refusal(autopar.monitor, nn.Linear(2, 2))
    (found,) = run_ranks(1, refusals)
    need = "monitor: step(loss=) needs a number or a tensor of one element, found "
    words = (
        "to= needs a writer",
        "found 'wandb'; to a library pass what it has made",
        "to= needs a path with a suffix",
        "every: ",
        "total: ",
        "start: ",
        "progress: ",
        need + "a tensor of shape [2]",
        need + "a str",
    )
    assert all(word in text for word, text in zip(words, found, strict=True)), found


def test_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    values = {"seconds_per_step": 0.42, "loss": 2.3171, "tokens_per_second": 1.25e6, "mfu": 0.412,
              "peak_memory_gib": 61.34, "waiting_for_tp": 0.05, "waiting_for_dp": 0.03}  # fmt: skip
    with contextlib.redirect_stderr(shown):
        line = monitor._Line(1000, 128)
        line.show(129, values)
        assert not shown.getvalue(), "not yet"
        now = time.monotonic()
        monkeypatch.setattr(monitor, "time", SimpleNamespace(monotonic=lambda: now + 31))
        line.show(130, values)
        line.show(131, values)
        line.close()
    assert shown.getvalue() == (
        "step 130/1000, 0.42 s per step, loss 2.317, 1.2 M tokens/s, MFU 41.2%, memory 61.3 GiB, waiting 8%\n"
    )
