"""What was found so far, counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tests.module_fuzz.check import FAILURES, INVALID, REFUSED, Result, summary
from tests.module_fuzz.program import Program


@dataclass
class Tally:
    """``kinds`` of results; of failures the pieces that were left, by names and by letter; messages of the others."""

    kinds: Counter[str] = field(default_factory=Counter)
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    letters: Counter[tuple[str, str]] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    invalid: Counter[str] = field(default_factory=Counter)

    def add(self, program: Program, result: Result) -> bool:
        """Whether it is a failure of pieces that no other failed with."""
        self.kinds[result.kind] += 1
        if result.kind == REFUSED:
            self.refusals[summary(result.text)] += 1
        if result.kind == INVALID:
            self.invalid[summary(result.text)] += 1
        if not result.failed:
            return False
        self.letters[result.kind, program.kinds() or "-"] += 1
        cause = result.kind, " + ".join(program.names()) or "; ".join(program.statements())
        self.failures[cause] += 1
        return self.failures[cause] == 1

    def __str__(self) -> str:
        count, kinds = sum(self.kinds.values()), ", ".join(f"{n} {kind}" for kind, n in self.kinds.most_common())
        parts = [f"{count} programs: {kinds}"]
        for kind in FAILURES:
            of = ", ".join(f"{letters} {n}" for (k, letters), n in sorted(self.letters.items()) if k == kind)
            parts.append(f"{kind}, by the kinds of pieces that are left: {of or 'none'}")
        for title, found in (("refused", self.refusals), ("invalid in torch", self.invalid)):
            parts += [f"{title}:", *(f"  {n:5} {text}" for text, n in found.most_common())]
        return "\n".join(
            [*parts, "failures:", *(f"  {n:5} {k}: {what}" for (k, what), n in self.failures.most_common())]
        )
