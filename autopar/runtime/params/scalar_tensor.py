"""A number that was computed of tensors on a mesh: a plain tensor of 0 dims, the same on every rank."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from autopar.adapters.dtensor import no_torch_function


class ScalarTensor(Tensor):
    """What `torch.Tensor` is, with what code for DTensors asks of it. What is computed of it is a plain tensor."""

    __torch_function__ = no_torch_function  # type: ignore[assignment]

    def full_tensor(self) -> Tensor:
        """Itself."""
        return self.as_subclass(Tensor)

    to_local = full_tensor

    def __repr__(self, **how: Any) -> str:  # type: ignore[override]
        return self.as_subclass(Tensor).__repr__(**how)

    def __format__(self, spec: str) -> str:
        return self.as_subclass(Tensor).__format__(spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)
