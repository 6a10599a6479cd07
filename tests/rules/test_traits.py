"""What `autopar.ops.traits` says of operators holds when they run: on every sample of `tests/support/rule_samples.py`
and on further views, each on plain and on strided operands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.ops import traits
from autopar.ops.declare import alike, operator
from autopar.testing.soundness import Sample, SampleCall, call, whole_results
from tests.support.pointwise_samples import complex_, normal, real
from tests.support.rule_samples import SAMPLES

aten = torch.ops.aten

OTHERS = (
    call(aten.detach.default, normal(2, 3)),
    call(aten.alias.default, normal(2, 3)),
    call(aten.unsafe_split.Tensor, normal(6, 3), 2),
    call(aten.unsafe_split_with_sizes.default, normal(6, 3), [2, 4]),
    call(aten.unsafe_chunk.default, normal(6, 3), 2),
    call(aten.unbind.int, normal(2, 3)),
    call(aten.diagonal.default, normal(3, 3)),
    call(aten.unfold.default, normal(6), 0, 2, 2),
    call(aten.as_strided.default, normal(6), [2, 2], [3, 1]),
    call(aten.view_as_real.default, complex_(2, 3)),
    call(aten.contiguous.default, normal(2, 3)),
    call(aten.to.dtype, normal(2, 3), torch.float64),
    call(aten.add_.Tensor, normal(2, 3), 1.0),
    call(aten.bernoulli.default, real(4)),
    call(aten.rand_like.default, normal(4)),
)


def steps() -> Iterator[SampleCall]:
    """Single calls."""
    for sample in (*(s for samples in SAMPLES.values() for s in samples), *OTHERS):
        if len(sample.steps) == 1 and isinstance(sample.steps[0].target, traits.OpOverload):
            yield sample.steps[0]


def transposed(x: Tensor) -> Tensor:
    """The same values with other strides."""
    return x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() > 1 else x.clone()


def runs(step: SampleCall) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """(operands, results) of a call, on plain and on strided operands; without those that a view cannot be made of."""
    sample = Sample([step])
    for how in (torch.clone, transposed):
        operands = [how(x) for x in sample.tensors]
        try:
            yield operands, [r for r in whole_results(sample, operands) if isinstance(r, Tensor)]
        except RuntimeError:
            assert how is transposed, f"{step.target} refuses its own sample"


def shares(result: Tensor, operands: list[Tensor]) -> bool:
    return any(result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for x in operands)


def wrong_about_storage(step: SampleCall) -> str:
    """What the traits say of a call's storage and a run denies; "" where they are right."""
    for operands, results in runs(step):
        found = [shares(r, operands) for r in results if r.numel()]
        if any(found) and not (traits.aliases(step.target) or step.target is aten.einsum.default):
            return "shares storage, and is no alias"
        if traits.is_view(step.target) and not all(found):
            return "has storage of its own, and is a view"
    return ""


def test_traits_of_storage() -> None:
    wrong = {str(s.target): said for s in steps() if (said := wrong_about_storage(s))}
    assert not wrong


@pytest.mark.parametrize(
    "missing, said",
    [(aten._unsafe_view.default, "shares storage, and is no alias"), (aten.relu.default, "has storage of its own")],
)
def test_a_wrong_trait_is_found(missing: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traits, "aliases", lambda target: target is not missing and target is not aten.relu.default)
    monkeypatch.setattr(traits, "is_view", lambda target: target is aten.relu.default)
    assert any(wrong_about_storage(s).startswith(said) for s in steps() if s.target is missing)


def test_sums_go_through_what_passes() -> None:
    """f(a + b) = f(a) + f(b), for a view and a copy alike."""
    passing = [s for s in steps() if s.target in traits.PASSING]
    assert {s.target for s in passing} == traits.PASSING
    for step in passing:
        if not step.args[0].is_floating_point() or step.kwargs.get("dtype", torch.float64) != torch.float64:
            continue
        a, b = normal(*step.args[0].shape), normal(*step.args[0].shape)
        one, other, both = (step.target(x, *step.args[1:], **step.kwargs) for x in (a, b, a + b))
        torch.testing.assert_close(one + other, both, rtol=0, atol=1e-15)
        assert not set(both.flatten().tolist()) - set((a + b).flatten().tolist()), "no element changes"


def test_what_is_random_draws_numbers() -> None:
    for step in steps():
        seen = []
        for _ in range(2):
            torch.manual_seed(len(seen))
            state = torch.get_rng_state()
            whole_results(Sample([step]), [x.clone() for x in Sample([step]).tensors])
            seen.append(not torch.equal(state, torch.get_rng_state()))
        assert not any(seen) or traits.is_random(step.target), step.target


def test_choices_are_declared_where_the_operator_is() -> None:
    """Also by an operator that is not one of ours."""

    def declared(name: str, choice: bool) -> Any:
        def kernel(expert: torch.Tensor) -> torch.Tensor:
            return expert.argsort()

        kernel.__name__ = name
        operator(fake=alike, choice=choice)(kernel)
        return getattr(torch.ops.autopar, name).default

    assert traits.is_choice(declared("chooses", True)) and not traits.is_choice(declared("computes", False))
    assert all(traits.is_choice(getattr(torch.ops.autopar, name).default) for name in ("moe_pairs", "row_splits"))
