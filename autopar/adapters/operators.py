"""What an operator's schema says of its results."""

from __future__ import annotations

from typing import Any

import torch


def returns_view(target: Any) -> bool:
    """Whether the results of an operator share the storage of an operand, as far as its schema tells."""
    return isinstance(target, torch._ops.OpOverload) and any(r.alias_info is not None for r in target._schema.returns)
