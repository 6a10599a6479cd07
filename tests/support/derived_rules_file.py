"""Writes tests/derived_rules.json: rules that are derived for calls such as models make. `make docs`.

    python -m tests.support.derived_rules_file

What another version of torch or of the derivation finds must be the same: `tests/rules/test_derived_rules.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node

from autopar.rules.derived import as_file, entry_of
from autopar.rules.infer_rule import derive
from autopar.rules.rule_trials import CallForm, NoTrial, draws
from autopar.testing.soundness import Sample, SampleCall

FILE = Path(__file__).with_name("derived_rules.json")
F32, F64, I64, BOOL = "float32", "float64", "int64", "bool"


def _t(*shape: int, dtype: str = F64) -> dict[str, Any]:
    return {dtype: list(shape)}


CALLS: list[tuple[Any, ...]] = [  # operator, arguments
    ("aten.sinc.default", _t(8, 6)),
    ("aten.sinc.default", _t(8, 6, dtype=F32)),
    ("aten.sinc.default", _t(8, 6, dtype="bfloat16")),
    ("aten.kthvalue.default", _t(8, 6), 2, -1),
    ("aten.kthvalue.default", _t(8, 6), 2, 0),
    ("aten.mode.default", _t(8, 6)),
    ("aten.cummax.default", _t(8, 6), 1),
    ("aten.renorm.default", _t(8, 6), 2.0, 0, 0.5),
    ("aten.nansum.default", _t(8, 6), [1]),
    ("aten.nanmedian.dim", _t(8, 6), 1),
    ("aten.trace.default", _t(6, 6)),
    ("aten.diagonal_copy.default", _t(8, 5, 5), 0, 1, 2),
    ("aten.diag_embed.default", _t(8, 5)),
    ("aten.rot90.default", _t(8, 5, 6), 1, [1, 2]),
    ("aten._prelu_kernel.default", _t(8, 6, 4), _t(1, 6, 1)),
    ("aten.glu.default", _t(8, 6)),
    ("aten._weight_norm_interface.default", _t(8, 6), _t(8, 1)),
    ("aten.grid_sampler_2d.default", _t(4, 3, 5, 6), _t(4, 7, 8, 2), 0, 0, False),
    ("aten.affine_grid_generator.default", _t(4, 2, 3), [4, 3, 5, 6], False),
    ("aten.upsample_bicubic2d.vec", _t(4, 3, 5, 6), [10, 12], False, None),
    ("aten.upsample_trilinear3d.vec", _t(4, 3, 2, 5, 6), None, False, [2.0, 2.0, 2.0]),
    ("aten.pixel_shuffle.default", _t(4, 8, 5, 6), 2),
    ("aten.channel_shuffle.default", _t(4, 8, 5, 6), 2),
    ("aten.reflection_pad2d.default", _t(4, 3, 5, 6), [1, 1, 1, 1]),
    ("aten._cdist_forward.default", _t(4, 5, 3), _t(4, 6, 3), 2.0, None),
    ("aten._trilinear.default", _t(8, 4, 5), _t(8, 4, 5), _t(8, 4, 5), [], [], [], [2]),
    ("aten.fft_rfft.default", _t(8, 6), None, -1),
    ("aten.fft_fft2.default", _t(8, 3, 6, 5), None, [2, 3]),
    ("aten.bucketize.Tensor", _t(8, 6), _t(5)),
    ("aten.isin.Tensor_Tensor", _t(8, 6, dtype=I64), _t(5, dtype=I64)),
    ("aten.linalg_vander.default", _t(8, 6)),
    ("aten.roll.default", _t(8, 6), [8], [0]),
    ("aten.special_i0e.default", _t(8, 6)),
    ("aten.heaviside.default", _t(8, 6), _t(8, 6)),
    ("aten.take_along_dim.default", _t(8, 6), _t(8, 2, dtype=I64), 1),
    ("aten.masked_scatter.default", _t(8, 6), _t(8, 6, dtype=BOOL), _t(48)),
    ("aten.index_add.default", _t(8, 6), 0, _t(5, dtype=I64), _t(5, 6)),
    ("aten.bmm.default", _t(6, 6, 6), _t(6, 6, 6)),
    ("aten.native_group_norm.default", _t(4, 6, 5), _t(6), _t(6), 4, 6, 5, 2, 1e-5),
    ("aten.addr.default", _t(8, 6), _t(8), _t(6)),
]  # fmt: skip


def call_of(entry: dict[str, Any]) -> tuple[Any, list[Any], dict[str, Any]]:
    """(operator, arguments, keywords) of an entry, with empty tensors on the CPU. Raises AttributeError for an operator
    that is not there."""
    op: Any = torch.ops
    for part in entry["op"].split("."):
        op = getattr(op, part)
    return op, [_read(x) for x in entry["args"]], {name: _read(x) for name, x in entry["kwargs"].items()}


def _read(x: Any) -> Any:
    if isinstance(x, list):
        return [_read(y) for y in x]
    if isinstance(x, dict):
        ((name, value),) = x.items()
        return (
            getattr(torch, value) if name == "dtype" else torch.zeros(value, dtype=getattr(torch, name), device="cpu")
        )
    return x


def call_node(entry: dict[str, Any]) -> Node:
    """The call of an entry in a graph, its operands parameters filled with what the operator takes."""
    return next(n for n in sample_of(entry).graph.graph.nodes if n.op == "call_function")


def sample_of(entry: dict[str, Any]) -> Sample:
    """The call of an entry on numbers that the operator takes."""
    op, args, kwargs = call_of(entry)
    empty = Sample([SampleCall(op, tuple(args), kwargs)])
    form = CallForm.of(next(n for n in empty.graph.graph.nodes if n.op == "call_function"))
    for draw in draws(form):
        tensors = draw.tensors(form)
        try:
            form.run(tensors)
        except NoTrial:
            continue
        step = _filled(op, args, kwargs, iter(tensors))
        return Sample([step], gradients=_has_backward(step))
    raise AssertionError(f"{op} takes no numbers that are drawn")


def _filled(op: Any, args: list[Any], kwargs: dict[str, Any], tensors: Iterator[torch.Tensor]) -> SampleCall:
    def fill(x: Any) -> Any:
        return [fill(y) for y in x] if isinstance(x, list) else next(tensors) if isinstance(x, torch.Tensor) else x

    return SampleCall(op, tuple(fill(args)), {name: fill(x) for name, x in kwargs.items()})


def _has_backward(step: SampleCall) -> bool:
    floats = [x for x in torch.utils._pytree.tree_leaves(step.args) if isinstance(x, torch.Tensor)]
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in floats]
    known = {id(a): b for a, b in zip(floats, leaves, strict=True)}
    args = torch.utils._pytree.tree_map(lambda x: known.get(id(x), x), step.args)
    made = [r for r in torch.utils._pytree.tree_leaves(step.target(*args, **step.kwargs)) if r.requires_grad]
    try:
        torch.autograd.grad(
            made, [x for x in leaves if x.requires_grad], list(map(torch.ones_like, made)), allow_unused=True
        )
    except RuntimeError:
        return False
    return bool(made)


def found(call: tuple[Any, ...]) -> dict[str, Any]:
    """The entry of a call: what is derived for it, or "none"."""
    entry = {"op": call[0], "args": list(call[1:]), "kwargs": {}}
    node = call_node(entry)
    node.meta["derived"] = derived = derive(node)
    return entry_of(node) if hasattr(derived, "dims") else {**entry, "rule": "none"}


if __name__ == "__main__":
    FILE.write_text(as_file(map(found, CALLS)), encoding="utf-8")
    for line in json.loads(FILE.read_text(encoding="utf-8")):
        print(line["op"], line["rule"])
