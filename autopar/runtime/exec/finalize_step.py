"""The end of a step: stages exchange gradients of parameters that several hold, losses, new buffers and outputs.

All ranks of the pp axis call it at the same point. A rank that is alone on it has everything already.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.ir.signature import ParameterSpec, in_buckets
from autopar.ir.traffic import Ledger, Traffic, add_ledgers, traffic_of
from autopar.runtime.comm.collectives import PendingCollective, all_reduce, broadcast, finish
from autopar.runtime.comm.p2p import AXIS
from autopar.runtime.exec.value_slots import Routes
from autopar.runtime.mesh.process_groups import Groups
from autopar.schedule.order import Order
from autopar.steps.graphs import Compiled
from autopar.steps.of_rank import output_types, results_of


class StepFinalizer:
    """The end of one compiled step. ``results``: names of the outputs of F that a rank keeps for it. ``traffic``:
    what this rank has sent so far. ``axes``: over which it exchanges. ``trained``: placeholders of the stored
    parameters of which some stage makes gradients, in the order of the model."""

    def __init__(self, compiled: Compiled, order: Order, groups: Groups) -> None:
        self._groups, self._alone = groups, groups.mesh.size(AXIS) == 1
        pipeline = compiled.pipeline
        self._results = results_of(pipeline, order, compiled.train and not self._alone)
        self._gradients = SharedGradients(compiled, groups)
        self._losses = {
            name: kind for part in pipeline.parts for name, (_, kind) in output_types(part, part.losses).items()
        }
        self.results: Collection[str] = self._results
        self.trained = self._gradients.trained
        self.axes = {AXIS, *self._gradients.axes} if not self._alone else set[str]()
        self.traffic: Ledger = {}

    def _count(self, axis: str, kind: str, sent: int) -> None:
        self.traffic = add_ledgers(self.traffic, {(axis, kind): Traffic(1, sent)})

    def gradients(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """By placeholder of the stored parameter, summed over the stages that hold it."""
        return self._gradients.sum(own, self._count)

    def losses(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every rank has all losses; they travel as one vector of float64."""
        if self._alone or not self._losses:
            return dict(own)
        vector = torch.zeros(len(self._losses), dtype=torch.float64, device=self._groups.device)
        for i, name in enumerate(self._losses):
            if name in own:
                vector[i] = own[name]
        total = finish(all_reduce(self._groups, "losses", AXIS, "sum", in_place=True)(vector))
        self._count(AXIS, "all_reduce", traffic_of("all_reduce", vector.shape, vector.dtype, self._groups.size(AXIS)))
        return {name: x.to(dtype) for (name, dtype), x in zip(self._losses.items(), total.unbind(), strict=True)}

    @property
    def totals(self) -> Callable[[list[Tensor]], list[Tensor]] | None:
        """Sums what stages have of totals, in place; None where there is one stage."""
        return None if self._alone else self._summed

    def _summed(self, values: list[Tensor]) -> list[Tensor]:
        out = []
        for x in values:
            whole = x.to(torch.uint8) if x.dtype == torch.bool else x.contiguous()
            out.append(finish(all_reduce(self._groups, "totals", AXIS, "sum", in_place=True)(whole)).to(x.dtype))
            self._count(AXIS, "all_reduce", traffic_of("all_reduce", x.shape, whole.dtype, self._groups.size(AXIS)))
        return out

    def outputs(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """New buffers and outputs, from the ranks that made them. ``own``: what this rank has kept."""
        if self._alone:
            return dict(own)
        pending = {}
        for name, (source, shape, dtype) in self._results.items():
            mine = source == self._groups.coordinate[AXIS]
            x = own[name] if mine else torch.empty(shape, dtype=dtype, device=self._groups.device)
            pending[name] = broadcast(self._groups, name, AXIS, source)(x)
            self._count(AXIS, "broadcast", x.nbytes * mine)
        return {name: finish(p) for name, p in pending.items()}


class SharedGradients:
    """Sums the gradients of parameters that several ranks of the pp axis hold, over exactly these: tied weights of
    several parts, and both copies of a part under dual_pipe. A rank that holds one takes part, whether its parts use
    it in this step or not: all copies have the same gradient."""

    def __init__(self, compiled: Compiled, groups: Groups) -> None:
        self._groups = groups
        self._specs = {p.name: p for p in compiled.parameters}
        nodes = {s.name: s.node for s in compiled.signature.inputs if s.kind == "parameter"}
        parts, routes = compiled.pipeline.parts, Routes(compiled.pipeline)
        made = {name for i in range(len(parts)) for name, _, _ in routes.stored_gradients(i)}
        self.trained = [nodes[name] for name in self._specs if nodes[name] in made]
        self._buckets: list[tuple[str, list[tuple[str, ParameterSpec]]]] = []
        together: dict[tuple[tuple[int, ...], torch.dtype], list[tuple[str, ParameterSpec]]] = {}
        for name, spec in self._specs.items():
            if len(spec.ranks) > 1 and nodes[name] in made:
                together.setdefault((spec.ranks, spec.dtype), []).append((nodes[name], spec))
        for (coordinates, _), members in together.items():
            axis = groups.subset(AXIS, coordinates)  # on all ranks
            if groups.coordinate[AXIS] in coordinates:
                sizes = [spec.nbytes(groups.mesh) for _, spec in members]
                for bucket in in_buckets(sizes, compiled.plan.options.bucket_bytes):
                    self._buckets.append((axis, [members[i] for i in bucket]))

    @property
    def axes(self) -> set[str]:
        """Axis expressions of this rank's sums."""
        return {axis for axis, _ in self._buckets}

    def sum(self, gradients: dict[str, Tensor], count: Any) -> dict[str, Tensor]:
        """By placeholder of the stored parameter; one that is not here is zero. ``count`` gets (axis, kind, bytes)."""
        pending = [self._start(gradients, axis, bucket, count) for axis, bucket in reversed(self._buckets)]
        out = dict(gradients)
        for _, bucket in self._buckets:
            total = finish(pending.pop()).view(-1)
            sizes = [torch.Size(spec.local_shape(self._groups.mesh)).numel() for _, spec in bucket]
            for (node, spec), x in zip(bucket, total.split(sizes), strict=True):
                target = out[node] = self._target(out.get(node), spec)
                if target.data_ptr() != x.data_ptr():
                    target.view(-1).copy_(x)
        return out

    def _start(
        self, gradients: Mapping[str, Tensor], axis: str, bucket: list[tuple[str, ParameterSpec]], count: Any
    ) -> PendingCollective:
        pieces = [self._piece(gradients, node, spec) for node, spec in bucket]
        flat = torch.cat([x.reshape(-1) for x in pieces]) if len(pieces) > 1 else pieces[0].contiguous()
        count(AXIS, "all_reduce", traffic_of("all_reduce", flat.shape, flat.dtype, self._groups.size(axis)))
        return all_reduce(self._groups, f"gradient of {bucket[0][1].name}", axis, "sum", in_place=True)(flat)

    def _target(self, found: Tensor | None, spec: ParameterSpec) -> Tensor:
        """Where a sum is written: the rank's own gradient, where it can be."""
        if found is not None and found.dtype == spec.dtype and found.is_contiguous():
            return found
        shape = spec.local_shape(self._groups.mesh)
        return torch.empty(shape, dtype=spec.dtype, device=self._groups.device)

    def _piece(self, gradients: Mapping[str, Tensor], node: str, spec: ParameterSpec) -> Tensor:
        found = gradients.get(node)
        if found is None:
            return torch.zeros(spec.local_shape(self._groups.mesh), dtype=spec.dtype, device=self._groups.device)
        return found.to(spec.dtype)
