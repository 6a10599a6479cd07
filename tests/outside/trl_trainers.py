"""TRL's trainers behind `MeshTrainerMixin`: what they log on a mesh, and without one.

Each trains a tiny model for five steps on texts of changing lengths. On dp the standard is DDP on two processes.
"""

from __future__ import annotations

import functools
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
    """A trainer of TRL, what its texts are, arguments of its configuration, further ones of the trainer, and the meshes
    that it runs on."""

    trainer: str
    texts: str
    config: Mapping[str, Any] = MappingProxyType({})
    given: tuple[str, ...] = ()
    meshes: tuple[str, ...] = ("dp=2, zero=3", "tp=2", "pp=2")
    inside: str = "trl"


DP, TP, PP, SPLIT = MESHES = ("dp=2, zero=3", "tp=2", "pp=2", "pp=2, microbatches=2")
SIZES: dict[str, tuple[Sizes, dict[str, Any]]] = {
    DP: ({"dp": 2}, {"zero": 3}), TP: ({"tp": 2}, {}), PP: ({"pp": 2}, {}), SPLIT: ({"pp": 2}, {"microbatches": 2}),
}  # fmt: skip
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2}
GROUPS: Mapping[str, Any] = {"num_generations": 4, "max_completion_length": 8, "temperature": 0.9}
GREEDY = GROUPS | {"generation_kwargs": {"do_sample": False}}
CASES = {
    "SFT": Case("SFT", "text", meshes=MESHES),
    'SFT, loss_type="dft"': Case("SFT", "text", {"loss_type": "dft"}),
    "SFT, completion_only_loss": Case("SFT", "completion", {"completion_only_loss": True}),
    "SFT, assistant_only_loss": Case("SFT", "chat", {"assistant_only_loss": True}, meshes=(DP,)),
    "SFT, label_smoothing_factor": Case("SFT", "text", {"label_smoothing_factor": 0.1}),
    "SFT, packing": Case("SFT", "text", {"packing": True, "max_length": 32}),
    'SFT, packing_strategy="wrapped"': Case(
        "SFT", "text", {"packing": True, "max_length": 16, "packing_strategy": "wrapped"}, meshes=(DP,)
    ),
    "SFT, padding_free": Case("SFT", "text", {"padding_free": True, "max_length": None}, meshes=(DP, PP)),
    "SFT, evaluation, accumulation": Case(
        "SFT", "text", EVALUATED | {"gradient_accumulation_steps": 2}, meshes=(DP, TP)
    ),
    "SFT, LoRA": Case("SFT", "text", given=("lora",)),
    "DPO": Case("DPO", "pairs", meshes=MESHES),
    **{
        f'DPO, loss_type="{kind}"': Case("DPO", "pairs", {"loss_type": kind} | more, meshes=(DP,))
        for kind, more in (("ipo", {}), ("robust", {"label_smoothing": 0.2}), ("sigmoid_norm", {}))
    },
    "DPO, ref_model": Case("DPO", "pairs", given=("ref_model",), meshes=(DP,)),
    "DPO, evaluation": Case("DPO", "pairs", EVALUATED, meshes=(DP,)),
    "DPO, LoRA": Case("DPO", "pairs", given=("lora",)),
    "KTO": Case("KTO", "marked", meshes=MESHES),
    "Reward": Case("Reward", "pairs"),
    "ORPO": Case("ORPO", "pairs", {"max_length": 64}, inside="trl.experimental.orpo"),
    "CPO": Case("CPO", "pairs", {"max_length": 64}, inside="trl.experimental.cpo"),
    "GRPO": Case("GRPO", "prompts", GROUPS, ("rollout",), MESHES),
    "GRPO, own generation": Case("GRPO", "prompts", GREEDY | {"entropy_coef": 0.1}),
    "GRPO, beta": Case("GRPO", "prompts", GROUPS | {"beta": 0.1}, ("rollout",)),
    "GRPO, sync_ref_model": Case(
        "GRPO",
        "prompts",
        GROUPS | {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2},
        ("rollout",),
        (DP,),
    ),
    "GRPO, num_iterations": Case("GRPO", "prompts", GROUPS | {"num_iterations": 2}, ("rollout",)),
    "GRPO, LoRA": Case("GRPO", "prompts", GROUPS, ("rollout", "lora")),
    "GRPO, LoRA, beta": Case("GRPO", "prompts", GROUPS | {"beta": 0.1}, ("rollout", "lora")),
    **{
        f'GRPO, loss_type="{kind}"': Case("GRPO", "prompts", GROUPS | {"loss_type": kind}, ("rollout",), (DP,))
        for kind in ("grpo", "dr_grpo", "bnpo")
    },
    "GRPO, mask_truncated_completions": Case(
        "GRPO", "prompts", GROUPS | {"mask_truncated_completions": True}, ("rollout",), (DP,)
    ),
    "GRPO, evaluation": Case("GRPO", "prompts", GROUPS | EVALUATED | {"num_generations_eval": 2}, ("rollout",), (DP,)),
    "GRPO, a model as reward": Case("GRPO", "prompts", GROUPS, ("rollout", "reward model"), (DP,)),
    "RLOO": Case("RLOO", "prompts", GROUPS | {"beta": 0.1, "num_iterations": 2}, ("rollout",)),
    "RLOO, own generation": Case("RLOO", "prompts", GREEDY | {"beta": 0.1}, meshes=(DP,)),
}


def tokenizer() -> Any:
    """One token for each word."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(WORDS))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)
    found.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }} </s>{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{{ ' ' }}{% endfor %}"
    )
    return found


def texts(kind: str, count: int = 40) -> Any:
    """Rows of random words: "text", "completion", "pairs" (chosen and rejected), "marked" (good or bad) or "chat"."""
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
        if kind == "chat":
            said = (
                ("user", words(3, 7)),
                ("assistant", words(3, 9)),
                ("user", words(2, 4)),
                ("assistant", words(2, 5)),
            )
            row = {"messages": [{"role": role, "content": text} for role, text in said]}
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
    """A ``rollout_func``."""
    ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    new = completions(ids, trainer)
    return {"prompt_ids": ids, "completion_ids": new, "logprobs": [[0.0] * len(row) for row in new]}


def completions(prompts: list[list[int]], trainer: Any) -> list[list[int]]:
    """Greedy ones of the trainer's model. Each of a group begins with another word, so that they differ."""
    first = [4 + (trainer.accelerator.process_index * len(prompts) + i) % 4 for i in range(len(prompts))]
    longest = max(map(len, prompts)) + 1
    given = [[0] * (longest - 1 - len(row)) + [*row, word] for row, word in zip(prompts, first, strict=True)]
    mask = [[0] * (longest - 1 - len(row)) + [1] * (len(row) + 1) for row in prompts]
    made = trainer.model.generate(
        input_ids=torch.tensor(given), attention_mask=torch.tensor(mask), max_new_tokens=7, do_sample=False
    )
    new, end = [row[longest - 1 :] for row in made.tolist()], trainer.processing_class.eos_token_id
    last = [next((i for i, word in enumerate(row) if i and word % 5 == 0), len(row)) for row in new]
    return [[*row[:n], end][:8] for row, n in zip(new, last, strict=True)]  # some of them end


def _with_completions(trainer: type) -> type:
    """For a trainer without ``rollout_func``."""
    given = {"_generate_single_turn": lambda self, prompts, *_: completions(prompts, self)}
    return type("Rollouts", (trainer,), given)


def _more(case: Case, folder: str) -> dict[str, Any]:
    """Further arguments of the trainer."""
    found: dict[str, Any] = {}
    if "eval_steps" in case.config:
        found["eval_dataset"] = texts(case.texts, 6)
    if case.texts == "prompts":
        found["reward_funcs"] = reward
    if "reward model" in case.given:
        found["reward_funcs"] = _model(f"{folder}/reward", "Reward")
        found["reward_processing_classes"] = tokenizer()
    if "rollout" in case.given and case.trainer == "GRPO":
        found["rollout_func"] = rollout
    if "ref_model" in case.given:
        found["ref_model"] = _model(f"{folder}/reference", case.trainer)
    if "lora" in case.given:
        import peft

        found["peft_config"] = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return found


def logged(name: str, sizes: Sizes | None, options: dict[str, Any], parts: int, folder: str) -> list[dict[str, float]]:
    """What the trainer logs in five steps."""
    os.environ.update(HF_HUB_OFFLINE="1", CI="1", TRL_EXPERIMENTAL_SILENCE="1")
    case = CASES[name]
    library = importlib.import_module(case.inside)
    trainer, config = (getattr(library, f"{case.trainer}{what}") for what in ("Trainer", "Config"))
    if "rollout" in case.given and case.trainer == "RLOO":
        trainer = _with_completions(trainer)
    with as_started():
        mesh = autopar.init_mesh("cpu", **sizes) if sizes is not None else None
        mine = f"{folder}/{os.getpid()}"
        rows = (8 if case.texts == "prompts" else 4) // parts
        args = config(
            mine, per_device_train_batch_size=rows, max_steps=5, logging_steps=1, learning_rate=0.01,
            save_strategy="no", use_cpu=True, bf16=False, report_to=[], disable_tqdm=True,
            gradient_checkpointing=False, **case.config,
        )  # fmt: skip
        how = {"model": _model(f"{mine}/model", case.trainer), "args": args, "train_dataset": texts(case.texts)}
        how["processing_class"] = tokenizer()
        how |= _more(case, mine)
        torch.manual_seed(5)
        if mesh is None:
            made = trainer(**how)
        else:
            made = type("OnMesh", (integrations.MeshTrainerMixin, trainer), {})(**how, mesh=mesh, options=options)
        made.train()
        logs = made.state.log_history
    timed = ("runtime", "second", "time")
    return [{k: float(v) for k, v in log.items() if not any(word in k for word in timed)} for log in logs]


@functools.cache
def plain(name: str, parts: int) -> list[dict[str, float]]:
    """What the trainer logs without a mesh, on ``parts`` processes under DDP."""
    with tempfile.TemporaryDirectory() as folder:
        found: list[dict[str, float]] = run_ranks(parts, logged, name, None, {}, parts, folder, timeout=900)[0]
    return found


def outcome(name: str, mesh: str) -> tuple[str, float]:
    """(the sentence that refuses it or "", the largest difference of what is logged, relative where it is above 1)."""
    sizes, options = SIZES[mesh]
    parts = sizes.get("dp", 1)
    expected = plain(name, parts)
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = run_ranks(math.prod(sizes.values()), logged, name, sizes, options, parts, folder, timeout=1800)[0]
        except RankError as error:
            told = next(o.error for o in error.outcomes if o.error)
            return told.strip().splitlines()[-1], 0.0
    assert [log.keys() for log in found] == [log.keys() for log in expected]
    pairs = [(a[k], b[k]) for a, b in zip(found, expected, strict=True) for k in a]
    return "", max(abs(a - b) / max(1.0, abs(b)) for a, b in pairs)
