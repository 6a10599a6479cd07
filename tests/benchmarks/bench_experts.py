"""Experts over two ranks: ours against transformers' own expert parallelism (all-to-all, FSDP for the rest). Step time,
bytes sent, peak memory; both are checked against one process first.

    python tests/benchmarks/bench_experts.py [--rounds 5] [--small]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from bench_peers import Outcome, measured, report
from common import Workload, load, publish
from peers import Runner, _checkpoint, _part, _whole_gradients, eager, ours
from torch import nn

import autopar

LIMITS = 1e-5, 1e-4  # of the loss and of gradients in float32, relative to the largest entry


@dataclass(frozen=True)
class ExpertWorkload(Workload):
    """A seeded float32 Qwen3-MoE: 4 layers, 8 experts of which a token takes 2; 1024 tokens for each of two ranks."""

    hidden: int = 256
    layers: int = 4
    inner: int = 512
    heads: int = 4
    vocab: int = 4096
    batch: int = 8
    length: int = 256

    def model(self) -> nn.Module:
        """A new model; the same weights each time."""
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        config = Qwen3MoeConfig(
            vocab_size=self.vocab, hidden_size=self.hidden, intermediate_size=self.inner,
            moe_intermediate_size=self.inner, num_hidden_layers=self.layers, num_attention_heads=self.heads,
            num_key_value_heads=self.heads, head_dim=self.hidden // self.heads, num_experts=8, num_experts_per_tok=2,
            max_position_embeddings=self.length, tie_word_embeddings=False, use_cache=False,
        )  # fmt: skip
        torch.manual_seed(0)
        model: nn.Module = Qwen3MoeForCausalLM(config)
        model.train()
        return model


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


MAKE: dict[str, Callable[[Workload], Runner]] = {
    "transformers ep": transformers_ep,
    **{f"autopar ep, {way}": partial(ours, axis="ep", dispatch=way) for way in ("gather", "plain", "dedup")},
    "autopar ep, dedup, zero=3": partial(ours, axis="ep", dispatch="dedup", zero=3),
}
OPPONENTS = {name: ("transformers ep",) for name in MAKE if name.startswith("autopar")}


def main() -> None:
    """Run the ranks, print the table, write it to docs/benchmarks.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="a small model, to try the harness")
    chosen = parser.parse_args()
    workload = ExpertWorkload(hidden=64, layers=2, inner=64, vocab=256, length=32) if chosen.small else ExpertWorkload()
    before = load()
    arguments = (workload, chosen.rounds)
    found: dict[str, Outcome] = autopar.launch(_work, nproc=2, args=arguments, timeout=300, device="cpu")[0]
    text = report(found, chosen.rounds, before, OPPONENTS)
    rows = [f"{name} {found[name].sent.get('all_to_all_rows', 0) / 1e6:.1f}" for name in MAKE]
    text += f"\n\nOf the MB sent, rows of experts: {', '.join(rows)}."
    print(text) if chosen.small else publish("experts", text)


def _work(workload: Workload, rounds: int) -> dict[str, Outcome]:
    return measured(MAKE, workload, list(MAKE), rounds, LIMITS)


if __name__ == "__main__":
    main()
