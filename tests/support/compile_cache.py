"""What is planned and compiled once: by one of several ranks, and for tests that put a model on a mesh several times,
and ask about what runs there.

    with compiled_once():
        parallelize(model, mesh); parallelize(same(model), mesh)        captured and compiled once

    with compiled_by_each():
        parallelize(model, mesh)                    on ranks of `tests.support.ranks`: each captures and compiles, as
        users' do
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar import api
from autopar.adapters.hooks import hooks_of_all
from autopar.adapters.tensors.tags import tags_of
from autopar.cache.compile_cache import noticed_warnings, stored_plan, stored_step
from autopar.cache.disk_cache import VARIABLE, DiskCache
from autopar.cache.step_codec import plan_of_sections, plan_sections, step_of_sections, step_sections
from autopar.cache.value_codec import Decoder, Encoder, Unstorable
from autopar.capture.reads.forward_reads import ForwardReads
from autopar.files import OFF
from autopar.ir.batch import facts_of
from autopar.steps.graphs import Compiled
from tests.support.capture_cache import captured_by_each

_MAKERS: dict[str, Any] = {"stored_plan": stored_plan, "stored_step": stored_step}
_TOLD = (bool, int, float, complex, str, bytes, tuple, type(None))
_AT = re.compile(r" at 0x[0-9a-f]+")  # where a rank has an object: the others have theirs elsewhere
HEAD_START = 0.02  # seconds for rank 0: who has captured for the plan has done so for the step


@contextmanager
def compiled_once() -> Iterator[None]:
    """Ranks that are forked within remember as well, each what it compiles."""
    with _in_their_place(_remembered("stored_plan"), _remembered("stored_step")):
        yield


@contextmanager
def _in_their_place(plan: Callable[..., Any], step: Callable[..., Any]) -> Iterator[None]:
    originals = api.stored_plan, api.stored_step
    api.stored_plan, api.stored_step = plan, step
    try:
        yield
    finally:
        api.stored_plan, api.stored_step = originals


def facts_of_model(module: nn.Module) -> str:
    """A text that differs where modules do: what two compiled steps may share, they share in these tests."""
    ids: dict[int, str] = {}
    text = []
    for path, m in module.named_modules(remove_duplicate=False):
        plain = {k: vars(v) if type(v).__name__ == "Config" else v for k, v in vars(m).items() if not k.startswith("_")}
        text.append(f"{path} {type(m)} {plain}")
        text += [f"{path} {k} {v}" for k, v in vars(m).items() if k.startswith("_") and "hooks" in k and v]
    for kind in (module.named_parameters, module.named_buffers):
        for name, x in kind(remove_duplicate=False):
            told = {tag: value for tag, value in tags_of(x).items() if isinstance(value, (int, float, str))}
            text.append(f"{name} {ids.setdefault(id(x), name)} {tuple(x.shape)} {x.dtype} {x.requires_grad} {told}")
    return "\n".join([*text, *(f"{where} {_said(value)}" for where, value in ForwardReads(module).guards.values())])


def _said(value: Any) -> str:
    """A number or a text; the code of a function; of others the kind: what they hold is read by itself."""
    if isinstance(value, types.FunctionType):
        return f"{value.__qualname__} {_code(value.__code__)}"
    if isinstance(value, types.CodeType):
        return _code(value)
    if type(value) in _TOLD:
        return repr(value)
    named = isinstance(value, (type, types.BuiltinFunctionType))
    return f"a {value.__qualname__ if named else type(value).__qualname__}"


def _code(code: types.CodeType) -> str:
    """Equal for code that does the same."""
    inner = [_code(x) if isinstance(x, types.CodeType) else repr(x) for x in code.co_consts]
    return hashlib.blake2b(repr((code.co_code, code.co_names, inner)).encode(), digest_size=12).hexdigest()


def _remembered(kind: str) -> Callable[..., Any]:
    known: dict[str, Any] = {}

    def call(model: nn.Module, given: Mapping[str, Any], mesh: Any, options: Any, *args: Any, **how: Any) -> Any:
        key = _wanted(model, given, mesh, options, how)
        if key not in known:
            known[key] = model, _MAKERS[kind](model, given, mesh, options, *args, **how)  # hooks in the key stay alive
        return known[key][1]

    return partial(call)  # an object: to autopar it is no changed function


def _wanted(model: nn.Module, given: Mapping[str, Any], mesh: Any, options: Any, how: Mapping[str, Any]) -> str:
    fixed = how.get("fixed")
    rest = [str(how.get(k)) for k in ("train", "outputs", "tangents", "autocast", "lift_to_float64", "grad_mode")]
    rest.append(str(fixed and (fixed.graph, sorted(fixed.parameters), fixed.pipeline)))
    surroundings = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), str(hooks_of_all())
    return f"{facts_of_model(model)} {facts_of(given)} {mesh} {options} {rest} {surroundings}"


# --- one of several ranks ------------------------------------------------------------------------------------


def compiled_by_one(folder: Path, rank: int) -> None:
    """From now on, in one call of `run_ranks` with a folder of its own: what all ranks compile one compiles, and the
    others read as they would read it in the cache. What the k-th asks for is what their k-th asked for, or it is
    compiled here."""
    files, count = DiskCache(folder), itertools.count()
    plain = api.stored_plan is _MAKERS["stored_plan"]
    _MAKERS["stored_plan"] = by_one(stored_plan, plan_sections, plan_of_sections, files, rank, count)
    _MAKERS["stored_step"] = by_one(stored_step, sections_of_step, step_of, files, rank, count)
    if plain:  # not remembered beside
        api.stored_plan, api.stored_step = _MAKERS.values()


@contextmanager
def compiled_by_each() -> Iterator[None]:
    """Within, each rank captures and compiles."""
    with captured_by_each(), _in_their_place(stored_plan, stored_step):
        yield


def sections_of_step(made: Compiled) -> dict[str, bytes]:
    """With its constants: who reads has captured nothing."""
    constants = json.dumps(Encoder().encode(made.constants)).encode()
    return {**step_sections(made), "constants": constants}


def step_of(sections: Mapping[str, bytes]) -> Compiled:
    """The inverse."""
    constants = Decoder().decode(json.loads(sections["constants"]))
    return step_of_sections(sections, constants)


def by_one(make: Any, pack: Any, unpack: Any, files: DiskCache, rank: int, count: Iterator[int]) -> Any:
    """``make``, or what another rank has made of the same question, which was its ``count``-th as well."""

    def call(model: nn.Module, given: Mapping[str, Any], mesh: Any, options: Any, *args: Any, **how: Any) -> Any:
        if how.get("observed") or os.environ.get(VARIABLE, "").lower() not in OFF:
            return make(model, given, mesh, options, *args, **how)
        text = f"{next(count)} {make.__name__} {_AT.sub('', _wanted(model, given, mesh, options, how))}"
        key = hashlib.blake2b(text.encode(), digest_size=20).hexdigest()
        if rank:
            time.sleep(HEAD_START)
        with files.turn(key):
            entry = files.read(key)
            if entry is not None:
                for told in entry.about["warned"]:
                    warnings.warn(told, UserWarning, stacklevel=2)
                if how.get("shared") is not None and make is stored_step:
                    how["shared"].forget()
                return unpack(entry.sections)
            with noticed_warnings() as warned:
                made = make(model, given, mesh, options, *args, **how)
            with suppress(Unstorable):
                files.write(key, {"warned": warned}, pack(made))
            return made

    return partial(call)  # an object: to autopar it is no changed function
