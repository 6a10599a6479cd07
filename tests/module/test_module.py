"""ParallelModule on real ranks: what a user does with it, against the same done in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.modeling_outputs import CausalLMOutputWithPast

import autopar
from autopar.lift_to_float64 import LiftFloat32
from autopar.models.tiny import TINY
from tests.support.compile_cache import compiled_once
from tests.support.plain_models import (
    EXACT,
    Losses,
    Metric,
    Net,
    Normed,
    Tied,
    WithDropout,
    build,
    gap,
    gradients,
    images,
    numbers,
    part,
    put,
    tokens,
)
from tests.support.ranks import run_ranks
from tests.support.subjects import tiny

# --- inputs and outputs -------------------------------------------------------------------------------


def inputs_and_outputs(sizes: dict[str, int], zero: int) -> None:
    model, batch = build(Net), numbers()
    expected = model(**batch)
    expected["loss"].backward()
    mine = part(batch, sizes)
    parallel = put(model, batch, sizes, zero=zero)

    out = parallel(**mine)
    out["loss"].backward()
    assert abs(float(out["loss"].detach()) - float(expected["loss"])) < EXACT
    assert gap(parallel.full_gradients(), gradients(model)) < EXACT
    logits = out["logits"]
    assert isinstance(logits, DTensor) and logits.requires_grad
    assert torch.allclose(logits.full_tensor(), expected["logits"].detach(), atol=EXACT)
    with pytest.raises(RuntimeError, match="already differentiated"):
        out["loss"].backward()

    positional = parallel(mine["x"], mine["target"])
    assert torch.equal(positional["loss"], out["loss"]) and len(parallel.compiled()) == 1
    mixed = parallel(mine["x"], target=mine["target"])
    assert torch.equal(mixed["loss"], out["loss"]) and len(parallel.compiled()) == 1
    with pytest.raises(ValueError, match="positional"):
        parallel(mine["x"], mine["target"], mine["x"])

    parallel.zero_grad()
    (parallel(**mine)["loss"] * 3).backward()  # any function of the loss
    assert gap(parallel.full_gradients(), {n: 3 * g for n, g in gradients(model).items()}) < EXACT
    with torch.no_grad():
        assert not parallel(**mine)["loss"].requires_grad


@pytest.mark.parametrize("sizes, zero", [({"dp": 2}, 3), ({"tp": 2}, 0)], ids=["dp2-zero3", "tp2"])
def test_inputs_and_outputs(sizes: dict[str, int], zero: int) -> None:
    run_ranks(2, inputs_and_outputs, sizes, zero)


def shapes_and_modes() -> None:
    sizes = {"dp": 2}
    model, batch = build(WithDropout), numbers()
    parallel = put(model, batch, sizes)
    mine = part(batch, sizes)
    losses = [float(parallel.train_step(**mine)) for _ in range(2)]
    assert losses[0] != losses[1], "each step draws new masks"
    model.eval()
    expected = float(model(**batch))
    assert abs(float(parallel.eval_step(**mine)) - expected) < EXACT
    assert parallel.training
    assert not parallel.eval().training
    assert abs(float(torch.no_grad()(parallel)(**mine)) - expected) < EXACT and len(parallel.compiled()) == 2
    assert abs(float(parallel(**mine)) - expected) < EXACT and len(parallel.compiled()) == 3  # has a gradient
    assert float(parallel.train()(**mine)) != expected and len(parallel.compiled()) == 4  # train_step has no outputs

    other = numbers(1, 12)
    for count in (5, 5):  # a new shape compiles, an old one does not
        assert abs(float(parallel.eval_step(**part(other, sizes))) - float(model(**other))) < EXACT
        assert abs(float(parallel.eval_step(**mine)) - expected) < EXACT
        assert len(parallel.compiled()) == count


def test_new_shapes_compile_once_and_modes_choose_the_graph() -> None:
    run_ranks(2, shapes_and_modes)


def metrics(sizes: dict[str, int]) -> None:
    model, batch = build(Metric), numbers()
    expected = model(**batch)
    mine = part(batch, sizes)
    parallel = put(model, batch, sizes)
    for out in (parallel(**mine), parallel.eval_step(**mine)):
        assert abs(float(out["accuracy"]) - float(expected["accuracy"])) < EXACT
        assert torch.equal(out["right"].full_tensor(), expected["right"])
    # Without gradients there is nothing to accumulate: evaluation takes the batch as one.
    parallel = put(model, batch, sizes, microbatches=2)
    out = parallel.eval_step(**mine)
    assert abs(float(out["loss"]) - float(expected["loss"])) < EXACT
    assert torch.allclose(out["logits"].full_tensor(), expected["logits"].detach(), atol=EXACT)


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"tp": 2}], ids=["dp2", "tp2"])
def test_metrics_are_those_of_the_whole_batch(sizes: dict[str, int]) -> None:
    run_ranks(2, metrics, sizes)


# --- gradients ----------------------------------------------------------------------------------------


def accumulation() -> None:
    sizes = {"dp": 2}
    model, first, second = build(Net), numbers(0), numbers(1)
    parallel = put(model, first, sizes, zero=3)
    for batch in (first, second):
        model(**batch)["loss"].backward()
        parallel.train_step(**part(batch, sizes))
    assert gap(parallel.full_gradients(), gradients(model)) < EXACT
    names = {n: p.grad is None for n, p in parallel.named_parameters()}
    assert {n for n, none in names.items() if none} == {
        "second.weight", "second.bias", "unused.weight", "unused.bias"
    }  # fmt: skip
    assert [n for n, p in parallel.named_parameters() if not p.requires_grad] == ["second.weight", "second.bias"]
    parallel.zero_grad()
    assert parallel.full_gradients() == {}


def test_gradients_accumulate_and_none_stay_none() -> None:
    run_ranks(2, accumulation)


def microbatches(count: int, sizes: dict[str, int], zero: int) -> None:
    model, batch = build(Tied), tokens()
    loss = model(**batch)
    loss.backward()
    parallel = put(model, batch, sizes, microbatches=count, zero=zero)
    found = parallel.train_step(**part(batch, sizes))
    assert abs(float(found) - float(loss)) < EXACT
    assert gap(parallel.full_gradients(), gradients(model)) < EXACT
    again = parallel.train_step(**part(batch, sizes))
    assert torch.equal(again, found)
    assert gap(parallel.full_gradients(), {n: 2 * g for n, g in gradients(model).items()}) < EXACT
    if count > 1:
        with pytest.raises(ValueError, match="microbatches"):
            parallel(**part(batch, sizes))


WAYS = (({"dp": 2}, 0), ({"dp": 2}, 3), ({"tp": 2}, 0))
OFTEN = ((1, 0), (4, 1), (2, 2), (4, 2))  # each number and each way


@pytest.mark.parametrize("count, way", [
    pytest.param(count, way, marks=() if (count, way) in OFTEN else pytest.mark.full)
    for count in (1, 2, 4) for way in range(len(WAYS))
])  # fmt: skip
def test_microbatches_change_nothing(count: int, way: int) -> None:
    run_ranks(2, microbatches, count, *WAYS[way])


def several_losses(sizes: dict[str, int], count: int) -> None:
    model, batch = build(Losses), numbers()
    sum(losses := model(**batch)).backward()
    left, right, both = *losses, gradients(model)
    parallel = put(model, batch, sizes, microbatches=count)
    found = parallel.train_step(**part(batch, sizes))
    assert isinstance(found, tuple) and torch.allclose(torch.stack(found), torch.stack([left, right]), atol=EXACT)
    assert gap(parallel.full_gradients(), both) < EXACT
    if count == 1:
        parallel.zero_grad()
        _, second = parallel(**part(batch, sizes))
        second.backward()
        model.zero_grad()
        model(**batch)[1].backward()
        own = parallel.full_gradients()
        assert own.keys() == gradients(model).keys() != both.keys()  # the other loss's head has none, and no decay
        assert gap(own, gradients(model)) < EXACT


@pytest.mark.parametrize("sizes, count", [
    ({"dp": 2}, 2), ({"tp": 2}, 1),
    *(pytest.param(*of, marks=pytest.mark.full) for of in (({"dp": 2}, 1), ({"tp": 2}, 2))),
])  # fmt: skip
def test_several_losses(sizes: dict[str, int], count: int) -> None:
    run_ranks(2, several_losses, sizes, count)


# --- training -----------------------------------------------------------------------------------------

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9, nesterov=True),
}


def train(name: str, sizes: dict[str, int], clip: bool, options: dict[str, Any]) -> None:
    model = build(Tied)
    parallel = put(model, tokens(), sizes, **options)
    ours, theirs = OPTIMIZERS[name](parallel.parameters()), OPTIMIZERS[name](model.parameters())
    for step in range(3):
        batch = tokens(step)
        expected = model(**batch)
        expected.backward()
        found = parallel.train_step(**part(batch, sizes))
        assert abs(float(found) - float(expected)) < 1e-9
        if clip:
            norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.05) for m in (parallel, model)]
            norm = norms[0].full_tensor() if isinstance(norms[0], DTensor) else norms[0]
            assert abs(float(norm) - float(norms[1])) < 1e-9 and float(norms[1]) > 0.05
            assert gap(parallel.full_gradients(), gradients(model)) < 1e-9
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    whole = parallel.full_state_dict()
    assert gap(whole, dict(model.state_dict())) < 1e-9
    assert parallel.head.weight is parallel.embed.weight and torch.equal(whole["head.weight"], whole["embed.weight"])


def train_both(sizes: dict[str, int], options: dict[str, Any]) -> None:
    with compiled_once():
        train("adamw", sizes, True, options)
        train("sgd", sizes, False, options)


@pytest.mark.parametrize("sizes, options", [
    ({"dp": 2, "tp": 2}, {"microbatches": 2}), ({"dp": 4}, {"zero": 3}),
    pytest.param({"dp": 2, "tp": 2}, {"zero": 3}, marks=pytest.mark.full),
], ids=["dp2tp2-mb2", "dp4-zero3", "dp2tp2-zero3"])  # fmt: skip
def test_training_equals_one_process(sizes: dict[str, int], options: dict[str, Any]) -> None:
    run_ranks(4, train_both, sizes, options)


def running_statistics(sizes: dict[str, int]) -> None:
    model = build(Normed)
    before = {n: b.clone() for n, b in model.named_buffers()}
    parallel = put(model, images(), sizes)
    parallel.train_step(**part(images(9), sizes))
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers()), "the user's model is not changed"
    parallel.load_state_dict(model.state_dict())
    parallel.zero_grad()
    for step in range(3):
        batch = images(step)
        model.zero_grad()
        loss, _ = model(**batch)
        loss.backward()
        parallel.zero_grad()
        assert abs(float(parallel.train_step(**part(batch, sizes))) - float(loss)) < EXACT
        assert gap(parallel.full_gradients(), gradients(model)) < EXACT
    assert gap(dict(parallel.named_buffers()), dict(model.named_buffers())) < EXACT
    assert int(parallel.norm.num_batches_tracked) == 3
    model.eval()
    loss, logits = model(**images(5))
    found = parallel.eval_step(**part(images(5), sizes))
    whole = found[1].full_tensor() if isinstance(found[1], DTensor) else found[1]
    assert abs(float(found[0]) - float(loss)) < EXACT and torch.allclose(whole, logits, atol=EXACT)


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"tp": 2}], ids=["dp2", "tp2"])
def test_batch_norm_sees_the_whole_batch(sizes: dict[str, int]) -> None:
    run_ranks(2, running_statistics, sizes)


# --- state --------------------------------------------------------------------------------------------


def states() -> None:
    sizes = {"dp": 2, "tp": 2}
    model = build(Tied)
    parallel = put(model, tokens(), sizes, zero=3)
    assert list(parallel.state_dict()) == list(model.state_dict())
    assert [n for n, _ in parallel.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert all(isinstance(v, DTensor) for v in parallel.state_dict().values())
    other = {n: v + 1 for n, v in model.state_dict().items()}
    parallel.load_state_dict(other)
    assert gap(parallel.full_state_dict(), other) == 0
    saved = {n: v.clone() for n, v in parallel.state_dict().items()}
    parallel.load_state_dict(model.state_dict())
    parallel.load_state_dict(saved)  # pieces, of the same mesh
    assert gap(parallel.full_state_dict(), other) == 0
    first = parallel.full_state_dict(rank0_only=True)
    assert bool(first) == (dist.get_rank() == 0)
    wrong = {**other, "middle.bias": torch.zeros(3)}
    wrong.pop("middle.weight")
    with pytest.raises(ValueError, match=r"\"middle.weight\".*size mismatch for middle.bias"):
        parallel.load_state_dict(wrong)
    assert gap(parallel.full_state_dict(), other) == 0
    parallel.train_step(**part(tokens(), sizes))
    found = parallel.full_gradients()
    assert {n: g.shape for n, g in found.items()} == {n: p.shape for n, p in model.named_parameters()}


def test_states_have_the_original_names() -> None:
    run_ranks(4, states)


# --- transformers -------------------------------------------------------------------------------------


def llama(sizes: dict[str, int], **changes: Any) -> tuple[nn.Module, dict[str, Tensor], autopar.ParallelModule]:
    model, batch = tiny("llama", layers=1)[0], TINY["llama"].batch(4, 8)
    mask = torch.ones(4, 8, dtype=torch.int64)
    mask[0, 5:], mask[3, 2:] = 0, 0  # padding on the right
    batch |= {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}
    mesh = autopar.init_mesh("cpu", 30.0, **sizes)
    return model, batch, autopar.parallelize(model, mesh, lift_to_float64=True, **changes)


def model_output() -> None:
    sizes = {"dp": 2}
    model, batch, parallel = llama(sizes, zero=3)
    with LiftFloat32():
        expected = model(**batch)
        expected.loss.backward()
    out = parallel(**part(batch, sizes))
    assert isinstance(out, CausalLMOutputWithPast)
    out.loss.backward()
    assert abs(float(out.loss.detach()) - float(expected.loss)) < EXACT
    assert gap(parallel.full_gradients(), gradients(model)) < EXACT
    keep = batch["attention_mask"].bool()  # what a fully padded query gives is nobody's business
    assert torch.allclose(out.logits.full_tensor()[keep], expected.logits[keep], atol=EXACT)
    assert parallel.config is model.config, "who changes one changes the other"


def test_model_outputs_and_padding_masks() -> None:
    run_ranks(2, model_output)


def from_meta() -> None:
    sizes = {"tp": 2}
    source, batch = tiny("llama", layers=1)[0], TINY["llama"].batch(4, 8)
    with torch.device("meta"):
        model = type(source)(source.config).double().train()
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    mesh = autopar.init_mesh("cpu", 30.0, **sizes)
    parallel = autopar.parallelize(model, mesh, lift_to_float64=True)
    with pytest.raises(ValueError, match=r"needs weights.*load_pretrained"):
        parallel.train_step(**batch)
    parallel.load_state_dict(source.state_dict())
    with LiftFloat32():
        loss = source(**batch).loss
        loss.backward()
    found = parallel.train_step(**batch)
    # The rotary table of the source was rounded to float32 on its way to float64.
    assert abs(float(found) - float(loss)) < 1e-6
    assert gap(parallel.full_gradients(), gradients(source)) < 1e-6


def test_a_model_on_the_meta_device_gets_its_weights_later() -> None:
    run_ranks(2, from_meta)


def inductor() -> None:
    sizes = {"tp": 2}
    batch = TINY["llama"].batch(2, 8)
    losses, found = [], []
    for backend in ("eager", "inductor"):
        mesh = autopar.init_mesh("cpu", 30.0, **sizes)
        parallel = autopar.parallelize(TINY["llama"].build(), mesh, lift_to_float64=True, backend=backend)
        losses.append(float(parallel.train_step(**batch)))
        found.append(parallel.full_gradients())
    assert abs(losses[0] - losses[1]) < EXACT
    assert gap(found[0], found[1]) < EXACT


@pytest.mark.full  # takes minutes; tests/runtime/test_bind.py has inductor on single graphs
def test_inductor_equals_eager() -> None:
    run_ranks(2, inductor, timeout=250)


def needs_example() -> str:
    mesh = autopar.init_mesh("cpu", 30.0, dp=2)
    with pytest.raises(ValueError, match=r"needs to know the inputs of Net.*example_batch"):
        autopar.parallelize(build(Net), mesh)
    return "refused"


def test_a_plain_module_needs_an_example() -> None:
    assert run_ranks(2, needs_example) == ["refused"] * 2
