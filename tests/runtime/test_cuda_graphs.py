"""Steps that are recorded and replayed. CUDA is played: what is recorded has no values until it is replayed, and reads
and writes the same storages every time. `tests/gpu_check` does the same on a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.adapters.dtensor import local_of
from autopar.ir.traffic import Ledger, add_ledgers, ledger_between
from autopar.models.tiny import TINY
from autopar.ops import value_checks
from autopar.runtime.exec import cuda_graphs, executor
from autopar.runtime.exec.cuda_graphs import MOVES, WARM_UP, Result, why_not
from autopar.runtime.exec.value_checks import ValueChecks
from tests.support.compile_cache import compiled_once
from tests.support.plain_models import Net, Normed, Tied, WithDropout, build, images, numbers, part, put, tokens
from tests.support.ranks import run_ranks
from tests.support.subjects import tiny

STEPS = WARM_UP + 4
BATCHES: dict[Any, Callable[..., dict[str, Tensor]]] = {Net: numbers, Normed: images, Tied: tokens}


class PlayedGraph:
    """`cuda_graphs.CudaGraph` on the CPU."""

    made: ClassVar[list[PlayedGraph]] = []

    def __init__(self) -> None:
        self.replays, self.sent = 0, add_ledgers()  # by replays, which run on a CPU
        PlayedGraph.made.append(self)

    counts: Callable[[], Ledger]  # what this process has sent

    def record(self, run: Callable[[], Any]) -> Any:
        self._run, self._result, self._notes = run, run(), list(value_checks._notes)
        for x in _tensors(self._result):
            x.fill_(float("nan") if x.is_floating_point() else -1)
        return self._result

    def replay(self) -> None:
        self.replays += 1
        before = self.counts()
        for old, new in zip(_tensors(self._result), _tensors(self._run()), strict=True):
            old.copy_(new)
        for note, again in zip(
            self._notes, value_checks.take_notes(), strict=True
        ):  # nobody but a kernel notes anything
            note.extremes.copy_(again.extremes)
        self.sent = add_ledgers(self.sent, ledger_between(before, self.counts()))


def _tensors(result: Result) -> list[Tensor]:
    return [x for x in (*result.outputs, *result.gradients.values(), *result.losses) if isinstance(x, Tensor)]


def noted(values: Tensor, low: float, high: float, text: str, fatal: bool = True) -> None:
    """As on a GPU, where nobody knows yet whether the values are right."""
    value_checks._notes.append(value_checks.ValueNote(torch.stack(torch.aminmax(values)), low, high, text, fatal))


@contextmanager
def played(make: type[PlayedGraph] = PlayedGraph) -> Iterator[list[PlayedGraph]]:
    """The graphs that are made while steps are recorded on the CPU."""
    PlayedGraph.made = []
    kept, record = cuda_graphs.RecordedStep.__init__.__kwdefaults__ | {"make": make}, cuda_graphs.RecordedStep._record

    def recorded(self: Any, values: Any) -> None:
        record(self, values)
        PlayedGraph.made[-1].counts = self._traffic_of_run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(value_checks, "note", noted)
        patch.setattr(executor, "why_not", lambda graphs, device: why_not(graphs, torch.device("cuda")))
        patch.setattr(cuda_graphs.RecordedStep.__init__, "__kwdefaults__", kept)
        patch.setattr(cuda_graphs.RecordedStep, "_ask_others", lambda self: None)
        patch.setattr(cuda_graphs.RecordedStep, "_record", recorded)
        yield PlayedGraph.made


Told = list[list[Tensor]]


def trained(backend: str, name: str, sizes: dict[str, int], **options: Any) -> tuple[Told, Any]:
    """A loop with dropout, clipping, an optimizer, and gradients of two steps added up: what came out of every step,
    looked at when all have run; and traffic."""
    mesh = autopar.init_mesh("cpu", 20.0, **sizes)
    model = build(WithDropout) if name == "plain" else tiny(name, sizes.get("pp", 1), dropout=0.1)[0]

    def batch(i: int) -> dict[str, Tensor]:
        whole = numbers(i) if name == "plain" else TINY[name].batch(8, 16, seed=i)
        return part(whole, sizes) if "dp" in sizes else whole

    parallel = autopar.parallelize(model, mesh, backend=backend, example_batch=batch(0), **options)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    told: Told = []
    for i in range(STEPS):
        loss = parallel.train_step(**batch(i))
        told.append([loss, *(p.grad for p in parallel.parameters() if p.grad is not None)])
        if i % 3 == 2:
            continue  # the next step's gradients are added, in these tensors
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        outputs = [parallel.eval_step(**batch(i)) for i in range(STEPS)]
    values = (x for out in outputs for x in (out.values() if isinstance(out, Mapping) else [out]))
    told.append([x for x in values if isinstance(x, Tensor)])
    return [[_local(x) for x in values] for values in told], dict(parallel.traffic())


def _local(x: Any) -> Tensor:
    return (x.to_local() if hasattr(x, "to_local") else x).detach()


def both(name: str, sizes: dict[str, int], options: dict[str, Any]) -> tuple[int, list[int]]:
    """Recorded against run as always, bit by bit; how many values were compared, and the replays of each graph."""
    with compiled_once():
        expected, sent = trained("eager", name, sizes, **options)
        with played() as graphs:
            found, sent_too = trained("cudagraphs", name, sizes, **options)
    assert sent == ledger_between(add_ledgers(*(graph.sent for graph in graphs)), sent_too)
    for i, (mine, other) in enumerate(zip(found, expected, strict=True)):
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True)), f"step {i}"
    return sum(map(len, found)), [graph.replays for graph in graphs]


CELLS: list[Any] = [
    ("plain", {"dp": 1}, {}),
    ("gpt2", {"dp": 2}, {"zero": 3, "microbatches": 2}),
    ("plain", {"pp": 2}, {"schedule": "1f1b", "microbatches": 4}),
    ("llama", {"cp": 2}, {"attention": "ring"}),
    pytest.param("llama", {"dp": 1}, {}, marks=pytest.mark.full),
    pytest.param("llama", {"pp": 2}, {"schedule": "1f1b", "microbatches": 4}, marks=pytest.mark.full),
]


@pytest.mark.parametrize("name, sizes, options", CELLS)
def test_a_recorded_loop_is_the_loop(name: str, sizes: dict[str, int], options: dict[str, Any]) -> None:
    ranks = 2 if max(sizes.values()) > 1 else 1
    for compared, replays in run_ranks(ranks, both, name, sizes, options):
        assert compared > 20 and replays == [STEPS - WARM_UP] * 2  # training and evaluation


def world_of_one(kind: type[nn.Module], **options: Any) -> Any:
    batch = BATCHES[kind]()
    return autopar.parallelize(build(kind), autopar.init_mesh("cpu", dp=1), example_batch=batch, **options)


def buffers_go_on() -> None:
    """Running statistics are read where they are, and written after the step."""
    told = []
    for backend in ("eager", "cudagraphs"):
        with played() as graphs:
            parallel = world_of_one(Normed, backend=backend)
            losses = [parallel.train_step(**images(seed=i)).item() for i in range(STEPS)]
            told.append((losses, [b.clone() for b in parallel.buffers()]))
    assert graphs[0].replays == STEPS - WARM_UP
    assert told[0][0] == told[1][0] and len(set(told[0][0])) == STEPS
    assert told[0][1] and all(torch.equal(a, b) for a, b in zip(*(buffers for _, buffers in told), strict=True))


def tensors_that_move_are_read_where_they_are_now() -> None:
    """A graph holds addresses: with new ones the step is recorded anew, and not for ever."""
    with played() as graphs:
        parallel, plain = world_of_one(Net, backend="cudagraphs"), world_of_one(Net)
        for i in range(WARM_UP + MOVES + 3):
            for model in (parallel, plain):
                with torch.no_grad():
                    model.first.weight.to_local().mul_(0.5)
            values = local_of(parallel.first.weight)
            values.data = values.data.clone() if i > WARM_UP + 1 else values.data
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                loss = parallel.train_step(**numbers(i))
            assert float(loss) == float(plain.train_step(**numbers(i))), i
            told = [str(w.message) for w in said if "cudagraphs" in str(w.message)]
            assert [f"moved {MOVES} times" in text for text in told] == [True] * (i == WARM_UP + MOVES + 2)
    assert len(graphs) == MOVES + 1


class Refusing(PlayedGraph):
    def record(self, run: Callable[[], Any]) -> Any:
        run()
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nCompile with ...")


def what_cuda_does_not_record_runs_as_always() -> None:
    """What the broken recording has left, such as its notes, is forgotten."""
    with played(Refusing):
        parallel, plain = world_of_one(Net, backend="cudagraphs"), world_of_one(Net)
        for i in range(STEPS):
            expected = plain.train_step(**numbers(i))
            if i != WARM_UP:
                assert torch.equal(parallel.train_step(**numbers(i)), expected)
                continue
            with pytest.warns(UserWarning, match="runs normally: RuntimeError: CUDA error: operation not permitted"):
                assert torch.equal(parallel.train_step(**numbers(i)), expected)


def on_a_cpu() -> list[str]:
    sizes = {"dp": 2}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        parallel = put(build(Net), numbers(), sizes, backend="cudagraphs")
        plain = put(build(Net), numbers(), sizes)
        for i in range(STEPS):
            batch = part(numbers(i), sizes)
            assert torch.equal(parallel.train_step(**batch), plain.train_step(**batch))
    return [str(w.message) for w in said if "backend" in str(w.message)]


def test_a_step_that_reads_values_is_not_recorded() -> None:
    """Its graph says so; and on a CPU there is nothing to record with."""

    def f(x: Tensor) -> Tensor:
        return x[x.nonzero()[:, 0]].sum()

    gm = torch.fx.experimental.proxy_tensor.make_fx(f, tracing_mode="symbolic")(torch.ones(4))
    assert why_not([gm], torch.device("cuda")) == (
        "aten::nonzero (node nonzero) gives a result whose size depends on values"
    )
    assert why_not([], torch.device("cpu")) == "the device is cpu, which has no CUDA graphs"
    said = (
        'backend: "cudagraphs" cannot record this step, which runs normally: the device is cpu, which has no '
        "CUDA graphs"
    )
    assert run_ranks(2, on_a_cpu) == [[said]] * 2


@contextmanager
def sent_notes() -> Iterator[list[list[list[float]]]]:
    """The ranges that each step has noted."""
    found, send = list[list[list[float]]](), ValueChecks._send

    def sent(self: ValueChecks, notes: list[value_checks.ValueNote], step: int) -> Any:
        found.append([note.extremes.tolist() for note in notes])
        return send(self, notes, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ValueChecks, "_send", sent)
        yield found


def a_token_that_is_none_is_told_of_replays() -> None:
    """What kernels note about values is computed in a replay, and looked at after it."""
    with played() as graphs:
        told = []
        for parallel in (world_of_one(Tied), world_of_one(Tied, backend="cudagraphs")):
            with sent_notes() as found:
                for i in range(STEPS):
                    parallel.train_step(**tokens(i))
            told.append(found)
        assert graphs[0].replays and told[0] == told[1] and len({str(x) for x in told[0]}) > 2, told
        wrong = tokens()
        wrong["tokens"][0, 0] = 99
        with pytest.raises(ValueError, match=rf"step {STEPS + 1}: .*99"):
            parallel.train_step(**wrong)
        assert float(parallel.train_step(**tokens())) > 0


def other_calls_are_not_recorded() -> None:
    """A forward whose backward comes later keeps what lies in between; a recorded timeline is of what runs."""
    with played() as graphs:
        parallel, plain = world_of_one(Net, backend="cudagraphs"), world_of_one(Net)
        for i in range(STEPS):
            found, expected = (model(**numbers(i))["loss"] for model in (parallel, plain))
            found.backward()
            expected.backward()
            assert torch.equal(found, expected)
            pairs = zip(parallel.parameters(), plain.parameters(), strict=True)
            assert all(torch.equal(_local(a.grad), _local(b.grad)) for a, b in pairs if a.grad is not None)
    assert not graphs


def backends_have_names() -> None:
    with pytest.raises(ValueError, match="'cudagraphs' or 'inductor\\+cudagraphs', found 'graphs'"):
        world_of_one(Net, backend="graphs")


ALONE = (
    buffers_go_on,
    tensors_that_move_are_read_where_they_are_now,
    what_cuda_does_not_record_runs_as_always,
    a_token_that_is_none_is_told_of_replays,
    other_calls_are_not_recorded,
    backends_have_names,
)


@pytest.mark.parametrize("what", ALONE, ids=lambda what: what.__name__)
def test_on_one_rank(what: Callable[[], None]) -> None:
    run_ranks(1, what)
