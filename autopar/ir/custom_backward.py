"""Custom backwards in a graph (`autopar.ops.gradient`): which nodes they consist of, and what they may do.

g = gradient_of(y0, [x])                      a grad_output
gx = clamp(g, -1, 1)                          inside: depends on a grad_output
t = own_backward([x], [gx], [g], "Clamped")   the token
y = with_backward(y0, g, t)                   a result
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph, GraphModule, Node

from autopar.ir.graph import calls_of, is_call, reach, tensor_operands
from autopar.ir.meta import signature_of
from autopar.ops.gradient import GRAD_OUTPUT, OWN_BACKWARD, RESULT


@dataclass
class CustomBackward:
    """One call of an autograd function. inputs, gradients: in pairs. grad_outputs: the gradients of its
    results. inside: the nodes that depend on these and lead to a gradient, in order. results: those that are used."""

    token: Node
    inputs: list[Node]
    gradients: list[Node]
    grad_outputs: list[Node]
    name: str
    zeros: bool
    inside: list[Node] = field(default_factory=list)

    @property
    def results(self) -> list[Node]:
        return [user for user in self.token.users if is_call(user, RESULT)]

    @property
    def saved(self) -> list[Node]:
        """What the backward uses besides the grad_outputs, in the order of use."""
        made = {*self.grad_outputs, *self.inside}
        used = [x for node in self.inside for x in node.all_input_nodes] + self.gradients
        return list(dict.fromkeys(x for x in used if x not in made))


def own_backward_arguments(token: Node) -> tuple[list[Node], list[Node], list[Node], str, bool]:
    """The arguments of a call of `own_backward`."""
    inputs, gradients, grad_outputs, name, zeros = token.args
    return list(inputs), list(gradients), list(grad_outputs), str(name), bool(zeros)  # type: ignore[arg-type]


def own_backwards(graph: Graph) -> list[CustomBackward]:
    """All custom backwards of a graph, in order."""
    order = {n: i for i, n in enumerate(graph.nodes)}
    inside = inside_of(graph)
    found = []
    for token in graph.nodes:
        if is_call(token, OWN_BACKWARD):
            own = CustomBackward(token, *own_backward_arguments(token))
            needed = reach(own.gradients, lambda n: n.all_input_nodes if n in inside else ())
            made = (n for n in needed if n in inside and not is_call(n, GRAD_OUTPUT))
            own.inside = sorted(made, key=order.__getitem__)
            found.append(own)
    return found


def inside_of(graph: Graph) -> set[Node]:
    """Gradients of results, and everything that depends on one: values that are unknown before the backward."""
    found: set[Node] = set()
    for node in graph.nodes if calls_of(graph, GRAD_OUTPUT) else ():
        if is_call(node, GRAD_OUTPUT) or (_passes(node) and any(x in found for x in node.all_input_nodes)):
            found.add(node)
    return found


def _passes(node: Node) -> bool:
    return node.op == "call_function" and not is_call(node, OWN_BACKWARD, RESULT)


def glued(nodes: Sequence[Node]) -> set[Node]:
    """The nodes, of some nodes in order, that must stay with the one before them: those between the first
    grad_output of a function and its last result."""
    order = {n: i for i, n in enumerate(nodes)}
    found: set[Node] = set()
    for own in own_backwards(nodes[0].graph) if nodes else []:
        at = [order[n] for n in (*own.grad_outputs, *own.inside, own.token, *own.results) if n in order]
        if at:
            found |= set(nodes[min(at) + 1 : max(at) + 1])
    return found


def is_linear(own: CustomBackward, rule_of: Callable[[Node], Any]) -> bool:
    """Whether the sum over ranks of incoming gradients passes through to those of the inputs, by the operators' rules:
    ``rule_of`` raises ValueError where there is none."""
    pending = set(own.grad_outputs)
    for node in own.inside:
        operands = tensor_operands(node)
        summed = frozenset(i for i, x in enumerate(operands) if x in pending)
        try:
            rule = rule_of(node)
        except ValueError:
            return False
        summed = frozenset(i for i in summed if rule.operands[i] is not None)
        if summed and summed not in rule.linear:
            return False
        pending.add(node)
    return all(g in pending for g in own.gradients)


def check_contained(gm: GraphModule) -> None:
    """Raises ValueError where a value that depends on a gradient leaves a backward in another way than as a gradient:
    a buffer would be written before the gradient exists."""
    inside = inside_of(gm.graph)
    specs = signature_of(gm).outputs
    for value, spec in zip(gm.graph.output_node().args[0], specs, strict=True):  # type: ignore[arg-type]
        if value in inside:
            raise ValueError(
                f"capture: {spec.name} takes a value that depends on the gradient, in the backward of the autograd "
                f"function {function_of(value)}; a backward may only return gradients"
            )


def function_of(node: Node) -> str:
    """The name of the function to whose backward a node belongs."""
    grad_outputs = {grad_output: own.name for own in own_backwards(node.graph) for grad_output in own.grad_outputs}
    return next((grad_outputs[x] for x in reach([node]) if x in grad_outputs), "unknown")
