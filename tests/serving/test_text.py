"""Tokens to text as they come, and stop strings, with tokens that are bytes, parts of words, and special ones."""

from __future__ import annotations

import itertools

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from autopar.serving.text import Detokenizer, StopStrings, TextStream

TEXT = "Grüße, 世界! 👩‍👩‍👧 naïve\n  two  spaces stop sto st s STOP"


class OfBytes:
    """Each token is a byte; the least that a tokenizer must be."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def byte_level() -> PreTrainedTokenizerFast:
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=263, special_tokens=["<end>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    trained.train_from_iterator([TEXT] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<end>")


def of_words() -> PreTrainedTokenizerFast:
    """As sentencepiece: a token begins with its space, which is dropped at the beginning of a text."""
    words = {word: i for i, word in enumerate(["<unk>", "▁Hello", "▁world", "s", "▁st", "op", "▁", "opera"])}
    made = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.fixture(scope="module", params=["bytes", "byte level"])
def case(request: pytest.FixtureRequest) -> tuple[object, list[int]]:
    if request.param == "bytes":
        return OfBytes(), list(TEXT.encode())
    tokenizer = byte_level()
    return tokenizer, tokenizer.encode(TEXT)


def test_parts_make_the_text_and_hold_whole_characters(case: tuple[object, list[int]]) -> None:
    tokenizer, ids = case
    stream = Detokenizer(tokenizer)
    parts = [stream.push(token) for token in ids]
    assert "".join(parts) + stream.finish() == TEXT
    assert not any("\ufffd" in part for part in parts)
    assert any(not part for part in parts), "some tokens are parts of characters"
    assert stream.finish() == ""


def test_text_is_given_as_soon_as_it_is_certain() -> None:
    stream = Detokenizer(OfBytes())
    assert [stream.push(byte) for byte in "aé…b".encode()] == ["a", "", "é", "", "", "…", "b"]


def test_bytes_that_are_no_character_are_given_in_the_end() -> None:
    stream = Detokenizer(OfBytes())
    assert [stream.push(byte) for byte in b"a\xe2\x80"] == ["a", "", ""]
    assert stream.finish() == "\ufffd"


def test_endless_wrong_bytes_are_given_in_portions() -> None:
    stream = Detokenizer(OfBytes())
    parts = [stream.push(0xFF) for _ in range(200)]
    assert "".join(parts) + stream.finish() == "\ufffd" * 200
    assert sum(map(bool, parts)) == 3


def test_the_space_after_the_prompt_is_kept() -> None:
    tokenizer = of_words()
    first = Detokenizer(tokenizer, prompt=[1])
    assert [first.push(token) for token in (2, 3)] == [" world", "s"]
    alone = Detokenizer(tokenizer)
    assert [alone.push(token) for token in (1, 2)] == ["Hello", " world"]


def test_special_tokens() -> None:
    tokenizer = byte_level()
    end = tokenizer.eos_token_id
    assert Detokenizer(tokenizer).push(end) == ""
    assert Detokenizer(tokenizer, skip_special_tokens=False).push(end) == "<end>"


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("abé", max_size=20),
    stop=st.lists(st.text("abé", min_size=1, max_size=4), max_size=3),
    min_tokens=st.integers(0, 10),
)
def test_no_part_of_a_stop_string_is_given(text: str, stop: list[str], min_tokens: int) -> None:
    stream, given = TextStream(OfBytes(), stop, min_tokens), ""
    for count, byte in enumerate(text.encode(), 1):
        given += stream.push(byte)
        # What was given, and what may follow, is the text: no stop string begins in it that could go on.
        assert text.startswith(given)
        whole = text.encode()[:count].decode(errors="ignore")
        if stream.stopped:
            first = min(whole.find(s, 0) for s in stop if s in whole) if min_tokens <= 1 else None
            assert first is None or given == text[:first]
            return
        if min_tokens <= 1:
            assert not any(s in whole for s in stop)
            held = whole[len(given) :]
            assert held == "" or any(s.startswith(held) for s in stop)
            assert all(not s.startswith(held) or len(held) < len(s) for s in stop)
    assert given + stream.finish() == text


def test_a_stop_string_across_tokens() -> None:
    stream = TextStream(OfBytes(), ["stop", "top!"])
    assert [stream.push(byte) for byte in b"a sto stxstop it"] == [*"a ", "", "", "", "sto ", "", "", "stx", *[""] * 7]
    assert stream.stopped and stream.finish() == ""


def test_a_stop_string_ends_nothing_before_the_minimum() -> None:
    stream = TextStream(OfBytes(), ["a"], min_tokens=3)
    assert [stream.push(byte) for byte in b"aabca"] == ["a", "a", "b", "c", ""]
    assert stream.stopped


@pytest.mark.parametrize(
    ("prompt", "tokens", "stop", "ends"),
    [
        ([1], [4, 5], ["stop"], [False, True]),
        ([1, 4], [5], ["stop"], [True]),  # it began in the prompt
        ([1, 4, 5], [2], ["stop"], [False]),  # it is in the prompt alone
        ([1, 4, 5], [2, 4, 7], ["top", "much longer than all"], [False, False, True]),
        ([1], [4, 7], ["stop"], [False, True]),  # it ends within a token
        ([1], [2, 3], [" worlds", "x"], [False, True]),
    ],
)
def test_stop_strings_of_transformers(prompt: list[int], tokens: list[int], stop: list[str], ends: list[bool]) -> None:
    found = StopStrings(of_words(), stop, prompt)
    assert [found(token) for token in tokens] == ends


def test_long_runs_are_decoded_in_short_pieces() -> None:
    class Counting(OfBytes):
        longest = 0

        def decode(self, ids: list[int]) -> str:
            self.longest = max(self.longest, len(ids))
            return super().decode(ids)

    tokenizer = Counting()
    stream = Detokenizer(tokenizer, prompt=list(b"x" * 1000))
    for byte in itertools.islice(itertools.cycle("é1".encode()), 1000):
        stream.push(byte)
    assert tokenizer.longest < 20
