"""What is known of a model before a batch is compiled: its graph, ready for a plan, and the global batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import nn
from torch.fx import GraphModule

from autopar.capture.front_end import adapter_for, capture
from autopar.ir.batch import tensors_of, whole_batch, without_static_inputs
from autopar.ir.graph import mark_gradients
from autopar.ir.mesh import Mesh
from autopar.ir.meta import signature_of
from autopar.options import Options
from autopar.passes.pipelines import GLOBAL_PASSES
from autopar.plan import Plan
from autopar.planner.batch_dims import decide_batch_dims, known_dims, likely_dims
from autopar.rewrite.compilation import Compilation
from autopar.rewrite.pass_manager import PassManager

T = TypeVar("T")


def for_whole_batch(
    make: Callable[[dict[str, Any]], T],
    plan_of: Callable[[T], Plan],
    model: nn.Module,
    batch: Mapping[str, Any],
    mesh: Mesh,
    options: Options,
    fixed: Plan | None = None,
) -> T:
    """The result of ``make`` for the global batch, given one dp rank's shard of it.

    The global batch is built along likely batch dims, and built anew if the plan finds others. That does not happen
    for a model whose inputs an adapter knows, or a plan that knows them.
    """
    ranks, known = mesh.data_size * options.replicas, known_batch_dims(model, batch, options, fixed)
    shapes = {name: tuple(x.shape) for name, x in tensors_of(without_static_inputs(batch)).items()}
    dims, tried = likely_dims(shapes, known), []
    while dims not in tried:
        tried.append(dims)
        try:
            made = make(whole_batch(batch, dims, ranks))
            found = plan_of(made).batch_dims
            if ranks == 1 or all(dims.get(name, dim) == dim for name, dim in found.items()):
                return made
        except ValueError:
            if ranks == 1 or shapes.keys() == known.keys() or len(tried) > 1:
                raise
            # a wrongly built batch may not fit the model at all; the shard of one rank does
            found = decide_batch_dims(normalized(capture(model, batch), Compilation(Mesh.of(dp=1))), options, fixed)
            if all(dims.get(name, dim) == dim for name, dim in found.items()):
                raise
        dims = {**dims, **found}
    raise ValueError(
        f"batch_dims: which dim of which input is the batch is not clear: {' or '.join(map(str, tried))}; say it with "
        "batch_dims={...}, None for an input without a batch dim"
    )


def known_batch_dims(
    model: nn.Module, batch: Mapping[str, Any], options: Options, fixed: Plan | None = None
) -> dict[str, int | None]:
    """Batch dims of a batch's tensors that need no evidence (`autopar.planner.batch_dims.known_dims`). Raises
    ValueError for names that are not inputs (one that the forward takes may be absent), and for missing dims."""
    batch = without_static_inputs(batch)
    tensors, takes = tensors_of(batch), inspect.signature(model.forward).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    for name in options.static_inputs:
        if name not in batch and name not in takes and not anything:
            raise ValueError(f"static_inputs: no input {name!r}; the inputs of the batch are {', '.join(batch)}")
    for name, _ in options.batch_dims:
        first = name.partition(".")[0]
        if name not in tensors and (first in batch or (first not in takes and not anything)):
            raise ValueError(
                f"batch_dims: no input {name!r}; the tensors of the batch are {', '.join(tensors)}, those in tuples, "
                "lists and dicts are named by their path"
            )
    adapter = adapter_for(model)
    hints = adapter.batch_dims(model, batch) if adapter is not None else {}
    return known_dims({name: tuple(x.shape) for name, x in tensors.items()}, options, fixed, hints)


def normalized(gm: GraphModule, ctx: Compilation) -> GraphModule:
    """The graph after the global passes, ready for a plan; ``gm`` is changed."""
    gm = PassManager(GLOBAL_PASSES).run(gm, ctx)
    mark_gradients(gm, [s.node for s in signature_of(gm).inputs if s.kind == "parameter" and s.requires_grad])
    return gm
