"""The model that was parallelized, in somebody's hands: what may be done to it, and what the parallel one says."""

from __future__ import annotations

import copy
import gc
import tempfile
import weakref
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.runtime.guards.original_model import EVERY, OFTEN
from tests.compat.habit_faces import Counting, Tagged, whole_state
from tests.compat.habit_models import batch, make
from tests.support.compile_cache import compiled_once
from tests.support.ranks import refusal, run_ranks


def placed(model: nn.Module, **sizes: int) -> Any:
    mesh = autopar.init_mesh("cpu", **sizes or {"dp": 1})
    return autopar.parallelize(model, mesh, example_batch=batch())


def step(parallel: Any) -> str:
    """What a step says; "" if it is made."""
    said = refusal(lambda: parallel.train_step(**batch()))
    return "" if said == "no error" else said


def references() -> None:
    """What one does with a model of one process beside the parallel one."""
    model = make()
    parallel, alone = placed(model), copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for i in range(3):
        optimizer.zero_grad()
        model(**batch(i))["loss"].backward()
        parallel.train_step(**batch(i))
        optimizer.step()
    model.eval()
    model(**batch())
    parallel.eval_step(**batch())  # in eval mode, whatever the modes
    model.train()
    assert not step(parallel)
    model.load_state_dict(parallel.full_state_dict())
    model.zero_grad()
    assert not step(parallel)
    for both in (model, parallel):
        both.bn.eval(), both.first.requires_grad_(False)
        both.act, both.block.gain, both.scale.tag = nn.GELU(), 2.0, 1
    assert not step(parallel)
    alone.eval()
    nn.init.zeros_(alone.scale)
    assert not step(parallel)
    with torch.no_grad():
        model.scale.add_(1)
    assert "values of scale were written" in step(parallel), "also after it was trained"
    parallel.load_state_dict(model.state_dict())
    assert not step(parallel), "they are equal again"


def test_a_reference_beside_it() -> None:
    run_ranks(1, references)


def lives() -> None:
    model = make()
    whole, block = weakref.ref(model.first.weight), model.block
    parallel = placed(model)
    parallel.train_step(**batch())
    del model
    gc.collect()
    assert whole() is None, "nothing keeps the model"
    assert not step(parallel)
    block.eval()
    assert "attribute block.training was set to False" in step(parallel)
    del block
    gc.collect()
    assert not step(parallel)


def test_what_is_gone_is_not_looked_at() -> None:
    run_ranks(1, lives)


def seldom() -> None:
    model = make()
    parallel = placed(model)
    for _ in range(OFTEN + 1):
        parallel.train_step(**batch())
    model.bn.eval()
    said = [step(parallel) for _ in range(EVERY)]
    assert 1 <= sum(map(bool, said)) < EVERY and "model.bn of the model that parallelize returned" in "".join(said)
    model.bn.train(), model.first.requires_grad_(False)
    assert "requires_grad of first.weight" in refusal(lambda: parallel(**batch())), "another kind of step looks"


def test_later_steps_look_seldom() -> None:
    run_ranks(1, seldom)


class Part(nn.Module):
    def __init__(self, inner: nn.Module | None = None, more: nn.Module | None = None) -> None:
        super().__init__()
        self.inner, self.more = inner if inner is not None else nn.Linear(4, 4).double(), more

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        if self.more is not None:
            x = self.more.inner(x)  # type: ignore[operator]
        return nn.functional.mse_loss(self.inner(x), target)


def shared() -> None:
    judge = Part()
    of_judge, of_both = placed(judge), placed(Part(judge.inner, Part()))
    assert not step(of_judge) and not step(of_both), "nothing has changed"
    torch.optim.SGD(of_judge.parameters(), 0.1).step()
    assert not step(of_judge)
    said = step(of_both)
    assert "inner.weight is in two parallel models" in said and "copy.deepcopy(model) for each" in said
    del of_judge
    assert not step(of_both), "it is alone"

    frozen = Part().requires_grad_(False)
    pair = [placed(Part(frozen.inner, Part())) for _ in range(2)]
    optimizers = [torch.optim.SGD(p.parameters(), 0.1) for p in pair]
    for parallel, optimizer in zip(pair, optimizers):
        step(parallel), optimizer.step()
    assert not any(map(step, pair)), "a frozen part may be in many"

    model = make()
    first = placed(model)
    first.train_step(**batch())
    torch.optim.SGD(first.parameters(), 0.1).step()
    again = placed(model)
    assert not step(again), "of a model as it is now"
    torch.optim.SGD(first.parameters(), 0.1).step()
    assert "is in two parallel models" in step(again)


def test_models_that_share_weights() -> None:
    run_ranks(1, shared)


def without_decay(model: Any) -> list[str]:
    return [name for name, p in model.named_parameters() if getattr(p, "_no_weight_decay", False)]


def on_meshes(sizes: dict[str, int], options: dict[str, Any]) -> Any:
    """Tags and states on pieces, blocks and stages."""
    torch.manual_seed(0)
    model: Any = Tagged().double()
    model.block.fc = Counting(6, 6).double()
    parallel = autopar.parallelize(model, autopar.init_mesh("cpu", **sizes), example_batch=batch(), **options)
    loss = float(model(**batch())["loss"].detach())
    assert abs(float(parallel.train_step(**batch())) - loss) < 1e-12
    named = {name for name, _ in parallel.named_parameters()}
    assert without_decay(parallel) == [name for name in ("bn.weight", "bn.bias") if name in named]
    parallel.half().double()
    assert without_decay(parallel) == [name for name in ("bn.weight", "bn.bias") if name in named]
    parallel.block.fc.seen = 4
    state = whole_state(parallel)
    assert state["block.fc._extra_state"] == {"seen": 4}
    parallel.load_state_dict(state)
    assert parallel.block.fc.seen == 5 and not step(parallel)
    with tempfile.TemporaryDirectory() as folder:
        names = [folder]
        torch.distributed.broadcast_object_list(names, 0)
        autopar.save(f"{names[0]}/run", parallel)
        parallel.block.fc.seen = 0
        autopar.load(f"{names[0]}/run", parallel)
        torch.distributed.barrier()
    assert parallel.block.fc.seen == 6
    model.bn.eval()
    return refusal(lambda: parallel.train_step(**batch()))


def test_tags_and_states_on_meshes() -> None:
    with compiled_once():
        for sizes, options in ({"tp": 2}, {}), ({"pp": 2}, {"split_points": ["block"], "microbatches": 1}):
            for said in run_ranks(2, on_meshes, sizes, options):
                assert "attribute bn.training was set to False on the original model" in said


def names_of_tags() -> list[str]:
    model = make()
    model.scale.placements = 1  # type: ignore[attr-defined]
    return [refusal(lambda: placed(model))]


def test_a_tag_under_a_name_that_a_dtensor_has() -> None:
    for said in run_ranks(1, names_of_tags)[0]:
        assert "found .placements on parameter scale, which DTensor or torch.export uses" in said


def seen_by_one_stage() -> None:
    model = make()
    parallel = placed(model, pp=2)
    assert not step(parallel)
    before = model.first.weight.detach().clone()
    with torch.no_grad():
        model.first.weight.mul_(2)
    assert "values of first.weight were written on the original model" in step(parallel)
    with torch.no_grad():
        model.first.weight.copy_(before)
    assert not step(parallel)


def test_what_one_stage_sees_both_ranks_say() -> None:
    with compiled_once():
        run_ranks(2, seen_by_one_stage)
