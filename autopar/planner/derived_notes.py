"""Rules that were derived, as notes of a plan.

note rules: aten.grid_sampler_2d.default 3 times: derived: [(a b . .), (a c d .)] -> (a b c d)
"""

from __future__ import annotations

from collections import Counter

from torch.fx import GraphModule

from autopar.rules.derived import MADE_OF_PARAMETERS, DerivedRule
from autopar.rules.derived_calls import text_of


def derived_notes(gm: GraphModule) -> list[tuple[str, str]]:
    """("rules", operator and what was found) of a normalised global graph, each once."""
    found: Counter[str] = Counter()
    for node in gm.graph.nodes:
        derived = node.meta.get("derived")
        if derived == MADE_OF_PARAMETERS:
            found[f"{node.target}: made of parameters alone, computed whole"] += 1
        elif isinstance(derived, DerivedRule):
            found[f"{node.target}: derived: {text_of(node)}"] += 1
    return [("rules", text if count == 1 else f"{text}, {count} times") for text, count in found.items()]
