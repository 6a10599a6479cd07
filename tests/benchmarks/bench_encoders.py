"""A step of vision-language models whose encoder's images are shared, against every rank running it on all of them.

    python tests/benchmarks/bench_encoders.py [--rounds 5] [--small]

Time of the processor and FLOPs of one rank, and what it sends; the loss and the gradients of both are compared.
"""

from __future__ import annotations

import argparse
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from common import interleaved, load, publish, ratio, table
from torch import Tensor, nn

import autopar
from autopar.adapters.copying.fake import skeleton_of
from autopar.compile.model import compile_model
from autopar.cost.flops import flops
from autopar.cost.traffic import step_communication
from autopar.ir.mesh import Mesh
from autopar.models import hf as hf  # knows transformers models
from autopar.options import Options
from autopar.steps.of_rank import backwards

IMAGE = 2
DP, CP = {"dp": 2}, {"cp": 2}


@dataclass(frozen=True)
class Sizes:
    """Widths of both parts, layers of the encoder (the language model has 2), pixels of an image's side, images."""

    hidden: int = 256
    layers: int = 6
    pixels: int = 112
    images: int = 8

    @property
    def text(self) -> dict[str, Any]:
        """What transformers calls the sizes of the language model."""
        return {
            "vocab_size": 512, "hidden_size": self.hidden, "intermediate_size": 3 * self.hidden, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": self.hidden // 4, "pad_token_id": 0,
            "bos_token_id": 1, "eos_token_id": 3,
        }  # fmt: skip


FULL, SMALL = Sizes(), Sizes(64, 2, 56, 4)


def llava(sizes: Sizes) -> tuple[nn.Module, dict[str, Tensor]]:
    """A CLIP tower of 64 patches and a class token, whose 65 tokens no cp divides."""
    tower = transformers.CLIPVisionConfig(
        hidden_size=sizes.hidden, intermediate_size=4 * sizes.hidden, num_hidden_layers=sizes.layers,
        num_attention_heads=4, image_size=sizes.pixels, patch_size=14, projection_dim=sizes.hidden,
    )  # fmt: skip
    patches = (sizes.pixels // 14) ** 2
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**sizes.text), vision_config=tower, image_token_index=IMAGE,
        image_seq_length=patches,
    )  # fmt: skip
    batch = _text(sizes, patches)
    return _made("LlavaForConditionalGeneration", config), batch | {
        "pixel_values": torch.randn(sizes.images, 3, sizes.pixels, sizes.pixels)
    }


def qwen(sizes: Sizes) -> tuple[nn.Module, dict[str, Tensor]]:
    """Qwen2.5-VL; windows of 4 x 4 patches."""
    side = sizes.pixels // 14
    rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    tower = {
        "depth": sizes.layers, "hidden_size": sizes.hidden, "intermediate_size": 3 * sizes.hidden, "num_heads": 4,
        "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 56,
        "fullatt_block_indexes": [sizes.layers - 1], "out_hidden_size": sizes.hidden,
    }  # fmt: skip
    text = {
        **sizes.text,
        "rope_parameters": {**rotary, "mrope_section": [sizes.hidden // 16, sizes.hidden // 32] + [sizes.hidden // 32]},
    }
    config = transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=tower, image_token_id=IMAGE, video_token_id=1
    )
    batch = _text(sizes, side * side // 4)
    kinds = {"mm_token_type_ids": (batch["input_ids"] == IMAGE).long()}
    pixels = torch.randn(sizes.images * side * side, 3 * 2 * 14 * 14)
    grids = torch.tensor([[1, side, side]] * sizes.images)
    return _made("Qwen2_5_VLForConditionalGeneration", config), batch | kinds | {
        "pixel_values": pixels, "image_grid_thw": grids
    }  # fmt: skip


def _made(name: str, config: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, name)(config)
    return model


def _text(sizes: Sizes, places: int) -> dict[str, Tensor]:
    """An image and 32 words in each row."""
    torch.manual_seed(1)
    ids = torch.randint(4, 512, (sizes.images, places + 32))
    ids[:, 1 : 1 + places] = IMAGE
    return {"input_ids": ids, "labels": ids.masked_fill(ids == IMAGE, -100)}


# model, mesh, options that they share, what differs: every rank on all images, and shared
CASES: dict[str, tuple[Any, dict[str, int], dict[str, Any]]] = {
    "LLaVA, cp=2": (llava, CP, {}),
    "LLaVA, dp=2, cp=2": (llava, DP | CP, {"zero": 3}),
    "Qwen2.5-VL, dp=2": (qwen, DP, {}),
}
ALIKE, SHARED = "all images on every rank", "shared"


def differ(name: str, how: str) -> dict[str, Any]:
    """Over cp an option shares images. Over dp it is whether a rank is given its own, or those of all."""
    if "cp" in CASES[name][1]:
        return {"share_encoders": how == SHARED}
    return {"share_encoders": False, "batch_dims": {} if how == SHARED else {"pixel_values": None}}


def main() -> None:
    """Time all, print the table, write it to docs/benchmarks.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="small models; the page is then left alone")
    chosen = parser.parse_args()
    sizes, before, rows = SMALL if chosen.small else FULL, load(), []
    for name, (_, axes, _) in CASES.items():
        ranks = Mesh.of(**axes).world_size
        times = autopar.launch(_work, nproc=ranks, args=(name, sizes, chosen.rounds), timeout=550, device="cpu")[0]
        for how, found in times.items():
            made = _compiled(name, how, sizes)
            work, sent = _flops(made), sum(x.bytes for x in step_communication(made).values())
            cells = [f"{x:.2f}" for x in ratio(found, times[ALIKE])]
            seconds = f"{min(found.wall) * 1e3:.0f}", f"{min(found.cpu) * 1e3:.0f}"
            rows.append([name, how, *seconds, *cells, f"{work / 1e9:.2f}", f"{sent / 1e6:.2f}"])
    head = [
        "",
        "images",
        "ms, min",
        "of the processor",
        "ratio: min",
        "median",
        "processor",
        "GFLOPs of a rank",
        "MB sent",
    ]
    text = f"{chosen.rounds} rounds; {before} before, {load().split(' on ')[0]} after.\n\n{table(head, rows)}"
    print(text) if chosen.small else publish("encoders", text)


def _compiled(name: str, how: str, sizes: Sizes) -> Any:
    make, axes, options = CASES[name]
    model, batch = make(sizes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compile_model(skeleton_of(model), batch, Mesh.of(**axes), Options(**options, **differ(name, how)))


def _flops(made: Any) -> int:
    graphs = [step.graph for part in made.pipeline.parts for step in (part.forward, *backwards(part))]
    return sum(flops(node) for gm in graphs for node in gm.graph.nodes)


def _work(name: str, sizes: Sizes, rounds: int) -> Any:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    make, axes, options = CASES[name]
    mesh = autopar.init_mesh("cpu", **axes)
    at, parts = autopar.dp_rank_and_size(mesh)
    steps, losses, gradients = {}, {}, {}
    for how in (ALIKE, SHARED):
        model, batch = make(sizes)
        whole = differ(name, how).get("batch_dims") or {}
        mine = {n: x if n in whole else x.chunk(parts)[at] for n, x in batch.items()}
        own = autopar.parallelize(model, mesh, example_batch=mine, **options, **differ(name, how))
        losses[how], gradients[how] = float(own.train_step(**mine)), own.full_gradients()
        steps[how] = lambda own=own, mine=mine: own.train_step(**mine)
    assert abs(losses[ALIKE] - losses[SHARED]) < 1e-4, losses
    worst = max(float((x - gradients[SHARED][n]).abs().max()) for n, x in gradients[ALIKE].items() if x is not None)
    assert worst < 1e-4, worst
    return interleaved(steps, rounds)


if __name__ == "__main__":
    main()
