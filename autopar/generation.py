"""`generate` and `generate_batch` of a `ParallelModule`: with its weights as they are placed for training.

The server is made at the first call and kept, with its compiled graph, until a longer one is needed or the modules
have changed. Its cache is freed after each call.

Ranks make a call alike, with the prompts of all; or, with ``outputs_with_grad="rank"``, each data-parallel rank has
prompts of its own, and gets their results, as under DDP.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from autopar.runtime.fault.errors import error_context, explained
from autopar.runtime.guards.module_guards import ModuleGuards
from autopar.runtime.mesh.process_groups import gathered_objects
from autopar.runtime.module.served_weights import ServedWeights
from autopar.serve_model import ServeArguments, generation_facts, make_server
from autopar.serving.generate import Row, Share, batch_of, finished, finished_batch, requests_of
from autopar.serving.server import Server

SHORTEST = 256  # tokens of the first server; longer ones have powers of two


class Generation:
    """Generates with a model's weights. weights: what `ParallelModule.for_serving` returns now. keeps: whether gathered
    parameters outlive a step now. example: a batch that names the input of token ids. by_rank: each data-parallel rank
    passes prompts of its own."""

    def __init__(
        self,
        weights: Callable[[], ServedWeights],
        keeps: Callable[[], bool],
        example: Mapping[str, Any] | None,
        by_rank: bool = False,
    ) -> None:
        self._weights, self._keeps, self._example, self._by_rank = weights, keeps, example, by_rank
        self._server: Server | None = None
        self._guards: ModuleGuards | None = None
        self._kept = False

    def generate(self, *given: Any, **arguments: Any) -> Any:
        """transformers' `generate`, on all ranks alike: see `autopar.serving.server.Server.generate`."""
        with error_context("generate"):
            facts = generation_facts(self._weights().tree.root, self._example)
            requests = requests_of(facts.config, *given, max_positions=facts.max_length or None, **arguments)
            return self._served(requests.rows, functools.partial(finished, requests=requests))

    def generate_batch(self, *given: Any, **arguments: Any) -> Any:
        """transformers' `generate_batch`, on all ranks alike."""
        with error_context("generate_batch"):
            facts = generation_facts(self._weights().tree.root, self._example)
            batch = batch_of(facts.config, *given, **arguments)
            return self._served(batch.rows, functools.partial(finished_batch, batch=batch))

    def _served(self, rows: list[Row], run: Callable[..., Any]) -> Any:
        share = self._share(rows)
        lengths = [len(row.prompt) + (row.sampling.max_tokens or SHORTEST) for row in share.rows]
        server = self._server_for(max(lengths, default=1))
        try:
            return run(functools.partial(server.submit, background=False), share=share)
        finally:
            server.release()

    def _share(self, rows: list[Row]) -> Share:
        """Collective over data-parallel ranks, if each has its own prompts."""
        groups = self._weights().groups
        if not self._by_rank or groups.mesh.data_size == 1:
            return Share(rows)
        try:
            pickle.dumps(rows)
        except Exception as error:
            raise ValueError(
                f"generate: data-parallel ranks exchange their requests, which must be picklable, found {error}; use "
                "functions or classes of a module"
            ) from error
        with explained("exchanging prompts", groups.ranks(groups.world)):
            parts = gathered_objects(groups.device_mesh, rows)
        at = groups.mesh.dp_rank_and_size(groups.coordinate)
        before = sum(map(len, parts[:at]))
        return Share([row for part in parts for row in part], slice(before, before + len(rows)))

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
