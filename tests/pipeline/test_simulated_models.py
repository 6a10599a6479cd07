"""Corners of batches, and modules other than those of transformers, on all ranks of a mesh in one process: loss and
every gradient equal eager. (Whole models on every mesh: tests/hf/test_parallel_models.py.)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.ir.mesh import Mesh
from autopar.models.tiny import TINY
from autopar.options import Options
from autopar.testing.harness import Checked, check_model
from autopar.testing.reference import LIMIT
from tests.support.subjects import tiny


def close(model: nn.Module, batch: dict[str, Any], mesh: str, **options: Any) -> Checked:
    result = check_model(model.double().train(), batch, Mesh.parse(mesh), Options(**options))
    assert result.worst < LIMIT, result
    return result


# --- batches ----------------------------------------------------------------------------------------------------------


PADDED = [("llama", "right"), ("bert", "left")]


@pytest.mark.parametrize(
    ("name", "side"),
    [("llama", "left"), ("bert", "right"), *(pytest.param(*c, marks=pytest.mark.full) for c in PADDED)],
)
def test_padding(name: str, side: str) -> None:
    model, batch = tiny(name, layers=1)[0], TINY[name].batch(4, 8)
    mask = torch.ones(4, 8, dtype=torch.int64)
    for row, missing in enumerate((0, 3, 1, 5)):
        mask[row, 8 - missing :] = 0
    mask = mask.flip(1) if side == "left" else mask
    batch |= {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}
    close(model, batch, "dp=2,tp=2", zero=3)


def test_microbatches_with_uneven_labels() -> None:
    """All targets of one microbatch are ignored: a mean of means would be wrong, and 0/0."""
    batch = TINY["llama"].batch(4, 8)
    batch["labels"][:2] = -100
    close(tiny("llama", layers=1)[0], batch, "dp=2", microbatches=2)


# --- other modules ----------------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    """Two linears and a mean squared error."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias), nn.Linear(16, 4, bias)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(F.gelu(self.up(x))), y)


class Cnn(nn.Module):
    """Convolutions, batch norm, pooling, flatten, linear."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1, groups=2)
        self.norm = nn.BatchNorm2d(8) if norm else nn.Identity()
        self.head = nn.Linear(4 * 4 * 4, 6)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.one(image))), 2)
        return F.cross_entropy(self.head(F.relu(self.two(x)).flatten(1)), label)


class Several(nn.Module):
    """Two losses, a frozen and an unused parameter, a buffer that is not saved."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 6)
        self.frozen, self.unused = nn.Linear(8, 8), nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.arange(1.0, 9.0), persistent=False)

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(self.frozen(x * self.scale)))
        return F.l1_loss(self.a(h), y), F.cross_entropy(self.b(h), label)


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


MESHES = [("tp=2", {}), ("dp=4", {"zero": 3}), ("dp=2,tp=2", {"microbatches": 2})]


@pytest.mark.parametrize("mesh, options", MESHES)
def test_mlp_with_mse(mesh: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    close(Mlp(), {"x": numbers(8, 8), "y": numbers(8, 4)}, mesh, **options)


@pytest.mark.parametrize("mesh, options", MESHES)
def test_several_losses_frozen_unused(mesh: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    batch = {"x": numbers(8, 8), "y": numbers(8, 4), "label": torch.tensor([0, 5, 2, -100, 1, 1, -100, -100])}
    result = close(Several(), batch, mesh, **options)
    assert not any(n.startswith(("frozen", "unused")) for n in result.errors)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("mesh", ["dp=2", "tp=2", "dp=2,tp=2"])
def test_cnn(norm: bool, mesh: str) -> None:
    """Batch norm's statistics are those of the whole batch, over all ranks."""
    torch.manual_seed(0)
    close(Cnn(norm), {"image": numbers(4, 3, 8, 8), "label": torch.tensor([0, 5, 2, 1])}, mesh)


def test_batch_norm_forbids_microbatches() -> None:
    batch = {"image": numbers(4, 3, 8, 8), "label": torch.tensor([0, 5, 2, 1])}
    with pytest.raises(
        ValueError, match=r"microbatches: samples of different microbatches meet at .* use microbatches=1"
    ):
        close(Cnn(True), batch, "dp=2", microbatches=2)


class Shift(nn.Module):
    """A sequence moved by one place with pad (1, -1): the size stays, the positions do not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        h = h + self.mix(F.pad(h, (0, 0, 1, -1)))
        return F.cross_entropy(self.head(h).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("make, axis", [(Shift, "tp=2"), (Shift, "dp=2")])
def test_shifted_sequence(make: Callable[[], nn.Module], axis: str) -> None:
    torch.manual_seed(0)
    ids = torch.randint(12, (4, 6), generator=torch.Generator().manual_seed(0))
    close(make(), {"ids": ids}, axis, sequence_parallel="tp" in axis)
