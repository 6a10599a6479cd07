"""The loops that people have, on a mesh: one line of them changes.

    from autopar.integrations import Trainer         transformers.Trainer, with mesh=
    class Mine(MeshTrainerMixin, SFTTrainer): ...    any other trainer that is made from it
    from autopar.integrations import Accelerator     accelerate.Accelerator, with mesh=

What their arguments mean they mean here, and what they can't mean on a mesh is refused in words. Only scripts import
this room, and nothing else imports transformers and accelerate for their loops; names are loaded when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.integrations.accelerator import Accelerator
    from autopar.integrations.trainer import MeshTrainerMixin, Trainer

__all__ = ["Accelerator", "MeshTrainerMixin", "Trainer"]

_HOME = {"Accelerator": "accelerator", "MeshTrainerMixin": "trainer", "Trainer": "trainer"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    return value
