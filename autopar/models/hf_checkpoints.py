"""Weight conversions of transformers' from_pretrained and save_pretrained.

Since version 5 names on disk differ from those of the modules: experts are merged, projections split, prefixes changed,
tensors transposed, by a list for each model type (``transformers.conversion_mapping``). The lists are applied here in
transformers' order, by its own code; the caller converts the tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from autopar.ir.weight_conversion import WeightConversion


def recipes_to_load(model: PreTrainedModel, names: Sequence[str]) -> list[WeightConversion]:
    """Conversions from tensors in files to those of the model, which may be on the meta device. Names that the model
    does not have are kept."""
    renamings, converters = _sorted(get_model_conversion_mapping(model))
    wanted, prefix = model.state_dict(), model.base_model_prefix
    groups = _Collected(model, converters)
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
        known = target in wanted  # else it was not an old name
        groups.add(name, target if known else name, pattern if known else None)
    return groups.recipes([])


def recipes_to_save(model: PreTrainedModel, names: Sequence[str]) -> list[WeightConversion]:
    """Conversions from the model's tensors to those in files, as save_pretrained writes them: the inverse of the
    conversion with which this model was loaded, or of that for its type."""
    used = getattr(model, "_weight_conversions", None)
    if used is None:  # a prefix is added only if it was removed when loading
        used = [t for t in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(t, PrefixChange)]
    renamings, converters = _sorted([transform.reverse_transform() for transform in reversed(used)])
    groups = _Collected(model, converters)
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, [], converters)
        groups.add(name, _renamed(name, renamings) if pattern is None else target, pattern)
    return groups.recipes(renamings)


def _sorted(transforms: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """(renamings, conversions that compute)."""
    return (
        [t for t in transforms if isinstance(t, WeightRenaming)],
        [t for t in transforms if isinstance(t, WeightConverter)],
    )


def _renamed(name: str, renamings: list[Any]) -> str:
    """Apply renamings alone."""
    found: str = rename_source_key(name, renamings, [])[0]
    return found


class _Collected:
    """Collects tensors that are converted together, by target."""

    def __init__(self, model: PreTrainedModel, converters: Sequence[Any]) -> None:
        self._model = model
        self._converters = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        self._plain: list[tuple[str, str]] = []
        self._converted: dict[str, list[tuple[str, str]]] = {}  # target -> (name, matched pattern)

    def add(self, name: str, target: str, pattern: str | None) -> None:
        if pattern is None:
            self._plain.append((name, target))
        else:
            self._converted.setdefault(target, []).append((name, pattern))

    def recipes(self, renamings: list[Any]) -> list[WeightConversion]:
        """The conversions. ``renamings`` are applied to their results."""
        plain = [WeightConversion((name,), target) for name, target in self._plain]
        return plain + [self._recipe(target, found, renamings) for target, found in self._converted.items()]

    def _recipe(self, target: str, found: Sequence[tuple[str, str]], renamings: list[Any]) -> WeightConversion:
        converter, model = self._converters[found[0][1]], self._model

        def make(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
            own = copy.deepcopy(converter)
            for (name, pattern), tensor in zip(found, tensors, strict=True):
                own.add_tensor(target, name, pattern, tensor)
            made = own.convert(target, model=model, config=model.config)
            return {
                _renamed(name, renamings): value[0] if isinstance(value, list) else value
                for name, value in made.items()
            }

        words = ", ".join(map(repr, converter.operations))
        return WeightConversion(tuple(name for name, _ in found), target, make, words)
