"""Documents of different lengths as flat rows of one length, shared out so that ranks and microbatches compute as much.

    data = autopar.packer(documents, mesh, tokens=4096, rows=32, microbatches=4)
    for batch in data: loss = model.train_step(**batch)              this rank's rows of each batch, one epoch
    autopar.save(folder, model, optimizer, extra={"data": data})     load(...) continues with the next batch

    lengths 5 3 | 4 4 | 7 | 2 6        rows of 8 tokens; a longer document is cut into several

What costs attention is pairs of query and key, n (n + 1) / 2 of a document, not tokens: rows with many pairs are dealt
first, each to the microbatch that has fewest. Within a row the order of the documents is the one in which ranks of cp
have the most equal pairs. All ranks plan the same epoch from the lengths alone, so nothing is exchanged.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autopar.attention.layouts import LAYOUTS
from autopar.attention.problem import Mask, Span, spans_of
from autopar.runtime.mesh.process_groups import dp_rank_and_size, mesh_of
from autopar.values import whole_number

IGNORED = -100
_ORDERS = 16  # of the documents of a row that are tried
_CAUSAL = Mask(causal=True)
Piece = tuple[int, int, int]  # a document, and which of its tokens: [start, stop)
Row = tuple[Piece, ...]


class DocumentPacker:
    """Batches of packed rows, this rank's part of each. An iteration is an epoch, or the rest of one.

    A batch is ``input_ids`` [rows of this rank, tokens], ``position_ids`` that start anew with each document, and
    ``labels`` with -100 for the first token of a document (which none predicts) and for padding. Padding is a document
    of its own at the end of a row. With ``offsets`` also ``cu_seqlens`` int32 [rows of this rank, offsets + 1]: where
    the documents of each row begin, and its end, which is repeated. epoch, batch: the position of the next batch.
    """

    def __init__(
        self,
        documents: Any,
        part: tuple[int, int],
        tokens: int,
        rows: int,
        microbatches: int,
        cp: int,
        layout: str,
        shuffle: bool,
        seed: int,
        pad: int,
        lengths: Sequence[int] | None,
        offsets: int = 0,
    ) -> None:
        self._documents, self._part = documents, part
        self._lengths = [len(documents[i]) for i in range(len(documents))] if lengths is None else list(lengths)
        self._tokens, self._rows, self._groups = tokens, rows, part[1] * microbatches
        self._cp, self._layout, self._shuffle, self._seed, self._pad = cp, layout, shuffle, seed, pad
        self._offsets = offsets
        self._known: tuple[int, list[tuple[Row, ...]]] | None = None
        self.epoch = self.batch = 0

    def __len__(self) -> int:
        """Number of batches of this epoch."""
        return len(self._planned())

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        planned, first = self._planned(), self.batch
        for number in range(first, len(planned)):
            share = self._rows // self._part[1]
            mine = planned[number][self._part[0] * share : (self._part[0] + 1) * share]
            made = self._made(mine)
            self.epoch, self.batch = (self.epoch, number + 1) if number + 1 < len(planned) else (self.epoch + 1, 0)
            yield made

    def state_dict(self) -> dict[str, int]:
        """The current position. The same on every rank, and for every mesh with as many microbatches in all."""
        known = {"documents": len(self._lengths), "rows": self._rows, "tokens": self._tokens, "seed": self._seed}
        known |= {"shuffle": int(self._shuffle), "groups": self._groups}
        return {"epoch": self.epoch, "batch": self.batch, **known}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the position. Raises ValueError for the state of another order."""
        for name, mine in self.state_dict().items():
            if name not in ("epoch", "batch") and int(state[name]) != mine:
                raise ValueError(
                    f"packer: needs the state of the same order, found {name}={int(state[name])} where this one has "
                    f"{mine}; create it with the same documents, rows, tokens, microbatches of all ranks and seed"
                )
        self.epoch, self.batch = int(state["epoch"]), int(state["batch"])

    # --- the plan of an epoch -----------------------------------------------------------------------------

    def _planned(self) -> list[tuple[Row, ...]]:
        """The rows of each batch of this epoch, of all ranks."""
        if self._known is None or self._known[0] != self.epoch:
            self._known = self.epoch, list(self._batches())
        return self._known[1]

    def _batches(self) -> Iterator[tuple[Row, ...]]:
        """Pieces in order, as many as a batch has room for; what no row has room for begins the next batch. The last
        rows, which fill no batch, are left out."""
        waiting: list[Piece] = []
        coming = self._pieces()
        while True:
            room = self._rows * self._tokens - sum(b - a for _, a, b in waiting)
            while room > 0 and (piece := next(coming, None)) is not None:
                waiting.append(piece)
                room -= piece[2] - piece[1]
            if room > 0:
                return
            rows, waiting = self._packed(waiting)
            yield tuple(self._in_order(row) for row in self._dealt(rows))

    def _pieces(self) -> Iterator[Piece]:
        order: Sequence[int] = range(len(self._lengths))
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + self.epoch)
            order = torch.randperm(len(self._lengths), generator=generator).tolist()
        for document in order:
            for start in range(0, self._lengths[document], self._tokens):
                yield document, start, min(start + self._tokens, self._lengths[document])

    def _packed(self, pieces: list[Piece]) -> tuple[list[Row], list[Piece]]:
        """Rows, and the pieces for which they have no room: the longest piece first, each into the fullest row that has
        room (best fit decreasing)."""
        rows: list[list[Piece]] = [[] for _ in range(self._rows)]
        free = [(self._tokens, number) for number in range(self._rows)]  # sorted
        left = []
        for piece in sorted(pieces, key=lambda p: (p[1] - p[2], p)):
            size = piece[2] - piece[1]
            place = bisect.bisect_left(free, (size, -1))
            if place == len(free):
                left.append(piece)
                continue
            room, number = free.pop(place)
            rows[number].append(piece)
            if not self._offsets or len(rows[number]) < self._offsets - 1:  # one is left for padding
                bisect.insort(free, (room - size, number))
        order = {piece: number for number, piece in enumerate(pieces)}
        return [tuple(row) for row in rows], sorted(left, key=order.__getitem__)

    def _dealt(self, rows: list[Row]) -> list[Row]:
        """The rows in the order of ranks and their microbatches: those with most pairs first, each to the microbatch
        that has fewest pairs so far and room."""
        groups: list[list[Row]] = [[] for _ in range(self._groups)]
        pairs = [0] * self._groups
        for row in sorted(rows, key=_pairs, reverse=True):
            open_ = (n for n in range(self._groups) if len(groups[n]) < self._rows // self._groups)
            least = min(open_, key=pairs.__getitem__)
            groups[least].append(row)
            pairs[least] += _pairs(row)
        return [row for group in groups for row in group]

    def _in_order(self, row: Row) -> Row:
        """The documents of a row in the order in which the busiest rank of cp has fewest pairs, of some orders."""
        if self._cp == 1 or len(row) == 1:
            return row
        held = [spans_of(self._tokens, LAYOUTS[self._layout], self._cp, rank) for rank in range(self._cp)]

        def busiest(row: Row) -> int:
            return max(_pairs_of_rank(row, spans) for spans in held)

        generator = torch.Generator().manual_seed(self._seed)
        drawn = (torch.randperm(len(row), generator=generator).tolist() for _ in range(_ORDERS))
        orders = [row, row[::-1], row[::2] + row[1::2][::-1], *(tuple(row[i] for i in one) for one in drawn)]
        return min(orders, key=busiest)

    # --- tensors ------------------------------------------------------------------------------------------

    def _made(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """The tensors of some rows."""
        ids = torch.full((len(rows), self._tokens), self._pad)
        positions, labels = torch.zeros_like(ids), torch.full_like(ids, IGNORED)
        for number, row in enumerate(rows):
            first = 0
            for document, start, stop in row:
                tokens = torch.as_tensor(self._documents[document])[start:stop]
                here = slice(first, first + len(tokens))
                ids[number, here] = labels[number, here] = tokens
                positions[number, here] = torch.arange(len(tokens))
                labels[number, first] = IGNORED
                first += len(tokens)
            positions[number, first:] = torch.arange(self._tokens - first)
        made = {"input_ids": ids, "position_ids": positions, "labels": labels}
        return made | ({"cu_seqlens": self._starts(rows)} if self._offsets else {})

    def _starts(self, rows: Sequence[Row]) -> Tensor:
        found = torch.full((len(rows), self._offsets + 1), self._tokens, dtype=torch.int32)
        for number, row in enumerate(rows):
            ends = list(itertools.accumulate((b - a for _, a, b in row), initial=0))
            found[number, : len(ends)] = torch.tensor(ends)
        return found


def _pairs(row: Row) -> int:
    """Pairs of query and key in a row."""
    return sum((b - a) * (b - a + 1) // 2 for _, a, b in row)


def _pairs_of_rank(row: Row, held: tuple[Span, ...]) -> int:
    """Pairs whose query is at the positions ``held``."""
    total = first = 0
    for _, a, b in row:
        document = Span(first, first + b - a)
        total += sum(_CAUSAL.pairs(span & document, document) for span in held)
        first += b - a
    return total


def packer(
    documents: Any,
    mesh: DeviceMesh,
    *,
    tokens: int,
    rows: int,
    microbatches: int = 1,
    layout: str = "zigzag",
    shuffle: bool = True,
    seed: int = 0,
    pad: int = 0,
    lengths: Sequence[int] | None = None,
    offsets: int = 0,
) -> DocumentPacker:
    """Pack documents into rows, and share them out over the data-parallel ranks of a mesh.

    Args:
        documents: token ids of each, one after the other: a list or a data set of tensors or lists. A document longer
            than ``tokens`` is cut; the parts do not see each other.
        tokens: the length of a row.
        rows: of a global batch, over all data-parallel ranks.
        microbatches: of a step of the model, among which each rank's rows are balanced.
        layout: ``cp_load_balance`` of the model, for the order of the documents in a row on a mesh with cp.
        shuffle: a new order in every epoch, from ``seed``; the same on all ranks.
        pad: the token of padding.
        lengths: of all documents, if known; otherwise each document is read once to count its tokens.
        offsets: the most documents of a row, padding included, of models that take ``cu_seqlens``; 0: any number, and
            no offsets, since ``position_ids`` say where documents begin.

    Raises ValueError if the rows do not divide over ranks and microbatches, and for one offset.
    """
    part = dp_rank_and_size(mesh)
    groups = part[1] * whole_number("microbatches", microbatches)
    if whole_number("rows", rows) % groups or rows < groups:
        raise ValueError(
            f"packer: rows needs a multiple of {groups}, one for each of {microbatches} microbatches on {part[1]} "
            f"data-parallel ranks, found {rows}; choose {-(-rows // groups) * groups}"
        )
    if layout not in LAYOUTS:
        raise ValueError(f"packer: layout needs one of {', '.join(LAYOUTS)}, found {layout!r}; pass cp_load_balance")
    if whole_number("offsets", offsets, 0) == 1:
        raise ValueError("packer: offsets needs at least 2, a document and padding, found 1; use more, or 0 for none")
    cp = mesh_of(mesh).size("cp")
    how = (whole_number("tokens", tokens), rows, microbatches, cp, layout, shuffle, seed, pad, lengths, offsets)
    return DocumentPacker(documents, part, *how)
