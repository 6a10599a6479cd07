"""The layers of a model: entries of its outermost lists of equal modules, and models with few of them.

layer_lists(model)                        the lists, with the kind of each layer
with_layers(model, lists, entries)        the model with some entries of each list: its own code runs
samples(lists, unlike, is_part)           the fewest layers that tell the costs of all kinds apart
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from autopar.cost.layer_costs import Unlike, design_row

_NUMBERS_OF_LAYERS = ("idx", "index", "layer_id", "layer_number", "layer_num")

Entries = tuple[tuple[int, ...], ...]  # which layers of each list a model with few has


@dataclass(frozen=True)
class LayerList:
    """A list of layers. path: of the module list. kinds: number of the kind of each layer, over all lists."""

    path: str
    kinds: tuple[int, ...]


def layer_lists(model: nn.Module) -> tuple[LayerList, ...]:
    """The outermost lists of two or more layers of a model, with the kinds of their entries."""
    found: list[LayerList] = []
    known: list[Hashable] = []
    for path, module in _outermost(model):
        kinds = []
        for layer in module.children():
            signature = _signature(layer)
            if signature not in known:
                known.append(signature)
            kinds.append(known.index(signature))
        found.append(LayerList(path, tuple(kinds)))
    return tuple(found)


def _outermost(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and _are_layers(child):
            yield inner, child
        else:
            yield from _outermost(child, inner)


def _are_layers(module: nn.Module) -> bool:
    """Whether a list holds layers: several, some of one class, each with modules and parameters of its own."""
    entries = list(module.children())
    if len(entries) < 2 or len({type(entry) for entry in entries}) == len(entries):
        return False
    return all(list(entry.children()) and next(entry.parameters(), None) is not None for entry in entries)


def _signature(layer: nn.Module) -> Hashable:
    """Equal for layers of a kind: classes, plain attributes except for the layer's number, shapes of parameters."""
    found: list[Hashable] = []
    for path, module in layer.named_modules():
        held = [
            (name, _plain(value))
            for name, value in vars(module).items()
            if not name.startswith("_") and not any(word in name for word in _NUMBERS_OF_LAYERS)
        ]
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        sizes = [(name, tuple(x.shape), x.dtype, x.requires_grad) for name, x in tensors]
        found.append((path, type(module), tuple(held), tuple(sizes)))
    return tuple(found)


def _plain(value: Any) -> Hashable:
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    return str(getattr(value, "__qualname__", type(value).__qualname__))


@contextmanager
def with_layers(model: nn.Module, lists: Sequence[LayerList], entries: Entries) -> Iterator[None]:
    """Context manager: the lists have only these entries."""
    modules = [model.get_submodule(one.path) for one in lists]
    before = [dict(module._modules) for module in modules]
    try:
        for module, held, numbers in zip(modules, before, entries, strict=True):
            names = list(held)
            module._modules.clear()
            module._modules.update({names[i]: held[names[i]] for i in numbers})
        yield
    finally:
        for module, held in zip(modules, before, strict=True):
            module._modules.clear()
            module._modules.update(held)


def first(lengths: Sequence[int]) -> Entries:
    """So many of the first layers of each list."""
    return tuple(tuple(range(length)) for length in lengths)


def counts_of(lists: Sequence[LayerList], entries: Entries) -> tuple[int, ...]:
    """Layers of each kind."""
    counts = Counter(one.kinds[i] for one, numbers in zip(lists, entries, strict=True) for i in numbers)
    return tuple(counts[kind] for kind in range(1 + max((k for one in lists for k in one.kinds), default=-1)))


def samples(
    lists: Sequence[LayerList], unlike: Collection[Unlike], is_part: Callable[[Entries, Entries], bool]
) -> list[Entries]:
    """Layers of each sample: the fewest that tell the costs of all kinds apart, those with the most layers last.
    is_part: whether a model with some of the first layers is a part of the model with all of them."""
    found = of_first_layers(lists, unlike)
    for i, entries in enumerate(found):
        for fewer in _fewer(lists, entries):
            others = [*found[:i], fewer, *found[i + 1 :]]
            if _rank(lists, others, unlike) == len(found) and is_part(fewer, entries):
                found = others
                break
    return sorted(found, key=lambda entries: (sum(map(len, entries)), entries))


def of_first_layers(lists: Sequence[LayerList], unlike: Collection[Unlike]) -> list[Entries]:
    """The shortest lists of first layers. A list without layers is among them where others do not tell all kinds apart:
    a first layer of its own kind is in all others."""
    found = list[Entries]()
    start = [1] * len(lists)
    more = [(i, length) for i, one in enumerate(lists) for length in range(2, len(one.kinds) + 1)]
    empty = [(i, 0) for i in range(len(lists))]
    for lengths in [start, *([*start[:i], length, *start[i + 1 :]] for i, length in (*more, *empty))]:
        if _rank(lists, [*found, first(lengths)], unlike) > len(found):
            found.append(first(lengths))
    return found


def _fewer(lists: Sequence[LayerList], entries: Entries) -> Iterator[Entries]:
    """Without layers that may not be needed to have the last one. The first of all stays: what stands at the beginning
    of a model moves a little more. That of its kind may be needed."""
    for i, (one, numbers) in enumerate(zip(lists, entries, strict=True)):
        if len(numbers) > 1:
            last = numbers[-1]
            like = one.kinds.index(one.kinds[last])
            for kept in ({0, last}, {0, like, last}):
                if len(kept) < len(numbers):
                    yield (*entries[:i], tuple(sorted(kept)), *entries[i + 1 :])


def _rank(lists: Sequence[LayerList], found: Sequence[Entries], unlike: Collection[Unlike]) -> int:
    return int(np.linalg.matrix_rank(np.array([design_row(counts_of(lists, x), unlike) for x in found])))
