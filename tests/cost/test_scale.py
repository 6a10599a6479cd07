"""Large models compile in seconds and little memory: the shapes of Llama-3-8B on 64 ranks, from model to step graphs.

Time is that of the process (user + system), so that a busy machine does not count; the bounds are generous. Memory is
the peak of a process of its own. The whole compiler runs, its checks included.
"""

from __future__ import annotations

import json
import math
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
RANKS = 64
SECONDS_PER_LAYER, SECONDS_OF_A_START, GIB = 2.0, 20.0, 2**30
SHAPES = {
    "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
    "vocab_size": 128256, "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip


def compile_llama(layers: int, zero: int, sequence_parallel: bool) -> dict[str, Any]:
    """Compile in this process: seconds, peak resident bytes, and facts that show that all of it was made."""
    import torch
    from transformers import LlamaConfig

    from autopar.compile.model import compile_model
    from autopar.cost.memory import memory
    from autopar.ir.mesh import Mesh
    from autopar.models import hf_configs
    from autopar.options import Options

    model = hf_configs.build(LlamaConfig(num_hidden_layers=layers, **SHAPES), torch.bfloat16)
    batch = hf_configs.batch_of(model, 8, 8192)
    start = time.process_time()
    options = Options(zero=zero, sequence_parallel=sequence_parallel)
    compiled = compile_model(model, batch, Mesh.of(dp=8, tp=8), options, outputs=())
    found = memory(compiled)
    return {
        "seconds": time.process_time() - start,
        "resident": most_resident(),
        "elements": sum(math.prod(p.shape) for p in compiled.parameters),
        "gradients": len(compiled.stage.backward_reduce.outputs),
        "parameters": found.parameters,
        "peak": found.peak,
    }


def most_resident() -> int:
    """Bytes. (ru_maxrss of a new process starts with what the one had that made it.)"""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (kilobytes,) = re.findall(r"VmHWM:\s*(\d+) kB", status.read_text())
    return int(kilobytes) * 1024


def in_own_process(layers: int, *ways: tuple[int, bool]) -> list[dict[str, Any]]:
    """`compile_llama` in a fresh process, whose peak memory is that of these compilations."""
    code = (
        "import json, torch; torch.set_num_threads(1); from tests.cost.test_scale import compile_llama; "
        f"print(json.dumps([compile_llama({layers}, *way) for way in {ways}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def check(layers: int, found: dict[str, Any], zero: int) -> None:
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    matrices, vectors = layers * layer + 2 * 128256 * 4096, (2 * layers + 1) * 4096
    assert found["elements"] == matrices + vectors
    assert found["gradients"] == 9 * layers + 3
    assert found["parameters"] == 2 * (matrices // (RANKS if zero == 3 else 8) + vectors)
    assert found["seconds"] < SECONDS_OF_A_START + SECONDS_PER_LAYER * layers
    assert found["resident"] < 4 * GIB


def test_two_layers() -> None:
    """In a rank: a process that has imported what it needs."""
    (found,) = run_ranks(1, compile_llama, 2, 3, True, timeout=200)
    check(2, found, 3)


@pytest.mark.full
def test_four_layers() -> None:
    ways = ((0, False), (3, True))
    for (zero, _), found in zip(ways, in_own_process(4, *ways), strict=True):
        check(4, found, zero)


@pytest.mark.full
def test_llama_3_8b() -> None:
    """All 32 layers, with what makes the largest graphs."""
    (found,) = in_own_process(32, (3, True))
    check(32, found, 3)
    assert found["peak"] < 80 * 10**9  # it fits a device of that size
