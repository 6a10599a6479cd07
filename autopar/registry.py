"""Name -> object. An unknown name is an error that lists the known ones."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """Objects of one kind by name, in the order in which they were added.

    SCHEDULES: Registry[Schedule] = Registry("schedule")
    SCHEDULES.add("gpipe", GPipe())        # or @SCHEDULES.register("gpipe")
    SCHEDULES["gpipe"]
    """

    def __init__(self, kind: str) -> None:
        """``kind`` is the word for one entry in messages, such as "schedule"."""
        self.kind = kind
        self._entries: dict[str, T] = {}
        self._modules: dict[str, str] = {}  # name -> the module that adds it; in order

    def add(self, name: str, entry: T) -> T:
        """Make ``entry`` known as ``name``, and return it. A name has one owner."""
        assert name not in self._entries, f"{self.kind} {name!r} is registered twice"
        self._entries[name] = entry
        self._modules.setdefault(name, "")
        return entry

    def add_later(self, name: str, module: str) -> None:
        """Make a name known whose entry a module adds when it is imported, which is when somebody asks for it."""
        assert name not in self._modules, f"{self.kind} {name!r} is registered twice"
        self._modules[name] = module

    def remove(self, name: str) -> None:
        """Forget a name."""
        self._entries.pop(name, None)
        del self._modules[name]

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator form of `add`."""
        return lambda entry: self.add(name, entry)

    def __getitem__(self, name: str) -> T:
        """The entry of a name. Raises ValueError with the known names, and the closest one first."""
        if name not in self._entries and name in self._modules:
            importlib.import_module(self._modules[name])
        if name in self._entries:
            return self._entries[name]
        close = difflib.get_close_matches(str(name), self._modules, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        known = ", ".join(self._modules) or "none"
        raise ValueError(f"{self.kind}: unknown name {name!r}; known are {known}{hint}")

    def __contains__(self, name: object) -> bool:
        return name in self._modules

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    def items(self) -> list[tuple[str, T]]:
        """(name, entry) pairs in order."""
        return [(name, self[name]) for name in self._modules]
