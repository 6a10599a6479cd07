"""torch's attention over packed sequences with page tables: `torch.nn.attention.varlen.varlen_attn`."""

from __future__ import annotations

import functools
import inspect
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_NEEDED = {"seqused_k", "block_table", "num_splits", "enable_gqa", "window_size"}


@functools.cache
def _varlen_attn() -> Any:
    """The function, or None in a torch without page tables."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if set(inspect.signature(varlen_attn).parameters) >= _NEEDED else None


@functools.cache
def works(device: torch.device) -> bool:
    """Whether this torch has it for a GPU, and it is right there for two short requests. Warns once if it is not."""
    return _form(device) is not None


@functools.cache
def _form(device: torch.device) -> bool | None:
    """Whether the ends of the keys of each request are an argument, too: one implementation needs them, another refuses
    them. None if it does not work."""
    if _varlen_attn() is None or torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    problems = [_problem(device, ends) for ends in (False, True)]
    for ends, problem in enumerate(problems):
        if not problem:
            return bool(ends)
    warnings.warn(f"cached_attention: torch's varlen_attn cannot be used on {device} ({problems[-1]})", stacklevel=4)
    return None


def _problem(device: torch.device, ends: bool) -> str:
    g = torch.Generator(device).manual_seed(0)
    keys = torch.randn(3, 256, 1, 64, generator=g, device=device, dtype=torch.float16)
    q = torch.randn(3, 2, 64, generator=g, device=device, dtype=torch.float16)
    table, starts, lengths = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in ([[2], [1]], [0, 1, 3], [9, 5])
    )
    rows = [(q[:1], keys[2, :9, 0]), (q[1:2], keys[1, :4, 0]), (q[2:], keys[1, :5, 0])]
    right = torch.cat([torch.softmax(x.float() @ k.float().T * 0.125, -1) @ k.float() for x, k in rows])
    try:
        found = _call(q, keys, keys, table, starts, lengths, 2, 0, 0.125, ends)
        return "" if torch.allclose(found.float(), right, atol=1e-2) else "its results are wrong"
    except RuntimeError as error:
        return str(error).strip().partition("\n")[0] or "an error without a message"


def attend(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, starts: Tensor, lengths: Tensor, most: int, window: int,
    scale: float,
) -> Tensor:  # fmt: skip
    """q [T, Hq, D], pools [pages, page, Hk, D], the rest as in `autopar::cached_attention` -> out [T, Hq, D].

    ``most``: at least the number of tokens of any request.
    """
    ends = _form(q.device)
    assert ends is not None, "asked for without `works`"
    return _call(q, keys, values, table, starts, lengths, most, window, scale, ends)


def _call(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, starts: Tensor, lengths: Tensor, most: int, window: int,
    scale: float, ends: bool,
) -> Tensor:  # fmt: skip
    of_keys = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)) if ends else None
    out: Tensor = _varlen_attn()(
        q, keys, values, starts, of_keys, most, table.shape[1] * keys.shape[1], scale=scale,
        window_size=(window - 1 if window else -1, 0), enable_gqa=q.shape[1] != keys.shape[2], seqused_k=lengths,
        block_table=table, num_splits=1,
    )  # fmt: skip
    return out
