"""Cases of attention: tensors and facts of a size, and what plain math makes of them in double precision."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.ops.mask_spec import MaskSpec

NO_FACTS: dict[str, Any] = {
    "bias": None, "key_mask": None, "segments": None, "sinks": None, "seed": None, "causal": False, "window": 0,
    "chunk": 0, "offset": 0, "scale": 0.35, "softcap": 0.0, "dropout": 0.0, "site": 0, "index": [], "shape": [],
}  # fmt: skip
LENGTHS, WIDTHS, HEADS = (1, 17, 33, 128, 2048), (8, 20, 40, 64, 128, 256), ((4, 4), (4, 2), (6, 1))
USUAL = (64, (4, 2))  # width and heads with which every mask is tried
EVERYWHERE = ("plain", "causal", "later queries")  # masks that are tried with every width and number of heads
# Widths of queries and values that few kernels take as they are: they are padded, or taken by another one.
UNUSUAL = ((20, 12), (37, 37), (192, 128), (203, 203), (300, 64))
PADDED = ("causal", "softcap", "padding")
MORE = 9  # keys beyond the queries
BATCH = 2


@dataclass(frozen=True)
class Case:
    """``heads``: of queries and of keys. ``values``: their width, 0 for that of the queries."""

    mask: str
    length: int
    width: int
    heads: tuple[int, int]
    values: int = 0

    def __str__(self) -> str:
        width = f"width {self.width}" + (f" and {self.values}" if self.values else "")
        return f"{self.mask}, length {self.length}, {width}, heads {self.heads[0]}/{self.heads[1]}"

    @property
    def keys(self) -> int:
        """How many keys there are."""
        return self.length + (MORE if self.mask in ("more keys", "later queries", "queries in the middle") else 0)


def cases(short: bool, quick: bool) -> Iterator[Case]:
    """All masks at the usual width; all widths and heads with few masks; unusual widths. short: what a CPU has done in
    seconds; quick: even less."""
    lengths, widths = (LENGTHS[1:2], WIDTHS[:2]) if quick else (LENGTHS[:3], WIDTHS[:4]) if short else (LENGTHS, WIDTHS)
    for length in lengths:
        yield from (Case(mask, length, *USUAL) for mask in MASKS)
        for width in widths:
            for heads in HEADS[::2] if short else HEADS:
                if (width, heads) != USUAL:
                    yield from (Case(mask, length, width, heads) for mask in EVERYWHERE)
        for width, values in UNUSUAL[:1] if quick else UNUSUAL:
            yield from (Case(mask, length, width, HEADS[1], values) for mask in PADDED)


def _allowed(case: Case, g: torch.Generator) -> Tensor:
    """Any keys, and none for one row in the middle of an example."""
    mask = torch.rand(BATCH, 1, case.length, case.keys, generator=g) < 0.5
    mask[0, :, case.length // 2] = False
    return mask


def _padding(case: Case, g: torch.Generator, empty: bool = False) -> Tensor:
    """Each example padded at its end; ``empty``: the first one from the start."""
    lengths = torch.randint(1, case.keys + 1, (BATCH, 1), generator=g)
    lengths[0] = 0 if empty else lengths[0]
    return torch.arange(case.keys) < lengths


MASKS: dict[str, Callable[[Case, torch.Generator], dict[str, Any]]] = {
    "plain": lambda case, g: {},
    "causal": lambda case, g: {"causal": True},
    "window": lambda case, g: {"causal": True, "window": 5},
    "two-sided window": lambda case, g: {"window": 3},
    "chunk": lambda case, g: {"chunk": 4},
    "softcap": lambda case, g: {"softcap": 2.0, "causal": True},
    "bias": lambda case, g: {"bias": torch.randn(1, case.heads[0], case.length, case.keys, generator=g)},
    "key bias": lambda case, g: {"bias": torch.randn(case.keys, generator=g), "causal": True},
    "padding": lambda case, g: {"key_mask": _padding(case, g)},
    "an example of padding alone": lambda case, g: {"key_mask": _padding(case, g, empty=True), "causal": True},
    "documents": lambda case, g: {"segments": torch.arange(case.keys).expand(BATCH, -1) // 5, "causal": True},
    "mask with an empty row": lambda case, g: {"mask": _allowed(case, g)},
    "sinks": lambda case, g: {"sinks": torch.randn(case.heads[0], generator=g), "causal": True},
    "dropout": lambda case, g: {"dropout": 0.3, "seed": torch.tensor(5), "site": 3},
    "more keys": lambda case, g: {"causal": True},
    "later queries": lambda case, g: {"offset": MORE, "causal": True},
    "queries in the middle": lambda case, g: {"offset": 4, "causal": True},
}


def tensors(case: Case, keys: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """q, k, v and the gradient of out."""
    g, (hq, hk), values = seeded(case), case.heads, case.values or case.width
    sizes = ((hq, case.length, case.width), (hk, keys, case.width), (hk, keys, values), (hq, case.length, values))
    shapes = [(BATCH, *size) for size in sizes]
    return [torch.randn(shape, generator=g).to(device, dtype) for shape in shapes]


def facts(case: Case, dtype: torch.dtype, device: str) -> MaskSpec:
    """Floating ones in the dtype, all on the device."""
    made = MASKS[case.mask](case, seeded(case))
    for name, x in made.items():
        if isinstance(x, Tensor):
            made[name] = x.to(device, dtype if x.is_floating_point() else x.dtype)
    return MaskSpec(**{**NO_FACTS, "scale": 1 / math.sqrt(case.width), **made})


def seeded(case: Case) -> torch.Generator:
    """The same numbers on every machine."""
    return torch.Generator().manual_seed(zlib.crc32(str(case).encode()))


def plain_math(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, known: MaskSpec) -> list[Tensor]:
    """out, lse and the gradients of q, k, v and, if there is one, of the bias, in float64 and by autograd."""
    given = (q, k, v) if known.bias is None else (q, k, v, known.bias)
    inputs = [x.detach().double().requires_grad_() for x in given]
    wide_k, wide_v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in inputs[1:3])
    scores = inputs[0] @ wide_k.transpose(-1, -2) * known.scale
    if known.softcap:
        scores = torch.tanh(scores / known.softcap) * known.softcap
    if known.bias is not None:
        scores = scores + inputs[3]
    allowed = known.allowed(q.shape[2], k.shape[2], q.device)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -math.inf)
    if known.sinks is not None:
        scores = torch.cat([scores, known.sinks.double()[:, None, None].expand(*scores.shape[:3], 1)], -1)
    lse = torch.logsumexp(scores.detach(), -1)
    top = scores.detach().amax(-1, keepdim=True).clamp(min=-1e300)  # rows without keys are zero, and so are gradients
    raw = torch.exp(scores - top)
    weights = (raw / raw.sum(-1, keepdim=True).clamp(min=1e-300))[..., : k.shape[2]]
    if known.dropout:
        weights = weights * known.keep(weights.shape) / (1 - known.dropout)
    out = weights @ wide_v
    return [out.detach(), lse, *torch.autograd.grad(out, inputs, grad.double())]
