"""`autopar.Sampling`: what it takes and refuses."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import pytest

import autopar
from autopar.serving.sampling_params import Sampling
from autopar.serving.step import RowChoice


class AnyGrammar:
    finished = False

    def bitmask(self) -> bytes | None:
        return None

    def accept(self, token: int) -> None: ...


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "sampling.temperature: expected a number of at least 0, 0 for greedy, found -0.1"),
    ({"temperature": math.nan}, "sampling.temperature: expected a number"),
    ({"temperature": math.inf}, "sampling.temperature: expected a number of at least 0"),
    ({"temperature": "1"}, "sampling.temperature: expected a number, found '1'"),
    ({"temperature": True}, "sampling.temperature: expected a number, found True"),
    ({"top_p": 0}, "sampling.top_p: expected a number above 0 and at most 1, found 0"),
    ({"top_p": 1.5}, "sampling.top_p: expected a number above 0 and at most 1, found 1.5"),
    ({"top_k": -1}, "sampling.top_k: expected a whole number of at least 0, found -1"),
    ({"top_k": 1.0}, "sampling.top_k: expected a whole number of at least 0, found 1.0"),
    ({"min_p": 2}, "sampling.min_p: expected a number from 0 to 1, found 2"),
    ({"repetition_penalty": 0}, "sampling.repetition_penalty: expected a number above 0, found 0"),
    ({"presence_penalty": math.inf}, "sampling.presence_penalty: expected a number, found inf"),
    ({"logit_bias": {1: math.inf}}, "sampling.logit_bias: expected numbers below inf"),
    ({"logit_bias": {-1: 0.0}}, "sampling.logit_bias: expected a whole number of at least 0, found -1"),
    ({"logit_bias": [1]}, "sampling.logit_bias: expected a mapping of token id to number"),
    ({"bad_words": [[]]}, "sampling.bad_words: expected sequences of at least one token id"),
    ({"bad_words": [5]}, "sampling.bad_words: expected a sequence of token ids, found 5"),
    ({"max_tokens": 0}, "sampling.max_tokens: expected a whole number of at least 1, found 0"),
    ({"min_tokens": 3, "max_tokens": 2}, "sampling.min_tokens: expected at most max_tokens, 2, found 3"),
    ({"seed": 2**64}, "sampling.seed: expected a whole number"),
    ({"stop": ["a", ""]}, "sampling.stop: expected a text or several, none of them empty"),
    ({"stop": [3]}, "sampling.stop: expected a text, found 3"),
    ({"stop_token_ids": 3}, "sampling.stop_token_ids: expected a sequence of token ids, found 3"),
    ({"logprobs": -1}, "sampling.logprobs: expected a whole number of at least 0, found -1"),
    ({"ignore_eos": 1}, "sampling.ignore_eos: expected True or False, found 1; did you mean True?"),
    ({"grammar": "json"}, r"sampling.grammar: expected an object with bitmask\(\), accept\(token\) and finished"),
    ({"processors": [1]}, "sampling.processors: expected a sequence of functions"),
    ({"temprature": 1.0}, "sampling: no such field 'temprature'; did you mean 'temperature'?"),
    ({"max_new_tokens": 1}, "sampling: no such field 'max_new_tokens'; did you mean 'max_tokens'?"),
    ({"beams": 1}, "sampling: no such field 'beams'; name some of temperature, top_k"),
]


@pytest.mark.parametrize(("fields", "text"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_field_is_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        autopar.Sampling(**fields)


def test_an_unknown_field_is_a_type_error_as_well() -> None:
    with pytest.raises(TypeError):
        Sampling(temprature=1.0)  # type: ignore[call-arg]


def test_fields_are_brought_into_one_form() -> None:
    found = Sampling(stop="end", bad_words=[[1, 2], [3]], stop_token_ids=[4], temperature=1, logit_bias={5: 1})  # type: ignore[arg-type]
    assert found == Sampling(stop=("end",), bad_words=((1, 2), (3,)), stop_token_ids=(4,), logit_bias={5: 1.0})
    assert hash(found) == hash(dataclasses.replace(found, logit_bias={}))


def test_the_end_of_a_request() -> None:
    found = Sampling(stop_token_ids=(7,), eos_token_ids=(1, 2))
    assert found.end_ids == (7, 1, 2)
    assert dataclasses.replace(found, ignore_eos=True).end_ids == (7,)


@pytest.mark.parametrize(
    ("fields", "needed"),
    [
        ({}, False),
        ({"bad_words": [[1]]}, False),
        ({"bad_words": [[1, 2]]}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": 0.5}, True),
        ({"frequency_penalty": 0.5}, True),
        ({"processors": [max]}, True),
    ],
)
def test_history_is_sent_only_where_a_choice_needs_it(fields: dict[str, Any], needed: bool) -> None:
    assert Sampling(**fields).needs_history is needed


@pytest.mark.parametrize(("name", "ids"), [("logit_bias", {9: 1.0, 10: 1.0}), ("bad_words", [[1, 10]])])
def test_ids_beyond_the_vocabulary_are_refused(name: str, ids: Any) -> None:
    sampling = Sampling(**{name: ids})
    sampling.check_ids(11)
    with pytest.raises(
        ValueError, match=f"sampling.{name}: expected token ids below 10, the size of the vocab.*found 10"
    ):
        sampling.check_ids(10)


def test_it_travels_between_ranks_without_its_grammar() -> None:
    sampling = Sampling(grammar=AnyGrammar(), seed=3)
    choice = RowChoice(sampling.sent, position=4, seed=3, prompt_length=4)
    assert sampling.grammar is not None and pickle.loads(pickle.dumps(choice)) == choice
    assert choice.sampling == Sampling(seed=3)
