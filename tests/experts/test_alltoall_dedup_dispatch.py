"""Experts by copies: one of a token for each rank that has an expert of it, one sum of each comes back."""

from __future__ import annotations

import copy
import functools
import itertools
import operator
import os
import signal
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import Graph, GraphModule

from autopar.api import parallelize
from autopar.capture.front_end import capture
from autopar.compile.model import compile_graph, compile_model
from autopar.cost.memory import memory
from autopar.cost.traffic import step_communication
from autopar.ir.mesh import Mesh
from autopar.ops.token_dispatch.alltoall_dedup import even_copies
from autopar.options import Options
from autopar.passes.autodiff.joint import shared_counts
from autopar.plan import Plan
from autopar.planner.experts.expert_plan import check_experts
from autopar.report.graph_text import format_graph
from autopar.runtime.mesh.process_groups import dp_rank_and_size, init_mesh
from autopar.steps.graphs import Compiled
from autopar.testing import lockstep
from autopar.testing.harness import MeshRun
from autopar.testing.reference import eager
from autopar.token_dispatchers import Routing
from tests.experts.test_experts import ALLTOALL, ALLTOALL_DEDUP, HIERARCHICAL, Layer, routed
from tests.support.cases import Cell, check, compile_cell
from tests.support.ranks import close_pools, rank_outcomes, run_ranks
from tests.support.subjects import SEED, subject

ops = torch.ops.autopar
TIMEOUT = 6.0  # seconds until a collective without its peers fails
SPLITS = torch.tensor([[2, 0, 3], [0, 0, 0]])
SENT = torch.tensor([1, 3, 0, 1, 2])


def test_which_tokens_go_where() -> None:
    """Two ranks' experts of one token, both of one rank, and experts that nobody has."""
    expert = torch.tensor([[5, 0], [4, 5], [1, 6], [2, 0], [9, 6]])
    sent, counts = ops.moe_copies(expert, None, 6, 3, 6)
    assert sent.tolist() == [0, 2, 3, 3, 0, 1] and counts.tolist() == [[3], [1], [2]]
    sent, counts = ops.moe_copies(expert, torch.tensor([2]), 4, 2, 6)
    assert sent.tolist() == [3, 0, 1] and counts.tolist() == [[1], [2]]
    sent, counts = ops.moe_copies(expert[:0], None, 6, 3, 6)
    assert sent.tolist() == [] and counts.tolist() == [[0], [0], [0]]


def test_even_copies() -> None:
    assert even_copies(100, 8, 64, 4) == -(-100 * Routing(64, 8, 4, 4).reached(4) // 1)
    assert even_copies(7, 4, 4, 2) == even_copies(7, 5, 4, 2) == 14 and even_copies(0, 2, 4, 2) == 0


def test_copies_are_taken_and_added() -> None:
    """Each is the derivative of the other."""
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.equal(ops.take_copies(x, SENT, SPLITS), x[SENT])
    assert torch.equal(ops.add_copies(rows, SENT, SPLITS, 4)[1], rows[0] + rows[3])
    assert torch.autograd.gradcheck(lambda x: ops.take_copies(x, SENT, SPLITS), (x,))
    assert torch.autograd.gradcheck(lambda rows: ops.add_copies(rows, SENT, SPLITS, 4), (rows,))


def test_counts_are_asked_for_once() -> None:
    """Before and after; those of other experts stay."""
    graph = Graph()
    inputs = [graph.placeholder(name) for name in ("first", "second")]
    found = []
    for expert in (inputs[0], inputs[0], inputs[1]):
        made = graph.call_function(ops.moe_copies.default, (expert, None, 6, 3, 6))
        sent, counts = (graph.call_function(operator.getitem, (made, i)) for i in (0, 1))
        came = graph.call_function(ops.all_to_all.default, (counts, 1, [], 0, [], "ep", 3))
        found += [sent, graph.call_function(ops.row_splits.default, (counts, came))]
    graph.output(tuple(found))
    for node in graph.nodes:
        node.meta["val"] = torch.zeros(2, dtype=torch.int64)
    gm = GraphModule({}, graph)
    shared_counts(gm)
    targets = Counter(str(n.target) for n in gm.graph.nodes if n.op == "call_function")
    assert targets["autopar.moe_copies.default"] == targets["autopar.row_splits.default"] == 2
    assert targets["autopar.all_to_all.default"] == 2
    results: Any = gm.graph.output_node().args[0]
    assert results[:2] == results[2:4] and results[4] not in results[:4]


def test_the_graph() -> None:
    made = compile_cell(Cell("mixtral", Mesh.of(ep=2), ALLTOALL_DEDUP))
    text = format_graph(made.local)
    assert text.count("dispatch_tokens(") == text.count("combine_tokens(") == 2
    assert "ep:S(0;routed)" in text and "moe_dispatch(" not in text
    assert memory(made).peak > 0  # walks what an exchange of rows holds
    assert "ep: alltoall_dedup" in str(made.plan) and "asked for" in str(made.plan)


def calls_of(made: Compiled) -> tuple[Counter[str], Counter[str]]:
    """Names of operators in F and in the backward."""
    stage = made.stage
    backward = stage.backward_reduce or stage.backward
    assert backward is not None
    forward, other = (
        Counter(str(n.target).split(".")[1] for n in gm.graph.nodes if "autopar." in str(n.target))
        for gm in (stage.forward.graph, backward.graph)
    )
    return forward, other


@pytest.mark.parametrize("checkpoint", ["none", "full"])
@pytest.mark.parametrize(
    ("options", "levels", "there", "back"), [(ALLTOALL, 1, 2, 2), (ALLTOALL_DEDUP, 1, 4, 3), (HIERARCHICAL, 2, 8, 6)]
)
def test_the_host_waits_in_the_forward_only(
    options: Options, levels: int, there: int, back: int, checkpoint: str
) -> None:
    """Counts are exchanged once per layer and level, whatever the backward recomputes. Exchanges of a layer: tokens,
    numbers, weights, sums; and three gradients; of rows for each expert only rows go there and back."""
    cell = Cell("one-layer mixtral", Mesh.of(ep=4), replace(options, activation_checkpoint=checkpoint))
    forward, backward = calls_of(compile_cell(cell))
    asked = forward["moe_copies"] + forward["moe_pairs"]
    assert forward["row_splits"] == asked == forward["all_to_all"] == levels
    assert forward["all_to_all_rows"] == there and "moe_dispatch_own" in forward
    assert not backward.keys() & {"row_splits", "moe_copies", "moe_pairs", "all_to_all"}
    assert backward["all_to_all_rows"] >= back + (checkpoint == "full")


class Sent:
    """What ranks send to others in exchanges of rows, by dtype: numbers per copy -> copies."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copies: Counter[tuple[str, torch.dtype, int]] = Counter()  # by axis
        run, axis = lockstep.COLLECTIVE[ops.all_to_all_rows.default]

        def counted(xs: list[Tensor], me: int, splits: list[Tensor], back: bool, along: str, size: int) -> Tensor:
            to = splits[me].tolist()[1 if back else 0]
            self.copies[along, xs[me].dtype, xs[me].shape[1]] += sum(to) - to[me]
            return run(xs, me, splits, back, along, size)

        monkeypatch.setitem(lockstep.COLLECTIVE, ops.all_to_all_rows.default, (counted, axis))


@functools.cache
def made_for(ranks: int, tokens: int, experts: int, top: int, options: Options) -> Compiled:
    """For any routing."""
    graph = capture(Layer(experts), routed(tokens, experts, top, "any"), lift_to_float64=True)
    return compile_graph(graph, Mesh.of(ep=ranks), options, outputs=())


@pytest.mark.parametrize("choice", ["any", "one", "lower half"])
@pytest.mark.parametrize(("ranks", "tokens", "experts", "top"), [(2, 6, 4, 2), (4, 24, 8, 4), (3, 9, 6, 3)])
def test_what_is_sent(
    monkeypatch: pytest.MonkeyPatch, ranks: int, tokens: int, experts: int, top: int, choice: str
) -> None:
    """A copy per token and other rank that has an expert of it: there and back, forward and backward."""
    model, batch, mesh = Layer(experts), routed(tokens, experts, top, choice), Mesh.of(ep=ranks)
    made = made_for(ranks, tokens, experts, top, ALLTOALL_DEDUP)
    sent, own = Sent(monkeypatch), tokens // ranks
    check(MeshRun(made, model, batch, mesh, SEED).errors(eager(model, batch, SEED)))
    where = [set((row // (experts // ranks)).tolist()) - {token // own} for token, row in enumerate(batch["expert"])]
    copies = sum(map(len, where))
    assert sent.copies["ep", torch.float64, 4] == 4 * copies + (copies if top == 4 else 0)  # there, back, gradients
    assert sent.copies["ep", torch.int32, top] == copies
    if top != 4:
        assert sent.copies["ep", torch.float64, top] == copies  # weights; the batch's have no gradient


@pytest.mark.parametrize("choice", ["any", "one", "lower half"])
@pytest.mark.parametrize(
    ("ranks", "per_node", "tokens", "experts", "top"), [(4, 2, 24, 8, 3), (8, 4, 16, 8, 2), (6, 2, 12, 12, 6)]
)
def test_what_is_sent_on_each_level(
    monkeypatch: pytest.MonkeyPatch, ranks: int, per_node: int, tokens: int, experts: int, top: int, choice: str
) -> None:
    """A copy per token and other node, and from where it comes to a node one per other rank there. Rows of pairs: each,
    but for those of the own rank."""
    model, batch, mesh = Layer(experts), routed(tokens, experts, top, choice), Mesh.of(ep=ranks)
    expected = eager(model, batch, SEED)
    levels = Options(token_dispatcher="hierarchical", topology=f"ep%{per_node}=switch")
    inside = between = pairs = 0
    for token, row in enumerate(batch["expert"]):
        here, to = token // (tokens // ranks), (row // (experts // ranks)).tolist()
        pairs += sum(rank != here for rank in to)
        between += len({rank // per_node for rank in to} - {here // per_node})
        inside += sum(rank % per_node != here % per_node for rank in set(to))
    for options, found in ((levels, {f"ep%{per_node}": inside, f"ep/{per_node}": between}), (ALLTOALL, {"ep": pairs})):
        sent = Sent(monkeypatch)
        made = made_for(ranks, tokens, experts, top, options)
        check(MeshRun(made, model, batch, mesh, SEED).errors(expected))
        for axis, copies in found.items():
            assert sent.copies[axis, torch.float64, 4] == 4 * copies, axis
        assert {axis for axis, _, _ in +sent.copies} <= found.keys()
        monkeypatch.undo()


def test_bytes_of_a_plan() -> None:
    """As of even routing; what stays on its rank is not sent."""
    model, batch, ranks = Layer(8), routed(16, 8, 2, "any"), 4
    made = compile_model(model, batch, Mesh.of(ep=ranks), ALLTOALL_DEDUP, lift_to_float64=True, outputs=())
    copies = even_copies(4, 2, 8, ranks)
    sent = step_communication(made, 0)
    assert sent["ep", "all_to_all_rows"].calls == 6
    each = [copies * 4 * 8] * 4 + [copies * 2 * 4, copies * 2 * 8]
    assert sent["ep", "all_to_all_rows"].bytes == sum(-(-n * 3 // 4) for n in each)
    assert ("ep", "all_gather") not in sent


def test_the_choice() -> None:
    """By time: few exchanges where messages are dear, few bytes where links are slow."""
    model, batch = Layer(8, 64), routed(16, 8, 2, "any") | {"x": torch.randn(16, 64, dtype=torch.float64)}
    near = "ep%2=switch:1e15:0,ep/2=switch:1e3:0"
    for topology, chosen in (
        ("ep=switch:1e15:1", "alltoall"),
        ("ep=switch:1e3:0", "alltoall_dedup"),
        (near, "hierarchical"),
    ):
        plan = compile_model(model, batch, Mesh.of(ep=4), Options(topology=topology), lift_to_float64=True).plan
        (found,) = plan.experts.values()
        assert found.token_dispatcher == chosen and "by estimated time of a layer" in found.reason, topology
        assert ("on nodes of 2 ranks" in found.reason) == (found.per_node == 2) == (topology == near)
    with pytest.raises(
        ValueError,
        match="token_dispatcher: expected 'auto', 'allgather', 'alltoall', 'alltoall_dedup' or 'hierarchical', found",
    ):
        Options(token_dispatcher="post")
    with pytest.raises(ValueError, match="dispatch"):
        compile_model(model, batch, Mesh.of(dp=2), ALLTOALL_DEDUP)


@pytest.mark.parametrize(
    ("ranks", "options", "said"),
    [
        (4, {"token_dispatcher": "hierarchical"}, "found 4 ranks in nodes of 4; give the ranks per node"),
        (4, {"token_dispatcher": "hierarchical", "topology": "ep%4=switch"}, "found 4 ranks in nodes of 4"),
        (4, {"token_dispatcher": "hierarchical", "topology": "ep%1=switch"}, "found 4 ranks in nodes of 1"),
        (4, {"topology": "ep%3=switch"}, "4 ranks of axis 'ep' do not divide into nodes of 3; use one of 1, 2, 4"),
        (4, {"topology": "ep%2=switch,ep/4=switch"}, "nodes of 2 and 4 ranks of axis 'ep'"),
        (4, {"topology": "ep%x=switch"}, "expected an axis, or nodes of one of cp, ep"),
        (2, {"topology": "cp%2=switch"}, "names links of the axis 'cp', found the mesh ep=2"),
    ],
)
def test_nodes_that_are_none(ranks: int, options: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        compile_model(Layer(8), routed(16, 8, 2, "any"), Mesh.of(ep=ranks), Options(**options))  # type: ignore[arg-type]


def test_a_plan_with_nodes_that_are_none() -> None:
    cell = Cell("mixtral", Mesh.of(ep=4), HIERARCHICAL)
    plan = compile_cell(cell).plan
    assert Plan.from_json(plan.to_json()) == plan
    experts = {name: replace(found, per_node=3) for name, found in plan.experts.items()}
    with pytest.raises(ValueError, match="'hierarchical' needs several nodes of several ranks, found 3 ranks per node"):
        check_experts(subject("mixtral").graph(), cell.mesh, experts)


def trained(batch: dict[str, Tensor], ranks: int, options: dict[str, str]) -> list[str]:
    """Steps of AdamW whose routing changes: rows for one rank only, none at all for another. Bits of two runs."""
    losses, mesh = [], init_mesh("cpu", 60.0, ep=ranks)
    part, parts = dp_rank_and_size(mesh)
    mine = {name: x.chunk(parts)[part] for name, x in batch.items()}
    for _ in range(2):
        torch.manual_seed(0)
        model = Layer(12)
        parallel = parallelize(copy.deepcopy(model), mesh, example_batch=mine, **options)
        optimizers = [torch.optim.AdamW(module.parameters(), lr=0.1) for module in (model, parallel)]
        for choice in ("any", "one", "lower half", "any"):
            whole = routed(12, 12, 2, choice)
            model(**whole).backward()
            found = parallel.train_step(**{name: x.chunk(parts)[part] for name, x in whole.items()})
            losses.append(float(found).hex())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for name, x in parallel.full_state_dict().items():
            torch.testing.assert_close(x, model.state_dict()[name], rtol=1e-10, atol=1e-12, msg=name)
    assert losses[:4] == losses[4:]
    return losses


@pytest.mark.parametrize(
    ("ranks", "options"), [(3, ALLTOALL_DEDUP), (4, HIERARCHICAL), pytest.param(3, ALLTOALL, marks=pytest.mark.full)]
)
def test_routing_changes_between_steps(ranks: int, options: Options) -> None:
    given = {"token_dispatcher": options.token_dispatcher, "topology": options.topology}
    first, *others = run_ranks(ranks, trained, routed(12, 12, 2, "any"), ranks, given)
    assert all(other == first for other in others)


def killed_in_exchange(batch: dict[str, Tensor], ranks: int, options: dict[str, str], victim: int, turn: int) -> str:
    """Two good steps; in the third a rank dies when rows are about to be exchanged, for the ``turn``-th time. What the
    others say."""
    mesh = init_mesh("cpu", TIMEOUT, ep=ranks)
    part, parts = dp_rank_and_size(mesh)
    mine = {name: x.chunk(parts)[part] for name, x in batch.items()}
    parallel = parallelize(Layer(12), mesh, example_batch=mine, **options)
    for _ in range(2):
        parallel.train_step(**mine)
    exchange, turns = dist.all_to_all_single, itertools.count(1)

    def dies(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 4 and next(turns) == turn:  # with numbers of rows
            os.kill(os.getpid(), signal.SIGKILL)
        return exchange(*args, **kwargs)

    if dist.get_rank() == victim:
        dist.all_to_all_single = dies
    try:
        parallel.train_step(**mine)
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("ranks", "options", "turn"),
    [
        pytest.param(3, ALLTOALL_DEDUP, 1, marks=pytest.mark.full),
        pytest.param(3, ALLTOALL_DEDUP, 6, marks=pytest.mark.full),  # in the backward
        pytest.param(3, ALLTOALL, 1, marks=pytest.mark.full),
        pytest.param(3, ALLTOALL, 4, marks=pytest.mark.full),
        pytest.param(4, HIERARCHICAL, 4, marks=pytest.mark.full),  # within a node
        (4, HIERARCHICAL, 10),  # in the backward
    ],
)
def test_a_rank_that_dies_in_an_exchange_is_named(ranks: int, options: Options, turn: int) -> None:
    close_pools()
    given = {"token_dispatcher": options.token_dispatcher, "topology": options.topology}
    batch = routed(12, 12, 2, "any")
    outcomes = rank_outcomes(ranks, killed_in_exchange, batch, ranks, given, 1, turn, timeout=60, grace=TIMEOUT + 5)
    close_pools()  # its groups are broken
    assert "exit code -9" in (outcomes[1].lost or "")
    for rank in {*range(ranks)} - {1}:
        said = outcomes[rank].value
        assert "rank 1 did not respond" in said and 'axis "ep' in said, said
