"""Rows of attention that a large added number leaves without a key: over a sharded sequence as in one process."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.testing.harness import check_model

B, H, S, D = 2, 2, 8, 4


class Net(nn.Module):
    """Attention written out; the mask is added."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.head = nn.Linear(H * D, 3 * H * D), nn.Linear(H * D, 3)

    def forward(self, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (H, D)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        weights = (q @ k.transpose(-1, -2) / D**0.5 + mask).softmax(-1)
        return nn.functional.mse_loss(self.head((weights @ v).transpose(1, 2).flatten(2)), y)


def batch(number: float) -> dict[str, Tensor]:
    """Of two samples, one has no key in its first rows, and the other in none."""
    g = torch.Generator().manual_seed(1)
    x, y = (torch.randn(B, S, d, generator=g, dtype=torch.float64) for d in (H * D, 3))
    mask = torch.zeros(B, 1, S, S, dtype=torch.float64)
    mask[0, 0, :3] = number
    mask[1, 0] = number
    mask[:, :, 5:, :2] = number
    return {"x": x, "mask": mask, "y": y}


@pytest.mark.parametrize("number", [-1e4, -1e9, torch.finfo(torch.float64).min])
@pytest.mark.parametrize("algorithm", ["ring", "all_gather"])
def test_rows_without_a_key_but_for_a_number(number: float, algorithm: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "Converting a tensor")  # by torch, of the harness
        result = check_model(Net().double(), batch(number), Mesh.of(cp=2), Options(attention=algorithm))
    assert result.worst < 1e-10
