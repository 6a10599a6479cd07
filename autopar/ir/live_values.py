"""Peak memory of a graph that runs node by node, with collectives started and ended as the executor does.

    x dies after its last use            start: a collective allocates its buffers and keeps its operand alive
    outputs are kept, on the device      wait:  its result exists, its operand and its buffers may be freed

`autopar.ir.waits` says when collectives are waited for, `autopar.runtime.comm.collectives` how they move shards.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from autopar.adapters.operators import kernel_of
from autopar.capture.trace.python_workspace import workspace_bytes
from autopar.ir.graph import arguments, is_call, nbytes, output_node, placeholders, shape
from autopar.ir.placement import repetitions, scaled_blocks
from autopar.ir.storages import Storage, bytes_of, size_of, storages
from autopar.ir.waits import WaitPlaces, is_started
from autopar.ops import attention as attention
from autopar.ops import cross_entropy as cross_entropy
from autopar.ops import grouped_experts as grouped_experts
from autopar.ops import vocab_parallel as vocab_parallel  # registers what is named here
from autopar.ops.cross_entropy import blocks_of_rows
from autopar.ops.kernels import expected_kernel
from autopar.ops.kernels.chips import MODERN
from autopar.ops.mask_spec import MaskSpec
from autopar.ops.traits import ASKS, COPIES

ours = torch.ops.autopar


def peak_of_values(gm: GraphModule, held: Collection[str], same: Mapping[Node, Node] | None = None) -> int:
    """Most bytes alive at once when the graph runs node by node: outputs are kept, inputs freed after their last use.

    ``held``: names of placeholders that are alive anyway; they count nothing. ``same``: placeholders that share the
    storage of another one.
    """
    return max(bytes_alive(gm, held, same).values(), default=0)


def bytes_alive(gm: GraphModule, held: Collection[str], same: Mapping[Node, Node] | None = None) -> dict[Node, int]:
    """Most bytes alive at once while each node runs; as in `peak_of_values`."""
    run, waits, found = _Run(gm, held, same or {}), WaitPlaces(gm), dict[Node, int]()
    for node in gm.graph.nodes:
        for collective in waits.before(node):
            run.wait(collective)
        if is_started(node):
            run.start(node)
            for collective in waits.started(node):
                run.wait(collective)
        elif node.op == "call_function":
            run.call(node)
        run.end(node)
        found[node], run.most = run.most, run.live
    return found


class _Run:
    """The bytes that are alive. ``most``: their peak since somebody has looked."""

    def __init__(self, gm: GraphModule, held: Collection[str], same: Mapping[Node, Node]) -> None:
        self._behind = storages(gm, in_place=True)
        if same:
            base = {(x, 0): (first, 0) for x, first in same.items()}
            self._behind = {n: tuple(base.get(s, s) for s in found) for n, found in self._behind.items()}
        self._ends = _ends(gm, self._behind, held)
        self.live = self.most = bytes_of(n for n in placeholders(gm) if n.name not in held and n not in same)
        self._flying: dict[Node, tuple[Storage | None, int, int]] = {}  # operand, buffers, result
        self._read: Counter[Storage] = Counter()  # by running collectives
        self._late: set[Storage] = set()  # of these, those without another use

    def call(self, node: Node) -> None:
        """Run a node that is not a collective."""
        self._add(self._own(node))
        self.most = max(self.most, self.live + workspace(node))

    def _own(self, node: Node) -> int:
        return sum(size_of(s) for s in self._behind[node] if s[0] is node)

    def _add(self, size: int) -> None:
        self.live += size
        self.most = max(self.most, self.live)

    def start(self, node: Node) -> None:
        """Start a collective: it reads its operand or a copy in rows, and writes its result or rows of it. A copy to or
        from the host, and a question to experts, reads its operand and writes its result."""
        if node.target in (*COPIES, *ASKS):
            self._on_their_way(node, self._behind[arguments(node)["x"]][0], 0, 0)
            self._add(self._own(node))
            return
        if not self._own(node):  # an all-reduce that overwrites its operand
            return
        copied, buffers, late = buffers_of(node)
        (read,) = (None,) if copied else self._behind[arguments(node)["x"]]
        self._on_their_way(node, read, buffers, late)
        self._add(buffers + nbytes(node) - late)

    def _on_their_way(self, node: Node, read: Storage | None, buffers: int, result: int) -> None:
        self._flying[node] = read, buffers, result
        if read is not None:
            self._read[read] += 1

    def wait(self, node: Node) -> None:
        """End a collective."""
        if node not in self._flying:
            return
        read, buffers, result = self._flying.pop(node)
        self._add(result)
        self.live -= buffers
        if read is not None:
            self._read[read] -= 1
            if read in self._late and not self._read[read]:
                self._late.remove(read)
                self.live -= size_of(read)

    def end(self, node: Node) -> None:
        """Free the storages with their last use in a node, except those that running collectives read."""
        for storage in self._ends.get(node, ()):
            if self._read[storage]:
                self._late.add(storage)
            else:
                self.live -= size_of(storage)


def buffers_of(node: Node) -> tuple[bool, int, int]:
    """Of a collective: whether it leaves its operand at once, since it has copied it; bytes of its buffers until it is
    waited for; of these, bytes that become its result."""
    given = arguments(node)
    operand: Node = given["x"]
    if is_call(node, ours.all_reduce.default):
        return True, 0, 0  # it overwrites its result, a copy
    source, target = _row_dims(node)
    copied = not operand.meta["val"].is_contiguous() if source is None else _moves(shape(operand), *source)
    cropped = bool(given.get("units") or given.get("src_units"))
    arrives = target is not None and (cropped or _moves(shape(node), *target))
    late = nbytes(node) * arrives
    return copied, nbytes(operand) * copied + late, late


def _ends(gm: GraphModule, behind: dict[Node, tuple[Storage, ...]], held: Collection[str]) -> dict[Node, list[Storage]]:
    """Node -> the storages with their last use there; what the graph returns has none."""
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    last: dict[Storage, Node] = {}
    for node in gm.graph.nodes:
        for x in (node, *node.all_input_nodes):
            for storage in behind.get(x, ()):
                if storage not in last or order[node] > order[last[storage]]:
                    last[storage] = node
    found: dict[Node, list[Storage]] = {}
    for storage, node in last.items():
        if node is not output_node(gm) and (storage[0].name not in held or storage[0].op != "placeholder"):
            found.setdefault(node, []).append(storage)
    return found


Cut = tuple[int, list[int]]  # dim and blocks


def _row_dims(node: Node) -> tuple[Cut | None, Cut | None]:
    """(dim and blocks in which a collective splits its operand into rows, those in which it joins rows)."""
    given = arguments(node)
    if is_call(node, ours.all_gather.default):
        return None, (given["dim"], given["blocks"])
    if is_call(node, ours.reduce_scatter.default):
        return (given["dim"], given["blocks"]), None
    if is_call(node, ours.all_to_all_rows.default):
        return None, None
    return (given["dst_dim"], given["dst_blocks"]), (given["src_dim"], given["src_blocks"])


def _moves(whole: tuple[int, ...], dim: int, blocks: list[int]) -> bool:
    """Whether the rows of the ranks have to be copied: not if they are contiguous in the whole."""
    parts = scaled_blocks(blocks, whole[dim])
    return math.prod(whole[:dim]) > 1 or repetitions(parts) > 1 or len(parts) > 1 or any(b < 0 for b in parts)


# --- workspace of calls --------------------------------------------------------------------------------

ATTENTIONS = {ours.attention.default, ours.attention_backward.default}
IN_BLOCKS = {  # of rows, in thousands of calls
    ours.cross_entropy.default,
    ours.cross_entropy_backward.default,
    ours.piece_max.default,
    ours.piece_sums.default,
    ours.piece_backward.default,
    ours.moe_combine_backward.default,
}
IN_PYTHON = {
    *ATTENTIONS,
    *IN_BLOCKS,
    ours.moe_dispatch.default,
    ours.moe_dispatch_backward.default,
    ours.moe_combine.default,
}
_FACTS = tuple(MaskSpec.__dataclass_fields__)[:-2]  # the last two are not arguments
_KNOWN: dict[Any, int] = {}
FEW = 32  # blocks of rows


def workspace(node: Node) -> int:
    """Bytes that an operator written in Python allocates beside its operands and results, while it runs.

    Found by running its function on fake tensors of the node's shapes, once for each kind of call. It is the CPU's
    number. For attention also where GPUs have a fused kernel without this memory: plans are the same on every machine.
    Workspace of torch's own operators is left out, as are operators whose sizes depend on values.
    """
    if node.target not in IN_PYTHON:
        return 0
    given: dict[str, Any] = map_arg(arguments(node), lambda n: n.meta["val"])
    key = (node.target, *map(_kind, given.values()))
    if key not in _KNOWN:
        function = kernel_of(node.target)
        assert function is not None
        fused, fake = node.target in ATTENTIONS and _is_fused(given), node.target not in IN_BLOCKS
        measured = _of_many_rows if "logits" in given else workspace_bytes
        _KNOWN[key] = 0 if fused else measured(function, given, fake)
    return _KNOWN[key]


def _of_many_rows(function: Any, given: Mapping[str, Any], fake: bool) -> int:
    """`workspace_bytes` of an operator that computes with a block of rows at a time: it grows by the same bytes for
    each further block, so two numbers of blocks are run in place of thousands."""
    rows, width = len(given["logits"]), next(blocks_of_rows(given["logits"])).stop
    if rows <= 2 * FEW * width:
        return workspace_bytes(function, given, fake)

    def of(blocks: int) -> int:
        fewer = blocks * width + rows % width
        some = {k: x[:fewer] if isinstance(x, Tensor) and x.shape[:1] == (rows,) else x for k, x in given.items()}
        return workspace_bytes(function, some, fake)

    return of(FEW) + (of(2 * FEW) - of(FEW)) * (rows // width - FEW) // FEW


def _kind(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return tuple(map(_kind, x))
    return (tuple(x.shape), x.stride(), x.dtype) if isinstance(x, Tensor) else x


def _is_fused(given: Mapping[str, Any]) -> bool:
    """Whether a GPU would not store the scores of all pairs."""
    facts = MaskSpec(*(given[name] for name in _FACTS))
    return expected_kernel(MODERN, given["q"], given["k"], given["v"], facts) != "math"
