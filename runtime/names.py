"""Submodules that hold parameters and buffers under their original dotted names."""

from __future__ import annotations

from typing import Any

from torch import nn


class Holder(nn.Module):
    """Holds parameters and buffers under the names of one of the model's modules. Nobody calls it, so it refuses the
    hooks of a call."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            "hooks: the modules of a parallel model hold parameters and are not called, so the hook would not be; "
            "register forward hooks before parallelize, which are traced, or hooks on parameters"
        )

    register_forward_hook = register_forward_pre_hook = _refuse
    register_full_backward_hook = register_full_backward_pre_hook = register_backward_hook = _refuse


def owner_of(root: nn.Module, name: str, skeleton: nn.Module) -> nn.Module:
    """The submodule that holds a dotted name; made on the way, so that names stay the original ones."""
    module = root
    for part in name.split(".")[:-1]:
        children = dict(module.named_children())
        if part not in children:
            module.add_module(part, Holder())
        module = module.get_submodule(part)
    return module


def make_owners(root: nn.Module, skeleton: nn.Module, names: list[str]) -> None:
    """The submodules that hold something, in the model's order: the state has its names in this order."""
    for path, _ in skeleton.named_modules(remove_duplicate=False):
        if path and any(name.startswith(f"{path}.") for name in names):
            owner_of(root, f"{path}.", skeleton)
