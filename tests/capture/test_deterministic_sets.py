"""Graphs do not depend on the seed of Python's hashes: ranks may have different ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.front_end import capture

KINDS = tuple(f"kind {x}" for x in "hcaigbdfej")


class Walker(nn.Module):
    """Adds a multiple for each of a set, which it also asks for what sets are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.kinds = list(KINDS)

    def forward(self, x: Tensor, frozen: bool = False) -> Tensor:
        kinds: Any = (frozenset if frozen else set)(self.kinds)
        assert isinstance(kinds, frozenset if frozen else set) and isinstance({1}, set) and not isinstance([], set)
        assert "kind a" in kinds and len(kinds) == len(KINDS) and kinds == {*KINDS} and kinds | {"z"} > kinds
        assert list(set((3, 1, 2))) == [1, 2, 3] and set() == set() and {x for x in kinds} == kinds
        for kind in kinds:
            x = x + self.scale * (1 + ord(kind[-1]))
        return x.sum()


@pytest.mark.parametrize("frozen", [False, True])
def test_texts_are_walked_in_order(frozen: bool) -> None:
    gm = capture(Walker(), {"x": torch.ones(3), "frozen": frozen})
    factors = [n.args[1] for n in gm.graph.nodes if n.target is torch.ops.aten.mul.Tensor]
    assert factors == [1 + ord(kind[-1]) for kind in sorted(KINDS)]
    assert "set" not in globals() and "frozenset" not in globals()


CODE = """
from autopar.capture.front_end import capture
from autopar.models.tiny import TINY
import hashlib
for name in ("gemma3", "modernbert"):
    if name in TINY:
        gm = capture(TINY[name].build(), TINY[name].batch(2, 8))
        print(name, hashlib.sha256(gm.code.encode()).hexdigest())
"""


@pytest.mark.full
def test_models_are_traced_alike_with_any_seed() -> None:
    root = Path(__file__).parents[2]
    told = set()
    for seed in range(1, 6):
        environment = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": str(root)}
        run = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True)
        told.add(run.stdout)
    assert len(told) == 1 and "gemma3" in told.pop()
