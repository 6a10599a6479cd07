"""Steps on whole parameters, for optimizers whose update of an element depends on others.

    step_owned       parameter by parameter, each on one rank of those that share it; then its shards travel back
    step_together    all at once, on every rank

States of a parameter's shape are sharded like it between steps; all others are the same on every rank.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from autopar.adapters.dtensor import local_of
from autopar.adapters.optimizer_step import own_step
from autopar.runtime.optim.cpu_offload import OffloadedStates
from autopar.runtime.optim.local_step import over, piece_of_state
from autopar.runtime.optim.owners import Owned, from_owners, in_rounds, of_all, to_owners
from autopar.runtime.params.dtensor_layout import as_local, is_here
from autopar.runtime.params.sharded_tensor import ShardedTensor, all_written

IsOurs = Callable[[Tensor], bool]


@dataclass(eq=False)
class Member:
    """A whole parameter with its gradient, in the i-th group of an optimizer, and its state before and after a step."""

    group: int
    whole: nn.Parameter
    state: dict[str, Any]


@contextlib.contextmanager
def holding(
    optimizer: Optimizer, members: Sequence[Member], is_ours: IsOurs | None, spares: Mapping[int, Member]
) -> Iterator[None]:
    """Context manager: an optimizer has these members in place of our parameters, besides those that are not ours.
    ``is_ours`` None: without these, and what the step changes besides its members is forgotten, since the last step,
    with other members, is to come. ``spares``: for groups that would be empty."""
    groups, states, before = optimizer.param_groups, optimizer.state, dict(vars(optimizer))
    made = []
    for i, group in enumerate(groups):
        mine = [m.whole for m in members if m.group == i]
        rest = [p for p in group["params"] if not is_ours(p)] if is_ours is not None else []
        if is_ours is not None and not mine and not rest and i in spares:
            mine = [spares[i].whole]
        made.append({**group, "params": mine + rest})
    held = [*members, *(spares.values() if is_ours is not None else ())]
    kept = {key: state for key, state in states.items() if not (is_ours and isinstance(key, Tensor) and is_ours(key))}
    optimizer.param_groups = made if is_ours is not None else [g for g in made if g["params"]]
    optimizer.state = defaultdict(dict, {**(kept if is_ours is not None else {}), **{m.whole: m.state for m in held}})
    try:
        yield
    finally:
        stepped, after = optimizer.param_groups, optimizer.state
        if is_ours is None:
            vars(optimizer).clear()
            vars(optimizer).update(before)
        optimizer.param_groups, optimizer.state = groups, states
        for m in held:
            m.state = after.pop(m.whole, {})
        if is_ours is not None:
            states.update(after)
            for group, changed in zip(groups, stepped, strict=True):
                group.update({name: value for name, value in changed.items() if name != "params"})


# --- each by its owner -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Like:
    """In place of a state of a parameter's shape: its position among them."""

    at: int


@torch.no_grad()
def step_owned(optimizer: Optimizer, is_ours: IsOurs, hosts: OffloadedStates | None, call: Callable[[], Any]) -> Any:
    """Step each of our parameters on its owner. ``call``: runs the step; ``hosts``: the offloaded states, if any.
    Collective. Returns what the step of the last parameters returns."""
    found = [(i, p) for i, group in enumerate(optimizer.param_groups) for p in group["params"] if is_ours(p)]
    stepped: list[Owned] = []
    spares: dict[int, Member] = {}
    for i, p in found:
        if i not in spares:
            spares[i] = spare(optimizer, i, p)
        if p.grad is not None and is_here(p):
            stepped.append(Owned(p, i))
        elif p.grad is not None:
            local_of(p).zero_()  # nothing, which counts as written on all stages
    rounds = [*in_rounds(stepped)] or [[]]
    for k, members in enumerate(rounds):
        parameters = [m.p for m in members]
        if hosts is not None:
            hosts.bring(parameters)()
        mine = _gathered(optimizer, members)
        last = k == len(rounds) - 1
        if last or mine:
            with holding(optimizer, [*mine.values()], is_ours if last else None, spares):
                out = call() if last else own_step(optimizer)(optimizer)
        _spread(optimizer, members, mine)
        if hosts is not None:
            hosts.put_away(parameters)()
    return out


def _gathered(optimizer: Optimizer, members: Sequence[Owned]) -> dict[int, Member]:
    """Position -> the whole parameter, for those that this rank owns."""
    shards = []
    for m in members:
        like: list[Tensor] = [local_of(m.p).detach(), local_of(m.p.grad).detach()]
        m.state = over(Tensor, dict(optimizer.state.get(m.p, {})), functools.partial(_noted, m.p, like))
        shards.append(like)
    mine = {}
    for k, (m, whole) in enumerate(zip(members, to_owners(members, shards), strict=True)):
        if whole is not None:
            p = nn.Parameter(whole[0], requires_grad=m.p.requires_grad)
            p.grad = whole[1]
            mine[k] = Member(m.group, p, _filled(m.state, whole[2:]))
    return mine


def _noted(p: Any, like: list[Tensor], x: Tensor) -> Any:
    x = piece_of_state(p, x, keep=True)
    if not (isinstance(x, ShardedTensor) and p.lies_as(x) and p.dim()):
        return as_local(x)
    like.append(x.fresh().detach())
    return _Like(len(like) - 3)


def _filled(state: Any, like: Sequence[Tensor]) -> Any:
    return over(_Like, state, lambda x: like[x.at])


def _spread(optimizer: Optimizer, members: Sequence[Owned], mine: Mapping[int, Member]) -> None:
    """Put the shards of what owners have stepped in place, and states."""
    whole: list[list[Tensor] | None] = [None] * len(members)
    told: dict[int, Any] = {}
    for k, stepped in mine.items():
        like = [stepped.whole.detach()]
        state = over(Tensor, stepped.state, functools.partial(_noted_whole, stepped.whole.shape, like))
        whole[k], told[k] = like, (state, [x.dtype for x in like])
    if members and members[0].p.cuts:
        told = of_all({k: (over(Tensor, state, _Sent), dtypes) for k, (state, dtypes) in told.items()}, members)
    shards = from_owners(members, whole, [told[k][1] for k in range(len(members))])
    for k, (m, (moved, *like)) in enumerate(zip(members, shards, strict=True)):
        local, state = local_of(m.p), over(_Sent, told[k][0], functools.partial(_received, m.p.device))
        if moved.data_ptr() != local.data_ptr():
            local.copy_(moved)
        if m.p in optimizer.state or state:
            optimizer.state[m.p] = _filled(state, [m.p.like(x) for x in like])


def _noted_whole(shape: torch.Size, like: list[Tensor], x: Tensor) -> Any:
    if x.shape != shape or not x.dim():
        return x
    like.append(x.detach())
    return _Like(len(like) - 2)


class _Sent:
    """A tensor on its way to other ranks; ``on_host``: whether it is in host memory at its owner."""

    def __init__(self, x: Tensor) -> None:
        self.on_host, self.value = x.device.type == "cpu", x.detach().cpu()


def _received(device: torch.device, x: _Sent) -> Tensor:
    return x.value if x.on_host else x.value.to(device)


_SPARES = WeakIdKeyDictionary()  # optimizer -> its group -> a member


def spare(optimizer: Optimizer, group: int, p: Tensor) -> Member:
    """A small parameter for a group of which this rank owns nothing, so that its options change as on other ranks."""
    kept = _SPARES.setdefault(optimizer, {})
    shape = tuple(min(size, 8) for size in p.shape)
    numbers = torch.linspace(0.1, 1.0, max(1, int(torch.Size(shape).numel())), dtype=torch.float64).cos().view(shape)
    x = numbers.to(p.device, p.dtype)
    if group not in kept or kept[group].whole.shape != x.shape:
        kept[group] = Member(group, nn.Parameter(x.clone()), {})
    found: Member = kept[group]
    found.whole.grad = x.clone()
    return found


# --- all together ------------------------------------------------------------------------------------------------


@torch.no_grad()
def step_together(optimizer: Optimizer, is_ours: IsOurs, draws: bool, call: Callable[[], Any]) -> Any:
    """Step all of our parameters whole, on every rank alike. ``draws``: whether the step draws random numbers: those of
    the mesh's first rank. Collective."""
    ours, members = [], []
    for i, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if is_ours(p) and p.grad is not None:
                whole = nn.Parameter(p.whole().clone(), requires_grad=p.requires_grad)
                whole.grad = p.grad.whole().clone()
                state = over(Tensor, dict(optimizer.state.get(p, {})), lambda x: _whole(x).clone())
                ours.append(p)
                members.append(Member(i, whole, state))
    random_numbers = numbers_of_first(ours[0].device_mesh) if draws and ours else contextlib.nullcontext()
    with random_numbers, holding(optimizer, members, is_ours, {}):
        out = call()
    for p, m in zip(ours, members, strict=True):
        local_of(p).copy_(p.laid_as(m.whole.detach(), "optimizer"))

        def laid(x: Tensor, p: Any = p) -> Tensor:
            return p.like(p.laid_as(x.detach(), "optimizer")) if x.shape == p.shape and x.dim() else x

        optimizer.state[p] = over(Tensor, m.state, laid)
    all_written()
    return out


def _whole(x: Tensor) -> Tensor:
    return x.whole() if isinstance(x, ShardedTensor) else x


@contextlib.contextmanager
def numbers_of_first(mesh: DeviceMesh) -> Iterator[None]:
    """Context manager: random numbers are those of the first rank of the mesh, whose generators alone advance."""
    mine = random_state(mesh.device_type)
    said = [mine]
    groups = [mesh.get_group(axis) for axis in mesh.mesh_dim_names or ()]
    for group in groups:
        if group.size() > 1:
            dist.broadcast_object_list(said, group=group, group_src=0)
    set_random_state(said[0], mesh.device_type)
    try:
        yield
    finally:
        if any(group.rank() for group in groups):
            set_random_state(mine, mesh.device_type)


def random_state(device: str) -> Any:
    """The states of all generators that a step may draw from."""
    on_device = torch.cuda.get_rng_state() if device == "cuda" else None
    return torch.get_rng_state(), on_device, random.getstate(), np.random.get_state()


def set_random_state(state: Any, device: str) -> None:
    """Set what `random_state` has returned."""
    torch.set_rng_state(state[0])
    if device == "cuda":
        torch.cuda.set_rng_state(state[1])
    random.setstate(state[2])
    np.random.set_state(state[3])


def seed_all(seed: int) -> None:
    """Seed all generators that a step may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
