"""Whether a backward that gets None for results without gradient returns what it would return for gradients of zeros.

With `set_materialize_grads(False)` torch hands None to a backward. Which results have no gradient is known only where
the joint graph is made, and the traced backward runs on zeros there. So what it computes of None has to be what it
computes of zeros, for every choice of results: the calls that it makes with all gradients, where those that are missing
are zeros and sums and products with zeros are worked out, have to be the calls that it makes with None.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar.capture.branches.known_values import writes
from autopar.capture.branches.rowwise_ops import plain_name

MOST_RESULTS = 4  # with a gradient: all choices of them are compared
_ZERO = "zeros"
_TENSOR: Any = Tensor
_PRODUCTS = {"mul", "multiply", "matmul", "mm", "bmm", "mv", "dot", "outer"}  # zeros if one factor is
_OF_FIRST = {
    "view", "reshape", "transpose", "permute", "t", "expand", "expand_as", "sum", "mean", "neg", "negative", "clone",
    "contiguous", "to", "type_as", "squeeze", "unsqueeze", "flatten", "getitem", "float", "double", "half", "bfloat16",
    "detach", "sum_to_size", "div", "truediv", "true_divide", "select", "narrow", "chunk", "split", "movedim",
    "swapaxes", "view_as", "reshape_as",
}  # fmt: skip  # linear in the first argument: zeros if that is
_OF_ZEROS = {"zeros", "zeros_like", "new_zeros"}
_ATTRIBUTES = {_TENSOR.T.__get__, _TENSOR.mT.__get__}
Backward = Callable[[Sequence[Tensor | None]], Sequence[Any]]


def none_is_zeros(backward: Backward, given: Sequence[Tensor | None], results: Sequence[int]) -> bool:
    """Whether gradients of the inputs are the same for None and for zeros, whichever of the ``results`` have none.
    given: gradients of all results. False where that is not seen."""
    if len(results) > MOST_RESULTS:
        return False
    try:
        all_calls, all_made = _recorded(backward, given)
        for count in range(1, len(results)):
            for missing in itertools.combinations(results, count):
                zeros = {id(given[i]) for i in missing}
                calls, made = _recorded(backward, [None if i in missing else x for i, x in enumerate(given)])
                if _results(all_calls, all_made, zeros) != _results(calls, made, set()):
                    return False
    except ValueError:
        return False
    return True


class _Calls(TorchFunctionMode):
    """Notes the calls of a backward. Raises ValueError for one that writes: views of what it changes are not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Any, tuple[Any, ...], Mapping[str, Any], Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if writes(func) or "out" in kwargs or plain_name(func).startswith("__i"):
            raise ValueError(f"{plain_name(func)} writes")
        result = func(*args, **kwargs)
        self.made.append((func, args, kwargs, result))
        return result


def _recorded(backward: Backward, given: Sequence[Tensor | None]) -> tuple[_Calls, Sequence[Any]]:
    calls = _Calls()
    with calls:
        made = backward(given)
    return calls, made


def _results(calls: _Calls, made: Sequence[Any], zeros: set[int]) -> list[Hashable]:
    """Expressions of the gradients. zeros: identities of tensors that are."""
    known: dict[int, Hashable] = dict.fromkeys(zeros, _ZERO)

    def of(x: Any) -> Hashable:
        if isinstance(x, Tensor):
            return known.get(id(x), ("a tensor", id(x)))
        return x if x is None or isinstance(x, (int, float)) else repr(x)

    for func, args, kwargs, result in calls.made:
        found = _expression(func, args, kwargs, result, of)
        several = not isinstance(result, Tensor)
        for i, x in enumerate(pytree.tree_leaves(result)):
            if isinstance(x, Tensor):
                known[id(x)] = (found, i) if several and found != _ZERO else found
    return [_ZERO if x is None else of(x) for x in made]


def _expression(func: Any, args: Any, kwargs: Any, result: Any, of: Callable[[Any], Hashable]) -> Hashable:
    name, leaves = plain_name(func), pytree.tree_leaves((args, kwargs))
    operands = [of(x) for x in leaves]
    first = operands[0] if operands else None
    if name in _OF_ZEROS or (name in _PRODUCTS and _ZERO in operands):
        return _ZERO
    if first == _ZERO and (name in _OF_FIRST or func in _ATTRIBUTES):
        return _ZERO
    if name in ("add", "sub") and len(operands) == 2:
        one, other = operands
        if _is_zero(other) and _alike(leaves[0], result):
            return one
        if name == "add" and _is_zero(one) and _alike(leaves[1], result):
            return other
    exact = (func.__name__, func if func.__name__ == "__get__" else "")  # c - x and c / x have one plain name
    return (*exact, tuple(operands), str(pytree.tree_structure((args, kwargs))))


def _is_zero(x: Hashable) -> bool:
    return x == _ZERO or (isinstance(x, (int, float)) and x == 0)


def _alike(x: Any, result: Any) -> bool:
    """Whether a sum with zeros has the shape and dtype of its other addend."""
    both = isinstance(x, Tensor) and isinstance(result, Tensor)
    return both and x.shape == result.shape and x.dtype == result.dtype
