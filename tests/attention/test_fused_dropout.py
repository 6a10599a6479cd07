"""Dropout as one kernel: the CPU's bits, in Triton's interpreter; and code for GPUs, which is compiled but not run.

Triton is in the extra ``dev``. Where it is missing nothing here can run, and GPUs do without the kernel, too.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from autopar.ops import dropout
from autopar.ops.kernels.triton_module import module_that_runs
from tests.support.triton_files import fresh, interpreted

triton = pytest.importorskip("triton", reason="Triton is not here; the extra dev has it: pip install -e '.[dev]'")

FILE = Path(dropout.__file__).parent / "kernels" / "fused_dropout.py"
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
ops = torch.ops.autopar


@pytest.fixture(scope="module")
def fused() -> Any:
    with interpreted(FILE, "interpreted_dropout") as module:
        yield module


def bits(x: Tensor) -> Tensor:
    return x.reshape(-1).view(WORDS[x.element_size()])


def compare(fused: Any, x: Tensor, seed: int, p: float, site: int, *cut: Any) -> None:
    """The kernel against the operator on the CPU, and the mask alone."""
    index, shape = cut or ([], [])
    known = torch.tensor(seed), p, site, index, shape
    found, expected = fused.dropped(x, *known), ops.dropout(x, *known)
    assert found.is_contiguous() and found.dtype == x.dtype and found.shape == x.shape
    assert torch.equal(bits(found), bits(expected))
    assert torch.equal(fused.mask(x.shape, *known), dropout.keep_mask(x.shape, *known))


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bits(fused: Any, dtype: torch.dtype) -> None:
    """Odd sizes, more than one program along rows and columns, all ranks of tensors."""
    for shape in ((), (7,), (2, 3, 5), (1100, 3), (3, 1030), (2, 2, 3, 2, 9), (0, 4)):
        compare(fused, numbers(*shape, dtype=dtype), -12345678901234, 0.3, 3)


def test_other_strides(fused: Any) -> None:
    x = numbers(6, 10, 8)
    for view in (x.permute(2, 0, 1), x[::2, 1::3, ::2], x[:, :1].expand(6, 4, 8), x[0].t(), numbers(5, 6, 2, 3, 4).mT):
        assert not view.is_contiguous()
        compare(fused, view, 5, 0.5, 0)


def test_pieces(fused: Any) -> None:
    """Rows and columns of a sharded tensor, in any order and number of dims; more rows than 32 bits count."""
    some, most = torch.tensor([1, 4]), torch.tensor([5, 0, 3])
    compare(fused, numbers(2, 10, 3), 5, 0.3, 3, [some, torch.arange(10), torch.tensor([0, 3, 7])], [6, 10, 8])
    compare(fused, numbers(2, 3, 4, 5), 5, 0.3, 3, [some, most, torch.arange(8)[::2], torch.arange(5)], [6, 7, 8, 5])
    index = [some, most, torch.arange(2), some, torch.arange(3)]
    compare(fused, numbers(2, 3, 2, 2, 3), 5, 0.3, 3, index, [6, 7, 2, 5, 3])
    compare(fused, numbers(3), 5, 0.3, 3, [torch.tensor([1 << 33, 7, (1 << 32) + 7])], [1 << 34])
    far = [torch.tensor([3, 1 << 20, (1 << 21) - 1]), torch.tensor([0, 1 << 13]), torch.arange(5)]
    compare(fused, numbers(3, 2, 5), 5, 0.3, 3, far, [1 << 21, 1 << 14, 5])
    compare(fused, numbers(2, 5), 5, 0.3, 3, [], [9, 5])  # no indices: the first rows


@pytest.mark.parametrize("p", [0.0, 1e-9, 0.1, 1 - 2**-24, 1 - 1e-9])
def test_rates_seeds_and_sites(fused: Any, p: float) -> None:
    known = ((0, 0), (-1, 1), (1 << 62, 7), (-(1 << 63), 123456))
    for (seed, site), dtype in zip(known, FLOATS):
        compare(fused, numbers(4, 6, dtype=dtype), seed, p, site)


def test_rates_at_the_bits_of_an_element(fused: Any) -> None:
    """An element is kept up to the rate that is its own 24 bits."""
    low, high = 0, 1 << 24
    while high - low > 1:
        middle = (low + high) // 2
        kept = dropout.keep_mask((1,), torch.tensor(5), middle / (1 << 24), 0, [], [])
        low, high = (middle, high) if bool(kept) else (low, middle)
    for rate in (low, high):
        kept = fused.mask((1,), torch.tensor(5), rate / (1 << 24), 0, [], [])
        assert bool(kept) == (rate == low)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning", "ignore:overflow:RuntimeWarning")
def test_numbers_that_are_none(fused: Any) -> None:
    """Zero times infinity is NaN, and a dropped negative number is -0, as on the CPU."""
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, -1.0, 1e-45, 3e38, 65504.0]).repeat(20, 1)
    for dtype in (torch.float32, torch.float64):
        x = odd.to(dtype)
        found = fused.dropped(x, torch.tensor(1), 0.5, 0, [], [])
        expected = ops.dropout(x, torch.tensor(1), 0.5, 0, [], [])
        assert torch.equal(found.isnan(), expected.isnan()) and found.isnan().any()
        assert torch.equal(bits(found.nan_to_num(7.0)), bits(expected.nan_to_num(7.0)))


def everything() -> list[Tensor]:
    """Dropout and attention with dropout, both ways."""
    seed, x = torch.tensor(3), numbers(2, 4, 6, 8, dtype=torch.float64).requires_grad_()
    y = ops.dropout(x.mT, seed, 0.25, 1, [], []).mT
    facts = (None, None, None, None, seed, True, 0, 0, 0, 0.3, 0.0, 0.5, 2, [], [], [])
    out = ops.attention(y, x[:, :2], y[:, 2:], *facts)[0]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), x)]


def test_the_operators_take_it(fused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, which the CPU plays: dropout and its backward are a launch each, attention's masks, too."""
    expected, launched = everything(), []
    monkeypatch.setattr(dropout, "fused_for", lambda x: fused)
    launch = fused._launch
    monkeypatch.setattr(fused, "_launch", lambda out, x, *known: (launched.append(out.dtype), launch(out, x, *known)))
    monkeypatch.setattr(dropout, "_mix", None)
    for found, other in zip(everything(), expected, strict=True):
        assert torch.equal(found, other)
    assert launched == [torch.float64, torch.bool, torch.bool, torch.float64]


def test_what_it_does_not_take(fused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fused.takes((1 << 20, 3, 4), torch.bfloat16) and fused.takes(()) and fused.takes((0,), torch.float64)
    assert not fused.takes((1 << 30, 2)) and not fused.takes((1 << 27,)) and not fused.takes((3,), torch.complex64)
    x = numbers(3, 4).to(torch.complex64)
    expected = ops.dropout(x, torch.tensor(3), 0.5, 0, [], [])
    monkeypatch.setattr(dropout, "fused_for", lambda x: fused)
    assert torch.equal(ops.dropout(x, torch.tensor(3), 0.5, 0, [], []), expected)


def test_where_it_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tried once per device, and said once; neither the CPU nor a tensor without data is asked."""
    module_that_runs.cache_clear()
    cuda = torch.device("cuda", 0)
    with pytest.warns(UserWarning, match="dropout: Triton does not run on cuda:0 .* dozen kernels instead of one"):
        assert dropout._fused(cuda) is None
    assert dropout._fused(cuda) is None
    monkeypatch.setattr(dropout, "_fused", None)
    with FakeTensorMode():
        assert dropout.fused_for(torch.ones(3, device=cuda)) is None
    assert dropout.fused_for(torch.ones(3)) is None


# --- code for GPUs ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled() -> Any:
    """The module with a kernel that Triton compiles."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        return fresh(FILE, "compiled_dropout")


def code(module: ModuleType, dtype: str, capability: int, **known: Any) -> str:
    """PTX as for a large tensor whose sizes are multiples of 16, "i1": the mask alone. ``known``: other constants."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, is_mask = module._dropout, dtype == "i1"
    constants = {"FAR": False, "MASK": is_mask, "DOUBLE": dtype == "fp64", "ROWS": 4, "COLUMNS": 1024, "stride3": 1}
    constants |= {"size1": 1, "whole1": 1, **dict.fromkeys(("at0", "at1", "at2", "at3"))} | known
    constants |= {"x": None} if is_mask else {}
    types = {"out": f"*{dtype}", "x": f"*{dtype}", "seed": "*i64", "scale": "i64"}
    types |= {name: "*i64" for name in ("at0", "at1", "at2", "at3")}
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names}
    aligned = [n for n in signature if n not in constants and n not in ("salt", "least", "scale")]
    attributes = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    source = ASTSource(kernel, signature, constants, attributes)
    return str(triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"])


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(("dtype", "loads"), [("bf16", 4), ("fp64", 16), ("i1", 0)])
def test_code_reads_once_and_writes_once(
    compiled: Any, dtype: str, loads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread has 32 of the 4,096 elements: it reads the seed and 16 bytes at a time of x, and writes as much."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ptx = code(compiled, dtype, 90)
    found = re.findall(r"\b(ld|st)\.global\.(v\d\.)?b(\d+)", ptx)
    assert [width for kind, vector, width in found if kind == "ld" and not vector] == ["64"]
    wide = [(kind, int(vector[1]) * int(width)) for kind, vector, width in found if vector]
    assert wide.count(("ld", 128)) == loads and wide.count(("st", 128)) == max(loads, 2) == len(wide) - loads


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("capability", [80, 120])
def test_code_for_other_chips(compiled: Any, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With indices, and with rows that 32 bits do not count."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    others = {"FAR": True, "size1": 3} if capability == 80 else {}
    ptx = code(compiled, "fp16", capability, **others)
    assert f".target sm_{capability}" in ptx and "ld.global.v4.b32" in ptx
