"""Loops over the positions of a mask: over all positions, each turn a branch on its entry.

    hit = (chosen.sum((1, 2)) > 0).nonzero()             for e in range(E):
    for e in hit:                                -->         if hit[e]:
        token, k = torch.where(chosen[e])                        token, k = torch.where(chosen[e])
        y.index_add_(0, token, f(x[token]))                      y.index_add_(0, token, f(x[token]))

As with other branches on a mask (`row_branches`), only if a turn that is skipped does nothing else than work on rows,
and no turn reads what an earlier one has assigned.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.adapters.fx.graph_nodes import node_of
from autopar.capture.branches.expert_masks import expert_mask, experts_asked
from autopar.capture.branches.row_branches import Lines, functions_at, is_plain, stays, updates


class ChosenLoops:
    """Such loops in one traced forward. ``within``: (running frame, lines) -> the mask of the branch that they are."""

    def __init__(self, within: dict[tuple[int, Lines], Tensor]) -> None:
        self._within = within
        self._turns: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # mask of a turn -> (mask of all, its place)
        self.running = 0

    def turns(self, chosen: Tensor, frame: FrameType | None, turn: Callable[[int], Any]) -> Any:
        """What a loop over the positions of a mask [E] runs over; ``turn(e)`` makes what a turn gets. None where the
        frame is in no loop whose turns may be branches."""
        lines = (
            _body("".join(linecache.getlines(frame.f_code.co_filename)), frame.f_lineno) if frame is not None else None
        )
        if lines is None or frame is None:
            return None
        return _Turns(lambda: self._run(chosen, (id(frame), (frame.f_code, lines)), turn))

    def _run(self, chosen: Tensor, where: tuple[int, Lines], turn: Callable[[int], Any]) -> Iterator[Any]:
        self.running += 1
        try:
            for e in range(chosen.shape[0]):
                one = chosen[e : e + 1]
                self._turns[one] = chosen, e
                self._within[where] = one
                yield turn(e)
        finally:
            self.running -= 1
            self._within.pop(where, None)

    def implied(self, one: Tensor, mask: Tensor) -> bool:
        """Whether a mask is empty wherever the turn ``one`` is skipped: the turns are of the experts that any token
        chose, and the mask is of the tokens that chose this one."""
        if one not in self._turns:
            return False
        chosen, e = self._turns[one]
        mode: Any = get_proxy_mode()
        nodes = [node_of(x, mode.tracer) if mode is not None else None for x in (chosen, mask)]
        if any(node is None for node in nodes):
            return False
        asked, own = experts_asked(nodes[0], e), expert_mask(nodes[1])
        return (
            asked is not None
            and own is not None
            and (asked.index, asked.expert) == (own.index, own.expert)
            and not asked.kept
        )


class _Turns:
    """Not a list: each turn begins when the loop asks for it."""

    def __init__(self, run: Callable[[], Iterator[Any]]) -> None:
        self._run = run

    def __iter__(self) -> Iterator[Any]:
        return self._run()


@functools.lru_cache(256)
def _body(text: str, line: int) -> range | None:
    """The lines of the body of the loop over what this line makes, if its turns may be branches."""
    for function in functions_at(text, line):
        for loop in ast.walk(function):
            if isinstance(loop, ast.For) and loop.iter.lineno <= line <= (loop.iter.end_lineno or 0):
                return _lines(function, loop)
    return None


def _lines(function: ast.FunctionDef, loop: ast.For) -> range | None:
    body, target = loop.body, ast.Assign([loop.target], ast.Constant(None))
    fit = not loop.orelse and all(map(_is_work, body)) and stays(function, [target, *body]) and not _carries(loop)
    return range(body[0].lineno, (body[-1].end_lineno or body[-1].lineno) + 1) if fit else None


def _is_work(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.If):
        return all(isinstance(x, ast.Continue) or _is_work(x) for x in (*statement.body, *statement.orelse))
    return is_plain(statement)


def _carries(loop: ast.For) -> bool:
    """Whether a turn may read a name that an earlier one has assigned."""
    assigned = {x.id for x in ast.walk(loop.target) if isinstance(x, ast.Name)}
    stored = {x.id for s in loop.body for x in ast.walk(s) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
    for statement in loop.body:
        names = [x for x in ast.walk(statement) if isinstance(x, ast.Name)]
        augmented = (
            {statement.target.id}
            if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name)
            else set()
        )
        read = {x.id for x in names if isinstance(x.ctx, ast.Load)} | augmented
        read -= {x for x in read if updates(statement, x)}
        if read & stored - assigned:
            return True
        if not isinstance(statement, ast.If):
            assigned |= {x.id for x in names if isinstance(x.ctx, ast.Store)}
    return False
