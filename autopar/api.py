"""`parallelize`: from a module to a `ParallelModule` on a mesh.

skeleton    = skeleton_of(model)           the module without weights
plan, specs = stored_plan(skeleton)        capture, canonicalize, plan; or read the plan from the compile cache
ParallelModule(...)                        each rank keeps its shards
.train_step(batch)                         stored_step(skeleton, batch) -> lower -> run; compiled once per batch shape
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW

from autopar.ac_policies import FUSED
from autopar.adapters.copying.fake import skeleton_of
from autopar.adapters.quantized_weights import with_plain_weights
from autopar.adapters.tensors.held_memory import referenced_elsewhere
from autopar.adapters.versions import version_errors, warn_of_newer
from autopar.auto.finish import Finalist, fastest
from autopar.auto.machine import layouts_for, lengthened, rows_of, world_mesh
from autopar.auto.timed_steps import timed_steps
from autopar.cache.background_compile import BackgroundCompile
from autopar.cache.compile_cache import stored_plan, stored_step
from autopar.capture.front_end import adapter_for, as_captured, buffers_of, model_dtypes
from autopar.compile.parameters import for_whole_batch
from autopar.compile.shared_capture import SharedCapture
from autopar.cost.axis_shares import repeated
from autopar.errors import refusal_like
from autopar.generation import Generation
from autopar.ir.batch import facts_of
from autopar.ir.mesh import Mesh
from autopar.ir.signature import ParameterSpec
from autopar.options import DECLARED, OTHER_WORDS, Options
from autopar.plan import Plan
from autopar.report.dump.dump import check_writable, dumper_for
from autopar.report.progress import Progress
from autopar.runtime.consistency.rank_checks import agree_on_call, agree_on_model, agree_on_plan, check_source
from autopar.runtime.exec.lowering import BACKENDS
from autopar.runtime.fault.errors import error_context
from autopar.runtime.inputs.call_arguments import by_name, check_input_names, check_values, misspelled
from autopar.runtime.inputs.loss_fn import LOSS, with_loss
from autopar.runtime.inputs.padding import PaddingBuckets, asked_padding
from autopar.runtime.inputs.rank_outputs import RANK
from autopar.runtime.mesh.process_groups import Groups, init_mesh
from autopar.runtime.mesh.roles import Roles
from autopar.runtime.module.argument_checks import (
    check_arguments,
    check_module,
    check_no_gradients,
    check_replicas,
    checks_of,
)
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.optim.step_hooks import note_parameters
from autopar.serve_model import ServeArguments, make_server
from autopar.serve_roles import serve_roles
from autopar.serving.expert_server import ExpertServer
from autopar.serving.server import Server
from autopar.spelling import did_you_mean
from autopar.steps.graphs import Compiled
from autopar.values import whole_number

T = TypeVar("T")
APART = timedelta(milliseconds=1)  # a mesh with another timeout has groups of its own


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh | str,
    *,
    batch: int | None = None,
    finish: int = 0,
    example_batch: Mapping[str, Any] | None = None,
    plan: Plan | None = None,
    backend: str = "eager",
    seed: int = 0,
    lift_to_float64: bool = False,
    dump: str | Path | None = None,
    broadcast_weights: bool = False,
    check_replica_inputs: bool = True,
    check: str | Collection[str] = (),
    padding: str | PaddingBuckets = "exact",
    loss: Callable[[Any, Mapping[str, Any]], Any] | None = None,
    outputs_with_grad: bool | str = False,
    **options: Any,
) -> ParallelModule:
    """Put a model on a mesh.

    Args:
        model: any module that torch.export accepts; transformers models work unmodified. A model on the meta device
            loads its weights afterwards. The model is not changed; delete it to free the unsharded weights.
        mesh: from `autopar.init_mesh`, or a torch DeviceMesh whose dims are named pp, dp_replicate, dp, cp, ep, tp. Or
            "auto": mesh and options are chosen for the ranks of this world and their chip (`autopar plan --auto`
            explains the same choice); ``options`` stay as they are given. The choice is ``model.plan``, and logged.
        batch: with mesh="auto", the examples of a step over all ranks and microbatches.
        finish: with mesh="auto", how many of the first layouts are measured, a few steps each with AdamW, on the ranks;
            the fastest that ran is kept. By default none is, and the first is taken.
        example_batch: keyword arguments of the forward (the batch of one rank), from which the placements of
            parameters are planned. Not needed for transformers models.
        plan: a plan to use instead of making one, such as ``plan.override({...})`` of an earlier one.
        backend: "eager" runs step graphs as generated code, "inductor" compiles them; "cudagraphs" and
            "inductor+cudagraphs" also capture whole steps in CUDA graphs (`autopar/runtime/exec/cuda_graphs.py`).
        seed: of dropout. Masks depend on the seed, the step, and the position of an element in the global batch, and
            not on the mesh.
        lift_to_float64: compute the float32 islands (norms, losses) of a float64 model in float64, for comparisons.
        dump: folder to write the graphs after each pass, the plan and a report to; also $AUTOPAR_DUMP.
        broadcast_weights: broadcast all weights and buffers from rank 0, tensor by tensor; the models of other ranks
            may be on the meta device. Otherwise the weights of all ranks are compared, and a difference is an error.
        check_replica_inputs: check at every step that ranks which must get equal inputs do (all inputs over tp, pp
            and cp; inputs without a batch dim over dp, too), by a hash computed on the device of the tensors.
        check: what is checked while the model trains, one name or several. "finite": that losses and gradients are; a
            step of which they are not raises FloatingPointError on all ranks and says in which module and line that
            arose. It leaves the weights as they were, and ``.grad`` too. "replay", or "replay:20": every 100th (20th)
            training step is made twice, and replicas and memory are compared; bits that differ raise BitsDiffer, with
            the rank, action and tensor. Their prices: `docs/reliability.md`.
        padding: "exact" compiles a step for each batch shape; "bucket" pads tokens to 64, 128, 256 ... and examples
            to those of the largest batch so far, where padding does not change the loss; or
            `autopar.PaddingBuckets(...)`.
        loss: a custom loss: a function of (outputs, batch), or such a module, that returns the loss. It is traced
            together with the model, and right on every mesh (`autopar/runtime/inputs/loss_fn.py`). Inputs that the
            forward does not take are passed to the loss alone.
        outputs_with_grad: True: ``model(**batch)`` returns plain tensors of the global batch on every rank, and each
            rank computes the same loss from them: ``my_loss(out.logits).backward()``. "rank": plain tensors of the
            rank's own examples, from which it computes its own loss; gradients are those of the mean over
            data-parallel ranks, as with DistributedDataParallel (`autopar/runtime/inputs/rank_outputs.py`). With
            pipelines or microbatches the backward then computes the forward once more. Otherwise outputs are DTensors,
            also with gradients.
        options: fields of `autopar.Options`, which documents them: zero=3, microbatches=8 ...

    Raises ValueError, on every rank and before any collective, for sizes that do not divide, a model that cannot be
    captured, or a plan of another model.
    """
    if (isinstance(mesh, str) and mesh == "auto") or batch is not None or finish:
        _check_auto(mesh, batch, finish, plan, model)
        how = {
            "seed": seed, "backend": backend, "broadcast_weights": broadcast_weights, "loss": loss,
            "lift_to_float64": lift_to_float64, "example_batch": example_batch,
        }  # fmt: skip
        mesh, options = _chosen(model, world_mesh(), batch or 0, finish, how, options)
    groups = Groups(mesh)  # type: ignore[arg-type]  # it refuses what is no mesh
    with error_context("parallelize"):
        asked, buckets = _options(options), asked_padding(padding)
        how = {
            "seed": seed, "backend": backend, "lift_to_float64": lift_to_float64, "padding": padding,
            "broadcast_weights": broadcast_weights, "check_replica_inputs": check_replica_inputs,
            "outputs_with_grad": outputs_with_grad,
        }  # fmt: skip
        model = with_plain_weights(model)
        check_module(model)
        shared_memory = referenced_elsewhere(model)
        check_no_gradients(model)
        check_arguments(asked, dump, plan, example_batch, **how)
        checks = checks_of(check)
        check_replicas(asked, backend, padding, checks)
        check_writable(dump)
        originals = {"": model} | ({LOSS: loss} if isinstance(loss, nn.Module) else {})
        model = model if loss is None else with_loss(model, loss)
        agree_on_call(groups, options | how | {"check": checks})
        check_input_names(model, "batch_dims", dict(asked.batch_dims))
        check_input_names(model, "static_inputs", asked.static_inputs)
        load_adapters(model)
        values, buffers = _weights(model, groups, broadcast_weights)

        chosen = for_backend(backend, plan.options if plan is not None and not options else asked)
        skeleton, captured = skeleton_of(model, model_dtypes(model, chosen.precision).stored), SharedCapture()
        found, specs = _planned(model, skeleton, example_batch, groups.mesh, chosen, plan, lift_to_float64, captured)
        agree_on_plan(groups, found)
        note_parameters(p for _, p in model.named_parameters())

        def made(
            captured: SharedCapture, broadcast: bool, skeleton: nn.Module, specs: Any, values: Any, buffers: Any
        ) -> ParallelModule:
            parallel = ParallelModule(
                skeleton, _compiler(groups, chosen, lift_to_float64, dump, captured), groups, found, specs, values,
                buffers, backend, seed, broadcast, check_replica_inputs, chosen.microbatches, outputs_with_grad,
                lift_to_float64, checks, chosen.replicas, lambda *state: made(SharedCapture(), False, *state),
            )  # fmt: skip
            served = parallel.for_serving, parallel.keeps_unsharded, example_batch, outputs_with_grad == RANK
            parallel.generate_with(Generation(*served))
            if buckets is not None:
                parallel.pad_batches(buckets, _ahead(groups, chosen, lift_to_float64, dump) if buckets.ahead else None)
            return parallel

        parallel = made(captured, broadcast_weights, skeleton, specs, values, buffers)
        parallel.watch_originals(originals, shared_memory)
        return parallel


def _check_auto(mesh: Any, batch: Any, finish: Any, plan: Plan | None, model: nn.Module) -> None:
    """Raises ValueError for arguments that do not go with mesh="auto", or only with it."""
    if mesh != "auto":
        way = f"pass autopar.init_mesh(...) instead of {mesh!r}" if isinstance(mesh, str) else "leave the batch out"
        raise ValueError(f'parallelize: chooses a mesh for a batch with mesh="auto", found another mesh; {way}')
    if batch is None:
        raise ValueError('parallelize: mesh="auto" needs the examples of a step of all ranks; pass batch=512')
    whole_number("batch", batch, least=1)
    if whole_number("finish", finish) and any(p.is_meta for p in model.parameters()):
        raise ValueError("parallelize: finish= measures steps, found a model without weights; build it on a device")
    if plan is not None:
        raise ValueError('parallelize: mesh="auto" makes a plan, found plan= as well; pass the mesh of the plan')


def _chosen(
    model: nn.Module, world: DeviceMesh, batch: int, finish: int, how: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[DeviceMesh, dict[str, Any]]:
    """(mesh, options) for mesh="auto". how: other arguments of `parallelize`."""
    with error_context("parallelize"):
        _options(options)  # for its refusals
        model = with_plain_weights(model)
        check_module(model)
        load_adapters(model)
        loss, given = how["loss"], how["example_batch"]
        whole = model if loss is None else with_loss(model, loss)
        example = next((one for one in examples_of(whole, given) if _only_tensors(one)), None)
        if example is None:
            raise ValueError('parallelize: mesh="auto" needs a batch of tensors; pass example_batch={...}')
        example = example if given is not None else lengthened(example, model)
        skeleton = skeleton_of(whole, model_dtypes(whole, Options(**options).precision).stored)
        groups = Groups(world)
        found = layouts_for(groups, skeleton, batch, example, options, finish or 1)

    def run(one: Finalist, number: int) -> float:
        mesh = init_mesh(None, groups.timeout + number * APART, **one.sizes)
        parallel = parallelize(model, mesh, **how, **{**one.options, **options})
        rows = batch // parallel.plan.mesh.data_size
        found = timed_steps(parallel, AdamW(parallel.parameters(), lr=0.0), rows_of(example)(rows), groups.device)
        del parallel
        gc.collect()  # its shards: the next one has its own
        return found

    best = fastest(groups, found, run) if finish else found[0]
    return init_mesh(None, **best.sizes), {**best.options, **options}


def _only_tensors(batch: Mapping[str, Any]) -> bool:
    return all(isinstance(value, Tensor) for value in batch.values())


def serve(
    model: nn.Module,
    mesh: DeviceMesh | Roles | None = None,
    *,
    max_length: int,
    cache: int | float | str | None = None,
    page_size: int | None = None,
    step_tokens: int = 512,
    max_running: int = 64,
    max_waiting: int = 1024,
    step_sizes: Sequence[int] = (),
    split_kv: bool = True,
    keep_unsharded: bool | None = None,
    backend: str = "eager",
    weights: str | Path | None = None,
    microbatches: int | None = None,
    apart: str | None = None,
    example_batch: Mapping[str, Any] | None = None,
    dump: str | Path | None = None,
    **options: Any,
) -> Server | ExpertServer:
    """Serve a causal language model on a mesh: requests join and leave, each with its own sampling. Collective.

    Args:
        model: a model as for `parallelize`, or one that is parallelized already, which is served with its weights as
            they are placed for training. What it caches is found in its graph: every causal attention, on any mesh but
            cp. A model with recurrent or convolution states is refused.
        mesh: as for `parallelize`; not for a model that has one. Ranks along dp, dp_replicate and ep have requests of
            their own, those along tp and pp work on the same ones. Or `autopar.init_roles(...)`: attention and experts
            on ranks of their own.
        max_length: most tokens of a request, prompt included.
        cache: bytes of keys and values per rank, "8GB"; by default what ``memory_limit`` leaves, 0.9 of a GPU's free
            memory, or on a CPU eight requests of ``max_length``.
        page_size: tokens of a page of the cache; 64 on CPUs, 256 on GPUs. Prefixes are shared by whole pages.
        step_tokens: most tokens of a step; longer prompts are computed in chunks.
        max_running, max_waiting: most requests that run at a time, per replica, and that wait.
        step_sizes: numbers of tokens, and of rows of logits, to which steps are padded, such as (8, 64, 512); by
            default none are.
        split_kv: False: with ``step_sizes`` of one size, the bits of a request's logits depend on no other request,
            as long as its prompt is computed in the same chunks.
        keep_unsharded: gather and cast parameters once for all steps, which takes their memory, or in every step; by
            default the latter for a model that is parallelized already.
        backend: "eager" or "inductor".
        weights: a folder of safetensors with transformers' names, from which each rank reads its shards; for a model on
            the meta device.
        microbatches: of roles: into how many microbatches the requests of a step are dealt, which take turns between
            attention and experts; 3 by default.
        apart: of roles: "experts", which is the default, or "mlp": all MLPs of a dense model, of whose width each node
            of experts has a slice.
        example_batch: as for `parallelize`.
        dump: folder to write the graphs after each pass to.
        options: of `parallelize`; of roles lift_to_float64 and precision alone.

    Returns a `Server`, on all ranks but those of experts: see its docstring for who calls what. Ranks of experts get an
    `ExpertServer`, whose `run` answers until the server is closed. Raises ValueError, on all ranks, for a
    model whose tokens depend on others in another way than by causal attention, a ``max_length`` beyond its positions,
    a cache that does not hold one request.
    """
    arguments: dict[str, Any] = {
        "max_length": max_length, "cache": cache, "page_size": page_size, "step_tokens": step_tokens,
        "max_running": max_running, "max_waiting": max_waiting, "step_sizes": step_sizes, "split_kv": split_kv,
        "backend": backend,
    }  # fmt: skip
    if isinstance(mesh, Roles):
        how = {"microbatches": microbatches, "apart": apart, "keep_unsharded": keep_unsharded, **options}
        load_adapters(model)
        return serve_roles(model, mesh, arguments, how, weights, example_batch, dump)
    if given := "microbatches" if microbatches is not None else "apart" if apart is not None else "":
        raise ValueError(
            f"serve: {given} is for experts on ranks of their own, found a mesh; pass autopar.init_roles(...)"
        )
    keeps = not isinstance(model, ParallelModule) if keep_unsharded is None else keep_unsharded
    if not isinstance(model, ParallelModule):
        if mesh is None:
            raise ValueError("serve: needs a mesh for a model that is not parallelized; pass autopar.init_mesh(...)")
        model = parallelize(model, mesh, example_batch=example_batch, **options)
        if weights is not None:
            model.load_pretrained(weights)
    elif options or weights is not None:
        raise ValueError(
            f"serve: the model is parallelized already, found {next(iter(options), 'weights')!r}; leave it out"
        )
    found = model.for_serving()
    if mesh is not None and mesh is not found.groups.device_mesh:
        raise ValueError("serve: the model is on a mesh already, found another one; leave it out")
    with error_context("serve"):
        asked = ServeArguments.checked(found.groups.device.type, **arguments)
    return make_server(found, asked, keeps, example_batch, dump)


def _planned(
    model: nn.Module,
    skeleton: nn.Module,
    example_batch: Mapping[str, Any] | None,
    mesh: Mesh,
    options: Options,
    given: Plan | None,
    lift_to_float64: bool,
    captured: SharedCapture,
) -> tuple[Plan, tuple[ParameterSpec, ...]]:
    """Capture a skeleton with an example batch and plan its parameters. ``captured`` keeps the graph for the first
    step."""

    def plan_of(batch: Mapping[str, Any]) -> tuple[Plan, tuple[ParameterSpec, ...]]:
        return for_whole_batch(
            lambda whole: stored_plan(
                skeleton, whole, mesh, options, given, lift_to_float64=lift_to_float64, shared=captured
            ),
            lambda found: found[0], skeleton, batch, mesh, options, given,
        )  # fmt: skip

    examples = [as_captured(model, batch, options.static_inputs) for batch in examples_of(model, example_batch)]
    return planned_with(examples, model, example_batch is None, plan_of)


def _weights(
    model: nn.Module, groups: Groups, broadcast_weights: bool
) -> tuple[dict[str, Tensor | None], dict[str, Tensor]]:
    """(parameters, buffers) of this rank by name; None for a parameter on the meta device. All ranks must have the same
    values, or rank 0 all of them to broadcast."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    values: dict[str, Tensor | None] = {name: None if p.is_meta else p for name, p in parameters.items()}
    buffers, given = buffers_of(model, may_lack=broadcast_weights and groups.rank > 0)
    tensors = parameters | dict(model.named_buffers(remove_duplicate=False))
    agree_on_model(groups, tensors, None if broadcast_weights else values | given)
    if broadcast_weights:
        check_source(groups, values | given)
    return values, buffers


def _compiler(
    groups: Groups, options: Options, lift_to_float64: bool, dump: str | Path | None, shared: SharedCapture
) -> Callable[..., Compiled]:
    """A function that compiles a skeleton for the batch of one rank; its result is the same on all ranks. Its argument
    ``unchanged``: the modules are still those that ``shared`` has captured."""

    def compiler(skeleton: nn.Module, batch: Mapping[str, Any], unchanged: bool = False, **how: Any) -> Compiled:
        if not unchanged:
            shared.forget()
        # an evaluation accumulates no gradients and drops no tokens
        chosen = (
            options if how["train"] else dataclasses.replace(options, microbatches=1, replicas=1, capacity_factor=0.0)
        )
        measured = {name: how.pop(name) for name in ("recorded", "modules", "load", "sent", "health") if name in how}
        folder = dumper_for(how.pop("dump", dump))
        progress = Progress(f"compiling {type(skeleton).__name__}").begin() if groups.rank == 0 else None
        observers = [watch for watch in (folder, progress) if watch is not None]
        try:
            result = for_whole_batch(
                lambda whole: stored_step(
                    skeleton, whole, groups.mesh, chosen, lift_to_float64=lift_to_float64, observers=observers,
                    shared=shared, observed=folder is not None, **how
                ),
                lambda made: made.plan, skeleton, batch, groups.mesh, chosen, how.get("fixed"),
            )  # fmt: skip
        finally:
            if progress is not None:
                progress.close()
        if folder is not None:
            folder.add_compiled(result, **measured)
        for text in repeated(result.plan) if how["train"] and groups.rank == 0 else ():
            warnings.warn(text, stacklevel=2)
        return result

    return compiler


def _ahead(
    groups: Groups, options: Options, lift_to_float64: bool, dump: str | Path | None
) -> Callable[..., None] | None:
    """Compiles steps in the background, on one rank of each machine, unless compiled graphs are dumped."""
    first = int(os.environ.get("LOCAL_RANK", groups.rank)) == 0
    watched = dump is not None or os.environ.get("AUTOPAR_DUMP")
    return BackgroundCompile(groups.mesh, options, lift_to_float64).ask if first and not watched else None


def _options(given: Mapping[str, Any]) -> Options:
    unknown = sorted(set(given) - set(DECLARED))
    if unknown:
        hint = did_you_mean(unknown[0], [*DECLARED, *(parallelize.__kwdefaults__ or ())], OTHER_WORDS)
        known = ", ".join(sorted(DECLARED))
        raise ValueError(f"parallelize: unknown option {unknown[0]!r}; the options are {known}{hint}")
    return Options(**given)


def for_backend(backend: str, options: Options) -> Options:
    """The options with a backend's default policy of activation checkpointing: a compiled backward recomputes within
    its kernels what costs more to keep."""
    if options.activation_checkpoint or options.memory_limit or BACKENDS[backend][0] != "inductor":
        return options
    return dataclasses.replace(options, activation_checkpoint=FUSED)


def load_adapters(model: nn.Module) -> None:
    """Import the adapters of the libraries that a model uses. Raises ValueError for a library that is too old."""
    warn_of_newer("torch")
    if any(cls.__module__.startswith("transformers.") for m in model.modules() for cls in type(m).__mro__[:2]):
        with version_errors("transformers"):
            importlib.import_module("autopar.models.hf")


def examples_of(model: nn.Module, given: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Candidate batches of one rank to plan parameters with: the user's, else those of the model's adapter."""
    if given is not None:
        named = by_name(model, (), given)
        check_values(named, differentiated=False, shapes_only=True)
        return [named]
    adapter = adapter_for(model)
    batches = adapter.example_batches(model) if adapter is not None else []
    if not batches:
        raise ValueError(
            f"parallelize: needs to know the inputs of {type(model).__name__} to plan its parameters; "
            f"pass example_batch={{...}}, the keyword arguments of its forward"
        )
    return list(batches)


def planned_with(
    examples: Sequence[Mapping[str, Any]], model: nn.Module, guessed: bool, plan: Callable[[Mapping[str, Any]], T]
) -> T:
    """The plan from the first example that the model runs with. ``guessed``: the examples are not the user's."""
    for example in examples[:-1]:
        with contextlib.suppress(ValueError):
            return plan(example)
    try:
        return plan(examples[-1])
    except ValueError as error:
        if not guessed or "with these inputs" not in str(error):  # the batch is not the cause
            if hint := "" if guessed else misspelled(model, examples[-1]):
                raise refusal_like(error, f"{error}{hint}") from error
            raise
        tried = "; ".join(", ".join(facts_of(example)) for example in examples)
        raise ValueError(
            f"parallelize: needs to know the inputs of {type(model).__name__} to plan its parameters, found none that "
            f"its forward runs with (tried {tried}): {error}; pass example_batch={{...}}, the keyword arguments of its "
            "forward"
        ) from error
