"""Meshes are names and sizes: parsing, coordinates, groups, the order of cuts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.mesh import Mesh


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
        ("data=2", "unknown axis 'data'; the axes are pp, dp"),
        ("dp=0", "size of at least 1"),
        ("dp=2,dp=2", "named twice"),
    ],
)
def test_refusals(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Mesh.parse(text)


def test_inner_axes_cut_first() -> None:
    mesh = Mesh.of(tp=2, dp=3, cp=1).with_micro_batches(4)
    assert list(mesh.cut_order.items()) == [("tp", 2), ("dp", 3), ("mb", 4)]
    assert Mesh.of(dp=2).with_micro_batches(1) == Mesh.of(dp=2)


def test_groups() -> None:
    mesh = Mesh.of(dp=2, tp=3)
    assert mesh.coordinate(4) == {"dp": 1, "tp": 1}
    assert mesh.group_of("tp", 4) == [3, 4, 5]
    assert mesh.group_of("dp", 4) == [1, 4]


@given(st.dictionaries(st.sampled_from(["dp", "cp", "ep", "tp"]), st.integers(1, 3), max_size=3))
def test_coordinates_number_the_ranks(sizes: dict[str, int]) -> None:
    mesh = Mesh.of(**sizes)
    seen = [tuple(c.items()) for c in mesh.coordinates()]
    assert len(set(seen)) == mesh.world_size
    assert seen == sorted(seen)
    for axis in sizes:
        for rank in range(mesh.world_size):
            group = mesh.group_of(axis, rank)
            assert rank in group and len(group) == mesh.size(axis)
    assert Mesh.parse(str(mesh) if sizes else "") == mesh
