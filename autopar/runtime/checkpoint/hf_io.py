"""Loading and saving Hugging Face checkpoints: safetensors files with the original names.

On load, a rank reads only its shards from the files. On save, one tensor at a time is gathered and rank 0 writes it.
from_pretrained of transformers reads the result. Arguments of transformers' `save_pretrained` that ask for the same
folder are accepted, the others are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.fx import Node

from autopar.ir.signature import ParameterSpec, in_buckets
from autopar.ir.weight_conversion import WeightConversion, as_they_are
from autopar.runtime.checkpoint.hf_atomic_write import CONFIG, INDEX, SINGLE, AtomicFolder, named_weights, quantizer
from autopar.runtime.checkpoint.partial_reads import Window, pulled, traced
from autopar.runtime.consistency.rank_checks import all_alike
from autopar.runtime.mesh.process_groups import Groups
from autopar.runtime.params.parameters import STEPS, check_tensors, fetch_whole, local_tensor, other_kind, piece_like
from autopar.runtime.params.sharded_tensor import whole_tensor
from autopar.runtime.params.shards import boxes, cuts_of
from autopar.values import parse, refuse, whole_number

# --- files -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """The location of a tensor: file, name in the file."""

    file: Path
    name: str


@dataclass(frozen=True)
class ViewSource:
    """A tensor that is stored, or computed from stored ones by a node of `partial_reads.traced`. words: describes
    how."""

    inputs: tuple[Stored, ...]
    node: Node | None = None
    words: str = ""


def _head(folder: Path) -> Path:
    """The file to open first, as in transformers: the one that config.json names, else a single file, else an index."""
    try:
        named = named_weights(folder)
        chosen = [folder / SINGLE, folder / INDEX] if named is None else [_within(folder, named, CONFIG)]
        found = [file for file in chosen if file.is_file()]
    except OSError as error:
        raise ValueError(f"load_pretrained: needs a readable folder, found {folder}: {error}") from error
    if found and not _is_own(folder, str(found[0].relative_to(folder))):
        raise ValueError(
            f"load_pretrained: {found[0]} is a link that leads out of the folder; put the file there, or load the "
            "folder that has it"
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
    """Name in the files -> location. Raises ValueError if there are no files, or an index names files outside."""
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
        why = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)
        raise ValueError(f"load_pretrained: {index} is not an index of safetensors files: {why}") from error
    found = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(found, dict):
        raise ValueError(
            f"load_pretrained: {index} is not an index of safetensors files: it needs a weight_map of names to files"
        )
    return found


def _within(folder: Path, file: Any, by: str = INDEX) -> Path:
    """The file that an index or a config names. It must be in the folder itself, or be a link of the Hugging Face
    cache, whose snapshots/<revision>/ links to ../../blobs/: an index is untrusted input and must not name any
    other file."""
    inside = isinstance(file, str) and file and not Path(file).is_absolute() and ".." not in Path(file).parts
    if inside and _is_own(folder, file):
        return folder / file
    raise ValueError(
        f"load_pretrained: {folder / by} names the file {file!r}, which is absolute, outside of the folder or "
        "reached through a link; put the files into the folder and name them by their path in it"
    )


def _is_own(folder: Path, file: str) -> bool:
    """Whether a path in the folder resolves to a file in it, or is a link of the cache. False for loops of links."""
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
        """The open file at a path. Raises ValueError if it is not a safetensors file."""
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="pt").__enter__()
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"load_pretrained: {path} is missing, truncated or not a safetensors file: {error}"
                ) from error
        return self._open[path]

    def outline(self, source: Stored) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of a stored tensor. Raises ValueError if the file does not hold it."""
        try:
            piece = self.open(source.file).get_slice(source.name)
        except SafetensorError as error:
            raise ValueError(f"load_pretrained: {source.file} does not hold {source.name}: {error}") from error
        shape = tuple(piece.get_shape())
        dtype = self.stored(source, tuple(slice(0, 0) for _ in shape)).dtype  # of an empty slice, or of the scalar
        return shape, dtype

    def check(self, name: str, source: ViewSource, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Raises ValueError unless the tensor has this shape, and this dtype or one that can be cast to it."""
        outlines = [self.outline(x) for x in source.inputs]
        found, made = outlines[0][0], ""
        if source.node is not None:
            found = tuple(source.node.meta["val"].shape)
            made = f" after {source.words} of {_listed([x.name for x in source.inputs], 3)}"
        if found != shape:
            raise ValueError(
                f"load_pretrained: {name} has shape {found} in the checkpoint{made}, the model needs {shape}"
            )
        for _, kind in outlines:
            if other_kind(kind, dtype):
                raise ValueError(
                    f"load_pretrained: {name} is {kind} in the checkpoint, the model needs {dtype}; only floats are "
                    "cast to floats: convert the checkpoint first (a quantized one with its scales)"
                )

    def read(self, source: ViewSource, window: Window, dtype: torch.dtype) -> Tensor:
        """Read a window of a tensor; () is all of it. Inputs of a computed tensor are cast to ``dtype`` before, as in
        transformers."""
        inputs = source.inputs
        if source.node is None:
            return self.stored(inputs[0], window)
        return pulled(source.node, window, lambda i, part: self.stored(inputs[i], part).to(dtype))

    def stored(self, source: Stored, window: Window) -> Tensor:
        """Read a window of a stored tensor; () is all of it."""
        file = self.open(source.file)
        value: Tensor = file.get_slice(source.name)[window] if window else file.get_tensor(source.name)
        return value


Recipes = Callable[[list[str]], list[WeightConversion]]  # of names

# --- loading ------------------------------------------------------------------------------------------


def checked_pretrained(
    files: Files,
    folder: str | Path,
    specs: Iterable[ParameterSpec],
    groups: Groups,
    buffers: Mapping[str, Tensor] | None,
    prefix: str,
    ignore: Sequence[str],
    into: Mapping[str, Tensor] | None,
    recipes: Recipes | None,
    elsewhere: Sequence[str] = (),
) -> Callable[[], dict[str, Tensor]]:
    """Check a checkpoint and return a function that reads this rank's shards: parameter name -> local tensor on the
    mesh's device, in the spec's dtype. Nothing is filled if the checkpoint does not fit.

    ``buffers`` (persistent ones, unsharded) are filled in place; one that is not in the files keeps its value.
    ``prefix``: that of the base model ("model", "transformer"): a checkpoint of the base model alone loads into a model
    with a head, and vice versa. ``ignore``: patterns of names in the files that the model may lack. ``into``: shards to
    fill in place, of the parameters to read (those of one pipeline stage); None: all, into new tensors. A tied
    parameter may be stored under any of its names. ``recipes``: names in the files -> how tensors of the model are
    computed from them; None: they are the model's. A rank reads only those parts of the source tensors that its shard
    depends on. ``elsewhere``: names of the model that are not read, since other ranks hold them.

    Raises ValueError for missing, unexpected and truncated tensors, for other shapes, for dtypes of another kind
    (integers are not read into floats), for quantized weights, and for an index that names files outside of the folder.
    """
    if method := quantizer(Path(folder)):
        raise ValueError(
            f"load_pretrained: needs plain weights, found quantized ones in {folder} (quantization_config in "
            f"config.json: {method!r}), whose scales would not be applied; dequantize them with transformers, save "
            "them, and load that folder"
        )
    specs = list(specs)
    known = [n for s in specs for n in (s.name, *s.aliases)] + list(buffers or {})
    known += elsewhere
    stored = stored_in(Path(folder))
    sources, unknown = _renamed(_made(files, stored, (recipes or as_they_are)(list(stored))), stored, known, prefix)
    unknown = [n for n in unknown if not any(re.search(pattern, n) for pattern in ignore)]
    found = {s.name: next((n for n in (s.name, *s.aliases) if n in sources), None) for s in specs}
    missing = [name for name, source in found.items() if source is None]
    if missing or unknown:
        raise ValueError(
            f"load_pretrained: {folder} does not fit the model: "
            + "; ".join(f"{what} {_listed(n)}" for what, n in (("missing", missing), ("unexpected", unknown)) if n)
            + "; use a checkpoint of this architecture, or pass the names to ignore"
        )
    for spec in specs:
        files.check(spec.name, sources[found[spec.name] or ""], tuple(spec.shape), spec.dtype)
    held = {name: buffer for name, buffer in (buffers or {}).items() if name in sources}
    for name, buffer in held.items():
        files.check(name, sources[name], tuple(buffer.shape), buffer.dtype)

    @torch.no_grad()
    def fill() -> dict[str, Tensor]:
        out = (
            dict(into)
            if into is not None
            else {
                s.name: torch.empty(s.stored_shape(groups.mesh, groups.coordinate), dtype=s.dtype, device=groups.device)
                for s in specs
            }
        )
        for spec in specs:
            if spec.name in out:
                _read_piece(files, sources[found[spec.name] or ""], spec, groups, out[spec.name])
        for name, buffer in held.items():
            buffer.copy_(files.read(sources[name], (), buffer.dtype))
        return out

    return fill


def saved_steps(folder: str | Path) -> int | None:
    """The number of training steps stored in a checkpoint of `save_pretrained`; None if there is none."""
    with Files() as files:
        for source in stored_in(Path(folder)).values():
            text = (files.open(source.file).metadata() or {}).get(STEPS, "")
            return int(text) if re.fullmatch("[0-9]{1,12}", text) else None
    return None


def _listed(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _made(
    files: Files, stored: Mapping[str, Stored], recipes: Sequence[WeightConversion]
) -> list[tuple[str, str, ViewSource]]:
    """(name in the model, name in the files, source) of every tensor that the recipes compute."""
    out: list[tuple[str, str, ViewSource]] = []
    for recipe in recipes:
        inputs = tuple(stored[name] for name in recipe.sources)
        if recipe.make is None:
            out.append((recipe.target, recipe.sources[0], ViewSource(inputs)))
            continue
        outlines = [_outline(*files.outline(source)) for source in inputs]
        try:
            nodes = traced(recipe.make, outlines)
        except Exception as error:
            raise ValueError(
                f"load_pretrained: {recipe.target} cannot be computed from {_listed(recipe.sources)}, of shapes "
                f"{_listed([str(list(x.shape)) for x in outlines])}, by {recipe.words}: {error}; check "
                "that none is missing and that the model type is the same"
            ) from error
        out += [(name, recipe.sources[0], ViewSource(inputs, node, recipe.words)) for name, node in nodes.items()]
    return out


def _outline(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def _renamed(
    made: Sequence[tuple[str, str, ViewSource]], stored: Iterable[str], known: Sequence[str], prefix: str
) -> tuple[dict[str, ViewSource], list[str]]:
    """Sources by the model's names, and names that the model lacks."""
    names, dot = set(known), f"{prefix}."
    base_model = prefix and not any(n.startswith(dot) for n in names)  # the model is the base model itself
    base_file = prefix and not any(n.startswith(dot) for n in stored)  # the files are of the base model alone
    out: dict[str, ViewSource] = {}
    unknown = []
    for name, original, source in made:
        target = name
        if base_model and not base_file and name.startswith(dot):
            target = name.removeprefix(dot)
        elif base_file and not base_model and dot + name in names:
            target = dot + name
        if target in out:
            raise ValueError(
                f"load_pretrained: {target} is in the files twice, under its own name and an older one, such as "
                f"{original}; remove one of them"
            )
        if target in names:
            out[target] = source
        elif not (base_model and not base_file and not original.startswith(dot)):  # a head the base model does not have
            unknown.append(name)
    return out, unknown


def _read_piece(files: Files, source: ViewSource, spec: ParameterSpec, groups: Groups, local: Tensor) -> None:
    """Read the ranges that this rank holds, one by one, into its local tensor."""
    cuts = cuts_of(spec.placements, groups.mesh.sizes)
    for box in boxes(spec.shape, cuts, groups.mesh.sizes, groups.coordinate):
        window = tuple(slice(start, start + size) for start, size in zip(box.start, box.size))
        box.of_local(local).copy_(files.read(source, window, spec.dtype))


# --- saving -------------------------------------------------------------------------------------------


def save_pretrained(
    folder: str | Path,
    parameters: Mapping[str, Tensor],
    specs: Iterable[ParameterSpec],
    groups: Groups,
    buffers: Mapping[str, Tensor] | None = None,
    configs: Iterable[Any] = (),
    max_shard_size: int | str = "5GB",
    steps: int = 0,
    recipes: Recipes | None = None,
) -> None:
    """Write a checkpoint that from_pretrained loads. Collective: every rank calls it; only rank 0 writes.

    The folder contains the old checkpoint until the new one is complete, and one of them if a rank dies meanwhile
    (`autopar.runtime.checkpoint.hf_atomic_write`).

    ``buffers``: the persistent ones. ``configs``: objects with ``save_pretrained(folder)``, such as model.config and
    model.generation_config. Tied parameters are written once, under their first name. ``steps``: training steps so far,
    stored in the files' headers. ``recipes``: names of the model -> the tensors to write instead; without it, those of
    the model are written. All tensors computed from one tensor go into one file.
    """
    folder, specs, buffers = Path(folder), list(specs), dict(buffers or {})
    by_name = {s.name: s for s in specs}
    outlines = {s.name: _outline(s.shape, s.dtype) for s in specs}
    outlines |= {name: buffer.to("meta") for name, buffer in buffers.items()}
    made = _written((recipes or as_they_are)(list(outlines)), outlines)
    sizes = [sum(x.nbytes for x in written.values()) for _, written in made]
    parts = in_buckets(sizes, _parse_size(max_shard_size)) or [[]]
    files: dict[str, str] = {}  # tensor -> file
    with _in_words(folder), AtomicFolder(folder, len(parts)) if groups.rank == 0 else nullcontext() as draft:
        for part in parts:
            content: dict[str, Tensor] = {}
            for recipe, _ in (made[i] for i in part):
                whole = [
                    buffers[name].detach() if name in buffers else fetch_whole(by_name[name], parameters.get(name))
                    for name in recipe.sources
                ]
                if draft is not None:
                    content |= {name: x.contiguous() for name, x in _make(recipe, [w.cpu() for w in whole]).items()}
            if draft is not None:
                files |= dict.fromkeys(content, draft.add(content, {"format": "pt", STEPS: str(steps)}))
        if draft is not None:
            draft.publish(_index(files, [x for _, written in made for x in written.values()]), configs)
    all_alike(groups, f"the checkpoint in {folder}")  # no rank returns before it is complete


def _written(
    recipes: Sequence[WeightConversion], outlines: Mapping[str, Tensor]
) -> list[tuple[WeightConversion, Mapping[str, Tensor]]]:
    """Each recipe with its results, on the meta device, in the order of the model."""
    place = {name: number for number, name in enumerate(outlines)}
    ordered = sorted(recipes, key=lambda recipe: min(place[name] for name in recipe.sources))
    return [(recipe, _make(recipe, [outlines[name] for name in recipe.sources])) for recipe in ordered]


def _make(recipe: WeightConversion, tensors: list[Tensor]) -> dict[str, Tensor]:
    return {recipe.target: tensors[0]} if recipe.make is None else recipe.make(tensors)


@contextmanager
def _in_words(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"save_pretrained: needs a writable folder, found {folder}: {error.strerror or error}; use another folder "
            "or free space (an older checkpoint there is unchanged)"
        ) from error


def _parse_size(size: int | str) -> int:
    """'5GB' -> 5 * 10**9"""
    if not isinstance(size, str):
        return whole_number("max_shard_size", size, 1)
    match = re.fullmatch(r"([0-9]{1,12})\s*([KMGT]?)(i?)B", size.strip(), re.IGNORECASE)
    if not match or not int(match[1]):
        raise refuse("max_shard_size", "bytes, or a size such as '5GB' or '500MB'", size)
    return int(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " ")


def _index(files: Mapping[str, str], written: Sequence[Tensor]) -> dict[str, Any]:
    """The contents of the index of several files. ``written``: all tensors, on the meta device."""
    totals = {"total_parameters": sum(x.numel() for x in written), "total_size": sum(x.nbytes for x in written)}
    return {"metadata": totals, "weight_map": dict(files)}


# --- arguments that scripts pass to save_pretrained ------------------------------------------------------------


_SAID = {"safe_serialization": True, "push_to_hub": False, "variant": None, "token": None}  # accepted: no effect


def check_habits(how: Mapping[str, Any], own: Mapping[str, nn.Parameter], specs: tuple[ParameterSpec, ...]) -> None:
    """``own``: this rank's shards by name. Raises ValueError for arguments that would change what is written."""
    for name, value in how.items():
        if name == "is_main_process":
            continue  # rank 0 is the main process
        if name == "save_function":
            _check_function(value)
        elif name == "state_dict":
            if value is not None:
                _check_weights(value, own, specs)
        elif name not in _SAID:
            raise ValueError(
                f"save_pretrained: of a parallel model does not support {name}, found {value!r}; leave it out"
            )
        elif value != _SAID[name]:
            raise ValueError(
                f"save_pretrained: of a parallel model writes safetensors into a folder, found {name}={value!r}; "
                "leave it out, and do that with the folder afterwards"
            )


def _check_function(function: Any) -> None:
    home = str(getattr(function, "__module__", ""))
    if not home.startswith(("accelerate.", "torch.", "safetensors.")):
        raise ValueError(
            f"save_pretrained: rank 0 writes the files itself, found save_function={function!r}; leave it out, and do "
            "that with the folder afterwards"
        )


def _check_weights(state: Mapping[str, Any], own: Mapping[str, nn.Parameter], specs: tuple[ParameterSpec, ...]) -> None:
    """Raises ValueError unless the weights are the model's own. A rank that does not write may pass an empty dict."""
    check_tensors(state)
    for spec in specs if state else ():
        name = next((n for n in (spec.name, *spec.aliases) if n in state), None)
        if name is not None and (spec.name not in own or _same(own[spec.name], state[name], spec)):
            continue
        raise ValueError(
            f"save_pretrained: writes the model's own weights, found a state_dict with another {spec.name} or without "
            "it; leave state_dict out, or load it with load_state_dict first"
        )


def _same(parameter: nn.Parameter, whole: Tensor, spec: ParameterSpec) -> bool:
    if tuple(whole.shape) != tuple(spec.shape):
        return False
    piece = local_tensor(parameter)
    given = piece_like(parameter, whole_tensor(whole))
    return torch.equal(piece, given.to(piece.device, piece.dtype))
