"""Encoders that all ranks would run alike: their rows are shared. Graph, numbers, traffic, decisions, refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.compile.model import compile_model
from autopar.cost.flops import flops
from autopar.cost.traffic import step_communication
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.plan import Plan
from autopar.steps.graphs import Compiled
from autopar.testing.harness import check_model
from tests.support.cases import step_graphs
from tests.support.ranks import refusal, run_ranks
from tests.support.steps_on_ranks import step_on_rank
from tests.support.vision_models import Made, frozen_llava, llava, two_towers

LIMIT = 1e-10
ALWAYS, NEVER = Options(share_encoders=True), Options(share_encoders=False)


def made_of(made: Made, mesh: str, options: Options) -> Compiled:
    model, batch = made
    return compile_model(model, batch, Mesh.parse(mesh), options, lift_to_float64=True, outputs=())


def rows_of(plan: Plan) -> list[tuple[str, str, tuple[int, ...], int]]:
    return [(s.axis, s.node, s.blocks, s.units) for s in plan.streams if s.rows]


# --- the graph ----------------------------------------------------------------------------------------------


class Captions(nn.Module):
    """An image becomes a word before the others."""

    def __init__(self) -> None:
        super().__init__()
        self.see, self.words, self.qkv = nn.Linear(6, 4, bias=False), nn.Embedding(16, 4), nn.Linear(4, 12, bias=False)

    def forward(self, ids: Tensor, images: Tensor) -> Tensor:
        seen = self.see(images).tanh()
        x = torch.cat([seen.unsqueeze(1), self.words(ids)], 1)
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
        return (nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True) ** 2).mean()


def captions(rows: int = 4) -> Made:
    torch.manual_seed(0)
    ids = torch.randint(0, 16, (rows, 7))
    return Captions().double(), {"ids": ids, "images": torch.randn(rows, 6).double()}


GRAPH = """
images_s = convert(images, 'cp', 'I', 'S(0)')
p_see_weight_r = convert(p_see_weight, 'cp', 'I', 'R')
linear = linear(images_s, p_see_weight_r)
tanh = tanh(linear)
unsqueeze = unsqueeze(tanh, 1)
unsqueeze_r = convert(unsqueeze, 'cp', 'S(0)', 'R')
"""


def test_the_region_is_sharded_and_what_leaves_it_gathered() -> None:
    texts: list[str] = []

    def see(name: str, gm: Any, ctx: Any) -> None:
        if name == "propagate_placements":
            texts.extend(f"{n.name} = {_called(n.target)}{n.args}" for n in gm.graph.nodes if n.op == "call_function")

    model, batch = captions()
    compile_model(model, batch, Mesh.of(cp=2), ALWAYS, lift_to_float64=True, observers=[see])
    region = [line for line in texts if line.split()[0] in GRAPH.split()]
    assert [line.replace(",)", ")") for line in region] == GRAPH.strip().splitlines()


def _called(target: Any) -> str:
    return getattr(target, "__name__", str(target)).partition(".")[0]


# --- numbers ------------------------------------------------------------------------------------------------

CASES: list[tuple[Callable[[], Made], str, dict[str, Any], list[tuple[str, str, tuple[int, ...], int]]]] = [
    (lambda: llava(3), "cp=2", {}, [("cp", "pixel_values", (1,), 3)]),  # two images and one
    (lambda: llava(4, 2, 0.3), "dp=2,cp=2", {"zero": 3}, [("cp", "pixel_values", (1, 1), 0)]),  # two per row; dropout
    (lambda: frozen_llava(8), "dp=2,cp=2", {"microbatches": 2}, [("cp", "pixel_values", (1,) * 4, 0)]),
    (two_towers, "tp=2", {}, [("tp", "images", (1,), 0)]),  # batch norm over rows that are shared
    (
        lambda: two_towers(6), "cp=2,tp=2", {"sequence_parallel": True},
        [("cp", "images", (1,), 0), ("cp", "sounds", (1,), 0), ("tp", "images", (1, 1), 3)],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("make", "mesh", "options", "rows"), CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_loss_and_gradients_are_those_of_one_process(make: Any, mesh: str, options: Any, rows: Any) -> None:
    found = check_model(*make(), Mesh.parse(mesh), replace(ALWAYS, **options))
    assert rows_of(found.compiled.plan) == rows
    assert found.worst < LIMIT, str(found)


def stepped(make: str, sizes: dict[str, int], options: dict[str, Any]) -> float:
    """On a rank: the largest error, as users call it."""
    worst, parallel = step_on_rank(*MAKERS[make](), sizes, {"share_encoders": True, **options})
    assert rows_of(parallel.plan) or "cp" not in sizes
    return worst


MAKERS: dict[str, Callable[[], Made]] = {"two images": lambda: llava(4, 2), "frozen": frozen_llava}


@pytest.mark.parametrize(
    ("make", "sizes", "options"),
    [
        ("two images", {"dp": 2, "cp": 2}, {"zero": 3}),
        ("two images", {"pp": 2, "cp": 2}, {"microbatches": 2}),
        ("frozen", {"dp": 2}, {}),
    ],
    ids=str,
)
def test_steps_on_ranks_are_those_of_one_process(make: str, sizes: dict[str, int], options: dict[str, Any]) -> None:
    assert max(run_ranks(len(sizes) * 2, stepped, make, sizes, options, timeout=120)) < LIMIT


# --- traffic and work ---------------------------------------------------------------------------------------


def work(compiled: Compiled) -> int:
    """FLOPs of a rank's step."""
    return sum(flops(node) for gm in step_graphs(compiled) for node in gm.graph.nodes)


def test_half_of_the_work_for_one_gather() -> None:
    """Words of images (4 x 1 of 4, 8 bytes) are gathered once in the forward, scattered once in the backward."""
    shared, alike, one = (
        made_of(captions(), mesh, options) for mesh, options in (("cp=2", ALWAYS), ("cp=2", NEVER), ("dp=1", NEVER))
    )
    assert not rows_of(alike.plan)
    sent, before = step_communication(shared), step_communication(alike)
    for kind in ("all_gather", "reduce_scatter"):
        more = sent["cp", kind].bytes - (before["cp", kind].bytes if ("cp", kind) in before else 0)
        assert more == 4 * 4 * 8 // 2, kind
    saved, products = work(alike) - work(shared), 2 * 4 * 6 * 4  # the forward's, and that of the weight's gradient
    assert products <= saved <= work(one) - work(shared)


# --- decisions ----------------------------------------------------------------------------------------------


def test_rows_are_shared_where_it_saves_time() -> None:
    fast, slow = (made_of(captions(), "cp=2", Options(topology=f"cp=ring:{n}:0")).plan for n in ("1e15", "1e3"))
    assert rows_of(fast) and not rows_of(slow)
    (why,) = [reason for subject, reason in slow.notes if "of input images" in subject]
    assert why.startswith("alike on all ranks of cp: sharing its rows saves ") and " ms and takes " in why
    assert "of input images: sharing its rows saves" in str(fast)


@pytest.mark.parametrize(
    ("make", "mesh"),
    [
        (lambda: captions(1), "cp=2"),  # one image
        (lambda: captions(2), "dp=2,cp=2"),  # one image per rank
        (captions, "dp=2"),  # every rank has its own
        (captions, "tp=2"),  # widths are sharded
    ],
    ids=["one image", "one per rank", "dp", "tp"],
)
def test_nothing_to_share(make: Callable[[], Made], mesh: str) -> None:
    assert not rows_of(made_of(make(), mesh, ALWAYS).plan)


def test_plans_are_kept_as_text() -> None:
    plan = made_of(captions(), "cp=2", ALWAYS).plan
    assert Plan.from_json(plan.to_json()).streams == plan.streams


# --- refusals -----------------------------------------------------------------------------------------------


def without_image() -> str:
    model, batch = llava(4, 2)
    batch["input_ids"][::2, 1:5] = 7  # one image of two rows, one on each rank, has no place in the text
    mesh = autopar.init_mesh("cpu", 60.0, dp=2)
    mine = {name: x.chunk(2)[mesh.get_local_rank()] for name, x in batch.items()}
    parallel = autopar.parallelize(model, mesh, example_batch=mine)
    return refusal(parallel.train_step, **mine)


def test_images_without_a_place_are_refused() -> None:
    for told in run_ranks(2, without_image):
        assert "each example needs its own rows, in the order of the examples" in told


def test_an_encoder_that_nobody_can_pad_does_not_stop_the_text() -> None:
    """A tower of 17 patches beside a text of 8 tokens, which divides."""
    model, batch = Patches().double(), captions()[1]
    batch |= {"ids": torch.randint(0, 16, (4, 8)), "images": torch.randn(4, 3, 16, 16).double()}
    found = check_model(model, batch, Mesh.of(cp=2), ALWAYS)
    assert found.worst < LIMIT and rows_of(found.compiled.plan)


class Patches(nn.Module):
    """Attention among the patches of an image and a class token, whose result is added to the words."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.one = nn.Conv2d(3, 4, 4, stride=4), nn.Parameter(torch.randn(1, 1, 4))
        self.words, self.both = nn.Embedding(16, 4), nn.ModuleList(nn.Linear(4, 12, bias=False) for _ in range(2))

    def forward(self, ids: Tensor, images: Tensor) -> Tensor:
        patches = self.patch(images).flatten(2).transpose(1, 2)
        seen = self.attend(0, torch.cat([self.one.expand(len(images), -1, -1), patches], 1))
        return (self.attend(1, self.words(ids) + seen[:, :1], causal=True) ** 2).mean()

    def attend(self, which: int, x: Tensor, causal: bool = False) -> Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.both[which](x).chunk(3, -1))
        return x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).squeeze(1)
