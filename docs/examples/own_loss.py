"""A loss outside of the model: direct preference optimization (Rafailov et al. 2023, eq. 7).

torchrun --nproc-per-node 2 docs/examples/own_loss.py     (or: python docs/examples/own_loss.py)
"""

from typing import Any

import corpus
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

BETA = 0.1


def log_probabilities(logits: Tensor, ids: Tensor) -> Tensor:
    """Of each row: [rows, tokens, vocabulary] and [rows, tokens] to [rows]."""
    return -F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none").sum(1)


def preference(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    """Traced with the model. Of two neighbouring rows the first, with ``sign`` 1, is preferred; the other has -1."""
    gain = (log_probabilities(outputs.logits, batch["input_ids"]) - batch["reference"]) * batch["sign"]
    return -F.logsigmoid(BETA * gain.view(-1, 2).sum(1)).mean()


def pairs(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Text is preferred to the same tokens in another order."""
    ids = torch.stack([row["input_ids"] for row in rows])
    both = torch.stack([ids, ids[:, torch.randperm(32)]], dim=1).flatten(0, 1)
    return {"input_ids": both, "sign": torch.tensor([1.0, -1.0]).repeat(len(rows))}


def main() -> list[float]:
    mesh = autopar.init_mesh(tp=2)
    tokens = corpus.tokenizer()
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    batch = pairs(corpus.rows(tokens, 32)[:8])
    policy = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokens), **sizes))
    with torch.no_grad():  # the reference: the policy as it was
        batch["reference"] = log_probabilities(policy(batch["input_ids"]).logits, batch["input_ids"])
    model = autopar.parallelize(policy, mesh, loss=preference, example_batch=batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []
    for _ in range(8):
        losses.append(float(model.train_step(**batch)))
        optimizer.step()
        optimizer.zero_grad()
    if mesh.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    autopar.launch(main, 2)
