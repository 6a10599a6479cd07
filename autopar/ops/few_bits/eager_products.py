"""Linear layers and experts of a model that runs eagerly, computed in eight bits as a step graph computes them.

    with ScaledProducts(model, {"mlp.up.weight", ...}, "tensor"):
        model(**batch).loss.backward()

The products are those of `torch.nn.functional.linear` and of `torch.addmm` with one of the named parameters, as layers
of torch and transformers call them, and for experts of `linear` and `matmul` with one matrix of a parameter. `unmet`
names the parameters that no such call used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopar.ops.few_bits.delayed_scales import DelayedScales, keys_of
from autopar.ops.few_bits.scaled_products import scaled_linear


class ScaledProducts(TorchFunctionMode):
    """Context manager. ``microbatches``: rows of the batch of each microbatch, which scale by themselves; none: one.
    ``delayed``: the scales of earlier steps, which the caller advances after each step."""

    def __init__(
        self,
        model: nn.Module,
        weights: Collection[str],
        scaling: str,
        wide_weight_gradient: bool = False,
        microbatches: Sequence[Tensor] = (),
        delayed: DelayedScales | None = None,
    ) -> None:
        super().__init__()
        named = dict(model.named_parameters(remove_duplicate=False))
        self.how, self.microbatches = (scaling, wide_weight_gradient), microbatches
        self.weights = {id(named[name]): name for name in weights}
        self.unmet, self._delayed, self._stack = set(weights), delayed, ExitStack()

    def __enter__(self) -> ScaledProducts:
        if self._delayed is not None:
            self._stack.enter_context(self._delayed.used(notes=True))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.linear and (name := self._scaled(weight := _given(args, kwargs, 1, "weight"))):
            bias = _given(args, kwargs, 2, "bias")
            return self._product(name, _given(args, kwargs, 0, "input"), weight, bias)
        if func is torch.addmm and len(args) == 3 and (name := self._scaled(args[2])):
            return self._product(name, args[1], args[2].t(), args[0])
        if func in _MATMULS and _of_expert(args[1]) is not None and (name := self._scaled(args[1])):
            return self._product(name, args[0], args[1].t(), None)
        return func(*args, **kwargs)

    def _scaled(self, weight: Any) -> str:
        """The name of a weight whose products are scaled, or of the parameter of which it is an expert's matrix."""
        name = self.weights.get(id(weight), "") or self.weights.get(id(_of_expert(weight)), "")
        self.unmet.discard(name)
        return name

    def _product(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        scaling, wide = self.how
        if _of_expert(weight) is not None:  # scales of rows, and of an expert's columns
            if self.microbatches and not wide and scaling != "block":
                raise ValueError(
                    "precision: gradients of experts are scaled by the tokens of a microbatch, which one process cannot"
                    " tell apart; compare with one microbatch, or with wide_weight_gradient=True"
                )
            block = scaling == "block"
            return scaled_linear(x, weight, bias, "block" if block else "row", wide or block)
        operands = ("", "", "") if self._delayed is None else keys_of(name)
        how = functools.partial(scaled_linear, scaling=scaling, wide_weight_gradient=wide, operands=operands)
        if not self.microbatches:
            return how(x, weight, bias)
        examples = sum(map(len, self.microbatches))
        if x.numel() % (examples * x.shape[-1]):
            raise ValueError(
                f"precision: the input {list(x.shape)} of a product has no rows of each of {examples} examples, so "
                "microbatches cannot be told apart; compare with one microbatch"
            )
        rows = x.reshape(examples, -1, x.shape[-1])
        made = [how(rows[own], weight, bias) for own in self.microbatches]
        back = torch.cat(list(self.microbatches)).argsort()
        return torch.cat(made)[back].reshape(*x.shape[:-1], weight.shape[0])


_MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)


def _of_expert(weight: Any) -> Tensor | None:
    """The parameter of three dims of which a matrix is a part."""
    base = weight._base if isinstance(weight, Tensor) else None
    return base if base is not None and base.dim() == 3 and weight.dim() == 2 else None


def _given(args: Sequence[Any], kwargs: dict[str, Any], place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)
