"""A folder that holds one checkpoint, and how another one takes its place: in one moment.

transformers, and `load_pretrained`, read model.safetensors if it is there, else the parts that the index names. So a
single operation decides which checkpoint is read, and what is written before it disturbs nobody:

    .saving/...                         everything is written and synced here
    model-2-00001-of-00002.safetensors  parts move to names that no file had; nothing names them yet
    model.safetensors replaced          the moment, of a checkpoint in one file; an index is not read any more
    index replaced                      the moment, of a checkpoint in parts ...
    model.safetensors removed           ... or this, where the old one was in one file
    old parts, old index, .saving       removed

A process that dies on the way leaves the old checkpoint or the new one; the next save removes its traces. Weights and
config.json are two files: where the config changes, the old one is removed first, so that in between nothing can be
read, rather than weights under the config of another model.
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

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
BESIDE = ".saving"
PART = re.compile(r"model(-\d+)?-\d{5}-of-\d{5}\.safetensors")


class Draft:
    """A checkpoint in the making. Used as a context: an error discards it, and the old checkpoint stays.

    with Draft(folder, parts=2) as draft:
        draft.add(tensors, metadata)            # for each part
        draft.publish(index, configs)
    """

    def __init__(self, folder: Path, parts: int) -> None:
        self._folder, self._beside = folder, folder / BESIDE
        folder.mkdir(parents=True, exist_ok=True)
        self.discard()
        self._beside.mkdir()
        self._names = _free_names(folder, parts)
        self._added: list[str] = []

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is not None:
            shutil.rmtree(self._beside, ignore_errors=True)  # the error on its way tells more than one of this

    def add(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
        """Write the next part; returns the name of its file."""
        name = self._names[len(self._added)]
        save_file(dict(tensors), self._beside / name, metadata=dict(metadata))
        self._added.append(name)
        return name

    def publish(self, index: Mapping[str, Any], configs: Iterable[Any]) -> None:
        """From now on the draft is the checkpoint. ``index``: what the index says, if there are several parts.
        ``configs``: objects with ``save_pretrained(folder)``."""
        assert len(self._added) == len(self._names), "every part is written"
        single = self._names == [SINGLE]
        if not single:
            (self._beside / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        weights = {*self._names, INDEX}
        for config in configs:
            config.save_pretrained(self._beside)
        small = [name for name in sorted(os.listdir(self._beside)) if name not in weights]
        for name in os.listdir(self._beside):
            _sync(self._beside / name)
        changed = [name for name in small if not _same(self._beside / name, self._folder / name)]
        if not single:
            for name in self._names:
                os.rename(self._beside / name, self._folder / name)
        if changed:
            _remove(self._folder / CONFIG)
        _sync(self._folder)
        self._move(SINGLE if single else INDEX)
        if not single:
            _remove(self._folder / SINGLE)
        for name in sorted(changed, key=lambda n: n == CONFIG):  # config.json at last: it makes the folder readable
            self._move(name)
        _sync(self._folder)
        self._remove_old()
        self.discard()

    def discard(self) -> None:
        """Remove what lies beside, of this draft or of one that was cut off."""
        if self._beside.exists():
            shutil.rmtree(self._beside)

    def _move(self, name: str) -> None:
        os.replace(self._beside / name, self._folder / name)

    def _remove_old(self) -> None:
        kept = {*self._names, *([] if self._names == [SINGLE] else [INDEX])}
        for name in os.listdir(self._folder):
            if name not in kept and (name == INDEX or PART.fullmatch(name)):
                _remove(self._folder / name)


def _free_names(folder: Path, parts: int) -> Sequence[str]:
    """Names of the files of so many parts, none of which is in the folder."""
    if parts == 1:
        return [SINGLE]
    for generation in itertools.count(1):
        stem = "model" if generation == 1 else f"model-{generation}"
        names = [f"{stem}-{i + 1:05d}-of-{parts:05d}.safetensors" for i in range(parts)]
        if not any(os.path.lexists(folder / name) for name in names):
            return names
    raise AssertionError


def _sync(path: Path) -> None:
    """Wait until a file, or the list of a folder, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _same(a: Path, b: Path) -> bool:
    return b.is_file() and a.read_bytes() == b.read_bytes()


def _remove(path: Path) -> None:
    if os.path.lexists(path):
        os.unlink(path)
