"""A run that is stopped and resumed on another mesh: weights, optimizer, schedule, random numbers, data position.

torchrun --nproc-per-node 4 docs/examples/resume.py --dp 2 --tp 2 --until 6
torchrun --nproc-per-node 2 docs/examples/resume.py --pp 2 --until 12       (or: python docs/examples/resume.py --pp 2)
"""

import argparse
from pathlib import Path

import corpus
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import autopar


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for axis in ("dp", "tp", "pp"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--until", type=int, default=6, help="the step to stop at")
    parser.add_argument("--folder", default="run", help="of its checkpoints")
    return parser.parse_args()


def main(args: argparse.Namespace) -> list[float]:
    mesh = autopar.init_mesh(dp=args.dp, tp=args.tp, pp=args.pp)
    tokens = corpus.tokenizer()
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(tokens), n_positions=64, n_embd=64, n_layer=2, n_head=4)
    model = autopar.parallelize(GPT2LMHeadModel(config), mesh, microbatches=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    sampler = autopar.sampler(corpus.rows(tokens, 64), mesh, batch_size=8, seed=0)
    run = {"scheduler": schedule, "extra": {"data": sampler}}
    if Path(args.folder).exists():
        autopar.load(args.folder, model, optimizer, **run)
    losses: list[float] = []
    for batch in sampler.loader():
        losses.append(float(model.train_step(**batch)))
        optimizer.step(), schedule.step(), optimizer.zero_grad()
        if mesh.get_rank() == 0:
            print(f"step {model.training_steps}: loss {losses[-1]:.4f}")
        if model.training_steps >= args.until:
            break
    autopar.save(args.folder, model, optimizer, keep=2, **run)
    return losses


if __name__ == "__main__":
    args = arguments()
    autopar.launch(main, args.dp * args.tp * args.pp, [args])
