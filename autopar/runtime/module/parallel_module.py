"""ParallelModule: the user's model on a mesh.

It holds this rank's shards of the parameters as DTensors under their original names, compiles a step for each new
shape of the batch, and runs it. Whatever torch does with parameters (optimizers, clipping, checkpoints) works on it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.adapters.dtensor import local_of
from autopar.adapters.grad_mode import grad_mode
from autopar.adapters.hooks import Observers, has_forward_hooks
from autopar.capture.front_end import as_captured
from autopar.errors import refusal_like
from autopar.ir.batch import tensors_of
from autopar.ir.signature import PRESENT, ParameterSpec
from autopar.ir.traffic import ledger_between, rows_sent
from autopar.plan import Plan
from autopar.runtime.checkpoint.checkpoint_dir import RunLineage
from autopar.runtime.consistency.rank_checks import agree_on_pieces
from autopar.runtime.exec.buffer_updates import plain_buffers
from autopar.runtime.exec.executor import Executor, per_rank
from autopar.runtime.exec.finite_check import FINITE, FiniteCheck
from autopar.runtime.exec.replay_check import BitsDiffer, ReplayCheck, replay_every
from autopar.runtime.exec.step_inputs import REPLICA_SHARD, SCALE
from autopar.runtime.exec.value_checks import ValueChecks
from autopar.runtime.fault.errors import error_context
from autopar.runtime.guards.global_state import GlobalTorchState, need_gradients, no_anomalies, outside
from autopar.runtime.guards.module_guards import ModuleGuards
from autopar.runtime.guards.origin import Origin
from autopar.runtime.guards.step_cache import Compiler, Kind, StepCache
from autopar.runtime.inputs.call_arguments import by_name, check_values, misspelled
from autopar.runtime.inputs.loss_fn import COTANGENT
from autopar.runtime.inputs.outputs import parts_of_outputs, rebuild_outputs
from autopar.runtime.inputs.padding import BatchPadder, PaddingBuckets
from autopar.runtime.inputs.rank_outputs import COUNT, RANK, Made, of_rank, outputs_of_others
from autopar.runtime.inputs.unused_inputs import Modules
from autopar.runtime.mesh.host_copies import to_device
from autopar.runtime.mesh.process_groups import Groups
from autopar.runtime.module.autograd_bridge import Forward, attach, refuse_gradients, with_second_forward
from autopar.runtime.module.module_facade import SHARED, ModuleFacade
from autopar.runtime.module.overridden_methods import face_of
from autopar.runtime.module.served_weights import ServedWeights
from autopar.runtime.optim.cpu_offload import keep_on_host
from autopar.runtime.optim.grad_clipping import clip_gradients
from autopar.runtime.optim.grad_scaler import GradScaler
from autopar.runtime.optim.step_hooks import now, watch_optimizers
from autopar.runtime.params import parameters as state
from autopar.runtime.params.sharded_modules import ShardedModules
from autopar.runtime.params.shards import STAGES
from autopar.steps.graphs import Compiled
from autopar.values import a_path, number

_NO_WEIGHTS = (
    "parallelize: needs weights, found a model that was built without them (meta device); load them with "
    "load_pretrained(folder), load_state_dict(state) or autopar.load(folder, model) before the first step"
)


class ParallelModule(ModuleFacade):
    """A model on a mesh, returned by `autopar.parallelize`.

    ``train_step(**batch)``: forward and backward of all microbatches; returns the loss of the global batch.
    ``model(**batch)``: the model's own output structure, part of the autograd graph. Scalars are plain tensors. Other
    outputs are DTensors over the mesh, sharded as the step left them, and compute as their global values:
    ``float(out.logits.mean())`` is the mean over the global batch. The same holds for parameters and gradients; every
    rank has those of other pipeline stages, too. Reductions and gathers are collective: all ranks of the mesh call
    them, even if only one prints the number.
    ``eval_step(**batch)``: the same with all modules in eval mode, without gradients.

    Its submodules are copies of the model's: change modes, attributes and ``requires_grad`` of parameters at any time.
    Other attributes of the model (config, methods) are available, too. Steps are already compiled: `torch.compile` of a
    function that calls them does not change them.

    Each rank passes its data-parallel shard of the global batch, as with DistributedDataParallel. Ranks that differ
    only along other axes pass the same one.
    """

    def __init__(
        self,
        skeleton: nn.Module,
        compiler: Compiler,
        groups: Groups,
        plan: Plan,
        specs: tuple[ParameterSpec, ...],
        values: Mapping[str, Tensor | None],
        buffers: Mapping[str, Tensor],
        backend: str,
        seed: int,
        broadcast_weights: bool = False,
        check_replica_inputs: bool = True,
        microbatches: int = 1,
        outputs_with_grad: bool | str = False,
        lift_to_float64: bool = False,
        check: Collection[str] = (),
        replicas: int = 1,
        again: Callable[..., ParallelModule] | None = None,
    ) -> None:
        """``again``: makes another one, from (skeleton, specs, values, buffers)."""
        super().__init__()
        self.replicas, self._again = replicas, again
        self._shard: tuple[int, list[Tensor]] | None = None  # within `shard_of_batch`
        self.shards_present = replicas  # of which a step computes one
        self._store_new_buffers: Callable[[], None] = lambda: None
        self._lift_to_float64, self._generation = lift_to_float64, None
        self._whole_outputs, self._of_rank = outputs_with_grad is True, outputs_with_grad == RANK
        self._groups, self._seed = groups, seed
        self._steps = 0
        self._watch, self._observers = ValueChecks(groups), Observers()
        self._scaler: GradScaler | None = None
        self._averages: list[Any] = []
        self._origin: Origin | None = None
        self._line = RunLineage()
        self._last_use, self._sizes = 0, (0, 0)
        self._weight = torch.ones((), dtype=torch.float64, device=groups.device)
        self._fitter: BatchPadder | None = None
        self._tangents: tuple[str, ...] = ()  # outputs, beside the losses, that the user has differentiated
        self._step_observers: list[Callable[[Compiled], None]] = []
        self._loaded = broadcast_weights or all(values.get(s.name) is not None for s in specs)
        # steps write to buffers
        own, written = (
            state.make_parameters(specs, values, groups, broadcast_weights),
            state.own_buffers(buffers, groups, broadcast_weights),
        )
        tree = ShardedModules(skeleton, specs, own, written)
        for name in SHARED:
            self.__dict__[name] = tree.root.__dict__[name]  # this module stands for the root
        finite = FiniteCheck(groups, lambda: self._scaler is None) if FINITE in check else None
        self._replay = None
        if every := replay_every(check):
            self._replay = ReplayCheck(every, lambda: self._tree.own, self._compare_replicas)
        self._cache = StepCache(
            compiler, tree, plan, groups, backend, microbatches, check_replica_inputs, finite, self._replay
        )
        self.__class__ = face_of(type(self), tree.root)
        self._tree = tree
        watch_optimizers()
        if plan.options.optimizer_cpu_offload:
            keep_on_host(self, plan.options.bucket_bytes)
        if outputs_with_grad and (reason := self._cannot_differentiate()):
            if not self._of_rank:
                raise ValueError(f"outputs_with_grad: {reason}; pass a custom loss as loss=fn, traced with the model")
            if plan.options.capacity_factor:
                raise ValueError(
                    'outputs_with_grad="rank": a forward alone and its backward by microbatches would drop other '
                    f"tokens, found capacity_factor={plan.options.capacity_factor}; leave it out"
                )
        self._sizes = len(self.__dict__), len(vars(type(self)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A model on the same mesh with parameters and buffers of its own, without gradients and gradient hooks, as for
        torch.optim.swa_utils.AveragedModel. While the modules are copied, the copy of the outermost one: for a function
        set on the model that holds the model itself (``model.f = MethodType(f, model)``)."""
        if (copy := memo.get(id(self._tree.root))) is not None:
            return copy
        if self._again is None or not self._loaded:
            raise ValueError(_NO_WEIGHTS)
        own = self._tree.own
        made = self._again(self._tree.structure(), self._tree.specs, {}, self._tree.buffers())
        memo[id(self)] = made
        made._loaded, made._steps = True, self._steps
        with torch.no_grad():
            for name, parameter in made._tree.own.items():
                local_of(parameter).copy_(local_of(own[name]))  # type: ignore[arg-type]
        return made

    def watch_originals(self, models: Mapping[str, nn.Module], held: Collection[str] = ()) -> None:
        """Refuse later changes of the original ``models`` (by path), see `guards.original_model.OriginalModel`.
        ``held``: names of tensors that user code holds beside the model."""

        def written() -> set[str] | None:
            if not any(kind.train for kind in self._cache.kinds()):
                return None
            outputs = (s for runner in self._cache.runners for s in runner.compiled.signature.outputs)
            return {s.name for s in outputs if s.kind == "mutation"}

        self._origin = Origin(models, self._tree, self._groups, held, written)

    def generate_with(self, generation: Any) -> None:
        """Take what ``generate`` and ``generate_batch`` of a library's models are replaced by."""
        self._generation = generation

    def keeps_unsharded(self) -> bool:
        """Whether gathered parameters outlive a step now: within `keep_unsharded`."""
        return self._cache.keep_unsharded

    def for_serving(self) -> ServedWeights:
        """What a server needs of it. Raises ValueError where it has no weights yet."""
        if not self._loaded:
            raise ValueError(_NO_WEIGHTS)
        return ServedWeights(self._groups, self._tree, self._cache.plan, self._lift_to_float64)

    def pad_batches(self, buckets: PaddingBuckets, ahead: Callable[..., None] | None = None) -> None:
        """Pad batches from now on: see `autopar.PaddingBuckets`. ``ahead`` compiles the step of the next longer batch
        in the background."""

        def evaluate(batch: dict[str, Any]) -> Any:
            with torch.no_grad():
                return self._evaluated((), batch)

        deals = self._cache.backend == "eager" and self._cache.plan.options.deal_images
        modules = Modules(self._tree.structure, lambda: ModuleGuards(self._tree.root, modes=False).holds)
        how = (evaluate, modules, self._of_rank, self._lift_to_float64, self._cache.microbatches, deals)
        fitter = BatchPadder(buckets, self._tree.root, self._cache.plan, self._groups, *how)
        self._fitter = fitter
        if ahead is not None:
            self._cache.ahead = lambda structure, batch, how: ahead(structure, batch, fitter.longer(batch), how)

    def observe_steps(self, observer: Callable[[Compiled], None]) -> Callable[[], None]:
        """Call ``observer`` with each step that computes gradients, before it runs. Returns what ends it."""
        self._step_observers.append(observer)
        return lambda: self._step_observers.remove(observer)

    # --- steps --------------------------------------------------------------------------------------------

    @torch.compiler.disable
    def train_step(self, *args: Any, **batch: Any) -> Tensor:
        """Run forward and backward of this rank's shard of the batch, over all microbatches.

        Returns the loss of the global batch: the output called "loss", else every scalar output with a gradient (a
        tuple, if there are several), differentiated together. Gradients accumulate in ``.grad`` of the parameters, as
        with ``backward()``. Raises ValueError for batches that do not fit the model or the mesh.
        """
        with error_context("train_step"), outside(self._groups.device) as surroundings:
            if has_forward_hooks(self):
                raise ValueError(
                    "train_step: does not call hooks of the parallel model (only model(**batch) does), found some; "
                    "register them on the model before parallelize, which traces them, or remove them"
                )
            need_gradients()
            no_anomalies()
            self._need_scaler()
            if self.replicas > 1 and self._shard is None:
                raise ValueError(
                    f"train_step: computes one shard of the batch of {self.replicas} replicas, found no exchange with "
                    "the others; call train_step of autopar.Replicas(model)"
                )
            if self._replay is not None:
                self._replay.begin()
            executor, values = self._prepare(self._named(args, batch), Kind(True, ()), surroundings)
            if not executor.compiled.losses:
                raise ValueError(
                    "train_step: needs a scalar output with a gradient, found none; pass the labels, so that the model "
                    "returns a loss" + misspelled(self._tree.root, batch)
                )
            with self._watch.step(self.training_steps):
                result = executor.run_step(values)
            self._store_gradients(executor, result.gradients)
            store = functools.partial(executor.buffers.store, self._tree, result.outputs, torch.is_grad_enabled())
            if self._shard is None:
                store()
            else:
                self._store_new_buffers = store
            if self._replay is not None:
                self._replay.end()
            return result.losses[0] if len(result.losses) == 1 else tuple(result.losses)  # type: ignore[return-value]

    @torch.compiler.disable
    def own_totals(self, **batch: Any) -> list[Tensor]:
        """What replicas add up before a step: the counts of targets of this batch, and the like. Collective."""
        with error_context("train_step"), outside(self._groups.device) as surroundings:
            number = self.training_steps + 1
            executor, values = self._prepare(self._named((), batch), Kind(True, ()), surroundings, number)
            return executor.own_totals(values)

    def written_buffers(self) -> list[str]:
        """Names of the buffers that training steps so far have written to."""
        outputs = (
            s for runner in self._cache.runners if runner.compiled.train for s in runner.compiled.signature.outputs
        )
        return [s.name for s in outputs if s.kind == "mutation"]

    @contextlib.contextmanager
    def shard_of_batch(self, index: int, totals: list[Tensor]) -> Iterator[None]:
        """Context manager: `train_step` computes one shard of the batch of several replicas, and returns its addend to
        the loss. ``totals``: the sums over all shards of what `own_totals` returns. Buffers stay as they are until
        `store_new_buffers`."""
        self._shard = index, totals
        try:
            yield
        finally:
            self._shard = None

    def store_new_buffers(self) -> None:
        """The step of which a shard was computed last is done: its buffers take effect. They are the same for all
        shards, since they depend on the batch through ``totals`` alone."""
        self._store_new_buffers()

    @torch.compiler.disable
    def forward(self, *args: Any, **batch: Any) -> Any:
        """The model's outputs for this rank's shard of the batch."""
        evaluates = not any(m.training for m in self._tree.root.modules())
        if self._of_rank and self._cannot_differentiate() and (torch.is_grad_enabled() or not evaluates):
            return self._forward_alone(args, batch)
        if evaluates and (not torch.is_grad_enabled() or self._cannot_differentiate()):
            return self._evaluated(args, batch)
        with error_context("the forward"), outside(self._groups.device) as surroundings:
            if reason := self._cannot_differentiate():
                raise ValueError(reason)
            no_anomalies()
            if torch.is_grad_enabled():
                self._need_scaler()
            kind = Kind(True, None, self._tangents)
            if self._replay is not None and torch.is_grad_enabled():
                self._replay.begin()
            executor, values = self._prepare(self._named(args, batch), kind, surroundings)
            with self._watch.step(self.training_steps):
                outputs, paused = executor.run_forward(values, self._shared_buffers())
            executor.buffers.store(self._tree, outputs, torch.is_grad_enabled())
            run = None
            if torch.is_grad_enabled():
                named = self._padded_again(args, batch)
                again = functools.partial(self._with_tangents, named, kind, surroundings)
                unlike = functools.partial(self._unlike, executor, values)
                run = Forward(executor, values | paused.kept, paused, dict(self._tree.own), again, unlike)
                attach(run, outputs)
            return self._rebuilt(executor, outputs, args, batch, run.watch if run is not None else None)

    def _compare_replicas(self) -> None:
        """Raises BitsDiffer if ranks that hold the same shard of a parameter have other values."""
        here = {name: state.local_tensor(p) for name, p in self._tree.here.items()}
        need = "replay: shards that several ranks hold must be bitwise equal"
        way_out = "the memory of one of them has failed, or it was updated differently; load a checkpoint on all"
        try:
            agree_on_pieces(self._groups, here, self._tree.specs, {}, need, way_out)
        except ValueError as error:
            raise BitsDiffer(str(error)) from None

    def _padded_again(self, args: tuple[Any, ...], batch: dict[str, Any]) -> dict[str, Any]:
        named = self._named(args, batch)
        return named if self._fitter is None else self._fitter.padded_again(named)

    def _forward_alone(self, args: tuple[Any, ...], batch: dict[str, Any]) -> Any:
        """The forward of a pipeline or of microbatches; the backward runs both (`_backward_alone`)."""
        with error_context("the forward"), outside(self._groups.device) as surroundings:
            no_anomalies()
            kind = Kind(False, None, own_modes=True)
            executor, values = self._prepare(self._named(args, batch), kind, surroundings)
            written = {*executor.buffers.written.values(), *executor.buffers.bound}
            before = {name: values[name].clone() for name in written if name in values}
            with self._watch.step(self.training_steps):
                outputs = executor.run_step(values).outputs
            executor.buffers.store(self._tree, outputs, differentiated=False)
            made = None
            if torch.is_grad_enabled():
                self._need_scaler()
                how = self._padded_again(args, batch), surroundings, self.training_steps, before
                backward = functools.partial(self._backward_alone, *how)
                made = functools.partial(with_second_forward, parameters=dict(self._tree.own), backward=backward)
            return self._rebuilt(executor, outputs, args, batch, made=made)

    def _backward_alone(
        self,
        named: dict[str, Any],
        surroundings: GlobalTorchState,
        number: int,
        before: Mapping[str, Tensor],
        tangents: dict[int, Tensor],
    ) -> None:
        """Forward and backward of one batch from the gradients of its outputs, by place. ``number``: of its step.
        ``before``: buffers that the forward has written."""
        with error_context("the backward"), outside(self._groups.device):
            given = {f"{COTANGENT}{k}": x for k, x in sorted(tangents.items())}
            kind = Kind(True, (), cotangents=tuple(sorted(tangents)))
            executor, values = self._prepare(named | given, kind, surroundings, number)
            with self._watch.step(number):
                result = executor.run_step({**values, **before})
            self._store_gradients(executor, result.gradients)

    def _cannot_differentiate(self) -> str:
        """Why ``model(**batch)`` cannot be differentiated by autograd, "" if it can."""
        if self._cache.plan.pipeline is not None:
            return (
                "model(**batch): a pipeline schedules forward and backward together, found pp in the mesh; use "
                "train_step(**batch) to train, eval_step(**batch) for outputs"
            )
        count = self._cache.microbatches
        if count > 1:
            return f"model(**batch): works without microbatches, found microbatches={count}; use train_step(**batch)"
        if self.replicas > 1:
            return (
                f"model(**batch): replicas exchange in train_step alone, found replicas={self.replicas}; use "
                "train_step of autopar.Replicas(model), or eval_step(**batch)"
            )
        return ""

    def _unlike(self, executor: Executor, values: Mapping[str, Tensor]) -> str:
        """Names what a forward with these values has read of the model and has changed since, "" if nothing has."""
        if changed := self._cache.changed_since(executor):
            return changed
        now = {**self._tree.pieces(), **self._tree.buffers()}
        read = (name for name in executor.compiled.signature.recomputed or () if name in now)
        return next((name for name in read if now[name].data_ptr() != values[name].data_ptr()), "")

    def _with_tangents(
        self, named: dict[str, Any], kind: Kind, surroundings: GlobalTorchState, names: tuple[str, ...]
    ) -> Executor:
        """The same step with a backward that also starts from these outputs; all later forwards use it."""
        self._tangents = tuple(sorted({*self._tangents, *kind.tangents, *names}))
        return self._cache.runner(kind._replace(tangents=self._tangents), named, surroundings)

    @torch.compiler.disable
    @torch.no_grad()
    def eval_step(self, *args: Any, **batch: Any) -> Any:
        """The model's outputs in eval mode (no dropout, running statistics), without gradients."""
        return self._evaluated(args, batch)

    def _shared_buffers(self) -> Collection[str]:
        return self._origin.shared_buffers() if self._origin is not None else ()

    def _evaluated(self, args: tuple[Any, ...], batch: dict[str, Any]) -> Any:
        with error_context("the evaluation"), outside(self._groups.device) as surroundings:
            kind = Kind(False, None, grad_mode="no_grad")
            executor, values = self._prepare(self._named(args, batch), kind, surroundings)
            with self._watch.step(self.training_steps):
                outputs = executor.run_step(values).outputs
            executor.buffers.store(self._tree, outputs, differentiated=False)
            if torch.is_grad_enabled():
                refuse_gradients(outputs, self._cannot_differentiate(), self._groups.device)
            return self._rebuilt(executor, outputs, args, batch)

    def _rebuilt(
        self,
        executor: Executor,
        outputs: list[Any],
        args: tuple[Any, ...],
        batch: dict[str, Any],
        watch: Any = None,
        made: Made | None = None,
    ) -> Any:
        """Outputs in the user's structure, without padding."""
        found = rebuild_outputs(executor.compiled, outputs, self._groups, watch, self._whole_outputs)
        if self._of_rank:
            others = outputs_of_others(executor.compiled)
            found = of_rank(found, self._groups, batch.get(COUNT) is not None, made, others)
        if self._fitter is None:
            return found
        return self._fitter.trimmed(found, by_name(self._tree.root, args, batch))

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` over all ranks, pipeline stages included; returns the norm before clipping.

        The same result as torch's function, with a single all-reduce; also works with `autopar.GradScaler`. A tied
        weight on several stages counts once. Collective.
        """
        with error_context("clip_grad_norm_"):
            scale = self._scaler.scale_to_take_off() if self._scaler is not None else None
            norm = clip_gradients(
                self._tree.own, self._tree.specs, self._groups, max_norm, norm_type, self._cache.owed(), scale
            )
            if self._scaler is not None and scale is not None:
                self._scaler.taken_off(norm)
            return norm

    def take_scaler(self, scaler: GradScaler) -> Groups:
        """Scale the losses of ``train_step`` from now on; called by `autopar.GradScaler`."""
        if self.replicas > 1:
            raise ValueError(
                "GradScaler: replicas do not agree on a scale, found replicas="
                f"{self.replicas}; compute in bfloat16 (precision='bf16')"
            )
        self._scaler = scaler
        return self._groups

    def _need_scaler(self) -> None:
        if self._scaler is None and self.plan.options.precision.compute == "float16":
            raise ValueError(
                "precision: float16 gradients underflow without loss scaling, found no scaler; create "
                "scaler = autopar.GradScaler(model) before the first step and call scaler.step(optimizer), or compute "
                "in bfloat16"
            )

    def _named(self, args: tuple[Any, ...], batch: dict[str, Any]) -> dict[str, Any]:
        """The inputs by name."""
        return parts_of_outputs(by_name(self._tree.root, args, batch), self._groups.device_mesh)

    def _prepare(
        self, named: dict[str, Any], kind: Kind, surroundings: GlobalTorchState, step: int | None = None
    ) -> tuple[Executor, dict[str, Tensor]]:
        """``step``: of an earlier forward, of which this is the backward."""
        if not self._loaded:
            raise ValueError(_NO_WEIGHTS)
        self._take_entries()
        refused = self._origin.refusal(kind) if self._origin is not None else ""
        check_values(named, differentiated=kind.train)
        if self._fitter is not None and step is None:
            named = self._fitter.fit(named, outputs=kind.outputs is None)
        named = as_captured(self._tree.root, named, self._cache.plan.options.static_inputs)
        # dropout masks depend on the number of the step
        advances = kind.in_own_modes and step is None
        number = self.training_steps + 1 if advances else step
        try:
            executor = self._cache.runner(kind, named, surroundings, number, refused)
        except ValueError as error:
            if not refused and (hint := misspelled(self._tree.root, named)):
                raise refusal_like(error, f"{error}{hint}") from error
            raise
        if executor.compiled.signature.asks_grad_mode and kind.grad_mode != grad_mode():
            kind = kind._replace(grad_mode=grad_mode())
            executor = self._cache.runner(kind, named, surroundings, number)
        pieces, buffers = self._tree.pieces(), plain_buffers(self._tree, executor.compiled, kind.train)
        values = {**pieces, **buffers, **executor.constants}
        self.training_steps += advances
        for observer in self._step_observers if kind.train else ():
            observer(executor.compiled)
        self._last_use = now() if kind.train else self._last_use
        given = tensors_of(named)
        self._watch.check_size(given, self.training_steps)
        for name, value in given.items():
            plain = value if type(value) is Tensor else value.as_subclass(Tensor)  # results would keep the subclass
            values[name] = to_device(plain, self._groups.device)  # contiguous, as compiled for
        seed = step_seed(self._seed, self.training_steps if step is None else step)
        scaled = self._scaler is not None and not kind.cotangents  # these come from a loss that is scaled already
        values[SCALE] = self._scaler.seed * self._weight if scaled and self._scaler else self._weight
        executor.totals = None
        if self.replicas > 1:
            present = self.shards_present * executor.compiled.plan.options.microbatches
            values[PRESENT] = torch.full((), float(present), device=self._groups.device)
        if self._shard is not None:
            index, executor.totals = self._shard
            values[REPLICA_SHARD] = torch.tensor(index)
        values |= {name: torch.full((), seed, device=self._groups.device) for name in executor.seeds}  # without a copy
        return executor, values

    def _store_gradients(self, executor: Executor, gradients: Mapping[str, Tensor]) -> None:
        own, specs = self._tree.held, executor.specs
        found = [(own[specs[node].name], x.contiguous()) for node, x in gradients.items()]
        if self._groups.mesh.size(STAGES) > 1:  # in the order of the model on all stages, since hooks may communicate
            here, trained = dict(found), [own[specs[node].name] for node in executor.trained]
            found = [(p, here[p] if p in here else state.no_elements(p)) for p in trained]
        state.set_gradients(found, self._observers)

    @contextlib.contextmanager
    def loss_weight(self, weight: float) -> Iterator[None]:
        """Context manager: `train_step` scales gradients by ``weight`` and returns the unscaled loss. For means over
        several calls, such as gradient accumulation in a loop. Enter and leave it on all ranks."""
        before, self._weight = self._weight, torch.full_like(self._weight, number("weight", weight))
        try:
            yield
        finally:
            self._weight = before

    @contextlib.contextmanager
    def keep_unsharded(self) -> Iterator[None]:
        """Context manager: parameters are gathered in the first step and stay unsharded until exit. For several
        `train_step` per ``optimizer.step()``, and for evaluation. Weights must not change inside. Enter and leave it on
        all ranks.

        Raises RuntimeError at a step if a weight has changed; writes through ``.data`` are not detected.
        """
        outermost = not self._cache.keep_unsharded
        self._cache.keep_weights(True)
        try:
            yield
        finally:
            if outermost:
                self._cache.keep_weights(False)

    # --- dumps --------------------------------------------------------------------------------------------

    def dump(self, folder: str | Path) -> None:
        """Write the graphs of the last compiled step, after each pass, the plan and a report to a folder. Recompiles
        the step."""
        folder = a_path("folder", folder)
        if not self._cache.runners:
            raise ValueError(
                "dump: needs a compiled step, found none before the first step; run one, or set AUTOPAR_DUMP before it"
            )
        self._cache.dump(folder, health=self._cache.health.read().rows())

    def trace(self, folder: str | Path, **batch: Any) -> Tensor:
        """Run a `train_step` that records when every action runs; returns its loss.

        Writes what `dump` writes; the measured and the simulated timeline as a Chrome trace (``trace.json``), with the
        modules inside each action; the tokens per expert so far (`expert_load`); and the bytes of tokens that each rank
        has sent to experts. Collective.
        """
        self.train_step(**batch)  # compile and warm up
        executor = self._cache.last
        assert executor is not None
        executor.record, before = True, executor.traffic
        try:
            loss = self.train_step(**batch)
        finally:
            executor.record = False
        found: list[Any] = [None] * self._groups.mesh.world_size
        with error_context("trace"):
            modules = executor.modules if self._groups.is_first_of_stage else []  # large: one rank per stage is enough
            rows = rows_sent(ledger_between(before, executor.traffic))
            torch.distributed.all_gather_object(found, (self._groups.coordinate, executor.timeline, rows, modules))
            load = {} if self._cache.backend == "cudagraphs" else self.expert_load()
        sent = {
            axis: [of_rank.get(axis, 0) for _, _, of_rank, _ in found]
            for axis in sorted({a for _, _, of_rank, _ in found for a in of_rank})
        }
        measured = {"load": {layer: x.tolist() for layer, x in load.items()}, "sent": sent}
        actions, modules = per_rank(x[:2] for x in found), per_rank((x[0], x[3]) for x in found)
        health = self._cache.health.read().rows()
        self._cache.dump(folder, executor, recorded=actions, modules=modules, health=health, **measured)
        return loss


def step_seed(seed: int, step: int) -> int:
    """The seed of the dropout masks of a step; the first training step is 1."""
    return seed + 1_000_003 * step
