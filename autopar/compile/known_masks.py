"""Masks that a model keeps in buffers, or computes from positions, as a server needs them: known while compiling.

know_masks(gm, {"attn.bias": tril(ones(1024, 1024))})     the buffer becomes a constant
mark_causal(gm)                                           attention whose bias hides all later tokens is causal
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.fx import GraphModule

from autopar.ir.graph import arguments, calls_of, placeholders, set_argument
from autopar.ir.meta import input_specs, signature_of
from autopar.passes.canonicalize.constant_masks import LEAST, constant


def know_masks(gm: GraphModule, buffers: Mapping[str, Tensor]) -> None:
    """Buffers [.., n, m] of a captured graph that are masks become constants: bool ones, and those of zeros and ones,
    or of zeros and numbers that hide a key."""
    signature = signature_of(gm)
    known = {s.name for s in signature.inputs if s.kind == "buffer" and s.name in buffers and _is_mask(buffers[s.name])}
    inputs = [replace(s, kind="constant") if s.name in known else s for s in signature.inputs]
    gm.meta["signature"] = replace(signature, inputs=tuple(inputs))
    gm.meta["constants"] = {**gm.meta.get("constants", {}), **{name: buffers[name].detach().clone() for name in known}}


def _is_mask(x: Tensor) -> bool:
    if x.dtype == torch.bool:
        return True
    if x.is_meta or x.is_complex() or x.dim() < 2 or min(x.shape[-2:]) < 2:
        return False
    return bool(((x == 0) | (x == 1)).all() or ((x == 0) | (x <= LEAST)).all())


def mark_causal(gm: GraphModule) -> None:
    """In a normalized graph, set the flag of attention whose bias, known now, lets no token see a later one: windows
    written as masks, for example. The bias stays."""
    specs, constants = input_specs(gm), gm.meta.get("constants", {})
    for node in placeholders(gm):
        if specs[node.name].kind == "constant":
            node.meta["value"] = constants[specs[node.name].name]
    for node in calls_of(gm.graph, torch.ops.autopar.attention.default):
        known = arguments(node)
        if not known["causal"] and known["bias"] is not None and _hides_later(constant(known["bias"])):
            set_argument(node, "causal", True)
    for node in placeholders(gm):
        node.meta.pop("value", None)


def _hides_later(bias: Tensor | None) -> bool:
    """Whether a bias [.., S, S] hides all keys above the diagonal, and none on it: a row without keys would be the mean
    of all."""
    if bias is None or bias.dim() < 2 or bias.shape[-2] != bias.shape[-1]:
        return False
    above = torch.ones(bias.shape[-2:], dtype=torch.bool).triu(1)
    own = bias.diagonal(dim1=-2, dim2=-1)
    return bool((bias[..., above] <= LEAST).all() and (own > LEAST / 2).all())
