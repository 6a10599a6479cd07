"""Guards on attributes of parameters and buffers that a forward may read (``self.weight.gain``).

Most such attributes are for optimizers and may change at every step, so a change counts only if the code of the modules
names the attribute.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from autopar.adapters.tensors.tags import tags_of
from autopar.capture.reads.named_in_code import names_in_code

_ENTRIES = operator.attrgetter("__dict__")
_MISSING = object()


class TagGuards:
    """``holds()``: whether attributes of tensors that the code of ``root`` may read are unchanged."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._tensors: list[Tensor] = [x for _, x in (*root.named_parameters(), *root.named_buffers())]
        self._named: set[str] | None = None  # names in the code, computed on first use
        self._take()

    def _take(self) -> None:
        self._tags = [_copied(tags_of(x)) for x in self._tensors]
        self._live = list(map(_ENTRIES, self._tensors))
        self._then: list[dict[str, Any]] = list(map(_copied, self._live))

    def holds(self) -> bool:
        """About 0.1 us per tensor."""
        try:
            if all(map(operator.eq, self._live, self._then)):
                return True
        except Exception:  # a tensor or array, whose == does not return a bool
            pass
        if self._named is None:
            self._named = names_in_code(self._root)
        if any(map(self._differ, self._tags, map(tags_of, self._tensors))):
            return False
        self._take()
        return True

    def _differ(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
        assert self._named is not None
        names = self._named.intersection((*before, *now))
        return not all(_equal(before.get(name, _MISSING), now.get(name, _MISSING)) for name in names)


def _copied(x: Any) -> Any:
    """A copy of plain containers."""
    if type(x) is dict:
        return {key: _copied(value) for key, value in x.items()}
    return type(x)(map(_copied, x)) if type(x) in (list, tuple, set) else x


def _equal(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and not isinstance(a, Tensor) and bool(a == b))
