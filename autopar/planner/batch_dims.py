"""Which dim of each input is the batch: what the user or an adapter says, else evidence from shapes and from the graph.

Samples of a batch do not interact before the loss. So the graph tells a batch dim from a sequence dim: followed through
the graph, a batch dim reaches everything that the model computes, while a sequence dim ends in a recurrence or reaches
an attention as the dim whose entries attend to each other.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch.fx import GraphModule, Node

from autopar.ir.batch import BatchDims
from autopar.ir.graph import arguments, describe, global_shape, has_gradient, is_call, reach, tensor_operands
from autopar.ir.mesh import Mesh
from autopar.ir.meta import input_specs, signature_of
from autopar.ir.placement import Shard
from autopar.options import Options
from autopar.plan import Plan
from autopar.rules import RuleError, has_rule, rule_of
from autopar.rules.sequence_parallel import spread_label

ATTENTION = torch.ops.autopar.attention.default
Shapes = Mapping[str, tuple[int, ...]]


def known_dims(shapes: Shapes, options: Options, fixed: Plan | None, hints: BatchDims) -> dict[str, int | None]:
    """Batch dims of the inputs that need no evidence: those of the user, an earlier plan, or an adapter's ``hints``, in
    this order. Raises ValueError for a dim that an input lacks."""
    said = {**hints, **(fixed.batch_dims if fixed is not None else {}), **dict(options.batch_dims)}
    said = {name: dim for name, dim in said.items() if name in shapes}
    check_dims_exist(said, shapes)
    return {name: dim if dim is None else dim % len(shapes[name]) for name, dim in said.items()}


def check_dims_exist(dims: BatchDims, shapes: Shapes) -> None:
    """Raises ValueError for an input without the dim that is named as its batch."""
    for name, dim in dims.items():
        shape = shapes.get(name)
        if dim is not None and shape is not None and not -len(shape) <= dim < len(shape):
            raise ValueError(
                f"batch_dims: the batch is dim {dim} of input {name}, found a tensor of shape {list(shape)}; pass a "
                f"row for each example, name another dim, or batch_dims={{{name!r}: None}} for an input without a batch"
            )


def likely_dims(shapes: Shapes, known: BatchDims) -> dict[str, int | None]:
    """The likely batch dims: what is known, else dim 0 where its size is that of the batch.

    The batch size is that of the first known dim, else the most common leading size; a tie goes to the first.
    """
    rows = next((shapes[n][d] for n, d in known.items() if d is not None), None)
    if rows is None:
        leading = Counter(shape[0] for name, shape in shapes.items() if shape and name not in known)
        rows = max(leading, key=leading.__getitem__, default=0)
    return {n: known[n] if n in known else 0 if shape and shape[0] == rows else None for n, shape in shapes.items()}


def decide_batch_dims(gm: GraphModule, options: Options, fixed: Plan | None) -> dict[str, int | None]:
    """Input -> its batch dim, or None, for a normalised global graph: the known ones (hints of an adapter are in
    ``gm.meta["batch_dims"]``); the others follow from those, or from the graph alone. Raises ValueError, asking for
    batch_dims, where they are ambiguous. Sets ``gm.meta["unclear_batch_dims"]`` to the inputs whose dim is only likely.
    """
    nodes = {n.name: n for n in gm.graph.nodes if n.op == "placeholder"}
    inputs = {s.name: nodes[s.node] for s in signature_of(gm).inputs if s.kind == "input"}
    shapes = {name: tuple(global_shape(node)) for name, node in inputs.items()}
    said = known_dims(shapes, options, fixed, gm.meta.get("batch_dims", {}))
    gm.meta["unclear_batch_dims"] = []
    likely = likely_dims(shapes, said)
    if options.static_inputs:  # their values may have unrolled the forward over its examples: no dim is one of a batch
        said |= {name: dim for name, dim in likely.items() if dim is not None}
    free = [name for name, shape in shapes.items() if name not in said and shape]
    if not free:
        return likely
    anchors = [(n, likely[n]) for n in said if likely[n] is not None]
    if anchors:
        found = [_LikelyDim.of(gm, n, inputs[n], d) for n, d in anchors if d is not None]
    else:
        dims = [(n, d) for n in free for d, size in enumerate(shapes[n]) if size > 1]
        chosen = _chosen(inputs, [_LikelyDim.of(gm, n, inputs[n], d) for n, d in dims], likely)
        found = [chosen] if chosen is not None else []
    decided = _followed(found, inputs, likely, free)
    reached = {node for c in found for node in c.labels}
    gm.meta["unclear_batch_dims"] = [
        n for n in free if decided[n] is not None and inputs[n] not in reached and inputs[n].users
    ]
    return decided


@dataclass(frozen=True)
class _LikelyDim:
    """One dim of one input, followed through the graph."""

    name: str
    dim: int
    size: int
    labels: Mapping[Node, Shard]
    coverage: int  # how many values computed from parameters have the dim
    meets: str  # the operator in which its entries interact; "" if they do not
    ours: bool  # it reaches a parameter, buffer or constant, so it is a dim of the model

    @classmethod
    def of(cls, gm: GraphModule, name: str, node: Node, dim: int) -> _LikelyDim:
        size = global_shape(node)[dim]
        labels = spread_label(node, Shard(dim), Mesh.of(dp=size), "dp", inputs=True)  # shards of one row, the smallest
        specs = input_specs(gm)
        ours = any(x.op == "placeholder" and specs[x.name].kind != "input" for x in labels)
        coverage = sum(x.op != "placeholder" and has_gradient(x) for x in labels)
        return cls(name, dim, size, labels, coverage, _meeting(gm, labels), ours)


def whole_over_microbatches(gm: GraphModule, dims: BatchDims, count: int) -> dict[str, str]:
    """Inputs with other rows than most (patches of all images) whose rows meet, and where: images of unlike sizes meet
    in every attention. Each microbatch then gets all of them. ``count``: of all shards of the batch."""
    nodes = {n.name: n for n in gm.graph.nodes if n.op == "placeholder"}
    inputs = {s.name: nodes[s.node] for s in signature_of(gm).inputs if s.kind == "input"}
    rows = {name: global_shape(inputs[name])[d] for name, d in dims.items() if d is not None and name in inputs}
    usual = Counter(rows.values()).most_common(1)[0][0] if rows else 0
    found = {n: _first_meeting(inputs[n], dims[n] or 0, count) for n, size in rows.items() if size != usual}
    return {name: where for name, where in found.items() if where}


def _first_meeting(start: Node, dim: int, count: int) -> str:
    """The operator that cannot compute each of ``count`` shards of an input by itself; "" if there is none."""
    mesh = Mesh.of().with_microbatches(count)
    labels = spread_label(start, Shard(dim), mesh, "mb")
    own = set(reach([start], lambda node: node.users))
    for user in (user for node in labels if node in own for user in node.users):
        if is_call(user, operator.getitem) or user.op != "call_function" or not has_rule(user):
            continue
        rule = rule_of(user, "mb", mesh)
        for x, factors in zip(tensor_operands(user), rule.operands, strict=True):
            try:
                if x in labels and factors is not None:
                    rule.completed(rule.cut_of(factors, labels[x], count))
            except RuleError:
                return describe(user)
    return ""


def _meeting(gm: GraphModule, labels: Mapping[Node, Shard]) -> str:
    """The attention whose sequence is the followed dim; "" without one."""
    for node in gm.graph.nodes:
        if is_call(node, ATTENTION):
            operands = arguments(node)
            if any(labels.get(operands[name], Shard(0)).dim == 2 for name in ("q", "k", "v")):
                return describe(node)
    return ""


def _chosen(inputs: Mapping[str, Node], candidates: list[_LikelyDim], likely: BatchDims) -> _LikelyDim | None:
    """The likely dim, unless the graph shows that another is the batch. Raises ValueError where neither is clear."""
    clear = [c for c in candidates if not (c.meets or c.ours)]
    first = next((n for n in inputs if likely[n] is not None), None)
    guess = next((c for c in candidates if (c.name, c.dim) == (first, likely.get(first or ""))), None)
    best = max(clear, key=lambda c: (c.coverage, c is guess), default=None)
    if guess is None or best is None:
        return guess if guess is None or not guess.meets else _refuse(inputs, guess)
    if guess not in clear or best.coverage >= 2 * guess.coverage:
        return best if 2 * best.coverage >= guess.coverage else _refuse(inputs, guess)
    votes = Counter(shape[0] for node in inputs.values() if (shape := global_shape(node)))
    for other in clear:
        apart = other.dim == 0 and other.size != guess.size and inputs[other.name] not in guess.labels
        if apart and other.coverage >= guess.coverage and votes[other.size] >= votes[guess.size]:
            _refuse(inputs, guess, other)
    return guess


def _refuse(inputs: Mapping[str, Node], guess: _LikelyDim, other: _LikelyDim | None = None) -> NoReturn:
    why = f"it may be dim {guess.dim} of {guess.name}"
    if guess.meets:
        why = f"dim {guess.dim} of {guess.name} is the sequence of {guess.meets}, and no other dim is clear"
    elif guess.ours:
        why = f"dim {guess.dim} of {guess.name} is a dim of the model's own tensors, and no other dim is clear"
    elif other is not None:
        why += f", or dim {other.dim} of {other.name}"
    shapes = ", ".join(f"{name} {tuple(global_shape(node))}" for name, node in inputs.items())
    raise ValueError(
        f"batch_dims: cannot tell which dim of which input is the batch: {why} (inputs {shapes}); pass "
        f'batch_dims={{"{guess.name}": {guess.dim}, ...}}, with None for an input without a batch dim'
    )


def _followed(
    found: list[_LikelyDim], inputs: Mapping[str, Node], likely: BatchDims, free: list[str]
) -> dict[str, int | None]:
    """The batch dims of the inputs that the graph reaches from the chosen one. An input that it does not reach has
    batch dim 0 if it has as many rows as the batch, else none (ranks that then pass different values get an error). The
    graph cannot tell such an input from a table with as many rows: the texts of a contrastive loss look like the rows
    of a memory bank. What the ranks pass at run time can (`runtime.batches`)."""
    dims = dict(likely)
    for name in free if found else ():
        label = next((c.labels[inputs[name]] for c in found if inputs[name] in c.labels), None)
        shape = tuple(global_shape(inputs[name]))
        alike = any(c.dim == 0 and shape[0] == c.size for c in found)
        dims[name] = label.dim if label is not None else 0 if alike else None
    return dims
