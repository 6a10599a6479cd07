"""Experts that a model writes out become a dispatch, grouped products and a combine; on every mesh they stay exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.front_end import capture
from autopar.ir.graph import calls_of
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.passes.canonicalize.experts.group_experts import GroupExperts
from autopar.testing.harness import check_model
from tests.experts import written_out as written
from tests.experts.written_out import SPELLINGS, Model, batch

ours = torch.ops.autopar
AS_THEY_ARE = ("EinsumDispatch", "Dense")  # every expert computes every token, or has a fixed number of places
REFUSED = ("DeepSeekInference",)  # reads counts on the host
GROUPED = [name for name in SPELLINGS if name not in (*AS_THEY_ARE, *REFUSED)]
OFTEN = ("LitGPT", "OldMixtral", "MakeMoE", "Switch", "SortedTitan")


def captured(layer: type[nn.Module]) -> Any:
    return GroupExperts().apply(capture(Model(layer), batch()))


@pytest.mark.parametrize("name", GROUPED)
def test_a_layer_is_one_dispatch_and_one_combine(name: str) -> None:
    graph = captured(SPELLINGS[name]).graph
    assert len(calls_of(graph, ours.moe_dispatch.default)) == len(calls_of(graph, ours.moe_combine.default)) == 1
    assert len(calls_of(graph, ours.grouped_mm.default)) in (2, 3)
    assert len(calls_of(graph, torch.ops.aten.linear.default)) == 2  # router and head


@pytest.mark.parametrize("name", [x if x in OFTEN else pytest.param(x, marks=pytest.mark.full) for x in SPELLINGS])
@pytest.mark.parametrize("mesh, options", [("tp=2", {}), ("dp=2,ep=2", {"zero": 3}), ("dp=2", {"microbatches": 2})])
def test_exact(name: str, mesh: str, options: dict[str, Any]) -> None:
    model = Model(SPELLINGS[name]).double()
    if name in REFUSED:
        with pytest.raises(ValueError, match=r"^capture: .*it reads the value of a tensor; for experts, call"):
            check_model(model, batch(), Mesh.parse(mesh), Options(**options))
        return
    if name == "EinsumDispatch" and "microbatches" in options:  # places of an expert are those of the whole batch
        with pytest.raises(ValueError, match=r"^microbatches: samples of different microbatches meet"):
            check_model(model, batch(), Mesh.parse(mesh), Options(**options))
        return
    if name == "Dense" and "ep" in mesh:
        with pytest.raises(ValueError, match=r"^experts: nothing to shard on axis 'ep'"):
            check_model(model, batch(), Mesh.parse(mesh), Options(**options))
        return
    assert check_model(model, batch(), Mesh.parse(mesh), Options(**options)).worst < 1e-12


class Different(written.MistralReference):
    """One expert has another activation."""

    def __init__(self) -> None:
        super().__init__()
        self.experts[1] = nn.Sequential(nn.Linear(written.H, written.H), nn.Tanh())


class Reused(written.MistralReference):
    """What the first experts have added is read by the next."""

    def forward(self, inputs: Tensor) -> Tensor:
        flat = inputs.view(-1, written.H)
        weights, selected = self.chosen(flat)
        y = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            token, k = torch.where(selected == i)
            y[token] += weights[token, k, None] * expert(flat[token] + y[token])
        return y.view_as(inputs)


@pytest.mark.parametrize("layer, why", [(Different, "its experts differ at"), (Reused, "")])
def test_a_loop_that_is_not_grouped_says_why_and_is_exact(layer: type[nn.Module], why: str) -> None:
    with pytest.warns(UserWarning, match=f"is not grouped, so each of them computes every token: .*{why}"):
        captured(layer)
    assert check_model(Model(layer).double(), batch(), Mesh.parse("dp=2,tp=2"), Options()).worst < 1e-12


class Maybe(written.MistralReference):
    """Tokens without an expert, and experts that may be chosen twice by one token."""

    def forward(self, inputs: Tensor) -> Tensor:
        flat = inputs.view(-1, written.H)
        weights, selected = self.chosen(flat)
        selected = torch.where(weights > 0.45, selected, torch.full_like(selected, -1))
        y = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            token, k = torch.where(selected == i)
            y.index_add_(0, token, weights[token, k, None] * expert(flat[token]))
        return y.view_as(inputs)


def test_a_number_that_is_no_expert_chooses_none() -> None:
    assert check_model(Model(Maybe).double(), batch(), Mesh.parse("dp=2,tp=2"), Options()).worst < 1e-12
    assert check_model(Model(Maybe).double(), batch(), Mesh.parse("ep=2"), Options()).worst < 1e-12


class Twice(written.MistralReference):
    """Rows that are put where another row of the same expert may be put, too."""

    def forward(self, inputs: Tensor) -> Tensor:
        flat = inputs.view(-1, written.H)
        weights, selected = self.chosen(flat)
        y = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            token, k = torch.where(selected // 2 == i)
            y[token] += weights[token, k, None] * expert(flat[token])
        return y.view_as(inputs)


class Counts(written.MakeMoE):
    """A branch on whether an expert has tokens that does something else, too."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, written.H)
        _, selected = self.chosen(flat)
        y, used = torch.zeros_like(flat), 0
        for i, expert in enumerate(self.experts):
            mask = (selected == i).any(-1)
            if mask.any():
                y[mask] += expert(flat[mask])
                used = used + 1
        return (y / used).view_as(x)


class Writes(written.MakeMoE):
    """The same, in place."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, written.H)
        _, selected = self.chosen(flat)
        y, used = torch.zeros_like(flat), torch.zeros(4, dtype=x.dtype)
        for i, expert in enumerate(self.experts):
            mask = (selected == i).any(-1)
            if mask.any():
                y[mask] += expert(flat[mask])
                used[i] += 1.0
        return (y / used.sum()).view_as(x)


@pytest.mark.parametrize(
    "layer, why",
    [
        (Twice, "two of a token's experts may be the same"),
        (Counts, "it reads the value of a tensor"),
        (Writes, "writes to a tensor where a mask selects rows, which a branch on the mask decides"),
    ],
)
def test_what_rows_cannot_stand_for_is_refused(layer: type[nn.Module], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        capture(Model(layer), batch())
