"""transformers' Trainer, its own loop, on a mesh: what it logs equals what one process logs; checkpoints move."""

from __future__ import annotations

import dataclasses
import math
import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaForCausalLM

import autopar
from autopar import integrations
from tests.integrations.loops import arguments, as_started, differences, llama, rows, trained
from tests.support.ranks import refusal, run_ranks

EXACT = 1e-10


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, float]]]:
    folder = tmp_path_factory.mktemp("one")
    return folder, trained(None, str(folder))


def resumed(sizes: dict[str, int], folder: str) -> list[dict[str, float]]:
    """Another mesh, a pipeline, goes on from a checkpoint of steps 1 and 2."""
    return trained(sizes, folder, options={"microbatches": 2}, resume=f"{folder}/checkpoint-2")


BOTH = pytest.param({"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}, marks=pytest.mark.full)


@pytest.mark.parametrize("first, then", [({"tp": 2}, {"pp": 2}), BOTH])
def test_logs_and_checkpoints_are_those_of_one_process(
    one_process: tuple[Path, list[dict[str, float]]], tmp_path: Path, first: dict[str, int], then: dict[str, int]
) -> None:
    """Losses, norms before clipping, learning rates, evaluations, counts of tokens and flops; then on with pp."""
    folder, expected = one_process
    for logs in run_ranks(math.prod(first.values()), trained, first, str(tmp_path), timeout=200):
        assert max(differences(logs, expected).values()) < EXACT
    for step in (2, 4):
        name = f"checkpoint-{step}"
        states = [LlamaForCausalLM.from_pretrained(f / name, dtype="auto").state_dict() for f in (folder, tmp_path)]
        assert all(float((states[1][n] - x).abs().max()) < EXACT for n, x in states[0].items())
    logs = run_ranks(math.prod(then.values()), resumed, then, str(tmp_path), timeout=200)[0]
    worst = differences(logs, expected)
    assert len(logs) == len(expected) and worst.pop("train_loss") > 0  # a mean of the last two steps over all four
    assert max(worst.values()) < EXACT


def single(sizes: dict[str, int] | None, folder: str) -> list[dict[str, float]]:
    return trained(
        sizes, folder, lambda: llama(torch.float32), exact=False, max_steps=2, save_strategy="no", eval_strategy="no"
    )


@pytest.mark.full
def test_in_float32(tmp_path: Path) -> None:
    expected = single(None, str(tmp_path))
    found = run_ranks(4, single, {"dp": 2, "tp": 2}, str(tmp_path), timeout=200)[0]
    assert differences(found, expected)["loss"] < 1e-5


def bert() -> transformers.PreTrainedModel:
    """Its loss is a mean over rows, whatever the trainer counts."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config).double()


def classified(sizes: dict[str, int] | None, folder: str) -> list[dict[str, float]]:
    """Three batches in an epoch: the second step of each epoch has one batch instead of two."""
    data = [{"input_ids": row["input_ids"], "labels": torch.tensor(i % 2)} for i, row in enumerate(rows(24, 1))]
    given = {"train_dataset": data, "eval_dataset": data[:7], "compute_metrics": None}
    return trained(sizes, folder, bert, given=given, max_steps=3, save_strategy="no")


@pytest.mark.full
def test_a_loss_that_is_a_mean_of_rows(tmp_path: Path) -> None:
    expected = classified(None, str(tmp_path))
    found = run_ranks(4, classified, {"dp": 2, "tp": 2}, str(tmp_path), timeout=200)[0]
    assert max(differences(found, expected).values()) < EXACT


def half(sizes: dict[str, int] | None, folder: str) -> list[dict[str, float]]:
    return trained(
        sizes, folder, lambda: llama(torch.float32), exact=False, bf16=True, activation_checkpointing=True,
        eval_strategy="no", save_strategy="no",
    )  # fmt: skip


@pytest.mark.full
def test_in_bfloat16_with_activation_checkpoints(tmp_path: Path) -> None:
    expected = half(None, str(tmp_path))
    found = run_ranks(2, half, {"tp": 2}, str(tmp_path), timeout=200)[0]
    worst = differences(found, expected)
    assert 1e-6 < worst["loss"] < 0.02 and worst["grad_norm"] < 0.05


class Smoothed(integrations.MeshTrainerMixin, transformers.Trainer):
    """A loss of its own, of the outputs."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss * 2
        return (loss, outputs) if return_outputs else loss


def one_layer() -> LlamaForCausalLM:
    """Where nothing cuts the layers."""
    return llama(num_hidden_layers=1)


def doubled(sizes: dict[str, int] | None, folder: str, cls: Any) -> list[dict[str, float]]:
    """As under DDP, examples that fill the last batch count in an own loss: here there are none."""
    given = {"eval_dataset": rows(8, 2)}
    return trained(sizes, folder, one_layer, cls=cls, given=given, max_steps=2, save_strategy="no")


def test_a_loss_of_ones_own(tmp_path: Path) -> None:
    """In `compute_loss`, without a pipeline."""

    class Plain(transformers.Trainer):
        loss_is_scaled_for_ga = False
        compute_loss = Smoothed.compute_loss

    expected = doubled(None, str(tmp_path), Plain)
    found = run_ranks(2, doubled, {"dp": 2}, str(tmp_path), Smoothed, timeout=200)[0]
    assert max(differences(found, expected).values()) < EXACT


def smoothed(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """A sum over what transformers counts."""
    targets = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
    found = torch.nn.functional.cross_entropy(
        outputs.logits.double().flatten(0, 1), targets, label_smoothing=0.2, reduction="sum"
    )
    return found / num_items_in_batch if num_items_in_batch is not None else found / targets.ne(-100).sum()


def outside(sizes: dict[str, int] | None, folder: str) -> list[dict[str, float]]:
    given = {"compute_loss_func": smoothed}
    return trained(sizes, folder, given=given, max_steps=2, save_strategy="no")


def test_a_loss_of_outputs(tmp_path: Path) -> None:
    """`compute_loss_func` is traced with the model, and so runs on a pipeline."""
    expected = outside(None, str(tmp_path))
    found = run_ranks(2, outside, {"pp": 2}, str(tmp_path), timeout=200)[0]
    assert max(differences(found, expected).values()) < EXACT


def best(sizes: dict[str, int] | None, folder: str) -> tuple[list[dict[str, float]], Any]:
    """Smoothed labels; the best of the checkpoints is taken at the end, and predicts."""
    predicted: dict[str, Any] = {}
    base: Any = transformers.Trainer if sizes is None else integrations.Trainer

    class Predicts(base):
        def train(self, *args: Any, **kwargs: Any) -> None:
            super().train(*args, **kwargs)
            out = self.predict(rows(6, 3))
            predicted.update(out=torch.as_tensor(out.predictions), loss=out.metrics["test_loss"])

    logs = trained(
        sizes, folder, one_layer, cls=Predicts, label_smoothing_factor=0.2, load_best_model_at_end=True,
        metric_for_best_model="loss", save_strategy="steps",
    )  # fmt: skip
    return logs, predicted


def test_smoothed_labels_the_best_checkpoint_and_predictions(tmp_path: Path) -> None:
    logs, predicted = best(None, str(tmp_path / "one"))
    losses = [log["eval_loss"] for log in logs if "eval_loss" in log]
    assert losses[0] < losses[-1]  # the best one is not the last
    for found, told in run_ranks(2, best, {"dp": 2}, str(tmp_path / "two"), timeout=200):
        assert max(differences(found, logs).values()) < EXACT
        assert float((told["out"] - predicted["out"]).abs().max()) < EXACT
        assert told["loss"] == pytest.approx(predicted["loss"], abs=EXACT)


def ragged(sizes: dict[str, int] | None, folder: str) -> list[dict[str, float]]:
    """Batches of different lengths, padded by the collator to the longest row of the part."""

    def data(count: int, seed: int) -> list[dict[str, list[int]]]:
        return [
            {name: x[: 4 + (5 * i) % 9].tolist() for name, x in row.items()} for i, row in enumerate(rows(count, seed))
        ]

    def collated(given: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        most = max(len(row["labels"]) for row in given)
        fill = {"input_ids": 0, "labels": -100}
        return {n: torch.tensor([row[n] + [x] * (most - len(row[n])) for row in given]) for n, x in fill.items()}

    given = {"train_dataset": data(80, 1), "eval_dataset": data(10, 2), "data_collator": collated}
    given |= {"compute_metrics": None}
    options = {"padding": autopar.PaddingBuckets(lengths=(8, 16))} if sizes else {}
    return trained(sizes, folder, one_layer, given=given, options=options, max_steps=2, save_strategy="no")


def test_batches_of_changing_lengths(tmp_path: Path) -> None:
    """`padding=` of the options: shards of different lengths, the losses of one process."""
    expected = ragged(None, str(tmp_path))
    found = run_ranks(2, ragged, {"dp": 2}, str(tmp_path), timeout=200)[0]
    worst = differences(found, expected)
    assert worst["loss"] < EXACT and worst["grad_norm"] < EXACT and worst["eval_loss"] < EXACT


def in_few_bits(sizes: dict[str, int], folder: str, scaling: str) -> list[dict[str, float]]:
    policy = autopar.Precision("float64", "float64", "float64", product="float8" if scaling else "")
    options = {"precision": dataclasses.replace(policy, scaling=scaling) if scaling else policy}
    how: dict[str, Any] = {"max_steps": 3, "eval_strategy": "no", "save_strategy": "no"}
    return trained(sizes, folder, one_layer, options=options, **how)


@pytest.mark.parametrize("scaling", ["tensor", "delayed"])
def test_products_in_few_bits(scaling: str, tmp_path: Path) -> None:
    """`precision=` of the options: the losses of one process with the same products."""
    expected = run_ranks(1, in_few_bits, {"dp": 1}, str(tmp_path), scaling, timeout=200)[0]
    found = run_ranks(2, in_few_bits, {"dp": 2}, str(tmp_path), scaling, timeout=200)[0]
    worst = differences(found, expected)
    assert worst["loss"] < EXACT and worst["grad_norm"] < EXACT
    wide = run_ranks(1, in_few_bits, {"dp": 1}, str(tmp_path), "", timeout=200)[0]
    assert differences(wide, expected)["loss"] > 1e-6


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"fp16": True}, "fp16 has no meaning on a mesh.*bf16=True"),
    ({"bf16_full_eval": True}, "bf16_full_eval has no meaning"),
    ({"torch_compile": True}, "torch_compile.*inductor"),
    ({"auto_find_batch_size": True}, "auto_find_batch_size.*plan"),
    ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha.*before creating the trainer"),
    ({"optim": "lomo"}, "optim='lomo' steps during the backward"),
    ({"average_tokens_across_devices": False}, "average_tokens_across_devices=False; remove it"),
    ({"train_sampling_strategy": "batch_rebalance"}, "batch_rebalance.*group_by_length"),
    ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches=True"),
]


class Weighted(transformers.Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        return (3 * outputs.loss, outputs) if return_outputs else 3 * outputs.loss


class Clips(transformers.Trainer):
    def _clip_grad_norm(self, model: Any) -> Any:
        return super()._clip_grad_norm(model)


class FrontOfClips(integrations.MeshTrainerMixin, Clips):
    pass


def losses_refused(folder: str) -> list[str]:
    """What would train another loss than the one that is written there."""
    with as_started():
        how = {"args": arguments(folder, 1, eval_strategy="no"), "mesh": autopar.init_mesh("cpu", dp=1)}
        how |= {"train_dataset": rows(8, 1)}
        found = [refusal(FrontOfClips, model=llama(), **how)]
        later = integrations.Trainer(model=llama(), **how)
        later.compute_loss_func = smoothed
        found.append(refusal(later.train))
        later = integrations.Trainer(model=llama(), **how)
        later.label_smoother = transformers.trainer_pt_utils.LabelSmoother(0.1)
        found.append(refusal(later.train))
        later = integrations.Trainer(model=llama(), compute_loss_func=smoothed, **how)
        later.compute_loss = types.MethodType(Weighted.compute_loss, later)
        found.append(refusal(later.train))
    return found


def test_losses_that_would_not_be_called_are_refused(tmp_path: Path) -> None:
    words = ["Clips._clip_grad_norm would be hidden by MeshTrainerMixin._clip_grad_norm"]
    words += [f"{name} is traced with the model when" for name in ("compute_loss_func", "label_smoother")]
    words += ["needs one loss, found compute_loss_func, which is traced with the model, and a compute_loss"]
    for text, pattern in zip(run_ranks(1, losses_refused, str(tmp_path))[0], words, strict=True):
        assert pattern in text


def on_the_trainer(sizes: dict[str, int] | None, folder: str) -> list[dict[str, float]]:
    """``trainer.compute_loss = fn``, once it is made."""
    base: Any = transformers.Trainer if sizes is None else integrations.Trainer

    class Patched(base):
        loss_is_scaled_for_ga = False

        def train(self, *args: Any, **kwargs: Any) -> Any:
            self.compute_loss = types.MethodType(Weighted.compute_loss, self)
            return super().train(*args, **kwargs)

    return trained(sizes, folder, one_layer, cls=Patched, max_steps=2, save_strategy="no")


def test_a_loss_that_is_set_on_the_trainer(tmp_path: Path) -> None:
    expected = on_the_trainer(None, str(tmp_path))
    found = run_ranks(1, on_the_trainer, {"dp": 1}, str(tmp_path), timeout=200)[0]
    assert max(differences(found, expected).values()) < EXACT


def refusals(folder: str) -> list[str]:
    found = []
    with as_started():
        mesh = autopar.init_mesh("cpu", dp=2)
        for changes, _ in REFUSED:
            args = arguments(folder, 2, **changes)
            found.append(refusal(integrations.Trainer, model=llama(), args=args, mesh=mesh, eval_dataset=rows(2, 2)))
        how = {"args": arguments(folder, 2, eval_strategy="no"), "mesh": mesh}
        found.append(refusal(integrations.Trainer, model_init=llama, **how))
        found.append(refusal(integrations.Trainer, model=autopar.parallelize(llama(), mesh), **how))
        trainer = integrations.Trainer(model=llama(), train_dataset=rows(4, 1), **how)
        found.append(refusal(trainer.train, resume_from_checkpoint=f"{folder}/checkpoint-2"))
    return found


def test_what_has_no_meaning_is_refused(one_process: tuple[Path, Any], tmp_path: Path) -> None:
    words = [pattern for _, pattern in REFUSED]
    words += ["pass model=", "needs a model before parallelize", "optimizer.pt of one process.*from_pretrained"]
    found = run_ranks(2, refusals, str(one_process[0]))[0]
    for text, pattern in zip(found, words, strict=True):
        assert re.search(pattern, text)
    assert "pass mesh=" in refusal(integrations.Trainer, model=llama())
