"""Tags: attributes that the user has set on a parameter or buffer (``p._no_weight_decay = True``).

They are in the tensor's ``__dict__``, beside attributes of torch. Copies of a model have them, and so do the tensors
that replace its own while a forward is traced. `torch.utils.swap_tensors`, which ``model.half()`` calls for DTensors,
would lose them: `keep_tags` prevents that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor

_APPLY = "_apply"
KINDS = (Tensor, nn.Parameter, nn.Buffer)


@functools.cache
def _inner() -> frozenset[str]:
    """Attributes that torch sets itself. Not computed at import: a fake mode looks for GPUs, and a process that has
    done so cannot be forked into ranks that use them."""
    with FakeTensorMode():
        fake = torch.empty(())
    assert isinstance(fake, FakeTensor)
    return frozenset({*vars(fake), "_is_param", "share_memory_"})


def tags_of(x: Tensor) -> dict[str, Any]:
    """The attributes that the user has set on a tensor, in order."""
    entries = x.__dict__
    if len(entries) - ("_is_param" in entries) - ("share_memory_" in entries) == 0:  # most have none
        return {}
    declared = getattr(type(x), "__annotations__", {})  # attributes of the subclass itself
    return {name: value for name, value in entries.items() if name not in _inner() and name not in declared}


OF_LIBRARIES = {
    "torchao": (
        'pass the model before its conversion and precision="fp8", "fp8_row" or "mxfp8", or freeze linear layers of '
        "Int8WeightOnlyConfig() or to_nf4"
    ),
    "bitsandbytes": "only linear layers keep frozen weights of bitsandbytes in 4 bits: leave others in full precision",
}  # library -> what to do about its tensors


def check_tags(model: nn.Module) -> None:
    """Raises ValueError for parameters and buffers of a custom class, whose behaviour shards would not have, and for
    tags with names that DTensor or fake tensors use."""
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, x in named:
            if type(x) not in KINDS:
                of = OF_LIBRARIES.get(type(x).__module__.partition(".")[0], "")
                raise ValueError(
                    f"parallelize: needs plain parameters and buffers, found {kind} {name}, a {type(x).__qualname__}; "
                    f"on a mesh it becomes a DTensor and loses the behaviour of this class; "
                    f"{of or f'make it {_plain_kind(kind)} (attributes that are set on it are kept)'}"
                )
            for tag in x.__dict__:
                taken = tag in _inner() - {"_is_param"} or hasattr(DTensor, tag)
                if taken and not hasattr(nn.Parameter, tag):
                    raise ValueError(
                        f"parallelize: needs unused names for attributes of tensors, found .{tag} on {kind} {name}, "
                        "which DTensor or torch.export uses; rename it"
                    )


def _plain_kind(kind: str) -> str:
    return "an nn.Parameter" if kind == "parameter" else "a plain tensor"


class ReplacedTensors:
    """The tags of a module's tensors, to be set on tensors that replace them in a traced forward."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [(entries, name, tags) for entries, name, tags in _tagged(model) if tags]

    def tag(self) -> None:
        """Set the tags on the tensors that are there now."""
        for entries, name, tags in self._places:
            x = entries.get(name)
            if x is not None:
                x.__dict__.update(tags)


def _tagged(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, dict[str, Any]]]:
    for module in model.modules():
        for entries in (module._parameters, module._buffers):
            yield from ((entries, name, tags_of(x)) for name, x in entries.items() if x is not None)


def keep_tags(module: nn.Module) -> None:
    """Keep tags of this module's parameters across ``module.half()`` and the like. Call `free_tags` on copies to
    restore the default."""
    kind = type(module)

    def applied(fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        parameters, entries_of = module._parameters, dict(module._parameters)
        held = [(x, dict(x.__dict__)) for x in parameters.values() if x is not None]
        for name in [name for name, x in parameters.items() if x is not None and _stays(x, fn)]:
            del parameters[name]  # else torch swaps it with a copy, which breaks the backward
        try:
            return getattr(kind, _APPLY)(module, fn, *args, **kwargs)
        finally:
            if len(parameters) < len(entries_of):
                changed = dict(parameters)
                parameters.clear()
                parameters.update({name: changed.get(name, x) for name, x in entries_of.items()})
            for x, entries in held:
                x.__dict__.update({name: value for name, value in entries.items() if name not in x.__dict__})

    module.__dict__[_APPLY] = applied


def _stays(x: Tensor, fn: Callable[[Tensor], Tensor]) -> bool:
    """Whether a cast or move does not change a parameter and its gradient."""
    with torch.no_grad():
        return fn(x) is x and (x.grad is None or fn(x.grad) is x.grad)


def free_tags(module: nn.Module) -> None:
    """Undo `keep_tags`."""
    module.__dict__.pop(_APPLY, None)
