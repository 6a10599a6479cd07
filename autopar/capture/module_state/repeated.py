"""Detects forwards that compute with Python state of an earlier forward, which a capture of one forward cannot show.

    y = h if self.last is None else h + self.last
    self.last = h.detach()                            the next forward would take the other branch
    self.count += 1; y = h * self.count               each forward would compute something else

A forward that changes Python state is run three times on fake tensors: the second run must not use tensors that the
first computed from inputs or parameters, and the third must make the same calls as the second. Buffers are allowed:
compiled steps carry their state.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.adapters.copying.fake_deepcopy import walk_attributes
from autopar.capture.module_state.leftovers import OF_SIZES
from autopar.capture.side_effects.other_clocks import OTHER_TIMES, Endless, other_clocks


def found_again(replica: nn.Module, arguments: Mapping[str, Any], mode: FakeTensorMode, clocks: bool) -> str | None:
    """The state of an earlier forward that a structure copy computes with: the path of a tensor, or "" for numbers.
    None if there is none, or if the forward does not run on fake tensors. The copy is not usable afterwards.
    ``clocks``: the forward may read a clock, so run it at other times, too."""
    watch = _Watch(replica)
    try:
        with mode, watch:
            replica(**watch.fresh(arguments))
            watch.first_is_over()
            replica(**watch.fresh(arguments))
            second, watch.calls = watch.calls, []
            if watch.read is None:
                replica(**watch.fresh(arguments))
    except Exception:  # fake tensors have no values to read
        return None
    if watch.read is not None:
        return watch.read
    same = second == watch.calls
    for later, answer in OTHER_TIMES if clocks and same else ():
        watch.calls = []
        try:
            with mode, watch, other_clocks(replica, later, answer):
                replica(**watch.fresh(arguments))
        except Endless:
            continue
        except Exception:  # it did not raise before
            same = False
        same = same and second == watch.calls
    return None if same else ""


class _Watch(TorchFunctionMode):
    """Records torch functions. read: the path of a tensor of the first forward that a later one used. calls: (function,
    arguments that are not tensors)."""

    def __init__(self, replica: nn.Module) -> None:
        super().__init__()
        self.read: str | None = None
        self.calls: list[Any] = []
        self._replica = replica
        self._varying: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._made: list[weakref.ref[Tensor]] = []
        self._kept: dict[int, str] = {}
        self._registered = {id(x) for x in (*replica.parameters(), *replica.buffers())}
        for parameter in replica.parameters():
            self._varying[parameter] = True

    def fresh(self, arguments: Mapping[str, Any]) -> Any:
        """New tensors for the arguments of a forward."""
        found = pytree.tree_map_only(Tensor, lambda x: x.detach(), dict(arguments))
        self._note([x for x in pytree.tree_leaves(found) if isinstance(x, Tensor)], True)
        return found

    def first_is_over(self) -> None:
        """Find the tensors that the first forward has kept and that depend on inputs or parameters."""
        alive = [x for ref in self._made if (x := ref()) is not None]
        kept = {id(x): "a container outside of its modules" for x in alive if x in self._varying}
        paths = {id(x): path.lstrip(".") for path, x in walk_attributes(self._replica) if id(x) in kept}
        self._kept = {i: path for i, path in (kept | paths).items() if i not in self._registered}
        self._alive, self.calls = alive, []  # keep them alive, so that ids are not reused

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = func(*args, **(kwargs or {}))
        found = [x for x in pytree.tree_leaves(made) if isinstance(x, FakeTensor)]
        takes_values = not any(part in getattr(func, "__name__", "") for part in OF_SIZES)
        self.calls.append((func, repr(pytree.tree_map_only(Tensor, lambda _: None, (args, kwargs)))))
        if found and takes_values:
            read = next((path for x in given if (path := self._kept.get(id(x))) is not None), None)
            self.read = read if self.read is None else self.read
            self._note(found, any(x in self._varying for x in given))
        return made

    def _note(self, tensors: Sequence[Tensor], varying: bool) -> None:
        for x in tensors:
            self._made.append(weakref.ref(x))
            if varying:
                self._varying[x] = True
