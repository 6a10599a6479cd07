"""Loss scaling for float16 gradients, with the interface of `torch.amp.GradScaler`.

    scaler = autopar.GradScaler(model)
    loss = model.train_step(**batch)              the backward starts from the scale instead of 1
    model.clip_grad_norm_(1.0)                    unscales, too, in the same pass over the gradients
    scaler.step(optimizer); scaler.update()

An infinite or NaN gradient on any rank of any stage skips the step on all ranks: the optimizer is not called, so its
step count and hooks do not advance. (Micikevicius et al. 2018, Mixed precision training, 3.2.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from autopar.adapters.foreach import unscale_all
from autopar.capture.trace.export import flatten, unflatten
from autopar.runtime.consistency.rank_checks import agree_on_arguments
from autopar.runtime.fault.errors import error_context
from autopar.runtime.optim.grad_clipping import over_world
from autopar.runtime.optim.step_hooks import note_step
from autopar.runtime.params.parameters import local_tensor
from autopar.values import number, whole_number, yes_or_no


class GradScaler:
    """Scales the loss of a parallel model, so that small gradients do not underflow in float16.

    Args:
        model: from `autopar.parallelize`; its ``train_step`` scales the loss from now on. One scaler per model.
        init_scale: the initial scale.
        growth_factor, growth_interval: factor of the scale after ``growth_interval`` steps without infinities or NaNs.
        backoff_factor: factor of the scale after a step with one.
        enabled: if False, nothing is scaled and no step is skipped.

    Raises ValueError unless growth_factor is above 1 and backoff_factor between 0 and 1.
    """

    def __init__(
        self,
        model: Any,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        if not hasattr(model, "take_scaler"):
            raise ValueError(
                f"GradScaler: needs the model whose steps it scales, made by autopar.parallelize, found a "
                f"{type(model).__name__}"
            )
        self._enabled = yes_or_no("enabled", enabled)
        self._growth, self._backoff = number("growth_factor", growth_factor), number("backoff_factor", backoff_factor)
        if not self._growth > 1.0 or not 0.0 < self._backoff < 1.0:
            raise ValueError(
                f"GradScaler: needs a growth_factor above 1 and a backoff_factor between 0 and 1, found "
                f"{self._growth} and {self._backoff}"
            )
        self._interval = whole_number("growth_interval", growth_interval, 1)
        self._groups = model.take_scaler(self)
        self._scale = torch.full((), number("init_scale", init_scale, 0.0), device=self._groups.device)
        self._since = 0  # steps since the last change of the scale
        self._found: dict[int | None, Tensor] = {}  # optimizer (None: all gradients of the model) -> 1 if not finite
        self._skipped: bool | None = None

    # --- torch's interface --------------------------------------------------------------------------------

    def scale(self, outputs: Any) -> Any:
        """A loss, or nested losses, times the scale: for ``scaler.scale(loss).backward()``. (``train_step`` returns the
        unscaled loss; its gradients are scaled.)"""
        if not self._enabled:
            return outputs
        leaves, spec = flatten(outputs)
        return unflatten([x * self._scale.to(x.device) if isinstance(x, Tensor) else x for x in leaves], spec)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscale the gradients of an optimizer. Collective. Raises RuntimeError if they are already unscaled."""
        if not self._enabled:
            return
        if self._of(optimizer) is not None:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        given = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        with error_context("unscale_"):
            agree_on_arguments(self._groups, "unscale_", {"gradients": len(given)})
            found = torch.zeros((), device=self._groups.device)
            unscale_all(list(map(local_tensor, given)), found, self._scale.double().reciprocal().float())
            self._found[id(optimizer)] = over_world(found, self._groups)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """``optimizer.step(...)`` on unscaled gradients; skipped on all ranks if a gradient is infinite or NaN."""
        if "closure" in kwargs or args:
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        if self._enabled and self._of(optimizer) is None:
            self.unscale_(optimizer)
        found = self._of(optimizer)
        skip = self._enabled and found is not None and bool(found)
        self._skipped = skip if self._skipped is None else self._skipped or skip
        if skip:
            note_step(optimizer)
            return None
        return optimizer.step(**kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update the scale for the next step. Raises RuntimeError if no step was made since the last update."""
        if not self._enabled:
            return
        if new_scale is not None:
            self._scale.fill_(float(new_scale))
        elif self._skipped is None:
            raise RuntimeError("No inf checks were recorded prior to update.")
        elif self._skipped:
            self._scale.mul_(self._backoff)
            self._since = 0
        else:
            self._since += 1
            if self._since == self._interval:
                self._scale.mul_(self._growth)
                self._since = 0
        self.stepped = not self._skipped
        self._found, self._skipped = {}, None

    stepped = True
    """Whether the last step was made and not skipped, for instance to advance a learning rate schedule."""

    def get_scale(self) -> float:
        """The current scale; 1 if not enabled."""
        return float(self._scale) if self._enabled else 1.0

    def is_enabled(self) -> bool:
        """Whether scaling is enabled."""
        return self._enabled

    def get_growth_factor(self) -> float:
        return self._growth

    def set_growth_factor(self, new_factor: float) -> None:
        self._growth = number("growth_factor", new_factor, 1.0)

    def get_backoff_factor(self) -> float:
        return self._backoff

    def set_backoff_factor(self, new_factor: float) -> None:
        self._backoff = number("backoff_factor", new_factor, 0.0)

    def get_growth_interval(self) -> int:
        return self._interval

    def set_growth_interval(self, new_interval: int) -> None:
        self._interval = whole_number("growth_interval", new_interval, 1)

    def state_dict(self) -> dict[str, Any]:
        """The state, in the format of torch's scaler: either one can load it."""
        if not self._enabled:
            return {}
        return {
            "scale": self.get_scale(),
            "growth_factor": self._growth,
            "backoff_factor": self._backoff,
            "growth_interval": self._interval,
            "_growth_tracker": self._since,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state. Raises ValueError for the state of a scaler that was not enabled."""
        if not self._enabled:
            return
        if not state_dict:
            raise ValueError(
                "GradScaler: needs the state of an enabled scaler, found an empty one; start with a new scaler"
            )
        self._scale.fill_(state_dict["scale"])
        self._growth, self._backoff = state_dict["growth_factor"], state_dict["backoff_factor"]
        self._interval, self._since = state_dict["growth_interval"], state_dict["_growth_tracker"]

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError unless this is the state of an enabled scaler; changes nothing."""
        number("scale", state["scale"], 0.0)
        number("growth_factor", state["growth_factor"], 0.0)
        number("backoff_factor", state["backoff_factor"], 0.0)
        whole_number("growth_interval", state["growth_interval"], 1)
        whole_number("growth_tracker", state["_growth_tracker"])

    # --- for the model ------------------------------------------------------------------------------------

    @property
    def in_a_step(self) -> bool:
        """Whether gradients have been unscaled and `update` was not called yet."""
        return self._enabled and (bool(self._found) or self._skipped is not None)

    @property
    def seed(self) -> Tensor:
        """The gradient from which a backward starts: the scale."""
        return self._scale if self._enabled else torch.ones_like(self._scale)

    def scale_to_take_off(self) -> Tensor | None:
        """The scale, if no gradients have been unscaled yet; else None."""
        return self._scale if self._enabled and not self._found else None

    def taken_off(self, norm: Tensor) -> None:
        """Record that all gradients of the model are unscaled, and had this norm."""
        self._found[None] = (~torch.isfinite(norm)).float()

    def _of(self, optimizer: Optimizer) -> Tensor | None:
        return self._found.get(None, self._found.get(id(optimizer)))
