"""Custom backwards as ordinary nodes of the graph, with a *grad_output*.

    g  = gradient_of(f(x), [x])                  stands for the gradient that will arrive at the result
    gx = mul(g, 2.0)                             the backward: whatever it computes, of g and of any other value
    t  = own_backward([x], [gx], [g], "F", True) the gradient of x is gx
    y  = with_backward(f(x), g, t)               the value f(x); what arrives as its gradient is g

In the forward nothing reads what depends on a grad_output: the joint graph (`autopar.passes.autodiff.backward_builder`)
runs it on the gradient once that is known. ``t`` ties a function's results to its inputs and has no value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.ops.declare import dense, operator

TRACED = "torch.autograd.grad through an autograd function inside of a forward is not supported; compute it outside"


@operator(fake=dense)
def gradient_of(value: Tensor, inputs: list[Tensor]) -> Tensor:
    """A grad_output: the gradient of a result whose value is ``value``, of its shape and dtype. Without a value."""
    return torch.zeros_like(value, memory_format=torch.contiguous_format)


@operator()
def own_backward(
    inputs: list[Tensor], gradients: list[Tensor], grad_outputs: list[Tensor], name: str, zeros: bool
) -> Tensor:
    """The gradients of the inputs are ``gradients``, which are computed from ``grad_outputs``. ``name``: of the
    function. ``zeros``: whether a result without gradient gets zeros; else the backward would see None."""
    return gradients[0].new_zeros(())


@own_backward.register_fake
def _(inputs: list[Tensor], gradients: list[Tensor], grad_outputs: list[Tensor], name: str, zeros: bool) -> Tensor:
    found, expected = [g.shape for g in gradients], [x.shape for x in inputs]
    assert found == expected, f"own_backward of {name}: gradients of {found} for inputs of {expected}"
    return gradients[0].new_empty(())


@operator()
def with_backward(value: Tensor, grad_output: Tensor, token: Tensor) -> Tensor:
    """A result of a function: ``value``, whose gradient is ``grad_output`` in the backward of ``token``."""
    return value.clone()


@with_backward.register_fake
def _(value: Tensor, grad_output: Tensor, token: Tensor) -> Tensor:
    assert value.shape == grad_output.shape, f"with_backward: {value.shape} and {grad_output.shape}"
    return torch.empty_like(value)


def _unknown(ctx: Any, *grads: Tensor) -> None:
    raise ValueError(TRACED)


for _op in (own_backward, with_backward):
    _op.register_autograd(_unknown)

GRAD_OUTPUT = torch.ops.autopar.gradient_of.default
OWN_BACKWARD = torch.ops.autopar.own_backward.default
RESULT = torch.ops.autopar.with_backward.default
