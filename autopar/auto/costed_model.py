"""Costs of a model's layers on any placement, from compiled models of a few layers.

    model = CostedModel.from_config("config.json", seq=8192)
    model.price(Layout(tp=8, dp=8, zero=1), Cluster.parse("H100"), stack_named("autopar-eager", "H100"))

Layers are the entries of the outermost lists of equal modules. A list is shortened to its first entries, so that the
model's own code runs: two layers of a kind differ from one by exactly one layer.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.fx import GraphModule

import autopar.runtime.schedules  # noqa: F401  (fills the table of schedules)
from autopar.attention.layouts import LAYOUTS
from autopar.auto.layer_calls import is_part
from autopar.auto.layer_lists import Entries, counts_of, first, layer_lists, of_first_layers, samples, with_layers
from autopar.auto.stored_costs import CostsByRows, stored_costs
from autopar.capture.trace.compiling import compiling
from autopar.compile.model import capture_step
from autopar.compile.partitioned_model import PartitionedModel, graph_to_plan, keep_outputs
from autopar.cost.cluster import Cluster
from autopar.cost.efficiency import Stack
from autopar.cost.flops import is_lookup
from autopar.cost.layer_costs import SCALARS, ModelCosts, Sample, Unlike, design_row, graph_work, model_costs
from autopar.cost.layout import Layout, Placement
from autopar.cost.layout_price import Price, price
from autopar.cost.memory import memory
from autopar.ir.expert_layers import axis_of_experts, dispatches
from autopar.ir.graph import arguments, copy_graph, layer_of, nbytes, placeholders
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Shard
from autopar.options import Options
from autopar.plan import Plan
from autopar.planner import make_plan
from autopar.rewrite.compilation import Compilation
from autopar.steps.graphs import Compiled

ROWS = (1, 2)  # for which samples are compiled
EQUAL = 1e-9  # of what a sample costs

Documents = int | tuple[int, ...]
MakeBatch = Callable[[int], Mapping[str, Any]]  # rows -> a batch


@dataclass(frozen=True)
class _Short:
    """A model with few layers, compiled. dense: its ranks of ep are those of dp, as it has no experts."""

    entries: Entries
    compiled: Compiled
    dense: bool


class CostedModel:
    """A model whose layers are compiled for a placement when their costs are first asked for. values: all that the
    model and its batches are made of, as text, under which costs are stored on disk; "": they are not. documents: of a
    packed row, as in `Options.documents`."""

    def __init__(self, model: nn.Module, make_batch: MakeBatch, values: str = "", documents: Documents = 0) -> None:
        self.model, self.make_batch, self.values, self.documents = model, make_batch, values, documents
        self.lists = layer_lists(model)
        self._chosen: dict[tuple[Unlike, ...], list[Entries]] = {}
        self._captures: dict[Hashable, GraphModule] = {}
        self._partitioned: dict[Hashable, PartitionedModel] = {}  # what checkpoint policies have in common
        self._dense: dict[Hashable, Compiled] = {}  # samples without experts: the same for any number of ranks of ep
        self._experts: dict[Entries, bool] = {}
        self._costs: dict[Placement, CostsByRows] = {}

    @classmethod
    def from_config(cls, config: Any, seq: int, dtype: str = "bfloat16", documents: Documents = 0) -> CostedModel:
        """Of a config.json (or its folder), or the values of one as a dict. Raises ValueError."""
        hf = importlib.import_module("autopar.models.hf_configs")
        found = hf.config_of(config) if isinstance(config, Mapping) else hf.load_config(config)
        model = hf.build(found, hf.dtype_named(dtype))
        values = f"{type(model).__name__} {found.to_json_string(use_diff=False)} {seq} {dtype} {documents}"
        return cls(model, lambda rows: hf.batch_of(model, rows, seq, packed=bool(documents)), values, documents)

    @property
    def kinds(self) -> tuple[int, ...]:
        """The kind of each layer, in the model's order."""
        return tuple(kind for one in self.lists for kind in one.kinds)

    @property
    def layers(self) -> int:
        """How many layers the model has."""
        return len(self.kinds)

    def split_points(self, counts: Sequence[int]) -> tuple[str, ...]:
        """The names of the layers with which stages of so many layers begin, without the first stage."""
        children = [self.model.get_submodule(one.path).named_children() for one in self.lists]
        names = [f"{one.path}.{name}" for one, held in zip(self.lists, children, strict=True) for name, _ in held]
        return tuple(names[end] for end in itertools.accumulate(counts[:-1]))

    @property
    def experts(self) -> int:
        """A number that divides the experts of every layer; 0 if there are none. Raises ValueError for a model that
        cannot be compiled."""
        return self.costs(Placement()).num_experts

    def price(self, layout: Layout, cluster: Cluster, stack: Stack, **what_if: Any) -> Price:
        """The price of a layout. A layout that does not compile is refused with the compiler's sentence."""
        try:
            costs = self.costs(layout.placement, layout.micro_batch)
        except ValueError as error:
            return Price.of_refusal(" ".join(str(error).split()))
        return price(layout, costs, cluster, stack, **what_if)

    def costs(self, placement: Placement, rows: int = ROWS[-1]) -> ModelCosts:
        """Costs on a placement of microbatches of so many rows. Raises ValueError for what cannot be compiled."""
        if placement not in self._costs:
            self._costs[placement] = stored_costs(self.values, placement, lambda: self._compiled_costs(placement))
        return next(costs for least, costs in reversed(self._costs[placement]) if least <= rows or least == ROWS[0])

    def _compiled_costs(self, placement: Placement) -> CostsByRows:
        """Costs are affine in rows while algorithms are the same: if the compiler chooses others for more rows, each
        choice has costs of its own."""
        few, more = (self._compiled_for(placement, rows) for rows in ROWS)
        if _choices(few) == _choices(more):
            return ((ROWS[0], self._costs_of(placement, few, more)),)
        like_few, like_more = self._compiled_for(placement, ROWS[1], few), self._compiled_for(placement, ROWS[0], more)
        pairs = (few, like_few), (like_more, more)
        return tuple((rows, self._costs_of(placement, *pair)) for rows, pair in zip(ROWS, pairs, strict=True))

    def _costs_of(self, placement: Placement, few: list[_Short], more: list[_Short]) -> ModelCosts:
        """The costs of models with few layers, compiled for both numbers of rows."""
        samples = []
        for one, other in zip(few, more, strict=True):
            sample = sample_of([one.compiled, other.compiled], counts_of(self.lists, one.entries))
            samples.append(sample.resized("dp", 2, "ep", placement.ep) if one.dense else sample)
        return model_costs(placement, self.kinds, samples, ROWS, self._unlike)

    @functools.cached_property
    def _unlike(self) -> tuple[Unlike, ...]:
        """Layers that cost more than the next ones of their kind: the first that make or read what all of them read
        (tables of positions, a bias that goes from layer to layer, the encoder's output)."""
        shortest = counts_of(self.lists, first([1] * len(self.lists)))
        several = [kind for kind, count in sorted(Counter(self.kinds).items()) if count > 1 + shortest[kind]]
        asked = [(kind, 1 + shortest[kind]) for kind in several if len(self.lists) > 1 or not shortest[kind]]
        if not asked:
            return ()
        if len(self.lists) > 1:  # over tp it shows what all layers of a decoder have gathered
            with contextlib.suppress(ValueError):
                return self._found_unlike(asked, Placement(tp=2, sequence_parallel=True, policy="full"))
        return self._found_unlike(asked, Placement(policy="full"))

    def _found_unlike(self, asked: Sequence[Unlike], placement: Placement) -> tuple[Unlike, ...]:
        """Those of the asked layers that are. Raises ValueError for a placement that does not compile."""
        amounts = {
            entries: _amounts(sample_of([self._compiled(entries, ROWS[0], placement.mesh, placement.options)], ()))
            for entries in of_first_layers(self.lists, asked)
            if all(entries)
        }
        solver = np.linalg.pinv([design_row(counts_of(self.lists, entries), asked) for entries in amounts])
        more = (solver @ np.array([*amounts.values()]))[-len(asked) :]
        largest = np.abs([*amounts.values()]).max(axis=0)
        return tuple(one for one, found in zip(asked, more, strict=True) if (np.abs(found) > EQUAL * largest).any())

    def _samples(self, unlike: tuple[Unlike, ...]) -> list[Entries]:
        """Layers of each sample."""
        if unlike not in self._chosen:
            self._chosen[unlike] = samples(self.lists, unlike, self._is_part)
        return self._chosen[unlike]

    def _is_part(self, fewer: Entries, entries: Entries) -> bool:
        """Whether a model with fewer layers runs, and is a part of the other one."""
        try:
            return is_part(*(self._captured(x, ROWS[0], Options()) for x in (fewer, entries)))
        except Exception:  # of the model's own code
            return False

    def _compiled_for(self, placement: Placement, rows: int, like: Sequence[_Short] = ()) -> list[_Short]:
        """Models with few layers. like: with their algorithms instead of those that the compiler chooses. A model that
        does not run without layers is left out."""
        plans: list[tuple[Entries, Plan | None]] = [(one.entries, one.compiled.plan) for one in like]
        found = []
        for entries, plan in plans or [(x, None) for x in self._samples(self._unlike)]:
            try:
                found.append(self._short(placement, entries, rows, plan))
            except ValueError:
                if all(entries):
                    raise
        return found

    def _short(self, placement: Placement, entries: Entries, rows: int, like: Plan | None) -> _Short:
        dense = (placement.ep > 1 or placement.expert_axis != "ep") and not self._has_experts(entries)
        apart = dense and placement.ep > 1
        if dense:
            placement = replace(placement, ep=1, expert_axis="ep", token_dispatcher="auto")
        mesh = placement.mesh
        how = placement.options, like, entries != self._samples(self._unlike)[-1]
        if not apart:
            return _Short(entries, self._compiled(entries, rows * mesh.data_size, mesh, *how), False)
        # To layers without experts, ranks of ep are data parallel: any number costs the same but for sums of gradients
        key = entries, rows, placement, like is None
        if key not in self._dense:
            mesh = Mesh.of(dp=2, **mesh.sizes)
            self._dense[key] = self._compiled(entries, rows * mesh.data_size, mesh, *how)
        return _Short(entries, self._dense[key], True)

    def _has_experts(self, entries: Entries) -> bool:
        """Whether a model with these layers has experts."""
        if entries not in self._experts:
            alone = Placement()
            one = self._compiled(entries, ROWS[0], alone.mesh, alone.options)
            self._experts[entries] = bool(dispatches(one.local))
        return self._experts[entries]

    @compiling
    def _compiled(
        self, entries: Entries, rows: int, mesh: Mesh, options: Options, like: Plan | None = None, draft: bool = True
    ) -> Compiled:
        """draft: calls stay in the order of the model, as only the peak of the largest sample counts."""
        options = replace(options, documents=self.documents)
        if "tp" in mesh.sizes:  # chunks, whose number depends on sizes, would not compare
            options = replace(options, async_tp=False)
        key = entries, rows, mesh, replace(options, activation_checkpoint="", loss_chunks=0), like is None, draft
        if key not in self._partitioned:
            gm = copy_graph(self._captured(entries, rows, options))
            plan = None if like is None else _plan_like(like, copy_graph(gm), mesh, options)
            ctx = Compilation(mesh.with_microbatches(options.all_microbatches), checks=False, draft=draft)
            self._partitioned[key] = PartitionedModel(gm, mesh, options, ctx, plan=plan, outputs=())
        return self._partitioned[key].compiled(options)

    def _captured(self, entries: Entries, rows: int, options: Options) -> GraphModule:
        key = entries, rows
        if key not in self._captures:
            with with_layers(self.model, self.lists, entries):
                self._captures[key] = capture_step(self.model, self.make_batch(rows), options)
        return self._captures[key]


def _amounts(sample: Sample) -> list[float]:
    """FLOPs, bytes sent, bytes and kernels of each pass, bytes kept. What a compiler may fuse is left out: it differs a
    little beside a layer of another kind, and samples cost time."""
    (works,), (memory,) = sample.works, sample.memory
    products = [sum(product[1] for product in work.products) for work in works]
    sent = [sum(size for _, size in work.sent.values()) for work in works]
    scalars = [x for work in works for name, x in zip(SCALARS, work.scalars, strict=True) if "fused" not in name]
    return [*products, *sent, *scalars, float(memory.saved)]


# --- a sample from compiled models ----------------------------------------------------------------------------


def _choices(shorts: Sequence[_Short]) -> list[object]:
    """The algorithms of attention and of experts."""
    plans = [one.compiled.plan for one in shorts]
    attention = [(a.forward, a.backward, a.query_blocks, a.key_blocks) for p in plans for a in p.attention.values()]
    return [attention, [one.token_dispatcher for p in plans for one in p.experts.values()]]


def _plan_like(other: Plan, gm: GraphModule, mesh: Mesh, options: Options) -> Plan:
    """The plan of a graph with the algorithms of a plan for other rows."""
    blocks = {a.query_blocks for a in other.attention.values()}
    dealt = [name for name, found in LAYOUTS.items() if found in blocks]
    if len(blocks) == 1 and dealt:
        options = replace(options, cp_load_balance=dealt[0])
    gm = graph_to_plan(gm, Compilation(mesh), options)
    keep_outputs(gm, ())
    plan = make_plan(gm, mesh, options)
    attention = zip(plan.attention.items(), other.attention.values(), strict=True)
    experts = zip(plan.experts.items(), other.experts.values(), strict=True)
    return replace(
        plan,
        attention={name: replace(a, forward=b.forward, backward=b.backward) for (name, a), b in attention},
        experts={name: replace(a, token_dispatcher=b.token_dispatcher) for (name, a), b in experts},
    )


def sample_of(compiled: Sequence[Compiled], counts: tuple[int, ...]) -> Sample:
    """What a model with few layers costs, compiled for each number of rows."""
    works = []
    for one in compiled:
        (part,) = one.pipeline.parts
        mesh = one.plan.mesh
        backward = part.backward_reduce or part.backward
        assert backward is not None, "a sample is trained"
        again, rest = (graph_work(backward.graph, mesh, again=flag) for flag in (True, False))
        works.append((graph_work(part.forward.graph, mesh), rest, again))
    first = compiled[0]
    dense, experts, tables = _elements(first)
    itemsize = max((p.dtype.itemsize for p in first.parameters), default=2)
    num_experts = math.gcd(*(int(arguments(node)["num_experts"]) for node in dispatches(first.local)))
    return Sample(
        counts, tuple(works), tuple(memory(one) for one in compiled), tuple(_layer_peak(one) for one in compiled),
        tuple(_hop(one) for one in compiled), tuple(_logits(one) for one in compiled), dense, experts, tables, itemsize,
        num_experts,
    )  # fmt: skip


def _elements(compiled: Compiled) -> tuple[float, float, float]:
    """Elements of a rank's parameters: outside of experts that share an axis of data, of these, of tables that are
    looked up."""
    mesh, plan = compiled.plan.mesh, compiled.plan
    axis = axis_of_experts(plan.experts)
    axis = "" if axis == "tp" else axis  # whose shards all have the same gradients' ranks
    nodes = {s.name: s.node for s in compiled.signature.inputs if s.kind == "parameter"}
    by_name = {n.name: n for n in placeholders(compiled.local)}
    dense = experts = tables = 0.0
    for p in compiled.parameters:
        size = p.nbytes(mesh) / p.dtype.itemsize
        sharded = bool(axis) and isinstance(plan.parameter(p.name, axis).stored, Shard)
        if sharded:
            experts += size
            continue
        dense += size
        node = by_name.get(nodes[p.name])
        if node is not None and node.users and all(is_lookup(user) for user in node.users):
            tables += size
    return dense, experts, tables


def _layer_peak(compiled: Compiled) -> float:
    """Bytes of the largest product's result: what a layer's temporaries are at least."""
    (part,) = compiled.pipeline.parts
    sizes = [nbytes(n) for n in part.forward.graph.graph.nodes if n.op == "call_function" and layer_of(n)]
    return 2.0 * max(sizes, default=0)


def _hop(compiled: Compiled) -> float:
    """Bytes of the value that goes from layer to layer: the largest that is made in one and read in another, or, in a
    model with one, after it."""
    (part,) = compiled.pipeline.parts
    between: dict[bool, list[int]] = {True: [], False: []}
    for node in part.forward.graph.graph.nodes:
        if node.op != "call_function" or not layer_of(node) or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        readers = {layer_of(user) for user in node.users if user.op == "call_function"} - {layer_of(node)}
        if readers:
            between[readers != {""}].append(nbytes(node))
    return float(max(between[True] or between[False] or [0]))


def _logits(compiled: Compiled) -> float:
    """Elements of the logits of a rank."""
    (part,) = compiled.pipeline.parts
    sizes = [
        n.meta["val"].numel()
        for n in part.forward.graph.graph.nodes
        if n.op == "call_function" and not layer_of(n) and isinstance(n.meta.get("val"), torch.Tensor)
    ]
    return float(max(sizes, default=0))
