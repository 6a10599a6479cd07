"""What one rank holds: bytes of parameters, gradients, optimizer states and activations, read off the step graphs.

    steady    parameters + buffers + inputs + optimizer
    F         saved values and temporaries as they live and die          \\
    B         saved values until their last use, gradients from birth     } the peak of a step lies in one of them
    between   gradient sums of earlier micro-batches                     /

Activations are counted by walking a graph as it runs: a value lives from its node to the last use of any view of it.
What the walk leaves out: workspace inside of an operator, the allocator's rounding, and that an all-reduce may
overwrite its operand; so it is what the graph asks for, not what a device's allocator reports.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node

from autopar.adapters.operators import OpOverload, returns_alias
from autopar.graph import arguments, is_call, output_node, outputs, placeholders
from autopar.mesh import Mesh
from autopar.parameter import ParameterSpec
from autopar.placement import Shard

if TYPE_CHECKING:
    from autopar.steps import Compiled

Storage = tuple[Node, int]  # the node that allocates it, and which of its results it is

# Views that their schemas do not tell of.
_SILENT_VIEWS = (torch.ops.aten._unsafe_view.default,)
# Floating states of AdamW per element: the two moments.
_MOMENTS = 2


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    parameters: stored pieces of all parameters. buffers: buffers and constants. inputs: its part of a step's batch.
    gradients: one per trainable parameter that the loss depends on, placed and typed like it.
    optimizer: AdamW in single precision, see `optimizer_bytes`.
    accumulated: with micro-batches, this rank's own gradients before they are reduced; they are whole on dp.
    saved: what F of one micro-batch keeps for B. forward_peak, backward_peak: most bytes of live values in F and in B,
    saved values and gradients included, what is steady left out.
    """

    parameters: int
    buffers: int
    inputs: int
    gradients: int
    optimizer: int
    accumulated: int
    saved: int
    forward_peak: int
    backward_peak: int

    @property
    def steady(self) -> int:
        """What is there all the time."""
        return self.parameters + self.buffers + self.inputs + self.optimizer

    @property
    def peak(self) -> int:
        """The most that is there at once, in a step whose gradients were freed before it started."""
        return self.steady + max(self.forward_peak, self.backward_peak)


def memory(compiled: Compiled) -> Memory:
    """The memory of one rank that trains a compiled model: AdamW, gradients freed between steps."""
    mesh, steps = compiled.plan.mesh, compiled.steps
    specs = {s.node: s for s in compiled.local.meta["signature"].inputs}
    nodes = {n.name: n for n in placeholders(compiled.local)}
    own = {spec.name: spec for spec in compiled.parameters}
    trained = [own[specs[name].name] for name in steps.gradients]
    held = {name for name, spec in specs.items() if spec.kind in ("parameter", "buffer", "constant", "input")}
    accumulated = _accumulated(compiled)
    backward = [peak_of_values(steps.backward, held)] if steps.backward else [0]
    if steps.backward_local is not None:
        backward.append(peak_of_values(steps.backward_local, held) + accumulated)
    return Memory(
        parameters=sum(p.nbytes(mesh) for p in compiled.parameters),
        buffers=_bytes(nodes[n] for n, s in specs.items() if s.kind in ("buffer", "constant") and n in nodes),
        inputs=_input_bytes(compiled, {n: s.name for n, s in specs.items() if s.kind == "input"}, nodes),
        gradients=sum(p.nbytes(mesh) for p in trained),
        optimizer=sum(optimizer_bytes(p, mesh) for p in trained),
        accumulated=accumulated,
        saved=saved_bytes(steps.forward, steps.outputs, held),
        forward_peak=peak_of_values(steps.forward, held) + accumulated,
        backward_peak=max(backward),
    )


def optimizer_bytes(spec: ParameterSpec, mesh: Mesh) -> int:
    """AdamW on one rank's piece: two moments in single precision, and a single precision master copy of a parameter
    in half precision. 8 bytes per element of float32, 12 of bfloat16, 16 of float64.

    (`torch.optim.AdamW` on parameters in half precision keeps both moments in half precision and no master copy: 4.)
    """
    size = spec.dtype.itemsize
    count = spec.nbytes(mesh) // size
    return count * (_MOMENTS * max(size, 4) + (4 if size < 4 else 0))


def _accumulated(compiled: Compiled) -> int:
    local = compiled.steps.backward_local
    if local is None:
        return 0
    return _bytes(g for g in outputs(local) if isinstance(g, Node))


def _input_bytes(compiled: Compiled, inputs: Mapping[str, str], nodes: Mapping[str, Node]) -> int:
    """Inputs of all micro-batches: a graph sees one of them."""
    count, total = compiled.plan.options.micro_batches, 0
    for node, name in inputs.items():
        cut = isinstance(compiled.plan.inputs.get(name, {}).get("mb"), Shard)
        total += _bytes([nodes[node]]) * (count if cut else 1)
    return total


def _bytes(nodes: Iterable[Node]) -> int:
    return sum(_size(v) for n in nodes for v in _results(n))


def _size(value: Any) -> int:
    return math.prod(value.shape) * value.dtype.itemsize if isinstance(value, torch.Tensor) else 0


def _results(node: Node) -> list[Any]:
    """Everything that a call returns, None (a gradient that nobody asked for) included."""
    val = node.meta["val"]
    return list(val) if isinstance(val, (tuple, list)) else [val]


# --- storages and their lives --------------------------------------------------------------------------------


def storages(gm: GraphModule) -> dict[Node, tuple[Storage, ...]]:
    """Node -> the storage behind each of its results. A view has that of its base."""
    found: dict[Node, tuple[Storage, ...]] = {}
    for node in gm.graph.nodes:
        if node.op == "output":
            continue
        if is_call(node, operator.getitem):
            found[node] = (found[node.args[0]][node.args[1]],)
        elif (base := _base(node)) is not None:
            found[node] = found[base][:1] * len(_results(node))
        else:
            found[node] = tuple((node, i) for i in range(len(_results(node))))
    return found


def _bytes_of(storage: Storage) -> int:
    return _size(_results(storage[0])[storage[1]])


def _base(node: Node) -> Node | None:
    """The operand whose storage all results of a view share; None for what allocates."""
    if node.op != "call_function" or not node.all_input_nodes:
        return None
    if is_call(node, torch.ops.autopar.shard_slice.default):
        return node.all_input_nodes[0] if not arguments(node)["blocks"] else None
    is_view = isinstance(node.target, OpOverload) and returns_alias(node.target)
    return node.all_input_nodes[0] if is_view or node.target in _SILENT_VIEWS else None


def is_view(node: Node) -> bool:
    """Whether a call allocates nothing."""
    return is_call(node, operator.getitem) or _base(node) is not None


def saved_bytes(forward: GraphModule, results: int, held: Collection[str]) -> int:
    """Bytes behind F's outputs after the first ``results``, each storage once, placeholders in ``held`` left out."""
    return storage_bytes(forward, range(results, len(outputs(forward))), held)


def storage_bytes(gm: GraphModule, results: Iterable[int], held: Collection[str] = ()) -> int:
    """Bytes behind some of a graph's outputs, each storage once, placeholders in ``held`` left out."""
    behind, values = storages(gm), outputs(gm)
    kept = {s for i in results if isinstance(values[i], Node) for s in behind[values[i]]}
    return sum(_bytes_of(s) for s in kept if s[0].name not in held)


def peak_of_values(gm: GraphModule, held: Collection[str]) -> int:
    """Most bytes alive at once when the graph runs node by node: outputs are kept, inputs freed after their last use.

    ``held``: names of placeholders that somebody else keeps; they count nothing.
    """
    behind = storages(gm)
    last: dict[Storage, Node] = {}
    for node in gm.graph.nodes:
        for x in (node, *node.all_input_nodes):
            for storage in behind.get(x, ()):
                last[storage] = node
    end = output_node(gm)
    dying: dict[Node, list[Storage]] = {}
    for storage, node in last.items():
        if storage[0].name not in held or storage[0].op != "placeholder":
            dying.setdefault(node, []).append(storage)
    given = [n for n in placeholders(gm) if n.name not in held]
    live = most = _bytes(given)
    for node in gm.graph.nodes:
        if node.op == "call_function":
            live += sum(_bytes_of(s) for s in behind[node] if s[0] is node)
            most = max(most, live)
        if node is not end:
            live -= sum(_bytes_of(s) for s in dying.get(node, ()))
    return most
