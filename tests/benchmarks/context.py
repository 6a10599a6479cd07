"""One attention over a sequence that is sharded on ranks: the problem, its reference, and autopar's algorithms.

A `Side` runs it in one way on this rank. All get the same tensors, stored [batch, positions, heads, width], as
projections leave them; who wants [batch, heads, positions, width] gets that view.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import autopar.passes.attention  # noqa: F401 - fills the registry
from autopar.attention import operator
from autopar.attention.algorithm_table import ALGORITHMS
from autopar.attention.layouts import CONTIGUOUS, LAYOUTS, Blocks
from autopar.attention.problem import Mask, Problem, kv_repeats, spans_of
from autopar.ir.traffic import traffic_of
from autopar.runtime.comm.collectives import all_to_all, finish
from autopar.runtime.comm.context_parallel_comm import AxisComm
from autopar.runtime.mesh.process_groups import Groups

Result = tuple[Tensor, Tensor, Tensor, Tensor]  # out and the gradients of q, k, v: [batch, heads, positions, width]
AXIS = "cp"


@dataclass(frozen=True)
class Case:
    """Sizes of an attention of one sequence, and over how many ranks it is cut."""

    ranks: int
    length: int
    heads: int
    kv_heads: int
    dtype: torch.dtype = torch.float32
    causal: bool = True
    width: int = 64

    @property
    def scale(self) -> float:
        return float(self.width**-0.5)

    def problem(self, blocks: Blocks) -> Problem:
        """As an algorithm sees it."""
        return Problem(
            1, self.heads, self.kv_heads, self.length, self.length, self.width, self.width, self.dtype, self.ranks,
            Mask(self.causal), blocks, blocks,
        )  # fmt: skip

    def tensors(self) -> list[Tensor]:
        """q, k, v and the gradient of the output, whole: [1, positions, heads, width]."""
        seeded = torch.Generator().manual_seed(2)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return [torch.randn(1, self.length, n, self.width, generator=seeded).to(self.dtype) for n in heads]

    def own(self, positions: Tensor) -> list[Tensor]:
        """A rank's part of `tensors`."""
        return [x.index_select(1, positions).contiguous() for x in self.tensors()]

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        mask = "causal" if self.causal else "full"
        return f"{self.ranks} ranks, {self.length} positions, {self.heads} / {self.kv_heads} heads, {kind}, {mask}"


@dataclass
class Side:
    """One way to compute a case on this rank, from no gradients. positions: those that this rank holds, in order.
    held: what exists before. ledger: bytes that its own books say were sent so far (peers have none)."""

    forward: Callable[[], Tensor]
    both: Callable[[], Result]
    positions: Tensor
    held: list[Tensor]
    ledger: Callable[[], int] | None = None


def positions_of(case: Case, blocks: Blocks, rank: int) -> Tensor:
    """What a rank holds of a sequence that is dealt in blocks."""
    return torch.cat([torch.arange(s.start, s.stop) for s in spans_of(case.length, blocks, case.ranks, rank)])


# --- one process --------------------------------------------------------------------------------------


def one_process(case: Case, dtype: torch.dtype | None = None) -> Side:
    """torch's scaled_dot_product_attention of the whole sequence; the values in another dtype, if one is given."""
    tensors = [x.to(dtype or case.dtype) for x in case.tensors()]
    return differentiated(
        partial(heads_first, partial(sdpa, case.causal, case.scale)), tensors, torch.arange(case.length)
    )


def reference(case: Case) -> Result:
    """The results of the whole sequence on one process, float32 from the values in the case's dtype."""
    return one_process(case, torch.float32).both()


def sdpa(causal: bool, scale: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's attention, of [batch, heads, positions, width]."""
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=gqa)


def heads_first(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """An attention of [batch, heads, positions, width] applied to [batch, positions, heads, width]."""
    return attend(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def differentiated(attend: Callable[..., Tensor], tensors: list[Tensor], positions: Tensor) -> Side:
    """A side whose backward is autograd's. ``attend`` takes and gives [batch, positions, heads, width]."""
    leaves, grad = [x.requires_grad_() for x in tensors[:3]], tensors[3]

    def forward() -> Tensor:
        return attend(*leaves)

    def both() -> Result:
        for x in leaves:
            x.grad = None
        out = attend(*leaves)
        out.backward(grad)
        found: Any = [x.grad for x in leaves]
        return tuple(x.transpose(1, 2) for x in (out.detach(), *found))  # type: ignore[return-value]

    return Side(forward, both, positions, tensors)


# --- ours ---------------------------------------------------------------------------------------------


class Missing(Exception):
    """Something is not installed, or cannot compute a case: says why."""


def algorithms() -> dict[str, Callable[[Case, Groups], Side]]:
    """Every registered algorithm, by the name of its row."""
    return {f"autopar {name}": partial(ours, name=name) for name in ALGORITHMS}


def ours(case: Case, groups: Groups, name: str) -> Side:
    """An algorithm, over the mesh's own Comm."""
    algorithm = ALGORITHMS[name]
    blocks = LAYOUTS[algorithm.layouts[0]] if case.causal else CONTIGUOUS
    problem = case.problem(blocks)
    if refusal := algorithm.refusal(problem):
        raise Missing(refusal)
    positions = positions_of(case, blocks, groups.rank)
    run = _Ours(case, groups, name, blocks, algorithm.head_ranks(problem))
    *inputs, grad = (x.transpose(1, 2) for x in case.own(positions))
    return Side(
        lambda: run.forward(*inputs)[0], lambda: run.both(inputs, grad), positions, [*inputs, grad], lambda: run.sent
    )


class _Ours:
    """`autopar.attention.operator.attention_of_piece` and its backward, run by hand: heads for sequence among
    neighbours if the algorithm wants that, and the algorithm over the others."""

    def __init__(self, case: Case, groups: Groups, name: str, blocks: Blocks, head_ranks: int) -> None:
        self.groups, self.head_ranks, self.blocks = groups, head_ranks, list(blocks)
        self.times = kv_repeats(case.heads, case.kv_heads, head_ranks)
        self.axis = f"{AXIS}%{head_ranks}" if head_ranks < case.ranks else AXIS
        rest = case.ranks // head_ranks
        along = AXIS if head_ranks == 1 else f"{AXIS}/{head_ranks}"
        self.facts = (*[None] * 5, case.causal, 0, 0, 0, case.scale, 0.0, 0.0, 0, [], [], [])
        self.how = (name, name, self.blocks, self.blocks, along, rest)
        self.comm = AxisComm(groups, along, name) if rest > 1 else None
        self.exchanged = 0

    @property
    def sent(self) -> int:
        return self.exchanged + (sum(t.bytes for t in self.comm.traffic.values()) if self.comm else 0)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """The output, and what the backward needs."""
        if self.times > 1:
            k, v = (x.repeat_interleave(self.times, 1) for x in (k, v))
        q, k, v = self._to_heads([q, k, v])
        if self.comm:
            out, lse = operator.forward_over_ranks(self.comm, q, k, v, *self.facts, *self.how)
        else:
            out, lse = torch.ops.autopar.attention(q, k, v, *self.facts)
        return *self._to_sequence([out]), q, k, v, out, lse

    def both(self, inputs: list[Tensor], grad: Tensor) -> Result:
        """The output and the gradients."""
        result, *saved = self.forward(*inputs)
        (grad,) = self._to_heads([grad])
        if self.comm:
            found = list(operator.backward_over_ranks(self.comm, grad, *saved, *self.facts, *self.how, False)[:3])
        else:
            found = list(torch.ops.autopar.attention_backward(grad, *saved, *self.facts, False)[:3])
        to_q, to_k, to_v = self._to_sequence(found)
        if self.times > 1:
            to_k, to_v = (x.unflatten(1, (-1, self.times)).sum(2) for x in (to_k, to_v))
        return result, to_q, to_k, to_v

    def _to_heads(self, tensors: list[Tensor]) -> list[Tensor]:
        return self._exchange(tensors, (2, self.blocks), (1, []))

    def _to_sequence(self, tensors: list[Tensor]) -> list[Tensor]:
        return self._exchange(tensors, (1, []), (2, self.blocks))

    def _exchange(
        self, tensors: list[Tensor], source: tuple[int, list[int]], target: tuple[int, list[int]]
    ) -> list[Tensor]:
        """From one cut to another, all at once. Takes the tensors out of the list, so that they are not kept."""
        if self.head_ranks == 1:
            return tensors
        start = all_to_all(self.groups, "heads", *source, *target, self.axis)
        pending = []
        while tensors:
            x = tensors.pop(0)
            self.exchanged += traffic_of("all_to_all", tuple(x.shape), x.dtype, self.head_ranks)
            pending.append(start(x))
        del x
        return [finish(pending.pop(0)) for _ in range(len(pending))]
