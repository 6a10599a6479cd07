"""No two gradients that leave a step share storage: what is done to one in place is done to no other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx import Graph, GraphModule

import autopar
from autopar.ir.mesh import Mesh
from autopar.ir.storages import shared_outputs
from autopar.options import Options
from autopar.passes.autodiff.clone_aliased_grads import clone_aliased_grads
from autopar.rewrite.checks import PlacementError, check_owned
from autopar.rewrite.compilation import Compilation
from autopar.runtime.params.parameters import local_tensor
from autopar.testing.harness import check_alone, check_model
from tests.support.plain_models import Net, build, numbers, part, put
from tests.support.ranks import run_ranks

WIDTH = 8
EXACT = 1e-10


class Shared(nn.Module):
    """Every way in which autograd gives several parameters views of one gradient, or one of its own inputs."""

    def __init__(self, penalty: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.penalty = penalty
        new = lambda *size: nn.Parameter(torch.randn(*size).double() / 3)  # noqa: E731
        self.w1, self.w2 = new(WIDTH, WIDTH), new(WIDTH, WIDTH)
        self.a, self.b, self.c = new(WIDTH // 2), new(WIDTH // 2), new(WIDTH)
        self.whole, self.offset, self.other = new(2 * WIDTH), new(1), new(1)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.blocks[0](x @ (self.w1 + self.w2.t()))  # a gradient and its transpose
        h = torch.tanh(h * (torch.cat([self.a, self.b]) + self.c))  # a gradient and its pieces
        first, second = self.whole.split(WIDTH)
        h = self.blocks[1](h * first + second) + (self.offset + self.other)
        loss = ((h - y) ** 2).mean()
        if self.penalty:  # gradients that are expanded
            loss = loss + (self.offset + self.other).expand(3).sum() + self.whole.view(2, WIDTH).t().sum()
        return loss


def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {n: torch.randn(8, WIDTH).double() for n in "xy"}


@pytest.mark.parametrize("mesh, zero, microbatches", [("dp=2", 0, 1), ("dp=2,tp=2", 0, 2), ("dp=2", 3, 2)])
def test_gradients_are_alone_and_add_up_in_place(mesh: str, zero: int, microbatches: int) -> None:
    """`check_model` adds in place, as the runtime does, and asserts that each gradient has storage to itself."""
    options = Options(zero=zero, microbatches=microbatches)
    result = check_model(Shared(penalty=microbatches == 1), batch(), Mesh.parse(mesh), options)
    assert result.worst < EXACT, result


def habits(sizes: dict[str, int], microbatches: int, schedule: str | None) -> None:
    """Two steps, clipped and halved in place."""
    model, data = Shared(), batch()
    mesh = autopar.init_mesh("cpu", 30.0, **sizes)
    ranks = sizes.get("dp", 1)
    mine = {n: x.chunk(ranks)[mesh.get_local_rank("dp") if ranks > 1 else 0] for n, x in data.items()}
    parallel = autopar.parallelize(model, mesh, example_batch=mine, microbatches=microbatches, schedule=schedule or "")
    for step in range(2):
        model(**data).backward()
        parallel.train_step(**mine)
        found = [p.grad for p in parallel.parameters() if p.grad is not None]
        check_alone([local_tensor(g) for g in found], [local_tensor(p) for p in parallel.parameters()])
        norms = [nn.utils.clip_grad_norm_(model.parameters(), 0.5), parallel.clip_grad_norm_(0.5)]
        assert abs(float(norms[0]) - float(norms[1])) < EXACT, (step, norms)
        for p in (*model.parameters(), *parallel.parameters()):
            if p.grad is not None:
                p.grad.mul_(0.5)
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    gradients = parallel.full_gradients()
    assert gradients.keys() == expected.keys()
    worst = max(float((gradients[n] - g).abs().max()) for n, g in expected.items())
    assert worst < EXACT, worst


@pytest.mark.parametrize(
    "sizes, microbatches, schedule",
    [({"dp": 2}, 2, None), ({"pp": 2}, 4, "zb_h1")],
)
def test_steps_that_accumulate_are_clipped_and_scaled(
    sizes: dict[str, int], microbatches: int, schedule: str | None
) -> None:
    run_ranks(2, habits, sizes, microbatches, schedule)


class Returning(nn.Module):
    """Returns views of its inputs, weights and values, by operators that say so and by those that do not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = self.linear(x)
        pairs = torch.view_as_complex(h.reshape(-1, WIDTH // 2, 2))
        return {
            "loss": ((h - y) ** 2).mean(),
            "turned": torch.einsum("ij->ji", x),
            "same": x.contiguous(),
            "weight": torch.einsum("ij->ji", self.linear.weight),
            "pairs": torch.view_as_real(pairs),
            "windows": h.unfold(1, 2, 1),
        }


def returned() -> None:
    model, data = Returning(), batch()
    parallel = autopar.parallelize(model, autopar.init_mesh("cpu", 60.0, tp=2), example_batch=data)
    found = parallel(**data)
    for name, expected in model(**data).items():
        value = found[name]
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        torch.testing.assert_close(whole, expected, rtol=0, atol=EXACT)
        local_tensor(value).detach().zero_()
    assert all(map(torch.equal, data.values(), batch().values()))
    assert torch.equal(parallel.full_state_dict()["linear.weight"], model.linear.weight)


def test_outputs_own_their_storage() -> None:
    """What a user does to an output is done to no input and no weight."""
    run_ranks(2, returned)


def kept_between() -> None:
    batch = numbers()
    parallel = put(build(Net), batch, {"dp": 2})
    found = parallel(**part(batch, {"dp": 2}))
    paused = found["loss"].grad_fn.run.paused
    read = {id(x) for _, x in paused.saved}
    others = {x.data_ptr() for x in paused.slots if isinstance(x, Tensor) and id(x) not in read}
    assert others and found["loss"].data_ptr() not in others and found["logits"].to_local().data_ptr() not in others
    found["loss"].backward()
    assert parallel.full_gradients()


def test_outputs_are_not_kept_for_the_backward() -> None:
    """Logits that nobody holds any more are freed before it."""
    run_ranks(2, kept_between)


def test_a_graph_whose_gradients_share_storage_is_refused() -> None:
    graph, aten = Graph(), torch.ops.aten
    x, w = graph.placeholder("x"), graph.placeholder("w")
    product = graph.call_function(aten.mm.default, (x, w))
    turned = graph.call_function(aten.t.default, (product,))
    piece = graph.call_function(aten.slice.Tensor, (turned, 0, 0, 2))
    graph.output((product, turned, product, piece, w, x))
    square = torch.empty(4, 4, device="meta")
    for node in (x, w, product, turned):
        node.meta["val"] = square
    piece.meta["val"] = square[:2]
    gm = GraphModule(nn.Module(), graph)
    gm.meta["owned"] = [0, 1, 2, 3, 4]
    assert shared_outputs(gm, gm.meta["owned"]) == [1, 2, 3, 4]
    with pytest.raises(PlacementError, match=r"aten\.t\.default \(t.*aten\.slice.*placeholder \(w\)"):
        check_owned(gm, Compilation(Mesh.of()))
    clone_aliased_grads(gm)
    check_owned(gm, Compilation(Mesh.of()))
    given = [torch.randn(4, 4), torch.randn(4, 4)]
    check_alone(gm(*given)[:5], given)
