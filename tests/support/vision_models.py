"""Small models that read images beside text: those of transformers, and plain ones.

llava(images=2)      LLaVA: a CLIP tower of 5 patches per image, two images in each row of the batch
qwen_vl(GRIDS)       Qwen2.5-VL: all patches in one row, windows, one image of each grid
GRID_MODELS          more such models
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import autopar
from autopar.models import hf as hf  # registers the adapter
from autopar.testing.reference import eager

ROWS, TOKENS, IMAGE = 4, 16, 2
Made = tuple[nn.Module, dict[str, Tensor]]
_TEXT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 3, "head_dim": 8,
}  # fmt: skip
_TOWER = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 8, "projection_dim": 32,
}  # fmt: skip
_QWEN_TOWER = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "window_size": 16, "fullatt_block_indexes": [1], "out_hidden_size": 32,
}  # fmt: skip


def _made(name: str, config: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, name)(config)
    nn.Module.double(model).train()
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.dim() == 1):
            parameter.add_(torch.randn_like(parameter), alpha=0.1)  # off zeros and ones, so that mistakes show
    return model


def _text(rows: int, tokens: int = TOKENS) -> dict[str, Tensor]:
    ids = torch.randint(4, 64, (rows, tokens))
    return {"input_ids": ids, "labels": ids.masked_fill(torch.rand(rows, tokens) < 0.3, -100)}


def llava(rows: int = ROWS, images: int = 1, dropout: float = 0.0, tokens: int = TOKENS) -> Made:
    """Four tokens of text for each image."""
    tower = transformers.CLIPVisionConfig(**_TOWER, attention_dropout=dropout)
    text = transformers.LlamaConfig(**_TEXT)
    config = transformers.LlavaConfig(
        text_config=text, vision_config=tower, image_token_index=IMAGE, image_seq_length=4
    )
    model, batch = _made("LlavaForConditionalGeneration", config), _text(rows, tokens)
    batch["input_ids"][:, 1 : 1 + 4 * images] = IMAGE
    return model, batch | {"pixel_values": torch.randn(rows * images, 3, 16, 16).double()}


def frozen_llava(rows: int = ROWS) -> Made:
    """Only the projector and the language model learn."""
    model, batch = llava(rows)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("vision_tower" not in name)
    return model, batch


def with_grids(grids: Sequence[Sequence[int]], seed: int = 0, tokens: int = TOKENS) -> dict[str, Tensor]:
    """A text with an image of (frames, height, width) patches in each row; no image for one without frames."""
    torch.manual_seed(seed)
    batch = _text(len(grids), tokens)
    for row, (t, h, w) in enumerate(grids):
        batch["input_ids"][row, 1 : 1 + t * h * w // 4] = IMAGE
    batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).long()
    given = torch.tensor([grid for grid in grids if grid[0]])
    return batch | {"pixel_values": torch.randn(int(given.prod(-1).sum()), 96).double(), "image_grid_thw": given}


def part_with_grids(batch: dict[str, Tensor], grids: Sequence[Sequence[int]], at: int, parts: int) -> dict[str, Tensor]:
    """The rows of one of ``parts`` ranks, and its images; a rank without images has no such inputs."""
    rows = len(grids) // parts
    counts = [t * h * w for t, h, w in grids]
    before, own = sum(counts[: at * rows]), sum(counts[at * rows : (at + 1) * rows])
    images = (
        sum(1 for grid in grids[: at * rows] if grid[0]),
        sum(1 for g in grids[at * rows : (at + 1) * rows] if g[0]),
    )
    names = ("pixel_values", "image_grid_thw")
    mine = {name: x.chunk(parts)[at] for name, x in batch.items() if name not in names}
    if own:
        mine["pixel_values"] = batch["pixel_values"][before : before + own]
        mine["image_grid_thw"] = batch["image_grid_thw"][images[0] : sum(images)]
    return mine


def steps_with_grids(
    name: str,
    sizes: Mapping[str, int],
    options: Mapping[str, Any],
    steps: Sequence[Sequence[Sequence[int]]],
    tokens: int = TOKENS,
) -> Iterator[tuple[Any, float]]:
    """On a rank, which passes its own rows and images: after each step, the module and the largest error of the loss
    and the gradients. steps: grids of each."""
    mesh = autopar.init_mesh("cpu", 120.0, **sizes)
    at, parts = autopar.dp_rank_and_size(mesh)
    parallel: Any = None
    for seed, grids in enumerate(steps):
        model, batch = GRID_MODELS[name](), with_grids(grids, seed, tokens)
        expected, mine = eager(model, batch), part_with_grids(batch, grids, at, parts)
        if parallel is None:
            parallel = autopar.parallelize(model, mesh, lift_to_float64=True, padding="auto", **options)
        loss, found = float(parallel.train_step(**mine)), parallel.full_gradients()
        wanted = {n: g for n, g in expected.gradients.items() if g is not None}
        worst = max(abs(loss - expected.loss), *(float((found[n] - g).abs().max()) for n, g in wanted.items()))
        parallel.zero_grad(set_to_none=True)
        yield parallel, worst


def qwen_vl(grids: Sequence[Sequence[int]] = ((1, 4, 4),) * ROWS) -> Made:
    """An image of (frames, height, width) patches in each row; its windows are of 4 x 4 patches."""
    return GRID_MODELS["qwen2.5"](), with_grids(grids)


_ROTARY = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_ROTATED = {**_TEXT, "rope_parameters": _ROTARY}
_IDS = {"image_token_id": IMAGE, "video_token_id": 1}
_DEEP_TOWER = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip
_GLM_TOWER = {
    "depth": 2, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "out_hidden_size": 32, "intermediate_size": 64, "image_size": 16,
}  # fmt: skip
_OLD_TOWER = {
    "depth": 2, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2, "num_heads": 4, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
_FOUR_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def _reads_grids(name: str, text: dict[str, Any], tower: dict[str, Any]) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=tower, **_IDS)
    return _made(f"{name}ForConditionalGeneration", config)


# Models whose patches of all images lie in one row.
GRID_MODELS: dict[str, Callable[[], nn.Module]] = {
    "qwen2": lambda: _reads_grids("Qwen2VL", _ROTATED, _OLD_TOWER),
    "qwen2.5": lambda: _reads_grids("Qwen2_5_VL", _ROTATED, _QWEN_TOWER),
    "qwen3": lambda: _reads_grids("Qwen3VL", _ROTATED, _DEEP_TOWER),
    "qwen3 experts": lambda: _reads_grids("Qwen3VLMoe", {**_ROTATED, **_FOUR_EXPERTS}, _DEEP_TOWER),
    "glm4v": lambda: _reads_grids(
        "Glm4v", {**_TEXT, "rope_parameters": {**_ROTARY, "partial_rotary_factor": 1.0}}, _GLM_TOWER
    ),
}


class TwoTowers(nn.Module):
    """A convolutional tower with batch norm for images, a tower of products for sounds, and an attention over words."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8)
        self.sounds = nn.Sequential(nn.Linear(10, 20), nn.GELU(), nn.Dropout(0.2), nn.Linear(20, 8))
        self.words, self.qkv, self.head = nn.Embedding(16, 8), nn.Linear(8, 24), nn.Linear(8, 16)

    def forward(self, ids: Tensor, images: Tensor, sounds: Tensor, labels: Tensor) -> Tensor:
        seen = self.norm(self.conv(images)).relu().mean((2, 3))  # (rows, 8)
        x = self.words(ids) + seen.unsqueeze(1) + self.sounds(sounds).unsqueeze(1)
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def two_towers(rows: int = ROWS) -> Made:
    torch.manual_seed(0)
    model = nn.Module.double(TwoTowers()).train()
    ids = torch.randint(0, 16, (rows, 8))
    batch = {"ids": ids, "images": torch.randn(rows, 3, 9, 9).double(), "sounds": torch.randn(rows, 10).double()}
    return model, batch | {"labels": ids.roll(-1, 1)}
