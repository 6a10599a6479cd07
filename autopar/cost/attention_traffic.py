"""What attention over a cut sequence moves: read off a node by running its algorithm on tensors without data."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from autopar.attention.algorithm_table import ALGORITHMS
from autopar.attention.exchanges import WAYS
from autopar.attention.operator import FACT_NAMES, attention_of_piece, problem_of_pieces
from autopar.attention.problem import Problem
from autopar.attention.program import most_moved, sampled, trace
from autopar.ir.graph import arguments, has_gradient, is_call
from autopar.ops.mask_spec import MaskSpec

BACKWARD = {
    torch.ops.autopar.context_attention.default: False,
    torch.ops.autopar.context_attention_backward.default: True,
    attention_of_piece: False,
}


def is_context_attention(node: Node) -> bool:
    """Whether a node is attention over a cut sequence, at any level."""
    return is_call(node, *BACKWARD)


def problem_of_node(node: Node) -> Problem:
    """What the node's algorithm is given."""
    args: dict[str, Any] = torch.fx.node.map_arg(arguments(node), lambda n: n.meta["val"])
    facts = MaskSpec(*(args[name] for name in FACT_NAMES))
    bias = arguments(node)["bias"]
    differentiated = args.get("bias_needs_grad", bias is not None and has_gradient(bias))
    dealt = args["query_blocks"], args["key_blocks"]
    return problem_of_pieces(args["q"], args["k"], args["v"], facts, *dealt, args["size"], bool(differentiated))


def sent_by(node: Node) -> dict[str, tuple[int, int]]:
    """(exchanges, bytes) of the rank that sends most so, by "send up", "send home", "all_gather", ..."""
    args, problem, backward = arguments(node), problem_of_node(node), BACKWARD[node.target]
    algorithm = ALGORITHMS[args["backward" if backward else "forward"]]
    # heads are exchanged around the operators of step graphs, and inside of what stands in local graphs
    heads = args.get("head_ranks", 1)
    found = most_moved([trace(algorithm, problem, backward, rank, heads) for rank in sampled(problem.size)])
    return {f"send {kind}" if kind in WAYS else kind: moved for kind, moved in found.items()}
