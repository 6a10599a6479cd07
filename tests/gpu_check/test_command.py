"""The check of GPUs, on the CPU: it passes what is right, and names what is planted."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from autopar.ops import dropout, grouped_experts
from autopar.ops.kernels.plain import CpuFlash
from autopar.runtime.exec.executor import Executor
from tests.gpu_check import command, ranks, step
from tests.gpu_check.attention import checks
from tests.gpu_check.processes import Check, Machine
from tests.gpu_check.rows import FAILED, Row

Ran = Callable[[str], tuple[int, dict[str, Any], str]]


@pytest.fixture
def ran(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Ran:
    """Exit status, content of the JSON and what was printed, of some sections."""

    def run(sections: str) -> tuple[int, dict[str, Any], str]:
        file = tmp_path / "found.json"
        status = command.main(["--device", "cpu", "--quick", "--only", sections, "--json", str(file)])
        return status, json.loads(file.read_text()), capsys.readouterr().out

    return run


def only(monkeypatch: pytest.MonkeyPatch, *chosen: Check) -> None:
    """These are all checks of a section "planted"."""
    monkeypatch.setitem(command.SECTIONS, "planted", lambda machine: chosen)


def test_what_is_right(ran: Ran) -> None:
    status, found, printed = ran("facts,kernels,paged,experts,dropout,sampling")
    assert status == 0 and not found["failed"] and found["device"] == "cpu", printed
    counted = {(row["section"], row["verdict"]) for row in found["rows"]}
    assert counted >= {(name, "ok") for name in ("facts", "kernels", "paged", "experts", "dropout", "sampling")}
    assert {row["what"] for row in found["rows"] if row["section"] == "kernels"} >= {
        "cpu_flash float64",
        "math bfloat16",
        "kernel that is taken",
    }
    assert "[dropout 1/2] bits of masks: 50 rows" in printed and "FAILED" not in printed


def backward_with_a_wrong_sign(self: CpuFlash, *given: Any) -> tuple[Tensor | None, ...]:
    q, *others = right_backward(self, *given)
    return -q, *others


right_backward = CpuFlash.backward


def test_a_kernel_with_a_wrong_sign(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuFlash, "backward", backward_with_a_wrong_sign)
    first = [c for c in checks(Machine("cpu", 2)) if c.name == "cpu_flash float64"]
    only(monkeypatch, *first)
    status, found, printed = ran("planted")
    failed = [row for row in found["rows"] if row["verdict"] == FAILED]
    assert status == 1 and found["failed"] and len(failed) > 20
    assert {row["case"].split()[0] for row in failed} == {"q"} and "FAILED planted: cpu_flash float64, q of" in printed


def test_a_kernel_that_merges_wrong_or_raises(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = CpuFlash.forward

    def planted(self: CpuFlash, q: Tensor, k: Tensor, v: Tensor, known: Any) -> tuple[Tensor, Tensor]:
        if known.window:
            raise RuntimeError("no window today")
        out, lse = forward(self, q, k, v, known)
        return out, lse * 0.6931471805599453 if known.only_causal else lse  # in powers of two

    monkeypatch.setattr(CpuFlash, "forward", planted)
    only(monkeypatch, *(c for c in checks(Machine("cpu", 2)) if c.name == "cpu_flash float64"))
    status, found, printed = ran("planted")
    failed = {row["case"]: row["words"] for row in found["rows"] if row["verdict"] == FAILED}
    assert status == 1
    assert any("RuntimeError: no window today" in words for words in failed.values())
    assert any(case.split(" of ")[-1].startswith("two parts merged: plain") for case in failed)
    assert not any("documents" in case for case in failed), printed


def test_experts_and_masks(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, shift = grouped_experts._groups, dropout._shift_right
    monkeypatch.setattr(grouped_experts, "_groups", lambda offsets: list(groups(offsets))[:-1])
    monkeypatch.setattr(dropout, "_shift_right", lambda x, bits: x >> bits if bits == 15 else shift(x, bits))
    status, found, _ = ran("experts,dropout")
    failed = [row for row in found["rows"] if row["verdict"] == FAILED]
    assert status == 1 and {row["section"] for row in failed} == {"experts", "dropout"}
    assert any("wrong bits" in row["words"] for row in failed)


def dying(how: str, machine: Machine) -> Iterator[Row]:
    yield Row("before", "it came to this")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "poisoned":
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more")
    time.sleep(60)


def test_processes_that_end(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"killed": 60.0, "poisoned": 60.0, "hanging": 20.0}  # seconds, on a machine with others at work
    only(monkeypatch, *(Check("planted", how, functools.partial(dying, how), seconds=s) for how, s in ways.items()))
    status, found, printed = ran("planted,facts")
    words = {row["what"]: row["words"] for row in found["rows"] if row["verdict"] == FAILED}
    assert status == 1 and sum(row["what"] == "before" for row in found["rows"]) == 3
    assert words["killed"] == "died with exit code -9"
    assert words["poisoned"] == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert words["hanging"].startswith("still running after 20 s") and "in dying" in words["hanging"]
    assert "[facts 1/1]" in printed, "the others go on"


def test_a_rank_that_fails(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, Check("planted", "two ranks", one_of_two, ranks=2, seconds=20.0))
    status, found, _ = ran("planted")
    assert status == 1
    assert [row["words"] for row in found["rows"] if row["verdict"] == FAILED] == ["rank 1: KeyError: 'planted'"]


def one_of_two(machine: Machine) -> Iterator[Row]:
    yield Row("start", f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}")
    if os.environ["RANK"] == "1":
        raise KeyError("planted")


def test_a_rank_that_is_named(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, ranks.failing("a rank that raises", True))
    status, found, printed = ran("planted")
    assert status == 0, printed
    assert "rank 1 failed: KeyError: 'planted'" in found["rows"][0]["words"]


@pytest.mark.full
def test_a_rank_that_is_not_missed_in_time(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ranks.FAULTS, "a rank that skips a step", (lambda: time.sleep(2), 0.5))
    only(monkeypatch, ranks.failing("a rank that skips a step", False))
    status, found, printed = ran("planted")
    assert status == 1 and [row["verdict"] for row in found["rows"]] == [FAILED], printed
    assert found["rows"][0]["figure"] > 0.5


def doubled(self: Executor, values: Any) -> Any:
    result = right_step(self, values)
    for gradient in result.gradients.values():
        gradient.mul_(2)
    return result


right_step = Executor.run_step


@pytest.mark.parametrize("ways", [(1,), pytest.param((1, 2), marks=pytest.mark.full)], ids=str)
def test_steps(ran: Ran, monkeypatch: pytest.MonkeyPatch, ways: tuple[int, ...]) -> None:
    """On a world of one and, where there is time, on two ranks; right, and with gradients that are not."""
    alone = Check("planted", "two layers", functools.partial(step.one_model, step.PLAIN, "eager"))
    pair = next(c for c in ranks.checks(Machine("cpu", 2)) if c.name.startswith("llama tp=2"))
    only(monkeypatch, *(alone, pair)[: len(ways)])
    status, found, printed = ran("planted")
    assert status == 0 and sum(row["verdict"] == "ok" for row in found["rows"]) == len(ways), printed
    monkeypatch.setattr(Executor, "run_step", doubled)
    status, found, printed = ran("planted")
    words = [row["words"] for row in found["rows"] if row["verdict"] == FAILED]
    assert status == 1 and len(words) == len(ways) and all("differs from one process" in text for text in words), (
        printed
    )


def test_every_cell_is_laid_out_for_eight_gpus() -> None:
    """Nothing is run: names are unique, and what is asked for exists."""
    machine = Machine("cuda", 8, gpus=8)
    for name, section in command.SECTIONS.items():
        names = [check.name for check in section(machine)]
        assert names and len(set(names)) == len(names), name
    cells = [c.name for c in ranks.cells()]
    assert {"t5 pp=2 1f1b", "llama pp=2 seq1f1b", "llama cp=4 hybrid"} <= set(
        cells
    ) and "t5 pp=2 tera_pipe" not in cells


def test_sections_that_do_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        command.main(["--only", "kernles"])
    assert error.value.code == 2 and "unknown sections kernles" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["--device", "cuda"])
    assert "no GPU is there" in capsys.readouterr().err
