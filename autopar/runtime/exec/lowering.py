"""Lower a step graph onto a running mesh: axis names become process groups, the graph becomes a function.

    x = autopar.all_reduce(h, "tp", "sum")        pending = start_all_reduce(h); h = None
    y = mm(a, b)                            -->   y = mm(a, b)
    z = add(x, y)                                 x = finish(pending); z = add(x, y)

A collective starts at its node and is waited for right before its first user, so it overlaps with independent work in
between. Reduce-scatters of gradients, whose user is the end of the graph, are waited for earlier (`autopar.ir.waits`).
Context-parallel attention communicates inside its node (`autopar.runtime.comm.context_parallel_comm`). The function
takes ONE list of inputs and empties it, so a saved activation is freed after its last use.

Graphs with token exchanges may pause where they would wait for one (`autopar.ir.waits.pauses_at`), so that another
graph computes meanwhile: their code is a generator that yields there. So do graphs that ask experts on other ranks
(`autopar::ask_experts`), which `autopar.runtime.comm.experts.Experts` answers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen

from autopar.adapters.fx.graph_nodes import copied_node
from autopar.adapters.operators import OpOverload, argument_defaults, kernel_of, name_of
from autopar.ir.graph import is_call, module_path, outputs
from autopar.ir.meta import TRACE, inherit
from autopar.ir.traffic import Ledger, Traffic, traffic_of
from autopar.ir.waits import PRODUCT_OF, WaitPlaces, donated, is_started, overwritten, pauses_at
from autopar.ops.declare import COMPILED, operator
from autopar.ops.padded_pieces import padded_size
from autopar.ops.traits import ASKS, COLLECTIVES, COPIES, LOCAL
from autopar.runtime.comm import collectives as comm
from autopar.runtime.comm import functional_collectives
from autopar.runtime.comm.collectives import finish
from autopar.runtime.comm.context_parallel_comm import OPERATORS, Comms
from autopar.runtime.comm.experts import Experts
from autopar.runtime.comm.step_notes import open_notes
from autopar.runtime.exec.module_profiling import is_watched, left_after, watched_code
from autopar.runtime.exec.value_checks import operator_explained, operator_of
from autopar.runtime.exec.value_probe import open_probe
from autopar.runtime.mesh.host_copies import OffloadBuffers
from autopar.runtime.mesh.process_groups import Groups

aten = torch.ops.aten

# Only functions that take the schema's arguments in the same order and by the same names.
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: torch.add, aten.add.Scalar: torch.add, aten.sub.Tensor: torch.sub,
    aten.mul.Tensor: torch.mul, aten.mul.Scalar: torch.mul, aten.div.Tensor: torch.div, aten.div.Scalar: torch.div,
    aten.pow.Tensor_Scalar: torch.pow, aten.neg.default: torch.neg, aten.rsqrt.default: torch.rsqrt,
    aten.exp.default: torch.exp, aten.cos.default: torch.cos, aten.sin.default: torch.sin,
    aten.tanh.default: torch.tanh, aten.sigmoid.default: torch.sigmoid, aten.mm.default: torch.mm,
    aten.bmm.default: torch.bmm, aten.addmm.default: torch.addmm, aten.t.default: torch.t,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze, aten.squeeze.dim: torch.squeeze, aten.permute.default: torch.permute,
    aten.cat.default: torch.cat, aten.sum.dim_IntList: torch.sum, aten.mean.dim: torch.mean,
    aten.split_with_sizes.default: torch.split_with_sizes, aten.where.self: torch.where,
    aten.linear.default: torch.nn.functional.linear, aten.gelu.default: torch.nn.functional.gelu,
    aten.layer_norm.default: torch.layer_norm, aten.index_select.default: torch.index_select,
    aten.embedding.default: torch.embedding, aten.clone.default: torch.clone, aten.reshape.default: torch.reshape,
}  # fmt: skip
METHODS: dict[Any, str] = {
    # reshape, not view: a fake may have other strides (softplus_backward: contiguous fake, result strided as its input)
    aten.view.default: "reshape",
    aten._unsafe_view.default: "reshape",
    aten.expand.default: "expand",
}


IN_PLACE = {aten.add.Tensor: "add_", aten.addmm.default: "addmm_", aten.addcmul.default: "addcmul_"}


def bypass_dispatch(node: Node, overwritten: int | None = None) -> None:
    """Let a node of a lowered graph call its operator with less dispatch overhead, if possible. ``overwritten``: the
    operand that its result may overwrite (of two that are added, either)."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return
    if overwritten is not None and node.target in IN_PLACE:
        over, *others = (node.args[overwritten], *node.args[:overwritten], *node.args[overwritten + 1 :])
        node.op, node.target, node.args = "call_method", IN_PLACE[node.target], (over, *others)
    elif node.target in METHODS:
        if not node.kwargs:
            node.op, node.target = "call_method", METHODS[node.target]
    else:
        node.target = FUNCTIONS.get(node.target) or kernel_of(node.target) or node.target


# --- pauses ----------------------------------------------------------------------------------------------------


Steps = Generator[None, None, Any]  # returns what the graph returns
_MARK = re.compile(r"^\s*\w+ = \w*pause_here\(\);?.*$", re.MULTILINE)


def pause_here() -> None:
    """Marks a place in a lowered graph where its code pauses."""


def run_to_end(steps: Callable[[list[Any]], Steps]) -> Callable[[list[Any]], Any]:
    """Runs through."""

    def run(inputs: list[Any]) -> Any:
        going = steps(inputs)
        try:
            while True:
                next(going)
        except StopIteration as end:
            return end.value

    return run


if TYPE_CHECKING:
    from autopar.adapters.inductor import Functional

ours = torch.ops.autopar

_SIZED = tuple(x for x in COLLECTIVES if x is not ours.all_to_all_rows.default)  # their traffic is known from the graph

# name -> (how graphs are run, whether steps are recorded as CUDA graphs)
BACKENDS = {
    "eager": ("eager", False),
    "inductor": ("inductor", False),
    "cudagraphs": ("eager", True),
    "inductor+cudagraphs": ("inductor", True),
}


@dataclass(frozen=True)
class Lowered:
    """A runnable step graph: ``bound([inputs]) -> tuple``, the list is emptied.

    traffic: of the collectives in one run, except tokens of experts. comms: those of context-parallel attention; they
    count what all runs so far have sent, tokens of experts included. made: fake values of the results of compiled code.
    paused: the code with pauses (`autopar.runtime.exec.lowering`), if it has some. lowered: the graph that runs
    operator by operator. by_operators: makes such a graph of one that was compiled.
    """

    run: Callable[[list[Any]], tuple[Any, ...]]
    traffic: Ledger
    code: str = field(repr=False)
    comms: Comms = field(repr=False)
    lowered: GraphModule | None = field(default=None, repr=False)
    made: list[Any] | None = field(default=None, repr=False)
    paused: Callable[[list[Any]], Steps] | None = field(default=None, repr=False)
    by_operators: Callable[[], GraphModule] | None = field(default=None, repr=False)

    def __call__(self, inputs: list[Any]) -> tuple[Any, ...]:
        """Run the graph. If an operator refuses its inputs, raises ValueError that names the model's line."""
        with self._explained():
            if (probe := open_probe()) is not None:
                return probe.run(self._operators, inputs)
            if is_watched() and self.lowered is not None and self.paused is None:
                return left_after(self._watched.forward, inputs)
            return self._noted(self.run(inputs))

    def _noted(self, results: tuple[Any, ...]) -> tuple[Any, ...]:
        """The results, of which the step takes notes if it does."""
        if (notes := open_notes()) is not None:
            for name, x in zip(self._names, results, strict=True):
                notes.note(name, [x])
        return results

    @functools.cached_property
    def _names(self) -> list[str]:
        """Of the results: the module and the operator that made them."""
        made = outputs(self._operators)
        return [_result_name(x) if isinstance(x, Node) else "a constant" for x in made]

    @functools.cached_property
    def _operators(self) -> GraphModule:
        if self.lowered is not None:
            return self.lowered
        assert self.by_operators is not None
        return self.by_operators()

    @functools.cached_property
    def _watched(self) -> GraphModule:
        assert self.lowered is not None
        return watched_code(self.lowered, _BoxedCode())

    def steps(self, inputs: list[Any]) -> Steps:
        """Run the graph with pauses, if it has some."""
        assert self.paused is not None
        if open_probe() is not None:
            return self(inputs)
        with self._explained():
            return self._noted((yield from self.paused(inputs)))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, IndexError) as error:
            said = operator_explained(error, self.lowered.graph) if self.lowered is not None else None
            if said is None:
                raise
            raise said from error


def _result_name(node: Node) -> str:
    made = f"the value of {operator_of(node)}" if node.op != "placeholder" else "an input"
    return f"{made} in {module_path(node)}" if module_path(node) else f"{made} ({node.name})"


def bind(
    gm: GraphModule,
    groups: Groups,
    backend: str = "eager",
    given: Sequence[Any] = (),
    pauses: str = "",
    any_strides: Collection[int] = (),
    experts: Experts | None = None,
    first: bool = False,
) -> Lowered:
    """Lower the raw collectives of a step graph onto the mesh. ``gm`` is not changed. ``pauses``: the axis at whose
    exchanges it may pause, if it runs operator by operator. ``experts``: answers what it asks; it pauses before each
    answer. ``first``: it runs for the first microbatch of a step, whose sums are products, and takes zeros in place of
    the sums of gradients; compiled code adds to them.

    backend "eager" runs the graph's operators one by one; "inductor" compiles it, for inputs like ``given`` (None: like
    the graph's own), and chooses the strides of the results ``any_strides``. Raises ValueError for another backend, and
    for "inductor" for a graph that asks experts.
    """
    if backend not in ("eager", "inductor"):
        raise ValueError(f"bind: expected a backend out of eager, inductor, found {backend!r}")
    traffic, comms = traffic_of_graph(gm, groups), Comms(groups)
    if backend == "inductor" and any(node.target in ASKS for node in gm.graph.nodes):
        raise ValueError(
            'bind: a graph that asks experts on other ranks runs operator by operator, found backend="inductor"; use '
            'backend="eager"'
        )
    if backend == "inductor":
        from autopar.adapters.inductor import Functional, compile_step  # a slow import that only this backend needs

        explicit = _lower(comms.compilable(gm), _Traced(Functional(groups), groups.device))
        run, made = compile_step(explicit, groups.device, given, any_strides, COMPILED)
        by_operators = functools.partial(_lower, gm, _Eager(groups, comms, experts))
        return Lowered(run, traffic, gm.code, comms, made=made, by_operators=by_operators)
    lowered = _lower(gm, _Eager(groups, comms, experts, first), pauses)
    if all(node.target is not pause_here for node in lowered.graph.nodes):
        return Lowered(lowered.forward, traffic, lowered.code, comms, lowered)
    return Lowered(run_to_end(lowered.forward), traffic, lowered.code, comms, lowered, paused=lowered.forward)


def traffic_of_graph(gm: GraphModule, groups: Groups) -> Ledger:
    """Traffic of one run of the graph, read from its nodes; tokens of experts are counted when they are sent."""
    ledger: dict[tuple[str, str], Traffic] = {}
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target in _SIZED:
            arguments = named_arguments(node)
            axis, kind, value = arguments["axis"], kind_of(node), arguments["x"].meta["val"]
            shape = list(value.shape)
            dim, units = ("dst_dim", "dst_units") if kind == "all_to_all" else ("dim", "units")
            if kind != "all_gather" and arguments.get(units):  # whole along this dim: padded where it is sent
                shape[arguments[dim]] = padded_size(shape[arguments[dim]], arguments[units], groups.size(axis))
            sent = traffic_of(kind, shape, value.dtype, groups.size(axis))
            ledger[axis, kind] = ledger.get((axis, kind), Traffic()) + Traffic(1, sent)
    return ledger


def axes_of(graphs: Iterable[GraphModule]) -> tuple[set[str], set[str]]:
    """The axes over which step graphs communicate; those along which context-parallel attention communicates."""
    axes, along = set[str](), set[str]()
    for node in (node for gm in graphs for node in gm.graph.nodes):
        if node.target in COLLECTIVES:
            axes.add(named_arguments(node)["axis"])
        elif node.target is ours.delayed_scale.default:  # in the first step
            axes.update(named_arguments(node)["axes"])
        elif node.target in OPERATORS:
            along.add(named_arguments(node)["axis"])
    return axes | along, along


def kind_of(node: Node) -> str:
    """'all_reduce' of a raw collective's node."""
    assert isinstance(node.target, OpOverload)
    return name_of(node.target).removeprefix("autopar::")


def named_arguments(node: Node) -> dict[str, Any]:
    """Arguments of a raw collective by name."""
    assert isinstance(node.target, OpOverload)
    names = list(argument_defaults(node.target))
    return {**dict(zip(names, node.args)), **node.kwargs}


# --- starts and waits --------------------------------------------------------------------------------


def _lower(gm: GraphModule, calls: _Traced | _Eager, pauses: str = "") -> GraphModule:
    graph, waits = Graph(), WaitPlaces(gm)
    new: dict[Node, Node] = {}

    def call(node: Node, target: Callable[..., Any], args: tuple[Node, ...]) -> Node:
        made = graph.call_function(target, args)
        inherit(made, node, TRACE)
        return made

    def wait(collectives: list[Node]) -> None:
        if pauses_at(collectives, pauses):
            graph.call_function(pause_here)
        for collective in collectives:
            new[collective] = call(collective, calls.finish(collective), (new[collective],))

    for node in gm.graph.nodes:
        wait(waits.before(node))
        if is_started(node):
            given = [x for x in named_arguments(node).values() if isinstance(x, Node)]
            new[node] = call(node, calls.start(node), tuple(new[x] for x in given))
            wait(waits.started(node))
        elif node.op == "call_function" and node.target in LOCAL:
            new[node] = call(node, calls.local(node), (new[named_arguments(node)["x"]],))
        elif node.op != "call_function" or node.target not in COLLECTIVES:
            new[node] = copied_node(graph, node, new.__getitem__)
            calls.other(node, new[node])
            if node.op == "placeholder":
                new[node].target = new[node].name  # else generated code renames arguments one by one, over each other
    graph.set_codegen(_BoxedCode())
    graph.on_generate_code(lambda _: lambda lines: [_MARK.sub("yield", line) for line in lines])
    graph.lint()
    return GraphModule(gm, graph)


class _BoxedCode(CodeGen):
    """``def forward(self, inputs)``: takes a list, unpacks it and empties it."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        names = [name.partition(":")[0].partition("=")[0].strip() for name in free_vars]
        unpack = f"    [{', '.join(names)}] = inputs\n" if names else ""
        return f"def forward(self, inputs):\n{unpack}    inputs.clear()\n"

    def process_inputs(self, inputs: list[Any]) -> list[Any]:
        return inputs


class _Traced:
    """What the nodes of a graph for a compiler call: functional collectives, operators as they are.

    start: of a collective or copy, takes its tensors and returns what ``finish`` takes. local: of a rank's slice or
    padding. other: sets the target of a copied node.
    """

    def __init__(self, collectives: Functional, device: torch.device) -> None:
        self._collectives, self._device = collectives, device

    def finish(self, node: Node) -> Callable[[Any], Any]:
        if node.target in COPIES:
            return lambda x: x
        return lambda_named("finish_traced", lambda pending: pending[1](self._collectives.wait(pending[0])))

    def start(self, node: Node) -> Callable[..., Any]:
        if node.target is ours.from_host.default:
            return lambda_named("from_host", lambda x: ours.from_host.default(x, self._device))
        if node.target in COPIES:
            return node.target
        given = {k: v for k, v in named_arguments(node).items() if k != "x"}
        run = getattr(functional_collectives, kind_of(node))
        return lambda_named(f"functional_{kind_of(node)}", lambda x: run(self._collectives, x, **given))

    local = start

    def other(self, node: Node, new: Node) -> None:
        if is_call(node, aten.addmm.default) and overwritten(node) is not None:
            new.target = _add_product
        elif donated(node) is not None:
            new.target = _add_elementwise


@operator("(Tensor(a!) total, Tensor a, Tensor b) -> ()", lambda total, a, b: None, writes=["total"])
def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds a [M, K] times b [K, N] to total [M, N], in place in compiled code as well."""
    total.addmm_(a, b)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    ours.add_product.default(total, a, b)
    return total


def _add_elementwise(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return total.copy_(aten.addcmul.default(total, a, b))


class _Eager:
    """What those of a graph call that runs operator by operator; as `_Traced`."""

    def __init__(self, groups: Groups, comms: Comms, experts: Experts | None, first: bool = False) -> None:
        self._groups, self._comms, self._experts, self._first = groups, comms, experts, first

    def start(self, node: Node) -> Callable[..., Any]:
        if node.target in COPIES:
            copies = OffloadBuffers.on(self._groups.device)
            return copies.to_host if node.target is ours.to_host.default else copies.from_host
        if node.target in ASKS:
            return self._ask(node)
        kind, given = kind_of(node), _given(node)
        if kind == "all_reduce":
            given["in_place"] = overwritten(node) is not None
        if kind == "all_to_all_rows":
            given["count"] = self._comms.count
        return getattr(comm, kind)(self._groups, node.name, **given)

    def _ask(self, node: Node) -> Callable[..., Any]:
        assert self._experts is not None, f"{node.name} asks experts, and nobody answers"
        start, layer = self._experts.start, named_arguments(node)["layer"]

        def ask(x: Tensor, expert: Tensor | None = None, weights: Tensor | None = None) -> Any:
            return start(layer, x, expert, weights)

        return lambda_named("ask_experts", ask)

    def finish(self, node: Node) -> Callable[[Any], Any]:
        if node.target in ASKS:
            assert self._experts is not None
            answered = self._experts.finish
            return lambda_named("answered", lambda pending: answered(pending))
        return OffloadBuffers.on(self._groups.device).finish if node.target in COPIES else finish

    def local(self, node: Node) -> Callable[..., Any]:
        take = getattr(comm, kind_of(node))(self._groups, **_given(node))
        if node.target is ours.shard_slice.default and any(user.op == "output" for user in node.users):
            return lambda_named("own_slice", lambda x: take(x).clone())  # an output owns its storage
        return take

    def other(self, node: Node, new: Node) -> None:
        if node.target in OPERATORS:
            new.target = self._comms.function_of(node.target, node.args, node.name)
        given = overwritten(node)
        if self._first and donated(node) is not None:
            new.target, new.args, given = PRODUCT_OF[node.target], new.args[1:], None
        bypass_dispatch(new, None if given is None else node.args.index(given))


def _given(node: Node) -> dict[str, Any]:
    """The arguments by name with which a collective is made, before it has tensors."""
    return {name: x for name, x in named_arguments(node).items() if name not in ("x", "splits", "size")}


def lambda_named(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function with a readable name in generated code."""
    fn.__name__ = fn.__qualname__ = name
    return fn
