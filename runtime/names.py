"""Submodules that hold parameters and buffers under their original dotted names."""

from __future__ import annotations

from torch import nn


def owner_of(root: nn.Module, name: str, skeleton: nn.Module) -> nn.Module:
    """The submodule that holds a dotted name; made on the way, so that names stay the original ones."""
    module = root
    for part in name.split(".")[:-1]:
        children = dict(module.named_children())
        if part not in children:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    return module


def make_owners(root: nn.Module, skeleton: nn.Module, names: list[str]) -> None:
    """The submodules that hold something, in the model's order: the state has its names in this order."""
    for path, _ in skeleton.named_modules(remove_duplicate=False):
        if path and any(name.startswith(f"{path}.") for name in names):
            owner_of(root, f"{path}.", skeleton)
