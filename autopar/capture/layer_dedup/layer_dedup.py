"""Modules that are called alike are traced once: the graph of the first one is copied for the others.

    layers.0(x0, cos)   traced                    mul -> linear(p_layers_0_q) -> ... -> add
    layers.1(x1, cos)   its nodes are copied      mul -> linear(p_layers_1_q) -> ... -> add
    layers.2(x2, cos)   traced, and compared

The model's own Python code runs down to the modules that are known, so windows that alternate, dense layers ahead of
experts, encoders and decoders need no special case. A module is known if everything that its forward can read is as it
was (`block_facts`). Integers among its attributes that differ between alike modules (the number of a layer) need not be
equal where the traced forward has not read them.

What a forward does beside its graph is looked for. One that changes what can be read (attributes, globals), or takes
tensors that it was not given, is traced each time. Where it shows only at the end, in tensors that somebody else takes
or in a last module that differs, the model is traced anew, module by module. What stays unseen is state that only
functions of libraries read, behind those that a forward calls, where it changes from call to call and the last is as
the first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import _ModuleStackTracer

from autopar.capture.branches.known_values import answers
from autopar.capture.layer_dedup.layer_signature import (
    LayerSignature,
    NotComparable,
    Tensors,
    facts_of_block,
    facts_of_call,
    noticed_reads,
    surroundings,
)
from autopar.capture.layer_dedup.layer_template import Template, template_of_call

_ENOUGH = 3  # modules that are alike: the first and the last are traced


class TraceAnew(Exception):
    """A graph with copies may not be the model's."""


class _Member(NamedTuple):
    """What is known of a module before it is called: the integers, by path and name, that differ among those like it,
    and whether it is the last of them."""

    differing: frozenset[tuple[str, str]]
    last: bool


class _ModuleCall(NamedTuple):
    """``key``: everything that decides what a call does, but for the integers of the module."""

    key: Any
    block: LayerSignature
    tensors: Tensors

    def is_still(self, later: _ModuleCall | None) -> bool:
        """Whether nothing has changed since."""
        if later is None or later.key != self.key or later.block != self.block:
            return False
        return all(a is b for a, b in zip(self.tensors.found, later.tensors.found, strict=True))


class _KnownModule(NamedTuple):
    """A template, and the integers that it is for: all but those that its forward has not read."""

    template: Template
    numbers: dict[tuple[str, str], int]

    def fits(self, facts: LayerSignature) -> bool:
        """Whether the integers of a module are those."""
        found = dict(zip(facts.names, facts.numbers, strict=True))
        return all(found[name] == number for name, number in self.numbers.items())


class LayerDedup:
    """For one export of ``model``, in `within`. ``copied``: how many modules were not traced."""

    def __init__(self, model: nn.Module) -> None:
        self.copied = 0
        self._blocks = _alike(model)
        self._entries: dict[Any, list[_KnownModule]] = {}
        self._refused: set[Any] = set()

    @contextmanager
    def within(self) -> Iterator[None]:
        """Around the export. (The tracer is torch's; its class is patched for the time.) Raises TraceAnew."""
        tracers: Any = _ModuleStackTracer
        trace, call = tracers.trace, tracers.call_module

        def traced(tracer: Any, root: Any, concrete_args: Any) -> Any:
            graph = trace(tracer, root, concrete_args)
            templates = [entry.template for entries in self._entries.values() for entry in entries]
            if any(template.copies and template.leaks() for template in templates):
                raise TraceAnew
            return graph

        def called(tracer: Any, module: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            base = module.get_base() if hasattr(type(module), "get_base") else module
            if id(base) not in self._blocks:
                return call(tracer, module, forward, args, kwargs)
            return call(tracer, module, lambda *a, **k: self._forward(tracer, base, forward, a, k), args, kwargs)

        tracers.trace, tracers.call_module = traced, called
        try:
            yield
        finally:
            tracers.trace, tracers.call_module = trace, call

    def _forward(self, tracer: Any, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What the module's forward returns, which is called or not."""
        block, call = self._blocks[id(module)], _call(module, args, kwargs)
        if call is None or call.key in self._refused:
            return forward(*args, **kwargs)
        known = next((e for e in self._entries.get(call.key, ()) if e.fits(call.block)), None)
        if known is not None and not block.last:
            self.copied += 1
            _read(module, block.differing & known.numbers.keys())
            with torch._C.DisableTorchFunction():
                return known.template.copy(tracer, call.tensors.found)
        before = answers()
        with noticed_reads(module, block.differing) as read:
            made, template = template_of_call(tracer, call.tensors.found, lambda: forward(*args, **kwargs))
        still = call.is_still(_call(module, args, kwargs)) and answers() == before  # values are no facts of a call
        new = template() if still else None
        if known is not None:
            if known.template.copies and (new is None or new.text() != known.template.text()):
                raise TraceAnew
        elif new is None:
            self._refused.add(call.key)
        else:
            numbers = dict(zip(call.block.names, call.block.numbers, strict=True))
            numbers = {name: n for name, n in numbers.items() if name not in block.differing or name in read}
            self._entries.setdefault(call.key, []).append(_KnownModule(new, numbers))
        return made


def _alike(model: nn.Module) -> dict[int, _Member]:
    """By id of a module: those that are worth it, and of which there are enough."""
    groups: dict[Any, list[tuple[nn.Module, LayerSignature]]] = {}
    states: dict[int, Any] = {}
    for module in model.modules():
        of_torch = type(module).__module__.startswith("torch.nn.")
        if module is model or (of_torch and next(module.children(), None) is None):
            continue  # one operator
        try:
            facts = facts_of_block(module, Tensors(), states)
        except (NotComparable, RecursionError):
            continue
        groups.setdefault(facts.fixed, []).append((module, facts))
    found: dict[int, _Member] = {}
    for members in groups.values():
        if len(members) < _ENOUGH:
            continue
        columns = zip(members[0][1].names, zip(*(facts.numbers for _, facts in members)))
        differing = frozenset(name for name, values in columns if len({*values}) > 1)
        found |= {id(module): _Member(differing, last=module is members[-1][0]) for module, _ in members}
    return found


def _call(module: nn.Module, args: Any, kwargs: Any) -> _ModuleCall | None:
    """None where something is not known."""
    tensors, around = Tensors(), surroundings(module)
    with torch._C.DisableTorchFunction():
        try:
            block = facts_of_block(module, tensors)
            return _ModuleCall((block.fixed, facts_of_call((args, kwargs), tensors), around), block, tensors)
        except (NotComparable, RecursionError):
            return None


def _read(module: nn.Module, names: Collection[tuple[str, str]]) -> None:
    """A copy depends on the integers that its template is for, so whoever notices reads has to see them."""
    for path, name in names:
        getattr(module.get_submodule(path), name)
