"""Trainers that generate: each data-parallel rank has its own prompts, and the weights of the last step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.utils import gather, gather_object, set_seed
from torch import Tensor

import autopar
from autopar import integrations
from tests.integrations.loops import Sizes, arguments, as_started, differences, llama, rows
from tests.support.ranks import RankError, run_ranks

CLOSE = 1e-6  # parts of transformers' plain forward are in float32, and its `generate` cannot be lifted
PROMPTS = [[[5, 6, 7], [8, 9]], [[11], [12, 13, 14, 15], [16]]]  # of two ranks


def padded(prompts: list[list[int]]) -> dict[str, Tensor]:
    """At the left."""
    most = max(map(len, prompts))
    ids = [[0] * (most - len(row)) + row for row in prompts]
    mask = [[0] * (most - len(row)) + [1] * len(row) for row in prompts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


DRAWN = {"do_sample": True, "num_return_sequences": 2}


def own_prompts(sizes: Sizes, parts: list[int]) -> list[Any]:
    """Tokens for the prompts of a rank: drawn, and greedy by `generate_batch`."""
    mesh = autopar.init_mesh("cpu", 60.0, **sizes)
    model = autopar.parallelize(llama(), mesh, outputs_with_grad="rank", lift_to_float64=True)
    found = []
    for part in parts:
        prompts = PROMPTS[part + autopar.dp_rank_and_size(mesh)[0]]
        torch.manual_seed(len(prompts))
        drawn = model.generate(**padded(prompts), max_new_tokens=6, pad_token_id=0, **DRAWN)
        config = transformers.GenerationConfig(max_new_tokens=6, do_sample=False)
        batch = model.generate_batch(prompts, generation_config=config)
        found += [drawn.tolist(), [batch[f"req_{i}"].generated_tokens for i in range(len(prompts))]]
    return found


def test_prompts_of_a_rank() -> None:
    """Whatever the others generate; draws by a rank's own generator."""
    found = run_ranks(2, own_prompts, {"dp": 2}, [0], timeout=200)
    assert found[0] + found[1] == run_ranks(1, own_prompts, {}, [0, 1], timeout=200)[0]
    greedy = llama().generate(**padded(PROMPTS[1]), max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert found[1][1] == greedy[:, -6:].tolist()


def unpicklable() -> None:
    mesh = autopar.init_mesh("cpu", 60.0, dp=2)
    model = autopar.parallelize(llama(), mesh, outputs_with_grad="rank")
    model.generate(torch.tensor([[5]]), max_new_tokens=2, prefix_allowed_tokens_fn=lambda row, ids: [3])


def test_functions_that_other_ranks_cannot_get() -> None:
    with pytest.raises(RankError, match="exchange their requests, which must be picklable"):
        run_ranks(2, unpicklable, timeout=100)


class Rollouts(transformers.Trainer):
    """Trains on its own completions, weighted against those of all ranks, in an order that is drawn."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        set_seed(7, device_specific=True)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        prompts = inputs["input_ids"][torch.randperm(len(inputs["input_ids"]))][:, :4]
        with torch.no_grad():
            made = self.accelerator.unwrap_model(model).generate(
                prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=3, do_sample=False, pad_token_id=0
            )
        rewards = made[:, 4:].double().mean(1)
        everybody = gather(rewards)
        assert gather_object(rewards.tolist()) == everybody.tolist()
        own = everybody[self.accelerator.process_index * len(rewards) :][: len(rewards)]
        logits = model(input_ids=made).logits[:, :-1].log_softmax(-1)
        chosen = logits.gather(-1, made[:, 1:, None])[:, 3:, 0].sum(1)
        loss = -(chosen * (own - everybody.mean())).mean()
        self.log({"rewards": float(everybody.std()), "count": float(len(everybody))})
        return loss


class RolloutsOnMesh(integrations.MeshTrainerMixin, Rollouts):
    pass


def logged(sizes: Sizes | None, folder: str, parts: int, options: dict[str, Any]) -> list[dict[str, float]]:
    with as_started():
        mesh = autopar.init_mesh("cpu", **sizes) if sizes is not None else None
        changes = {"eval_strategy": "no", "save_strategy": "no", "gradient_accumulation_steps": 1}
        how: dict[str, Any] = {
            "model": llama(), "args": arguments(folder, parts, **changes), "train_dataset": rows(40, 1)
        }  # fmt: skip
        given = {"lift_to_float64": True, **options}
        trainer = Rollouts(**how) if mesh is None else RolloutsOnMesh(**how, mesh=mesh, options=given)
        trainer.train()
        return trainer.state.log_history


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"dp": 2}, {"zero": 3}),
        pytest.param({"tp": 2}, {}, marks=pytest.mark.full),
        pytest.param({"pp": 2}, {}, marks=pytest.mark.full),
        pytest.param({"dp": 2, "tp": 2}, {}, marks=pytest.mark.full),
    ],
    ids=str,
)  # fmt: skip
def test_a_trainer_that_generates(tmp_path: Path, sizes: Sizes, options: dict[str, Any]) -> None:
    parts = sizes.get("dp", 1)
    expected = run_ranks(parts, logged, None, str(tmp_path), parts, {}, timeout=200)[0]
    for logs in run_ranks(4 if len(sizes) > 1 else 2, logged, sizes, str(tmp_path), parts, options, timeout=300):
        worst, largest = differences(logs, expected), max(1.0, *(abs(x) for log in expected for x in log.values()))
        assert max(worst.values()) < CLOSE * largest, worst
