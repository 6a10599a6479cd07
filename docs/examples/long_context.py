"""Sequences too long for one rank: each of four ranks holds a quarter of the tokens.

torchrun --nproc-per-node 4 docs/examples/long_context.py     (or: python docs/examples/long_context.py)
"""

import corpus
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

LENGTH = 1024  # tokens of a sequence; divides by 2 * cp


def main() -> list[float]:
    mesh = autopar.init_mesh(cp=4)
    tokens = corpus.tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )
    model = autopar.parallelize(
        LlamaForCausalLM(config),
        mesh,
        attention="zigzag_ring",  # without it: the fastest by estimate
        zero=3,  # ranks of cp hold the same weights, so ZeRO shards over cp, too
        loss_chunks=4,  # logits of a quarter of the tokens at a time
        activation_checkpoint="selective",
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    sampler = autopar.sampler(corpus.rows(tokens, LENGTH), mesh, batch_size=2, seed=0)
    for batch in sampler.loader():  # whole sequences, the same on all ranks of cp
        losses.append(float(model.train_step(**batch)))
        optimizer.step()
        optimizer.zero_grad()
        if len(losses) == 8:
            break
    if mesh.get_rank() == 0:
        print(f"{LENGTH} tokens, {LENGTH // 4} of them on each rank: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    autopar.launch(main, 4)
