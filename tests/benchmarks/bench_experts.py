"""Experts over two ranks: ours against transformers' own expert parallelism (all-to-all, FSDP for the rest), and
against DeepSpeed's where it is installed. Step time, bytes sent, peak memory; all are checked against one process.

    python tests/benchmarks/bench_experts.py [--rounds 5] [--small]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from bench_peers import Outcome, measured, report
from common import Workload, load, publish
from expert_peers import deepspeed_ep, transformers_ep
from memory_peers import has_deepspeed
from peers import Runner, ours
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
            max_position_embeddings=self.length, norm_topk_prob=True, tie_word_embeddings=False, use_cache=False,
        )  # fmt: skip
        torch.manual_seed(0)
        model: nn.Module = Qwen3MoeForCausalLM(config)
        model.train()
        return model


MAKE: dict[str, Callable[[Workload], Runner]] = {
    "transformers ep": transformers_ep,
    **({"DeepSpeed ep": deepspeed_ep} if has_deepspeed() else {}),
    **{
        f"autopar ep, {way}": partial(ours, axis="ep", token_dispatcher=way)
        for way in ("allgather", "alltoall", "alltoall_dedup")
    },
    "autopar ep, alltoall_dedup, zero=3": partial(ours, axis="ep", token_dispatcher="alltoall_dedup", zero=3),
}
OPPONENTS = {name: ("transformers ep", "DeepSpeed ep") for name in MAKE if name.startswith("autopar")}


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
    kinds = {"DeepSpeed ep": "all_to_all"}  # buffers of one capacity for all experts
    rows = [f"{name} {found[name].sent.get(kinds.get(name, 'all_to_all_rows'), 0) / 1e6:.1f}" for name in MAKE]
    text += f"\n\nOf the MB sent, rows of experts: {', '.join(rows)}."
    print(text) if chosen.small else publish("experts", text)


def _work(workload: Workload, rounds: int) -> dict[str, Outcome]:
    return measured(MAKE, workload, list(MAKE), rounds, LIMITS)


if __name__ == "__main__":
    main()
