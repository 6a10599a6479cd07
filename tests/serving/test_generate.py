"""transformers' `generate` and `generate_batch` on requests: the same arguments, and the same results."""

from __future__ import annotations

import copy
import math
import pickle
import string
from collections.abc import Sequence
from typing import Any

import pytest
import scipy.stats
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.generation import LogitsProcessor, LogitsProcessorList, SuppressTokensLogitsProcessor
from transformers.generation.continuous_batching import RequestStatus
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from autopar.serving import generation_config as tables
from autopar.serving.generate import generate, generate_batch, requests_of
from tests.serving.reference_engine import ReferenceEngine

pytestmark = pytest.mark.filterwarnings("ignore:Using the model-agnostic default `max_length`")
V = 61
PROMPTS = [[5, 17, 3, 44], [9], [8, 8, 31, 2, 60, 7, 19], [23, 40]]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.4,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def ours(model: LlamaForCausalLM, *given: Any, **arguments: Any) -> Any:
    engine = ReferenceEngine(model, V)
    return generate(engine.submit, model.generation_config, *given, max_positions=64, **arguments)


def padded(prompts: Sequence[Sequence[int]], pad: int = 0) -> tuple[Tensor, Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


class Halved(LogitsProcessor):
    supports_continuous_batching = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.where(torch.arange(scores.shape[1]) < input_ids[:, -1:] % 30, scores / 2, scores)


def only_even(row: int, ids: Tensor) -> list[int]:
    return [i for i in range(V) if (i + len(ids)) % 2 == 0]


GREEDY: list[dict[str, Any]] = [
    {},
    {"max_new_tokens": 9},
    {"max_length": 12},
    {"max_new_tokens": 12, "eos_token_id": list(range(0, 30, 3))},
    {"max_new_tokens": 12, "eos_token_id": list(range(0, 30, 3)), "min_new_tokens": 5},
    {"max_new_tokens": 12, "eos_token_id": list(range(0, 30, 3)), "min_length": 9},
    {"max_new_tokens": 12, "eos_token_id": torch.tensor([11, 12, 13, 14])},
    {"max_new_tokens": 15, "repetition_penalty": 1.7},
    {"max_new_tokens": 15, "no_repeat_ngram_size": 2},
    {"max_new_tokens": 15, "bad_words_ids": [[i] for i in range(0, V, 2)] + [[1, 3]], "eos_token_id": 4},
    {"max_new_tokens": 15, "sequence_bias": {(i,): 3.5 for i in range(20)}, "repetition_penalty": 1.4},
    {"max_new_tokens": 15, "sequence_bias": [[[7], 20.0]], "no_repeat_ngram_size": 3},
    {"max_new_tokens": 15, "suppress_tokens": list(range(20)), "begin_suppress_tokens": list(range(20, 40))},
    {"max_new_tokens": 8, "forced_eos_token_id": 59, "eos_token_id": 59},
    {"max_new_tokens": 8, "forced_bos_token_id": 58},
    {"max_new_tokens": 15, "exponential_decay_length_penalty": (3, 2.0), "eos_token_id": 6},
    {"max_new_tokens": 8, "remove_invalid_values": True},
    {"max_new_tokens": 8, "logits_processor": LogitsProcessorList([Halved()])},
    {"max_new_tokens": 8, "logits_processor": LogitsProcessorList([SuppressTokensLogitsProcessor(range(30))])},
    {"max_new_tokens": 8, "prefix_allowed_tokens_fn": only_even},
    {"max_new_tokens": 8, "temperature": 0.3, "top_k": 3, "top_p": 0.2},  # without effect on greedy choices
    {"max_new_tokens": 8, "use_cache": False, "cache_implementation": "static", "disable_compile": True},
    {"generation_config": GenerationConfig(max_new_tokens=7, repetition_penalty=1.3)},
]


@pytest.mark.parametrize("arguments", GREEDY, ids=lambda arguments: ",".join(arguments) or "none")
def test_greedy_results_are_those_of_transformers(model: LlamaForCausalLM, arguments: dict[str, Any]) -> None:
    alone = [model.generate(torch.tensor([prompt]), **copy.deepcopy(arguments)) for prompt in PROMPTS]
    for prompt, expected in zip(PROMPTS, alone, strict=True):
        found = ours(model, torch.tensor([prompt]), **arguments)
        assert found.dtype == torch.int64 and found.tolist() == expected.tolist()
    if "max_length" in arguments or "min_length" in arguments or "forced_bos_token_id" in arguments:
        return  # padding counts
    ids, mask = padded(PROMPTS)
    together = ours(model, ids, attention_mask=mask, **arguments)
    for row, prompt, expected in zip(together.tolist(), PROMPTS, alone, strict=True):
        assert row[ids.shape[1] - len(prompt) :][: expected.shape[1]] == expected[0].tolist()
    eos = tables.token_ids(arguments.get("eos_token_id"))
    assert together.shape[1] == ids.shape[1] + max(e.shape[1] - len(p) for e, p in zip(alone, PROMPTS, strict=True))
    for row, prompt, expected in zip(together.tolist(), PROMPTS, alone, strict=True):
        behind = row[ids.shape[1] + expected.shape[1] - len(prompt) :]
        assert behind == [eos[0]] * len(behind) if behind else True


def test_requests_travel_between_ranks(model: LlamaForCausalLM) -> None:
    for arguments in GREEDY:
        sampling = requests_of(model.generation_config, torch.tensor(PROMPTS[:1]), **arguments).samplings[0]
        sent = pickle.loads(pickle.dumps(sampling.sent))
        assert sent.grammar is None
        assert [type(one) for one in sent.processors] == [type(one) for one in sampling.processors]


def test_the_arguments_matter(model: LlamaForCausalLM) -> None:
    """Most of the settings above change the tokens, else comparing would show nothing."""
    plain = model.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=15)[0].tolist()
    changed = [
        arguments
        for arguments in GREEDY
        if model.generate(torch.tensor(PROMPTS[:1]), **copy.deepcopy(arguments))[0].tolist() != plain[: 4 + 8]
    ]
    assert len(changed) > 12


def test_padding_is_found_without_a_mask(model: LlamaForCausalLM) -> None:
    ids, mask = padded(PROMPTS, pad=60)
    arguments = {"max_new_tokens": 8, "pad_token_id": 60, "eos_token_id": [10, 11]}
    ids[2, 4] = 59  # no padding within a prompt
    expected = ours(model, ids, attention_mask=mask, **arguments)
    assert ours(model, ids, **arguments).tolist() == expected.tolist()


def test_lengths_count_padding(model: LlamaForCausalLM) -> None:
    ids, mask = padded(PROMPTS)
    found = ours(model, ids, attention_mask=mask, max_length=10, min_length=9)
    assert found.shape == (4, 10)
    with pytest.raises(ValueError, match="a request has at most 64 tokens, found a prompt of 7 and up to 58 new ones"):
        ours(model, ids, max_new_tokens=58)
    with pytest.raises(ValueError, match="expected prompts shorter than max_length, found 7 tokens; set max_"):
        ours(model, ids, attention_mask=mask, max_length=7)


def test_without_a_prompt_it_begins_with_bos(model: LlamaForCausalLM) -> None:
    assert ours(model, max_new_tokens=5).tolist() == model.generate(max_new_tokens=5).tolist()


def test_the_models_config_is_the_default(model: LlamaForCausalLM) -> None:
    model = copy.deepcopy(model)
    model.generation_config = GenerationConfig(max_new_tokens=6, repetition_penalty=1.9, eos_token_id=[3, 4])
    ids = torch.tensor(PROMPTS[:1])
    for arguments in [{}, {"max_new_tokens": 4}, {"generation_config": GenerationConfig(repetition_penalty=1.1)}]:
        assert ours(model, ids, **arguments).tolist() == model.generate(ids, **arguments).tolist()


@pytest.mark.parametrize("arguments", [{}, {"repetition_penalty": 1.5, "renormalize_logits": True}], ids=str)
def test_scores_and_logits(model: LlamaForCausalLM, arguments: dict[str, Any]) -> None:
    wanted = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    ids = torch.tensor(PROMPTS[:1])
    found = ours(model, ids, max_new_tokens=5, **arguments, **wanted)
    expected = model.generate(ids, max_new_tokens=5, **arguments, **wanted)
    assert isinstance(found, GenerateDecoderOnlyOutput) and found.keys() == {"sequences", "scores", "logits"}
    torch.testing.assert_close(found.sequences, expected.sequences)
    for ours_, theirs in ((found.scores, expected.scores), (found.logits, expected.logits)):
        assert len(ours_) == len(theirs) == 5
        for one, other in zip(ours_, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    transition = model.compute_transition_scores(found.sequences, found.scores, normalize_logits=True)
    theirs = model.compute_transition_scores(expected.sequences, expected.scores, normalize_logits=True)
    torch.testing.assert_close(transition, theirs, rtol=1e-4, atol=1e-5)


def test_scores_of_rows_that_have_ended_are_zeros(model: LlamaForCausalLM) -> None:
    ids, mask = padded(PROMPTS)
    eos = ours(model, ids, attention_mask=mask, max_new_tokens=2)[0, -1].item()
    found = ours(
        model,
        ids,
        attention_mask=mask,
        max_new_tokens=6,
        eos_token_id=eos,
        output_scores=True,
        return_dict_in_generate=True,
    )
    assert found.logits is None and len(found.scores) == found.sequences.shape[1] - ids.shape[1] > 2
    assert found.sequences[0, ids.shape[1] + 2 :].tolist() == [eos] * (len(found.scores) - 2)
    assert not found.scores[2][0].any() and found.scores[1][0].any()


SAMPLED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_k": 0, "top_p": 0.8},
    {"top_k": 0, "min_p": 0.1, "temperature": 1.5},
    {"repetition_penalty": 1.3, "top_k": 9, "bad_words_ids": [[3], [4]]},
]


@pytest.mark.parametrize("arguments", SAMPLED, ids=str)
def test_draws_come_from_the_distribution_of_transformers(model: LlamaForCausalLM, arguments: dict[str, Any]) -> None:
    wanted = {"output_scores": True, "return_dict_in_generate": True, "do_sample": True, "max_new_tokens": 1}
    ids = torch.tensor([PROMPTS[0]])
    scores = model.generate(ids, **arguments, **wanted).scores[0][0]
    found = ours(model, ids, num_return_sequences=2000, **arguments, **wanted)
    torch.testing.assert_close(found.scores[0][0].softmax(-1), scores.softmax(-1), rtol=1e-3, atol=1e-6)
    counts = torch.bincount(found.sequences[:, -1], minlength=V)
    expected = scores.double().softmax(-1) * 2000
    common = expected > 5
    assert not counts[expected == 0].any()
    rest = (counts[~common].sum(), expected[~common].sum())
    have = [*counts[common].tolist(), *([rest[0].item()] if rest[1] > 1 else [])]
    want = [*expected[common].tolist(), *([rest[1].item()] if rest[1] > 1 else [])]
    assert scipy.stats.chisquare(have, [w * sum(have) / sum(want) for w in want]).pvalue > 1e-4


def test_sampled_tokens_do_not_depend_on_the_company(model: LlamaForCausalLM) -> None:
    engine = ReferenceEngine(model, V)
    requests = requests_of(
        model.generation_config, *padded(PROMPTS)[:1], attention_mask=padded(PROMPTS)[1], do_sample=True
    )
    tickets = [engine.submit(p, s) for p, s in zip(requests.prompts, requests.samplings, strict=True)]
    engine.step()
    engine.step()
    others = [engine.submit([7, 7], s) for s in requests.samplings]  # they join later
    together = [ticket.result() for ticket in tickets]
    for prompt, sampling, expected in zip(requests.prompts, requests.samplings, together, strict=True):
        assert ReferenceEngine(model, V).submit(prompt, sampling).result() == expected
    assert len({tuple(ticket.result()) for ticket in others}) == 4, "seeds differ"


def test_draws_are_repeatable_by_manual_seed(model: LlamaForCausalLM) -> None:
    def drawn() -> list[list[int]]:
        found: Tensor = ours(model, torch.tensor(PROMPTS[:1]), do_sample=True, num_return_sequences=3)
        return found.tolist()

    torch.manual_seed(3)
    first, second = drawn(), drawn()
    torch.manual_seed(3)
    assert first == drawn() != second
    assert len({tuple(row) for row in first}) == 3
    before = torch.get_rng_state()
    ours(model, torch.tensor(PROMPTS[:1]))
    assert torch.equal(before, torch.get_rng_state()), "greedy calls draw nothing"


def test_seeds_may_come_from_elsewhere(model: LlamaForCausalLM) -> None:
    """From rank 0, where each rank has a generator of its own."""
    asked: list[int] = []

    def seeds(number: int) -> list[int]:
        asked.append(number)
        return list(range(number))

    before = torch.get_rng_state()
    requests = requests_of(model.generation_config, torch.tensor([[1], [2]]), do_sample=True, seeds=seeds)
    assert [sampling.seed for sampling in requests.samplings] == [0, 1]
    in_batch(model, PROMPTS, GenerationConfig(do_sample=True, max_new_tokens=2), seeds=seeds)
    ours(model, torch.tensor([[1]]), seeds=seeds)
    assert asked == [2, 4] and torch.equal(before, torch.get_rng_state())


class Listening(BaseStreamer):
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.heard.append((list(value.shape), value.tolist()))

    def end(self) -> None:
        self.heard.append("end")


def test_streamers_hear_the_same(model: LlamaForCausalLM) -> None:
    found, expected = Listening(), Listening()
    ids = torch.tensor(PROMPTS[:1])
    ours(model, ids, max_new_tokens=6, streamer=found)
    model.generate(ids, max_new_tokens=6, streamer=expected)
    assert found.heard == expected.heard
    with pytest.raises(ValueError, match="generate: streamer: expected one prompt and one sequence with it, found 2"):
        ours(model, torch.tensor([[1], [2]]), streamer=found)


def letters() -> PreTrainedTokenizerFast:
    """52 tokens of a letter and 9 of two."""
    pairs = [(a, b) for a in "abc" for b in "abc"]
    names = [*string.ascii_letters, *map("".join, pairs)]
    made = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, pairs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def test_stop_strings(model: LlamaForCausalLM) -> None:
    tokenizer = letters()
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        text = tokenizer.decode(model.generate(ids, max_new_tokens=12)[0, len(prompt) :])
        arguments = {"stop_strings": [text[5:8], "never"], "max_new_tokens": 12}
        found = ours(model, ids, tokenizer=tokenizer, **arguments)
        expected = model.generate(ids, tokenizer=tokenizer, **arguments)
        assert found.tolist() == expected.tolist() and found.shape[1] < len(prompt) + 12


# --- what is refused ------------------------------------------------------------------------------------------------


def test_every_setting_of_transformers_is_in_one_table() -> None:
    listed = [*tables.SERVED, *tables.HARMLESS, *tables.REFUSED, *tables.REFUSED_IF_SAMPLED]
    assert len(listed) == len(set(listed))
    assert {name for name in vars(GenerationConfig()) if not name.startswith("_")} <= {*listed}


class Stateful(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_beams": 2}, "generate: num_beams: expected a value without effect, since it is not served, found 2; leave"),
    ({"guidance_scale": 1.5}, "generate: guidance_scale: expected"),
    ({"cache_implementation": "quantized"}, "generate: cache_implementation: expected .* found 'quantized'"),
    ({"typical_p": 0.5, "do_sample": True}, "generate: typical_p: expected"),
    ({"output_attentions": True}, "generate: output_attentions: expected"),
    ({"penalty_alpha": 0.6, "top_k": 4}, "generate: penalty_alpha: expected"),
    ({"assistant_model": torch.nn.Linear(1, 1)}, "expected arguments that are served, found assistant_model; leave it"),
    ({"stopping_criteria": [1]}, "expected arguments that are served, found stopping_criteria"),
    ({"temperature": 0.0, "do_sample": True}, "temperature: expected a number above 0 with do_sample, found 0"),
    ({"sequence_bias": {(1, 2): 1.0}}, r"sequence_bias: expected sequences of one token, found \[1, 2\]"),
    ({"logits_processor": [Stateful()]}, "found a Stateful; leave it out.* or set supports_continuous_batching"),
    (
        {"logits_processor": [SuppressTokensLogitsProcessor([1])], "suppress_tokens": [2]},
        "expected a SuppressTokensLogitsProcessor or suppress_tokens, found both",
    ),
    ({"stop_strings": "a"}, "expected a tokenizer with stop_strings, found none; pass tokenizer="),
    ({"max_new_token": 3}, "found 'max_new_token'; did you mean 'max_new_tokens'?"),
    ({"inputs_embeds": torch.zeros(1, 1, 32)}, "found 'inputs_embeds'"),
    (
        {"attention_mask": torch.tensor([[1, 1, 0]])},
        "expected padding at the left alone in row 0 .* pad prompts at",
    ),
    ({"attention_mask": torch.tensor([[0, 0, 0]])}, "expected tokens in row 0 of input_ids"),
    ({"attention_mask": torch.tensor([[1, 1]])}, r"expected a tensor of shape \[1, 3\], as input_ids, found \[1, 2\]"),
    ({"generation_config": {"top_k": 1}}, "generation_config: expected a GenerationConfig, found a dict"),
    ({"bad_words_ids": [[V]]}, "sampling.bad_words: expected token ids below 61"),
]


@pytest.mark.parametrize(("arguments", "text"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_is_not_served_is_named(model: LlamaForCausalLM, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ours(model, torch.tensor([[1, 2, 3]]), **arguments)


@pytest.mark.parametrize("ids", [torch.zeros(3), torch.zeros(0, 0).long(), [[1, 2]], torch.zeros(1, 1)], ids=str)
def test_prompts_are_a_tensor_of_ids(model: LlamaForCausalLM, ids: Any) -> None:
    with pytest.raises(ValueError, match=r"generate: input_ids: expected a tensor of token ids \[rows, length\]"):
        ours(model, ids)


def test_a_request_without_a_possible_token_ends_the_call(model: LlamaForCausalLM) -> None:
    with pytest.raises(ValueError, match="expected a possible token, found none"):
        ours(model, torch.tensor([[1]]), suppress_tokens=list(range(V)))


@pytest.mark.parametrize("call", [generate, generate_batch])
def test_an_error_ends_the_requests_of_the_call(model: LlamaForCausalLM, call: Any) -> None:
    class Interrupted(ReferenceEngine):
        def step(self) -> None:
            raise KeyboardInterrupt

    engine = Interrupted(model, V)
    with pytest.raises(KeyboardInterrupt):
        call(engine.submit, model.generation_config, torch.tensor([[1], [2]]) if call is generate else [[1], [2]])
    assert [ticket.finish_reason for ticket in engine.tickets] == ["abort", "abort"]


def test_what_a_server_refuses_ends_the_call(model: LlamaForCausalLM) -> None:
    engine = ReferenceEngine(model, V)
    submit = engine.submit

    def full(*given: Any, **named: Any) -> Any:
        if engine.tickets:
            raise ValueError("serve: the queue is full")
        return submit(*given, **named)

    with pytest.raises(ValueError, match="the queue is full"):
        generate(full, model.generation_config, torch.tensor([[1], [2]]))
    assert [ticket.finish_reason for ticket in engine.tickets] == ["abort"]


# --- generate_batch -------------------------------------------------------------------------------------------------


def in_batch(model: LlamaForCausalLM, *given: Any, **arguments: Any) -> Any:
    return generate_batch(ReferenceEngine(model, V).submit, model.generation_config, *given, **arguments)


class WithLogprobs:
    return_logprobs = True


def test_generate_batch(model: LlamaForCausalLM) -> None:
    config = GenerationConfig(max_new_tokens=8, eos_token_id=list(range(0, 40, 4)), repetition_penalty=1.2)
    found = in_batch(model, PROMPTS, config, WithLogprobs(), record_timestamps=True, progress_bar=True, warmup=False)
    assert list(found) == ["req_0", "req_1", "req_2", "req_3"]
    for prompt, (name, one) in zip(PROMPTS, found.items(), strict=True):
        expected = model.generate(
            torch.tensor([prompt]), generation_config=config, output_scores=True, return_dict_in_generate=True
        )
        assert one.request_id == name and one.prompt_ids == prompt
        assert one.generated_tokens == expected.sequences[0, len(prompt) :].tolist()
        assert one.status == RequestStatus.FINISHED and one.is_finished() and one.error is None
        logprobs = [s[0].log_softmax(-1)[t].item() for s, t in zip(expected.scores, one.generated_tokens, strict=True)]
        assert one.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert one.timestamps is not None and len(one.timestamps) == len(one.generated_tokens)
        assert one.created_time <= one.lifespan[0] == one.timestamps[0] <= one.lifespan[1] == one.timestamps[-1]


def test_generate_batch_takes_the_given_config_alone(model: LlamaForCausalLM) -> None:
    model = copy.deepcopy(model)
    model.generation_config = GenerationConfig(max_new_tokens=3, repetition_penalty=1.9)
    assert [len(one.generated_tokens) for one in in_batch(model, PROMPTS).values()] == [3] * 4
    alone = in_batch(model, PROMPTS[:1], GenerationConfig(), max_new_tokens=5)["req_0"]
    assert (
        alone.generated_tokens
        == ours(model, torch.tensor(PROMPTS[:1]), max_new_tokens=5, repetition_penalty=1.0)[0, 4:].tolist()
    )
    assert alone.logprobs == [] and alone.timestamps is None
    unlimited = in_batch(model, PROMPTS[:1], GenerationConfig())["req_0"]
    assert len(unlimited.generated_tokens) == 60, "up to the longest that is served"
    assert in_batch(model, []) == {}


def test_generate_batch_returns_several_sequences(model: LlamaForCausalLM) -> None:
    config = GenerationConfig(max_new_tokens=6, do_sample=True, num_return_sequences=3)
    torch.manual_seed(0)
    found = in_batch(model, PROMPTS[:2], config)
    assert list(found) == [f"req_{i}{end}" for i in (0, 1) for end in ("__child#0", "__child#1", "")]
    assert len({tuple(one.generated_tokens) for one in found.values()}) == 6


def test_generate_batch_reports_a_failed_request_alone(model: LlamaForCausalLM) -> None:
    class Failing(ReferenceEngine):
        def submit(self, prompt: Sequence[int], *given: Any, **named: Any) -> Any:
            if len(prompt) == 1:
                raise ValueError("serve: expected a longer prompt")
            return super().submit(prompt, *given, **named)

    found = generate_batch(Failing(model, V).submit, model.generation_config, PROMPTS, max_new_tokens=4)
    assert found["req_1"].error == "serve: expected a longer prompt" and found["req_1"].status == RequestStatus.FAILED
    assert [len(one.generated_tokens) for one in found.values()] == [4, 0, 4, 4]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [({"num_beams": 3}, "num_beams"), ({"stop_strings": "a"}, "use generate"), ({"max_tokens": 3}, "did you mean")],
)
def test_generate_batch_names_what_is_not_served(model: LlamaForCausalLM, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        in_batch(model, PROMPTS, **arguments)


def test_grammars_of_functions_see_prompt_and_tokens(model: LlamaForCausalLM) -> None:
    seen: list[tuple[int, list[int]]] = []

    def allowed(row: int, ids: Tensor) -> list[int]:
        seen.append((row, ids.tolist()))
        return [40 + len(ids)]

    ids, mask = padded(PROMPTS[:2])
    found = ours(model, ids, attention_mask=mask, max_new_tokens=2, prefix_allowed_tokens_fn=allowed)
    assert found[:, -2:].tolist() == [[44, 45], [41, 42]]
    assert seen == [(0, PROMPTS[0]), (1, PROMPTS[1]), (0, [*PROMPTS[0], 44]), (1, [*PROMPTS[1], 41])]
    assert not math.isnan(found.sum())
