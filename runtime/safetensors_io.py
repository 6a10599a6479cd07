"""HuggingFace checkpoints, in and out: safetensors files under the original names.

Loading, a rank reads from the files only the boxes that it holds. Saving, one tensor at a time is whole, and rank 0
writes. `transformers`' own from_pretrained reads the result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from autopar.parameter import ParameterSpec
from autopar.runtime.groups import Groups, agree
from autopar.runtime.sharded_tensor import boxes, cuts_of
from autopar.runtime.state import fetch_whole

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


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
    names: Iterable[str] | None = None,
) -> dict[str, Tensor]:
    """This rank's pieces of a checkpoint: parameter name -> local tensor on the mesh's device, in the spec's dtype.

    ``buffers`` (persistent ones, whole) are filled in place; one that the files lack keeps its value. ``prefix``: that
    of the base model ("model", "transformer"): a checkpoint of the base model alone loads into a model with a head, and
    the other way round. ``ignore``: patterns of names in the files that the model may lack. ``names``: read these
    parameters only (those of one pipeline stage); all are checked. A tied parameter may lie under any of its names.

    Raises ValueError for missing, unexpected and truncated tensors, and for shapes that differ.
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
    wanted = set(names) if names is not None else {s.name for s in specs}
    with _Files() as files:
        out = {s.name: _read_piece(files, sources[found[s.name] or ""], s, groups) for s in specs if s.name in wanted}
        for name, buffer in (buffers or {}).items():
            if name in sources:
                _check_shape(name, files.shape(sources[name]), tuple(buffer.shape))
                with torch.no_grad():
                    buffer.copy_(files.read(sources[name], ()))
    return out


def _listed(word: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return f"{word} {', '.join(names[:6])}{more}" if names else ""


def _sources(folder: Path) -> dict[str, _Source]:
    """Name in the files -> where it lies."""
    index, single = folder / INDEX, folder / SINGLE
    if index.exists():
        try:
            weights = json.loads(index.read_text())["weight_map"]
        except (json.JSONDecodeError, KeyError) as error:
            raise ValueError(f"load_pretrained: {index} is not an index of safetensors files: {error!r}") from error
        return {name: _Source(folder / file, name) for name, file in weights.items()}
    if not single.exists():
        raise ValueError(
            f"load_pretrained: {folder} needs {SINGLE} or {INDEX}, found neither; save it as safetensors first"
        )
    with _Files() as files:
        return {name: _Source(single, name) for name in files.open(single).keys()}  # noqa: SIM118 - no mapping


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

    def shape(self, source: _Source) -> tuple[int, ...]:
        try:
            return tuple(self.open(source.file).get_slice(source.name).get_shape())
        except SafetensorError as error:
            raise ValueError(f"load_pretrained: {source.file} does not hold {source.name}: {error}") from error

    def read(self, source: _Source, window: tuple[slice, ...]) -> Tensor:
        file = self.open(source.file)
        value: Tensor = file.get_slice(source.name)[window] if window else file.get_tensor(source.name)
        return value


def _check_shape(name: str, found: tuple[int, ...], needed: tuple[int, ...]) -> None:
    if found != needed:
        raise ValueError(f"load_pretrained: {name} has shape {found} in the checkpoint, the model needs {needed}")


def _read_piece(files: _Files, source: _Source, spec: ParameterSpec, groups: Groups) -> Tensor:
    """The boxes that this rank holds, read one by one into its local tensor."""
    _check_shape(spec.name, files.shape(source), tuple(spec.shape))
    local = torch.empty(spec.local_shape(groups.mesh), dtype=spec.dtype, device=groups.device)
    cuts = cuts_of(spec.placements, groups.mesh.sizes)
    for box in boxes(spec.shape, cuts, groups.mesh.sizes, groups.coordinate):
        window = tuple(slice(start, start + size) for start, size in zip(box.start, box.size))
        box.of_local(local).copy_(files.read(source, window))
    return local


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
) -> None:
    """Write a checkpoint that from_pretrained loads. Collective: every rank calls it; rank 0 alone writes.

    ``buffers``: the persistent ones. ``configs``: objects with ``save_pretrained(folder)``, such as model.config and
    model.generation_config. Tied parameters are written once, under their first name. ``owners``: as in
    `full_state_dict`.
    """
    folder, specs, buffers = Path(folder), list(specs), dict(buffers or {})
    sizes = {s.name: s.nbytes() for s in specs} | {name: b.numel() * b.element_size() for name, b in buffers.items()}
    files = _split(sizes, _parse_size(max_shard_size))
    by_name = {s.name: s for s in specs}
    writes = groups.rank == 0
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_old(folder)
    for file, names in files.items():
        content = {}
        for name in names:
            whole = _whole(name, parameters, by_name, buffers, groups, owners)
            if writes:
                content[name] = whole.cpu().contiguous()
        if writes:
            save_file(content, folder / file, metadata={"format": "pt"})
    if writes:
        if len(files) > 1:
            _write_index(folder, files, sizes, specs, buffers)
        for config in configs:
            config.save_pretrained(folder)
    agree(groups, "written", f"the checkpoint in {folder}")  # nobody reads before it is complete


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
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"(\d+)\s*([KMGT]?)(i?)B", size.strip(), re.IGNORECASE)
    if not match:
        raise ValueError(f"save_pretrained: expected a size such as '5GB' or '500MB', found {size!r}")
    return int(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " ")


def _split(sizes: Mapping[str, int], limit: int) -> dict[str, list[str]]:
    """File name -> tensor names, in order; no file above the limit unless one tensor alone is."""
    parts: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if parts[-1] and filled + size > limit:
            parts.append([])
            filled = 0
        parts[-1].append(name)
        filled += size
    if len(parts) == 1:
        return {SINGLE: parts[0]}
    return {f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors": names for i, names in enumerate(parts)}


def _remove_old(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name in (SINGLE, INDEX) or re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", path.name):
            path.unlink()


def _write_index(
    folder: Path,
    files: Mapping[str, Sequence[str]],
    sizes: Mapping[str, int],
    specs: Sequence[ParameterSpec],
    buffers: Mapping[str, Tensor],
) -> None:
    count = sum(torch.Size(s.shape).numel() for s in specs) + sum(b.numel() for b in buffers.values())
    weights = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"total_parameters": count, "total_size": sum(sizes.values())}, "weight_map": weights}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
