"""Rules of operators over space and time: convolutions and their transposes, pools, resampling, windows, transforms.

Spatial dims are blocked, since their entries are mixed. Batch and channels, or groups of channels, may be sharded.
"""

from __future__ import annotations

from torch.fx import Node

from autopar.rules.builders import UNARY, named_dims
from autopar.rules.call import Call
from autopar.rules.rule import Dims, Rule

_OVERLAP = "windows of a convolution overlap"
_BIAS = "the bias would be added once per rank; split it off first"


def convolution_rule(call: Call) -> Rule:
    """x (b, g·ci, ...), w (g·co, ci, ...) -> (b, g·co, ...). Spatial dims are blocked: windows overlap."""
    return _convolution(call, transposed=bool(call.args.get("transposed")))


def transposed_convolution_rule(call: Call) -> Rule:
    """x (b, g·ci, ...), w (g·ci, co, ...) -> (b, g·co, ...)."""
    return _convolution(call, transposed=True)


def _convolution(call: Call, transposed: bool) -> Rule:
    source, weight, result = call.shape("input"), call.shape("weight"), call.result
    lead = (call.factor("b", source[0]),) if len(source) == len(weight) else ()
    groups = (result if transposed else source)[len(lead)] // weight[1]  # of a rank, where an earlier axis shards them
    outer, inner = ("ci", "co") if transposed else ("co", "ci")
    factors = {
        "g": call.factor("g", groups),
        outer: call.factor(outer, weight[0] // groups),
        inner: call.factor(inner, weight[1]),
    }
    g, co, ci = factors["g"], factors["co"], factors["ci"]
    first = len(lead)
    spatial_in = tuple(call.factor(f"x{i}", n) for i, n in enumerate(source[first + 1 :]))
    spatial_w = tuple(call.factor(f"w{i}", n) for i, n in enumerate(weight[2:]))
    spatial_out = tuple(call.factor(f"y{i}", n) for i, n in enumerate(result[first + 1 :]))
    channels = (*g, *factors[outer])
    operands: list[Dims | None] = [(*lead, (*g, *ci), *spatial_in), (channels, factors[inner], *spatial_w)]
    blocked = {f: _OVERLAP for f in call.sizes if f[0] in "xwy"}
    sets: tuple[frozenset[int], ...] = (frozenset({0}), frozenset({1}))
    if isinstance(call.args.get("bias"), Node):
        operands.append(((*g, *co),))
        sets = ()
        if not call.relaxed:
            blocked |= {f: _BIAS for f in ci}
    return call.rule(operands, [(*lead, (*g, *co), *spatial_out)], blocked=blocked, linear=sets)


def _groups(call: Call, name: str) -> int:
    """The groups of the global call, also in a graph of one rank."""
    return int(call.node.meta.get("global_groups", call.args[name]))


def group_norm_rule(call: Call) -> Rule:
    """(b, g·k, ...), (g·k), (g·k) -> (b, g·k, ...): statistics of each group, over its channels and space."""
    source, groups = call.shape("input"), _groups(call, "num_groups")
    g, k = call.factor("g", groups), call.factor("k", source[1] // groups)
    space = tuple(call.factor(f"x{i}", n) for i, n in enumerate(source[2:]))
    dims: Dims = (call.factor("b", source[0]), (*g, *k), *space)
    operands: list[Dims | None] = [dims]
    operands += [(dims[1],) for name in ("weight", "bias") if isinstance(call.args.get(name), Node)]
    why = "group_norm normalizes over it"
    return call.rule(operands, [dims], blocked={f: why for dim in (k, *space) for f in dim})


def prelu_rule(call: Call) -> Rule:
    """(b, c, ...), (c), (1) or () -> (b, c, ...)."""
    dims = named_dims(call, call.shape("self"))
    slopes = call.shape("weight")
    of_channels = (dims[1],) if len(dims) > 1 and slopes not in ((1,), ()) else ((),) * len(slopes)
    return call.rule([dims, of_channels], [dims])


def pooling_rule(call: Call) -> Rule:
    """(b, c, ...) -> (b, c, ...) with the window dims blocked. Leading dims of equal size pass."""
    return _over_windows(call, "a pooling window spans it", "it consists of pooling windows")


def resampling_rule(call: Call) -> Rule:
    """(b, c, ...) -> (b, c, ...), interpolating between spatial points; linear."""
    return _over_windows(call, "it is resampled", "it is resampled", linear=UNARY)


def _over_windows(call: Call, why: str, why_made: str, linear: tuple[frozenset[int], ...] = ()) -> Rule:
    source = call.shape_of(call.operands[0])
    window = _window_rank(call)
    dims = named_dims(call, source)
    results: list[Dims] = []
    for r, shape in enumerate(call.result_shapes):
        tail = tuple(call.factor(f"out{r}_{i}", n) for i, n in enumerate(shape[len(shape) - window :]))
        results.append((*dims[: len(source) - window], *tail))
    blocked = {f: why for dim in dims[len(source) - window :] for f in dim}
    blocked |= {f: why_made for f in call.sizes if f.startswith("out")}
    return call.rule([dims], results, blocked=blocked, linear=linear)


def _window_rank(call: Call) -> int:
    name = str(call.node.target)
    return next(int(d) for d in "123" if f"{d}d" in name)


def unfold_rule(call: Call) -> Rule:
    """(.. d ..) -> (.. windows .., size): one dim becomes windows, whose entries are the last dim."""
    dim = call.dim("dimension")
    dims = named_dims(call, call.shape("self"))
    windows, size = call.factor("windows", call.result[dim]), call.factor("size", call.result[-1])
    blocked = {f: "windows of it are taken" for f in (*dims[dim], *windows, *size)}
    return call.rule([dims], [(*dims[:dim], windows, *dims[dim + 1 :], size)], blocked=blocked, linear=UNARY)


def image_to_columns_rule(call: Call) -> Rule:
    """im2col: (b, c, h, w) -> (b, c·k, l); col2im back."""
    source, result = call.shape("self"), call.result
    back = len(result) > len(source) or (len(result) == 3 and "output_size" in call.args and len(source) == 2)
    image, columns = (result, source) if back else (source, result)
    lead = (call.factor("b", image[0]),) if len(image) == 4 else ()
    c, k = call.factor("c", image[-3]), call.factor("k", columns[-2] // image[-3])
    of_image: Dims = (*lead, c, call.factor("h", image[-2]), call.factor("w", image[-1]))
    of_columns: Dims = (*lead, (*c, *k), call.factor("l", columns[-1]))
    blocked = {f: "windows of it are taken" for f in "hwkl" if f in call.sizes}
    before, after = (of_columns, of_image) if back else (of_image, of_columns)
    return call.rule([before], [after], blocked=blocked, linear=UNARY)


def pixel_shuffle_rule(call: Call) -> Rule:
    """pixel_shuffle: (.., c·r·r, h, w) -> (.., c, h·r, w·r); pixel_unshuffle back."""
    source, result = call.shape("self"), call.result
    coarse, fine = (source, result) if "upscale_factor" in call.args else (result, source)
    lead = tuple(call.factor(f"d{i}", n) for i, n in enumerate(fine[:-3]))
    c, h, w = call.factor("c", fine[-3]), call.factor("h", coarse[-2]), call.factor("w", coarse[-1])
    rows, columns = call.factor("rows", fine[-2] // coarse[-2]), call.factor("columns", fine[-1] // coarse[-1])
    of_coarse, of_fine = (*lead, (*c, *rows, *columns), h, w), (*lead, c, (*h, *rows), (*w, *columns))
    before, after = (of_coarse, of_fine) if coarse is source else (of_fine, of_coarse)
    blocked = {f: "it becomes a block of pixels" for f in (*rows, *columns)}
    return call.rule([before], [after], blocked=blocked, linear=UNARY, keep_partial=True)


def fourier_rule(call: Call) -> Rule:
    """A Fourier transform of some dims; the others pass."""
    shape, result = call.shape("self"), call.result
    over = {int(d) % len(shape) for d in call.args["dim"]}
    dims = named_dims(call, shape)
    made = tuple(call.factor(f"n{i}", n) if i in over else dims[i] for i, n in enumerate(result))
    blocked = {f: "the transform spans it" for i in over for f in (*dims[i], *made[i])}
    return call.rule([dims], [made], blocked=blocked, linear=UNARY)
