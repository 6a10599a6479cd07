"""What a world of any size asks when it starts: counts here, seconds in tests/benchmarks/bench_start.py."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch.distributed as dist

from autopar.adapters.distributed import own_client
from autopar.ir.mesh import Mesh
from tests.benchmarks.bootstrap import Crowd, StartReport, ask_as, simulate_start
from tests.support.launched import in_child

LARGE = "pp=8,dp=8,cp=8,tp=4"


def start(mesh: str, ranks: int) -> StartReport:
    """In a process that need not import anything."""
    return in_child(simulate_start, Mesh.parse(mesh), ranks)


@pytest.fixture(scope="module")
def large() -> StartReport:
    return start(LARGE, 2)


def test_2048_ranks_start_with_a_few_questions_each(large: StartReport) -> None:
    assert large.mesh.world_size == 2048
    check_start(large)


@pytest.mark.full
def test_16384_ranks_start_with_as_many() -> None:
    check_start(start("pp=16,dp=16,cp=8,tp=8", 2))


def check_start(large: StartReport) -> None:
    """A vote and looks whether all have come: of these more on a slow machine, but no more for more ranks."""
    # four axes, dp joined with cp, three ways along cp, four links to the stages beside, votes along pp
    assert large.groups <= 4 + 1 + 3 + 4 + 1
    assert large.agreement.count <= 12 and large.agreement.nbytes < 1500
    assert large.parallelize.count <= 6 * 12 and large.beat.count == 4
    assert [step.count for step in large.steps[2:]] == [0] * 4, "steps that all expect"
    assert large.steps[0].count >= 2, "the first ones are agreed on"


def test_a_small_world_asks_as_much(large: StartReport) -> None:
    small = start("dp=2,tp=2", 1)
    assert small.groups == 2 and small.beat.count == large.beat.count
    assert 2 <= small.agreement.count <= 8 and [step.count for step in small.steps[2:]] == [0] * 4


def test_all_ranks_ask() -> None:
    """The crowd adds up what each rank adds, writes what each writes, and waits for its turn."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with closing(Crowd(store, 3, 50)) as crowd:
        leader = crowd.connect(store)

        def questions() -> None:
            leader.add("count", 1)
            leader.set("alive/3", "x")
            leader.add("count", 1)

        asked = crowd.asked(questions)
    assert (asked.count, asked.nbytes) == (3, 5 + 8 + 7 + 1 + 5 + 8)
    assert store.add("count", 0) == 100 and all(store.check([f"alive/{r}"]) for r in range(50))
    ask_as(own_client(store), "delete_key", ("count",), 3, 4)
    assert store.check(["count"]), "the last rank of a round deletes what all share"


def test_what_goes_wrong_in_the_crowd_is_raised() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with closing(Crowd(store, 0, 4)) as crowd, pytest.raises(AttributeError):
        crowd.asked(lambda: crowd.repeat("no such question", ()))
    assert isinstance(crowd, Crowd)
