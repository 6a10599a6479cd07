"""What the schedules share: checks of requests, where stages are, and how actions become an Order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopar.schedule.order import Action, Order
from autopar.schedule.request import Request


def check(request: Request, name: str, virtual_stages: int | None = 1, sliced: bool = False) -> None:
    """What every schedule needs. ``virtual_stages``: the parts per rank that it runs (None: checked by it).

    Raises ValueError.
    """
    for what in ("ranks", "microbatches", "virtual_stages", "token_slices"):
        if getattr(request, what) < 1:
            raise ValueError(f"schedule: {name} needs {what} >= 1, found {getattr(request, what)}")
    if virtual_stages is not None and request.virtual_stages != virtual_stages:
        other = "use interleaved" if virtual_stages == 1 else f"ask for {virtual_stages}"
        raise ValueError(
            f"schedule: {name} runs {virtual_stages} parts per rank, found {request.virtual_stages}; {other}"
        )
    if request.token_slices != 1 and not sliced:
        raise ValueError(
            f"schedule: {name} runs whole microbatches, found {request.token_slices} token slices; "
            "use tera_pipe or seq1f1b, or ask for 1 slice"
        )


def loop(ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """stage -> rank if the chain visits all ranks in order, ``chunks`` times: 0 1 2 0 1 2."""
    return tuple(stage % ranks for stage in range(ranks * chunks))


def vee(ranks: int) -> tuple[int, ...]:
    """stage -> rank if the chain visits all ranks forward, then backward: 0 1 2 2 1 0."""
    return tuple(range(ranks)) + tuple(reversed(range(ranks)))


def one_chain(
    name: str, request: Request, rows: Iterable[Sequence[Action]], rank_of: tuple[int, ...] | None = None
) -> Order:
    """The order whose microbatches all flow through stages 0, 1, 2 ..."""
    rank_of = rank_of or loop(request.ranks)
    chain = tuple(range(len(rank_of)))
    ranks = tuple(tuple(row) for row in rows)
    return Order(name, ranks, (chain,), rank_of, (0,) * request.microbatches, request.token_slices)
