"""Metadata of a state dict, in which state can be stored under names of its own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

IncompatibleKeys = torch.nn.modules.module._IncompatibleKeys  # what load_state_dict gives back


def add_note(state: OrderedDict[str, Any], name: str, value: Any, prefix: str = "") -> None:
    """Store a value in the metadata (where torch keeps layout versions); it survives torch.save and adds no entry."""
    notes, path = OrderedDict(_notes(state)), prefix[:-1]
    state._metadata = OrderedDict({path: {}, **notes})  # type: ignore[attr-defined]
    state._metadata[path] = {**notes.get(path, {}), name: value}  # type: ignore[attr-defined]


def noted(state: Any, name: str) -> Any:
    """A value from the metadata, or None."""
    return _notes(state).get("", {}).get(name)


def with_notes_of(state: Mapping[str, Any], entries: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Other entries with the metadata of a state dict."""
    out = OrderedDict(entries)
    if notes := _notes(state):
        out._metadata = notes  # type: ignore[attr-defined]
    return out


def _notes(state: Any) -> Mapping[str, Any]:
    found: Mapping[str, Any] = getattr(state, "_metadata", {})
    return found


def unsaved_buffers(root: nn.Module) -> set[str]:
    """Names of non-persistent buffers."""
    modules = root.named_modules(remove_duplicate=False)
    return {f"{path}.{name}" if path else name for path, m in modules for name in m._non_persistent_buffers_set}
