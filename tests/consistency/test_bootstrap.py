"""What a world of any size asks when it starts: counts here, seconds in tests/benchmarks/bench_start.py."""

from __future__ import annotations

import io
import runpy
from contextlib import closing, redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

import autopar
from autopar.adapters.distributed import own_client
from autopar.cli.main import main
from autopar.ir.mesh import Mesh
from autopar.runtime.training.bootstrap_simulation import Crowd, StartReport, ask_as, simulate_here
from tests.support.launched import in_child

LARGE = "pp=8,dp=8,cp=8,tp=4"


def start(mesh: str, ranks: int) -> StartReport:
    """What `autopar.simulate_start` tells, by a process that need not import anything."""
    return in_child(simulate_here, Mesh.parse(mesh), ranks)


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


def test_mistakes_are_told() -> None:
    for mesh, message in (("dp=1", "two ranks or more"), ("dp", "expected name=size"), ({"mb": 4}, "nothing is cut")):
        with pytest.raises(ValueError, match=message):
            autopar.simulate_start(mesh)
    with pytest.raises(ValueError, match="ranks"):
        autopar.simulate_start("dp=4", ranks=0)


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, large: StartReport) -> None:
    monkeypatch.setattr(
        "autopar.runtime.training.bootstrap_simulation.simulate_start", lambda mesh, ranks: replace(large, groups=ranks)
    )
    assert main(["start", "--mesh", LARGE, "--ranks", "7"]) == 0
    assert "2048 ranks\ngroups of a rank      7 in" in capsys.readouterr().out
    assert str(Mesh.parse(LARGE)) == LARGE


def printed_by(script: str) -> str:
    """By a script that is the main module of this process."""
    with redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


def test_in_a_script_without_a_main_guard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a process of its own, which does not run the script again; also from within a launched one."""
    monkeypatch.setenv("RANK", "3")
    script = tmp_path / "script.py"
    script.write_text("import autopar\nprint(autopar.simulate_start({'dp': 2, 'tp': 2}, ranks=1))\n")
    found = in_child(printed_by, str(script))
    assert found.startswith("dp=2,tp=2: 4 ranks\n"), found
    assert "0, 0, 0, 0 questions" in found
