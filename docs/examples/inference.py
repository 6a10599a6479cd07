"""Inference with a model sharded on two ranks: the perplexity of a text, and text generation.

torchrun --nproc-per-node 2 docs/examples/inference.py --model FOLDER     (or: python docs/examples/inference.py)
"""

import argparse
import math

import corpus
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import autopar

WINDOW = 64  # tokens of a pass: one length, so one compiled step


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder such as pretrain.py writes (default: fresh weights)")
    parser.add_argument("--prompt", default="A schedule is")
    parser.add_argument("--tokens", type=int, default=12, help="how many to add")
    return parser.parse_args()


def main(args: argparse.Namespace) -> tuple[float, str]:
    mesh = autopar.init_mesh(tp=2)
    torch.manual_seed(0)
    if args.model:
        tokens, model = AutoTokenizer.from_pretrained(args.model), AutoModelForCausalLM.from_pretrained(args.model)
    else:
        tokens = corpus.tokenizer()
        sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokens), **sizes))
    model = autopar.parallelize(model, mesh)
    rows = corpus.rows(tokens, WINDOW)[:4]
    losses = [float(model.eval_step(**{key: value[None] for key, value in row.items()}).loss) for row in rows]
    perplexity = math.exp(sum(losses) / len(losses))
    ids = tokens(args.prompt, return_tensors="pt")["input_ids"]
    for _ in range(args.tokens):  # one pass over the window per token; causal, so padding after it has no effect
        seen = ids[:, -WINDOW:]
        window = torch.nn.functional.pad(seen, (0, WINDOW - seen.shape[1]))
        logits = model.eval_step(input_ids=window).logits.full_tensor()
        ids = torch.cat([ids, logits[:, seen.shape[1] - 1].argmax(-1, keepdim=True)], dim=1)
    text = tokens.decode(ids[0])
    if mesh.get_rank() == 0:
        print(f"perplexity {perplexity:.1f}\n{text}")
    return perplexity, text


if __name__ == "__main__":
    autopar.launch(main, 2, [arguments()])
