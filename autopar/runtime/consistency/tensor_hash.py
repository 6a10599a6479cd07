"""A hash of a tensor, computed on its device: equal tensors have equal hashes on all ranks.

A tensor is read as 64-bit integers, whatever its dtype, so NaNs, signed zeros and every bit count. The hash of the
integers x[i] is the sum of (x[i] ^ x[i] >> 33) * weight[i] modulo 2**64, with odd pseudo-random weights. Folding the
upper half into the lower one lets each bit reach at least 31 bits of the sum: without it, two flipped signs would
cancel. The shift is 33 and not 32, since an integer may hold two numbers that change alike. Large tensors are hashed in
chunks that stay in the cache; the hashes of the chunks are hashed in turn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from autopar.runtime.mesh.host_copies import to_host

CHUNK = {"cpu": 2**16, "cuda": 2**24}  # 64-bit integers; on a GPU few kernel launches matter more than the cache
_SPLITMIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # constants of splitmix64


def hashes_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Name -> 16 hexadecimal digits. All hashes of a device are copied to the host at once: one synchronization."""
    return start_hashes(tensors)()


def start_hashes(tensors: Mapping[str, Tensor]) -> Callable[[], dict[str, str]]:
    """Start copying the hashes to the host; the returned function waits for them and returns `hashes_of`."""
    started: list[tuple[list[str], Tensor, torch.Event | None]] = []
    for device in dict.fromkeys(x.device for x in tensors.values()):
        here = {name: hash_of(x) for name, x in tensors.items() if x.device == device}
        started.append((list(here), *to_host(torch.stack(list(here.values())))))

    def arrived() -> dict[str, str]:
        found: dict[str, int] = {}
        for names, hashes, there in started:
            if there is not None:
                there.synchronize()
            found |= dict(zip(names, hashes.tolist(), strict=True))
        return {name: f"{found[name] % 2**64:016x}" for name in tensors}

    return arrived


@torch.no_grad()
def hash_of(x: Tensor) -> Tensor:
    """The hash of a tensor of any dtype, an int64 scalar on its device."""
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    flat = x.reshape(-1)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    size = flat.numel() * flat.element_size()
    if size % 8 == 0:
        return _hash(flat.view(torch.int64))
    raw, whole = flat.view(torch.uint8), size // 8 * 8  # the rest is padded with zeros
    rest = torch.nn.functional.pad(raw[whole:], (0, whole + 8 - size))
    parts = [_hash(part.view(torch.int64)) for part in (raw[:whole], rest) if part.numel()]
    return parts[0] if len(parts) == 1 else _hash(torch.stack(parts))


def _hash(lanes: Tensor) -> Tensor:
    """int64 [n] -> int64 scalar."""
    count = lanes.numel()
    limit = CHUNK.get(lanes.device.type, 2**24)
    if count > limit:
        return _hash(torch.stack([_hash(part) for part in lanes.split(limit)]))
    weights = _weights(1 << max(count - 1, 0).bit_length(), lanes.device)
    return (lanes >> 33).bitwise_xor_(lanes).mul_(weights if count == weights.numel() else weights[:count]).sum()


@functools.cache
def _weights(count: int, device: torch.device) -> Tensor:
    """The finalizer of splitmix64 of 1, 2, ..., made odd: pseudo-random, the same everywhere."""
    step, *factors = (c - 2**64 if c >= 2**63 else c for c in _SPLITMIX)
    x = torch.arange(1, count + 1, device=device) * step
    for shift, factor in zip((30, 27), factors, strict=True):
        x = (x ^ _shifted(x, shift)) * factor
    return (x ^ _shifted(x, 31)) | 1


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
