"""Checks that ranks get the same batch where they must: its shapes before a step is compiled, its contents at every
step, without waiting for an accelerator.

Tensors on the host are compared in the step itself. Tensors on an accelerator are compared in the first step of its
kind; later steps start copying their hashes to the host, and the next call compares them: a step, `clip_grad_norm_`, a
save or load of the state. By then the hashes have arrived, so the check never drains the accelerator's queue. After the
last step there may be no further call: its hashes are compared when the process ends, without waiting.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.ir.batch import ConstantTensor, map_tensors, tensors_of
from autopar.ir.mesh import DATA
from autopar.ir.placement import Placements, Shard
from autopar.plan import UNCLEAR, Plan
from autopar.runtime.consistency.exit_checks import ask_at_end, difference_at_end, no_longer_ask
from autopar.runtime.consistency.rank_checks import RankCheck, all_alike, everywhere
from autopar.runtime.consistency.tensor_hash import hashes_of, start_hashes
from autopar.runtime.mesh.process_groups import Groups


def shapes_of(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with its tensors on the meta device."""
    shapes: dict[str, Any] = map_tensors(batch, lambda _, x: torch.empty(x.shape, dtype=x.dtype, device="meta"))
    return shapes


# --- what ranks must agree on ---------------------------------------------------------------------------


def claim_shapes(groups: Groups, batch: Mapping[str, Any], further: Mapping[str, Any]) -> RankCheck:
    """A check of what a compiled step depends on: shapes and dtypes of tensors, values of everything else. ``further``:
    other facts that must be equal on all ranks, by name."""
    leaves = tensors_of(batch)
    facts = {name: f"{tuple(x.shape)} {x.dtype}" for name, x in leaves.items()}
    told = (bool, int, float, str, ConstantTensor)
    facts |= {name: repr(value) for name, value in batch.items() if isinstance(value, told)}
    static = [name for name, value in batch.items() if isinstance(value, ConstantTensor)]
    ways = "give every rank the same model, mesh, options and batch shapes"
    if static:
        ways += f" and equal values of the static inputs {', '.join(static)}, which the graph holds (or no dp and ep)"
    return RankCheck(
        everywhere(groups),
        facts | {name: str(value) for name, value in further.items()},
        "agree: the step and the shapes of the batch must be the same on all ranks",
        f'{ways}: drop or pad an uneven last batch, or pass padding="auto"',
    )


def check_unclear(groups: Groups, batch: Mapping[str, Any], plan: Plan, contents: bool) -> None:
    """Check inputs that the plan has taken for part of the batch without being sure: shards of a batch differ between
    dp ranks, a table that every rank gets does not. Collective. Without ``contents``, only warns.

    Raises ValueError, on all ranks, if all dp ranks have got the same values.
    """
    tensors = {name: x for name, x in tensors_of(batch).items() if name in plan.unclear_inputs() and x.numel()}
    if not tensors:
        return
    if not contents:
        warnings.warn(_unclear(list(tensors), "check_replica_inputs=False"), stacklevel=2)
        return
    hashes = hashes_of(tensors)
    if same := [name for name, x in hashes.items() if all_alike(groups, f"the contents of {name}", x)]:
        raise ValueError(_unclear(same, "the same on all ranks"))


def _unclear(names: Sequence[str], found: str) -> str:
    return (
        f"batch: input {', '.join(names)} {UNCLEAR}, found {found}; set batch_dims={{{names[0]!r}: None}} if every "
        f"rank gets all of it, batch_dims={{{names[0]!r}: 0}} if each rank of 'dp' gets its own shard"
    )


LATER = "to be compared in the next step"
SKIP = "check_replica_inputs=False skips this check"


Left = tuple[bool, Callable[[], list[RankCheck]]]  # whether a step has deferred checks to the next call, and which


@dataclass
class BatchContents:
    """The checks of the batches of one model."""

    groups: Groups
    _last: Left | None = None
    _next: Left | None = None

    def claims(
        self, batch: Mapping[str, Any], inputs: Mapping[str, Placements], at_once: bool = False
    ) -> list[RankCheck]:
        """Inputs that are sharded on dp and dp_replicate (``inputs``: their placements) must be equal on ranks with the
        same coordinates there; other inputs must be equal on all ranks. Values of any dtype are compared bitwise.

        If no two ranks must have equal inputs, nothing is hashed. ``at_once``: nothing is deferred to the next call.
        """
        tensors = {name: x for name, x in tensors_of(batch).items() if name in inputs}
        cutting = [axis for axis in DATA if self.groups.mesh.size(axis) > 1]
        unsharded = [n for n in tensors if cutting and not isinstance(inputs[n].get(cutting[0]), Shard)]
        shared = [n for n in tensors if n not in unsharded] if self._others() else []
        later = [n for n in (*shared, *unsharded) if _arrives(tensors[n]) and not at_once]
        now = {n: tensors[n] for n in (*shared, *unsharded) if n not in later}
        hashes = hashes_of(now) | dict.fromkeys(later, LATER)
        found = self._claims(shared, unsharded, hashes) + self._of_last()
        of_shared, of_all = ([n for n in names if n in later] for names in (shared, unsharded))
        arrived = start_hashes({n: tensors[n] for n in later})
        self._next = bool(later), lambda: self._claims(of_shared, of_all, arrived(), ", in the step before")
        return found

    def owed(self) -> list[RankCheck]:
        """The checks that the last step has deferred to this call."""
        found = self._of_last()
        self._keep(None)
        return found

    def _of_last(self) -> list[RankCheck]:
        return self._last[1]() if self._last is not None else []

    def exit_errors(self) -> str:
        """How the batch of the last step differs from those of ranks that have already ended; "" if it does not."""
        found = (difference_at_end(self.groups, claim) for claim in self.owed())
        return next(filter(None, found), "")

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """Context manager around the checks of one call: if they fail, checks deferred to the next call are dropped."""
        self._next = None
        try:
            yield
        except BaseException:
            self._next = None
            raise
        finally:
            self._keep(self._next)

    def _keep(self, last: Left | None) -> None:
        self._last = last
        (ask_at_end if last is not None and last[0] else no_longer_ask)(self)

    def _others(self) -> tuple[str, ...]:
        return tuple(axis for axis, size in self.groups.mesh.axes if axis not in DATA and size > 1)

    def _claims(
        self, shared: list[str], unsharded: list[str], hashes: Mapping[str, str], when: str = ""
    ) -> list[RankCheck]:
        others = self._others()
        return [
            RankCheck(
                others,
                {n: hashes[n] for n in shared},
                f"batch: the ranks of {' and '.join(map(repr, others))} must be given the same batch{when}",
                "feed every rank the batch of its dp coordinate (seed shuffling and augmentation by that, not by the "
                "rank); " + SKIP,
            ),
            RankCheck(
                everywhere(self.groups),
                {n: hashes[n] for n in unsharded},
                f"batch: inputs without a batch dim must be the same on all ranks{when}",
                "feed the same values, or set batch_dims={...} if each rank of 'dp' gets its own shard; " + SKIP,
            ),
        ]


def _arrives(x: Tensor) -> bool:
    """Whether the host would have to wait for its values."""
    return x.device.type != "cpu"
