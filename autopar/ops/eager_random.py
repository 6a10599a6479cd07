"""An eager run whose random numbers are those of `autopar::dropout` and `autopar::random`: so that it can be compared
with a compiled run.

    with shared_random(seed): model(**batch)       the n-th call of the run that draws is the n-th site

It works below autograd, where every dropout of torch asks for random bits: modules, functionals, the dropout inside
attention (its plain form), and whatever calls them. The n-th call in an eager run is the n-th site of the captured
graph, since capture runs the same code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from autopar.adapters.dispatch import DispatchMode
from autopar.adapters.operators import argument_defaults
from autopar.ops.dropout import keep_mask
from autopar.ops.random_numbers import drawn
from autopar.ops.random_recipes import DrawMaker, recipe_for
from autopar.ops.traits import is_random

aten = torch.ops.aten


class _Numbers(DispatchMode):
    """Answers requests for random numbers; counts them in ``site``."""

    def __init__(self, seed: int):
        super().__init__()
        self.seed, self.site = seed, 0
        self.maker = DrawMaker(lambda target, *args, **kwargs: target(*args, **kwargs), self._draw, lambda x: x)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        known = kwargs or {}
        if func is aten.native_dropout.default:  # the fused form on CUDA
            x, p, train = args
            mask = self._mask(x, p) if train or train is None else torch.ones_like(x, dtype=torch.bool)
            return x * mask * (1.0 / (1.0 - p) if train and p < 1 else 1.0), mask
        recipe, written = recipe_for(func)
        if recipe is None or known.get("generator") is not None:
            assert recipe or not is_random(func) or not _named(func, args, known).get("dropout_p", True), (
                f"nothing says what {func} draws"
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
    """The arguments of a call. An attention that a model has chosen a kernel for draws nothing at a rate of 0."""
    return {**argument_defaults(func), **dict(zip(argument_defaults(func), args)), **kwargs}


@contextlib.contextmanager
def shared_random(seed: int) -> Iterator[_Numbers]:
    """Within: what is drawn depends on ``seed`` and the number of the call. Around the forward of a model, not its
    backward."""
    with sdpa_kernel(SDPBackend.MATH), _Numbers(seed) as numbers:
        yield numbers
