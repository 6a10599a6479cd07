"""Side effects of a forward in Python: random numbers from Python and NumPy, and Python state.

The Python code of a forward runs only while it is captured, once for each batch shape. So a random number drawn in
Python is the same in every step, and a counter stops counting.
"""

from __future__ import annotations

import operator
import random
import re
import sys
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from io import IOBase
from types import GeneratorType, ModuleType
from typing import Any

import numpy
import torch
from torch import SymBool, SymFloat, SymInt, Tensor, nn

from autopar.adapters.copying.fake import MARKS
from autopar.adapters.copying.fake_deepcopy import walk_attributes
from autopar.capture.reads.forward_reads import ForwardReads
from autopar.capture.reads.memos import memo_text
from autopar.capture.reads.read_values import GENERATORS
from autopar.capture.side_effects.function_watch import Refused, is_outside
from autopar.capture.side_effects.unusual import warn_of

_SIMPLE = {bool, int, float, complex, str, type(None)}
_SIZED = (list, dict, set, deque)
_SEEDS = ("initial_seed", "seed", "manual_seed", "get_rng_state", "set_rng_state")
_EVERY_STEP = (
    " while it is captured, and the result would be the same in every step; call it outside of the forward and pass "
    "the result in as a tensor, or use dropout"
)
_ITEMS = (
    " while it is captured, and they would be the same in every step; take them outside of the forward and pass them in"
)
_REPLACED = "made by an earlier forward"
_GENERATOR, _ITERATOR = "generator", "iterator"
_SHOWN = 4
_ATTRIBUTE = re.compile(r"(?:(?P<path>[\w.]+)\.)?(?P<name>\w+)(?:\[.*\])?")


@contextmanager
def frozen_state(replica: nn.Module, kept: dict[str, str]) -> Iterator[Collection[str]]:
    """Context manager around the capture of a structure copy. Drawing or seeding in the forward raises Refused.

    Yields the paths of Python state that the forward changes, filled while it runs, and warns of them. Adds possible
    `memos` to ``kept``: values where there was none before.
    """
    generators, (changed, uncomparable) = _generator_states(), _watch_state(replica, kept)
    with _refusing():
        yield changed
    for name, state in _generator_states().items():
        if name in generators and generators[name] != state:
            warn_of(
                f"capture: numbers were drawn from {name} during the capture; if the forward drew them, they are the "
                "same in every step: draw them outside of the forward and pass them in",
                stacklevel=5,
            )
    drawn = [path for path, fact in changed.items() if str(fact).startswith(_GENERATOR)]
    if drawn:
        raise ValueError(f"capture: the forward draws from {drawn[0]}{_EVERY_STEP}")
    taken = [path for path, fact in changed.items() if str(fact).startswith(_ITERATOR)]
    if taken:
        raise ValueError(f"capture: the forward takes items from {taken[0]}{_ITEMS}")
    for path, kind in uncomparable.items():
        warn_of(
            f"capture: the forward may read {path}, {kind}, whose contents cannot be compared, so a change between "
            "steps goes unnoticed; keep values that change in a plain attribute, a container or a buffer",
            stacklevel=5,
        )
    if changed:
        more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
        warn_of(
            f"capture: the forward changes Python state: {', '.join(list(changed)[:_SHOWN])}{more}; compiled steps "
            "keep the values seen while tracing and drop later changes; use a buffer for values that change, and "
            "return values that you want to read",
            stacklevel=5,
        )


def attributes_of(replica: nn.Module, changed: Collection[str]) -> list[tuple[str, str]]:
    """(path of the module, attribute) of changed attributes, and of attributes with changes inside."""
    modules = {path for path, _ in replica.named_modules()}
    found: dict[tuple[str, str], None] = {}
    for change in changed:
        if (match := _ATTRIBUTE.fullmatch(change)) is not None and (match["path"] or "") in modules:
            found[match["path"] or "", match["name"]] = None
    return list(found)


# --- draws --------------------------------------------------------------------------------------------


@contextmanager
def _refusing() -> Iterator[None]:
    """Context manager: models may not call functions that draw from global generators, or get or set their seeds."""
    replaced: list[tuple[ModuleType, str, Any]] = []
    for module, names in _drawing():
        for name in names:
            function = getattr(module, name)
            replaced.append((module, name, function))
            setattr(module, name, _refused(function, f"{module.__name__}.{name}"))
    try:
        yield
    finally:
        for module, name, function in replaced:
            setattr(module, name, function)


def _drawing() -> Iterator[tuple[ModuleType, list[str]]]:
    """(module, names of its functions that use a global generator)."""
    yield numpy.random, _bound_to(numpy.random, numpy.random.mtrand._rand)
    yield torch, list(_SEEDS)
    yield torch.random, list(_SEEDS)


def _bound_to(module: ModuleType, generator: object) -> list[str]:
    return [name for name, value in vars(module).items() if getattr(value, "__self__", None) is generator]


def _refused(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if is_outside(sys._getframe(1)):
            raise Refused(f"the forward calls {name}{_EVERY_STEP}")
        return function(*args, **kwargs)

    return refuse


def _generator_states() -> dict[str, str]:
    of_numpy = [x.tolist() if hasattr(x, "tolist") else x for x in numpy.random.get_state()]
    return {"random": repr(random.getstate()), "numpy.random": repr(of_numpy)}


# --- state --------------------------------------------------------------------------------------------


def _watch_state(replica: nn.Module, kept: dict[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """(paths of what the forward changes, in model order; paths of what it reads that cannot be compared). Both are
    filled by hooks around the forward, since the export restores attributes afterwards."""
    changed: dict[str, Any] = {}
    uncomparable: dict[str, str] = {}
    number = id(changed)  # hooks must not refer to it: it would count as state of the module

    def start(*_: Any) -> None:
        reads = ForwardReads(replica)
        _BEFORE.setdefault(number, []).append((_state(replica), reads, [state_of(x) for _, x in reads.uncomparable]))

    def end(*_: Any) -> None:
        after, (state, reads, facts) = _state(replica), _BEFORE[number].pop()
        _BEFORE.pop(number) if not _BEFORE[number] else None
        ours = f"_forward_hooks[{handle.id}]"
        changed.update({p: after[p] for p in _changes(state, after) if not p.startswith(ours)})
        if changed:
            kept.update(_new_values(replica, state, ours))
        changed.update({str(w): "another" for w in reads.guards.changed() if w.own and not w.kind})
        for (where, x), fact in zip(reads.uncomparable, facts, strict=True):
            if state_of(x) != fact and not where.kind:
                changed[str(where)] = state_of(x)
            elif state_of(x) == fact and not isinstance(x, GENERATORS):
                uncomparable[str(where)] = f"a {type(x).__qualname__}"

    replica.register_forward_pre_hook(start, prepend=True)
    handle = replica.register_forward_hook(end, always_call=True)
    return changed, uncomparable


_BEFORE: dict[int, list[tuple[dict[str, Any], ForwardReads, list[Any]]]] = {}  # of running forwards


def _state(root: nn.Module) -> dict[str, Any]:
    """Comparable state of all objects that a module reaches: numbers, strings, sizes, states of generators."""
    registered = {id(t) for _, t in (*root.named_parameters(), *root.named_buffers())}
    facts = ((path, state_of(x)) for path, x in walk_attributes(root) if id(x) not in registered)
    return {path.lstrip("."): fact for path, fact in facts if fact is not None and not _is_dynamos(path)}


def _new_values(root: nn.Module, before: dict[str, Any], but: str) -> Iterator[tuple[str, str]]:
    """(path, text) of new values where there was none before."""
    for path, x in ((path.lstrip("."), x) for path, x in walk_attributes(root)):
        new = before.get(path) in (None, repr(None)) and not path.startswith(but) and not _is_dynamos(path)
        if new and (text := memo_text(x)) is not None:
            yield path, text


def _is_dynamos(path: str) -> bool:
    """Attributes that dynamo sets on functions."""
    return "._torchdynamo_" in path or ".__dynamo_" in path


def state_of(x: Any) -> Any:
    """Comparable state of one object: a number, the size of a list, the state of a generator; None for others."""
    if type(x) in _SIMPLE or isinstance(x, (SymInt, SymFloat, SymBool)):
        return repr(x)
    if isinstance(x, Tensor):
        return _REPLACED if MARKS.get(x) is not None else id(x)
    if isinstance(x, _SIZED):
        return f"{len(x)} entries"
    if isinstance(x, random.Random):
        return f"{_GENERATOR} {hash(x.getstate())}"
    if isinstance(x, Iterator):
        return f"{_ITERATOR} {_place_of(x)}"
    if isinstance(x, numpy.random.RandomState):
        return f"{_GENERATOR} {x.get_state()}"
    generator = getattr(x, "bit_generator", None) if str(type(x).__module__).startswith("numpy.random") else None
    return f"{_GENERATOR} {generator.state}" if generator is not None else None


def _place_of(x: Any) -> Any:
    """The position of an iterator, as far as it can be read."""
    if isinstance(x, GeneratorType):
        frame = x.gi_frame
        if frame is None:
            return "at its end"
        held = {name: repr(value) for name, value in frame.f_locals.items() if type(value) in _SIMPLE}
        return frame.f_lasti, held, None if x.gi_yieldfrom is None else _place_of(x.gi_yieldfrom)
    if isinstance(x, IOBase):
        return x.tell() if not x.closed and x.readable() and x.seekable() else None
    with suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = x.__reduce__()[1:]
        return [_place_of(part) if isinstance(part, Iterator) else _simple(part) for part in _flat(parts)]
    return operator.length_hint(x, -1)


def _flat(parts: Any) -> Iterator[Any]:
    """The items of nested tuples."""
    for part in parts:
        yield from _flat(part) if isinstance(part, tuple) else [part]


def _simple(x: Any) -> Any:
    """A number or string; for other objects their identity, and numbers and strings among their entries."""
    if type(x) in _SIMPLE:
        return repr(x)
    if isinstance(x, dict):
        return {key: repr(value) for key, value in x.items() if type(value) in _SIMPLE}
    return id(x), len(x) if isinstance(x, _SIZED) else None


def _changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Paths of changed and new values, without paths inside of them."""
    found: list[str] = []
    for path, fact in after.items():
        within = tuple(f"{known}{mark}" for known in found for mark in ".[<(")
        if before.get(path) not in (fact, _REPLACED) and not path.startswith(within):
            found.append(path)
    return found
