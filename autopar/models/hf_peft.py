"""peft models: the tensors of an adapter folder, and their names.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight      in the model
    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight              in adapter_model.safetensors

peft itself says which: it is asked with tensors on the meta device. It is loaded when there is a model of it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

FILE = "adapter_model.safetensors"


def is_peft(model: nn.Module) -> bool:
    """Whether a model is a PeftModel, and no other wrapper."""
    ours = any(cls.__module__.split(".")[0] == "peft" for cls in type(model).__mro__)
    return ours and hasattr(model, "peft_config") and hasattr(model, "get_base_model")


class AdapterFolder:
    """The folder that `save_pretrained` of a PeftModel writes. names: the tensors in it."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._saved_as = {adapter: _saved_as(model, adapter) for adapter in model.peft_config}
        self.names = {name for names in self._saved_as.values() for name in names.values()}

    def write(self, folder: Path, state: Mapping[str, Tensor]) -> None:
        """Write the folder. ``state``: unsharded tensors of `names`."""
        self._model.save_pretrained(str(folder), state_dict=dict(state), is_main_process=True)

    def read(self, folder: Path) -> dict[str, Tensor]:
        """Read unsharded tensors by name in the model. Raises ValueError for a folder of another adapter."""
        found: dict[str, Tensor] = {}
        for adapter, names in self._saved_as.items():
            file = (folder if adapter == "default" else folder / adapter) / FILE
            if not file.is_file():
                raise ValueError(f"load_pretrained: needs {FILE}, found none in {file.parent}")
            try:
                stored = load_file(file)
            except (SafetensorError, OSError) as error:
                raise ValueError(f"load_pretrained: {file} is truncated or not a safetensors file: {error}") from error
            if other := stored.keys() ^ names.keys():
                raise ValueError(
                    f"load_pretrained: {file} does not fit the model's adapter {adapter!r}: {min(other)} is in one of "
                    "them only; load the adapter that was saved from this configuration"
                )
            found |= {names[key]: x for key, x in stored.items()}
        return found


def _saved_as(model: Any, adapter: str) -> dict[str, str]:
    """Name in the folder -> name in the model."""
    peft: Any = importlib.import_module("peft")
    whole = {n: torch.empty(x.shape, dtype=x.dtype, device="meta") for n, x in model.state_dict().items() if _dense(x)}
    name_of = {id(x): name for name, x in whole.items()}
    found = peft.get_peft_model_state_dict(model, state_dict=whole, adapter_name=adapter)
    return {saved: name_of[id(x)] for saved, x in found.items() if id(x) in name_of}


def _dense(x: Any) -> bool:
    return isinstance(x, Tensor)
