"""Attention written out as products and a softmax: recognised in many spellings, with the same numbers; else left."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.front_end import capture
from autopar.passes.canonicalize import constant_masks
from autopar.passes.canonicalize.normalize import Normalize
from tests.canonicalize.test_normalize import Wrapped, normalized, rand, text

B, H, S, T, D = 2, 3, 6, 5, 4
LEAST = torch.finfo(torch.float64).min


def split(**extra: Tensor) -> dict[str, Tensor]:
    """q, k, v with a dim for heads; more keys than queries are left to `joined`."""
    return {n: rand(B, H, S, D, seed=i, grad=True) for i, n in enumerate("qkv")} | extra


def joined(**extra: Tensor) -> dict[str, Tensor]:
    """q [B·H, S, D] and k, v [B·H, T, D]"""
    sizes = {"q": S, "k": T, "v": T}
    return {n: rand(B * H, m, D, seed=i, grad=True) for i, (n, m) in enumerate(sizes.items())} | extra


def causal() -> Tensor:
    return torch.ones(S, S, dtype=torch.bool).tril()


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1)


def bloom(x: Tensor, alibi: Tensor, mask: Tensor) -> Tensor:
    """Heads joined with the batch for the product, split for the mask, joined again for the values."""
    q, k, v = (part.transpose(1, 2).reshape(B * H, S, D) for part in x.unflatten(2, (H, 3, D)).unbind(3))
    weights = torch.baddbmm(alibi, q, k.transpose(1, 2), beta=1.0, alpha=0.5).view(B, H, S, S)
    probabilities = torch.softmax(weights + mask, -1, dtype=torch.float64).to(x.dtype).view(B * H, S, S)
    return torch.bmm(probabilities, v).view(B, H, S, D).transpose(1, 2).reshape(B, S, H * D)


class Heads(nn.Module):
    """torch's own layer with its weights, which it writes out; sequence first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.MultiheadAttention(H * D, H).double()

    def forward(self, x: Tensor, mask: Tensor, padding: Tensor) -> Tensor:
        out, _ = self.inner(x, x, x, key_padding_mask=padding, attn_mask=mask)
        assert isinstance(out, Tensor)
        return out


heads = Heads().requires_grad_(False)  # a constant of the graphs: it is reached through a global name


def capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    weights = torch.tanh(scores(q, k) * 0.5 / 7.0) * 7.0
    return torch.softmax(weights + mask, -1) @ v


def causal_where(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.where(causal(), scores(q, k), torch.full([], LEAST, dtype=torch.float64)) / 2.0
    return torch.softmax(weights, -1) @ v


RECOGNISED: dict[str, tuple[Callable[..., Tensor], dict[str, Tensor], str]] = {
    "heads joined here and there": (
        bloom,
        {"x": rand(B, S, 3 * H * D, grad=True), "alibi": rand(B * H, 1, S), "mask": rand(B, 1, S, S, seed=1)},
        f"{B}x{H}x{S}x{D}",
    ),
    "joined heads alone": (
        lambda q, k, v, m: torch.bmm(torch.softmax(torch.baddbmm(m, q, k.transpose(1, 2)), -1), v),
        joined(m=rand(1, S, T, seed=5)),
        f"{B * H}x1x{S}x{D}",
    ),
    "a mask of each joined head": (
        lambda q, k, v, m: torch.softmax(m + scores(q, k), -1) @ v,
        joined(m=rand(B * H, 1, T, seed=5)),
        f"{B * H}x1x{S}x{D}",
    ),
    "capped scores": (capped, split(mask=rand(B, 1, S, S, seed=4)), "scale 0.5, softcap 7.0"),
    "filled by where, then scaled": (causal_where, split(), "scale 0.5"),
    "filled by masked_fill, for each example": (
        lambda q, k, v, m: torch.softmax(scores(q, k).masked_fill(m[:, None], LEAST), -1) @ v,
        split(m=torch.stack([~causal(), ~causal().flip(0, 1)])),
        "scale 1.0",
    ),
    "a mask before the scale": (
        lambda q, k, v, m: torch.softmax((scores(q, k) + m) * 0.25, -1) @ v,
        split(m=rand(S, S, seed=3, grad=True)),
        "scale 0.25",
    ),
    "two masks, either side": (
        lambda q, k, v, m, n: torch.softmax(m + (scores(q, k) + n), -1) @ v,
        split(m=rand(B, H, S, S, seed=3), n=rand(H, 1, S, seed=6)),
        "scale 1.0",
    ),
    "shifted windows": (
        lambda q, k, v, m, r: (
            torch.softmax(((scores(q, k) + r).view(1, B, H, S, S) + m[:, None]).view(B, H, S, S), -1) @ v
        ),
        {n: rand(B, H, S, D, seed=i, grad=True) for i, n in enumerate("qkv")}
        | {"m": rand(B, S, S, seed=3), "r": rand(H, S, S, seed=4, grad=True)},
        f"{B}x{H}x{S}x{D}",
    ),
    "keys of each example and of all": (
        lambda q, k, v, m: torch.softmax((scores(q, k).view(B, 1, H, S, S) + m).view(B, H, S, S), -1) @ v,
        split(m=rand(B, 1, 1, 1, S, seed=3)),
        "scale 1.0",
    ),
    "a temperature": (
        lambda q, k, v, t: torch.softmax(scores(q, k) * t, -1) @ v,
        split(t=torch.tensor(0.7, dtype=torch.float64, requires_grad=True)),
        "scale 1.0",
    ),
    "keys that come transposed": (
        lambda q, k, v: torch.softmax(q @ k.permute(0, 3, 1, 2).permute(0, 2, 1, 3), -1) @ v,
        split(),
        f"{B}x{H}x{S}x{D}",
    ),
    "einsum": (
        lambda q, k, v: torch.einsum(
            "bhij,bjhd->bihd", torch.softmax(torch.einsum("b i h d, b j h d -> b h i j", q, k) * 0.5, -1), v
        ),
        {n: rand(B, m, H, D, seed=i, grad=True) for i, (n, m) in enumerate({"q": S, "k": T, "v": T}.items())},
        f"{B}x{H}x{S}x{D} scale 0.5",
    ),
    "a product without a transpose": (
        lambda q, k, v: torch.softmax(q @ k, -1) @ v,
        {"q": rand(B, H, S, D, grad=True), "k": rand(B, H, D, T, seed=1, grad=True), "v": rand(B, H, T, D, seed=2)},
        f"{B}x{H}x{S}x{D}",
    ),
}


def described(gm: Any) -> list[str]:
    """'2x3x6x4 scale 0.5, softcap 0.0' of each attention: the shape of its queries."""
    found = [n for n in gm.graph.nodes if n.target is torch.ops.autopar.attention.default]
    shapes = ["x".join(map(str, n.args[0].meta["val"].shape)) for n in found]
    return [f"{shape} scale {n.args[12]}, softcap {n.args[13]}" for shape, n in zip(shapes, found)]


@pytest.mark.parametrize("name", RECOGNISED)
def test_is_recognised_with_the_same_numbers(name: str) -> None:
    function, inputs, what = RECOGNISED[name]
    gm = normalized(function, inputs)
    (found,) = described(gm)
    assert what in found, found
    assert not any(re.match("matmul|softmax|bmm", line) for line in text(gm))


def positions() -> tuple[Tensor, Tensor]:
    return torch.arange(S)[:, None], torch.arange(S)


MASKS: dict[str, tuple[Callable[[], Tensor], bool]] = {  # True = attend, or to be added; is it the triangle?
    "compared positions": (lambda: positions()[1] <= positions()[0], True),
    "for each example": (lambda: (positions()[1] <= positions()[0]).expand(B, 1, S, S), True),
    "added": (lambda: torch.zeros(S, S, dtype=torch.float64).masked_fill(~causal(), float("-inf")), True),
    "a large number added": (lambda: torch.zeros(S, S, dtype=torch.float64).masked_fill(~causal(), LEAST), False),
    "one entry more": (lambda: causal() | (positions()[0] + 3 == positions()[1]), False),
    "strictly below": (lambda: positions()[1] < positions()[0] + (positions()[0] == 0), False),
    "a window": (lambda: causal() & (positions()[0] - positions()[1] < 3), False),
    "not nothing below": (lambda: torch.where(causal(), 0.5, float("-inf")).double(), False),
    "too little above": (lambda: torch.where(causal(), 0.0, -50.0).double(), False),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_triangle_is_a_fact(name: str) -> None:
    """Of a mask that nothing else decides; beside another mask, which stays."""
    make, triangle = MASKS[name]

    def attention(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        mask, weights = make(), scores(q, k) + m
        weights = weights.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else weights + mask
        return torch.softmax(weights, -1) @ v

    gm = normalized(attention, split(m=rand(H, S, S, seed=9)))
    (node,) = [n for n in gm.graph.nodes if n.target is torch.ops.autopar.attention.default]
    assert node.args[8] is triangle
    assert node.args[3].name.startswith("reshape" if triangle else "add"), node.args[3]


def test_a_mask_of_inputs_is_no_fact_and_a_large_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return torch.softmax(scores(q, k).masked_fill(~(causal() if mask is None else mask), LEAST), -1) @ v

    def is_causal(gm: Any) -> bool:
        (node,) = [n for n in gm.graph.nodes if n.target is torch.ops.autopar.attention.default]
        return bool(node.args[8])

    assert is_causal(normalized(attention, split())) and not is_causal(normalized(attention, split(mask=causal())))
    monkeypatch.setattr(constant_masks, "LARGEST", S * S - 1)
    assert is_causal(normalized(attention, split()))


def test_torchs_own_layer() -> None:
    """Batch and heads share a dim of [S, B·H, D]; the reshape that joined them tells which is which."""
    mask = torch.zeros(S, S, dtype=torch.float64).masked_fill(~causal(), float("-inf"))
    padding = torch.zeros(B, S, dtype=torch.float64)
    padding[0, -2:] = float("-inf")
    inputs = {"x": rand(S, B, H * D, grad=True), "mask": mask, "padding": padding}
    found = described(normalized(lambda **kw: heads(**kw), inputs))
    assert found[0].startswith(f"{B}x{H}x{S}x{D} "), found


def test_probabilities_that_are_used_stay_beside() -> None:
    def both(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.softmax(scores(q, k), -1)
        return weights @ v, weights.mean(1)

    gm = normalized(both, split())
    assert len(described(gm)) == 1 and any(line.startswith("softmax") for line in text(gm))


NO_KEY = torch.ones(B, 1, S, S, dtype=torch.bool)  # True = attend: rows of one example see nothing, of another one key
NO_KEY[0, :, 1:3] = False
NO_KEY[1, :, :, 1:] = False


def soft(weights: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(weights, -1) @ v


def added(m: Tensor, least: float) -> Tensor:
    return torch.zeros(m.shape, dtype=torch.float64).masked_fill(~m, least)


# Each with rows that no key is left to. True: is attention; the numbers are eager's either way.
EMPTY_ROWS: dict[str, tuple[Callable[..., Tensor], bool]] = {
    "filled": (lambda q, k, v, m: soft(scores(q, k).masked_fill(~m, -1e9), v), True),
    "filled with the least": (lambda q, k, v, m: soft(torch.where(m, scores(q, k), LEAST), v), True),
    "filled, then scaled": (lambda q, k, v, m: soft(scores(q, k).masked_fill(~m, -1e9) * 0.25, v), True),
    "filled, then scaled away": (lambda q, k, v, m: soft(scores(q, k).masked_fill(~m, -1e9) * 1e-9, v), False),
    "filled, then a temperature": (
        lambda q, k, v, m: soft(scores(q, k).masked_fill(~m, -1e9) * torch.tensor(1e-9).double(), v),
        False,
    ),
    "filled beside a triangle": (
        lambda q, k, v, m: soft(scores(q, k).masked_fill(~causal(), -1e9).masked_fill(~m, -1e9), v),
        True,
    ),
    "two fills": (lambda q, k, v, m: soft(scores(q, k).masked_fill(~causal(), -2e9).masked_fill(~m, -1e9), v), False),
    "filled, over what is added": (
        lambda q, k, v, m: soft((scores(q, k) + torch.where(m, 0.0, -1e9)).masked_fill(~causal(), -1e9), v),
        False,
    ),
    "added": (lambda q, k, v, m: soft(scores(q, k) + torch.where(m, 0.0, -1e9), v), True),
    "the least added": (lambda q, k, v, m: soft(scores(q, k) + added(m, LEAST), v), True),
    "little added": (lambda q, k, v, m: soft(scores(q, k) + torch.where(m, 0.0, -10000.0), v), True),
    "added, then scaled": (lambda q, k, v, m: soft((scores(q, k) + torch.where(m, 0.0, -1e9)) * 1e-9, v), True),
    "added beside a triangle": (
        lambda q, k, v, m: soft(scores(q, k) + added(m, LEAST) + added(causal(), LEAST), v),
        True,
    ),
    "capped, then filled": (
        lambda q, k, v, m: soft((torch.tanh(scores(q, k) / 3.0) * 3.0).masked_fill(~m, -1e9), v),
        True,
    ),
    "filled, then capped": (
        lambda q, k, v, m: soft(torch.tanh(scores(q, k).masked_fill(~m, -1e9) / 3.0) * 3.0, v),
        False,
    ),
}


@pytest.mark.parametrize("name", EMPTY_ROWS)
def test_rows_that_may_attend_to_nothing_are_as_written(name: str) -> None:
    """`normalized` compares outputs and gradients with the function itself."""
    function, recognised = EMPTY_ROWS[name]
    assert bool(described(normalized(function, split(m=NO_KEY)))) is recognised


def test_rows_of_minus_infinity_are_not_numbers() -> None:
    """0/0, as the softmax: a batch that masks everything must not look well."""
    function = lambda q, k, v, m: soft(scores(q, k).masked_fill(~m, float("-inf")), v)  # noqa: E731
    inputs = {n: x.detach() for n, x in split(m=NO_KEY).items()}
    assert described(normalized(function, inputs))
    open_rows = split(m=NO_KEY | torch.eye(S, dtype=torch.bool))
    gm = normalized(function, open_rows)
    assert described(gm) and any(line.startswith("where") for line in text(gm))


def test_a_fill_that_a_cast_makes_infinite() -> None:
    """The least number of one type is minus infinity in a smaller one."""
    function = lambda q, k, v, m: soft(scores(q, k).masked_fill(~m, LEAST).float(), v.float())  # noqa: E731
    gm = Normalize().apply(capture(Wrapped(function), {n: x.detach() for n, x in split(m=NO_KEY).items()}))
    assert described(gm) and "mean" not in " ".join(text(gm))


class Dropped(nn.Module):
    """Probabilities after dropout, used once or twice."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.twice = twice

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        weights = torch.dropout(torch.softmax(scores(q, k), -1), 0.5, self.training)
        return (weights @ v, weights @ q, weights) if self.twice else (weights @ v,)


@pytest.mark.parametrize("twice", [False, True])
def test_dropped_probabilities_that_are_used_twice_have_one_mask(twice: bool) -> None:
    inputs = {n: x.detach() for n, x in split().items()}
    gm = Normalize().apply(capture(Dropped(twice).train(), inputs))
    assert bool(described(gm)) is not twice
    seed = {"seed": torch.tensor(3)}
    found = gm(*(({**inputs, **seed})[spec.name] for spec in gm.meta["signature"].inputs))
    if twice:
        torch.testing.assert_close(found[0], found[2] @ inputs["v"])
        torch.testing.assert_close(found[1], found[2] @ inputs["q"])


LEFT: dict[str, tuple[Callable[..., Tensor], dict[str, Tensor]]] = {
    "softmax over queries": (lambda q, k, v: torch.softmax(scores(q, k), -2) @ v, split()),
    "filled with a number like others": (
        lambda q, k, v: torch.softmax(scores(q, k).masked_fill(~causal(), -100.0), -1) @ v,
        split(),
    ),
    "a mask under the cap": (
        lambda q, k, v, m: torch.softmax(torch.tanh(scores(q, k) + m) * 7.0, -1) @ v,
        split(m=rand(S, S)),
    ),
    "a fill that the scale turns round": (
        lambda q, k, v: torch.softmax(scores(q, k).masked_fill(causal(), LEAST) * -1e-300, -1) @ v,
        split(),
    ),
    "a factor for each key": (lambda q, k, v, m: torch.softmax(scores(q, k) * m, -1) @ v, split(m=rand(S))),
    "no product": (lambda q, v: torch.softmax(q, -1) @ v, {"q": rand(B, H, S, S, grad=True), "v": rand(B, H, S, D)}),
}


@pytest.mark.parametrize("name", LEFT)
def test_anything_else_is_left_as_it_is(name: str) -> None:
    function, inputs = LEFT[name]
    gm = normalized(function, inputs)
    assert not described(gm) and any(line.startswith("softmax") for line in text(gm))
