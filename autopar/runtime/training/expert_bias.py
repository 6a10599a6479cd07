"""Router biases adjusted by the load of experts, outside of the optimizer: balancing without an auxiliary loss."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.runtime.module.parallel_module import ParallelModule

BIAS = "e_score_correction_bias"


def balance_experts(model: ParallelModule, rate: float = 1e-3, buffer: str = BIAS) -> dict[str, Tensor]:
    """Adjust the bias with which each router selects experts towards even load: b_e += rate * sign(mean of counts -
    count of e), with the token counts since the last call. Call it after ``optimizer.step()``; returns the counts.
    Collective.

    ``buffer``: suffix of the names of the bias buffers [E], as in DeepSeek-V3, GLM-4-MoE or MiniMax. A layer of experts
    without such a buffer keeps its routing. Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for
    Mixture-of-Experts", 2024, algorithm 1. Raises ValueError for a model without such buffers.
    """
    biases = {name: x for name, x in model.named_buffers() if name.endswith(buffer)}
    if not biases and "pp" not in model.mesh.mesh_dim_names:
        raise ValueError(
            f"balance_experts: needs buffers whose names end with {buffer!r}, found none; pass the name of the "
            "router's bias as buffer=, or use the model's auxiliary loss"
        )
    load = model.expert_load(reset=True)
    with torch.no_grad():
        for layer, count in load.items():
            counts, beside = count.double(), layer.rpartition(".")[0]  # bias of the experts or their parent
            for name, bias in biases.items():
                if name.startswith(f"{beside}." if beside else "") and bias.shape == counts.shape:
                    bias.add_((counts.mean() - counts).sign().to(bias), alpha=rate)
    return load
