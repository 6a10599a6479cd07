"""Rules of factorizations, inverses, solvers, distances and diagonals: the last dims are a matrix, those before them a
batch of matrices."""

from __future__ import annotations

from dataclasses import replace

from autopar.rules.builders import UNARY, einsum_rule, named_dims, pointwise
from autopar.rules.call import Call, RuleFunction
from autopar.rules.rule import Dims, Rule

WHY = "the op spans the matrix"


def matrices(*ranks: int) -> RuleFunction:
    """(... m n) -> (... any), with the batch dims of operands aligned to the right; ``ranks``: the number of non-batch
    dims of each operand. A result has the batch dims before its own: a matrix, a vector, a number."""

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
    """a (... n n), b (... n k) or (... n): b is a batch of vectors if its shape is that of a without its last dim."""
    a, b = (call.shape_of(x) for x in call.operands)
    vectors = len(b) == 1 or a[:-1] == b
    rule = _rule(call, [a, b], (2, 1 if vectors else 2))
    if not vectors and len(b) == len(a) - 1 and a[-1] == b[-1]:  # with fewer matrices in a shard it might be
        return replace(rule, blocked={f: "in a shard the right-hand side could pass for vectors" for f in rule.sizes})
    return rule


def cross(call: Call) -> Rule:
    """Products of vectors along a dim; linear in each alone."""
    rule = pointwise("product")(call)
    dim = int(call.args["dim"]) % len(call.result)
    return replace(rule, blocked={f"d{dim}": "the op spans the vector"})


def distances(call: Call) -> Rule:
    """x1 (... p m), x2 (... r m) -> (... p r): from every row of one to every row of the other."""
    rule = einsum_rule("... p m, ... r m -> ... p r", "x1 x2")(call)
    return replace(rule, blocked={"m": "a distance spans the vector"}, linear=())


def diagonal(call: Call) -> Rule:
    """(... n m ...) -> (... k): rows and columns are blocked, since a block of rank r is not on the diagonal."""
    shape = call.shape("self")
    dims, pair = named_dims(call, shape), {call.dim("dim1"), call.dim("dim2")}
    k = call.factor("k", call.result[-1])
    blocked = {f: "its diagonal is taken" for i in pair for f in dims[i]} | {f: "it is a diagonal" for f in k}
    rest = [dims[i] for i in range(len(shape)) if i not in pair]
    return call.rule([dims], [(*rest, k)], blocked=blocked, linear=UNARY, keep_partial=True)


def diagonal_matrices(call: Call) -> Rule:
    """The mirror of `diagonal`: (... k) -> (... n m ...)"""
    rank = len(call.result)
    pair = {int(call.args[name]) % rank for name in ("dim1", "dim2")}
    made = named_dims(call, call.result)
    rest = [made[i] for i in range(rank) if i not in pair]
    k = call.factor("k", call.shape("self")[-1])
    blocked = {f: "it becomes a diagonal" for f in (*k, *(f for i in pair for f in made[i]))}
    return call.rule([(*rest, k)], [made], blocked=blocked, linear=UNARY, keep_partial=True)


def diagonal_written(call: Call) -> Rule:
    """x (... n m ...), src (... k) -> x with a diagonal replaced by src."""
    rule = diagonal(replace(call, result_shapes=(call.shape("src"),)))
    (source,), (part,) = rule.operands, rule.results
    assert source is not None
    both = (frozenset({0, 1}),)
    return replace(rule, operands=(source, part), results=(source,), linear=both)
