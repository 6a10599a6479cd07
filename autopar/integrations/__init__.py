"""Training loops of other libraries on a mesh; one line of a script changes.

    from autopar.integrations import Trainer         transformers.Trainer, with mesh=
    class Mine(MeshTrainerMixin, SFTTrainer): ...    any other subclass of it
    from autopar.integrations import Accelerator     accelerate.Accelerator, with mesh=

Arguments have their usual meaning, and those without one on a mesh are refused. Only user scripts import this package,
which imports the trainers of transformers and accelerate; names are loaded when they are first used.
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
