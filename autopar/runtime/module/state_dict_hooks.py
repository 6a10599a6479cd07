"""Modules that define their own state: hooks of a state dict, `get_extra_state`, an overridden `state_dict`.

torch calls all of these with full tensors, and so does a parallel model: meanwhile its modules have full parameters
(`sharded_modules.ShardedModules.whole`), so they return and accept the same state as in one process.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from autopar.adapters.autograd import version_of
from autopar.adapters.state_dict import IncompatibleKeys, with_notes_of
from autopar.errors import refusal_like
from autopar.runtime.module.overridden_methods import overrides
from autopar.runtime.params.sharded_modules import ShardedModules

_SAVED = ("state_dict", "_save_to_state_dict", "get_extra_state")
_LOADED = ("load_state_dict", "_load_from_state_dict", "set_extra_state")
_HOOKS_OF_SAVING = ("_state_dict_hooks", "_state_dict_pre_hooks")
_HOOKS_OF_LOADING = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


def says_itself(root: nn.Module) -> bool:
    """Whether some module defines or changes its state dict."""
    return any(_has(m, _SAVED, _HOOKS_OF_SAVING) for m in root.modules())


def loads_itself(root: nn.Module) -> bool:
    """Whether some module changes how a state dict is loaded. (Hooks of torch's modules only read older layouts.)"""
    return any(_has(m, _LOADED, _HOOKS_OF_LOADING) for m in root.modules())


def with_extra_state(root: nn.Module) -> dict[str, nn.Module]:
    """By path, the modules that have a state beside tensors, which is the same on all ranks."""
    return {path: m for path, m in root.named_modules() if overrides(m, "get_extra_state")}


def _has(module: nn.Module, methods: tuple[str, ...], hooks: tuple[str, ...]) -> bool:
    if any(getattr(module, name) for name in hooks):
        return True
    return not type(module).__module__.startswith("torch.nn.") and overrides(module, *methods)


def said(tree: ShardedModules, whole: Mapping[str, Tensor]) -> Any:
    """The state dict of the model with these ``whole`` (full) parameters: copies on the CPU."""
    with tree.whole(whole) as root:
        found = root.state_dict()
    own = {x.data_ptr() for x in whole.values()}

    def kept(x: Any) -> Any:
        return x if not isinstance(x, Tensor) or x.data_ptr() in own else x.detach().cpu().clone()

    if type(found) not in (dict, OrderedDict):
        return found
    return with_notes_of(found, {name: kept(x) for name, x in found.items()})


def load_or_refuse(root: nn.Module, given: Any, strict: bool) -> tuple[Any, ValueError | None]:
    """(what the model's `load_state_dict` returned, its error or None)."""
    try:
        return root.load_state_dict(given) if strict else root.load_state_dict(given, strict=False), None
    except RuntimeError as error:
        return IncompatibleKeys([], []), refusal_like(error, f"load_state_dict: {' '.join(str(error).split())}")


def loaded(
    tree: ShardedModules, whole: Mapping[str, Tensor], given: Any, strict: bool
) -> tuple[Any, ValueError | None, dict[str, Tensor]]:
    """What `load_or_refuse` returns, and by name the full parameters that it has written or replaced in a model with
    these ``whole`` ones."""
    with tree.whole(whole) as root:
        before = {name: (p, version_of(p)) for name, p in root.named_parameters(remove_duplicate=False)}
        found, refused = load_or_refuse(root, given, strict)
        now = dict(root.named_parameters(remove_duplicate=False))
        return found, refused, {name: p.detach() for name, p in now.items() if _is_new(before.get(name), p)}


def _is_new(before: tuple[Tensor, int] | None, now: Tensor) -> bool:
    return before is None or before[0] is not now or before[1] != version_of(now)
