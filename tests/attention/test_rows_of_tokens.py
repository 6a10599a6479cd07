"""cp, where the tokens of one attention are the rows of another: axial attention, layers that take sequences first."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.ir.mesh import Mesh
from autopar.testing.harness import check_model
from autopar.testing.reference import LIMIT


class Both(nn.Module):
    """Attention over tokens, then over the batch, whose rows are tokens, with dropout; nn.MultiheadAttention with
    sequences first, likewise."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.rows = nn.Linear(8, 8), nn.MultiheadAttention(8, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.inner(x)
        h = h + nn.functional.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None])[:, 0]
        q = h.unflatten(-1, (2, 4)).permute(1, 2, 0, 3)  # tokens, heads, rows, width
        h = h + nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5).permute(2, 0, 1, 3).flatten(2)
        return nn.functional.mse_loss(h + self.rows(h, h, h)[0], y)


class Axial(nn.Module):
    """Attention over the columns of a grid, then over its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.inner(x)
        h = (h + nn.functional.scaled_dot_product_attention(h, h, h)).transpose(1, 2)
        return nn.functional.mse_loss((h + nn.functional.scaled_dot_product_attention(h, h, h)).transpose(1, 2), y)


@pytest.mark.parametrize(("kind", "shape"), [(Both, (2, 8, 8)), (Axial, (2, 4, 4, 8))])
def test_tokens_of_one_attention_are_rows_of_another(kind: type[nn.Module], shape: tuple[int, ...]) -> None:
    made = torch.Generator().manual_seed(0)
    batch = {name: torch.randn(shape, generator=made, dtype=torch.float64) for name in ("x", "y")}
    assert check_model(kind().double(), batch, Mesh.of(cp=2)).worst < LIMIT
