"""Replicas that die and return: losses and weights are those of one process that trains on all shards of a batch."""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.runtime.checkpoint.checkpoint_dir import checkpoints_in
from tests.replicas.run import COUNT, SILENT, Case, Done, Fault, Model, one_process, run, shard_of
from tests.support.ranks import refusal, run_ranks

EXACT = 1e-10


def check(done: Done, steps: int, last: list[int], absent_from: int = 10**9, parts: int = 1) -> None:
    """Every replica has the losses of one process; those that compute the last step, ``last``, have its weights."""
    losses, weights = one_process(steps, absent_from, parts)
    for start in done.starts:
        for step, loss in start.losses.items():
            assert abs(loss - losses[step]) < EXACT, (start.index, step, loss, losses[step])
    ended = [start for start in done.starts if start.weights]
    assert sorted(start.index for start in ended) == last, [(s.index, s.losses, s.ends) for s in done.starts]
    for start in ended:
        for name, x in weights.items():
            np.testing.assert_allclose(start.weights[name], x, atol=EXACT, rtol=0)
        for name, x in ended[0].weights.items():
            np.testing.assert_array_equal(start.weights[name], x)


def test_one_dies_and_returns(tmp_path: Path) -> None:
    """With two ranks each; the second rank of the replica that dies ends by itself. It is the first one, which saves:
    others go on with that, too."""
    case = Case([Fault(0, 7, 0.5)], back=[0], ranks=2, steps=40, pause=0.1, away=1.5 * SILENT, folder=str(tmp_path))
    done = run(case)
    check(done, 40, [*range(COUNT)])
    first, second = done.of(0)
    assert max(first.losses) < min(second.losses), "it has gone on where the others were"
    assert done.starts[1].members[min(second.losses) - 2] == [1, 2, 3]
    assert first.ends[0] == "exit code -9"
    assert first.ends[1].startswith("CollectiveError") and "rank 0" in first.ends[1], first.ends
    saved = checkpoints_in(tmp_path)
    steps = [int(one.name.removeprefix("step-")) for one in saved]
    assert any(max(first.losses) < step < min(second.losses) for step in steps), "others have saved meanwhile"
    assert len({one.run for one in saved}) == 1


def test_scale() -> None:
    """Means are over the shards that are left, and a penalty counts once."""
    done = run(Case([Fault(3, step=2, moment=0.3)], on_loss="scale", steps=5))
    check(done, 5, [0, 1, 2], absent_from=2)


SEVERAL: dict[str, tuple[Case, list[int]]] = {
    "two at once": (Case([Fault(1, 2, 0.3), Fault(2, 2, 0.6)]), [0, 3]),
    "three at once, the first among them": (Case([Fault(0, 2, 0.1), Fault(1, 2, 0.5), Fault(3, 2, 0.8)]), [2]),
    "one after another": (Case([Fault(1, 2, 0.3), Fault(2, 4, 0.6), Fault(0, 6, 0.2)]), [3]),
    "it dies while it gives its state": (
        Case([Fault(2, 2, 0.5), Fault(0, 1, "give")], back=[2], steps=60, pause=0.1), [1, 2, 3],
    ),
    "the one that returns gives its state to another": (
        Case([Fault(0, 2, 0.5), Fault(1, 40, 0.5)], back=[0, 1], steps=80, pause=0.1), [0, 1, 2, 3],
    ),
    "it dies while it is given the state": (
        Case([Fault(2, 2, 0.5), Fault(2, 0, "take", start=1)], back=[2, 2], steps=60, pause=0.1), [0, 1, 2, 3],
    ),
    "another dies while one is given the state": (
        Case([Fault(2, 2, 0.5), Fault(2, 0, "take", start=1), Fault(3, 3, 0.9), Fault(1, 0, "give")], back=[2, 3, 1],
             steps=60, pause=0.1), [0, 1, 3],
    ),
    "one is slow": (Case(slow=(1, 2, 3 * SILENT), steps=5), [0, 1, 2, 3]),
    "before the first step": (Case([Fault(1, 0, 0.9)], back=[1]), [0, 1, 2, 3]),
    "stopped for a while": (
        Case([Fault(1, 2, 0.5, signal=signal.SIGSTOP)], steps=60, pause=0.1, resumed=2 * SILENT), [0, 1, 2, 3],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.full) for name in SEVERAL])
def test_several(name: str) -> None:
    case, last = SEVERAL[name]
    check(run(case), case.steps, last)


def test_too_few_wait() -> None:
    """For the one that returns; no step is made by three."""
    done = run(Case([Fault(3, 2, 0.5)], back=[3], least=4, steps=6, away=2 * SILENT))
    check(done, 6, [*range(COUNT)])
    assert all(len(order) == COUNT for start in done.starts for order in start.members.values())


@pytest.mark.parametrize("case", [
    Case(odd=(0, 0), back=[0], steps=4),
    Case([Fault(3, 1, 0.5)], odd=(3, 1), back=[3, 3], steps=40, pause=0.1),
], ids=["at the start", "one that returns"])  # fmt: skip
def test_the_one_with_other_options_ends_and_no_other(case: Case) -> None:
    """It may come back with those of the others."""
    done = run(case)
    index, number = case.odd
    check(done, case.steps, [*range(COUNT)])
    odd = done.of(index)[number]
    said = (
        r"ValueError: replicas: needs the same options on all replicas, found on_loss='repeat', min_replicas=2 on "
        rf"replica {index} and on_loss='repeat', min_replicas=1 on replica \d(, \d)*; start it with the same"
    )
    assert not odd.losses and re.fullmatch(said, odd.ends[0]), odd.ends
    assert all(len(done.of(i)) == 1 and done.of(i)[0].ends == {0: "done"} for i in range(COUNT) if i != index)


@pytest.mark.full
def test_too_few_end() -> None:
    done = run(Case([Fault(3, 2, 0.5)], least=4, steps=6, patience=12.0))
    for start in done.starts[:3]:
        assert "step 2 needs min_replicas=4 replicas, found 0, 1, 2 for 12 s; start others" in start.ends[0], start.ends


@pytest.mark.full
def test_the_store_dies() -> None:
    done = run(Case(steps=10**6, store_ends=12.0))
    for start in done.starts:
        assert len(start.losses) > 3, start
        assert start.ends[0].startswith("CollectiveError: replicas: the store at 127.0.0.1:"), start.ends
        assert "start it on a host that outlives them" in start.ends[0], start.ends


@pytest.mark.full
@pytest.mark.parametrize("seed", range(30))
def test_random_moments(seed: int) -> None:
    """Of a step of one or two ranks per replica; every second one returns."""
    drawn = random.Random(seed)
    ranks, axis = drawn.choice([(1, "tp"), (2, "tp"), (2, "dp")])
    fault = Fault(drawn.randrange(COUNT), drawn.randrange(1, 4), drawn.random(), drawn.randrange(ranks))
    back = [fault.index] * (seed % 2)
    steps = 40 if back else 8
    away = drawn.choice([0.0, 1.5 * SILENT])
    done = run(Case([fault], back=back, ranks=ranks, axis=axis, steps=steps, pause=0.1 * len(back), away=away))
    last = [index for index in range(COUNT) if index != fault.index or back]
    check(done, steps, last, parts=ranks if axis == "dp" else 1)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(6))
def test_all_of_them_now_and_then(seed: int) -> None:
    """Each of the four is killed twice, at any step and moment, and comes back twice; sometimes nobody is left."""
    drawn = random.Random(seed)
    faults = [Fault(i, drawn.randrange(30), drawn.random(), start=n) for i in range(COUNT) for n in range(2)]
    done = run(Case(faults, back=[*range(COUNT)] * 2, steps=60, pause=0.1, away=drawn.choice([0.0, 2.0])))
    check(done, 60, [*range(COUNT)])


# --- what is refused ---------------------------------------------------------------------------------------------


class BatchNorm(Model):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.BatchNorm1d(16)  # type: ignore[assignment]


class Counting(Model):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.seen.add_(1)
        return super().forward(x, labels)


def refused() -> dict[str, str]:
    mesh = autopar.init_mesh("cpu", 30.0, dp=1)

    def made(kind: Callable[[], nn.Module] = Model, replicas: int = 2, **options: object) -> autopar.ParallelModule:
        model = kind().double()
        return autopar.parallelize(model, mesh, example_batch=shard_of(0, 0), replicas=replicas, **options)

    def step(kind: Callable[[], nn.Module]) -> None:
        model = made(kind)
        with model.shard_of_batch(0, model.own_totals(**shard_of(0, 0))):
            model.train_step(**shard_of(0, 0))

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    here = f"127.0.0.1:{store.port}"
    at = {"index": 0, "store": "127.0.0.1:1"}
    return {
        "one": refusal(autopar.Replicas, made(replicas=1), **at),
        "alone": refusal(made().train_step, **shard_of(0, 0)),
        "forward": refusal(made(), **shard_of(0, 0)),
        "index": refusal(autopar.Replicas, made(), index=2, store="127.0.0.1:1"),
        "no index": refusal(autopar.Replicas, made(), store="127.0.0.1:1"),
        "no store": refusal(autopar.Replicas, made(), index=0),
        "on_loss": refusal(autopar.Replicas, made(), on_loss="stop", **at),
        "too many": refusal(autopar.Replicas, made(), min_replicas=3, **at),
        "check": refusal(made, check="finite"),
        "padding": refusal(made, padding="bucket"),
        "scaler": refusal(autopar.GradScaler, made()),
        "batch norm": refusal(step, BatchNorm),
        "buffer": refusal(autopar.Replicas(made(Counting), index=0, store=here).train_step, shard_of),
    }


def test_what_is_refused() -> None:
    (said,) = run_ranks(1, refused)
    expected = {
        "one": "pass parallelize(model, mesh, replicas=4)",
        "alone": "call train_step of autopar.Replicas(model)",
        "forward": "use train_step of autopar.Replicas(model), or eval_step",
        "index": "index is one of 0 to 1, found 2",
        "no index": "pass index=0, or set AUTOPAR_REPLICA",
        "no store": "run python -m autopar replica-store",
        "on_loss": "expected 'repeat' or 'scale', found 'stop'",
        "too many": "min_replicas: expected a whole number of at least 1 and at most 2, found 3",
        "check": "found check=['finite'], which needs one world",
        "padding": "found padding='bucket', which needs one world",
        "scaler": "compute in bfloat16",
        "batch norm": "samples of different microbatches meet",
        "buffer": "a step writes buffer seen, which is not part of the model's state",
    }
    for name, words in expected.items():
        assert words in said[name], (name, said[name])
