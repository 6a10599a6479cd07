"""What a schedule costs in closed form: equal stages, no time for transfers, as its paper says.

    p  ranks        m  microbatches        v  virtual stages per rank        n  token slices per microbatch
    F, B, W         time of a rank's whole share of the model for one microbatch
    FB              the same of an overlapped forward and backward

A row of `SCHEDULES` has two formulas over these symbols: ``bubble``, the time that a rank is idle in a step, and
``memory``, the peak of the fullest rank in activations of one microbatch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from autopar.schedule.request import Costs, Request
from autopar.schedule.simulate import Timeline

if TYPE_CHECKING:
    import sympy

SYMBOLS = ("p", "m", "v", "n", "F", "B", "W", "FB")


def expression(formula: str) -> sympy.Expr:
    """A formula, such as "(p - 1)*(F + B + W)", as a sympy expression. Raises ValueError for other symbols than
    `SYMBOLS`."""
    import sympy  # slow to import

    found = sympy.sympify(formula, {name: sympy.Symbol(name) for name in SYMBOLS})
    unknown = sorted({str(symbol) for symbol in found.free_symbols} - {*SYMBOLS})
    if unknown:
        raise ValueError(
            f"schedule: formulas have the symbols {', '.join(SYMBOLS)}, found {', '.join(unknown)} in {formula!r}"
        )
    return found


def evaluated(formula: str, sizes: Request, costs: Costs) -> float:
    """The value of a formula. ``costs``: numbers, of a rank's whole share of the model."""
    times = {name: getattr(costs, name) for name in ("F", "B", "W")}
    counts = {"p": sizes.ranks, "m": sizes.microbatches, "v": sizes.virtual_stages, "n": sizes.token_slices}
    cell = sum(times.values()) if costs.FB is None else costs.FB
    return float(expression(formula).subs({**counts, **times, "FB": cell}))


def of_equal_stages(formula: str, timeline: Timeline) -> float:
    """The value for a timeline's order, if all its stages took their average time."""
    order, costs = timeline.order, timeline.costs
    sizes = Request(len(order.ranks), order.microbatches, order.parts // len(order.ranks), order.slices)
    f, b, w = (sizes.virtual_stages * float(np.mean(times)) for times in (costs.F, costs.B, costs.W))
    cell = None if costs.FB is None else sizes.virtual_stages * float(np.mean(costs.FB))
    return evaluated(formula, sizes, Costs(f, b, w, FB=cell))
