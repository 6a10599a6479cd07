"""Values that wait in host memory: bitwise equal, bytes that move as predicted, copies that start early, end late."""

from __future__ import annotations

import contextlib
import functools
import gc
import re
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import autopar
from autopar.ac_policies import AC_POLICIES, HOST, ForwardValue
from autopar.compile.model import compile_graph, compile_model
from autopar.cost.memory import memories, memory
from autopar.ir.graph import copy_graph, is_call, layer_of
from autopar.ir.live_values import peak_of_values
from autopar.ir.mesh import Mesh
from autopar.ir.waits import WaitPlaces, is_started
from autopar.models.tiny import TINY
from autopar.options import Options
from autopar.plan import Plan
from autopar.report.graph_text import format_graph
from autopar.runtime.mesh.host_copies import HostArena, OffloadBuffers
from autopar.steps.graphs import Compiled
from tests.autodiff.test_activation_checkpoint import DROPPING, captured, every_second, least, made, peak
from tests.benchmarks.meter import Meter
from tests.support.ranks import run_ranks
from tests.support.subjects import tiny

ours = torch.ops.autopar


def everything(value: ForwardValue) -> str:
    return HOST


def layers(value: ForwardValue) -> bool | str:
    return HOST if value.layer else False


def mixed(value: ForwardValue) -> bool | str:
    """Some wait on the host, some are recomputed, also from the others."""
    return HOST if len(value.target) % 2 else every_second(value) and value.recomputable


POLICIES = {"everything": everything, "layers": layers, "mixed": mixed}
FAST = {"topology": "host=switch:1e12:1e-9"}  # as fast as tiny layers compute


@contextlib.contextmanager
def known_policies() -> Iterator[None]:
    """A rank may have been forked from a process that did not know them."""
    new = [name for name in POLICIES if name not in AC_POLICIES]
    for name in new:
        AC_POLICIES.add(name, POLICIES[name])
    yield
    for name in new:
        AC_POLICIES.remove(name)


@pytest.fixture(autouse=True)
def _known_policies() -> Iterator[None]:
    with known_policies():
        yield


def arena() -> HostArena:
    return OffloadBuffers.on(torch.device("cpu")).arena


# --- steps on real ranks ------------------------------------------------------------------------------------

MESHES: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "zero 3": ("gpt2", {"dp": 2}, {"zero": 3, "microbatches": 2}),
    "zb_h1": ("gpt2", {"pp": 2}, {"microbatches": 4, "schedule": "zb_h1"}),
    "token slices": ("llama", {"pp": 2}, {"microbatches": 2, "schedule": "tera_pipe", "token_slices": 2}),
}
KINDS = {"zero 3": ["everything"], "zb_h1": ["mixed"], "token slices": ["mixed"]}  # the others have both
MORE: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    **{f"{case}, both": MESHES[case] for case in MESHES},
    "sequence parallel": ("llama", {"tp": 2}, {"sequence_parallel": True}),
    "sharded sequences": ("llama", {"cp": 2}, {}),
    "1f1b": ("t5", {"pp": 2}, {"microbatches": 4, "schedule": "1f1b"}),
    "zb_h1, t5": ("t5", {"pp": 2}, {"microbatches": 4, "schedule": "zb_h1"}),
    **{s: ("gpt2", {"pp": 2}, {"microbatches": 4, "schedule": s})
       for s in ("interleaved", "zb_v", "dual_pipe", "dual_pipe_v", "zb_h2")},
    "inductor": ("gpt2", {"dp": 2}, {"backend": "inductor"}),
    "bf16": ("llama", {"dp": 2}, {"precision": "bf16", "zero": 2, "microbatches": 2}),
    **{f"one rank, {name}": (name, {"dp": 1}, {}) for name in DROPPING},
}  # fmt: skip


@pytest.mark.parametrize("case", [*MESHES, *(pytest.param(c, marks=pytest.mark.full) for c in MORE)])
def test_the_same_bits_and_the_bytes_that_were_predicted(case: str) -> None:
    """With dropout. What is there on the host is what the walk says, and comes back when a step is over."""
    name, sizes, options = {**MESHES, **MORE}[case]
    policies = ("none", *KINDS.get(case, ("everything", "mixed")))
    for rank, found in enumerate(run_ranks(max(sizes.values()), _steps, name, sizes, options, policies, timeout=200.0)):
        for policy, (differing, host, seen, left, held) in found.items():
            assert not differing, f"rank {rank}, {policy}: other gradients of {', '.join(differing)}"
            assert not left, f"rank {rank}, {policy}: {left} bytes were not given back"
            assert held[0] == held[1], f"rank {rank}, {policy}: buffers were made anew"
            if options.get("backend") != "inductor":
                assert seen == host > 0, f"rank {rank}, {policy}: {seen} bytes on the host, {host} said"


@known_policies()
def _steps(name: str, sizes: dict[str, int], options: dict[str, Any], policies: tuple[str, ...]) -> dict[str, Any]:
    mesh = autopar.init_mesh("cpu", 60.0, **sizes)
    part, parts = autopar.dp_rank_and_size(mesh)
    model, batch = tiny(name, layers=1, dropout=0.1)
    mine = {k: v.chunk(parts)[part] for k, v in batch.items()}
    expected, found = dict[str, Tensor](), {}
    for policy in policies:
        parallel = autopar.parallelize(model, mesh, activation_checkpoint=policy, **options)
        arena().most, held = arena().lent, []
        for _ in range(2):  # each with other masks of dropout
            parallel.zero_grad()
            parallel.train_step(**mine)
            held.append(arena().held)
        gradients = {n: g.clone() for n, g in parallel.full_gradients().items()}
        expected = expected or gradients
        differing = [n for n, g in gradients.items() if not torch.equal(g, expected[n])]
        held_by = memories(parallel.compiled()[0])[dict(parallel._groups.coordinate).get("pp", 0)]
        found[policy] = differing, held_by.host, arena().most, arena().lent, held
    return {policy: x for policy, x in found.items() if policy != "none"}


def test_the_device_holds_less() -> None:
    """By a meter of the device, and by one of the host."""
    kept, away = run_ranks(1, _metered, ("none", "everything"), timeout=100.0)[0]
    assert kept[2] == 0 and away[2] == away[3] > 0
    for predicted, seen, _, _ in (kept, away):
        assert 0.99 < predicted / seen < 1.02
    assert away[1] < 0.75 * kept[1]


@known_policies()
def _metered(policies: tuple[str, ...]) -> list[tuple[int, int, int, int]]:
    """(predicted, seen) on the device, (seen, predicted) on the host."""
    mesh, found = autopar.init_mesh("cpu", 30.0, dp=1), []
    for policy in policies:
        model, batch = tiny("gpt2", layers=3)
        parallel = autopar.parallelize(model, mesh, activation_checkpoint=policy)
        parallel.train_step(**batch)
        parallel.zero_grad()
        gc.collect()
        before = arena().most = arena().lent  # what others have left in this process
        with Meter([list(parallel.parameters()), list(parallel.buffers()), batch], arena().holds) as meter:
            parallel.train_step(**batch)
        said = memory(parallel.compiled()[0])
        found.append((said.peak - said.optimizer, meter.peak, arena().most - before, said.host))
    return found


def test_what_a_forward_left_on_the_host_goes_with_it() -> None:
    assert run_ranks(1, _forwards, timeout=100.0) == [[True, 0, True, 0, 0]]


@known_policies()
def _forwards() -> list[Any]:
    """``backward()`` of the user; a forward that nobody differentiates; one that is differentiated twice."""
    model, batch = tiny("llama", layers=1)
    expected = torch.autograd.grad(model(**batch).loss, next(model.parameters()))[0]
    parallel = autopar.parallelize(
        model, autopar.init_mesh("cpu", 30.0, dp=1), activation_checkpoint="everything", lift_to_float64=True
    )
    loss = parallel(**batch).loss
    lent = arena().lent > 0
    del loss
    gc.collect()
    found: list[Any] = [lent, arena().lent]
    loss = parallel(**batch).loss
    loss.backward(retain_graph=True)
    loss.backward()
    name = next(iter(parallel.full_gradients()))
    found += [bool(torch.allclose(parallel.full_gradients()[name], 2 * expected, atol=1e-6)), arena().lent]
    with torch.no_grad():
        parallel.eval()(**batch)
    return [*found, arena().lent]


# --- the choice ---------------------------------------------------------------------------------------------


def lost(compiled: Compiled) -> float:
    return sum(layer.seconds for layer in compiled.plan.checkpoints)


@functools.cache
def wide(layers: int = 3, stages: int = 1, **options: Any) -> Compiled:
    """Layers that compute long enough for copies, and whose values set the peak."""
    model = tiny("llama", layers=layers, hidden_size=128, intermediate_size=320)[0]
    return compile_model(model, TINY["llama"].batch(8, 64), Mesh.of(pp=stages), Options(**options), outputs=())


SAVING: list[tuple[dict[str, Any], float, int, int]] = [  # layers, share of the limit, some host memory, other times
    ({}, 0.8, 4 * 10**6, 2),
    ({"layers": 4}, 0.8, 10**7, 3),
    ({"stages": 2, "microbatches": 4, "schedule": "1f1b"}, 0.9, 10**7, 2),
]


@pytest.mark.parametrize(
    "how, share, some, count", [SAVING[0], *(pytest.param(*case, marks=pytest.mark.full) for case in SAVING[1:])]
)
def test_host_memory_saves_time(how: dict[str, Any], share: float, some: int, count: int) -> None:
    """Under one limit the more host memory the less time is lost, and each limit is kept."""
    none, full = (peak(wide(activation_checkpoint=name, **how)) for name in ("none", "full"))
    limit, times = round(share * full + (1 - share) * none), []
    for host in (0, some, 10**9):
        found = wide(memory_limit=limit, activation_offload=host, **how, **FAST)
        assert peak(found) <= limit and max(m.host for m in memories(found)) <= host
        times.append(lost(found))
    assert times[0] >= times[1] >= times[2] > 0 and len(set(times)) >= count


def test_a_slow_link_is_left_alone() -> None:
    none, full = peak(wide(activation_checkpoint="none")), peak(wide(activation_checkpoint="full"))
    limit = round(0.5 * none + 0.5 * full)
    slow = wide(memory_limit=limit, activation_offload="1GB", topology="host=switch:1e6:1e-3")
    assert memory(slow).host == 0 and lost(slow) == lost(wide(memory_limit=limit))


def test_the_last_layer_stays() -> None:
    """Its backward comes at once: nothing hides its copies."""
    none, full = peak(wide(activation_checkpoint="none")), peak(wide(activation_checkpoint="full"))
    found = wide(memory_limit=round(0.9 * full + 0.1 * none), activation_offload="1GB", **FAST)
    hosted = {layer.layer: layer.hosted for layer in found.plan.checkpoints}
    assert sum(hosted.values()) == memory(found).host > 0
    assert hosted.get("lm_head", 0) == hosted.get("model.layers.2", 0) == 0 < hosted["model.layers.0"]


def test_the_least_limit_with_host_memory() -> None:
    """What a refusal names works, 1 % below is refused; less than without."""
    with pytest.raises(ValueError, match="no choice of what to recompute") as error:
        made("llama", memory_limit=1, activation_offload="1GB", **FAST)
    found = re.search(r"least that would do is ([\d,]+) bytes", str(error.value))
    assert found is not None
    smallest = int(found[1].replace(",", ""))
    assert smallest <= least("llama")
    assert peak(made("llama", memory_limit=smallest, activation_offload="1GB", **FAST)) <= smallest
    with pytest.raises(ValueError, match="the least that would do"):
        made("llama", memory_limit=int(0.99 * smallest), activation_offload="1GB", **FAST)


def test_a_plan_says_what_waits() -> None:
    plan = made("llama", activation_checkpoint="layers").plan
    captured_graph = copy_graph(captured("llama")[2])
    again = compile_graph(captured_graph, Mesh.of(), plan=Plan.from_json(plan.to_json()), outputs=())
    assert again.plan.checkpoints == plan.checkpoints and memory(again).host == sum(x.hosted for x in plan.checkpoints)
    assert "more; activation_checkpoint=layers" in str(plan)


# --- graphs -------------------------------------------------------------------------------------------------


def test_copies_start_early_and_end_late() -> None:
    """Out right behind what is copied; back while what comes before the first use is computed."""
    model, batch = tiny("llama", layers=3)
    stage = compile_model(model, batch, Mesh.of(), Options(activation_checkpoint="layers"), outputs=()).stage
    assert stage.backward_reduce is not None
    forward, backward = stage.forward, stage.backward_reduce
    copies = [n for n in forward.graph.graph.nodes if is_call(n, ours.to_host.default)]
    assert copies and all(n.prev in (n.args[0], *copies) for n in copies)
    assert sum(name is not None and name.startswith("host:") for name in forward.outputs) == len(copies)
    place = {n: i for i, n in enumerate(backward.graph.graph.nodes)}
    back = [n for n in place if is_call(n, ours.from_host.default)]
    ahead = [min(place[user] for user in n.users) - place[n] for n in back]
    assert sum(calls >= 5 for calls in ahead) > 0.9 * len(ahead)
    assert [x.rpartition(".")[2] for x in dict.fromkeys(map(layer_of, back))] == ["2", "1", "0"]
    assert "from the host, " in format_graph(backward.graph) and "to the host, " in format_graph(forward.graph)


def test_copies_have_the_time_of_one_layer() -> None:
    """They keep what they read until the layer behind the next one begins."""
    model, batch = tiny("llama", layers=4)
    graph = compile_model(
        model, batch, Mesh.of(), Options(activation_checkpoint="layers"), outputs=()
    ).stage.forward.graph
    waits, begun, ended = WaitPlaces(graph), dict[str, set[str]](), dict[str, set[str]]()
    for node in graph.graph.nodes:
        for done in waits.before(node):
            ended.setdefault(layer_of(done)[-1:], set()).add(layer_of(node)[-1:])
        if is_started(node):
            begun.setdefault(layer_of(node)[-1:], set()).add(layer_of(node)[-1:])
            assert not waits.started(node)
    assert [*begun] == ["0", "1", "2", "3"]
    assert ended == {"0": {"2"}, "1": {"3"}, "2": {""}, "3": {""}}


def test_memory_counts_what_a_copy_reads() -> None:
    """x is free once it is copied."""
    value = torch.empty(1000)

    def most(layers: str) -> int:
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        x.meta["val"], copies = value, []
        for layer in layers:
            x = graph.call_function(torch.ops.aten.sin.default, (x,))
            copies.append(graph.call_function(ours.to_host.default, (x,)))
            for node in (x, copies[-1]):
                node.meta["val"] = value
                node.meta["nn_module_stack"] = {layer: (f"layers.{layer}", "Layer")}
        graph.output((*copies, x))
        return peak_of_values(GraphModule(nn.Module(), graph), {"x"}) // value.nbytes

    assert [most("00000"), most("01234"), most("00112")] == [5, 2, 4]


# --- streams ------------------------------------------------------------------------------------------------


def test_streams_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: a copy is behind what makes its source and the last use of its buffer, what computes behind the
    copy."""
    log: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name, self.events = name, 0

        def wait_stream(self, other: Any) -> None:
            log.append(f"{self.name} waits for {other.name}")

        def wait_event(self, event: str) -> None:
            log.append(f"{self.name} waits for {event}")

        def record_event(self) -> str:
            self.events += 1
            return f"{self.name} {self.events}"

        def __enter__(self) -> None:
            log.append(f"copy on {self.name}")

        def __exit__(self, *_: Any) -> None:
            pass

    copies = OffloadBuffers(torch.device("cpu"))
    copies._out, copies._in = Stream("out"), Stream("in")  # type: ignore[assignment]
    fake = SimpleNamespace(current_stream=lambda device: Stream("compute"), stream=lambda stream: stream)
    monkeypatch.setattr(torch, "cuda", fake)
    x = torch.randn(3, 5).t()
    for _ in range(2):
        host = copies.finish(copies.to_host(x))
        assert torch.equal(copies.finish(copies.from_host(host)), x) and host.stride() == x.stride()
        del host
    there = ["out waits for compute", "copy on out", "compute waits for out {}"]
    back = ["in waits for compute", "in waits for out {}", "copy on in", "compute waits for in {}"]
    once, twice = ([line.format(k) for line in (*there, *back)] for k in (1, 2))
    assert log == [*once, twice[0], "out waits for in 1", *twice[1:]]
    assert copies.arena.lent == 0 and copies.arena.held == copies.arena.most == x.nbytes
    source, pending = weakref.ref(x), copies.to_host(x)
    del x
    assert source() is not None, "its memory would be another's while it is read"
    copies.finish(pending)
    del pending
    assert source() is None


# --- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"activation_offload": "1GB"},
            "activation_offload: offloads activations that do not fit a memory_limit, found 1,000,000,000",
        ),
        (
            {"activation_offload": 5, "activation_checkpoint": "everything"},
            "activation_checkpoint: everything offloads [0-9,]+ bytes of a rank to host",
        ),
        ({"topology": "hosts=switch"}, "topology: names links of the axis 'hosts'"),
    ],
    ids=str,
)
def test_bad_input(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made("llama", **options)


def test_a_plan_of_another_graph_is_refused() -> None:
    plan = made("llama", activation_checkpoint="layers").plan
    text = plan.to_json().replace(f'"{plan.checkpoints[0].host[0]}"', '"no_such_value"')
    with pytest.raises(
        ValueError, match="activation_checkpoint: a plan names no_such_value, which the graph does not have"
    ):
        compile_graph(copy_graph(captured("llama")[2]), Mesh.of(), plan=Plan.from_json(text), outputs=())
