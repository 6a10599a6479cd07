"""Torch's random operators in terms of `autopar::random`.

    rand([4, 8])            -->   random(empty([4, 8]), "uniform", 0, 1)
    bernoulli(p)            -->   random(p, "uniform", 0, 1) < p
    multinomial(p, 3)       -->   the 3 largest of log(p) - log(random(p, "exponential", 1))

One recipe serves a graph, where ``make`` adds calls, and an eager run, where it runs them: so the numbers are the same.
An operator whose count of draws depends on values (poisson and gamma use rejection) has no recipe.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from autopar.adapters.dispatch import DispatchMode
from autopar.adapters.operators import OpOverload, argument_defaults
from autopar.ops.dropout import keep_mask
from autopar.ops.random_numbers import drawn
from autopar.ops.traits import is_random

aten = torch.ops.aten


@dataclass(frozen=True)
class DrawMaker:
    """``call(operator, ...)`` returns its result; ``draw(like, kind, a, b, dtype)`` random numbers in the shape of a
    value; ``value(x)`` the tensor of a result, or a fake of it."""

    call: Callable[..., Any]
    draw: Callable[[Any, str, float, float, torch.dtype], Any]
    value: Callable[[Any], Tensor]


WeightConversion = Callable[[Mapping[str, Any], DrawMaker], Any]


class NoRecipe(ValueError):
    """Unsupported arguments; the message says which."""


def _dtype(known: Mapping[str, Any], like: Tensor | None = None) -> torch.dtype:
    found = known.get("dtype")
    if isinstance(found, torch.dtype):
        return found
    return like.dtype if like is not None else torch.get_default_dtype()


def _whole(known: Mapping[str, Any]) -> torch.dtype:
    """The dtype of integers; schemas have a number for int64."""
    return known["dtype"] if isinstance(known.get("dtype"), torch.dtype) else torch.int64


def _empty(known: Mapping[str, Any], make: DrawMaker, dtype: torch.dtype) -> Any:
    return make.call(aten.empty.memory_format, known["size"], dtype=dtype, device=known.get("device") or "cpu")


def _made(kind: str, a: float = 0.0, b: float = 1.0) -> WeightConversion:
    """rand and randn: of a given size."""

    def recipe(known: Mapping[str, Any], make: DrawMaker) -> Any:
        dtype = _dtype(known)
        _real(dtype)
        return make.draw(_empty(known, make, dtype), kind, a, b, dtype)

    return recipe


def _alike(kind: str, a: float | str = 0.0, b: float | str = 1.0) -> WeightConversion:
    """In the shape of ``self``; a and b are numbers, or names of arguments."""

    def recipe(known: Mapping[str, Any], make: DrawMaker) -> Any:
        x = known["self"]
        dtype = _dtype(known, make.value(x))
        _real(dtype)
        first, second = (float(known[v]) if isinstance(v, str) else v for v in (a, b))
        return make.draw(x, kind, first, second, dtype)

    return recipe


def _real(dtype: torch.dtype) -> None:
    if dtype.is_complex:
        raise NoRecipe("numbers are real")


def _bernoulli(known: Mapping[str, Any], make: DrawMaker) -> Any:
    """Probabilities in ``self``, or in ``p``: a number or a tensor."""
    x, p = known["self"], known.get("p")
    dtype = make.value(x).dtype
    if isinstance(p, (int, float)):
        return make.draw(x, "keep", float(p), 0.0, dtype)
    p = x if p is None else p
    exact = make.value(p).dtype if make.value(p).dtype == torch.float64 else torch.float32
    below = make.call(aten.lt.Tensor, make.draw(x, "uniform", 0.0, 1.0, exact), p)
    return make.call(aten._to_copy.default, below, dtype=dtype)


def _normal(known: Mapping[str, Any], make: DrawMaker) -> Any:
    """Mean and deviation: numbers or tensors, with a size where both are numbers."""
    mean, std = known.get("mean", 0.0), known.get("std", 1.0)
    tensors = [x for x in (mean, std) if not isinstance(x, (int, float))]
    if known.get("self") is not None:
        return _alike("normal", "mean", "std")(known, make)
    if not tensors:
        return _made("normal", float(mean), float(std))(known, make)
    like = tensors[0] if len(tensors) == 1 else make.call(aten.add.Tensor, *tensors)
    noise = make.draw(like, "normal", 0.0, 1.0, make.value(like).dtype)
    scaled = make.call(aten.mul.Scalar if isinstance(std, (int, float)) else aten.mul.Tensor, noise, std)
    return make.call(aten.add.Scalar if isinstance(mean, (int, float)) else aten.add.Tensor, scaled, mean)


def _integers(known: Mapping[str, Any], make: DrawMaker) -> Any:
    """randint: of a given size, or in the shape of ``self``; random: between bounds."""
    low, high = known.get("low", known.get("from", 0)), known.get("high", known.get("to"))
    if not isinstance(low, int) or not isinstance(high, int):
        raise NoRecipe("its bounds must be constant integers")
    if not 0 < high - low <= 1 << 48:
        raise NoRecipe(f"it draws between {low} and {high}, which may be at most 2**48 apart")
    if "size" in known:
        return make.draw(_empty(known, make, _whole(known)), "integers", low, high, _whole(known))
    return make.draw(known["self"], "integers", low, high, _dtype(known, make.value(known["self"])))


def _permutation(known: Mapping[str, Any], make: DrawMaker) -> Any:
    """randperm: the order of as many random numbers."""
    dtype, known = _whole(known), {**known, "size": [known["n"]]}
    numbers = make.draw(_empty(known, make, torch.float64), "uniform", 0.0, 1.0, torch.float64)
    return make.call(aten._to_copy.default, make.call(aten.argsort.default, numbers), dtype=dtype)


def _multinomial(known: Mapping[str, Any], make: DrawMaker) -> Any:
    """Without replacement: the largest of log(p) + Gumbel noise, equal to drawing one after another. With replacement:
    as many numbers, and how many steps of the cumulative sum are below each."""
    p, count = known["self"], known["num_samples"]
    wide = make.call(aten._to_copy.default, p, dtype=torch.float64)
    if count == 1 or not known.get("replacement"):
        noise = make.call(aten.log.default, make.draw(p, "exponential", 1.0, 0.0, torch.float64))
        keys = make.call(aten.sub.Tensor, make.call(aten.log.default, wide), noise)
        return make.call(operator.getitem, make.call(aten.topk.default, keys, count, -1), 1)
    sums = make.call(aten.cumsum.default, wide, -1)
    size = [*make.value(p).shape[:-1], count]
    like = make.call(aten.expand.default, make.call(aten.slice.Tensor, sums, -1, 0, 1), size)
    numbers = make.draw(like, "uniform", 0.0, 1.0, torch.float64)
    scaled = make.call(aten.mul.Tensor, numbers, make.call(aten.slice.Tensor, sums, -1, -1))
    steps = make.call(
        aten.le.Tensor, make.call(aten.unsqueeze.default, sums, -2), make.call(aten.unsqueeze.default, scaled, -1)
    )
    return make.call(aten.sum.dim_IntList, steps, [-1])


RECIPES: dict[Any, WeightConversion] = {
    aten.rand: _made("uniform"),
    aten.randn: _made("normal"),
    aten.rand_like: _alike("uniform"),
    aten.randn_like: _alike("normal"),
    aten.bernoulli: _bernoulli,
    aten.uniform: _alike("uniform", "from", "to"),
    aten.normal: _normal,
    aten.normal_functional: _normal,
    aten.exponential: _alike("exponential", "lambd"),
    aten.geometric: _alike("geometric", "p"),
    aten.log_normal: _alike("log_normal", "mean", "std"),
    aten.cauchy: _alike("cauchy", "median", "sigma"),
    aten.randint: _integers,
    aten.randint_like: _integers,
    aten.random: _integers,
    aten.randperm: _permutation,
    aten.multinomial: _multinomial,
}


def recipe_for(target: Any) -> tuple[WeightConversion | None, bool]:
    """(the recipe of an operator, whether it writes into ``self``): bernoulli_ is bernoulli, written in place."""
    packet = getattr(target, "overloadpacket", None)
    if packet in RECIPES:
        return RECIPES[packet], False
    name = str(packet).removeprefix("aten.")
    plain = getattr(aten, name[:-1], None) if name.endswith("_") else None
    return RECIPES.get(plain), plain in RECIPES


# --- in eager runs -------------------------------------------------------------------------------------


class _Numbers(DispatchMode):
    """Answers calls of random operators; counts them in ``site``. Operators with functions as arguments pass."""

    supports_higher_order_operators = True

    def __init__(self, seed: int):
        super().__init__()
        self.seed, self.site = seed, 0
        self.maker = DrawMaker(lambda target, *args, **kwargs: target(*args, **kwargs), self._draw, lambda x: x)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        known = kwargs or {}
        if not isinstance(func, OpOverload):
            return func(*args, **known)
        if func is aten.native_dropout.default:  # the fused form on CUDA
            x, p, train = args
            mask = self._mask(x, p) if train or train is None else torch.ones_like(x, dtype=torch.bool)
            return x * mask * (1.0 / (1.0 - p) if train and p < 1 else 1.0), mask
        recipe, written = recipe_for(func)
        if recipe is None or known.get("generator") is not None:
            assert recipe or not is_random(func) or not _named(func, args, known).get("dropout_p", True), (
                f"no recipe says what {func} draws"
            )
            return func(*args, **known)
        made = recipe(_named(func, args, known), self.maker)
        return args[0].copy_(made) if written else made

    def _mask(self, x: Tensor, p: float) -> Tensor:
        mask = keep_mask(x.shape, torch.tensor(self.seed, device=x.device), p, self.site, [], [])
        self.site += 1
        return mask

    def _draw(self, like: Tensor, kind: str, a: float, b: float, dtype: torch.dtype) -> Tensor:
        seed = torch.tensor(self.seed, device=like.device)
        self.site += 1
        return drawn(like.shape, seed, kind, float(a), float(b), self.site - 1, [], [], dtype)


def _named(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call. An attention with a fixed kernel draws nothing at a rate of 0."""
    return {**argument_defaults(func), **dict(zip(argument_defaults(func), args)), **kwargs}


@contextlib.contextmanager
def shared_random(seed: int) -> Iterator[_Numbers]:
    """Within, numbers are those of `autopar::dropout` and `autopar::random`: they depend on ``seed`` and the number of
    the call, which is the site in the captured graph. Use it around the forward of a model, not its backward. It works
    below autograd, where every dropout of torch asks for random bits."""
    with sdpa_kernel(SDPBackend.MATH), _Numbers(seed) as numbers:
        yield numbers
