"""The lines of `tests.compat.habit_numbers` on real ranks, where parameters are sharded: by tp, in unequal blocks,
by zero; and where pipeline stages hold some of them each.

Numbers are compared as they are read; parameters, gradients and a further loss as wholes, behind the line.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.ir.placement import Shard
from autopar.runtime.params.dtensor_layout import is_here
from autopar.runtime.params.sharded_tensor import ShardedTensor
from tests.compat.habit_numbers import LINES, rounded
from tests.support.ranks import refusal, run_ranks

LR = 0.1


class Fused(nn.Module):
    """Attention with one projection for queries, keys and values; an embedding; a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(8, 8), nn.LayerNorm(8)
        self.qkv, self.out, self.head = nn.Linear(8, 24, bias=False), nn.Linear(8, 8), nn.Linear(8, 6)

    def forward(self, tokens: Tensor, target: Tensor) -> dict[str, Tensor]:
        x = self.norm(self.table(tokens))
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return {"loss": nn.functional.cross_entropy(self.head(x).flatten(0, 1), target.flatten())}


def plain() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    made = torch.Generator().manual_seed(1)
    batch = {
        "tokens": torch.randint(0, 8, (4, 5), generator=made),
        "target": torch.randint(0, 6, (4, 5), generator=made),
    }
    return Fused().double(), batch


def outcome(model: Any, batch: dict[str, Tensor], start: dict[str, Tensor], what: str, phases: bool) -> list[Any]:
    """(what the line gives, gradients, parameters, the next loss) after a step by hand."""
    model.load_state_dict(start)
    model.zero_grad()
    on_mesh = isinstance(model, autopar.ParallelModule)
    if on_mesh and not phases:
        model.train_step(**batch)
    else:
        model(**batch)["loss"].backward()
    found = rounded(LINES[what](list(model.parameters())))
    gradients = model.full_gradients() if on_mesh else {n: p.grad for n, p in model.named_parameters()}
    state = dict(model.full_state_dict()) if on_mesh else {n: x.clone() for n, x in model.state_dict().items()}
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(p.grad, alpha=LR)
    further = model.train_step(**batch) if on_mesh and not phases else model(**batch)["loss"].detach()
    return [found, {n: x.clone() for n, x in gradients.items()}, state, float(further)]


def unlike(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)):
        return len(a) != len(b) or any(map(unlike, a, b))
    if isinstance(a, dict):
        return a.keys() != b.keys() or any(unlike(x, b[n]) for n, x in a.items())
    if isinstance(a, Tensor):
        return a.shape != b.shape or not torch.allclose(a, b, atol=1e-9, rtol=1e-9)
    return a != b if not isinstance(a, float) else abs(a - b) > 1e-8 * max(1.0, abs(a))


def wrong_lines(sizes: dict[str, int], zero: int, phases: bool) -> list[str]:
    """Lines that are not as in torch, and how."""
    model, batch = plain()
    start = {n: x.clone() for n, x in model.state_dict().items()}
    mesh = autopar.init_mesh("cpu", 30.0, **sizes)
    part, parts = autopar.dp_rank_and_size(mesh)
    mine = {k: v.chunk(parts)[part] for k, v in batch.items()}
    parallel = autopar.parallelize(plain()[0], mesh, example_batch=mine, zero=zero, lift_to_float64=True)
    cuts = [p.cuts for p in parallel.parameters()]  # type: ignore[attr-defined]
    assert any(cuts) == (len({*sizes} - {"pp"}) > 0)
    assert any(s.blocks for cut in cuts for _, s in cut) == ("tp" in sizes), cuts
    assert len({is_here(p) for p in parallel.parameters()}) == sizes.get("pp", 1)
    wrong = []
    for what in LINES:
        expected = outcome(model, batch, start, what, phases)
        try:
            found = outcome(parallel, mine, start, what, phases)
        except Exception as error:  # the test reports all of them
            wrong.append(f"{what}: {type(error).__name__}: {error}")
            continue
        for name, a, b in zip(("number", "gradient", "parameter", "loss"), expected, found, strict=True):
            if unlike(a, b):
                wrong.append(f"{what}: {name}: {b}, not {a}")
                break
    return wrong


@pytest.mark.parametrize(
    ("sizes", "zero", "phases"),
    [
        ({"tp": 2}, 0, False),
        ({"dp": 2}, 3, False),
        ({"dp": 2}, 1, True),
        ({"pp": 2}, 0, False),
        pytest.param({"pp": 2, "tp": 2}, 0, False, marks=pytest.mark.full),
        pytest.param({"pp": 2, "dp": 2}, 3, False, marks=pytest.mark.full),
        pytest.param({"dp": 2, "tp": 2}, 3, True, marks=pytest.mark.full),
    ],
    ids=["tp", "zero 3", "zero 1", "stages", "stages and tp", "stages and zero 3", "both"],
)
def test_lines_are_as_in_torch_where_parameters_are_cut(sizes: dict[str, int], zero: int, phases: bool) -> None:
    for found in run_ranks(torch.Size(sizes.values()).numel(), wrong_lines, sizes, zero, phases):
        assert not found, "\n".join(found)


def alone() -> dict[str, Any]:
    """What one rank may do by itself; draws where seeds are unlike; what is refused."""
    model, batch = plain()
    parallel = autopar.parallelize(
        model, autopar.init_mesh("cpu", 30.0, tp=2), example_batch=batch, lift_to_float64=True
    )
    parallel.train_step(**batch)
    p, rank = parallel.qkv.weight, torch.distributed.get_rank()
    assert p.grad is not None and p.cuts
    norm = p.grad.norm()
    texts = [f"{norm:.3f}", str(norm.item())] if rank == 0 else []  # no communication
    torch.manual_seed(rank)
    nn.init.normal_(p)
    drawn = p.full_tensor().detach()
    local = p.to_local().detach()
    rows = ShardedTensor.make(local[:1].clone(), p.device_mesh, (("tp", Shard(0)),), torch.Size((2, 8)))
    assert torch.equal((p.detach() + drawn[:1]).full_tensor(), drawn + drawn[:1])  # one row, and pieces have several
    said = [
        refusal(lambda: p.grad.set_(local)),  # type: ignore[union-attr]
        refusal(lambda: p.detach().resize_(2, 2)),
        refusal(lambda: setattr(p, "grad", local)),
        refusal(lambda: setattr(p, "data", p.detach().float())),
        refusal(lambda: rows.add_(drawn[:1])),
    ]
    return {"texts": texts, "drawn": drawn, "said": said, "shown": repr(p)}


def test_one_rank_alone_reads_numbers_and_draws_are_those_of_the_first() -> None:
    first, second = run_ranks(2, alone)
    assert len(first["texts"]) == 2 and torch.equal(first["drawn"], second["drawn"])
    copy, local, cast = "copy into it: x.copy_(y)", "this rank's shard has this shape", "cast the whole"
    needs = [copy, copy, local, cast, "expanded if it has one row for all"]
    assert all(words in said for words, said in zip(needs, first["said"], strict=True)), first["said"]
    assert first["shown"].startswith("ShardedTensor(shape=(24, 8), tp: S(0;8x3), local=")
