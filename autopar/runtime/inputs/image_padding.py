"""Images of any sizes, padded to a few numbers of patches: a part of `parallelize(model, mesh, padding="bucket")`.

    rank 0: patches [80, 96], grids [[1, 4, 4], [1, 8, 8]]         [128, 96] on both ranks, and what a model
    rank 1: patches [112, 96], grids [[1, 8, 12], [1, 4, 4]]  -->  computes from the grids as tensors

Where a model can take what depends on the sizes of images as inputs, a library's adapter makes these
(``image_reader``), and sizes need not be the same on all ranks, or in all steps. Each rank brings as many patches as
the one with the most, in each of its microbatches; a rank without images brings nothing but padding. Where that is less
padding, ranks compute images of each other (`autopar.runtime.inputs.image_dealing`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from autopar.capture.front_end import adapter_for
from autopar.runtime.inputs.image_dealing import Dealt, ImageDealer

LEAST = 64  # patches
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8)
DIMS = 4  # of a patch, at most
Images = dict[str, tuple[Tensor, Tensor]]  # kind -> patches, grids
Extremes = Callable[[Mapping[str, int]], tuple[dict[str, int], dict[str, int]]]


class OfBatch(Protocol):
    """The images of a rank's batch."""

    def pixels(self, name: str) -> Tensor:
        """The patches of a kind, [P, ...]."""
        ...

    def grids(self, name: str) -> Sequence[Tensor]:
        """Those of each microbatch, [n, 3]."""
        ...

    def unit(self, name: str) -> int:
        """What the number of patches of a kind is to be a multiple of."""
        ...

    def inputs(self, patches: Mapping[str, int], dealt: Mapping[str, Dealt]) -> dict[str, Any]:
        """The batch, with so many patches of each kind in each microbatch, of these images; else its own."""
        ...


class Reader(Protocol):
    """What an adapter knows of the images of a model."""

    @property
    def kinds(self) -> dict[str, tuple[str, str]]:
        """Kind of images -> the names of its patches [P, ...] and of its grids [N, 3]."""
        ...

    def refusal(self, shapes: Mapping[str, tuple[int, ...]]) -> str:
        """Why the graph depends on the sizes of images; "" if it does not. shapes: kind -> that of a patch."""
        ...

    def read(self, text: dict[str, Any], images: Images, rows: int) -> OfBatch:
        """The images of a batch in ``rows`` microbatches. Raises ValueError if they do not fit the text."""
        ...


def bucket(patches: int, unit: int = 1) -> int:
    """The padded number of patches: four sizes for each power of two, so that at most a quarter is padding."""
    step = max(LEAST, 1 << max((patches - 1).bit_length() - 3, 0))
    step = math.lcm(step, unit)
    return max(-(-patches // step), 1) * step


def _table(grids: Sequence[Tensor]) -> Tensor:
    """[n, 4], the microbatch and the grid of each image."""
    rows = torch.arange(len(grids)).repeat_interleave(torch.tensor([len(g) for g in grids]))
    return torch.cat([rows.unsqueeze(1), torch.cat(list(grids))], 1)


class ImagePadder:
    """Pads the images of one model. ``extremes``: the least and the largest sizes on any rank, collective. ``lazy``:
    batches with as many patches on each rank as the first one are not padded. ``dealer``: sends images to other ranks,
    from the first batch on that has less padding then; ``always``: from the first one on."""

    def __init__(
        self,
        root: nn.Module,
        microbatches: int,
        lift: bool,
        extremes: Extremes,
        lazy: bool = False,
        dealer: ImageDealer | None = None,
        always: bool = False,
    ) -> None:
        reader = getattr(adapter_for(root), "image_reader", None)
        self.reader: Reader | None = reader(root, lift) if reader is not None else None
        self.microbatches, self.extremes, self.lazy = microbatches, extremes, lazy
        self._first: dict[str, int] = {}  # patches of the first batch
        self._kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}  # of the last batch
        self._patches: dict[str, int] = {}  # of the last batch, padded
        self._dealt: dict[str, Dealt] = {}  # of the last batch
        self.dealer, self.always = dealer, always
        self.dealing = set[str]()  # kinds whose images are dealt

    @property
    def active(self) -> bool:
        """Whether the last batch had images that were padded."""
        return bool(self._kinds)

    def apart(self, batch: dict[str, Any]) -> tuple[dict[str, Any], Images]:
        """(the batch without images, images), the same kinds on all ranks. No images where they stay in the batch.
        Collective."""
        self._kinds = {}
        if self.reader is None:
            return batch, {}
        _, largest = self.extremes(self._sizes(batch if batch.get("input_ids") is not None else {}))
        for name in self.reader.kinds:
            shape = tuple(n for n in (largest[f"{name}.{d}"] for d in range(DIMS)) if n)
            if shape:
                self._kinds[name] = DTYPES[largest[f"{name} dtype"] - 1], shape
        if reason := self.reader.refusal({name: shape for name, (_, shape) in self._kinds.items()}):
            self._kinds = {}
            self._compare(batch, reason)
        return self.apart_again(batch)

    def apart_again(self, batch: dict[str, Any]) -> tuple[dict[str, Any], Images]:
        """`apart` for the last batch."""
        images, rest = {}, dict(batch)
        for name, (dtype, shape) in self._kinds.items():
            pixels, grids = (rest.pop(n, None) for n in self.reader.kinds[name])  # type: ignore[union-attr]
            empty = torch.empty(0, *shape, dtype=dtype), torch.empty(0, 3, dtype=torch.int64)
            images[name] = empty if pixels is None else (pixels, grids)
        return rest, images

    def fit(self, text: dict[str, Any], images: Images) -> dict[str, Any]:
        """The inputs of the step, from the two parts of a batch. Collective. Raises, on all ranks, for images that do
        not fit the text of a rank."""
        if not images:
            return text
        assert self.reader is not None
        wrong, found = None, dict.fromkeys(images, 0)
        counts = dict(found)
        try:
            self._check_patches(images)
            read = self.reader.read(text, images, self.microbatches)
            grids = {name: read.grids(name) for name in images}
            found = {name: max(int(g.prod(-1).sum()) for g in of_rows) for name, of_rows in grids.items()}
            counts = {name: sum(map(len, of_rows)) for name, of_rows in grids.items()}
        except Exception as error:  # of the model's own code, too: ranks raise together
            wrong = error
        told = {f"{name} images": n for name, n in counts.items()}
        least, largest = self.extremes({**found, **told, "wrong": int(wrong is not None)})
        if wrong is not None:
            raise wrong
        if largest.pop("wrong"):
            raise ValueError(
                "padding: images need to fit the text on every rank, found that those of another rank do not; its "
                "error says what is wrong"
            )
        most = {name: largest.pop(f"{name} images") for name in images}
        for name, n in largest.items():
            self._first.setdefault(name, n)
        exact = {n for n in largest if self.lazy and 0 < largest[n] == least[n] == self._first[n]}
        self._patches = {name: n if name in exact else bucket(n, read.unit(name)) for name, n in largest.items()}
        self._dealt = {}
        if self.dealer is not None:
            self._deal(self.dealer, read, most)
        return read.inputs(self._patches, self._dealt)

    def _deal(self, dealer: ImageDealer, read: OfBatch, most: Mapping[str, int]) -> None:
        """Set what is dealt, and the number of patches that is left. ``most``: images of a kind on any rank."""
        tables = {name: _table(read.grids(name)) for name in most}
        ways = {name: dealer.divided(tables[name], n, self.microbatches) for name, n in most.items()}
        _, largest = self.extremes({name: found.patches() for name, found in ways.items()})
        for name, found in ways.items():
            patches = bucket(largest[name], read.unit(name))
            if self.always or patches < self._patches[name]:
                self.dealing.add(name)
            if name in self.dealing:
                self._patches[name] = patches
                self._dealt[name] = dealer.dealt(found, read.pixels(name))

    def _check_patches(self, images: Images) -> None:
        """Raises ValueError for patches unlike those of other ranks."""
        assert self.reader is not None
        for name, (pixels, _) in images.items():
            need, found = self._kinds[name], (pixels.dtype, tuple(pixels.shape[1:]))
            if found != need:
                raise ValueError(
                    f"{self.reader.kinds[name][0]}: all ranks need patches of one dtype and shape, found "
                    f"{need[0]} {list(need[1])} on another rank and {found[0]} {list(found[1])} here; process images "
                    "alike on all ranks"
                )

    def fit_again(self, text: dict[str, Any], images: Images) -> dict[str, Any]:
        """`fit` for the last batch."""
        if not images:
            return text
        assert self.reader is not None
        return self.reader.read(text, images, self.microbatches).inputs(self._patches, self._dealt)

    def _compare(self, batch: Mapping[str, Any], reason: str) -> None:
        """Raises ValueError, on all ranks, if sizes of images differ between ranks."""
        assert self.reader is not None
        names = [grids for _, grids in self.reader.kinds.values() if batch.get(grids) is not None]
        told = repr([(name, batch[name].tolist()) for name in names]).encode()
        least, largest = self.extremes({"sizes": int.from_bytes(hashlib.sha256(told).digest()[:7], "big")})
        if least != largest:
            raise ValueError(
                "padding: all ranks need images of the same sizes in the same order, since the graph of this model "
                f"depends on them ({reason}), found other {' or '.join(names) or 'images'} on other ranks; resize "
                "images, or sort them into batches by size"
            )

    def _sizes(self, batch: Mapping[str, Any]) -> dict[str, int]:
        """Of each kind, the shape of a patch and the number of its dtype; zeros without images."""
        found: dict[str, int] = {}
        assert self.reader is not None
        for name, (pixels, grids) in self.reader.kinds.items():
            x = batch.get(pixels) if batch.get(grids) is not None else None
            shape = tuple(x.shape[1:]) if isinstance(x, Tensor) and x.dtype in DTYPES and x.dim() <= DIMS + 1 else ()
            found |= {f"{name}.{d}": shape[d] if d < len(shape) else 0 for d in range(DIMS)}
            found[f"{name} dtype"] = DTYPES.index(x.dtype) + 1 if isinstance(x, Tensor) and shape else 0
        return found
