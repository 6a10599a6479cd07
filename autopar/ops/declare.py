"""How `autopar::` operators are declared: schema, kernel and fake in one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

CHOICES = set[Any]()  # operators (packets) declared with ``choice``
COMPILED = dict[Any, Callable[..., Any]]()  # operator -> what a compiler traces in its place, to fuse it with others


def operator(
    schema: str | None = None,
    fake: Callable[..., Any] | None = None,
    choice: bool = False,
    writes: Sequence[str] = (),
    compiled: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Any]], Any]:
    """Registers a function as the kernel of the operator ``autopar::`` of its name.

    ``schema``: by default that of the annotations. ``fake``: computes fake results from fake arguments, unless it is
    registered later. ``choice``: it returns positions or counts of elements, such as the experts of a token, which a
    recomputation must not choose again (`autopar.ops.traits.is_choice`). ``writes``: the arguments that it writes to.
    ``compiled``: computes the same, in operators that a compiler fuses and that write to no operand.
    """

    def made(kernel: Callable[..., Any]) -> Any:
        found = torch.library.custom_op(f"autopar::{kernel.__name__}", mutates_args=writes, schema=schema)(kernel)
        if fake is not None:
            found.register_fake(fake)
        if compiled is not None:
            COMPILED[getattr(torch.ops.autopar, kernel.__name__).default] = compiled
        if choice:
            CHOICES.add(getattr(torch.ops.autopar, kernel.__name__))
        return found

    return made


def alike(x: Tensor, *_: Any) -> Tensor:
    """A fake: of the first argument's shape and strides."""
    return torch.empty_like(x)


def dense(x: Tensor, *_: Any) -> Tensor:
    """A fake: of the first argument's shape, contiguous."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)
