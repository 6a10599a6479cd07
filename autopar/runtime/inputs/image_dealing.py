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
from collections import Counter
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
    """The images that a rank computes.

    pixels: [P, ...], their patches, one microbatch after the other. grids: of each microbatch, [n, 3]. starts: of each
    microbatch, for each image of this rank's own text, how many patches are before it where features of all ranks have
    come. splits: [microbatches, 2, ranks], for how many patches features go to each rank of ``axis``, and come from
    each; None: all images are this rank's own.
    """

    pixels: Tensor
    grids: Sequence[Tensor]
    starts: Sequence[Sequence[int]]
    splits: Tensor | None = None
    axis: str = ""


def kept(pixels: Tensor, grids: Sequence[Tensor]) -> Dealt:
    """Each rank computes its own images."""
    return Dealt(pixels, grids, [(g.prod(-1).cumsum(0) - g.prod(-1)).tolist() for g in grids])


@dataclass(frozen=True)
class Division:
    """Who computes the images of all ranks. table: [N, 5], home rank, microbatch and grid (frames, height, width) of
    each, the homes in order; owners: the rank that computes it; rows: microbatches."""

    table: Tensor
    owners: Sequence[int]
    ranks: int
    rows: int

    @functools.cached_property
    def sizes(self) -> list[int]:
        """Patches of each image."""
        found: list[int] = self.table[:, GRID].prod(-1).tolist()
        return found

    @functools.cached_property
    def homes(self) -> list[int]:
        """The rank with the text of each image."""
        found: list[int] = self.table[:, HOME].tolist()
        return found

    @functools.cached_property
    def of_rows(self) -> list[int]:
        """The microbatch of each image."""
        found: list[int] = self.table[:, ROW].tolist()
        return found

    def patches(self) -> int:
        """The most that a rank computes in a microbatch."""
        found = Counter[tuple[int, int]]()
        for owner, row, size in zip(self.owners, self.of_rows, self.sizes, strict=True):
            found[owner, row] += size
        return max(found.values(), default=0)

    def exchanged(self, me: int) -> tuple[list[int], list[int], list[int]]:
        """(the images of rank ``me``, in the order of the ranks that compute them; patches for each rank; patches from
        each rank)."""
        sent = [sum(self.sizes[i] for i in self._images(me, rank)) for rank in range(self.ranks)]
        received = [sum(self.sizes[i] for i in self._images(rank, me)) for rank in range(self.ranks)]
        return [i for rank in range(self.ranks) for i in self._images(me, rank)], sent, received

    def _images(self, home: int, rank: int) -> Sequence[int]:
        return self._by_pair.get((home, rank), ())

    @functools.cached_property
    def _by_pair(self) -> dict[tuple[int, int], list[int]]:
        found: dict[tuple[int, int], list[int]] = {}
        for i, pair in enumerate(zip(self.homes, self.owners, strict=True)):
            found.setdefault(pair, []).append(i)
        return found

    def dealt(self, me: int, pixels: Tensor, axis: str) -> Dealt:
        """What rank ``me`` computes. pixels: of its images, those of each rank after those of the one before."""
        computed = [i for home in range(self.ranks) for i in self._images(home, me)]
        patches = dict(zip(computed, pixels.split([self.sizes[i] for i in computed]), strict=True))
        splits = torch.zeros(self.rows, 2, self.ranks, dtype=torch.int64)
        rows: list[list[int]] = [[] for _ in range(self.rows)]
        for i in computed:
            rows[self.of_rows[i]].append(i)
            splits[self.of_rows[i], 0, self.homes[i]] += self.sizes[i]
        starts: list[dict[int, int]] = [{} for _ in range(self.rows)]
        for rank in range(self.ranks):
            for i in self._images(me, rank):
                come = splits[self.of_rows[i], 1]
                starts[self.of_rows[i]][i] = int(come.sum())
                come[rank] += self.sizes[i]
        return Dealt(
            torch.cat([patches[i] for images in rows for i in images]) if computed else pixels,
            [self.table[images, GRID] for images in rows],
            [[found[i] for i in sorted(found)] for found in starts],
            splits,
            axis,
        )


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
        owners[i] = to = homes[i] if load[homes[i]] == least[0][0] else least[0][1]
        load[to] += costs[i]
        heapq.heappush(least, (load[to], to))
    return owners


class ImageDealer:
    """Deals images over the ranks of an axis. Its calls are collective."""

    def __init__(self, groups: Groups, axis: str) -> None:
        self.groups, self.axis, self.ranks, self.me = groups, axis, groups.size(axis), groups.index(axis)

    def divided(self, images: Tensor, most: int, rows: int) -> Division:
        """Who computes the images of all ranks. images: [n, 4], microbatch and grid of each of this rank, at most
        ``most`` on any rank."""
        padded = torch.full((1, most, 4), -1)
        padded[0, : len(images)] = images
        found = self._gathered(padded)
        homes = torch.arange(self.ranks).view(-1, 1, 1).expand(-1, most, 1)
        table = torch.cat([homes, found], -1).flatten(0, 1)
        return division(table[table[:, ROW] >= 0], self.ranks, rows)

    def _gathered(self, x: Tensor) -> Tensor:
        group = self.groups.group(self.axis)
        here = x if takes_host_tensors(group) else x.to(self.groups.device)
        made = here.new_empty(self.ranks, *x.shape[1:])
        with explained("comparing the sizes of images", self.groups.ranks(self.axis)):
            all_gather_single(made.view(-1), here.view(-1), group=group)
        return made.cpu()

    def dealt(self, found: Division, pixels: Tensor) -> Dealt:
        """The images that this rank computes. pixels: those of its own text."""
        order, sent, received = found.exchanged(self.me)
        if order:
            parts = pixels.split([found.sizes[i] for i in sorted(order)])
            pixels = torch.cat([parts[i - min(order)] for i in order])
        return found.dealt(self.me, self._exchanged(pixels, sent, received), self.axis)

    def _exchanged(self, pixels: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """On the device, where patches are used."""
        here = pixels.to(self.groups.device).flatten(1).contiguous().view(torch.uint8)  # every backend sends bytes
        made = here.new_empty(sum(received), here.shape[1])
        with explained("dealing images", self.groups.ranks(self.axis)):
            dist.all_to_all_single(made, here, received, sent, group=self.groups.group(self.axis))
        return made.view(pixels.dtype).view(-1, *pixels.shape[1:])


def dealer_of(groups: Groups) -> ImageDealer | None:
    """Deals images over the outermost axis whose ranks have different samples; None if there is none."""
    axis = next((axis for axis in DATA if groups.size(axis) > 1), "")
    return ImageDealer(groups, axis) if axis else None
