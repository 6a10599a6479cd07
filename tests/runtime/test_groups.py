"""Process groups by axis name, agreement over the ranks, and who is named when a rank is missing."""

from __future__ import annotations

import itertools
import os
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from datetime import timedelta
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.adapters.distributed import default_store, group_of_members, make_default_group, own_client, root_store
from autopar.ir.mesh import Mesh
from autopar.runtime.consistency.rank_checks import RankCheck, agree_on, all_alike
from autopar.runtime.fault.errors import board, error_context
from autopar.runtime.fault.store_barrier import world_store
from autopar.runtime.fault.store_client import StoreClient, look
from autopar.runtime.mesh.process_groups import Groups, init_mesh, mesh_of, with_rest
from tests.support.launched import serve
from tests.support.meeting import meet_for
from tests.support.ranks import rank_outcomes, refusal, run_ranks


def axis_sums(sizes: dict[str, int]) -> dict[str, float]:
    groups = Groups(init_mesh(**sizes))
    out = {}
    pairs = [",".join(pair) for pair in itertools.combinations(sizes, 2)]
    for axis in [*sizes, *pairs, groups.world]:
        x = torch.tensor(float(groups.rank))
        dist.all_reduce(x, group=groups.group(axis))
        out[axis] = x.item()
        assert groups.group(axis).size() == groups.size(axis) == len(groups.ranks(axis))
        assert dist.get_process_group_ranks(groups.group(axis)) == groups.ranks(axis)
    return out


def test_each_axis_has_its_group() -> None:
    out = run_ranks(4, axis_sums, {"dp": 2, "tp": 2})
    assert [o["tp"] for o in out] == [1, 1, 5, 5]
    assert [o["dp"] for o in out] == [2, 4, 2, 4]
    assert all(o["dp,tp"] == 6 for o in out)


def test_three_axes_one_of_size_one() -> None:
    out = run_ranks(4, axis_sums, {"pp": 2, "cp": 1, "tp": 2})
    assert [o["pp"] for o in out] == [2, 4, 2, 4] and [o["cp"] for o in out] == [0, 1, 2, 3]


def connects(groups: Groups) -> None:
    """On a GPU, in one order on all ranks; on the CPU nothing is asked of anybody."""
    with patch.object(dist, "all_reduce") as reduce:
        groups.warm_up({"tp", "dp,tp", "dp", "pp"})
        assert not reduce.called
        groups.device = torch.device("meta")
        groups.warm_up({"tp", "dp,tp", "dp", "pp"})
    found = [call.kwargs["group"] for call in reduce.call_args_list]
    assert found == [groups.group(axis) for axis in ("dp", "dp,tp", "tp")]


def joins() -> list[str]:
    mesh = init_mesh(dp=2, cp=2, tp=2)
    with patch("autopar.runtime.mesh.process_groups.group_of_members") as new:
        groups = Groups(mesh)
    assert not new.called, "groups of joined axes and levels are made where they are used"
    out = [str(groups.ranks("dp,tp"))]
    for axis in ("dp,cp", "dp,tp", "cp,tp", "dp,cp,tp"):
        x = torch.tensor(float(groups.rank))
        dist.all_reduce(x, group=groups.group(axis))
        assert x.item() == sum(groups.ranks(axis))
    connects(groups)
    for bad in ("tp,dp", "dp,xx"):
        with pytest.raises(ValueError) as caught:
            groups.group(bad)
        out.append(str(caught.value))
    return out


def test_joined_axes_of_a_larger_mesh() -> None:
    ranks, order, unknown = run_ranks(8, joins)[2]
    assert ranks == "[2, 3, 6, 7]" and "in mesh order" in order and "no axis 'xx'" in unknown


def made_beside_a_slow_rank(default: bool) -> float:
    """Seconds until this rank has made a group, whose rank 1 is connected a second late."""
    rank, limit = int(os.environ["RANK"]), timedelta(minutes=1)
    store = world_store(rank, 2, limit)
    if not default:
        make_default_group("gloo", store, rank, 2, limit)
    made, start = distributed_c10d._new_process_group_helper, time.monotonic()

    def slow(*args: Any, **how: Any) -> Any:
        found = made(*args, **how)
        time.sleep(rank)
        return found

    with patch.object(distributed_c10d, "_new_process_group_helper", slow):
        if default:
            make_default_group("gloo", store, rank, 2, limit)
        else:
            group_of_members([0, 1], "both", limit, "both")
    return time.monotonic() - start


@pytest.mark.parametrize("default", [False, True])
def test_a_group_is_made_when_all_members_are_connected(default: bool) -> None:
    """A member that ended before would close the connections that others are making."""
    serve()
    assert autopar.launch(made_beside_a_slow_rank, 2, (default,), device="cpu", timeout=60)[0] > 0.9


def keys_after_starts(starts: int) -> list[int]:
    """How many keys the launcher's store holds after each start of two ranks."""
    rank, limit, found = int(os.environ["RANK"]), timedelta(minutes=1), []
    last = ""
    for _ in range(starts):
        store = world_store(rank, 2, limit)
        make_default_group("gloo", store, rank, 2, limit)
        dist.all_reduce(torch.ones(1))
        store.add("left by a rank", 1)
        root = root_store(store)
        deadline = time.monotonic() + 20
        while last and any(key.startswith(last) for key in root.list_keys()) and time.monotonic() < deadline:  # type: ignore[attr-defined]
            time.sleep(0.05)
        dist.barrier()
        found.append(root.num_keys())
        last = look(root, "autopar/start of 2")
        dist.destroy_process_group()
    return found


@pytest.mark.skipif(not hasattr(dist.Store, "list_keys"), reason="torch 2.13 lists the keys of a store")
def test_a_start_deletes_the_keys_of_the_one_before() -> None:
    """The store of a launcher serves all restarts of a job."""
    serve()
    first, *_, last = autopar.launch(keys_after_starts, 2, (4,), device="cpu", timeout=90)[0]
    assert last <= first + 2


def groups_of_many() -> tuple[list[list[int]], list[int]]:
    """Those of rank 5000 of 16,384, and what it learns of others: nobody else is there to take part, nor to split a
    communicator that is bound to a device."""
    dist.init_process_group("fake", rank=5000, world_size=16384, store=dist.HashStore())
    dist.group.WORLD.bound_device_id = device = torch.device("cuda", 0)  # type: ignore[union-attr]
    dist.distributed_c10d._get_split_source = pytest.fail  # in a process of its own
    groups = Groups(init_mesh("cpu", pp=16, dp=16, cp=8, tp=8))
    groups.make(["dp,cp", "cp%2"])
    groups.make_channels(["cp"])
    groups.make_links((i, i + 1) for i in range(15))
    default, *own = dist.distributed_c10d._world.pg_names
    assert all(group.bound_device_id == device for group in (default, *own))
    return [dist.get_process_group_ranks(group) for group in own], groups.ranks("pp")


def test_a_rank_of_many_makes_only_its_own_groups() -> None:
    with ProcessPoolExecutor(1, get_context("fork")) as alone:
        made, along = alone.submit(groups_of_many).result(60)
    # the axes, two levels and joined axes, three ways along cp, links to the stages before and after
    assert len(made) == 4 + 2 + 3 + 2 and all(5000 in ranks for ranks in made)
    assert sorted(map(len, made)) == [2, 2, 2, 8, 8, 8, 8, 8, 16, 16, 128]
    assert along == list(range(5000 % 1024, 16384, 1024))


def levels() -> tuple[dict[str, list[int]], str]:
    groups, alone = Groups(init_mesh(cp=4)), Groups(init_mesh(dp=4))
    found = {}
    for level in ("cp%1", "cp%2", "cp%4", "cp/1", "cp/2", "cp/4"):
        x = torch.tensor(float(groups.rank))
        dist.all_reduce(x, group=groups.group(level))
        found[level] = groups.ranks(level)
        assert x.item() == sum(found[level]) and groups.size(level) == len(found[level])
        assert dist.get_process_group_ranks(groups.group(level)) == found[level]
        assert found[level][groups.index(level)] == groups.rank
    assert alone.ranks("cp%1") == [groups.rank]
    with pytest.raises(ValueError) as caught:
        groups.size("cp%3")
    return found, str(caught.value)


def test_levels_of_the_context_axis() -> None:
    for rank, (found, unknown) in enumerate(run_ranks(4, levels)):
        low, everybody = rank // 2 * 2, [0, 1, 2, 3]
        assert found["cp%1"] == found["cp/4"] == [rank] and found["cp%4"] == found["cp/1"] == everybody
        assert found["cp%2"] == [low, low + 1] and found["cp/2"] == [rank % 2, rank % 2 + 2]
        assert "no level 'cp%3'" in unknown and "cp%2, cp/2" in unknown


def levels_beside_others() -> dict[str, list[int]]:
    groups = Groups(init_mesh(dp=2, cp=4))
    groups.make_channels(["cp/2"])
    assert dist.get_process_group_ranks(groups.channel("home", "cp/2")) == groups.ranks("cp/2")
    return {level: groups.ranks(level) for level in ("cp%2", "cp/2")}


def test_levels_stay_within_the_coordinates_of_other_axes() -> None:
    found = run_ranks(8, levels_beside_others)
    assert [f["cp%2"][0] for f in found] == [0, 0, 2, 2, 4, 4, 6, 6]
    assert [f["cp/2"] for f in found] == [[0, 2], [1, 3], [0, 2], [1, 3], [4, 6], [5, 7], [4, 6], [5, 7]]


def mistakes() -> list[str]:
    def message(**kwargs: Any) -> str:
        with pytest.raises(ValueError) as caught:
            init_mesh(**kwargs)
        return str(caught.value)

    assert init_mesh(dp="rest") is init_mesh(dp=2)
    return [message(dp=3), message(dp=1), message(xx=2), message(tp=0)]


def test_one_axis_takes_the_rest_of_the_ranks() -> None:
    assert with_rest({"pp": 2, "dp": "rest", "tp": 2}, 16) == {"pp": 2, "dp": 4, "tp": 2}
    assert list(with_rest({"dp": "rest", "tp": 2}, 2)) == ["dp", "tp"]
    assert with_rest({"dp": 3}, 7) == {"dp": 3}
    for sizes, ranks, said in (
        ({"dp": "rest", "tp": 4}, 6, 'mesh: dp="rest" needs a number of ranks that 4 divides (tp=4), found 6; start 4'),
        ({"dp": "rest", "tp": 4}, 2, 'mesh: dp="rest" needs a number of ranks that 4 divides (tp=4), found 2; start 4'),
        ({"dp": "rest", "ep": "rest"}, 4, "mesh: one axis can take the rest of the ranks, found dp and ep; give"),
        ({"dp": "rest", "tp": 0}, 4, "mesh: axis 'tp' needs a size of at least 1, found 0"),
        ({"xx": "rest"}, 4, "mesh: unknown axis 'xx'"),
    ):  # fmt: skip
        assert said in refusal(lambda sizes=sizes, ranks=ranks: Mesh.of(**with_rest(sizes, ranks)))


def test_mistakes_are_refused() -> None:
    for larger, smaller, unknown, empty in run_ranks(2, mistakes):
        assert "needs 3 ranks, the world has 2" in larger
        assert "needs 1 ranks, the world has 2" in smaller
        assert "unknown axis 'xx'" in unknown
        assert "size of at least 1" in empty


def own_meshes() -> list[Any]:
    fine = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    found = [mesh_of(fine), Groups(fine).coordinate, init_mesh(dp=2) is init_mesh(dp=2)]
    for bad in (DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 0], mesh_dim_names=("dp",))):
        with pytest.raises(ValueError) as caught:
            mesh_of(bad)
        found.append(str(caught.value))
    return found


def test_a_user_mesh_is_taken_or_refused() -> None:
    for rank, (mesh, coordinate, cached, unnamed, order) in enumerate(run_ranks(2, own_meshes)):
        assert mesh == Mesh.of(dp=2, tp=1) and coordinate == {"dp": rank, "tp": 0} and cached
        assert "needs mesh_dim_names" in unnamed and "found [1, 0]" in order


def agreement() -> list[str]:
    groups = Groups(init_mesh(dp=2, tp=2))
    for _ in range(3):
        meet_for(groups, "the plan")
    check_fact(groups, ("dp",), f"dp {groups.coordinate['tp']}")  # differs over tp, not over dp
    messages = []
    for axes, fact in ((("dp", "tp"), f"shape {groups.rank == 2}"), (("tp",), str(groups.coordinate["tp"]))):
        with pytest.raises(ValueError) as caught:
            check_fact(groups, axes, fact)
        messages.append(str(caught.value))
    meet_for(groups, "the plan")
    return messages


def check_fact(groups: Groups, axes: tuple[str, ...], fact: str) -> None:
    agree_on(groups, [RankCheck(axes, {"it": fact}, "the plan must be the same", "say it alike")], "the plan")


def test_agree_names_who_differs_the_same_everywhere() -> None:
    out = run_ranks(4, agreement)
    assert len({tuple(o) for o in out}) == 1
    assert "found it: rank 2: shape True; against rank 0, 1, 3: shape False; say" in out[0][0]
    assert "rank 1: 1; against rank 0: 0" in out[3][1]


def agree_without(rank: int) -> str:
    groups = Groups(init_mesh(dp=2))
    if groups.rank == rank:
        time.sleep(8)
    with pytest.raises(RuntimeError) as caught:
        meet_for(groups, "the plan", timeout=1)
    return str(caught.value)


def something_else() -> tuple[str, float]:
    """Rank 1 tells what rank 0 does not ask for."""
    groups, start = Groups(init_mesh(dp=2, timeout=20.0)), time.monotonic()
    with pytest.raises(ValueError) as caught:
        if groups.rank:
            all_alike(groups, "parameters")
        else:
            agree_on(groups, [RankCheck(("dp",), {"x": "7"}, "", "")], "the batch")
    return str(caught.value), time.monotonic() - start


def test_ranks_in_different_calls_are_told_so_at_once() -> None:
    for error, seconds in run_ranks(2, something_else):
        assert "must take the same steps" in error and "parameters" in error and seconds < 10


def questions_of_an_agreement(more: bool) -> tuple[int, int]:
    """How many this rank asks of the store in steady state, and how many keys of agreements are left there."""
    groups = Groups(init_mesh(dp=dist.get_world_size()))
    claims = [RankCheck(("dp",), {f"x{i}": "7"}, "", "") for i in range(5 if more else 1)]
    agree_on(groups, claims, "the batch")
    with patch("autopar.runtime.fault.store_client.own_client", lambda store: Counting(own_client(store))):
        board().line = StoreClient(default_store())
    asked = Counting.asked
    for _ in range(10):
        dist.barrier()
        agree_on(groups, claims, "the batch")
    dist.barrier()
    return Counting.asked - asked, sum(f"{groups.name}/agree/" in key for key in default_store().list_keys())


class Counting:
    """A client of the store. To ask again for what has not come yet is not counted."""

    asked = 0

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            Counting.asked += not (name == "add" and args[1] == 0)
            return getattr(self._store, name)(*args)

        return call


@pytest.mark.parametrize("more", [False, True])
def test_an_agreement_asks_as_little_of_many_ranks(more: bool) -> None:
    """A vote and a count; a rank that waits long says so and takes it back; the first rank clears what is left."""
    few, many = (run_ranks(n, questions_of_an_agreement, more) for n in (2, 8))
    for found in (few, many):
        assert all(asked <= 10 * (2 + 1 + 2 + 1) for asked, _ in found), found
        # That all hold the same, and that all were late: of the last round.
        assert all(1 <= left <= 2 for _, left in found), "keys of rounds that are over are deleted"


def test_an_absent_rank_is_named() -> None:
    out = rank_outcomes(2, agree_without, 1, timeout=20)
    assert "rank 1 did not respond: alive, but never joined" in out[0].value


def agree_late(seconds: float) -> tuple[list[str], float]:
    """With rank 1, which is at work in a call of ours: longer than the timeout."""
    groups, start = Groups(init_mesh(dp=2)), time.monotonic()
    with warnings.catch_warnings(record=True) as caught, error_context("train_step"):
        if groups.rank == 1:
            time.sleep(seconds)
        meet_for(groups, "the plan", timeout=2)
    return [str(w.message) for w in caught if "has waited" in str(w.message)], time.monotonic() - start


def test_a_rank_at_work_is_waited_for() -> None:
    (told, waited), (silent, _) = run_ranks(2, agree_late, 5.0)
    assert waited > 4 and not silent and len(told) == 1
    assert "agreeing on the plan on rank 0 has waited 2 s" in told[0] and "(rank 1 in train_step)" in told[0]
    assert "it keeps waiting, up to 20 s" in told[0]


def told_and_handled() -> tuple[str, str, str]:
    init_mesh(dp=2)
    with suppress(ValueError), error_context():
        raise ValueError(f"handled by {dist.get_rank()}")
    dist.barrier()
    explained = board().explain([0, 1], "something old")
    told = board().trouble([0, 1])
    dist.barrier()
    with error_context():
        dist.barrier()
    return explained, told, board().trouble([0, 1])


def test_what_was_handled_explains_nothing_later() -> None:
    for rank, (explained, told, later) in enumerate(run_ranks(2, told_and_handled)):
        assert explained == f"rank {1 - rank} failed: ValueError: handled by {1 - rank}"
        assert told == explained and later == ""
    run_ranks(2, told_and_handled)
    out = rank_outcomes(2, agree_without, 1, timeout=20)
    assert "rank 1 did not respond: alive, but never joined" in out[0].value


def die_in_agree(rank: int) -> str:
    groups = Groups(init_mesh(dp=2))
    if groups.rank == rank:
        os._exit(1)
    with pytest.raises(RuntimeError) as caught:
        meet_for(groups, "the plan", timeout=1)
    return str(caught.value)


def test_a_dead_rank_is_named() -> None:
    out = rank_outcomes(2, die_in_agree, 0, grace=10)
    assert "rank 0 did not respond: no sign of life" in out[1].value
