"""Images of unlike sizes on each rank and in each step, whose patches lie in one row: numbers, steps that are compiled,
loops of others, and batches that are wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import accelerate
import pytest
import torch
import transformers
from torch import Tensor, nn

import autopar
from autopar import integrations
from autopar.compile.model import capture_step, compile_model
from autopar.compile.parameters import normalized
from autopar.ir.batch import tensors_of
from autopar.ir.graph import calls_of, global_shape
from autopar.ir.mesh import Mesh
from autopar.lift_to_float64 import LiftFloat32
from autopar.models.hf import TransformersAdapter
from autopar.models.hf_images import ImageReader
from autopar.options import Options
from autopar.rewrite.compilation import Compilation
from autopar.runtime.inputs.image_padding import ImagePadder, bucket
from autopar.testing.harness import MeshRun
from autopar.testing.reference import eager
from tests.integrations.loops import arguments, as_started, differences
from tests.outside import vision_language as vision_language  # enters its models
from tests.outside.zoo_of_others import MODELS
from tests.support.ranks import refusal, run_ranks
from tests.support.vision_models import GRID_MODELS, IMAGE, part_with_grids, qwen_vl, steps_with_grids, with_grids

LIMIT = 1e-10
S, W, L, NONE = (1, 4, 4), (1, 4, 8), (1, 8, 6), (0, 0, 0)
Grids = Sequence[Sequence[int]]
# Of a batch of four rows. The most patches of a rank of dp=2 are 64, 48, 96 and 48: two buckets
STEPS: tuple[Grids, ...] = ((S, W, L, S), (W, S, S, W), (S, S, W, L), (NONE, NONE, S, W))


def stepped(name: str, sizes: dict[str, int], options: dict[str, Any], steps: Sequence[Grids]) -> tuple[float, int]:
    """On a rank, which passes its own rows and images: (the largest error, how many steps were compiled)."""
    found = [*steps_with_grids(name, sizes, options, steps)]
    parallel, _ = found[-1]
    return max(error for _, error in found), sum(r.compiled.train for r in parallel._cache.runners)


EVERY = [
    (name, sizes, options)
    for name in GRID_MODELS
    for sizes, options in (
        ({"dp": 2}, {"zero": 3}),
        ({"dp": 2, "tp": 2}, {}),
        ({"dp": 2}, {"microbatches": 2}),
        ({"dp": 2, "cp": 2}, {}),
        ({"dp": 2, "pp": 2}, {"microbatches": 2}),
    )
]
FEW = [("qwen2.5", {"dp": 2}, {"zero": 3}), ("glm4v", {"dp": 2}, {"microbatches": 2})]


@pytest.mark.parametrize(
    ("name", "sizes", "options"),
    [*FEW, *(pytest.param(*case, marks=pytest.mark.full) for case in EVERY if case not in FEW)],
    ids=str,
)
def test_each_rank_has_images_of_its_own_sizes(name: str, sizes: dict[str, int], options: dict[str, Any]) -> None:
    """A rank without images, too. Steps are compiled for numbers of patches alone."""
    for worst, compiled in run_ranks(math.prod(sizes.values()), stepped, name, sizes, options, STEPS, timeout=300):
        assert worst < LIMIT
        assert compiled == (1 if "microbatches" in options else 2)


def ragged() -> float:
    """On a rank, whose text is shorter than that of the other one, with images of other sizes: the largest error."""
    grids = (S, W, L, NONE)
    mesh = autopar.init_mesh("cpu", 120.0, dp=2)
    at, parts = autopar.dp_rank_and_size(mesh)
    model, batch = GRID_MODELS["qwen2.5"](), with_grids(grids)
    batch["labels"][2:, 14:] = -100
    expected, mine = eager(model, batch), part_with_grids(batch, grids, at, parts)
    if at:
        mine = {n: x[:, :14] if x.shape[1] == 16 else x for n, x in mine.items()}
    parallel = autopar.parallelize(model, mesh, lift_to_float64=True, padding="auto")
    loss, found = float(parallel.train_step(**mine)), parallel.full_gradients()
    wanted = {n: g for n, g in expected.gradients.items() if g is not None}
    return max(abs(loss - expected.loss), *(float((found[n] - g).abs().max()) for n, g in wanted.items()))


def test_texts_of_unlike_lengths_beside_images_of_unlike_sizes() -> None:
    assert max(run_ranks(2, ragged, timeout=300)) < LIMIT


# --- loops of others --------------------------------------------------------------------------------------


def examples() -> list[dict[str, Tensor]]:
    grids = [S, W, L, S, W, S, S, W, L, L, S, W]
    found = []
    for i, grid in enumerate(grids):
        found.append({name: x[0] if len(x) == 1 else x for name, x in with_grids([grid], i).items()})
    return found


def collated(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """As processors of such models do: patches of all images in one row."""
    out = {name: torch.stack([row[name] for row in rows]) for name in rows[0] if name != "pixel_values"}
    return out | {"pixel_values": torch.cat([row["pixel_values"] for row in rows])}


def trained(sizes: dict[str, int] | None, folder: str) -> list[dict[str, float]]:
    with as_started(), LiftFloat32():
        mesh = autopar.init_mesh("cpu", **sizes) if sizes is not None else None
        parts = autopar.dp_rank_and_size(mesh)[1] if mesh is not None else 1
        how: dict[str, Any] = {
            "model": GRID_MODELS["qwen2.5"](),
            "args": arguments(
                folder,
                parts,
                per_device_train_batch_size=4 // parts,
                gradient_accumulation_steps=1,
                max_steps=3,
                eval_strategy="no",
                save_strategy="no",
                include_num_input_tokens_seen="no",
            ),
            "train_dataset": examples(),
            "data_collator": collated,
        }
        if mesh is None:
            trainer: Any = transformers.Trainer(**how)
        else:
            trainer = integrations.Trainer(**how, mesh=mesh, options={"lift_to_float64": True})
        trainer.train()
        logs: list[dict[str, float]] = trainer.state.log_history
        return logs


def test_the_trainer_of_transformers(tmp_path: Any) -> None:
    expected = trained(None, str(tmp_path))
    for logs in run_ranks(2, trained, {"dp": 2}, str(tmp_path), timeout=300):
        assert max(differences(logs, expected).values()) < LIMIT


def looped(sizes: dict[str, int] | None) -> list[float]:
    """The losses of a loop as users of accelerate write it, and a sum of the last weights."""
    with as_started(), LiftFloat32():
        at, parts = 0, 1
        if sizes is None:
            accelerator: Any = accelerate.Accelerator(cpu=True)
        else:
            mesh = autopar.init_mesh("cpu", **sizes)
            at, parts = autopar.dp_rank_and_size(mesh)
            accelerator = integrations.Accelerator(mesh=mesh, options={"lift_to_float64": True}, cpu=True)
        model = GRID_MODELS["qwen3"]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer = accelerator.prepare(model, optimizer)
        losses = []
        for seed, grids in enumerate(STEPS[:3]):
            loss = model(**part_with_grids(with_grids(grids, seed), grids, at, parts)).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        weights = accelerator.get_state_dict(model)
        return [*losses, sum(float(x.double().abs().sum()) for x in weights.values())]


def test_a_loop_of_accelerate() -> None:
    expected = looped(None)
    for found in run_ranks(2, looped, {"dp": 2}, timeout=300):
        assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-9


# --- the graph --------------------------------------------------------------------------------------------


def read(name: str, grids: Grids, patches: int, rows: int, seed: int = 0) -> tuple[nn.Module, dict[str, Any]]:
    """A model, and the inputs of its step."""
    model, batch = GRID_MODELS[name](), with_grids(grids, seed)
    images = {"image": (batch.pop("pixel_values"), batch.pop("image_grid_thw"))}
    reader = ImageReader(model, TransformersAdapter().prepare, lift=True)
    assert not reader.refusal({"image": (96,)})
    return model, reader.read(batch, images, rows).inputs({"image": patches})


@pytest.mark.parametrize("name", ["qwen2.5", "glm4v"])
def test_the_graph_knows_numbers_of_patches_alone(name: str) -> None:
    graphs = []
    for grids in ((S, W, L, S), (W, S, S, W)):
        model, batch = read(name, grids, 64, 2)
        gm = normalized(capture_step(model, batch, Options(), lift_to_float64=True), Compilation(Mesh.of(dp=2)))
        towers = [
            n for n in calls_of(gm.graph, torch.ops.autopar.attention.default) if global_shape(n.args[0])[2] == 64
        ]
        assert [tuple(global_shape(n.args[0])) for n in towers] == [(2, 4, 64, 8)] * 2  # one call for each layer
        graphs.append([(n.op, str(n.target), str(n.args)) for n in gm.graph.nodes])
    assert graphs[0] == graphs[1]


def test_patches_are_given_in_the_order_of_windows() -> None:
    """8 x 6 patches of 2 x 2 a feature are 4 x 3 features, in windows of 2 x 2."""
    _, batch = read("qwen2.5", (L, NONE), 64, 1)
    inputs = batch["image_inputs"]
    assert inputs["places"][0].tolist() == [-1, 0, 1, 4, 2, 3, 5, 6, 7, 10, 8, 9, 11, -1, -1, -1]
    assert inputs["cu_window_seqlens"][0].tolist() == [n for n, k in enumerate((16, 8, 16, 8, 8, 8)) for _ in range(k)]
    assert inputs["cu_seqlens"][0].tolist() == [0] * 48 + [1] * 16
    assert batch["pixel_values"].shape == (64, 96) and not batch["pixel_values"][48:].any()
    assert batch["image_grid_thw"].tolist() == [[1, 2, 32]]
    assert all(x.shape[0] == 64 for n, x in tensors_of(inputs).items() if n == "position_ids")


@pytest.mark.parametrize(
    ("patches", "unit", "padded"), [(0, 4, 64), (1, 1, 64), (64, 1, 64), (65, 4, 128), (513, 4, 640), (900, 9, 1152)]
)
def test_buckets(patches: int, unit: int, padded: int) -> None:
    assert bucket(patches, unit) == padded
    assert padded % unit == 0 and (padded - patches) <= max(64 * unit, padded // 4)


@pytest.mark.parametrize(("lazy", "found"), [(True, [48, 48, 64, 128]), (False, [64, 64, 64, 128])])
def test_batches_like_the_first_one_are_not_padded(lazy: bool, found: list[int]) -> None:
    model = GRID_MODELS["qwen2"]()
    padder = ImagePadder(model, 1, False, lambda sizes: (dict(sizes), dict(sizes)), lazy)
    patches = []
    for grids in ((S, W), (W, S), (L, S), (L, W)):
        text, images = padder.apart(with_grids(grids))
        patches.append(len(padder.fit(text, images)["pixel_values"]))
    assert patches == found
    uneven = ImagePadder(model, 1, False, lambda sizes: ({n: k // 2 for n, k in sizes.items()}, dict(sizes)), lazy)
    text, images = uneven.apart(with_grids((S, W)))
    assert len(uneven.fit(text, images)["pixel_values"]) == 64, "other ranks have fewer"


OTHERS = ["qwen3.5", "qwen2.5-omni thinker"]


@pytest.mark.full
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,tp=2"])
def test_other_models_that_take_what_depends_on_sizes(name: str, mesh: str) -> None:
    model, batch = MODELS[f"transformers {name}"].make()
    expected, on = eager(model, batch), Mesh.parse(mesh)
    images = {"image": (batch.pop("pixel_values"), batch.pop("image_grid_thw"))}
    reader = ImageReader(model, TransformersAdapter().prepare, lift=True)
    given = reader.read(batch, images, 2).inputs({"image": 64})
    compiled = compile_model(model, given, on, Options(), lift_to_float64=True, outputs=())
    assert max(errors.worst for errors in MeshRun(compiled, model, given, on).errors(expected)) < LIMIT


# --- what is wrong ----------------------------------------------------------------------------------------


def wrong_on_one(what: str) -> str:
    mesh = autopar.init_mesh("cpu", 60.0, dp=2)
    at, _ = autopar.dp_rank_and_size(mesh)
    model, batch = qwen_vl((S, W, L, S))
    mine = part_with_grids(batch, (S, W, L, S), at, 2)
    parallel = autopar.parallelize(model, mesh, padding="auto")
    if at:
        ids = mine["input_ids"].clone()
        if what == "too few places":
            ids[0, 1] = 5
        mine["input_ids"] = ids
        mine["mm_token_type_ids"] = (ids == IMAGE).long()
    return refusal(lambda: parallel.train_step(**mine))


def test_places_without_features() -> None:
    texts = run_ranks(2, wrong_on_one, "too few places", timeout=120)
    assert "image_grid_thw: the features of images need as many places in the text, found 16" in texts[1]
    assert "and 15 places" in texts[1] and "images need to fit the text on every rank" in texts[0]


@pytest.mark.parametrize(
    ("grids", "patches", "rows", "text"),
    [
        ([[1, 4, 12]], 48, 2, "each image needs its places in one microbatch, found those of number 0 in"),
        ([[1, 4, 4], [1, 4, 8]], 40, 1, "found 48 in the grids and 40 patches"),
        ([[1, 4, 4], [1, 8, 8]], 80, 1, "found 20 of them .4 patches each. and 12 places"),
    ],
)
def test_images_that_do_not_fit_the_text(grids: list[list[int]], patches: int, rows: int, text: str) -> None:
    model, batch = qwen_vl((S, W))
    reader = ImageReader(model, TransformersAdapter().prepare, lift=True)
    words = {n: x for n, x in batch.items() if n not in ("pixel_values", "image_grid_thw")}
    with pytest.raises(ValueError, match=f"image_grid_thw: .*{text}"):
        reader.read(words, {"image": (torch.zeros(patches, 96).double(), torch.tensor(grids))}, rows)


@pytest.mark.parametrize("name", ["ernie4.5-vl", "paddleocr-vl"])
def test_towers_that_compute_with_their_grids(name: str) -> None:
    model, batch = MODELS[f"transformers {name}"].make()
    reader = ImageReader(model, TransformersAdapter().prepare, lift=False)
    assert "with its grids" in reader.refusal({"image": tuple(batch["pixel_values"].shape[1:])})


def other_sizes(name: str) -> str:
    """On a rank, whose images have other sizes than those of the other one."""
    mesh = autopar.init_mesh("cpu", 60.0, dp=2)
    at, _ = autopar.dp_rank_and_size(mesh)
    model, batch = MODELS[f"transformers {name}"].make()
    batch = {n: x[:48] if n == "pixel_values" else x[:2] for n, x in batch.items()}
    parallel = autopar.parallelize(model, mesh, example_batch=batch, padding="auto")
    return refusal(lambda: parallel.train_step(**batch | {"image_grid_thw": batch["image_grid_thw"].roll(at, 0)}))


def test_other_sizes_on_another_rank_where_the_graph_depends_on_them() -> None:
    for text in run_ranks(2, other_sizes, "ernie4.5-vl", timeout=120):
        assert "all ranks need images of the same sizes in the same order" in text and "with its grids" in text
