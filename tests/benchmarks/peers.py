"""The peers and ours, each as a function that prepares a step; the same Llama, batch and loss for all.

A `Runner` holds what is needed to run a step, to check it against one process, and to read its gradients.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Workload
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import autopar


@dataclass
class Runner:
    """``step()``: forward and backward from no gradients, returns this rank's loss. ``gradients()``: whole."""

    model: nn.Module
    step: Callable[[], Tensor]
    gradients: Callable[[], dict[str, Tensor]]
    mean_loss: bool = False  # the losses of the ranks are those of their parts, of equal weight


def eager(model: nn.Module, batch: dict[str, Tensor]) -> Callable[[], Tensor]:
    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss: Tensor = model(**batch).loss
        loss.backward()
        return loss.detach()

    return step


def _whole_gradients(model: nn.Module, strip: str = "") -> Callable[[], dict[str, Tensor]]:
    def gradients() -> dict[str, Tensor]:
        found = {n.removeprefix(strip): p.grad for n, p in model.named_parameters() if p.grad is not None}
        return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in found.items()}

    return gradients


def _part(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v.chunk(dist.get_world_size())[dist.get_rank()] for k, v in batch.items()}


# --- peers --------------------------------------------------------------------------------------------


def single(work: Workload) -> Runner:
    """One process, the whole batch: the reference."""
    model = work.model()
    return Runner(model, eager(model, work.tokens()), _whole_gradients(model))


def ddp(work: Workload) -> Runner:
    """torch.nn.parallel.DistributedDataParallel."""
    model = DistributedDataParallel(work.model(), gradient_as_bucket_view=True)
    return Runner(model, eager(model, _part(work.tokens())), _whole_gradients(model, "module."), mean_loss=True)


def fsdp2(work: Workload, reshard: bool = True) -> Runner:
    """torch.distributed.fsdp.fully_shard on every layer and on the root."""
    model: Any = work.model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return Runner(model, eager(model, _part(work.tokens())), _whole_gradients(model), mean_loss=True)


def fsdp2_no_reshard(work: Workload) -> Runner:
    """fully_shard that keeps the gathered parameters for the backward."""
    return fsdp2(work, reshard=False)


def tensor_parallel(work: Workload) -> Runner:
    """torch's parallelize_module: columns and rows, logits gathered."""
    model: Any = work.model()
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
        **{f"model.layers.*.self_attn.{n}_proj": ColwiseParallel() for n in "qkv"},
        "model.layers.*.self_attn.o_proj": RowwiseParallel(),
        "model.layers.*.mlp.gate_proj": ColwiseParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(),
    }
    parallelize_module(model, _one_axis(), plan)
    return Runner(model, eager(model, work.tokens()), _whole_gradients(model))


def sequence_and_loss_parallel(work: Workload) -> Runner:
    """parallelize_module with a sequence-parallel residual stream and loss_parallel."""
    model: Any = work.model()
    whole = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        "model.layers.*.input_layernorm": SequenceParallel(),
        "model.layers.*.post_attention_layernorm": SequenceParallel(),
        "model.layers.*.self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        ),
        **{f"model.layers.*.self_attn.{n}_proj": ColwiseParallel() for n in "qkv"},
        "model.layers.*.self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "model.layers.*.mlp": PrepareModuleInput(**whole),
        "model.layers.*.mlp.gate_proj": ColwiseParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, _one_axis(), plan)
    batch = work.tokens()
    ids = batch["input_ids"]
    # rotary tables are for the whole sequence, which the cut stream does not tell
    positions = torch.arange(ids.shape[1]).unsqueeze(0)
    targets = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:].flatten()

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        with loss_parallel():
            logits = model(input_ids=ids, position_ids=positions).logits
            loss = F.cross_entropy(logits.flatten(0, 1), targets)
            loss.backward()
        return loss.detach().to_local() if isinstance(loss, DTensor) else loss.detach()

    return Runner(model, step, _whole_gradients(model))


def transformers_tp(work: Workload) -> Runner:
    """transformers' own tensor parallelism: from_pretrained with a tp_plan."""
    from transformers import LlamaForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    with _checkpoint(work) as folder:
        chosen = DistributedConfig(tp_size=dist.get_world_size(), tp_plan="auto")
        model: Any = LlamaForCausalLM.from_pretrained(folder, distributed_config=chosen)
    model.train()
    return Runner(model, eager(model, work.tokens()), _whole_gradients(model))


def _one_axis() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


@contextmanager
def _checkpoint(work: Workload) -> Iterator[str]:
    """A folder with the reference's weights, on all ranks."""
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    if dist.get_rank() == 0:
        model: Any = work.model()
        model.save_pretrained(names[0])
    dist.barrier()
    try:
        yield names[0]
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            for file in Path(names[0]).iterdir():
                os.unlink(file)
            os.rmdir(names[0])


# --- ours ---------------------------------------------------------------------------------------------


def ours(work: Workload, axis: str, **options: Any) -> Runner:
    """autopar on one axis over all ranks."""
    sizes = {axis: dist.get_world_size()}
    model = autopar.parallelize(work.model(), autopar.init_mesh(**sizes), **options)
    batch = _part(work.tokens()) if axis in ("dp", "ep") else work.tokens()

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        return model.train_step(**batch).detach()

    return Runner(model, step, model.full_gradients)
