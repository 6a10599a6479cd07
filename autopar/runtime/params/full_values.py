"""A tensor on a mesh as Python numbers, arrays, files and copies: those of the whole tensor."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn


class FullValues:
    """For a tensor with ``whole()``, ``is_apart`` and ``source``, as ShardedTensor has them."""

    def tolist(self: Any) -> Any:
        """Of the whole tensor. Collective where it is cut."""
        return self.whole().tolist()

    def numpy(self: Any, *, force: bool = False) -> Any:
        """The whole tensor, as of torch; what was gathered can only be read. Collective where it is cut."""
        plain = self.whole().detach()
        found = (plain.requires_grad_() if self.requires_grad else plain).numpy(force=force)
        if self.is_apart or self.source is not None:
            found.flags.writeable = False
        return found

    def __dlpack__(self: Any, **how: Any) -> Any:
        """Of the whole tensor. Collective where it is cut."""
        plain = self.whole()
        return plain.requires_grad_(self.requires_grad).__dlpack__(**how)

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        if not self.is_leaf:
            raise RuntimeError("only tensors that the user made can be deep copied; copy x.detach()")
        out: Any = self.detach().clone().requires_grad_(self.requires_grad)
        vars(out).update({name: copy.deepcopy(x, memo) for name, x in vars(self).items() if name == "_is_param"})
        if not isinstance(self, nn.Parameter):  # of which torch copies none
            out.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = out
        return out

    def __copy__(self: Any) -> Any:
        """Another tensor over the same piece."""
        out: Any = self.detach().requires_grad_(self.requires_grad)
        vars(out).update({name: x for name, x in vars(self).items() if name == "_is_param"})
        return out

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """As the whole tensor, so that ``torch.save`` writes what plain torch reads. Collective where it is cut."""
        plain = self.whole()
        if isinstance(self, nn.Parameter):
            return nn.Parameter(plain, self.requires_grad).__reduce_ex__(protocol)
        return plain.requires_grad_(self.requires_grad).__reduce_ex__(protocol)
