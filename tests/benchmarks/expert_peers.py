"""Expert parallelism of others, on the ranks of one group: transformers', and DeepSpeed's where it is installed."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
from common import Workload
from memory_peers import deepspeed_library
from peers import Runner, _checkpoint, _part, _whole_gradients, eager
from torch import Tensor, nn


def transformers_ep(work: Workload) -> Runner:
    """from_pretrained with expert parallelism, FSDP over the same ranks for everything else."""
    from transformers import Qwen3MoeForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    ranks = dist.get_world_size()
    with _checkpoint(work) as folder:
        chosen = DistributedConfig(fsdp_size=ranks, ep_size=ranks)
        model: Any = Qwen3MoeForCausalLM.from_pretrained(folder, distributed_config=chosen)
    model.train()
    return Runner(model, eager(model, _part(work.tokens())), _whole_gradients(model), mean_loss=True)


# --- DeepSpeed --------------------------------------------------------------------------------------------


class Expert(nn.Module):
    """One expert of a Qwen3-MoE."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Parameter(gate_up.detach().clone()), nn.Parameter(down.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        gate, up = nn.functional.linear(x, self.gate_up).chunk(2, -1)
        return nn.functional.linear(nn.functional.silu(gate) * up, self.down)


class DeepSpeedBlock(nn.Module):
    """``deepspeed.moe.layer.MoE`` with the weights of a block of transformers: no token is dropped, no noise."""

    def __init__(self, block: Any, moe: Any) -> None:
        super().__init__()
        weights = block.experts.gate_up_proj, block.experts.down_proj
        count, ranks, rank = len(weights[0]), dist.get_world_size(), dist.get_rank()
        self.moe = moe(
            weights[0].shape[2], Expert(weights[0][0], weights[1][0]), count, ranks, k=2, min_capacity=0,
            drop_tokens=False, use_rts=False, top2_2nd_expert_sampling=False,
        )  # fmt: skip
        with torch.no_grad():
            self.moe.deepspeed_moe.gate.wg.weight.copy_(block.gate.weight)
            for i, expert in enumerate(self.experts, rank * count // ranks):
                expert.gate_up.copy_(weights[0][i])
                expert.down.copy_(weights[1][i])

    @property
    def experts(self) -> Any:
        """Of this rank."""
        return self.moe.deepspeed_moe.experts.deepspeed_experts

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.moe(x)[0]
        return found


def deepspeed_ep(work: Workload) -> Runner:
    """Its experts over all ranks, its data parallelism for everything else."""
    library = deepspeed_library()
    moe = importlib.import_module("deepspeed.moe.layer").MoE
    plain: Any = work.model()
    for layer in plain.model.layers:
        layer.mlp = DeepSpeedBlock(layer.mlp, moe)
    config = {"train_micro_batch_size_per_gpu": work.batch // dist.get_world_size()}
    never = torch.optim.SGD(plain.parameters(), lr=0.0)  # no step of it is taken: others have forward and backward
    engine: Any = library.initialize(model=plain, optimizer=never, config=config)[0]
    batch = _part(work.tokens())

    def step() -> Tensor:
        engine.module.zero_grad(set_to_none=True)
        loss = engine(**batch).loss
        engine.backward(loss)
        return loss.detach()  # type: ignore[no-any-return]

    return Runner(engine.module, step, lambda: _gradients_of_blocks(engine.module), mean_loss=True)


def _gradients_of_blocks(model: nn.Module) -> dict[str, Tensor]:
    """By the names and in the shapes of transformers' weights."""
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None and ".moe." not in n}
    for name, block in model.named_modules():
        if isinstance(block, DeepSpeedBlock):
            found[f"{name}.gate.weight"] = block.moe.deepspeed_moe.gate.wg.weight.grad
            for ours, theirs in (("gate_up_proj", "gate_up"), ("down_proj", "down")):
                mine = torch.stack([getattr(expert, theirs).grad for expert in block.experts])
                parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
                dist.all_gather(parts, mine)
                found[f"{name}.experts.{ours}"] = torch.cat(parts)
    return found
