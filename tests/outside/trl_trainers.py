"""TRL's trainers behind `MeshTrainerMixin`: what they log on a mesh, and without one.

Each trains a tiny model for five steps on texts of changing lengths. On dp the standard is DDP on two processes.
"""

from __future__ import annotations

import importlib
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import save_file

import autopar
from autopar import integrations
from tests.integrations.loops import Sizes, as_started
from tests.support.ranks import RankError, run_ranks

WORDS = 60


class Case(NamedTuple):
    """A trainer of TRL, what its texts are, arguments of its configuration, and whether it trains LoRA."""

    trainer: str
    texts: str
    config: Mapping[str, Any] = MappingProxyType({})
    lora: bool = False
    inside: str = "trl"
    rollout: bool = False


ROLLOUTS: Mapping[str, Any] = {"num_generations": 4, "max_completion_length": 8, "temperature": 0.9}
GREEDY = ROLLOUTS | {"generation_kwargs": {"do_sample": False}}

CASES = {
    "SFT": Case("SFT", "text"),
    'SFT, loss_type="dft"': Case("SFT", "text", {"loss_type": "dft"}),
    "SFT, completion_only_loss": Case("SFT", "completion", {"completion_only_loss": True}),
    "SFT, label_smoothing_factor": Case("SFT", "text", {"label_smoothing_factor": 0.1}),
    "SFT, packing": Case("SFT", "text", {"packing": True, "max_length": 32}),
    "SFT, LoRA": Case("SFT", "text", {}, True),
    "DPO": Case("DPO", "pairs"),
    "DPO, LoRA": Case("DPO", "pairs", {}, True),
    "KTO": Case("KTO", "marked"),
    "Reward": Case("Reward", "pairs"),
    "ORPO": Case("ORPO", "pairs", {"max_length": 64}, inside="trl.experimental.orpo"),
    "CPO": Case("CPO", "pairs", {"max_length": 64}, inside="trl.experimental.cpo"),
    "GRPO": Case("GRPO", "prompts", ROLLOUTS, rollout=True),
    "GRPO, greedy, entropy bonus": Case("GRPO", "prompts", GREEDY | {"entropy_coef": 0.1}),
    "GRPO, beta": Case("GRPO", "prompts", ROLLOUTS | {"beta": 0.1}, rollout=True),
    "GRPO, num_iterations": Case("GRPO", "prompts", ROLLOUTS | {"num_iterations": 2}, rollout=True),
    "GRPO, LoRA": Case("GRPO", "prompts", ROLLOUTS, True, rollout=True),
    "GRPO, LoRA, beta": Case("GRPO", "prompts", ROLLOUTS | {"beta": 0.1}, True, rollout=True),
    **{
        f'GRPO, loss_type="{kind}"': Case("GRPO", "prompts", ROLLOUTS | {"loss_type": kind}, rollout=True)
        for kind in ("grpo", "dr_grpo", "bnpo")
    },
    "GRPO, mask_truncated_completions": Case(
        "GRPO", "prompts", ROLLOUTS | {"mask_truncated_completions": True}, rollout=True
    ),
    "RLOO": Case("RLOO", "prompts", GREEDY | {"beta": 0.1}),
}
MESHES: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "dp=2, zero=3": ({"dp": 2}, {"zero": 3}),
    "tp=2": ({"tp": 2}, {}),
    "pp=2": ({"pp": 2}, {}),
}


def tokenizer() -> Any:
    """One token for each word."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(WORDS))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)


def texts(kind: str, count: int = 40) -> Any:
    """Rows of random words: "text", "completion", "pairs" (chosen and rejected) or "marked" (good or bad)."""
    from datasets import Dataset

    generator = torch.Generator().manual_seed(1)

    def words(least: int, most: int) -> str:
        length = int(torch.randint(least, most, (1,), generator=generator))
        return " ".join(f"w{int(i)}" for i in torch.randint(0, WORDS, (length,), generator=generator))

    names = {"completion": ("completion",), "pairs": ("chosen", "rejected"), "marked": ("completion",)}
    found = []
    for i in range(count):
        row: dict[str, Any] = {"text": words(4, 14)} if kind == "text" else {"prompt": words(3, 7) + " "}
        row |= {name: words(3, 9) for name in names.get(kind, ())}
        found.append(row | ({"label": bool(i % 2)} if kind == "marked" else {}))
    return Dataset.from_list(found)


def _model(folder: str, kind: str) -> Any:
    """Of a folder, from which DPO reads its reference."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        num_labels=1,
    )  # fmt: skip
    family = transformers.LlamaForSequenceClassification if kind == "Reward" else transformers.LlamaForCausalLM
    if not Path(folder).exists():  # save_pretrained writes on rank 0 alone
        config.architectures = [family.__name__]
        config.save_pretrained(folder)
        state = {n: x.contiguous() for n, x in family(config).state_dict().items()}
        save_file(state, Path(folder) / "model.safetensors", {"format": "pt"})
    return family.from_pretrained(folder, dtype=torch.float32)


def reward(completions: list[str], **_: Any) -> list[float]:
    """Some words are better than others."""
    return [sum(int(word[1:]) % 7 for word in text.split() if word[0] == "w") / 10 for text in completions]


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Greedy completions with the trainer's model. Each of a group begins with another word, so that they differ."""
    tokens, end = trainer.processing_class, trainer.processing_class.eos_token_id
    ids = [tokens(prompt)["input_ids"] for prompt in prompts]
    first = [4 + (trainer.accelerator.process_index * len(prompts) + i) % 4 for i in range(len(prompts))]
    longest = max(map(len, ids)) + 1
    given = [[0] * (longest - 1 - len(row)) + [*row, word] for row, word in zip(ids, first, strict=True)]
    mask = [[0] * (longest - 1 - len(row)) + [1] * (len(row) + 1) for row in ids]
    made = trainer.model.generate(
        input_ids=torch.tensor(given), attention_mask=torch.tensor(mask), max_new_tokens=7, do_sample=False
    )
    new = [row[longest - 1 :] for row in made.tolist()]
    last = [next((i for i, word in enumerate(row) if i and word % 5 == 0), len(row)) for row in new]
    new = [[*row[:n], end][:8] for row, n in zip(new, last, strict=True)]  # some of them end
    return {"prompt_ids": ids, "completion_ids": new, "logprobs": [[0.0] * len(row) for row in new]}


def logged(name: str, sizes: Sizes | None, options: dict[str, Any], parts: int, folder: str) -> list[dict[str, float]]:
    """What the trainer logs in five steps."""
    os.environ.update(HF_HUB_OFFLINE="1", CI="1", TRL_EXPERIMENTAL_SILENCE="1")
    case = CASES[name]
    library = importlib.import_module(case.inside)
    trainer, config = (getattr(library, f"{case.trainer}{what}") for what in ("Trainer", "Config"))
    with as_started():
        mesh = autopar.init_mesh("cpu", **sizes) if sizes is not None else None
        mine = f"{folder}/{os.getpid()}"
        args = config(
            mine, per_device_train_batch_size=(8 if case.texts == "prompts" else 4) // parts, max_steps=5, logging_steps=1, learning_rate=0.01,
            save_strategy="no", use_cpu=True, bf16=False, report_to=[], disable_tqdm=True,
            gradient_checkpointing=False, **case.config,
        )  # fmt: skip
        how = {"model": _model(f"{mine}/model", case.trainer), "args": args, "train_dataset": texts(case.texts)}
        how["processing_class"] = tokenizer()
        if case.texts == "prompts":
            how["reward_funcs"] = reward
        if case.rollout:
            how["rollout_func"] = rollout
        if case.lora:
            import peft

            how["peft_config"] = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        torch.manual_seed(5)
        if mesh is None:
            made = trainer(**how)
        else:
            made = type("OnMesh", (integrations.MeshTrainerMixin, trainer), {})(**how, mesh=mesh, options=options)
        made.train()
        logs = made.state.log_history
    timed = ("runtime", "second", "time")
    return [{k: float(v) for k, v in log.items() if not any(word in k for word in timed)} for log in logs]


def outcome(name: str, mesh: str) -> tuple[str, float]:
    """(the sentence that refuses it or "", the largest difference of what is logged, relative where it is above 1)."""
    sizes, options = MESHES[mesh]
    parts = sizes.get("dp", 1)
    with tempfile.TemporaryDirectory() as folder:
        expected = run_ranks(parts, logged, name, None, {}, parts, folder, timeout=900)[0]
        try:
            found = run_ranks(math.prod(sizes.values()), logged, name, sizes, options, parts, folder, timeout=1800)[0]
        except RankError as error:
            told = next(o.error for o in error.outcomes if o.error)
            return told.strip().splitlines()[-1], 0.0
    assert [log.keys() for log in found] == [log.keys() for log in expected]
    pairs = [(a[k], b[k]) for a, b in zip(found, expected, strict=True) for k in a]
    return "", max(abs(a - b) / max(1.0, abs(b)) for a, b in pairs)
