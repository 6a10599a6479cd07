"""Questions to the store: how long somebody waits for an answer."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from autopar.runtime.fault.store_client import Answer

PATIENCE, TURNS, TURN, SUSPENDED = 2.0, 10, 0.05, 3.0  # seconds; an answer takes a quarter of the patience


def _asking(pipe: Connection) -> None:
    answer = Answer()

    def work() -> None:
        for _ in range(TURNS):
            time.sleep(TURN)

    threading.Thread(target=answer.run, args=(work,), daemon=True).start()
    pipe.send("waiting")
    pipe.send(answer.wait(PATIENCE))


def test_no_time_passes_while_the_process_is_suspended() -> None:
    context: Any = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_asking, args=(there,), daemon=True)
    process.start()
    assert here.recv() == "waiting"
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(SUSPENDED)
    os.kill(process.pid, signal.SIGCONT)
    assert here.recv() is True
    process.join()


def test_nobody_waits_longer_than_he_says() -> None:
    answer, start = Answer(), time.monotonic()
    assert not answer.wait(1.2)
    assert 1.2 <= time.monotonic() - start < 10
    assert not answer.wait(0.0)


def test_an_answer_that_came_is_there() -> None:
    answer = Answer()
    answer.run(lambda: 3)
    assert answer.wait(0.0) and answer.value == 3
