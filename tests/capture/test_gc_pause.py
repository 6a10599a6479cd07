"""The collector of cycles rests while graphs are made, and is as it was afterwards."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.front_end import capture
from autopar.compile.model import compile_model
from autopar.ir.mesh import Mesh


class Asking(nn.Module):
    """Notes whether it is on while the forward is traced."""

    def __init__(self, refused: bool) -> None:
        super().__init__()
        self.linear, self.refused = nn.Linear(3, 3), refused

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(gc.isenabled())
        if self.refused:
            raise ValueError(f"refused, with the collector {gc.isenabled()}")
        return self.linear(x).sum()  # type: ignore[no-any-return]


SEEN: list[bool] = []


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("refused", [True, False])
def test_as_it_was(on: bool, refused: bool) -> None:
    before = gc.isenabled()
    SEEN.clear()
    (gc.enable if on else gc.disable)()
    try:
        for call in (capture, lambda model, batch: compile_model(model, batch, Mesh.of(dp=2))):
            try:
                call(Asking(refused), {"x": torch.rand(4, 3)})
            except ValueError as error:
                assert refused and "with the collector False" in str(error)
            assert gc.isenabled() == on
    finally:
        (gc.enable if before else gc.disable)()
    assert not any(SEEN)  # what a refused forward has written is taken back
