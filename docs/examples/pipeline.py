"""Four pipeline stages under a zero-bubble schedule, and the timeline of a measured step.

torchrun --nproc-per-node 4 docs/examples/pipeline.py     (or: python docs/examples/pipeline.py)
"""

import argparse

import corpus
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autopar


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedule", default="zb_h1", help="gpipe, 1f1b, interleaved, zb_h1, zb_v, dual_pipe_v, ...")
    parser.add_argument("--folder", default="pipeline", help="where the report of a measured step is written")
    return parser.parse_args()


def main(args: argparse.Namespace) -> list[float]:
    mesh = autopar.init_mesh(pp=4)
    tokens = corpus.tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokens), hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4
    )
    # Split points follow from estimated times; split_points=["model.layers.1", ...] sets them.
    model = autopar.parallelize(LlamaForCausalLM(config), mesh, microbatches=8, schedule=args.schedule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for batch in autopar.sampler(corpus.rows(tokens, 32), mesh, batch_size=16, seed=0).loader():
        losses.append(float(model.train_step(**batch)))  # forward and backward of all microbatches, stage by stage
        model.clip_grad_norm_(1.0)  # by the norm over all stages
        optimizer.step()
        optimizer.zero_grad()
        if len(losses) == 4:
            break
    model.trace(args.folder, **batch)
    if mesh.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; open {args.folder}/report.html")
    return losses


if __name__ == "__main__":
    autopar.launch(main, 4, [arguments()])
