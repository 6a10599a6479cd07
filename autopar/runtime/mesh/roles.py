"""Two roles with a world each: attention, which keeps caches and routers, and experts, which keep only their weights.

    roles = init_roles(attention={"dp": 4, "tp": 2}, experts={"ep": 8})     # global ranks 0..7 and 8..15

The default process group of a rank is that of its role, over a prefix of the whole world's store, so meshes, groups and
agreements are those of a role. What crosses are heartbeats and errors (`autopar.runtime.fault`), agreements of both
roles (`Roles.agree`), and pairs: groups of two, the leader of an attention node and that of an expert node.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.adapters.distributed import group_of_members, make_default_group
from autopar.ir.mesh import Mesh
from autopar.runtime.fault import aborts
from autopar.runtime.fault.aborts import leave_to_us, started
from autopar.runtime.fault.error_propagation import ErrorBoard, ranks_named
from autopar.runtime.fault.errors import board, explained, starting_role, waited_for
from autopar.runtime.fault.flight import flying
from autopar.runtime.fault.store_barrier import Rounds, show, world_store
from autopar.runtime.mesh.devices import RANKS_SHARE_GPUS, choose_device
from autopar.runtime.mesh.process_groups import PATIENCE, init_mesh, time_limit
from autopar.spelling import did_you_mean
from autopar.values import refuse

Role = Literal["attention", "experts"]
AXES: Mapping[Role, tuple[str, ...]] = {"attention": ("dp", "dp_replicate", "tp"), "experts": ("ep", "tp")}


@dataclass(frozen=True)
class Pair:
    """The groups of two leaders by what goes over them; with gloo it is one. ``peer``: the global rank of the other
    end; ``place``: its rank in the groups."""

    peer: int
    place: int
    headers: dist.ProcessGroup
    rows: dist.ProcessGroup
    sums: dist.ProcessGroup


@dataclass(frozen=True)
class Roles:
    """The two roles of a job, and the place of this rank in them. Made by `init_roles`.

    attention, experts: names and sizes of their meshes. role: this rank's. mesh: of the own role. rank: the global one;
    attention has the first ranks, experts the last ones. timeout: of the mesh. pairs: of this rank with each node of
    the other role, in their order; only leaders have any.
    """

    attention: Mesh
    experts: Mesh
    role: Role
    mesh: DeviceMesh
    rank: int
    timeout: timedelta
    pairs: tuple[Pair, ...] = ()
    rounds: dict[str, Rounds] = field(default_factory=dict, repr=False)
    ends: list[Any] = field(default_factory=list, repr=False)  # of pairs, which two servers cannot share

    @property
    def in_use(self) -> bool:
        """Whether a server's microbatches may be on their way between the roles."""
        return any(end.open for end in self.ends)

    def ranks_of(self, role: Role) -> range:
        """The global ranks of a role."""
        return _ranks(self.attention, self.experts)[role]

    @property
    def world_size(self) -> int:
        """Ranks of both roles."""
        return self.attention.world_size + self.experts.world_size

    @property
    def attention_nodes(self) -> int:
        """Replicas of attention, each with requests of its own."""
        return self.attention.data_size

    @property
    def expert_nodes(self) -> int:
        """Nodes that share the experts: each has a consecutive range of them."""
        return self.experts.size("ep")

    def node_of(self, rank: int) -> int:
        """The node of a global rank in its role: one coordinate on all axes but tp."""
        ranks = self.ranks_of(self.role_of(rank))
        return (rank - ranks.start) // (len(ranks) // self._nodes(self.role_of(rank)))

    def leader_of(self, role: Role, node: int) -> int:
        """The global rank that talks for a node: its first one on tp."""
        return self._leaders(role)[node]

    def role_of(self, rank: int) -> Role:
        """The role of a global rank."""
        return "attention" if rank in self.ranks_of("attention") else "experts"

    @property
    def leads(self) -> bool:
        """Whether this rank talks for its node."""
        return self.rank in self._leaders(self.role)

    def named(self, *ranks: int) -> str:
        """ "rank 3 (experts)"."""
        return ranks_named(ranks, _ranks(self.attention, self.experts))

    def local(self, rank: int) -> int:
        """A global rank as process groups and errors of the own role count it: from the role's first rank, around the
        world."""
        return (rank - self.ranks_of(self.role).start) % self.world_size

    def agree(self, scope: str, text: str, reply: Callable[[list[str]], str]) -> str:
        """The reply of global rank 0 to the texts of all ranks of both roles, the same for all. A text is a subject,
        then the rest by lines. Collective over both roles. Raises CollectiveError that names ranks that do not come."""
        rounds = self.rounds.setdefault(scope, Rounds())
        everyone, limit = range(self.world_size), self.timeout.total_seconds()
        with flying("wait", f"agreeing on {text.partition(chr(10))[0]}", [*map(self.local, everyone)]):
            return show(f"autopar/roles/{scope}", rounds, self.rank, everyone, text, limit, reply, board().whole)

    def _nodes(self, role: Role) -> int:
        return self.attention_nodes if role == "attention" else self.expert_nodes

    def _leaders(self, role: Role) -> list[int]:
        mesh: Mesh = getattr(self, role)
        places = {}
        for i, rank in enumerate(self.ranks_of(role)):
            at = mesh.coordinate(i)
            if not at.get("tp", 0):
                places[at["ep"] if role == "experts" else mesh.dp_rank_and_size(at)] = rank
        return [places[node] for node in range(self._nodes(role))]


def init_roles(
    device: str | torch.device | None = None,
    timeout: float | timedelta | None = None,
    *,
    attention: Mapping[str, int],
    experts: Mapping[str, int],
) -> Roles:
    """``init_roles(attention={"dp": 4, "tp": 2}, experts={"ep": 8})``: a world with a mesh for each role. Collective:
    every rank that torchrun or `autopar.launch` has started calls it, with no default process group yet.

    ``attention``: sizes of its mesh, of dp, dp_replicate and tp: ranks over dp have requests of their own. ``experts``:
    of ep, over which experts are divided in consecutive ranges, and tp, which cuts each expert. Global ranks of
    attention come first. ``device`` and ``timeout`` as in `init_mesh`.

    Raises ValueError for other axes, a role without ranks, ranks that do not add up to those started, ranks that have
    called it with other sizes, ranks that share a GPU, or a default process group that is there already.
    """
    own = {"attention": _mesh("attention", attention), "experts": _mesh("experts", experts)}
    ranks, limit = _ranks(own["attention"], own["experts"]), time_limit(timeout)
    if dist.is_initialized():
        raise ValueError(
            "init_roles: makes the default process group itself, of the ranks of one role, found one; call it instead "
            "of init_mesh and init_process_group, or destroy_process_group first"
        )
    started_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if sum(map(len, ranks.values())) != started_ranks:
        raise ValueError(
            f"init_roles: attention ({own['attention']}) needs {len(ranks['attention'])} ranks and experts "
            f"({own['experts']}) {len(ranks['experts'])}, {sum(map(len, ranks.values()))} together, found "
            f"{started_ranks} started; choose sizes that add up, or start that many processes"
        )
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(f"init_roles: needs {', '.join(missing)}; start the ranks with torchrun or autopar.launch")
    chosen, rank = choose_device(device), int(os.environ["RANK"])
    role: Role = "attention" if rank in ranks["attention"] else "experts"
    if chosen.type == "cuda":
        leave_to_us()
    store = world_store(rank, started_ranks, limit)
    make = functools.partial(
        make_default_group,
        "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo",
        dist.PrefixStore(f"autopar/{role}", store),
        rank - ranks[role].start,
        len(ranks[role]),
        limit,
    )
    check = functools.partial(_check_start, rank, ranks, f"{own['attention']}; {own['experts']}", chosen, limit)
    with aborts.recorded():
        starting_role(store, rank, ranks, limit.total_seconds(), check, make)
    mesh = init_mesh(chosen, limit, **own[role].sizes)
    roles = Roles(own["attention"], own["experts"], role, mesh, rank, limit)
    object.__setattr__(roles, "pairs", tuple(_pairs(roles, store, chosen)))
    return roles


def _mesh(role: Role, sizes: Mapping[str, int]) -> Mesh:
    """The mesh of a role, with the axis of its nodes."""
    known = AXES[role]
    if not isinstance(sizes, Mapping) or not sizes:
        raise refuse(role, f'sizes of {" and ".join(known)}, such as {{"{known[0]}": 2}}', sizes)
    for axis in sizes:
        if axis not in known:
            raise ValueError(
                f"init_roles: {role} can be sharded on {', '.join(known)}, found {axis!r}; leave it out"
                f"{did_you_mean(str(axis), known)}"
            )
    return Mesh.of(**({} if known[0] in sizes else {known[0]: 1}), **sizes)


def _ranks(attention: Mesh, experts: Mesh) -> dict[str, range]:
    first = attention.world_size
    return {"attention": range(first), "experts": range(first, first + experts.world_size)}


def _check_start(
    rank: int, ranks: Mapping[str, range], sizes: str, device: torch.device, limit: timedelta, mine: ErrorBoard
) -> None:
    """All ranks have given the same sizes, and have a GPU each."""
    gpu = ""
    if device.type == "cuda" and os.environ.get(RANKS_SHARE_GPUS, "0") != "1":
        gpu = str(torch.cuda.get_device_properties(device).uuid)

    def reply(texts: list[str]) -> str:
        given, gpus = zip(*(text.split("\n")[1:] for text in texts))
        if odd := [r for r, text in enumerate(given) if text != given[0]]:
            return (
                f"init_roles: all ranks need the same sizes, found {given[odd[0]]} on {ranks_named(odd)} and {given[0]}"
                " on rank 0; pass the same attention= and experts= everywhere"
            )
        if shared := [r for r, one in enumerate(gpus) if one and gpus.count(one) > 1]:
            return (
                f"init_roles: each rank needs a GPU of its own, found {ranks_named(shared)} on GPUs with others; start "
                f"as many ranks on a machine as it has GPUs, or set {RANKS_SHARE_GPUS}=1"
            )
        return ""

    everyone = range(sum(map(len, ranks.values())))
    text = f"the roles\n{sizes}\n{gpu}"
    if problem := show("autopar/roles/start", Rounds(), rank, everyone, text, limit.total_seconds(), reply, mine):
        raise ValueError(problem)


# --- pairs -----------------------------------------------------------------------------------------------------

_counts: dict[str, int] = {}  # how many groups have had a name


def _pairs(roles: Roles, store: dist.Store, device: torch.device) -> list[Pair]:
    """This rank's pairs, connected. All leaders go through the pairs in one order, so none waits in a circle.

    NCCL has no tags, and what goes one way would wait for what goes the other: a group for each. Headers are read by
    the host, so they go over gloo. gloo has tags, and one group does for all three.
    """
    found = []
    for attention in roles._leaders("attention"):
        for experts in roles._leaders("experts"):
            if roles.rank not in (attention, experts):
                continue
            peer = experts if roles.rank == attention else attention
            ends = [attention, experts]
            make = functools.partial(pair_group, roles, ends, store=store)
            headers = make("headers", kind="gloo")
            rows, sums = (make("rows"), make("sums")) if device.type == "cuda" else (headers, headers)
            pair = Pair(peer, ends.index(peer), headers, rows, sums)
            if device.type == "cuda":
                _connect(roles, pair, device)
            found.append(pair)
    return found


def pair_group(
    roles: Roles, ranks: Sequence[int], name: str, store: dist.Store, kind: str | None = None
) -> dist.ProcessGroup:
    """A group of some global ranks, of either role, made by these alone."""
    full = f"autopar/pairs/{'+'.join(map(str, ranks))}/{name}"
    _counts[full] = count = _counts.get(full, 0) + 1  # a store may outlive a default group, and serve the next
    local = [roles.local(rank) for rank in ranks]
    limit = PATIENCE if kind == "gloo" else roles.timeout
    make: Any = functools.partial(group_of_members, local, f"{full}/{count}", limit, name, kind, store)
    with aborts.recorded():
        return waited_for(board(), roles.timeout.total_seconds(), make, f"making a pair ({name})", local)


def _connect(roles: Roles, pair: Pair, device: torch.device) -> None:
    """A byte over each group: NCCL connects two ranks at their first transfer, for which both must be there."""
    token, asks = torch.zeros(1, dtype=torch.uint8, device=device), roles.role == "attention"
    what = f"connecting with {roles.named(pair.peer)}"
    started(str, what)
    with explained(what, [roles.local(pair.peer)]):
        for group, sends in ((pair.rows, asks), (pair.sums, not asks)):
            work = group.send([token], pair.place, 0) if sends else group.recv([token], pair.place, 0)
            assert work is not None, "a member of the group gets a handle"
            work.wait()
