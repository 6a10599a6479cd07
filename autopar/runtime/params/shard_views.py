"""What views are of that do not lie in a piece alone: the gathered tensor, kept as its pieces are, both ways.

row = x[3]           x is cut along dim 0: ``row`` is a view of a gathered copy of x, its source
row.mul_(2)          is written into the pieces of x
x.mul_(2); row       is gathered again, since the piece was written to
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from autopar.adapters.autograd import version_of
from autopar.adapters.dtensor import local_of, storage_of
from autopar.runtime.params.shards import piece_of


@dataclass(eq=False)
class ViewSource:
    """The piece that a view is of which does not lie in a piece alone: the view is one of ``whole``, which was gathered
    when the piece was at version ``seen``; ``stale``: an operator on pieces has written to it since."""

    of: Any  # a ShardedTensor
    whole: Tensor
    seen: int
    stale: bool = False

    @classmethod
    def gathered(cls, x: Any) -> ViewSource:
        """Collective."""
        of = x.same()  # the piece as it lies now: `.data` of x may be set
        whole = of.whole()
        if of.holders is not None and of.holders.here:
            whole = whole.clone()  # beside the piece, as on other stages
        found = cls(of, whole, _version(of))
        _live.add(found)
        return found

    def refresh(self) -> None:
        """Gather again if the piece was written to. Collective then."""
        if self.stale or _version(self.of) != self.seen:
            self.whole.copy_(self.of.whole())
            self.seen, self.stale = _version(self.of), False

    def write(self) -> None:
        """What the whole now holds, into the piece."""
        local_of(self.of).copy_(piece_of(self.whole, self.of.device_mesh, self.of.cuts, self.of.holders))
        make_stale(self.of)
        self.seen, self.stale = _version(self.of), False


_live: weakref.WeakSet[ViewSource] = weakref.WeakSet()


def make_stale(x: Any) -> None:
    """The piece of a tensor was written to."""
    if not _live:
        return
    place = storage_of(local_of(x))
    for source in _live:
        source.stale |= storage_of(local_of(source.of)) == place


def all_written() -> None:
    """Pieces of any tensors may have been written to, on some ranks."""
    for source in _live:
        source.stale = True


def _version(x: Any) -> int:
    local = local_of(x) if x.piece is None else x.piece
    return version_of(local)
