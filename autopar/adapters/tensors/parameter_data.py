"""``p.data = x`` of a plain parameter where ``x`` has no storage of its own, as a DTensor.

torch accepts it, and the process crashes when ``p`` is read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_ATTRIBUTES: Any = Tensor  # whose attributes are descriptors
_get, _set = _ATTRIBUTES.data.__get__, _ATTRIBUTES.data.__set__


def refuse_as_data(kind: type[Tensor], words: str) -> None:
    """Make plain parameters refuse tensors of this class as their data, by a ValueError with this text."""

    def put(parameter: nn.Parameter, x: Any) -> None:
        if isinstance(x, kind):
            raise ValueError(words)
        _set(parameter, x)

    torch.nn.Parameter.data = property(_get, put)  # type: ignore[assignment]
