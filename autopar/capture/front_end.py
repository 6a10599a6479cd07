"""Capture: a module becomes one flat functional graph, with a signature of its inputs and outputs.

    model(input_ids=..., labels=...)   -->   graph(p_wte, p_ln_weight, ..., input_ids, labels) -> (loss, logits)

The graph is a `torch.fx.GraphModule` without attributes: one placeholder for each parameter (tied names share one),
buffer in use, lifted constant and tensor input; then calls of functional operators; then a tuple of tensors. Its
``meta["signature"]`` is a `Signature`, its ``meta["constants"]`` holds the values of lifted constants.

Support for the models of a library is in an adapter, which registers itself in `ADAPTERS`; capture itself imports no
model library.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar import ops as ops  # registers the operators that adapters put into models
from autopar.adapters.copying.fake import FakeTensorMode, fake_like, new_mode, owned_by, structure_copy
from autopar.adapters.distributions import unchecked_distributions
from autopar.adapters.foreach import ONE_BY_ONE
from autopar.adapters.fx.lazy import graph_module
from autopar.adapters.grad_fn_paths import followed_paths
from autopar.capture.branches.buffer_values import BufferValues
from autopar.capture.branches.state_numbers import IntCalls
from autopar.capture.custom_autograd.missing_fakes import with_fake
from autopar.capture.flex.stand_ins import attentions_as_operators, refuse_block_mask
from autopar.capture.layer_dedup.layer_dedup import TraceAnew
from autopar.capture.module_state.assigned import BufferWatch
from autopar.capture.module_state.cumulative_norms import weigh_batches_as_tensors
from autopar.capture.module_state.leftovers import Leftovers, nothing_left
from autopar.capture.module_state.module_changes import changes_as_values
from autopar.capture.module_state.repeated import found_again
from autopar.capture.reads.compared_sizes import SizeLog
from autopar.capture.side_effects.eager_answers import eager_types, noticed_grad_mode
from autopar.capture.side_effects.external_calls import seen_files
from autopar.capture.side_effects.function_watch import FunctionWatch
from autopar.capture.side_effects.other_clocks import asked_out_of_sight
from autopar.capture.side_effects.trace_side_effects import attributes_of, frozen_state
from autopar.capture.side_effects.unseen_effects import seen_effects
from autopar.capture.side_effects.unusual import warn_of
from autopar.capture.trace.compiling import compiling
from autopar.capture.trace.decompositions import fill_diagonal_
from autopar.capture.trace.deterministic_sets import sets_in_order
from autopar.capture.trace.export import export, flatten, paths, unflatten
from autopar.capture.trace.program_checks import refuse_overlaps, refuse_running_values
from autopar.ir.batch import static_inputs_of, tensors_of, with_static_inputs
from autopar.ir.compute_dtypes import Dtypes, cast_around, check_dtypes, dtypes_of, stored_by_name
from autopar.ir.custom_backward import check_contained
from autopar.ir.exported import (
    Made,
    buffers_differentiated,
    read_again,
    refuse_other_gradients,
    refuse_writes_again,
    specs_of_inputs,
)
from autopar.ir.graph import placeholders
from autopar.ir.signature import InputSpec, OutputSpec, Signature
from autopar.ir.weight_conversion import WeightConversion
from autopar.lift_to_float64 import LiftFloat32
from autopar.ops.ctc import functional_ctc_loss
from autopar.ops.grouped_experts import GROUPED_CALLS
from autopar.ops.value_free import VALUE_FREE
from autopar.precision import Precision

__all__ = [
    "ADAPTERS",
    "Adapter",
    "GenerationFacts",
    "InputSpec",
    "LiftFloat32",
    "OutputSpec",
    "Signature",
    "adapter_for",
    "as_captured",
    "capture",
]


@dataclass(frozen=True)
class GenerationFacts:
    """What a library knows of a model that generates. tokens: the input that is the ids. max_length: the
    longest sequence, 0 if there is no limit. eos_token_ids: ends of text. config: the library's own description of how
    the model generates."""

    tokens: str
    max_length: int = 0
    eos_token_ids: tuple[int, ...] = ()
    config: Any = None


class OwnFolder(Protocol):
    """A checkpoint folder in a library's own format. names: the tensors in it."""

    names: set[str]

    def write(self, folder: Path, state: Mapping[str, Tensor]) -> None:
        """Write a folder. ``state``: unsharded tensors by name."""
        ...

    def read(self, folder: Path) -> dict[str, Tensor]:
        """Read a folder: unsharded tensors by name. Raises ValueError for a folder of another model."""
        ...


class Adapter(Protocol):
    """Support for capturing the models of one library."""

    def matches(self, model: nn.Module) -> bool:
        """Is this model one of the library's?"""
        ...

    def prepare(self, model: nn.Module) -> nn.Module:
        """Change the structure copy (never the user's model) so that it can be exported."""
        ...

    def arguments(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments of the forward: the batch without inputs that make no sense in training."""
        ...

    def context(self, batch: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
        """A context manager around the export."""
        ...

    def reference(self, model: nn.Module, capacity: float = 0.0) -> contextlib.AbstractContextManager[None]:
        """A context manager around the eager float64 run that a parallel run is compared with. Raises ValueError if
        it cannot apply ``capacity`` to the experts of the model."""
        ...

    def example_batches(self, model: nn.Module) -> list[dict[str, Any]]:
        """Small batches with labels, for planning before the first real batch: those with the most inputs first, of
        which the first that the model runs with is used. Empty if the inputs are unknown."""
        ...

    def batch_dims(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, int | None]:
        """Path of an input tensor -> its batch dim, or None for an input without one."""
        ...

    def generation(self, model: nn.Module) -> GenerationFacts:
        """How the model generates tokens. Raises ValueError for one that does not."""
        ...

    def in_float32(self, model: nn.Module) -> list[str]:
        """Substrings of the names of parameters that stay in float32 when others compute in half precision."""
        ...

    def buffers(self, model: nn.Module) -> dict[str, Tensor]:
        """Values of the non-persistent buffers of a model on the meta device."""
        ...

    def recipes_to_load(self, model: nn.Module, names: list[str]) -> list[WeightConversion]:
        """Conversions from the tensors of a checkpoint, which have these names, to those of the model."""
        ...

    def recipes_to_save(self, model: nn.Module, names: list[str]) -> list[WeightConversion]:
        """Conversions from the model's tensors of these names to those that the library saves."""
        ...

    def own_folder(self, model: nn.Module) -> OwnFolder | None:
        """The folder format of models that the library saves in its own way, with only some of their tensors."""
        ...


ADAPTERS: list[Adapter] = []


def adapter_for(model: nn.Module) -> Adapter | None:
    """The first registered adapter that matches a model."""
    return next((adapter for adapter in ADAPTERS if adapter.matches(model)), None)


def as_captured(model: nn.Module, batch: Mapping[str, Any], static_inputs: Collection[str]) -> dict[str, Any]:
    """The batch as a step takes it: with what depends on values in it, and with static inputs as constants.

    An adapter may have ``inputs_from_values(model, batch)`` -> (inputs that the forward would compute from values of
    others in ways that cannot be captured, names of inputs that are static besides those that the user names).
    """
    found, out = getattr(adapter_for(model), "inputs_from_values", None), dict(batch)
    if found is None or any(x.is_meta or isinstance(x, FakeTensor) for x in tensors_of(out).values()):
        return with_static_inputs(out, static_inputs)
    more, names = found(model, out)
    return with_static_inputs(out | more, (*static_inputs, *names))


def buffers_of(model: nn.Module, may_lack: bool = False) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
    """(buffers by name, the same with None for those on the meta device). Persistent buffers on the meta device stay
    empty until a checkpoint is loaded; others are an error, unless ``may_lack``: rank 0 will broadcast them.
    """
    found = dict(model.named_buffers(remove_duplicate=False))
    adapter = adapter_for(model)
    made = adapter.buffers(model) if adapter is not None and any(b.is_meta for b in found.values()) else {}
    kept = set(model.state_dict())
    given = {name: made.get(name, None if b.is_meta else b) for name, b in found.items()}
    for name, buffer in given.items():
        if buffer is None and name not in kept and not may_lack:
            raise ValueError(
                f"parallelize: needs values for the non-persistent buffer {name}, found it on the meta device; "
                f"build the model with real buffers (torch.device('meta') around parameters only)"
            )
    empty = {id(b): torch.empty_like(b, device="cpu") for b in found.values() if b.is_meta}
    return {name: empty[id(found[name])] if b is None else b for name, b in given.items()}, given


def model_dtypes(model: nn.Module, precision: Precision) -> Dtypes:
    """The dtypes of a model under a policy. Its adapter may keep some parameters in float32."""
    adapter = adapter_for(model) if precision.compute else None
    return dtypes_of(model, precision, adapter.in_float32(model) if adapter is not None else ())


@compiling
def capture(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    train: bool | None = None,
    lift_to_float64: bool = False,
    autocast: torch.dtype | None = None,
    precision: Precision | None = None,
    grad_mode: str = "grad",
    memo: bool = True,
    trial: bool = False,
    sizes: SizeLog | None = None,
) -> GraphModule:
    """The global graph of ``model(**batch)``.

    ``batch`` holds tensors (real, fake or meta; their shapes and dtypes matter, their values do not), nested tuples,
    lists and dicts of them, and constants (Python's, and `ConstantTensor`), which specialize the graph. The model may
    be on any device, meta included; it is not modified and its parameters are not copied.

    train: mode to put every module into; by default each keeps its own.
    lift_to_float64: see `autopar.lift_to_float64`; needs a float64 model and batch.
    autocast: dtype of a `torch.autocast` around the forward, whose casts become part of the graph.
    precision: dtypes to compute in. Parameters have them in the graph; ``meta["stored_dtypes"]`` has their own.
    grad_mode: grad mode that the forward sees: "grad", "no_grad", "inference".
    memo: trace identical layers once (`autopar.capture.layer_dedup.layer_dedup`); the graph is the same without.
    sizes: notes what the forward decides by sizes of tensors.
    trial: the graph is for a plan, not for a step, so Python values that the forward has cached are removed again;
        ``meta["kept"]`` says whether there were any.

    Raises ValueError that names the line that cannot be captured, and why.
    """
    how = (train, lift_to_float64, autocast, precision or Precision(), grad_mode)
    calls, buffers = IntCalls(), BufferValues(model)
    while True:
        try:
            for blocks in (True, False) if memo else (False,):
                with contextlib.suppress(TraceAnew), nothing_left(trial) as left:
                    gm = _captured(model, batch, *how, blocks, left, sizes, calls, buffers)
                    break
            gm.meta["kept"] = left.taken_back
            if not buffers.leave(s.name for s in gm.meta["signature"].outputs if s.kind == "mutation"):
                return gm
        except ValueError:
            if not calls.new and not buffers.again():
                raise


def _prepared(
    model: nn.Module, batch: Mapping[str, Any], train: bool | None, precision: Precision, mode: FakeTensorMode
) -> tuple[nn.Module, dict[str, Any]]:
    """(a structure copy, the arguments for its forward)"""
    dtypes, adapter = model_dtypes(model, precision), adapter_for(model)
    replica = structure_copy(model, mode, dtypes.used)
    if train is not None:
        replica.train(train)
    arguments = dict(batch)
    if adapter is not None:
        replica = adapter.prepare(replica)
        arguments = adapter.arguments(replica, batch)
    weigh_batches_as_tensors(replica)
    cast_around(replica, dtypes)
    return replica, arguments


def _captured(
    model: nn.Module,
    batch: Mapping[str, Any],
    train: bool | None,
    lift_to_float64: bool,
    autocast: torch.dtype | None,
    precision: Precision,
    grad_mode: str,
    memo: bool,
    left: Leftovers,
    sizes: SizeLog | None,
    calls: IntCalls,
    values: BufferValues,
) -> GraphModule:
    adapter, mode = adapter_for(model), new_mode()
    replica, arguments = _prepared(model, batch, train, precision, mode)
    constants = static_inputs_of(arguments)
    arguments = {name: value for name, value in arguments.items() if name not in constants}
    for path, leaf in paths(arguments):
        refuse_block_mask(path, leaf)
    leaves, spec = flatten(arguments)
    fakes = [fake_like(leaf, mode) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    with contextlib.ExitStack() as stack:
        if adapter is not None:
            stack.enter_context(adapter.context(batch))
        if sizes is not None:
            sizes.events.clear()  # of a capture that is repeated
            stack.enter_context(_forward_within(replica, sizes))
        if lift_to_float64:
            stack.enter_context(_forward_within(replica, LiftFloat32()))
        if constants:
            stack.enter_context(_given(replica, constants))
        stack.enter_context(sets_in_order(replica))
        stack.enter_context(unchecked_distributions())
        left.watch(replica, model)
        watch = stack.enter_context(
            FunctionWatch(replica, owned_by(model), _INSTEAD, left.note, with_fake, calls, values)
        )
        stack.enter_context(calls.replaced(watch.numbers))
        stack.enter_context(changes_as_values(lambda: watch.running, watch.said))
        stack.enter_context(seen_effects(watch.refuse))
        stack.enter_context(noticed_grad_mode(watch.asked_grad_mode, grad_mode, watch.asked_inference))
        stack.enter_context(eager_types(replica))
        stack.enter_context(followed_paths())
        stack.enter_context(seen_files())
        changed = stack.enter_context(frozen_state(replica, left.kept))
        buffers = BufferWatch(replica)
        program = export(replica, unflatten(fakes, spec), autocast, grad_mode, memo=memo)
        if buffers.refused:
            raise ValueError(f"capture: {buffers.refused}")
        if watch.refused is not None:  # the forward caught the exception
            at = f"{watch.refused.place}: " if watch.refused.place else ""
            raise ValueError(f"capture: {at}{watch.refused}") from watch.refused
        for text in watch.said:
            warn_of(text, stacklevel=3)
        refuse_running_values(program, changed)
        refuse_overlaps(program, dict(replica.named_parameters()), owned_by(model).overlaps)
    asked = watch.outside.noted
    named = asked_out_of_sight(replica)
    if names := [*asked, *changed, *left.changed(), *filter(None, [named])]:
        asked = asked if asked or not named else {named: f"{type(model).__name__}.forward"}
        _refuse_running_state(*_prepared(model, batch, train, precision, mode), mode, names, asked)
    for text in watch.outside.said():
        warn_of(text, stacklevel=3)
    unkept = attributes_of(replica, changed)
    facts = {"unkept": tuple(unkept), "memos": tuple(left.kept.items()), "values": tuple(values.asked.items())}
    gm = _finish(program, replica, arguments, buffers, asks_grad_mode=watch.asks_grad_mode, **facts)
    if grad_mode == "grad":
        refuse_other_gradients(gm, watch.gradients)
        refuse_writes_again(gm)
    stored = stored_by_name(model, model_dtypes(model, precision))
    held = [s for s in gm.meta["signature"].inputs if s.kind == "parameter" and s.name in stored]
    gm.meta["stored_dtypes"] = {s.node: stored[s.name] for s in held}
    _refuse_rounded_writes(gm, {s.name: s.node for s in held})
    gm.meta["batch_dims"] = adapter.batch_dims(replica, {**constants, **arguments}) if adapter is not None else {}
    return gm


def _refuse_rounded_writes(gm: GraphModule, nodes: Mapping[str, str]) -> None:
    """Raises ValueError for a parameter that the forward writes to in another dtype than it is stored in."""
    used = {node.name: node.meta["val"].dtype for node in placeholders(gm)}
    for name in (s.name for s in gm.meta["signature"].outputs if s.kind == "mutation" and s.name in nodes):
        stored, seen = gm.meta["stored_dtypes"][nodes[name]], used[nodes[name]]
        if stored != seen:
            raise ValueError(
                f"precision: the forward writes to parameter {name}, which is stored in {stored} and would be rounded "
                f"to {seen} in each step; keep its module in precision.keep, or use torch.autocast around the step"
            )


@contextlib.contextmanager
def _forward_within(replica: nn.Module, mode: TorchFunctionMode) -> Iterator[None]:
    """Context manager: a mode within the forward, but not within torch.export's own code around it."""
    forward = replica.forward
    number = id(mode)  # what the forward refers to counts as state of the module
    _MODES[number] = mode

    @functools.wraps(forward)
    def within(*args: Any, **kwargs: Any) -> Any:
        with _MODES[number] as entered:
            return forward(*args, **(entered.given(kwargs) if isinstance(entered, SizeLog) else kwargs))

    own = "forward" in vars(replica)
    replica.forward = within
    try:
        yield
    finally:
        del _MODES[number]
        if own:
            replica.forward = forward
        else:
            del replica.forward


@contextlib.contextmanager
def _given(replica: nn.Module, constants: Mapping[str, Any]) -> Iterator[None]:
    """Context manager: pass ``constants`` to the forward without making them inputs of the graph."""
    forward = replica.forward
    signature = inspect.signature(forward)

    def with_them(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs, **constants)

    left = [p for name, p in signature.parameters.items() if name not in constants]
    with_them.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
    replica.forward = with_them
    try:
        yield
    finally:
        replica.forward = forward


def _refuse_running_state(
    replica: nn.Module,
    arguments: Mapping[str, Any],
    mode: FakeTensorMode,
    names: Sequence[str],
    asked: Mapping[str, str],
) -> None:
    """Raises ValueError for a forward that computes with Python state of an earlier forward, or with results of
    external calls (clocks, ranks). ``names``: the state that it changes and the functions that it calls; ``asked``:
    function -> line of the call."""
    given = pytree.tree_map_only(Tensor, lambda x: fake_like(x, mode), arguments)
    with attentions_as_operators():
        left = found_again(replica, given, mode, bool(asked))
    if left is not None:
        if not left and names[0] in asked:
            raise ValueError(
                f"capture: {asked[names[0]]}: the forward computes with the result of {names[0]}, which would be the "
                "same in every step; call it outside of the forward and pass the result in as a tensor"
            )
        what = f"a tensor that an earlier forward kept in {left}" if left else f"{names[0]}, which it changes"
        raise ValueError(
            f"capture: the forward computes with {what}, but only buffers carry state from step to step; register it "
            "with register_buffer (a forward may write to a buffer, or assign it), or pass it in"
        )


def _finish(
    program: ExportedProgram,
    replica: nn.Module,
    arguments: Mapping[str, Any],
    buffers: BufferWatch,
    **facts: Any,
) -> GraphModule:
    """The graph of a program. ``facts``: further ones of its signature."""
    graph = program.graph_module.graph
    leaf_paths = [path for path, _ in paths(arguments)]
    inputs = specs_of_inputs(program, replica, leaf_paths)
    check_dtypes(graph, {spec.node: spec.name for spec in inputs})
    made = Made.of(program, inputs, buffers)
    node = graph.output_node()
    node.args = (tuple(made.values),)
    _write_out_scalars(program, inputs)
    kept = _drop_unused(program, inputs)
    gm = graph_module(graph)
    read = buffers_differentiated(graph, kept, made.outputs)
    if again := next((name for name in buffers.written_with_graph if name in read), None):
        raise ValueError(
            f"capture: the forward writes a value that depends on parameters into buffer {again} and reads it in the "
            "next step, whose backward would go through this step again; write detached values (.detach(), "
            "torch.no_grad())"
        )
    gm.meta["signature"] = Signature(
        kept,
        tuple(made.outputs),
        made.spec,
        tuple(made.leaves),
        assigned=tuple(buffers.assigned),
        differentiated=read,
        recomputed=read_again(graph, kept),
        **facts,
    )
    check_contained(gm)
    constants = {spec.name for spec in kept if spec.kind == "constant"}
    gm.meta["constants"] = {name: program.constants[name].detach() for name in sorted(constants)}
    return gm


def _write_out_scalars(program: ExportedProgram, inputs: Sequence[InputSpec]) -> None:
    """torch.tensor(-1e9), a constant of the model --> full([], -1e9), whose value passes can see."""
    nodes = {node.name: node for node in program.graph.nodes}
    first = next(node for node in program.graph.nodes if node.op != "placeholder")
    for spec in inputs:
        value = program.constants[spec.name] if spec.kind == "constant" else None
        if not isinstance(value, Tensor) or value.dim() or value.is_complex() or value.is_meta:
            continue
        placeholder = nodes[spec.node]
        with program.graph.inserting_before(first):
            kind = {"dtype": value.dtype, "device": value.device}
            scalar = program.graph.call_function(torch.ops.aten.full.default, ([], value.item()), kind)
        user = next(iter(placeholder.users), placeholder)
        scalar.meta = {**user.meta, "val": placeholder.meta["val"]}
        placeholder.replace_all_uses_with(scalar)


def _drop_unused(program: ExportedProgram, inputs: list[InputSpec]) -> tuple[InputSpec, ...]:
    """Remove dead code and unused placeholders, except for parameters; returns the remaining inputs."""
    graph = program.graph_module.graph
    graph.eliminate_dead_code()
    kinds = {spec.node: spec.kind for spec in inputs}
    for node in list(graph.nodes):
        if node.op != "placeholder":
            continue
        constant = not isinstance(node.meta.get("val"), Tensor)
        if constant or (not node.users and kinds.get(node.name) != "parameter"):
            graph.erase_node(node)
    left = {node.name for node in graph.nodes}
    return tuple(spec for spec in inputs if spec.node in left)


_MODES: dict[int, TorchFunctionMode] = {}  # around forwards that are being captured
# Replacements of functions for which torch.export has no decomposition with static shapes, or that read values.
_INSTEAD: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.nn.functional.ctc_loss: functional_ctc_loss,
    torch.Tensor.fill_diagonal_: fill_diagonal_,  # works on views, too
    **ONE_BY_ONE,
    **VALUE_FREE,
    **GROUPED_CALLS,  # of any dtype
}
