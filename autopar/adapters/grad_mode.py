"""The grad mode of this thread, and the inference mode that a traced forward sees: traces never run under it."""

from __future__ import annotations

import threading
from typing import Any

import torch


class _Seen(threading.local):
    """State of the forward that this thread traces."""

    inference: bool | None = None  # None: no forward is traced


_SEEN = _Seen()
_IS_GRAD_ENABLED, _IS_INFERENCE_MODE = torch.is_grad_enabled, torch.is_inference_mode_enabled


def grad_mode() -> str:
    """The grad mode of this thread: "grad", "no_grad" or "inference"."""
    return "inference" if _IS_INFERENCE_MODE() else "grad" if _IS_GRAD_ENABLED() else "no_grad"


def seen_inference() -> bool | None:
    """Whether the traced forward of this thread sees inference mode; None if none is traced."""
    return _SEEN.inference


class InferenceRegion(torch.set_grad_enabled):
    """Without gradients from its creation to its exit; a traced forward sees inference mode if ``mode``."""

    def __init__(self, mode: bool) -> None:
        self._before, _SEEN.inference = _SEEN.inference, mode
        super().__init__(not mode)

    def __exit__(self, *raised: Any) -> None:
        _SEEN.inference = self._before
        super().__exit__(*raised)
