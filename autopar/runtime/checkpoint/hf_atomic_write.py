"""Atomic replacement of a Hugging Face checkpoint folder.

transformers and `load_pretrained` read the file that config.json names (``transformers_weights``, rarely set); else
model.safetensors if it exists; else the files that the index names. So a single operation switches to the new
checkpoint, and everything written before it has no effect:

    .saving/...                         everything is written and synced here
    model-2-00001-of-00002.safetensors  files move to unused names; nothing refers to them yet
    model.safetensors replaced          the switch, to a checkpoint in one file; an index is not read any more
    index replaced                      the switch, to a checkpoint in several files ...
    model.safetensors removed           ... or this, if the old one was in one file
    old files, old index, .saving       removed

Weights and config.json are separate files. If the config changes, the new one names its weights until both are in
place:

    model.next1.safetensors             the new weights (or the new index) a second time, under an unused name
    config.json replaced                the switch: the new config, which names model.next1.safetensors
    model.safetensors, index            as above; not read meanwhile
    config.json replaced                the new config in its final form
    model.next1.safetensors             removed

A process that dies at any point leaves the old checkpoint or the new one; the next save removes leftovers.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from autopar.files import sync_path

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
BESIDE = ".saving"
WEIGHTS = "transformers_weights"  # the key of config.json that names the weights
PART = re.compile(r"model(-\d+)?-\d{5}-of-\d{5}\.safetensors")
NEXT = re.compile(r"model\.next\d+\.safetensors(\.index\.json)?")


def named_weights(folder: Path) -> Any:
    """The file that config.json names as the weights (or as their index); None if it names none."""
    return _config(folder).get(WEIGHTS)


def quantizer(folder: Path) -> str | None:
    """The quantization method in config.json; None if there is none."""
    found = _config(folder).get("quantization_config")
    if found is None:
        return None
    return str(found.get("quant_method", "unknown") if isinstance(found, dict) else found)


def _config(folder: Path) -> dict[str, Any]:
    """The contents of config.json, which may not be one of transformers."""
    path = folder / CONFIG
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}  # a pipe would be waited for
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


class AtomicFolder:
    """A checkpoint that is being written. A context manager: an error discards it, and the old checkpoint stays.

    with AtomicFolder(folder, parts=2) as draft:
        draft.add(tensors, metadata)            # for each file
        draft.publish(index, configs)
    """

    def __init__(self, folder: Path, parts: int) -> None:
        self._folder, self._beside = folder, folder / BESIDE
        folder.mkdir(parents=True, exist_ok=True)
        self.discard()
        self._beside.mkdir()
        self._names = _free_names(folder, parts)
        self._added: list[str] = []

    def __enter__(self) -> AtomicFolder:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is not None:
            shutil.rmtree(self._beside, ignore_errors=True)  # the original error matters more

    def add(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
        """Write the next file of tensors; returns its name."""
        name = self._names[len(self._added)]
        save_file(dict(tensors), self._beside / name, metadata=dict(metadata))
        self._added.append(name)
        return name

    def publish(self, index: Mapping[str, Any], configs: Iterable[Any]) -> None:
        """Make the draft the checkpoint. ``index``: the contents of the index, if there are several files. ``configs``:
        objects with ``save_pretrained(folder)``."""
        assert len(self._added) == len(self._names), "every part is written"
        single = self._names == [SINGLE]
        head = SINGLE if single else INDEX
        if not single:
            (self._beside / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        changed = self._changed(configs)
        for name in os.listdir(self._beside):
            sync_path(self._beside / name)
        if not single:
            for name in self._names:
                os.rename(self._beside / name, self._folder / name)
        if CONFIG in changed and (self._folder / CONFIG).exists():
            self._name_in_config(head)
        sync_path(self._folder)
        self._move(head)
        if not single:
            _remove(self._folder / SINGLE)
        sync_path(self._folder)
        for name in sorted(changed, key=lambda n: n == CONFIG):  # config.json last: it makes a new folder readable
            self._move(name)
        sync_path(self._folder)
        self._remove_old()
        self.discard()

    def _changed(self, configs: Iterable[Any]) -> list[str]:
        """Write the configs; returns the names of files that differ from those in the folder."""
        weights = set(os.listdir(self._beside))
        for config in configs:
            config.save_pretrained(self._beside)
        if not (self._beside / CONFIG).exists() and named_weights(self._folder) is not None:
            old = json.loads((self._folder / CONFIG).read_text(encoding="utf-8"))
            _write_json(self._beside / CONFIG, {k: v for k, v in old.items() if k != WEIGHTS})
        small = sorted({*os.listdir(self._beside)} - weights)
        return [name for name in small if not _same(self._beside / name, self._folder / name)]

    def _name_in_config(self, head: str) -> None:
        """Replace config.json by the new one, which names the new weights by a separate file."""
        numbered = (head.replace("model.", f"model.next{n}.", 1) for n in itertools.count(1))
        name = next(name for name in numbered if not os.path.lexists(self._folder / name))
        _duplicate(self._beside / head, self._folder / name)
        new = json.loads((self._beside / CONFIG).read_text(encoding="utf-8"))
        _write_json(self._beside / f"{CONFIG}.next", {**new, WEIGHTS: name})
        for path in (self._folder / name, self._beside / f"{CONFIG}.next", self._folder):
            sync_path(path)
        os.replace(self._beside / f"{CONFIG}.next", self._folder / CONFIG)

    def discard(self) -> None:
        """Remove the files of this draft, or of an interrupted one."""
        if self._beside.exists():
            shutil.rmtree(self._beside)

    def _move(self, name: str) -> None:
        os.replace(self._beside / name, self._folder / name)

    def _remove_old(self) -> None:
        kept = {*self._names, *([] if self._names == [SINGLE] else [INDEX])}
        for name in os.listdir(self._folder):
            if name not in kept and (name == INDEX or PART.fullmatch(name) or NEXT.fullmatch(name)):
                _remove(self._folder / name)


def _free_names(folder: Path, parts: int) -> Sequence[str]:
    """Unused names for so many files of a checkpoint."""
    if parts == 1:
        return [SINGLE]
    for generation in itertools.count(1):
        stem = "model" if generation == 1 else f"model-{generation}"
        names = [f"{stem}-{i + 1:05d}-of-{parts:05d}.safetensors" for i in range(parts)]
        if not any(os.path.lexists(folder / name) for name in names):
            return names
    raise AssertionError


def _duplicate(source: Path, target: Path) -> None:
    """Link a file under a second name; copy it if the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _same(a: Path, b: Path) -> bool:
    return b.is_file() and a.read_bytes() == b.read_bytes()


def _remove(path: Path) -> None:
    if os.path.lexists(path):
        os.unlink(path)
