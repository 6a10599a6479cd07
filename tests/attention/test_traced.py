"""For a CPU a compiler traces attention: numbers, strides and rows without keys are those of the operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.adapters.inductor import compile_step
from autopar.ops.declare import COMPILED
from autopar.runtime.exec.lowering import _BoxedCode

forward, backward = torch.ops.autopar.attention.default, torch.ops.autopar.attention_backward.default
QUERIES, KEYS = 5, 12
OPTIONAL = ("bias", "key_mask", "segments", "sinks", "seed")
CASES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "softcap, window": {"softcap": 3.0, "window": 4, "causal": True},
    "padding, sinks": {"key_mask": torch.rand(2, KEYS) > 0.4, "sinks": torch.rand(4).double()},
    "a row without keys": {"key_mask": torch.arange(KEYS).expand(2, KEYS) > 9, "causal": True, "offset": 0},
    "softcap, padding": {"softcap": 3.0, "key_mask": torch.rand(2, KEYS) > 0.4},
    "chunks": {"chunk": 3, "causal": True},
}
OPAQUE: dict[str, dict[str, Any]] = {
    "a bias may block all keys by a large number": {"bias": torch.rand(2, 1, QUERIES, KEYS).double()},
    "dropout": {"dropout": 0.5, "seed": torch.tensor(1), "index": [], "shape": [2, 4, QUERIES, KEYS]},
    "documents": {"segments": torch.zeros(2, KEYS, dtype=torch.int64)},
}


def facts(optional: dict[str, Tensor], given: dict[str, Any]) -> tuple[Any, ...]:
    known = {"causal": False, "window": 0, "chunk": 0, "offset": KEYS - QUERIES, "softcap": 0.0, "dropout": 0.0} | given
    scalars = [known[name] for name in ("causal", "window", "chunk", "offset")]
    tail = known["softcap"], known["dropout"], 0, [], known.get("shape", []), []
    return (*(optional.get(name) for name in OPTIONAL), *scalars, 0.3, *tail)


def compiled(function: Callable[..., Any], given: list[Tensor]) -> tuple[Callable[..., Any], bool]:
    """(the function as a step graph is compiled, whether attention is opaque in it)."""
    gm = make_fx(function, tracing_mode="fake")(*given)
    traced = make_fx(gm, decomposition_table=COMPILED, tracing_mode="fake")(*given)
    opaque = any(str(node.target).startswith("autopar.") for node in traced.graph.nodes)
    gm.graph.set_codegen(_BoxedCode())
    gm.recompile()
    return compile_step(gm, torch.device("cpu"), fused=COMPILED)[0], opaque


def attended(given: dict[str, Any], key_heads: int = 2) -> tuple[list[list[Tensor]], list[bool]]:
    """(results and gradients of the operator and of compiled code, whether the latter calls the operator)."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, *size, 8).double() for size in ((4, QUERIES), (key_heads, KEYS), (key_heads, KEYS)))
    tensors = {name: x for name, x in given.items() if name in OPTIONAL}

    def f(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Any:
        return forward(q, k, v, *facts(dict(zip(tensors, more)), given))

    def b(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *more: Tensor) -> Any:
        return backward(grad, q, k, v, out, lse, *facts(dict(zip(tensors, more)), given), False)

    results, how = list[list[Tensor]](), list[bool]()
    with torch.no_grad():
        out, lse = f(q, k, v, *tensors.values())
        back = [torch.randn_like(out), q, k, v, out, lse, *tensors.values()]
        results.append([out, lse, *b(*back)])
        found: list[Tensor] = []
        for function, inputs in ((f, [q, k, v, *tensors.values()]), (b, back)):
            run, opaque = compiled(function, inputs)
            found += run(list(inputs))
            how.append(opaque)
        results.append(found)
    return results, how


@pytest.mark.parametrize("name", [*CASES, *OPAQUE])
def test_the_numbers_are_those_of_the_operator(name: str) -> None:
    """What depends on values or random bits stays an operator."""
    (expected, found), opaque = attended({**CASES, **OPAQUE}[name])
    assert opaque == [name in OPAQUE] * 2
    for x, y in zip(expected, found, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)
        assert x.stride() == y.stride() or not x.numel()
