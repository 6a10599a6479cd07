"""What ranks find out without the store: by a few numbers in collectives between hosts.

    as_expected(groups, call)        whether this rank goes on with a call that all expect (`call_order`)
    hold(groups, claims)             whether all claims hold, the same answer on all ranks

Along pp ranks run different graphs, and one that was told something else than the others (a parameter that is frozen)
would leave them waiting. So they say each other, with one number, whether their next call is the expected one. That
goes over a group of its own: a rank that makes another call must not be taken at its word for something else.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.adapters.distributed import takes_host_tensors
from autopar.runtime.comm.p2p import AXIS
from autopar.runtime.fault.errors import board, explained
from autopar.runtime.mesh.process_groups import Groups


def as_expected(groups: Groups, call: Hashable, own: Hashable = None) -> bool:
    """Whether all ranks expect this call of this rank, which then goes on with it; ``own``: what else must be as in
    that call before, on this rank. Collective along pp. Raises CollectiveError where a rank is known to have failed."""
    if verdict := board().verdict:
        raise board().ended("agreeing on the next call", verdict)
    expected = groups.order.expects(call, own)
    if groups.mesh.size(AXIS) > 1:
        expected = _all_do(groups, expected)
    if expected:
        groups.order.goes_on(call)
    return expected


def _all_do(groups: Groups, expected: bool) -> bool:
    """Whether all ranks along pp say so; never without a backend for the host."""
    group = groups.votes()
    if group is None:
        return False
    said = torch.tensor([int(expected)])
    with explained("agreeing on the next call", groups.ranks(AXIS)):
        dist.all_reduce(said, dist.ReduceOp.MIN, group=group)
    return bool(said.item())


def can_vote(groups: Groups) -> bool:
    """Whether the groups of all axes take tensors of the host."""
    return all(takes_host_tensors(groups.group(axis)) for axis, size in groups.mesh.axes if size > 1)


def hold(groups: Groups, claims: Sequence[tuple[tuple[str, ...], str]]) -> bool:
    """Whether of each claim, (axes, digest), the digests of ranks that differ on these axes only are equal. All ranks
    make the same claims but for the digests. Collective over all ranks, but for claims of which no two ranks make one.
    """
    sizes = groups.mesh.sizes
    spread = [tuple(axis for axis in axes if sizes[axis] > 1) for axes, _ in claims]
    words = [int(digest, 16) >> 1 for _, digest in claims]
    bounds = torch.tensor([[word, -word] for word in words])  # greatest and least, negated
    if not any(spread):
        return True
    for axis in sizes:
        _reduce(groups, axis, bounds, [i for i, axes in enumerate(spread) if axis in axes])
    differ = torch.zeros(1, 1, dtype=torch.int64)
    differ[0, 0] = int((bounds.sum(1) != 0).any())
    for axis, size in sizes.items():
        if size > 1 and any(axes and axis not in axes for axes in spread):
            _reduce(groups, axis, differ, [0])
    return not differ.item()


def _reduce(groups: Groups, axis: str, rows: Tensor, chosen: list[int]) -> None:
    """The greatest of each number, of the chosen rows."""
    if chosen:
        found = rows[chosen]
        with explained("comparing the batch", groups.ranks(axis)):
            dist.all_reduce(found, dist.ReduceOp.MAX, group=groups.group(axis))
        rows[chosen] = found
