"""Fine-tuning with transformers' Trainer: its loop, logs and checkpoints, on two pipeline stages of two ranks.

torchrun --nproc-per-node 4 docs/examples/finetune.py --model FOLDER     (or: python docs/examples/finetune.py)
"""

import argparse

import corpus
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel, TrainingArguments

import autopar
from autopar.integrations import Trainer


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder, or a name on the hub (default: a small GPT-2 with fresh weights)")
    parser.add_argument("--folder", default="finetuned", help="where checkpoints go")
    parser.add_argument("--steps", type=int, default=8)
    return parser.parse_args()


def load(name: str | None) -> PreTrainedModel:
    if name:
        return AutoModelForCausalLM.from_pretrained(name)
    return GPT2LMHeadModel(GPT2Config(vocab_size=1024, n_positions=128, n_embd=64, n_layer=2, n_head=4))


def main(args: argparse.Namespace) -> list[float]:
    mesh = autopar.init_mesh(pp=2, dp=2)
    tokens = corpus.tokenizer()
    rows = corpus.rows(tokens, 64)
    torch.manual_seed(0)
    settings = TrainingArguments(
        args.folder,
        per_device_train_batch_size=8,  # per data-parallel rank, of which there are two: 16 examples per step
        max_steps=args.steps,
        learning_rate=2e-3,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=args.steps,
        save_steps=args.steps,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(
        model=load(args.model),
        args=settings,
        train_dataset=rows[64:],
        eval_dataset=rows[:64],
        mesh=mesh,  # this and the next line are what a mesh needs
        options={"microbatches": 4, "schedule": "1f1b"},
    )
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


if __name__ == "__main__":
    autopar.launch(main, 4, [arguments()])
