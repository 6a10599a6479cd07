"""`print(model)`: the user's modules, and how their parameters lie on the mesh.

    LlamaForCausalLM on dp=2, tp=2: 25,632 parameters, this rank holds 13,120 (51 %)
      (model): LlamaModel
        (embed_tokens): Embedding(64, 32)
            weight [64, 32] tp: S(0), 1/2 here

A module's own line is what its class returns for it. Equal neighbours in a list share one line.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from torch import nn

from autopar.ir.mesh import Mesh
from autopar.ir.signature import ParameterSpec

_INDENT = "  "


def module_text(root: nn.Module, specs: Iterable[ParameterSpec], mesh: Mesh, held: Mapping[str, object]) -> str:
    """The text of the tree. ``held``: the parameters of this rank, by name."""
    specs = list(specs)
    whole = sum(math.prod(s.shape) for s in specs)
    here = sum(math.prod(s.local_shape(mesh)) for s in specs if s.name in held)
    share = f"{100 * here / whole:.0f} %" if whole else "all"
    head = f"{type(root).__name__} on {mesh}: {whole:,} parameters, this rank holds {here:,} ({share})"
    by_module: dict[str, list[str]] = {}
    for spec in specs:
        for name in (spec.name, *spec.aliases):
            path, _, own = name.rpartition(".")
            by_module.setdefault(path, []).append(_parameter(own, name, spec, mesh, held))
    return "\n".join([head, *_lines(root, "", by_module)])


def _parameter(own: str, name: str, spec: ParameterSpec, mesh: Mesh, held: Mapping[str, object]) -> str:
    cuts = ", ".join(f"{axis}: {placement}" for axis, placement in spec.placements.items())
    pieces = math.prod(spec.shape) // max(1, math.prod(spec.local_shape(mesh)))
    share = "on other stages" if spec.name not in held else f"1/{pieces} here" if pieces > 1 else "whole here"
    tied = "" if name == spec.name else f", tied to {spec.name}"
    frozen = "" if spec.requires_grad else ", frozen"
    return f"{own} {list(spec.shape)} {f'{cuts}, ' if cuts else ''}{share}{tied}{frozen}"


def _lines(module: nn.Module, path: str, by_module: Mapping[str, list[str]]) -> list[str]:
    """The lines below that of a module."""
    found = [f"{_INDENT * 2}{text}" for text in by_module.get(path, [])]
    groups: list[tuple[list[str], str, list[str]]] = []  # names of equal neighbours, their line, the lines below
    for name, child in module.named_children():
        line, below = _line(child), _lines(child, f"{path}.{name}" if path else name, by_module)
        if groups and name.isdecimal() and groups[-1][1:] == (line, below):
            groups[-1][0].append(name)
        else:
            groups.append(([name], line, below))
    for names, line, below in groups:
        label = names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}"
        count = "" if len(names) == 1 else f"{len(names)} x "
        found += [f"{_INDENT}({label}): {count}{line}", *(_INDENT + text for text in below)]
    return found


def _line(module: nn.Module) -> str:
    said = module.extra_repr().replace("\n", ", ")
    return f"{type(module).__name__}({said})" if said else type(module).__name__
