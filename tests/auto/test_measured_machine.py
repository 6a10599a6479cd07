"""`autopar calibrate` on real CPU ranks, and what a stack is made of."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from autopar.auto.machine import CPU, Machine
from autopar.auto.measured_machine import SMALL, Measured, levels, stack_of
from autopar.cli.calibration_ranks import SmallSteps, calibrated
from autopar.cost.cluster import Cluster
from autopar.cost.efficiency import stack_from, stack_named
from tests.auto.test_choice import LLAMA
from tests.support.ranks import run_ranks

STEPS = SmallSteps(LLAMA, ((1, 16), (2, 16), (1, 32)))
FOUND = Measured(
    SMALL, products=50e9, attention={"flash2": (1e-3, 3e-3)}, memory=5e9, launch=2e-6, copies=4e9, optimizer=6e-9,
    links={"inside": (1e9, 40e-6)},
)  # fmt: skip
HERE = Machine(CPU, 16 << 30, 4)


def on_rank() -> tuple[str, list[str]]:
    return calibrated("autopar-eager", SMALL, STEPS)


def test_ranks_measure_a_stack_that_plans_take() -> None:
    texts = run_ranks(2, on_rank, timeout=240)
    assert texts[0][0] == texts[1][0], "all ranks agree"
    ((chip, row),) = json.loads(texts[0][0]).items()
    stack = stack_from("measured", chip, row)
    assert chip == CPU and stack.source.startswith("measured: 2 ranks") and stack.reserved == 0
    assert {"network", "float8"} <= set(stack.guesses) and not {"products", "inside"} & set(stack.guesses)
    assert all(0 < value < math.inf for value in (stack.products, stack.memory, stack.launch, stack.start))
    words = (
        "measured on 2 ranks",
        "products ",
        "attention ",
        "inside: ",
        "three small steps: off by",
        "nobody measured",
    )
    assert [any(line.startswith(word) for line in texts[0][1]) for word in words] == [True] * len(words)


def test_shares_are_of_the_peaks_of_the_chip() -> None:
    chip, stack = Cluster.parse(CPU).chip, stack_of(FOUND, HERE, stack_named("autopar-eager", CPU))
    assert stack.products == pytest.approx(50e9 / chip.flops)
    assert stack.memory == pytest.approx(5e9 / chip.memory)
    assert stack.inside == pytest.approx(1e9 / chip.inside) and stack.start == 40e-6
    flops = 4 * SMALL.heads * SMALL.seq**2 * 64 / 2  # of the pairs that are allowed
    assert stack.attention["flash2"] == pytest.approx(flops / 1e-3 / chip.flops)
    assert stack.attention_backward["flash2"] == pytest.approx(2.5 * flops / 3e-3 / chip.flops)
    assert stack.optimizer == pytest.approx(6e-9 * 5e9), "bytes, at the speed of the memory"
    assert stack.host == pytest.approx(4e9 / chip.host)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_measurements_that_cannot_be_are_refused(value: float) -> None:
    for changes in ({"products": value}, {"launch": value}, {"links": {"inside": (value, 1e-5)}}):
        with pytest.raises(ValueError, match=r"calibrate: .* needs a number above 0, found .*; measure on an idle"):
            stack_of(replace(FOUND, **changes), HERE, stack_named("autopar-eager", CPU))  # type: ignore[arg-type]


def test_levels_are_nodes_and_their_ranks() -> None:
    assert levels(Machine("H100", 80 << 30, 8), 32) == {"dp_replicate": 4, "dp": 8}
    assert levels(Machine("H100", 80 << 30, 8), 4) == {"dp_replicate": 1, "dp": 4}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"products": -0.5}, "products needs a share above 0, found -0.5"),
        ({"memory": "fast"}, "expected a number at memory, found 'fast'"),
        ({"launch": -1e-6}, "launch needs a number of at least 0, found -1e-06"),
        ({"attention": {"flash2": 0}}, "attention of flash2 needs a share above 0, found 0"),
        ({"hidden": {"dp": 2}}, "hidden dp needs a share up to 1, found 2"),
        ({"speed": 1}, "has unknown values speed"),
        ({"products": None}, "lacks products; measure it with autopar calibrate"),
    ],
    ids=str,
)  # fmt: skip
def test_a_torn_stack_is_refused(row: dict[str, object], said: str) -> None:
    whole = {"products": 0.5, "memory": 0.5, "inside": 0.5, "network": 0.5, "attention": {"flash2": 0.4},
             "attention_backward": {"flash2": 0.4}}  # fmt: skip
    values = {name: value for name, value in (whole | row).items() if value is not None}
    with pytest.raises(ValueError, match=said):
        stack_from("machine.json", "H100", values)
