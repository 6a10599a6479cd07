"""Rules of factorisations, inverses and solvers: the last dims are a matrix, those before them a batch of matrices."""

from __future__ import annotations

import dataclasses

from autopar.rules.builders import named_dims, pointwise
from autopar.rules.call import Call, RuleFunction
from autopar.rules.rule import Dims, Rule

WHY = "the op spans the matrix"


def matrices(*ranks: int) -> RuleFunction:
    """(... m n) -> (... any), with the batch dims of operands aligned to the right; ``ranks``: the dims of each operand
    that are no batch. A result has the whole batch in front of whatever it is made of: a matrix, a vector, a number."""

    def build(call: Call) -> Rule:
        return _rule(call, [call.shape_of(x) for x in call.operands], ranks)

    return build


def _rule(call: Call, shapes: list[tuple[int, ...]], ranks: tuple[int, ...]) -> Rule:
    batch = max(len(shape) - rank for shape, rank in zip(shapes, ranks))
    lead = named_dims(call, call.result[:batch])

    def dims_of(name: str, shape: tuple[int, ...], count: int) -> Dims:
        head = [dim if size != 1 else () for dim, size in zip(lead[batch - count :], shape[:count], strict=True)]
        return (*head, *(call.factor(f"{name}{i}", size) for i, size in enumerate(shape[count:])))

    operands = [dims_of(f"m{i}_", shape, len(shape) - rank) for i, (shape, rank) in enumerate(zip(shapes, ranks))]
    results = [dims_of(f"r{i}_", shape, batch) for i, shape in enumerate(call.result_shapes)]
    return call.rule(operands, results, blocked={f: WHY for f in call.sizes if f[0] in "mr"})


def solve(call: Call) -> Rule:
    """a (... n n), b (... n k) or (... n): b is read as vectors where its shape is that of a without its last dim."""
    a, b = (call.shape_of(x) for x in call.operands)
    vectors = len(b) == 1 or a[:-1] == b
    rule = _rule(call, [a, b], (2, 1 if vectors else 2))
    if not vectors and len(b) == len(a) - 1 and a[-1] == b[-1]:  # with fewer matrices in a it might be
        return dataclasses.replace(
            rule, blocked={f: "the right-hand side could be read as vectors in a piece" for f in rule.sizes}
        )
    return rule


def cross(call: Call) -> Rule:
    """Products of vectors along a dim; linear in either."""
    rule = pointwise("product")(call)
    dim = int(call.args["dim"]) % len(call.result)
    return dataclasses.replace(rule, blocked={f"d{dim}": "the op spans the vector"})
