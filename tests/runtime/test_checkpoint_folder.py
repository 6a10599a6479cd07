"""A checkpoint takes the place of another in one moment; a process that dies on the way leaves one of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from autopar.runtime.checkpoint import hf_atomic_write, hf_io
from autopar.runtime.checkpoint.hf_atomic_write import INDEX, PART, SINGLE, AtomicFolder

OPERATIONS = ("fsync", "link", "mkdir", "rename", "replace", "rmdir", "unlink")
CONFIG = LlamaConfig(
    hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8, pad_token_id=0
)
WIDER = LlamaConfig(**{**CONFIG.to_dict(), "vocab_size": 12, "rms_norm_eps": 0.5})
Shapes = dict[str, torch.Size]


def shapes_of(config: LlamaConfig) -> Shapes:
    with torch.device("meta"):
        return {name: value.shape for name, value in LlamaForCausalLM(config).state_dict().items()}


SHAPES, WIDER_SHAPES = shapes_of(CONFIG), shapes_of(WIDER)
MIDDLE = len(SHAPES) // 2


class Killed(BaseException):
    """Nothing happens after it."""


@contextmanager
def killed_at(moment: int, patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The process dies ahead of its file operation number ``moment``, a write half done; yields those it did."""
    done: list[str] = []

    def count(name: str) -> bool:
        if len(done) == moment:
            return True
        done.append(name)
        return False

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if count(name):
                raise Killed
            return call(*args, **kwargs)

        return run

    def write(tensors: dict[str, Tensor], path: Path, **kwargs: Any) -> None:
        save(tensors, path, **kwargs)
        if count("write"):
            path.write_bytes(path.read_bytes()[:100])
            raise Killed

    save = hf_atomic_write.save_file
    with patch.context() as p:
        for name in OPERATIONS:
            p.setattr(os, name, watched(name, getattr(os, name)))
        p.setattr(hf_atomic_write, "save_file", write)
        yield done


def save(folder: Path, value: float, parts: int, config: LlamaConfig = CONFIG) -> None:
    """A checkpoint whose weights are all ``value``."""
    shapes = WIDER_SHAPES if config is WIDER else SHAPES
    names = list(shapes)
    groups = [names] if parts == 1 else [names[:MIDDLE], names[MIDDLE:]]
    files: dict[str, str] = {}
    with AtomicFolder(folder, parts) as draft:
        for group in groups:
            tensors = {n: torch.full(shapes[n], value) for n in group}
            files |= dict.fromkeys(group, draft.add(tensors, {"format": "pt"}))
        draft.publish({"metadata": {}, "weight_map": files}, [config])


def read(folder: Path) -> float:
    """The value of a whole checkpoint, by the rule of transformers: the single file, else what the index names."""
    if (folder / SINGLE).is_file():
        found = load_file(folder / SINGLE)
    else:
        weights = json.loads((folder / INDEX).read_text())["weight_map"]
        found = {n: t for file in set(weights.values()) for n, t in load_file(folder / file).items()}
        assert found.keys() == weights.keys()
    assert {n: t.shape for n, t in found.items()} == SHAPES
    (value,) = {float(x) for t in found.values() for x in t.unique()}
    return value


def read_by_transformers(folder: Path) -> float:
    model, info = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    (value,) = {float(x) for p in model.parameters() for x in p.detach().unique()}
    return value


def state_of(folder: Path) -> tuple[Any, ...]:
    return tuple(sorted((p.name, p.stat().st_size) for p in folder.iterdir()))


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 2), (2, 2), (2, 1)])
def test_a_kill_leaves_the_old_or_the_new_one(
    before: int, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, seen, moment = [], {}, 0
    while True:
        folder = tmp_path / str(moment)
        save(folder, 1.0, before)
        (folder / "tokenizer.json").write_text("the user's own")
        with killed_at(moment, monkeypatch) as done, suppress(Killed):
            save(folder, 2.0, after)
        found.append(read(folder))
        seen.setdefault((found[-1], state_of(folder)), folder)
        if len(done) < moment:
            break
        moment += 1
    assert found == sorted(found) and set(found) == {1.0, 2.0} and moment > 10  # old, old, ..., new, new
    for (value, _), folder in seen.items():
        assert read_by_transformers(folder) == value
        save(folder, 3.0, 3 - after)  # the next save, in the other layout
        assert read_by_transformers(folder) == 3.0
        names = {p.name for p in folder.iterdir()}
        parts = {name for name in names if PART.fullmatch(name)}
        assert names - parts == {"config.json", "tokenizer.json", SINGLE if after == 2 else INDEX}
        assert len(parts) == (0 if after == 2 else 2)


def read_by_us(folder: Path) -> float:
    """As `load_pretrained` finds it."""
    sources = hf_io.stored_in(folder)
    (value,) = {float(x) for s in sources.values() for x in load_file(s.file)[s.name].unique()}
    return value


@pytest.mark.parametrize(("before", "after", "links"), [(1, 1, True), (1, 2, True), (2, 2, False), (2, 1, False)])
def test_a_kill_leaves_the_weights_under_their_own_config(
    before: int, after: int, links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another vocabulary: nothing loads that is not whole. ``links``: whether the file system has hard links."""
    found, seen, moment = [], {}, 0
    if not links:
        monkeypatch.setattr(os, "link", refuse_link)
    while True:
        folder = tmp_path / str(moment)
        save(folder, 1.0, before)
        with killed_at(moment, monkeypatch) as done, suppress(Killed):
            save(folder, 2.0, after, WIDER)
        state = state_of(folder)
        if state not in seen:
            seen[state] = read_by_transformers(folder), folder
            assert read_by_us(folder) == seen[state][0]
        found.append(seen[state][0])
        if len(done) < moment:
            break
        moment += 1
    assert found == sorted(found) and set(found) == {1.0, 2.0} and moment > 14
    for value, folder in seen.values():  # the next save, with the first config or the second
        save(folder, 3.0, 3 - after, CONFIG if value == 2.0 else WIDER)
        assert read_by_transformers(folder) == read_by_us(folder) == 3.0
        names = {p.name for p in folder.iterdir() if not PART.fullmatch(p.name)}
        assert names == {"config.json", SINGLE if after == 2 else INDEX}


def refuse_link(*args: Any, **kwargs: Any) -> None:
    raise OSError("no links here")


def test_a_config_that_names_its_weights(tmp_path: Path) -> None:
    """Ours until a save has ended; anybody's otherwise. A save without a config takes the name away."""
    save(tmp_path, 1.0, 1)
    os.rename(tmp_path / SINGLE, tmp_path / "other.safetensors")
    save_file({n: torch.zeros(s) for n, s in SHAPES.items()}, tmp_path / SINGLE)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "transformers_weights": "other.safetensors"}))
    assert read_by_transformers(tmp_path) == read_by_us(tmp_path) == 1.0
    with AtomicFolder(tmp_path, 1) as draft:
        draft.add({n: torch.full(s, 2.0) for n, s in SHAPES.items()}, {"format": "pt"})
        draft.publish({}, [])
    assert read_by_transformers(tmp_path) == read_by_us(tmp_path) == 2.0
    for named, words in (("gone.safetensors", "found no such file"), ("../x.safetensors", "outside of the folder")):
        config.write_text(json.dumps({"transformers_weights": named}))
        with pytest.raises(ValueError, match=rf"config.json names the file .*{words}"):
            read_by_us(tmp_path)


def test_an_error_keeps_the_old_one(tmp_path: Path) -> None:
    save(tmp_path, 1.0, 2)
    before = state_of(tmp_path)
    with pytest.raises(KeyError), AtomicFolder(tmp_path, 1) as draft:
        draft.add({"x": torch.zeros(2)}, {})
        raise KeyError("another rank died")
    assert state_of(tmp_path) == before and read(tmp_path) == 1.0
