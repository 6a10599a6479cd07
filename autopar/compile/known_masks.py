"""Masks that a model keeps in buffers, or computes from positions, as a server needs them: known while compiling.

know_masks(gm, {"attn.bias": tril(ones(1024, 1024))})     the buffer becomes a constant
mark_causal(gm)                                           attention whose bias hides all later tokens is causal
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from autopar.compile.bias_terms import terms
from autopar.compile.key_biases import add_up, fold, is_column
from autopar.compile.soft_masks import HIDES, harden
from autopar.ir.graph import arguments, calls_of, is_call, placeholders, remove_dead_code, set_argument, shape
from autopar.ir.meta import input_specs, remembered, signature_of
from autopar.passes.canonicalize.constant_masks import LARGEST, LEAST, constant, may_hide, triangle
from autopar.passes.canonicalize.mask_blocks import hides_later_in_blocks
from autopar.rewrite.build import Build, operand

aten = torch.ops.aten
_OWN = ("parameter", "buffer", "constant")  # inputs that are the model's


def know_masks(gm: GraphModule, buffers: Mapping[str, Tensor]) -> None:
    """Buffers [.., n, m] of a captured graph that are masks become constants: bool ones, those of zeros and ones or of
    zeros and numbers that hide a key, and biases that hide later keys. Other values are marked if they hide none.
    Masks by numbers such as -1e4 become masks by -inf."""
    signature = signature_of(gm)
    known = {s.name for s in signature.inputs if s.kind == "buffer" and s.name in buffers and _is_mask(buffers[s.name])}
    inputs = [replace(s, kind="constant") if s.name in known else s for s in signature.inputs]
    gm.meta["signature"] = replace(signature, inputs=tuple(inputs))
    for node in placeholders(gm):
        spec = input_specs(gm)[node.name]
        node.meta["moderate"] = spec.kind in _OWN and _is_moderate(buffers.get(spec.name))
    gm.meta["constants"] = {**gm.meta.get("constants", {}), **{name: buffers[name].detach().clone() for name in known}}
    with _known_constants(gm):
        harden(gm)


def _is_mask(x: Tensor) -> bool:
    if x.dtype == torch.bool:
        return True
    if x.is_meta or x.is_complex() or x.dim() < 2 or min(x.shape[-2:]) < 2:
        return False
    if bool(((x == 0) | (x == 1)).all() or ((x == 0) | (x <= HIDES)).all()):
        return True
    later = torch.ones(x.shape[-2:], dtype=torch.bool).triu(1)
    return x.shape[-2] == x.shape[-1] and bool((x[..., later] <= LEAST).all())  # a bias and a mask in one


def _is_moderate(x: Tensor | None) -> bool:
    """Whether values, if they are known, hide nothing."""
    return x is None or x.is_meta or not x.is_floating_point() or bool((x > LEAST).all())


def mark_causal(gm: GraphModule) -> None:
    """In a normalized graph, set the flag of attention whose bias hides all later tokens: windows written as masks, and
    masks beside learned biases. A bias that is a number per key token (`key_biases`) becomes a part of the keys."""
    with _known_constants(gm):
        of_ids = _of_ids(gm)
        for node in calls_of(gm.graph, torch.ops.autopar.attention.default):
            if arguments(node)["bias"] is not None:
                _know_bias(node, of_ids)
    remove_dead_code(gm)


@contextlib.contextmanager
def _known_constants(gm: GraphModule) -> Iterator[None]:
    """Within: `constant` knows the values of the graph's constants."""
    specs, constants = input_specs(gm), gm.meta.get("constants", {})
    for node in placeholders(gm):
        if specs[node.name].kind == "constant":
            node.meta["value"] = constants[specs[node.name].name]
    yield
    for node in placeholders(gm):
        node.meta.pop("value", None)


def _of_ids(gm: GraphModule) -> Callable[[Node], bool]:
    """Whether a value depends on an input of the forward."""
    kinds = {name: spec.kind for name, spec in input_specs(gm).items()}

    def of_ids(x: Node) -> bool:
        return remembered(x, "of_ids", ask)

    def ask(x: Node) -> bool:
        return kinds.get(x.name) not in _OWN if x.op == "placeholder" else any(map(of_ids, x.all_input_nodes))

    for node in gm.graph.nodes:  # in order, so that no question goes deep
        of_ids(node)
    return of_ids


def _know_bias(node: Node, of_ids: Callable[[Node], bool]) -> None:
    known, build = arguments(node), Build(node)
    parts = terms(known["bias"], build, of_ids)
    tokens = shape(known["k"])[2]
    if known["sinks"] is None and (rows := [x for x in parts if _is_row(x) and of_ids(x) and not may_hide(x)]):
        parts = [x for x in parts if x not in rows]
        set_argument(node, "bias", add_up(parts, build))
    columns = [x for x in parts if of_ids(x)]
    others = [x for x in parts if x not in columns]
    mask = _total([x for x in map(constant, others) if x is not None])
    large = [x for x in others if x.meta["val"].numel() > LARGEST and hides_later_in_blocks(x, LEAST, constant)]
    shows_own = mask is None or _shows_own(mask)
    causal = known["causal"] or tokens == 1 or _hides_later(mask, tokens) or (large and shows_own)
    if not causal or not all(is_column(x) and not may_hide(x) for x in columns):
        return
    if columns and tokens > 1:
        if known["softcap"]:
            return  # the bias is added to what the cap leaves
        fold(node, columns, build)
        if mask is not None and _is_triangle(mask):
            others = [x for x in others if constant(x) is None]
        others = [x for x in others if x not in large or triangle(x) is None]
        set_argument(node, "bias", add_up(others, build))
    set_argument(node, "causal", True)
    unknown = [x for x in others if constant(x) is None and x not in large]
    if shows_own and not any(map(may_hide, unknown)):
        _no_empty_rows(node)


def _is_row(x: Node) -> bool:
    """Whether a part of a bias is the same for all keys: a softmax does not see it."""
    return len(shape(x)) > 1 and shape(x)[-1] == 1 and shape(x)[-2] > 1


def _no_empty_rows(node: Node) -> None:
    """where(lse == -inf, what a row without keys gets, x) --> x; x * where(lse == -inf, nan, 1.0) --> x"""
    for lse in [user for user in node.users if is_call(user, operator.getitem) and user.args[1] == 1]:
        rows = [x for empty in lse.users if is_call(empty, aten.eq.Scalar) for x in (empty, *empty.users)]
        for chosen in [x for row in rows for x in row.users if is_call(x, aten.where.self) and x.args[0] in rows]:
            otherwise = operand(chosen, 2)
            for user in [x for x in chosen.users if is_call(x, aten.mul.Tensor) and x.args[1] is chosen]:
                if is_call(otherwise, aten.full.default) and otherwise.args[1] == 1:
                    user.replace_all_uses_with(operand(user))
            chosen.replace_all_uses_with(otherwise)


def _total(masks: Sequence[Tensor]) -> Tensor | None:
    return functools.reduce(torch.add, map(torch.atleast_2d, masks)) if masks else None


def _hides_later(bias: Tensor | None, tokens: int) -> bool:
    """Whether a bias [.., S, S] of S tokens hides all keys above the diagonal, and none on it: a row without keys would
    be the mean of all."""
    if bias is None or bias.shape[-2:] != (tokens, tokens):
        return False
    above = torch.ones(bias.shape[-2:], dtype=torch.bool).triu(1)
    return bool((bias[..., above] <= LEAST).all()) and _shows_own(bias)


def _shows_own(bias: Tensor) -> bool:
    """Whether each token sees itself."""
    own = bias if bias.shape[-2] == 1 else bias.diagonal(dim1=-2, dim2=-1)
    return bool((own > LEAST / 2).all())


def _is_triangle(bias: Tensor) -> bool:
    """Whether a bias that hides later keys does nothing else."""
    return bool((bias.tril() == 0).all())
