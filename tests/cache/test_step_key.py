"""The key of a step: equal for a model that is captured again, another one for whatever may decide what compiling makes
of it, and none where that is unknown."""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopar.ac_policies import AC_POLICIES
from autopar.cache import own_sources
from autopar.cache.own_sources import changed_autopar
from autopar.cache.step_key import step_key
from autopar.cache.value_codec import Unstorable
from autopar.capture.front_end import capture
from autopar.chips import CHIPS
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.passes import pipelines
from autopar.passes.autodiff import differentiate
from autopar.passes.canonicalize.normalize import REWRITES
from autopar.rules.table import RULES
from autopar.schedule.request import SCHEDULES, Schedule
from autopar.token_dispatchers import TOKEN_DISPATCHERS
from autopar.zero_stages import ZERO_STAGES, ZeroStage
from tests.support.subjects import make, tiny

step_key_module = sys.modules[step_key.__module__]


class Net(nn.Module):
    def __init__(self, act: Callable[[Any, Tensor], Tensor] = lambda m, h: torch.tanh(h)) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(4, 8), nn.Linear(8, 4), nn.Dropout(0.1)
        self.scale, self.act, self.table = 2.0, act, torch.arange(8.0)
        self.register_buffer("count", torch.zeros(8))

    def forward(self, x: Tensor, y: Any = None, times: float = 1) -> Tensor:
        h = self.act(self, self.drop(self.up(x))) * self.table
        return ((self.down(h + self.count) * self.scale * times - 1) ** 2).mean()


def key_of(
    model: nn.Module, mesh: str = "dp=2", batch: Any = None, options: Any = None, seen: Any = None, **how: Any
) -> str:
    batch = {"x": torch.empty(8, 4, device="meta")} if batch is None else batch
    gm = capture(model, batch, **(seen or {}))
    return step_key("step", gm, Mesh.parse(mesh), options=Options(**(options or {})), **how)


def test_captured_again_it_is_the_same() -> None:
    for name in ("llama", "t5", "mixtral"):
        model, batch = tiny(name, layers=1)
        assert key_of(model, batch=batch) == key_of(model, batch=batch)
    net = Net()
    before = key_of(net)
    with torch.no_grad():
        net.up.weight.fill_(7.0)  # the key does not contain the values of weights
        net.count += 1
    assert key_of(net) == before


# --- what a forward reads -------------------------------------------------------------------------------------

SETTINGS = types.SimpleNamespace(gain=2.0, table={"a": 1.0}, act=torch.tanh)
WRITTEN = torch.ones(8)


def by_closure(n: float) -> Callable[[Any, Tensor], Tensor]:
    return lambda m, h: h * n


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda net: None,
    "an attribute": lambda net: setattr(net, "scale", 3.0),
    "a function": lambda net: setattr(net, "act", lambda m, h: torch.relu(h)),
    "a closure": lambda net: setattr(net, "act", by_closure(2.0)),
    "another": lambda net: setattr(net, "act", by_closure(3.0)),
    "a partial": lambda net: setattr(net, "act", functools.partial(lambda n, m, h: h - n, 2.0)),
    "frozen": lambda net: net.up.weight.requires_grad_(False),
    "dtype": lambda net: net.double(),
    "mode": lambda net: net.eval(),
    "another number in dropout": lambda net: setattr(net.drop, "p", 0.2),
    "buffer": lambda net: setattr(net, "act", lambda m, h: (m.count.add_(1), h)[1]),
    "hook": lambda net: net.up.register_forward_hook(lambda m, a, out: out * 2),
    "no bias": lambda net: setattr(net.up, "bias", None),
    "a constant's value": lambda net: net.table.mul_(2),
    "a module": lambda net: setattr(net, "up", nn.Sequential(nn.Linear(4, 8))),
}


def test_each_change_of_a_model_has_a_key_of_its_own() -> None:
    found = dict[str, str]()
    for name, change in CHANGES.items():
        keys = set()
        for _ in range(2):
            net = Net()
            change(net)
            keys.add(key_of(net, batch={"x": torch.empty(8, 4, dtype=next(net.parameters()).dtype)}))
        assert len(keys) == 1, name
        key = keys.pop()
        assert key not in found, f"{name} is like {found.get(key)}"
        found[key] = name


READS: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[pytest.MonkeyPatch], Any]]] = {
    "an attribute": (lambda m, h: h * SETTINGS.gain, lambda p: p.setattr(SETTINGS, "gain", 3.0)),
    "an entry": (lambda m, h: h * SETTINGS.table["a"], lambda p: p.setitem(SETTINGS.table, "a", 3.0)),
    "a function": (lambda m, h: SETTINGS.act(h), lambda p: p.setattr(SETTINGS, "act", torch.relu)),
    "by a text": (lambda m, h: h * globals()["SETT" + "INGS"].gain, lambda p: p.setattr(SETTINGS, "gain", 3.0)),
    "a tensor": (lambda m, h: h * WRITTEN, lambda p: WRITTEN.add_(1)),
    "torch's function": (lambda m, h: nn.functional.gelu(h), lambda p: p.setattr(nn.functional, "gelu", torch.relu)),
}


@pytest.mark.parametrize("name", READS)
def test_what_a_forward_reads_counts_by_what_it_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    act, change = READS[name]
    before = key_of(Net(act))
    assert key_of(Net(act)) == before
    change(monkeypatch)
    assert key_of(Net(act)) != before


# --- the question, and what is around it ----------------------------------------------------------------------


def test_calls() -> None:
    net, x = Net(), torch.empty(8, 4, device="meta")
    calls: list[dict[str, Any]] = [
        {}, {"mesh": "dp=4"}, {"mesh": "tp=2"}, {"mesh": "dp=2,tp=1"}, {"options": {"zero": 3}},
        {"train": False}, {"outputs": None}, {"outputs": ("loss",)}, {"tangents": ("h",)},
        {"seen": {"lift_to_float64": True}, "batch": {"x": x.double()}}, {"seen": {"autocast": torch.bfloat16}},
        {"batch": {"x": torch.empty(16, 4, device="meta")}}, {"batch": {"x": x, "times": 2}},
        {"batch": {"x": torch.empty(4, 8, device="meta").t()}},
    ]  # fmt: skip
    keys = [key_of(net.double() if "lift_to_float64" in str(call) else net.float(), **call) for call in calls]
    assert len({*keys}) == len(calls)


def test_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = capture(Net(), {"x": torch.empty(8, 4)})
    first = step_key("step", gm, Mesh.of(dp=2))
    with torch.backends.mkldnn.flags(enabled=False):
        assert step_key("step", gm, Mesh.of(dp=2)) != first
    monkeypatch.setenv("MASTER_PORT", "1234")
    monkeypatch.setenv("RANK", "3")
    assert step_key("step", gm, Mesh.of(dp=2)) == first != step_key("plan", gm, Mesh.of(dp=2))
    torch.set_float32_matmul_precision("medium")
    try:
        assert step_key("step", gm, Mesh.of(dp=2)) != first
    finally:
        torch.set_float32_matmul_precision("highest")


# --- what is not known ----------------------------------------------------------------------------------------


def test_modes_around_a_call() -> None:
    class Mode(TorchFunctionMode):
        pass

    gm = capture(Net(), {"x": torch.empty(8, 4)})
    with Mode(), pytest.raises(Unstorable, match=r"the active mode .*Mode"):
        step_key("step", gm, Mesh.of(dp=2))


def test_an_operator_of_the_users() -> None:
    """What it does may change under the same name."""
    operator = torch.library.custom_op(
        "users_of_step_key::double", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    operator.register_fake(lambda x: torch.empty_like(x))
    operator.register_autograd(lambda ctx, g: g * 2)
    gm = capture(Net(lambda m, h: torch.ops.users_of_step_key.double(h)), {"x": torch.empty(8, 4)})
    with pytest.raises(Unstorable, match="users_of_step_key"):
        step_key("step", gm, Mesh.of(dp=2))


def test_functions_in_the_place_of_autopars(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = capture(*make("mlp"))
    before = step_key("step", gm, Mesh.of(dp=2))
    with monkeypatch.context() as patched:
        patched.setattr(differentiate, "lowered", lambda *a: None)
        with pytest.raises(Unstorable, match=r"autopar\.passes\.autodiff\.differentiate"):
            step_key("step", gm, Mesh.of(dp=2))

    class Mine:
        pass

    SCHEDULES.add("mine", Mine())  # type: ignore[arg-type]
    try:
        with pytest.raises(Unstorable, match="mine"):
            step_key("step", gm, Mesh.of(dp=2))
    finally:
        SCHEDULES.remove("mine")
    TOKEN_DISPATCHERS.add("mine", replace(TOKEN_DISPATCHERS["alltoall"], module="mine"))
    try:
        with pytest.raises(Unstorable, match="mine"):
            step_key("step", gm, Mesh.of(dp=2))
    finally:
        TOKEN_DISPATCHERS.remove("mine")
    CHIPS.add("MINE", replace(CHIPS["A100"], memory=1e12))
    try:
        assert step_key("step", gm, Mesh.of(dp=2)) != before
    finally:
        CHIPS.remove("MINE")
    assert step_key("step", gm, Mesh.of(dp=2)) == before


def rewrite_of_the_users(node: Any, build: Any) -> None:
    return None


class PassOfTheUsers:
    name = "users"


ADDED: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "a canonicalization": lambda p: p.setitem(REWRITES, torch.ops.aten.glu.default, rewrite_of_the_users),
    "a partial": lambda p: p.setitem(REWRITES, torch.ops.aten.glu.default, functools.partial(rewrite_of_the_users)),
    "a pass": lambda p: p.setattr(step_key_module, "STEP_PASSES", (*pipelines.STEP_PASSES, PassOfTheUsers())),
    "a policy": lambda p: p.setitem(AC_POLICIES._entries, "users", rewrite_of_the_users),
    "a schedule": lambda p: p.setitem(
        SCHEDULES._entries,
        "users",
        Schedule("users", rewrite_of_the_users, "a function of the user's"),  # type: ignore[arg-type]
    ),
    "a dispatcher": lambda p: p.setitem(
        TOKEN_DISPATCHERS._entries, "users", dataclasses.replace(TOKEN_DISPATCHERS["alltoall"], copies=lambda r: (1.0,))
    ),
    "a rule": lambda p: p.setitem(RULES, torch.ops.aten.glu.default, rewrite_of_the_users),
}


@pytest.mark.parametrize("name", ADDED)
def test_what_a_script_adds_to_tables_is_not_stored(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gm = capture(*make("mlp"))
    assert step_key("step", gm, Mesh.of(dp=2))
    ADDED[name](monkeypatch)
    with pytest.raises(Unstorable):
        step_key("step", gm, Mesh.of(dp=2))


def test_rows_of_numbers_are_a_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = capture(*make("mlp"))
    found = {step_key("step", gm, Mesh.of(dp=2))}
    for stage in (ZeroStage(True, False, True), ZeroStage(True, True, True)):
        monkeypatch.setitem(ZERO_STAGES, 4, stage)
        found.add(step_key("step", gm, Mesh.of(dp=2)))
    for flops in (1e12, 2e12):
        monkeypatch.setitem(CHIPS._entries, "users", dataclasses.replace(CHIPS["A100"], flops=flops))
        found.add(step_key("step", gm, Mesh.of(dp=2)))
    assert len(found) == 5


def test_what_is_put_into_autopar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where everything was looked at before: a function, a method, a property, the code of a function."""

    def other(self: Any) -> Any:
        return self

    assert changed_autopar() is None
    for holder, name, value in (
        (own_sources, "versions", other), (own_sources, "new_function", other), (Mesh, "coordinates", other),
        (Mesh, "world_size", property(other)), (Mesh, "parse", classmethod(other)),
        (own_sources.is_foreign, "__code__", other.__code__),
    ):  # fmt: skip
        with monkeypatch.context() as patched:
            patched.setattr(holder, name, value, raising=False)
            assert changed_autopar() is not None, name
        assert changed_autopar() is None, name
