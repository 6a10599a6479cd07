"""``check="replay"``: every n-th step is made twice, and what lies in memory between steps is hashed; bits that differ
are reported.

    a step            its two runs are bitwise equal, or the first tensor that differs is named (`StepNotes`)
    before it         shards that several ranks hold are equal on all of them
    after it          gradients, weights and optimizer states have changed only by operations, which torch counts
                      (``Tensor._version``), until the next step and the next update

A chip that computes wrongly does so now and then (Dixit et al., Silent Data Corruptions at Scale, 2021;
arXiv 2102.11245), so two runs differ.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autopar.adapters.autograd import version_of
from autopar.adapters.dtensor import local_of
from autopar.runtime.comm.step_notes import Note, StepNotes, noting
from autopar.runtime.consistency.tensor_hash import hash_of
from autopar.runtime.fault.error_propagation import ranks_named
from autopar.runtime.fault.errors import error_context
from autopar.runtime.mesh.process_groups import Groups
from autopar.values import refuse, whole_number

REPLAY, EVERY = "replay", 100


def replay_every(checks: Iterable[str]) -> int:
    """Every how many steps one is made twice, by the name "replay" or "replay:20" among the checks; 0 if none is.
    Raises ValueError."""
    for name in checks:
        first, _, count = name.partition(":")
        if first == REPLAY:
            if count and not count.isdigit():
                raise refuse("check", '"replay" or "replay:20", every how many steps', name)
            return whole_number("check: replay", int(count or EVERY), 1)
    return 0


class BitsDiffer(RuntimeError):
    """Two runs of a step gave other bits, or memory has changed by itself. The message names rank, action and
    tensor."""


def run_twice(groups: Groups, run: Callable[[], Any], results: Callable[[Any], Iterable[tuple[str, Tensor]]]) -> Any:
    """The result of the second of two runs of a step. ``results``: their names and tensors. Raises BitsDiffer on all
    ranks if the runs differ on any of them. Collective."""
    runs = []
    for _ in range(2):
        notes = StepNotes(hash_of)
        with noting(notes):
            made = run()
        notes.action = ""
        for name, x in results(made):
            notes.note(name, [x])
        runs.append(notes.notes)
    found: list[Any] = [_first_difference(*runs)]
    if groups.mesh.world_size > 1:
        found = [None] * groups.mesh.world_size
        dist.all_gather_object(found, _first_difference(*runs))
    if said := _origins(found):
        raise BitsDiffer(
            f"replay: two runs of this step must be bitwise equal, found that they differ in {said}: a chip or its "
            "memory has failed, or a kernel is not deterministic (torch.use_deterministic_algorithms(True) finds those)"
        )
    return made


def _first_difference(one: Sequence[Note], other: Sequence[Note]) -> tuple[str, bool] | None:
    """The first note that differs, in words, and whether it was received."""
    if not one:
        return None
    differ = (torch.stack([n.hashed for n in one]) != torch.stack([n.hashed for n in other])).nonzero()
    return (str(one[int(differ[0])]), one[int(differ[0])].received) if len(differ) else None


def _origins(found: Sequence[tuple[str, bool] | None]) -> str:
    """What differs first, on ranks that made it; of those that received it only if nobody made it."""
    differ = [(rank, *what) for rank, what in enumerate(found) if what is not None]
    made = [one for one in differ if not one[2]] or differ
    return "; ".join(f"{what} on {ranks_named([rank])}" for rank, what, _ in made)


@dataclass
class AtRest:
    """Tensors as they were: ``(name, tensor, versions, hash)``."""

    kept: list[tuple[str, Tensor, tuple[int, ...], Tensor]] = field(default_factory=list)

    def note(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep the hashes of these."""
        for name, x in tensors.items():
            self.kept.append((name, x, _versions(x), hash_of(_local(x))))

    def check(self) -> None:
        """Raises BitsDiffer for a tensor that has changed though nothing was written to it; forgets all."""
        kept, self.kept = [one for one in self.kept if _versions(one[1]) == one[2]], []
        if not kept:
            return
        now = torch.stack([hash_of(_local(x)) for _, x, _, _ in kept])
        differ = (now != torch.stack([hashed for *_, hashed in kept])).nonzero().flatten().tolist()
        if differ:
            names = ", ".join(kept[i][0] for i in differ[:3])
            raise BitsDiffer(
                f"replay: {names} on rank {dist.get_rank()} must be as the last step left it, found other bits though "
                "nothing was written to it: memory has failed, or it was written through .data, which torch does not "
                "count"
            )


def _local(x: Tensor) -> Tensor:
    return local_of(x) if isinstance(x, DTensor) else x


def _versions(x: Tensor) -> tuple[int, ...]:
    """Operators on a DTensor count there, those on its shard at the shard; its memory may be another one."""
    local = _local(x)
    return version_of(x), version_of(local), local.data_ptr()


class ReplayCheck:
    """When the steps of one model are made twice, and what is kept between them. ``parameters``: by name. ``alike``:
    raises if the ranks that hold the same shards have others."""

    def __init__(self, every: int, parameters: Callable[[], Mapping[str, Tensor]], alike: Callable[[], None]) -> None:
        self._every, self._parameters, self._alike = every, parameters, alike
        self._rest = AtRest()
        self._steps = 0
        before, after = weakref.WeakMethod(self._before), weakref.WeakMethod(self._after)
        hooks = (
            register_optimizer_step_pre_hook(lambda optimizer, *_: _called(before, optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, *_: _called(after, optimizer)),
        )
        for hook in hooks:
            weakref.finalize(self, hook.remove)

    @property
    def due(self) -> bool:
        """Whether this step is made twice."""
        return self._steps % self._every == 0

    def begin(self) -> None:
        """A training step begins. Collective where it is due."""
        self._steps += 1
        self._rest.check()
        if self.due:
            self._alike()

    def end(self) -> None:
        """Its gradients are in place."""
        if self.due:
            own = self._parameters()
            self._rest.note(own)
            self._rest.note({f"the gradient of {name}": p.grad for name, p in own.items() if p.grad is not None})

    def _before(self, optimizer: Optimizer) -> None:
        if self._is_ours(optimizer):
            with error_context("optimizer.step"):
                self._rest.check()

    def _after(self, optimizer: Optimizer) -> None:
        if self.due and self._is_ours(optimizer):
            own = {id(p): name for name, p in self._parameters().items()}
            states = (
                (own[id(p)], key, x) for p, of in optimizer.state.items() if id(p) in own for key, x in of.items()
            )
            self._rest.note(self._parameters())
            self._rest.note({f"the state {key} of {n}": x for n, key, x in states if isinstance(x, Tensor)})

    def _is_ours(self, optimizer: Optimizer) -> bool:
        own = {id(p) for p in self._parameters().values()}
        return any(id(p) in own for group in optimizer.param_groups for p in group["params"])


def _called(hook: weakref.WeakMethod[Any], optimizer: Optimizer) -> None:
    """Call it, unless its check is gone."""
    if (call := hook()) is not None:
        call(optimizer)
