"""The key of a step: equal for a model that is made again in another process, another one for whatever may decide what
a step computes, and none where that cannot be told. A process's work is done here by loading the same source anew."""

from __future__ import annotations

import functools
import os
import random
import socket
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar.adapters.copying.fake import skeleton_of
from autopar.cache import library_versions
from autopar.cache.fingerprint_values import Uncacheable
from autopar.cache.library_versions import changed_autopar
from autopar.cache.step_key import step_key
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.passes.autodiff import differentiate
from autopar.schedule.request import SCHEDULES
from tests.cache.sources import CALLS, EDITS, HEAD, NET, OTHERS, READS, calling
from tests.support.subjects import tiny


@pytest.fixture(autouse=True)
def _modules() -> Iterator[None]:
    before = dict(sys.modules)
    yield
    for name in sys.modules.keys() - before.keys():
        if name.startswith("users_"):
            del sys.modules[name]


def load(source: str, folder: Path, name: str = "users_model") -> Any:
    """A module of this source, as a new process would have it."""
    path = folder / f"{name}.py"
    path.write_text(HEAD + source)
    module = types.ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    exec(compile(HEAD + source, str(path), "exec"), module.__dict__)
    return module


def key_of(model: nn.Module, *, mesh: str = "dp=2", batch: Any = None, options: Any = None, **how: Any) -> str:
    batch = {"x": torch.empty(8, 4, device="meta")} if batch is None else batch
    how = {"train": True, "outputs": (), "lift_to_float64": False} | how
    return step_key("step", model, batch, Mesh.parse(mesh), options=Options(**(options or {})), **how)


def key(source: str, folder: Path) -> str:
    return key_of(skeleton_of(load(source, folder).Net()))


# --- what is the same -------------------------------------------------------------------------------------


def test_loaded_again_it_is_the_same(tmp_path: Path) -> None:
    assert key(NET, tmp_path) == key(NET, tmp_path)


def test_values_of_weights_do_not_matter(tmp_path: Path) -> None:
    net = load(NET, tmp_path).Net()
    before = key_of(skeleton_of(net))
    with torch.no_grad():
        net.up.weight.fill_(7.0)
    assert key_of(skeleton_of(net)) == before


def test_what_is_never_called_may_read_files(tmp_path: Path) -> None:
    more = NET + "    def save(self, path):\n        open(path, 'w').write(str(time.time()))\n"
    assert key(more, tmp_path) == key(more, tmp_path)


def test_models_of_libraries_are_the_same_again() -> None:
    first, second = (key_of(skeleton_of(tiny("llama")[0])) for _ in range(2))
    assert first == second


def test_classes_without_a_file(tmp_path: Path) -> None:
    """Of a notebook, whose cells are no files: code counts all the same."""

    def cell(source: str) -> str:
        module = types.ModuleType("users_notebook")
        sys.modules["users_notebook"] = module
        exec(compile(HEAD + source, "<ipython-input-1>", "exec"), module.__dict__)
        return key_of(skeleton_of(module.Net()))

    assert cell(NET) == cell(NET) != cell(NET.replace("- 1)", "- 2)"))


# --- what is another --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EDITS)
def test_edits(name: str, tmp_path: Path) -> None:
    source, old, new = EDITS[name]
    assert source.count(old) == 1
    first = key(source, tmp_path)
    assert first == key(source, tmp_path) != key(source.replace(old, new), tmp_path)


def test_another_file(tmp_path: Path) -> None:
    """What is imported from a file of the user's, at the top, within the forward or within a function there."""
    for source in OTHERS:
        keys = []
        for value in (2, 2, 3):
            made_up = "def __getattr__(name): return N\n" if "made_up" in source else ""
            load(f"N = {value}\ndef helper(): return N\n{made_up}", tmp_path, "users_other")
            keys.append(key(source, tmp_path))
        assert keys[0] == keys[1] != keys[2]


def test_a_file_of_the_same_package(tmp_path: Path) -> None:
    source = NET.replace(CALLS, "        from .other import helper\n        return self.up(x).mean() * helper()\n")
    keys = []
    for value in (2, 2, 3):
        load(f"def helper(): return {value}\n", tmp_path, "users_package.other")
        module = load("", tmp_path, "users_package.model")
        module.__package__ = "users_package"
        exec(compile(HEAD + source, str(tmp_path / "users_package.model.py"), "exec"), module.__dict__)
        keys.append(key_of(skeleton_of(module.Net())))
    assert keys[0] == keys[1] != keys[2]


def test_a_class_of_the_same_name(tmp_path: Path) -> None:
    """In the scripts of two users, both called __main__."""
    other = tmp_path / "other"
    other.mkdir()
    assert key(NET, tmp_path) != key(NET.replace("nn.Linear(4, 8)", "nn.Linear(4, 8, bias=True)"), other)


def test_variables_that_the_forward_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [calling("float(os.environ['USERS_N'])"), calling("float(os.getenv(NAME, 1))", "NAME = 'USERS_N'\n")]
    for source in sources:
        monkeypatch.setenv("USERS_N", "1")
        first = key(source, tmp_path)
        monkeypatch.setenv("USERS_OTHER", "1")
        assert key(source, tmp_path) == first
        monkeypatch.setenv("USERS_N", "2")
        assert key(source, tmp_path) != first


# --- what is done to a model ------------------------------------------------------------------------------


def _freeze(net: Any) -> None:
    net.up.weight.requires_grad_(False)


def _tie(net: Any) -> None:
    net.more = nn.Linear(4, 8)
    net.more.weight = net.up.weight


def _untied(net: Any) -> None:
    net.more = nn.Linear(4, 8)


def _share_an_object(net: Any) -> None:
    net.a = net.b = [1]


def _two_objects(net: Any) -> None:
    net.a, net.b = [1], [1]


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda net: None,
    "an attribute": lambda net: setattr(net, "scale", 3.0),
    "a list": lambda net: net.names.append("c"),
    "frozen": _freeze,
    "dtype": lambda net: net.double(),
    "one dtype": lambda net: net.up.bfloat16(),
    "tied": _tie,
    "not tied": _untied,
    "shared": _share_an_object,
    "not shared": _two_objects,
    "mode": lambda net: net.eval(),
    "mode of a child": lambda net: net.up.eval(),
    "buffer": lambda net: net.register_buffer("b", torch.zeros(2)),
    "buffer's kind": lambda net: net.register_buffer("b", torch.zeros(2), persistent=False),
    "hook": lambda net: net.up.register_forward_hook(lambda m, a, out: out * 2),
    "hook's number": lambda net: net.up.register_forward_hook(lambda m, a, out: out * 3),
    "hook before": lambda net: net.up.register_forward_pre_hook(lambda m, a: (a[0] * 2,)),
    "forward of one": lambda net: setattr(net, "forward", lambda x: net.up(x).mean()),
    "child": lambda net: setattr(net, "up", nn.Sequential(nn.Linear(4, 8))),
    "no bias": lambda net: setattr(net.up, "bias", None),
    "width": lambda net: setattr(net, "up", nn.Linear(4, 16)),
    "a method bound to it": lambda net: setattr(net, "act", types.MethodType(lambda self, x: x * self.scale, net)),
    "a function of torch's": lambda net: setattr(net, "act", torch.relu),
    "another of torch's": lambda net: setattr(net, "act", torch.sigmoid),
    "a partial": lambda net: setattr(net, "act", functools.partial(torch.softmax, dim=-1)),
    "its dim": lambda net: setattr(net, "act", functools.partial(torch.softmax, dim=0)),
    "an integer in a module": lambda net: setattr(net.up, "layer", 1),
    "another integer": lambda net: setattr(net.up, "layer", 2),
}


def test_changes_of_a_model(tmp_path: Path) -> None:
    """Each has a key of its own, which is the same when it is done again."""
    module, found = load(NET, tmp_path), dict[str, str]()
    for name, change in CHANGES.items():
        keys = []
        for _ in range(2):
            net = module.Net()
            change(net)
            keys.append(key_of(skeleton_of(net)))
        assert keys[0] == keys[1], name
        assert keys[0] not in found, f"{name} is like {found.get(keys[0])}"
        found[keys[0]] = name


def test_what_is_put_into_classes_and_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama
    from transformers.utils import hub

    module = load(NET, tmp_path)
    llama = skeleton_of(tiny("llama", layers=1)[0])
    first, of_llama = key_of(skeleton_of(module.Net())), key_of(llama)

    def other(self: Any, x: Any) -> Any:
        return self.up(x).mean()

    def sum_of(*args: Any, **kwargs: Any) -> Any:
        return args[0].sum()

    places: list[tuple[Any, str, bool]] = [
        (module.Net, "forward", False), (nn.Linear, "forward", True), (nn.functional, "linear", True),
        (torch, "tanh", True), (torch.Tensor, "mean", True), (nn.Module, "__call__", True),
        (modeling_llama, "apply_rotary_pos_emb", True), (modeling_llama.LlamaMLP, "forward", True),
        (modeling_llama, "create_causal_mask", True), (modeling_llama.LlamaConfig, "get_text_config", True),
    ]  # fmt: skip
    for holder, name, llamas in places:
        for function in (other, sum_of):
            with monkeypatch.context() as patched:
                patched.setattr(holder, name, function)
                if holder is not nn.Module:
                    assert (key_of(llama) != of_llama) == llamas, name
                assert (key_of(skeleton_of(module.Net())) != first) == ("llama" not in str(holder).lower()), name
    with monkeypatch.context() as patched:
        patched.setattr(nn.functional, "gelu", nn.functional.relu)
        assert key_of(llama) != of_llama
    assert key_of(llama) == of_llama and key_of(skeleton_of(module.Net())) == first
    llama.agent = hub.http_user_agent  # reads variables of the environment, and what the library calls its process
    keys = set()
    for digit in "01":
        monkeypatch.setattr(hub, "SESSION_ID", digit * 32)
        keys.add(key_of(llama))
    assert len(keys) == 1 and of_llama not in keys


def test_what_is_put_into_autopar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where everything was looked at before: a function, a method, a property, the code of a function."""

    def other(self: Any) -> Any:
        return self

    assert changed_autopar() is None
    for holder, name, value in (
        (library_versions, "renamed", other), (library_versions, "new_function", other), (Mesh, "coordinates", other),
        (Mesh, "world_size", property(other)), (Mesh, "parse", classmethod(other)),
        (library_versions.renamed, "__code__", other.__code__),
    ):  # fmt: skip
        with monkeypatch.context() as patched:
            patched.setattr(holder, name, value, raising=False)
            assert changed_autopar() is not None, name
        assert changed_autopar() is None, name


def test_fields_of_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")[0]
    found = {key_of(skeleton_of(model))}
    for name, value in (("rms_norm_eps", 1e-3), ("attention_dropout", 0.1), ("use_cache", False), ("pad_token_id", 3)):
        setattr(model.config, name, value)
        found.add(key_of(skeleton_of(model)))
    assert len(found) == 5


# --- calls and surroundings -------------------------------------------------------------------------------


def test_calls(tmp_path: Path) -> None:
    net = skeleton_of(load(NET, tmp_path).Net())
    x = torch.empty(8, 4, device="meta")
    calls: list[dict[str, Any]] = [
        {}, {"mesh": "dp=4"}, {"mesh": "tp=2"}, {"mesh": "dp=2,tp=1"}, {"options": {"zero": 3}},
        {"options": {"microbatches": 2}}, {"train": False}, {"outputs": None}, {"outputs": ("loss",)},
        {"lift_to_float64": True}, {"autocast": torch.bfloat16}, {"tangents": ("h",)},
        {"batch": {"x": torch.empty(16, 4, device="meta")}}, {"batch": {"x": x.double()}},
        {"batch": {"x": torch.empty(4, 8, device="meta").t()}}, {"batch": {"x": x, "y": x}},
        {"batch": {"x": x, "times": 1}}, {"batch": {"x": x, "times": 2}}, {"batch": {"x": x, "times": 1.0}},
        {"batch": {"x": x, "times": True}}, {"batch": {"x": (x, x)}}, {"batch": {"x": [x, x]}},
        {"batch": {"y": None, "x": x}}, {"batch": {"x": x, "y": None}}, {"batch": {"x": x, "y": "a"}},
    ]  # fmt: skip
    keys = [key_of(net, **call) for call in calls]
    assert len({*keys}) == len(calls)
    assert keys == [key_of(net, **call) for call in calls]


def test_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = skeleton_of(load(NET, tmp_path).Net())
    first, found = key_of(net), list[str]()
    with torch.no_grad():
        found.append(key_of(net))
    with torch.inference_mode():
        found.append(key_of(net))
    with torch.autocast("cpu", torch.bfloat16):
        found.append(key_of(net))
    with torch.device("meta"):
        found.append(key_of(net))
    with torch.backends.mkldnn.flags(enabled=False):
        found.append(key_of(net))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        found.append(key_of(net))
    with monkeypatch.context() as patched:
        patched.setenv("TORCH_SOMETHING", "1")
        found.append(key_of(net))
    for setter, value, back in (
        (torch.set_default_dtype, torch.float64, torch.float32),
        (torch.set_float32_matmul_precision, "medium", "highest"),
        (torch.use_deterministic_algorithms, True, False),
    ):
        setter(value)  # type: ignore[operator]
        try:
            found.append(key_of(net))
        finally:
            setter(back)  # type: ignore[operator]
    import torch.fx.experimental._config as config

    with config.patch(translation_validation=True):
        found.append(key_of(net))
    monkeypatch.setenv("MASTER_PORT", "1234")
    monkeypatch.setenv("RANK", "3")
    assert first == key_of(net) and len({first, *found}) == len(found) + 1


# --- what cannot be told ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", READS)
def test_reads_that_are_no_part_of_a_model(name: str, tmp_path: Path) -> None:
    with pytest.raises(Uncacheable):
        key(READS[name], tmp_path)


OPAQUE = (
    iter([1]), socket.socket(), random.Random(0), (i for i in range(3)), {object()}, torch.Generator(), zip([1]),
)  # fmt: skip


@pytest.mark.parametrize("value", OPAQUE, ids=lambda x: type(x).__name__)
def test_objects_without_a_content(value: Any, tmp_path: Path) -> None:
    net = load(NET, tmp_path).Net()
    net.held = value
    with pytest.raises(Uncacheable):
        key_of(net)


def test_modes_around_a_call(tmp_path: Path) -> None:
    class Mode(TorchFunctionMode):
        pass

    net = skeleton_of(load(NET, tmp_path).Net())
    batch = {"x": torch.empty(8, 4, device="meta")}
    with Mode(), pytest.raises(Uncacheable, match="Mode around the call"):
        key_of(net, batch=batch)


def test_functions_in_the_place_of_autopars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = skeleton_of(load(NET, tmp_path).Net())
    with monkeypatch.context() as patched:
        patched.setattr(differentiate, "differentiate", lambda *a: None)
        with pytest.raises(Uncacheable, match=r"autopar\.passes\.autodiff\.differentiate"):
            key_of(net)

    class Mine:
        pass

    SCHEDULES.add("mine", Mine())  # type: ignore[arg-type]
    try:
        with pytest.raises(Uncacheable, match="Mine"):
            key_of(net)
    finally:
        SCHEDULES.remove("mine")
    assert key_of(net) == key_of(net) and os.sep
