"""Losses at the edge: probabilities of 0 and 1, infinite logits, labels that are none, batches in which none counts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import autopar
from autopar.ops.value_checks import ValueNote, note, take_notes
from autopar.runtime.exec.value_checks import ValueChecks
from tests.canonicalize.test_normalize import normalized
from tests.support.plain_models import Tied, build, part, put, tokens
from tests.support.ranks import run_ranks

INF = math.inf


def row(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


CERTAIN = row(0, 1, 0, 1, 0.5, 1e-13, 1 - 1e-13, 1e-50, 0.3), row(0, 1, 1, 0, 0.5, 0, 1, 1, 0)
EXTREME = row(-INF, INF, -1000, 1000, 0, 0, 40, -40, 0.3), row(0, 1, 1, 0, 0.5, 0, 1, 1, 0)
FAR = row(0, 1, -1, INF, -INF, 0.5, -0.5, 2, 1e200), torch.zeros(9).double()
LOGITS = row(1e4, -1e4, -INF, 0, 0, 3, 1, 0, 0).reshape(3, 3), torch.tensor([0, 1, -100])
FIVE = row(5)

SATURATED: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, Tensor]]] = {
    "bce": (lambda x, y: F.binary_cross_entropy(x, y, reduction="none"), CERTAIN),
    "bce mean": (lambda x, y: F.binary_cross_entropy(x, y), CERTAIN),
    "bce weights": (lambda x, y: F.binary_cross_entropy(x, y, weight=FIVE, reduction="sum"), CERTAIN),
    "bce with logits": (
        lambda x, y: F.binary_cross_entropy_with_logits(x, y, pos_weight=FIVE, reduction="none"),
        EXTREME,
    ),
    "mse": (lambda x, y: F.mse_loss(x, y, reduction="none"), FAR),
    "l1": (lambda x, y: F.l1_loss(x, y, reduction="none"), FAR),
    "smooth l1": (lambda x, y: F.smooth_l1_loss(x, y, beta=0.5, reduction="none"), FAR),
    "smooth l1 without a knee": (lambda x, y: F.smooth_l1_loss(x, y, beta=0.0, reduction="none"), FAR),
    "huber": (lambda x, y: F.huber_loss(x, y, delta=0.5, reduction="none"), FAR),
    "kl": (lambda x, y: F.kl_div(x, y, reduction="none"), (-EXTREME[0].abs(), EXTREME[1])),
    "cross entropy": (lambda x, y: F.cross_entropy(x, y, reduction="none"), LOGITS),
    "smoothing": (lambda x, y: F.cross_entropy(x, y, reduction="none", label_smoothing=0.1), LOGITS),
    "nll": (lambda x, y: F.nll_loss(x, y, reduction="none"), LOGITS),
}


@pytest.mark.parametrize("name", SATURATED)
def test_numbers_and_gradients_are_those_of_torch(name: str) -> None:
    function, (x, y) = SATURATED[name]
    normalized(function, {"y": y}, x=x)


def test_gradient_of_the_target() -> None:
    x, y = CERTAIN[0][4:7], CERTAIN[1][4:7]
    normalized(lambda x, y: F.binary_cross_entropy(x, y, reduction="none"), {}, x=x, y=y)


# --- ids and labels, sharded vocabulary --------------------------------------------------------------------------

# what, where, the range, in words
WRONG = {
    "an id below": ("tokens", -1, r'ids of "tokens" must lie in 0 \.\. 15, .* found -1'),
    "the first id above": ("tokens", 16, "found 16"),
    "a huge id": ("tokens", 2**62, f"found {2**62}"),
    "the first label above": ("labels", 16, r'labels of "labels" must lie in 0 \.\. 15, or be -100, found 16'),
    "a label below": ("labels", -1, "found -1"),
    "a label far below": ("labels", -(2**62), f"found -{2**62}"),
}


def wrong_ids(sizes: dict[str, int]) -> list[str]:
    """Every wrong batch is refused with the step, before any gradient is stored; the next one trains as if it had not
    been. Returns what was said of batches without labels."""
    model, batch = build(Tied), tokens()
    parallel = put(model, batch, sizes)
    expected = model(**batch)
    for step, (name, value, words) in enumerate(WRONG.values(), 1):
        bad = {k: v.clone() for k, v in batch.items()}
        bad[name][3, 2] = value
        with pytest.raises(ValueError, match=f"^step {step}: .*{words}"):
            parallel.train_step(**part(bad, sizes))
        assert all(p.grad is None for p in parallel.parameters())
    assert abs(float(parallel.train_step(**part(batch, sizes))) - float(expected)) < 1e-10
    nothing = batch | {"labels": torch.full_like(batch["labels"], -100)}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        losses = [float(parallel.train_step(**part(nothing, sizes))) for _ in range(2)]
    assert all(map(math.isnan, losses))  # as torch
    return [str(w.message) for w in said]


def test_ids_and_labels_out_of_range_are_refused_and_named() -> None:
    said, quiet = run_ranks(2, wrong_ids, {"tp": 2})
    assert len(said) == 1 and said[0].startswith("step 8: no label counts (all are -100") and not quiet


def test_an_empty_batch_is_said_once() -> None:
    said = run_ranks(1, empty_batch)[0]
    assert len(said) == 1 and said[0].startswith("step 1: the batch is empty (x [0, 12], target [0, 8])")


def empty_batch() -> list[str]:
    from tests.support.plain_models import Net, numbers

    batch = {k: v[:0] for k, v in numbers().items()}
    parallel = autopar.parallelize(build(Net), autopar.init_mesh("cpu", 30.0, dp=1), example_batch=batch)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert all(math.isnan(float(parallel.train_step(**batch))) for _ in range(2))
    return [str(w.message) for w in said if "step" in str(w.message)]


# --- on an accelerator ------------------------------------------------------------------------------------------------


class _Groups:
    is_first_of_stage = True


def test_notes_of_an_accelerator_are_told_when_they_have_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for them: a step that finds them still on their way leaves them to the next."""
    take_notes()
    there: list[bool] = []
    watch = ValueChecks(_Groups())  # type: ignore[arg-type]
    monkeypatch.setattr(ValueChecks, "_send", lambda self, notes, step: _later(self, notes, step, there))
    note(torch.tensor([3, 17]), 0, 15, "ids must lie in 0 .. 15, found {found}")
    watch.settle(4)
    note(torch.tensor([0]), 1, INF, "no label counts", fatal=False)
    watch.settle(5)
    there.append(True)
    with pytest.raises(ValueError, match=r"^step 4: ids must lie in 0 \.\. 15, found 17; correct the batch"):
        watch.look()
    with pytest.warns(UserWarning, match="^step 5: no label counts"):
        watch.look()
    note(torch.tensor([0]), 1, INF, "no label counts", fatal=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.settle(6)


def _later(watch: ValueChecks, notes: list[ValueNote], step: int, there: list[bool]) -> Any:
    from autopar.runtime.exec.value_checks import PendingRanges

    class Event:
        def query(self) -> bool:
            return bool(there)

    return PendingRanges(notes, torch.stack([n.extremes.double() for n in notes]), Event(), step)  # type: ignore[arg-type]
