"""Images in one row whose sizes repeat become rows: the graph, the numbers, and models that are called so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.compile.model import capture_step
from autopar.compile.parameters import normalized
from autopar.ir.graph import calls_of, global_shape
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.rewrite.compilation import Compilation
from autopar.testing.harness import check_model
from autopar.testing.reference import eager
from tests.support.ranks import run_ranks
from tests.support.steps_on_ranks import step_on_rank
from tests.support.vision_models import qwen_vl

LIMIT = 1e-10
ATTENTION = torch.ops.autopar.attention.default


class Packed(nn.Module):
    """Patches of all images in one row, permuted within windows, and one attention for each piece."""

    def __init__(self, sizes: Sequence[int], order: Sequence[int], dim: int = 2) -> None:
        super().__init__()
        self.sizes, self.order, self.dim = list(sizes), list(order), dim
        self.up, self.qkv = nn.Linear(3, 8), nn.Linear(8, 24)

    def forward(self, patches: Tensor) -> Tensor:
        x = self.up(patches)[torch.tensor(self.order)]
        q, k, v = (part.view(1, -1, 2, 4).transpose(1, 2).split(self.sizes, 2) for part in self.qkv(x).chunk(3, -1))
        made = [nn.functional.scaled_dot_product_attention(*piece) for piece in zip(q, k, v, strict=True)]
        out = torch.cat([x.transpose(1, 2) for x in made], 1) if self.dim == 1 else torch.cat(made, 2)
        return (out**2).mean()


def graph_of(sizes: Sequence[int], order: Sequence[int], dim: int = 2) -> Any:
    model = Packed(sizes, order, dim).double()
    batch = {"patches": torch.randn(sum(sizes), 3).double()}
    return normalized(capture_step(model, batch, Options(), lift_to_float64=True), Compilation(Mesh.of(dp=2)))


SWAPPED = [1, 0, 3, 2, 5, 4, 7, 6]


@pytest.mark.parametrize(
    ("sizes", "queries"),
    [
        ((4, 4), [(2, 2, 4, 4)]),
        ((2, 1, 1, 2, 1, 1), [(2, 2, 2, 4), (2, 2, 1, 4), (2, 2, 1, 4)]),
        ((2, 2, 2, 2), [(4, 2, 2, 4)]),
        ((3, 5), [(1, 2, 3, 4), (1, 2, 5, 4)]),
    ],
)
@pytest.mark.parametrize("dim", [1, 2])
def test_lengths_that_repeat_become_rows(sizes: tuple[int, ...], queries: list[tuple[int, ...]], dim: int) -> None:
    gm = graph_of(sizes, SWAPPED, dim)
    assert [tuple(global_shape(n.args[0])) for n in calls_of(gm.graph, ATTENTION)] == queries


@pytest.mark.parametrize(
    ("order", "blocks"),
    [(SWAPPED, (4, 2)), ([1, 0, 2, 3, 5, 4, 6, 7], (2, 4)), (list(range(8)), None), ([7, 6, 5, 4, 3, 2, 1, 0], ())],
)
def test_an_index_that_repeats_stays_within_blocks(order: list[int], blocks: tuple[int, ...] | None) -> None:
    gm = graph_of((4, 4), order)
    picks = [
        n for n in gm.graph.nodes if n.target in (torch.ops.aten.index.Tensor, torch.ops.aten.index_select.default)
    ]
    found = [tuple(global_shape(n)[:2]) for n in picks if n.target is torch.ops.aten.index_select.default]
    assert found == ([blocks] if blocks else []) and len(picks) == (0 if blocks is None else 1)


@pytest.mark.parametrize(("sizes", "mesh"), [((4, 4), "dp=2"), ((2, 1, 1, 2, 1, 1), "dp=2"), ((3, 5), "tp=2")])
def test_numbers_are_those_of_one_process(sizes: tuple[int, ...], mesh: str) -> None:
    torch.manual_seed(0)
    batch = {"patches": torch.randn(8, 3).double()}
    found = check_model(Packed(sizes, SWAPPED).double(), batch, Mesh.parse(mesh), Options())
    assert found.worst < LIMIT, str(found)
    gathered = [n for n in found.compiled.local.graph.nodes if "S(0)" in n.args[3:4] and n.args[1] == "dp"]
    assert not gathered, "images of other ranks"


def stepped(grids: Sequence[Sequence[int]], sizes: dict[str, int], options: dict[str, Any]) -> float:
    """On a rank, which passes its own rows, images and grids: the largest error."""
    return step_on_rank(*qwen_vl(grids), sizes, options)[0]


SMALL, WIDE = (1, 4, 4), (1, 4, 8)


@pytest.mark.parametrize(
    ("grids", "sizes", "options"),
    [
        ((SMALL, WIDE) * 2, {"dp": 2}, {"zero": 3}),  # images of unlike sizes, the same on both ranks
        ((SMALL,) * 4, {"dp": 2}, {"microbatches": 2}),
    ],
    ids=["unlike images", "microbatches"],
)
def test_qwen_vl_with_images_of_its_own_on_each_rank(grids: Any, sizes: Any, options: Any) -> None:
    assert max(run_ranks(2, stepped, grids, sizes, options, timeout=200)) < LIMIT


def compiled_for(batches: Sequence[dict[str, Any]]) -> tuple[int, float]:
    """On a rank: (how many steps are compiled, the largest error)."""
    model, _ = qwen_vl()
    mesh = autopar.init_mesh("cpu", 60.0, tp=2)
    expected = [eager(model, batch).loss for batch in batches]
    parallel = autopar.parallelize(model, mesh, lift_to_float64=True, example_batch=batches[0])
    found = [float(parallel.train_step(**batch)) for batch in batches]
    return len(parallel._cache.runners), max(abs(a - b) for a, b in zip(found, expected, strict=True))


def test_images_at_other_places_of_the_text_run_as_compiled() -> None:
    """Sizes of images are part of a graph. Positions of tokens are not, though the model computes them from values."""
    _, batch = qwen_vl()
    moved = {name: batch[name].roll(3, 1) for name in ("input_ids", "labels", "mm_token_type_ids")}
    padded = {**batch, **moved, "attention_mask": (torch.arange(16) < torch.tensor([[16], [14], [16], [15]])).long()}
    for count, error in run_ranks(2, compiled_for, [batch, {**batch, **moved}, {**batch, **moved}], timeout=200):
        assert count == 1 and error < LIMIT
    for _, error in run_ranks(2, compiled_for, [padded], timeout=200):
        assert error < LIMIT


ON_MESHES = [
    (grids, mesh)
    for grids in ((SMALL,) * 4, (SMALL, WIDE) * 2) for mesh in ("dp=2", "tp=2", "cp=2", "dp=2,cp=2")
]  # fmt: skip
UNLIKE = [((SMALL, SMALL, WIDE, WIDE), mesh) for mesh in ("tp=2", "cp=2")]  # whose halves no two ranks of dp could pass


@pytest.mark.full
@pytest.mark.parametrize(("grids", "mesh"), [*ON_MESHES, *UNLIKE], ids=str)
@pytest.mark.parametrize("share", [True, False])
def test_qwen_vl_on_meshes(grids: Any, mesh: str, share: bool) -> None:
    options = Options(share_encoders=share)
    found = check_model(*qwen_vl(grids), Mesh.parse(mesh), options)
    assert found.worst < LIMIT, str(found)
