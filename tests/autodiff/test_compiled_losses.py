"""What a compiler traces in place of the operators of losses: the same numbers, to the last bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.capture.front_end import capture
from autopar.compile.model import compile_graph
from autopar.ir.graph import copy_graph, outputs
from autopar.ir.mesh import Mesh
from autopar.ops.declare import COMPILED
from autopar.options import Options

ops = torch.ops.autopar
CLASSES, ROWS = 103, 7


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_same_numbers(dtype: torch.dtype, smoothing: float) -> None:
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, CLASSES, generator=drawn).mul(3).to(dtype)
    target = torch.randint(0, CLASSES, (ROWS,), generator=drawn)
    target[2] = -100
    loss, lse = ops.cross_entropy(x, target, -100, smoothing)
    grad, piece, index = torch.randn(ROWS, generator=drawn).to(loss.dtype), x[:, 50:], target - 50
    top = ops.piece_max(piece)
    calls = {
        ops.cross_entropy: (x, target, -100, smoothing),
        ops.cross_entropy_backward: (grad, x, target, lse, -100, smoothing),
        ops.piece_max: (piece,),
        ops.piece_sums: (piece, index, top, CLASSES),
        ops.piece_backward: (grad, piece, index, lse, smoothing, CLASSES),
    }
    for operator, given in calls.items():
        torch.testing.assert_close(COMPILED[operator.default](*given), operator(*given), rtol=0, atol=0)


class Head(nn.Module):
    """As transformers has it: logits are cast to float32 for the loss."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.head = nn.Linear(8, CLASSES, dtype=dtype)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = self.head(x).float()
        return nn.functional.cross_entropy(logits.view(-1, CLASSES), target.view(-1))


def test_half_logits_are_kept_once() -> None:
    batch = {"x": torch.randn(2, 4, 8).bfloat16(), "target": torch.randint(0, CLASSES, (2, 4))}
    graph = copy_graph(capture(Head(torch.bfloat16), batch))
    part = compile_graph(graph, Mesh.parse("dp=1"), Options(), outputs=()).pipeline.parts[0]
    found = [x.meta["val"] for x in outputs(part.forward.graph) if x is not None]
    assert [x.dtype for x in found if x.dim() and x.shape[-1] == CLASSES] == [torch.bfloat16]
