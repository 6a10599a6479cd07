"""ParallelModule: the user's model on a mesh.

It holds this rank's pieces of the parameters as DTensors under their original names, compiles a step for each new
shape of the batch, and runs it. Everything that torch knows to do with parameters (optimizers, clipping, checkpoints)
works on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.adapters.hooks import has_forward_hooks
from autopar.batch import tensors_of
from autopar.capture import Signature
from autopar.parameter import ParameterSpec
from autopar.pipeline_dump import per_rank
from autopar.placement import PARTIAL, Placement, Shard
from autopar.plan import Plan
from autopar.rules import result_placements
from autopar.runtime import state
from autopar.runtime.agreement import Claim, agree_on, everywhere
from autopar.runtime.batches import claim_contents, claim_shapes, facts_of, shapes_of
from autopar.runtime.clipping import clip_gradients
from autopar.runtime.comm import Ledger, add_ledgers
from autopar.runtime.executor import Executor, digest_of, has_losses
from autopar.runtime.failures import reporting
from autopar.runtime.groups import Groups
from autopar.runtime.inputs import by_name, check_values
from autopar.runtime.names import make_owners, owner_of
from autopar.runtime.pipeline import PipelineExecutor
from autopar.runtime.stateful import Stateful
from autopar.runtime.watch import Watch
from autopar.steps import Compiled

Compiler = Callable[..., Compiled]
Key = tuple[Any, ...]
Runner = Executor | PipelineExecutor


class ParallelModule(Stateful):
    """A model on a mesh, made by `autopar.parallelize`.

    ``train_step(**batch)``: forward and backward of all micro-batches; returns the loss of the whole batch.
    ``model(**batch)``: the model's own output structure; its loss has a ``backward()``. Outputs other than losses are
    DTensors over the mesh, as they are cut; they carry no gradient.
    ``eval_step(**batch)``: the same in eval mode, without gradients.

    Every rank of a dp group passes the same batch, its dp part of the whole; as with DistributedDataParallel.
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
        sync: bool = False,
        check_batches: bool = True,
    ) -> None:
        super().__init__()
        self._skeleton = [skeleton]  # in a list: its (meta) parameters are not this module's
        self._compiler, self._groups, self._backend, self._seed = compiler, groups, backend, seed
        self._plan, self._specs, self._check_batches = plan, specs, check_batches
        self._executors: dict[Key, Runner] = {}
        self._batches: dict[Key, dict[str, Any]] = {}  # shapes only, on the meta device
        self._steps = state.StepCount(groups)
        self._watch = Watch(groups)
        self._loaded = sync or all(values.get(s.name) is not None for s in specs)
        # with pipeline stages: what this rank's stages use
        self._own: dict[str, nn.Parameter] = state.make_parameters(specs, values, groups, sync)
        make_owners(self, skeleton, [*values, *buffers])
        tied = {name: s.name for s in specs for name in (s.name, *s.aliases)}
        for name in values:  # in the model's order, not that of the graph
            if tied[name] in self._own:
                owner_of(self, name, skeleton).register_parameter(name.rpartition(".")[2], self._own[tied[name]])
        persistent = set(skeleton.state_dict())
        copies = state.own_buffers(buffers, groups, sync)  # steps write to them
        for name, buffer in copies.items():
            owner = owner_of(self, name, skeleton)
            owner.register_buffer(name.rpartition(".")[2], buffer, persistent=name in persistent)

    # --- what it is ---------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The decisions: of the last compiled step, or of the parameters before the first one."""
        return next(reversed(self._executors.values())).compiled.plan if self._executors else self._plan

    @property
    def mesh(self) -> Any:
        """The torch DeviceMesh."""
        return self._groups.device_mesh

    @property
    def parameter_specs(self) -> tuple[ParameterSpec, ...]:
        return self._specs

    def compiled(self) -> list[Compiled]:
        """Everything compiled so far, oldest first."""
        return [e.compiled for e in self._executors.values()]

    def traffic(self) -> Ledger:
        """Calls and bytes sent by this rank so far, by (axis, kind)."""
        return add_ledgers(*(e.traffic for e in self._executors.values()))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            skeleton = self.__dict__.get("_skeleton")
            if skeleton is None or name.startswith("_"):
                raise
            value = getattr(skeleton[0], name)  # config, main_input_name, ...
            if isinstance(value, (nn.Module, Tensor)):
                raise AttributeError(f"{name!r} of the original model is not on the mesh") from None
            return value

    def register_full_backward_hook(self, *args: Any, **kwargs: Any) -> Any:
        """Raises ValueError: a step has its own backward."""
        raise ValueError("hooks: a parallel model has its own backward, which calls the hooks of parameters only")

    register_full_backward_pre_hook = register_backward_hook = register_full_backward_hook

    # --- steps --------------------------------------------------------------------------------------------

    def train_step(self, *args: Any, **batch: Any) -> Tensor:
        """Forward and backward of this rank's part of the batch, in all its micro-batches.

        Returns the loss of the whole batch (a scalar, or a tuple of them for a model with several losses); gradients
        accumulate in ``.grad`` of the parameters, as ``backward()`` does. Raises ValueError for batches that do not
        fit.
        """
        with reporting("train_step"):
            if has_forward_hooks(self):
                raise ValueError(
                    "train_step: hooks of the parallel model are called by model(**batch) only; register them on the "
                    "model before parallelize, which traces them, or remove them"
                )
            executor, values = self._prepare(args, batch, train=True, outputs=())
            if not has_losses(executor.compiled):
                raise ValueError(
                    "train_step: the model returns no scalar with a gradient; pass what makes it return a loss (labels)"
                )
            result = executor.train_step(values)
            self._watch.settle(self.training_steps)
            self._store_gradients(executor, result.gradients)
            self._store_buffers(executor.compiled, result.outputs)
            return result.losses[0] if len(result.losses) == 1 else tuple(result.losses)  # type: ignore[return-value]

    def forward(self, *args: Any, **batch: Any) -> Any:
        """The model's outputs for this rank's part of the batch."""
        if not self.training:
            return self.eval_step(*args, **batch)
        with reporting("the forward"):
            if self._plan.pipeline is not None:
                raise ValueError(
                    "model(**batch): a pipeline runs forward and backward in one, stage by stage; use "
                    "train_step(**batch) to train, eval_step(**batch) for outputs"
                )
            executor, values = self._prepare(args, batch, train=True, outputs=None)
            if executor.micro_batches > 1:
                raise ValueError(
                    f"model(**batch): works without micro-batches, found micro_batches={executor.micro_batches}; "
                    "use train_step(**batch)"
                )
            assert isinstance(executor, Executor)
            outputs, saved = executor.run_forward(values)
            self._watch.settle(self.training_steps)
            self._store_buffers(executor.compiled, outputs)
            steps = executor.compiled.steps
            if torch.is_grad_enabled() and steps.backward is not None:
                anchor = torch.zeros((), requires_grad=True, device=self._groups.device)
                losses = _Backward.apply(anchor, self, executor, values, saved, *(outputs[k] for k in steps.losses))
                for k, loss in zip(steps.losses, losses, strict=True):
                    outputs[k] = loss
            return self._rebuild(executor.compiled, outputs)

    @torch.no_grad()
    def eval_step(self, *args: Any, **batch: Any) -> Any:
        """The model's outputs in eval mode (no dropout, running statistics), without gradients."""
        with reporting("eval_step"):
            executor, values = self._prepare(args, batch, train=False, outputs=None)
            outputs, _ = executor.run_forward(values)
            self._watch.settle(self.training_steps)
            return self._rebuild(executor.compiled, outputs)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` over all ranks, pipeline stages included; returns the norm before.

        The function of torch sees the parameters of this rank's stages alone, and would clip every stage by its own
        norm. A tied weight that several stages hold counts once. Collective.
        """
        with reporting("clip_grad_norm_"):
            return clip_gradients(self._own, self._specs, self._groups, max_norm, norm_type)

    def _prepare(
        self, args: tuple[Any, ...], batch: dict[str, Any], train: bool, outputs: tuple[str, ...] | None
    ) -> tuple[Runner, dict[str, Tensor]]:
        if not self._loaded:
            raise ValueError(
                "parallelize: the model came without weights (meta device); load them first with "
                "load_pretrained(folder) or load_state_dict(state)"
            )
        named = by_name(self._skeleton[0], args, batch)
        check_values(named, differentiated=train)
        key = (train, outputs, facts_of(named))
        executor = self._executors.get(key)
        step = f"step {self.training_steps + 1}: " if train else ""  # masks depend on it
        # a store round trip per step: a rank with another batch would otherwise end in a hang
        claims = [claim_shapes(self._groups, named, {"all of it": f"{step}{key}"})]
        agree_on(self._groups, claims + (self._contents(named, executor) if executor else []), "the batch")
        if executor is None:
            executor = self._executors[key] = self._compile(named, train, outputs)
            self._batches[key] = shapes_of(named)
        values = self._state() | executor.compiled.local.meta.get("constants", {})
        self.training_steps += train
        self._watch.check_size(named, self.training_steps)
        values["__seed__"] = torch.tensor(step_seed(self._seed, self.training_steps))
        for name, value in tensors_of(named).items():
            values[name] = value.to(self._groups.device).contiguous()  # the step is compiled for no other strides
        for spec in executor.specs.values():
            if spec.kind == "seed":
                values[spec.name] = values["__seed__"]
        return executor, values

    def _compile(self, batch: Mapping[str, Any], train: bool, outputs: tuple[str, ...] | None) -> Runner:
        compiled = self._compiler(self._skeleton[0], batch, train=train, outputs=outputs, fixed=self._plan)
        run = Executor if compiled.pipeline is None else PipelineExecutor
        executor = run(compiled, self._groups, self._backend)
        same = Claim(
            everywhere(self._groups),
            {"digest": digest_of(compiled)},
            "agree: the compiled step must be the same on all ranks",
            "give every rank the same model, mesh, options and batch shapes",
        )
        agree_on(self._groups, [same, *self._contents(batch, executor)], "the compiled step")
        return executor

    def _contents(self, batch: Mapping[str, Any], executor: Runner) -> list[Claim]:
        """What must be equal of a batch on several ranks."""
        return claim_contents(self._groups, batch, executor.compiled.plan.inputs) if self._check_batches else []

    def _state(self) -> dict[str, Tensor]:
        found = {name: state.local_tensor(p) for name, p in self._own.items()}
        return found | dict(self.named_buffers())

    def _store_gradients(self, executor: Runner, gradients: Mapping[str, Tensor]) -> None:
        specs = {s.name: s for s in self._specs}
        names = {executor.specs[node].name: gradient.contiguous() for node, gradient in gradients.items()}
        state.set_gradients([(self._own[name], g, specs[name]) for name, g in names.items()], self._groups)

    def _store_buffers(self, compiled: Compiled, outputs: list[Any]) -> None:
        if not any(spec.kind == "mutation" for spec in compiled.signature.outputs):
            return
        buffers = dict(self.named_buffers())
        for spec, value in zip(compiled.signature.outputs, outputs, strict=True):
            if spec.kind == "mutation":
                buffers[spec.name].copy_(value)

    def _rebuild(self, compiled: Compiled, outputs: list[Any]) -> Any:
        """The user's structure; tensors become DTensors."""
        signature: Signature = compiled.signature
        nodes = list(compiled.local.graph.nodes)[-1].args[0]
        flat = []
        for spec, node, value in zip(signature.outputs, nodes, outputs, strict=True):
            if spec.kind == "output":
                flat.append(self._wrapped(compiled, node, value) if value.dim() else value)
        return signature.rebuild(flat)

    def _wrapped(self, compiled: Compiled, node: Any, value: Tensor) -> Tensor:
        found = {a: result_placements(_source(node), a)[0] for a in self._groups.mesh.cut_order}
        assert PARTIAL not in found.values(), f"module: output {_source(node).name} is {found}, its sum is pending"
        placements: dict[str, Placement] = {a: p for a, p in found.items() if isinstance(p, Shard)}
        shape = tuple(_source(node).meta["global_shape"])
        return state.wrap(value, ParameterSpec("output", shape, value.dtype, False, (), placements), self._groups)

    # --- dumps --------------------------------------------------------------------------------------------

    def dump(self, folder: str | Path) -> None:
        """Write every level of the last compiled step, the plan and a report to a folder. Compiles it once more."""
        if not self._executors:
            raise ValueError("dump: nothing is compiled before the first step; run one, or set AUTOPAR_DUMP before it")
        self._dump(next(reversed(self._executors)), folder)

    def _dump(self, key: Key, folder: str | Path, **how: Any) -> None:
        train, outputs, _ = key
        batch = self._batches[key]
        self._compiler(self._skeleton[0], batch, train=train, outputs=outputs, fixed=self._plan, dump=folder, **how)

    def trace(self, folder: str | Path, **batch: Any) -> Tensor:
        """A `train_step` of a pipeline that records when every action ran; returns its loss.

        Writes what `dump` writes, the measured timeline beside the simulated one. Collective.
        """
        if self._plan.pipeline is None:
            raise ValueError(f"trace: records the stages of a pipeline, found the mesh {self._groups.mesh}; use dump")
        self.train_step(**batch)  # compiles, and warms up
        executor, _ = self._prepare((), batch, train=True, outputs=())
        assert isinstance(executor, PipelineExecutor)
        executor.record = True
        try:
            loss = self.train_step(**batch)
        finally:
            executor.record = False
        found: list[Any] = [None] * self._groups.mesh.world_size
        with reporting("trace"):
            torch.distributed.all_gather_object(found, (self._groups.coordinate, executor.timeline))
        key = next(k for k, e in self._executors.items() if e is executor)
        self._dump(key, folder, recorded=per_rank(found))
        return loss


def step_seed(seed: int, step: int) -> int:
    """The seed of the dropout masks of a step; the first training step is 1."""
    return seed + 1_000_003 * step


class _Backward(torch.autograd.Function):
    """Ties the losses of a forward step to the backward step graph."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, module: ParallelModule, executor: Executor, values: Any, saved: Any, *losses: Tensor
    ) -> Any:
        ctx.facts = module, executor, values, saved
        return tuple(loss.clone() for loss in losses)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> Any:
        module, executor, values, saved = ctx.facts
        if not saved and executor.compiled.steps.saved:
            raise RuntimeError(
                "backward: this loss was already differentiated, its saved values are gone; run the model again"
            )
        with reporting("the backward"):
            found = executor.run_backward(values, saved, [t.contiguous() for t in tangents])
        names = executor.compiled.steps.gradients
        module._store_gradients(executor, {n: g for n, g in zip(names, found, strict=True) if g is not None})
        return (None,) * (5 + len(tangents))


def _source(node: Any) -> Any:
    """Behind the detach that separates an output from the losses' graph."""
    while "global_shape" not in node.meta:
        node = node.args[0]
    return node
