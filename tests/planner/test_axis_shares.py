"""What an axis cuts, and what it leaves whole, in exact shares."""

from __future__ import annotations

import dataclasses
import re
import warnings
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.compile.model import compile_model, plan_model
from autopar.cost.axis_shares import repeated
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.plan import AxisShare, Plan, WholePart
from autopar.verification import Compared, Report
from tests.support.cases import Cell, compiled
from tests.support.ranks import run_ranks

ROWS, WIDTH = 4, 8


class OneOddPair(nn.Module):
    """Two pairs of products, of which the middle of one has six entries and that of the other three."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 6, bias=False), nn.Linear(6, WIDTH, bias=False)
        self.odd, self.back = nn.Linear(WIDTH, 3, bias=False), nn.Linear(3, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.odd(self.down(self.up(x).relu())).relu()).sum()


BATCH = {"x": torch.zeros(ROWS, WIDTH)}
WEIGHTS = 2 * WIDTH * 6 + 2 * WIDTH * 3
ODD = WIDTH * 3  # that is whole; the one behind it is a column, whose results end in the sum
ODD_FLOPS, RELU = 2 * ROWS * ODD, ROWS * 3  # two per entry and row
FLOPS = 2 * ROWS * WEIGHTS + ROWS * (6 + 3 + WIDTH)  # with both relus and the sum


def planned(mesh: Mesh, **options: object) -> Plan:
    return compile_model(OneOddPair(), BATCH, mesh, Options(**options)).plan  # type: ignore[arg-type]


def share(plan: Plan, axis: str) -> AxisShare:
    (found,) = (s for s in plan.shares if s.axis == axis)
    return found


def rows(plan: Plan, axis: str, kind: str) -> list[tuple[float, str]]:
    return [(part.share, part.subject) for part in share(plan, axis).whole if part.kind == kind]


def test_what_tp_cannot_cut_has_its_share_and_its_reason() -> None:
    plan = planned(Mesh.of(dp=2, tp=2), zero=3)
    tp = share(plan, "tp")
    assert tp.parameters == pytest.approx(float(Fraction(WEIGHTS - ODD, WEIGHTS)), abs=1e-12)
    assert tp.flops == pytest.approx(float(Fraction(FLOPS - ODD_FLOPS - RELU, FLOPS)), abs=1e-12)
    assert rows(plan, "tp", "parameters") == [(pytest.approx(ODD / WEIGHTS), "odd.weight")]
    assert "excluded by a cheaper sharding of its neighbours" in tp.whole[0].reason
    assert rows(plan, "tp", "FLOPs") == [
        (pytest.approx(ODD_FLOPS / FLOPS), "odd: aten.linear"),
        (pytest.approx(RELU / FLOPS), "the model: aten.relu"),
    ]
    assert tp.whole[1].reason == "odd.weight is replicated"


def test_dp_cuts_the_batch_and_parameters_with_zero_alone() -> None:
    whole, cut = (share(planned(Mesh.of(dp=2), zero=zero), "dp") for zero in (0, 3))
    assert (whole.parameters, whole.flops, cut.parameters, cut.flops) == (0.0, 1.0, 1.0, 1.0)
    assert [part.reason for part in whole.whole] == ["replicated; gradients are summed"] and not cut.whole


def test_microbatches_and_sequence_parallelism_change_the_shares_of_no_one_else() -> None:
    assert share(planned(Mesh.of(dp=2, tp=2), microbatches=2), "tp").flops == pytest.approx(
        1 - (ODD_FLOPS + RELU) / FLOPS
    )


def test_before_a_batch_is_compiled_parameters_alone_are_counted() -> None:
    plan, _ = plan_model(OneOddPair(), BATCH, Mesh.of(tp=2), Options())
    (tp,) = plan.shares
    assert tp.flops is None and tp.parameters == pytest.approx(5 / 6)
    assert plan.override({"odd.weight": {"tp": "I"}}).shares == ()


def test_a_weight_of_two_parts_is_not_cut_over_pp() -> None:
    plan = compiled(Cell("llama_tied", Mesh.of(pp=2), Options(microbatches=2))).plan
    (pp,) = plan.shares
    (tied,) = pp.whole
    assert tied.subject == "model.embed_tokens.weight" and tied.reason == "used by stages 0, 1"
    assert pp.parameters == pytest.approx(1 - tied.share) and pp.flops is None


def test_over_token_slices_as_without_them() -> None:
    sliced = Cell("one-layer llama", Mesh.of(pp=2, tp=2), Options(microbatches=2, schedule="tera_pipe", token_slices=2))
    plain = Cell("one-layer llama", Mesh.of(tp=2))
    found, expected = (share(compiled(cell).plan, "tp").flops for cell in (sliced, plain))
    assert expected is not None and found == pytest.approx(expected, abs=0.01) and 0.9 < expected < 1


def test_cp_cuts_what_has_tokens() -> None:
    cp = share(compiled(Cell("one-layer llama", Mesh.of(cp=2))).plan, "cp")
    assert cp.flops == pytest.approx(1.0, abs=0.001) and cp.parameters == 0.0


def test_a_plan_says_it_in_text_and_json_and_so_does_verify() -> None:
    plan = planned(Mesh.of(tp=2))
    first = "tp shards 83.3% of parameters and 83.3% of FLOPs; replicated:\n    16.7% of parameters: odd.weight:"
    assert first in str(plan)
    assert Plan.from_json(plan.to_json()) == plan
    one = Compared("loss", 0.0, 1.0, 1.0)
    text = str(Report("tp=2", True, 1.0, 1.0, one, (), shares=plan.shares))
    assert "tp shards 83.3% of parameters" in text and "  16.7% of parameters: odd.weight:" in text


def test_plans_saved_before_they_said_it_can_be_read() -> None:
    plan = planned(Mesh.of(tp=2))
    old = plan.to_json().replace('"shares"', '"was"')
    with pytest.raises(ValueError, match="unknown name 'was'"):
        Plan.from_json(old)
    without = dataclasses.replace(plan, shares=())
    assert Plan.from_json(without.to_json().replace(',\n "shares": []', "")) == without


def test_a_part_is_a_line() -> None:
    assert str(WholePart("FLOPs", "a.b: aten.mm", 0.125, "why")) == "12.5% of FLOPs: a.b: aten.mm: why"


class Vocabulary(nn.Module):
    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16, bias=False), nn.Linear(16, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, tokens, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(self.up(x).relu())).logsumexp(-1).sum()


def test_much_that_a_size_keeps_whole_is_told_with_the_way_out() -> None:
    (said,) = repeated(compile_model(Vocabulary(33), BATCH, Mesh.of(tp=2)).plan)
    assert re.match(r"plan: all 2 ranks of tp repeat \d\d% of the forward's FLOPs: head: aten.linear: ", said)
    assert "pad 33 to 34 (a vocabulary with model.resize_token_embeddings), or choose a size of tp that divides" in said
    assert repeated(compile_model(Vocabulary(34), BATCH, Mesh.of(tp=2)).plan) == []
    assert repeated(compile_model(Vocabulary(33), BATCH, Mesh.of(dp=2)).plan) == []


def test_a_training_step_warns_of_it() -> None:
    (told,) = run_ranks(2, warnings_of_a_step)[:1]
    assert [text.partition(":")[0] for text in told] == ["plan"]


def warnings_of_a_step() -> list[str]:
    mesh = autopar.init_mesh(tp=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        autopar.parallelize(Vocabulary(33), mesh, example_batch=BATCH).train_step(**BATCH)
    return [str(warning.message) for warning in caught]
