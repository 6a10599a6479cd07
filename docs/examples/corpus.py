"""Text for the examples: a tokenizer, and rows of token ids of one length.

The text is any files that you name; without names, the pages of this folder's parent. `tokenizer` learns byte pairs of
them, so nothing is downloaded; with weights from a hub take `AutoTokenizer.from_pretrained(name)` in its place.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast

PAGES = sorted(Path(__file__).resolve().parent.parent.glob("*.md"))
END = "<|endoftext|>"


def tokenizer(files: Sequence[str | Path] = PAGES, size: int = 1024) -> PreTrainedTokenizerFast:
    """One of ``size`` tokens, learned from the files: the same on every rank."""
    learned = ByteLevelBPETokenizer()
    learned.train([str(file) for file in files], vocab_size=size, special_tokens=[END], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=learned, eos_token=END, pad_token=END)


def rows(tokens: PreTrainedTokenizerFast, length: int, files: Sequence[str | Path] = PAGES) -> list[dict[str, Tensor]]:
    """The files one behind the other, cut into rows of ``length`` tokens: {"input_ids": [length], "labels": [length]}.

    What is left over is dropped. The model shifts the labels."""
    texts = [Path(file).read_text(encoding="utf-8") + END for file in files]
    ids = torch.tensor([i for found in tokens(texts)["input_ids"] for i in found])
    return [{"input_ids": row, "labels": row} for row in ids[: len(ids) // length * length].view(-1, length)]
