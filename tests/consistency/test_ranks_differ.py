"""Ranks that were given different weights, options or batches: refused, or made equal."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import GraphModule

import autopar
from autopar.runtime.consistency import batch_checks
from autopar.runtime.consistency.exit_checks import found_at_end
from autopar.runtime.consistency.tensor_hash import CHUNK, hash_of, hashes_of
from autopar.runtime.fault.store_barrier import differences
from autopar.steps.graphs import Compiled
from tests.support.compile_cache import compiled_by_each
from tests.support.launched import serve
from tests.support.plain_models import (
    EXACT,
    Metric,
    Net,
    Normed,
    Tied,
    build,
    gap,
    gradients,
    numbers,
    part,
    put,
    tokens,
)
from tests.support.ranks import refusal, run_ranks

# --- words of contents ------------------------------------------------------------------------------------


def test_words_depend_on_bits_and_places_alone() -> None:
    x = torch.randn(6, 10, dtype=torch.float64)
    same = [x, x.clone(), x.t().contiguous().t(), x.expand(2, 6, 10)[1], torch.cat([x[:1], x])[1:], nn.Parameter(x)]
    assert len(set(hashes_of({str(i): y for i, y in enumerate(same)}).values())) == 1
    changed = [x]
    for i in (0, 7, 59):
        changed.append(x.clone())
        changed[-1].view(-1)[i] = torch.nextafter(x.view(-1)[i], torch.tensor(9.0, dtype=x.dtype))
    changed += [
        -x,
        x.flip(0),
        x.roll(1, 1),
        torch.where(torch.arange(10) < 2, -x, x),
        x * float("nan"),
        0 * x,
        -0.0 * x,
    ]
    assert len(set(hashes_of({str(i): y for i, y in enumerate(changed)}).values())) == len(changed)


def test_words_of_every_dtype_and_size() -> None:
    dtypes = [torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn, torch.bfloat16,
              torch.float16, torch.float32, torch.complex64, torch.complex128]  # fmt: skip
    for dtype in dtypes:
        for n in (1, 3, 8, 4 * CHUNK["cpu"] + 5):
            x = torch.arange(n).remainder(2).to(dtype)
            for i in {0, n // 2, n - 1}:
                other = x.clone()
                other[i] = 1 - int(x[i].real if x.is_complex() else x[i])
                assert hash_of(other) != hash_of(x), (dtype, n, i)
    assert int(hash_of(torch.zeros(0))) == 0 == int(hash_of(torch.zeros(5)))
    conjugate = torch.tensor([1 + 2j]).conj()
    assert hash_of(conjugate) == hash_of(conjugate.resolve_conj()) != hash_of(conjugate.conj())


def test_long_texts_are_cut_to_where_they_differ() -> None:
    long = [str(i) for i in range(2000)]
    texts = ["\n" + " ".join(x) for x in (long, long, [*long[:900], "other", *long[901:]])]
    assert differences([4, 5, 6], ["\nshort", "\nshort", "\nlong"]) == "rank 6: long; against rank 4, 5: short"
    found = differences([4, 5, 6], texts)
    assert "rank 6: ..." in found and "899 other 901" in found and "899 900 901" in found and len(found) < 500
    assert differences([4, 5], [texts[0], texts[0] + "!"]).endswith("1998 1999")


# --- weights ----------------------------------------------------------------------------------------------


def seeded(kind: type[nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return kind().double()


def weights_differ() -> list[str]:
    mesh, batch, rank = autopar.init_mesh("cpu", 30.0, dp=2, tp=2), numbers(), dist.get_rank()

    def put(model: nn.Module, **how: Any) -> Any:
        return autopar.parallelize(model, mesh, example_batch=part(batch, {"dp": 2, "tp": 2}), **how)

    found = [refusal(put, seeded(Net, rank // 2)), refusal(put, build(Net), seed=rank // 3)]
    bent = build(Net)
    with torch.no_grad():
        bent.head.bias[3] += 1e-12 * (rank == 1)
    found.append(refusal(put, bent))
    stats = build(Normed)
    stats.norm.running_mean[2] = rank
    images = {"images": torch.randn(2, 3, 5, 5, dtype=torch.float64), "labels": torch.zeros(2, dtype=torch.int64)}
    found.append(refusal(autopar.parallelize, stats, mesh, example_batch=images))
    with torch.device("meta" if rank == 3 else "cpu"):
        partly = Net().double()
    torch.manual_seed(0)
    found.append(refusal(put, partly))
    found.append(refusal(put, Net().to("meta"), broadcast_weights=True))

    found.append(refusal(put, build(Metric if rank == 2 else Tied)))

    module = put(build(Net).to("meta"))
    found.append(refusal(module.load_state_dict, seeded(Net, rank).state_dict()))
    module.load_state_dict(build(Net).state_dict())
    return found


def test_different_weights_are_refused_on_every_rank() -> None:
    every = run_ranks(4, weights_differ)
    assert all(found == every[0] for found in every)
    seeds, seed, bias, buffer, meta, no_source, model, loaded = every[0]
    assert re.search(
        r"same weights, found first.weight: rank 2, 3: \w+; against rank 0, 1: .*second.weight: .*more\)", seeds
    )
    assert "torch.manual_seed" in seeds and "broadcast_weights=True" in seeds and "load_pretrained" in seeds
    assert "same options, found seed: rank 3: 1; against rank 0, 1, 2: 0" in seed
    assert re.search(r"same weights, found head.bias: rank 1: \w+; against rank 0, 2, 3: \w+; set the same seed", bias)
    assert "found norm.running_mean: rank 1: " in buffer
    assert "first.weight: rank 3: no values; against" in meta
    assert (
        "broadcast_weights=True takes the weights of rank 0, found first.weight on the meta device there" in no_source
    )
    assert "the same model, found embed.weight: rank 2: nothing; against rank 0, 1, 3: (16, 12) torch.float64" in model
    assert loaded.startswith("load_state_dict: every rank must be given the same values, found ")


def synchronised(sizes: dict[str, int], kind: type[nn.Module]) -> None:
    """Rank 0 has the weights; others have their own, and the last one none."""
    rank = dist.get_rank()
    model = build(kind)
    with torch.device("meta" if rank == 1 else "cpu"):
        mine = model if rank == 0 else seeded(kind, rank)
    before = {n: p.clone() for n, p in mine.named_parameters()}
    batch = numbers() if kind is Net else tokens()
    mesh = autopar.init_mesh("cpu", 30.0, **sizes)
    parallel = autopar.parallelize(
        mine, mesh, example_batch=part(batch, sizes), lift_to_float64=True, zero=3, broadcast_weights=True
    )
    assert all(p.is_meta or torch.equal(p, before[n]) for n, p in mine.named_parameters())
    output = model(**batch)
    expected = output if isinstance(output, Tensor) else output["loss"]
    expected.backward()
    assert abs(float(parallel.train_step(**part(batch, sizes))) - float(expected)) < EXACT
    assert gap(parallel.full_gradients(), gradients(model)) < EXACT
    assert gap(parallel.full_state_dict(), dict(model.state_dict())) == 0


def test_sync_gives_every_rank_the_weights_of_the_first() -> None:
    run_ranks(2, synchronised, {"dp": 2}, Tied)
    run_ranks(4, synchronised, {"dp": 2, "tp": 2}, Net)


def synchronised_buffers() -> None:
    model, rank = build(Normed), dist.get_rank()
    with torch.no_grad():
        model.norm.running_mean += 1 + rank
    images = {"images": torch.randn(2, 3, 5, 5, dtype=torch.float64), "labels": torch.zeros(2, dtype=torch.int64)}
    module = autopar.parallelize(
        model, autopar.init_mesh("cpu", 30.0, dp=2), example_batch=images, broadcast_weights=True
    )
    assert module.norm.running_mean.eq(1).all() and model.norm.running_mean.eq(1 + rank).all()
    assert module.norm.num_batches_tracked.dtype == torch.int64


def test_sync_takes_the_buffers_too() -> None:
    run_ranks(2, synchronised_buffers)


# --- calls ------------------------------------------------------------------------------------------------


def calls_differ(sizes: dict[str, int], folder: str) -> dict[str, str]:
    """Two ranks in different calls: the error of each. Nothing is changed, and the same calls work afterwards."""
    last = dist.get_rank() == 1
    module, mine = put(build(Net), numbers(), sizes), part(numbers(), sizes)
    module.train_step(**mine)
    before, state = module.full_gradients(), module.full_state_dict()
    found = {
        "max_norm": refusal(module.clip_grad_norm_, 0.1 if last else 0.01),
        "norm_type": refusal(module.clip_grad_norm_, 0.1, 1.0 if last else 2.0),
        "full_gradients": refusal(module.full_gradients if last else module.full_state_dict),
        "folder": refusal(module.save_pretrained, f"{folder}/{last}"),
        "first.bias: rank 1: nothing": refusal(
            module.load_state_dict, {n: x + 1 for n, x in state.items() if not (last and n == "first.bias")}, False
        ),
    }
    call = module.train_step if last else module.eval_step
    found["found the call: rank 1: train_step; against rank 0: eval_step"] = refusal(call, **mine)
    kept, module.first.bias.grad = module.first.bias.grad, None if last else module.first.bias.grad
    found["first.bias: rank 1: nothing; "] = refusal(module.full_gradients)
    module.first.bias.grad = kept
    assert not any(Path(folder).iterdir())
    assert all(torch.equal(x, before[n]) for n, x in module.full_gradients().items())
    assert all(torch.equal(x, state[n]) for n, x in module.full_state_dict().items())
    module.clip_grad_norm_(0.1)
    return found


def test_ranks_that_make_different_calls_are_told(tmp_path: Path) -> None:
    for sizes in ({"dp": 2}, {"tp": 2}):
        first, second = run_ranks(2, calls_differ, sizes, str(tmp_path))
        for what, text in first.items():
            assert what in text and "rank 1" in text and second[what] == text, (what, text, second[what])


def compared_later() -> list[str]:
    """Batches whose values the host does not wait for: at once in the first step, one step later in the others."""
    module, mine = put(build(Net), numbers(), {"tp": 2}), numbers()
    other = {name: x + dist.get_rank() if x.is_floating_point() else x for name, x in mine.items()}
    with patch.object(batch_checks, "_arrives", lambda x: True):
        given = [other, mine, other, mine, mine, other, mine]
        return [refusal(module.train_step, **batch) for batch in given] + [refusal(module.eval_step, **mine)]


def test_batches_on_an_accelerator_are_compared_without_waiting() -> None:
    first, second = run_ranks(2, compared_later)
    assert first == second
    now = "batch: the ranks of 'tp' must be given the same batch, found"
    before = "batch: the ranks of 'tp' must be given the same batch, in the step before, found"
    expected = [now, "no error", "no error", before, "no error", "no error", before, "no error"]
    assert [text[: len(start)] for text, start in zip(first, expected, strict=True)] == expected


def compared_by_other_calls(folder: str) -> dict[str, list[str]]:
    """A step whose batch differs, then a call of each kind, then the same call once more."""
    module, mine = put(build(Net), numbers(), {"tp": 2}), numbers()
    other = {name: x + dist.get_rank() if x.is_floating_point() else x for name, x in mine.items()}
    module.train_step(**mine)
    state, found = module.full_state_dict(), {}
    calls: dict[str, Callable[[], Any]] = {
        "clip": lambda: module.clip_grad_norm_(1.0), "gradients": module.full_gradients,
        "eval": lambda: module.eval_step(**mine),
        "whole state": module.full_state_dict, "save": lambda: module.save_pretrained(folder),
        "load": lambda: module.load_state_dict(state), "end": ended,
    }  # fmt: skip
    with patch.object(batch_checks, "_arrives", lambda x: True):
        module.eval_step(**mine)
        for name, call in calls.items():
            said = [refusal(module.train_step, **given) for given in (mine, other)]
            found[name] = [*said, refusal(call), refusal(call)]
    return found


def ended() -> None:
    if found := found_at_end():
        raise ValueError(found)


def test_the_batch_of_the_last_step_is_compared_by_what_comes_next(tmp_path: Path) -> None:
    first, second = run_ranks(2, compared_by_other_calls, str(tmp_path))
    need = "batch: the ranks of 'tp' must be given the same batch, in the step before, found x"
    for name, (*steps, once, again) in first.items():
        assert steps == ["no error", "no error"] == second[name][:2], (name, steps)
        if name == "end":  # the rank that comes second reports it
            assert "no error" in (once, second[name][2])
            once = max(once, second[name][2], key=len)
            assert re.search("ranks (0 and 1|1 and 0) differ; feed every rank the batch of its dp coordinate", once)
        else:
            assert second[name][2] == once
        assert once.startswith(need), (name, once)
        assert again == second[name][3] == "no error", name


def ends_after_a_step(where: str) -> None:
    """A program on two ranks, as under torchrun: its last step has a batch that differs."""
    with patch.object(batch_checks, "_arrives", lambda x: True):
        module = put(build(Net), numbers(), {"tp": 2})
        module.train_step(**numbers())
        module.train_step(**{n: x + dist.get_rank() if x.is_floating_point() else x for n, x in numbers().items()})
        if where == "raises":
            raise RuntimeError("its own")


def test_a_program_that_ends_says_it() -> None:
    serve()
    with pytest.raises(RuntimeError, match="batch: the ranks of 'tp' must be given the same batch, in the step before"):
        autopar.launch(functools.partial(ends_after_a_step, "returns"), nproc=2)
    with pytest.raises(RuntimeError, match="its own") as caught:
        autopar.launch(functools.partial(ends_after_a_step, "raises"), nproc=2)
    assert "in the step before" not in str(caught.value)


# --- compiled steps ---------------------------------------------------------------------------------------


class Masked(nn.Module):
    """A mean over the labels that count, which microbatches share: a prologue. Its table is a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 12), nn.Linear(12, 16)
        self.table = torch.full((12,), 0.5, dtype=torch.float64)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.embed(tokens)) * self.table)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def bent(graph: GraphModule) -> None:
    """Its last operator is done to the first operand's negative."""
    node = next(n for n in reversed(graph.graph.nodes) if n.op == "call_function" and n.all_input_nodes)
    with graph.graph.inserting_before(node):
        other = graph.graph.call_function(torch.ops.aten.neg.default, (node.all_input_nodes[0],))
    node.replace_input_with(node.all_input_nodes[0], other)
    graph.recompile()


def swap_last_actions(compiled: Compiled) -> None:
    assert compiled.pipeline is not None
    first, *others = compiled.pipeline.order.ranks
    order = dataclasses.replace(compiled.pipeline.order, ranks=((*first[:-2], first[-1], first[-2]), *others))
    compiled.pipeline.order = order


def lift_constant(compiled: Compiled) -> None:
    constants = compiled.local.meta["constants"]
    constants["table"] = constants["table"] + 1e-12


PLANTED: dict[str, Callable[[Any], Any]] = {
    "part 0 forward": lambda c: bent(c.stage.forward.graph),
    "part 0 backward": lambda c: bent(c.stage.backward.graph),
    "part 0 backward_reduce": lambda c: bent(c.stage.backward_reduce.graph),
    "prologue": lambda c: bent(c.prologue.graph),
    "part 0 losses": lambda c: c.stage.losses.append("output:0"),
    "the contents of the constant table": lift_constant,
}
IN_PIPELINES: dict[str, Callable[[Any], Any]] = {
    "order": swap_last_actions,
    "edges": lambda c: c.pipeline.edges.pop(),
    "prologue": lambda c: bent(c.prologue.graph),
    "part 0 backward_weight": lambda c: bent(c.pipeline.parts[0].backward_weight.graph),
    "part 1 backward_input": lambda c: bent(c.pipeline.parts[1].backward_input.graph),
    "part 1 reduce": lambda c: bent(c.pipeline.parts[1].reduce.graph),
    "part 0 gather": lambda c: bent(c.pipeline.parts[0].gather.graph),
    "part 1 losses": lambda c: c.pipeline.parts[1].losses.clear(),
}


def one_compiles_otherwise(sizes: dict[str, int], options: dict[str, Any], pipeline: bool) -> dict[str, str]:
    """Planted on the last rank, in what its compiler makes; nothing may be sent or stored. Then an honest step."""
    batch, me = tokens(), dist.get_rank()
    mine = {k: v.chunk(2)[me % 2] for k, v in batch.items()}
    module = autopar.parallelize(build(Masked), autopar.init_mesh("cpu", 30.0, **sizes), example_batch=mine, **options)
    honest, made = module._cache._compiler, []
    found = {}
    for name, plant in (IN_PIPELINES if pipeline else PLANTED).items():

        def compiler(*args: Any, plant: Callable[[Any], Any] = plant, **how: Any) -> Compiled:
            if not made:
                with compiled_by_each():
                    made.append(honest(*args, **how))
            mine = copy.deepcopy(made[0])
            if me == dist.get_world_size() - 1:
                plant(mine)
            return mine

        module._cache._compiler = compiler
        found[name] = refusal(module.train_step, **mine)
        assert not module.traffic() and all(p.grad is None for p in module.parameters())
    module._cache._compiler = lambda *args, **how: made[0]
    module.train_step(**mine)
    return found


def check_planted(every: list[dict[str, str]]) -> None:
    last = len(every) - 1
    for name, text in every[0].items():
        assert all(found[name] == text for found in every)
        assert f"the compiled step must be the same on all ranks, found {name}: rank {last}" in text, (name, text)


def test_a_rank_that_compiled_something_else_is_stopped_before_anything_runs() -> None:
    check_planted(run_ranks(2, one_compiles_otherwise, {"dp": 2}, {"microbatches": 2}, False, timeout=200))


def test_a_rank_that_compiled_another_pipeline_is_stopped_before_anything_runs() -> None:
    options = {"microbatches": 2, "schedule": "zb_h1", "zero": 1}
    check_planted(run_ranks(4, one_compiles_otherwise, {"pp": 2, "dp": 2}, options, True, timeout=300))
