"""Rows of experts, one kernel per operator: the CPU's numbers, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.ops import grouped_experts
from autopar.ops.grouped_experts import inverse, pairs_by_expert
from tests.support.triton_files import fresh, interpreted

triton = pytest.importorskip("triton", reason="Triton is not here; the extra dev has it: pip install -e '.[dev]'")

FILE = Path(grouped_experts.__file__).parent / "kernels" / "fused_expert_rows.py"
ops = torch.ops.autopar
TYPES = ((torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32),
         (torch.bfloat16, torch.bfloat16))  # fmt: skip
EXPERTS = (8, 5, 0)  # how many of 8 this rank has: all of them, some, none


@pytest.fixture(scope="module")
def fused() -> Iterator[Any]:
    with interpreted(FILE, "interpreted_expert_rows") as module:
        yield module


def numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers, whose sums every dtype holds."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def routed(own: int, tokens: int = 9, k: int = 3) -> tuple[Tensor, int, int]:
    chosen = torch.rand(tokens, 8, generator=torch.Generator().manual_seed(own)).topk(k).indices
    return pairs_by_expert(chosen, own)[0], tokens, k


@pytest.mark.parametrize("own", EXPERTS)
@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("width", [6, 1030])
def test_sums_and_their_gradients(fused: Any, own: int, types: Any, width: int) -> None:
    (dtype, of_weights), (order, tokens, k) = types, routed(own)
    rows, weights = numbers(order.shape[0], width, dtype=dtype), numbers(tokens, k, dtype=of_weights)
    grad, place = numbers(tokens, width, dtype=dtype), inverse(order, tokens * k).view(tokens, k)
    same = torch.testing.assert_close
    same(fused.summed(rows, place, None), ops.moe_dispatch_backward(rows, order, k, tokens), rtol=0, atol=0)
    same(fused.summed(rows, place, weights), ops.moe_combine(rows, order, weights), rtol=0, atol=0)
    to_rows, to_weights = fused.spread(grad, rows, order, weights)
    expected = ops.moe_combine_backward(grad, rows, order, weights)
    same(to_rows, expected[0], rtol=0, atol=0)
    same(to_weights.float(), expected[1].float(), rtol=1e-2 if of_weights == torch.bfloat16 else 0, atol=0)


@pytest.mark.parametrize("ends", ([4, 4, 12, 16], [0, 0, 0, 16], [0, 0, 0, 0], [3, 7, 8, 11]), ids=str)
def test_what_the_product_leaves(fused: Any, ends: list[int]) -> None:
    """Rows of no expert and experts without rows become zeros; nothing else is touched."""
    offsets = torch.tensor(ends, dtype=torch.int32)
    rows, matrices = torch.full((16, 1030), torch.nan), torch.full((4, 70, 80), torch.nan)
    rows[: ends[-1]], matrices[torch.tensor([0, *ends]).diff() > 0] = 3.0, 5.0
    assert torch.equal(fused.clear_rows(rows, offsets).isnan(), torch.zeros(16, 1030, dtype=torch.bool))
    assert float(rows.sum()) == 3.0 * ends[-1] * 1030
    used = int((torch.tensor([0, *ends]).diff() > 0).sum())
    assert float(fused.clear_experts(matrices, offsets).sum()) == 5.0 * used * 5600


@pytest.mark.parametrize("kernel", ["_sum_rows", "_spread_rows", "_clear_rows", "_clear_experts"])
@pytest.mark.parametrize("capability", [80, 90])
def test_code_for_gpus(kernel: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It compiles, for weights and sizes as they come."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    function = getattr(fresh(FILE, "compiled_expert_rows"), kernel)
    kinds = {
        "place": "*i64",
        "order": "*i64",
        "weights": "*fp32",
        "weights_grad": "*fp32",
        "last": "*i32",
        "ends": "*i32",
    }
    known = {"K": 4, "DOUBLE": False, "COLUMNS": 1024, "BLOCK": 4096}
    sizes = dict.fromkeys(("width", "rows", "size"), "i32") if kernel.startswith("_clear") else {"width": "i32"}
    names = function.arg_names
    signature = {n: "constexpr" if n in known else kinds.get(n) or sizes.get(n, "*bf16") for n in names}
    source = ASTSource(function, signature, constexprs={(i,): known[n] for i, n in enumerate(names) if n in known})
    ptx = str(triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"])
    assert "st.global" in ptx
