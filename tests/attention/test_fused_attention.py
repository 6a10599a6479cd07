"""Attention in Triton: in its interpreter against plain products; and code for GPUs, which is compiled but not run."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.ops import kernels
from autopar.ops.kernels import KERNELS, cuda, triton_flash
from autopar.ops.kernels.chips import Chip
from autopar.ops.kernels.triton_module import module_that_runs
from autopar.ops.mask_spec import MaskSpec
from tests.support.kernel_cases import CASES, both_ways, case_of, facts, tensors
from tests.support.triton_files import fresh, interpreted

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")  # the logarithm in rows without keys
triton = pytest.importorskip("triton", reason="Triton is not here; the extra dev has it: pip install -e '.[dev]'")

FILE = Path(kernels.__file__).with_name("fused_attention.py")
SMALL = {256: ((16, 16, 4, 2), (16, 16, 4, 2)), 512: ((32, 32, 4, 2), (32, 32, 4, 2))}
MATH = KERNELS["math"]


@pytest.fixture(scope="module")
def fused() -> Any:
    """In blocks of 16. The interpreter does not multiply bfloat16: torch does here."""
    from triton.runtime import interpreter

    dot = interpreter.InterpreterBuilder.create_dot

    def wide(x: Any) -> Any:
        if str(x.dtype) != "bf16":
            return x
        numbers = torch.from_numpy(x.data.copy()).view(torch.bfloat16).float().numpy()
        return interpreter.TensorHandle(numbers, triton.language.float32)

    with pytest.MonkeyPatch.context() as patch, interpreted(FILE, "interpreted_attention") as module:
        patch.setattr(
            interpreter.InterpreterBuilder, "create_dot", lambda self, a, b, *how: dot(self, wide(a), wide(b), *how)
        )
        patch.setattr(module, "BLOCKS", SMALL)
        yield module


@pytest.fixture
def played(fused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU passes for a chip that has the kernel."""
    monkeypatch.setattr(cuda, "_on_cuda", lambda q: True)
    monkeypatch.setattr(cuda, "chip_of", lambda device: Chip((9, 0), 92000))
    monkeypatch.setattr(triton_flash, "_module", lambda device: fused)


def compare(name: str, inputs: list[Tensor], known: MaskSpec, tolerance: float) -> None:
    """Both ways; the plain products are those of the same numbers in double precision."""
    q, k, v, grad = (x.double() for x in inputs)
    expected = both_ways_of_math(q, k, v, grad, known)
    with kernels.using(name):
        found = both_ways(*inputs, known)  # type: ignore[call-arg]
    for part, left, right in zip(("out", "lse", "q", "k", "v"), found, expected, strict=True):
        torch.testing.assert_close(
            left.double(), right, rtol=tolerance, atol=tolerance, msg=lambda m, p=part: f"{p}: {m}"
        )


TAKEN = set(CASES) - {"bias", "key bias", "dropout", "wide"}
SOME = (
    "window",
    "chunk",
    "padding",
    "sinks",
    "queries before keys",
    "softcap of an odd width",
    "one key head",
)


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in SOME else pytest.mark.full) for c in CASES])
def test_equals_plain_products(case: str) -> None:
    made, known = case_of(case)
    inputs = [x.float() for x in made]
    if case in SOME:  # one example where rows are alike, and every other head, unless each is told apart
        inputs = [x[: 2 if case == "padding" else 1, :: 1 if case == "sinks" else 2] for x in inputs]
    assert KERNELS["triton_flash"].applies(*inputs[:3], known) == (case in TAKEN)
    if case in TAKEN:
        compare("triton_flash", inputs, known, 5e-6 * max(1.0, inputs[0].shape[-1] / 32))  # longer sums


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 4e-3), (torch.bfloat16, 3e-2)], ids=str)
def test_half_types(dtype: torch.dtype, tolerance: float) -> None:
    """Scores and sums are float32; probabilities and their gradients are rounded before the products."""
    inputs = [x[:1, ::2].to(dtype) for x in tensors(S_ODD, dtype=torch.float32)]
    compare("triton_flash", inputs, facts(softcap=3.0, causal=True, offset=S_ODD - 22), tolerance)


S_ODD = 37


@pytest.mark.usefixtures("played")
def test_a_part_of_a_larger_attention() -> None:
    """Two halves of the keys, merged, and backwards that are given the log-sum-exp and the delta of the whole."""
    q, k, v, grad = (x[:1, ::2].float() for x in tensors(30))
    known = facts(softcap=2.0, causal=True, offset=8, window=19)
    with kernels.using("math"):
        out, lse, *expected = both_ways(q, k, v, grad, known)
    kernel, parts, sums = KERNELS["triton_flash"], [], [torch.zeros(()), [], []]
    for low, high in ((0, 13), (13, 30)):
        of_part = dataclasses.replace(known, offset=8 - low)
        parts.append(kernel.forward(q, k[:, :, low:high], v[:, :, low:high], of_part))
        to_q, to_k, to_v, _ = kernel.backward(grad, q, k[:, :, low:high], v[:, :, low:high], out, lse, of_part, False)
        sums = [sums[0] + to_q, [*sums[1], to_k], [*sums[2], to_v]]
    merged = torch.logaddexp(parts[0][1], parts[1][1])
    torch.testing.assert_close(merged, lse, rtol=5e-6, atol=5e-6)
    weighted = sum(o * torch.exp(part - merged).unsqueeze(-1) for o, part in parts)
    torch.testing.assert_close(weighted, out, rtol=5e-6, atol=5e-6)
    for left, right in zip((sums[0], torch.cat(sums[1], 2), torch.cat(sums[2], 2)), expected):
        torch.testing.assert_close(left, right, rtol=5e-6, atol=5e-6)


MASKS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window": 10},  # 15 rows reach 33 columns
    "causal window": {"causal": True, "window": 7},
    "chunk": {"chunk": 24},
}


def reached(allowed: Tensor) -> Tensor:
    """Bool over the columns of a mask: those of the blocks of 16, from the first that any row reaches to the last."""
    found = allowed.any(0).nonzero()
    first, last = int(found.min()), int(found.max())
    return (torch.arange(allowed.shape[1]) >= first) & (
        torch.arange(allowed.shape[1]) < first + (last - first) // 16 * 16 + 16
    )


@pytest.mark.parametrize("mask", [pytest.param(m, marks=pytest.mark.full) if m == "causal" else m for m in MASKS])
def test_blocks_out_of_reach_are_not_visited(fused: Any, mask: str) -> None:
    """NaNs would show: a fully masked block is still multiplied."""
    q, k, v, grad = (x.float()[:1, :1] for x in tensors(96))
    rows = facts(softcap=2.0, offset=37, **MASKS[mask])  # few rows, many columns
    inside = reached(rows.allowed(15, 96, q.device)[0, 0])  # type: ignore[index]
    assert not inside.all()
    odd = [x.masked_fill(~inside[:, None], float("nan")) for x in (k, v)]
    few, of_few = q[:, :, :15], grad[:, :, :15]
    out, lse = fused.attended(few, *odd, rows)
    to_q, _, _ = fused.differentiated(of_few, few, *odd, lse, (of_few * out).sum(-1), rows)
    expected = both_ways_of_math(few, k, v, of_few, rows)
    for found, right in zip((out, lse, to_q), expected):
        torch.testing.assert_close(found, right, rtol=5e-6, atol=5e-6)

    columns = facts(softcap=2.0, offset=0 if mask == "chunk" else -37, **MASKS[mask])  # many rows, few columns
    wide, of_wide, one, of_one = k, v, q[:, :, :16], grad[:, :, :16]
    inside = reached(columns.allowed(96, 16, q.device)[0, 0].T)  # type: ignore[index]
    assert not inside.all()
    out, lse = MATH.forward(wide, one, of_one, columns)
    delta = (of_wide * out).sum(-1)
    odd = [x.masked_fill(~inside[:, None], float("nan")) for x in (wide, of_wide)]
    _, to_k, to_v = fused.differentiated(odd[1], odd[0], one, of_one, lse, delta, columns)
    _, right_k, right_v, _ = MATH.backward(of_wide, wide, one, of_one, out, lse, columns, False)
    torch.testing.assert_close((to_k, to_v), (right_k, right_v), rtol=5e-6, atol=5e-6)


PACKED: dict[str, dict[str, Any]] = {
    "in any order": {"segments": torch.tensor([3, 7, 7, 1, 5, 5]).repeat_interleave(16)[None]},
    "across blocks": {"causal": True, "segments": torch.arange(96)[None] // 24},
    "a number that comes back": {"segments": torch.tensor([2, 1, 2, 1, 8, 8]).repeat_interleave(16)[None]},
}


@pytest.mark.parametrize("packed", PACKED)
def test_blocks_of_other_documents_are_not_visited(fused: Any, packed: str) -> None:
    """NaNs in the last document do not show in blocks that have none of its rows."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, 1, 96, 8) for _ in range(4))
    known = facts(softcap=2.0, **PACKED[packed])
    behind = (known.segments == known.segments[:, -1:])[..., None]  # type: ignore[index]
    right = both_ways_of_math(q, k, v, grad, known)
    lse, delta = right[1], (grad * right[0]).sum(-1)
    odd_q, odd_k, odd_v, odd_grad = (x.masked_fill(behind, float("nan")) for x in (q, k, v, grad))
    out, found_lse = fused.attended(q, odd_k, odd_v, known)
    to_q, _, _ = fused.differentiated(grad, q, odd_k, odd_v, lse, delta, known)
    _, to_k, to_v = fused.differentiated(odd_grad, odd_q, k, v, lse, delta, known)
    for found, expected in zip((out, found_lse, to_q, to_k, to_v), right, strict=True):
        torch.testing.assert_close(found[:, :, :64], expected[:, :, :64], rtol=5e-6, atol=5e-6)
        assert found is found_lse or bool(found[:, :, 80:].isnan().all())


def both_ways_of_math(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, known: MaskSpec) -> list[Tensor]:
    """out, lse and gradients."""
    with kernels.using("math"):
        return both_ways(q, k, v, grad, known)


@pytest.mark.usefixtures("played")
def test_documents_of_later_queries() -> None:
    made = [x.float()[:, ::2] for x in tensors(S_ODD)]  # one head of keys
    segments = torch.stack((torch.arange(S_ODD) // 5, torch.arange(S_ODD) // 9))
    compare("triton_flash", made, facts(softcap=2.0, causal=True, offset=S_ODD - 22, segments=segments), 5e-6)


@pytest.mark.usefixtures("played")
def test_other_strides_and_larger_blocks(fused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads inside, every other row, one head for all; sizes in which no block is full; results lie heads inside."""
    monkeypatch.setattr(fused, "BLOCKS", {512: SMALL[512]})
    q, k, v, grad = (x.float() for x in tensors(S_ODD, width=20, value_width=9, key_heads=1))
    q, grad = q[:1, :2], grad[:1, :2]
    k, v = (x[:1].repeat_interleave(2, 2)[:, :, ::2] for x in (k, v))
    q, grad = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, grad))
    compare("triton_flash", [q, k, v, grad], facts(softcap=4.0, key_mask=torch.rand(1, S_ODD) < 0.6), 5e-6)
    out, _ = KERNELS["triton_flash"].forward(q, k, v, facts())
    assert out.transpose(1, 2).is_contiguous()


def test_tanh_is_right_where_it_is_small(fused: Any) -> None:
    """One key, and a softcap: out is the value, lse the score, from 1e-6 of the cap to beyond it."""
    raw = torch.logspace(-6, 1.5, 48).reshape(1, 1, 48, 1) * torch.tensor([1.0, -1.0]).repeat(24).reshape(1, 1, 48, 1)
    one = torch.ones(1, 1, 1, 1)
    _, lse = fused.attended(raw, one, one, facts(scale=1.0, softcap=1.0))
    torch.testing.assert_close(lse, torch.tanh(raw.double()).float()[..., 0], rtol=2e-6, atol=0)


def test_where_it_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning, once, and plain products."""
    module_that_runs.cache_clear()
    monkeypatch.setattr(cuda, "_on_cuda", lambda q: True)
    monkeypatch.setattr(cuda, "chip_of", lambda device: Chip((9, 0), 92000))
    q, k, v, _ = (x.half() for x in tensors())
    with pytest.warns(UserWarning, match="fused_attention: Triton does not run on cpu .* softcap .* in plain products"):
        assert not KERNELS["triton_flash"].applies(q, k, v, facts(softcap=2.0))
    assert kernels.choose_kernel(q, k, v, facts(softcap=2.0)).name == "math"
    module_that_runs.cache_clear()


# --- code for GPUs ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled() -> Any:
    """The module with kernels that Triton compiles."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        return fresh(FILE, "compiled_attention")


TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
POINTERS = ("q", "k", "v", "out", "grad", "to_q", "to_k", "to_v")


def code(
    module: ModuleType, name: str, dtype: torch.dtype, capability: int, width: int, masked: bool = False, **known: Any
) -> Any:
    """What Triton makes of a kernel for a causal attention with softcap, rows of which begin at multiples of 16.
    ``known``: further constants, as Triton takes sizes that are 1, or other facts."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(module, name)
    x = torch.empty(1, 1, 1, width, dtype=dtype, device="meta")
    constants, how = module._constants(x, x, facts(causal=True, softcap=50.0), name != "_forward")
    constants |= known if masked else {"mask": None, "documents": None, **known}
    types = {**dict.fromkeys(POINTERS, f"*{TYPES[dtype]}"), "lse": "*fp32", "delta": "*fp32", "scale": "fp32"}
    types |= {"mask": "*u8", "documents": "*i32"}
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names}
    free = ("offset", "scale", "heads", "group", "rows", "columns", "mask_b", "mask_row", "mask_column", *constants)
    aligned = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in signature if n not in free}
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=how)


MOST_SHARED = 99 * 1024  # of a program on sm_86, sm_89 and sm_120; others have more
CODE = [
    ("_forward", torch.bfloat16, 80, 128),
    ("_to_keys", torch.bfloat16, 90, 128),
    ("_to_queries", torch.float16, 90, 64),
]
EVERY = [
    (name, dtype, capability, width)
    for name in ("_forward", "_to_queries", "_to_keys")
    for dtype in (torch.bfloat16, torch.float32)
    for capability in (80, 90, 100, 120)
    for width in (64, 128, 256)
]


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(
    ("name", "dtype", "capability", "width"),
    [*CODE, *(pytest.param(*c, marks=pytest.mark.full) for c in EVERY)],
    ids=str,
)
def test_code(
    compiled: Any, name: str, dtype: torch.dtype, capability: int, width: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """It fits on the chip; half types are multiplied by tensor cores; numbers come 16 bytes at a time."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    made = code(compiled, name, dtype, capability, width)
    ptx = made.asm["ptx"]
    assert f".target sm_{capability}" in ptx and made.asm["cubin"]
    assert made.metadata.shared <= MOST_SHARED
    assert bool(re.search(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b", ptx)) == (dtype != torch.float32)
    assert re.search(r"(ld\.global[.\w]*\.v4\.b32|cp\.async\.cg\.shared\.global)", ptx)
    assert not re.search(r"\b(red|atom)\.", ptx)


ONES = ("heads", "group", "rows", "columns", "q_s", "k_b", "mask_row", "mask_column", "mask_b")


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(("name", "known"), [
    pytest.param(name, known, marks=() if (name, i) in (("_forward", 0), ("_to_keys", 0)) else pytest.mark.full)
    for name in ("_forward", "_to_queries", "_to_keys") for i, known in enumerate((
        dict.fromkeys(ONES, 1), {"rows": 1}, {"columns": 1, "CAUSAL": 0, "CAP": 0.0},
        {"heads": 1, "group": 1, "WINDOW": 5}, {"CHUNK": 8}, {"CAUSAL": 0, "WINDOW": 9},
    ))
], ids=str)  # fmt: skip
def test_code_of_other_facts(
    compiled: Any, name: str, known: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes and strides that are 1 are constants to Triton, of another type."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    made = code(compiled, name, torch.float16, 80, 16, masked="mask_row" in known, **known)
    assert "mma.sync" in made.asm["ptx"]


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_code_with_masks(compiled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    made = code(compiled, "_to_keys", torch.bfloat16, 80, 64, masked=True)
    assert made.metadata.shared <= MOST_SHARED and "mma.sync" in made.asm["ptx"]
