"""`autopar serve` on ranks without a model: rank 0 has the fake engine, the others wait for its end.

python -m tests.http_server.fake_ranks FOLDER MESH       as the command of that folder and mesh, at a free port
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import LlamaConfig

from autopar.integrations.http.serve import Settings, serve_folder
from autopar.runtime.fault.errors import error_context
from tests.http_server.fake_engine import EOS, VOCABULARY, FakeEngine, tokenizer


def make_folder(folder: Path) -> None:
    """A config and a tokenizer."""
    LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=8, num_attention_heads=2, num_hidden_layers=1, eos_token_id=EOS
    ).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"temperature": 0.0, "do_sample": true, "eos_token_id": [256]}')


class RankedEngine(FakeEngine):
    """The fake engine on rank 0."""

    def close(self) -> None:
        super().close()
        if dist.is_initialized():
            dist.barrier()


class Follower:
    """Another rank."""

    def run(self) -> None:
        with error_context("serving"):
            dist.barrier()


def load(settings: Settings, mesh: Any, config: Any) -> Any:
    """Notes its process in the folder."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    (settings.folder / f"pid{rank}").write_text(str(os.getpid()))
    return Follower() if rank else RankedEngine(delay=0.01)


if __name__ == "__main__":
    asked = Settings(Path(sys.argv[1]), sys.argv[2], "127.0.0.1", 0, None, 200, None, 10, 10, None, "cpu")
    sys.exit(serve_folder(asked, importlib.import_module("tests.http_server.fake_ranks").load))
