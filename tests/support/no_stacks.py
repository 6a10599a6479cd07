"""torch takes down the stack at each `torch.manual_seed`, once for each kind of device that is not there, and at each
new fake mode: for errors that no test has, and with pytest's frames a millisecond each time, thousands of times."""

from __future__ import annotations

import traceback
from functools import partial
from types import SimpleNamespace

import torch
from torch._subclasses import fake_tensor


def note_no_stacks() -> None:
    """From now on, in this process and those that it forks. Where there is a GPU its seeds are as torch sets them."""
    fake_tensor.traceback = SimpleNamespace(extract_stack=list, format_list=traceback.format_list)  # type: ignore[attr-defined]
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if not device.is_available():
            device.manual_seed_all = partial(int)  # type: ignore[attr-defined]
