"""A language model from scratch: tokenizer, data, AdamW with warm-up, clipping, a folder that transformers reads.

torchrun --nproc-per-node 4 docs/examples/pretrain.py --text *.txt     (or: python docs/examples/pretrain.py)
"""

import argparse

import corpus
import torch
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

import autopar


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", nargs="+", default=corpus.PAGES, help="files to learn from (default: pages of docs/)")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--folder", default="pretrained", help="where the model is written")
    return parser.parse_args()


def main(args: argparse.Namespace) -> list[float]:
    mesh = autopar.init_mesh(dp=2, tp=2)
    tokens = corpus.tokenizer(args.text)
    sampler = autopar.sampler(corpus.rows(tokens, 128, args.text), mesh, batch_size=16, seed=0)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    precision = "bf16" if torch.cuda.is_available() else "none"  # weights stay in float32
    model = autopar.parallelize(LlamaForCausalLM(config), mesh, zero=1, precision=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = get_cosine_schedule_with_warmup(optimizer, args.steps // 10, args.steps)
    losses: list[float] = []
    while len(losses) < args.steps:
        for batch in sampler.loader():
            losses.append(float(model.train_step(**batch)))
            norm = model.clip_grad_norm_(1.0)
            optimizer.step(), schedule.step(), optimizer.zero_grad()
            if mesh.get_rank() == 0:
                print(f"step {len(losses)}: loss {losses[-1]:.3f}, norm of gradients {norm:.2f}")
            if len(losses) == args.steps:
                break
    model.save_pretrained(args.folder)  # AutoModelForCausalLM.from_pretrained(folder)
    if mesh.get_rank() == 0:
        tokens.save_pretrained(args.folder)
    return losses


if __name__ == "__main__":
    autopar.launch(main, 4, [arguments()])
