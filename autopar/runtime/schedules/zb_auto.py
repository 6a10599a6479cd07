"""Zero bubble by search: memory limit in, order out (Zero Bubble, Qi et al. 2024, section 3 and appendix G).

    p = 3, m = 4, M_W = M_B / 2, in 2 M_B, where 1F1B needs 3 (with 3 it finds ZB-H1, with 4 ZB-H2):
    rank 0  0F0 0F1 --  --  --  0B0 0W0 0F2 0B1 0W1 0F3 --  --  0B2 0W2 0B3 0W3
    rank 1  --  1F0 1F1 --  1B0 1W0 1B1 1W1 1F2 --  --  1F3 1B2 1W2 1B3 1W3 --
    rank 2  --  --  2F0 2B0 2F1 2B1 2W0 2W1 --  2F2 2B2 2W2 2F3 2B3 2W3 --  --

The time from a rank's first start to its last end is made small, over the slowest rank, while F, which adds M_B, B,
which replaces it by M_W, and W, which frees that, stay within the limit. 1F1B, ZB-H1, ZB-H2 and the rows of many greedy
policies run on the given costs; the best are refined. Where the result reaches `lower_bound`, it is optimal. No solver
is needed: on the twelve profiles of the paper the bubble is nowhere larger than that of its integer program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from autopar.runtime.schedules.common import check, one_chain
from autopar.runtime.schedules.one_f_one_b import one_f_one_b
from autopar.runtime.schedules.zb_greedy import POLICIES, greedy
from autopar.runtime.schedules.zb_h1 import zb_h1
from autopar.runtime.schedules.zb_h2 import zb_h2
from autopar.runtime.schedules.zb_refine import refine
from autopar.runtime.schedules.zb_search import TOLERANCE, RowProblem, RowRun, Rows, lower_bound, run_rows
from autopar.schedule.order import Action, Order
from autopar.schedule.request import SCHEDULES, Costs, Request, Schedule

HAND_MADE: tuple[Callable[[Request], Order], ...] = (one_f_one_b, zb_h1, zb_h2)
# How far the search goes. Counted, not timed: every rank must find the same order.
POLICY_ACTIONS = 400_000  # actions run by all greedy policies together
REFINE_ACTIONS = 400_000  # the same for refinement
REFINE_RUNS = 200  # trial runs from each of the best rows
REFINED = 3  # how many of the best are refined


def zb_auto(request: Request) -> Order:
    """Any number of ranks and microbatches, on ``request.costs`` (default: F = B = W = 1 and no stash) within
    ``request.memory_limit``, in the unit of ``costs.activations`` (default: what 1F1B needs, p M_B for equal parts).

    Raises ValueError for a limit that does not hold one microbatch.
    """
    check(request, "zb_auto")
    rows = search(row_problem(request), _hand_made(request))
    return one_chain("zb_auto", request, (_actions(rank, row) for rank, row in enumerate(rows)))


def row_problem(request: Request) -> RowProblem:
    """The costs and the memory limit of a request, per rank. Raises ValueError."""
    costs = request.costs or Costs()
    F, B, W, held, stash = (_per_rank(costs, name, request.ranks) for name in ("F", "B", "W", "activations", "stash"))
    one = [max(both) for both in zip(held, stash)]
    limit = request.memory_limit
    if limit is None:
        ahead = min(request.ranks, request.microbatches) - 1
        limit = max(ahead * each + last for each, last in zip(held, one))
    if not limit * TOLERANCE >= max(one):
        raise ValueError(
            f"schedule: zb_auto needs a memory_limit of at least {max(one):g}, for one microbatch on "
            f"rank {one.index(max(one))}, found {limit:g}; raise it, or use smaller microbatches"
        )
    return RowProblem(request.microbatches, F, B, W, costs.comm, held, stash, limit)


def search(problem: RowProblem, known: list[Rows]) -> Rows:
    """The best rows that fit the memory: of ``known``, of the greedy policies, and of what refinement makes of them."""
    bound = lower_bound(problem)
    tried: dict[Rows, RowRun] = {}
    for rows in _candidates(problem, known):
        if rows not in tried and all(problem.fits(rank, row) for rank, row in enumerate(rows)):
            made = run_rows(problem, rows)
            assert made is not None, "neither known rows nor greedy ones deadlock"
            tried[rows] = made
            if made.cost <= bound * TOLERANCE:
                return rows
    best_first = sorted(tried.values(), key=lambda made: made.cost)[:REFINED]
    runs = min(REFINE_RUNS, REFINE_ACTIONS // problem.actions // len(best_first))
    best = best_first[0]
    for made in best_first:
        if best.cost > bound * TOLERANCE:
            best = min(best, refine(problem, made.rows, runs, bound), key=lambda other: other.cost)
    return best.rows


def _candidates(problem: RowProblem, known: list[Rows]) -> Iterator[Rows]:
    yield from known
    for policy in POLICIES[: max(4, POLICY_ACTIONS // problem.actions)]:
        yield greedy(problem, policy)


def _hand_made(request: Request) -> list[Rows]:
    """Rows of the schedules that this one replaces; BW becomes B and W."""
    plain = Request(request.ranks, request.microbatches)
    return [
        tuple("".join(action.kind for action in actions) for actions in schedule(plain).ranks) for schedule in HAND_MADE
    ]


def _per_rank(costs: Costs, name: str, ranks: int) -> tuple[float, ...]:
    value = getattr(costs, name)
    values = value if isinstance(value, tuple) else (value,) * ranks
    if len(values) != ranks:
        raise ValueError(f"costs: {name} needs one value per part ({ranks}), found {len(values)}")
    if min(values) < 0:
        raise ValueError(f"costs: {name} needs values of at least 0, found {min(values):g}")
    return values


def _actions(rank: int, row: str) -> list[Action]:
    done = {"F": 0, "B": 0, "W": 0}
    actions = []
    for kind in row:
        actions.append(Action(rank, kind, done[kind]))
        done[kind] += 1
    return actions


SCHEDULES.add(
    "zb_auto",
    Schedule(
        "zb_auto",
        zb_auto,
        "W apart, order searched for given costs and memory limit",
        searches=True,
        bubble="(p - 1)*(F + B - W)",
        memory="p",
    ),
)
