"""What was found so far, counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tests.module_fuzz.check import INVALID, REFUSED, Result, summary


@dataclass
class Tally:
    """Results by kind, and messages of those that are no failure."""

    kinds: Counter[str] = field(default_factory=Counter)
    told: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, result: Result) -> None:
        self.kinds[result.kind] += 1
        if result.kind in (REFUSED, INVALID):
            self.told[result.kind, summary(result.text)] += 1

    def __str__(self) -> str:
        counts = ", ".join(f"{n} {kind}" for kind, n in self.kinds.most_common())
        messages = [f"  {n:5} {kind}: {text}" for (kind, text), n in self.told.most_common()]
        return "\n".join([f"{sum(self.kinds.values())} programs: {counts}", *messages])
