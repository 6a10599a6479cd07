"""Images that ranks of dp compute for each other: the division, the ways of patches and features, and numbers."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import autopar
from autopar.runtime.inputs.image_dealing import Division, dealt_by_cost, division
from autopar.runtime.inputs.image_padding import DTYPES, ImagePadder
from autopar.runtime.module.argument_checks import check_arguments
from tests.support.ranks import run_ranks
from tests.support.vision_models import GRID_MODELS, steps_with_grids, with_grids

LIMIT = 1e-10
NONE, S, W, L, X = (0, 0, 0), (1, 4, 4), (1, 4, 8), (1, 8, 6), (1, 8, 14)
TOKENS = 32


@pytest.mark.parametrize(
    ("costs", "homes", "owners"),
    [
        ([5, 3, 3, 1], [0, 0, 1, 1], [0, 1, 1, 0]),  # loads 5, 3 + 3, then 1 to the first
        ([2, 2, 2, 2], [0, 0, 1, 1], [0, 0, 1, 1]),  # nothing moves where all are alike
        ([4, 4, 4, 4], [1, 1, 1, 1], [1, 0, 1, 0]),  # one rank has all texts
        ([7], [1], [1]),
        ([], [], []),
    ],
)
def test_the_costliest_first_to_the_rank_with_the_least(costs: list[int], homes: list[int], owners: list[int]) -> None:
    assert dealt_by_cost(costs, homes, 2) == owners


@pytest.mark.parametrize("seed", range(20))
def test_no_rank_has_more_than_the_bound_of_the_algorithm(seed: int) -> None:
    chance = random.Random(seed)
    ranks = chance.randint(1, 9)
    costs = [int(math.exp(chance.uniform(0, 8))) + 1 for _ in range(chance.randint(0, 40))]
    owners = dealt_by_cost(costs, sorted(chance.randrange(ranks) for _ in costs), ranks)
    load = [sum(c for c, w in zip(costs, owners) if w == rank) for rank in range(ranks)]
    assert max(load) <= sum(costs) / ranks + max(costs, default=0) * (1 - 1 / ranks)


def tabled(seed: int) -> Division:
    """Images of a few ranks and microbatches; some have none."""
    chance = random.Random(seed)
    ranks, rows = chance.randint(2, 5), chance.randint(1, 3)
    table = []
    for home in range(ranks):
        for row in range(rows):
            for _ in range(chance.choice([0, 0, 1, 2, 4])):
                table.append([home, row, chance.randint(1, 2), 2 * chance.randint(1, 4), 2 * chance.randint(1, 4)])
    return division(torch.tensor(table, dtype=torch.int64).view(-1, 5), ranks, rows)


@pytest.mark.parametrize("seed", range(20))
def test_features_come_back_to_their_texts(seed: int) -> None:
    """A patch is a number, and so is its feature: each text finds those of its own images, in their order."""
    found = tabled(seed)
    sizes = torch.tensor(found.sizes, dtype=torch.int64)
    numbers = torch.arange(int(sizes.sum())).split(found.sizes)
    own = [[i for i, home in enumerate(found.homes) if home == rank] for rank in range(found.ranks)]
    ways = [found.exchanged(rank) for rank in range(found.ranks)]
    parts = [
        torch.cat([torch.empty(0, dtype=torch.int64), *(numbers[i] for i in order)]).split(sent)
        for order, sent, _ in ways
    ]
    given = [torch.cat([parts[home][rank] for home in range(found.ranks)]) for rank in range(found.ranks)]
    assert [len(x) for x in given] == [sum(received) for _, _, received in ways]
    dealt = [found.dealt(rank, given[rank], "dp") for rank in range(found.ranks)]
    most = found.patches()
    x = torch.zeros(found.ranks, found.rows, most, 1)
    for rank, part in enumerate(dealt):
        pieces = part.pixels.split([int(g.prod(-1).sum()) for g in part.grids])
        for row, piece in enumerate(pieces):
            x[rank, row, : len(piece), 0] = piece
    splits = torch.stack([part.splits for part in dealt])  # type: ignore[misc]
    room = max([1, *(int(s.sum()) for s in splits[:, :, 1].flatten(0, 1))])
    come = torch.ops.autopar.dealt_rows(x, splits, False, room, "dp")[..., 0].long()
    for rank, part in enumerate(dealt):
        for row in range(found.rows):
            images = [i for i in own[rank] if found.of_rows[i] == row]
            for i, start in zip(images, part.starts[row], strict=True):
                assert come[rank, row, start : start + found.sizes[i]].tolist() == numbers[i].tolist()


def test_an_exchange_is_linear_and_its_gradient_goes_back() -> None:
    sent = torch.tensor([[[1, 2], [0, 1]], [[2, 1], [3, 0]]])
    splits = torch.stack([sent, sent.transpose(0, 2)], 2)
    x = torch.randn(2, 2, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: torch.ops.autopar.dealt_rows(x, splits, False, 5, "dp"), (x,))


def test_patches_of_another_dtype_than_on_other_ranks() -> None:
    """Found before they are sent as bytes."""

    def extremes(sizes: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
        """Another rank has float64."""
        return sizes, sizes | {n: DTYPES.index(torch.float64) + 1 for n in sizes if n == "image dtype"}

    padder, batch = ImagePadder(GRID_MODELS["qwen2"](), 1, False, extremes), with_grids((S, W))  # type: ignore[arg-type]
    text, images = padder.apart({**batch, "pixel_values": batch["pixel_values"].float()})
    with pytest.raises(ValueError, match=r"found torch.float64 \[96\] on another rank and torch.float32"):
        padder.fit(text, images)


def test_graphs_of_a_compiler_do_not_deal() -> None:
    how = {"seed": 0, "backend": "inductor", "padding": "bucket", "outputs_with_grad": False}
    with pytest.raises(ValueError, match=r"deal_images: .* found backend=.inductor.; use"):
        check_arguments(autopar.Options(deal_images=True), None, None, None, **how)  # type: ignore[arg-type]


# --- on ranks ---------------------------------------------------------------------------------------------

# Of a batch of four rows, or eight: alike on all ranks, very unlike, and of one rank alone.
STEPS = ((S, W, W, S), (X, L, W, NONE), (NONE, NONE, NONE, S))
WIDE = ((S,) * 8, (X, L, W, NONE, S, NONE, S, W), (NONE,) * 4 + (X, X, L, S), (NONE,) * 7 + (S,))


def stepped(name: str, sizes: dict[str, int], options: dict[str, Any], steps: Sequence[Any]) -> Any:
    """On a rank: (the largest error, for each step whether it exchanges features)."""
    worst, exchanges = 0.0, []
    for parallel, error in steps_with_grids(name, sizes, options, steps, TOKENS):
        worst = max(worst, error)
        exchanges.append("all_to_all_rows" in [kind for _, kind in parallel.traffic()])
    return worst, exchanges


def test_from_the_first_unlike_batch_on() -> None:
    """Alike images stay where they are; what has once been dealt is dealt from then on."""
    for worst, exchanges in run_ranks(2, stepped, "qwen3", {"dp": 2}, {"zero": 3}, STEPS, timeout=300):
        assert worst < LIMIT and exchanges == [False, True, True]


MESHES: tuple[tuple[dict[str, int], dict[str, Any]], ...] = (
    ({"dp": 2}, {}),
    ({"dp": 4}, {"zero": 3}),
    ({"dp": 2}, {"microbatches": 2, "zero": 3}),
    ({"dp": 2, "tp": 2}, {}),
    ({"dp": 2, "cp": 2}, {}),
    ({"dp": 2, "pp": 2}, {"microbatches": 2}),
    ({"dp_replicate": 2, "dp": 2}, {"zero": 3}),
)


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen2", "qwen2.5", "qwen3", "glm4v"])
@pytest.mark.parametrize(("sizes", "options"), MESHES, ids=str)
def test_dealt_on_every_mesh(name: str, sizes: dict[str, int], options: dict[str, Any]) -> None:
    found = run_ranks(math.prod(sizes.values()), stepped, name, sizes, options, WIDE, timeout=500)
    assert max(worst for worst, _ in found) < LIMIT
    assert any(exchanges[-1] for _, exchanges in found)  # not those of the last stage


@pytest.mark.full
@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall", "alltoall_dedup"])
def test_beside_experts(dispatcher: str) -> None:
    # Not "auto": over dp alone, dealing these batches saves nothing
    options = {"microbatches": 2, "token_dispatcher": dispatcher, "deal_images": True}
    for worst, exchanges in run_ranks(4, stepped, "qwen3 experts", {"dp": 2, "ep": 2}, options, WIDE, timeout=500):
        assert worst < LIMIT and exchanges[-1]
