"""AOTAutograd: traces a function into the joint graph of its forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch.fx import GraphModule

from autopar.capture.trace.effects import without_tokens


def traced_joint(run: Callable[..., Any], inputs: Sequence[Tensor], checked: Any) -> GraphModule:
    """Forward and backward of a function of flat tensors as one graph of core operators; the forward alone if no input
    requires a gradient.

    ``run`` is called under AOTAutograd, on its own versions of the fake tensors ``inputs``. ``checked``: see
    `without_tokens`. Raises ValueError where torch has no backward.
    """

    def function(*args: Tensor) -> Any:
        with torch.fx.traceback.preserve_node_meta():
            return run(*args)

    try:
        traced = aot_export_joint_simple(function, tuple(inputs), trace_joint=any(x.requires_grad for x in inputs))
    except RuntimeError as error:
        explain(error)
        raise
    assert isinstance(traced, GraphModule)
    return without_tokens(traced, checked)


def explain(error: RuntimeError) -> None:
    """Raises ValueError for an operator without a derivative, from torch's error."""
    if "derivative" in str(error) or "differentia" in str(error):
        raise ValueError(
            f"differentiate: {(str(error).splitlines() or ['?'])[0].rstrip('. ')}; torch has no backward for it; "
            "detach its input, or use other operators"
        ) from error
