"""Context parallelism in the plan: which sequences are sharded on cp, how they are dealt, and which algorithm each
attention runs.

A *stream* is a sequence of tokens that the graph carries along: all values that are connected to the queries (or keys)
of an attention along its sequence dim. A stream has one layout for all its attentions. An encoder and a decoder are
two streams; cross-attention reads both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from autopar.attention.algorithm_table import ALGORITHMS
from autopar.attention.layouts import LAYOUTS
from autopar.attention.problem import Mask, Problem
from autopar.cost.hardware import Links, device_of
from autopar.cost.topology import Topology
from autopar.ir.graph import arguments, calls_of, describe, global_shape, has_gradient, reach
from autopar.ir.mesh import Mesh
from autopar.ir.meta import names_of_parameters, signature_of
from autopar.ir.placement import Shard
from autopar.ops.traits import PRODUCTS
from autopar.options import Options
from autopar.plan import AttentionPlan, Stream
from autopar.planner.attention_choice import choose_algorithms, choose_layout
from autopar.planner.batch_dims import decide_batch_dims
from autopar.rules.sequence_parallel import spread_label, stream_labels

AXIS = "cp"
ATTENTION = torch.ops.autopar.attention.default


@dataclass
class ContextPlan:
    """Streams of the axis cp, the algorithms of each attention, and notes."""

    streams: list[Stream] = field(default_factory=list)
    attention: dict[str, AttentionPlan] = field(default_factory=dict)
    notes: list[tuple[str, str]] = field(default_factory=list)
    labels: dict[Node, int] = field(default_factory=dict)  # value -> number of its stream

    def chunks(self, ranks: int) -> dict[Node, int]:
        """Value -> the number of chunks into which its sequence is dealt."""
        return {node: ranks * max(1, len(self.streams[i].blocks)) for node, i in self.labels.items()}


def plan_context(gm: GraphModule, mesh: Mesh, options: Options) -> ContextPlan:
    """Decide for a normalised global graph. Raises ValueError for sequences that do not divide, for a graph without
    attention, and for a requested algorithm that cannot run one of the attentions."""
    plan = ContextPlan()
    ranks = mesh.size(AXIS)
    attentions = calls_of(gm.graph, ATTENTION)
    if not attentions:
        stream = _stream_of_input(gm, ranks, options)
        return ContextPlan([stream], labels=dict.fromkeys(stream_labels(gm, (stream,), mesh, AXIS), 0))
    longest = max((_tokens(n)[0] for n in attentions if not any(s % ranks for s in _tokens(n))), default=0)
    inputs = {s.node for s in signature_of(gm).inputs if s.kind == "input"}
    chosen = [n for n in attentions if _can_be_cut(n, ranks, plan, longest, inputs)]
    if not chosen:
        raise ValueError(
            f'context_parallel: axis "{AXIS}" shards the sequence of attention, found {describe(attentions[0])}, whose '
            f"tokens do not divide over {ranks} ranks; pad them"
        )
    for node in chosen:
        for name in ("q", "k"):
            _follow(node, name, mesh, plan)
    problems = {n: problem_of_call(n, mesh, options) for n in chosen}
    for i, stream in enumerate(plan.streams):
        own = [problems[n] for n in chosen if _streams_of(n, plan) == (i, i) and problems[n].mask.causal]
        layout, why = _layout(own, mesh, options) if own else ("contiguous", "no query waits for earlier tokens")
        reason = f"{stream.reason}; {layout}: {why}"
        plan.streams[i] = dataclasses.replace(stream, blocks=LAYOUTS[layout], reason=reason)
    for node in chosen:
        rows, columns = (plan.streams[i].blocks for i in _streams_of(node, plan))
        problem = dataclasses.replace(problems[node], query_blocks=rows, key_blocks=columns)
        plan.attention[node.name] = _chosen(problem, mesh, options, describe(node))
    return plan


def _tokens(node: Node) -> tuple[int, int]:
    """(queries, keys): the lengths of both sequences."""
    queries, keys = (global_shape(arguments(node)[name])[2] for name in ("q", "k"))
    return queries, keys


def _can_be_cut(node: Node, ranks: int, plan: ContextPlan, longest: int, inputs: Collection[str]) -> bool:
    """Whether both sequences of an attention divide. Self-attention must, unless beside the ``longest`` one that is
    sharded its sequence is shorter, or one that nobody can pad (patches of an image beside a text). Others that do not
    divide are replicated."""
    queries, keys = _tokens(node)
    bad = [n for n in (queries, keys) if n % ranks]
    if not bad:
        return True
    if queries == keys and queries > max(1, longest) and (not longest or _is_of_input(node, inputs)):
        raise ValueError(
            f'context_parallel: sequence length {queries} of {describe(node)} does not divide over axis "{AXIS}" of '
            f'size {ranks}; pad to {-(-queries // ranks) * ranks}, as parallelize(padding="bucket") does'
        )
    plan.notes.append((node.name, f"replicated on {AXIS}: {bad[0]} tokens do not divide over {ranks} ranks"))
    return False


def _is_of_input(node: Node, inputs: Collection[str]) -> bool:
    """Whether the queries are a dim of one of the ``inputs``, which can be padded."""
    queries = arguments(node)["q"]
    labels = spread_label(queries, Shard(2), Mesh.of(cp=global_shape(queries)[2]), AXIS, inputs=True)
    return any(x.name in inputs for x in labels)


def _stream_of_input(gm: GraphModule, ranks: int, options: Options) -> Stream:
    """The tokens of a model without attention: the dim of an input that most of what parameters make has, no batch, and
    no width of a weight. Raises ValueError if there is none, or if it does not divide."""
    batch, names = decide_batch_dims(gm, options, None), names_of_parameters(gm)
    made = set(reach((n for n in gm.graph.nodes if n.name in names), lambda n: n.users))
    inputs = {s.name: s.node for s in signature_of(gm).inputs if s.kind == "input"}
    nodes = {n.name: n for n in gm.graph.nodes if n.op == "placeholder"}
    best, covered, size = None, 0, 0
    for name, node in inputs.items():
        for dim, length in enumerate(global_shape(nodes[node])):
            if dim != batch.get(name) and length > 1:
                labels = spread_label(nodes[node], Shard(dim), Mesh.of(cp=length), AXIS, inputs=True)
                of_weights = any(n in labels for n in nodes.values() if any(u.target in PRODUCTS for u in n.users))
                if (count := len(made.intersection(labels))) > covered and not of_weights:
                    best, covered, size = Stream(node, dim, f"{length} tokens", AXIS), count, length
    if best is None:
        raise ValueError(
            f'context_parallel: axis "{AXIS}" shards a sequence, found none: no scaled_dot_product_attention, no '
            "softmax between two products that autopar recognises (docs/context_parallel.md), no input with a dim "
            f'beside its batch along which the model computes entries one by one; use no axis "{AXIS}"'
        )
    if size % ranks:
        raise ValueError(
            f'context_parallel: sequence length {size} of input {best.node} does not divide over axis "{AXIS}" of size '
            f'{ranks}; pad to {-(-size // ranks) * ranks}, as parallelize(padding="bucket") does'
        )
    return best


def _follow(node: Node, name: str, mesh: Mesh, plan: ContextPlan) -> None:
    """Start a stream at an operand that no earlier stream reaches."""
    start = arguments(node)[name]
    if start not in plan.labels:
        for value in spread_label(start, Shard(2), mesh, AXIS, inputs=True):
            plan.labels.setdefault(value, len(plan.streams))
        plan.streams.append(Stream(f"{node.name}.{name}", 2, f"{global_shape(start)[2]} tokens", AXIS))


def _streams_of(node: Node, plan: ContextPlan) -> tuple[int, int]:
    """Numbers of the streams of an attention's queries and keys."""
    args = arguments(node)
    return plan.labels[args["q"]], plan.labels[args["k"]]


def problem_of_call(node: Node, mesh: Mesh, options: Options) -> Problem:
    """The attention of a global graph as a rank of cp sees it: with its shard of the batch and of the heads."""
    args = arguments(node)
    batch, heads, queries, width = global_shape(args["q"])
    _, kv_heads, keys, value_width = global_shape(args["v"])
    tp, parts = mesh.size("tp"), mesh.data_size * options.all_microbatches
    group, tp = heads // kv_heads, tp if kv_heads > 1 else 1
    kv_heads = -(-kv_heads // tp)  # with padding where they do not divide
    bias = args["bias"]
    rows = bias is not None and len(global_shape(bias)) > 1 and global_shape(bias)[-2] > 1
    return Problem(
        batch=batch // parts if batch % parts == 0 else batch, heads=kv_heads * group, kv_heads=kv_heads,
        queries=queries, keys=keys, width=width, value_width=value_width, dtype=args["q"].meta["val"].dtype,
        size=mesh.size(AXIS), mask=Mask(bool(args["causal"]), int(args["window"]), int(args["chunk"])),
        bias="" if bias is None else "rows" if rows else "columns",
        bias_gradient=bias is not None and has_gradient(bias),
        segments=args["segments"] is not None, key_mask=args["key_mask"] is not None, sinks=args["sinks"] is not None,
        softcap=float(args["softcap"]), dropout=float(args["dropout"]), documents=tuple(args["documents"]),
    )  # fmt: skip


# --- layouts and algorithms --------------------------------------------------------------------------------------


def _layout(problems: list[Problem], mesh: Mesh, options: Options) -> tuple[str, str]:
    """(layout of a stream for its causal attentions, why). A named algorithm may support only some layouts."""
    layout = options.cp_load_balance
    if layout == "auto" and options.attention != "auto":
        own = ALGORITHMS[options.attention.partition("+")[0]].layouts
        layout = own[0] if len(own) == 1 else layout
    return choose_layout(problems, options.attention, layout, _topology(mesh, options), device_of(options))


def _chosen(problem: Problem, mesh: Mesh, options: Options, what: str) -> AttentionPlan:
    """The algorithms of one attention. Raises ValueError, naming it, where none can run."""
    try:
        found = choose_algorithms(problem, options.attention, _topology(mesh, options), device_of(options))
    except ValueError as error:
        raise ValueError(f"{error} (at {what})") from None
    blocks = problem.query_blocks, problem.key_blocks
    return AttentionPlan(found.forward, found.backward, *blocks, found.reason, found.candidates)


def _topology(mesh: Mesh, options: Options) -> Topology:
    return Links.of(options, mesh).axis(AXIS).topology
