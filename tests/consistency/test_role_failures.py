"""Of two roles: who dies, is stopped or raises is named by all ranks of both within seconds, with its global number; a
header that does not fit names both ends; and ranks of experts wait for an idle attention as long as it lives."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from autopar.runtime.comm.pairs import AnsweringPairs, AskingPairs
from autopar.runtime.comm.rows import RowFormat
from autopar.runtime.fault.heartbeat import SILENT
from autopar.runtime.mesh.process_groups import Groups
from tests.consistency.test_hangs import LONG, World

ROWS = RowFormat(4, 1, 2, torch.float64, torch.float64)
X, EXPERT, WEIGHTS = torch.ones(4, 2, dtype=torch.float64), torch.arange(4)[:, None], torch.ones(4, 1).double()
BEGIN, LAYERS, MANY = 5, 2, 10**6  # the step in which it happens; steps
QUICK, SLOW = 12.0, SILENT + 16  # seconds on a machine with others at work, to start included


def happens(how: str) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "raises":
        raise ArithmeticError("of my own")


def body(how: str, who: int, rank: int, timeout: float = LONG, steps: int = MANY, pause: float = 0.0) -> str:
    """Attention: ranks 0, 1. Experts: ranks 2, 3. Who raises lives on, and nobody waits for its end."""
    roles = autopar.init_roles("cpu", timeout, attention={"dp": 2}, experts={"ep": 2})
    groups, calls = Groups(roles.mesh), 0
    try:
        with autopar.error_context("serving"):
            if roles.role == "attention":
                asking = AskingPairs(roles, groups, [ROWS] * (LAYERS + 1))
                run_attention(asking, partial(happens, how) if rank == who else None, how, steps, pause)
            else:

                def answer(layer: int, x: Tensor, *_: Any) -> Tensor:
                    nonlocal calls
                    calls += 1
                    if rank == who and calls == BEGIN * LAYERS:
                        happens(how)
                    return x

                AnsweringPairs(roles, groups, [ROWS] * LAYERS).serve(answer)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        if rank != who:
            return found
        time.sleep(2 * LONG)  # alive, and silent
    return "ended"


def run_attention(
    asking: AskingPairs, act: Callable[[], None] | None, how: str, steps: int = MANY, pause: float = 0.0
) -> None:
    for step in range(steps):
        asking.step = step
        try:
            if act is not None and step == BEGIN:
                act()
                asking.microbatch = int(how == "microbatch")
                asking.step += int(how == "step")
            for layer in range(LAYERS):
                asking.finish(asking.start(layer + int(how == "layer" and act is not None), X, EXPERT, WEIGHTS))
        except Exception as error:
            asking.fail(error)
            raise
        time.sleep(pause)
    asking.end()


@pytest.mark.parametrize("who", [1, 2], ids=["attention", "experts"])
@pytest.mark.parametrize("how", ["killed", "stopped", "raises"])
def test_who_is_gone_is_named_by_both_roles(how: str, who: int) -> None:
    found = World(4, partial(body, how, who), stays=who).end()
    assert found.keys() == {0, 1, 2, 3} - {who}
    named = f"rank {who} ({'attention' if who < 2 else 'experts'})"
    why = "failed: ArithmeticError: of my own" if how == "raises" else "did not respond: no sign of life"
    for rank, (seconds, text) in found.items():
        own = f"rank {rank} ({'attention' if rank < 2 else 'experts'})"
        assert text.startswith("CollectiveError: comm: ") and f" failed on {own}: {named} {why}" in text
        assert seconds < (SLOW if how == "stopped" else QUICK), text


@pytest.mark.parametrize("how", ["step", "layer", "microbatch"])
def test_a_header_that_does_not_fit_names_both_ends(how: str) -> None:
    found = World(4, partial(body, how, 1), stays=1).end()
    step, layer = (0 if how == "layer" else BEGIN), 0
    there = f"step {step + (how == 'step')}, layer {layer + (how == 'layer')}, microbatch {int(how == 'microbatch')}"
    assert found.keys() == {0, 2, 3}
    for seconds, text in found.values():
        assert (
            f"(experts) expects step {step}, layer {layer}, microbatch 0 next, found {there} from rank 1 (attent"
            in text
        )
        assert seconds < QUICK


def test_experts_wait_for_an_idle_attention() -> None:
    """Longer than the timeout of a collective."""
    found = World(4, partial(body, "", -1, timeout=2.0, steps=3, pause=3.0), stays=-1).end()
    assert {text for _, text in found.values()} == {"ended"} and len(found) == 4
