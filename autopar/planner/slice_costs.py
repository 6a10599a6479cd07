"""How long a slice of tokens takes on one stage: the cost model of TeraPipe (Li et al., ICML 2021, section 3.3).

    t(b, n, c) = own(b n) + ctx(b, n, c) + 2 comm(b n)        b sequences, n tokens each, behind c earlier tokens

own   forward and backward without context. It is flat up to a few hundred tokens, because weights must be read
      whatever the number of tokens, then linear. Kernels leave their floors at different lengths, which rounds the
      corner: own = (floor^p + (token·b·n)^p)^(1/p); p = 1 is affine, p = ∞ is max(floor, ...). Attention inside of
      the slice adds square·b·n².
ctx   a0 + a1 b n + a2 b c + a3 b n c for c > 0: linear in each of b n and c.
comm  start-up + bytes / bandwidth: once forward, once backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from autopar.cost.hardware import DEFAULT, Device

Array = npt.NDArray[np.float64]
Sample = tuple[int, int, int, float]

_CORNERS = (*np.geomspace(1.0, 16.0, 41), math.inf)
# How many times the forward's work a training step does: products twice more in the backward, attention computes its
# scores again (5 products against 2).
_PRODUCTS, _ATTENTION = 3.0, 3.5


@dataclass(frozen=True)
class SliceTime:
    """Seconds of a slice on one stage, forward and backward: ``SliceTime(...)(batch, length, context)``, vectorised.

    floor, token, corner, square: of ``own``, see the module. context: a0, a1, a2, a3 of ``ctx``. latency, wire: seconds
    per message and per token sent.
    """

    floor: float
    token: float
    corner: float = math.inf
    square: float = 0.0
    context: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    latency: float = 0.0
    wire: float = 0.0

    def __call__(self, batch: npt.ArrayLike, length: npt.ArrayLike, context: npt.ArrayLike) -> Array:
        """t(b, n, c); the three arguments broadcast."""
        b, n, c = (np.asarray(x, dtype=np.float64) for x in (batch, length, context))
        return self._own(b, n) + self._ctx(b, n, c) + 2 * (self.latency + self.wire * b * n)

    def _own(self, b: Array, n: Array) -> Array:
        linear = _rounded(self.floor, self.token * b * n, self.corner)
        return np.asarray(linear + self.square * b * n**2)

    def _ctx(self, b: Array, n: Array, c: Array) -> Array:
        """Not below zero: more to attend to never makes a slice faster, whatever the fit says outside its samples."""
        terms = _context_terms(b, n, c) @ np.asarray(self.context)
        return np.asarray(np.where(c > 0, np.maximum(terms, 0.0), 0.0))

    @classmethod
    def fit(cls, samples: Iterable[Sample], layers: int = 1, latency: float = 0.0, wire: float = 0.0) -> SliceTime:
        """The model nearest to measured (batch, length, context, seconds), in relative error.

        ``own`` is fitted to the samples without context, ``ctx`` by linear least squares to what the others take
        beyond it, as in the paper; attention inside of a slice meets half as many keys as it has tokens, so that
        square = a3 / 2. ``layers``: samples are of one layer, a stage has that many. ``latency`` and ``wire`` are not
        fitted: samples are without communication.
        Raises ValueError for fewer than two lengths without context, and for times that are not positive.
        """
        rows = np.asarray([tuple(map(float, s)) for s in samples]).reshape(-1, 4)
        b, n, c, t = rows.T
        alone = c == 0
        if len(np.unique((b * n)[alone])) < 2 or (t <= 0).any():
            raise ValueError(
                "slices: a fit needs positive times of at least two lengths without context, found "
                f"{sorted(set((b * n)[alone].astype(int).tolist()))} tokens; measure (1, length, 0) for a few lengths"
            )
        model = cls(*_fit_own((b * n)[alone], t[alone]))
        for _ in range(2):  # the context tells how much of `own` is attention, which changes the fit of `own`
            if alone.all():
                break
            extra = t[~alone] - model._own(b[~alone], n[~alone])
            terms = _context_terms(b[~alone], n[~alone], c[~alone])
            found = _least_squares(terms, extra)
            square = max(0.0, found[3] / 2)
            inside = np.minimum(square * (b * n**2)[alone], 0.9 * t[alone])
            own = _fit_own((b * n)[alone], t[alone] - inside)
            model = cls(*own, square=square, context=(found[0], found[1], found[2], found[3]))
        return replace(model.of_layers(layers), latency=latency, wire=wire)

    @classmethod
    def from_flops(
        cls,
        hidden: int,
        layers: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        inner: int | None = None,
        gated: bool = False,
        tp: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        device: Device = DEFAULT,
    ) -> SliceTime:
        """An estimate for a stage of transformer layers that nobody has measured.

        hidden, heads, kv_heads, inner (of the feed-forward part; default 4·hidden), gated (three matrices instead of
        two): sizes of a layer. layers: per stage. tp: ranks that share a layer (their transfers are left out).
        Per token and layer, forward: 2 operations per weight, and 4·hidden per key that it attends to. Floor: weights
        are read twice, and their gradients written. Context: keys and values are read twice, their gradients read and
        written.
        """
        inner = 4 * hidden if inner is None else inner
        keys = hidden * (heads if kv_heads is None else kv_heads) // heads
        weights = 2 * hidden * hidden + 2 * hidden * keys + (3 if gated else 2) * hidden * inner
        operation, byte = layers / tp / device.speed(dtype), layers / tp * dtype.itemsize / device.memory
        pair = _ATTENTION * 4 * hidden * operation
        return cls(
            floor=3 * weights * byte,
            token=_PRODUCTS * 2 * weights * operation,
            square=pair / 2,
            context=(0.0, 0.0, 4 * 2 * keys * byte, pair),
            latency=device.latency,
            wire=hidden * dtype.itemsize / device.link,
        )

    def of_layers(self, count: int) -> SliceTime:
        """The time of as many stages in one: computing is multiplied, sending is not."""
        a0, a1, a2, a3 = (count * a for a in self.context)
        return replace(
            self,
            floor=count * self.floor,
            token=count * self.token,
            square=count * self.square,
            context=(a0, a1, a2, a3),
        )


def _rounded(floor: float, work: Array, corner: float) -> Array:
    """(floor^p + work^p)^(1/p), scaled by the greater one so that no power overflows."""
    high, low = np.maximum(floor, work), np.minimum(floor, work)
    if math.isinf(corner):
        return np.asarray(high)
    share = np.divide(low, high, out=np.zeros_like(high), where=high > 0)
    return np.asarray(high * (1 + share**corner) ** (1 / corner))


def _context_terms(b: Array, n: Array, c: Array) -> Array:
    """[..., 4]: 1, b n, b c, b n c"""
    return np.stack(np.broadcast_arrays(np.ones(()), b * n, b * c, b * n * c), axis=-1)


def _least_squares(terms: Array, values: Array) -> list[float]:
    """Linear least squares; columns are scaled to 1, since b n c is a million times b n."""
    scale = np.maximum(np.abs(terms).max(axis=0), 1e-300)
    found: Any = np.linalg.lstsq(terms / scale, values, rcond=None)[0]
    return [float(x) for x in found / scale]


def _fit_own(tokens: Array, times: Array) -> tuple[float, float, float]:
    """floor, token and corner of ``own``: for each corner p, t^p is linear in x^p, and relative errors of t^p are p
    times those of t."""
    best = (math.inf, 0.0, 0.0, 1.0)
    for p in _CORNERS:
        floor, token = _knee(tokens, times) if math.isinf(p) else _power_fit(tokens, times, p)
        error = float(np.square(_rounded(floor, token * tokens, p) / times - 1).sum())
        if error < best[0] * (1 - 1e-9):  # of equals the roundest
            best = (error, floor, token, float(p))
    return best[1:]


def _power_fit(tokens: Array, times: Array, p: float) -> tuple[float, float]:
    """floor and token ≥ 0 that minimise Σ ((floor^p + (token x)^p) / t^p - 1)²."""
    x, t = tokens.max(), times.max()
    first, second = (t / times) ** p, (tokens / x * t / times) ** p
    ones = np.ones_like(first)
    found = np.linalg.lstsq(np.stack([first, second], axis=1), ones, rcond=None)[0]
    if found[0] < 0:
        found = np.array([0.0, second.sum() / (second @ second)])
    if found[1] < 0:
        found = np.array([first.sum() / (first @ first), 0.0])
    floor, token = found ** (1 / p)
    return float(floor * t), float(token * t / x)


def _knee(tokens: Array, times: Array) -> tuple[float, float]:
    """p = ∞: the shortest samples lie on the floor, the others on the line through zero; every split is tried."""
    order = np.argsort(tokens, kind="stable")
    x, inverse = tokens[order], 1 / times[order]
    found: Sequence[tuple[float, float, float]] = [_split(x, inverse, k) for k in range(1, len(x)) if x[k - 1] < x[k]]
    return min(found)[1:]


def _split(x: Array, inverse: Array, k: int) -> tuple[float, float, float]:
    floor = inverse[:k].sum() / np.square(inverse[:k]).sum()
    line = x[k:] * inverse[k:]
    token = line.sum() / np.square(line).sum()
    error = np.square(np.maximum(floor, token * x) * inverse - 1).sum()
    return float(error), float(floor), float(token)
