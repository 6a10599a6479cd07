"""What operators and their derivatives are made of is found out once in a run of the tests, for all workers and ranks.

`autopar.passes.derivatives` remembers it for its process, by all that an operator can see; here misses look into the
folder of the run. Who has forgotten (`derivatives.forget`: an operator is no longer what it was) shares no more.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from autopar.adapters.operators import OpOverload
from autopar.passes import derivatives


class DerivedOnce(dict[Any, Any]):
    """Keys and values of `derivatives`; ``variable``: of the environment, with the folder."""

    def __init__(self, variable: str) -> None:
        super().__init__()
        self._variable, self.read = variable, 0

    def get(self, key: Any, default: Any = None) -> Any:
        if key not in self and (path := self._path(key)) is not None:
            with suppress(OSError, EOFError, pickle.UnpicklingError):
                super().__setitem__(key, pickle.loads(path.read_bytes()))
                self.read += 1
        return super().get(key, default)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        if (path := self._path(key)) is None:
            return
        text = io.BytesIO()
        with suppress(OSError, pickle.PicklingError, TypeError, AttributeError):
            _Pickler(text).dump(value)
            path.parent.mkdir(exist_ok=True)
            own = path.with_suffix(f".{os.getpid()}")
            own.write_bytes(text.getvalue())
            os.replace(own, path)

    def clear(self) -> None:
        super().clear()
        self._variable = ""

    def _path(self, key: Any) -> Path | None:
        folder = os.environ.get(self._variable)
        if not folder:
            return None
        target, *rest = key
        name = str(target) if isinstance(target, OpOverload) else f"{target.__module__}.{target.__qualname__}"
        return Path(folder, "derived", hashlib.blake2b(f"{name} {rest}".encode(), digest_size=20).hexdigest())


def share_derivatives(variable: str) -> None:
    """From now on, in this process and those that it forks."""
    derivatives._KNOWN = DerivedOnce(variable)


class _Pickler(pickle.Pickler):
    def reducer_override(self, x: Any) -> tuple[Callable[..., Any], tuple[str, ...]] | Any:
        return (_operator, (*str(x).split("."),)) if isinstance(x, OpOverload) else NotImplemented


def _operator(space: str, name: str, overload: str) -> OpOverload:
    found: OpOverload = getattr(getattr(getattr(torch.ops, space), name), overload)
    return found
