"""Process groups of a mesh. Everything else says the name of an axis.

mesh = init_mesh(dp=2, tp=2)     # a torch DeviceMesh whose dims are named after the axes
groups = Groups(mesh)            # axis name -> ProcessGroup, size, my coordinate
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.adapters.distributed import (
    default_store,
    group_of_members,
    make_default_group,
    rank_table,
    takes_host_tensors,
)
from autopar.attention.exchanges import WAYS
from autopar.ir.mesh import DATA, LEVELLED, Mesh
from autopar.runtime.fault import aborts
from autopar.runtime.fault.aborts import leave_to_us, started, tell_count
from autopar.runtime.fault.call_sequence import CallSequence
from autopar.runtime.fault.errors import board, starting, waited_for
from autopar.runtime.fault.store_barrier import Rounds, world_store
from autopar.runtime.mesh.devices import check_devices, choose_device
from autopar.schedule.order_checks import Link

T = TypeVar("T")
DEFAULT_TIMEOUT = 600.0  # seconds
PATIENCE = timedelta(days=7)  # of ranks that wait for the next step of a server, which may not come for long


def time_limit(timeout: float | timedelta | None) -> timedelta:
    """Of a collective: as given, else $AUTOPAR_TIMEOUT, else 600 seconds. Raises ValueError for what is no time."""
    given = os.environ.get("AUTOPAR_TIMEOUT", DEFAULT_TIMEOUT) if timeout is None else timeout
    name = "AUTOPAR_TIMEOUT" if timeout is None else "timeout"
    try:
        found = given if isinstance(given, timedelta) else timedelta(seconds=float(given))
    except (TypeError, ValueError, OverflowError):
        found = timedelta(0)
    if found <= timedelta(0) or isinstance(given, bool):
        raise ValueError(f"{name}: expected seconds above 0, found {given!r}; 600 is the default")
    return found


_meshes: dict[tuple[int, str, Mesh, timedelta], DeviceMesh] = {}
_parts: dict[tuple[int, str, Mesh, str, timedelta], dist.ProcessGroup | None] = {}  # all but those of the axes
_named: dict[str, int] = {}  # how many groups have had a name
_made: dict[Mesh, int] = {}  # how many Groups of a mesh there were: their common name in the store


def init_mesh(
    device: str | torch.device | None = None, timeout: float | timedelta | None = None, **sizes: int | Literal["rest"]
) -> DeviceMesh:
    """``init_mesh(dp=2, tp=2)``: a torch DeviceMesh over all ranks. The last axis varies fastest with the rank.
    ``init_mesh(dp="rest", tp=2)``: one axis may have as many ranks as the others leave, so that a job that is restarted
    on fewer or more nodes runs the same script.

    Uses the default process group if there is one. Otherwise makes it: from torchrun's environment, or as a world
    of one. ``device``: "cpu" (gloo) or "cuda" (nccl); by default that of the group, else cuda where there is one; see
    `autopar.runtime.mesh.devices` for which GPU. ``timeout``: seconds (or a timedelta) after which a collective, an
    agreement or the making of a group without its peers fails; default $AUTOPAR_TIMEOUT or 600. A rank that is dead or
    stopped is noticed within seconds.

    The mesh has ``data_rank`` and ``data_size``: which part of the batch this rank is given, of how many
    (`dp_rank_and_size`).

    Raises ValueError for an unknown axis, a size below 1, sizes whose product is not the number of ranks, an axis for
    the rest of ranks that the other sizes do not divide, a device
    that is neither cpu nor a cuda that is there and that the group can use, ranks that share a GPU, or a timeout that
    is no time.
    """
    chosen = choose_device(device)
    kind = chosen.type
    limit = time_limit(timeout)
    expected = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    mesh = Mesh.of(**with_rest(sizes, expected)).planned()
    if mesh.world_size != expected:
        raise ValueError(
            f"mesh: {mesh} needs {mesh.world_size} ranks, the world has {expected}; "
            "choose sizes whose product is the number of ranks, or start that many processes"
        )
    if not mesh.axes:
        mesh = Mesh.of(dp=1)
    if kind == "cuda":
        leave_to_us()
    if not dist.is_initialized():
        with aborts.recorded():
            _init_world(kind, limit)
    board()  # from now on the others see that this rank is alive
    check_devices(chosen, limit.total_seconds())
    key = (id(default_store()), kind, mesh, limit)
    if key not in _meshes:
        _meshes[key] = made = _make_mesh(mesh, kind, limit)
        vars(made).update(zip(("data_rank", "data_size"), dp_rank_and_size(made)))
    return _meshes[key]


def with_rest(sizes: Mapping[str, int | Literal["rest"]], ranks: int) -> dict[str, int]:
    """The sizes of a mesh of so many ranks; that of the axis "rest" is what the others leave. Raises ValueError for two
    such axes, and for ranks that the others do not divide."""
    given = {axis: size for axis, size in sizes.items() if not isinstance(size, str) or size != "rest"}
    rest = [axis for axis in sizes if axis not in given]
    if len(rest) > 1:
        raise ValueError(f"mesh: one axis can take the rest of the ranks, found {' and '.join(rest)}; give a number")
    if not rest:
        return given
    fixed = Mesh.of(**given)
    others = fixed.world_size
    if ranks % others:
        raise ValueError(
            f'mesh: {rest[0]}="rest" needs a number of ranks that {others} divides ({fixed}), found {ranks}; '
            f"start {max(1, ranks // others) * others} ranks"
        )
    return {axis: given.get(axis, ranks // others) for axis in sizes}


def _init_world(kind: str, timeout: timedelta) -> None:
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    if "RANK" in os.environ:
        missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ValueError(
                f"init_mesh: with RANK set, needs {', '.join(missing)} as well; start the ranks with torchrun or "
                "autopar.launch, or unset RANK"
            )
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = world_store(rank, world, timeout)
        make = functools.partial(make_default_group, backend, store, rank, world, timeout)
        starting(store, rank, world, timeout.total_seconds(), make)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def _make_mesh(mesh: Mesh, kind: str, timeout: timedelta) -> DeviceMesh:
    """This rank's group on each axis. Made here and not by torch, which gives subgroups a timeout of 30 minutes and has
    every rank call for the groups of all."""
    groups = []
    for axis, _ in mesh.axes:
        mine = _group_along(mesh, [axis], range(mesh.size(axis)), timeout, f"mesh_{axis}")
        assert mine is not None, "every rank is in one group of each axis"
        groups.append(mine)
    shape = [size for _, size in mesh.axes]
    names = tuple(name for name, _ in mesh.axes)
    table = torch.arange(mesh.world_size, dtype=torch.int).view(shape)
    of_axes: Any = groups if len(groups) > 1 else groups[0]
    return DeviceMesh.from_group(of_axes, kind, mesh=table, mesh_dim_names=names)


def _group_along(
    mesh: Mesh, axes: Sequence[str], members: Sequence[int], timeout: timedelta, name: str, kind: str | None = None
) -> dist.ProcessGroup | None:
    """A new group of the coordinates ``members`` of joined axes, if this rank is at one of them; only they take part.
    Ranks make all their groups in the same order, so none waits in a circle."""
    rank = dist.get_rank()
    along = mesh.along(axes, rank)
    ranks = [along[i] for i in members]
    if rank not in ranks:
        return None
    # Nobody else may have the name; each of its ranks finds the same one, whatever other groups it is in.
    full = f"autopar/{mesh}/{name}/{min(ranks)}/{timeout.total_seconds():g}"
    _named[full] = count = _named.get(full, 0) + 1  # a store may outlive a default group, and serve the next
    make = functools.partial(group_of_members, ranks, f"{full}/{count}", timeout, name, kind)
    with aborts.recorded():
        return waited_for(board(), timeout.total_seconds(), make, f"making the group {name}", ranks)


def _parts_of(axis: str, mesh: Mesh) -> list[range]:
    """The coordinates of each group along an axis, or along a level of it."""
    name, kind, given = _named_level(axis)
    count = mesh.size(name)
    n = int(given or count)
    if kind == "/":
        return [range(first, count, n) for first in range(n)]
    return [range(first, first + n) for first in range(0, count, n)]


def _named_level(axis: str) -> tuple[str, str, str]:
    """ "ep%8" -> ("ep", "%", "8"); "ep" -> ("ep", "", "")"""
    kind = next((c for c in "%/" if c in axis), "")
    return axis.partition(kind) if kind else (axis, "", "")


def dp_rank_and_size(mesh: DeviceMesh) -> tuple[int, int]:
    """(which part of the batch this rank is given, how many parts there are): over dp, over dp_replicate within that,
    and over ep within that. Ranks that differ in other axes are given the same part.

    ``batch.chunk(parts)[part]``, or a DistributedSampler of rank ``part`` and ``num_replicas=parts``.
    """
    sizes = mesh_of(mesh)
    return sizes.dp_rank_and_size(sizes.coordinate(dist.get_rank())), sizes.data_size


def gathered_objects(mesh: DeviceMesh, own: T) -> list[T]:
    """The picklable objects of all data-parallel ranks, in their order. Collective."""
    found = [own]
    for group in data_groups(mesh):
        parts: list[Any] = [None] * group.size()
        dist.all_gather_object(parts, found, group=group)
        found = [x for part in parts for x in part]
    return found


def data_groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Groups to gather over one after the other, which keeps the order of data-parallel ranks."""
    sizes = mesh_of(mesh).sizes
    return [mesh.get_group(axis) for axis in reversed(DATA) if sizes.get(axis, 1) > 1]


def mesh_of(device_mesh: DeviceMesh) -> Mesh:
    """Names and sizes of a DeviceMesh. Raises ValueError for what is none, dims without axis names, axes over which
    nothing is cut, or ranks in another order."""
    if not isinstance(device_mesh, DeviceMesh):
        raise ValueError(
            f"mesh: needs a torch DeviceMesh, found {device_mesh!r} ({type(device_mesh).__name__}); make one with "
            "autopar.init_mesh(dp=2, tp=2)"
        )
    names = device_mesh.mesh_dim_names
    if names is None:
        raise ValueError(
            "mesh: the DeviceMesh needs mesh_dim_names; name its dims after the axes, such as ('dp', 'tp')"
        )
    mesh = Mesh(tuple(zip(names, (int(s) for s in device_mesh.shape)))).planned()
    if dist.is_initialized():
        table = rank_table(device_mesh).flatten().tolist()
        if table != list(range(dist.get_world_size())):
            raise ValueError(
                f"mesh: the DeviceMesh must hold the ranks 0..{dist.get_world_size() - 1} in order, found {table}; "
                "use autopar.init_mesh, or torch's init_device_mesh over the whole world"
            )
    return mesh


class Groups:
    """Process groups of a mesh by axis name.

    An axis is a name ("tp"), several joined by commas ("dp,cp", in mesh order: the ranks that differ in any of these),
    or a level of the context axis, for algorithms of two levels:

        cp=4    "cp%2"  {0, 1} {2, 3}  each two neighbours        "cp/2"  {0, 2} {1, 3}  every second rank

    Groups of joined axes and of levels are made when they are first asked for. Their members must do so at the same
    point: ranks make the groups that they share in the same order. Where stages use different ones, `make` does so
    ahead.
    """

    def __init__(self, device_mesh: DeviceMesh):
        self.mesh = mesh_of(device_mesh)
        self.device_mesh = device_mesh
        if not dist.is_initialized():
            raise ValueError("mesh: needs a process group, found none; make the mesh anew with autopar.init_mesh")
        board()  # from now on the others see that this rank is alive, if the mesh is the user's
        self.rank = dist.get_rank()
        self.coordinate = self.mesh.coordinate(self.rank)
        self.device = choose_device(device_mesh.device_type)
        self._groups: dict[str, dist.ProcessGroup] = {a: device_mesh.get_group(a) for a in self.mesh.sizes}
        made = (limit for (_, _, _, limit), mesh in _meshes.items() if mesh is device_mesh)
        self.timeout = next(made, None) or time_limit(None)  # the default for a mesh of the user's
        check_devices(self.device, self.timeout.total_seconds())
        if self.device.type == "cuda":
            leave_to_us()
        self._subsets: dict[str, list[int]] = {}
        self._levels = self._find_levels()
        self._channels: dict[tuple[str, str], dist.ProcessGroup] = {}  # (axis or subset, way) -> group
        self._links: dict[Link, dist.ProcessGroup] = {}
        self._connected: set[str] = set()
        self.rounds: dict[str, Rounds] = {}  # of agreements so far, by scope
        _made[self.mesh] = _made.get(self.mesh, 0) + 1
        self.name = f"{self.mesh}/{_made[self.mesh]}"  # in the store
        self.order = CallSequence(self.name, board().calls)

    def _find_levels(self) -> dict[str, str]:
        """Level -> the axis, or the subset that this rank is in: "cp%2" -> "cp[0+1]"."""
        found = {}
        for axis in LEVELLED:
            count, along = self.mesh.size(axis), self.mesh.along([axis], self.rank)
            for n, kind in itertools.product((n for n in range(1, count + 1) if count % n == 0), "%/"):
                level = f"{axis}{kind}{n}"
                part = next(part for part in _parts_of(level, self.mesh) if self.coordinate.get(axis, 0) in part)
                found[level] = name = self._subset_name(axis, part)
                if name != axis:
                    self._subsets[name] = [along[i] for i in part]
        return found

    # --- making groups ------------------------------------------------------------------------------------

    def _further(self, axis: str, name: str, members: Sequence[int]) -> dist.ProcessGroup | None:
        key = (id(default_store()), self.device_mesh.device_type, self.mesh, name, self.timeout)
        if key not in _parts:
            _parts[key] = _group_along(self.mesh, axis.split(","), members, self.timeout, name)
        return _parts[key]

    def make(self, axes: Iterable[str]) -> None:
        """The groups of joined axes and of levels that are not there yet. Every rank of the world must call it with the
        same ones. Raises ValueError as `group` does."""
        for axis in sorted(set(axes)):
            if axis in self._levels:
                for part in _parts_of(axis, self.mesh):
                    self.subset(_named_level(axis)[0], part)
            elif (joined := self._joined(axis)) not in self._groups:
                group = self._further(joined, joined, range(self.size(joined)))
                assert group is not None, "every rank is in one group of each set of axes"
                self._groups[joined] = group

    def make_channels(self, axes: Iterable[str]) -> None:
        """The groups for `channel` along cp or its levels. Every rank of the world must call it with the same ones."""
        for axis in sorted(set(axes)):
            of, _, _ = _named_level(axis)
            for way, part in itertools.product(WAYS, _parts_of(axis, self.mesh)):
                name = self._subset_name(of, part)
                group = self._further(of, f"{name}_{way}", part)
                if group is not None:
                    self._channels[name, way] = group

    def warm_up(self, axes: Iterable[str]) -> None:
        """NCCL makes a communicator at the first collective of a group, for which its ranks must be there: now, in one
        order on all ranks, and not in the midst of a step. gloo connects a group when it is made."""
        if self.device.type != "cpu":
            for axis in sorted(axis for axis in set(axes) if self.size(axis) > 1):
                started(str, f'connecting over axis "{axis}"')
                dist.all_reduce(torch.zeros(1, device=self.device), group=self.group(axis))
            tell_count()

    def channel(self, way: str, axis: str) -> dist.ProcessGroup:
        """The group for sends along cp or cp/n: "up", to higher coordinates, "down" or "home". What goes one way does
        not wait for what goes another. A rank's place in it is its index on the axis."""
        return self._channels[self._resolved(axis), way]

    def make_links(self, links: Iterable[Link]) -> None:
        """A group of two ranks for each (sending, receiving) pair on pp. Every rank of the world calls it alike."""
        for source, target in sorted(set(links)):
            group = self._further("pp", f"pp[{source}>{target}]", sorted((source, target)))
            if group is not None:
                self._links[source, target] = group

    def votes(self) -> dist.ProcessGroup | None:
        """A group along pp for votes between hosts, if the backend can. All ranks on it call it at the same point."""
        if not takes_host_tensors(self._groups["pp"]):
            return None
        return self._further("pp", "pp_votes", range(self.size("pp")))

    def control(self, timeout: timedelta, axes: Sequence[str] = ()) -> dist.ProcessGroup:
        """A new group of all ranks, or along some axes, for messages between hosts (gloo). All its ranks call it at the
        same point."""
        axes = axes or [*self.mesh.sizes]
        members = range(self.mesh.size(",".join(axes)))
        made = _group_along(self.mesh, axes, members, timeout, f"control_{'_'.join(axes)}", "gloo")
        assert made is not None, "every rank is in it"
        return made

    def host_pair(self, a: int, b: int) -> dist.ProcessGroup:
        """A new group of two global ranks for messages between their hosts (gloo). Both call it, and ranks of several
        pairs in one order."""
        name = f"hosts[{min(a, b)}+{max(a, b)}]"
        made = _group_along(self.mesh, [*self.mesh.sizes], sorted((a, b)), self.timeout, name, "gloo")
        assert made is not None, "this rank is one of them"
        return made

    def link(self, source: int, target: int) -> tuple[dist.ProcessGroup, int]:
        """The group for what ``source`` on pp sends to ``target``, and the place in it of the one that is not here."""
        here = self.coordinate["pp"]
        return self._links[source, target], int(here == min(source, target))

    def connect(self, axis: str) -> None:
        """Join all ranks of an axis on each of its channels, once; all of them must call it at the same point (all of
        the world, if the channels are not there yet).

        NCCL makes a communicator at the first call on it, for which all of its ranks must be there; the first send of
        an algorithm may well be between two of them.
        """
        axis, level = self._resolved(axis), axis
        if axis not in self._connected:
            if (axis, WAYS[0]) not in self._channels:
                self.make_channels([level])
            for way in WAYS:
                dist.all_reduce(torch.zeros(1, device=self.device), group=self._channels[axis, way])
            self._connected.add(axis)

    def subset(self, axis: str, coordinates: Sequence[int]) -> str:
        """The axis expression of some coordinates of an axis, which ``group``, ``size`` and ``ranks`` take: on the
        ranks at these coordinates. Every rank of the world must call it, in the same order: it makes groups."""
        members = sorted(set(coordinates))
        name = self._subset_name(axis, members)
        if name == axis:
            return axis
        group = self._further(axis, name, members)
        if group is not None:
            along = self.ranks(axis)
            self._groups[name], self._subsets[name] = group, [along[i] for i in members]
        return name

    def _subset_name(self, axis: str, members: Sequence[int]) -> str:
        return axis if len(members) == self.mesh.size(axis) else f"{axis}[{'+'.join(map(str, members))}]"

    def _resolved(self, axis: str) -> str:
        """Of a level: the axis or subset that it is for this rank."""
        if axis in self._levels:
            return self._levels[axis]
        if "%" in axis or "/" in axis:
            known = ", ".join(self._levels)
            raise ValueError(f"groups: no level {axis!r} in the mesh {self.mesh}; there are {known}")
        return axis

    def size(self, axis: str) -> int:
        axis = self._resolved(axis)
        if axis in self._subsets:
            return len(self._subsets[axis])
        return math.prod(map(self.mesh.size, axis.split(",")))

    def ranks(self, axis: str) -> list[int]:
        """Global ranks of my group, in the order of the axis (of joined axes: the first varies slowest)."""
        axis = self._resolved(axis)
        if axis in self._subsets:
            return list(self._subsets[axis])
        return self.mesh.along(axis.split(","), self.rank)

    def index(self, axis: str) -> int:
        return self.ranks(axis).index(self.rank)

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group. Raises ValueError for an axis that the mesh lacks, or joined axes out of mesh order."""
        name = self._resolved(axis)
        if name not in self._subsets:
            name = self._joined(name)
        if name not in self._groups:
            self.make([axis])
        return self._groups[name]

    def _joined(self, axis: str) -> str:
        """The axes among joined ones that have more than one rank: others join nothing."""
        names = axis.split(",")
        unknown = [name for name in names if name not in self.mesh.sizes]
        if unknown:
            raise ValueError(f"groups: no axis {unknown[0]!r} in the mesh {self.mesh}")
        if names != [name for name in self.mesh.sizes if name in names]:
            raise ValueError(f"groups: join the axes in mesh order ({self.mesh}), found {axis!r}")
        return ",".join(name for name in names if self.mesh.size(name) > 1) or names[0]

    @property
    def is_first_of_stage(self) -> bool:
        """Whether this rank's coordinates on all axes but pp are 0."""
        return not any(i for axis, i in self.coordinate.items() if axis != "pp")

    @property
    def world(self) -> str:
        """All axes joined: the axis expression of the whole world."""
        return ",".join(self.mesh.sizes)
