"""Clipping gradients by their norm over all ranks, pipeline stages included.

Powers of local norms (one foreach call), each divided by its number of replicas, are summed by one all-reduce over pp
and all axes that shard any parameter. So all ranks scale by the same number, even if replicas differ in the last bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from autopar.adapters.foreach import norms, scale_all
from autopar.ir.signature import ParameterSpec
from autopar.runtime.comm.collectives import all_reduce, finish
from autopar.runtime.consistency.rank_checks import RankCheck, agree_on_arguments
from autopar.runtime.mesh.process_groups import Groups
from autopar.runtime.params.parameters import local_tensor
from autopar.runtime.params.shards import cuts_of
from autopar.values import number, refuse


def clip_gradients(
    parameters: Mapping[str, nn.Parameter],
    specs: Iterable[ParameterSpec],
    groups: Groups,
    max_norm: float,
    norm_type: float = 2.0,
    owed: Sequence[RankCheck] = (),
    scale: Tensor | None = None,
) -> Tensor:
    """Scale the gradients of this rank's parameters such that the norm of all gradients is at most ``max_norm``.

    ``owed``: checks that earlier steps have deferred. ``scale``: the loss scale of the gradients, which is removed in
    the same pass. Returns the norm before clipping, the same on all ranks (float64). A tied weight on several stages
    counts once. Collective. Raises ValueError for a ``max_norm`` below 0, and for an invalid ``norm_type``.
    """
    max_norm, norm_type = number("max_norm", max_norm, 0.0), number("norm_type", norm_type)
    if norm_type <= 0.0:
        raise refuse("norm_type", "a number above 0, such as 2.0 or math.inf", norm_type)
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    agree_on_arguments(groups, "clip_grad_norm_", {"max_norm": max_norm, "norm_type": norm_type}, gradients, owed)
    pieces = {name: local_tensor(gradient) for name, gradient in gradients.items()}
    total = _total_norm(pieces, list(specs), groups, norm_type)
    total = total if scale is None else total / scale
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    scale_all(list(pieces.values()), factor if scale is None else factor / scale)
    return total


def over_world(value: Tensor, groups: Groups) -> Tensor:
    """The maximum over all ranks. Collective."""
    return _over_ranks(value, groups, [axis for axis, size in groups.mesh.axes if size > 1], "max")


def _total_norm(
    pieces: Mapping[str, Tensor], specs: Sequence[ParameterSpec], groups: Groups, norm_type: float
) -> Tensor:
    sizes = groups.mesh.sizes
    cuts = {spec.name: {axis for axis, _ in cuts_of(spec.placements, sizes)} for spec in specs}
    axes = [a for a, size in groups.mesh.axes if size > 1 and (a == "pp" or any(a in cut for cut in cuts.values()))]
    here = groups.coordinate.get("pp", 0)
    counted = [s.name for s in specs if s.ranks[0] == here and s.name in pieces]
    held = dict(zip(counted, norms([pieces[name] for name in counted], norm_type, _wide(pieces.values()))))
    if norm_type == math.inf:
        return _over_ranks(_stacked(held.values(), groups.device).amax(), groups, axes, "max")
    copies = {name: math.prod(sizes[a] for a in axes if a != "pp" and a not in cuts[name]) for name in counted}
    power = torch.zeros((), dtype=torch.float64, device=groups.device)
    for count in sorted(set(copies.values())):  # few: numbers that stay on the host need no copy to the device
        alike = _stacked((held[name] for name in counted if copies[name] == count), groups.device)
        power += (alike**norm_type).sum() / count
    return _over_ranks(power, groups, axes, "sum") ** (1.0 / norm_type)


def _wide(tensors: Iterable[Tensor]) -> torch.dtype:
    """The dtype to compute norms in: float32 or wider."""
    return functools.reduce(torch.promote_types, (x.dtype for x in tensors), torch.float32)


def _stacked(values: Iterable[Tensor], device: torch.device) -> Tensor:
    """The values as one float64 tensor; a zero if there are none."""
    found = list(values)
    return torch.stack(found).double() if found else torch.zeros(1, dtype=torch.float64, device=device)


def _over_ranks(value: Tensor, groups: Groups, axes: Sequence[str], op: str) -> Tensor:
    return finish(all_reduce(groups, "norm", ",".join(axes), op)(value)) if axes else value
