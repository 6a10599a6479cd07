"""`PackedRunner`: the packed graph of a model on this rank of the mesh, with its pools of pages.

    runner.run(rows) -> tokens        build inputs -> [receive] -> graph -> [send], or logits -> choose

It implements `autopar.serving.step.Runner`. A rank without tokens runs one padding token where other replicas need it:
where the graph communicates over data axes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from autopar.ir.graph import set_device
from autopar.ir.mesh import DATA
from autopar.runtime.comm.experts import Experts
from autopar.runtime.comm.p2p import AXIS, Channels, PendingTransfer
from autopar.runtime.exec.lowering import Lowered, Steps, axes_of, bind
from autopar.runtime.mesh.process_groups import Groups
from autopar.runtime.module.served_weights import ServedWeights
from autopar.schedule.order import Action
from autopar.serving.choice import choose
from autopar.serving.pages import most_pages
from autopar.serving.step import Chosen, Row, Step
from autopar.steps.packed import (
    LAST,
    LENGTHS,
    LOGITS,
    POSITIONS,
    ROWS,
    STARTS,
    TOKENS,
    CachedLayer,
    Packed,
    PackedStage,
    SizedValue,
    pages,
    slots,
)

SCRATCH = 0  # the page that padding tokens write to


@dataclass(frozen=True)
class PageCounts:
    """How many pages of ``page_size`` tokens the pools of each window kind have, page 0 included, and the bytes of a
    page over all layers of the kind on the fullest rank."""

    page_size: int
    pages: tuple[int, ...]
    page_bytes: tuple[int, ...]


def page_counts(packed: Packed, page_size: int, cache: int, step_tokens: int) -> PageCounts:
    """How many pages fit into ``cache`` bytes per rank: as many requests of ``max_length`` as possible, each of which
    needs pages of every window kind."""
    ranks: dict[int, list[CachedLayer]] = {}
    for stage in packed.stages:
        ranks.setdefault(stage.rank, []).extend(stage.layers)
    needed = most_pages(packed.windows, page_size, packed.max_length, step_tokens)

    def bytes_of(layers: list[CachedLayer], kind: int) -> int:
        return page_size * sum(layer.bytes_per_token for layer in layers if layer.kind == kind)

    per_rank = [[bytes_of(layers, kind) for kind in range(len(packed.windows))] for layers in ranks.values()]
    largest = tuple(max(of_rank[kind] for of_rank in per_rank) for kind in range(len(packed.windows)))
    requests = min(
        (cache - sum(of_rank)) / max(1, sum(n * size for n, size in zip(needed, of_rank))) for of_rank in per_rank
    )
    return PageCounts(page_size, tuple(1 + max(0, math.floor(requests * n)) for n in needed), largest)


class VocabExchange:
    """How the ranks that hold shards of the vocabulary exchange numbers; see `autopar.serving.choice.choose`."""

    def __init__(self, packed: Packed, groups: Groups) -> None:
        axes = [axis for axis in groups.mesh.sizes if axis in packed.vocabulary_axes and groups.mesh.size(axis) > 1]
        self.vocab = packed.vocabulary
        self._group = groups.group(",".join(axes)) if axes else None
        self.size = groups.size(",".join(axes)) if axes else 1
        self.rank = groups.index(",".join(axes)) if axes else 0

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """The tensors of all ranks, in the order of their shards."""
        if self._group is None:
            return [x]
        x = x.contiguous()
        found = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(found, x, group=self._group)
        return found


class _BoundStage:
    """One stage of the model that this rank runs."""

    def __init__(
        self,
        packed: Packed,
        k: int,
        groups: Groups,
        counts: PageCounts,
        backend: str,
        names: Mapping[str, str],
        experts: Experts | None,
    ) -> None:
        self.stage: PackedStage = packed.stages[k]
        self.number = k
        device = groups.device
        for graph in (self.stage.graph, self.stage.tables):
            if graph is not None and device.type != "cpu":
                set_device(graph.graph, device)
        self._backend, self._groups, self._experts = backend, groups, experts
        self._code: dict[Any, Lowered] = {}  # by the sizes that it is compiled for
        self.tables = bind(self.stage.tables.graph, groups) if self.stage.tables is not None else None
        self.names = names
        self._counts, self._device = counts, device
        self._inputs = list(self.stage.graph.inputs)
        self.pools: dict[str, Tensor] = {}
        self._held: list[Any] = []
        self._changing: list[tuple[int, str]] = []

    def hold(self, values: Mapping[str, Tensor]) -> None:
        """Take parameters and buffers, and make the tables."""
        held = {node: values[name] for node, name in self.names.items() if name in values}
        self.pools = self._new_pools()
        known = {**held, **self.pools}
        if self.tables is not None and self.stage.tables is not None:
            given = [held[name] for name in self.stage.tables.inputs]
            names = [str(name) for name in self.stage.tables.outputs]
            known |= dict(zip(names, self.tables(given), strict=True))
        self._held = [known.get(name) for name in self._inputs]
        self._changing = [(i, name) for i, name in enumerate(self._inputs) if name not in known]

    def _new_pools(self) -> dict[str, Tensor]:
        """Pools of pages, by input."""
        pools: dict[str, Tensor] = {}
        for layer in self.stage.layers:
            shape = (self._counts.pages[layer.kind], self._counts.page_size)
            for name, of_token in ((layer.keys, layer.key_shape), (layer.values, layer.value_shape)):
                pools[name] = torch.zeros(*shape, *of_token, dtype=layer.dtype, device=self._device)
        return pools

    def release(self) -> None:
        """Free pools and tables."""
        self.pools, self._held, self._changing = {}, [], []

    def run(self, values: Mapping[str, Any]) -> list[Tensor]:
        given = self._given(values)
        return list(self._bound(values, given)(given))

    def steps(self, values: Mapping[str, Any]) -> Steps:
        """Run it with a pause wherever it waits for experts."""
        given = self._given(values)
        return self._bound(values, given).steps(given)

    def _given(self, values: Mapping[str, Any]) -> list[Any]:
        given = list(self._held)
        for i, name in self._changing:
            given[i] = values[name]
        return given

    def _bound(self, values: Mapping[str, Any], given: list[Any]) -> Lowered:
        sizes = (values[TOKENS], values[ROWS]) if self._backend == "inductor" else ()
        code = self._code.get(sizes)
        if code is None:
            like = given if sizes else ()
            code = bind(self.stage.graph.graph, self._groups, self._backend, like, experts=self._experts)
            self._code[sizes] = code
        return code


class PackedRunner:
    """See the module's docstring.

    weights: of the model. counts: of pages. backend: "eager" or "inductor".
    step_sizes: numbers of tokens to which steps are padded, in ascending order; empty: none are. most: requests that
    run at a time. experts: who answers for experts that are on other ranks. All ranks of the mesh make theirs at the
    same time.
    """

    has_other_roles = False

    def __init__(
        self,
        packed: Packed,
        groups: Groups,
        weights: ServedWeights,
        counts: PageCounts,
        backend: str = "eager",
        step_sizes: Sequence[int] = (),
        most: int = 64,
        experts: Experts | None = None,
    ) -> None:
        self._most = most
        self.packed, self.groups, self._weights, self._sizes = packed, groups, weights, tuple(step_sizes)
        self.page_size, self.windows = counts.page_size, packed.windows
        self.pages, self.page_bytes = counts.pages, counts.page_bytes
        graphs = [s.graph.graph for s in packed.stages]
        axes, along = axes_of(graphs + [s.tables.graph for s in packed.stages if s.tables is not None])
        groups.make(axes)
        groups.make_channels(along)
        mesh = groups.mesh
        self.replicas, self.stages = mesh.data_size, mesh.size(AXIS)
        self.replica = mesh.dp_rank_and_size(groups.coordinate)
        self.needs_all = any(axis in DATA for name in axes for axis in name.replace("%", "/").split("/")[0].split(","))
        here = groups.coordinate.get(AXIS, 0)
        names = {spec.node: spec.name for spec in packed.signature.inputs}
        self._channels = Channels(groups)
        last = packed.stages[-1].rank
        links = {(a.rank, b.rank) for a, b in zip(packed.stages, packed.stages[1:]) if a.rank != b.rank}
        self._channels.connect(links)
        self._exchange = VocabExchange(packed, groups)
        groups.warm_up(axes)
        self.reporters = tuple(
            next(
                rank for rank, at in enumerate(mesh.coordinates())
                if mesh.dp_rank_and_size(at) == replica and at.get(AXIS, 0) == last
            )
            for replica in range(self.replicas)
        )  # fmt: skip
        self._stages = [
            _BoundStage(packed, k, groups, counts, backend, names, experts)
            for k, s in enumerate(packed.stages)
            if s.rank == here
        ]
        self._inputs = StepInputs(packed, counts.page_size, groups.device)
        self._steps = 0
        self._versions: list[Any] = []
        self.refresh()

    @property
    def traffic(self) -> Any:
        """Bytes sent to other stages so far."""
        return self._channels.traffic

    def refresh(self, changed: bool = False) -> bool:
        """Take the present values of parameters and buffers; whether they have changed, which ``changed`` knows
        already. Tables are made anew, and so are the pools: what they held was of the old values."""
        versions = self._weights.versions()
        if versions == self._versions and not changed:
            return False
        self._versions = versions
        given = {name: x.detach() for name, x in self._weights.values().items()}
        for spec in self.packed.parameters:
            if spec.is_padded and spec.name in given:
                given[spec.name] = spec.padded(given[spec.name], self.groups.mesh, self.groups.coordinate)
        for name, x in self.packed.constants.items():
            if name in given and not torch.equal(given[name], x.to(self.groups.device)):
                raise ValueError(f"serve: the mask {name} has changed since the model was compiled; make a new server")
            given[name] = x.to(self.groups.device)
        with torch.no_grad():
            for stage in self._stages:
                stage.hold(given)
        return True

    def release(self) -> None:
        """Free the pools, the tables and the parameters that were gathered ahead, until the next step."""
        self._versions = []
        for stage in self._stages:
            stage.release()

    def end(self, error: BaseException | None = None) -> None:
        """See `autopar.serving.step.Runner`."""

    @property
    def timeline(self) -> list[Any]:
        """See `autopar.serving.step.Runner`."""
        return []

    # --- a step -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def run(self, step: Step) -> list[Chosen] | None:
        """Run a replica's part of a step. On ranks of the last stage, one `Chosen` per row with a choice; None
        elsewhere."""
        rows = step.rows[self.replica]
        if not (any(step.rows) if self.needs_all else rows):
            return [] if self._is_last else None
        alike = step.rows if self.packed.equal_sizes else (rows,)
        tokens = max(sum(len(row.tokens) for row in of_replica) for of_replica in alike)
        chosen = max(sum(row.choice is not None for row in of_replica) for of_replica in alike)
        values = self._inputs.of(rows, *self._sizes_of(tokens, chosen))
        self._channels.flush()  # of the step before
        self._steps += 1
        for stage in self._stages:
            self._run_stage(stage, values)
        if not self._is_last:
            return None
        return self._chosen(rows, values[LOGITS][0])

    def _chosen(self, rows: Sequence[Row], logits: Tensor) -> list[Chosen]:
        """Of the rows with a choice; ``logits`` [N, V]: of these, in their order, and maybe of padding."""
        choices = [row.choice for row in rows if row.choice is not None]
        return choose(logits[: len(choices)], choices, self._exchange) if choices else []

    @property
    def _is_last(self) -> bool:
        return bool(self._stages) and self._stages[-1].number == len(self.packed.stages) - 1

    def _sizes_of(self, tokens: int, chosen: int) -> tuple[int, int, int]:
        """(tokens, rows of logits, requests) of a step with padding. Steps of one number of tokens have all sizes in
        common, so that code is compiled once, and products round alike."""
        if not self._sizes:
            return max(tokens, 1), max(chosen, 1), 0
        size = next(size for size in self._sizes if size >= tokens)
        return size, min(size, self._most), min(size, self._most) + 1

    def _run_stage(self, stage: _BoundStage, values: dict[str, Any]) -> None:
        k, all_stages = stage.number, self.packed.stages
        if k and all_stages[k - 1].rank != stage.stage.rank:
            pending = self._receive(k, values)
            values |= zip((x.name for x in stage.stage.received), self._channels.wait(pending), strict=True)
        values |= zip(stage.stage.graph.outputs, stage.run(values), strict=True)  # type: ignore[arg-type]
        if k + 1 < len(all_stages) and all_stages[k + 1].rank != stage.stage.rank:
            action = Action(k, "SF", self._steps, peer=k + 1)
            self._channels.send(action, all_stages[k + 1].rank, [values[x.name] for x in stage.stage.sent])

    def _receive(self, k: int, values: Mapping[str, Any]) -> PendingTransfer:
        received: Sequence[SizedValue] = self.packed.stages[k].received
        tensors = [
            torch.empty(x.shape(values[TOKENS], values[ROWS]), dtype=x.dtype, device=self.groups.device)
            for x in received
        ]
        return self._channels.post(Action(k, "RF", self._steps, peer=k - 1), self.packed.stages[k - 1].rank, tensors)


class StepInputs:
    """The inputs of a packed graph for the rows of a step."""

    def __init__(self, packed: Packed, page_size: int, device: torch.device) -> None:
        self._kinds, self._size, self._device = len(packed.windows), page_size, device
        self._longest = -(-packed.max_length // page_size) + 1
        self._tokens = next(s.node for s in packed.signature.inputs if s.name == packed.tokens)

    def of(self, rows: Sequence[Row], count: int, chosen: int, requests: int = 0) -> dict[str, Any]:
        """``count``: of tokens with padding, at least one; the padding is one more request, on the scratch page.
        ``chosen``: of rows of logits with padding, at least one. ``requests``: 0, or how many there are with padding;
        tables then have the pages of the longest request."""
        tokens: list[int] = []
        positions: list[int] = []
        starts, lengths, last = [0], [], []
        for row in rows:
            tokens += row.tokens
            end = row.start + len(row.tokens)
            positions += range(row.start, end)
            starts.append(len(tokens))
            lengths.append(end)
            if row.choice is not None:
                last.append(len(tokens) - 1)
        padding = count - len(tokens)
        if padding:
            tokens += [0] * padding
            positions += [0] * padding
            starts.append(count)
            lengths.append(padding)
        idle = max(0, requests - len(lengths))
        starts += [count] * idle
        lengths += [0] * idle
        last += [0] * (chosen - len(last))
        values: dict[str, Any] = {
            self._tokens: self._put([tokens], torch.int64),
            POSITIONS: self._put(positions, torch.int64),
            STARTS: self._put(starts, torch.int32),
            LENGTHS: self._put(lengths, torch.int32),
            LAST: self._put(last, torch.int64),
            TOKENS: count,
            ROWS: len(last),
        }
        for kind in range(self._kinds):
            values[slots(kind)], values[pages(kind)] = self._of_kind(rows, kind, padding, requests)
        return values

    def _of_kind(self, rows: Sequence[Row], kind: int, padding: int, requests: int) -> tuple[Tensor, Tensor]:
        """The slots of the tokens, and the page tables."""
        size, places = self._size, list[int]()
        width = max([1, -(-padding // size), *(len(row.pages[kind]) for row in rows)])
        width = max(width, self._longest if requests else 0)
        table = np.zeros((max(requests, len(rows) + bool(padding)), width), np.int32)
        for i, row in enumerate(rows):
            held = row.pages[kind]
            table[i, : len(held)] = held
            if len(row.tokens) == 1:
                places.append(held[row.start // size] * size + row.start % size)
            else:
                places += [held[p // size] * size + p % size for p in range(row.start, row.start + len(row.tokens))]
        places += [SCRATCH * size + i % size for i in range(padding)]
        return self._put(places, torch.int64), torch.from_numpy(table).to(self._device)

    def _put(self, numbers: Sequence[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(numbers, dtype=dtype, device=self._device)
