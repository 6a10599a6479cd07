"""Small models that read images beside text: those of transformers, and plain ones.

llava(images=2)      LLaVA: a CLIP tower of 5 patches per image, two images in each row of the batch
qwen_vl(GRIDS)       Qwen2.5-VL: all patches in one row, windows, one image of each grid
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from autopar.models import hf as hf  # registers the adapter

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


def qwen_vl(grids: Sequence[Sequence[int]] = ((1, 4, 4),) * ROWS) -> Made:
    """An image of (frames, height, width) patches in each row; its windows are of 4 x 4 patches."""
    rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**_TEXT, "rope_parameters": rotary},
        vision_config=_QWEN_TOWER,
        image_token_id=IMAGE,
        video_token_id=1,
    )
    model, batch = _made("Qwen2_5_VLForConditionalGeneration", config), _text(len(grids))
    for row, (t, h, w) in enumerate(grids):
        batch["input_ids"][row, 1 : 1 + t * h * w // 4] = IMAGE
    batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).long()
    patches = sum(t * h * w for t, h, w in grids)
    pixels = torch.randn(patches, 96).double()
    return model, batch | {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)}


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
