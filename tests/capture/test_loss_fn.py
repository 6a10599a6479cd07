"""Losses outside of the model, traced with it: equal to one process, gradients too; and outputs to differentiate."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import autopar
from autopar.lift_to_float64 import LiftFloat32
from tests.compat import habit_models
from tests.integrations.loops import llama, rows
from tests.support.ranks import refusal, run_ranks

EXACT = 1e-10
Sizes = dict[str, int]


class Distilled(nn.Module):
    """The model's own loss, and that of a frozen teacher's logits; a temperature that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = llama(hidden_size=16, intermediate_size=32, num_hidden_layers=1).requires_grad_(False)
        self.warmth = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, outputs: Any, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            target = self.teacher(input_ids=batch["input_ids"]).logits.softmax(-1).flatten(0, 1)
        found = F.log_softmax(outputs.logits * self.warmth, -1).flatten(0, 1)
        return outputs.loss + 0.5 * F.kl_div(found, target, reduction="batchmean")


def weighted(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    """Weights of tokens, which the model's forward knows nothing of."""
    each = F.cross_entropy(outputs.logits.flatten(0, 1), batch["input_ids"].flatten(), reduction="none")
    return (each * batch["weights"].flatten()).sum() / batch["weights"].sum()


def made(kind: str, layers: int) -> tuple[nn.Module, Callable[..., Tensor]]:
    model = llama(num_hidden_layers=layers)
    if kind == "regularised":
        return model, lambda out, _: out.loss + 0.01 * sum(p.square().sum() for p in model.model.layers.parameters())
    return model, Distilled() if kind == "distilled" else weighted


def batch_of(kind: str) -> dict[str, Tensor]:
    data = rows(8, 1)
    batch = {name: torch.stack([row[name] for row in data]) for name in data[0]}
    weights = torch.rand(8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    return batch | ({"weights": weights} if kind == "weighted" else {})


def expected_of(kind: str, layers: int) -> tuple[float, dict[str, Tensor | None]]:
    (model, loss), batch = made(kind, layers), batch_of(kind)
    with LiftFloat32():
        found = loss(model(input_ids=batch["input_ids"], labels=batch["labels"]), batch)
        found.backward()
    own = loss.named_parameters(prefix="own_loss") if isinstance(loss, nn.Module) else ()
    named = [*model.named_parameters(), *own]
    return float(found.detach()), {name: p.grad for name, p in named}


def layers_of(sizes: Sizes) -> int:
    return sizes.get("pp", 1)


def ranks_of(sizes: Sizes) -> int:
    return math.prod(sizes.values())


def on_mesh(sizes: Sizes, kind: str, options: dict[str, Any], folder: str) -> tuple[float, dict[str, Tensor]]:
    mesh = autopar.init_mesh("cpu", **sizes)
    model, loss = made(kind, layers_of(sizes))
    part = {name: x.chunk(mesh.data_size)[mesh.data_rank] for name, x in batch_of(kind).items()}
    parallel = autopar.parallelize(model, mesh, loss=loss, example_batch=part, lift_to_float64=True, **options)
    assert "forward" not in vars(model)  # the user's is as it was
    found = float(parallel.train_step(**part))
    if "pp" not in sizes:
        assert float(parallel.eval_step(**part)["loss"]) == pytest.approx(found, abs=EXACT)
    parallel.save_pretrained(folder)  # without the loss's own
    parallel.load_pretrained(folder)
    return found, parallel.full_gradients()


CASES = [
    ("distilled", {"dp": 2}, {"zero": 3}),
    ("distilled", {"pp": 2}, {"microbatches": 2}),
    ("regularised", {"tp": 2}, {"sequence_parallel": True, "microbatches": 2}),
    ("weighted", {"dp": 2, "pp": 2}, {"microbatches": 2}),
]
MORE = [
    ("distilled", {"dp": 2, "tp": 2}, {"zero": 3}),
    ("distilled", {"pp": 2, "dp": 2}, {"microbatches": 2}),
    ("regularised", {"dp": 2, "tp": 2}, {"sequence_parallel": True, "microbatches": 2}),
    ("regularised", {"pp": 2, "dp": 2}, {"microbatches": 2, "zero": 3, "schedule": "interleaved"}),
    ("regularised", {"pp": 2, "tp": 2}, {"microbatches": 4, "schedule": "zb_h1"}),
]


@pytest.mark.parametrize("kind, sizes, options", [*CASES, *(pytest.param(*c, marks=pytest.mark.full) for c in MORE)])
def test_losses_of_ones_own(kind: str, sizes: Sizes, options: dict[str, Any], tmp_path: Path) -> None:
    loss, gradients = expected_of(kind, layers_of(sizes))
    for found, own in run_ranks(ranks_of(sizes), on_mesh, sizes, kind, options, str(tmp_path), timeout=200):
        assert found == pytest.approx(loss, abs=EXACT)
        assert own.keys() == {name for name, g in gradients.items() if g is not None}
        assert all(float((own[name] - g).abs().max()) < EXACT for name, g in gradients.items() if g is not None)
    saved, start = LlamaForCausalLM.from_pretrained(tmp_path, dtype="auto"), made(kind, layers_of(sizes))[0]
    assert all(torch.equal(x, saved.state_dict()[name]) for name, x in start.state_dict().items())


def small() -> LlamaForCausalLM:
    return llama(num_hidden_layers=1)


def my_loss(logits: Tensor) -> Tensor:
    return (logits.log_softmax(-1)[..., 3] * torch.linspace(0, 1, logits.shape[1], dtype=logits.dtype)).pow(2).mean()


def outputs(sizes: Sizes, options: dict[str, Any]) -> dict[str, Tensor]:
    mesh = autopar.init_mesh("cpu", **sizes)
    part = {name: x.chunk(mesh.data_size)[mesh.data_rank] for name, x in batch_of("").items()}
    model = autopar.parallelize(small(), mesh, lift_to_float64=True, outputs_with_grad=True, **options)
    out = model(**part)
    assert type(out.logits) is Tensor and out.logits.shape[0] == 8
    (my_loss(out.logits) + 0.1 * out.loss).backward()
    return model.full_gradients()


BOTH = pytest.param({"dp": 2, "tp": 2}, {"zero": 3}, marks=pytest.mark.full)


@pytest.mark.parametrize("sizes, options", [({"dp": 2}, {"zero": 3}), ({"cp": 2, "tp": 2}, {}), BOTH])
def test_outputs_with_grad(sizes: Sizes, options: dict[str, Any]) -> None:
    model = small()
    with LiftFloat32():
        out = model(**batch_of(""))
        (my_loss(out.logits) + 0.1 * out.loss).backward()
    for found in run_ranks(ranks_of(sizes), outputs, sizes, options, timeout=200):
        worst = {n: float((found[n] - p.grad).abs().max()) for n, p in model.named_parameters()}
        assert max(worst.values()) < EXACT, worst


def met_by_parts() -> tuple[list[str], float, float]:
    mesh = autopar.init_mesh("cpu", dp=2)
    whole = habit_models.batch()
    part = {name: x.chunk(2)[mesh.get_local_rank()] for name, x in whole.items()}
    out = autopar.parallelize(habit_models.make(), mesh, example_batch=part)(**part)
    logits, target = out["logits"], part["target"]
    calls: list[Callable[[], Any]] = [
        lambda: F.mse_loss(logits, target),
        lambda: logits - target,
        lambda: torch.cdist(logits, target),  # which would take any number of rows
        lambda: F.nll_loss(logits.log_softmax(-1), target.argmax(-1)),
        lambda: (logits.argmax(-1) == target.argmax(-1)).double().mean(),
        lambda: nn.CrossEntropyLoss()(logits * 2, target.softmax(-1)),
    ]
    return [refusal(call) for call in calls], float(F.mse_loss(logits, whole["target"]).detach()), float(out["loss"])


def test_outputs_that_meet_a_part_of_the_batch_say_so() -> None:
    for said, found, loss in run_ranks(2, met_by_parts):
        assert all("of the global batch, here of 8 rows, found a tensor with the 4 rows" in text for text in said), said
        assert found == pytest.approx(loss, abs=EXACT)


def said() -> list[str]:
    mesh = autopar.init_mesh("cpu", dp=1)
    named = small()
    named.own_loss = 1
    tokens = lambda out, batch: out.logits.sum(-1)  # noqa: E731
    return [
        refusal(autopar.parallelize, small(), mesh, outputs_with_grad=True, padding="bucket"),
        refusal(autopar.parallelize, small(), mesh, loss=3),
        refusal(autopar.parallelize, small(), mesh, loss=lambda out: out.loss),
        refusal(autopar.parallelize, named, mesh, loss=weighted),
        refusal(autopar.parallelize, small(), mesh, loss=tokens),
        refusal(autopar.parallelize, small(), mesh, loss=weighted),
    ]


def said_of_stages() -> str:
    return refusal(autopar.parallelize, small(), autopar.init_mesh("cpu", pp=2), outputs_with_grad=True)


def test_refusals() -> None:
    words = [
        "which pads the batch of each rank", "needs a function of (out", "found another signature",
        "needs the name 'own_loss' in the model", "needs to return one scalar, found a tensor of shape",
        "pass example_batch={...}",
    ]  # fmt: skip
    for text, word in zip(run_ranks(1, said, timeout=100)[0], words, strict=True):
        assert word in text, text
    for text in run_ranks(2, said_of_stages, timeout=100):
        assert "outputs_with_grad: model(**batch): a pipeline schedules forward and backward together" in text
