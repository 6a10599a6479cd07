"""The batch that the user passes to a step: its shapes, and what ranks must agree on before they compile it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.capture.trace.export import flatten, unflatten
from autopar.ir.batch import ConstantTensor, tensors_of
from autopar.plan import UNCLEAR, Plan
from autopar.runtime.consistency.rank_checks import RankCheck, all_alike, everywhere
from autopar.runtime.consistency.tensor_hash import words_of
from autopar.runtime.mesh.process_groups import Groups


def shapes_of(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with its tensors on the meta device."""
    leaves, spec = flatten(batch)
    out: dict[str, Any] = unflatten([_shape(x) if isinstance(x, Tensor) else x for x in leaves], spec)
    return out


def _shape(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


# --- what ranks must agree on ---------------------------------------------------------------------------


def claim_shapes(groups: Groups, batch: Mapping[str, Any], further: Mapping[str, Any]) -> RankCheck:
    """Shapes and dtypes of tensors, values of everything else: what a compiled step depends on. ``further``: more that
    must be the same on all ranks, by name."""
    leaves = tensors_of(batch)
    facts = {name: f"{tuple(x.shape)} {x.dtype}" for name, x in leaves.items()}
    told = (bool, int, float, str, ConstantTensor)
    facts |= {name: repr(value) for name, value in batch.items() if isinstance(value, told)}
    return RankCheck(
        everywhere(groups),
        facts | {name: str(value) for name, value in further.items()},
        "agree: the step and the shapes of the batch must be the same on all ranks",
        "give every rank the same model, mesh, options and batch shapes: drop or pad a last batch that is uneven",
    )


def check_unclear(groups: Groups, batch: Mapping[str, Any], plan: Plan, contents: bool) -> None:
    """Inputs of which the plan does not know whether they are part of the batch, and takes them for it: parts differ
    from one dp rank to the next, a table that all are given does not. Collective. Without ``contents``, a warning.

    Raises ValueError, on all ranks, where the ranks of dp were given the same.
    """
    tensors = {name: x for name, x in tensors_of(batch).items() if name in plan.unclear_inputs() and x.numel()}
    if not tensors:
        return
    if not contents:
        warnings.warn(_unclear(list(tensors), "check_replica_inputs=False"), stacklevel=2)
        return
    words = words_of(tensors)
    if same := [name for name, word in words.items() if all_alike(groups, f"the contents of {name}", word)]:
        raise ValueError(_unclear(same, "the same on all ranks"))


def _unclear(names: Sequence[str], found: str) -> str:
    return (
        f"batch: input {', '.join(names)} {UNCLEAR}, found {found}; say batch_dims={{{names[0]!r}: None}} if every "
        f"rank is given all of it, batch_dims={{{names[0]!r}: 0}} if each rank of 'dp' is given its own part"
    )
