"""Row-wise functions, by name, for `mask_indexing`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_TENSOR: Any = Tensor


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Elementwise. Python operators have the same names: __radd__ is add.
POINTWISE = _words(
    "add sub rsub mul div truediv true_divide divide multiply subtract neg negative abs absolute exp exp2 expm1 "
    "log log2 log10 log1p sqrt rsqrt pow square reciprocal sigmoid logsigmoid tanh relu relu6 gelu silu mish elu "
    "selu celu leaky_relu softplus softsign hardtanh hardswish hardsigmoid hardshrink softshrink tanhshrink erf "
    "sin cos tan asin acos atan atan2 sinh cosh atanh logit clamp clip clamp_min clamp_max where maximum minimum "
    "fmax fmin lerp eq ne lt gt le ge logical_and logical_or logical_not logical_xor and or xor invert "
    "bitwise_not isnan isinf isfinite to float double half bfloat16 type type_as long int bool detach clone "
    "contiguous xlogy round floor ceil trunc sign masked_fill zeros_like ones_like full_like remainder fmod "
    "dropout nan_to_num addcmul addcdiv"
)
# Functions whose derivative is inf or nan somewhere.
WITH_POLES = _words(
    "log log2 log10 log1p sqrt rsqrt pow reciprocal div truediv true_divide divide asin acos atanh logit xlogy "
    "atan2 tan remainder fmod addcdiv norm vector_norm normalize std var logsumexp cosine_similarity abs exp exp2 "
    "expm1 sinh cosh"
)
_OVER_DIMS = _words(
    "softmax log_softmax logsumexp sum mean amax amin argmax argmin max min prod std var norm normalize cumsum "
    "cosine_similarity sort"
)
# Equal calls of these on equal tensors compute equal masks.
OF_MASKS = _words(
    "eq ne lt gt le ge logical_and logical_or logical_not logical_xor and or xor invert bitwise_not isnan isinf "
    "isfinite bool to view reshape flatten squeeze unsqueeze expand expand_as getitem transpose permute"
)
SAME = frozenset(
    {_TENSOR.dim, _TENSOR.ndim.__get__, _TENSOR.dtype.__get__, _TENSOR.device.__get__, _TENSOR.is_floating_point,
     _TENSOR.requires_grad.__get__, torch.is_floating_point, _TENSOR.is_complex, torch.is_complex,
     _TENSOR.layout.__get__, _TENSOR.is_cuda.__get__, _TENSOR.ndimension}
)  # fmt: skip
NUMELS = (_TENSOR.numel, torch.numel, _TENSOR.nelement)
SIZES = (_TENSOR.shape.__get__, _TENSOR.size, *NUMELS)
# x[mask] += y discards the tensor that it updates, so the out-of-place function does as well.
IN_PLACE = {
    **dict.fromkeys((_TENSOR.__iadd__, _TENSOR.add_), torch.add),
    **dict.fromkeys((_TENSOR.__isub__, _TENSOR.sub_), torch.sub),
    **dict.fromkeys((_TENSOR.__imul__, _TENSOR.mul_), torch.mul),
    **dict.fromkeys((_TENSOR.__itruediv__, _TENSOR.div_), torch.div),
}
OF_CLASSES = (F.cross_entropy, F.nll_loss)
LOSSES = (
    *OF_CLASSES, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits, F.kl_div, F.poisson_nll_loss, F.soft_margin_loss,
)  # fmt: skip


_OPERATORS = {
    f"__{name}__": name
    for name in _words("add sub mul truediv div pow neg abs and or xor invert eq ne lt gt le ge getitem matmul mod")
} | {f"__r{name}__": name for name in _words("add mul and or xor")} | dict.fromkeys(
    ("__rsub__", "__rtruediv__", "__rdiv__", "__rpow__"), "rsub"
)  # fmt: skip


def plain_name(function: Any) -> str:
    """'add' of torch.add, of Tensor.add and of __radd__"""
    name = str(getattr(function, "__name__", ""))
    return _OPERATORS.get(name, name)


def by_row(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], is_rows: Callable[[Any], bool]) -> bool:
    """Whether a call with rows among its arguments makes of each row something by itself."""
    name = plain_name(function)
    x: Any = args[0] if args else None
    if name in POINTWISE:
        return "out" not in kwargs and (name != "where" or len(args) + len(kwargs) == 3)
    if name in ("cat", "stack", "concat"):
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        alone = len(x) == 1 and name != "stack"  # one tensor, as it is
        return all(is_rows(t) for t in x) and (alone or dim % (x[0].dim() + (name == "stack")) != 0)
    if not is_rows(x):
        return False
    way = _WAYS.get(name)
    others = any(is_rows(a) for a in (*args[1:], *kwargs.values()))
    if name in _OVER_DIMS:
        return _dims_beside(x, _dims(name, args, kwargs)) and (not others or name == "cosine_similarity")
    return way is not None and not others and way(x, args[1:], kwargs)


def _dims(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The dims that a call runs over; None for all."""
    place = {"norm": 2, "normalize": 2, "cosine_similarity": 2}.get(name, 1)
    default = 1 if name in ("normalize", "cosine_similarity") else -1 if name == "sort" else None
    given = kwargs.get("dim", kwargs.get("dims", args[place] if len(args) > place else default))
    return given


def _dims_beside(x: Tensor, dims: Any) -> bool:
    """Whether dims are named, and that of rows is not among them."""
    given = (dims,) if isinstance(dims, int) and not isinstance(dims, bool) else dims
    return (
        isinstance(given, (tuple, list)) and len(given) > 0 and all(isinstance(d, int) and d % x.dim() for d in given)
    )


def _dim_beside(default: int | None) -> Callable[[Tensor, tuple[Any, ...], dict[str, Any]], bool]:
    def way(x: Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        dim = kwargs.get("dim", rest[0] if rest else default)
        return isinstance(dim, int) and dim % x.dim() != 0

    return way


def _split(x: Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    dim = kwargs.get("dim", rest[1] if len(rest) > 1 else 0)
    return isinstance(dim, int) and dim % x.dim() != 0


def _unsqueezed(x: Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    dim = kwargs.get("dim", rest[0] if rest else 0)
    return bool(dim % (x.dim() + 1) != 0)


def _linear(x: Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return x.dim() > 1


def _product(x: Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    other = rest[0] if rest else kwargs.get("other")
    return x.dim() == 2 and isinstance(other, Tensor) and other.dim() <= 2


def _normed(x: Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    shape = rest[0] if rest else kwargs.get("normalized_shape", ())
    return 0 < len(tuple(shape)) < x.dim()


def _indexed(x: Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """x[:, 1:], x[..., 0], x[:, None]"""
    index = rest[0] if isinstance(rest[0], tuple) else (rest[0],)
    if any(isinstance(i, (Tensor, list)) for i in index):
        return False
    taken = sum(i is not None and i is not Ellipsis for i in index)
    if index and index[0] is Ellipsis:
        return taken < x.dim()
    return bool(index) and index[0] == slice(None)


def _viewed(x: Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """x.view(-1, a, b) with as many entries in a row as before"""
    shape = rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest
    if not shape or kwargs or not all(isinstance(s, int) for s in shape) or shape[0] != -1 or -1 in shape[1:]:
        return False
    return math.prod(shape[1:]) == math.prod(x.shape[1:])


_WAYS: dict[str, Callable[[Tensor, tuple[Any, ...], dict[str, Any]], bool]] = {
    "linear": _linear, "matmul": _product, "mm": _product, "layer_norm": _normed, "rms_norm": _normed,
    "unsqueeze": _unsqueezed, "squeeze": _dim_beside(None), "chunk": _split, "split": _split, "unbind": _dim_beside(0),
    "getitem": _indexed, "view": _viewed, "reshape": _viewed, "embedding": _linear, "select": _dim_beside(None),
}  # fmt: skip
