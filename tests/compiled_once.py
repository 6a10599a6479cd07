"""Structures that are alike are planned and compiled once: for tests that put a model on a mesh several times, and ask
about what runs there.

    with compiled_once():
        parallelize(model, mesh); parallelize(same(model), mesh)        captured and compiled once
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autopar import api
from autopar.adapters.hooks import hooks_of_all


@contextmanager
def compiled_once() -> Iterator[None]:
    """Ranks that are forked within remember as well, each what it compiles."""
    originals = api.stored_plan, api.stored_step
    api.stored_plan, api.stored_step = map(_remembered, originals)
    try:
        yield
    finally:
        api.stored_plan, api.stored_step = originals


def _facts(module: nn.Module) -> str:
    """A text that differs where modules do: what two compiled steps may share, they share in these tests."""
    ids: dict[int, str] = {}
    text = []
    for path, m in module.named_modules(remove_duplicate=False):
        plain = {k: vars(v) if type(v).__name__ == "Config" else v for k, v in vars(m).items() if not k.startswith("_")}
        text.append(f"{path} {type(m)} {plain}")
        text += [f"{path} {k} {v}" for k, v in vars(m).items() if k.startswith("_") and "hooks" in k and v]
    for kind in (module.named_parameters, module.named_buffers):
        for name, x in kind(remove_duplicate=False):
            text.append(f"{name} {ids.setdefault(id(x), name)} {tuple(x.shape)} {x.dtype} {x.requires_grad}")
    return "\n".join(text)


def _remembered(make: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[str, Any] = {}

    def call(model: nn.Module, given: Mapping[str, Any], mesh: Any, options: Any, *args: Any, **how: Any) -> Any:
        shapes = [(k, tuple(v.shape), v.dtype) for k, v in given.items()]
        fixed = how.get("fixed")
        rest = [str(how.get(k)) for k in ("train", "outputs", "tangents", "autocast", "exact")]
        rest.append(str(fixed and (fixed.graph, sorted(fixed.parameters))))
        surroundings = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), str(hooks_of_all())
        key = f"{_facts(model)} {shapes} {mesh} {options} {rest} {surroundings}"
        if key not in known:
            known[key] = model, make(model, given, mesh, options, *args, **how)  # hooks in the key stay alive
        return known[key][1]

    return call
