"""transformers' `generate` and `generate_batch` on requests: their arguments, and their results.

`requests_of` reads the arguments, `outputs_of` makes the result; `generate` and `generate_batch` do both around a
function that submits requests (`Submit`), such as that of a server.

Where transformers depends on padding, a prompt is treated as if it were alone: processors and
``prefix_allowed_tokens_fn`` see its tokens without padding. Rows that have ended have zeros in ``scores`` and
``logits``, where transformers has those of padding. Draws come from the seeds of requests, which are taken from torch's
default generator; so `torch.manual_seed` makes them repeatable.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from autopar.serving.generation_config import (
    WITHOUT,
    check,
    check_unused,
    merged,
    new_tokens,
    own_processors,
    sampling_of,
    token_ids,
)
from autopar.serving.sampling_params import Sampling
from autopar.serving.text import StopStrings
from autopar.values import refuse

Seeds = Callable[[int], list[int]]
_WITHOUT_EFFECT = "trust_remote_code", "logits_to_keep"
_TOP_K = 50  # transformers' default of `generate`


class Ticket(Protocol):
    """A submitted request. logits, scores: [vocabulary] of each token, if asked for."""

    tokens: list[int]
    logprobs: list[float | None]
    logits: list[Tensor]
    scores: list[Tensor]

    def __iter__(self) -> Iterator[int]:
        """Its tokens as they come; raises its error."""

    def result(self) -> list[int]:
        """All its tokens, when it has finished; raises its error."""

    def abort(self) -> None:
        """End it; without effect once it has finished."""


class Row(NamedTuple):
    """One request of a call."""

    prompt: Sequence[int]
    sampling: Sampling
    want_logits: bool = False
    want_scores: bool = False


class Share(NamedTuple):
    """Requests of all ranks that make a call, and which of them are this rank's own."""

    rows: list[Row]
    own: slice = slice(None)


class Submit(Protocol):
    """Hands a request to a server. ``on_token`` is called with each token in order; True: the request ends there."""

    def __call__(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        on_token: Callable[[int], bool] | None = None,
        want_logits: bool = False,
        want_scores: bool = False,
    ) -> Ticket: ...


@dataclass
class Requests:
    """What a call of `generate` asks for: a request per row."""

    prompts: list[list[int]]
    samplings: list[Sampling]
    input_ids: Tensor  # [rows, width], as the result begins with
    config: Any  # the merged GenerationConfig
    tokenizer: Any = None  # of stop strings
    streamer: Any = None

    @property
    def want_logits(self) -> bool:
        return bool(self.config.return_dict_in_generate and self.config.output_logits)

    @property
    def want_scores(self) -> bool:
        return bool(self.config.return_dict_in_generate and self.config.output_scores)

    @property
    def rows(self) -> list[Row]:
        """Each request."""
        wanted = self.want_logits, self.want_scores
        return [Row(prompt, sampling, *wanted) for prompt, sampling in zip(self.prompts, self.samplings, strict=True)]

    def on_token(self, row: Row) -> Callable[[int], bool] | None:
        """What ends a row at its stop strings."""
        stop = row.sampling.stop
        return StopStrings(self.tokenizer, stop, row.prompt) if stop else None


def requests_of(
    defaults: Any,
    inputs: Tensor | None = None,
    generation_config: Any = None,
    logits_processor: Sequence[Any] | None = None,
    stopping_criteria: Sequence[Any] | None = None,
    prefix_allowed_tokens_fn: Callable[[int, Tensor], Sequence[int]] | None = None,
    synced_gpus: bool | None = None,
    assistant_model: Any = None,
    streamer: Any = None,
    negative_prompt_ids: Tensor | None = None,
    negative_prompt_attention_mask: Tensor | None = None,
    custom_generate: Any = None,
    *,
    max_positions: int | None = None,
    seeds: Seeds | None = None,
    **arguments: Any,
) -> Requests:
    """The requests of a call with the arguments of transformers' `generate`. ``defaults``: the model's
    GenerationConfig; ``max_positions``: most tokens of a request; ``seeds``: draws so many seeds, as
    `seeds_of_torch` does (which needs equal generators where several ranks make the call).

    Raises ValueError that names the argument which is wrong or not served.
    """
    arguments = {
        name: value for name, value in arguments.items() if name not in ("trust_remote_code", "logits_to_keep")
    }
    inputs = arguments.pop("input_ids", None) if inputs is None else inputs
    mask, tokenizer = arguments.pop("attention_mask", None), arguments.pop("tokenizer", None)
    refused = {
        "stopping_criteria": stopping_criteria,
        "assistant_model": assistant_model,
        "negative_prompt_ids": negative_prompt_ids,
        "negative_prompt_attention_mask": negative_prompt_attention_mask,
        "custom_generate": custom_generate,
    }
    if found := [name for name, value in refused.items() if value is not None and value != []]:
        raise ValueError(f"generate: expected arguments that are served, found {found[0]}{WITHOUT}")
    config, unused = merged(defaults, generation_config, arguments)
    check_unused(unused, ("input_ids", "attention_mask", "tokenizer", "streamer", "generation_config"))
    check(config)
    if config.stop_strings and tokenizer is None:
        raise ValueError("generate: expected a tokenizer with stop_strings, found none; pass tokenizer=")
    input_ids = _checked_inputs(inputs, config)
    prompts = _without_padding(input_ids, mask, config)
    limits = new_tokens(config, input_ids.shape[1], max_positions)
    longest = max(map(len, prompts))
    if max_positions is not None and longest + limits[1] > max_positions:
        raise ValueError(
            f"generate: a request has at most {max_positions} tokens, found a prompt of {longest} and up to "
            f"{limits[1]} new ones; lower max_new_tokens to {max_positions - longest}, or raise the max_length of the "
            "server"
        )
    own = own_processors(logits_processor, config)
    copies = config.num_return_sequences or 1
    if streamer is not None and len(prompts) * copies > 1:
        raise refuse("generate: streamer", "one prompt and one sequence with it", len(prompts) * copies)
    prompts = [prompt for prompt in prompts for _ in range(copies)]
    samplings = [sampling_of(config, len(prompt), limits, _TOP_K, own) for prompt in prompts]
    samplings = _with_seeds(samplings, seeds or seeds_of_torch)
    if prefix_allowed_tokens_fn is not None:
        samplings = [
            replace(sampling, grammar=_AllowedByFunction(prefix_allowed_tokens_fn, row, list(prompt)))
            for row, (sampling, prompt) in enumerate(zip(samplings, prompts, strict=True))
        ]
    return Requests(prompts, samplings, input_ids.repeat_interleave(copies, 0), config, tokenizer, streamer)


def _checked_inputs(inputs: Any, config: Any) -> Tensor:
    if inputs is None:
        if config.bos_token_id is None:
            raise ValueError("generate: expected input_ids, found none and no bos_token_id; pass token ids")
        return torch.tensor([[config.bos_token_id]])
    if not isinstance(inputs, Tensor) or inputs.dim() != 2 or inputs.is_floating_point() or not inputs.numel():
        shown = list(inputs.shape) if isinstance(inputs, Tensor) else inputs
        raise refuse("generate: input_ids", "a tensor of token ids [rows, length]", shown)
    return inputs


def _without_padding(input_ids: Tensor, mask: Any, config: Any) -> list[list[int]]:
    """The prompts. Without a mask, padding tokens are masked if they are no end of text, as in transformers."""
    pad = config.pad_token_id
    if mask is None:
        told_apart = pad is not None and pad not in token_ids(config.eos_token_id)
        mask = input_ids != pad if told_apart else torch.ones_like(input_ids)
    elif not isinstance(mask, Tensor) or mask.shape != input_ids.shape:
        shown = list(mask.shape) if isinstance(mask, Tensor) else mask
        raise refuse("generate: attention_mask", f"a tensor of shape {list(input_ids.shape)}, as input_ids", shown)
    prompts = []
    for row, (ids, kept) in enumerate(zip(input_ids.tolist(), (mask != 0).tolist(), strict=True)):
        length = sum(kept)
        if not length or not all(kept[-length:]):
            where = "tokens" if not length else "padding at the left alone"
            raise ValueError(
                f"generate: expected {where} in row {row} of input_ids, found a mask of {[int(k) for k in kept][:20]}; "
                "pad prompts at the left and pass their attention_mask"
            )
        prompts.append(ids[-length:])
    return prompts


def seeds_of_torch(number: int) -> list[int]:
    """Seeds from torch's default generator."""
    found: list[int] = torch.randint(2**63 - 1, (number,)).tolist()
    return found


def _with_seeds(samplings: list[Sampling], seeds: Seeds) -> list[Sampling]:
    """Greedy requests draw none."""
    greedy = all(sampling.greedy for sampling in samplings)
    drawn = [0] * len(samplings) if greedy else seeds(len(samplings))
    return [replace(sampling, seed=seed) for sampling, seed in zip(samplings, drawn, strict=True)]


@dataclass
class _AllowedByFunction:
    """A `Grammar` of transformers' ``prefix_allowed_tokens_fn``."""

    function: Callable[[int, Tensor], Sequence[int]]
    row: int
    ids: list[int]
    finished: bool = False

    def bitmask(self) -> bytes:
        bits = 0
        for token in self.function(self.row, torch.tensor(self.ids)):
            bits |= 1 << int(token)
        return bits.to_bytes(-(-bits.bit_length() // 8), "little")

    def accept(self, token: int) -> None:
        self.ids.append(token)


def outputs_of(
    requests: Requests,
    tokens: Sequence[Sequence[int]],
    logits: Sequence[Sequence[Tensor]] = (),
    scores: Sequence[Sequence[Tensor]] = (),
) -> Any:
    """The result of `generate`: int64 [rows, width + new tokens], padded at the right, or a
    GenerateDecoderOnlyOutput. ``tokens``, ``logits``, ``scores``: of each row, those generated."""
    config, most = requests.config, max(map(len, tokens))
    pad = next(iter([*token_ids(config.pad_token_id), *token_ids(config.eos_token_id)]), None)
    if pad is None and any(len(row) < most for row in tokens):
        raise ValueError("generate: expected a pad_token_id for rows of different lengths, found none; pass one")
    new = torch.tensor([[*row, *[pad] * (most - len(row))] for row in tokens], dtype=torch.int64)
    sequences: Any = torch.cat([requests.input_ids.long(), new.to(requests.input_ids.device)], 1)
    if not config.return_dict_in_generate:
        return sequences
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    found = _steps(scores, most) if requests.want_scores else None
    if found is not None and config.renormalize_logits:
        found = tuple(step.log_softmax(-1) for step in found)
    return GenerateDecoderOnlyOutput(
        sequences=sequences, scores=found, logits=_steps(logits, most) if requests.want_logits else None
    )


def _steps(rows: Sequence[Sequence[Tensor]], most: int) -> Any:
    """Per step [rows, vocabulary] in float32."""
    nothing = torch.zeros_like(rows[0][0], dtype=torch.float32)
    return tuple(
        torch.stack([row[step].float() if step < len(row) else nothing for row in rows]) for step in range(most)
    )


def generate(submit: Submit, defaults: Any, /, *given: Any, **arguments: Any) -> Any:
    """transformers' `generate`: arguments of `requests_of`, result of `outputs_of`."""
    return finished(submit, requests_of(defaults, *given, **arguments))


def finished(submit: Submit, requests: Requests, share: Share | None = None) -> Any:
    """The result of `generate`, for this rank's own rows of a ``share``."""
    tickets: list[Ticket] = []
    rows, own = share or Share(requests.rows)
    with _aborted_on_error(tickets):
        for row in rows:
            wanted = {"want_logits": row.want_logits, "want_scores": row.want_scores}
            tickets.append(submit(row.prompt, row.sampling, on_token=requests.on_token(row), **wanted))
        if requests.streamer is not None:
            _stream(requests, tickets[own][0])
        for ticket in tickets:  # all of them: steps are driven as long as any rank waits
            ticket.result()
    mine = tickets[own]
    return outputs_of(requests, [t.tokens for t in mine], [t.logits for t in mine], [t.scores for t in mine])


@contextmanager
def _aborted_on_error(tickets: list[Ticket]) -> Iterator[None]:
    """Nobody would read what the others generate."""
    try:
        yield
    except BaseException:
        for ticket in tickets:
            ticket.abort()
        raise


def _stream(requests: Requests, tokens: Iterable[int]) -> None:
    """As transformers does: the prompt [1, length], each token [1], the end."""
    requests.streamer.put(requests.input_ids.cpu())
    for token in tokens:
        requests.streamer.put(torch.tensor([token]))
    requests.streamer.end()


# --- generate_batch -------------------------------------------------------------------------------------------


@dataclass
class GenerationOutput:
    """The result of one request, with the attributes of transformers'.

    logprobs: of the generated tokens, if ``continuous_batching_config.return_logprobs``. status: its RequestStatus.
    lifespan: times of the first and the last token; timestamps: of each, if asked for. error: why it failed.
    """

    request_id: str
    prompt_ids: list[int] = field(default_factory=list)
    generated_tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    error: str | None = None
    status: Any = None
    created_time: float = field(default_factory=time.perf_counter)
    lifespan: tuple[float, float] = (-1, -1)
    timestamps: list[float] | None = None

    def is_finished(self) -> bool:
        """Whether it has ended, with or without an error."""
        return bool(self.status.value >= 3)


@dataclass
class Batch:
    """What a call of `generate_batch` asks for: requests by id."""

    prompts: dict[str, list[int]]
    samplings: list[Sampling]
    record_timestamps: bool = False

    @property
    def rows(self) -> list[Row]:
        """Each request."""
        return [Row(prompt, sampling) for prompt, sampling in zip(self.prompts.values(), self.samplings, strict=True)]


def batch_of(
    defaults: Any,
    inputs: Sequence[Sequence[int]],
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    record_timestamps: bool = False,
    progress_bar: bool = False,
    persistent_manager: bool = False,
    warmup: bool = True,
    *,
    seeds: Seeds | None = None,
    **arguments: Any,
) -> Batch:
    """The requests of a call with the arguments of transformers' `generate_batch`: "req_0", ...; further sequences of
    a prompt are "req_0__child#0", ...

    ``generation_config`` stands alone: the model's is taken only without one. How the cache, the batches and the
    progress are set up has no effect. ``seeds``: as of `requests_of`. Raises ValueError that names the argument which
    is wrong or not served.
    """
    config, unused = merged(type(defaults)(), defaults if generation_config is None else generation_config, arguments)
    check_unused(unused, ("inputs", "generation_config", "continuous_batching_config"))
    check(config)
    if config.stop_strings:
        raise ValueError("generate_batch: expected no stop_strings, for want of a tokenizer, found some; use generate")
    limits = config.min_new_tokens or 0, config.max_new_tokens
    logprobs = 0 if getattr(continuous_batching_config, "return_logprobs", False) else None
    copies = config.num_return_sequences or 1
    prompts = {
        name: list(prompt)
        for i, prompt in enumerate(inputs)
        for name in [*(f"req_{i}__child#{n}" for n in range(copies - 1)), f"req_{i}"]
    }
    samplings = [sampling_of(config, len(prompt), limits) for prompt in prompts.values()]
    samplings = [replace(sampling, logprobs=logprobs, processed_logprobs=True) for sampling in samplings]
    return Batch(prompts, _with_seeds(samplings, seeds or seeds_of_torch), record_timestamps)


def generate_batch(submit: Submit, defaults: Any, /, *given: Any, **arguments: Any) -> dict[str, GenerationOutput]:
    """transformers' `generate_batch`: the results of prompts without padding, by request id, with the arguments of
    `batch_of`. A request that fails has ``error`` and ends no other."""
    return finished_batch(submit, batch_of(defaults, *given, **arguments))


def finished_batch(submit: Submit, batch: Batch, share: Share | None = None) -> dict[str, GenerationOutput]:
    """The result of `generate_batch`, for this rank's own rows of a ``share``."""
    rows, own = share or Share(batch.rows)
    running = [_Running(GenerationOutput("", list(row.prompt)), batch.record_timestamps) for row in rows]
    for name, one in zip(batch.prompts, running[own], strict=True):
        one.output.request_id = name
    tickets: list[Ticket] = []
    with _aborted_on_error(tickets):
        for one, row in zip(running, rows, strict=True):
            tickets += one.submitted(submit, row.sampling)
        outputs = [one.finished() for one in running]
        return {output.request_id: output for output in outputs[own]}


class _Running:
    """A request, its ticket, and when its tokens came."""

    def __init__(self, output: GenerationOutput, record_timestamps: bool) -> None:
        self.output, self._record, self._times = output, record_timestamps, list[float]()
        self._tickets: list[Ticket] = []

    def submitted(self, submit: Submit, sampling: Sampling) -> list[Ticket]:
        """Its ticket; none if it is refused."""
        try:
            self._tickets = [submit(self.output.prompt_ids, sampling, on_token=self._on_token)]
        except ValueError as error:
            self.output.error = str(error)
        return self._tickets

    def _on_token(self, token: int) -> bool:
        self._times.append(time.perf_counter())
        return False

    def finished(self) -> GenerationOutput:
        """The result, when it has ended."""
        from transformers.generation.continuous_batching import RequestStatus

        output = self.output
        for ticket in self._tickets:
            try:
                ticket.result()
            except Exception as error:
                output.error = str(error)
            output.generated_tokens = list(ticket.tokens)
            output.logprobs = [value for value in ticket.logprobs if value is not None]
        output.status = RequestStatus.FINISHED if output.error is None else RequestStatus.FAILED
        if self._times:
            output.lifespan = self._times[0], self._times[-1]
        output.timestamps = list(self._times) if self._record else None
        return output
