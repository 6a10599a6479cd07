"""`autopar.monitor`: what a training loop does, as numbers, for a person and for the tools that plot them.

    with autopar.monitor(model, to=[SummaryWriter("runs/first"), "metrics.jsonl"], total=1000) as monitor:
        for batch in batches:
            loss = model.train_step(**batch)
            optimizer.step(); optimizer.zero_grad()
            monitor.step(loss=loss, lr=schedule.get_last_lr()[0])

    step 130/1000, 0.42 s per step, loss 2.317, 1.25M tokens/s, MFU 41.2%, memory 61.3 GiB, waiting 8%

Between two readings a step costs a few microseconds; a reading costs one wait for the device and, for a model with
experts, one sum over the ranks.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch.fx import GraphModule
from tqdm import tqdm

from autopar.auto.machine import chip_called
from autopar.cost.hardware import device_named
from autopar.cost.step_estimate import model_flops
from autopar.integrations.metric_writers import kept_from_failing, writer_for
from autopar.ir.graph import global_shape, placeholders
from autopar.ir.meta import input_specs
from autopar.report.tables import human_count
from autopar.runtime.exec.expert_stats import layers_of_experts
from autopar.runtime.health.health_watch import EVERY
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.steps.graphs import Compiled
from autopar.values import whole_number, yes_or_no

GIB = 2**30
QUIET = 30.0  # seconds between two lines where there is no terminal


class Monitor:
    """See `monitor`, which makes it. ``values``: of the last reading, the same on all ranks but for what only rank 0
    reads."""

    def __init__(
        self, model: ParallelModule, to: Iterable[Any], every: int, total: int | None, start: int, progress: bool
    ) -> None:
        self.values: dict[str, float] = {}
        self._model, self._every, self._step = model, every, start
        self._first = model.mesh.get_rank() == model.mesh.mesh.flatten()[0]
        self._to = [kept_from_failing(writer_for(x), type(x).__name__) for x in to if x is not None and self._first]
        self._done: Counter[str] = Counter()  # since the last reading
        self._sizes: WeakKeyDictionary[GraphModule, dict[str, float]] = WeakKeyDictionary()
        self._experts, self._load = False, dict[str, torch.Tensor]()
        self._forget = model.observe_steps(self._called)
        self._since, self._at = time.perf_counter(), start
        self._look, self._published = 0.0, dict[str, float]()
        self._line = _Line(total, start) if progress and self._first else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the line, and count no more."""
        self._forget()
        if self._line is not None:
            self._line.close()

    def step(self, **numbers: Any) -> None:
        """A step of the optimizer is over. ``numbers``: of the user, by name; tensors of one element are read every
        ``every`` steps. All ranks call it. Raises ValueError for what is not a number."""
        self._step += 1
        if self._step % self._every == 0:
            given = {name: _number(name, value) for name, value in numbers.items()}
            self._read(given)
        if self._line is not None:
            self._line.show(self._step, self.values)

    def _called(self, compiled: Compiled) -> None:
        if compiled.local not in self._sizes:
            self._sizes[compiled.local] = _sizes(compiled) if self._first else {}
            self._experts |= any(layers_of_experts(part.forward.graph) for part in compiled.pipeline.parts)
        self._done.update(self._sizes[compiled.local])

    def _read(self, given: dict[str, float]) -> None:
        now = time.perf_counter()
        seconds, steps = now - self._since, self._step - self._at
        self._since, self._at = now, self._step
        done, self._done = self._done, Counter()
        self.values = given | self._imbalance()
        if self._first:
            self.values |= {"seconds_per_step": seconds / steps, **self._rates(done, seconds), **self._of_ranks()}
            for write in self._to:
                write(self._step, self.values)

    def _rates(self, done: Mapping[str, float], seconds: float) -> dict[str, float]:
        """Per second, of what was done in these."""
        rates = {f"{name}_per_second": done[name] / seconds for name in ("samples", "tokens") if done[name]}
        if done["flops"]:
            per_rank = done["flops"] / seconds / self._model.mesh.size()
            rates["tflops_per_rank"] = per_rank / 1e12
            if done["at_peak"]:
                rates["mfu"] = done["at_peak"] / seconds / self._model.mesh.size()
        return rates

    def _imbalance(self) -> dict[str, float]:
        """Tokens of the expert that got most, over the mean, in the layer where that is most. Collective."""
        if not self._experts:
            return {}
        before, self._load = self._load, self._model.expert_load()
        worst = 0.0
        for layer, count in self._load.items():
            since = count - before[layer] if layer in before and bool((count >= before[layer]).all()) else count
            if since.sum():
                worst = max(worst, float(since.max() / since.double().mean()))
        return {"expert_imbalance": worst} if worst else {}

    def _of_ranks(self) -> dict[str, float]:
        """What ranks have published of themselves, at most as often as they do."""
        if time.monotonic() >= self._look:
            self._look = time.monotonic() + EVERY
            self._published = self._read_ranks()
        return self._published

    def _read_ranks(self) -> dict[str, float]:
        try:
            health = self._model.health()
        except ValueError:  # a backend whose waiting is not seen
            return {"peak_memory_gib": max(self._model.peak_memory().values()) / GIB}
        spent: Counter[str] = Counter()
        for _, of_rank, _ in health.rows():
            spent.update(of_rank)
        whole = sum(spent.values())
        shares = {what.replace(" ", "_"): t / whole for what, t in spent.items() if what != "computing"}
        peak = max(one.peak_memory for one in health.ranks) / GIB
        return {"peak_memory_gib": peak, **shares, "slow_ranks": float(len(health.slow))}


def monitor(
    model: ParallelModule,
    to: Any = (),
    *,
    every: int = 10,
    total: int | None = None,
    start: int = 0,
    progress: bool = True,
) -> Monitor:
    """A context manager whose ``step(**numbers)`` is called on all ranks after each step of the optimizer, and that
    writes every few steps:

        seconds_per_step            of the loop, data and optimizer included
        samples_per_second          of all ranks, and tokens_per_second: elements of the first input of whole numbers
                                    with two dims or more, padding included
        tflops_per_rank, mfu        FLOPs of the model without recomputation, and their share of the chip's peak, on a
                                    GPU (Chowdhery et al. 2022, appendix B)
        peak_memory_gib             of the rank that has most: allocated on the GPU, or held by the process on a CPU
        waiting_for_tp, ...         the share of the last minute that ranks waited for others, by axis, and
        outside_of_steps            what was data, optimizer and logs (see `ParallelModule.health`; eager backend)
        slow_ranks                  how many ranks are slow
        expert_imbalance            tokens of the busiest expert over the mean, of the worst layer
        loss=..., any name          what ``step`` is given

    to: where to, of rank 0: one or several of a SummaryWriter of TensorBoard, wandb or a run of it, mlflow, a registry
    of prometheus_client, the path of a file of JSON lines, a function of (step, values). None is skipped. A writer that
    fails is logged and given up.
    every: steps between two readings. total: steps of the run, for the line. start: steps before this run.
    progress: whether rank 0 shows a line; without a terminal one every 30 seconds.
    Raises ValueError for a model that is not parallelized, and for other arguments.
    """
    if not isinstance(model, ParallelModule):
        raise ValueError(f"monitor: needs a model made by autopar.parallelize, found a {type(model).__name__}")
    targets = to if isinstance(to, (list, tuple)) else [to]
    every, start = whole_number("every", every, least=1), whole_number("start", start, least=0)
    total = None if total is None else whole_number("total", total, least=0)
    return Monitor(model, targets, every, total, start, yes_or_no("progress", progress))


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"monitor: step({name}=) needs a number or a tensor of one element, found {_described(value)}"
        ) from None


def _described(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _sizes(compiled: Compiled) -> dict[str, float]:
    """What a call does, on all ranks: samples, tokens, FLOPs of the model; and the seconds that these take a GPU at its
    peak."""
    plan, specs = compiled.plan, input_specs(compiled.local)
    shapes = [
        (global_shape(node), node.meta["val"].dtype, plan.batch_dims.get(specs[node.name].name, 0))
        for node in placeholders(compiled.local) if specs[node.name].kind == "input"
    ]  # fmt: skip
    found = dict[str, float]()
    rows = [shape[dim] for shape, _, dim in shapes if dim is not None and len(shape) > dim]
    ids = [shape for shape, dtype, dim in shapes if dim is not None and len(shape) > 1 and _whole(dtype)]
    if rows:
        found["samples"] = rows[0]
    if ids:
        found["tokens"] = float(torch.Size(ids[0]).numel())
    found["flops"], dtype = model_flops(compiled)
    if torch.cuda.is_available():
        facts = torch.cuda.get_device_properties(torch.cuda.current_device())
        found["at_peak"] = found["flops"] / device_named(chip_called(facts.name, facts.total_memory)).peak(dtype)
    return found


def _whole(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex and dtype is not torch.bool


class _Line:
    """What a person sees."""

    def __init__(self, total: int | None, start: int) -> None:
        form = "step {n_fmt}, {elapsed}" if total is None else "step {n_fmt}/{total_fmt} |{bar:12}| {remaining} left"
        self._bar = tqdm(
            total=total, initial=start, disable=None, dynamic_ncols=True, bar_format=form + "{postfix}"
        )  # fmt: skip
        self._total, self._next = total, time.monotonic() + QUIET

    def show(self, step: int, values: Mapping[str, float]) -> None:
        if not self._bar.disable:
            self._bar.set_postfix_str(", ".join(_words(values)), refresh=False)
            self._bar.update(step - self._bar.n)
        elif values and time.monotonic() >= self._next:
            self._next = time.monotonic() + QUIET
            of = f"/{self._total}" if self._total is not None else ""
            print(", ".join([f"step {step}{of}", *_words(values)]), file=sys.stderr, flush=True)

    def close(self) -> None:
        self._bar.close()


def _words(values: Mapping[str, float]) -> Iterable[str]:
    if "seconds_per_step" in values:
        yield f"{values['seconds_per_step']:.3g} s per step"
    if "loss" in values:
        yield f"loss {values['loss']:.4g}"
    if "tokens_per_second" in values:
        yield f"{human_count(values['tokens_per_second'])} tokens/s"
    if "mfu" in values:
        yield f"MFU {values['mfu']:.1%}"
    if "peak_memory_gib" in values:
        yield f"memory {values['peak_memory_gib']:.1f} GiB"
    if waiting := sum(share for name, share in values.items() if name.startswith("waiting_for_")):
        yield f"waiting {waiting:.0%}"
