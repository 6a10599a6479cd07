"""verify: agrees with one process where all is well, dropout included, and finds every mistake that is planted."""

from __future__ import annotations

import functools
import json
import math
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.cli.verify_run import ignored_labels, random_batch, verify_config
from autopar.ir.mesh import Mesh
from autopar.models.tiny import TINY
from autopar.ops.random_recipes import shared_random
from autopar.options import Options
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.verification import TOLERANCES, Compared, Report
from tests.cli.test_cli import LLAMA, run
from tests.support.compile_cache import compiled_once
from tests.support.launched import serve
from tests.support.ranks import run_ranks
from tests.support.subjects import make


class Net(nn.Module):
    """Dropout in several places, an unused parameter, a tie."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 12), nn.Linear(12, 16, bias=False)
        self.inner, self.outer, self.p = nn.Linear(12, 24), nn.Linear(24, 12), p
        self.drop = nn.Dropout(p)
        self.unused = nn.Parameter(torch.ones(3))
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        h = self.drop(self.embed(tokens))
        h = h + self.drop(self.outer(nn.functional.dropout(torch.relu(self.inner(h)), self.p, self.training)))
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


def build(p: float = 0.0, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net(p).to(dtype)


def batch_of(rows: int = 8) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 16, (rows, 6), generator=g)
    return {"tokens": tokens, "labels": tokens.roll(-1, 1).masked_fill(ignored_labels(rows, 6, g), -100)}


# --- agreement ----------------------------------------------------------------------------------------


def agrees(sizes: dict[str, int], p: float, dtype: torch.dtype, exact: bool, options: dict[str, Any]) -> Report:
    mesh = autopar.init_mesh("cpu", 30.0, **sizes)
    model, batch = build(p, dtype), batch_of()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    report = autopar.verify(model, mesh, batch, lift_to_float64=exact, **options)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert all(q.grad is None and q.dtype == dtype for q in model.parameters())
    return report


MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp2": ({"dp": 2}, {}), "tp2": ({"tp": 2}, {}), "dp2-zero3-mb2": ({"dp": 2}, {"zero": 3, "microbatches": 2}),
}  # fmt: skip
WITHOUT = ("tp2",)  # what has dropout by default has it not with -m full, and the other way round


@pytest.mark.parametrize("sizes, options, p", [
    pytest.param(*MESHES[name], p, id=f"{name}-{p}", marks=[pytest.mark.full] if (p == 0) != (name in WITHOUT) else [])
    for name in MESHES for p in (0.0, 0.1)
])  # fmt: skip
def test_a_float32_model_is_compared_in_float64(sizes: dict[str, int], options: dict[str, Any], p: float) -> None:
    reports = run_ranks(2, agrees, sizes, p, torch.float32, True, options)
    assert reports[0] == reports[1], "every rank gets the same report"
    report = reports[0]
    report.raise_for_mismatch()
    assert report.passed and report.exact and report.entries[0].error < 1e-13
    assert report.without_gradient == ("unused",)
    assert {e.name for e in report.parameters} == {
        "embed.weight", "inner.weight", "inner.bias", "outer.weight", "outer.bias"
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_in_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    report = run_ranks(2, agrees, {"tp": 2}, 0.1, dtype, False, {})[0]
    report.raise_for_mismatch()
    assert max(e.error for e in report.parameters) > 0
    assert report.parameters[0].allowed >= TOLERANCES[dtype][1]


def with_seeds(options: dict[str, Any]) -> list[Report]:
    mesh = autopar.init_mesh("cpu", 30.0, dp=2)
    with compiled_once():
        return [autopar.verify(build(0.1), mesh, batch_of(), seed=seed, **options) for seed in (1, 2)]


def test_the_seed_changes_the_masks_and_not_the_agreement() -> None:
    first, second = run_ranks(2, with_seeds, {"zero": 3, "microbatches": 2})[0]
    assert first.passed and second.passed
    assert abs(first.loss - second.loss) > 1e-4


def transformer(sizes: dict[str, int], options: dict[str, Any]) -> Report:
    mesh = autopar.init_mesh("cpu", 30.0, **sizes)
    model, batch = make("gpt2 with dropout")
    return autopar.verify(model, mesh, batch, **options)


CUT: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp": 2}, {"zero": 3, "microbatches": 2}),
    ({"tp": 2}, {"sequence_parallel": True}),
]
ALL_CUT = [({"dp": 2, "tp": 2}, {"sequence_parallel": True, "microbatches": 2})]


@pytest.mark.parametrize("meshes", [CUT, pytest.param([*CUT, *ALL_CUT], marks=pytest.mark.full)], ids=len)
def test_dropout_of_a_transformer_does_not_depend_on_the_mesh(meshes: list[Any]) -> None:
    """Embeddings, attention probabilities and residuals; sharded on the batch, heads, the sequence and time."""
    losses = {run_ranks(math.prod(sizes.values()), transformer, sizes, options)[0] for sizes, options in meshes}
    for report in losses:
        report.raise_for_mismatch()
    assert len({round(r.loss, 10) for r in losses}) == 1


def test_shared_random_draws_one_mask_per_call_and_leaves_no_trace() -> None:
    x = torch.ones(64, 64, dtype=torch.float64, requires_grad=True)
    with shared_random(3) as masks:
        first, second = (nn.functional.dropout(x, 0.25) for _ in range(2))
    with shared_random(3):
        again = nn.functional.dropout(x, 0.25)
    assert masks.site == 2 and torch.equal(first, again) and not torch.equal(first, second)
    again.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, again.detach())
    assert abs(float((again == 0).double().mean()) - 0.25) < 0.03
    torch.manual_seed(0)
    plain = nn.functional.dropout(x, 0.25)
    assert not torch.equal(plain, first)


# --- mistakes -----------------------------------------------------------------------------------------


PLANTED = {
    "scaled": ("inner.bias", "MISMATCH"), "one rank": ("outer.weight", "MISMATCH"), "nan": ("inner.weight", "MISMATCH"),
    "missing": ("outer.bias", "no gradient on the mesh"), "extra": ("unused", "no gradient in one process"),
}  # fmt: skip


def all_planted() -> dict[str, Report]:
    with compiled_once():
        return {kind: planted(kind) for kind in PLANTED}


@functools.cache
def reports() -> list[dict[str, Report]]:
    """Of both ranks."""
    return run_ranks(2, all_planted)


def planted(kind: str) -> Report:
    """verify with a ParallelModule whose gradients are wrong on rank 1 only, or on all ranks."""
    mesh = autopar.init_mesh("cpu", 30.0, dp=2)
    original = ParallelModule.full_gradients

    def wrong(self: ParallelModule, rank0_only: bool = False) -> dict[str, Tensor]:
        found = original(self, rank0_only)
        if kind == "scaled":
            found["inner.bias"] = found["inner.bias"] * 1.001
        if kind == "one rank" and torch.distributed.get_rank() == 1:
            found["outer.weight"] = found["outer.weight"] + 1e-8
        if kind == "missing":
            del found["outer.bias"]
        if kind == "extra":
            found["unused"] = torch.zeros(3, dtype=torch.float64)
        if kind == "nan":
            found["inner.weight"] = found["inner.weight"] * math.nan
        return found

    ParallelModule.full_gradients = wrong  # type: ignore[method-assign]
    try:
        return autopar.verify(build(), mesh, batch_of())
    finally:
        ParallelModule.full_gradients = original  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", PLANTED)
def test_planted_mistakes_are_found_on_every_rank(kind: str) -> None:
    name, verdict = PLANTED[kind]
    for report in (found[kind] for found in reports()):
        assert not report.passed
        assert [e.name for e in report.entries if not e.passed] == [name]
        assert report.entries[0].name == name, "the worst comes first"
        with pytest.raises(AssertionError, match=re.escape(name)):
            report.raise_for_mismatch()
        assert re.search(rf"{name} .*{verdict}", str(report)), str(report)
        assert "differs from one process in 1 of" in str(report)


class Weighted(Net):
    """Its loss is weighted by integers, which are cast to float32 without rounding."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        weights = (tokens % 3 + 1).float().reshape(-1).double()
        each = nn.functional.cross_entropy(
            self.head(self.embed(tokens)).flatten(0, 1), labels.flatten(), reduction="none"
        )
        return (each * weights).sum() / weights.sum()


def in_double(kind: str, faults: tuple[float, ...]) -> list[Report]:
    """``lift_to_float64=False`` of a float64 model, one gradient of which is wrong by each of these factors."""
    with compiled_once():
        return [faulty(kind, fault) for fault in faults]


def faulty(kind: str, fault: float) -> Report:
    mesh = autopar.init_mesh("cpu", 30.0, tp=2)
    if kind.startswith("one-layer"):
        model, batch = make(kind)
    else:
        torch.manual_seed(0)
        model, batch = (Net if kind == "net" else Weighted)().double(), batch_of()
    original = ParallelModule.full_gradients

    def wrong(self: ParallelModule, rank0_only: bool = False) -> dict[str, Tensor]:
        found = original(self, rank0_only)
        name = next(iter(found))
        return found | {name: found[name] * (1 + fault)}

    with patch.object(ParallelModule, "full_gradients", wrong):
        return autopar.verify(model.double(), mesh, batch, lift_to_float64=False)


@pytest.mark.parametrize("kind, fault, precision", [
    ("net", 1e-6, "float64"), ("weighted", 1e-6, "float64"),
    ("one-layer llama", 1e-3, "float64 with parts in float32"),
    ("one-layer gpt2", 1e-3, "float64 with parts in float32"),
])  # fmt: skip
def test_as_precise_as_what_is_computed(kind: str, fault: float, precision: str) -> None:
    """Norms and losses in float32 are no mistake in a float64 model; what is float64 throughout is held to that."""
    right, wrong = run_ranks(2, in_double, kind, (0.0, fault))[0]
    right.raise_for_mismatch()
    assert f"({precision})" in str(right)
    assert [e.name for e in wrong.entries if not e.passed] == [
        wrong.parameters[0].name
    ] and wrong.precision == precision
    worst = max(e.error / e.reference for e in right.entries if e.reference)
    assert worst < (1e-12 if precision == "float64" else 1e-5)


def bad_input(kind: str) -> str:
    mesh = autopar.init_mesh("cpu", 30.0, dp=2)
    try:
        if kind == "rows":
            autopar.verify(build(), mesh, batch_of(7))
        if kind == "meta":
            autopar.verify(build().to("meta"), mesh, batch_of())
        if kind == "loss":
            model = nn.Linear(4, 4)
            autopar.verify(model, mesh, {"input": torch.ones(4, 4)})
        if kind == "option":
            autopar.verify(build(), mesh, batch_of(), zeroo=3)
        if kind == "auxiliary":
            autopar.verify(build(), mesh, batch_of(), aux_loss_scope="microbatch")
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("kind, pattern", [
    ("rows", "the batch of 7 .*does not divide into 2 pieces .*; use a batch of 8"),
    ("meta", "verify: needs the weights of the model"),
    ("loss", "needs a scalar output with a gradient, found none"),
    ("option", "unknown option 'zeroo'"),
    ("auxiliary", 'verify: needs aux_loss_scope="global_batch", found "microbatch", .*; remove the option'),
])  # fmt: skip
def test_bad_input(kind: str, pattern: str) -> None:
    texts = run_ranks(2, bad_input, kind)
    assert len(set(texts)) == 1 and re.search(pattern, texts[0]), texts


# --- the report ---------------------------------------------------------------------------------------


def report_of(*errors: float) -> Report:
    entries = tuple(Compared(f"layer.{i}.weight", e, 1.0, 1e-10) for i, e in enumerate(errors))
    return Report("dp=2", True, 1.5, 1.5, Compared("loss", 0.0, 1.5, 1.5e-10), entries)


def test_the_table_shows_the_worst_first_and_not_all() -> None:
    report = report_of(*[k * 1e-12 for k in range(40)], 3e-10)
    lines = str(report).splitlines()
    shown = [line for line in lines if "layer." in line]
    assert "layer.40.weight" in shown[0] and "MISMATCH" in shown[0] and "layer.39.weight" in shown[1]
    assert "and 22 with smaller errors" in lines[-1] and not report.passed
    assert report_of(1e-11).passed and "equals one process" in str(report_of(1e-11))
    assert not report_of(math.nan).passed and report_of(math.nan).entries[0].name == "layer.0.weight"


# --- the command --------------------------------------------------------------------------------------


def test_main_verifies_a_config_on_local_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = TINY["llama"].build().config.to_dict()
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**config, "num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}))
    serve()
    code = verify_config(file, Mesh.of(dp=2), Options(zero=3), seq=8, batch=4, timeout=60)
    text = capsys.readouterr().out
    assert code == 0, text
    assert "mesh dp=2 equals one process" in text and "model.layers.0.mlp.down_proj.weight" in text
    with pytest.raises(ValueError, match="config"):
        verify_config(tmp_path / "nothing.json", Mesh.of(dp=2))


def test_verify_of_a_cut_sequence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "cache"))  # as users have one: a rank compiles for the other
    serve()
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**LLAMA, "num_hidden_layers": 1}))
    options = ("--mesh", "cp=2", "--attention", "token_ring", "--seq", 8, "--batch", 2)
    code, out, err = run(capsys, "verify", "--config", config, *options)
    assert code == 0, out + err
    assert "mesh cp=2 equals one process" in out and "model.layers.0.self_attn.q_proj.weight" in out


def test_random_batches_ignore_labels_unevenly() -> None:
    shapes = {"input_ids": torch.zeros(4, 16, dtype=torch.int64), "labels": torch.zeros(4, 16, dtype=torch.int64)}
    batch = random_batch(shapes, 64, 2)
    counts = (batch["labels"] == -100).sum(1).tolist()
    assert len(set(counts)) > 1 and 0 < sum(counts) < 64 and int(batch["input_ids"].min()) >= 3
    assert all(torch.equal(x, random_batch(shapes, 64, 2)[k]) for k, x in batch.items())
    image = random_batch({"pixels": torch.zeros(2, 3, 4, 4), "labels": torch.zeros(2, dtype=torch.int64)}, 9, 5)
    assert image["pixels"].std() > 0.5 and int(image["labels"].max()) < 5
