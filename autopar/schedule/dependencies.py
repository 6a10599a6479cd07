"""What every action of an order waits for: the rules that `simulate` plays by and that a runtime must keep.

    F(part)    F(part-1) of the same microbatch and slice; F of the slice before on the same stage
    B, BW, BWR own F; B(part+1); B of the slice behind on the same stage (backward runs slices in reverse)
    W          own B
    SF, SB     own F, own B
    RF, RB     nothing: they are posted, and what uses the value waits for the send at the other end

In a lowered order, what comes from other ranks comes only through transfers; between stages of one rank F and B wait
for the nearest stage of the same chain.
"""

from __future__ import annotations

from itertools import pairwise

from autopar.schedule.order import BACKWARD, Action, Order

Key = tuple[str, int, int, int, int]
"""(kind, stage, microbatch, slice, peer) of an action; BW and BWR count as B."""


def key_of(action: Action) -> Key:
    """What others wait for when they wait for this action."""
    kind = "B" if action.kind in BACKWARD else action.kind
    return kind, action.stage, action.microbatch, action.slice, action.peer


class Dependencies:
    """``dependencies(action)`` lists the keys that the action waits for."""

    def __init__(self, order: Order) -> None:
        """``order``: lowered or not."""
        self.slices = order.slices
        self.before: dict[int, int] = {}  # stage -> stage whose F comes first without a transfer
        self.behind: dict[int, int] = {}
        for chain in order.chains:
            for i, stage in enumerate(chain):
                known = [s for s in chain[:i] if not order.lowered or order.rank_of[s] == order.rank_of[stage]]
                if known:
                    self.before[stage] = known[-1]
            for stage, following in pairwise(chain):
                if not order.lowered:
                    self.behind[stage] = following
        if order.lowered:
            self.behind = {first: second for second, first in self.before.items()}
        self.receives: dict[tuple[str, int, int, int], list[Key]] = {}
        for actions in order.ranks:
            for action in actions:
                if action.kind in ("RF", "RB"):
                    unit = (action.kind[1], action.stage, action.microbatch, action.slice)
                    self.receives.setdefault(unit, []).append(key_of(action))

    def __call__(self, action: Action) -> list[Key]:
        """Keys in the order in which it is best to look at them: what is latest first."""
        kind, stage, microbatch, piece = action.kind, action.stage, action.microbatch, action.slice
        if kind in ("W", "SB"):
            return [("B", stage, microbatch, piece, -1)]
        if kind == "SF":
            return [("F", stage, microbatch, piece, -1)]
        if kind == "F":
            return self._forward(stage, microbatch, piece)
        if kind in BACKWARD:
            return self._backward(stage, microbatch, piece)
        return []

    def _forward(self, stage: int, microbatch: int, piece: int) -> list[Key]:
        keys = self._received("F", stage, microbatch, piece)
        if stage in self.before:
            keys.append(("F", self.before[stage], microbatch, piece, -1))
        if piece > 0:
            keys.append(("F", stage, microbatch, piece - 1, -1))
        return keys

    def _backward(self, stage: int, microbatch: int, piece: int) -> list[Key]:
        keys = self._received("B", stage, microbatch, piece)
        if stage in self.behind:
            keys.append(("B", self.behind[stage], microbatch, piece, -1))
        if piece < self.slices - 1:
            keys.append(("B", stage, microbatch, piece + 1, -1))
        keys.append(("F", stage, microbatch, piece, -1))
        return keys

    def _received(self, way: str, stage: int, microbatch: int, piece: int) -> list[Key]:
        """The receives of a unit, which must be posted, and the sends at the other end."""
        if not self.receives:
            return []
        posted = self.receives.get((way, stage, microbatch, piece), [])
        sends = [(f"S{way}", peer, microbatch, piece, stage) for _, _, _, _, peer in posted]
        return [*posted, *sends]
