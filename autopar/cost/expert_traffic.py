"""What token dispatchers send, before any graph is there: bytes and seconds.

A copy of a token (`autopar.token_dispatchers`) moves four times in a step: to the experts, back, and both ways for
gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost.cluster import AxisLinks
from autopar.cost.topology import NamedLinks
from autopar.token_dispatchers import TOKEN_DISPATCHERS, Routing

Wires = AxisLinks | NamedLinks


@dataclass(frozen=True)
class DispatchCost:
    """Cost of one layer, per rank. Copies of a token: those that leave its rank, or the rank that forwards them within
    a node. Bytes and seconds: of a whole step, forward and backward."""

    name: str
    copies_inside: float
    copies_between: float
    bytes_inside: float
    bytes_between: float
    seconds: float


def dispatch_costs(
    routing: Routing, tokens: int, width: int, itemsize: int, inside: Wires, between: Wires
) -> list[DispatchCost]:
    """One row per token dispatcher, in the order of their table. ``tokens``: of a rank; ``width``: numbers of a token,
    of ``itemsize`` bytes each; ``inside``, ``between``: links of a rank within its node, and to other nodes."""
    found = []
    for name, row in TOKEN_DISPATCHERS.items():
        (near, far), copy = row.copies(routing), copy_bytes(routing, name, tokens, width, itemsize)
        times = [
            wires.seconds(row.collective, n * copy, row.exchanges)
            for wires, n in ((inside, near), (between, far))
            if wires.size > 1
        ]
        # Levels of one exchange run beside each other; those of a dispatcher over nodes one after the other.
        seconds = sum(times) if row.over_nodes else max(times, default=0.0)
        found.append(DispatchCost(name, near, far, near * copy, far * copy, seconds))
    return found


def copy_bytes(routing: Routing, name: str, tokens: int, width: int, itemsize: int) -> int:
    """What one copy of each of ``tokens`` moves in a step, both ways and for gradients, numbers and weights with it."""
    number = TOKEN_DISPATCHERS[name].expert_bytes
    weights = 2 * itemsize if number else 0  # there, and their gradient back
    return tokens * (4 * width * itemsize + routing.top_k * (number + weights))
