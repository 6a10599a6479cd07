"""An engine without a model: each request gets a token of a fixed text per step of a thread. And a server of it."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import tokenizers
import uvicorn
from transformers import PreTrainedTokenizerFast

from autopar.integrations.http.app import make_app
from autopar.integrations.http.engine import ServedModel
from autopar.serving.calls import QueueFull
from autopar.serving.metrics import Histogram, Metrics
from autopar.serving.requests import FinishReason
from autopar.serving.sampling_params import Grammar, Sampling
from autopar.serving.step import Chosen
from autopar.serving.ticket import Driver, Ticket

EOS = 256
VOCABULARY = 260  # 256 bytes, <eos>, <user>, <assistant>, and one id that stands for nothing
TEXT = "Ein Käse für 3 €: ☃ und 🧀. "
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer(template: str | None = TEMPLATE) -> Any:
    """A token for each byte: id i stands for byte i."""
    alphabet = _byte_characters()
    model = tokenizers.models.BPE({alphabet[i]: i for i in range(256)}, [])
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<eos>", "<user>", "<assistant>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", chat_template=template)


def _byte_characters() -> list[str]:
    """How byte-level tokenizers write the bytes 0 to 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = itertools.count(256)
    return [chr(i if i in printable else next(others)) for i in range(256)]


class FakeTicket(Ticket):
    """A request of the fake engine. ``script``: what it will generate."""

    def __init__(
        self,
        prompt: Sequence[int],
        engine: Driver,
        sampling: Sampling,
        script: list[int],
        on_token: Callable[[int], bool] | None,
    ) -> None:
        super().__init__(prompt, engine)
        self.sampling, self.script, self.on_token, self.aborted = sampling, script, on_token, False


@dataclass
class FakeEngine:
    """``delay``: seconds per step. ``most``: requests that it takes at once. ``fails_at``: a prompt of this many tokens
    fails after three of its own."""

    delay: float = 0.0
    most: int = 1000
    fails_at: int = -1
    failure: str | None = None
    text: str = TEXT
    vocabulary: int = VOCABULARY
    max_length: int = 200
    eos_token_ids: tuple[int, ...] = (EOS,)
    tickets: list[FakeTicket] = field(default_factory=list)
    running: list[FakeTicket] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        self._lock, self._closed = threading.Lock(), False
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def submit_all(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[Sampling],
        *,
        on_token: Sequence[Callable[[int], bool] | None],
    ) -> Sequence[FakeTicket]:
        if any(len(prompt) == 13 for prompt in prompts):
            raise ValueError("prompt: 13 tokens bring bad luck; use another number")
        with self._lock:
            if len(self.running) + len(prompts) > self.most:
                raise QueueFull(f"queue: at most {self.most} requests, found another; try again later")
            new = [FakeTicket(p, self, s, self._answer(s), on) for p, s, on in zip(prompts, sampling, on_token)]
            for ticket in new:
                ticket.request = len(self.tickets)
                self.tickets.append(ticket)
            self.running += new
        return new

    def _answer(self, sampling: Sampling) -> list[int]:
        text = [*self.text.encode()]
        shift = 0 if sampling.temperature == 0 or sampling.seed is None else sampling.seed
        whole = [*text[shift:], *itertools.islice(itertools.cycle(text), 10_000)]
        return whole if sampling.ignore_eos or sampling.max_tokens is not None else [*text, EOS]

    def abort(self, request: int) -> None:
        self.tickets[request].aborted = True

    def start(self) -> None:
        """The thread runs already."""

    def drive(self, until: Callable[[], bool], timeout: float | None) -> None:
        """The same."""

    def metrics(self) -> Metrics:
        generated, prompt = sum(len(t.tokens) for t in self.tickets), sum(len(t.prompt) for t in self.tickets)
        finished = Counter(str(t.finish_reason) for t in self.tickets if t.finish_reason)
        durations = Histogram((0.1, 0.2), [3, 2, 1], 1.5)
        return Metrics(
            running=len(self.running), pages_used=5, pages_free=6, generated_tokens=generated, prompt_tokens=prompt,
            cached_tokens=2, steps=self.steps, finished=finished, first_token=durations, next_token=durations,
        )  # fmt: skip

    def close(self) -> None:
        self._closed = True
        self._thread.join(10)

    def _loop(self) -> None:
        while not self._closed:
            time.sleep(self.delay or 1e-4)
            self.steps += 1
            with self._lock:
                self.running = [ticket for ticket in self.running if self._step(ticket)]

    def _step(self, ticket: FakeTicket) -> bool:
        """Whether the request goes on."""
        sampling = ticket.sampling
        if ticket.aborted:
            return self._end(ticket, "abort")
        if self.failure:
            return self._end(ticket, "error", RuntimeError(self.failure))
        if len(ticket.prompt) == self.fails_at and len(ticket.tokens) == 3:
            return self._end(ticket, "error", RuntimeError("the kernel of this request broke"))
        token = ticket.script[len(ticket.tokens)] if sampling.grammar is None else _allowed(sampling.grammar)
        top, wanted = ((token, -0.5), (65, -1.5)), sampling.logprobs
        stops = ticket.on_token is not None and ticket.on_token(token)
        ticket.add(Chosen(token) if wanted is None else Chosen(token, -0.5, top[:wanted]))
        if stops or token in (EOS, *sampling.stop_token_ids) or (sampling.grammar and sampling.grammar.finished):
            return self._end(ticket, "stop")
        return len(ticket.tokens) != sampling.max_tokens or self._end(ticket, "length")

    def _end(self, ticket: FakeTicket, reason: FinishReason, error: Exception | None = None) -> bool:
        ticket.finish(reason, error)
        return False


def _allowed(grammar: Grammar) -> int:
    mask = int.from_bytes(grammar.bitmask() or b"", "little")
    token = next(i for i in (*b'"}]0ab:,{[', *range(VOCABULARY)) if mask >> i & 1)
    grammar.accept(token)
    return token


@contextlib.contextmanager
def serving(engine: FakeEngine, **changes: Any) -> Iterator[str]:
    """The address of a server in a thread."""
    served = ServedModel(**{"name": "tiny", "engine": engine, "tokenizer": tokenizer()} | changes)
    config = uvicorn.Config(make_app(served), port=0, log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    _until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server did not end"
        engine.close()
        served.thread.shutdown()


def _until(true: Callable[[], Any], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def until_idle(engine: FakeEngine) -> None:
    """Wait until every request has ended."""
    _until(lambda: not engine.running)
    assert all(ticket.finish_reason for ticket in engine.tickets)


def client_of(address: str) -> openai.OpenAI:
    """openai's own client."""
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=20)


def post(address: str, path: str, **body: Any) -> httpx.Response:
    """A request that openai's client would not make."""
    return httpx.post(f"{address}/v1/{path}", json=body, timeout=20)
