"""The grad mode of this thread, and what a traced forward is told of it: traces never run under inference_mode."""

from __future__ import annotations

import threading
from typing import Any

import torch


class _Told(threading.local):
    """Of the forward that this thread traces."""

    inference: bool | None = None  # None: it traces none


_TOLD = _Told()
_IS_GRAD_ENABLED, _IS_INFERENCE_MODE = torch.is_grad_enabled, torch.is_inference_mode_enabled


def grad_mode() -> str:
    """That of this thread: "grad", "no_grad" or "inference"."""
    return "inference" if _IS_INFERENCE_MODE() else "grad" if _IS_GRAD_ENABLED() else "no_grad"


def seen_inference() -> bool | None:
    """Whether the forward that this thread traces is told that it runs under inference_mode; None: there is none."""
    return _TOLD.inference


class InferenceRegion(torch.set_grad_enabled):
    """From when it is made until its exit: no gradients, and a traced forward is told of inference_mode."""

    def __init__(self, mode: bool) -> None:
        self._before, _TOLD.inference = _TOLD.inference, mode
        super().__init__(not mode)

    def __exit__(self, *raised: Any) -> None:
        _TOLD.inference = self._before
        super().__exit__(*raised)
