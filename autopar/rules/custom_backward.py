"""Rules of `autopar.ops.gradient`: a result of an autograd function, and the gradient that arrives at it.

value   grad   result          gradient of an input x: dual(x)
S       S      S
P       R, I   P               The grad_output is a value like any other: its placement is that of a gradient,
R, I    P      R               dual(result). So what a backward does with it is typed op by op, and ops
R, I    R, I   I               that need the reduced gradient get it.
"""

from __future__ import annotations

from torch.fx import Node

from autopar.ir.graph import is_call, placement
from autopar.ir.placement import INVARIANT, REPLICATE, Partial, Placement, Shard, dual
from autopar.ops.gradient import GRAD_OUTPUT, OWN_BACKWARD, RESULT
from autopar.rules.builders import named_dims
from autopar.rules.call import Call
from autopar.rules.rule import Rule, RuleError, matches

TARGETS = (GRAD_OUTPUT, OWN_BACKWARD, RESULT)


def grad_output(call: Call) -> Rule:
    """A gradient is sharded as its value is."""
    dims = named_dims(call, call.result)
    return call.rule([dims, *[None] * (len(call.operands) - 1)], [dims])


def token(call: Call) -> Rule:
    """It has no value."""
    return call.rule([None for _ in call.operands], [()])


def result(call: Call) -> Rule:
    """Value, grad_output, token."""
    dims = named_dims(call, call.result)
    return call.rule([dims, dims, None], [dims])


def of_result(value: Placement, grad_output: Placement) -> Placement:
    """The placement of a result. Raises RuleError if the grad_output does not have the dual placement."""
    if isinstance(value, Shard) or isinstance(grad_output, Shard) or isinstance(value, Partial):
        found = value
    else:
        found = REPLICATE if isinstance(grad_output, Partial) else INVARIANT
    if not matches(grad_output, dual(found), gradient=False):
        raise RuleError(f"a value that is {value} cannot have a gradient that is {grad_output}")
    return found


def type_of_part(node: Node, axis: str, operands: list[Placement]) -> list[Placement]:
    """Result placements of a call of one of `TARGETS`. Raises RuleError."""
    if is_call(node, GRAD_OUTPUT):
        chosen = placement(node, axis)
        of_result(operands[0], chosen)
        return [chosen]
    if is_call(node, RESULT):
        return [of_result(*operands[:2])]
    count = len(node.args[0])  # type: ignore[arg-type]
    for x, gradient in zip(operands[:count], operands[count : 2 * count], strict=True):
        if not matches(gradient, dual(x), gradient=False):
            raise RuleError(f"the gradient of an input that is {x} is {gradient}")
    return [INVARIANT]
