"""Lists of experts, each of which computes its piece of the rows that a product dispatches: `expert_lists`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture.front_end import capture
from autopar.ir.graph import calls_of
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.passes.canonicalize.experts.expert_rows import place_of
from autopar.passes.canonicalize.experts.group_experts import GroupExperts
from autopar.rewrite.compilation import Compilation
from autopar.testing.harness import check_model
from tests.experts import test_one_hot_dispatch as one_hot
from tests.experts.test_one_hot_dispatch import EXPERTS, INNER, WIDTH, top_two
from tests.support.ranks import run_ranks
from tests.support.steps_on_ranks import step_on_rank

ours = torch.ops.autopar


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))


class Gated(nn.Module):
    """SwiGLU of a matrix per expert, which scales its rows; it returns a tuple, as Megatron's layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(WIDTH, 2 * INNER, bias=False), nn.Parameter(torch.randn(INNER, WIDTH) / 4)
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        up, gate = self.both.weight.chunk(2)
        return (F.silu(F.linear(x, gate)) * F.linear(x, up)) @ self.down * self.scale, None


class Listed(nn.Module):
    """Experts take pieces as a ``way`` says."""

    def __init__(self, way: Callable[[Any, Tensor], Tensor], make: Callable[[], nn.Module] = mlp) -> None:
        super().__init__()
        self.way, self.router = way, nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(make() for _ in range(EXPERTS))
        self.place = nn.Parameter(torch.randn(16, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.reshape(-1, WIDTH)
        auxiliary, weights = top_two(self.router(tokens), 16)
        rows = torch.einsum("sec,sm->ecm", weights.bool().to(x.dtype), tokens)
        return torch.einsum("sec,ecm->sm", weights, self.way(self, rows)).view(x.shape), auxiliary


def deep_speed(layer: Any, rows: Tensor) -> Tensor:
    """deepspeed.moe.experts: [groups, experts, capacity, width], tuples and a list."""
    made = []
    for chunk, expert in zip(rows.reshape(1, EXPERTS, -1, WIDTH).chunk(EXPERTS, dim=1), layer.experts, strict=True):
        out = expert(chunk)
        made.append(out[0] if isinstance(out, tuple) else out)
    return torch.cat(made, dim=1).view(EXPERTS, -1, WIDTH)


def last_first(layer: Any, rows: Tensor) -> Tensor:
    """Places before experts."""
    pieces = rows.transpose(0, 1).split(1, dim=1)
    return torch.cat([expert(c) for expert, c in zip(layer.experts, pieces, strict=True)], 1).transpose(0, 1)


def through_rows(layer: Any, rows: Tensor) -> Tensor:
    """Flattened inside, in the compute type of the weights."""
    made = [layer.experts[e](c.flatten(0, 1).to(layer.place.dtype)).unflatten(0, c.shape[:2])
            for e, c in enumerate(rows.chunk(EXPERTS))]  # fmt: skip
    return torch.cat(made)


def doubled(layer: Any, rows: Tensor) -> Tensor:
    """Two calls of a list: what the second one is given is no product, so it is left as it is."""
    for _ in range(2):
        rows = rows + torch.stack([expert(rows[e]) for e, expert in enumerate(layer.experts)])
    return rows


WAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "chunk": lambda layer, x: torch.cat([f(c) for f, c in zip(layer.experts, x.chunk(EXPERTS), strict=True)]),
    "unbind": lambda layer, x: torch.stack([f(c) for f, c in zip(layer.experts, x.unbind(), strict=True)]),
    "index": lambda layer, x: torch.stack([f(x[e]) for e, f in enumerate(layer.experts)]),
    "slice": lambda layer, x: torch.cat([f(x[e : e + 1]) for e, f in enumerate(layer.experts)]),
    "rows": lambda layer, x: torch.cat([f(c) for f, c in zip(layer.experts, x.flatten(0, 1).split(16), strict=True)])
    .view(x.shape),
    "DeepSpeed": deep_speed,
    "last first": last_first,
    "through rows": through_rows,
    "twice": doubled,
}  # fmt: skip


def model(way: Callable[[Any, Tensor], Tensor], make: Callable[[], nn.Module] = mlp) -> tuple[nn.Module, Any]:
    whole, rows = one_hot.made("einsum")
    torch.manual_seed(1)
    whole.layers = nn.ModuleList(Listed(way, make) for _ in range(2))
    return whole.double(), rows


def grouped(way: Callable[[Any, Tensor], Tensor], make: Callable[[], nn.Module] = mlp) -> int:
    """How many lists become a dispatch on ep."""
    gm = capture(*model(way, make))
    GroupExperts().apply(gm, Compilation(Mesh.of(ep=2)))
    return len(calls_of(gm.graph, ours.moe_dispatch.default))


MESHES = [
    ("ep=2", {}),
    ("ep=4", {}),
    ("dp=2,ep=2", {"zero": 3}),
    ("ep=2,tp=2", {"sequence_parallel": True}),
    ("cp=2,ep=2", {}),
]


@pytest.mark.parametrize("mesh, options", [MESHES[0], *(pytest.param(*x, marks=pytest.mark.full) for x in MESHES[1:])])
@pytest.mark.parametrize("name", WAYS)
def test_exact(name: str, mesh: str, options: dict[str, Any]) -> None:
    result = check_model(
        *model(WAYS[name], Gated if name == "DeepSpeed" else mlp), Mesh.parse(mesh), Options(**options)
    )
    assert result.worst < 1e-10 and len(result.compiled.plan.experts) == 2


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, INNER), nn.Dropout(0.5), nn.Linear(INNER, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


class Over(nn.Module):
    """Mixes the rows of an expert."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x).softmax(-2)
        return out


def placed(layer: Any, rows: Tensor) -> Tensor:
    """Adds the same to the places of all experts."""
    return torch.stack([f(c + layer.place) for f, c in zip(layer.experts, rows.unbind(), strict=True)])


def crossed(layer: Any, rows: Tensor) -> Tensor:
    """Each expert also reads the piece of the next."""
    return torch.stack([f(rows[e] + rows[e - 1]) for e, f in enumerate(layer.experts)])


def reversed_order(layer: Any, rows: Tensor) -> Tensor:
    return torch.stack([f(rows[EXPERTS - 1 - e]) for e, f in enumerate(layer.experts)])


@pytest.mark.parametrize(
    ("way", "make", "why"),
    [
        (WAYS["chunk"], Dropped, "draws random numbers"),
        (WAYS["chunk"], Over, "may mix the rows of an expert"),
        (placed, mlp, "has an operand for each row"),
        (crossed, mlp, ""),
        (reversed_order, mlp, ""),
    ],
)
def test_what_is_not_grouped_is_left_as_it_is(way: Any, make: Any, why: str) -> None:
    if not why:
        assert not grouped(way, make)
        return
    with pytest.warns(UserWarning, match=f"the list of 4 experts .* is not grouped, .*: .*{why}"):
        assert not grouped(way, make)


def test_pieces_of_activations_are_no_experts() -> None:
    """Of heads, each with a layer of its own: no product gave them their rows."""

    def heads(layer: Any, rows: Tensor) -> Tensor:
        parts = layer.place.expand(EXPERTS, -1, -1).chunk(EXPERTS)
        return rows + torch.cat([f(c) for f, c in zip(layer.experts, parts, strict=True)])

    assert not grouped(heads)


def _stepped(sizes: dict[str, int], options: dict[str, int]) -> float:
    return step_on_rank(*model(WAYS["DeepSpeed"], Gated), sizes, options)[0]


def test_exact_on_ranks() -> None:
    assert max(run_ranks(4, _stepped, {"dp": 2, "ep": 2}, {"zero": 3})) < 1e-10


def test_a_split_may_have_an_empty_piece() -> None:
    """Of rotary embeddings of the whole width, for example: no experts, and no error."""

    def empty(layer: Any, rows: Tensor) -> Tensor:
        whole, rest = rows.split([WIDTH, 0], dim=-1)
        none, other = rows.split([0, EXPERTS])
        return layer.experts[0](whole) + torch.cat([other, none]) + rest.sum()

    assert not grouped(empty)


def test_places_of_parts() -> None:
    """Indices from the end, beyond it, steps, and parts of nothing."""

    def parts(layer: Any, rows: Tensor) -> Tensor:
        nothing = rows[:0]
        return rows + rows[-1] + rows[1:9:1].sum(0) + rows[::2].sum(0) + nothing[3:].sum(0) + nothing[-2:].sum(0)

    gm = capture(*model(parts))
    found = {at[1:] for node in gm.graph.nodes if (at := place_of(node)) and at[0].meta["val"].shape[0] in (0, EXPERTS)}
    assert {(0, 3, 1), (0, 1, 3), (0, 0, 0)} <= found and not grouped(parts)
