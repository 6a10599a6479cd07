"""Raw collectives, bound and run on real ranks, against `placement.piece` and `placement.join`."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

import autopar.ops.collectives  # noqa: F401 - defines the operators
from autopar.adapters.distributed import ALL_GATHER, REDUCE_SCATTER
from autopar.ir.placement import PARTIAL, Shard, join, piece
from autopar.ir.traffic import Traffic
from autopar.runtime.exec.lowering import bind
from autopar.runtime.fault.errors import error_context
from autopar.runtime.mesh.process_groups import Groups, init_mesh
from tests.support.ranks import close_pools, rank_outcomes, run_ranks
from tests.support.scalar_kernels import scalar_kernels

raw = torch.ops.autopar
aten = torch.ops.aten


def graph_of(
    shapes: list[tuple[int, ...]], build: Callable[..., Any], dtype: torch.dtype = torch.float64
) -> GraphModule:
    """A graph of placeholders and what ``build(call, *nodes)`` adds, with fake values."""
    mode, graph = FakeTensorMode(), Graph()

    def call(target: Any, *args: Any) -> Any:
        node = graph.call_function(target, args)
        with mode:
            node.meta["val"] = target(*[a.meta["val"] if hasattr(a, "meta") else a for a in args])
        return node

    inputs = []
    for i, shape in enumerate(shapes):
        node = graph.placeholder(f"in{i}")
        with mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        inputs.append(node)
    graph.output(tuple(build(call, *inputs)))
    return GraphModule({}, graph)


def piece_cases() -> list[tuple[tuple[int, ...], Shard]]:
    return [
        ((8, 3), Shard(0)),
        ((3, 8), Shard(1)),
        ((1, 8, 2), Shard(1)),
        ((2, 3, 8), Shard(2)),
        ((12, 2), Shard(0, (4, 4, 4))),
        ((2, 16, 3), Shard(1, (8, 4, 4))),
        ((2, 16), Shard(1, (4, 12))),
    ]


def one(ranks: int, backend: str, shape: tuple[int, ...], build: Callable[..., Any], x: Tensor) -> Tensor:
    groups = Groups(init_mesh(tp=ranks))
    given = [x]
    (out,) = bind(graph_of([shape], build), groups, backend)(given)
    assert not given, "the list of inputs is emptied"
    assert out.is_contiguous()
    return out


def pieces_and_wholes(ranks: int, backend: str) -> None:
    me = dist.get_rank()
    for shape, shard in piece_cases():
        dim, blocks = shard.dim, list(shard.blocks)
        whole = torch.rand(shape, dtype=torch.float64)
        mine = piece(whole, shard, ranks, me).contiguous()
        addends = [torch.rand(shape, dtype=torch.float64) for _ in range(ranks)]

        def run(target: Any, x: Tensor, *args: Any) -> Tensor:
            return one(ranks, backend, tuple(x.shape), lambda call, n: [call(target, n, *args)], x)

        gathered = run(raw.all_gather.default, mine, dim, blocks, "tp", ranks)
        torch.testing.assert_close(gathered, whole, rtol=0, atol=0)
        scattered = run(raw.reduce_scatter.default, addends[me], dim, blocks, "tp", ranks)
        torch.testing.assert_close(scattered, piece(join(addends, PARTIAL), shard, ranks, me))
        sliced = run(raw.shard_slice.default, whole, dim, blocks, "tp", ranks)
        torch.testing.assert_close(sliced, mine, rtol=0, atol=0)
        padded = run(raw.shard_pad.default, mine, dim, blocks, "tp", ranks)
        reduced = run(raw.all_reduce.default, padded, "tp", "sum")
        torch.testing.assert_close(reduced, whole, rtol=0, atol=0)
        highest = run(raw.all_reduce.default, addends[me], "tp", "max")
        torch.testing.assert_close(highest, torch.stack(addends).amax(0), rtol=0, atol=0)


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_collective_is_piece_and_join(ranks: int) -> None:
    run_ranks(ranks, pieces_and_wholes, ranks, "eager")


def exchanges(ranks: int, backend: str) -> None:
    me = dist.get_rank()
    cases = [
        ((8, 12), Shard(0), Shard(1)),
        ((8, 12), Shard(1), Shard(0)),
        ((2, 8, 3, 16), Shard(1), Shard(3, (8, 4, 4))),
        ((2, 16, 8), Shard(1, (4, 12)), Shard(2)),
        ((16, 3), Shard(0), Shard(0, (8, 8))),
        ((3, 16), Shard(1, (4, 12)), Shard(1)),
    ]
    for shape, src, dst in cases:
        whole = torch.rand(shape, dtype=torch.float64)
        mine = piece(whole, src, ranks, me).contiguous()
        args = (src.dim, list(src.blocks), dst.dim, list(dst.blocks), "tp", ranks)
        out = one(
            ranks, backend, tuple(mine.shape), lambda call, n, args=args: [call(raw.all_to_all.default, n, *args)], mine
        )
        torch.testing.assert_close(out, piece(whole, dst, ranks, me), rtol=0, atol=0)


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_to_all_moves_shards(ranks: int) -> None:
    run_ranks(ranks, exchanges, ranks, "eager")


# --- where a collective starts and ends, and what it may overwrite -------------------------------------


def layers(call: Any, x: Any, w: Any) -> list[Any]:
    h = call(aten.mm.default, x, w)
    reduced = call(raw.all_reduce.default, h, "tp", "sum")
    other = call(aten.mul.Tensor, x, x)
    return [call(aten.add.Tensor, reduced, other)]


def overlap() -> tuple[str, bool]:
    groups = Groups(init_mesh(tp=2))
    bound = bind(graph_of([(4, 4), (4, 4)], layers), groups)
    x, w = torch.rand(4, 4, dtype=torch.float64), torch.eye(4, dtype=torch.float64)
    kept = x.clone()
    (out,) = bound([x, w])
    return bound.code, torch.equal(out, 2 * kept + kept * kept) and torch.equal(x, kept)


def test_the_wait_stands_before_the_first_user() -> None:
    code, right = run_ranks(2, overlap)[0]
    order = [code.index(word) for word in ("torch.mm(", "start_all_reduce(", "torch.mul(", "finish(", ".add_(")]
    assert order == sorted(order) and right


def overwrites() -> list[bool]:
    groups = Groups(init_mesh(tp=2))

    def in_place(build: Callable[..., Any]) -> bool:
        gm = graph_of([(4, 4)], build)
        target = next(n.args[0] for n in gm.graph.nodes if n.target is raw.all_reduce.default)
        seen: list[int] = []

        def spy(*args: Any, **kwargs: Any) -> Any:
            seen.append(args[0].data_ptr())
            return real(*args, **kwargs)

        made: list[int] = []

        class Made(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                out = func(*args, **(kwargs or {}))
                if func is target.target and isinstance(out, Tensor):
                    made.append(out.data_ptr())
                return out

        real, dist.all_reduce = dist.all_reduce, spy
        try:
            x = torch.rand(4, 4, dtype=torch.float64)
            kept, pointer = x.clone(), x.data_ptr()
            with Made():
                bind(gm, groups)([x])
            assert torch.equal(x, kept), "an input of the graph is never overwritten"
        finally:
            dist.all_reduce = real
        return seen[0] in [*made, pointer]

    reduce = raw.all_reduce.default
    return [
        in_place(lambda call, x: [call(reduce, call(aten.neg.default, x), "tp", "sum")]),
        in_place(
            lambda call, x: [call(reduce, call(aten.view.default, call(aten.neg.default, x), [2, 8]), "tp", "sum")]
        ),
        in_place(lambda call, x: [call(reduce, x, "tp", "sum")]),
        in_place(lambda call, x: [call(reduce, call(aten.view.default, x, [2, 8]), "tp", "sum")]),
        in_place(lambda call, x: [(n := call(aten.neg.default, x)), call(reduce, n, "tp", "sum")]),
        in_place(lambda call, x: [call(reduce, call(raw.shard_slice.default, x, 0, [], "tp", 2), "tp", "sum")]),
    ]


def test_only_temporaries_are_overwritten() -> None:
    assert run_ranks(2, overwrites)[0] == [True, True, False, False, False, False]


def lifetimes() -> list[bool]:
    """Whether the first input is still alive when the last operator runs."""
    groups = Groups(init_mesh(tp=2))

    def build(call: Any, x: Any, y: Any) -> list[Any]:
        early = call(aten.neg.default, x)
        return [call(aten.cos.default, call(aten.add.Tensor, early, y))]

    alive: list[bool] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is aten.cos.default:
                alive.append(watched() is not None)
            return func(*args, **(kwargs or {}))

    inputs = [torch.rand(4, 4, dtype=torch.float64) for _ in range(2)]
    watched = weakref.ref(inputs[0])
    bound = bind(graph_of([(4, 4), (4, 4)], build), groups)
    with Watch():
        bound(inputs)
    return alive


def test_an_input_dies_after_its_last_use() -> None:
    assert run_ranks(2, lifetimes)[0] == [False]


# --- bytes --------------------------------------------------------------------------------------------


class Counter:
    """Bytes by kind as torch.distributed sees them: independent of the graph."""

    kinds: ClassVar[dict[str, Callable[..., int]]] = {
        "all_reduce": lambda a, n: 2 * a[0].nbytes * (n - 1) // n,
        ALL_GATHER: lambda a, n: a[0].nbytes * (n - 1) // n,
        REDUCE_SCATTER: lambda a, n: a[1].nbytes * (n - 1) // n,
        "all_to_all_single": lambda a, n: a[1].nbytes * (n - 1) // n,
    }

    def __init__(self) -> None:
        self.calls: dict[str, tuple[int, int]] = {}
        self.real = {name: getattr(dist, name) for name in self.kinds}

    def __enter__(self) -> Counter:
        for name in self.kinds:
            setattr(dist, name, self._counted(name))
        return self

    def _counted(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, group: Any = None, **kwargs: Any) -> Any:
            count, size = self.calls.get(name, (0, 0))
            self.calls[name] = (count + 1, size + self.kinds[name](args, group.size()))
            return self.real[name](*args, group=group, **kwargs)

        return call

    def __exit__(self, *_: Any) -> None:
        for name, fn in self.real.items():
            setattr(dist, name, fn)


def counted() -> tuple[dict[Any, Traffic], dict[str, tuple[int, int]]]:
    groups = Groups(init_mesh(dp=2, tp=2))

    def build(call: Any, x: Any) -> list[Any]:
        g = call(raw.all_gather.default, x, 1, [], "tp", 2)
        s = call(raw.reduce_scatter.default, g, 0, [], "dp", 2)
        t = call(raw.all_to_all.default, s, 0, [], 1, [8, 8], "dp", 2)
        return [call(raw.all_reduce.default, t, "dp", "sum"), call(raw.all_reduce.default, g, "tp", "sum")]

    bound = bind(graph_of([(4, 8)], build, torch.float32), groups)
    with Counter() as counter:
        bound([torch.rand(4, 8)])
    return dict(bound.traffic), counter.calls


def test_traffic_is_the_formula_and_what_was_called() -> None:
    traffic, calls = run_ranks(4, counted)[0]
    assert traffic == {
        ("tp", "all_gather"): Traffic(1, 4 * 16 * 4 // 2),
        ("dp", "reduce_scatter"): Traffic(1, 4 * 16 * 4 // 2),
        ("dp", "all_to_all"): Traffic(1, 2 * 16 * 4 // 2),
        ("dp", "all_reduce"): Traffic(1, 2 * 4 * 8 * 4 // 2),
        ("tp", "all_reduce"): Traffic(1, 2 * 4 * 16 * 4 // 2),
    }
    by_kind: dict[str, tuple[int, int]] = {}
    for (_, kind), t in traffic.items():
        name = kind if kind == "all_reduce" else f"{kind}_single"
        have = by_kind.get(name, (0, 0))
        by_kind[name] = (have[0] + t.calls, have[1] + t.bytes)
    assert by_kind == calls


# --- failures -----------------------------------------------------------------------------------------


def reduce_with(rank: int, what: str) -> str:
    groups = Groups(init_mesh(dp=2, tp=2, timeout=3))
    bound = bind(graph_of([(4, 4), (4, 4)], layers), groups)
    with error_context():
        if groups.rank == rank and what == "exit":
            os._exit(3)
        if groups.rank == rank and what == "raise":
            raise ValueError("boom")
        if groups.rank == rank and what == "stall":
            return "stalled"
        try:
            bound([torch.rand(4, 4, dtype=torch.float64), torch.rand(4, 4, dtype=torch.float64)])
        except RuntimeError as error:
            return str(error)
    return "fine"


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("exit", "rank 3 did not respond: no sign of life"),
        ("raise", "rank 3 failed: ValueError: boom"),
        ("stall", "rank 3 did not respond: alive, but never joined"),
    ],
)
def test_a_failed_collective_names_axis_node_and_rank(what: str, why: str) -> None:
    outcomes = rank_outcomes(4, reduce_with, 3, what, timeout=40, grace=15)
    close_pools()  # every rank may have caught its error: the groups are broken all the same
    assert outcomes[0].value == outcomes[1].value == "fine"
    assert 'all_reduce over axis "tp" (node all_reduce' in outcomes[2].value
    assert why in outcomes[2].value
    assert math.prod(o.value is not None for o in outcomes[:3])


# --- inductor -----------------------------------------------------------------------------------------


def compiled() -> None:
    with scalar_kernels():
        _compiled()


def _compiled() -> None:
    """Every raw collective in one graph, and a product whose sum is waited for, so that there is one compilation."""
    groups, me = Groups(init_mesh(tp=2)), dist.get_rank()
    shard = Shard(1, (8, 4, 4))
    whole = torch.rand(2, 16, 6, dtype=torch.float64)
    mine = piece(whole, shard, 2, me).contiguous()

    def build(call: Any, x: Any, a: Any, w: Any) -> list[Any]:
        full = call(raw.all_gather.default, x, 1, [8, 4, 4], "tp", 2)
        back = call(raw.reduce_scatter.default, full, 1, [8, 4, 4], "tp", 2)
        moved = call(raw.all_to_all.default, x, 1, [8, 4, 4], 2, [], "tp", 2)
        again = call(raw.all_to_all.default, x, 1, [8, 4, 4], 1, [], "tp", 2)
        cut = call(raw.shard_slice.default, full, 1, [8, 4, 4], "tp", 2)
        pad = call(raw.shard_pad.default, x, 1, [8, 4, 4], "tp", 2)
        return [full, back, moved, again, cut, call(raw.all_reduce.default, pad, "tp", "sum"), *layers(call, a, w)]

    a, w = torch.rand(4, 4, dtype=torch.float64), torch.rand(4, 4, dtype=torch.float64)
    gm, given = graph_of([tuple(mine.shape), (4, 4), (4, 4)], build), [mine.clone(), a.clone(), w.clone()]
    plain = bind(gm, groups)([x.clone() for x in given])
    outs = bind(gm, groups, "inductor")(given)
    assert not given
    pieces = [whole, 2 * mine, piece(whole, Shard(2), 2, me), piece(whole, Shard(1), 2, me), mine, whole]
    for out, right in zip(outs, [*pieces, 2 * (a @ w) + a * a], strict=True):
        torch.testing.assert_close(out, right)
    torch.testing.assert_close(outs, plain)


def test_inductor_gives_the_same() -> None:
    run_ranks(2, compiled, timeout=180)
