"""`generate` and `generate_batch` of a `ParallelModule`: with its weights as they are placed for training.

The server is made at the first call and kept, with its compiled graph, until a longer one is needed or the modules
have changed. Its cache is freed after each call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autopar.runtime.guards.module_guards import ModuleGuards
from autopar.runtime.module.served_weights import ServedWeights
from autopar.serve_model import ServeArguments, generation_facts, make_server
from autopar.serving.generate import batch_of, finished, finished_batch, requests_of
from autopar.serving.sampling_params import Sampling
from autopar.serving.server import Server

SHORTEST = 256  # tokens of the first server; longer ones have powers of two


class Generation:
    """Generates with a model's weights. weights: what `ParallelModule.for_serving` returns now. keeps: whether gathered
    parameters outlive a step now. example: a batch that names the input of token ids."""

    def __init__(
        self, weights: Callable[[], ServedWeights], keeps: Callable[[], bool], example: Mapping[str, Any] | None
    ) -> None:
        self._weights, self._keeps, self._example = weights, keeps, example
        self._server: Server | None = None
        self._guards: ModuleGuards | None = None
        self._kept = False

    def generate(self, *given: Any, **arguments: Any) -> Any:
        """transformers' `generate`, on all ranks alike: see `autopar.serving.server.Server.generate`."""
        facts = generation_facts(self._weights().tree.root, self._example)
        requests = requests_of(facts.config, *given, max_positions=facts.max_length or None, **arguments)
        return self._served(requests.prompts, requests.samplings, lambda submit: finished(submit, requests))

    def generate_batch(self, *given: Any, **arguments: Any) -> Any:
        """transformers' `generate_batch`, on all ranks alike."""
        facts = generation_facts(self._weights().tree.root, self._example)
        batch = batch_of(facts.config, *given, **arguments)
        prompts = list(batch.prompts.values())
        return self._served(prompts, batch.samplings, lambda submit: finished_batch(submit, batch))

    def _served(
        self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling], run: Callable[[Any], Any]
    ) -> Any:
        lengths = [len(p) + (s.max_tokens or SHORTEST) for p, s in zip(prompts, samplings, strict=True)]
        server = self._server_for(max(lengths, default=1))
        try:
            return run(functools.partial(server.submit, background=False))
        finally:
            server.release()

    def _server_for(self, length: int) -> Server:
        """A server of requests of ``length`` tokens, for the modules as they are."""
        weights, keeps, found = self._weights(), self._keeps(), self._server
        valid = self._guards is not None and self._guards.holds() and keeps == self._kept
        if found is None or found.failure or found.max_length < length or not valid:
            if found is not None:
                found.close()
            limit = generation_facts(weights.tree.root, self._example).max_length or length
            longest = min(max(SHORTEST, 1 << (length - 1).bit_length()), max(limit, length))
            asked = ServeArguments.checked(weights.groups.device.type, max_length=longest)
            self._server = found = make_server(weights, asked, keeps, self._example)
            self._guards, self._kept = ModuleGuards(weights.tree.root, modes=False), keeps
        return found
