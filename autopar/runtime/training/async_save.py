"""A save, synchronous or in flight: each rank writes its share, then rank 0 completes the checkpoint.

    saving = AsyncSave(groups, target); saving.start() or saving.run()
    wait_for_save()                  before the next one, and before a load: at most one is in flight

Ranks report through the store when they have written, so no collective interferes with training.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from autopar.runtime.checkpoint.tensor_storage import whole_index
from autopar.runtime.consistency.exit_checks import ask_at_end, no_longer_ask
from autopar.runtime.fault.error_propagation import CheckpointError
from autopar.runtime.fault.errors import board
from autopar.runtime.fault.store_barrier import Rounds
from autopar.runtime.fault.store_client import StoreError, look
from autopar.runtime.mesh.process_groups import Groups
from autopar.runtime.optim.step_hooks import before_writes

_in_flight: AsyncSave | None = None


def wait_for_save() -> None:
    """Wait until the save in flight, if any, is complete. Raises its error. Collective."""
    global _in_flight
    mine, _in_flight = _in_flight, None
    if mine is not None:
        mine.wait()


def _wait_staged() -> None:
    """Wait, before parameters change, until everything to be saved has been copied."""
    if _in_flight is not None:
        _in_flight.wait_staged()


def _forget() -> None:
    """Forget the save in a forked process: the parent writes it."""
    global _in_flight
    if _in_flight is not None:
        no_longer_ask(_in_flight)
    _in_flight = None


before_writes(_wait_staged)
os.register_at_fork(after_in_child=_forget)


class SaveTarget(Protocol):
    """Where a rank's share goes. ``folder``: the path of the checkpoint. ``staged``: set once the saved tensors may
    change. ``optional``: whether the run goes on if the save fails."""

    folder: Path
    staged: threading.Event
    optional: bool

    def write(self) -> None:
        """Write this rank's share, on the thread."""

    def publish(self) -> None:
        """On rank 0, when all ranks have written: complete the checkpoint."""

    def discard(self) -> None:
        """On rank 0, when a rank has failed: remove what is written."""

    def close(self) -> None:
        """This rank is done with it, or has given it up."""

    def completed(self) -> None:
        """The save has succeeded on all ranks."""


class AsyncSave:
    """A save, complete or in flight, returned by `autopar.save`. ``folder``: the path of the checkpoint."""

    def __init__(self, groups: Groups, target: SaveTarget) -> None:
        self._groups, self._target = groups, target
        self.folder = target.folder
        self._board = board()
        self._rounds = groups.rounds.setdefault("saves", Rounds())
        self._where = self._rounds.next(f"autopar/{groups.name}/saves")
        self._before, self._rounds.left = self._rounds.left, [f"{self._where}/{x}" for x in ("ended", "failed", "done")]
        self._thread: threading.Thread | None = None
        self._outcome: str | None = None
        global _in_flight
        _in_flight = self

    # --- on each rank -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Write on a thread; the interpreter waits for it at exit."""
        ask_at_end(self)
        self._thread = threading.Thread(target=self._run_alone, name="autopar-save")
        try:
            self._thread.start()
        except BaseException as error:
            self._thread = None
            self._target.close()
            self._say(f"rank {self._groups.rank} could not start a thread: {error}")
            raise

    def wait_staged(self) -> None:
        """Wait until the saved tensors may change."""
        self._target.staged.wait()

    @property
    def done(self) -> bool:
        """Whether this rank has written its share (rank 0: whether the checkpoint is complete)."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint is complete. If it fails, raises CheckpointError on all ranks, which names the rank
        that failed; a checkpoint in memory that fails is a warning of rank 0. Collective."""
        global _in_flight
        if _in_flight is self:
            _in_flight = None
        no_longer_ask(self)
        if self._thread is not None:
            self._thread.join()
        if self._outcome is None:
            self._outcome = self._poll(lambda store: look(store, f"{self._where}/done"))
        if self._outcome == "done":
            self._target.completed()
        elif not self._target.optional:
            raise CheckpointError(f"save: {self._outcome}; the previous checkpoint is unchanged")
        elif self._groups.rank == 0:
            warnings.warn(f"save: {self._outcome}; the previous one in memory and those on disk remain", stacklevel=2)

    def exit_errors(self) -> str:
        """The error to report at process exit, if the save failed."""
        try:
            self.wait()
        except RuntimeError as error:
            return str(error)
        return ""

    def _run_alone(self) -> None:
        with contextlib.suppress(Exception):  # wait() raises
            self.run()

    def run(self) -> None:
        """Write this rank's share and report it; rank 0 completes the checkpoint."""
        failure = f"rank {self._groups.rank} was interrupted"
        try:
            try:
                self._target.write()
                failure = ""
            except Exception as error:
                failure = (
                    f"rank {self._groups.rank} could not write {self.folder.name}: {type(error).__name__}: {error}"
                )
            finally:  # rank 0 waits for all
                self._say(failure)
            if self._groups.rank == 0:
                self._complete()
        finally:
            self._target.close()

    def _say(self, failure: str) -> None:
        def tell(store: dist.Store) -> None:
            if failure:
                store.compare_set(f"{self._where}/failed", "", failure[:1000])
            store.add(f"{self._where}/ended", 1)

        self._board.line.ask(tell)

    # --- on rank 0 --------------------------------------------------------------------------------------------

    def _complete(self) -> None:
        world, outcome = self._groups.mesh.world_size, "rank 0 was interrupted"
        try:
            self._poll(lambda store: "all" if store.add(f"{self._where}/ended", 0) == world else "")
            outcome = self._board.line.ask(lambda store: look(store, f"{self._where}/failed")) or self._published()
            if outcome != "done":
                self._target.discard()
        except BaseException as error:
            outcome = f"rank 0 gave up: {error}"
            raise
        finally:
            self._target.close()
            self._board.line.ask(functools.partial(self._tell_outcome, outcome=outcome))

    def _published(self) -> str:
        try:
            self._target.publish()
        except Exception as error:
            return f"rank 0 could not complete {self.folder.name}: {type(error).__name__}: {error}"
        return "done"

    def _tell_outcome(self, store: dist.Store, outcome: str) -> None:
        for key in self._before:  # all ranks have waited for the previous save
            store.delete_key(key)
        store.set(f"{self._where}/done", outcome)

    # --- waiting for others -----------------------------------------------------------------------------------

    def _poll(self, question: Callable[[dist.Store], str]) -> str:
        """Ask until there is an answer. Raises CollectiveError if ranks have failed; on the thread only if the
        job cannot go on, since a rank whose training has raised an error still writes its share."""
        pause, next_look, ranks = 0.001, time.monotonic() + self._board.beat, range(self._groups.mesh.world_size)
        alone = threading.current_thread() is self._thread
        try:
            while not (found := self._board.line.ask(question)):
                time.sleep(pause)
                pause = min(pause * 1.5, 0.05)
                if time.monotonic() > next_look:
                    trouble = self._board.verdict if alone else self._board.trouble(ranks)
                    if trouble and not self._board.line.ask(question):
                        raise self._board.ended("saving", trouble)
                    next_look = time.monotonic() + self._board.beat
        except StoreError as error:
            raise self._board.failed("saving", ranks, error) from error
        return found


def manifest_of(told: Sequence[Mapping[str, Any]], common: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest of a checkpoint, from the reports of all ranks and the values that are equal on them."""
    sums = {file: part["sums"] for part in told for file in part["index"]["files"]}
    return {**joined(told, common), **whole_index(part["index"] for part in told), "sums": sums}


def joined(told: Sequence[Mapping[str, Any]], common: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the run, from the reports of all ranks."""
    optimizers = []
    for i, known in enumerate(common["optimizers"]):
        of_stages = [t["of_stage"]["optimizers"][i] for t in told if t["of_stage"]]
        names = [list(dict.fromkeys(n for g in group for n in g)) for group in zip(*(s["names"] for s in of_stages))]
        states = {name: tree for s in of_stages for name, tree in s["states"].items()}
        optimizers.append({**known, "names": names, "states": states})
    extra = [t["extra"] for t in told if t["extra"]]
    return {**common, "optimizers": optimizers, "extra": extra}
