"""Losses of other people's trainers and loops on a mesh: over tp and pp as in one process, over dp as under DDP."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader

import autopar
from autopar import integrations
from autopar.lift_to_float64 import LiftFloat32
from tests.integrations.loops import VOCABULARY, Sizes, arguments, as_started, differences, llama, rows
from tests.support.ranks import run_ranks

EXACT = 1e-10


class ClassWeights(transformers.Trainer):
    """The example of transformers' documentation, for tokens."""

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        weight = torch.linspace(1, 2, VOCABULARY, dtype=outputs.logits.dtype)
        loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), weight)
        return (loss, outputs) if return_outputs else loss


class Several(transformers.Trainer):
    """The model's loss, a term of hidden states, two forwards, a teacher, metrics; all scaled by a step of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.teacher = llama(num_hidden_layers=1)
        self.seen: list[float] = []

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs) * 1

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        found = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        ids = inputs["input_ids"]
        second = model(input_ids=ids.flip(1), output_hidden_states=True)
        with torch.no_grad():
            target = self.teacher(input_ids=ids).logits.softmax(-1)
        distilled = F.kl_div(found[1].logits.log_softmax(-1), target, reduction="batchmean")
        pooled = F.normalize(second.hidden_states[-1].mean(1), dim=-1)
        contrast = F.cross_entropy(pooled @ pooled.T * 5, torch.arange(len(ids)))
        self.seen.append(float(self.accelerator.gather_for_metrics(contrast.detach()).mean()))
        loss = found[0] + 0.1 * distilled + contrast
        return (loss, found[1]) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any) -> None:
        super().log({**logs, "contrast": sum(self.seen) / max(len(self.seen), 1)}, *args)


class OnMeshClassWeights(integrations.MeshTrainerMixin, ClassWeights):
    pass


class OnMeshSeveral(integrations.MeshTrainerMixin, Several):
    pass


CLASSES: Mapping[str, tuple[Any, Any]] = {
    "weights": (ClassWeights, OnMeshClassWeights),
    "several": (Several, OnMeshSeveral),
}


def ragged(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Rows of which each batch of a rank has one length, and each rank and step another."""
    return [{name: x[: 6 + (i // 2) % 5] for name, x in row.items()} for i, row in enumerate(rows(count, seed))]


def logged(
    name: str, sizes: Sizes | None, folder: str, parts: int, options: Mapping[str, Any]
) -> list[dict[str, float]]:
    """What the trainer logs: on a mesh, or without one in one process or under DDP, by how many processes there are."""
    with as_started(), LiftFloat32():
        mesh = autopar.init_mesh("cpu", **sizes) if sizes is not None else None
        how: dict[str, Any] = {
            "model": llama(),
            "args": arguments(
                folder, 4, gradient_accumulation_steps=2, max_steps=2, eval_steps=2, save_strategy="no",
                per_device_train_batch_size=4 // parts, per_device_eval_batch_size=4 // parts,
            ),
            "train_dataset": ragged(40, 1) if name == "weights" and parts == 2 else rows(40, 1),
            "eval_dataset": rows(6, 2),
        }  # fmt: skip
        plain, on_mesh = CLASSES[name]
        if mesh is not None:
            given = {"lift_to_float64": True, **options}
            trainer = on_mesh(**how, mesh=mesh, options=given)
        else:
            trainer = plain(**how)
        trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(how["train_dataset"])
        trainer.train()
        return trainer.state.log_history


MESHES: list[Any] = [
    ("weights", {"dp": 2}, {"zero": 3}),
    ("several", {"tp": 2}, {}),
    ("several", {"pp": 2}, {"microbatches": 2}),
    pytest.param("several", {"dp": 2}, {"zero": 3}, marks=pytest.mark.full),
    pytest.param("weights", {"cp": 2}, {}, marks=pytest.mark.full),
    pytest.param("weights", {"pp": 2, "dp": 2}, {"microbatches": 2}, marks=pytest.mark.full),
]


@pytest.mark.parametrize("name, sizes, options", MESHES)
def test_a_loss_behind_the_mixin(tmp_path: Path, name: str, sizes: Sizes, options: Mapping[str, Any]) -> None:
    """Losses, norms, evaluations and metrics; with dp rows of lengths that differ over ranks and steps."""
    parts = sizes.get("dp", 1)
    how = (str(tmp_path), parts)
    expected = (
        logged(name, None, *how, {}) if parts == 1 else run_ranks(parts, logged, name, None, *how, {}, timeout=300)[0]
    )
    found = run_ranks(math.prod(sizes.values()), logged, name, sizes, *how, options, timeout=500)
    for logs in found:
        assert max(differences(logs, expected).values()) < EXACT


class Net(nn.Module):
    """Returns no loss: the loop computes it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def own_loop(sizes: Sizes | None, parts: int) -> tuple[list[float], list[Any]]:
    """A criterion of the loop's, and predictions that are gathered; 2 rows in the last batch."""
    with as_started():
        mesh = autopar.init_mesh("cpu", **sizes) if sizes is not None else None
        generator = torch.Generator().manual_seed(1)
        data = [(torch.randn(8, generator=generator).double(), i % 3) for i in range(10)]
        options = {"example_batch": {"x": torch.zeros(4, 8, dtype=torch.float64)}}
        made: Any = accelerate.Accelerator(cpu=True)
        if mesh is not None:
            made = integrations.Accelerator(mesh=mesh, options=options, cpu=True)
        model = Net().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loader = DataLoader(data, batch_size=4 // parts)
        model, optimizer, loader = made.prepare(model, optimizer, loader)
        losses, guesses = [], []
        for _ in range(2):
            for x, y in loader:
                found = model(x)
                loss = F.cross_entropy(found, y, torch.tensor([1.0, 2, 3]).double())
                losses.append(float(made.gather(loss.detach()).mean()))
                made.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        for x, y in loader:
            with torch.no_grad():
                found = model(x)
            guesses += torch.cat(made.gather_for_metrics((found, y[:, None].double())), 1).tolist()
        return losses, guesses


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"tp": 2}])
def test_a_criterion_of_the_loop(sizes: Sizes) -> None:
    """The last batch has fewer rows."""
    parts = sizes.get("dp", 1)
    expected = own_loop(None, 1) if parts == 1 else run_ranks(parts, own_loop, None, parts)[0]
    for losses, guesses in run_ranks(2, own_loop, sizes, parts, timeout=200):
        assert losses == pytest.approx(expected[0], abs=EXACT)
        assert float((torch.tensor(guesses) - torch.tensor(expected[1])).abs().max()) < 1e-6


class Pairs(nn.Module):
    """Similarities of all pairs in a batch, as CLIP's, beside embeddings that are normed over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.norm = nn.Linear(4, 3), nn.Linear(5, 3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        left, right = self.left(x), self.right(y)
        return {"loss": (left - right).square().mean(), "logits": left @ right.T, "embeds": self.norm(left)}


def outputs_of_all_ranks() -> tuple[list[int], str]:
    torch.manual_seed(0)
    mesh = autopar.init_mesh("cpu", 60.0, dp=2)
    batch = {"x": torch.randn(2, 4).double(), "y": torch.randn(2, 5).double()}
    model = autopar.parallelize(Pairs().double(), mesh, example_batch=batch, outputs_with_grad="rank")
    found = model(**batch)
    (found["loss"] + found["embeds"].sum()).backward()
    with pytest.raises(ValueError, match="DDP has those of each rank alone") as refused:
        F.cross_entropy(found["logits"], torch.arange(2))
    return list(found["embeds"].shape), str(refused.value)


def test_an_output_of_the_examples_of_all_ranks_cannot_be_used() -> None:
    for shape, said in run_ranks(2, outputs_of_all_ranks):
        assert shape == [2, 3]
        assert said.startswith('outputs_with_grad="rank": logits is computed from the examples of all ranks (')
