"""Habits with what a forward reads and somebody changes: globals, configs, functions, the environment, containers."""

from __future__ import annotations

import argparse
import array
import contextvars
import dataclasses
import enum
import functools
import itertools
import os
import threading
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from tests.compat.habits import PHASES, STEP, Habit, Run

GUARDS: list[Habit] = []
functional = nn.functional

GAIN = 1.0
CFG = types.SimpleNamespace(gain=1.0, scale=types.SimpleNamespace(of=1.0), step=0)
TABLE = {"gain": 1.0, "sizes": [1.0, 2.0]}
LOCAL, CONTEXT = threading.local(), contextvars.ContextVar("gain", default=1.0)
SCALES, BYTES, NUMBERS = numpy.ones(4), bytearray(4), array.array("d", [1.0])
COUNT = itertools.count(1)
TEACHER = nn.Linear(4, 4).double().requires_grad_(False)
GELU = functional.gelu


class Helper:
    """State beside the model."""

    factor = 1.0

    def __init__(self) -> None:
        self.gain, self.table = 1.0, {i: 1.0 for i in range(2000)}

    def scaled(self, by: float = 1.0) -> float:
        return self.gain * self.factor * by

    @property
    def hidden(self) -> float:
        return float(TABLE["gain"])  # type: ignore[arg-type]


class Slotted:
    """Attributes in no dict."""

    __slots__ = ("gain",)

    def __init__(self) -> None:
        self.gain = 1.0


@dataclasses.dataclass
class Settings:
    """As many a training script has them."""

    gain: float = 1.0
    nested: list[dict[str, float]] = dataclasses.field(default_factory=lambda: [{"gain": 1.0}])


class Named(enum.Enum):
    """Of which one member is a model's attribute."""

    LOW, HIGH = 1.0, 3.0


class Attributes(dict[str, Any]):
    """A dict whose entries are attributes, as yacs and others have it."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


def helper(x: Any, by: float = 1.0, *, more: float = 1.0) -> Any:
    """What a forward calls."""
    return x * by * more


def tripled(x: Any, by: float = 1.0, *, more: float = 1.0) -> Any:
    """In its place."""
    return x * 3


HELPER, _CODE = helper, helper.__code__


def counted() -> tuple[Callable[[], float], Callable[[float], None]]:
    """A function that reads a variable of another one, and one that sets it."""
    gain = 1.0

    def read() -> float:
        return gain

    def write(value: float) -> None:
        nonlocal gain
        gain = value

    return read, write


READ, WRITE = counted()


class Reader(nn.Module):
    """Two layers and a factor that ``read(self)`` tells."""

    scale = 1.0

    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.first, self.last, self.read = nn.Linear(4, 6), nn.Linear(6, 4), read
        self.helper, self.slotted, self.settings, self.named = Helper(), Slotted(), Settings(), Named.LOW
        self.attributes, self.arguments = Attributes(gain=1.0), argparse.Namespace(gain=1.0)
        self.ordered, self.default = OrderedDict(gain=1.0), defaultdict(lambda: 1.0)
        self.counter, self.queue = Counter({"gain": 1}), deque([1.0])
        self.partial, self.method = functools.partial(helper, by=1.0), self.helper.scaled
        self.kept = [nn.Dropout(0.5).eval()]
        self.count = itertools.count(1)

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        logits = self.last(functional.gelu(self.first(x))) * self.read(self)
        return {"loss": functional.mse_loss(logits, target), "logits": logits}


def reader(read: Callable[[Any], Any]) -> Reader:
    """A new one; what it may read is as it was at first."""
    global GAIN, helper
    GAIN, functional.gelu = 1.0, GELU
    vars(CFG).update(gain=1.0, scale=types.SimpleNamespace(of=1.0), step=0)
    TABLE.update(gain=1.0, sizes=[1.0, 2.0])
    SCALES[:], NUMBERS[0], BYTES[0] = 1.0, 1.0, 1
    LOCAL.gain = 1.0
    CONTEXT.set(1.0)
    os.environ.pop("GAIN_OF_TESTS", None)
    WRITE(1.0)
    helper = HELPER
    helper.__code__, helper.__defaults__, helper.__kwdefaults__ = _CODE, (1.0,), {"more": 1.0}
    Helper.factor = Reader.scale = 1.0
    Helper.scaled = SCALED  # type: ignore[method-assign]
    TEACHER.train().requires_grad_(False)
    with torch.no_grad():
        TEACHER.weight.copy_(torch.eye(4)), TEACHER.bias.zero_()
    torch.manual_seed(0)
    return Reader(read).double()


SCALED = Helper.scaled


def guard(
    what: str,
    read: Callable[[Any], Any],
    change: Callable[[Any], Any],
    refused: str = "",
    *,
    both: bool = False,
    ways: tuple[str, ...] = (STEP,),
) -> None:
    """A habit of changing what is read: between two steps, or before as well."""
    make = functools.partial(reader, read)
    for when in ("before", "between") if both else ("between",):
        GUARDS.append(Habit(what, when, lambda m: (change(m), None)[1], refused, make=make, ways=ways))


def put(obj: Any, **values: Any) -> None:
    for name, value in values.items():
        setattr(obj, name, value)


def put_global(**values: Any) -> None:
    globals().update(values)


TWO = (STEP, PHASES)

# --- globals and configs ----------------------------------------------------------------------------------

guard("GAIN = 2 in the file of the model", lambda m: GAIN, lambda m: put_global(GAIN=2.0), both=True, ways=TWO)
guard("GAIN = 0.0, then -0.0", lambda m: 1 / (GAIN - 1 or 1), lambda m: put_global(GAIN=2.0))
guard("CFG.gain = 2 of a global object", lambda m: CFG.gain, lambda m: put(CFG, gain=2.0), both=True, ways=TWO)
guard("CFG.scale.of = 2, an object in an object", lambda m: CFG.scale.of, lambda m: put(CFG.scale, of=2.0))
guard("CFG.scale = another object", lambda m: CFG.scale.of, lambda m: put(CFG, scale=types.SimpleNamespace(of=2.0)))
guard("CFG.step += 1, which no forward reads", lambda m: CFG.gain, lambda m: put(CFG, step=1))
guard("TABLE['gain'] = 2 of a global dict", lambda m: TABLE["gain"], lambda m: TABLE.update(gain=2.0), ways=TWO)
guard("TABLE['sizes'].append(3)", lambda m: sum(TABLE["sizes"]), lambda m: TABLE["sizes"].append(3.0))  # type: ignore
guard("a class attribute of the model's class", lambda m: m.scale, lambda m: put(Reader, scale=2.0), both=True)
guard("a class attribute of a helper's class", lambda m: m.helper.scaled(), lambda m: put(Helper, factor=2.0))
guard("getattr(CFG, name): an attribute by text", lambda m: getattr(CFG, "ga" + "in"), lambda m: put(CFG, gain=2.0))

# --- functions --------------------------------------------------------------------------------------------

guard("mod.helper = another function", lambda m: helper(1.0), lambda m: put_global(helper=tripled) or None)
guard("helper.__code__ = ...", lambda m: helper(1.0), lambda m: put(helper, __code__=tripled.__code__))
guard("helper.__defaults__ = (2.0,)", lambda m: helper(1.0), lambda m: put(helper, __defaults__=(2.0,)))
guard("helper.__kwdefaults__['more'] = 2", lambda m: helper(1.0), lambda m: helper.__kwdefaults__.update(more=2.0))
guard("nonlocal gain: what a function closes over", lambda m: READ(), lambda m: WRITE(2.0), both=True, ways=TWO)
guard("torch.nn.functional.gelu = torch.tanh", lambda m: 1.0, lambda m: put(functional, gelu=torch.tanh), both=True)
guard("Class.method = another function", lambda m: m.helper.scaled(), lambda m: put(Helper, scaled=lambda s, by=1: 3.0))
guard("a partial's keywords", lambda m: m.partial(1.0), lambda m: m.partial.keywords.update(by=2.0))
guard("a bound method: attributes of its object", lambda m: m.method(), lambda m: put(m.method.__self__, gain=2.0))

# --- objects that the model holds -------------------------------------------------------------------------

guard("an object's attribute, read in a method", lambda m: m.helper.scaled(2), lambda m: put(m.helper, gain=2.0))
guard("a property over a global dict", lambda m: m.helper.hidden, lambda m: TABLE.update(gain=2.0))
guard("one of 2000 entries of a dict", lambda m: m.helper.table[7], lambda m: m.helper.table.update({7: 2.0}))
guard("__slots__", lambda m: m.slotted.gain, lambda m: put(m.slotted, gain=2.0), ways=TWO)
guard("a dataclass", lambda m: m.settings.gain, lambda m: put(m.settings, gain=2.0))
guard("a dict in a list in a dataclass", lambda m: m.settings.nested[0]["gain"], lambda m: m.settings.nested[0].update(
    gain=2.0))  # fmt: skip
guard("an enum's member", lambda m: m.named.value, lambda m: put(m, named=Named.HIGH))
guard("a dict with attributes (yacs)", lambda m: m.attributes.gain, lambda m: put(m.attributes, gain=2.0))
guard("argparse.Namespace", lambda m: m.arguments.gain, lambda m: put(m.arguments, gain=2.0))
guard("OrderedDict", lambda m: m.ordered["gain"], lambda m: m.ordered.update(gain=2.0))
guard("OrderedDict: another order", lambda m: 2.0 if next(iter(m.ordered)) == "gain" else 3.0, lambda m: (
    m.ordered.update(other=1.0), m.ordered.move_to_end("gain")))  # fmt: skip
guard("defaultdict", lambda m: m.default.get("gain", 1.0), lambda m: m.default.update(gain=2.0))
guard("Counter", lambda m: m.counter["gain"], lambda m: m.counter.update(gain=1))
guard("deque", lambda m: m.queue[-1], lambda m: m.queue.append(2.0))
guard("a module in a plain list: its mode", lambda m: 2.0 if m.kept[0].training else 1.0, lambda m: m.kept[0].train())

# --- arrays, tensors and modules elsewhere ----------------------------------------------------------------

guard("a numpy array, written in place", lambda m: torch.from_numpy(SCALES).clone(), lambda m: SCALES.fill(2.0))
guard("a numpy scalar", lambda m: float(SCALES[0]), lambda m: SCALES.__setitem__(0, 2.0), both=True)
guard("array.array", lambda m: NUMBERS[0], lambda m: NUMBERS.__setitem__(0, 2.0))
guard("bytearray", lambda m: float(BYTES[0]), lambda m: BYTES.__setitem__(0, 2))
guard("a global module: its mode", lambda m: 2.0 if TEACHER.training else 1.0, lambda m: TEACHER.eval())
guard("a frozen global module: its weights", lambda m: TEACHER(torch.ones(4).double()), lambda m: [
    p.data.mul_(2) for p in TEACHER.parameters()])  # fmt: skip

# --- surroundings -----------------------------------------------------------------------------------------

guard("os.environ", lambda m: float(os.environ.get("GAIN_OF_TESTS", "1")), lambda m: os.environ.update(
    GAIN_OF_TESTS="2"), ways=TWO)  # fmt: skip
guard("os.getenv", lambda m: float(os.getenv("GAIN_OF_TESTS", "1")), lambda m: os.environ.update(GAIN_OF_TESTS="2"))
guard("contextvars.ContextVar", lambda m: CONTEXT.get(), lambda m: CONTEXT.set(2.0), ways=TWO)
guard("threading.local", lambda m: LOCAL.gain, lambda m: put(LOCAL, gain=2.0))

# --- what advances, and changes back ----------------------------------------------------------------------

ITEMS = "the forward takes items from"
guard("next(self.count)", lambda m: next(m.count), lambda m: None, ITEMS)
guard("next of a global iterator", lambda m: next(COUNT), lambda m: None, ITEMS)


def for_a_step(run: Run) -> None:
    """A global is another one, and then what it was."""
    for gain in (2.0, 1.0, 2.0):
        put_global(GAIN=gain)
        run.train_step(1)


def own_handle(run: Run) -> None:
    """The user still has the config that the constructor was given."""
    OPTIONS["gain"] = 2.0
    run.train_step(1)


OPTIONS = {"gain": 1.0}


def with_options() -> Reader:
    """Options that somebody keeps."""
    OPTIONS["gain"] = 1.0
    made = reader(lambda m: m.options["gain"])
    made.options = OPTIONS
    return made


GUARDS.append(Habit("GAIN changed, changed back, changed", "loop", for_a_step, make=functools.partial(
    reader, lambda m: GAIN), ways=TWO))  # fmt: skip
GUARDS.append(Habit("the user's handle on a config that the model was given", "loop", own_handle, make=with_options,
                    ways=TWO))  # fmt: skip
