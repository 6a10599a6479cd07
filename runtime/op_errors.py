"""An operator that fails in a step, such as a lookup of a token that is not there: said with the model's own line."""

from __future__ import annotations

import traceback

from torch.fx import Graph

from autopar.adapters.export import line_of


def explained(error: BaseException, graph: Graph) -> ValueError | None:
    """The error of an operator in the generated code of ``graph``, in words; None for what was raised elsewhere."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    told = type(error).__module__ != "builtins"  # a collective that failed, or memory that is out: it has its own words
    if told or not frame.filename.startswith("<eval_with_key>"):
        return None
    name = (frame.line or "").partition(" ")[0].rstrip(";")
    node = next((n for n in graph.nodes if n.name == name), None)
    place = line_of(node) if node is not None else frame.line
    reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")
    return ValueError(f"step: {place}: {reason}; give this call inputs that it takes")
