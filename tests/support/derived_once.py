"""What operators and their derivatives are made of is found out once in a run of the tests, for all workers and ranks.

`autopar.passes.autodiff.vjp` remembers it for its process, by all that an operator can see; here misses look into the
folder of the run. Who has forgotten (`derivatives.forget`: an operator is no longer what it was) shares no more.
"""

from __future__ import annotations

import copyreg
import functools
import hashlib
import io
import os
import pickle
from collections import ChainMap
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar

import torch

from autopar.adapters.operators import OpOverload
from autopar.passes.autodiff import vjp


class DerivedOnce(dict[Any, Any]):
    """Keys and values of `derivatives`; ``variable``: of the environment, with the folder."""

    def __init__(self, variable: str) -> None:
        super().__init__()
        self._variable, self.read = variable, 0

    def get(self, key: Any, default: Any = None) -> Any:
        if key not in self and (path := self._path(key)) is not None:
            with suppress(OSError, EOFError, pickle.UnpicklingError), open(path, "rb") as file:
                super().__setitem__(key, pickle.load(file))
                self.read += 1
        return super().get(key, default)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        if (path := self._path(key)) is None:
            return
        text = io.BytesIO()
        with suppress(OSError, pickle.PicklingError, TypeError, AttributeError):
            _Pickler(text).dump(value)
            with open(path, "xb", buffering=0) as file:  # who reads half of it finds nothing
                file.write(text.getvalue())

    def clear(self) -> None:
        super().clear()
        self._variable = ""

    def _path(self, key: Any) -> str | None:
        folder = os.environ.get(self._variable)
        if not folder:
            return None
        target, args, operands, needs, arriving, surroundings = key
        name = str(target) if isinstance(target, OpOverload) else f"{target.__module__}.{target.__qualname__}"
        facts = [x and (x.shape, x.stride, x.offset, x.dtype) for x in (*operands, *(arriving or ()))]
        text = f"{name} {args} {facts} {len(operands)} {needs} {arriving is None} {surroundings}"
        return f"{_made(folder)}/{hashlib.blake2b(text.encode(), digest_size=20).hexdigest()}"


@functools.cache
def _made(folder: str) -> str:
    """Of files of one kind, in the folder of the run."""
    path = os.path.join(folder, "derived")
    os.makedirs(path, exist_ok=True)
    return path


def share_derivatives(variable: str) -> None:
    """From now on, in this process and those that it forks."""
    vjp._KNOWN = DerivedOnce(variable)


def _reduced(x: OpOverload) -> tuple[Callable[..., Any], tuple[str, ...]]:
    return _operator, (*str(x).split("."),)


class _Pickler(pickle.Pickler):
    dispatch_table: ClassVar[Any] = ChainMap({OpOverload: _reduced}, copyreg.dispatch_table)  # type: ignore[arg-type]


def _operator(space: str, name: str, overload: str) -> OpOverload:
    found: OpOverload = getattr(getattr(getattr(torch.ops, space), name), overload)
    return found
