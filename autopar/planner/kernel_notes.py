"""Attentions for which GPUs have no fused kernel, or that of autopar alone, as notes of a plan.

    note attention: 4 of 4 on GPUs in plain products, all scores at once: no fused kernel draws dropout ...

They say the same on every machine, with and without a GPU: what chips and the package flash-attn can do is data.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.fx import GraphModule, Node

from autopar.attention.operator import FACT_NAMES
from autopar.ir.graph import arguments, calls_of
from autopar.ops.kernels import expected_kernel
from autopar.ops.kernels.chips import MODERN
from autopar.ops.mask_spec import MaskSpec

PACKAGE, OWN = "flash_attn", "triton_flash"
_OR_PACKAGE = ", or in that of the package flash-attn where it is installed (extra flash)"
_PLAIN = "on GPUs in plain products, all scores at once"


def kernel_notes(gm: GraphModule) -> list[tuple[str, str]]:
    """("attention", how many and why) of a normalised global graph, one for each reason."""
    nodes = calls_of(gm.graph, torch.ops.autopar.attention.default)
    counts = Counter(why for node in nodes if (why := _why_plain(node)))
    return [("attention", f"{count} of {len(nodes)} {why}") for why, count in counts.items()]


def _why_plain(node: Node) -> str:
    """Empty if a fused kernel of torch takes it, or if its dtype is none that GPUs are used for."""
    args: dict[str, Any] = torch.fx.node.map_arg(arguments(node), lambda n: n.meta["val"])
    q, k, v, facts = args["q"], args["k"], args["v"], MaskSpec(*(args[name] for name in FACT_NAMES))
    if q.dtype == torch.float64:
        return ""
    if facts.dropout:
        return f"{_PLAIN}: no fused kernel draws dropout of probabilities from positions; without it they are fused"
    chosen = expected_kernel(MODERN, q, k, v, facts, without=(PACKAGE,))
    if chosen == "math":
        return f"{_PLAIN}: no fused kernel takes them together: {_facts(q, v, facts)}"
    if chosen == OWN:
        packaged = expected_kernel(MODERN, q, k, v, facts) == PACKAGE
        return "on GPUs fused in autopar's own kernel" + (_OR_PACKAGE if packaged else "")
    return ""


def _facts(q: torch.Tensor, v: torch.Tensor, facts: MaskSpec) -> str:
    """'softcap, bias, float32, widths 300 and 300'"""
    names = ("softcap", "bias", "key_mask", "segments", "window", "chunk", "offset")
    given = [name.replace("_", " ") for name in names if getattr(facts, name) not in (None, 0, 0.0)]
    dtype = str(q.dtype).removeprefix("torch.")
    return ", ".join([*given, dtype, f"widths {q.shape[-1]} and {v.shape[-1]}"])
