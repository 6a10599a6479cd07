"""A program: pieces, some of them in blocks, and what happens to the model. It is drawn at random, and written as a file.

program = next(programs(seed=7, count=1))
program.source()            the file of the module, with a class Net
program.statements()        what happens, in the names of `side.Side.play`
"""

from __future__ import annotations

import dataclasses
import random
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.module_fuzz.buffers import BUFFER_PIECES
from tests.module_fuzz.functions import FUNCTION_PIECES
from tests.module_fuzz.hooks import HOOK_PIECES
from tests.module_fuzz.layers import GENERAL, LAYER_PIECES
from tests.module_fuzz.modes import MODE_PIECES
from tests.module_fuzz.piece import Piece, lines, numbered
from tests.module_fuzz.reads import READ_PIECES
from tests.module_fuzz.special_functions import SPECIAL_PIECES

PIECES = [*SPECIAL_PIECES, *FUNCTION_PIECES, *BUFFER_PIECES, *READ_PIECES, *MODE_PIECES, *HOOK_PIECES, *LAYER_PIECES]
SHARES = {"A": 4, "B": 4, "D": 5, "F": 4, "H": 2, "P": 3}  # how often a piece is of which kind
_OF_KIND = {kind: [p for p in PIECES if p.kind[0] == kind] for kind in SHARES}

TRAIN_STEP, PHASES, MIXED = "train_step", "phases", "mixed"  # ways to step on the mesh
WAYS = (TRAIN_STEP, PHASES, MIXED)


@dataclass(frozen=True)
class Call:
    """How a module calls a block: what is in ``__init__``, in ``forward``, and the block's path from the module.
    ``kind``: a letter, where it is one of a piece."""

    name: str
    forward: str
    init: str = "self.b_N = Block_N()"
    path: str = "b_N"
    kind: str = ""


PLAIN = Call("plain", "x = self.b_N(x, out)")
CALLS = (
    PLAIN,
    Call("twice", "x = self.b_N(x, out)\nx = self.b_N(x, out)"),
    Call("checkpoint", "x = checkpoint(self.b_N, x, out, use_reentrant=False)", kind="F"),
    Call("no_grad", "with torch.no_grad():\n    h = self.b_N(x, out)\nx = x + h", kind="F"),
    Call("inference_mode", "with torch.inference_mode():\n    h = self.b_N(x, out)\nx = x + h", kind="F"),
    Call("in training", "if self.training:\n    x = self.b_N(x, out)"),
    Call("forward", "x = self.b_N.forward(x, out)"),
    Call("a name of its forward", "x = self.run_N(x, out)", "self.b_N = Block_N()\nself.run_N = self.b_N.forward"),
    Call("a list", "for b in self.bs_N:\n    x = b(x, out)", "self.bs_N = nn.ModuleList([Block_N()])", "bs_N[0]"),
    Call("a dict", "x = self.bs_N['b'](x, out)", "self.bs_N = nn.ModuleDict({'b': Block_N()})", "bs_N['b']"),
    Call("a function", "x = call_N(self.b_N, x, out)"),
)


@dataclass(frozen=True)
class Placed:
    piece: Piece
    number: int


@dataclass(frozen=True)
class Block:
    number: int
    call: Call
    items: tuple[Placed, ...]


@dataclass(frozen=True)
class Event:
    """A statement; ``number``: of the piece that it is a change of."""

    text: str
    number: int | None = None


@dataclass(frozen=True)
class Program:
    items: tuple[Placed | Block, ...]
    events: tuple[Event, ...]
    way: str = TRAIN_STEP

    def placed(self) -> Iterator[tuple[Placed, str]]:
        """Each piece, with the path of its module from the model."""
        for item in self.items:
            if isinstance(item, Placed):
                yield item, "net"
            else:
                yield from ((inner, f"net.{numbered(item.call.path, item.number)}") for inner in item.items)

    def statements(self) -> list[str]:
        """Changes of pieces that are not there are left out."""
        paths = {placed.number: path for placed, path in self.placed()}
        return [
            event.text
            if event.number is None
            else re.sub(r"\bown\b", paths[event.number], numbered(event.text, event.number))
            for event in self.events
            if event.number is None or event.number in paths
        ]

    def source(self) -> str:
        blocks = [item for item in self.items if isinstance(item, Block)]
        tops = [numbered(placed.piece.top, placed.number) for placed, _ in self.placed()]
        tops += [_class(f"Block_{b.number}", "x, out", b.items) for b in blocks]
        tops += [f"def call_{b.number}(f, *args):\n    return f(*args)" for b in blocks if "call_N" in b.call.forward]
        return "\n\n".join([HEAD, *filter(None, tops), _class("Net", "x, target", self.items)]) + "\n"

    def kinds(self) -> str:
        """Letters of its pieces, and of how blocks are called."""
        kinds = [placed.piece.kind for placed, _ in self.placed()] + [call.kind for call in self.calls()]
        return "".join(sorted(set("".join(kinds))))

    def names(self) -> list[str]:
        """What it is made of."""
        return [placed.piece.name for placed, _ in self.placed()] + [f"a block: {call.name}" for call in self.calls()]

    def calls(self) -> list[Call]:
        return [item.call for item in self.items if isinstance(item, Block) and item.call != PLAIN]


HEAD = """\
import array, collections, contextlib, contextvars, dataclasses, enum, functools, math, operator, os, pathlib, sys
import tempfile, threading, types, typing, weakref

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
"""


def _class(name: str, arguments: str, items: Sequence[Placed | Block]) -> str:
    root = name == "Net"
    init, forward = ["super().__init__()"], []
    if root:
        init.append("self.w, self.b = nn.Parameter(torch.rand(3) + 0.5), nn.Parameter(torch.rand(3))")
        forward += ["out = {}", "x = x * self.w + self.b"]
    for item in items:
        texts = item.piece if isinstance(item, Placed) else item.call
        init.append(numbered(texts.init, item.number))
        forward.append(numbered(texts.forward, item.number))
    forward.append("return {'loss': ((x - target) ** 2).mean(), 'y': x, **out}" if root else "return x")
    return "\n".join(
        [
            f"class {name}(nn.Module):",
            "    def __init__(self):",
            textwrap.indent(lines(*init), " " * 8),
            "",
            f"    def forward(self, {arguments}):",
            textwrap.indent(lines(*forward), " " * 8),
        ]
    )


# --- drawn at random ------------------------------------------------------------------------------------------


ALL = "".join(SHARES)


def programs(seed: int, count: int, kinds: str = ALL) -> Iterator[Program]:
    """Of pieces of some kinds; the same for the same seed."""
    return (drawn(random.Random(f"{seed} {i}"), kinds) for i in range(count))


def drawn(rng: random.Random, among: str = ALL) -> Program:
    """One to four pieces, three or four steps, up to three things between them."""
    kinds = rng.choices(among, [SHARES[kind] for kind in among], k=rng.choice((1, 1, 2, 2, 3, 4)))
    placed = [Placed(rng.choice(_OF_KIND[kind]), number) for number, kind in enumerate(kinds)]
    items: tuple[Placed | Block, ...] = tuple(placed)
    if rng.random() < 0.4:
        first = rng.randrange(len(placed))
        calls = [call for call in CALLS if not call.kind or call.kind in among]
        block = Block(len(placed), rng.choice(calls), tuple(placed[first : first + 2]))
        items = (*placed[:first], block, *placed[first + 2 :])
    return Program(items, tuple(_drawn_events(rng, placed)), rng.choices(WAYS, (4, 4, 1))[0])


def _drawn_events(rng: random.Random, placed: Sequence[Placed]) -> list[Event]:
    events = [Event(_drawn_step(rng, k)) for k in range(rng.choice((3, 3, 4)))]
    for _ in range(rng.choice((0, 1, 1, 2))):
        events.insert(rng.randrange(len(events)), _drawn_change(rng, placed))
    if rng.random() < 0.25:
        between = rng.choice(("evaluate({k})", "quiet({k})", "inference({k})"))
        events.insert(rng.randrange(len(events)), Event(between.format(k=7)))
    return events


def _drawn_step(rng: random.Random, k: int) -> str:
    if rng.random() < 0.85:
        return f"step({k})"
    others = "accumulate({k})", "two({k})", "retained({k})", "own_loss({k})", "keep({k})", "step({k}, rows=6)"
    return rng.choice((*others, "begin({k})\nend()")).format(k=k)


def _drawn_change(rng: random.Random, placed: Sequence[Placed]) -> Event:
    own = [Event(change, p.number) for p in placed for change in p.piece.changes]
    event = rng.choice(own) if own and rng.random() < 0.8 else Event(rng.choice(GENERAL))
    if rng.random() < 0.1:  # between a forward and its backward
        return dataclasses.replace(event, text=f"begin(5)\n{event.text}\nend()")
    return event


def each(kinds: str = ALL) -> Iterator[Program]:
    """Every piece alone, without a change and with each, in both ways to step; and the events of the whole model."""
    steps = Event("step(0)"), Event("step(1)"), Event("step(2)")
    for piece in PIECES:
        if piece.kind[0] not in kinds:
            continue
        for change in ("", *piece.changes):
            events = (steps[0], Event(change, 0), *steps[1:]) if change else steps
            yield from (Program((Placed(piece, 0),), events, way) for way in (TRAIN_STEP, PHASES))
        if "F" in piece.kind or piece.kind == "B":
            for between in ("evaluate(7)", "quiet(7)", "inference(7)", "two(7)", "begin(5)\nend()"):
                yield Program((Placed(piece, 0),), (steps[0], Event(between), steps[1]), PHASES)
    for text in GENERAL:
        yield from (Program((), (steps[0], Event(text), *steps[1:]), way) for way in (TRAIN_STEP, PHASES))
