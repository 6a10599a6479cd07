"""Steps of `autopar::cached_attention`: requests with random numbers of their own, laid out in pages of pools, and the
results by a softmax over each request's keys in double precision."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NAMES = (
    "q", "k", "v", "keys", "values", "slots", "table", "starts", "lengths", "bias", "sinks", "window", "chunk", "scale",
    "softcap", "split_kv",
)  # fmt: skip
LAYOUTS = ("rows", "gaps", "close", "fragments", "pages")


@dataclass(frozen=True)
class Request:
    """``new`` tokens after ``old`` ones; its numbers follow from the seed."""

    new: int
    old: int
    seed: int = 0

    @property
    def length(self) -> int:
        return self.new + self.old


@dataclass(frozen=True)
class Step:
    """layout: of pages. "rows": regions of equal size; "gaps": the same, some of them free; "close": one request after
    another; "fragments": in two or three runs; "pages": in any order. filler: what the pools hold elsewhere. padding:
    tokens of no request; their length is their number, or 1."""

    requests: tuple[Request, ...]
    layout: str = "rows"
    page: int = 4
    heads: tuple[int, int] = (4, 2)
    widths: tuple[int, int] = (8, 8)
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    bias: tuple[int, int] | None = None  # its heads and tokens: 1, or 0 for all
    sinks: bool = False
    split_kv: bool = True
    filler: float = float("nan")
    padding: int = 0
    seed: int = 0


def tables(step: Step) -> tuple[list[list[int]], int]:
    """The pages of each request, and how many pages a pool has."""
    counts = [-(-r.length // step.page) for r in step.requests]
    rng, most, total = random.Random(step.seed), max(counts), sum(counts)
    if step.layout in ("rows", "gaps"):
        size = most + 1
        regions = list(range(len(counts))) if step.layout == "rows" else rng.sample(range(2 * len(counts)), len(counts))
        places = [list(range(1 + size * r, 1 + size * r + n)) for r, n in zip(regions, counts)]
        return places, 1 + size * (max(regions) + 1)
    pages = list(range(1, total + 1))
    if step.layout == "pages":
        rng.shuffle(pages)
    elif step.layout == "fragments":
        cuts = sorted(rng.sample(range(1, total + 1), min(total, 2 * len(counts))))
        parts = [pages[a:b] for a, b in zip([0, *cuts], [*cuts, total])]
        rng.shuffle(parts)
        pages = [page for part in parts for page in part]
    return [[pages.pop(0) for _ in range(n)] for n in counts], total + 1


def numbers(step: Step, request: Request) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q [Hq, new, D], keys [length, Hk, D], values [length, Hk, Dv] and bias [Hq, new, length] of a request, double."""
    g = torch.Generator().manual_seed(1000 + request.seed)
    (heads, groups), (width, value) = step.heads, step.widths
    shapes = [(heads, request.new, width), (request.length, groups, width), (request.length, groups, value)]
    q, k, v = (torch.randn(s, generator=g, dtype=torch.float64) for s in shapes)
    return q, k, v, torch.randn(heads, request.new, request.length, generator=g, dtype=torch.float64)


def arguments(step: Step, dtype: torch.dtype = torch.float64, device: str = "cpu") -> dict[str, Any]:
    """The operator's arguments by name, in order."""
    places, pages = tables(step)
    known = [numbers(step, r) for r in step.requests]
    groups, (width, value) = step.heads[1], step.widths
    keys = torch.full((pages, step.page, groups, width), step.filler, dtype=torch.float64)
    values = torch.full((pages, step.page, groups, value), step.filler, dtype=torch.float64)
    columns = max(map(len, places))
    slots, starts, table = list[int](), [0], []
    for request, place, (_, k, v, _) in zip(step.requests, places, known):
        mine = [place[p // step.page] * step.page + p % step.page for p in range(request.length)]
        slots += mine[request.old :]
        starts.append(starts[-1] + request.new)
        back = _given_back(step, request)
        table.append([0] * back + place[back:] + [0] * (columns - len(place)))
        for pool, x in ((keys, k), (values, v)):
            pool.view(-1, *pool.shape[2:])[mine[back * step.page : request.old]] = x[back * step.page : request.old]
    q = torch.cat([x[0] for x in known], 1)
    k = torch.cat([x[1][r.old :] for x, r in zip(known, step.requests)]).transpose(0, 1)
    v = torch.cat([x[2][r.old :] for x, r in zip(known, step.requests)]).transpose(0, 1)
    lengths = [r.length for r in step.requests]
    if step.padding:
        q, k, v = (torch.cat([x, torch.zeros(x.shape[0], step.padding, x.shape[2])], 1) for x in (q, k, v))
        slots += [i % step.page for i in range(step.padding)]
        starts.append(starts[-1] + step.padding)
        table.append([0] * columns)
        lengths.append(step.padding if step.seed % 2 else 1)
    ints = [torch.tensor(x, dtype=torch.int32, device=device) for x in (table, starts, lengths)]
    floats = [x.to(device, dtype) for x in (q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), keys, values)]
    extra = [None if x is None else x.to(device, dtype) for x in (bias_of(step), sinks_of(step))]
    rest = (step.window, step.chunk, 0.3, step.softcap, step.split_kv)
    return dict(zip(NAMES, (*floats, torch.tensor(slots, device=device), *ints, *extra, *rest)))


def _given_back(step: Step, request: Request) -> int:
    """How many of its first pages lie wholly behind the window."""
    return max(0, request.old - step.window + 1) // step.page if step.window else 0


def bias_of(step: Step) -> Tensor | None:
    """[1, H|1, T|1, S]: some of the keys of each token are blocked where it has rows of its own."""
    if step.bias is None:
        return None
    heads, tokens = (every if n == 0 else n for n, every in zip(step.bias, (step.heads[0], _tokens(step))))
    columns = max(r.length for r in step.requests)
    g = torch.Generator().manual_seed(7)
    bias = torch.randn(1, heads, tokens, columns, generator=g, dtype=torch.float64)
    if tokens > 1:
        bias[:, :, :, 0].masked_fill_(torch.rand(1, heads, tokens, generator=g) < 0.3, float("-inf"))
        at = 0
        for request in step.requests:  # every token keeps itself
            for i in range(request.new):
                bias[:, :, at + i, request.old + i] = 0.25
            at += request.new
    return bias


def _tokens(step: Step) -> int:
    return sum(r.new for r in step.requests) + step.padding


def sinks_of(step: Step) -> Tensor | None:
    """One number per head."""
    return torch.linspace(-1, 1, step.heads[0], dtype=torch.float64) if step.sinks else None


def expected(step: Step) -> Tensor:
    """out [1, Hq, T, Dv] without the padding."""
    bias, sinks, at, rows = bias_of(step), sinks_of(step), 0, []
    group = step.heads[0] // step.heads[1]
    for request in step.requests:
        q, k, v, _ = numbers(step, request)
        k, v = (x.transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
        scores = q @ k.transpose(1, 2) * 0.3
        if step.softcap:
            scores = torch.tanh(scores / step.softcap) * step.softcap
        if bias is not None:
            mine = bias[0, :, at : at + request.new] if bias.shape[2] > 1 else bias[0]
            scores = scores + mine[..., : request.length]
        i, j = torch.arange(request.old, request.length)[:, None], torch.arange(request.length)
        allowed = j <= i
        if step.window:
            allowed = allowed & (i - j < step.window)
        if step.chunk:
            allowed = allowed & (i // step.chunk == j // step.chunk)
        scores = scores.masked_fill(~allowed, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, request.new, 1)], -1)
        rows.append(torch.softmax(scores, -1)[..., : request.length] @ v)
        at += request.new
    return torch.cat(rows, 1).unsqueeze(0)


def requests(*sizes: tuple[int, int]) -> tuple[Request, ...]:
    """(new, old) of each."""
    return tuple(Request(new, old, seed) for seed, (new, old) in enumerate(sizes))


FEATURES: Sequence[dict[str, Any]] = (
    {},
    {"window": 5},
    {"window": 1},
    {"chunk": 6},
    {"window": 5, "chunk": 7},
    {"softcap": 2.0},
    {"softcap": 2.0, "window": 6},
    {"widths": (12, 8)},
    {"widths": (8, 12), "heads": (4, 1), "chunk": 5},
    {"heads": (4, 4)},
    {"heads": (6, 1)},
    {"sinks": True},
    {"sinks": True, "window": 4},
    {"bias": (0, 1)},
    {"bias": (1, 0)},
    {"bias": (0, 0), "softcap": 3.0},
    {"bias": (1, 1), "window": 5, "sinks": True},
)
