"""Images of any sizes, whose patches lie in one row: what depends on the sizes becomes inputs of a step.

    pixel_values [80, 96], image_grid_thw [[1, 4, 4], [1, 8, 8]]
        --> pixel_values [128, 96], image_inputs {position_ids [128, 2], cu_seqlens [1, 128], places [4, 16], ...}

Vision towers of transformers compute positions, borders of images and windows, and weights of an interpolation from
grids, by functions of `transformers.vision_utils`, and take what they return as arguments instead. So the functions are
called here, for each batch, and a graph depends on the number of patches alone. That is padded with further images,
whose features no token takes; ``places`` says which feature each token takes.

A tower that computes with its grids in another way is found when its calls are recorded, on tensors without values: its
graph depends on them, and it is left as it is.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import vision_utils

from autopar.adapters.copying.fake import FakeTensorMode, new_mode, structure_copy
from autopar.adapters.dispatch import without_modes
from autopar.lift_to_float64 import LiftFloat32
from autopar.models.hf_batches import positions_of_images
from autopar.runtime.inputs.image_dealing import Dealt, kept

FLASH = "autopar_flash"  # transformers' towers pass borders of images to an implementation with "flash" in its name
SMALL = 64  # patches of an image of padding: attention within it costs little
# function of transformers.vision_utils -> the arguments of a tower that are its results
RESULTS = {
    "get_vision_position_ids": ("position_ids",),
    "get_vision_cu_seqlens": ("cu_seqlens",),
    "get_vision_attention_seqlens": ("cu_seqlens", "max_seqlen"),
    "get_vision_window_index": ("window_index", "cu_window_seqlens"),
    "get_vision_interpolation_indices_and_weights": ("interp_indices", "interp_weights"),
}
ORDER, SHAPES, PLACES, SPLITS, AXIS = "window_index", "image_shapes", "places", "splits", "axis"
OWN = (PLACES, SHAPES, SPLITS, AXIS)  # inputs that a tower does not take
LONGEST = {"max_seqlen": 1, "max_window_seqlen": 1}  # of kernels that we do not call
_FOUND: contextvars.ContextVar[dict[str, Any]] = contextvars.ContextVar("_FOUND")  # in a running forward
OF_SPLITS = {"prod", "floor_divide", "__floordiv__", "tolist", "__pow__"}  # how many features an image has


@dataclass(frozen=True)
class Kind:
    """The inputs of a kind of images. ``inputs``: the name of ours."""

    name: str
    pixels: str
    grids: str
    inputs: str
    features: str


KINDS = (
    Kind("image", "pixel_values", "image_grid_thw", "image_inputs", "get_image_features"),
    Kind("video", "pixel_values_videos", "video_grid_thw", "video_inputs", "get_video_features"),
)


@dataclass(frozen=True)
class _Call:
    """A call that a tower makes with its grids."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any]


class _Unknown(Exception):
    """A tower computes with its grids in a way that is not known."""


@dataclass(frozen=True)
class Tower:
    """What a tower computes from grids. merged: patches of a feature; side: of a square of these. shapes: whether each
    patch needs the grid of its image. deep: whether there are features for layers of the text."""

    calls: tuple[_Call, ...]
    merged: int
    side: int
    shapes: bool
    deep: bool = False

    def arguments(self, grids: Tensor, lift: bool) -> tuple[dict[str, Tensor], Tensor]:
        """(arguments of a tower that have a row for each patch, [P, ...] each, the order of features [F]) for grids
        [N, 3]. Patches are to be given in this order, so that windows need no permutation."""
        found: dict[str, Tensor] = {}
        with LiftFloat32() if lift else contextlib.nullcontext():
            for call in self.calls:
                made = call.function(grids, **call.arguments)
                names = RESULTS[call.function.__name__]
                found |= zip(names, made if isinstance(made, tuple) else (made,), strict=True)
        sizes = grids.prod(-1)
        patches = int(sizes.sum())
        order = found.pop(ORDER, torch.arange(patches // self.merged))  # within images: no window has two of them
        of_windows = found.pop("cu_window_seqlens", None)
        found = {n: _segments(x) if n == "cu_seqlens" else x for n, x in found.items() if isinstance(x, Tensor)}
        if self.shapes:
            found[SHAPES] = grids.repeat_interleave(sizes, 0)
        if any(x.shape[0] != patches for x in found.values()):
            raise _Unknown("an argument has no row for each patch")
        moved = self.of_patches(order)
        found = {name: x[moved] for name, x in found.items()}
        if of_windows is not None:
            found["cu_window_seqlens"] = _segments(of_windows)
        return found, order

    def order(self, grids: Tensor) -> Tensor:
        """The order of features alone."""
        call = next((c for c in self.calls if ORDER in RESULTS[c.function.__name__]), None)
        found: Tensor = torch.arange(int(grids.prod(-1).sum()) // self.merged)
        return call.function(grids, **call.arguments)[0] if call is not None and len(grids) else found

    def of_patches(self, order: Tensor) -> Tensor:
        """The order of patches, from that of features."""
        return (order.unsqueeze(1) * self.merged + torch.arange(self.merged)).flatten()

    def padding(self, patches: int) -> Tensor:
        """Grids of small images with so many patches."""
        whole = max(SMALL // self.merged, 1)
        wide = [whole] * (patches // self.merged // whole)
        rest = patches // self.merged % whole
        sizes = [[1, self.side, self.side * n] for n in [*wide, *[rest] * bool(rest)]]
        return torch.tensor(sizes, dtype=torch.int64).view(-1, 3)


def _segments(borders: Tensor) -> Tensor:
    """[0, 2, 5] --> [0, 0, 1, 1, 1]"""
    return torch.arange(len(borders) - 1).repeat_interleave(borders.diff())


# --- recording --------------------------------------------------------------------------------------------


def tower_of(model: nn.Module, kind: Kind, shape: Sequence[int], prepare: Callable[[nn.Module], Any]) -> Tower | str:
    """How the tower of a model computes with grids, or why that is not known. shape: of a patch."""
    mode = new_mode()
    replica = structure_copy(model, mode)
    prepare(replica)
    owner = _owner(replica, kind)
    side = _side(owner)
    if owner is None or not side:
        return "it has no tower that takes what depends on grids as arguments"
    grids = torch.tensor([[1, 2 * side, 2 * side], [1, 2 * side, 4 * side]])
    patches = int(grids.prod(-1).sum())
    take_borders(owner)
    seen = _Seen(grids, side, mode)
    try:
        with mode, seen, _recorded(owner, seen):
            given = torch.empty(patches, *shape, dtype=_dtype(replica))
            longest = {f"{kind.name}_{name}": n for name, n in LONGEST.items()}
            made = getattr(owner, kind.features)(given, seen.grids, return_dict=True, **longest)
    except Exception as error:  # whatever a tower makes of tensors without values
        return f"{type(error).__name__}: {error}".splitlines()[0]
    pieces = made.pooler_output
    if not isinstance(pieces, tuple) or [x.shape[0] for x in pieces] != (grids.prod(-1) // side**2).tolist():
        return "its features are not those of one image after the other"
    deep = getattr(made, "deepstack_features", None) is not None
    return Tower(tuple(seen.calls), side**2, side, seen.shapes, deep)


class _Seen(TorchFunctionMode):
    """Runs what depends on grids alone on real tensors. Raises _Unknown if that is more than sizes of images."""

    def __init__(self, grids: Tensor, side: int, mode: FakeTensorMode) -> None:
        super().__init__()
        self.grids, self.side, self.mode = grids, side, mode
        self.calls: list[_Call] = []
        self.shapes = self.busy = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if self.busy or not given or not all(type(x) is Tensor for x in given):
            return function(*args, **kwargs)
        name = getattr(function, "__name__", "")
        if name not in OF_SPLITS and name != "__get__":
            raise _Unknown(f"it computes {name} with its grids")
        with without_modes():
            return function(*args, **kwargs)

    def called(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call of one of `RESULTS` in the forward, as towers are to be given its results."""
        given = inspect.signature(function).bind(*args, **kwargs).arguments
        names, taken = RESULTS[function.__name__], given.pop("kwargs", None)
        if given.pop("grid_thw") is not self.grids or taken is None:
            raise _Unknown(f"it does not take the results of {function.__name__}")
        for name in names:
            taken.pop(name, None)
        call = _Call(function, given)
        self.calls.append(call)
        with self._apart():
            made, order = Tower((call,), self.side**2, self.side, False).arguments(self.grids, lift=False)
            made = {n: x.unsqueeze(0) if "seqlens" in n else x for n, x in made.items()} | {ORDER: order}
        fakes = {n: self._fake(x) for n, x in made.items()}
        results = tuple(fakes[n] if n in fakes else LONGEST[n] for n in names)
        return results if len(results) > 1 else results[0]

    def took_shapes(self) -> Tensor:
        """The grid of each patch's image."""
        self.shapes = True
        with self._apart():
            made = self.grids.repeat_interleave(self.grids.prod(-1), 0)
        return self._fake(made)

    def _fake(self, x: Tensor) -> Tensor:
        with self._apart():
            made: Tensor = self.mode.from_tensor(x)
        return made

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """Context manager: calls on real tensors that are not the forward's."""
        before, self.busy = self.busy, True
        try:
            with without_modes():
                yield
        finally:
            self.busy = before


@contextlib.contextmanager
def _recorded(owner: nn.Module, seen: _Seen) -> Iterator[None]:
    """Context manager: functions of grids, where the classes of a model look them up, are recorded."""
    files = {sys.modules[cls.__module__] for m in owner.modules() for cls in type(m).__mro__}
    before = []
    for file in files:
        for name, function in list(vars(file).items()):
            if (
                inspect.isfunction(function)
                and function.__module__ == vision_utils.__name__
                and file is not vision_utils
            ):
                before.append((file, name, function))
                known = functools.partial(seen.called, function) if name in RESULTS else _refused(name)
                setattr(file, name, known)
    give_shapes(owner, seen.took_shapes)
    try:
        yield
    finally:
        for file, name, function in before:
            setattr(file, name, function)


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise _Unknown(f"it calls {name}")

    return refuse


def _owner(model: nn.Module, kind: Kind) -> nn.Module | None:
    """The module that puts features of images into the places of a text."""
    methods = (kind.features, "get_placeholder_mask")
    return next((m for m in model.modules() if all(hasattr(type(m), name) for name in methods)), None)


def reads_images(model: nn.Module) -> bool:
    """Whether a model may take images whose patches lie in one row."""
    return any(_owner(model, kind) is not None for kind in KINDS)


def _side(owner: nn.Module | None) -> int:
    """The side of the square of patches that make a feature."""
    found = getattr(getattr(getattr(owner, "config", None), "vision_config", None), "spatial_merge_size", 0)
    return found if isinstance(found, int) else 0


def _dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())


# --- what a forward does ----------------------------------------------------------------------------------


def take_borders(owner: nn.Module) -> None:
    """Let the towers of a structure copy call attention once, with the borders of images."""
    for module in owner.modules():
        if "grid_thw" in inspect.signature(module.forward).parameters and hasattr(module, "config"):
            config: Any = module.config
            config._attn_implementation_internal = FLASH


class _OfPatches:
    """Stands for the grids of images where a tower asks for that of each patch's image: ``shapes[number, 1]``."""

    def __init__(self, shapes: Tensor) -> None:
        self.shapes = shapes

    def __getitem__(self, index: tuple[Any, int]) -> Tensor:
        return self.shapes[:, index[1]]


def give_shapes(owner: nn.Module, shapes: Callable[[], Tensor]) -> None:
    """Let embeddings that look up the grid of each patch's image have it."""
    for module in owner.modules():
        takes = inspect.signature(module.forward).parameters
        if {"lengths", SHAPES} <= takes.keys():
            object.__setattr__(module, "forward", functools.partial(_with_shapes, module, list(takes), shapes))


def _with_shapes(
    module: nn.Module, names: Sequence[str], shapes: Callable[[], Tensor], *args: Any, **kwargs: Any
) -> Any:
    given: dict[str, Any] = dict(zip(names, args, strict=False)) | kwargs
    given |= {"lengths": given["lengths"].new_zeros(1), SHAPES: _OfPatches(shapes())}
    return type(module).forward(module, **given)


def _shapes() -> Tensor:
    return _FOUND.get({})[SHAPES]


def read_inputs(model: nn.Module, batch: Mapping[str, Any]) -> None:
    """Let a structure copy take the inputs that `ImageReader` makes."""
    kinds = [kind for kind in KINDS if isinstance(batch.get(kind.inputs), Mapping)]
    for kind in kinds:
        owner = _owner(model, kind)
        assert owner is not None
        take_borders(owner)
        object.__setattr__(owner, kind.features, types.MethodType(_features(kind), owner))
        object.__setattr__(owner, "get_placeholder_mask", types.MethodType(_masks, owner))
        give_shapes(owner, _shapes)


@contextlib.contextmanager
def images_within() -> Iterator[None]:
    """Context manager: what a forward finds in its inputs is forgotten at the end."""
    token = _FOUND.set({})
    try:
        yield
    finally:
        _FOUND.reset(token)


def _masks(self: Any, ids: Any, inputs_embeds: Any, **features: Any) -> tuple[Tensor, ...]:
    """A model's masks of the places of images, videos, ..., with those where a token takes one of our features."""
    features = {n: x for n, x in features.items() if n not in {f"{kind.name}_features" for kind in KINDS}}
    made = type(self).get_placeholder_mask(self, ids, inputs_embeds=inputs_embeds, **features)
    own = (_FOUND.get({}).get(kind.name) for kind in KINDS)
    return tuple(x if mask is None else mask.unsqueeze(-1) for mask, x in zip(own, made, strict=False)) + made[2:]


def _features(kind: Kind) -> Callable[..., Any]:
    def features(self: Any, pixels: Tensor, grids: Any = None, **kwargs: Any) -> Any:
        given = kwargs.pop(kind.inputs, None)
        own = getattr(type(self), kind.features)
        if given is None:
            return own(self, pixels, grids, **kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in {k.inputs for k in KINDS}}
        places, segments = given[PLACES], given["cu_seqlens"]
        found = _FOUND.get({})
        found[SHAPES] = given.get(SHAPES)
        extra = {name: x for name, x in given.items() if name not in OWN} | LONGEST
        if "cu_window_seqlens" in given:
            side = _side(self)
            extra[ORDER] = torch.arange(segments.numel() // side**2, device=pixels.device)
        made = own(self, pixels, grids, **kwargs, **{f"{kind.name}_{name}": x for name, x in extra.items()})
        found[kind.name] = mask = places >= 0
        made.pooler_output = _placed(_returned(made.pooler_output, given), places, mask)
        if getattr(made, "deepstack_features", None) is not None:
            made.deepstack_features = [_placed(_returned(x, given), places, mask) for x in made.deepstack_features]
        return made

    return features


def _returned(pieces: Sequence[Tensor], given: Mapping[str, Any]) -> Tensor:
    """Features of the images that ranks compute -> of those of their texts, [rows, T, W]; a row is a microbatch of a
    rank, and has at most as many features as tokens."""
    features, rows = torch.cat(tuple(pieces), 0), given["cu_seqlens"].shape[0]
    width = features.shape[-1]
    if SPLITS in given:
        ranks, tokens = given[SPLITS].shape[-1], given[PLACES].numel() // rows
        x, splits = features.view(ranks, rows // ranks, -1, width), given[SPLITS].view(ranks, rows // ranks, 2, ranks)
        features = torch.ops.autopar.dealt_rows(x, splits, False, tokens, given[AXIS])
    return features.view(rows, -1, width)


def _placed(features: Tensor, places: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """Features of all images [rows, T, W] -> those that tokens take, in their order."""
    rows, _, width = features.shape
    if rows == 1:
        taken = features[0].index_select(0, places.flatten().clamp(min=0))
    else:
        taken = features.gather(1, places.reshape(rows, -1, 1).clamp(min=0).expand(-1, -1, width))
    return (taken.view(*places.shape, width)[mask],)


# --- a batch ----------------------------------------------------------------------------------------------


class ImageReader:
    """Images of the batches of one model. ``prepare`` makes a structure copy ready for capture; ``lift``: compute in
    float64 (`autopar.lift_to_float64`)."""

    def __init__(self, model: nn.Module, prepare: Callable[[nn.Module], Any], lift: bool) -> None:
        self.model, self.prepare, self.lift = model, prepare, lift
        self._towers: dict[tuple[Kind, tuple[int, ...]], Tower | str] = {}

    @property
    def kinds(self) -> dict[str, tuple[str, str]]:
        """Kind of images that a batch may have -> the names of its patches and of its grids."""
        return {kind.name: (kind.pixels, kind.grids) for kind in KINDS}

    def refusal(self, shapes: Mapping[str, tuple[int, ...]]) -> str:
        """Why the graph of a model depends on the grids of images; "" if it does not. ``shapes``: kind -> that of a
        patch."""
        towers = [self._tower(name, shape) for name, shape in shapes.items()]
        if why := next((tower for tower in towers if isinstance(tower, str)), ""):
            return why
        deep = any(isinstance(tower, Tower) and tower.deep for tower in towers)
        return "layers of the text add features of images and of videos together" if deep and len(towers) > 1 else ""

    def _tower(self, name: str, shape: tuple[int, ...]) -> Tower | str:
        kind = next(k for k in KINDS if k.name == name)
        if (kind, shape) not in self._towers:
            self._towers[kind, shape] = tower_of(self.model, kind, shape, self.prepare)
        return self._towers[kind, shape]

    def read(self, text: dict[str, Any], images: Mapping[str, tuple[Tensor, Tensor]], rows: int) -> ImagesOfBatch:
        """The images of a batch, (patches, grids) of each kind, in ``rows`` microbatches. Raises ValueError if they do
        not fit the text."""
        masks = masks_of(self.model, text["input_ids"].cpu())
        found: dict[Kind, _Images] = {}
        for kind, mask in zip(KINDS, masks, strict=False):
            if kind.name in images:
                pixels, grids = images[kind.name]
                tower = self._tower(kind.name, tuple(pixels.shape[1:]))
                assert isinstance(tower, Tower)
                own = images_by_row(kind, tower, mask, grids.cpu(), len(pixels), rows)
                found[kind] = _Images(tower, pixels, mask, own)
        given = {kind.grids: images[kind.name][1] for kind in found}
        if made := positions_of_images(self.model, {**text, **given}):
            text = {**text, **made}
            text.pop("second_per_grid_ts", None)  # for positions alone, one for each video
        return ImagesOfBatch(text, found, self.lift)


@dataclass(frozen=True)
class _Images:
    """Images of a kind. mask: their places in the text [B, S]; grids: of each microbatch."""

    tower: Tower
    pixels: Tensor
    mask: Tensor
    grids: Sequence[Tensor]


@dataclass(frozen=True)
class ImagesOfBatch:
    """Images beside a text, of one rank."""

    text: Mapping[str, Any]
    images: Mapping[Kind, _Images]
    lift: bool

    def _of(self, name: str) -> _Images:
        return next(images for kind, images in self.images.items() if kind.name == name)

    def pixels(self, name: str) -> Tensor:
        """The patches of a kind, [P, ...]."""
        return self._of(name).pixels

    def grids(self, name: str) -> Sequence[Tensor]:
        """Those of each microbatch, [n, 3]."""
        return self._of(name).grids

    def unit(self, name: str) -> int:
        """What the number of patches is to be a multiple of."""
        return self._of(name).tower.merged

    def inputs(self, patches: Mapping[str, int], dealt: Mapping[str, Dealt] | None = None) -> dict[str, Any]:
        """The inputs of the step, with so many patches of each kind in each microbatch. ``dealt``: of what kinds this
        rank computes others than its own."""
        out = dict(self.text)
        for kind, images in self.images.items():
            computed = (dealt or {}).get(kind.name) or kept(images.pixels, images.grids)
            out |= self._of_kind(kind, images, patches[kind.name], computed)
        return out

    def _of_kind(self, kind: Kind, images: _Images, patches: int, dealt: Dealt) -> dict[str, Any]:
        tower, pixels, rows = images.tower, dealt.pixels, len(images.grids)
        made: dict[str, list[Tensor]] = {}
        padded, start = pixels.new_zeros(rows * patches, *pixels.shape[1:]), 0
        for row, (grids, places) in enumerate(zip(dealt.grids, images.mask.chunk(rows), strict=True)):
            count = int(grids.prod(-1).sum())
            arguments, order = tower.arguments(torch.cat([grids, tower.padding(patches - count)]), self.lift)
            at = _features_of(tower, images.grids[row], dealt.starts[row])
            arguments[PLACES] = torch.full(places.shape, -1).masked_scatter(places, at)
            for name, x in arguments.items():
                made.setdefault(name, []).append(x.unsqueeze(0) if "seqlens" in name else x)
            own = tower.of_patches(order)[:count] + start  # padding comes last: no image takes patches of another one
            padded[row * patches : row * patches + count] = pixels[own.to(pixels.device)]
            start += count
        device = self.text["input_ids"].device
        inputs: dict[str, Any] = {name: torch.cat(parts).to(device) for name, parts in made.items()}
        if dealt.splits is not None:
            inputs |= {SPLITS: (dealt.splits // tower.merged).to(device), AXIS: dealt.axis}
        return {
            kind.pixels: padded,
            kind.grids: torch.tensor([[1, tower.side, rows * patches // tower.side]]),
            kind.inputs: inputs,
        }


def _features_of(tower: Tower, grids: Tensor, starts: Sequence[int]) -> Tensor:
    """Where the features of images are, before whose patches there are so many others (`Dealt.starts`)."""
    sizes = grids.prod(-1)
    moved = (torch.tensor(starts, dtype=torch.int64) - sizes.cumsum(0) + sizes) // tower.merged
    return tower.order(grids).argsort() + moved.repeat_interleave(sizes // tower.merged)


def masks_of(model: nn.Module, ids: Tensor) -> tuple[Tensor, ...]:
    """The places of images and of videos in a text [B, S], by the model's own code."""
    owner = _owner(model, KINDS[0])
    assert owner is not None
    found = owner.get_placeholder_mask(ids, inputs_embeds=torch.empty(*ids.shape, 1))  # type: ignore[operator]
    return tuple(x[..., 0] for x in found)


def images_by_row(kind: Kind, tower: Tower, mask: Tensor, grids: Tensor, patches: int, rows: int) -> list[Tensor]:
    """The grids of the images of each of ``rows`` parts of a text [B, S]. Raises ValueError where patches, features and
    places of images differ."""
    if int(grids.prod(-1).sum()) != patches:
        raise ValueError(
            f"{kind.grids}: grids need the patches of {kind.pixels}, found {int(grids.prod(-1).sum())} in the grids "
            f"and {patches} patches; pass both as a processor makes them"
        )
    counts = [int(part.sum()) for part in mask.chunk(rows)]
    features = (grids.prod(-1) // tower.merged).tolist()
    if sum(counts) != sum(features):
        raise ValueError(
            f"{kind.grids}: the features of {kind.name}s need as many places in the text, found {sum(features)} of "
            f"them ({tower.merged} patches each) and {sum(counts)} places; pass a grid for each {kind.name} of the "
            "text, in its order"
        )
    found, at = [], 0
    for row, left in enumerate(counts):
        start = at
        while left > 0:
            left -= features[at]
            at += 1
        if left:
            raise ValueError(
                f"{kind.grids}: each {kind.name} needs its places in one microbatch, found those of number {at - 1} in "
                f"microbatches {row} and {row + 1}; put them into one example"
            )
        found.append(grids[start:at])
    return found
