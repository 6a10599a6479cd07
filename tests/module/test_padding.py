"""Padded batches: loss and gradients are those of the batches without padding, few steps are compiled, and what
padding would change is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.lift_to_float64 import LiftFloat32
from autopar.runtime.inputs.padding import IGNORED, PaddingBuckets, asked_padding
from tests.support.ranks import run_ranks
from tests.support.subjects import tiny

LIMIT = 1e-10
Batch = dict[str, Tensor]


def batch_of(name: str, rows: int, tokens: int, seed: int) -> Batch:
    """Random tokens, of which some have no label."""
    torch.manual_seed(seed)
    ids = torch.randint(3, 30, (rows, tokens))
    labels = torch.randint(3, 30, (rows, tokens)).masked_fill(torch.rand(rows, tokens) < 0.2, IGNORED)
    labels[:, -1] = 5
    if "t5" in name:
        masks = {"attention_mask": torch.ones_like(ids)} if name == "masked t5" else {}
        return {"input_ids": ids, "labels": labels[:, : max(2, tokens // 2)].contiguous(), **masks}
    return {"input_ids": ids, "labels": labels if name == "bert" else ids.where(labels != IGNORED, labels)}


def expected(model: nn.Module, batches: list[Batch]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of all ranks' batches, each without padding."""
    model.zero_grad()
    counts = [count(model, b["labels"]) for b in batches]
    total = 0.0
    with LiftFloat32():
        for batch, labels in zip(batches, counts, strict=True):
            loss = model(**batch).loss * labels / sum(counts)
            loss.backward()
            total += float(loss)
    return total, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def count(model: nn.Module, labels: Tensor) -> int:
    causal = "CausalLM" in type(model).__name__ or "LMHead" in type(model).__name__
    return int(((labels[:, 1:] if causal else labels) != IGNORED).sum())


def _steps(
    name: str, sizes: dict[str, int], options: dict[str, Any], steps: list[list[tuple[int, int]]], shapes: Any
) -> int:
    """Steps, each with (rows, tokens) of every data rank; how many training steps were compiled."""
    model, _ = tiny(name.removeprefix("masked "), layers=1)
    mesh = autopar.init_mesh("cpu", 60.0, **sizes)
    at, parts = autopar.dp_rank_and_size(mesh)
    parallel = autopar.parallelize(model, mesh, lift_to_float64=True, padding=shapes, **options)
    for seed, step in enumerate(steps):
        batches = [batch_of(name, *shape, 100 * seed + i) for i, shape in enumerate(step)]
        assert len(batches) == parts
        loss = float(parallel.train_step(**batches[at]))
        total, gradients = expected(model, batches)
        assert abs(loss - total) < LIMIT, (step, loss, total)
        found = parallel.full_gradients()
        for key, x in found.items():
            error = (x - gradients[key]).abs().max() / gradients[key].abs().max().clamp(min=1e-3)
            assert error < LIMIT, (step, key, error)
        parallel.zero_grad()
    return sum(runner.compiled.train for runner in parallel._cache.runners)


RAGGED = [[(2, 40), (2, 61)], [(2, 100), (2, 7)], [(2, 64), (2, 64)], [(1, 30), (2, 33)], [(2, 90), (1, 128)]]
LESS = [[(2, 9), (2, 14)], [(2, 25), (2, 7)], [(1, 13), (2, 16)], [(2, 22), (1, 32)]]
WHOLE = [[(2, 37)], [(2, 61)], [(2, 100)], [(1, 12)]]
SHORT = [[(2, 10), (2, 13)], [(2, 17), (2, 4)], [(1, 7), (2, 16)]]
SMALL = PaddingBuckets(lengths=(16, 32))
UNCHECKED = PaddingBuckets(lengths=(16, 32), check=False)
ALONE = [step[:1] for step in SHORT]


@pytest.mark.parametrize(
    ("name", "sizes", "options", "steps", "shapes"),
    [
        ("llama", {"dp": 2}, {"zero": 3}, LESS, UNCHECKED),
        ("bert", {"dp": 2}, {}, SHORT[:1], SMALL),  # finds that it needs masks
        ("masked t5", {"tp": 2}, {}, ALONE[:1], UNCHECKED),
        ("llama", {"tp": 2}, {"sequence_parallel": True}, ALONE[:1], UNCHECKED),
        ("gpt2", {"pp": 2}, {"schedule": "1f1b"}, ALONE[:1], UNCHECKED),
        *(pytest.param(*case, marks=pytest.mark.full) for case in [
            ("llama", {"dp": 2}, {"zero": 3}, RAGGED, "bucket"),
            ("bert", {"dp": 2}, {}, SHORT, SMALL),
            ("t5", {"tp": 2}, {}, ALONE, SMALL),
            ("llama", {"tp": 2}, {"sequence_parallel": True}, WHOLE, "bucket"),
            ("gpt2", {"pp": 2}, {"schedule": "1f1b"}, ALONE, SMALL),
            ("llama", {"cp": 2}, {}, WHOLE, "bucket"),
            ("gpt2", {"dp": 2}, {"microbatches": 2}, SHORT[:2], SMALL),
        ]),
    ],
    ids=lambda x: str(x) if not isinstance(x, list) else "",
)  # fmt: skip
def test_padded_steps_equal_the_unpadded(name: str, sizes: Any, options: Any, steps: Any, shapes: Any) -> None:
    """Ranks get different lengths and numbers of rows; all go to the bucket of the longest."""
    compiled = min(len(steps), 2)
    assert run_ranks(2, _steps, name, sizes, options, steps, shapes, timeout=200.0) == [compiled] * 2


def _many(steps: int, longest: int) -> tuple[int, int]:
    """Steps of random lengths, and evaluations of a few: each as without padding. What was compiled, and lengths."""
    model, _ = tiny("llama", layers=1)
    parallel = autopar.parallelize(model, autopar.init_mesh("cpu", 60.0, dp=1), lift_to_float64=True, padding="bucket")
    torch.manual_seed(0)
    lengths = torch.randint(2, longest, (steps,)).tolist()
    for step, tokens in enumerate(lengths):
        batch = batch_of("llama", 2, tokens, step)
        loss, gradients = expected(model, [batch])
        assert abs(float(parallel.train_step(**batch)) - loss) < LIMIT
        found = parallel.full_gradients()
        assert found.keys() == gradients.keys()
        assert max(float((found[name] - x).abs().max()) for name, x in gradients.items()) < LIMIT, (step, tokens)
        parallel.zero_grad()
    return sum(r.compiled.train for r in parallel._cache.runners), len(set(lengths))


@pytest.mark.parametrize(("steps", "longest"), [(8, 120), pytest.param(200, 250, marks=pytest.mark.full)])
def test_random_lengths_compile_a_few_steps(steps: int, longest: int) -> None:
    ((compiled, lengths),) = run_ranks(1, _many, steps, longest, timeout=250.0)
    assert lengths > 0.5 * steps and compiled == (3 if longest > 128 else 2)  # 64, 128, 256


def _evaluated() -> int:
    model, _ = tiny("llama", layers=1)
    parallel = autopar.parallelize(model, autopar.init_mesh("cpu", 60.0, dp=1), lift_to_float64=True, padding="bucket")
    with torch.no_grad():
        for step, tokens in enumerate((41, 64, 100, 7, 2)):
            batch = batch_of("llama", 2, tokens, step)
            found = parallel.eval_step(**batch)
            with LiftFloat32():
                plain = model.eval()(**batch)
            assert abs(float(found.loss) - float(plain.loss)) < LIMIT
            logits = found.logits.full_tensor()
            assert logits.shape == plain.logits.shape and (logits - plain.logits).abs().max() < LIMIT
    return len(parallel._cache.runners)


def test_outputs_have_no_padding() -> None:
    assert run_ranks(1, _evaluated, timeout=200.0)[0] <= 4  # 64, 128; two for the comparison


def _own_loss() -> None:
    model, _ = tiny("llama", layers=1)
    parallel = autopar.parallelize(model, autopar.init_mesh("cpu", 60.0, dp=1), lift_to_float64=True, padding="bucket")
    for step, tokens in enumerate((40, 64)):
        batch = batch_of("llama", 2, tokens, step)
        model.zero_grad()
        with LiftFloat32():
            model(**batch).logits.pow(2).mean().backward()
        logits = parallel(**batch).logits
        assert logits.shape[1] == tokens
        logits.pow(2).mean().backward()
        for name, x in parallel.full_gradients().items():
            whole = dict(model.named_parameters())[name].grad
            assert whole is not None and (x - whole).abs().max() < LIMIT, (tokens, name)
        parallel.zero_grad()


def test_outputs_without_padding_carry_gradients() -> None:
    run_ranks(1, _own_loss, timeout=200.0)


class Pooled(nn.Module):
    """A mean over all tokens: padding counts."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(30, 8), nn.Linear(8, 4)
        self.norm: nn.Module = nn.BatchNorm1d(8) if norm else nn.Identity()

    def forward(self, input_ids: Tensor, target: Tensor, extra: Tensor | None = None) -> Tensor:
        hidden = self.table(input_ids) if extra is None else self.table(input_ids) + extra.unsqueeze(-1)
        return nn.functional.cross_entropy(self.out(self.norm(hidden.mean(1))), target)


def _refused(norm: bool, extra: bool, shapes: Any) -> str:
    torch.manual_seed(0)
    batch = {"input_ids": torch.randint(0, 30, (4, 20)), "target": torch.tensor([0, 1, 2, 3])}
    if extra:
        batch["extra"] = torch.rand(4, 20)
    mesh = autopar.init_mesh("cpu", 60.0, dp=dist.get_world_size())
    parallel = autopar.parallelize(Pooled(norm), mesh, example_batch=batch, padding=shapes)
    try:
        parallel.train_step(**batch)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("norm", "extra", "shapes", "said"),
    [
        (False, False, "bucket", "padding: changes the loss of Pooled"),
        (True, False, "bucket", "a BatchNorm1d averages over all rows and tokens"),
        (False, True, "bucket", "needs a fill value for input extra of shape [4, 20]"),
        (False, False, PaddingBuckets(lengths=(16,)), "20 tokens are more than the longest of lengths=(16,)"),
        (False, False, PaddingBuckets(lengths=(20, 32)), ""),
    ],
)
def test_what_padding_would_change_is_refused_on_all_ranks(norm: bool, extra: bool, shapes: Any, said: str) -> None:
    for found in run_ranks(2, _refused, norm, extra, shapes, timeout=120.0):
        assert (said in found) if said else not found, found


@pytest.mark.parametrize(
    ("asked", "said"),
    [("buckets", 'expected "exact", "bucket", "auto" or autopar.PaddingBuckets'), (3, "expected"), (None, "expected")],
)
def test_unknown_shapes_are_refused(asked: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        asked_padding(asked)
    with pytest.raises(ValueError, match="ascending positive integers"):
        PaddingBuckets(lengths=(64, 32))


def test_lengths() -> None:
    buckets = PaddingBuckets()
    assert [buckets.length(n) for n in (1, 64, 65, 128, 1000)] == [64, 64, 128, 128, 1024]
    assert buckets.length(1000, limit=1000) == 1000 and buckets.length(1100, limit=1000) == 2048
    assert buckets.length(65, unit=12) == 132 and buckets.length(5, unit=1, limit=32) == 32
    assert PaddingBuckets(lengths=(100, 200)).length(101) == 200
