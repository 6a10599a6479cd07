"""`Server`: requests in, tokens out.

Who drives the steps, one at a time:

    ticket = server.submit(prompt)                      a thread from now on, until `close`
    ticket = server.submit(prompt, background=False)    the thread that waits for the ticket, while it waits
    server.complete(prompts, sampling)                  the calling thread; the same, for several requests
    server.run()                                        the calling thread, until rank 0 closes the server

On several ranks, rank 0 alone decides. The others are in `run`, or make the same calls in the same order, with equal
arguments, and get tickets with the same results: hashes of arguments are compared (`calls`), and nobody can end a
request but rank 0. All ranks close the server.

Weights may change while no request runs, as in an optimizer's step: the next requests are computed with the new ones.

A rank that fails in a step breaks the server: all tickets end with its error, and later calls are refused. What
concerns one request (a grammar, a function of the user's) ends that one alone.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import pickle
import random
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from autopar.runtime.fault.errors import error_context
from autopar.runtime.mesh.process_groups import Groups
from autopar.serving import generate
from autopar.serving.calls import Announcement, CallRefused, Calls, Event, QueueFull
from autopar.serving.control import Control
from autopar.serving.loop import Follower, Leader
from autopar.serving.metrics import Metrics
from autopar.serving.paged_cache import PagedCache
from autopar.serving.requests import Request
from autopar.serving.sampling_params import Sampling
from autopar.serving.scheduler import Scheduler
from autopar.serving.step import Runner
from autopar.serving.ticket import Ticket

OnToken = Callable[[int], bool]


class Server:
    """Serves a runner's model. Collective to make, and to close.

    groups: of the mesh; None: this process is alone. max_length: most tokens of a request, prompt included. vocabulary:
    number of token ids. step_tokens: most tokens of a step. max_running: most requests that run at a time, per replica.
    max_waiting: most that wait, beyond which `submit` raises QueueFull. eos_token_ids: end of text, for requests that
    do not say. generation_config: transformers' defaults of the model, for `generate`.

    Raises ValueError if the cache does not hold one request of ``max_length``.
    """

    def __init__(
        self,
        runner: Runner,
        groups: Groups | None = None,
        *,
        max_length: int,
        vocabulary: int,
        step_tokens: int = 512,
        max_running: int = 64,
        max_waiting: int = 1024,
        eos_token_ids: Sequence[int] = (),
        generation_config: Any = None,
    ) -> None:
        self._runner, self._generation_config = runner, generation_config
        self.max_length, self.max_waiting, self.vocabulary = max_length, max_waiting, vocabulary
        self.eos_token_ids = tuple(eos_token_ids)
        step_tokens = max(step_tokens, max_running)  # all that run may decode in one step
        cache = functools.partial(
            PagedCache, runner.pages, runner.windows, runner.page_size, max_length, step_tokens, runner.page_bytes
        )
        self._empty = lambda: [
            Scheduler(cache(), step_tokens, max_running, runner.stages) for _ in range(runner.replicas)
        ]
        self._schedulers = self._empty()  # per replica
        self._control = Control(groups)
        self._device = None if groups is None or groups.device.type == "cpu" else groups.device
        self._calls = Calls(self._control.rank, self)
        self._leader = Leader(runner, self._control, self._schedulers, self._delivered) if self._control.leads else None
        self._follower = None if self._leader else Follower(runner, self._control, self._calls)
        self._metrics, self._times = Metrics(), dict[int, tuple[float, bool]]()  # id -> (last event, it had a token)
        self._ids, self._made = itertools.count(1), 0  # of requests, number of calls
        self._lock = threading.RLock()  # of calls
        self._driving = threading.Lock()  # of the thread that drives
        self._thread: threading.Thread | None = None
        self._closed = self._ended = False
        self._reports = groups is not None and (self._control.world > 1 or runner.has_other_roles)
        self._error: BaseException | None = None

    # --- calls ----------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling | None = None,
        *,
        on_token: OnToken | None = None,
        want_logits: bool = False,
        want_scores: bool = False,
        background: bool = True,
    ) -> Ticket:
        """Start a request; its tokens come as they are generated.

        prompt: token ids, at least one. on_token: called on rank 0 with each token, in the thread that drives; True:
        the request ends with "stop". want_logits, want_scores: keep the rows of logits, as the model and as the choice
        sees them. background: False: start no thread; steps are driven while somebody waits for a ticket, however many
        requests there are.

        Raises QueueFull, and ValueError for a prompt that cannot be served or a server that has ended.
        """
        more: Any = {"want_logits": want_logits, "want_scores": want_scores, "background": background}
        return self.submit_all([prompt], sampling, on_token=[on_token], **more)[0]

    def submit_n(self, prompt: Sequence[int], n: int, sampling: Sampling | None = None, **more: Any) -> list[Ticket]:
        """``n`` requests of one prompt, which is computed once. Their seeds are successive if ``sampling`` has one;
        other arguments as of `submit_all`."""
        chosen = sampling or Sampling()
        seeds = [None if chosen.seed is None else chosen.seed + i for i in range(n)]
        return self.submit_all([prompt] * n, [dataclasses.replace(chosen, seed=seed) for seed in seeds], **more)

    def submit_all(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        on_token: Sequence[OnToken | None] | None = None,
        want_logits: bool = False,
        want_scores: bool = False,
        background: bool = True,
    ) -> list[Ticket]:
        """Start a request for each prompt, all or none. ``sampling``, ``on_token``: for all, or one for each; other
        arguments and errors as of `submit`."""
        requests = self._requests(prompts, sampling, on_token, want_logits, want_scores)
        with self._lock:
            tickets = self._call(requests, background)
            if background:
                self.start()
        return tickets

    def complete(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling] | None = None, **more: Any
    ) -> list[Ticket]:
        """Requests of all prompts, however many, when they have finished; arguments as of `submit_all`.

        Raises ValueError as `submit` does, or if other ranks make the call with other arguments, and the error of a
        step. A request that failed on its own does not raise: see its ``error``.
        """
        tickets = self.submit_all(prompts, sampling, background=False, **more)
        for ticket in tickets:
            ticket.wait()
            if isinstance(ticket.error, CallRefused):
                raise ticket.error
        if self._error is not None:
            raise self._error
        return tickets

    def generate(self, *given: Any, **arguments: Any) -> Any:
        """transformers' `generate`, with its arguments and results, for prompts of one or several rows
        (`autopar.serving.generate`). All ranks call it alike. Raises ValueError that names an argument which is wrong
        or not served."""
        submit = functools.partial(self.submit, background=False)
        return generate.generate(submit, self.generation_config, *given, max_positions=self.max_length, **arguments)

    def generate_batch(self, inputs: Sequence[Sequence[int]], *given: Any, **arguments: Any) -> Any:
        """transformers' `generate_batch`: the results of prompts of any lengths by request id."""
        submit = functools.partial(self.submit, background=False)
        return generate.generate_batch(submit, self.generation_config, inputs, *given, **arguments)

    @property
    def generation_config(self) -> Any:
        """The defaults of `generate`: the model's, or transformers'."""
        if self._generation_config is None:
            from transformers import GenerationConfig

            self._generation_config = GenerationConfig()
        return self._generation_config

    def _requests(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | Sequence[Sampling] | None,
        on_token: Sequence[OnToken | None] | None,
        want_logits: bool,
        want_scores: bool,
    ) -> list[Request]:
        """Checked, without ids."""
        count = len(prompts)
        given = [sampling or Sampling()] * count if sampling is None or isinstance(sampling, Sampling) else [*sampling]
        heard = [None] * count if on_token is None else [*on_token]
        if len(given) != count or len(heard) != count:
            raise ValueError(
                f"serve: needs one sampling and one on_token for each of {count} prompts, found {len(given)} and "
                f"{len(heard)}; give one for all, or as many as prompts"
            )
        full = {key: self._checked(one) for key, one in {id(one): one for one in given}.items()}
        return [
            Request(0, self._prompt(prompt), full[id(one)], _seed(one), self.max_length, on, want_logits, want_scores)
            for prompt, one, on in zip(prompts, given, heard)
        ]

    def _prompt(self, prompt: Sequence[int]) -> tuple[int, ...]:
        tokens = tuple(map(int, prompt))
        if not 0 < len(tokens) < self.max_length:
            way_out = "shorten it, or raise max_length" if tokens else "begin with the token for the start of text"
            raise ValueError(f"serve: a prompt needs 1 to {self.max_length - 1} tokens, found {len(tokens)}; {way_out}")
        self._check_ids("a prompt", tokens)
        return tokens

    def _checked(self, sampling: Sampling) -> Sampling:
        sampling.check_ids(self.vocabulary)
        if sampling.eos_token_ids is None:
            sampling = dataclasses.replace(sampling, eos_token_ids=self.eos_token_ids)
        self._check_ids("sampling.stop_token_ids", sampling.end_ids)
        if sampling.processors and self._control.world > 1:
            try:
                pickle.dumps(sampling.processors)
            except Exception as error:
                raise ValueError(
                    f"serve: sampling.processors are sent to all ranks and must be picklable, found {error}; use "
                    "functions or classes of a module"
                ) from error
        return sampling

    def _check_ids(self, what: str, ids: Any) -> None:
        if ids and not (min(ids) >= 0 and max(ids) < self.vocabulary):
            wrong = next(token for token in ids if not 0 <= token < self.vocabulary)
            raise ValueError(
                f"serve: {what} needs token ids from 0 to {self.vocabulary - 1}, found {wrong}; use the tokenizer of "
                "this model"
            )

    def _call(self, requests: list[Request], background: bool) -> list[Ticket]:
        """Make a call: its tickets."""
        with self._lock:
            self._refuse_if_over()
            self._made = number = self._made + 1
            digest = _digest(requests) if self._control.world > 1 else b""
            if self._leader is None:
                return self._calls.make(number, digest, [request.prompt for request in requests])
            waiting = self._leader.waiting
            if background and waiting + len(requests) > self.max_waiting:
                error = QueueFull(
                    f"serve: {waiting} of at most {self.max_waiting} requests wait, no room for {len(requests)} more; "
                    "try again later, or raise max_waiting"
                )
                self._leader.add(Announcement(number, digest, (), error=error))
                raise error
            for request in requests:
                request.id = next(self._ids)
                self._times[request.id] = time.monotonic(), False
            tickets = [self._calls.hold(request.id, request.prompt) for request in requests]
            # Ranks whose threads drive may make the call later.
            asks = not background and self._thread is None
            self._leader.add(Announcement(number, digest, tuple(one.id for one in requests), asks), requests)
            return tickets

    # --- driving --------------------------------------------------------------------------------------------------

    @property
    def _loop(self) -> Leader | Follower:
        loop = self._leader or self._follower
        assert loop is not None
        return loop

    @property
    def _ending(self) -> bool:
        """Whether this rank is to end the loop."""
        return self._closed and self._leader is not None

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        """Context manager: an error in it breaks the server, except that Ctrl-C aborts all requests where no other rank
        is in the midst of a step."""
        try:
            with error_context("serving") if self._reports else contextlib.nullcontext():
                yield
                if self._loop.over and not self._ended:
                    self._ended = True
                    self._runner.end()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and self._leader is not None and not self._reports:
                self._schedulers[:] = self._empty()  # it may have come anywhere
                self._leader.restart()
                self._times.clear()
                self._calls.finish("abort")
                raise
            self._error = error
            self._runner.end(error)
            self._loop.give_up(error)
            self._calls.finish("error", error)
            raise

    def drive(self, until: Callable[[], bool], timeout: float | None) -> None:
        """Drive steps in this thread until the condition holds, if no other thread does; else a thread goes on when
        that one stops. A ``timeout`` has no effect on several ranks, which must stop at the same message."""
        end = None if timeout is None or self._control.world > 1 else time.monotonic() + timeout
        with self._lock:
            if until() or self._error is not None or self._loop.over:
                return
            if self._thread is not None or not self._driving.acquire(blocking=False):
                return self.start()
        try:
            with self._breaking():
                self._loop.run(lambda: until() or self._ending or (end is not None and time.monotonic() > end))
        finally:
            self._driving.release()

    def start(self) -> None:
        """Drive steps in a thread from now on."""
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._in_background, name="autopar-serve", daemon=True)
                self._thread.start()
                atexit.register(self.close)  # or the interpreter would go while it runs

    def abort(self, request: int) -> None:
        """End a request of rank 0."""
        if self._leader is not None:
            self._leader.abort(request)

    def _in_background(self) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)  # the current device is per thread
        with contextlib.suppress(BaseException):  # all tickets have it
            self._drive()

    def _drive(self) -> None:
        """Until the server is closed."""
        self._refuse_if_over()
        with self._driving, self._breaking():
            if self._error is None and not self._loop.over:
                self._loop.run(lambda: self._ending)
                if self._leader is not None:
                    self._leader.end()

    def run(self) -> None:
        """Drive steps until the server is closed, on rank 0. Raises the error that breaks the server."""
        self._calls.ignores = self._leader is None
        self._drive()

    def _refuse_if_over(self) -> None:
        if self.failure:
            raise ValueError(f"serve: the server ended by an error ({self.failure}); make a new one")
        if self._closed or (self._loop.over and not self._calls.knows(self._made + 1)):
            raise ValueError("serve: the server is closed; make a new one")

    @property
    def failure(self) -> str | None:
        """The error that ended the server; None while it can generate."""
        return None if self._error is None else f"{type(self._error).__name__}: {self._error}"

    def release(self) -> None:
        """Free the memory of the cache until the next request. Nothing may run. All ranks call it."""
        self._runner.release()

    def weights_changed(self) -> None:
        """To be called when weights have changed in a way that tensors do not record, such as ``p.data.copy_``, before
        the next call: keys and values of earlier requests are not used again. Changes of optimizers and
        ``load_state_dict`` are noticed without it. It does nothing on ranks other
        than 0."""
        if self._leader is not None:
            self._leader.weights_changed()

    def close(self) -> None:
        """Abort what runs and end the server, on all ranks: those other than 0 wait until rank 0 does."""
        with self._lock:
            first, self._closed = not self._closed, True
            thread = self._thread
        if not first or self._error is not None:
            return
        atexit.unregister(self.close)
        if self._leader is not None:
            self._leader.wake()
        if thread is not None:
            thread.join()
        with self._driving:
            if self._error is None and not self._loop.over:
                with self._breaking():
                    self._leader.end() if self._leader is not None else self._loop.run(lambda: False)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def traffic(self) -> Any:
        """Bytes that this rank has sent so far to other stages, or to ranks of experts: (axis, kind) -> `Traffic`."""
        return self._runner.traffic

    @property
    def timeline(self) -> list[Any]:
        """Where experts are on ranks of their own: when this rank computed what in the last step, a list of
        `autopar.cost.ping_pong.Interval` in seconds of `time.time`; `autopar.report.disaggregation_summary.drawn` draws
        those of all ranks."""
        return self._runner.timeline

    # --- metrics --------------------------------------------------------------------------------------------------

    def _delivered(self, events: Sequence[Event]) -> None:
        """On rank 0: feed tickets, and measure."""
        now, metrics = time.monotonic(), self._metrics
        for event in events:
            if event.chosen is not None:
                last, is_next = self._times[event.request]
                (metrics.next_token if is_next else metrics.first_token).observe(now - last)
                self._times[event.request] = now, True
                metrics.generated_tokens += 1
            if event.reason is not None:
                del self._times[event.request]
                metrics.finished[event.reason] = metrics.finished.get(event.reason, 0) + 1
        self._calls.deliver(events)

    def metrics(self) -> Metrics:
        """What rank 0 has counted, now; zeros on other ranks."""
        if self._leader is None:
            return Metrics()
        pools = [pool for scheduler in self._schedulers for pool in scheduler.cache.pools]
        free = sum(pool.free for pool in pools)
        return dataclasses.replace(
            self._metrics,
            running=sum(len(group) for scheduler in self._schedulers for group in scheduler.running),
            waiting=self._leader.waiting,
            pages_used=sum(pool.pages - 1 for pool in pools) - free,
            pages_free=free,
            prompt_tokens=sum(scheduler.prompt_tokens for scheduler in self._schedulers),
            cached_tokens=sum(scheduler.cached_tokens for scheduler in self._schedulers),
            preempted=sum(scheduler.preempted for scheduler in self._schedulers),
            steps=self._leader.steps,
        )


def _seed(sampling: Sampling) -> int:
    return random.SystemRandom().getrandbits(63) if sampling.seed is None else sampling.seed


def _digest(requests: Sequence[Request]) -> bytes:
    """Of what must be the same on all ranks: all that can be compared, so no functions and grammars. Seeds are those of
    rank 0."""
    found = hashlib.blake2b(digest_size=16)
    for request in requests:
        sampling = request.sampling
        fields = [(f.name, getattr(sampling, f.name)) for f in dataclasses.fields(sampling)]
        compared = [field for field in fields if field[0] not in ("grammar", "processors", "seed")]
        found.update(array("q", request.prompt).tobytes())
        found.update(repr((compared, request.want_logits, request.want_scores)).encode())
    return found.digest()
