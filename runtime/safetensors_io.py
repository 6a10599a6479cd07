"""HuggingFace checkpoints, in and out: safetensors files under the original names.

Loading, a rank reads from the files only the boxes that it holds. Saving, one tensor at a time is whole, and rank 0
writes. `transformers`' own from_pretrained reads the result.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from autopar.ir.parameter import ParameterSpec
from autopar.runtime.agreement import agree
from autopar.runtime.checkpoint_folder import CONFIG, INDEX, SINGLE, Draft, named_weights
from autopar.runtime.groups import Groups
from autopar.runtime.sharded_tensor import boxes, cuts_of
from autopar.runtime.state import STEPS, fetch_whole, other_kind
from autopar.values import parse, refuse, whole_number


@dataclass(frozen=True)
class _Source:
    """Where a tensor lies: file, name in the file."""

    file: Path
    name: str


# --- loading ------------------------------------------------------------------------------------------


def load_pretrained(
    folder: str | Path,
    specs: Iterable[ParameterSpec],
    groups: Groups,
    buffers: Mapping[str, Tensor] | None = None,
    prefix: str = "",
    ignore: Sequence[str] = (),
    into: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """This rank's pieces of a checkpoint: parameter name -> local tensor on the mesh's device, in the spec's dtype.

    ``buffers`` (persistent ones, whole) are filled in place; one that the files lack keeps its value. ``prefix``: that
    of the base model ("model", "transformer"): a checkpoint of the base model alone loads into a model with a head, and
    the other way round. ``ignore``: patterns of names in the files that the model may lack. ``into``: pieces to fill in
    place, of the parameters to read (those of one pipeline stage); without it, all into new ones. All are checked
    first, so that none is filled from files that do not fit. A tied parameter may lie under any of its names.

    Raises ValueError for missing, unexpected and truncated tensors, for shapes that differ, for dtypes of another kind
    (integers are not read into floats), and for an index that names files outside of the folder.
    """
    specs = list(specs)
    known = [n for s in specs for n in (s.name, *s.aliases)] + list(buffers or {})
    sources, unknown = _rename(_sources(Path(folder)), known, prefix)
    unknown = [n for n in unknown if not any(re.search(pattern, n) for pattern in ignore)]
    found = {s.name: next((n for n in (s.name, *s.aliases) if n in sources), None) for s in specs}
    missing = [name for name, source in found.items() if source is None]
    if missing or unknown:
        raise ValueError(
            f"load_pretrained: {folder} does not fit the model: "
            + "; ".join(filter(None, (_listed("missing", missing), _listed("unexpected", unknown))))
            + "; use the checkpoint of this architecture, or name what to ignore"
        )
    with _Files() as files:
        for spec in specs:
            files.check(spec.name, sources[found[spec.name] or ""], tuple(spec.shape), spec.dtype)
        stored = {name: buffer for name, buffer in (buffers or {}).items() if name in sources}
        for name, buffer in stored.items():
            files.check(name, sources[name], tuple(buffer.shape), buffer.dtype)
        out = dict(into) if into is not None else {s.name: _empty(s, groups) for s in specs}
        with torch.no_grad():
            for spec in specs:
                if spec.name in out:
                    _read_piece(files, sources[found[spec.name] or ""], spec, groups, out[spec.name])
            for name, buffer in stored.items():
                buffer.copy_(files.read(sources[name], ()))
    return out


def saved_steps(folder: str | Path) -> int | None:
    """The training steps that a checkpoint of `save_pretrained` had behind it; None of one that says nothing."""
    with _Files() as files:
        for source in _sources(Path(folder)).values():
            text = (files.open(source.file).metadata() or {}).get(STEPS, "")
            return int(text) if re.fullmatch("[0-9]{1,12}", text) else None
    return None


def _listed(word: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return f"{word} {', '.join(names[:6])}{more}" if names else ""


def _head(folder: Path) -> Path:
    """The file to begin with, as in transformers: what config.json names, else a single file, else an index."""
    try:
        named = named_weights(folder)
        chosen = [folder / SINGLE, folder / INDEX] if named is None else [_within(folder, named, CONFIG)]
        found = [file for file in chosen if file.is_file()]
    except OSError as error:
        raise ValueError(f"load_pretrained: needs a folder that can be read, found {folder}: {error}") from error
    if found:
        return found[0]
    if named is not None:
        raise ValueError(
            f"load_pretrained: {folder / CONFIG} names the file {named!r}, found no such file; put it there"
        )
    raise ValueError(
        f"load_pretrained: {folder} needs {SINGLE} or {INDEX}, found neither; save it as safetensors first"
    )


def _sources(folder: Path) -> dict[str, _Source]:
    """Name in the files -> where it lies."""
    head = _head(folder)
    if head.suffix != ".json":
        with _Files() as files:
            return {name: _Source(head, name) for name in files.open(head).keys()}  # noqa: SIM118 - no mapping
    weights = _weight_map(head)
    texts = [file for file in weights.values() if isinstance(file, str)]
    files_of = {file: _within(folder, file) for file in dict.fromkeys(texts)}
    return {
        name: _Source(files_of[file] if isinstance(file, str) else _within(folder, file), name)
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


def _rename(sources: Mapping[str, _Source], known: Sequence[str], prefix: str) -> tuple[dict[str, _Source], list[str]]:
    """Sources under the model's names, and names that the model lacks."""
    names, dot = set(known), f"{prefix}."
    base_model = prefix and not any(n.startswith(dot) for n in names)  # the model is the base model itself
    base_file = prefix and not any(n.startswith(dot) for n in sources)  # the files are of the base model alone
    out: dict[str, _Source] = {}
    unknown = []
    for name, source in sources.items():
        target = name
        if base_model and not base_file and name.startswith(dot):
            target = name.removeprefix(dot)
        elif base_file and not base_model and dot + name in names:
            target = dot + name
        if target in names:
            out[target] = source
        elif not (base_model and not base_file and not name.startswith(dot)):  # a head the base model does not have
            unknown.append(name)
    return out, unknown


class _Files:
    """Open safetensors files, each opened once."""

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: Any) -> None:
        for file in self._open.values():
            file.__exit__(None, None, None)

    def open(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="pt").__enter__()
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"load_pretrained: {path} is missing, truncated or no safetensors file: {error}"
                ) from error
        return self._open[path]

    def check(self, name: str, source: _Source, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Raises ValueError unless the file holds a tensor of this shape, and of this dtype or one that is cast."""
        try:
            piece = self.open(source.file).get_slice(source.name)
        except SafetensorError as error:
            raise ValueError(f"load_pretrained: {source.file} does not hold {source.name}: {error}") from error
        found = tuple(piece.get_shape())
        if found != shape:
            raise ValueError(f"load_pretrained: {name} has shape {found} in the checkpoint, the model needs {shape}")
        kind = self.read(source, tuple(slice(0, 0) for _ in shape)).dtype  # of no numbers, or of the only one
        if other_kind(kind, dtype):
            raise ValueError(
                f"load_pretrained: {name} is {kind} in the checkpoint, the model needs {dtype}; only floats are cast "
                "to floats: convert the checkpoint first (a quantized one with its scales)"
            )

    def read(self, source: _Source, window: tuple[slice, ...]) -> Tensor:
        file = self.open(source.file)
        value: Tensor = file.get_slice(source.name)[window] if window else file.get_tensor(source.name)
        return value


def _empty(spec: ParameterSpec, groups: Groups) -> Tensor:
    return torch.empty(spec.local_shape(groups.mesh), dtype=spec.dtype, device=groups.device)


def _read_piece(files: _Files, source: _Source, spec: ParameterSpec, groups: Groups, local: Tensor) -> None:
    """The boxes that this rank holds, read one by one into its local tensor."""
    cuts = cuts_of(spec.placements, groups.mesh.sizes)
    for box in boxes(spec.shape, cuts, groups.mesh.sizes, groups.coordinate):
        window = tuple(slice(start, start + size) for start, size in zip(box.start, box.size))
        box.of_local(local).copy_(files.read(source, window))


# --- saving -------------------------------------------------------------------------------------------


def save_pretrained(
    folder: str | Path,
    parameters: Mapping[str, Tensor],
    specs: Iterable[ParameterSpec],
    groups: Groups,
    buffers: Mapping[str, Tensor] | None = None,
    configs: Iterable[Any] = (),
    max_shard_size: int | str = "5GB",
    owners: Mapping[str, int] | None = None,
    steps: int = 0,
) -> None:
    """Write a checkpoint that from_pretrained loads. Collective: every rank calls it; rank 0 alone writes.

    The folder holds the old checkpoint until the new one is complete, and either of them if any rank dies meanwhile
    (`autopar.runtime.checkpoint_folder`).

    ``buffers``: the persistent ones. ``configs``: objects with ``save_pretrained(folder)``, such as model.config and
    model.generation_config. Tied parameters are written once, under their first name. ``owners``: as in
    `full_state_dict`. ``steps``: training steps run so far; they stand in the files' headers.
    """
    folder, specs, buffers = Path(folder), list(specs), dict(buffers or {})
    sizes = {s.name: s.nbytes() for s in specs} | {name: b.numel() * b.element_size() for name, b in buffers.items()}
    parts = _split(sizes, _parse_size(max_shard_size))
    by_name = {s.name: s for s in specs}
    files: dict[str, str] = {}  # tensor -> file
    with _in_words(folder), Draft(folder, len(parts)) if groups.rank == 0 else nullcontext() as draft:
        for names in parts:
            content = {}
            for name in names:
                whole = _whole(name, parameters, by_name, buffers, groups, owners)
                if draft is not None:
                    content[name] = whole.cpu().contiguous()
            if draft is not None:
                files |= dict.fromkeys(names, draft.add(content, {"format": "pt", STEPS: str(steps)}))
        if draft is not None:
            draft.publish(_index(files, sizes, specs, buffers), configs)
    agree(groups, "written", f"the checkpoint in {folder}")  # nobody reads before it is complete


@contextmanager
def _in_words(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"save_pretrained: needs a folder that can be written, found {folder}: {error.strerror or error}; an older "
            "checkpoint there is as it was, name another folder or make room"
        ) from error


def _whole(
    name: str,
    parameters: Mapping[str, Tensor],
    specs: Mapping[str, ParameterSpec],
    buffers: Mapping[str, Tensor],
    groups: Groups,
    owners: Mapping[str, int] | None,
) -> Tensor:
    if name in buffers:
        return buffers[name].detach()
    spec = specs[name]
    return fetch_whole(name, parameters.get(name), spec.shape, spec.dtype, groups, owners)


def _parse_size(size: int | str) -> int:
    """'5GB' -> 5 * 10**9"""
    if not isinstance(size, str):
        return whole_number("max_shard_size", size, 1)
    match = re.fullmatch(r"([0-9]{1,12})\s*([KMGT]?)(i?)B", size.strip(), re.IGNORECASE)
    if not match or not int(match[1]):
        raise refuse("max_shard_size", "bytes, or a size such as '5GB' or '500MB'", size)
    return int(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " ")


def _split(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Tensor names of each file, in order; no file above the limit unless one tensor alone is."""
    parts: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if parts[-1] and filled + size > limit:
            parts.append([])
            filled = 0
        parts[-1].append(name)
        filled += size
    return parts


def _index(
    files: Mapping[str, str],
    sizes: Mapping[str, int],
    specs: Sequence[ParameterSpec],
    buffers: Mapping[str, Tensor],
) -> dict[str, Any]:
    count = sum(torch.Size(s.shape).numel() for s in specs) + sum(b.numel() for b in buffers.values())
    return {"metadata": {"total_parameters": count, "total_size": sum(sizes.values())}, "weight_map": dict(files)}
