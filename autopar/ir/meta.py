"""The annotations of nodes and graphs: every key of their ``meta``, with its type and meaning.

    signature_of(gm).inputs          names_of_parameters(gm)["p_weight"] = "weight"
    inherit(new, old, TYPES)         a new value of the same type as an old one

`tests/house/test_meta.py` finds reads and writes of keys that are not listed here. Shapes, dtypes and
placements of values are read with the functions of `autopar.ir.graph`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch.fx import GraphModule, Node

from autopar.ir.signature import InputSpec, OutputSpec, Signature

T = TypeVar("T")

NODES = {
    # torch's
    "val": "Tensor | tuple[Tensor | None, ...] | int: the fake result, of global shape or, after lower_to_local, of "
    "one rank's; an int in graphs that compute sizes of token slices",
    "nn_module_stack": "dict[str, tuple[str, type]]: the modules around the call in the model, outermost first",
    "stack_trace": "str: the lines of the model that made the call",
    "original_aten": "OpOverload: the operator that this one was decomposed from",
    "user_visible_output_idxs": "list[int]: of an output node, results whose strides Inductor keeps",
    "partitioner_tag": "str: 'is_backward' for what AOTAutograd traced after the forward",
    "call": "int: which of the `forward_calls` of a local graph a node of its joint graph belongs to (-1: none)",
    "ac_region": "int: number of the torch.utils.checkpoint in which the model calls it",
    "own_memory": "True: it copies a detached value that is written to (`autopar.capture.trace.detached_writes`)",
    "custom": "dict[str, Any]: annotations, which torch's decompositions propagate",
    # placements
    "placements": "dict[str, Placement]: of the result, by axis; Invariant where an axis is missing",
    "result_placements": "dict[str, tuple[Placement, ...]]: the same for several results",
    "global_shape": "tuple[int, ...] | list[tuple[int, ...]]: over the whole mesh, of the result or of each of several",
    "has_gradient": "bool: whether a gradient flows into the result",
    "conversion": "tuple[str, Placement, Placement]: axis, source and target of a local conversion, in terms of "
    "global shapes",
    # inputs of rules
    "dealt": "tuple[tuple[int, ...], tuple[int, ...]]: blocks of queries and keys of attention over sharded sequences",
    "experts": "ExpertPlan: how the experts of a dispatch, product or combine are sharded",
    "of_microbatches": "bool: of the factor that makes a local mean an addend to that of all microbatches",
    "global_groups": "int: groups of a convolution, or of group_norm, of the global call",
    "moderate": "bool: an input of a served forward that no number of which can hide a key",
    "unfolded": "Node: the model's own query or key, of one that has an entry for biases of keys",
    "derived": "DerivedRule | NoRule: the result of deriving a rule for the call",
    # cached answers
    "may_hide": "bool: whether a mask or bias may hide keys",
    "of_ids": "bool: whether it depends on an input of the forward",
    "kind": "str: of the input that a placeholder is, while the graph is normalized",
    "value": "Tensor: of a constant of the model, while the graph is normalized",
    "triangle": "float | None: what a mask adds above the diagonal, if it is a triangle",
    "filled triangle": "bool: whether a mask is true above the diagonal and nowhere else",
    "nonlinear": "bool: whether the operator's registered backward is not linear in the gradient",
    # of recipes for checkpoints
    "number": "int: which of the tensors in the files a placeholder is",
    # of passes
    "chunk": "int: number of the chunk of rows whose logits it computes: nothing of it is saved",
    "tile": "int: number of the tile of tokens that it computes: nothing of it is saved",
    "most_rows": "tuple[int | None, ...]: rows of each result if routing sends a rank as many as it can",
    "early": "bool: of a gradient, or of a node that leads to it: F computes it",
    "kept": "bool: F saves it for the backward, which recomputes other values",
    "again": "bool: the backward recomputes it",
    "of_slice": "bool: a token slice's rows of a value that depends on no parameter",
    "bucket": "bool: a collective of a bucket",
    "donated": "True: an input of a step graph that the graph may overwrite",
}

GRAPHS = {
    "signature": "Signature: inputs and outputs",
    "constants": "dict[str, Tensor]: values of the inputs of kind constant, by name",
    "stored_dtypes": "dict[str, torch.dtype]: the dtypes in which parameters are stored, by placeholder",
    "batch_dims": "dict[str, int | None]: inputs whose batch dim the user named",
    "unclear_batch_dims": "str: why several dims of the inputs may be the batch's, for messages",
    "results": "list[str]: names of the values that a prologue returns",
    "owned": "list[int]: outputs of a step that are written to later",
    "takes": "list[str]: names of the inputs of a forward, which its placeholders may not have (``input``)",
    "freed": "names of inputs of a step graph that are freed after their last use",
    "promise": "Promise: results and communication of a step graph (`autopar.rewrite.step_checks`)",
}

ORIGIN = ("nn_module_stack", "stack_trace", "ac_region", "chunk", "tile")
TRACE = ("nn_module_stack", "stack_trace")
TYPES = ("placements", "global_shape")


def inherit(new: Node, old: Node, keys: Iterable[str]) -> None:
    """Copy some annotations of ``old`` to ``new``."""
    new.meta.update({key: old.meta[key] for key in keys if key in old.meta})


def of_no_module(*made: Node) -> None:
    """Remove the module of calls that combine calls of several modules."""
    for node in made:
        node.meta = {key: value for key, value in node.meta.items() if key not in ORIGIN}


def note_all(node: Node, notes: Iterable[tuple[str, Any]]) -> None:
    """Set annotations, under keys of `NODES`."""
    node.meta.update(notes)


def remembered(node: Node, key: str, ask: Callable[[Node], T]) -> T:
    """The answer of ``ask(node)``, which is called once per node."""
    if key not in node.meta:
        node.meta[key] = ask(node)
    found: T = node.meta[key]
    return found


def signature_of(gm: GraphModule) -> Signature:
    """The inputs and outputs of a graph."""
    found: Signature = gm.meta["signature"]
    return found


def input_specs(gm: GraphModule) -> dict[str, InputSpec]:
    """Name of a placeholder -> what it is."""
    return {spec.node: spec for spec in signature_of(gm).inputs}


def names_of_parameters(gm: GraphModule) -> dict[str, str]:
    """Name of a parameter's placeholder -> the parameter's."""
    return {spec.node: spec.name for spec in signature_of(gm).inputs if spec.kind == "parameter"}


def extend_signature(gm: GraphModule, inputs: Iterable[InputSpec] = (), outputs: Iterable[OutputSpec] = ()) -> None:
    """Append inputs and outputs."""
    old = signature_of(gm)
    new = dataclasses.replace(old, inputs=(*old.inputs, *inputs), outputs=(*old.outputs, *outputs))
    gm.meta["signature"] = new
