"""Operators of others (`torch.library`) that bring a backward of their own: whether it is linear in the gradient.

A derivative is. A backward that clips, normalises or keeps the largest entries is not: then the gradient must be whole
before it runs, and not the part of a rank or of a microbatch. What is registered may be code in any language, so it is
tried out, on random numbers of three sizes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from autopar.adapters.dispatch import has_kernel, without_modes
from autopar.adapters.operators import OpOverload
from autopar.capture.trace.export import flatten
from autopar.ir.graph import has_gradient
from autopar.ir.meta import remembered

OURS = ("aten", "prims", "autopar", "_c10d_functional", "higher_order")
MOST = 2**26  # elements that are tried out
SIZES = (1e-5, 1.0, 1e5)
AUTOGRAD = ("Autograd", "AutogradCPU", "AutogradCUDA")


def has_nonlinear_backward(node: Node) -> bool:
    """Of a call: whether its operator has a backward of its own that is not linear in the gradient. One that cannot be
    tried is taken to be linear, with a warning."""
    return _has_backward(node) and remembered(node, "nonlinear", _tried)


def _has_backward(node: Node) -> bool:
    op = node.target
    if not isinstance(op, OpOverload) or op.namespace in OURS or not has_gradient(node):
        return False
    return any(has_kernel(op.name(), key) for key in AUTOGRAD)


def _tried(node: Node) -> bool:
    try:
        size = sum(math.prod(x.meta["val"].shape) for x in node.all_input_nodes)
        if size > MOST:
            raise ValueError(f"its operands have {size} elements")
        with without_modes(), torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            return _is_nonlinear(node)
    except Exception as error:
        warnings.warn(
            f"the backward of {node.target} cannot be tried out on the CPU ({error}); it is taken to be linear in the "
            "gradient, as a derivative is; if it is not, write it as a torch.autograd.Function, which is captured",
            stacklevel=2,
        )
        return False


def _is_nonlinear(node: Node) -> bool:
    args, kwargs = map_arg((node.args, node.kwargs), _example)
    made = node.target(*args, **kwargs)  # type: ignore[operator]
    results = [y for y in flatten(made)[0] if isinstance(y, Tensor) and y.requires_grad]
    inputs = [x for x in flatten((args, kwargs))[0] if isinstance(x, Tensor) and x.requires_grad]

    def backward(grads: Sequence[Tensor]) -> Tensor:
        found = torch.autograd.grad(results, inputs, grads, retain_graph=True, allow_unused=True)
        return torch.cat([x.double().flatten() for x in found if x is not None])

    for size in SIZES:
        a, b = ([torch.randn_like(y) * size for y in results] for _ in range(2))
        apart = backward(a), backward(b)
        together = backward([x + y for x, y in zip(a, b, strict=True)])
        least = max(float(x.abs().max()) for x in apart)
        if not math.isfinite(least):
            raise ValueError("it gives numbers that are not finite")
        exact = max(torch.finfo(y.dtype).eps for y in results) ** 0.5
        if float((together - sum(apart)).abs().max()) > exact * least:
            return True
    return False


def _example(x: Node) -> Any:
    """Random numbers, or zeros, of an operand's shape and dtype."""
    val = x.meta["val"]
    if not isinstance(val, Tensor):
        return val
    shape = tuple(val.shape)
    if val.dtype.is_floating_point or val.dtype.is_complex:
        return torch.randn(shape, dtype=val.dtype).requires_grad_(has_gradient(x))
    return torch.zeros(shape, dtype=val.dtype)
