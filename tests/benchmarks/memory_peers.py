"""Whole training steps of peers and of ours: forward and backward of several microbatches, then AdamW.

A step's gradients are those of before the optimizer's step; they stay until the next step.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import Workload
from peers import Runner, _part, _whole_gradients
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import autopar

RATE = 1e-5
BUCKET = 25 * 2**20 // 4  # elements


def steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: dict[str, Tensor],
    count: int,
    last: Callable[[bool], contextlib.AbstractContextManager[Any]] = lambda _: contextlib.nullcontext(),
) -> Callable[[], Tensor]:
    """``last(is_last)``: around a microbatch."""
    pieces = [{k: v.chunk(count)[i] for k, v in batch.items()} for i in range(count)]

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        total = torch.zeros(())
        for i, piece in enumerate(pieces):
            with last(i == count - 1):
                loss = model(**piece).loss / count
                loss.backward()
            total += loss.detach().float()
        optimizer.step()
        return total

    return step


def ddp(work: Workload, count: int, zero: bool = False, dtype: torch.dtype | None = None) -> Runner:
    """DistributedDataParallel, which sums after the last microbatch; ``zero``: with ZeroRedundancyOptimizer."""
    model = DistributedDataParallel(work.model(), gradient_as_bucket_view=True)
    optimizer: Any = (
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=RATE)
        if zero
        else torch.optim.AdamW(model.parameters(), lr=RATE)
    )

    @contextlib.contextmanager
    def last(is_last: bool) -> Any:
        with (
            contextlib.nullcontext() if is_last else model.no_sync(),
            torch.autocast("cpu", dtype, enabled=dtype is not None),
        ):
            yield

    step = steps(model, optimizer, _part(work.tokens()), count, last)
    return Runner(model, step, _whole_gradients(model, "module."), mean_loss=True)


def fsdp2(
    work: Workload,
    count: int,
    each: bool = True,
    reshard: bool = True,
    dtype: torch.dtype | None = None,
    replicas: int = 1,
) -> Runner:
    """fully_shard of every layer and of the root. ``each``: gradients are reduce-scattered after every microbatch,
    else after the last. ``replicas``: hybrid sharding."""
    model: Any = work.model()
    ranks = dist.get_world_size()
    shape, names = (ranks // replicas,), ("dp",)
    mesh = init_device_mesh("cpu", (replicas, *shape), mesh_dim_names=("dp_replicate", *names)) if replicas > 1 else (
        init_device_mesh("cpu", shape, mesh_dim_names=names)
    )  # fmt: skip
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if dtype else MixedPrecisionPolicy()
    for layer in (*model.model.layers, model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)

    @contextlib.contextmanager
    def last(is_last: bool) -> Any:
        if not each:
            model.set_requires_gradient_sync(is_last)
        elif replicas > 1:
            model.set_requires_all_reduce(is_last)
        yield

    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    step = steps(model, optimizer, _part(work.tokens()), count, last)
    return Runner(model, step, _whole_gradients(model), mean_loss=True)


def deepspeed(work: Workload, count: int, stage: int) -> Runner:
    """DeepSpeed ZeRO. With buckets of 25 MiB, as the others: its own of 2 GB would be its peak."""
    library = deepspeed_library()
    plain = work.model()
    engine: Any = library.initialize(
        model=plain,
        optimizer=torch.optim.AdamW(plain.parameters(), lr=RATE),
        config={
            "train_micro_batch_size_per_gpu": work.batch // dist.get_world_size() // count,
            "gradient_accumulation_steps": count,
            "zero_optimization": {
                "stage": stage,
                "reduce_bucket_size": BUCKET,
                "allgather_bucket_size": BUCKET,
                "stage3_prefetch_bucket_size": BUCKET,
            },
            "zero_allow_untested_optimizer": True,
        },
    )[0]
    pieces = [{k: v.chunk(count)[i] for k, v in _part(work.tokens()).items()} for i in range(count)]
    found: dict[str, Tensor] = {}  # of the first step: its own step frees them

    def step() -> Tensor:
        total = torch.zeros(())
        for i, piece in enumerate(pieces):
            loss = engine(**piece).loss
            engine.backward(loss)
            total += loss.detach() / count
            if not found and i == count - 1:
                whole = {n: library.utils.safe_get_full_grad(p) for n, p in engine.module.named_parameters()}
                found.update({n: g.clone() for n, g in whole.items() if g is not None})
            engine.step()
        return total

    return Runner(engine.module, step, lambda: found, mean_loss=True)


def deepspeed_library() -> Any:
    """DeepSpeed on these ranks (``pip install --no-deps deepspeed``, and hjson, py-cpuinfo, msgpack, einops, ninja,
    psutil, pydantic)."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": os.environ["RANK"]}
    library: Any = importlib.import_module("deepspeed")
    library.init_distributed(dist_backend="gloo")
    return library


def has_deepspeed() -> bool:
    return importlib.util.find_spec("deepspeed") is not None


def ours(work: Workload, count: int, replicas: int = 1, **options: Any) -> Runner:
    """autopar over dp, or over dp_replicate and dp."""
    sizes = {"dp_replicate": replicas} if replicas > 1 else {}
    mesh = autopar.init_mesh(**sizes, dp=dist.get_world_size() // replicas)
    model = autopar.parallelize(work.model(), mesh, microbatches=count, **options)
    part, parts = autopar.dp_rank_and_size(mesh)
    batch = {k: v.chunk(parts)[part] for k, v in work.tokens().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = model.train_step(**batch).detach()
        optimizer.step()
        return loss

    return Runner(model, step, model.full_gradients)
