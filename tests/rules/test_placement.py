"""Placements: text, pieces and joins, duality, and every row of the conversion table forward and backward."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.conversions import exchange
from autopar.ir.mesh import Mesh
from autopar.ir.placement import (
    CONVERSIONS,
    INVARIANT,
    PARTIAL,
    REPLICATE,
    Placement,
    Shard,
    check_shard,
    conversion,
    dual,
    extent,
    join,
    local_shape,
    nested_piece,
    nested_shape,
    parse_placement,
    piece,
    rows_of_slice,
    scaled_blocks,
    transpose,
)
from autopar.runtime.comm.collectives import from_rows, rows_of, to_rows
from autopar.testing.harness import scatter, whole_of
from autopar.testing.lockstep import in_lockstep

R, I, P = REPLICATE, INVARIANT, PARTIAL  # noqa: E741
sizes_of_blocks = st.integers(-64, 64).filter(bool)
patterns = st.builds(
    lambda pattern, times: tuple(pattern) * times, st.lists(sizes_of_blocks, max_size=5), st.integers(1, 3)
)
shards = st.builds(Shard, st.integers(0, 3), patterns)
placements = st.one_of(st.sampled_from([R, I, P]), shards)


@given(placements)
def test_text_round_trip(p: Placement) -> None:
    assert parse_placement(str(p)) == p


def test_text() -> None:
    assert str(Shard(0, (32, 16, 16))) == "S(0;32,16x2)"
    assert str(Shard(1, (8,))) == "S(1)"
    assert str(Shard(1, (8, -8))) == "S(1;8,-8)"
    assert str(Shard(1, (-8,))) == "S(1;-8)" != str(Shard(1))
    assert str(Shard(0, (8, -4, -4) * 3)) == "S(0;(8,-4x2)x3)"
    for text in ("S", "S(-1)", "S(0;)x", "Q", "S(0;a)", "S(0;8-)", "S(0;(8,-8)", "S(0;(8,-8))", "S(0;8,-8)x2)"):
        with pytest.raises(ValueError, match="expected R, I, P, S"):
            parse_placement(text)


@given(placements, placements)
def test_duality(a: Placement, b: Placement) -> None:
    assert dual(dual(a)) == a
    src, dst = transpose(a, b)
    assert (src, dst) == (dual(b), dual(a))
    assert transpose(src, dst) == (a, b)


def test_the_table_is_closed_under_transposition() -> None:
    """What can be converted has a gradient that can, and one that moves as many bytes the other way."""
    kinds: dict[type, Placement] = {type(R): R, type(I): I, type(P): P, Shard: Shard(0)}
    pairs = {
        "all_gather": {"reduce_scatter", "slice"},
        "reduce_scatter": {"all_gather"},
        "slice": {"all_gather", "pad"},
        "pad": {"slice"},
        "all_to_all": {"all_to_all"},
        "divide": {"divide"},
        "none": {"all_reduce"},
        "all_reduce": {"none", "all_reduce"},
    }
    for (a, b), kind in CONVERSIONS.items():
        src, dst = kinds[a], Shard(1) if b is Shard else kinds[b]
        assert conversion(*transpose(src, dst)) in pairs[kind], (src, dst)


def test_what_no_communication_makes_right() -> None:
    for src, dst in ((R, I), (I, P)):
        with pytest.raises(ValueError, match="no conversion"):
            conversion(src, dst)


# --- pieces -----------------------------------------------------------------------------------------------------------


@st.composite
def cuts(draw: st.DrawFn) -> tuple[torch.Tensor, Shard, int]:
    """A tensor, a Shard that fits it, a number of ranks."""
    ranks = draw(st.integers(1, 4))
    blocks = tuple(ranks * n for n in draw(st.lists(st.integers(-4, 4).filter(bool), min_size=1, max_size=4)))
    blocks *= draw(st.integers(1, 3))
    dim = draw(st.integers(0, 2))
    shape = [2, 3, 4]
    shape[dim] = extent(blocks)
    return torch.arange(torch.Size(shape).numel()).reshape(shape), Shard(dim, blocks), ranks


@given(cuts())
def test_join_is_the_inverse_of_piece(cut: tuple[torch.Tensor, Shard, int]) -> None:
    x, shard, ranks = cut
    pieces = [piece(x, shard, ranks, i) for i in range(ranks)]
    assert all(p.shape == local_shape(x.shape, shard, ranks) for p in pieces)
    assert torch.equal(join(pieces, shard), x)


@given(cuts(), st.integers(1, 3))
def test_axes_nest(cut: tuple[torch.Tensor, Shard, int], outer: int) -> None:
    """tp cuts first, dp cuts what tp left; `whole_of` puts it together in the other order."""
    x, shard, ranks = cut
    x = x.repeat_interleave(outer, (shard.dim + 1) % 3)
    mesh = Mesh.of(dp=outer, tp=ranks)
    placed: dict[str, Placement] = {"tp": shard, "dp": Shard((shard.dim + 1) % 3)}
    pieces = [nested_piece(x, placed, mesh.cut_order, c) for c in mesh.coordinates()]
    assert {tuple(p.shape) for p in pieces} == {nested_shape(x.shape, placed, mesh.cut_order)}
    assert torch.equal(whole_of(pieces, placed, mesh), x)


def test_blocks_keep_heads_together() -> None:
    """Fused q, k, v of 4, 2, 2 rows: each rank holds half of each."""
    x = torch.arange(8)
    assert piece(x, Shard(0, (4, 2, 2)), 2, 1).tolist() == [2, 3, 5, 7]


@given(cuts())
def test_rows_of_a_collective_are_the_pieces(cut: tuple[torch.Tensor, Shard, int]) -> None:
    """What buffers hold is what placements say, also of other sizes in the same ratio."""
    x, shard, ranks = cut
    for wide, scaled in (
        (x, shard),
        (x.repeat_interleave(2, shard.dim), Shard(shard.dim, tuple(2 * b for b in shard.blocks))),
    ):
        pieces = torch.stack([piece(wide, scaled, ranks, i) for i in range(ranks)])
        rows = to_rows(wide, shard.dim, shard.blocks, ranks)
        assert torch.equal(rows, pieces) and rows.is_contiguous()
        whole = from_rows(rows, shard.dim, shard.blocks)
        assert torch.equal(whole, wide) and whole.is_contiguous()
    held = rows_of(x.shape[shard.dim], shard.blocks, ranks)
    assert torch.equal(
        torch.stack([x.index_select(shard.dim, held[i]) for i in range(ranks)]),
        to_rows(x, shard.dim, shard.blocks, ranks),
    )


def test_rows_of_one_block_of_the_first_dim_are_no_copy() -> None:
    x = torch.arange(12).view(1, 6, 2)
    rows = to_rows(x, 1, (), 3)
    assert rows.data_ptr() == x.data_ptr() == from_rows(rows, 1, ()).data_ptr()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_zigzag_deals_chunks_from_both_ends(ranks: int) -> None:
    """Rank i holds chunks i and 2n-1-i, in this order."""
    size = 4 * ranks
    chunks = torch.arange(size).view(2 * ranks, 2)
    for rank in range(ranks):
        expected = torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])
        assert torch.equal(piece(torch.arange(size), Shard(0, (size // 2, -size // 2)), ranks, rank), expected)


def test_a_block_dealt_backwards_is_not_the_whole_dim() -> None:
    backwards = Shard(0, (-6,))
    assert backwards != Shard(0) and backwards.blocks == (-6,)
    assert [piece(torch.arange(6), backwards, 3, r).tolist() for r in range(3)] == [[4, 5], [2, 3], [0, 1]]


@pytest.mark.parametrize(
    "tp, cp", [((), (4, -4)), ((4,) * 4, (4, -4)), ((8, -8), ()), ((8, -8), (4, -4)), ((-16,), (-8,))]
)
def test_two_axes_cut_one_dim(tp: tuple[int, ...], cp: tuple[int, ...]) -> None:
    """cp cuts what tp left, whichever of them deals backwards."""
    mesh, x = Mesh.of(cp=2, tp=2), torch.arange(32).view(16, 2)
    placed: dict[str, Placement] = {"tp": Shard(0, tp), "cp": Shard(0, cp)}
    pieces = [nested_piece(x, placed, mesh.cut_order, c) for c in mesh.coordinates()]
    assert {tuple(p.shape) for p in pieces} == {nested_shape(x.shape, placed, mesh.cut_order)} == {(4, 2)}
    assert torch.equal(whole_of(pieces, placed, mesh), x)
    assert all(torch.equal(a, b) for a, b in zip(pieces, scatter(x, placed, mesh), strict=True))


def test_scaled_blocks_keep_their_direction() -> None:
    assert scaled_blocks((1, -1), 16) == (8, -8) == scaled_blocks((8, -8), 16)
    assert scaled_blocks((12, -12, 12, -12), 8) == (2, -2, 2, -2)
    assert scaled_blocks((), 8) == ()
    with pytest.raises(AssertionError, match="do not scale"):
        scaled_blocks((1, -1), 9)


def test_token_slices_are_not_dealt_backwards() -> None:
    assert rows_of_slice(16, Shard(0, (8, 8)), 1, 2, 4) == [(4, 2), (12, 2)]
    with pytest.raises(AssertionError, match="none is dealt backwards"):
        rows_of_slice(16, Shard(0, (8, -8)), 1, 2, 4)


@given(st.integers(1, 40), st.lists(st.integers(-12, 12).filter(bool), min_size=2, max_size=4), st.integers(1, 4))
def test_check_shard(size: int, blocks: list[int], ranks: int) -> None:
    shard = Shard(0, tuple(blocks))
    if extent(blocks) == size and not any(b % ranks for b in blocks):
        check_shard(size, shard, ranks)
        return
    with pytest.raises(ValueError, match="sum to" if extent(blocks) != size else "does not divide over"):
        check_shard(size, shard, ranks)


# --- conversions ------------------------------------------------------------------------------------------------------

S0, S1, B1, Z1, Z0 = Shard(0), Shard(1), Shard(1, (6, 3, 3)), Shard(1, (6, -6)), Shard(0, (-3, 3))
ROWS = [
    (I, R),
    (P, I),
    (P, R),
    (P, S0),
    (P, B1),
    (S0, R),
    (B1, R),
    (S0, I),
    (B1, I),
    (I, S1),
    (I, B1),
    (R, S0),
    (R, B1),
    (S0, S1),
    (B1, S0),
    (S1, B1),
    (S0, P),
    (B1, P),
    (P, Z1),
    (Z1, R),
    (I, Z1),
    (Z1, P),
    (Z1, Z0),
    (S1, Z1),
    (Z1, B1),
    (R, P),
    (R, R),
    (S0, S0),
]


@pytest.mark.parametrize("src, dst", ROWS, ids=str)
def test_conversion_forward_and_backward(src: Placement, dst: Placement) -> None:
    """The whole value is the same before and after, and so is the whole gradient."""
    torch.manual_seed(0)
    mesh = Mesh.of(tp=3)
    whole, tangent = torch.randn(6, 12, dtype=torch.float64), torch.randn(6, 12, dtype=torch.float64)
    for value, a, b in ((whole, src, dst), (tangent, dual(dst), dual(src))):
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        x.meta["val"] = torch.empty(local_shape((6, 12), a, 3), dtype=torch.float64)
        graph.output((graph.call_function(exchange, (x, "tp", 3, str(a), str(b))),))
        gm = _lowered(torch.fx.GraphModule({}, graph), scatter(value, {"tp": a}, mesh)[0])
        out = [o[0] for o in in_lockstep(gm, [[x] for x in scatter(value, {"tp": a}, mesh)], mesh)]
        assert all(o.shape == torch.Size(local_shape((6, 12), b, 3)) for o in out)
        torch.testing.assert_close(whole_of(out, {"tp": b}, mesh), value, rtol=1e-12, atol=1e-12)


def _lowered(gm: torch.fx.GraphModule, example: torch.Tensor) -> torch.fx.GraphModule:
    """exchange as raw collectives."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(gm, tracing_mode="fake")(example)


def test_every_row_of_the_table_is_tried() -> None:
    tried = {(type(a), type(b)) for a, b in ROWS}
    assert set(CONVERSIONS) <= tried
    assert not [
        p
        for p in itertools.product((R, I, P, S0), repeat=2)
        if p[0] != p[1] and (type(p[0]), type(p[1])) in CONVERSIONS and (type(p[0]), type(p[1])) not in tried
    ]
