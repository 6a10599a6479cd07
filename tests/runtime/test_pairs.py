"""Attention and experts as two roles on real processes: init_roles, pairs, what both roles agree on."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed import distributed_c10d

import autopar
from autopar.ir.placement import Shard
from autopar.ir.signature import ParameterSpec
from autopar.runtime.comm import pairs as comm
from autopar.runtime.comm.pairs import AnsweringPairs, AskingPairs
from autopar.runtime.comm.rows import Memory, RowFormat
from autopar.runtime.mesh.process_groups import Groups
from autopar.runtime.mesh.roles import Roles
from autopar.runtime.module.role_weights import RoleWeights
from autopar.runtime.training.launch import LaunchError
from tests.support.launched import serve

LAYERS, STEPS = 3, 3
ROWS = [RowFormat(12, 3, 5, torch.float64, torch.float32)] * LAYERS
DENSE = [RowFormat(12, 3, 5, torch.float64, None)] * LAYERS
UNLIKE = [RowFormat(*sizes, torch.float64, torch.float32) for sizes in ((12, 3, 5), (4, 1, 9), (8, 5, 2))]
Sizes = dict[str, int]
Routing = Callable[[RowFormat, int, int, int, int], tuple[Tensor, Tensor, Tensor]]


def random_routing(rows: RowFormat, node: int, step: int, layer: int, microbatch: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, experts and weights of some tokens; of none, now and then."""
    seeded = torch.Generator().manual_seed(((node * STEPS + step) * LAYERS + layer) * 8 + microbatch)
    count = int(torch.randint(0, 6, (1,), generator=seeded))
    x = torch.randn(count, rows.hidden, dtype=torch.float64, generator=seeded)
    scores = torch.rand(count, rows.num_experts, generator=seeded)
    return x, scores.argsort(1)[:, : rows.top_k], torch.rand(count, rows.top_k, generator=seeded)


def first_experts(rows: RowFormat, node: int, *where: int) -> tuple[Tensor, Tensor, Tensor]:
    """All tokens choose the first experts, so only the first expert node gets any."""
    x, experts, weights = random_routing(rows, node, *where)
    return x, experts % rows.top_k, weights


def one_node_idle(rows: RowFormat, node: int, *where: int) -> tuple[Tensor, Tensor, Tensor]:
    x, experts, weights = random_routing(rows, node, *where)
    return (x[:0], experts[:0], weights[:0]) if node == 1 else (x, experts, weights)


def answer_of(formats: Sequence[RowFormat], node: int, nodes: int) -> Callable[..., Tensor]:
    """What a node's made-up experts add up to."""

    def answer(layer: int, x: Tensor, expert: Tensor | None, weights: Tensor | None) -> Tensor:
        if expert is None or weights is None:
            return torch.tanh(x * (layer + 1)) / nodes
        count = formats[layer].num_experts // nodes
        first = count * node
        assert expert.dtype == torch.int64 and weights.dtype == torch.float32
        there = (expert >= first) & (expert < first + count)
        assert there.any(1).all(), "tokens that have chosen no expert of this node are not sent"
        each = torch.tanh(x[:, None] * (expert[..., None] + 1 + layer)) * weights[..., None].to(x.dtype)
        return (each * there[..., None]).sum(1)

    return answer


def run_role(
    attention: Sizes, experts: Sizes, microbatches: int, routing: Routing, rows: Sequence[RowFormat],
    first: int = comm._FIRST,
) -> Any:  # fmt: skip
    comm._FIRST = first
    roles = autopar.init_roles("cpu", 60, attention=attention, experts=experts)
    groups = Groups(roles.mesh)
    if roles.role == "attention":
        return *ask(roles, AskingPairs(roles, groups, rows), microbatches, routing, rows), mixed_groups(roles)
    pairs = AnsweringPairs(roles, groups, rows, microbatches)
    pairs.serve(answer_of(rows, roles.node_of(roles.rank), roles.expert_nodes))
    return 0.0, pairs.traffic, mixed_groups(roles)


def ask(
    roles: Roles, pairs: AskingPairs, microbatches: int, routing: Routing, rows: Sequence[RowFormat]
) -> tuple[float, Any]:
    """(largest difference from one process, traffic)"""
    node, worst, whole = roles.node_of(roles.rank), 0.0, answer_of(rows, 0, 1)

    def graph(microbatch: int) -> Iterator[None]:
        nonlocal worst
        for layer in range(LAYERS):
            x, expert, weights = routing(rows[layer], node, pairs.step, layer, microbatch)
            given = (x, expert, weights) if rows[layer].weights_dtype is not None else (x, None, None)
            if len(x) == 0 and layer == 1:
                pairs.empty(layer)
                yield
                continue
            pending = pairs.start(layer, *given)
            yield
            found = pairs.finish(pending)
            assert found.shape == x.shape
            worst = max([worst, *(found - whole(layer, *given)).abs().flatten().tolist()])

    for step in range(STEPS):
        running = {i: graph(i) for i in range(microbatches)}
        while running:
            for i, turns in list(running.items()):
                pairs.resume(step, i)
                if next(turns, turns) is turns:
                    del running[i]
    pairs.end()
    return worst, pairs.traffic


def mixed_groups(roles: Roles) -> list[int]:
    """Sizes of torch's groups with members of both roles."""
    own = range(len(roles.ranks_of(roles.role)))
    return [len(ranks) for ranks in distributed_c10d._world.pg_group_ranks.values() if any(r not in own for r in ranks)]


CASES: list[tuple[Sizes, Sizes, int, Routing, Sequence[RowFormat]]] = [
    ({"dp": 1}, {"ep": 1}, 1, random_routing, ROWS),
    *(({"dp": 2}, {"ep": 2}, m, random_routing, ROWS) for m in (1, 2, 3, 4)),
    ({"dp": 1}, {"ep": 2}, 4, random_routing, ROWS),
    ({"dp": 3}, {"ep": 1}, 2, random_routing, ROWS),
    ({"dp": 1, "tp": 2}, {"ep": 2}, 2, random_routing, ROWS),
    ({"dp": 2}, {"tp": 2}, 2, random_routing, ROWS),
    ({"dp_replicate": 2}, {"ep": 2}, 1, first_experts, ROWS),
    ({"dp": 2}, {"ep": 2}, 2, one_node_idle, ROWS),
    ({"dp": 2}, {"ep": 2}, 2, random_routing, DENSE),
    ({"dp": 2}, {"ep": 2}, 2, random_routing, UNLIKE),
    ({"tp": 2}, {"ep": 2}, 2, random_routing, UNLIKE),
]


@pytest.mark.parametrize("attention, experts, microbatches, routing, rows", CASES)
def test_both_halves_equal_one_process(
    attention: Sizes, experts: Sizes, microbatches: int, routing: Routing, rows: Sequence[RowFormat]
) -> None:
    check_roles(attention, experts, microbatches, routing, rows)


@pytest.mark.parametrize("first", [40, 40 + 8, 40 + 2 * 64])
def test_rows_that_do_not_fit_follow(first: int) -> None:
    """None fits beside the header, an eighth of one, two."""
    check_roles({"dp": 2}, {"ep": 2}, 2, random_routing, ROWS, first)


def check_roles(
    attention: Sizes, experts: Sizes, microbatches: int, routing: Routing, rows: Sequence[RowFormat], *more: int
) -> None:
    serve()
    ranks = math.prod(attention.values()) + math.prod(experts.values())
    results = autopar.launch(run_role, ranks, (attention, experts, microbatches, routing, rows, *more), timeout=60)
    nodes, expert_nodes = math.prod(attention.values()) // attention.get("tp", 1), experts.get("ep", 1)
    found: dict[str, int] = {"rows": 0, "sums": 0, "headers": 0}
    for worst, traffic, mixed in results:
        assert worst < 1e-14
        assert all(size == 2 for size in mixed)
        for (_, kind), sent in traffic.items():
            found[kind] += sent.bytes
    expected = expected_bytes(nodes, expert_nodes, microbatches, routing, rows)
    assert found == expected


def expected_bytes(
    nodes: int, expert_nodes: int, microbatches: int, routing: Routing, rows: Sequence[RowFormat]
) -> dict[str, int]:
    """Bytes for the routing that happened: a token goes once to each node that has an expert of it."""
    found = {"rows": 0, "sums": 0, "headers": 5 * 8 * nodes * expert_nodes * (STEPS * LAYERS * microbatches + 1)}
    for where in itertools.product(range(nodes), range(STEPS), range(LAYERS), range(microbatches)):
        of_layer = rows[where[2]]
        x, experts, _ = routing(of_layer, *where)
        of_token = [set((chosen // (of_layer.num_experts // expert_nodes)).tolist()) for chosen in experts]
        dense = of_layer.weights_dtype is None
        copies = len(x) * expert_nodes if dense else sum(map(len, of_token))
        found["rows"] += copies * (of_layer.hidden * 8 + (0 if dense else of_layer.top_k * (4 + 4)))
        found["sums"] += copies * of_layer.hidden * 8
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("of_weights", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("begin", [0, 40])
def test_rows_are_bytes(dtype: torch.dtype, of_weights: torch.dtype, begin: int) -> None:
    rows, here = RowFormat(4, 3, 5, dtype, of_weights), torch.device("cpu")
    assert rows.row_bytes == 5 * dtype.itemsize + 3 * (4 + of_weights.itemsize)
    x, expert, weights = torch.randn(7, 5).to(dtype), torch.randint(4, (7, 3)), torch.rand(7, 3).to(of_weights)
    parts, pieces = rows.parts_of(x.t().contiguous().t(), expert, weights), []
    for tokens in (torch.tensor([6, 1, 2]), torch.empty(0, dtype=torch.int64), None):
        count = 7 if tokens is None else len(tokens)
        memory = Memory(begin + count * rows.row_bytes, here)
        rows.write(memory, begin, parts, tokens)
        found, some = rows.read(memory, begin, count), slice(None) if tokens is None else tokens
        assert all(torch.equal(y, whole[some]) for y, whole in zip(found, (x, expert, weights)))
        pieces.append((memory, begin, count))
    joined = rows.read(rows.join(pieces, here), 0, 10)
    assert all(torch.equal(y, torch.cat([part[[6, 1, 2]], part])) for y, part in zip(joined, (x, expert, weights)))


# --- roles -----------------------------------------------------------------------------------------------------


def places() -> Any:
    roles = autopar.init_roles("cpu", 60, attention={"dp": 2}, experts={"ep": 1, "tp": 2})
    found = roles.role, roles.rank, dist.get_rank(), roles.node_of(roles.rank), [pair.peer for pair in roles.pairs]
    with pytest.raises(ValueError, match="init_roles: makes the default process group itself"):
        autopar.init_roles("cpu", attention={"dp": 2}, experts={"ep": 2})
    return found


def test_each_rank_knows_its_place() -> None:
    serve()
    assert autopar.launch(places, 4, timeout=60) == [
        ("attention", 0, 0, 0, [2]),
        ("attention", 1, 1, 1, [2]),
        ("experts", 2, 0, 0, [0, 1]),
        ("experts", 3, 1, 0, []),
    ]


@pytest.mark.parametrize(
    "attention, experts, words",
    [
        ({"dp": 2}, {"ep": 2}, r"attention \(dp=2\) needs 2 ranks and experts \(ep=2\) 2, 4 together, found 1 started"),
        ({"dp": 1}, {}, "experts: expected sizes of ep and tp"),
        ({"dp": 0}, {"ep": 1}, "axis 'dp' needs a size of at least 1, found 0"),
        ({"dp": 1, "pp": 2}, {"ep": 1}, "attention can be sharded on dp, dp_replicate, tp, found 'pp'"),
        ({"dp": 1}, {"ep": 1, "cp": 2}, "experts can be sharded on ep, tp, found 'cp'"),
        ({"ep": 1}, {"ep": 1}, "attention can be sharded on dp, dp_replicate, tp, found 'ep'"),
        ({"dp": 1}, {"dp": 1}, "experts can be sharded on ep, tp, found 'dp'"),
    ],
)
def test_bad_sizes_are_refused(attention: Sizes, experts: Sizes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        autopar.init_roles("cpu", attention=attention, experts=experts)


def other_sizes() -> None:
    sizes = ({"dp": 2}, {"ep": 1}) if os.environ["RANK"] == "2" else ({"dp": 1}, {"ep": 2})
    autopar.init_roles("cpu", 60, attention=sizes[0], experts=sizes[1])


def test_other_sizes_are_refused_on_all_ranks() -> None:
    serve()
    with pytest.raises(LaunchError) as caught:
        autopar.launch(other_sizes, 3, timeout=60)
    assert caught.value.refusal == (
        "init_roles: all ranks need the same sizes, found dp=2; ep=1 on rank 2 and dp=1; ep=2 on rank 0; pass the same "
        "attention= and experts= everywhere"
    )


# --- weights ---------------------------------------------------------------------------------------------------


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.arange(12.0).view(4, 3))
        self.experts = nn.Parameter(torch.arange(16.0).view(8, 2))
        self.register_buffer("bias", torch.full((3,), 7.0))


def held(folder: str | None, other: str) -> Any:
    roles = autopar.init_roles("cpu", 60, attention={"dp": 1}, experts={"ep": 2})
    with torch.device("meta" if folder else "cpu"):
        model = Weights()
    if roles.rank == 2 and other == "weights":
        model.experts.data[3] += 1
    if roles.rank == 0 and other == "model":
        model.extra = nn.Parameter(torch.ones(1))
    buffers = {"bias": torch.zeros(3)} if folder else dict(model.named_buffers())
    weights = RoleWeights(model, roles, Groups(roles.mesh), buffers, folder)
    weights.agree()
    assert weights.structure().router.is_meta
    if roles.role == "attention":
        weights.hold([ParameterSpec("router", (4, 3), torch.float32)])
    else:
        weights.hold([ParameterSpec("experts", (8, 2), torch.float64, placements={"ep": Shard(0)})])
    before = weights.versions()
    assert before == weights.versions()
    return {name: x.clone() for name, x in weights.values().items()}


@pytest.mark.parametrize("from_folder", [False, True])
def test_a_role_holds_its_own_weights(tmp_path: Path, from_folder: bool) -> None:
    serve()
    whole = Weights().state_dict()
    save_file(whole, tmp_path / "model.safetensors")
    results = autopar.launch(held, 3, (str(tmp_path) if from_folder else None, ""), timeout=60)
    assert [list(found) for found in results] == [["router", "bias"], ["experts", "bias"], ["experts", "bias"]]
    assert torch.equal(results[0]["router"], whole["router"])
    assert torch.equal(torch.cat([found["experts"] for found in results[1:]]), whole["experts"].double())
    assert all(torch.equal(found["bias"], whole["bias"]) for found in results)


@pytest.mark.parametrize("other, rank", [("weights", "rank 2 (experts)"), ("model", "rank 0 (attention)")])
def test_roles_with_other_weights_are_refused(other: str, rank: str) -> None:
    serve()
    with pytest.raises(LaunchError) as caught:
        autopar.launch(held, 3, (None, other), timeout=60)
    refusal = caught.value.refusal
    assert (
        refusal.startswith(f"serve: all ranks of both roles need the same {other}, found ") and f"on {rank}," in refusal
    )


def test_a_model_without_weights_is_refused(tmp_path: Path) -> None:
    serve()
    with pytest.raises(LaunchError) as caught:
        autopar.launch(held, 3, (str(tmp_path), ""), timeout=60)
    assert "needs model.safetensors or" in caught.value.refusal
