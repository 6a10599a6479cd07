"""What operators that are written in Python hold beside their operands and results, while they run.

    workspace(cross_entropy node) = most bytes alive within it - bytes of its results

Found by running the operator's own function on fake tensors of the node's shapes, once for each kind of call. It is
what a CPU holds. Attention counts where GPUs have no fused kernel for it either: plans are the same on every machine.
Left out are the workspace of torch's own operators, and operators that read values to know their sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from autopar.adapters.operators import kernel_of
from autopar.capture.trace.python_workspace import workspace_bytes
from autopar.ir.graph import arguments
from autopar.ops import attention as attention
from autopar.ops import cross_entropy as cross_entropy
from autopar.ops import grouped_experts as grouped_experts
from autopar.ops import vocab_parallel as vocab_parallel  # registers what is named here
from autopar.ops.kernels import expected_kernel
from autopar.ops.kernels.chips import MODERN
from autopar.ops.mask_spec import MaskSpec

ours = torch.ops.autopar

ATTENTIONS = {ours.attention.default, ours.attention_backward.default}
IN_PYTHON = ATTENTIONS | {
    ours.cross_entropy.default,
    ours.cross_entropy_backward.default,
    ours.piece_max.default,
    ours.piece_sums.default,
    ours.piece_backward.default,
    ours.moe_dispatch.default,
    ours.moe_dispatch_backward.default,
    ours.moe_combine.default,
    ours.moe_combine_backward.default,
}
_FACTS = tuple(MaskSpec.__dataclass_fields__)[:-2]  # the last two are no arguments
_KNOWN: dict[Any, int] = {}


def workspace(node: Node) -> int:
    """Bytes."""
    if node.target not in IN_PYTHON:
        return 0
    given: dict[str, Any] = map_arg(arguments(node), lambda n: n.meta["val"])
    key = (node.target, *map(_kind, given.values()))
    if key not in _KNOWN:
        function = kernel_of(node.target)
        assert function is not None
        _KNOWN[key] = 0 if node.target in ATTENTIONS and _is_fused(given) else workspace_bytes(function, given)
    return _KNOWN[key]


def _kind(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return tuple(map(_kind, x))
    return (tuple(x.shape), x.stride(), x.dtype) if isinstance(x, Tensor) else x


def _is_fused(given: Mapping[str, Any]) -> bool:
    """Whether a GPU would not hold the scores of all pairs."""
    facts = MaskSpec(*(given[name] for name in _FACTS))
    return expected_kernel(MODERN, given["q"], given["k"], given["v"], facts) != "math"
