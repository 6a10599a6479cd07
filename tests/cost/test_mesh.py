"""Meshes are names and sizes: parsing, coordinates, groups, the order of cuts."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.mesh import Mesh, TokenSlice
from autopar.ir.placement import Shard, local_shape, nested_shape, rows_of_slice
from autopar.testing.lockstep import group_of


def test_parse_and_print() -> None:
    mesh = Mesh.parse("dp=2, tp=4")
    assert mesh == Mesh.of(dp=2, tp=4)
    assert str(mesh) == "dp=2,tp=4"
    assert str(Mesh.of()) == "1"
    assert (mesh.world_size, mesh.size("tp"), mesh.size("cp")) == (8, 4, 1)


@pytest.mark.parametrize(
    "text, why",
    [
        ("dp", "expected name=size pairs"),
        ("dp=x", "expected name=size"),
        ("data=2", "unknown axis 'data'; the axes are pp, dp_replicate, dp"),
        ("dp=0", "size of at least 1"),
        ("dp=2,dp=2", "named twice"),
        (
            "dp=100000000000000000000",
            "at most 2147483647 ranks, found 100000000000000000000; use fewer",
        ),
        (f"dp={'9' * 5000}", "found a number of more than 25 digits; use fewer"),
        ("dp=100000,tp=100000", "needs 10000000000 ranks, a world has at most 2147483647; use fewer"),
    ],
)
def test_refusals(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Mesh.parse(text)


@pytest.mark.parametrize("size", [2.0, True, "2", None, torch.tensor(2), [2]])
def test_sizes_that_are_no_numbers(size: object) -> None:
    with pytest.raises(ValueError, match=r"^mesh: axis 'dp' needs a whole number as its size, found "):
        Mesh.of(dp=size)  # type: ignore[arg-type]


def test_a_size_may_be_a_number_of_numpy() -> None:
    assert Mesh.of(dp=torch.tensor(2).numpy()) == Mesh.of(dp=2)


def test_inner_axes_cut_first() -> None:
    mesh = Mesh.of(tp=2, dp=3, cp=1).with_microbatches(4)
    assert list(mesh.cut_order.items()) == [("tp", 2), ("dp", 3), ("mb", 4)]
    assert Mesh.of(dp=2).with_microbatches(1) == Mesh.of(dp=2)


def test_groups() -> None:
    mesh = Mesh.of(dp=2, tp=3)
    assert mesh.coordinate(4) == {"dp": 1, "tp": 1}
    assert group_of(mesh, "tp", 4) == [3, 4, 5]
    assert group_of(mesh, "dp", 4) == [1, 4]


@given(st.dictionaries(st.sampled_from(["dp", "cp", "ep", "tp"]), st.integers(1, 3), max_size=3))
def test_coordinates_number_the_ranks(sizes: dict[str, int]) -> None:
    mesh = Mesh.of(**sizes)
    seen = [tuple(c.items()) for c in mesh.coordinates()]
    assert len(set(seen)) == mesh.world_size
    assert seen == sorted(seen)
    for axis in sizes:
        for rank in range(mesh.world_size):
            group = group_of(mesh, axis, rank)
            assert rank in group and len(group) == mesh.size(axis)
    assert Mesh.parse(str(mesh) if sizes else "") == mesh


def test_a_slice_of_tokens_is_a_fraction() -> None:
    """It cuts first, in time: no axis that a user can name, no ranks."""
    mesh = dataclasses.replace(Mesh.of(dp=2, tp=2).with_microbatches(3), slice=TokenSlice(6, 4, 16))
    assert list(mesh.cut_order.items()) == [("sl", Fraction(8, 3)), ("tp", 2), ("dp", 2), ("mb", 3)]
    assert nested_shape((6, 16, 8), {"sl": Shard(1), "tp": Shard(1), "dp": Shard(0)}, mesh.cut_order) == (3, 3, 8)
    assert local_shape((32,), Shard(0, (16, 16)), mesh.pieces("sl")) == (12,)
    assert rows_of_slice(32, Shard(0, (16, 16)), 6, 4, 16) == [(4, 6), (20, 6)]
    with pytest.raises(ValueError, match="block of 12 does not divide"):
        local_shape((12,), Shard(0), mesh.pieces("sl"))
    with pytest.raises(ValueError, match="unknown axis 'sl'; the axes are pp, dp_replicate, dp, cp, ep, tp"):
        Mesh.of(sl=2)
