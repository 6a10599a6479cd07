"""Registries: name -> object, with an error that lists the known names."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from autopar.spelling import did_you_mean

T = TypeVar("T")


@dataclass(frozen=True)
class _Later:
    """Placeholder of an entry that is not imported yet: the module that registers it."""

    module: str


class Registry(Generic[T]):
    """Objects of one kind by name, in the order in which they were added.

    SCHEDULES: Registry[Schedule] = Registry("schedule")
    SCHEDULES.add("gpipe", GPipe())        # or @SCHEDULES.register("gpipe")
    SCHEDULES["gpipe"]
    """

    def __init__(self, kind: str) -> None:
        """``kind`` names one entry in error messages, such as "schedule"."""
        self.kind = kind
        self._entries: dict[str, T | _Later] = {}

    def add(self, name: str, entry: T) -> T:
        """Register ``entry`` as ``name`` and return it. A name is registered once."""
        assert isinstance(self._entries.get(name, _Later("")), _Later), f"{self.kind} {name!r} is registered twice"
        self._entries[name] = entry
        return entry

    def add_later(self, name: str, module: str) -> None:
        """Register a name whose entry is added by importing ``module``, at the first lookup."""
        assert name not in self._entries, f"{self.kind} {name!r} is registered twice"
        self._entries[name] = _Later(module)

    def remove(self, name: str) -> None:
        """Remove an entry."""
        del self._entries[name]

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator form of `add`."""
        return lambda entry: self.add(name, entry)

    def __getitem__(self, name: str) -> T:
        """The entry of a name. Raises ValueError with the known names and the closest one."""
        if name in self._entries:
            entry = self._entries[name]
            if isinstance(entry, _Later):
                importlib.import_module(entry.module)
                entry = self._entries[name]
                assert not isinstance(entry, _Later), f"{self.kind} {name!r} is not added by its module"
            return entry
        known = ", ".join(self._entries) or "none"
        hint = did_you_mean(name, self._entries)
        raise ValueError(f"{self.kind}: unknown name {name!r}; known are {known}{hint}")

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def items(self) -> list[tuple[str, T]]:
        """(name, entry) pairs in order."""
        return [(name, self[name]) for name in self._entries]
