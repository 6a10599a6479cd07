"""What attention and experts cost in the graphs that serve a model: `autopar.cost.roles`, from their nodes.

    rows, order, offsets = moe_dispatch(x, expert, E)    the calls from here
    hidden = grouped_mm(rows, w, offsets)
    out = moe_combine(hidden, order, weights)            to here are the experts' part, and what only they read

Everything else is attention's part: routers, shared experts, dense layers, embeddings and logits too, spread evenly
over the layers of experts. Routing is even.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from autopar.cost.flops import flops, memory_bytes
from autopar.cost.roles import ExpertLayers, RoleCost
from autopar.cost.serving_step import with_sizes
from autopar.cost.traffic import transfer
from autopar.ir.expert_layers import dispatches, part_of_experts
from autopar.ir.graph import arguments, calls_of, is_call, placeholders, shape
from autopar.ir.storages import bytes_of
from autopar.steps.packed import Packed

TOKENS = (512, 1024)  # of two steps, whose difference is what tokens cost
aten = torch.ops.aten
_BEFORE_SUMS = (  # index_select: rows of the last layer without logits are dropped
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten._to_copy.default, aten.add.Tensor,
    aten.index_select.default,
)  # fmt: skip
_COMBINE = torch.ops.autopar.moe_combine.default


def layers_of_graphs(graphs: Mapping[int, Packed], keys: int) -> ExpertLayers:
    """The layers of a served model. graphs: tp -> what the ranks of such a mesh run, in one pipeline stage. keys:
    tokens that a request has, the last of which it decodes. Raises ValueError as `check_experts` does."""
    parts = {tp: _PackedParts(packed, keys) for tp, packed in graphs.items()}
    first = next(iter(parts.values()))
    num_experts, top_k, row = first.sizes
    return ExpertLayers(
        first.layers, num_experts, top_k, row,
        {tp: found.attention() for tp, found in parts.items()},
        {tp: found.expert() for tp, found in parts.items()},
    )  # fmt: skip


def check_experts(packed: Packed) -> None:
    """Raises ValueError for a model without layers of experts, or with several kinds."""
    sizes = {_sizes(node) for stage in packed.stages for node in dispatches(stage.graph.graph)}
    if not any(experts > 1 for experts, _, _ in sizes):
        raise ValueError(
            "experts: needs a model with layers of several experts, found none; plan to serve it with `autopar plan "
            "--serve`"
        )
    if len(sizes) > 1:
        found = " and ".join(f"{experts} experts, {top} per token" for experts, top, _ in sorted(sizes))
        raise ValueError(
            f"experts: needs layers that are alike, found {found}; plan to serve it with `autopar plan --serve`"
        )


def _sizes(dispatch: Node) -> tuple[int, int, int]:
    """(experts, experts of a token, bytes of a token's row)."""
    args = arguments(dispatch)
    return (
        int(args["num_experts"]),
        shape(args["expert"])[1],
        shape(args["x"])[1] * args["x"].meta["val"].dtype.itemsize,
    )


def expert_part(gm: GraphModule, given: Collection[Node]) -> set[Node]:
    """The nodes of the experts' part. ``given``: the placeholders that are the same in all steps."""
    found = set[Node]()
    for combine in calls_of(gm.graph, _COMBINE):
        found |= part_of_experts(combine)
    fixed = set(given)
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.all_input_nodes and fixed.issuperset(node.all_input_nodes):
            fixed.add(node)
    for node in reversed(gm.graph.nodes):
        if node in fixed and node.users and found.issuperset(node.users):
            found.add(node)
    return found


def sums_of_experts(gm: GraphModule, is_sum: Callable[[Node], bool]) -> dict[Node, bool]:
    """The first sum behind each combine -> whether it sums results of attention, such as of shared experts, too."""
    found: dict[Node, bool] = {}
    for combine in calls_of(gm.graph, _COMBINE):
        node, alone = combine, True
        while len(node.users) == 1 and is_call(following := next(iter(node.users)), *_BEFORE_SUMS):
            node, alone = following, alone and not is_call(following, aten.add.Tensor)
        for following in filter(is_sum, node.users):
            found[following] = not alone
    return found


@dataclass(frozen=True)
class _Measured:
    """What nodes do for (fixed, per token): operations, bytes; and bytes that they send per token."""

    operations: tuple[float, float]
    bytes: tuple[float, float]
    sent: float


class _PackedParts:
    """The two parts of one graph."""

    def __init__(self, packed: Packed, keys: int) -> None:
        check_experts(packed)
        (stage,) = packed.stages
        mesh = packed.plan.mesh
        small, large = (with_sizes(packed, stage, tokens, tokens) for tokens in TOKENS)

        def sent(node: Node) -> int:
            found = transfer(node, mesh)
            return found.bytes if found else 0

        self.measured: dict[Node, _Measured] = {}
        for node, larger in zip(small.graph.nodes, large.graph.nodes, strict=True):
            counts = [
                (flops(x, requests), memory_bytes(x, requests), sent(x))
                for x, requests in ((x, [(1, keys)] * t) for x, t in zip((node, larger), TOKENS, strict=True))
            ]
            done, moved, out = (_affine(a, b) for a, b in zip(*counts, strict=True))
            self.measured[node] = _Measured(done, moved, out[1])
        names = {s.node for s in packed.signature.inputs if s.kind in ("parameter", "buffer", "constant")}
        names |= {name for name in (stage.tables.outputs if stage.tables is not None else ()) if name}
        named = zip(stage.graph.inputs, placeholders(small), strict=True)
        self.given = [node for name, node in named if name in names]
        self.part = expert_part(small, self.given)
        self.sums = sums_of_experts(small, lambda node: sent(node) > 0)
        self.layers = len(dispatches(small))
        self.sizes = _sizes(dispatches(small)[0])
        kept = [min(window or keys, keys) for window in packed.windows]
        self.cache = sum(kept[layer.kind] * layer.bytes_per_token for layer in packed.layers)

    def attention(self) -> RoleCost:
        nodes = [n for n in self.measured if n not in self.part and self.sums.get(n, True)]
        weights = bytes_of(n for n in self.given if n not in self.part and n.users)
        return self._role(nodes, weights, self.cache)

    def expert(self) -> RoleCost:
        """Of one expert. Its rows are summed over tp as wide as a token."""
        experts, top_k, _ = self.sizes
        weights = bytes_of(n for n in self.given if n in self.part) / experts
        return self._role([*self.part, *self.sums], weights, 0.0, experts, top_k)

    def _role(self, nodes: list[Node], weights: float, cache: float, experts: int = 1, top_k: int = 1) -> RoleCost:
        """With what is fixed shared by ``experts``, and what a token costs by its ``top_k``."""
        alike = Counter((self.measured[n].operations, self.measured[n].bytes) for n in nodes)
        alike = Counter({key: n for key, n in alike.items() if any(map(any, key))})

        def shared(pairs: list[tuple[float, float]]) -> list[tuple[float, float]]:
            return [(fixed / experts, each / top_k) for fixed, each in pairs]

        return RoleCost(
            shared([done for done, _ in alike]), shared([moved for _, moved in alike]),
            [count / self.layers for count in alike.values()],
            sum(self.measured[n].sent for n in nodes) / self.layers, weights, cache,
        )  # fmt: skip


def _affine(small: float, large: float) -> tuple[float, float]:
    """(fixed, per token)."""
    each = (large - small) / (TOKENS[1] - TOKENS[0])
    return small - each * TOKENS[0], each
