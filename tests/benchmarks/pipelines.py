"""One Llama as a pipeline, twice: autopar's executor, and torch.distributed.pipelining with stages written by hand.

Both have the same cuts, microbatches, schedule and weights. A `Side` runs a step, says what it sent over every
boundary between ranks, and how long it did something else than computing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Workload
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor

from autopar.adapters.copying.fake import skeleton_of
from autopar.compile.model import compile_model
from autopar.ir.mesh import Mesh
from autopar.models import hf as hf  # knows transformers models
from autopar.options import Options
from autopar.planner.pipeline.step_order import make_order
from autopar.runtime.exec.executor import Executor
from autopar.runtime.mesh.process_groups import Groups, init_mesh
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.schedule.order import COMPUTE, Order
from autopar.schedule.request import SCHEDULES
from autopar.steps.graphs import Compiled

PEERS: dict[str, Any] = {  # the same schedules on both sides
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zb_v": schedules.ScheduleZBVZeroBubble,
    "dual_pipe_v": schedules.ScheduleDualPipeV,
}


@dataclass(frozen=True)
class Case:
    """A model on some ranks, cut for ``chunks`` parts per rank; twice as many microbatches as ranks."""

    work: Workload
    ranks: int
    chunks: int

    @property
    def microbatches(self) -> int:
        return 2 * self.ranks

    @property
    def starts(self) -> list[int]:
        """The layer with which each part begins; the first part has the embedding, the last the head."""
        parts = self.ranks * self.chunks
        return [k * self.work.layers // parts for k in range(parts)]

    @property
    def boundary(self) -> int:
        """Bytes that a boundary between parts passes each way in a step: the hidden states of the whole batch."""
        return self.work.batch * self.work.length * self.work.hidden * 4

    def schedules(self) -> list[str]:
        return [name for name in PEERS if SCHEDULES[name].virtual_stages == self.chunks]


def compile_case(case: Case) -> Compiled:
    """Once, in the process that the ranks are forked from."""
    base = {1: "1f1b", 2: "interleaved"}[case.chunks]
    cuts = tuple(f"model.layers.{k}" for k in case.starts[1:])
    options = Options(microbatches=case.microbatches, schedule=base, virtual_stages=case.chunks, split_points=cuts)
    return compile_model(
        skeleton_of(case.work.model()), case.work.tokens(), Mesh.of(pp=case.ranks), options, outputs=()
    )


class Watch:
    """What one step of a rank does outside of computing: ``overhead`` in processor seconds of its main thread (nobody
    else's load is in it), ``idle`` in seconds by the clock that it waited for others."""

    def __init__(self) -> None:
        self.overhead = self.idle = 0.0

    def run(self, step: Callable[[], Any]) -> None:
        self.overhead = self.idle = 0.0
        start = time.thread_time()
        step()
        self.overhead += time.thread_time() - start

    def computes(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            start = time.thread_time()
            found = call(*args, **named)
            self.overhead -= time.thread_time() - start
            return found

        return timed

    def waits(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            start = time.perf_counter()
            found = call(*args, **named)
            self.idle += time.perf_counter() - start
            return found

        return timed


@dataclass
class Side:
    """One way to run a case on this rank.

    step: from no gradients to all; the loss, on ranks that know it. gradients: of this rank's parameters. count: runs a
    step and says what it sent, (stage, stage) -> bytes. watched: a context in which a `Watch` sees what computes and
    waits. actions: F, B, W and BW of this rank. held: what exists before a step. kept: runs a step; most bytes that F
    and B kept (0: not known).
    """

    parameters: list[nn.Parameter]
    run: Callable[[], Tensor | None]
    gradients: Callable[[], dict[str, Tensor]]
    count: Callable[[], Counter[tuple[int, int]]]
    watched: Callable[[], Any]
    actions: int
    held: list[Tensor]
    kept: Callable[[], int] = lambda: 0

    def clear(self) -> None:
        for p in self.parameters:
            p.grad = None

    def step(self) -> Tensor | None:
        self.clear()
        return self.run()


# --- ours ---------------------------------------------------------------------------------------------


def ours(case: Case, compiled: Compiled, schedule: str) -> Side:
    """autopar, from the graphs that were compiled before the fork."""
    assert compiled.pipeline is not None and compiled.plan.pipeline is not None
    plan = replace(compiled.plan, pipeline=replace(compiled.plan.pipeline, schedule=schedule))
    order = make_order(plan, compiled.pipeline.parts, compiled.pipeline.edges)
    ready = replace(compiled, plan=plan, pipeline=replace(compiled.pipeline, order=order))
    whole, groups = case.work.model(), Groups(init_mesh(pp=case.ranks))
    specs = tuple(replace(s, ranks=holders(order, plan.pipeline.holders[s.name])) for s in compiled.parameters)
    values, buffers = dict(whole.named_parameters(remove_duplicate=False)), dict(whole.named_buffers())
    model = ParallelModule(
        skeleton_of(whole), lambda *_, **__: replace(ready, parameters=specs), groups, plan, specs, values, buffers,
        "eager", 0,
    )  # fmt: skip
    batch = case.work.tokens()

    def step() -> Tensor:
        return model.train_step(**batch).detach()

    step()  # binds
    executor: Any = model._cache.runners[0]
    mine = [a for a in executor.order.ranks[dist.get_rank()] if a.kind in COMPUTE]
    return Side(
        list(model.parameters()), step, lambda: dict(_gradients(model)), lambda: _count_ours(executor, step),
        lambda: _watch_ours(executor), len(mine), [*model.parameters(), *model.buffers()],
        lambda: _kept_ours(executor, step),
    )  # fmt: skip


def holders(order: Order, parts: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks whose stages run these parts."""
    return tuple(sorted({order.rank_of[chain[k]] for chain in order.chains for k in parts})) or (0,)


def _count_ours(executor: Executor, step: Callable[[], Any]) -> Counter[tuple[int, int]]:
    sent: Counter[tuple[int, int]] = Counter()
    channels, before = executor.channels, executor.channels.traffic

    def send(action: Any, peer: int, tensors: list[Tensor]) -> None:
        sent[action.stage, action.peer] += sum(x.nbytes for x in tensors)
        original(action, peer, tensors)

    original = channels.send
    with patch.object(channels, "send", send):
        step()
    mine = sum(t.bytes for t in channels.traffic.values()) - sum(t.bytes for t in before.values())
    assert mine == sent.total(), f"the ledger says {mine}, the calls {sent}"
    return sent


def _kept_ours(executor: Any, step: Callable[[], Any]) -> int:
    from tests.support.peaks import measure  # found once the benchmark has said where

    with patch.multiple(executor, _start=executor._start, _run_action=executor._run_action):
        peaks = measure(executor)
        step()
    return peaks.saved


@contextmanager
def _watch_ours(executor: Executor) -> Iterator[Watch]:
    """Computing: all but transfers, as autograd's accumulation of gradients is inside its backward."""
    watch, changed = Watch(), []
    for entry in executor.program.entries:
        for instruction in (*entry.waits, *entry.instructions):
            name = getattr(instruction.apply, "__qualname__", "")  # a bound graph has none
            if ".receive." in name or ".send." in name:
                continue
            changed.append((instruction, instruction.apply))
            instruction.apply = (watch.waits if "._wait." in name else watch.computes)(instruction.apply)
    try:
        with patch.object(executor.channels, "flush", watch.waits(executor.channels.flush)):
            yield watch
    finally:
        for instruction, original in changed:
            instruction.apply = original


# --- theirs -------------------------------------------------------------------------------------------


class LlamaPart(nn.Module):
    """Some layers of a Llama, the embedding ahead of the first, norm and head behind the last."""

    def __init__(self, model: Any, case: Case, part: int) -> None:
        super().__init__()
        starts = [*case.starts, case.work.layers]
        self.layers = model.model.layers[starts[part] : starts[part + 1]]
        last = part == len(case.starts) - 1
        self.embed = model.model.embed_tokens if part == 0 else None
        self.norm, self.head = (model.model.norm, model.lm_head) if last else (None, None)
        positions = torch.arange(case.work.length).unsqueeze(0)
        self.rotary = model.model.rotary_emb(torch.empty(1), positions)  # once, not per microbatch

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers:
            x = layer(x, attention_mask=None, position_embeddings=self.rotary)
        return self.head(self.norm(x)) if self.norm is not None and self.head is not None else x


def theirs(case: Case, schedule: str) -> Side:
    """torch.distributed.pipelining."""
    whole, batch, rank = case.work.model(), case.work.tokens(), dist.get_rank()
    parts = len(case.starts)
    vee = schedule in ("zb_v", "dual_pipe_v")
    mine = [rank, parts - 1 - rank] if vee else list(range(rank, parts, case.ranks))
    stages = [PipelineStage(LlamaPart(whole, case, k), k, parts, torch.device("cpu")) for k in mine]
    made = PEERS[schedule](stages[0] if case.chunks == 1 else stages, case.microbatches, loss_fn=_loss)
    targets = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    parameters = [p for stage in stages for p in stage.submod.parameters()]

    def step() -> Tensor | None:
        losses: list[Tensor] = []
        inputs = (batch["input_ids"],) if 0 in mine else ()
        made.step(*inputs, target=targets if parts - 1 in mine else None, losses=losses, return_outputs=False)
        return torch.stack([x.detach() for x in losses]).mean() if losses else None

    step()  # agrees on shapes
    return Side(
        parameters, step, lambda: dict(_gradients(whole)), lambda: _count_theirs(stages, step),
        lambda: _watch_theirs(stages, made), _actions(made, rank), list(parameters),
    )  # fmt: skip


def _actions(made: Any, rank: int) -> int:
    """F, B, W and BW of a rank."""
    if isinstance(made, schedules.PipelineScheduleSingle):
        return 2 * int(made._n_microbatches)
    rows = [a for a in made.pipeline_order[rank] if a is not None]
    return sum(len(a.sub_actions) if a.sub_actions else 1 for a in rows)


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _count_theirs(stages: list[PipelineStage], step: Callable[[], Any]) -> Counter[tuple[int, int]]:
    sent: Counter[tuple[int, int]] = Counter()
    originals = {}

    def counting(stage: PipelineStage, get: Callable[..., Any], ahead: int) -> Callable[..., Any]:
        def ops(microbatch: int) -> Any:
            found = get(microbatch)
            sent[stage.stage_index, stage.stage_index + ahead] += sum(op.tensor.nbytes for op in found)
            return found

        return ops

    for stage in stages:
        for name, ahead in (("get_fwd_send_ops", 1), ("get_bwd_send_ops", -1)):
            originals[stage, name] = getattr(stage, name)
            setattr(stage, name, counting(stage, originals[stage, name], ahead))
    step()
    for stage, name in originals:
        delattr(stage, name)
    return Counter({pair: size for pair, size in sent.items() if size})


@contextmanager
def _watch_theirs(stages: list[PipelineStage], made: Any) -> Iterator[Watch]:
    """Computing: the modules, the loss, autograd. The search for what belongs to B and W is not."""
    watch = Watch()
    for stage in stages:
        stage.forward_maybe_with_nosync = watch.computes(stage.forward_maybe_with_nosync)
    with (
        patch.object(torch.autograd, "backward", watch.computes(torch.autograd.backward)),
        patch.object(torch.autograd, "grad", watch.computes(torch.autograd.grad)),
        patch.object(schedules, "_wait_batch_p2p", watch.waits(schedules._wait_batch_p2p)),
        patch.object(made, "_loss_fn", watch.computes(made._loss_fn)),
    ):
        yield watch
    for stage in stages:
        del stage.forward_maybe_with_nosync


def _gradients(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Those that this rank has: of parameters of other stages its shards are empty."""
    for name, p in model.named_parameters():
        own = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        if own is not None and own.numel():
            yield name, own


def reference(work: Workload) -> tuple[float, Mapping[str, Tensor]]:
    """Loss and gradients of one process."""
    model: Any = work.model()
    loss = model(**work.tokens()).loss
    loss.backward()
    return float(loss), dict(_gradients(model))
