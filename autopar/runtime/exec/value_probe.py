"""Where the first NaN of a step arises: its graphs are run node by node, and every value is looked at.

    z = x / s        [finite, 0]  ->  inf       an overflow: this node
    p = z - z        [inf]        ->  nan       a NaN, which arose where the infinity did: at z
    y = p + 1        [nan]        ->  nan       spreads

A NaN of infinite inputs arises where these did, unless they are constants: masks are -inf, and a row of nothing but
-inf makes its softmax NaN there. What came from another rank, or from an action whose values nobody followed, arose
elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from autopar.capture.trace.export import line_of
from autopar.ir.graph import module_path
from autopar.ops.traits import COLLECTIVES
from autopar.runtime.exec.value_checks import operator_of


@dataclass(frozen=True)
class Origin:
    """Where values that are not finite arose: the ``number`` of the node in the order of the step, in words its
    operator and line (``place``), the ``module``, the ``action``, and what ``happened``."""

    number: int
    place: str
    module: str
    action: str
    happened: str

    def __str__(self) -> str:
        where = f"{self.module} ({self.place})" if self.module else self.place
        return f"{self.happened} in {where}, action {self.action}"


@dataclass(frozen=True)
class _State:
    """Whether a value holds NaN, or infinities; and where these arose (None: elsewhere, or as constants)."""

    nan: bool = False
    inf: bool = False
    origin: Origin | None = None

    @property
    def finite(self) -> bool:
        return not self.nan and not self.inf


class ValueProbe:
    """The origins that a step has met. ``action``: that runs now."""

    def __init__(self) -> None:
        self.action = ""
        self.met: list[tuple[Origin, Tensor]] = []  # with the results of graphs that they have reached
        self._of: dict[int, tuple[Tensor, _State]] = {}  # results that are not finite, by id
        self._number = 0

    def run(self, lowered: GraphModule, inputs: list[Any]) -> Any:
        """What the graph returns for the inputs, of which the list is emptied."""
        nodes, env, states = list(lowered.graph.nodes), dict[Node, Any](), dict[Node, _State]()
        last = {x: node for node in nodes for x in node.all_input_nodes}
        given = iter(list(inputs))
        inputs.clear()
        for node in nodes:
            self._number += 1
            if node.op == "output":
                found = map_arg(node.args[0], env.__getitem__)
                self._note(zip(node.args[0], found, strict=True), states)
                return tuple(found)
            env[node] = next(given) if node.op == "placeholder" else _result(node, lowered, env)
            states[node] = self._state(node, env, states)
            for x in node.all_input_nodes:
                if last[x] is node:
                    env[x] = None
        raise AssertionError("a graph has an output")

    def _state(self, node: Node, env: dict[Node, Any], states: dict[Node, _State]) -> _State:
        before = [states[x] for x in node.all_input_nodes]
        tensors = [x for x in _flat(env[node]) if isinstance(x, Tensor)]
        if not tensors:  # a collective on its way
            return _State(any(s.nan for s in before), any(s.inf for s in before), _earliest(before))
        tensors = [x for x in tensors if x.is_floating_point()]
        nan, inf = any(bool(x.isnan().any()) for x in tensors), any(bool(x.isinf().any()) for x in tensors)
        if not nan and not inf:
            return _State()
        if node.op == "placeholder":
            known = self._of.get(id(env[node]))
            return _State(nan, inf, known[1].origin if known is not None else None)
        from_nan, from_inf = [s for s in before if s.nan], [s for s in before if s.inf]
        if nan and from_nan:
            return _State(nan, inf, _earliest(from_nan))
        infinite = _earliest(from_inf)
        if from_inf and (infinite is not None or not nan):
            return _State(nan, inf, infinite)
        if _communicates(node) or (not nan and _is_constant(node)):
            return _State(nan, inf)
        of = "a constant that is infinite, such as a mask," if from_inf else "finite values"
        happened = f"{'nan' if nan else 'inf'} arose from {of}"
        place = f"{operator_of(node)} at {line_of(node)}"
        return _State(nan, inf, Origin(self._number, place, module_path(node), self.action, happened))

    def _note(self, results: Iterable[tuple[Any, Any]], states: dict[Node, _State]) -> None:
        for node, value in results:
            state = states.get(node) if isinstance(node, Node) else None
            if state is not None and not state.finite and isinstance(value, Tensor):
                self._of[id(value)] = value, state
                if state.origin is not None:
                    self.met.append((state.origin, value))

    def first(self, results: Sequence[Tensor]) -> Origin | None:
        """The earliest origin that has reached one of the results of the step; else that has left its graph."""
        wanted = {id(x) for x in results}
        reached = [origin for origin, value in self.met if id(value) in wanted]
        return min(reached or [origin for origin, _ in self.met], key=lambda x: x.number, default=None)


def _earliest(states: Iterable[_State]) -> Origin | None:
    return min((s.origin for s in states if s.origin is not None), key=lambda x: x.number, default=None)


def _result(node: Node, lowered: GraphModule, env: dict[Node, Any]) -> Any:
    args, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    if node.op == "get_attr":
        return getattr(lowered, str(node.target))
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _flat(value: Any) -> list[Any]:
    """What is in nested lists and tuples."""
    return [x for part in value for x in _flat(part)] if isinstance(value, (list, tuple)) else [value]


def _communicates(node: Node) -> bool:
    """Waits for a collective; its value came from other ranks, too."""
    return node.meta.get("original_aten") in COLLECTIVES or getattr(node.target, "__name__", "") in (
        "finish",
        "answered",
    )


def _is_constant(node: Node) -> bool:
    """Made of nothing, or of a number that is infinite itself."""
    numbers = [x for x in _flat([*node.args, *node.kwargs.values()]) if isinstance(x, float)]
    return not node.all_input_nodes or any(math.isinf(x) for x in numbers)


_probes: list[ValueProbe] = []


@contextmanager
def probing(probe: ValueProbe) -> Iterator[None]:
    """Context manager: step graphs are run by ``probe``."""
    _probes.append(probe)
    try:
        yield
    finally:
        _probes.remove(probe)


def open_probe() -> ValueProbe | None:
    """The probe that runs step graphs now, if one does."""
    return _probes[-1] if _probes else None
