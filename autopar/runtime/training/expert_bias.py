"""Biases of routers that follow the load of their experts, beside the optimizer: balance without an auxiliary loss."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.runtime.module.parallel_module import ParallelModule

BIAS = "e_score_correction_bias"


def balance_experts(model: ParallelModule, rate: float = 1e-3, buffer: str = BIAS) -> dict[str, Tensor]:
    """Move the bias by which each router chooses experts towards even load: b_e += rate * sign(mean of counts - count
    of e), with the counts since the last call. Call it after ``optimizer.step()``; returns the counts. Collective.

    ``buffer``: how the name of the biases [E] ends, such as those of DeepSeek-V3, GLM-4-MoE or MiniMax. A layer of
    experts without one keeps its routing. Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for
    Mixture-of-Experts", 2024, algorithm 1. Raises ValueError for a model that has none.
    """
    biases = {name: x for name, x in model.named_buffers() if name.endswith(buffer)}
    if not biases and "pp" not in model.mesh.mesh_dim_names:
        raise ValueError(
            f"balance_experts: moves buffers whose name ends with {buffer!r}, found none; give the name of the "
            "router's bias, or use the model's auxiliary loss"
        )
    load = model.expert_load(reset=True)
    with torch.no_grad():
        for layer, count in load.items():
            counts, beside = count.double(), layer.rpartition(".")[0]  # a bias lies beside the experts, or in them
            for name, bias in biases.items():
                if name.startswith(f"{beside}." if beside else "") and bias.shape == counts.shape:
                    bias.add_((counts.mean() - counts).sign().to(bias), alpha=rate)
    return load
