"""What attention over a cut sequence moves: read off a node by running its algorithm on tensors without data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from autopar.attention import ALGORITHMS, Problem
from autopar.attention_trace import Collective, Exchange, Trace, trace
from autopar.graph import arguments, is_call
from autopar.ops.attention import Facts
from autopar.ops.context import FACT_NAMES, attention_of_piece, problem_of

BACKWARD = {
    torch.ops.autopar.context_attention.default: False,
    torch.ops.autopar.context_attention_backward.default: True,
    attention_of_piece: False,
}
MOST = 16  # ranks of which all are looked at; of more, some


def is_context_attention(node: Node) -> bool:
    """Whether a node is attention over a cut sequence, at any level."""
    return is_call(node, *BACKWARD)


def problem_of_node(node: Node) -> Problem:
    """What the node's algorithm is given."""
    args: dict[str, Any] = torch.fx.node.map_arg(arguments(node), lambda n: n.meta["val"])
    q, k, v = _tensors(args, "q", "k", "v")
    facts = Facts(*(args[name] for name in FACT_NAMES))
    how = args["query_blocks"], args["key_blocks"], args["size"]
    return problem_of(q, k, v, facts, *how, bool(args.get("bias_needs_grad", False)))


def _tensors(args: dict[str, Any], *names: str) -> list[Tensor]:
    return [args[name] for name in names]


def traces_of(node: Node) -> list[Trace]:
    """What the ranks of the node's axis do: all of them, or the first, middle and last of many."""
    args, problem = arguments(node), problem_of_node(node)
    backward = BACKWARD[node.target]
    algorithm = ALGORITHMS[args["backward" if backward else "forward"]]
    ranks: Sequence[int] = range(problem.size) if problem.size <= MOST else (0, problem.size // 2, problem.size - 1)
    # heads are exchanged around the operators of step graphs, and inside of what stands in local graphs
    return [trace(algorithm, problem, backward, rank, args.get("head_ranks", 1)) for rank in ranks]


def sent_by(node: Node) -> dict[str, tuple[int, int]]:
    """(exchanges, bytes) of the rank that sends most so, by "send up", "send home", "all_gather", ..."""
    most: dict[str, tuple[int, int]] = {}
    for found in traces_of(node):
        calls: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        for event in found.events:
            if isinstance(event, Exchange) and event.sent:
                calls[f"send {event.way}"] += 1
                sizes[f"send {event.way}"] += event.sent
            elif isinstance(event, Collective):
                calls[event.kind] += 1
                sizes[event.kind] += event.block * (len(event.ranks) - 1)
        for kind, size in sizes.items():
            most[kind] = max(most.get(kind, (0, 0)), (calls[kind], size), key=lambda entry: entry[1])
    return most
