"""The plan: every decision about a graph on a mesh, frozen, printable with reasons, JSON in and out."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import GraphModule

from autopar.ac_policies import LayerCheckpoint, checkpoint_lines
from autopar.ir.expert_layers import ExpertPlan
from autopar.ir.mesh import DATA, Mesh
from autopar.ir.meta import signature_of
from autopar.ir.placement import INVARIANT, Invariant, Partial, Placement, Replicate, Shard, parse_placement
from autopar.options import Options
from autopar.spelling import did_you_mean
from autopar.values import parse, read

UNCLEAR = "has as many rows as the batch, and nothing in the graph tells whether they are its rows"  # a note


@dataclass(frozen=True)
class ParameterPlan:
    """One parameter on one axis: how it is stored, how it enters compute, and why."""

    stored: Placement = INVARIANT
    used: Placement = INVARIANT
    reason: str = ""


@dataclass(frozen=True)
class Stream:
    """Values that are sharded on an axis along their sequence, or along their rows: where they start, the dim, and its
    blocks.

    axis tp: a residual stream under sequence parallelism, from the value ``node``. axis cp: the tokens of an attention,
    from its operand ``node`` ("attention_1.q"). ``rows``, on any axis: what ranks would compute alike of the input
    ``node``, each image by itself (`autopar.rules.shared_rows`). ``channels``, on cp: a region that mixes tokens and
    runs on all tokens of some channels instead, the dim ``dim`` of its value ``node``
    (`autopar.rules.channel_regions`). ``blocks`` as in `autopar.ir.placement.Shard`; their ratios count; so ``units``.
    """

    node: str
    dim: int
    reason: str = ""
    axis: str = "tp"
    blocks: tuple[int, ...] = ()
    units: int = 0
    rows: bool = False
    channels: bool = False


@dataclass(frozen=True)
class AttentionPlan:
    """How one attention runs over a sharded sequence: algorithms by name, the layout of queries and keys, and why.

    ``candidates``: the alternatives, (algorithm, pass, cost or refusal) each.
    """

    forward: str
    backward: str
    query_blocks: tuple[int, ...] = ()
    key_blocks: tuple[int, ...] = ()
    reason: str = ""
    candidates: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True)
class PipelinePlan:
    """How the model is split over the axis pp.

    schedule: by name. split_points: the layer with which each stage but the first begins. virtual_stages: stages per
    rank. token_slices: their lengths (empty: none). holders: parameter -> the stages that use it, or did when it was
    distributed.
    """

    schedule: str
    split_points: tuple[str, ...]
    virtual_stages: int = 1
    token_slices: tuple[int, ...] = ()
    holders: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def parts(self) -> int:
        return len(self.split_points) + 1


@dataclass(frozen=True)
class WholePart:
    """What an axis does not shard: a part of the "parameters" or of the "FLOPs", and why. ``share``: of all of them."""

    kind: str
    subject: str
    share: float
    reason: str

    def __str__(self) -> str:
        return f"{self.share:.1%} of {self.kind}: {self.subject}: {self.reason}"


@dataclass(frozen=True)
class AxisShare:
    """What an axis shards of the parameters' bytes and of FLOPs (None: not counted). ``whole``: the rest."""

    axis: str
    parameters: float
    flops: float | None = None
    whole: tuple[WholePart, ...] = ()

    def __str__(self) -> str:
        flops = f" and {self.flops:.1%} of FLOPs" if self.flops is not None else ""
        return f"{self.axis} shards {self.parameters:.1%} of parameters{flops}{'; replicated:' if self.whole else ''}"


@dataclass(frozen=True)
class Plan:
    """All decisions for one graph on one mesh. Passes carry them out and decide nothing themselves.

    ``parameters``: name -> axis -> ParameterPlan (absent: Invariant). ``inputs``: name -> axis -> placement.
    ``notes``: (subject, reason) pairs for what was replicated, and why. ``overrides``: the user's choices, kept so
    that the plans of further batch shapes follow them. ``weight_pieces``: parts of replicated weights that enter
    compute sharded on tp, by node. ``pipeline``: with an axis pp, its stages. ``attention``: with an axis cp, how each
    attention runs, by node. ``experts``: how those of a layer are sharded, by the node that dispatches.
    ``batch_dims``: input -> its batch dim, None for an unbatched one; empty where nothing shards the batch.
    ``shares``: what each axis shards, and what stands in the way. ``checkpoints``: the layers whose backward recomputes
    something. ``loss_chunks``: in how many chunks losses are computed. ``loss_gradients``: what computes the gradients
    of these chunks, the "forward" or, with their logits a second time, the "backward". ``tiles``: in how many tiles of
    tokens the regions run that treat every token by itself. ``draws``: whether steps draw
    random numbers. ``products``: with products in few bits, the weight of each linear layer and grouped product -> why
    its products stay wide, or "" if they are scaled. (FLOPs of shares, checkpoints and loss chunks are known once a
    batch is compiled.)
    """

    mesh: Mesh
    graph: str
    options: Options = field(default_factory=Options)
    parameters: Mapping[str, Mapping[str, ParameterPlan]] = field(default_factory=dict)
    inputs: Mapping[str, Mapping[str, Placement]] = field(default_factory=dict)
    streams: tuple[Stream, ...] = ()
    notes: tuple[tuple[str, str], ...] = ()
    overrides: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    weight_pieces: Mapping[str, Placement] = field(default_factory=dict)
    pipeline: PipelinePlan | None = None
    attention: Mapping[str, AttentionPlan] = field(default_factory=dict)
    experts: Mapping[str, ExpertPlan] = field(default_factory=dict)
    batch_dims: Mapping[str, int | None] = field(default_factory=dict)
    shares: tuple[AxisShare, ...] = ()
    checkpoints: tuple[LayerCheckpoint, ...] = ()
    loss_chunks: int = 0
    loss_gradients: str = ""
    tiles: int = 0
    draws: bool = False
    products: Mapping[str, str] = field(default_factory=dict)

    def parameter(self, name: str, axis: str) -> ParameterPlan:
        return self.parameters.get(name, {}).get(axis, ParameterPlan())

    def stored(self, name: str) -> dict[str, Placement]:
        """Stored placements of a parameter, Invariant axes left out."""
        return {a: p.stored for a, p in self.parameters.get(name, {}).items() if p.stored != INVARIANT}

    def unclear_inputs(self) -> list[str]:
        """Inputs that are only likely to be part of the batch."""
        return [subject.removeprefix("input ") for subject, reason in self.notes if reason == UNCLEAR]

    def of_parameters(self, names: Collection[str]) -> Plan:
        """The decisions for these parameters alone, for a model in which they may have other dtypes."""
        kept = {n: axes for n, axes in self.parameters.items() if n in names}
        gone = self.parameters.keys() - kept.keys()
        overrides = {n: axes for n, axes in self.overrides.items() if n not in gone}
        pipeline = self.pipeline
        if pipeline is not None:
            pipeline = replace(pipeline, holders={n: r for n, r in pipeline.holders.items() if n in names})
        return replace(
            self,
            graph="",
            parameters=kept,
            overrides=overrides,
            pipeline=pipeline,
            shares=(),
            checkpoints=(),
            loss_chunks=0,
            loss_gradients="",
            tiles=0,
        )

    def override(self, changes: Mapping[str, Mapping[str, Placement | str]]) -> Plan:
        """Change single decisions: ``plan.override({"lm_head.weight": {"tp": "I"}, "mask": {"dp": "S(1)"}})``.

        Keys are parameter or input names, values axis -> placement (stored and used), I or S. Raises ValueError for
        names or axes that the plan does not know.
        """
        if not isinstance(changes, Mapping) or not all(isinstance(axes, Mapping) for axes in changes.values()):
            need = 'plan: changes are placements by name and axis, such as {"lm_head.weight": {"tp": "I"}}'
            raise ValueError(f"{need}, found {changes!r}; give them so")
        parameters = {name: dict(axes) for name, axes in self.parameters.items()}
        inputs = {name: dict(axes) for name, axes in self.inputs.items()}
        dims = dict(self.batch_dims)
        for name, axes in changes.items():
            if name not in parameters and name not in inputs:
                known = f"{', '.join(list(parameters)[:6])}, ...{did_you_mean(name, [*parameters, *inputs])}"
                raise ValueError(f"plan: no parameter or input {name!r}; the plan has {known}")
            for axis, chosen in axes.items():
                if axis not in self.mesh.sizes and axis != "mb":
                    hint = did_you_mean(axis, self.mesh.sizes)
                    raise ValueError(f"plan: no axis {axis!r} in the mesh {self.mesh}{hint}")
                target = parse_placement(chosen) if isinstance(chosen, str) else chosen
                if name in parameters:
                    parameters[name][axis] = ParameterPlan(target, target, "the user's choice")
                else:
                    inputs[name][axis] = target
                    if axis in DATA or self.mesh.data_size == 1:
                        dims[name] = target.dim if isinstance(target, Shard) else None
        kept = {name: dict(axes) for name, axes in self.overrides.items()}
        for name, axes in changes.items():
            kept.setdefault(name, {}).update({axis: str(p) for axis, p in axes.items()})
        changed = replace(
            self, parameters=parameters, inputs=inputs, overrides=kept, batch_dims=dims, shares=(), checkpoints=()
        )
        check_plan(changed)
        return changed

    # --- text and JSON ------------------------------------------------------------------------------------

    def __str__(self) -> str:
        lines = [f"plan for graph {self.graph} on mesh {self.mesh}", f"  {self.options}"]
        for name, axes in self.parameters.items():
            for axis, p in axes.items():
                used = f" used {p.used}" if p.used != p.stored else ""
                lines.append(f"  {name:<60} {axis}: {p.stored}{used:<8} {p.reason}")
        for name, placements in self.inputs.items():
            shown = " ".join(f"{a}: {p}" for a, p in placements.items())
            lines.append(f"  input {name:<54} {shown}{self._batch_of(name)}")
        for s in self.streams:
            blocks = f"; {','.join(map(str, s.blocks))}" if s.blocks else ""
            units = f"/{s.units}" if s.units else ""
            lines.append(f"  stream from {s.node:<48} {s.axis}: S({s.dim}{units}{blocks})  {s.reason}")
        for node, a in self.attention.items():
            lines.append(f"  attention {node:<50} cp: forward {a.forward}, backward {a.backward}  {a.reason}")
        for node, e in self.experts.items():
            lines.append(f"  experts of {node:<49} {e.axis}: {e.token_dispatcher}  {e.reason}")
        lines += self._products()
        lines += self._candidates()
        lines += [f"  piece {name:<54} tp: {p}  of a replicated fused weight" for name, p in self.weight_pieces.items()]
        for share in self.shares:
            lines += [f"  {share}", *(f"    {part}" for part in share.whole)]
        if self.loss_chunks > 1:
            lines.append(
                f"  losses in {self.loss_chunks} chunks of tokens, their gradients in the {self.loss_gradients}"
            )
        lines += checkpoint_lines(self.checkpoints)
        lines += [f"  note {subject}: {reason}" for subject, reason in self.notes]
        return "\n".join(lines)

    def _batch_of(self, name: str) -> str:
        if name not in self.batch_dims:
            return ""
        dim = self.batch_dims[name]
        return "  no part of the batch" if dim is None else f"  batch: dim {dim}"

    def _products(self) -> list[str]:
        """How many products are scaled, and why others are not."""
        if not self.products:
            return []
        kept = {name: why for name, why in self.products.items() if why}
        how = self.options.precision
        lines = [
            f"  products of {len(self.products) - len(kept)} of {len(self.products)} weights are of "
            f"{how.product}, scaled by {how.scaling}{', gathered in eight bits' if how.gather else ''}"
        ]
        return lines + [f"    {name:<58} stays wide: {why}" for name, why in kept.items()]

    def _candidates(self) -> list[str]:
        """The candidates of the attentions, once for those that share them."""
        by_table: dict[tuple[tuple[str, str, str], ...], list[str]] = {}
        for node, a in self.attention.items():
            by_table.setdefault(a.candidates, []).append(node)
        lines = []
        for table, nodes in by_table.items():
            more = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
            lines += [f"  candidates of {nodes[0]}{more}:"] if table else []
            lines += [f"    {algorithm:<26} {direction:<9} {cost}" for algorithm, direction, cost in table]
        return lines

    def to_json(self) -> str:
        return json.dumps(_plain(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Inverse of `to_json`. Raises ValueError for text that is not a plan, or a plan that no mesh could follow."""
        try:
            plan: Plan = read(cls, _renamed(parse(text)), "the plan", _READERS)
        except ValueError as error:
            raise ValueError(f"plan: expected the JSON of a plan: {error}; write it with plan.to_json()") from error
        check_plan(plan)
        return plan


_STREAM = {"units": 0, "rows": False, "channels": False}


def _renamed(value: Any) -> Any:
    """Plans of older versions, whose fields had other names or were missing, can still be read."""
    if not isinstance(value, dict):
        return value
    if "slices" in value and "weight_pieces" not in value:
        value = {"weight_pieces" if name == "slices" else name: v for name, v in value.items()}
    added = {"loss_gradients": "", "tiles": 0, "draws": False, "products": {}}
    if isinstance(streams := value.get("streams"), list):
        value = value | {"streams": [_STREAM | s if isinstance(s, dict) else s for s in streams]}
    return {"experts": {}, "shares": [], "checkpoints": [], "loss_chunks": 0, **added, **value}


def _plain(value: Any) -> Any:
    """Inverse of `_READERS`, and of `read`."""
    if isinstance(value, (Shard, Partial, Replicate, Invariant)):
        return str(value)
    if isinstance(value, ParameterPlan):
        return [str(value.stored), str(value.used), value.reason]
    if isinstance(value, Mesh):
        return value.axes
    if isinstance(value, Plan):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {key: _plain(x) for key, x in value.items()}
    return [_plain(x) for x in value] if isinstance(value, (list, tuple)) else value


def _placement(value: Any, at: str) -> Placement:
    return parse_placement(read(str, value, at, {}))


def _parameter(value: Any, at: str) -> ParameterPlan:
    stored, used, reason = read(tuple[str, str, str], value, at, {})
    return ParameterPlan(parse_placement(stored), parse_placement(used), reason)


def _mesh(value: Any, at: str) -> Mesh:
    return Mesh(read(tuple[tuple[str, int], ...], value, at, {}))


_READERS = {Placement: _placement, ParameterPlan: _parameter, Mesh: _mesh}


def graph_digest(gm: GraphModule) -> str:
    """A digest of a graph's parameters: names, shapes, dtypes. A plan is valid for one digest."""
    signature = signature_of(gm)
    by_name = {n.name: n for n in gm.graph.nodes if n.op == "placeholder"}
    facts = [
        (s.name, tuple(by_name[s.node].meta["val"].shape), str(by_name[s.node].meta["val"].dtype))
        for s in signature.inputs
        if s.kind == "parameter"
    ]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


def check_plan(plan: Plan) -> None:
    """Axes are axes of the mesh; parameters and inputs are stored replicated or sharded. Raises ValueError.

    Two of the four placements cannot be stored: Replicate says that each rank has a gradient of its own, Partial that
    the value is not reduced yet, and nothing would reduce them.
    """
    for name, axis, stored in _stored(plan):
        if axis not in plan.mesh.sizes and axis != "mb":
            raise ValueError(f"plan: {name}: no axis {axis!r} in the mesh {plan.mesh}; make a plan for this mesh")
        if axis == "pp":
            raise ValueError(f"plan: {name}: nothing is sharded on 'pp', its ranks hold different layers; leave it out")
        if not isinstance(stored, (Invariant, Shard)):
            raise ValueError(
                f"plan: {name} is stored as {stored} on axis {axis!r}, values are stored replicated (I) or sharded "
                f"(S); use I: how a rank uses it follows from that"
            )
    for name, axes in plan.parameters.items():
        if any(isinstance(p.used, Partial) for p in axes.values()):
            raise ValueError(
                f"plan: {name} is used as P, which is not reduced; use R, or the placement that it is stored with"
            )
        if isinstance(axes["mb"].stored if "mb" in axes else None, Shard):
            raise ValueError(f"plan: {name} is sharded on axis 'mb': microbatches do not shard parameters; use I")
    _check_parts(plan)


def _stored(plan: Plan) -> Iterator[tuple[str, str, Placement]]:
    """(what, axis, placement) of everything that a plan stores."""
    for name, axes in plan.parameters.items():
        yield from ((f"parameter {name}", axis, p.stored) for axis, p in axes.items())
    for name, placed in plan.inputs.items():
        yield from ((f"input {name}", axis, p) for axis, p in placed.items())
    for name, p in plan.weight_pieces.items():
        yield f"piece {name}", "tp", p
    for stream in plan.streams:
        yield f"stream {stream.node}", stream.axis, Shard(max(stream.dim, 0))


def _check_parts(plan: Plan) -> None:
    """Streams, and decisions for axes that a mesh may lack: attention over cp, stages over pp."""
    for stream in plan.streams:
        if stream.dim < 0:
            raise ValueError(f"plan: stream {stream.node}: dims count from 0, found {stream.dim}; use an existing dim")
    if plan.attention and plan.mesh.size("cp") == 1:
        name = next(iter(plan.attention))
        raise ValueError(f"plan: attention {name}: no axis 'cp' in the mesh {plan.mesh}; make a plan for this mesh")
    pipeline = plan.pipeline
    if pipeline is None:
        return
    if plan.mesh.size("pp") == 1:
        raise ValueError(f"plan: a pipeline needs an axis 'pp', found the mesh {plan.mesh}; make a plan for this mesh")
    for name, parts in pipeline.holders.items():
        if not all(0 <= part < pipeline.parts for part in parts):
            raise ValueError(
                f"plan: {name} is used by the pipeline stages {list(parts)}, but there are 0..{pipeline.parts - 1}; "
                "make a plan for this model"
            )
