"""Runs a compiled step on this rank: the actions of its lowered order, then the exchange between stages.

    for each action:    wait for its inputs; run it                       (see `program`)
    at the end:         gradients of parameters that several ranks of pp hold are summed over these ranks
                        losses are summed over pp; new buffers and outputs go to all ranks; sends complete

A model without pipeline stages is one stage on one rank of pp: nothing is sent or exchanged.

On a GPU the actions are run once before the first step, without the other stages, on zeros in place of received values.
CUDA loads a kernel at its first launch, and may wait for all running work before it does (CUDA Programming Guide, Lazy
Loading): for instance for a receive, whose sender is about to load a kernel itself and waits for its own receive.
DualPipe, in which both ends receive before they compute, deadlocked this way in its first step on an H100.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.profiler import record_function

from autopar.adapters.profiling import is_profiled
from autopar.ir.expert_layers import axis_of_experts
from autopar.ir.graph import set_device
from autopar.ir.signature import PRESENT
from autopar.ir.traffic import Ledger, add_ledgers, ledger_between
from autopar.ops.few_bits.delayed_scales import DelayedScales
from autopar.ops.grouped_experts import ends_of_rows
from autopar.ops.value_checks import take_notes
from autopar.runtime.comm.p2p import AXIS, Channels
from autopar.runtime.comm.step_notes import open_notes
from autopar.runtime.exec.buffer_updates import BufferUpdates
from autopar.runtime.exec.cuda_graphs import RecordedStep, Result, why_not
from autopar.runtime.exec.expert_stats import ExpertLoad, layers_of_experts, padded_experts
from autopar.runtime.exec.finalize_step import StepFinalizer
from autopar.runtime.exec.finite_check import FiniteCheck
from autopar.runtime.exec.global_statistics import pre_pass_links
from autopar.runtime.exec.instructions import BoundAction, Program
from autopar.runtime.exec.lowering import BACKENDS, Lowered, bind
from autopar.runtime.exec.module_profiling import ModuleProfile, Span, watched_modules
from autopar.runtime.exec.overlap_f_b import OverlappedActions, with_overlaps
from autopar.runtime.exec.program_builder import ProgramBuilder
from autopar.runtime.exec.replay_check import ReplayCheck, run_twice
from autopar.runtime.exec.step_fingerprint import axes_of_step
from autopar.runtime.exec.step_inputs import SCALE, StepInputs
from autopar.runtime.exec.unsharded_cache import UnshardedCache
from autopar.runtime.exec.value_probe import open_probe
from autopar.runtime.exec.value_slots import Routes
from autopar.runtime.fault.flight import flying
from autopar.runtime.health.step_times import StepTimes
from autopar.runtime.mesh.process_groups import Groups
from autopar.schedule.order import BACKWARD, COMPUTE, Action
from autopar.schedule.order_checks import links
from autopar.steps.graphs import Compiled, StepGraph, is_a, output
from autopar.steps.of_rank import graphs_of_rank, lowered_order

PER_STEP = ("input", "seed", PRESENT)  # kinds of values that change in every step
COMPUTED = ("microbatch", "total")  # kinds of values computed by the step itself


@dataclass
class PausedStep:
    """A step between its forward and its backward. ``saved``: values of the forward that the backward reads, by name.
    ``kept``: old values of the buffers that the forward has updated. ``values``: what the forward was given, if it may
    have to run again."""

    slots: list[Any]
    saved: list[tuple[str, Tensor]]
    kept: dict[str, Tensor]
    values: Mapping[str, Tensor]


class Executor:
    """The bound step of one batch shape. ``traffic`` grows with every step.

    All ranks of the world must make theirs at the same time: it makes process groups. record: if it is set, a step
    leaves in ``timeline`` (action, start, end) in seconds of every action, waiting for other ranks left out, and in
    ``modules`` what of it the host was in which module, but of pairs that take turns. unsharded: gathered weights that
    outlive a step.
    """

    def __init__(self, compiled: Compiled, groups: Groups, backend: str = "eager") -> None:
        pipeline = compiled.pipeline
        if backend != "eager" and compiled.plan.experts:
            raise ValueError(
                f"backend: {backend!r} needs static shapes, found experts sharded on axis "
                f"{next(iter(compiled.plan.experts.values())).axis!r}, whose numbers of tokens change at every step; "
                "use backend='eager'"
            )
        self.compiled, self.groups = compiled, groups
        self._backend, records = BACKENDS[backend]
        self.inputs = StepInputs(compiled, groups.device)
        self.specs, self.microbatches = self.inputs.specs, self.inputs.microbatches
        held = compiled.constants
        by_name = {spec.name: spec.dtype for spec in compiled.parameters}
        self._padded = {spec.name: spec for spec in compiled.parameters if spec.is_padded}
        self._stored = {node: by_name[s.name] for node, s in self.specs.items() if s.name in by_name}
        self.constants = {name: x if x.is_meta else x.to(groups.device) for name, x in held.items()}
        self.seeds = [spec.name for spec in self.specs.values() if spec.kind == "seed"]
        self._at = groups.mesh, groups.coordinate
        self.timeline: list[tuple[Action, float, float]] = []
        self.modules: list[Span] = []
        self.load: ExpertLoad | None = None  # of the module, that it counts for
        self.finite: FiniteCheck | None = None  # likewise
        self.replay: ReplayCheck | None = None  # likewise
        self.scales: DelayedScales | None = None  # likewise
        self.times: tuple[StepTimes, str] | None = None  # likewise, and the kind of its calls
        self._experts: dict[int, list[str]] = {}  # stage -> names of layers
        self._known: dict[str, Any] = {}  # by name, fake values returned by compiled code
        self.record = False
        self.totals: list[Tensor] | None = None  # of all replicas; a step takes them for those of its own batch
        self._pause_axis = axis_of_experts(compiled.plan.experts)  # where overlapped graphs take turns
        self.order = Routes(pipeline).drop_empty(lowered_order(pipeline))
        assert self.order.microbatches == self.microbatches, f"{self.order.name} is for other microbatches"
        axes, along = axes_of_step(compiled)  # of all ranks, which all create the same groups
        groups.make(axes)
        groups.make_channels(along)
        self.channels = Channels(groups)
        self.channels.connect({*links(self.order), *pre_pass_links(pipeline, self.order)})
        self._exchange = StepFinalizer(compiled, self.order, groups)
        self.trained = self._exchange.trained
        groups.warm_up({*axes, *self._exchange.axes})
        self.program: Program = ProgramBuilder(
            pipeline, self.order, groups.coordinate.get(AXIS, 0), self._bind, self._backend != "eager", self.inputs,
            self.channels, groups.device, compiled.prologue, self._exchange.results, self._exchange.totals,
            self._over_replicas,
        ).program()  # fmt: skip
        whole = {name: self.inputs.unsplit_name(name) for _, name, _ in self.program.loads}
        self._stored_loads = [(slot, whole[name]) for slot, name, _ in self.program.loads if whole[name]]
        self._computed_loads = [load for load in self.program.loads if not whole[load[1]]]
        entries = self.program.entries
        kinds = [entry.action.kind if entry.action is not None else "" for entry in entries]
        first = next((i for i, kind in enumerate(kinds) if kind in BACKWARD), len(entries))
        ahead = [i for i in range(first) if (action := entries[i].action) is not None and action.kind in COMPUTE]
        if ahead and (action := entries[ahead[-1]].action) is not None and action.paired:
            first = ahead[-1]  # of one cell with it
        self._forward, self._backward = entries[:first], entries[first:]
        self._runs = with_overlaps(self._forward), with_overlaps(self._backward)
        read = {i for entry in self._backward for x in (*entry.waits, *entry.instructions) for i in x.reads}
        self._unread = [i for i in self.program.results.values() if i not in read]  # outputs that no backward reads
        self.buffers = BufferUpdates(compiled, sorted(read), set(self.program.tangents))
        self.unsharded = UnshardedCache([one for entry in self._forward for one in entry.instructions])
        self._comms = {bound.comms for entry in entries for bound in entry.graphs}
        self._traffic_of = [
            add_ledgers(*(bound.traffic for entry in of_phase for bound in entry.graphs))
            for of_phase in (self._forward, self._backward)
        ]
        self._traffic: Ledger = {}
        self._needs_warm_up = groups.device.type != "cpu" and bool(links(self.order))
        self._warm_up_traffic: Ledger = {}
        self._alone = not axes and not self._exchange.axes  # no communication with other ranks within a step
        self._recorded = self._recorder() if records else None

    def _recorder(self) -> RecordedStep:
        mine = graphs_of_rank(self.compiled.pipeline, self.compiled.prologue, self.groups.coordinate.get(AXIS, 0))
        scales = [SCALE] if any(name.startswith(SCALE) for _, name, _ in self.program.loads) else []
        loaded = (self.specs.get(name) for _, name, _ in self.program.loads)
        kinds = {spec.name: spec.kind for spec in loaded if spec is not None and spec.kind not in COMPUTED}
        moving = {name for name, kind in kinds.items() if kind in PER_STEP} | self.buffers.bound.keys() & kinds.keys()
        return RecordedStep(
            self._step,
            [name for name in kinds if name not in moving],
            [*(name for name in kinds if name in moving), *scales],
            self._sent,
            reason=why_not((gm for gm, _ in mine.values()), self.groups.device),
            world=not self._alone and self.groups.device.type == "cuda",
        )

    def _bind(self, graph: StepGraph, first: bool) -> Lowered:
        if self.groups.device.type != "cpu":
            set_device(graph.graph, self.groups.device)
        given = [self._known.get(name) for name in graph.inputs]
        strides = self._of_this_rank(graph)
        bound = bind(graph.graph, self.groups, self._backend, given, self._pause_axis, strides, first=first)
        self._known |= {name: x for name, x in zip(graph.outputs, bound.made or ()) if name is not None}
        return bound

    def _of_this_rank(self, graph: StepGraph) -> list[int]:
        """Results that only graphs of this rank read, which are compiled for their strides: none where F alone may take
        the place of F with gathers."""
        twins = [(part.gather_forward, part.forward) for part in self.compiled.pipeline.parts if part.gather_forward]
        if any(graph is one for pair in twins for one in pair):
            return []
        return [i for i, name in enumerate(graph.outputs) if is_a(name, "saved", "stash")]

    @property
    def traffic(self) -> Ledger:
        """Calls and bytes sent by this rank so far, by (axis, kind)."""
        return add_ledgers(self._sent(), self._recorded.traffic if self._recorded else {})

    def _sent(self) -> Ledger:
        attention = (comms.traffic for comms in self._comms | self.unsharded.comms)
        own = self._traffic, self._exchange.traffic, self.channels.traffic, self._warm_up_traffic
        return add_ledgers(*own, *attention)

    # --- a step -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def run_step(self, values: Mapping[str, Tensor]) -> Result:
        """Run forward and backward of all microbatches, or only the forward of a step compiled without gradients.

        ``values``: stored parameters of this rank's stages and all buffers by original name, inputs by path (all
        microbatches of this rank). If another rank fails, raises CollectiveError that names the action and this rank.
        """
        with self._calling("step"):
            if self._replays:
                result = run_twice(self.groups, lambda: self._step(values), _named_results)
            else:
                records = self._recorded is not None and not self.record and not self.unsharded.on
                result = self._recorded(values) if records and self._recorded else self._step(values)
            if self.finite is not None and self.compiled.train:
                losses = {str(i): loss for i, loss in enumerate(result.losses)}
                again = functools.partial(self._step, values)
                self.finite.check(
                    losses, result.gradients, self._named(values), lambda: [x for _, x in _named_results(again())]
                )
            self._end_step()
            return result

    @torch.no_grad()
    def own_totals(self, values: Mapping[str, Tensor]) -> list[Tensor]:
        """The totals over this replica's batch (counts of targets), without the rest of the step."""
        slots = self._loaded(values)
        with self._calling("totals"):
            for instruction in self._forward[0].instructions:
                if instruction.apply == self._over_replicas:
                    return [slots[i] for i in instruction.reads]
                instruction.run(slots)
        return []

    def _over_replicas(self, own: list[Tensor]) -> list[Tensor]:
        return own if self.totals is None else self.totals

    @property
    def _replays(self) -> bool:
        return self.replay is not None and self.replay.due and self.compiled.train

    def _named(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of the values that the step reads, in words."""
        kinds = {s.name: s.kind for s in self.specs.values()}
        return {f"{kinds[n]} {n}": x for n, x in values.items() if n in kinds}

    def _step(self, values: Mapping[str, Tensor]) -> Result:
        slots = self._start(values)
        self._run(self._backward, slots)
        self.channels.flush()
        gradients = self._cropped(self._exchange.gradients(self._gradients(slots)))
        losses = self._exchange.losses({name: slots[i] for name, i in self.program.losses.items()})
        return Result(self._outputs({**self._kept(slots), **losses}), gradients, list(losses.values()))

    @torch.no_grad()
    def run_forward(self, values: Mapping[str, Tensor], shared: Collection[str] = ()) -> tuple[list[Any], PausedStep]:
        """(outputs, the paused step), for a model without stages that was compiled with gradients. ``shared``: buffers
        whose memory user code holds, too."""
        assert self.compiled.train and len(self.order.ranks) == 1, "stages run forward and backward in one"
        with self._calling("forward"):
            slots = self._start(values)
        before = self.buffers.keep(slots, values, shared)
        kept = [(name, slots[i]) for i, name in self.program.saved.items()]
        saved = [(name, x) for name, x in kept if isinstance(x, Tensor)]
        made = self._outputs(self._kept(slots))
        for i in self._unread:  # only the caller keeps them alive: logits are large
            slots[i] = None
        return made, PausedStep(slots, saved, before, {**values, **before} if self.finite or self.replay else {})

    @torch.no_grad()
    def run_backward(self, paused: PausedStep, tangents: Mapping[str, Tensor], keep: bool = False) -> dict[str, Tensor]:
        """Run the backward of a paused step: gradients by placeholder of the stored parameter. ``tangents``: by name of
        the output. ``keep``: the backward can run once more."""
        slots = list(paused.slots) if keep else paused.slots
        if not keep:
            paused.slots, paused.saved = [], []
        self._place(tangents, slots)
        with self._calling("backward"):
            whole = functools.partial(self._forward_and_backward, paused.values, tangents)
            if self._replays:
                gradients = run_twice(self.groups, whole, dict.items)
            else:
                self._run(self._backward, slots)
                gradients = self._cropped(self._gradients(slots))
            if self.finite is not None:
                read = self._named(paused.values) | {f"the gradient of {name}": x for name, x in tangents.items()}
                self.finite.check({}, gradients, read, lambda: list(whole().values()))
            self._end_step()
        return gradients

    def _end_step(self) -> None:
        if self.scales is not None and self.compiled.train:
            self.scales.advance()

    def _place(self, tangents: Mapping[str, Tensor], slots: list[Any]) -> None:
        """Put the gradients of outputs where the backward reads them."""
        for name, given in tangents.items():
            for i in self.program.tangents.get(name, ()):
                slots[i] = given

    def _forward_and_backward(self, values: Mapping[str, Tensor], tangents: Mapping[str, Tensor]) -> dict[str, Tensor]:
        slots = self._start(values)
        self._place(tangents, slots)
        self._run(self._backward, slots)
        return self._cropped(self._gradients(slots))

    @contextmanager
    def _calling(self, phase: str) -> Iterator[None]:
        """Context manager: its time is measured. An error amid exchanges leaves ranks at different places, so they
        agree on the next call."""
        times, kind = self.times or (None, "")
        try:
            with (
                times.step(f"{kind} {phase}", self.groups.device) if times is not None else nullcontext(),
                self.scales.used(notes=self.compiled.train) if self.scales is not None else nullcontext(),
            ):
                yield
        except BaseException:
            if not self._alone:
                self.groups.order.forget()
            raise

    def _gradients(self, slots: list[Any]) -> dict[str, Tensor]:
        """Gradients in the dtypes of their parameters, whatever dtype they were accumulated in."""
        found = {}
        for name, i in self.program.gradients.items():
            x = slots[i]
            if x is not None:
                dtype = self._stored.get(name)
                found[name] = slots[i] = x if dtype in (None, x.dtype) else x.to(dtype)
        return found

    def _cropped(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gradients without padding, as parameters are stored."""
        specs = {node: self._padded[spec.name] for node, spec in self.specs.items() if spec.name in self._padded}
        return {node: specs[node].cropped(x, *self._at) if node in specs else x for node, x in gradients.items()}

    def _kept(self, slots: list[Any]) -> dict[str, Any]:
        return self._exchange.outputs({name: slots[i] for name, i in self.program.results.items()})

    def _outputs(self, found: Mapping[str, Any]) -> list[Any]:
        made: list[Any] = [found.get(output(i)) for i in range(len(self.compiled.signature.outputs))]
        for i, name in self.buffers.written.items():
            if name in self._padded:
                made[i] = self._padded[name].cropped(made[i], *self._at)
        return made

    def _start(self, values: Mapping[str, Tensor]) -> list[Any]:
        """Fill new slots with inputs, and run all entries before the first backward."""
        if self._needs_warm_up:
            self._needs_warm_up = False
            self._warm_up(values)
        slots = self._loaded(values)
        self.timeline, self.modules = [], []
        self._run(self._forward, slots)
        return slots

    def _warm_up(self, values: Mapping[str, Tensor]) -> None:
        """Run all actions once, without the other stages: see above. Its traffic is not counted."""
        before, slots = self._sent(), self._loaded(values)
        self.channels.warms_up = True
        try:
            for entry in (*self._forward, *self._backward):
                entry.run(slots)
            self.channels.flush()
        finally:
            self.channels.warms_up = False
            take_notes()  # discard: values were not received
        self._warm_up_traffic = ledger_between(self._sent(), before)  # is taken off

    def _loaded(self, values: Mapping[str, Tensor]) -> list[Any]:
        slots: list[Any] = [None] * self.program.size
        for slot, constant in self.program.constants.items():
            slots[slot] = constant
        for slot, name in self._stored_loads:
            spec = self._padded.get(name)
            slots[slot] = values[name] if spec is None else spec.padded(values[name], *self._at)
        for slot, name, microbatch in self._computed_loads:
            slots[slot] = self.inputs.value(name, values, microbatch)
        self.channels.clear()
        return slots

    def _run(self, entries: list[BoundAction], slots: list[Any]) -> None:
        profiled = is_profiled()
        for entry in self._runs[entries is self._backward]:
            with self._profiled(entry, profiled) if profiled or self.record else nullcontext():
                text = str(entry)
                if (watch := open_probe() or open_notes()) is not None:
                    watch.action = text
                with flying("action", text):
                    start = self._run_action(entry, slots)
            if self.record:
                end = time.perf_counter()
                self.timeline += [(action, start, end) for action in entry.actions]
        self._traffic = add_ledgers(self._traffic, self._traffic_of[entries is self._backward])
        if entries is self._forward and self.unsharded.on:
            self._traffic = add_ledgers(self._traffic, self.unsharded.saved())

    @contextmanager
    def _profiled(self, entry: BoundAction | OverlappedActions, profiled: bool) -> Iterator[None]:
        """Context manager: records for torch's profiler, and for ``modules``."""
        spans = ModuleProfile(named=profiled)
        with record_function(f"autopar {entry}") if profiled else nullcontext(), watched_modules(spans):
            yield
        if self.record:
            self.modules += spans.found

    def _run_action(self, entry: BoundAction | OverlappedActions, slots: list[Any]) -> float:
        """Run an entry; in training forwards, count the tokens per expert."""
        action = next(iter(entry.actions), None)
        if (
            self.load is None
            or open_probe() is not None
            or action is None
            or action.kind != "F"
            or not self.compiled.train
        ):
            return entry.run(slots)
        found: list[Tensor] = []
        start = entry.run(slots, functools.partial(_collecting_ends, found))
        if found:
            part = self.order.part_of(action.stage)
            if part not in self._experts:
                self._experts[part] = layers_of_experts(self.compiled.pipeline.parts[part].forward.graph)
            axis = axis_of_experts(self.compiled.plan.experts)
            self.load.add(self._experts[part], found, axis, padded_experts(self.compiled.local, axis))
        return start


def _named_results(made: Result) -> list[tuple[str, Tensor]]:
    """The losses and gradients."""
    losses = [("the loss", x) for x in made.losses]
    return [*losses, *((f"the gradient of {name}", x) for name, x in made.gradients.items())]


@contextmanager
def _collecting_ends(found: list[Tensor]) -> Iterator[None]:
    """Context manager: adds the `ends_of_rows` seen inside to ``found``."""
    with ends_of_rows() as more:
        yield
    found += more


T = TypeVar("T")


def per_rank(recorded: Iterable[tuple[Mapping[str, int], T]]) -> list[T]:
    """The records of the first rank of each stage, from pairs (coordinate on the mesh, record) of all ranks."""
    first = {at.get(AXIS, 0): what for at, what in recorded if not any(i for axis, i in at.items() if axis != AXIS)}
    return [first[i] for i in sorted(first)]
