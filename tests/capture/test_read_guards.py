"""What a forward reads beside its arguments is compared at every step: what changes is seen, and nothing else."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

import autopar
from autopar.capture.reads.forward_reads import ForwardReads
from autopar.capture.reads.read_guards import ReadGuards, Where
from autopar.models.tiny import TINY
from autopar.runtime.guards.module_guards import ModuleGuards
from autopar.runtime.guards.step_cache import STATES
from tests.support.capture_cache import captured_by_each
from tests.support.ranks import refusal, run_ranks
from tests.support.subjects import tiny

GAIN = 1.0
OTHER = 1.0
SETTINGS = types.SimpleNamespace(gain=1.0, unread=0)
VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("gain", default=1.0)


class Net(nn.Module):
    """A layer and a factor that is read somewhere."""

    def __init__(self, read: Callable[[Any], Any], **held: Any) -> None:
        super().__init__()
        self.layer, self.read = nn.Linear(4, 4), read
        self.__dict__.update(held)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.read(self)).square().sum()


BATCH = {"x": torch.linspace(0, 1, 8, dtype=torch.float64).reshape(2, 4)}


def put(read: Callable[[Any], Any], **held: Any) -> tuple[Net, Any]:
    """A model, and the same on a mesh of one rank."""
    torch.manual_seed(0)
    model = Net(read, **held).double()
    return model, autopar.parallelize(model, autopar.init_mesh("cpu"), example_batch=BATCH)


def as_at_first() -> None:
    globals().update(GAIN=1.0, OTHER=1.0)
    vars(SETTINGS).update(gain=1.0, unread=0)
    VARIABLE.set(1.0)


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    yield
    as_at_first()


# --- guards -----------------------------------------------------------------------------------------------


def guarded(x: Any) -> ReadGuards:
    guards, where = ReadGuards(), Where("CFG", "a.py")
    if isinstance(x, (list, dict, set, deque)):
        guards.container(x, where)
    else:
        guards.contents(x, where) if isinstance(x, (numpy.ndarray, bytearray)) else guards.attributes(
            vars(x), [*vars(x)], where
        )
    guards.done()
    return guards


@pytest.mark.parametrize(
    ("x", "change"),
    [
        (types.SimpleNamespace(a=1), lambda x: setattr(x, "a", True)),
        (types.SimpleNamespace(a=1), lambda x: setattr(x, "a", 1.0)),
        (types.SimpleNamespace(a=0.0), lambda x: setattr(x, "a", -0.0)),
        (types.SimpleNamespace(a="x"), lambda x: setattr(x, "a", "y")),
        (types.SimpleNamespace(a=1), lambda x: delattr(x, "a")),
        (types.SimpleNamespace(a=(1, (2, 3))), lambda x: setattr(x, "a", (1, (2, 4)))),
        (types.SimpleNamespace(a=torch.ones(1)), lambda x: setattr(x, "a", torch.ones(1))),
        ([1, 2], lambda x: x.append(3)),
        ([1, 2], lambda x: x.__setitem__(0, 1.0)),
        ({"a": 1, "b": 2}, lambda x: x.update(a=x.pop("a"))),  # another order
        ({"a": 1}, lambda x: x.update(a=2)),
        ({1, 2}, lambda x: x.add(3)),
        (deque([1, 2]), lambda x: x.rotate(1)),
        (OrderedDict(a=1, b=2), lambda x: x.move_to_end("a")),
        (numpy.ones(3), lambda x: x.fill(2)),
        (numpy.zeros(3), lambda x: x.fill(-0.0)),
        (bytearray(3), lambda x: x.__setitem__(0, 1)),
    ],
)  # fmt: skip
def test_a_change_is_seen_and_named(x: Any, change: Callable[[Any], Any]) -> None:
    guards = guarded(x)
    assert guards.holds() and not guards.changed()
    change(x)
    with contextlib.suppress(AttributeError, KeyError):  # what is gone
        assert not guards.holds()
    assert str(guards.changed()[0]).startswith("CFG") and str(guards.changed()[0]).endswith(" of a.py")


class Held:
    """An object with attributes."""

    gain: Any = 1.0

    def __init__(self) -> None:
        self.factor: Any = 1.0


def _put_attribute(x: Any, value: Any) -> None:
    x.factor = value  # one instruction for all calls, which Python specializes


@pytest.mark.parametrize("write", [_put_attribute, lambda x, v: vars(x).update(factor=v), object.__setattr__])
def test_every_write_to_an_attribute_is_seen(write: Callable[..., Any]) -> None:
    held, watch = Held(), ReadGuards()
    put = functools.partial(write, held, "factor") if write is object.__setattr__ else functools.partial(write, held)
    for number in range(20):
        put(float(number))
    watch.attributes(vars(held), ["factor"], Where("held", "here"))
    watch.done()
    for number in range(100, 120):
        put(float(number))
        assert not watch.holds()
    put(19.0)
    assert watch.holds()


def test_writes_to_classes_and_files_are_seen_and_writes_beside_are_none() -> None:
    kind, names = type("Kind", (Held,), {"gain": 1.0}), {"gain": 1.0, "loss": 0}
    watch = ReadGuards()
    watch.attributes(vars(kind), ["gain"], Where("Kind", "here"), new={"bias"})
    watch.attributes(names, ["gain"], Where("", "here"), new={"bias"})
    watch.done()
    for put in (functools.partial(setattr, kind), names.__setitem__):
        for value in range(20):
            put("loss", value)
            assert watch.holds()
            put("gain", True)
            assert not watch.holds()
            put("gain", 1.0)
            assert watch.holds()
    names["bias"] = names.pop("loss")  # as many names as before
    assert not watch.holds()


def test_what_is_equal_holds() -> None:
    held = types.SimpleNamespace(number=1000.5, text="ab", nothing=float("nan"), pair=(1.5, "ab"), item=numpy.int64(3))
    guards = guarded(held)
    vars(held).update(
        number=float("1000.5"), text="".join("ab"), nothing=float("nan"), pair=(float("1.5"), "ab"),
        item=numpy.int64(3),
    )  # fmt: skip
    assert guards.holds() and guards.holds()
    held.unread = 1
    assert guards.holds()


def test_an_equal_container_in_its_place_is_watched_from_then_on() -> None:
    model = Net(lambda m: sum(m.sizes), sizes=[1.0, 2.0])
    watch = ModuleGuards(model)
    model.sizes = [1.0, 2.0]
    assert watch.holds() and watch.holds()
    model.sizes[0] = 3.0
    assert not watch.holds() and watch.changed() == "attribute sizes[0] of Net"
    model.sizes[0] = 1.0
    assert watch.holds()


# --- what is read -----------------------------------------------------------------------------------------


def test_what_no_code_reads_is_not_compared() -> None:
    vocabulary = {str(i): i for i in range(100_000)}
    unread = ForwardReads(Net(lambda m: 1.0, vocabulary=vocabulary, settings=SETTINGS)).guards
    read = ForwardReads(Net(lambda m: m.vocabulary["7"], vocabulary=vocabulary)).guards
    assert unread.count < 1000 and read.count > 200_000
    SETTINGS.unread, vocabulary["7"] = 1, -1
    assert unread.holds() and not read.holds()
    assert [str(where) for where in read.changed()] == ["attribute vocabulary['7'] of Net"]


def test_of_all_loaded_files_only_those_that_a_text_names_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(300):
        module = types.ModuleType(f"somebodys_{i}")
        vars(module).update({f"value_{k}": [k] for k in range(100)})
        monkeypatch.setitem(sys.modules, module.__name__, module)
    by_name = ForwardReads(Net(lambda m: sys.modules["somebodys_7"].value_1[0])).guards
    assert by_name.count < 2000
    monkeypatch.setitem(sys.modules, "imported_between_two_steps", types.ModuleType("imported_between_two_steps"))
    assert by_name.holds()
    monkeypatch.setattr("somebodys_7.value_1", [2.0])
    assert not by_name.holds() and "value_1 of somebodys_7" in str(by_name.changed()[0])


def inner(name: str) -> float:
    return float(getattr(SETTINGS, name))


def by_text(m: Any) -> float:
    return inner("ga" + "in")


def imports(m: Any) -> float:
    from tests.capture import test_read_guards

    return test_read_guards.OTHER


@pytest.mark.parametrize(
    ("read", "change", "name"),
    [
        (lambda m: GAIN, lambda: globals().update(GAIN=2.0), "GAIN of test_read_guards.py"),
        (by_text, lambda: setattr(SETTINGS, "gain", 2.0), "SETTINGS.gain of test_read_guards.py"),
        (imports, lambda: globals().update(OTHER=2.0), "OTHER of test_read_guards.py"),
        (lambda m: VARIABLE.get(), lambda: VARIABLE.set(2.0), "VARIABLE of test_read_guards.py"),
        (functools.lru_cache(lambda m: GAIN), lambda: globals().update(GAIN=2.0), "GAIN of test_read_guards.py"),
    ],
    ids=["global", "by text", "imported", "context", "cached"],
)
def test_reads_are_named(read: Any, change: Callable[[], Any], name: str) -> None:
    guards = ForwardReads(Net(read)).guards
    assert guards.holds()
    change()
    assert not guards.holds() and str(guards.changed()[0]) == name


# --- steps ------------------------------------------------------------------------------------------------


def a_change_back_finds_the_old_step() -> None:
    model, parallel = put(lambda m: GAIN * SETTINGS.gain)
    for gain, steps in ((1.0, 1), (2.0, 2), (1.0, 2), (2.0, 2), (3.0, 3), (1.0, 3)):
        globals().update(GAIN=gain)
        SETTINGS.unread += 1
        assert abs(float(parallel.train_step(**BATCH)) - float(model(**BATCH))) < 1e-12
        assert len(parallel.compiled()) == steps


def a_change_before_the_first_step_counts() -> None:
    model, parallel = put(lambda m: GAIN)
    globals().update(GAIN=2.0)
    assert abs(float(parallel.train_step(**BATCH)) - float(model(**BATCH))) < 1e-12
    assert abs(float(parallel.eval_step(**BATCH)) - float(model(**BATCH))) < 1e-12
    globals().update(GAIN=3.0)
    assert abs(float(parallel.eval_step(**BATCH)) - float(model(**BATCH))) < 1e-12


def a_change_at_every_step_is_told_by_name() -> None:
    _, parallel = put(lambda m: GAIN)
    with pytest.warns(
        UserWarning, match=f"compiled for the {STATES + 1}th time .* GAIN of test_read_guards.py; move what"
    ):
        for step in range(STATES + 1):
            globals().update(GAIN=float(step))
            parallel.train_step(**BATCH)


def models_have_guards_of_their_own() -> None:
    one, two = put(lambda m: GAIN), put(lambda m: OTHER)
    for _, parallel in (one, two):
        parallel.train_step(**BATCH)
    globals().update(GAIN=2.0)
    for model, parallel in (one, two):
        assert abs(float(parallel.train_step(**BATCH)) - float(model(**BATCH))) < 1e-12
    assert len(one[1].compiled()) == 2 and len(two[1].compiled()) == 1


def counter() -> tuple[Callable[[Any], float], Callable[[], None]]:
    gain = 1.0

    def read(m: Any) -> float:
        return gain

    def write() -> None:
        nonlocal gain
        gain += 1

    return read, write


def what_is_no_part_of_the_model_is_shared_with_the_user() -> None:
    config, teacher, (read, write) = types.SimpleNamespace(gain=1.0), nn.Dropout(), counter()
    model, parallel = put(lambda m: m.config.gain * read(m) * (1 + m.kept[0].training), config=config, kept=[teacher])
    parallel.train_step(**BATCH)
    assert parallel.config is config and parallel.kept[0] is teacher and parallel.layer is not model.layer
    for change in (lambda: setattr(config, "gain", 2.0), write, teacher.eval):
        change()
        assert abs(float(parallel.train_step(**BATCH)) - float(model(**BATCH))) < 1e-12
    layer = nn.Linear(4, 4)
    _, other = put(lambda m: m.config.gain, config=config, holds=[layer])
    assert other.config is config and other.holds[0] is layer, "registered nowhere"
    model.holds = [model.layer]
    other = autopar.parallelize(model, autopar.init_mesh("cpu"), example_batch=BATCH)
    assert other.holds[0] is other.layer is not model.layer, "of what reaches a weight there is a copy"


def iterators_that_are_held_are_told_and_those_that_advance_refused() -> None:
    with pytest.raises(ValueError, match="capture: the forward takes items from count while it is"):
        put(lambda m: next(m.count), count=itertools.count())
    with pytest.warns(UserWarning, match="may read attribute count of Net, .* whose contents cannot be compared"):
        put(lambda m: 1.0 if m.count is None else 2.0, count=itertools.count())


def what_a_forward_changes_elsewhere_is_told() -> None:
    def moves(m: Any) -> float:
        SETTINGS.unread += 1
        return 1.0

    with pytest.warns(UserWarning, match="the forward changes Python state: SETTINGS.unread of test_read_guards.py"):
        _, parallel = put(moves)
        for _ in range(3):
            parallel.train_step(**BATCH)
    assert len(parallel.compiled()) == 1


def what_cannot_be_copied_is_shared() -> None:
    class Stubborn:
        gain = 2.0

        def __deepcopy__(self, memo: Any) -> Any:
            raise KeyError("a connection")

    model, parallel = put(lambda m: m.held.gain, held=Stubborn())
    assert abs(float(parallel.train_step(**BATCH)) - float(model(**BATCH))) < 1e-12


def functions_of_a_library_are_guarded() -> None:
    model, batch = tiny("llama", layers=1)[0], TINY["llama"].batch(2, 8)
    parallel = autopar.parallelize(model, autopar.init_mesh("cpu"))
    as_alone = [float(model(**batch).loss)]
    found = [float(parallel.train_step(**batch))]
    with patch.object(modeling_llama, "apply_rotary_pos_emb", lambda q, k, *rest, **how: (q * 2, k)):
        as_alone.append(float(model(**batch).loss))
        found.append(float(parallel.train_step(**batch)))
    found.append(float(parallel.train_step(**batch)))
    assert len(parallel.compiled()) == 2 and abs(found[0] - found[1]) > 1e-6
    assert max(abs(a - b) for a, b in zip(found, [*as_alone, as_alone[0]])) < 1e-6


STEPS = [
    a_change_back_finds_the_old_step,
    a_change_before_the_first_step_counts,
    a_change_at_every_step_is_told_by_name,
    models_have_guards_of_their_own,
    what_is_no_part_of_the_model_is_shared_with_the_user,
    iterators_that_are_held_are_told_and_those_that_advance_refused,
    what_a_forward_changes_elsewhere_is_told,
    what_cannot_be_copied_is_shared,
    functions_of_a_library_are_guarded,
]


def one(number: int) -> None:
    as_at_first()
    with captured_by_each():
        STEPS[number]()


@pytest.mark.parametrize("number", range(len(STEPS)), ids=[f.__name__ for f in STEPS])
def test_steps(number: int) -> None:
    run_ranks(1, one, number)


# --- ranks ------------------------------------------------------------------------------------------------


def other_gain(steps: int) -> list[str]:
    as_at_first()
    torch.manual_seed(0)
    parallel = autopar.parallelize(
        Net(lambda m: GAIN).double(), autopar.init_mesh("cpu", 30.0, dp=2), example_batch=BATCH
    )
    for _ in range(steps):
        parallel.train_step(**BATCH)
    globals().update(GAIN=1.0 + dist.get_rank())
    return [refusal(lambda: parallel.train_step(**BATCH))]


@pytest.mark.parametrize("steps", [0, 1])
def test_ranks_that_read_something_else_are_named(steps: int) -> None:
    """Before the first step what they compile differs, behind it the number of their state."""
    found = run_ranks(2, other_gain, steps, timeout=100)
    need = "the state that the modules are in: rank 1: 1; against rank 0: 0" if steps else "part 0 forward: rank 1: "
    assert all(need in text for (text,) in found), found
