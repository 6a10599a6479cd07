"""Parameters as DTensors: optimizers, clipping, whole state, distributed checkpoint; against one process."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.adapters.hooks import Observers
from autopar.ir.placement import INVARIANT, Placement, Shard
from autopar.ir.signature import ParameterSpec
from autopar.runtime.mesh.process_groups import Groups, init_mesh
from autopar.runtime.params.dtensor_layout import is_here
from autopar.runtime.params.parameters import (
    full_gradients,
    full_state_dict,
    load_state_dict,
    local_piece,
    local_tensor,
    make_parameter,
    make_parameters,
    no_elements,
    refuse_others,
    set_gradients,
    wrap,
)
from autopar.runtime.params.sharded_reductions import ScalarTensor
from autopar.runtime.params.sharded_tensor import ShardedTensor
from tests.support.ranks import run_ranks

DTYPE = torch.float64


def make_specs(tp: int = 2) -> list[ParameterSpec]:
    """``tp``: the size of the axis that cuts first; the blocks of a dp cut are those of what it left."""

    def spec(name: str, shape: tuple[int, ...], **placements: Placement) -> ParameterSpec:
        return ParameterSpec(name, shape, DTYPE, placements=placements)

    return [
        spec("norm", (6,), tp=INVARIANT),
        spec("row", (8, 12), tp=Shard(1)),
        spec("both", (8, 12), tp=Shard(1), dp=Shard(0)),
        spec("same_dim", (16, 3), tp=Shard(0), dp=Shard(0)),
        spec("qkv", (24, 4), tp=Shard(0, (8, 8, 8))),
        spec("unequal", (32, 5), tp=Shard(0, (16, 8, 8)), dp=Shard(0, (16 // tp, 8 // tp, 8 // tp))),
        spec("columns", (4, 32), tp=Shard(1, (16, 8, 8)), dp=Shard(0)),
    ]


def wholes(seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {s.name: torch.rand(s.shape, dtype=DTYPE, generator=g) - 0.5 for s in make_specs()}


def model_on(sizes: dict[str, int], seed: int = 0) -> tuple[Groups, dict[str, nn.Parameter]]:
    groups = Groups(init_mesh(**sizes))
    values, specs = wholes(seed), make_specs(sizes.get("tp", 1))
    return groups, {s.name: make_parameter(local_piece(values[s.name], s, groups), s, groups) for s in specs}


MESHES = [{"dp": 2, "tp": 2}, {"tp": 4}, {"dp": 2}, {"tp": 2, "dp": 2}]


def pieces(sizes: dict[str, int]) -> None:
    groups, params = model_on(sizes)
    for spec in make_specs(groups.mesh.size("tp")):
        p, whole = params[spec.name], wholes(0)[spec.name]
        assert isinstance(p, nn.Parameter) and isinstance(p, DTensor) and p.shape == whole.shape and p.is_leaf
        torch.testing.assert_close(p.full_tensor().detach(), whole, rtol=0, atol=0)
        torch.testing.assert_close(local_tensor(p), local_piece(whole, spec, groups), rtol=0, atol=0)
        assert type(p.data) is ShardedTensor
        assert type(torch.zeros_like(p)) is type(p.detach()) is type(p.data)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_pieces_and_whole(sizes: dict[str, int]) -> None:
    run_ranks(2 if sizes == {"dp": 2} else 4, pieces, sizes)


def gradients(groups: Groups, params: dict[str, nn.Parameter], step: int) -> None:
    for spec in make_specs(groups.mesh.size("tp")):
        set_gradients([(params[spec.name], local_piece(wholes(100 + step)[spec.name], spec, groups))], Observers())


def optimizer(kind: str, params: Any) -> torch.optim.Optimizer:
    made = {
        "adamw": lambda: torch.optim.AdamW(params, lr=0.1),
        "adamw_loop": lambda: torch.optim.AdamW(params, lr=0.1, foreach=False),
        "adamw_foreach": lambda: torch.optim.AdamW(params, lr=0.1, foreach=True, amsgrad=True),
        "adamw_fused": lambda: torch.optim.AdamW(params, lr=0.1, fused=True),
        "sgd": lambda: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True),
        "lion_like": lambda: torch.optim.RMSprop(params, lr=0.1, foreach=True),
        "adagrad": lambda: torch.optim.Adagrad(params, lr=0.1),
    }
    return made[kind]()


KINDS = ["adamw", "adamw_loop", "adamw_foreach", "adamw_fused", "sgd", "lion_like", "adagrad"]


def reference(kind: str, p: float, foreach: bool | None, steps: int = 2) -> tuple[dict[str, Tensor], list[float]]:
    single = {name: nn.Parameter(value.clone()) for name, value in wholes(0).items()}
    opt, norms = optimizer(kind, list(single.values())), []
    for step in range(steps):
        for name, value in wholes(100 + step).items():
            single[name].grad = value.clone()
        norms.append(nn.utils.clip_grad_norm_(single.values(), 0.5, norm_type=p, foreach=foreach).item())
        opt.step()
        opt.zero_grad()
    return {name: value.detach() for name, value in single.items()}, norms


def train(kind: str, p: float, foreach: bool | None, sizes: dict[str, int]) -> None:
    groups, params = model_on(sizes)
    opt, norms = optimizer(kind, list(params.values())), []
    for step in range(2):
        gradients(groups, params, step)
        norms.append(nn.utils.clip_grad_norm_(params.values(), 0.5, norm_type=p, foreach=foreach).item())
        opt.step()
        for q in params.values():
            assert all(type(v) is type(q.data) for v in opt.state[q].values() if v.shape == q.shape and v.dim())
        opt.zero_grad()
    expected, expected_norms = reference(kind, p, foreach)
    torch.testing.assert_close(norms, expected_norms)
    for spec in make_specs():
        torch.testing.assert_close(params[spec.name].full_tensor().detach(), expected[spec.name])


@pytest.mark.parametrize("kind", KINDS)
def test_optimizers_and_clipping_equal_one_process(kind: str) -> None:
    run_ranks(4, train, kind, 2.0, None, {"dp": 2, "tp": 2})


@pytest.mark.parametrize(("p", "foreach"), [(2.0, True), (2.0, False), (float("inf"), None), (1.0, True), (3.0, None)])
def test_norms_of_every_kind(p: float, foreach: bool | None) -> None:
    run_ranks(4, train, "sgd", p, foreach, {"tp": 2, "dp": 2})


def operators_of_a_step() -> set[str]:
    """On a rank: what AdamW calls where it chooses for itself, on a device that has kernels for many tensors."""
    _, params = model_on({"tp": 2})
    for p in params.values():
        p.grad = torch.ones_like(p)
    opt, seen = optimizer("adamw", list(params.values())), Operators()
    with patch.object(torch_optimizer, "_get_foreach_kernels_supported_devices", lambda: ["cpu"]), seen:
        opt.step()
    return seen.names


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_shards_of_all_kinds_are_stepped_in_one_call() -> None:
    found = run_ranks(2, operators_of_a_step)[0]
    assert "_foreach_addcdiv_" in found and "addcdiv_" not in found


# --- whole states -------------------------------------------------------------------------------------


def states() -> None:
    groups, params = model_on({"dp": 2, "tp": 2})
    specs = make_specs()
    specs[1] = ParameterSpec("row", (8, 12), DTYPE, aliases=("tied.row",), placements={"tp": Shard(1)})
    buffers = {"steps": torch.tensor(3)}
    gradients(groups, params, 0)
    state = full_state_dict(params, specs, groups, buffers)
    assert list(state) == ["norm", "row", "tied.row", "both", "same_dim", "qkv", "unequal", "columns", "steps"]
    for name, value in wholes(0).items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=0)
        torch.testing.assert_close(full_gradients(params, specs, groups)[name], wholes(100)[name], rtol=0, atol=0)
    assert bool(full_state_dict(params, specs, groups, rank0_only=True)) == (groups.rank == 0)
    before = {name: value.clone() for name, value in state.items()}
    local_tensor(params["norm"]).add_(1)
    torch.testing.assert_close(state, before)  # a copy: training on does not change it

    new = {**wholes(1), "steps": torch.tensor(5)}
    new["tied.row"] = new.pop("row")
    load_state_dict(new, params, specs, buffers)
    assert buffers["steps"].item() == 5
    torch.testing.assert_close(params["unequal"].full_tensor().detach(), wholes(1)["unequal"], rtol=0, atol=0)

    wrong = {**new, "extra": torch.zeros(1), "qkv": torch.zeros(2, 2)}
    del wrong["norm"]
    found, misfits = load_state_dict(wrong, params, specs, buffers)
    with pytest.raises(ValueError) as caught:
        refuse_others(found, misfits, True, "Net")
    assert isinstance(caught.value, RuntimeError)  # which code for torch catches
    for part in (
        'Error(s) in loading state_dict for Net: Missing key(s) in state_dict: "norm". Unexpected key(s) in '
        'state_dict: "extra". size mismatch for qkv: copying a param with shape torch.Size([2, 2]) from checkpoint, '
        "the shape in current model is torch.Size([24, 4])",
    ):
        assert part in str(caught.value)
    refuse_others(*load_state_dict({"norm": wholes(2)["norm"]}, params, specs), False, "Net")


def test_whole_state_both_ways() -> None:
    run_ranks(4, states)


def staged() -> None:
    groups = Groups(init_mesh(pp=2, tp=2))
    specs = [replace(s, ranks=(i % 2,)) for i, s in enumerate(make_specs())]
    values: Any = wholes(0)
    params = make_parameters(specs, values, groups)
    held = [name for name, p in params.items() if is_here(p)]
    assert held == [s.name for s in specs if groups.coordinate["pp"] in s.ranks]
    state = full_state_dict(params, specs, groups)
    torch.testing.assert_close(state, values, rtol=0, atol=0)
    for spec in specs:
        p = params[spec.name]
        if spec.name != "row":
            local = local_piece(wholes(7)[spec.name], spec, groups) if is_here(p) else no_elements(p)
            set_gradients([(p, local)], Observers())
    found = full_gradients(params, specs, groups)
    assert found.keys() == values.keys() - {"row"}
    torch.testing.assert_close(found["qkv"], wholes(7)["qkv"], rtol=0, atol=0)


def test_whole_state_of_a_pipeline() -> None:
    run_ranks(4, staged)


# --- operators ----------------------------------------------------------------------------------------


def operators() -> None:
    groups, params = model_on({"dp": 2, "tp": 2})
    p, whole = params["unequal"].detach(), wholes(0)["unequal"]
    spec = next(s for s in make_specs() if s.name == "unequal")
    other = wrap(local_piece(wholes(1)["unequal"], spec, groups), spec, groups)
    assert isinstance(p, ShardedTensor)

    def same(found: Any, expected: Tensor) -> None:
        assert isinstance(found, ShardedTensor if expected.dim() else ScalarTensor)
        torch.testing.assert_close(found.full_tensor(), expected)

    same(p * 2 + 1, whole * 2 + 1)
    same(p + other, whole + wholes(1)["unequal"])
    same(torch.where(p > 0, p, other), torch.where(whole > 0, whole, wholes(1)["unequal"]))
    same(p.sum(), whole.sum())
    same(p.mean(), whole.mean())
    same(p.max(), whole.max())
    same(p.norm(), whole.norm())
    same(p.norm(float("inf")), whole.abs().max())
    same((p > 0.49).any(), (whole > 0.49).any())
    same(p.to(torch.float32), whole.to(torch.float32))
    same(copy.deepcopy(p), whole)
    assert p.sum().item() == pytest.approx(whole.sum().item())
    assert torch.equal(p, p.clone()) and not torch.equal(p, other)
    assert float(torch.isfinite(p).all()) == 1
    same(p @ p.full_tensor().T, whole @ whole.T)
    same(p.view(-1), whole.view(-1))
    same(p[0], whole[0])
    same(p.t(), whole.t())
    same(p.sum(0), whole.sum(0))
    same(p.sum(1), whole.sum(1))
    same(p + whole, whole * 2)
    same(p + whole[:1], whole + whole[:1])
    same(p[:16, :3] + params["same_dim"].detach(), whole[:16, :3] + wholes(0)["same_dim"])
    same(p[:16, :3].t() + params["same_dim"].detach().t(), (whole[:16, :3] + wholes(0)["same_dim"]).t())
    same(torch.cat([p, p]), torch.cat([whole, whole]))
    same(torch.nn.functional.softmax(p, -1), whole.softmax(-1))
    same(torch.cumsum(p, 0), whole.cumsum(0))
    for call in (
        lambda: p.redistribute(),
        lambda: p.set_(whole),
        lambda: p + local_tensor(p),
    ):
        with pytest.raises(ValueError, match=r"parameter: aten|cannot be redistributed"):
            call()
    local = params["unequal"].to_local()
    (local * 3).sum().backward()
    same(params["unequal"].grad, torch.full_like(whole, 3))


def test_operators_are_right_or_refused() -> None:
    run_ranks(4, operators)


def scaled() -> list[float]:
    groups, params = model_on({"tp": 2})
    gradients(groups, params, 0)
    qkv = params["qkv"].grad
    assert qkv is not None
    if groups.rank == 1:
        local_tensor(qkv)[0, 0] = float("inf")  # on one rank only
    opt = torch.optim.SGD(params.values(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(opt)
    scaler.step(opt)
    scaler.update()
    return [scaler.get_scale(), (params["row"].full_tensor().detach() - wholes(0)["row"]).abs().max().item()]


def test_the_grad_scaler_sees_an_infinity_on_another_rank() -> None:
    assert run_ranks(2, scaled) == [[2.0, 0.0], [2.0, 0.0]]


# --- distributed checkpoint ---------------------------------------------------------------------------


def save(sizes: dict[str, int], folder: str) -> None:
    groups, params = model_on(sizes)
    opt = optimizer("adamw", list(params.values()))
    gradients(groups, params, 0)
    opt.step()
    moments = {f"{n}.{k}": v for n, p in params.items() for k, v in opt.state[p].items()}
    dcp.save({"model": dict(params), "optimizer": moments}, checkpoint_id=folder)


def load(sizes: dict[str, int], folder: str) -> None:
    """Load on another mesh, take one more step, compare with two steps of one process."""
    groups, params = model_on(sizes, seed=5)
    opt = optimizer("adamw", list(params.values()))
    gradients(groups, params, 3)
    opt.step()  # so that there is a state to load into
    opt.zero_grad()
    moments = {f"{n}.{k}": v for n, p in params.items() for k, v in opt.state[p].items()}
    dcp.load({"model": dict(params), "optimizer": moments}, checkpoint_id=folder)
    gradients(groups, params, 1)
    opt.step()
    single = {name: nn.Parameter(value.clone()) for name, value in wholes(0).items()}
    alone = optimizer("adamw", list(single.values()))
    for step in range(2):
        for name, value in wholes(100 + step).items():
            single[name].grad = value.clone()
        alone.step()
    for name, p in params.items():
        torch.testing.assert_close(p.full_tensor().detach(), single[name].detach())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"dp": 2, "tp": 2}, {"tp": 4}),
        ({"tp": 2}, {"tp": 2, "dp": 2}),
        ({"tp": 4}, {"dp": 2}),
        ({"dp": 2, "tp": 2}, {}),
    ],
    ids=str,
)
def test_a_checkpoint_loads_on_another_mesh(tmp_path: Path, before: dict[str, int], after: dict[str, int]) -> None:
    def world(sizes: dict[str, int]) -> int:
        return torch.Size(sizes.values()).numel()

    run_ranks(world(before), save, before, str(tmp_path))
    run_ranks(world(after), load, after, str(tmp_path))


def state_dict_api(folder: str) -> None:
    """torch's own helpers for whole models: get_state_dict / set_state_dict with the names of a module."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    groups, params = model_on({"dp": 2, "tp": 2})
    module = nn.Module()
    for name, p in params.items():
        module.register_parameter(name, p)
    opt = optimizer("adamw", module.parameters())
    gradients(groups, params, 0)
    opt.step()
    opt.zero_grad()
    model_state, opt_state = get_state_dict(module, opt)
    dcp.save({"m": model_state, "o": opt_state}, checkpoint_id=folder)
    kept = {name: p.full_tensor().detach() for name, p in params.items()}
    gradients(groups, params, 1)
    opt.step()
    opt.zero_grad()
    model_state, opt_state = get_state_dict(module, opt)
    dcp.load({"m": model_state, "o": opt_state}, checkpoint_id=folder)
    set_state_dict(module, opt, model_state_dict=model_state, optim_state_dict=opt_state)
    for name, p in params.items():
        torch.testing.assert_close(p.full_tensor().detach(), kept[name])
    dist.barrier()


def test_torchs_state_dict_helpers(tmp_path: Path) -> None:
    run_ranks(4, state_dict_api, str(tmp_path))
