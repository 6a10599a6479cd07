"""A mixture of experts: two ranks hold two of four experts each, two data-parallel ranks, and tokens sent to them.

torchrun --nproc-per-node 4 docs/examples/experts.py     (or: python docs/examples/experts.py)
"""

import corpus
import torch
from transformers import MixtralConfig, MixtralForCausalLM

import autopar


def main() -> list[float]:
    mesh = autopar.init_mesh(dp=2, ep=2)  # four shards of the batch
    tokens = corpus.tokenizer()
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=len(tokens),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,  # adds the load-balancing loss
    )
    model = autopar.parallelize(MixtralForCausalLM(config), mesh, zero=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for batch in autopar.sampler(corpus.rows(tokens, 64), mesh, batch_size=16, seed=0).loader():
        losses.append(float(model.train_step(**batch)))
        optimizer.step()
        optimizer.zero_grad()
        if len(losses) == 8:
            break
    load = model.expert_load()  # collective: call it on every rank
    if mesh.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        for layer, chosen in load.items():
            print(f"{layer}: tokens per expert {chosen.tolist()}")
    return losses


if __name__ == "__main__":
    autopar.launch(main, 4)
