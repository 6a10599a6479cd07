"""Tests whether a sharding rule is sound: every accepted placement must compute on shards what the operator computes
without sharding.

A `Sample` is a small call (or a chain of calls) with real tensors. `unsound` enumerates placements of its operands;
for each combination that the types accept it localises the graph, differentiates it, runs all ranks in one process,
puts results and gradients together again and compares them with the whole call. Types prove placements, this proves
the rules behind them.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from autopar.adapters.copying.fake import new_mode
from autopar.ir.conversions import conversion_of, is_conversion
from autopar.ir.graph import (
    copy_graph,
    has_gradient,
    mark_gradients,
    output_node,
    placeholders,
    placement,
    tensor_operands,
)
from autopar.ir.mesh import Mesh
from autopar.ir.placement import INVARIANT, PARTIAL, REPLICATE, Placement, Shard, dual, extent
from autopar.ir.signature import InputSpec, Signature
from autopar.passes.autodiff.trace_joint import joint_graph
from autopar.passes.partition.lower_to_local import LowerToLocal
from autopar.rewrite.checks import PlacementError, check_types
from autopar.rewrite.compilation import Compilation
from autopar.rewrite.pass_manager import Pass
from autopar.rules import RuleError, apply, rule_of, set_results, type_of
from autopar.testing.harness import scatter, whole_of
from autopar.testing.lockstep import in_lockstep

TOLERANCE = 1e-11
Typed = tuple[dict[str, Placement], ...]  # per operand: axis -> placement


@dataclass(frozen=True)
class Ref:
    """The ``index``-th result of an earlier step of a chain."""

    step: int
    index: int = 0


@dataclass
class SampleCall:
    """One call; tensors among its arguments are operands of the sample."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Sample:
    """Calls in order. The results of all are compared, or only their shapes (``values=False``: empty_like).

    ``gradients=False``: torch has no derivative. ``private``: steps whose results mean nothing outside of the chain
    (rows sorted by each rank for itself).
    """

    steps: list[SampleCall]
    values: bool = True
    gradients: bool = True
    private: tuple[int, ...] = ()

    @property
    def tensors(self) -> list[Tensor]:
        """Operands in order, each once."""
        found: dict[int, Tensor] = {}

        def keep(leaf: Any) -> None:
            if isinstance(leaf, Tensor):
                found.setdefault(id(leaf), leaf)

        for step in self.steps:
            map_aggregate((step.args, dict(step.kwargs)), keep)
        return list(found.values())

    def wants(self, x: Tensor) -> bool:
        """Whether the gradient of an operand is compared."""
        return self.gradients and (x.is_floating_point() or x.is_complex())

    @functools.cached_property
    def graph(self) -> GraphModule:
        """The graph of the sample, to be copied or typed repeatedly."""
        return sample_graph(self)


def call(target: Any, *args: Any, values: bool = True, gradients: bool = True, **kwargs: Any) -> Sample:
    """A sample of one call."""
    return Sample([SampleCall(target, args, kwargs)], values, gradients)


def whole_results(sample: Sample, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The results of every step, flat, on unsharded tensors."""
    known = {id(old): new for old, new in zip(sample.tensors, tensors, strict=True)}
    made: list[list[Any]] = []

    def fill(leaf: Any) -> Any:
        return made[leaf.step][leaf.index] if isinstance(leaf, Ref) else known.get(id(leaf), leaf)

    for step in sample.steps:
        out = step.target(*map_aggregate(step.args, fill), **map_aggregate(dict(step.kwargs), fill))
        made.append(list(out) if isinstance(out, (tuple, list)) else [out])
    return [r for i, results in enumerate(made) if i not in sample.private for r in results]


def sample_graph(sample: Sample) -> GraphModule:
    """The sample as a global graph: a placeholder per operand, outputs of all steps."""
    graph, mode = Graph(), new_mode()
    operands: dict[int, Node] = {}
    specs = []
    for i, x in enumerate(sample.tensors):
        node = operands[id(x)] = graph.placeholder(f"x{i}")
        node.meta["val"] = mode.from_tensor(x)
        specs.append(InputSpec(node.name, "parameter", node.name, requires_grad=sample.wants(x)))
    made: list[list[Node]] = []
    for step in sample.steps:
        made.append(_add_step(graph, step, operands, made, mode))
    outs = [n for i, nodes in enumerate(made) if i not in sample.private for n in nodes]
    graph.output(tuple(outs))
    gm = GraphModule(torch.nn.Module(), graph)
    gm.meta["signature"] = Signature(tuple(specs), ())
    mark_gradients(gm, [s.node for s in specs if s.requires_grad])
    return gm


def _add_step(
    graph: Graph, step: SampleCall, operands: dict[int, Node], made: list[list[Node]], mode: Any
) -> list[Node]:
    def fill(leaf: Any) -> Any:
        return made[leaf.step][leaf.index] if isinstance(leaf, Ref) else operands.get(id(leaf), leaf)

    node = graph.call_function(step.target, map_aggregate(step.args, fill), map_aggregate(dict(step.kwargs), fill))
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with mode:
        node.meta["val"] = val = step.target(*args, **kwargs)
    if not isinstance(val, (tuple, list)):
        return [node]
    items = []
    for i, v in enumerate(val):
        items.append(graph.call_function(operator.getitem, (node, i)))
        items[-1].meta["val"] = v
    return items


# --- which placements to try ------------------------------------------------------------------------------------------


def possible_placements(x: Tensor, ranks: int, gradient: bool) -> list[Placement]:
    """Every placement that a tensor could have."""
    out: list[Placement] = [INVARIANT]
    out += [REPLICATE] if gradient else []
    out += [PARTIAL] if x.dtype != torch.bool else []
    for dim, size in enumerate(x.shape):
        half, third = size // 2, size // 3
        zigzag = (half, -half) if size % (2 * ranks) == 0 else (2 * third, -third)
        for blocks in ((size,), (2 * third, third), (third,) * 3, zigzag):
            if extent(blocks) == size and not any(b % ranks or not b for b in blocks):
                out.append(Shard(dim, blocks))
    return list(dict.fromkeys(out))


def combinations(
    sample: Sample, gm: GraphModule, axis: str, mesh: Mesh, most: int = 600
) -> Iterator[tuple[Placement, ...]]:
    """All combinations if they are few; else those of the rule, and all that differ from them in one operand."""
    ranks = mesh.size(axis)
    options = [possible_placements(x, ranks, sample.wants(x)) for x in sample.tensors]
    total = 1
    for o in options:
        total *= len(o)
    if total <= most:
        yield from itertools.product(*options)
        return
    seeds: list[tuple[Placement, ...]] = [
        tuple(p if p in o else INVARIANT for o in options) for p in (INVARIANT, REPLICATE, PARTIAL)
    ]
    if len(sample.steps) == 1:
        seeds += _asked(gm, axis, mesh, options)
    else:
        seeds += [
            tuple(
                next((p for p in o if isinstance(p, Shard) and p.dim == d), REPLICATE if REPLICATE in o else INVARIANT)
                for o in options
            )
            for d in range(3)
        ]
    near = (s[:i] + (p,) + s[i + 1 :] for s in seeds for i, o in enumerate(options) for p in o)
    yield from dict.fromkeys([*seeds, *near])


def _asked(gm: GraphModule, axis: str, mesh: Mesh, options: list[list[Placement]]) -> list[tuple[Placement, ...]]:
    node = next(n for n in gm.graph.nodes if n.op == "call_function")
    rule = rule_of(node, axis, mesh)
    nodes = [n for n in gm.graph.nodes if n.op == "placeholder"]
    order = [nodes.index(x) for x in tensor_operands(node)]
    found = []
    for i, dims in enumerate(rule.operands):
        for p in options[order[i]]:
            if dims is None or not isinstance(p, Shard):
                continue
            try:
                cut = rule.completed(rule.cut_of(dims, p, mesh.size(axis)))
            except RuleError:
                continue
            seed: list[Placement] = [INVARIANT] * len(options)
            for j, need in zip(order, rule.required(cut), strict=True):
                seed[j] = INVARIANT if need is None or (need == REPLICATE and need not in options[j]) else need
            found.append(tuple(seed))
    return found


# --- the comparison ---------------------------------------------------------------------------------------------------


def typed(sample: Sample, placements: Typed, mesh: Mesh) -> GraphModule:
    """The sample's graph with placements on every value. Raises RuleError or ValueError if they do not match."""
    gm = copy_graph(sample.graph)
    set_types(gm, placements, mesh)
    return gm


def set_types(gm: GraphModule, placements: Typed, mesh: Mesh) -> None:
    """Set placements on every value, replacing earlier ones. Raises as `typed`."""
    for axis in mesh.cut_order:
        inputs = iter(placements)
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                node.meta["placements"] = {**node.meta.get("placements", {}), axis: next(inputs).get(axis, INVARIANT)}
            elif node.op == "call_function":
                if is_conversion(node) and conversion_of(node)[0] == axis:
                    set_results(node, axis, [conversion_of(node)[2]])
                else:
                    set_results(node, axis, type_of(node, axis, mesh))


def accepted(sample: Sample, mesh: Mesh) -> Iterator[Typed]:
    """The placements on a mesh of one axis that the types accept."""
    (axis,) = mesh.cut_order
    gm = copy_graph(sample.graph)
    single = next(n for n in gm.graph.nodes if n.op == "call_function") if len(sample.steps) == 1 else None
    rule = rule_of(single, axis, mesh) if single is not None else None
    nodes = placeholders(gm)
    for combination in combinations(sample, gm, axis, mesh):
        placements = tuple({axis: p} for p in combination)
        try:
            if rule is not None and single is not None:
                found = dict(zip(nodes, combination, strict=True))
                operands = tensor_operands(single)
                apply(rule, [found[x] for x in operands], [has_gradient(x) for x in operands], mesh.size(axis))
            else:
                set_types(gm, placements, mesh)
        except (RuleError, ValueError):
            continue
        yield placements


def in_turn(found: Iterable[Typed], turn: int, dims_too: bool = False) -> list[Typed]:
    """A subset of placements that rotates with ``turn``: one for each choice of sharded dims (``dims_too``: for one
    choice). Placements that shard nothing are tried in the first turns only, since they compare a value with itself."""
    ways: dict[Any, list[Typed]] = {}
    for placements in found:
        cut = tuple(_cut(q) for of in placements for q in of.values())
        ways.setdefault(cut if any(c is not None for c in cut) else None, []).append(placements)
    plain, choices = ways.pop(None, []), [*ways.values()]
    if dims_too and choices:
        choices, turn = [choices[turn % len(choices)]], turn // len(choices)
    return plain[turn : turn + 1] + [way[turn % len(way)] for way in choices] or plain[:1]


def _cut(q: Placement) -> int | str | None:
    return q.dim if isinstance(q, Shard) else "P" if q == PARTIAL else None


def unsound(sample: Sample, mesh: Mesh, turn: int | None = None, dims_too: bool = False) -> tuple[int, list[str]]:
    """(placements tried, what is wrong) over all placements that the types accept on a mesh of one axis; or over those
    whose turn it is."""
    whole = Whole.of(sample)
    tried, wrong = 0, []
    for placements in accepted(sample, mesh) if turn is None else in_turn(accepted(sample, mesh), turn, dims_too):
        tried += 1
        problem = wrong_pieces(sample, placements, mesh, whole)
        if problem:
            shown = ", ".join(str(p) for of in placements for p in of.values())
            wrong.append(f"{sample.steps[0].target}({shown}) over {mesh}: {problem}")
    return tried, wrong


@dataclass
class Whole:
    """Results of the sample in one process: outputs, one tangent per differentiable output, gradients of operands."""

    results: list[Tensor]
    tangents: list[Tensor | None]
    gradients: list[Tensor | None]
    joints: dict[str, GraphModule] = field(default_factory=dict)  # text of a local graph -> its joint graph

    @classmethod
    def of(cls, sample: Sample) -> Whole:
        leaves = [x.detach().clone().requires_grad_(sample.wants(x)) for x in sample.tensors]
        results = whole_results(sample, leaves)
        tangents = [torch.randn_like(r) if r.requires_grad else None for r in results]
        pairs = [(r, t) for r, t in zip(results, tangents, strict=True) if t is not None]
        wanted = [x for x in leaves if x.requires_grad]
        grads: Sequence[Tensor | None] = [None] * len(wanted)
        if pairs and wanted:
            grads = torch.autograd.grad([r for r, _ in pairs], wanted, [t for _, t in pairs], allow_unused=True)
        found = iter(grads)
        gradients = [next(found) if x.requires_grad else None for x in leaves]
        return cls([r.detach() for r in results], tangents, gradients)

    def joint(self, gm: GraphModule, wanted: Sequence[bool]) -> GraphModule:
        """The joint graph of a local graph; placements with the same local graph share one."""
        text = "\n".join(f"{n.format_node()} {n.meta.get('val')}" for n in gm.graph.nodes)
        if text not in self.joints:
            _clone_outputs(gm)
            self.joints[text] = joint_graph(gm, [w and any(t is not None for t in self.tangents) for w in wanted])
        return self.joints[text]


def wrong_pieces(sample: Sample, placements: Typed, mesh: Mesh, whole: Whole, passes: Sequence[Pass] = ()) -> str:
    """'' if sharded and unsharded results agree, else the difference. ``passes`` rewrite the typed graph first."""
    try:
        gm = typed(sample, placements, mesh)
        for rewrite in (*passes, LowerToLocal()):
            gm = rewrite.apply(gm, Compilation(mesh))
        ends: Any = output_node(gm).args[0]
        results = [{a: placement(n, a) for a in mesh.cut_order} for n in ends]
        check_types(gm, Compilation(mesh))
        joint = whole.joint(gm, [sample.wants(x) for x in sample.tensors])
        fed = [scatter(x, p, mesh) for x, p in zip(sample.tensors, placements, strict=True)]
        for t, p in zip(whole.tangents, results, strict=True):
            if t is not None:
                fed.append(scatter(t, {a: dual(q) for a, q in p.items()}, mesh))
        with torch.no_grad():
            out = in_lockstep(joint, list(zip(*fed)) if fed else [()] * mesh.world_size, mesh)
    except (AssertionError, RuntimeError, ValueError, IndexError, TypeError, PlacementError) as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    count = len(whole.results)
    for i, (expected, p) in enumerate(zip(whole.results, results, strict=True)):
        problem = _differs([o[i] for o in out], expected, p, mesh, sample.values)
        if problem:
            return f"result {i} ({', '.join(map(str, p.values()))}) {problem}"
    for i, (gradient, p) in enumerate(zip(whole.gradients, placements, strict=True)):
        if gradient is None or not any(t is not None for t in whole.tangents):
            continue
        back = {a: dual(q) for a, q in p.items()}
        problem = _differs([o[count + i] for o in out], gradient, back, mesh, True)
        if problem:
            return f"gradient of operand {i} ({', '.join(map(str, p.values()))}) {problem}"
    return ""


def _clone_outputs(gm: GraphModule) -> None:
    """AOTAutograd refuses outputs that are views; a step graph never returns any."""
    end = output_node(gm)
    with gm.graph.inserting_before(end):
        end.args = (tuple(gm.graph.call_function(torch.clone, (n,)) for n in end.args[0]),)  # type: ignore[union-attr]
    gm.recompile()


def _differs(pieces: list[Any], expected: Tensor, p: Mapping[str, Placement], mesh: Mesh, values: bool) -> str:
    if any(x is None for x in pieces):
        return "is None" if expected.abs().sum() else ""
    if not values:  # uninitialized memory: only the shape matters
        expected = torch.zeros_like(expected)
        pieces = [torch.zeros_like(x) for x in pieces]
    try:
        found = whole_of(pieces, p, mesh)
    except (AssertionError, RuntimeError) as error:
        return str(error)[:200]
    if found.shape != expected.shape:
        return f"has shape {tuple(found.shape)}, not {tuple(expected.shape)}"
    # Kernels for narrow types add up in another order for other sizes, on some CPUs.
    rounding = 8 * torch.finfo(expected.dtype).eps if expected.is_floating_point() else 0.0
    most = max(TOLERANCE, rounding)
    same = torch.allclose(found.to(expected.dtype), expected, rtol=most, atol=most, equal_nan=True)
    return "" if same else f"differs by {(found - expected).abs().max():.1e}"
