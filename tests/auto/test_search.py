"""The search: the same choice as pricing everything, and what it says to questions without an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from autopar.auto.search import BAND, brute_force, search
from autopar.auto.space import Question, Space
from tests.auto.stand_in import StandIn

QUESTIONS = [
    *({"ranks": n, "batch": 48, "seq": 4096, "layers": 8} for n in (1, 4, 6, 8, 16)),
    {"ranks": 7, "batch": 7, "seq": 4096, "layers": 8},
    {"ranks": 8, "batch": 1, "seq": 16384, "layers": 8},
    {"ranks": 32, "batch": 64, "seq": 4096, "layers": 8, "per_node": 4},
    {"ranks": 16, "batch": 64, "seq": 4096, "layers": 8, "fixed": {"zero": 1, "pp": 2}},
    {"ranks": 16, "batch": 64, "seq": 8192, "layers": 8, "fixed": {"cp": 2, "sequence_parallel": True}},
]  # fmt: skip
CHIPS = [{}, {"limit": 20e9}, {"limit": 6e9}, {"width": 12288, "limit": 40e9}, {"inside": 5e9, "cards": 1e9}]


@pytest.mark.parametrize("chip", CHIPS, ids=str)
@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: "-".join(str(v) for v in q.values()))
def test_the_choice_is_that_of_pricing_everything(question: Mapping[str, Any], chip: Mapping[str, Any]) -> None:
    asked = Question(**question)
    prices = StandIn(seq=asked.seq, per_node=asked.per_node, **chip)
    found, every = search(Space(asked), prices), list(Space(asked).layouts())
    wanted = brute_force(every, StandIn(seq=asked.seq, per_node=asked.per_node, **chip))
    assert (found.choice and found.choice.layout) == (wanted and wanted.layout)
    assert found.counts["all"] == len(every) == sum(found.counts[k] for k in ("weights", "slower", "refused", "priced"))
    assert len(set(every)) == len(every)


def test_a_schedule_that_spreads_layers_better_is_found() -> None:
    """14 layers and a head of three on 4 ranks: stages take 3, 4, 4 and 6; the two parts of each rank of a V 5, 4, 4
    and 4."""
    asked = Question(ranks=8, batch=64, seq=4096, layers=14, fixed={"pp": 4})
    prices = StandIn(layers=14, head=3.0)
    found, wanted = search(Space(asked), prices), brute_force(Space(asked).layouts(), prices)
    assert found.choice is not None and wanted is not None
    assert found.choice.layout == wanted.layout and wanted.layout.schedule == "zb_v"


def test_pruning_prices_few_of_many() -> None:
    prices = StandIn(layers=96, width=12288)
    found = search(Space(Question(ranks=4096, batch=4096, seq=4096, layers=96)), prices)
    assert found.choice is not None
    assert found.counts["all"] > 20_000 and len(prices.asked) < found.counts["all"] / 10


@pytest.mark.parametrize("better", [{"inside": 600e9}, {"cards": 50e9}, {"limit": 160e9}, {"flops": 800e12}], ids=str)
@pytest.mark.parametrize("question", QUESTIONS[::3], ids=lambda q: "-".join(str(v) for v in q.values()))
def test_better_hardware_is_never_slower(question: Mapping[str, Any], better: Mapping[str, float]) -> None:
    asked = Question(**question)
    before = StandIn(seq=asked.seq, width=8192)
    old, new = (search(Space(asked), prices) for prices in (before, replace(before, asked=set(), **better)))
    if old.choice is not None:
        assert new.choice is not None
        assert new.least <= old.least * (1 + 1e-9)
        assert new.choice.seconds <= old.least * (1 + BAND) * (1 + 1e-9)


def test_the_simplest_within_the_band_is_chosen() -> None:
    found = search(Space(Question(ranks=8, batch=64, seq=4096, layers=8)), StandIn())
    assert found.choice is not None
    assert all(found.choice.simplicity <= other.simplicity for other in found.close)
    assert all(other.seconds <= found.least * (1 + BAND) for other in found.close)


def test_nothing_fits_names_the_nearest() -> None:
    found = search(Space(Question(ranks=2, batch=4, seq=4096, layers=8)), StandIn(width=16384, limit=40e9))
    assert found.choice is None and not found.close


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ({"ranks": 4096, "batch": 3, "layers": 8}, "4096 GPUs need a batch of at least 64 rows"),
        ({"ranks": 11, "batch": 3, "layers": 8}, "11 GPUs need a batch of at least 11 rows"),
        ({"ranks": 22, "batch": 12, "layers": 8},
         "no layout of 22 GPUs divides a batch of 12; the next that one divides is 22"),
        ({"ranks": 8, "batch": 8, "fixed": {"tp": 3}}, "tp=3 needs a number of GPUs that 3 divides, found 8"),
        ({"ranks": 8, "batch": 8, "fixed": {"tp": 8, "zero": 3}}, "has tp=8 together with zero=3; leave tp open"),
        ({"ranks": 8, "batch": 8, "fixed": {"pp": 1, "schedule": "1f1b"}}, "has pp=1 together with schedule=1f1b"),
        ({"ranks": 8, "batch": 8, "fixed": {"dp": 8, "tp": 2}},
         "dp=8,tp=2 needs a number of GPUs that 16 divides, found 8"),
        ({"ranks": 8, "batch": 8, "fixed": {"microbatches": 3}}, "microbatches=3"),
        ({"ranks": 8, "batch": 8, "fixed": {"pp": 8}}, "pp=8 needs as many layers, found 4; use at most pp=4"),
        ({"ranks": 8, "batch": 8, "fixed": {"schedule": "seq1f1b"}},
         "schedule 'seq1f1b' has no closed price; use one of"),
        ({"ranks": 8, "batch": 8, "fixed": {"activation_checkpoint": "offload"}},
         "'offload' has no price; use one of none"),
        ({"ranks": 8, "batch": 8, "fixed": {"token_slices": 4}},
         "token_slices is not searched, found 4; name the mesh"),
        ({"ranks": 8, "batch": 8, "layers": 0}, "a model with repeated layers"),
        ({"ranks": 0, "batch": 8}, "ranks needs a number above 0, found 0"),
    ],
)  # fmt: skip
def test_a_question_without_an_answer_is_refused_in_a_sentence(question: Mapping[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as error:
        Question(**({"seq": 512, "layers": 4} | dict(question)))
    assert said in str(error.value) and str(error.value).startswith("auto: ")
