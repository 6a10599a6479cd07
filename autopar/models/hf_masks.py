"""Reads transformers' mask functions back into a mask specification.

transformers describes a mask as nested closures over (batch, head, query, key) indices:

    and_masks(packed_sequence_mask_function(ids), remap(and_masks(sliding_window_overlay(w), causal)), position_ids)
        --> MaskFacts(causal=True, window=w, segments=ids)

Closures are recognized by the functions that create them, and their variables are read. With an unknown function the
whole mask is a tensor (`MaskFacts.tensor`), as transformers itself would materialize it. If a model computes with its
mask (`attention_mask[:, 0]`, `attention_mask.dtype`), the specification behaves like that tensor.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers import masking_utils

from autopar.models.hf_versions import renumbers_positions

# Files whose forwards slice a mask that they have not made where they are traced.
_MASK_UNLESS_TRACED = (
    "transformers.models.longt5.modeling_longt5",
    "transformers.models.pop2piano.modeling_pop2piano",
    "transformers.models.switch_transformers.modeling_switch_transformers",
    "transformers.models.udop.modeling_udop",
)
OWN_MASKS = "attention_before_autopar"  # attribute of a config: the attention that its model had

# Positions that the model computed itself never mean packed documents.
_POSITIONS_FROM_USER: contextvars.ContextVar[bool] = contextvars.ContextVar("positions_from_user", default=False)


@contextlib.contextmanager
def positions_from_user(given: bool) -> Iterator[None]:
    """Context manager: whether the user passed position_ids, which may then describe packed documents."""
    token = _POSITIONS_FROM_USER.set(given)
    try:
        yield
    finally:
        _POSITIONS_FROM_USER.reset(token)


@contextlib.contextmanager
def facts_handed_inward() -> Iterator[None]:
    """Context manager: a model that gets a `MaskFacts` as its mask uses it as it is, like a mask [B, 1, Sq, Sk],
    instead of reading it as a padding mask. Vision-language models pass such a mask to their language model."""
    before = masking_utils._preprocess_mask_arguments

    def taken(config: Any, inputs_embeds: Tensor, attention_mask: Any, *others: Any, **more: Any) -> Any:
        if isinstance(attention_mask, MaskFacts):
            return True, attention_mask, None, None, None, None, None
        return before(config, inputs_embeds, attention_mask, *others, **more)

    masking_utils._preprocess_mask_arguments = taken
    try:
        yield
    finally:
        masking_utils._preprocess_mask_arguments = before


@contextlib.contextmanager
def masks_made_when_traced() -> Iterator[None]:
    """Context manager: forwards that create their mask only if they are not traced do create it."""
    found = [module for name in _MASK_UNLESS_TRACED if (module := sys.modules.get(name)) is not None]
    before = [module.is_torchdynamo_compiling for module in found]
    for module in found:
        module.is_torchdynamo_compiling = lambda: False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module, asked in zip(found, before, strict=True):
            module.is_torchdynamo_compiling = asked  # type: ignore[attr-defined]


@dataclass(frozen=True)
class MaskFacts:
    """A mask specification, with fields as in `autopar.ops.mask_spec.MaskSpec`. ``tensor``: a materialized mask
    instead of the other fields, bool (True = attend) or additive. ``make`` creates the mask [B, 1, Sq, Sk] that the
    model's own attention would get: additive for "eager" attention, else bool. ``left_out``: transformers gives its own
    attention no mask instead, where no token is padding, and leaves it to the module whether that is causal."""

    causal: bool = False
    window: int = 0
    chunk: int = 0
    key_mask: Tensor | None = None
    segments: Tensor | None = None
    tensor: Tensor | None = None
    left_out: bool = False
    make: Callable[[], Tensor] | None = field(default=None, compare=False, repr=False)

    def whole(self) -> Tensor:
        """The mask as a tensor."""
        if self.make is not None:
            return self.make()
        assert self.tensor is not None, f"attention: {self} was not made from a mask of the model"
        return self.tensor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.whole(), name)

    def __getitem__(self, key: Any) -> Tensor:
        return self.whole()[key]

    def __invert__(self) -> Tensor:
        return ~self.whole()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(MaskFacts, MaskFacts.whole, (args, kwargs or {}))
        return function(*args, **kwargs)


class _Unknown(Exception):
    """An unknown mask function."""


def mask_facts(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    **others: Any,
) -> MaskFacts | None:
    """transformers' mask interface. ``attention_mask``: bool [B, Sk], True = a token, False = padding. None where
    transformers gives none, for any tokens: modules ask whether they got one."""
    eager = getattr(others.get("config"), OWN_MASKS, None) == "eager"
    left_out = not eager and q_length == kv_length  # what else there may be makes another pattern
    may_skip = bool(others.get("allow_is_causal_skip", True))  # models that add to the mask ask for one
    none_for_all = bool(others.get("allow_is_bidirectional_skip"))
    others |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    if _indexes(mask_function):
        others["use_vmap"] = False  # its indices broadcast
    sizes = (batch_size, q_length, kv_length, q_offset, kv_offset)
    own, as_bool = (
        cast(Callable[[], Tensor], functools.partial(made, *sizes, mask_function, attention_mask, **others))
        for made in (masking_utils.eager_mask if eager else masking_utils.sdpa_mask, masking_utils.sdpa_mask)
    )
    try:
        if q_offset != 0 or kv_offset != 0:
            raise _Unknown
        facts = _Reader(batch_size, kv_length, attention_mask is not None).facts(mask_function)
    except _Unknown:
        return MaskFacts(tensor=as_bool(), make=own)
    if attention_mask is not None:
        padded = masking_utils.prepare_padding_mask(attention_mask, kv_length, 0)
        assert padded is not None
        facts = replace(facts, key_mask=padded.bool())
    longest = max(q_length, kv_length)
    window = facts.window if facts.window < longest else 0
    chunk = facts.chunk if facts.chunk < longest else 0
    plain = not (window or chunk or facts.segments is not None)
    left_out = left_out and plain
    if attention_mask is None and q_length > 1 and (left_out and may_skip if facts.causal else plain and none_for_all):
        return None
    return replace(facts, window=window, chunk=chunk, left_out=left_out, make=own)


def _made_by(function: Callable[..., Any], factory: Callable[..., Any]) -> bool:
    """Whether ``function`` is a closure that ``factory`` returned."""
    return getattr(function, "__qualname__", "").startswith(f"{factory.__qualname__}.<locals>")


def _indexes(function: Callable[..., Any]) -> bool:
    """Whether a mask consists of transformers' own functions, which compare indices and entries at indices."""
    held = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    parts = [x for y in held.values() for x in (y if isinstance(y, tuple) else (y,)) if inspect.isfunction(x)]
    return getattr(function, "__module__", "") == masking_utils.__name__ and all(map(_indexes, parts))


class _Reader:
    """Reads nested closures. ``positions``: positions within packed documents, once a remapping was found."""

    def __init__(self, batch: int, keys: int, padded: bool) -> None:
        self.batch, self.keys, self.padded = batch, keys, padded
        self.one_sided = False

    def facts(self, function: Callable[..., Any]) -> MaskFacts:
        """The specification of a mask function. Raises _Unknown if it needs a tensor."""
        facts = self._read(function, MaskFacts(), None)
        if self.one_sided and not facts.causal:  # our window is two-sided, which is equivalent if causal
            raise _Unknown
        return facts

    def _read(self, function: Callable[..., Any], facts: MaskFacts, positions: Tensor | None) -> MaskFacts:
        m = masking_utils
        held = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
        if function is m.causal_mask_function:
            return replace(facts, causal=True)
        if function is m.bidirectional_mask_function:
            return facts
        if _made_by(function, m.and_masks):
            for part in held["mask_functions"]:
                facts = self._read(part, facts, positions)
            return facts
        if _made_by(function, m.sliding_window_overlay):
            self.one_sided = True
            return self._window(facts, held["sliding_window"])
        if _made_by(function, m.sliding_window_bidirectional_overlay):  # |q - k| <= size
            return self._window(facts, held["sliding_window"] + 1)
        if _made_by(function, m.chunked_overlay):
            return self._chunk(facts, held["chunk_size"], held["left_padding"], positions)
        if _made_by(function, m.packed_sequence_mask_function):
            return self._segments(facts, held["packed_sequence_mask"]) if _POSITIONS_FROM_USER.get() else facts
        if (renumbers := renumbers_positions()) is not None and _made_by(function, renumbers):
            inner = held["position_ids"] if _POSITIONS_FROM_USER.get() else None
            return self._read(held["mask_function"], facts, inner)
        raise _Unknown

    def _window(self, facts: MaskFacts, size: int) -> MaskFacts:
        if facts.window and facts.window != size:
            raise _Unknown
        return replace(facts, window=size)

    def _chunk(self, facts: MaskFacts, size: int, left_padding: Tensor, positions: Tensor | None) -> MaskFacts:
        """Chunks that start at position 0 are the field ``chunk``; chunks relative to the first token or a document
        are segments."""
        if positions is None and not self.padded:
            return replace(facts, chunk=size)
        if positions is None:
            positions = torch.arange(self.keys, device=left_padding.device).unsqueeze(0)
        numbers = torch.div(positions - left_padding.unsqueeze(-1), size, rounding_mode="floor")
        return self._segments(facts, numbers)

    def _segments(self, facts: MaskFacts, ids: Tensor) -> MaskFacts:
        ids = ids.expand(self.batch, -1)
        if facts.segments is not None:  # a new segment id for each pair
            ids = facts.segments * (1 << 20) + ids
        return replace(facts, segments=ids)
