"""Runs a compiled model for all ranks of a mesh in one process, and compares loss and gradients with eager.

result = check_model(model, batch, Mesh.of(dp=2, tp=2), Options(zero=3))
assert result.worst < 1e-10
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.front_end import as_captured
from autopar.compile.model import compile_model
from autopar.ir.batch import without_static_inputs
from autopar.ir.graph import placeholders
from autopar.ir.mesh import Mesh
from autopar.ir.placement import INVARIANT, Partial, Placement, Placements, join, nested_piece, piece, stored_piece
from autopar.ir.signature import ParameterSpec
from autopar.options import Options
from autopar.steps.graphs import Compiled, StepGraph, earlier_sum, is_a, of
from autopar.testing.lockstep import in_lockstep
from autopar.testing.reference import LIMIT, Errors, Expected, compare_step, difference, eager


def scatter(value: Tensor, placements: Placements, mesh: Mesh) -> list[Tensor]:
    """One shard per rank; the addends of a Partial are random."""
    pieces: dict[tuple[tuple[str, int], ...], Tensor] = {(): value}
    for axis, ranks in mesh.cut_order.items():
        p = placements.get(axis, INVARIANT)
        pieces = {
            (*at, (axis, i)): x for at, whole in pieces.items() for i, x in enumerate(_parts(whole, p, int(ranks)))
        }
    found = {frozenset(at): x for at, x in pieces.items()}
    return [found[_key(c, mesh)].contiguous() for c in mesh.coordinates()]


def _parts(value: Tensor, p: Placement, ranks: int) -> list[Tensor]:
    if not isinstance(p, Partial):
        return [piece(value, p, ranks, i) for i in range(ranks)]
    if value.is_floating_point() or value.is_complex():
        addends = [torch.randn_like(value) for _ in range(ranks - 1)]
    else:
        addends = [torch.randint_like(value, -3, 4) for _ in range(ranks - 1)]
    return [*addends, value - sum(addends)]


def _key(coordinate: Mapping[str, int], mesh: Mesh) -> frozenset[tuple[str, int]]:
    return frozenset((a, coordinate[a]) for a in mesh.cut_order)


def whole_of(pieces: Sequence[Tensor], placements: Placements, mesh: Mesh) -> Tensor:
    """The global value from the shards of all ranks. Asserts that replicas are equal."""
    current = {_key(c, mesh): x for c, x in zip(mesh.coordinates(), pieces, strict=True)}
    for axis, ranks in reversed(list(mesh.cut_order.items())):
        p = placements.get(axis, INVARIANT)
        joined = {}
        for rest in {frozenset(k for k in key if k[0] != axis) for key in current}:
            group = [current[rest | {(axis, i)}] for i in range(int(ranks))]
            if str(p) in "RI":
                for other in group[1:]:
                    same = torch.allclose(group[0], other, rtol=1e-11, atol=1e-11, equal_nan=True)
                    assert same, f"copies on axis {axis!r} differ by {(group[0] - other).abs().max():.1e}"
            joined[rest] = join(group, p)
        current = joined
    return next(iter(current.values()))


@dataclass
class Checked:
    """A compiled model, and the errors of each rank against eager."""

    compiled: Compiled
    ranks: list[Errors]

    @property
    def errors(self) -> dict[str, float]:
        """The largest error of any rank in the gradient of each parameter."""
        names = dict.fromkeys(n for of_rank in self.ranks for n in of_rank.gradients)
        return {n: max(of_rank.gradients.get(n, 0.0) for of_rank in self.ranks) for n in names}

    @property
    def worst(self) -> float:
        return max(of_rank.worst for of_rank in self.ranks)

    def __str__(self) -> str:
        return "\n".join(f"rank {i}: {errors}" for i, errors in enumerate(self.ranks) if not errors.worst < LIMIT)


def check_model(
    model: nn.Module, batch: Mapping[str, Any], mesh: Mesh, options: Options | None = None, **facts: Any
) -> Checked:
    """Compile, run all ranks and microbatches, and compare with eager, which draws the same random numbers. ``facts``:
    arguments of `compile_model`."""
    compiled = compile_model(model, batch, mesh, options or Options(), lift_to_float64=True, outputs=(), **facts)
    seed = 0 if any(s.kind == "seed" for s in compiled.signature.inputs) else None
    return Checked(compiled, MeshRun(compiled, model, batch, mesh).errors(eager(model, batch, seed)))


class MeshRun:
    """One training step of a compiled model on all ranks. ``seed``: of its dropout."""

    def __init__(
        self, compiled: Compiled, model: nn.Module, batch: Mapping[str, Any], mesh: Mesh, seed: int = 0
    ) -> None:
        given = without_static_inputs(as_captured(model, batch, compiled.plan.options.static_inputs))
        self.compiled, self.batch, self.mesh, self.seed = compiled, given, mesh, seed
        self.count = compiled.plan.options.microbatches
        self.cut_order = mesh.with_microbatches(self.count).cut_order
        self.buffers: list[dict[str, Tensor]] = []  # written by the last forward, on every rank
        self.specs = {s.node: s for s in compiled.local.meta["signature"].inputs}
        self.specs |= {s.node: s for s in compiled.signature.inputs}
        self.placed = {p.name: p.placements for p in compiled.parameters}
        self.state = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
            **compiled.local.meta.get("constants", {}),
        }

    def feed(self, names: Sequence[str], rank: int, microbatch: int, known: Mapping[str, Any]) -> list[Any]:
        """Values of a step graph's placeholders on one rank."""
        return [known[n] if n in known else self._value(n, rank, microbatch) for n in names]

    def _value(self, name: str, rank: int, microbatch: int) -> Any:
        spec = self.specs[self.compiled.stage.aliases.get(name, name)]
        at = {**self.mesh.coordinate(rank), "mb": microbatch}
        if spec.kind == "parameter":
            return nested_piece(self.state[spec.name].detach(), self.placed[spec.name], self.mesh.cut_order, at).clone()
        if spec.kind in ("buffer", "constant"):
            x = self.state[spec.name]
            return x.double() if x.dtype == torch.float32 else x
        if spec.kind == "input":
            return nested_piece(_at(self.batch, spec.name), self.compiled.plan.inputs[spec.name], self.cut_order, at)
        assert spec.kind in ("microbatch", "seed"), spec
        return torch.tensor(microbatch if spec.kind == "microbatch" else self.seed)

    def _totals(self) -> list[dict[str, Any]]:
        """Run the pre-pass for global statistics, one after the other, on every rank."""
        prologue, known = self.compiled.prologue, [dict[str, Any]() for _ in range(self.mesh.world_size)]
        if prologue is not None:
            self._add_up(StepGraph(prologue.graph, prologue.inputs, list(prologue.totals)), prologue.totals, known)
        kept = [[dict[str, Any]() for _ in known] for _ in range(self.count)]
        for one in self.compiled.pipeline.pre_pass:
            (graph,) = one.graphs
            assert graph is not None
            self._add_up(graph, one.totals, known, kept)
        return known

    def _add_up(
        self,
        graph: StepGraph,
        totals: Sequence[str],
        known: list[dict[str, Any]],
        kept: Sequence[list[dict[str, Any]]] = (),
    ) -> None:
        """Add sums over microbatches to ``known`` and other results to ``kept``, on every rank."""
        sums: list[dict[str, Any]] = [{} for _ in known]
        for mb in range(self.count):
            given = [{**a, **b} for a, b in zip(known, kept[mb] if kept else [{}] * len(known), strict=True)]
            for rank, made in enumerate(self._run(graph, mb, given)):
                for name, x in made.items():
                    if name in totals:
                        sums[rank][name] = sums[rank][name] + x if name in sums[rank] else x
                    else:
                        kept[mb][rank][name] = x
        for of_rank, found in zip(known, sums, strict=True):
            of_rank |= found

    @torch.no_grad()
    def step(self) -> tuple[list[float], dict[str, list[Tensor]]]:
        """Sum of the losses per rank; parameter name -> its reduced gradient on every rank."""
        stage, world = self.compiled.stage, range(self.mesh.world_size)
        known = self._totals()
        losses = [0.0 for _ in world]
        sums: list[dict[str, Any]] = [{} for _ in world]
        for mb in range(self.count):
            made = self._run((stage.gather_forward if mb == 0 else None) or stage.forward, mb, known)
            self.buffers = [{name: o[of] for of, name in stage.mutations.items()} for o in made]
            if stage.gather is not None and mb == 0:
                known = [
                    {**a, **{n: b[n] for n in stage.gather.outputs if n}} for a, b in zip(known, made, strict=True)
                ]
            losses = [total + sum(float(o[k]) for k in stage.losses) for total, o in zip(losses, made, strict=True)]
            last = mb == self.count - 1
            graph = (stage.backward_reduce if last else None) or stage.backward
            if graph is None:
                continue
            ones = {f"grad:{name}": torch.ones((), dtype=torch.float64) for name in stage.losses}
            none = {
                name: torch.zeros(x.meta["val"].shape, dtype=x.meta["val"].dtype)
                for name, x in zip(graph.inputs, placeholders(graph.graph), strict=True)
                if is_a(name, "sum")
            }
            earlier = [none | {earlier_sum(of(n)): x for n, x in of_rank.items()} for of_rank in sums]
            given = [{**a, **b, **c, **ones} for a, b, c in zip(known, made, earlier, strict=True)]
            found = self._run(graph, mb, given)
            for own, values in zip(found, given, strict=True):  # sums are donated
                check_alone(list(own.values()), [x for name, x in values.items() if not is_a(name, "sum")])
            sums = found
        used = {n: n.removeprefix("grad:") for n in sums[0]}
        names = {n: self.specs[stage.aliases.get(name, name)].name for n, name in used.items()}
        return losses, {name: [of_rank[n] for of_rank in sums] for n, name in names.items()}

    def wrong_buffers(self, expected: Expected) -> list[str]:
        """Buffers and frozen parameters that differ from one process after the last step, on any rank."""
        wrong = set()
        for own, at in zip(self.buffers, self.mesh.coordinates(), strict=True):
            for name, x in own.items():
                right = nested_piece(expected.buffers[name], self.placed.get(name, {}), self.mesh.cut_order, at)
                wrong |= set() if difference(x, right) < LIMIT else {name}
        return sorted(wrong)

    def errors(self, expected: Expected) -> list[Errors]:
        """Run a step and compare it with one process, on every rank."""
        losses, gradients = self.step()
        found: list[Errors] = []
        for rank, at in enumerate(self.mesh.coordinates()):

            def cut(spec: ParameterSpec, whole: Tensor, at: Mapping[str, int] = at) -> Tensor:
                return stored_piece(whole, spec.placements, self.mesh.cut_order, at)

            specs = {p.name: p for p in self.compiled.parameters}
            pieces = {
                name: x if (x := of_ranks[rank]) is None else specs[name].cropped(x, self.mesh, at)
                for name, of_ranks in gradients.items()
            }
            found.append(compare_step(losses[rank], pieces, expected, self.compiled.parameters, cut))
        return found

    def _run(self, step: StepGraph, mb: int, known: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Results of a step graph by name on every rank."""
        given = [self.feed(step.inputs, r, mb, values) for r, values in enumerate(known)]
        out = in_lockstep(step.graph, given, self.mesh)
        return [{n: x for n, x in zip(step.outputs, values, strict=True) if n is not None} for values in out]


def check_alone(gradients: Sequence[Tensor | None], inputs: Sequence[Any] = ()) -> None:
    """Asserts that each gradient has contiguous storage to itself."""
    taken = {x.untyped_storage().data_ptr() for x in inputs if isinstance(x, Tensor) and x.numel()}
    for g in (g for g in gradients if g is not None and g.numel()):
        storage = g.untyped_storage()
        assert g.is_contiguous() and storage.nbytes() == g.nbytes, f"a gradient {list(g.shape)} is part of a storage"
        assert storage.data_ptr() not in taken, f"a gradient {list(g.shape)} shares its storage"
        taken.add(storage.data_ptr())


def _at(batch: Any, path: str) -> Any:
    """'past.0' -> batch['past'][0]."""
    for part in path.split("."):
        batch = batch[int(part)] if isinstance(batch, (list, tuple)) else batch[part]
    return batch
