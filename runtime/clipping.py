"""Clipping gradients by their norm over all ranks, pipeline stages included."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from autopar.ir.parameter import ParameterSpec
from autopar.runtime.agreement import agree_on_arguments
from autopar.runtime.comm import all_reduce, finish
from autopar.runtime.groups import Groups
from autopar.runtime.state import local_tensor, whole_tensor
from autopar.values import number, refuse


def clip_gradients(
    parameters: Mapping[str, nn.Parameter],
    specs: Iterable[ParameterSpec],
    groups: Groups,
    max_norm: float,
    norm_type: float = 2.0,
) -> Tensor:
    """Scale the gradients of this rank's parameters such that the norm of all gradients is at most ``max_norm``.

    Returns the norm before, the same on all ranks (float64). A tied weight that several stages hold counts once.
    Collective. Raises ValueError for a ``max_norm`` below 0 and for norms that are none.
    """
    max_norm, norm_type = number("max_norm", max_norm, 0.0), number("norm_type", norm_type)
    if norm_type <= 0.0:
        raise refuse("norm_type", "a number above 0, such as 2.0 or math.inf", norm_type)
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    agree_on_arguments(groups, "clip_grad_norm_", {"max_norm": max_norm, "norm_type": norm_type}, gradients)
    here = groups.coordinate.get("pp", 0)
    counted = [s.name for s in specs if s.ranks[0] == here and s.name in gradients]
    norms = [whole_tensor(torch.linalg.vector_norm(gradients[name], norm_type)) for name in counted]
    total = torch.stack(norms) if norms else torch.zeros(1)
    total = torch.linalg.vector_norm(total.to(groups.device, torch.float64), norm_type)
    if groups.mesh.size("pp") > 1:
        total = _over_stages(total, groups, norm_type)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for gradient in gradients.values():
        local_tensor(gradient).mul_(scale.to(gradient.dtype))
    return total


def _over_stages(total: Tensor, groups: Groups, norm_type: float) -> Tensor:
    if norm_type == math.inf:
        return finish(all_reduce(groups, "norm", "pp", "max")(total))
    return finish(all_reduce(groups, "norm", "pp", "sum")(total**norm_type)) ** (1.0 / norm_type)
