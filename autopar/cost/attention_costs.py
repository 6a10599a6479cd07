"""The cost of each algorithm for one attention over ranks: seconds, bytes, steps, or why it cannot run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.fx import Node

from autopar.attention.algorithm import AttentionAlgorithm
from autopar.attention.algorithm_table import ALGORITHMS
from autopar.attention.exchanges import WAYS
from autopar.attention.layouts import LAYOUTS
from autopar.attention.operator import FACT_NAMES, attention_of_piece, problem_of_pieces
from autopar.attention.problem import Problem
from autopar.attention.program import ComputeEvent, Trace, kernel_flops, most_moved, sampled, trace
from autopar.cost.attention_timeline import AttentionTimeline, play
from autopar.cost.hardware import DEFAULT, Device
from autopar.cost.topology import Topology
from autopar.ir.graph import arguments, has_gradient, is_call
from autopar.ops.mask_spec import MaskSpec

PASSES = ("forward", "backward")


@dataclass(frozen=True)
class AttentionCost:
    """One pass of an algorithm on a problem. seconds: of the slowest rank; exposed: of these, waiting for exchanges.
    sent: (way or kind of collective, bytes) of the rank that sends most. steps: exchanges that the rank waits for.
    refusal: why the algorithm cannot run the problem; then all else is zero."""

    algorithm: str
    direction: str
    seconds: float = 0.0
    exposed: float = 0.0
    sent: tuple[tuple[str, int], ...] = ()
    steps: int = 0
    refusal: str = ""

    @property
    def bytes(self) -> int:
        """Bytes sent over all ways."""
        return sum(size for _, size in self.sent)

    def __str__(self) -> str:
        return self.refusal or f"{_ms(self.seconds)}, of which {_ms(self.exposed)} exposed"


def candidates(problem: Problem, topology: Topology, device: Device = DEFAULT) -> list[AttentionCost]:
    """Costs of both passes of every algorithm worth considering, in the order of the table."""
    return [estimate(algorithm, problem, way, topology, device) for algorithm in worth(problem) for way in PASSES]


def worth(problem: Problem) -> list[AttentionAlgorithm]:
    """The algorithms that support the problem's layout, whether they refuse it for other reasons or not. All of them,
    if the problem is not causal self-attention."""
    known = [algorithm for _, algorithm in ALGORITHMS.items()]
    if not problem.mask.causal or problem.query_blocks != problem.key_blocks:
        return known
    return [a for a in known if any(LAYOUTS[name] == problem.query_blocks for name in a.layouts)]


@lru_cache(maxsize=4096)
def estimate(
    algorithm: AttentionAlgorithm, problem: Problem, direction: str, topology: Topology, device: Device = DEFAULT
) -> AttentionCost:
    """The cost of one pass of an algorithm."""
    if refusal := algorithm.refusal(problem):
        return AttentionCost(algorithm.name, direction, refusal=refusal)
    backward = direction == "backward"
    programs = [trace(algorithm, problem, backward, rank) for rank in sampled(problem)]
    timeline = play(problem, backward, programs, topology, device)
    sent = tuple((way, size) for way, (_, size) in most_moved(programs).items())
    steps = max(program.steps for program in programs)
    return AttentionCost(algorithm.name, direction, timeline.seconds, timeline.exposed, sent, steps)


def pass_timeline(
    algorithm: AttentionAlgorithm, problem: Problem, direction: str, topology: Topology, device: Device = DEFAULT
) -> AttentionTimeline:
    """One pass on all ranks, for pictures. Raises ValueError if the algorithm refuses the problem."""
    check_together((algorithm,), problem)
    backward = direction == "backward"
    programs = [trace(algorithm, problem, backward, rank) for rank in range(problem.size)]
    return play(problem, backward, programs, topology, device)


def check_together(named: Sequence[AttentionAlgorithm], problem: Problem) -> None:
    """Raises ValueError if algorithms that the user named cannot run the problem, or cannot be combined."""
    for algorithm in named:
        if refusal := algorithm.refusal(problem):
            raise ValueError(refusal)
    for algorithm in named:
        if algorithm.head_ranks(problem) > 1 and len(set(named)) > 1:
            raise ValueError(
                f"attention: {algorithm.name} exchanges heads for sequence and keeps them so for the backward, found "
                f"{'+'.join(a.name for a in named)}; use {algorithm.name} for both passes"
            )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


# --- attention over ranks as a node of a graph ---------------------------------------------------------

BACKWARD = {
    torch.ops.autopar.context_attention.default: False,
    torch.ops.autopar.context_attention_backward.default: True,
    attention_of_piece: False,
}


def is_context_attention(node: Node) -> bool:
    """Whether a node is attention over a sharded sequence, at any level."""
    return is_call(node, *BACKWARD)


def problem_of_node(node: Node) -> Problem:
    """The problem that the node's algorithm runs."""
    args: dict[str, Any] = torch.fx.node.map_arg(arguments(node), lambda n: n.meta["val"])
    facts = MaskSpec(*(args[name] for name in FACT_NAMES))
    bias = arguments(node)["bias"]
    differentiated = args.get("bias_needs_grad", bias is not None and has_gradient(bias))
    dealt = args["query_blocks"], args["key_blocks"]
    return problem_of_pieces(args["q"], args["k"], args["v"], facts, *dealt, args["size"], bool(differentiated))


def busiest_share(node: Node) -> float:
    """FLOPs of the rank that computes most, as a multiple of the mean: documents and layouts decide it."""
    problem = problem_of_node(node)
    most = max(sum(e.flops for e in one.events if isinstance(e, ComputeEvent)) for one in _traces(node))
    mean = kernel_flops(problem, problem.pairs, BACKWARD[node.target]) * problem.batch * problem.heads / problem.size
    return max(1.0, most / mean) if mean else 1.0


def sent_by(node: Node) -> dict[str, tuple[int, int]]:
    """Kind ("send up", "send home", "all_gather", ...) -> (exchanges, bytes) of the rank that sends most that way."""
    return {f"send {kind}" if kind in WAYS else kind: moved for kind, moved in most_moved(_traces(node)).items()}


def _traces(node: Node) -> list[Trace]:
    """What the ranks that represent all do."""
    args, problem, backward = arguments(node), problem_of_node(node), BACKWARD[node.target]
    algorithm = ALGORITHMS[args["backward" if backward else "forward"]]
    # step graphs exchange heads around the operator, local graphs inside the node
    heads = args.get("head_ranks", 1)
    return [trace(algorithm, problem, backward, rank, heads) for rank in sampled(problem)]
