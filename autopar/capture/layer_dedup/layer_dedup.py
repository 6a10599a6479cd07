"""Traces identical layers once and copies the graph of the first one for the others.

    layers.0(x0, cos)   traced                    mul -> linear(p_layers_0_q) -> ... -> add
    layers.1(x1, cos)   its nodes are copied      mul -> linear(p_layers_1_q) -> ... -> add
    layers.2(x2, cos)   traced, and compared

The model's Python code runs down to the layers with a template, so alternating windows, dense layers before experts,
encoders and decoders need no special case. A template is used if everything that the forward can read is equal
(`layer_signature`). Integer attributes that differ between identical layers (the layer index) may differ if the traced
forward did not read them.

Side effects of a forward are detected. A forward that changes what it can read (attributes, globals), or uses tensors
that are not its arguments, is traced for every layer. If a side effect shows only at the end, in tensors that are used
elsewhere or in a different last layer, the model is traced again without templates. Not detected: state that only
library functions behind those that a forward calls read, if it changes between calls and the last equals the first.
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
    noticed_reads,
    signature_of_call,
    signature_of_layer,
    surroundings,
)
from autopar.capture.layer_dedup.layer_template import Template, template_of_call

_ENOUGH = 3  # identical layers needed: the first and the last are traced


class TraceAnew(Exception):
    """The graph with copied layers may be wrong: trace the model again without copying."""


class _Member(NamedTuple):
    """A layer of a group of identical ones. differing: (path, name) of integers that differ in the group; last:
    whether it is the last one."""

    differing: frozenset[tuple[str, str]]
    last: bool


class _ModuleCall(NamedTuple):
    """A call of a layer. key: everything that determines its graph, except for the integers of the module."""

    key: Any
    block: LayerSignature
    tensors: Tensors

    def is_still(self, later: _ModuleCall | None) -> bool:
        """Whether nothing has changed since this call."""
        if later is None or later.key != self.key or later.block != self.block:
            return False
        return all(a is b for a, b in zip(self.tensors.found, later.tensors.found, strict=True))


class _KnownModule(NamedTuple):
    """A template, and the integers that its forward has read, which must be equal."""

    template: Template
    numbers: dict[tuple[str, str], int]

    def fits(self, facts: LayerSignature) -> bool:
        """Whether a layer has these integers."""
        found = dict(zip(facts.names, facts.numbers, strict=True))
        return all(found[name] == number for name, number in self.numbers.items())


class LayerDedup:
    """Deduplicates layers in one export of ``model``, within `within`. copied: number of layers that were copied."""

    def __init__(self, model: nn.Module) -> None:
        self.copied = 0
        self._blocks = _alike(model)
        self._entries: dict[Any, list[_KnownModule]] = {}
        self._refused: set[Any] = set()

    @contextmanager
    def within(self) -> Iterator[None]:
        """Context manager around the export; patches torch's tracer. Raises TraceAnew."""
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
        """The result of a forward, traced or copied."""
        block, call = self._blocks[id(module)], _call(module, args, kwargs)
        if call is None or call.key in self._refused:
            return forward(*args, **kwargs)
        known = next((e for e in self._entries.get(call.key, ()) if e.fits(call.block)), None)
        if known is not None and not block.last:
            self.copied += 1
            _read(module, block.differing & known.numbers.keys())
            with torch._C.DisableTorchFunction():
                return known.template.copy(tracer, call.tensors.found)
        before = answers()  # a folded value that the forward reads is not in its signature
        with noticed_reads(module, block.differing) as read:
            made, template = template_of_call(tracer, call.tensors.found, lambda: forward(*args, **kwargs))
        still = call.is_still(_call(module, args, kwargs)) and answers() == before
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
    """id of a module -> its group, for modules with enough identical ones."""
    groups: dict[Any, list[tuple[nn.Module, LayerSignature]]] = {}
    states: dict[int, Any] = {}
    for module in model.modules():
        of_torch = type(module).__module__.startswith("torch.nn.")
        if module is model or (of_torch and next(module.children(), None) is None):
            continue  # a single operator is not worth it
        try:
            facts = signature_of_layer(module, Tensors(), states)
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
    """The signature of a call; None if something cannot be compared."""
    tensors, around = Tensors(), surroundings(module)
    with torch._C.DisableTorchFunction():
        try:
            block = signature_of_layer(module, tensors)
            return _ModuleCall((block.fixed, signature_of_call((args, kwargs), tensors), around), block, tensors)
        except (NotComparable, RecursionError):
            return None


def _read(module: nn.Module, names: Collection[tuple[str, str]]) -> None:
    """Read the integers that a copy depends on, so that `noticed_reads` of layers around it sees them."""
    for path, name in names:
        getattr(module.get_submodule(path), name)
