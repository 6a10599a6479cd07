"""The notes that torch keeps beside the tensors of a state dict, where a module's own state goes under names."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

IncompatibleKeys = torch.nn.modules.module._IncompatibleKeys  # what load_state_dict gives back


def add_note(state: OrderedDict[str, Any], name: str, value: Any, prefix: str = "") -> None:
    """Beside the tensors, where modules read the version of their layout; survives torch.save, changes no name."""
    notes, path = OrderedDict(_notes(state)), prefix[:-1]
    state._metadata = OrderedDict({path: {}, **notes})  # type: ignore[attr-defined]
    state._metadata[path] = {**notes.get(path, {}), name: value}  # type: ignore[attr-defined]


def noted(state: Any, name: str) -> Any:
    """What was noted under a name, or None."""
    return _notes(state).get("", {}).get(name)


def with_notes_of(state: Mapping[str, Any], entries: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Other entries with the notes of a state dict."""
    out = OrderedDict(entries)
    if notes := _notes(state):
        out._metadata = notes  # type: ignore[attr-defined]
    return out


def _notes(state: Any) -> Mapping[str, Any]:
    found: Mapping[str, Any] = getattr(state, "_metadata", {})
    return found


def unsaved_buffers(root: nn.Module) -> set[str]:
    """Names of the buffers that no state dict has, as they were registered."""
    modules = root.named_modules(remove_duplicate=False)
    return {f"{path}.{name}" if path else name for path, m in modules for name in m._non_persistent_buffers_set}
