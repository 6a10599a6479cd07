"""An exponential moving average of a model's parameters, shard by shard.

    average = autopar.ema(model, decay=0.999)
    average.update()                       after each optimizer step: one fused call, no communication
    with average.applied(): model.eval_step(**batch)       or model.save_pretrained(folder)

Averages are in float32 or wider, whatever the parameters are. `autopar.save` saves them with the model.
(Polyak and Juditsky 1992; `torch.optim.swa_utils`.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.adapters.dtensor import local_of
from autopar.adapters.foreach import copy_all, lerp_all
from autopar.runtime.optim.step_hooks import about_to_write
from autopar.runtime.params.dtensor_layout import laid_out
from autopar.values import number

if TYPE_CHECKING:
    from autopar.runtime.module.parallel_module import ParallelModule


class MovingAverage:
    """``average = decay * average + (1 - decay) * parameter``, for every floating-point parameter.

    decay: 0 (the parameters themselves) to 1 (never changes). updates: how often `update` was called.
    Raises ValueError for another decay, and for a model that is not parallelized.
    """

    def __init__(self, model: ParallelModule, decay: float) -> None:
        self.decay, self.updates = _decay(decay), 0
        if not hasattr(model, "take_scaler"):
            raise ValueError(
                f"ema: needs a model made by autopar.parallelize, found a {type(model).__name__}; "
                "use torch.optim.swa_utils.AveragedModel in one process"
            )
        self._model = model
        self._averages = {name: _wide(x) for name, x in self._pieces().items()}
        model.take_average(self)

    def _pieces(self) -> dict[str, Tensor]:
        named = self._model.named_parameters()
        return {n: local_of(p).detach() for n, p in named if isinstance(p, DTensor) and p.is_floating_point()}

    @torch.no_grad()
    def update(self, decay: float | None = None) -> None:
        """Update the average with the current parameters, after an optimizer step."""
        about_to_write()
        pieces = self._pieces()
        weight = 1.0 - (self.decay if decay is None else _decay(decay))
        lerp_all([self._averages[name] for name in pieces], list(pieces.values()), weight)
        self.updates += 1

    def drop(self) -> None:
        """Detach the average from the model: it is no longer saved with it, and its memory can be freed."""
        self._model.drop_average(self)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context manager: the model's parameters are the averages. Changes made inside are lost on exit."""
        about_to_write()
        pieces = self._pieces()
        kept = [x.clone() for x in pieces.values()]
        with torch.no_grad():
            copy_all(list(pieces.values()), [self._averages[n].to(x.dtype) for n, x in pieces.items()])
        try:
            yield
        finally:
            with torch.no_grad():
                copy_all(list(pieces.values()), kept)

    def state_dict(self) -> dict[str, Any]:
        """Averages by "ema." and the parameter's name, with its placements, for torch.distributed.checkpoint."""
        found: dict[str, Any] = {f"ema.{n}": x for n, x in self.laid_out().items()}
        return found | {"ema_updates": torch.tensor(self.updates)}

    def laid_out(self) -> dict[str, DTensor]:
        """Averages by parameter name, as DTensors with its placements, without a copy."""
        named = dict(self._model.named_parameters())
        return {n: laid_out(named[n], x) for n, x in self._averages.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned on a mesh of the same layout. Raises ValueError for missing averages."""
        missing = [name for name in self._averages if f"ema.{name}" not in state]
        if missing:
            raise ValueError(f"ema: the state has no average of {missing[0]!r}; pass what state_dict() returned")
        about_to_write()
        for name, x in self._averages.items():
            given = state[f"ema.{name}"]
            x.copy_(local_of(given) if isinstance(given, DTensor) else given)
        self.updates = int(state["ema_updates"])


def ema(model: ParallelModule, decay: float = 0.999) -> MovingAverage:
    """Create an exponential moving average of a model's parameters: see `MovingAverage`."""
    return MovingAverage(model, decay)


def _decay(value: float) -> float:
    found = number("decay", value, 0.0)
    if found > 1.0:
        raise ValueError(f"decay: expected a number between 0 and 1, found {value}")
    return found


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
