"""LoRA by peft on a frozen base that ZeRO-3 shards on two ranks; the adapter is a folder that peft reads.

torchrun --nproc-per-node 2 docs/examples/lora.py --model FOLDER     (or: python docs/examples/lora.py)
"""

import argparse

import corpus
import peft
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import autopar


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder, or a name on the hub (default: a small Llama with fresh weights)")
    parser.add_argument("--folder", default="adapter", help="where the adapter is written")
    parser.add_argument("--steps", type=int, default=10)
    return parser.parse_args()


def load(name: str | None) -> PreTrainedModel:
    if name:
        return AutoModelForCausalLM.from_pretrained(name)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    return LlamaForCausalLM(LlamaConfig(vocab_size=1024, **sizes))


def main(args: argparse.Namespace) -> list[float]:
    mesh = autopar.init_mesh(dp=2)
    torch.manual_seed(0)
    adapter = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.05)
    model = autopar.parallelize(peft.get_peft_model(load(args.model), adapter), mesh, zero=3)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    rows = corpus.rows(corpus.tokenizer(), 64)
    losses: list[float] = []
    for batch in autopar.sampler(rows, mesh, batch_size=16, seed=0).loader():
        losses.append(float(model.train_step(**batch)))
        optimizer.step()
        optimizer.zero_grad()
        if len(losses) == args.steps:
            break
    model.save_pretrained(args.folder)  # peft.PeftModel.from_pretrained(base, folder)
    if mesh.get_rank() == 0:
        print(f"{model.num_parameters(only_trainable=True)} of {model.num_parameters()} weights train")
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    autopar.launch(main, 2, [arguments()])
