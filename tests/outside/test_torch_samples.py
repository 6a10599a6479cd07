"""torch's samples of operators and modules are exact, or refused in a sentence."""

from __future__ import annotations

import pytest

from tests.outside.torch_samples import EXACT, KNOWN, modules, operators, outcomes

SOME = {"addbmm", "cumsum", "kthvalue", "nn.functional.prelu", "isposinf", "nn.functional.linear_cross_entropy"}


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("samples", [operators, modules])
def test_all(samples: type) -> None:
    wrong = [
        f"{sample.name}: {said}" for sample in samples() if sample.name not in KNOWN
        for said in outcomes(sample) if said.startswith("wrong")
    ]  # fmt: skip
    assert not wrong, "\n".join(wrong)


def test_some() -> None:
    said = [said for sample in operators(SOME) for said in outcomes(sample)]
    assert said.count(EXACT) >= 14 and not [x for x in said if x.startswith("wrong")], said
