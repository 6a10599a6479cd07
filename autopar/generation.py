"""`generate` and `generate_batch` of a `ParallelModule`: with its weights as they are placed for training.

The server is made at the first call and kept, with its compiled graph, until a longer one is needed or the modules
have changed. Its cache is freed after each call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autopar.runtime.guards.module_guards import ModuleGuards
from autopar.runtime.module.served_weights import ServedWeights
from autopar.serving.generate import requests_of
from autopar.serving.server import Server

SHORTEST = 256  # tokens of the first server; longer ones have powers of two


class Generation:
    """Servers of one model. weights: what `ParallelModule.for_serving` returns now. keeps: whether gathered parameters
    outlive a step now."""

    def __init__(
        self, weights: Callable[[], ServedWeights], keeps: Callable[[], bool], example: Mapping[str, Any] | None
    ) -> None:
        self._weights, self._keeps, self._example = weights, keeps, example
        self._server: Server | None = None
        self._kept: bool | None = None
        self._guards: ModuleGuards | None = None

    def generate(self, *given: Any, **arguments: Any) -> Any:
        """As of `autopar.serving.server.Server.generate`."""
        defaults, limit = self._facts()
        requests = requests_of(defaults, *given, max_positions=limit or None, **arguments)
        return self._run("generate", _longest(requests.prompts, requests.samplings, limit), given, arguments)
