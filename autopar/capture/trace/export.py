"""torch.export as a function from a module to one flat functional graph.

    module, kwargs --torch.export(strict=False)--> training graph --`_prepare`, run_decompositions--> flat graph

`run_decompositions` makes in-place operators functional, inlines grad-mode regions, and does not decompose linear,
layer_norm, sdpa, cross_entropy_loss ... It loses which regions were no-grad, so `_prepare` detaches differentiable
inputs of such regions first. `_prepare` also makes dtypes explicit that the default dtype decides
(`autopar.capture.trace.default_dtype`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from autopar.adapters.ac_regions import decomposed, noted_regions
from autopar.adapters.copying.fake import SPARSE, silent_fakes
from autopar.capture.branches.selected_targets import keep_rows_of_targets
from autopar.capture.custom_autograd.autograd_function import captured_backwards
from autopar.capture.custom_autograd.inner_derivatives import captured_derivatives
from autopar.capture.custom_autograd.opaque import check_written
from autopar.capture.flex.stand_ins import attentions_as_operators, warn_of_whole_masks
from autopar.capture.layer_dedup.layer_dedup import LayerDedup, TraceAnew
from autopar.capture.reads.code_owners import is_ours, is_torchs
from autopar.capture.side_effects.eager_answers import answered_as_eager
from autopar.capture.side_effects.function_watch import Refused
from autopar.capture.side_effects.unusual import warn_of
from autopar.capture.trace.decompose import LIFTS, decompose
from autopar.capture.trace.decompositions import DECOMPOSITIONS
from autopar.capture.trace.default_dtype import cast_integers, write_dtype
from autopar.capture.trace.detached_writes import name_operands, separate
from autopar.capture.trace.stack_lines import lines_of_forwards
from autopar.errors import refusal_like

_NO_GRAD_REGION = torch.ops.higher_order.wrap_with_set_grad_enabled
_LOOKUPS = (
    torch.ops.aten.embedding.default,
    torch.ops.aten._embedding_bag.default,
    torch.ops.aten.embedding_bag.padding_idx,
)
_NOISE = (torch.ops.aten._assert_tensor_metadata.default,)
_VALUE_CHECKS = (torch.ops.aten._assert_scalar.default, torch.ops.aten._assert_async.msg)
# Their messages suffice without the name of the class.
_PLAIN = (TypeError, AttributeError, IndexError, RuntimeError, ValueError, AssertionError)
_SYMBOLS = os.path.dirname(sympy.__file__)  # torch computes with it
_MOST_INPUTS = 8
_STATIC_INPUTS = 'declare the small input that decides it: static_inputs=("name",)'
# In torch's errors where a forward reads the values of a tensor.
_OF_VALUES = ("DataDependent", "data-dependent", "item()", ".numpy()", "BooleanAtom", "data is not allocated yet")
_STOPPED = "torch.export stopped at "
_ATTRIBUTE = re.compile(r"'(\w+)' object has no attribute '(\w+)'")
_INDICES = r"needs indices of int64, found \1", "pass ids.long()"
# pattern of torch's message, finding, way out
_KNOWN = tuple((re.compile(pattern), reason, way_out) for pattern, reason, way_out in (
    (r"scalar types: Long, Int; but got torch\.(\w+)", *_INDICES),
    (r"Expected dtype int32/int64 for index, but got torch\.(\w+)", *_INDICES),
    (r"argument '(\w+)' .*must be Tensor, not (?!None)(\w+)", r"needs a tensor as '\1', found a \2", "pass a tensor"),
    (r"'Tensor' object has no attribute 'constant'",  # fake tensors wrapped twice by functorch
     "torch.func.vmap around a derivative (jvp, jacfwd) cannot be captured",
     "compute it for the whole batch: torch.func.jvp by itself, or torch.autograd.grad(..., create_graph=True)"),
    (r"Constant \w+ is mutated in the forward",
     "the forward writes to a tensor that is not a buffer of the model, such as one of a module in a plain list",
     "register the tensor with register_buffer, or the module as a submodule"),
    (r"expected compiled_fn to be GraphModule, got <class 'function'>",  # two inputs of the graph share memory
     "the forward writes to a parameter that is tied to another one, which torch.export cannot trace",
     "write to it between steps, or compute with a new tensor"),
    (r"attribute '(\w+)' already exists",
     r"a tensor of the model is named \1, which is the name of an attribute of torch's graphs", "give it another name"),
    (r"Found <class '(?:.*\.)?(\w+)'> in output, which is not a known type",
     r"the forward returns a \1, a type in which torch.export finds no tensors",
     "return a tensor, or tensors in a dict, a tuple, a NamedTuple or a transformers ModelOutput"),
    (r"(?:same reduction dim, but got|shapes cannot be multiplied) (.*) (?:X|and) (.*?)\.?$",
     r"the inner sizes of a matrix product differ: \1 times \2", ""),
    (r"Attempting to broadcast a dimension of length (\d+) at (-?\d+)!.*had torch.Size\((.*)\);.*broadcastable to (.*)",
     r"needs sizes that broadcast to \4, found \3, whose dim \2 is \1", ""),
    (r"Expected input batch_size \((\d+)\) to match target batch_size \((\d+)\)",
     r"the loss has \1 predictions and \2 labels; give one label for each prediction", ""),
    (r"expected input(\[.*\]) to have (\d+) channels", r"the convolution needs \2 channels, found an input of \1", ""),
))  # fmt: skip


def export(
    model: nn.Module,
    kwargs: Mapping[str, Any],
    autocast: torch.dtype | None = None,
    grad_mode: str = "grad",
    *,
    memo: bool = True,
) -> ExportedProgram:
    """The module as a flat functional graph. ``autocast``: dtype of an autocast around the forward. ``grad_mode``: that
    of the forward. ``memo``: trace identical layers once.

    Raises ValueError that names the line that cannot be captured, or whose result has a data-dependent size; TraceAnew
    if the capture must be repeated without ``memo``, on a new copy of the model.
    """
    blocks = LayerDedup(model) if memo else None
    try:
        with (
            warnings.catch_warnings(),
            torch.set_grad_enabled(grad_mode == "grad"),
            captured_backwards(),
            captured_derivatives(),
            answered_as_eager(),
            attentions_as_operators(),
            torch.jit.optimized_execution(False),  # else torch.jit differentiates functions itself after a few runs
            silent_fakes(),
            lines_of_forwards(export.__code__),
            _quiet_stop(),
            _autocast(autocast),
            noted_regions(),
        ):
            warnings.simplefilter("ignore")
            with blocks.within() if blocks is not None else contextlib.nullcontext():
                program = torch.export.export(model, (), dict(kwargs), strict=False)
            _prepare(program)
            flat = run_decompositions(program, autocast)
    except Exception as error:
        if blocks is not None and blocks.copied:
            raise TraceAnew from error
        refused = _refusal(error)
        if refused is not None:
            where = f"{_STOPPED}{refused.place}" if refused.place else _where(refused)
            raise ValueError(f"capture: {where}: {refused}") from error
        where = _where(error)
        said = f"{_reason(error)}{_way_out(error, where, kwargs)}"
        raise refusal_like(error, f"capture: {where if _asks_values(error) else _line(where)}: {said}") from error
    warn_of_whole_masks()
    check_written(flat.graph)
    keep_rows_of_targets(flat.graph)
    _drop_value_checks(flat.graph)
    flat.graph.eliminate_dead_code()
    if grad_mode == "grad":
        _refuse_sparse_gradients(flat.graph, _parameter_nodes(flat))
    _refuse_sizes_of_values(flat.graph)
    _refuse_sparse(flat.graph)
    return flat


def run_decompositions(program: ExportedProgram, autocast: torch.dtype | None) -> ExportedProgram:
    """The flat graph. With an autocast all of it is traced again, since the training graph has no casts."""
    if autocast is not None:
        return decomposed(program, DECOMPOSITIONS)
    return decompose(program, DECOMPOSITIONS)


@contextlib.contextmanager
def _quiet_stop() -> Iterator[None]:
    """Context manager: a failing export prints no graph and logs nothing, since our error names the line."""
    from torch.export import _trace  # late, since it takes a second to import

    names, log = vars(_trace), logging.getLogger("torch.fx.experimental.symbolic_shapes")
    names["print"] = lambda *_, **__: None
    log.addFilter(_is_shown)
    try:
        yield
    finally:
        names.pop("print", None)
        log.removeFilter(_is_shown)


def _is_shown(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("Unable to find user code")


def _autocast(dtype: torch.dtype | None) -> torch.autocast:
    """The training graph has the dtypes of an autocast, but no casts; decomposing it within one adds them."""
    return torch.autocast("cpu", dtype=dtype, enabled=dtype is not None)


def _drop_value_checks(graph: Graph) -> None:
    """Remove ``assert lengths.max().item() <= n`` and the like, with a warning."""
    checks = [node for node in graph.nodes if node.target in _VALUE_CHECKS]
    for node in checks:
        graph.erase_node(node)
    if checks:
        graph.eliminate_dead_code()
    for line in dict.fromkeys(map(line_of, checks)):
        warn_of(f"capture: {line}: an assertion on tensor values is not checked in compiled steps", stacklevel=2)


def _refuse_sizes_of_values(graph: Graph) -> None:
    """Raises ValueError for tensors of data-dependent size (x[mask], nonzero, a loop over counts), and for numbers read
    from tensors."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.target is torch.ops.aten.item.default and node.users:
            raise ValueError(
                f"capture: {line_of(node)}: item() reads a number from a tensor, which differs between steps and "
                f"ranks; compute with the tensor itself (detached, if it should have no gradient), or {_STATIC_INPUTS}"
            )
        if (isinstance(value, Tensor) and free_unbacked_symbols(value)) or _picks_rows(node):
            raise ValueError(
                f"capture: {line_of(node)}: the size of the result depends on tensor values, but all sizes must "
                "follow from the shapes of the batch; use torch.where or a mask; for experts use grouped_mm, not a "
                f"loop over counts; or {_STATIC_INPUTS}"
            )


def _picks_rows(node: Node) -> bool:
    """Whether a result has as many rows as a mask has true entries, also where torch has concluded from another tensor
    how many these are."""
    indices = node.args[1] if node.target is torch.ops.aten.index.Tensor else ()
    masks = any(isinstance(i, Node) and i.meta["val"].dtype == torch.bool for i in indices)  # type: ignore[union-attr]
    return masks or node.target in (torch.ops.aten.nonzero.default, torch.ops.aten.masked_select.default)


def _refuse_sparse(graph: Graph) -> None:
    for node in graph.nodes:
        layout = getattr(node.meta.get("val"), "layout", torch.strided)
        if layout != torch.strided:
            raise ValueError(f"capture: {line_of(node)}: needs dense tensors, found one {SPARSE.format(layout)}")


def _refuse_sparse_gradients(graph: Graph, trained: set[str]) -> None:
    """Raises ValueError for an embedding lookup with a sparse gradient."""
    for node in graph.nodes:
        if node.target not in _LOOKUPS or (node.args[0].op == "placeholder" and node.args[0].name not in trained):
            continue
        names = [a.name for a in node.target._schema.arguments]
        if {**dict(zip(names, node.args)), **node.kwargs}.get("sparse"):
            raise ValueError(
                f"capture: {line_of(node)}: sparse=True asks for a sparse gradient, but steps compute dense ones; use "
                "sparse=False and an optimizer for dense gradients"
            )


def line_of(node: Node) -> str:
    """The line of the model that made a node: file, line, function and code; else the name of the operator."""
    found = re.findall(r'File "(.*?)", line (\d+), in ([\w<>]+)\n\s*(.*)', node.meta.get("stack_trace") or "")
    own = [frame for frame in found if not is_torchs(frame[0])]
    return _place(*(own or found)[-1]) if found else str(node.target)


def _place(file: str, line: object, function: str, code: str | None) -> str:
    return f"{file}:{line} in {function}, `{code}`"


def _where(error: BaseException) -> str:
    """The innermost line outside of torch that led to the error."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not is_torchs(f.filename)]
    # skip our own modes, which run between torch and the model, and code without a file
    outside = [f for f in frames if not (is_ours(f.filename) or f.filename.startswith(("<", _SYMBOLS)))]
    if not outside:
        return "torch.export needs a traceable model"
    frame = outside[-1]
    return f"{_STOPPED}{_place(frame.filename, frame.lineno, frame.name, frame.line)}"


def _line(where: str) -> str:
    """Without the prefix that names torch.export: plain torch would have failed there, too."""
    return where.removeprefix(_STOPPED)


def _refusal(error: BaseException | None) -> Refused | None:
    """The `Refused` that `FunctionWatch` raised, if that stopped the export."""
    while error is not None and not isinstance(error, Refused):
        error = error.__cause__ or error.__context__
    return error


def _reason(error: BaseException) -> str:
    if _asks_values(error):
        return "it uses a data-dependent size" if _of_sizes(error) else "it reads the value of a tensor"
    if known := _known(error):
        return known[0]
    lines = [line for line in str(error).splitlines() if line.strip()]
    text = _ATTRIBUTE.sub(r"a \1 has no \2", lines[0].strip().rstrip(".") if lines else "")
    return text if text and (isinstance(error, _PLAIN) or _is_ours(error)) else f"{type(error).__name__}: {text}"


def _way_out(error: BaseException, where: str, batch: Mapping[str, Any]) -> str:
    experts = "for experts, call autopar::moe_dispatch, grouped_mm and moe_combine; " if "expert" in where else ""
    if _of_sizes(error):
        return (
            f"; the line combines tensors of data-dependent size, such as x[mask] or masked_select: {experts}keep "
            "static shapes and multiply by the mask, as in (loss * mask).sum() / mask.sum(), or "
            f"{_STATIC_INPUTS}"
        )
    if _asks_values(error):
        return f"; {experts}use torch.where or masks instead of a branch{_or_static(batch)}"
    if (known := _known(error)) and known[1]:
        return f"; {known[1]}"
    if _is_ours(error):
        return ""
    found = ", ".join(f"{path} {_facts(x)}" for path, x in itertools.islice(paths(batch), _MOST_INPUTS))
    return (
        f"; the forward must run with these inputs in plain torch, and under torch.export(strict=False), found {found}"
    )


def _or_static(batch: Mapping[str, Any]) -> str:
    """Which inputs of integers may be declared, as a way out; nothing where there are none."""
    whole = [path for path, x in paths(batch) if isinstance(x, Tensor) and not x.is_floating_point()]
    names = list(dict.fromkeys(path.partition(".")[0] for path in whole))[:_MOST_INPUTS]
    if not names:
        return ""
    which = f" ({' or '.join(names)})" if len(names) > 1 else ""
    return f', or declare the small input that decides it{which}: static_inputs=("{names[0]}",)'


def _facts(x: Any) -> str:
    return str(list(x.shape)) if isinstance(x, Tensor) else repr(x)


def _known(error: BaseException) -> tuple[str, str] | None:
    """(finding, way out) of an error whose message speaks of torch's internals."""
    found = ((pattern.search(str(error)), reason, way_out) for pattern, reason, way_out in _KNOWN)
    return next(((match.expand(reason), way_out) for match, reason, way_out in found if match), None)


def _is_ours(error: BaseException) -> bool:
    """Whether it is an error of autopar, which has a way out already."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, ValueError) and bool(frames) and is_ours(frames[-1].filename)


def _asks_values(error: BaseException) -> bool:
    text = f"{type(error).__name__} {error}"
    return any(word in text for word in _OF_VALUES)


def _of_sizes(error: BaseException) -> bool:
    """Whether the unknown numbers are sizes: torch lists them in its message."""
    return _asks_values(error) and "Size-like symbols: u" in str(error)


def _prepare(program: ExportedProgram) -> None:
    """Rewrites of the training graph that need what decomposing it loses; see the module's docstring."""
    _merge_tied_buffers(program)
    graphs = [m.graph for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    for graph in graphs:
        for node in list(graph.nodes):
            if node.target in _NOISE:
                graph.erase_node(node)
            elif node.target is torch.ops.aten.detach_.default and node.all_input_nodes[0].target not in LIFTS:
                _cut_from(node)
            elif node.op == "call_function":
                write_dtype(node)
                cast_integers(node)
    trained = _parameter_nodes(program)
    _detach_no_grad(program.graph_module, trained)
    separate(program.graph_module, trained)
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            module.recompile()


def _merge_tied_buffers(program: ExportedProgram) -> None:
    """Merge the inputs of tied buffers: a write to one of two inputs would not reach the other."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    first: dict[int, Node] = {}
    signature, tensors = program.graph_signature, {**program.constants, **program.state_dict}
    for spec in [s for s in signature.input_specs if s.kind == InputKind.BUFFER]:
        node, tensor = nodes[spec.arg.name], tensors[str(spec.target)]
        known = first.setdefault(id(tensor), node)
        if known is not node:
            node.replace_all_uses_with(known)
            program.graph.erase_node(node)
            signature.input_specs.remove(spec)


def _cut_from(node: Node) -> None:
    """h.detach_(); f(h)   -->   f(h.detach()): later nodes use the detached value."""
    x = node.args[0]
    assert isinstance(x, Node)
    with node.graph.inserting_before(node):
        detached = node.graph.call_function(torch.ops.aten.detach.default, (x,))
    detached.meta = dict(node.meta)
    for user in [user for user in x.users if user > node]:
        user.replace_input_with(x, detached)
    node.replace_all_uses_with(detached)
    node.graph.erase_node(node)


def _parameter_nodes(program: ExportedProgram) -> set[str]:
    trainable = {name for name, p in program.named_parameters() if p.requires_grad}
    signature = program.graph_signature
    return {node for node, name in signature.inputs_to_parameters.items() if name in trainable}


def _detach_no_grad(module: torch.fx.GraphModule, parameters: set[str]) -> None:
    """no_grad(f)(x) --> no_grad(f)(detach(x)), where x depends on a parameter: results of the region, and what
    it writes to a buffer (the vectors of a spectral norm), have no gradient."""
    graph = module.graph
    carries: set[Node] = {node for node in graph.nodes if node.name in parameters}
    for node in list(graph.nodes):
        if node.op != "call_function" or not any(i in carries for i in node.all_input_nodes):
            continue
        region = node.target is _NO_GRAD_REGION
        if region and node.args[0] is False:
            name_operands(module, node)
            for x in node.all_input_nodes:
                if x in carries and not _is_integer(x.meta.get("val")):
                    _detach(graph, x, node)
        elif node.target is not torch.ops.aten.detach.default and not _is_integer(node.meta.get("val")):
            carries.add(node)


def _is_integer(value: Any) -> bool:
    return isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())


def _detach(graph: Graph, x: Node, user: Node) -> None:
    with graph.inserting_before(user):
        detached = graph.call_function(torch.ops.aten.detach.default, (x,))
    detached.meta = {**user.meta, "val": x.meta.get("val")}
    user.replace_input_with(x, detached)


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """(leaves, spec) of a nested structure, transformers' ModelOutput included; `unflatten` is its inverse."""
    return pytree.tree_flatten(tree)


def unflatten(leaves: list[Any], spec: Any) -> Any:
    """The nested structure of leaves and a spec."""
    return pytree.tree_unflatten(leaves, spec)


def one_level(tree: Any) -> tuple[list[Any], str | tuple[Any, ...] | None]:
    """(children, container) of a nested value. The container is the keys of a dict, "tuple", "list", or the name and
    context of another pytree type; None for a leaf."""
    if type(tree) is dict:
        return list(tree.values()), tuple(tree)
    if type(tree) in (tuple, list):
        return list(tree), type(tree).__name__
    children, spec = pytree.tree_flatten(tree, is_leaf=lambda x: x is not tree)
    if spec.is_leaf():
        return [], None
    return children, f"{type(tree).__module__}.{type(tree).__qualname__}[{spec.context!r}]"


def paths(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, leaf) of a nested structure, in flattening order: {"a": (x, y)} -> "a.0", "a.1"."""
    children, kind = one_level(tree)
    if kind is None:
        yield path or "0", tree
        return
    keys = list(tree) if isinstance(tree, Mapping) else range(len(children))
    for key, value in zip(keys, children, strict=True):
        yield from paths(value, f"{path}.{key}" if path else str(key))
