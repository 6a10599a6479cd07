"""The safetensors files of a folder: which there are, and parts of tensors out of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.fx import Node

from autopar.runtime.checkpoint.hf_atomic_write import CONFIG, INDEX, SINGLE, named_weights
from autopar.runtime.checkpoint.partial_reads import Window, pulled
from autopar.runtime.params.parameters import other_kind
from autopar.values import parse


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies: file, name in the file."""

    file: Path
    name: str


@dataclass(frozen=True)
class Computed:
    """A tensor that is computed from stored ones: the node of `windows.traced`, what it does in words."""

    inputs: tuple[Stored, ...]
    node: Node
    words: str


ViewSource = Stored | Computed


def _head(folder: Path) -> Path:
    """The file to begin with, as in transformers: what config.json names, else a single file, else an index."""
    try:
        named = named_weights(folder)
        chosen = [folder / SINGLE, folder / INDEX] if named is None else [_within(folder, named, CONFIG)]
        found = [file for file in chosen if file.is_file()]
    except OSError as error:
        raise ValueError(f"load_pretrained: needs a folder that can be read, found {folder}: {error}") from error
    if found and not _is_own(folder, str(found[0].relative_to(folder))):
        raise ValueError(
            f"load_pretrained: {found[0]} leads out of the folder; put the file there, or load the folder that has it"
        )
    if found:
        return found[0]
    if named is not None:
        raise ValueError(
            f"load_pretrained: {folder / CONFIG} names the file {named!r}, found no such file; put it there"
        )
    raise ValueError(
        f"load_pretrained: {folder} needs {SINGLE} or {INDEX}, found neither; save it as safetensors first"
    )


def stored_in(folder: Path) -> dict[str, Stored]:
    """Name in the files -> where it lies. Raises ValueError for a folder without safetensors files, for an index that
    names files outside of it."""
    head = _head(folder)
    if head.suffix != ".json":
        with Files() as files:
            return {name: Stored(head, name) for name in files.open(head).keys()}  # noqa: SIM118 - no mapping
    weights = _weight_map(head)
    texts = [file for file in weights.values() if isinstance(file, str)]
    files_of = {file: _within(folder, file) for file in dict.fromkeys(texts)}
    return {
        name: Stored(files_of[file] if isinstance(file, str) else _within(folder, file), name)
        for name, file in weights.items()
    }


def _weight_map(index: Path) -> dict[str, Any]:
    """Name -> file."""
    try:
        data = parse(index.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        why = "no text in UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise ValueError(f"load_pretrained: {index} is not an index of safetensors files: {why}") from error
    found = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(found, dict):
        raise ValueError(
            f"load_pretrained: {index} is not an index of safetensors files: it needs a weight_map of names to files"
        )
    return found


def _within(folder: Path, file: Any, by: str = INDEX) -> Path:
    """The file that an index or a config names. It must lie in the folder itself, or be a link of the Hugging Face
    cache, whose snapshots/<revision>/ links to ../../blobs/: such a text comes from elsewhere and must not say what is
    read here."""
    inside = isinstance(file, str) and file and not Path(file).is_absolute() and ".." not in Path(file).parts
    if inside and _is_own(folder, file):
        return folder / file
    raise ValueError(
        f"load_pretrained: {folder / by} names the file {file!r}, which is absolute, outside of the folder or "
        "reached through a link; put the files into the folder and name them by their path in it"
    )


def _is_own(folder: Path, file: str) -> bool:
    """Whether a path in the folder ends in the folder, or is a link of the cache. A circle of links ends nowhere."""
    try:
        root, found, parent = folder.resolve(), (folder / file).resolve(), (folder / file).parent.resolve()
    except (OSError, RuntimeError, ValueError):
        return False
    cached = root.parent.name == "snapshots" and found.parent == root.parent.parent / "blobs" and parent == root
    return found == root / file or cached


class Files:
    """Open safetensors files, each opened once."""

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: Any) -> None:
        for file in self._open.values():
            file.__exit__(None, None, None)

    def open(self, path: Path) -> Any:
        """The file of a path. Raises ValueError for what is none."""
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="pt").__enter__()
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"load_pretrained: {path} is missing, truncated or no safetensors file: {error}"
                ) from error
        return self._open[path]

    def outline(self, source: Stored) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of a stored tensor. Raises ValueError if the file does not hold it."""
        try:
            piece = self.open(source.file).get_slice(source.name)
        except SafetensorError as error:
            raise ValueError(f"load_pretrained: {source.file} does not hold {source.name}: {error}") from error
        shape = tuple(piece.get_shape())
        dtype = self._stored(source, tuple(slice(0, 0) for _ in shape)).dtype  # of no numbers, or of the only one
        return shape, dtype

    def check(self, name: str, source: ViewSource, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Raises ValueError unless the tensor has this shape, and this dtype or one that is cast."""
        if isinstance(source, Computed):
            found, kinds = tuple(source.node.meta["val"].shape), [self.outline(x)[1] for x in source.inputs]
            made = f" after {source.words} of {_some([x.name for x in source.inputs])}"
        else:
            found, kind = self.outline(source)
            kinds, made = [kind], ""
        if found != shape:
            raise ValueError(
                f"load_pretrained: {name} has shape {found} in the checkpoint{made}, the model needs {shape}"
            )
        for kind in kinds:
            if other_kind(kind, dtype):
                raise ValueError(
                    f"load_pretrained: {name} is {kind} in the checkpoint, the model needs {dtype}; only floats are "
                    "cast to floats: convert the checkpoint first (a quantized one with its scales)"
                )

    def read(self, source: ViewSource, window: Window, dtype: torch.dtype) -> Tensor:
        """A window of a tensor; () is the whole. What is computed is cast to ``dtype`` before, as transformers does."""
        if isinstance(source, Stored):
            return self._stored(source, window)
        inputs = source.inputs
        return pulled(source.node, window, lambda i, part: self._stored(inputs[i], part).to(dtype))

    def _stored(self, source: Stored, window: Window) -> Tensor:
        file = self.open(source.file)
        value: Tensor = file.get_slice(source.name)[window] if window else file.get_tensor(source.name)
        return value


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
