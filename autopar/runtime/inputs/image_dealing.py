"""Images of a batch dealt to data ranks by their cost, whatever rank has their text.

    rank 0: images of 64, 16 patches         rank 0 computes 64            rank 0 has the features of both its images,
    rank 1: images of 16, 16 patches   -->   rank 1 computes 16, 16, 16    rank 1 too (`autopar::dealt_rows`)

Every rank knows the grids of all, and so who computes what: the images with the highest cost first, each goes to the
rank with the least so far (longest processing time first, Graham 1969, within 4/3 of the best division). Each
microbatch has images of its own. Patches are sent before a step, features within it.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.adapters.distributed import all_gather_single, takes_host_tensors
from autopar.ir.mesh import DATA
from autopar.runtime.fault.errors import explained
from autopar.runtime.mesh.process_groups import Groups

KEYS = 6144  # how many keys cost as much as a patch: of 24 h**2 and 4 h operations in a layer, for h = 1024
HOME, ROW, GRID = 0, 1, slice(2, 5)  # columns of a table of images


@dataclass(frozen=True)
class Dealt:
    """The images that a rank computes, one microbatch after the other.

    pixels: [P, ...], their patches. grids: of each microbatch, [n, 3]. splits: [microbatches, 2, ranks], how many
    patches are computed for each rank, and how many each computes for this one; None: all are this rank's own. starts:
    of each microbatch, for each image of this rank's own text, how many patches come before it among those computed for
    this rank. axis: whose ranks.
    """

    pixels: Tensor
    grids: Sequence[Tensor]
    starts: Sequence[Sequence[int]]
    splits: Tensor | None = None
    axis: str = ""


def kept(pixels: Tensor, grids: Sequence[Tensor]) -> Dealt:
    """Each rank computes its own images."""
    return Dealt(pixels, grids, [_starts(g.prod(-1).tolist()) for g in grids])


@dataclass(frozen=True)
class Division:
    """Who computes the images of all ranks. table: [N, 5], home rank, microbatch and grid (frames, height, width) of
    each, the homes in order; owners: the rank that computes it."""

    table: Tensor
    owners: Sequence[int]
    ranks: int
    rows: int

    @functools.cached_property
    def sizes(self) -> list[int]:
        """Patches of each image."""
        found: list[int] = self.table[:, GRID].prod(-1).tolist()
        return found

    def patches(self) -> int:
        """The most that a rank computes in a microbatch."""
        at = torch.tensor(self.owners, dtype=torch.int64) * self.rows + self.table[:, ROW]
        return int(torch.zeros(self.ranks * self.rows, dtype=torch.int64).index_add_(0, at, self._sizes).max())

    @property
    def _sizes(self) -> Tensor:
        return torch.tensor(self.sizes, dtype=torch.int64)

    def sent(self, me: int) -> list[int]:
        """Patches of the images of rank ``me`` for each rank."""
        return [sum(self.sizes[i] for i in self._images(me, rank)) for rank in range(self.ranks)]

    def received(self, me: int) -> list[int]:
        """Patches of the images of each rank that ``me`` computes."""
        return [sum(self.sizes[i] for i in self._images(rank, me)) for rank in range(self.ranks)]

    def sent_order(self, me: int) -> list[int]:
        """The images of rank ``me``, by their number there, in the order of the ranks that compute them."""
        own = [i for rank in range(self.ranks) for i in self._images(me, rank)]
        return [i - min(own) for i in own]

    def _images(self, home: int, owner: int) -> Sequence[int]:
        return self._by_pair.get((home, owner), ())

    @functools.cached_property
    def _by_pair(self) -> dict[tuple[int, int], list[int]]:
        found: dict[tuple[int, int], list[int]] = {}
        for i, pair in enumerate(zip(self.table[:, HOME].tolist(), self.owners, strict=True)):
            found.setdefault(pair, []).append(i)
        return found

    def dealt(self, me: int, pixels: Tensor, axis: str) -> Dealt:
        """What rank ``me`` computes. pixels: of its images, those of each rank after those of the one before."""
        rows = self.table[:, ROW].tolist()
        computed = [i for home in range(self.ranks) for i in self._images(home, me)]
        own = [i for owner in range(self.ranks) for i in self._images(me, owner)]
        parts = dict(zip(computed, pixels.split([self.sizes[i] for i in computed]), strict=True))
        of_rows = [[i for i in computed if rows[i] == row] for row in range(self.rows)]
        ordered = [parts[i] for images in of_rows for i in images]
        splits = torch.zeros(self.rows, 2, self.ranks, dtype=torch.int64)
        for way, column, images in ((0, self.table[:, HOME].tolist(), computed), (1, self.owners, own)):
            for i in images:
                splits[rows[i], way, column[i]] += self.sizes[i]
        starts = []
        for row in range(self.rows):
            come = [i for i in own if rows[i] == row]
            before = dict(zip(come, _starts([self.sizes[i] for i in come]), strict=True))
            starts.append([before[i] for i in sorted(come)])
        grids = [self.table[images, GRID] for images in of_rows]
        return Dealt(torch.cat(ordered) if ordered else pixels, grids, starts, splits, axis)


def _starts(sizes: Sequence[int]) -> list[int]:
    """[3, 1, 2] --> [0, 3, 4]"""
    return list(itertools.accumulate(sizes, initial=0))[:-1]


def division(table: Tensor, ranks: int, rows: int) -> Division:
    """The images of ``table`` (see `Division`) dealt to ``ranks``, those of each of ``rows`` microbatches by
    themselves."""
    owners = [0] * len(table)
    homes, grids = table[:, HOME].tolist(), table[:, GRID].tolist()
    for row in range(rows):
        images = (table[:, ROW] == row).nonzero()[:, 0].tolist()
        costs = [t * h * w * (KEYS + h * w) for t, h, w in (grids[i] for i in images)]
        for i, owner in zip(images, dealt_by_cost(costs, [homes[i] for i in images], ranks), strict=True):
            owners[i] = owner
    return Division(table, owners, ranks, rows)


def dealt_by_cost(costs: Sequence[int], homes: Sequence[int], ranks: int) -> list[int]:
    """A rank for each image: that with the least cost so far, its own where several have."""
    load, owners, seen = [0] * ranks, [0] * len(costs), [0] * ranks
    numbers = []  # among those of the same rank: alike images of all ranks stay where they are
    for home in homes:
        numbers.append(seen[home])
        seen[home] += 1
    least = [(0, rank) for rank in range(ranks)]
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], numbers[i], homes[i])):
        while least[0][0] != load[least[0][1]]:
            heapq.heappop(least)
        owners[i] = rank = homes[i] if load[homes[i]] == least[0][0] else least[0][1]
        load[rank] += costs[i]
        heapq.heappush(least, (load[rank], rank))
    return owners


class ImageDealer:
    """Deals images over the ranks of an axis. Its calls are collective."""

    def __init__(self, groups: Groups, axis: str) -> None:
        self.groups, self.axis, self.ranks, self.me = groups, axis, groups.size(axis), groups.index(axis)

    def divided(self, images: Tensor, most: int, rows: int) -> Division:
        """Who computes the images of all ranks. images: [n, 4], microbatch and grid of each of this rank, at most
        ``most`` on any rank."""
        padded = torch.full((most, 4), -1)
        padded[: len(images)] = images
        found = torch.empty(self.ranks, most, 4, dtype=torch.int64)
        here = self._movable(padded)
        made = found.to(here.device)
        with self._explained("comparing the sizes of images"):
            all_gather_single(made.view(-1), here.view(-1), group=self.groups.group(self.axis))
        found = made.cpu()
        homes = torch.arange(self.ranks).view(-1, 1, 1).expand(-1, most, 1)
        table = torch.cat([homes, found], -1).flatten(0, 1)
        return division(table[table[:, ROW] >= 0], self.ranks, rows)

    def dealt(self, found: Division, pixels: Tensor, images: Tensor) -> Dealt:
        """The images that this rank computes. pixels: those of its own ``images`` (see `divided`)."""
        parts = pixels.split(images[:, 1:].prod(-1).tolist())
        ordered = [parts[i] for i in found.sent_order(self.me)]
        return found.dealt(self.me, self._exchanged(torch.cat(ordered) if ordered else pixels, found), self.axis)

    def _exchanged(self, pixels: Tensor, found: Division) -> Tensor:
        sent, received = found.sent(self.me), found.received(self.me)
        shape, flat = pixels.shape[1:], pixels.flatten(1).contiguous()
        here = self._movable(flat.view(torch.uint8))  # which all backends send, whatever the dtype
        made = here.new_empty(sum(received), here.shape[1])
        with self._explained("dealing images"):
            dist.all_to_all_single(made, here, received, sent, group=self.groups.group(self.axis))
        return made.to(pixels.device).view(pixels.dtype).view(-1, *shape)

    def _movable(self, x: Tensor) -> Tensor:
        """A tensor where the group can send it."""
        group = self.groups.group(self.axis)
        return x if not x.is_cpu or takes_host_tensors(group) else x.to(self.groups.device)

    def _explained(self, what: str) -> explained:
        return explained(what, self.groups.ranks(self.axis))


def dealer_of(groups: Groups) -> ImageDealer | None:
    """Deals images over the outermost axis whose ranks have different samples; None if there is none."""
    axis = next((axis for axis in DATA if groups.size(axis) > 1), "")
    return ImageDealer(groups, axis) if axis else None
