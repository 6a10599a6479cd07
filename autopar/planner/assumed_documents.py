"""Documents of packed rows that estimates assume (`Options.documents`): an argument of attention with segments.

    documents=3           -->  [5, 5, 6] in a row of 16 tokens
    documents=(9, 2)      -->  [9, 2, 5]: repeated until the row is full, the last one cut

Estimates of time, of bytes over cp and the choice of algorithms then count pairs within documents. What runs reads the
documents of each batch.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from autopar.cost.flops import pairs
from autopar.ir.graph import arguments, calls_of, global_shape, set_argument
from autopar.options import Options

ATTENTION = torch.ops.autopar.attention.default


def lengths_in_row(documents: int | tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """Lengths of the documents of a row, which add up to its tokens; () if they are unknown."""
    if not documents or not tokens:
        return ()
    if isinstance(documents, int):
        count = min(documents, tokens)
        ends = [tokens * i // count for i in range(count + 1)]
    else:
        ends = [
            *itertools.takewhile(tokens.__gt__, itertools.accumulate(itertools.cycle(documents), initial=0)),
            tokens,
        ]
    return tuple(b - a for a, b in itertools.pairwise(ends))


def assume_documents(gm: GraphModule, options: Options) -> None:
    """Set the documents of each attention of a normalised global graph."""
    for node in _over_documents(gm) if options.documents else ():
        set_argument(node, "documents", list(lengths_in_row(options.documents, global_shape(arguments(node)["k"])[2])))


def document_notes(gm: GraphModule, options: Options) -> list[tuple[str, str]]:
    """("attention", documents and the pairs that are counted), one for each kind of attention."""
    if not options.documents:
        return []
    counts = Counter(map(_counted, _over_documents(gm)))
    if not counts:
        return [
            ("attention", f"documents={options.documents}: no attention is over packed documents; pass position_ids")
        ]
    return [("attention", text if n == 1 else f"{text}, {n} times") for text, n in counts.items()]


def _over_documents(gm: GraphModule) -> Iterator[Node]:
    return (n for n in calls_of(gm.graph, ATTENTION) if arguments(n)["segments"] is not None)


def _counted(node: Node) -> str:
    """'8 documents in rows of 32,768 tokens: 33,599,488 pairs are counted, 6.26 % of those of one document'"""
    args = arguments(node)
    queries, keys = (global_shape(args[name])[2] for name in ("q", "k"))
    counted, whole = (
        pairs(queries, keys, args["causal"], args["window"], args["chunk"], documents=documents)
        for documents in (args["documents"], ())
    )
    return (
        f"{len(args['documents'])} documents in rows of {keys:,} tokens: {counted:,} pairs are counted, "
        f"{counted / whole:.3g} of those of one document"
    )
