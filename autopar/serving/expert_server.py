"""`ExpertServer`: the layers of experts of this rank, which answer ranks that have the attention.

It has no cache, no requests and no other weights. It runs until the attention ranks close their server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.cost.ping_pong import Interval
from autopar.ir.graph import set_device
from autopar.ir.traffic import Ledger
from autopar.runtime.comm.pairs import AnsweringPairs
from autopar.runtime.exec.lowering import Lowered, axes_of, bind
from autopar.runtime.fault.errors import error_context
from autopar.runtime.mesh.process_groups import Groups
from autopar.steps.packed_experts import PackedExperts


class ExpertServer:
    """values: this rank's shards of parameters, buffers and constants by name. pairs: the way to the attention."""

    def __init__(
        self, packed: PackedExperts, groups: Groups, values: Mapping[str, Tensor], pairs: AnsweringPairs
    ) -> None:
        graphs = {id(layer.graph): layer.graph.graph for layer in packed.layers}
        axes, _ = axes_of(graphs.values())
        groups.make(axes)
        groups.warm_up(axes)
        if groups.device.type != "cpu":
            for graph in graphs.values():
                set_device(graph, groups.device)
        code = {key: bind(graph, groups) for key, graph in graphs.items()}
        self._layers: list[tuple[Lowered, list[Tensor]]] = [
            (code[id(layer.graph)], [values[name] for name in layer.names]) for layer in packed.layers
        ]
        self.held = {spec.name: values[spec.name] for spec in packed.parameters}  # this rank's shards
        self._pairs, self._ended = pairs, False

    @property
    def traffic(self) -> Ledger:
        """Bytes sent to attention ranks so far."""
        return self._pairs.traffic

    @property
    def timeline(self) -> list[Interval]:
        """When this rank computed what in the last step; seconds of `time.time`."""
        return self._pairs.timeline

    def run(self) -> None:
        """Answer until the attention ranks close their server. Raises the error that breaks it."""
        if self._ended:
            return
        self._ended = True
        with error_context("serving experts"), torch.no_grad():
            self._pairs.serve(self._answer)

    close = run  # there is nothing to end on this side

    def _answer(self, layer: int, x: Tensor, expert: Tensor | None, weights: Tensor | None) -> Tensor:
        run, values = self._layers[layer]
        (out,) = run([given for given in (x, expert, weights) if given is not None] + values)
        result: Tensor = out
        return result

    def __enter__(self) -> ExpertServer:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:
            self.run()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"serve: a rank of experts has no requests, so no {name}; call it on attention ranks "
            '(roles.role == "attention"), and run() here'
        )
