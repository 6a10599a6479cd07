"""Lengths of the token slices: the user's, equal ones, or TeraPipe's dynamic program on estimated slice times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule, Node

from autopar.cost.flops import flops
from autopar.cost.hardware import DEFAULT, Device
from autopar.cost.topology import Topology
from autopar.ir.graph import arguments, calls_of, describe, is_call, nbytes, shape, tensor_operands
from autopar.ir.mesh import Mesh
from autopar.ir.storages import shares_storage
from autopar.options import Options
from autopar.planner.pipeline.terapipe import best_slices

BACKWARD = 2.0  # backward time relative to forward
ATTENTION = torch.ops.autopar.attention.default
GRID = 8  # tokens; slices begin at multiples of it where the sequence is long enough


def token_count(gm: GraphModule) -> int:
    """The tokens of the sequence: the queries of causal attention. Raises ValueError unless there is one sequence."""
    attentions = calls_of(gm.graph, ATTENTION)
    causal = {shape(arguments(n)["q"])[2] for n in attentions if arguments(n)["causal"]}
    if len(causal) != 1:
        found = f"attention over {sorted(causal)} tokens" if causal else "none"
        if attentions and not causal:
            found = f"{describe(attentions[0])} without a causal flag"
        raise ValueError(
            f"token_slices: slicing the tokens needs causal attention over one sequence, found {found}; use a schedule "
            "without token slices"
        )
    return causal.pop()


def slice_unit(options: Options, mesh: Mesh) -> int:
    """The length of a slice is a multiple of this, because sequence parallelism shards each slice."""
    return mesh.size("tp") if options.sequence_parallel else 1


def slice_lengths(
    asked: int | tuple[int, ...], total: int, unit: int, time: Callable[[], tuple[tuple[int, ...], str]]
) -> tuple[tuple[int, ...], str]:
    """(lengths, reason) for ``total`` tokens. asked: a number of slices, their lengths, or 0 for those of ``time()``.
    unit: lengths are multiples of it.

    Raises ValueError for lengths that do not sum to ``total`` or are not multiples of ``unit``, and too many slices.
    """
    if isinstance(asked, tuple):
        lengths, reason = asked, "the user's choice"
    elif asked:
        base, more = divmod(total // unit, asked)
        lengths = tuple((base + (i < more)) * unit for i in range(asked))
        reason = f"{asked} equal slices, as requested"
    else:
        lengths, reason = time()
    check_lengths(lengths, total, unit)
    return lengths, reason


def check_lengths(lengths: Sequence[int], total: int, unit: int) -> None:
    """Raises ValueError for lengths that do not sum to the tokens, or are not multiples of the unit."""
    if sum(lengths) != total or min(lengths) < 1:
        shown = ", ".join(map(str, lengths)) or "()"
        raise ValueError(
            f"token_slices: slices {shown} sum to {sum(lengths)}, the sequence has {total} "
            f"tokens; give positive lengths that sum to {total}, or their number, at most {total // unit}"
        )
    if any(n % unit for n in lengths):
        raise ValueError(
            f"token_slices: sequence parallelism shards each slice over {unit} ranks, found slices "
            f"{', '.join(map(str, lengths))}; use multiples of {unit}"
        )


def best_lengths(
    parts: Sequence[Sequence[Node]],
    total: int,
    microbatches: int,
    unit: int = 1,
    links: Topology | None = None,
    device: Device = DEFAULT,
) -> tuple[tuple[int, ...], str]:
    """(lengths, reason): the dynamic program (TeraPipe, Eq. 6 to 8) on the estimated times of the slowest stage.

    parts: main nodes of each stage of a global graph, all microbatches together. links: those of the axis pp, if the
    user names them.
    """
    grid = max(GRID, unit) if total >= 8 * GRID else unit
    times = [SliceEstimate(nodes, total, microbatches, links, device) for nodes in parts]
    slowest = max(times, key=lambda t: float(t(1, np.array([total]), np.array([0]))[0]))
    found = best_slices(total, len(parts), slowest, microbatches, 1, grid)
    lengths = found.groups[0][1]
    whole = microbatches * slowest(1, np.array([total]), np.array([0]))[0]
    whole += (len(parts) - 1) * whole / microbatches
    return tuple(map(int, lengths)), (
        f"least estimated time of {len(parts)} stages: {found.total:.3g} s, {whole:.3g} s without slices"
    )


class SliceEstimate:
    """t(batch, length, context) of a stage, a roofline per node: products and bytes of tokens grow with the length,
    weights are read once per slice, attention also reads the context, and launches take as long for any length. The
    stage's outputs are sent over ``links``, and their gradients come back."""

    def __init__(
        self, nodes: Sequence[Node], total: int, microbatches: int, links: Topology | None, device: Device
    ) -> None:
        self.rows: list[tuple[float, float, float, float, float]] = []
        self.launch, own = device.launch, set(nodes)
        sent = sum(nbytes(n) for n in nodes if any(user not in own for user in n.users))
        self.wire = 2 * sent / (total * microbatches) / links.bandwidth if links is not None else 0.0
        for node in nodes:
            if shares_storage(node):
                continue
            attention = is_call(node, ATTENTION)
            dtype, share = _dtype(node), 1.0 / (total * microbatches)
            speed = device.peak(dtype) * device.attention_share(False) if attention else device.speed(dtype)
            work = flops(node) / speed * share
            fixed = sum(nbytes(x) for x in tensor_operands(node) if _is_weight(x)) / device.memory
            moved = (nbytes(node) + sum(nbytes(x) for x in tensor_operands(node) if not _is_weight(x))) * share
            # the products of a whole causal attention are those of total / 2 keys per query
            pairs = work * 2.0 / total if attention else 0.0
            keys = sum(nbytes(arguments(node)[k]) for k in "kv") * share / device.memory if attention else 0.0
            self.rows.append((0.0 if attention else work, pairs, fixed, moved / device.memory, keys))
        self.latency = 2 * (links or device.card).latency

    def __call__(self, batch: int, lengths: Any, contexts: Any) -> Any:
        n, c = np.asarray(lengths, dtype=np.float64), np.asarray(contexts, dtype=np.float64)
        time = np.zeros(np.broadcast(n, c).shape)
        for work, pairs, fixed, moved, keys in self.rows:
            compute = batch * (work * n + pairs * n * (c + (n + 1) / 2))
            read = fixed + batch * (moved * n + keys * c)
            time = time + np.maximum(np.maximum(compute, read), self.launch)
        return time * (1 + BACKWARD) + self.latency + self.wire * batch * n


def _is_weight(x: Node) -> bool:
    return x.op == "placeholder"


def _dtype(node: Node) -> torch.dtype:
    operands = tensor_operands(node)
    dtype: torch.dtype = (operands[0] if operands else node).meta["val"].dtype
    return dtype
