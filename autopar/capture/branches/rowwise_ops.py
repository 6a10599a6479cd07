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
    "dropout nan_to_num addcmul addcdiv mod floor_divide __floordiv__"
)
# Functions whose derivative is inf or nan somewhere.
WITH_POLES = _words(
    "log log2 log10 log1p sqrt rsqrt pow reciprocal div truediv true_divide divide asin acos atanh logit xlogy "
    "atan2 tan remainder fmod mod addcdiv norm vector_norm normalize std var logsumexp cosine_similarity abs exp exp2 "
    "expm1 sinh cosh"
)
# Functions that read at integers, of which zero is always one.
BY_INDEX = _words("embedding gather take_along_dim one_hot")
_OVER_DIMS = _words(
    "softmax log_softmax logsumexp sum mean amax amin argmax argmin max min prod std var norm normalize cumsum "
    "cosine_similarity sort any all count_nonzero cumprod argsort topk median logcumsumexp diff roll"
)
_LAST = ("sort", "argsort", "topk", "diff")  # over the last dim, unless another is named
# Equal calls of these on equal tensors compute equal masks.
OF_MASKS = _words(
    "eq ne lt gt le ge logical_and logical_or logical_not logical_xor and or xor invert bitwise_not isnan isinf "
    "isfinite bool to view reshape flatten squeeze unsqueeze expand expand_as getitem transpose permute"
)
# With numbers of rows these are Python's.
ARITHMETIC = _words("add sub rsub mul div truediv pow mod neg __floordiv__ __rfloordiv__ floor_divide float")
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


_OPERATORS = (
    {
        f"__{name}__": name
        for name in _words("add sub mul truediv div pow neg abs and or xor invert eq ne lt gt le ge getitem matmul mod")
    }
    | {f"__r{name}__": name for name in _words("add mul and or xor truediv div pow matmul")}
    | {"__rsub__": "rsub"}
)


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
    if name in ("matmul", "mm", "bmm"):
        return len(args) == 2 and _product(*args, is_rows)
    if name in ("attention", "scaled_dot_product_attention"):
        return _attends(args, kwargs, is_rows, by_key=name == "attention")
    if name == "unfold" and function is not _TENSOR.unfold:
        return is_rows(x) and x.dim() == 4  # patches of a batch of images
    if name == "einsum":
        return _contracts(args, is_rows)
    if name in ("cat", "stack", "concat"):
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        alone = len(x) == 1 and name != "stack"  # one tensor, as it is
        return all(is_rows(t) for t in x) and (alone or dim % (x[0].dim() + (name == "stack")) != 0)
    if not is_rows(x):
        return False
    way = _WAYS.get(name)
    others = any(is_rows(a) for a in (*args[1:], *kwargs.values()))
    if name in ("gather", "take_along_dim"):
        return all(map(is_rows, (t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)))) and _gathered(
            x, args[1:], kwargs
        )
    if name in _OVER_DIMS:
        return _dims_beside(x, _dims(name, args, kwargs)) and (not others or name == "cosine_similarity")
    return way is not None and not others and way(x, args[1:], kwargs)


def _dims(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The dims that a call runs over; None for all."""
    place = {"norm": 2, "normalize": 2, "cosine_similarity": 2, "topk": 2, "roll": 2, "diff": 2}.get(name, 1)
    default = 1 if name in ("normalize", "cosine_similarity") else -1 if name in _LAST else None
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


def _product(x: Any, other: Any, is_rows: Callable[[Any], bool]) -> bool:
    """x @ other, with the rows of either, or of both, among the leading dims of the result"""
    if not isinstance(x, Tensor) or not isinstance(other, Tensor):
        return False
    if is_rows(x) and is_rows(other):
        return x.dim() == other.dim() > 2
    if is_rows(x):
        return x.dim() > 1 and other.dim() < max(3, x.dim())
    return other.dim() > 2 and x.dim() < other.dim()


def _attends(args: tuple[Any, ...], kwargs: dict[str, Any], is_rows: Callable[[Any], bool], by_key: bool) -> bool:
    """Attention: queries, keys and values are rows; masks are, too, or are the same for all rows. ``by_key``: there may
    be masks [rows, keys]."""
    given: dict[str, Any] = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
    first: list[Any] = [given.get(name) for name in ("query", "key", "value")]
    rank = {x.dim() if is_rows(x) else 0 for x in first}
    if len(rank) > 1 or min(rank) < 3:
        return False
    others = [x for x in (*args[3:], *kwargs.values()) if isinstance(x, Tensor)]
    return all(
        (x.dim() in rank or (by_key and x.dim() == 2))
        if is_rows(x)
        else x.shape[:1] == (1,) or x.dim() < (2 if by_key else min(rank))
        for x in others
    )


def _contracts(args: tuple[Any, ...], is_rows: Callable[[Any], bool]) -> bool:
    """einsum("bqd,bkd->bqk", rows, rows), in which b is one of the letters of the result and of no other operand"""
    equation = args[0].replace(" ", "") if args and isinstance(args[0], str) else ""
    operands = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
    if "->" not in equation or "." in equation:
        return False
    terms, _, result = equation.partition("->")
    pairs = list(zip(terms.split(","), operands, strict=False))
    letters = {term[:1] for term, x in pairs if is_rows(x)}
    return letters == {result[:1]} and all(term.count(result[0]) == int(is_rows(x)) for term, x in pairs)


def _batched(rank: int) -> Callable[[Tensor, tuple[Any, ...], dict[str, Any]], bool]:
    """Functions of a batch of this rank, whose examples are computed one by one."""
    return lambda x, rest, kwargs: x.dim() == rank


def _normed_alone(x: Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """batch_norm by running statistics"""
    return kwargs.get("training", rest[4] if len(rest) > 4 else False) is False


def _transposed(x: Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    dims = (*rest, *kwargs.values())
    return len(dims) == 2 and all(isinstance(d, int) and d % x.dim() for d in dims)


def _permuted(x: Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = (*rest, *kwargs.values())
    dims = tuple(given[0]) if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
    return len(dims) == x.dim() and dims[0] % x.dim() == 0


def _flattened(x: Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    start = kwargs.get("start_dim", rest[0] if rest else 0)
    return bool(start % x.dim())


def _flipped(x: Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = (*rest, *kwargs.values())
    dims = tuple(given[0]) if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
    return all(d % x.dim() for d in dims)


def _padded(x: Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return len(kwargs.get("pad", rest[0] if rest else ())) // 2 < x.dim()


def _repeated(x: Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    sizes = tuple(rest[0]) if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest
    return len(sizes) == x.dim() and all(isinstance(n, int) for n in sizes) and sizes[0] == 1


def _each_repeated(x: Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    dim = kwargs.get("dim", rest[1] if len(rest) > 1 else None)
    return (
        isinstance(dim, int) and dim % x.dim() != 0 and isinstance(kwargs.get("repeats", rest[0] if rest else 0), int)
    )


def _unfolded(x: Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    dim = kwargs.get("dimension", rest[0] if rest else 0)
    return bool(dim % x.dim())


def _gathered(x: Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Along another dim, at indices of the same rows."""
    dim, index = kwargs.get("dim", rest[0] if rest else 0), kwargs.get("index", rest[1] if len(rest) > 1 else None)
    return isinstance(dim, int) and dim % x.dim() != 0 and isinstance(index, Tensor) and index.dim() == x.dim()


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
    "linear": _linear, "layer_norm": _normed, "rms_norm": _normed, "unsqueeze": _unsqueezed, "split": _split,
    "squeeze": _dim_beside(None), "chunk": _split, "tensor_split": _split, "unbind": _dim_beside(0),
    "getitem": _indexed, "view": _viewed, "reshape": _viewed, "flip": _flipped,
    "embedding": lambda x, rest, kwargs: True, "select": _dim_beside(None),
    "narrow": _dim_beside(None), "index_select": _dim_beside(None), "unflatten": _dim_beside(None),
    "transpose": _transposed, "swapaxes": _transposed, "swapdims": _transposed, "permute": _permuted,
    "flatten": _flattened, "pad": _padded, "repeat": _repeated, "repeat_interleave": _each_repeated,
    "unfold": _unfolded, "bucketize": lambda x, rest, kwargs: True, "one_hot": lambda x, rest, kwargs: len(rest) == 1,
    "interpolate": lambda x, rest, kwargs: x.dim() > 2, "group_norm": lambda x, rest, kwargs: x.dim() > 1,
    "batch_norm": _normed_alone, "pixel_shuffle": lambda x, rest, kwargs: x.dim() > 3,
    "pixel_unshuffle": lambda x, rest, kwargs: x.dim() > 3,
    **{f"{kind}{n}d": _batched(n + 2) for n in (1, 2, 3) for kind in (
        "conv", "conv_transpose", "max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool"
    )},
}  # fmt: skip
