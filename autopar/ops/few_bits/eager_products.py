"""Linear layers and experts of a model that runs eagerly, computed in eight bits as a step graph computes them.

    with ScaledProducts(model, {"mlp.up.weight", ...}, "tensor"):
        model(**batch).loss.backward()

The products are those of `torch.nn.functional.linear` and of `torch.addmm` with one of the named parameters, as layers
of torch and transformers call them, and for experts of `linear` and `matmul` with one matrix of a parameter. `unmet`
names the parameters that no such call used. A module with weights of experts is called for each microbatch by itself,
since routing mixes the rows of its products.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopar.adapters.module_calls import forward_of
from autopar.ops.few_bits.delayed_scales import DelayedScales, keys_of
from autopar.ops.few_bits.scaled_products import scaled_linear


class ScaledProducts(TorchFunctionMode):
    """Context manager. ``microbatches``: rows of the batch of each microbatch, which scale by themselves; none: one.
    ``slices``: tokens of each slice of these, likewise. ``delayed``: the scales of earlier steps, which the caller
    advances after each step."""

    def __init__(
        self,
        model: nn.Module,
        weights: Collection[str],
        scaling: str,
        wide_weight_gradient: bool = False,
        microbatches: Sequence[Tensor] = (),
        delayed: DelayedScales | None = None,
        slices: Sequence[int] = (),
    ) -> None:
        super().__init__()
        named = dict(model.named_parameters(remove_duplicate=False))
        self.how, self.parts = (scaling, wide_weight_gradient), Parts(tuple(microbatches), tuple(slices))
        self.weights = {id(named[name]): name for name in weights}
        self.unmet, self._delayed, self._stack = set(weights), delayed, ExitStack()
        experts = {id(named[name]) for name in weights if named[name].dim() == 3}
        self._experts = [m for m in model.modules() if experts & set(map(id, m._parameters.values()))]

    def __enter__(self) -> ScaledProducts:
        if self._delayed is not None:
            self._stack.enter_context(self._delayed.used(notes=True))
        for module in self._experts if self.parts.microbatches else ():
            self._stack.enter_context(forward_of(module, _one_after_another(module, self.parts)))
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
            block = scaling == "block"
            return scaled_linear(x, weight, bias, "block" if block else "row", wide or block)
        operands = ("", "", "") if self._delayed is None else keys_of(name)
        how = functools.partial(scaled_linear, scaling=scaling, wide_weight_gradient=wide, operands=operands)
        if not self.parts.microbatches:
            return how(x, weight, bias)
        flat = x.flatten(0, -2)
        each = self.parts.rows_of(flat)
        made = torch.cat([how(flat[rows], weight, bias) for rows in each])
        return made[torch.cat(each).argsort()].reshape(*x.shape[:-1], weight.shape[0])


@dataclass(frozen=True)
class Parts:
    """What scales by itself. microbatches: the examples of each. slices: tokens of each slice of an example."""

    microbatches: tuple[Tensor, ...] = ()
    slices: tuple[int, ...] = ()

    def rows_of(self, x: Tensor) -> list[Tensor]:
        """The rows of x [n, ...] that are of each part; those of an example are together. Raises ValueError."""
        examples = sum(map(len, self.microbatches))
        if len(x) % examples or (self.slices and len(x) != examples * sum(self.slices)):
            raise ValueError(
                f"precision: the input {list(x.shape)} of a product has no rows of each of {examples} examples"
                f"{f' of {sum(self.slices)} tokens' if self.slices else ''}, so microbatches"
                f"{' and token slices' if self.slices else ''} cannot be told apart; compare with one microbatch"
            )
        rows = torch.arange(len(x)).view(examples, -1)
        lengths = self.slices or (rows.shape[1],)
        return [tokens.flatten() for own in self.microbatches for tokens in rows[own].split(lengths, 1)]


def _one_after_another(module: nn.Module, parts: Parts) -> Callable[..., Tensor]:
    """The forward of a module, of one part after another. The first dim of its tensors and result is tokens."""
    forward = module.forward

    def each(*args: Any, **kwargs: Any) -> Tensor:
        tokens = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        of_each, made = parts.rows_of(tokens), list[Any]()
        for rows in of_each:
            part = functools.partial(_part, rows=rows, tokens=len(tokens))
            made.append(forward(*map(part, args), **{name: part(x) for name, x in kwargs.items()}))
        if not all(isinstance(x, Tensor) and len(x) == len(rows) for x, rows in zip(made, of_each, strict=True)):
            raise ValueError(
                "precision: needs experts that return a row for each token, to tell microbatches apart, found those of "
                f"{type(module).__name__}; compare with one microbatch, or with wide_weight_gradient=True"
            )
        return torch.cat(made)[torch.cat(of_each).argsort()]

    return each


def _part(x: Any, rows: Tensor, tokens: int) -> Any:
    return x[rows] if isinstance(x, Tensor) and x.shape[:1] == (tokens,) else x


_MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)


def _of_expert(weight: Any) -> Tensor | None:
    """The parameter of three dims of which a matrix is a part."""
    base = weight._base if isinstance(weight, Tensor) else None
    return base if base is not None and base.dim() == 3 and weight.dim() == 2 else None


def _given(args: Sequence[Any], kwargs: dict[str, Any], place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)
