"""State around a step that habits cannot say: memory that is copied, signatures, meshes of several ranks, what outlives
a capture."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import autopar
from autopar.capture.front_end import capture
from autopar.capture.layer_dedup.layer_signature import _reads_of
from autopar.capture.module_state.assigned import Assignment, BufferAlias
from autopar.capture.trace.op_decomposition import TensorMeta, record
from tests.compat import habit_kept
from tests.compat.habit_buffers import Body, assigned, made, written
from tests.compat.habit_models import batch
from tests.support.compile_cache import compiled_once
from tests.support.ranks import run_ranks


def captured(body: Body) -> Any:
    return capture(made(body), batch()).meta["signature"]


def test_signatures_tell_writes_from_assignments() -> None:
    wrote, bound = captured(written), captured(assigned)
    assert [(s.name, s.assigned) for s in wrote.outputs if s.kind == "mutation"] == [("c", False)]
    assert [(s.name, s.assigned) for s in bound.outputs if s.kind == "mutation"] == [("c", True)]
    assert wrote.assigned == () and bound.assigned == (Assignment("c", None, True, False, False),)
    (output,) = [s for s in bound.outputs if s.name == "buffer"]
    assert output.alias == BufferAlias("c", True, None)


def test_views_and_exchanges_are_told_by_memory() -> None:
    def body(m: Any, h: Tensor) -> Tensor:
        out = h * m.c + m.d
        m.c, m.d = m.d[:4], m.c
        return out * 1.0

    found = {a.name: a.alias for a in captured(body).assigned}
    assert found == {"c": BufferAlias("d", False, ((4,), (1,), 0)), "d": BufferAlias("c", False, None)}


@pytest.mark.parametrize(
    "name", ["in_a_dict", "in_a_list", "in_a_global", "in_a_class", "in_an_object", "in_a_default"]
)
def test_nothing_holds_a_fake_after_a_capture(name: str) -> None:
    captured(getattr(habit_kept, name))
    defaults = habit_kept.in_a_default.__defaults__ or ({},)
    held = [*habit_kept.CACHE.values(), *habit_kept.ENTRIES, *defaults[0].values(), habit_kept.ONE]
    held += [habit_kept.Held.mask, *vars(habit_kept.HELD).values()]
    assert not any(isinstance(x, FakeTensor) for x in held)


KEPT: dict[str, Any] = {"before": 1}


def test_nor_after_one_that_failed() -> None:
    def body(m: Any, h: Tensor) -> Tensor:
        KEPT["mask"] = habit_kept.triangle()
        return h * float(h.sum())

    with pytest.raises(ValueError, match=r"reads the value|reads a number from"):
        captured(body)
    assert KEPT == {"before": 1}


@functools.lru_cache(None)
def doubled(module: nn.Module) -> Tensor:
    return module.first.weight.detach() * 2  # type: ignore[union-attr, operator]


def test_a_cache_of_what_depends_on_weights_is_refused_and_emptied() -> None:
    with pytest.raises(
        ValueError, match=r"weights in the cache of tests.compat.test_buffers.doubled, outside of its modules"
    ):
        captured(lambda m, h: h * doubled(m).sum())
    assert doubled.cache_info().currsize == 0


def test_what_functions_read_is_known_without_keeping_them() -> None:
    def reads() -> Any:
        return KEPT

    gone = weakref.ref(reads)
    assert [name for _, name in _reads_of(reads)] == ["KEPT"]
    del reads
    assert gone() is None


def test_what_takes_a_tangent_is_of_the_backward() -> None:
    whole, diagonal = (TensorMeta(s, t, 0, torch.float64) for s, t in (((4, 4), (4, 1)), ((4,), (1,))))
    operator: Callable[..., Any] = torch.ops.aten.as_strided.default
    found = record(lambda x: operator(x, [4], [5], 0), [whole], [True], [diagonal], False)
    taken = {x.number for call in found.calls[: found.forward] for x in call.args if hasattr(x, "number")}
    assert 1 not in taken  # operands come first, then tangents


def on_two_ranks(body: Body, axis: str) -> list[Any]:
    """Buffers after three steps, each way, and whether an old one was left alone."""
    ranks = 2 if axis == "dp" else 1
    place = torch.distributed.get_rank() if axis == "dp" else 0
    own = {k: v.chunk(ranks)[place] for k, v in batch().items()}
    model: Any = autopar.parallelize(made(body), autopar.init_mesh(**{axis: 2}), example_batch=own)
    old = model.c
    before = old.clone()
    first = float(model.train_step(**own))
    if axis == "pp":
        model.train_step(**own)
        model.train_step(**own)
    else:
        one, two = model(**own), model(**own)
        (one["loss"] + two["loss"]).backward()
    grads = {n: g.sum().item() for n, g in model.full_gradients().items()}
    return [first, model.c.tolist(), bool((old == before).all()), grads]


def in_one_process(body: Body) -> list[Any]:
    model = made(body)
    old = model.c
    before = old.clone()
    first = model(**batch())["loss"]
    first.backward()
    more = [model(**batch())["loss"] for _ in range(2)]
    (more[0] + more[1]).backward()
    grads = {n: p.grad.sum().item() for n, p in model.named_parameters() if p.grad is not None}
    return [float(first.detach()), model.c.tolist(), bool((old == before).all()), grads]


@pytest.mark.parametrize("axis", ["dp", "tp", "pp"])
def test_buffers_on_two_ranks(axis: str) -> None:
    with compiled_once():
        for body in (written, assigned):
            expected = in_one_process(body)
            for found in run_ranks(2, on_two_ranks, body, axis):
                assert found[0] == pytest.approx(expected[0], abs=1e-10)
                assert found[1] == pytest.approx(expected[1], abs=1e-10)
                assert found[2] is expected[2]
                assert found[3] == pytest.approx({n: expected[3][n] for n in found[3]}, abs=1e-10)


def copies_of_a_step() -> list[str]:
    """Tensors that are kept from before a write: of the queue, none of the running statistics."""

    def body(m: Any, h: Tensor) -> Tensor:
        return written(m, m.bn(h))

    model: Any = autopar.parallelize(made(body), autopar.init_mesh(dp=1), example_batch=batch())
    found = []
    for _ in range(2):
        out = model(**batch())
        executor = model._cache.last
        kept = executor.run_forward({**model._tree.pieces(), **model._tree.buffers(), **executor.constants, **batch()})
        found.append(sorted(kept[1].kept))
        out["loss"].backward()
    return found[-1]


def test_only_what_somebody_reads_is_kept() -> None:
    assert run_ranks(1, copies_of_a_step) == [["c"]]


def kept_output(model: Any) -> list[float]:
    """A buffer that was returned, after it was given other data and a step has written to that."""
    kept = model(**batch())["buffer"]
    model.c.data = torch.full_like(model.c, 0.25)
    model(**batch())
    return list(getattr(kept, "full_tensor", lambda: kept)().tolist())


def kept_output_on_ranks(axis: str) -> list[float]:
    mesh = autopar.init_mesh("cpu", 30.0, **{axis: torch.distributed.get_world_size()})
    return kept_output(autopar.parallelize(made(written), mesh, example_batch=batch()))


@pytest.mark.parametrize(("axis", "ranks"), [("dp", 1), ("dp", 2)])
def test_an_output_that_is_a_buffer_stays_that_buffer(axis: str, ranks: int) -> None:
    for found in run_ranks(ranks, kept_output_on_ranks, axis):
        assert found == pytest.approx(kept_output(made(written)), abs=1e-12)
