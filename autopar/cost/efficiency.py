"""What software stacks reach of a chip's peaks, read from ``efficiency.json``. Loads no torch.

    stack_named("megatron-core-2025", "H100")     the entry of a table, or of a file that `autopar calibrate` wrote

A new stack is one entry of the file.
"""

from __future__ import annotations

import functools
import json
import math
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from autopar.spelling import did_you_mean
from autopar.values import parse, read

FILE = Path(__file__).with_name("efficiency.json")
DEFAULT_STACK = "autopar-eager"
KERNELS = ("plain", "flash1", "flash2", "cudnn")  # of attention
MOST_SHARE = 1.5
AMOUNTS = (
    "launch", "start", "optimizer", "kept", "logits", "weight", "gradient", "states", "reserved", "jitter", "error",
)  # fmt: skip


@dataclass(frozen=True)
class Stack:
    """Shares, between 0 and 1, of a chip's peaks that a software stack reaches, and what it costs besides.

    products: of the peak of products; float8: of the peak in float8, on top. attention, attention_backward: kernel ->
    share of the peak of products. memory: of the memory's speed, by element-wise operators. inside, network: of the
    links within a node and between nodes. kernel: of attention, if nobody names one. launch: seconds of the host per
    operator. fused: whether element-wise operators between the same products are one kernel. hidden: axis ("zero": what
    each microbatch gathers and reduces) -> share of the computation beside it under which its exchanges are hidden, or
    for tp and pp share of them that is hidden.
    kept: bytes kept for the backward, of those that our graphs keep. logits: bytes per logit of the loss (0: as our
    graphs); whole_logits: each rank of tp has those of the whole vocabulary. weight, gradient, states: bytes per
    element of a parameter. reserved: bytes of context, buffers of collectives and fragments.
    jitter: what each doubling of the ranks beyond eight adds to a step, as slow ranks are waited for. kernels: values
    that differ with a kernel of attention. error: median of |predicted / measured - 1| of its rows. guesses: values
    that nobody measured. source: where the values are from.
    """

    name: str
    chip: str
    products: float
    attention: Mapping[str, float]
    attention_backward: Mapping[str, float]
    memory: float
    inside: float
    network: float
    kernel: str = "flash2"
    float8: float = 0.75
    launch: float = 10e-6
    fused: bool = False
    hidden: Mapping[str, float] = field(default_factory=dict)
    kept: float = 1.0
    logits: float = 0.0
    whole_logits: bool = False
    weight: float = 2.0
    gradient: float = 2.0
    states: float = 4.0
    reserved: float = 3e9
    start: float = 10e-6
    optimizer: float = 30.0
    host: float = 1.0
    jitter: float = 0.0
    kernels: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    error: float = 0.2
    guesses: tuple[str, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        _check(self)

    def with_kernel(self, kernel: str) -> Stack:
        """Its values with a kernel of attention."""
        return replace(self, kernel=kernel, **self.kernels.get(kernel, {}))


def _check(stack: Stack) -> None:
    """Raises ValueError for values that are no shares, seconds or bytes."""
    most = math.inf if stack.chip == "CPU" else MOST_SHARE  # the peaks of a CPU are orders of magnitude
    shares = {name: getattr(stack, name) for name in ("products", "memory", "inside", "network", "float8", "host")}
    for name in ("attention", "attention_backward"):
        shares |= {f"{name} of {kernel}": value for kernel, value in getattr(stack, name).items()}
    for name, value in shares.items():
        if not _is_number(value) or not 0 < value <= most:
            raise ValueError(f"stack {stack.name}: {name} needs a share above 0, found {value!r}; measure again")
    rest = {name: getattr(stack, name) for name in AMOUNTS}
    for name, value in rest.items():
        if not _is_number(value) or not 0 <= value < math.inf:
            raise ValueError(f"stack {stack.name}: {name} needs a number of at least 0, found {value!r}; measure again")
    for axis, value in stack.hidden.items():
        if not _is_number(value) or not 0 <= value <= 1:
            raise ValueError(f"stack {stack.name}: hidden {axis} needs a share up to 1, found {value!r}; measure again")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: Any, at: str) -> float:
    if not _is_number(value):
        raise ValueError(f"expected a number at {at}, found {value!r}")
    return float(value)


_READERS = {float: _number, Any: lambda value, at: value}


def stacks() -> tuple[str, ...]:
    """Names of the table."""
    return tuple(_table())


def stack_named(name: str, chip: str) -> Stack:
    """The entry of a stack for a chip; a name that ends in .json is a file with one entry. Raises ValueError for an
    unknown stack, and for one that says nothing about the chip."""
    rows = _file(Path(name)) if name.endswith(".json") else _table().get(name)
    if rows is None:
        known = stacks()
        raise ValueError(f"stack: unknown stack {name!r}; the stacks are {', '.join(known)}{did_you_mean(name, known)}")
    row = rows.get(chip, rows.get("*"))
    if row is None:
        raise ValueError(f"stack: {name} is of {', '.join(rows)}, found chip {chip}; choose a stack of {chip}")
    return stack_from(name, chip, row)


def stack_from(name: str, chip: str, row: Mapping[str, Any]) -> Stack:
    """A stack of the values of an entry. Raises ValueError."""
    unknown = sorted(row.keys() - {f.name for f in fields(Stack)} | row.keys() & {"name", "chip"})
    if unknown:
        raise ValueError(f"stack: {name} has unknown values {', '.join(unknown)}")
    hints = typing.get_type_hints(Stack)
    try:
        values = {key: read(hints[key], value, key, _READERS) for key, value in row.items()}
    except ValueError as error:
        raise ValueError(f"stack: {name}: {error}; measure it with autopar calibrate") from error
    try:
        stack = Stack(name=name, chip=chip, **values)
    except TypeError as error:
        needed = [f.name for f in fields(Stack) if f.default is MISSING and f.default_factory is MISSING]
        missing = [name for name in needed if name not in (*values, "name", "chip")]
        raise ValueError(f"stack: {name} lacks {', '.join(missing)}; measure it with autopar calibrate") from error
    plain = {key: value for key, value in row.items() if key != "kernels"}
    for kernel, changes in stack.kernels.items():  # each is checked
        stack_from(name, chip, plain | {"kernel": kernel} | dict(changes))
    return stack


def stack_text(stack: Stack) -> str:
    """A file with one entry, which `stack_named` reads."""
    plain = {f.name: f.default for f in fields(Stack)}
    row = {k: v for k, v in vars(stack).items() if k not in ("name", "chip") and v != plain[k]}
    return json.dumps({stack.chip: row}, indent=1)


@functools.cache
def _table() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    found: Mapping[str, Mapping[str, Mapping[str, Any]]] = json.loads(FILE.read_text(encoding="utf-8"))["stacks"]
    return found


def _file(file: Path) -> Mapping[str, Mapping[str, Any]]:
    try:
        data = parse(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"stack: {str(file)!r} cannot be read: {error}; give a file of autopar calibrate") from error
    if not isinstance(data, dict) or not all(isinstance(row, dict) for row in data.values()):
        raise ValueError(f"stack: {str(file)!r} needs an object with an entry per chip, such as {{'H100': {{...}}}}")
    return data
