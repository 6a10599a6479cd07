"""How long a node takes, from its shapes alone: floating-point operations, bytes of memory, and a roofline over both.

    products       2 per multiply-add: m·k·n of a matrix product, O·(I/g)·kernel·positions of a convolution
    attention      2·(D + Dv) per allowed (query, key) pair and head; its backward 2·(3 D + 2 Dv), as it recomputes
                   the scores. Causal counts the triangle, a window its band, chunks and documents their
                   blocks
    cached         as attention, over the requests of a step: ``requests``, or full tables of pages
    all else       1 per element
    views          nothing

seconds of a product = max(operations in whole tiles / speed, bytes / bandwidth) (Williams et al., Roofline, CACM 2009),
of attention = operations / speed, of all else = bytes / bandwidth, for graphs at any level. Speeds are those that a
software stack reaches (`autopar.cost.efficiency`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node

import autopar.ops  # noqa: F401  (registers the operators that the table names)
from autopar.adapters.operators import OpOverload, mutates, name_of
from autopar.attention.operator import attention_of_piece
from autopar.cost.attention_costs import busiest_share, is_context_attention
from autopar.cost.hardware import DEFAULT, Device, Links
from autopar.cost.traffic import transfer_seconds
from autopar.ir.conversions import convert, exchange
from autopar.ir.graph import arguments, is_call, tensor_operands
from autopar.ir.halo import token_conv1d_of_piece
from autopar.ir.storages import shares_storage
from autopar.ops.few_bits.scaled_experts import scaled_experts
from autopar.ops.few_bits.scaled_products import VALUES, scaled_linear
from autopar.ops.token_windows import token_conv1d
from autopar.ops.traits import ASKS, COLLECTIVES, COPIES
from autopar.ops.vocab_parallel import embedding_of_piece

Arguments = dict[str, Any]
Count = Callable[[Node, Arguments], int]


# --- products ------------------------------------------------------------------------------------------------


def _tensors(node: Node) -> list[Tensor]:
    """The fake tensors that a node returns, without None and numbers (of a graph that computes sizes)."""
    val = node.meta.get("val")
    return [v for v in (val if isinstance(val, (list, tuple)) else [val]) if isinstance(v, Tensor)]


def _numel(node: Node) -> int:
    return sum(math.prod(v.shape) for v in _tensors(node))


def _nbytes(node: Node) -> int:
    return sum(math.prod(v.shape) * v.dtype.itemsize for v in _tensors(node))


def _size(node: Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _product(left: str) -> Count:
    """2·(elements of the result)·(last dim of the left factor)."""
    return lambda node, args: 2 * _numel(node) * _size(args[left])[-1]


def _addbmm(node: Node, args: Arguments) -> int:
    return 2 * math.prod(_size(args["batch1"])) * _size(args["batch2"])[-1]


def _einsum(node: Node, args: Arguments) -> int:
    """One product per further factor, over all letters of the equation: exact for two factors, else an upper bound."""
    terms = str(args["equation"]).replace(" ", "").partition("->")[0].split(",")
    sizes: dict[str, int] = {}
    dots = 1
    for term, x in zip(terms, args["tensors"], strict=True):
        shape = list(_size(x))
        before, ellipsis, after = term.partition("...")
        named = shape[: len(before)] + (shape[len(shape) - len(after) :] if after else [])
        if ellipsis:
            dots = max(dots, math.prod(shape[len(before) : len(shape) - len(after)]))
        for letter, size in zip(before + after, named, strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))
    return 2 * max(1, len(terms) - 1) * dots * math.prod(sizes.values())


def _convolution(node: Node, args: Arguments) -> int:
    """Each output position takes a patch; transposed, each input position gives one."""
    positions = args["input"] if args.get("transposed") else node
    return 2 * _numel(positions) * math.prod(_size(args["weight"])[1:])


def _transposed_convolution(node: Node, args: Arguments) -> int:
    return _convolution(node, {**args, "transposed": True})


def _convolution_backward(node: Node, args: Arguments) -> int:
    """Two products like the forward's, and the bias's sum."""
    positions = args["input"] if args["transposed"] else args["grad_output"]
    each = 2 * _numel(positions) * math.prod(_size(args["weight"])[1:])
    to_input, to_weight, to_bias = args["output_mask"]
    return each * (to_input + to_weight) + to_bias * _numel(args["grad_output"])


def _grouped_mm(node: Node, args: Arguments) -> int:
    """torch's grouped_mm: groups of rows of the left factor, or of both, or of columns of the right one."""
    left, right = args["self"], args["mat2"]
    if len(_size(left)) == 2:
        return 2 * _numel(left) * _size(right)[-1]
    return 2 * _numel(node) * _size(left)[-1]


def _grouped_weight_grad(node: Node, args: Arguments) -> int:
    return 2 * _numel(args["rows"]) * _size(args["grad"])[-1]


# --- attention -----------------------------------------------------------------------------------------------


def pairs(
    queries: int,
    keys: int,
    causal: bool = False,
    window: int = 0,
    chunk: int = 0,
    offset: int = 0,
    documents: Sequence[int] = (),
) -> int:
    """Number of allowed (query, key) pairs under the mask facts of `autopar::attention`: row r is query r + offset.
    ``documents``: lengths of those of the whole row, () if unknown."""
    i = np.arange(offset, offset + queries, dtype=np.int64)
    first, behind = np.zeros_like(i), np.full_like(i, keys)
    if causal:
        behind = np.minimum(behind, i + 1)
    if window:
        first, behind = np.maximum(first, i - window + 1), np.minimum(behind, i + window)
    if chunk:
        first, behind = np.maximum(first, i // chunk * chunk), np.minimum(behind, (i // chunk + 1) * chunk)
    if documents:
        ends = np.cumsum(documents)
        own = np.minimum(np.searchsorted(ends, i, side="right"), len(ends) - 1)
        first, behind = np.maximum(first, (ends - documents)[own]), np.minimum(behind, ends[own])
    return int(np.maximum(behind - first, 0).sum())


def _attention(of_query: int, of_value: int) -> Count:
    """2·pairs·heads·(of_query·D + of_value·Dv) for autopar's operator and for torch's, whose argument names differ."""

    def count(node: Node, args: Arguments) -> int:
        q, k, v = (_size(args[long] if long in args else args[long[0]]) for long in ("query", "key", "value"))
        causal = bool(args.get("causal", args.get("is_causal", False)))
        offset = args.get("offset", 0)
        if isinstance(offset, Node):  # a graph for any token slice: this one's queries are its last tokens
            offset = k[-2] - q[-2]
        ranks = args.get("size", 1)  # over a sharded sequence: a rank's share of the pairs, which algorithms balance
        window, chunk, documents = args.get("window", 0), args.get("chunk", 0), args.get("documents", ())
        allowed = pairs(ranks * q[-2], ranks * k[-2], causal, window, chunk, offset, documents) // ranks
        return 2 * allowed * math.prod(q[:-2]) * (of_query * q[-1] + of_value * v[-1])

    return count


CACHED = torch.ops.autopar.cached_attention.default
Requests = Sequence[tuple[int, int]]  # of a step that serves: (tokens, keys with these) of each request


def _cached_attention(node: Node, requests: Requests | None) -> tuple[int, int]:
    """Operations, and bytes: each request's visible keys are read once, the step's own are written, too."""
    args = arguments(node)
    (_, heads, tokens, width), value = _size(args["q"]), _size(args["v"])[-1]
    window, chunk = args["window"], args["chunk"]
    if requests is None:
        rows, columns = _size(args["table"])
        requests = [(max(tokens // rows, 1), columns * _size(args["keys"])[1])] * rows
    allowed = sum(pairs(new, keys, True, window, chunk, keys - new) for new, keys in requests)
    read = 0
    for new, keys in requests:
        first = keys - new
        behind = max(first - window + 1 if window else 0, first // chunk * chunk if chunk else 0, 0)
        read += keys - behind
    of_key = _size(args["k"])[1] * (width + value) * args["keys"].meta["val"].dtype.itemsize
    own = _nbytes(args["k"]) + _nbytes(args["v"])
    moved = _nbytes(args["q"]) + 2 * own + read * of_key + _nbytes(node)
    return 2 * allowed * heads * (width + value), moved


# --- the table -----------------------------------------------------------------------------------------------

COUNTS: dict[str, Count] = {
    "aten::linear": _product("input"),
    "aten::matmul": _product("self"),
    "aten::mm": _product("self"),
    "aten::bmm": _product("self"),
    "aten::mv": _product("self"),
    "aten::dot": _product("self"),
    "aten::vdot": _product("self"),
    "aten::addmm": _product("mat1"),
    "aten::addmv": _product("mat"),
    "aten::baddbmm": _product("batch1"),
    "aten::addbmm": _addbmm,
    "aten::_grouped_mm": _grouped_mm,
    "aten::einsum": _einsum,
    "aten::conv1d": _convolution,
    "aten::conv2d": _convolution,
    "aten::conv3d": _convolution,
    "aten::convolution": _convolution,
    "aten::conv_transpose1d": _transposed_convolution,
    "aten::conv_transpose2d": _transposed_convolution,
    "aten::conv_transpose3d": _transposed_convolution,
    "aten::convolution_backward": _convolution_backward,
    "autopar::grouped_mm": _product("rows"),
    "autopar::grouped_mm_weight_grad": _grouped_weight_grad,
    "autopar::scaled_mm": _product("a"),
    "autopar::scaled_grouped_mm": _product("rows"),
    "autopar::scaled_grouped_mm_weight_grad": _grouped_weight_grad,
    "autopar::attention": _attention(1, 1),
    "autopar::attention_backward": _attention(3, 2),
    "autopar::context_attention": _attention(1, 1),
    "autopar::context_attention_backward": _attention(3, 2),
    "aten::scaled_dot_product_attention": _attention(1, 1),
}
for _kind in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention"):
    COUNTS[f"aten::_scaled_dot_product_{_kind}"] = _attention(1, 1)
    COUNTS[f"aten::_scaled_dot_product_{_kind}_backward"] = _attention(3, 2)

# Functions of local graphs.
_LOCAL: dict[Any, Count] = {
    attention_of_piece: _attention(1, 1),
    scaled_linear: _product("input"),
    scaled_experts: _product("rows"),
    token_conv1d: _convolution,
    token_conv1d_of_piece: _convolution,
}
# They read only as much of their operands as they return.
_LOOKUPS = ("aten::embedding", "aten::index_select", "aten::gather", "aten::index", "autopar::shard_slice")
_FREE = (operator.getitem, convert, exchange, *COLLECTIVES, *COPIES, *ASKS)


def _name(node: Node) -> str:
    return name_of(node.target) if isinstance(node.target, OpOverload) else ""


def is_free(node: Node) -> bool:
    """Whether a node computes nothing: inputs, views, and transfers, which `node_seconds` counts by their bytes."""
    if node.op != "call_function" or is_call(node, *_FREE):
        return True
    return shares_storage(node) and not mutates(node.target) and not is_lookup(node)


def is_lookup(node: Node) -> bool:
    """Whether a node reads only as much of its operands as it returns."""
    return _name(node) in _LOOKUPS or is_call(node, embedding_of_piece)


def flops(node: Node, requests: Requests | None = None) -> int:
    """Floating-point operations of one run of a node, from the shapes in ``meta['val']``; 0 for views and transfers.

    On local and step graphs they are one rank's, on global graphs those of the global batch. ``requests``: (tokens,
    keys with these) of each request of a step that serves, for ``cached_attention``.
    """
    if is_free(node):
        return 0
    if is_call(node, CACHED):
        return _cached_attention(node, requests)[0]
    count = _LOCAL.get(node.target) or COUNTS.get(_name(node))
    if count is not None:
        return count(node, arguments(node))
    operands = [] if is_lookup(node) else tensor_operands(node)
    return max([_numel(node), *map(_numel, operands)])


def memory_bytes(node: Node, requests: Requests | None = None) -> int:
    """Bytes that a node reads and writes when every operand comes from memory. ``requests``: as in `flops`."""
    if is_free(node):
        return 0
    if is_call(node, CACHED):
        return _cached_attention(node, requests)[1]
    if is_lookup(node):
        return 2 * _nbytes(node)
    return _nbytes(node) + sum(map(_nbytes, dict.fromkeys(tensor_operands(node))))


# --- seconds -------------------------------------------------------------------------------------------------

TILE = 128  # rows and columns of a product's tile: a smaller product takes as long
PRODUCT, ATTENTION = "product", "attention"


def kind_of(node: Node) -> str:
    """Product, attention, or another kernel; "" for what computes nothing."""
    if is_free(node):
        return ""
    name = _name(node)
    if is_context_attention(node) or ("attention" in name and name in COUNTS):
        return ATTENTION
    return PRODUCT if name in COUNTS or node.target in _LOCAL else "other"


def tiled_flops(node: Node) -> float:
    """FLOPs of a product in whole tiles."""
    sizes = _size(node) if isinstance(node.meta["val"], Tensor) else ()
    rows, columns = (math.prod(sizes[:-1]), sizes[-1]) if sizes else (1, 1)
    if len(sizes) > 2 and "bmm" in _name(node):
        rows = sizes[-2]
    return float(flops(node)) * _tiles(rows) * _tiles(columns)


def _tiles(size: int) -> float:
    """Elements of whole tiles, per element."""
    return -(-size // TILE) * TILE / size if size else 1.0


def _scaled_by_block(node: Node) -> bool:
    """Whether it is a product of float8 that no kernel computes, so that it runs in the dtype of its result."""
    if is_call(node, scaled_linear, scaled_experts):
        return bool(arguments(node)["scaling"] == "block")
    if _name(node) == "autopar::scaled_grouped_mm":
        return _size(arguments(node)["scale_rows"])[1] > 1
    if _name(node) != "autopar::scaled_mm":
        return _name(node) == "autopar::scaled_grouped_mm_weight_grad"
    args = arguments(node)
    return _size(args["scale_a"])[1] > 1 or _size(args["scale_b"])[0] > 1


def is_backward_attention(node: Node) -> bool:
    """Of attention: whether it is of the backward."""
    return "backward" in _name(node)


def busiest_flops(node: Node) -> int:
    """FLOPs of attention on the rank that computes most, whole ones: equal calls are counted."""
    return round(flops(node) * busiest_share(node)) if is_context_attention(node) else flops(node)


def node_seconds(
    node: Node, device: Device = DEFAULT, links: Links | None = None, requests: Requests | None = None
) -> float:
    """Seconds of one run of a node on a device; with links, conversions and collectives take their transfers' time.
    ``requests``: as in `flops`."""
    moved = transfer_seconds(node, links) if links is not None else None
    if moved is not None and not is_context_attention(node):
        return moved
    kind = kind_of(node)
    if not kind:
        return 0.0
    memory = memory_bytes(node, requests) / device.memory
    operands = tensor_operands(node) or [node]
    dtype = next((v.dtype for v in _tensors(operands[0])), None) or torch.float32
    dtype = VALUES if is_call(node, scaled_linear, scaled_experts) else dtype
    dtype = _tensors(node)[0].dtype if _scaled_by_block(node) else dtype
    if kind == PRODUCT:
        return max(tiled_flops(node) / device.speed(dtype), memory)
    if kind == ATTENTION:
        speed = device.peak(dtype) * device.attention_share(is_backward_attention(node))
        return max(busiest_flops(node) / speed, moved or 0.0)
    if is_call(node, CACHED):
        return max(flops(node, requests) / (device.peak(dtype) * device.attention_share(False)), memory)
    return memory


def seconds_of(
    nodes: Iterable[Node], device: Device = DEFAULT, links: Links | None = None, requests: Requests | None = None
) -> float:
    """Seconds of nodes that run one after another, such as a layer's, or a graph's: ``seconds_of(gm.graph.nodes)``; at
    least those that the host takes to launch them.

    A step of 64 requests that have 1000 keys each and decode: ``seconds_of(nodes, requests=[(1, 1000)] * 64)``, with
    the nodes of a graph of 64 tokens.
    """
    times = [node_seconds(node, device, links, requests) for node in nodes]
    return max(math.fsum(times), device.launch * sum(time > 0 for time in times))
