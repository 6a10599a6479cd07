"""Grammars of `response_format`: which tokens may come next, by llguidance."""

from __future__ import annotations

import json
from typing import Any

from llguidance import LLMatcher

from autopar.integrations.http.engine import ServedModel
from autopar.integrations.http.errors import ApiError


class SchemaGrammar:
    """A text that is being generated under a JSON schema: the `Grammar` of one request of the engine."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self.finished: bool = matcher.is_stopped()  # the text is complete and nothing may follow

    @classmethod
    def of_schema(cls, schema: Any, served: ServedModel) -> SchemaGrammar:
        """Raises ApiError for a schema that does not compile, and for a slow tokenizer."""
        try:
            tokens = served.token_bytes
        except ValueError as error:
            raise ApiError(
                f"response_format: needs a tokenizer with a tokenizer.json: {error}", param="response_format"
            ) from error
        try:
            matcher = LLMatcher(tokens, LLMatcher.grammar_from_json_schema(json.dumps(schema)), log_level=0)
        except ValueError as error:
            raise _refused(error) from error
        if matcher.is_error():
            raise _refused(matcher.get_error())
        return cls(matcher)

    def copy(self) -> SchemaGrammar:
        """For another choice of the same request."""
        return SchemaGrammar(self._matcher.deep_copy())

    def bitmask(self) -> bytes:
        """A bit for each token id that may follow: bit i of the little-endian bytes is id i."""
        mask: bytes = self._matcher.compute_bitmask()
        return mask

    def accept(self, token: int) -> None:
        """A token was chosen. Raises ValueError for one that was not allowed."""
        if not self._matcher.consume_token(token):
            raise ValueError(f"grammar: token {token} is not allowed here: {self._matcher.get_error()}")
        self.finished = self._matcher.is_stopped()


def _refused(why: object) -> ApiError:
    said = " ".join(str(why).split())
    return ApiError(f"response_format: the JSON schema does not compile: {said}", param="response_format")
