"""Ranks that die, stop or raise while a real model is served: the others name them within seconds."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from tests.serving.served import PROMPTS, Sampling, serving, tiny
from tests.support.ranks import close_pools, rank_outcomes

STEPS = Sampling(temperature=0.0, max_tokens=20, ignore_eos=True)


def breaks(sizes: dict[str, int], breaking: int, way: str) -> Any:
    """The error, and the seconds until it came."""
    with serving(tiny("llama"), sizes, timeout=10.0) as server:
        if server._control.rank == breaking:
            runner: Any = server._loop._runner
            run, steps = runner.run, iter(range(1000))

            def broken(step: Any) -> Any:
                if next(steps) == 6:
                    if way == "raises":
                        raise RuntimeError("the device is gone")
                    os.kill(os.getpid(), signal.SIGKILL if way == "dies" else signal.SIGSTOP)
                return run(step)

            runner.run = broken
        start = time.monotonic()
        try:
            server.complete(PROMPTS, STEPS)
        except RuntimeError as error:
            return str(error), time.monotonic() - start
    return "no error", 0.0


CASES = [
    ({"tp": 2}, 1, "dies"), ({"pp": 2}, 0, "dies"), ({"tp": 2}, 0, "raises"), 
    pytest.param({"pp": 2}, 1, "raises", marks=pytest.mark.full),
    pytest.param({"tp": 2}, 1, "stops", marks=pytest.mark.full),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "breaking", "way"), CASES, ids=str)
def test_others_name_the_rank(sizes: dict[str, int], breaking: int, way: str) -> None:
    try:
        outcomes = rank_outcomes(2, breaks, sizes, breaking, way, timeout=60, grace=30)
    finally:
        close_pools()
    assert outcomes[1 - breaking].ok, outcomes[1 - breaking]
    words, seconds = outcomes[1 - breaking].value
    assert f"rank {breaking}" in words and seconds < 60, (words, seconds)
