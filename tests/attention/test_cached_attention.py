"""`autopar::cached_attention`: steps of random requests against a softmax over each request's own keys."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.adapters import varlen_attention
from autopar.adapters.operators import kernel_of
from autopar.ops.kernels import paged, paged_kernel
from autopar.ops.kernels.paged import PAGED, Paged, PagedKernel
from autopar.ops.kernels.paged_varlen import Varlen
from tests.support.paged_cases import FEATURES, LAYOUTS, Request, Step, arguments, expected, requests

OPERATOR = torch.ops.autopar.cached_attention.default
FUNCTION: Any = kernel_of(OPERATOR)  # as lowered graphs call it
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
NAN = float("nan")
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def run(step: Step, kernel: str = "rows", dtype: torch.dtype = torch.float64) -> tuple[Tensor, dict[str, Any]]:
    """out without the padding, and the arguments."""
    given = arguments(step, dtype)
    with paged.using(kernel):
        out = FUNCTION(*given.values())
    assert out.transpose(1, 2).is_contiguous() and out.dtype == dtype
    return out[:, :, : sum(r.new for r in step.requests)], given


def assert_right(step: Step, kernel: str = "rows", dtype: torch.dtype = torch.float64) -> None:
    out, given = run(step, kernel, dtype)
    torch.testing.assert_close(out.double(), expected(step), rtol=0, atol=CLOSE[dtype])
    before = arguments(step, dtype)
    for pool, own in (("keys", "k"), ("values", "v")):
        flat = before[pool].view(-1, *before[pool].shape[2:])
        flat[given["slots"]] = given[own][0].transpose(0, 1)
        assert torch.equal(given[pool].isnan(), before[pool].isnan())
        assert torch.equal(given[pool].nan_to_num(7.0), before[pool].nan_to_num(7.0))


SIZES = st.lists(st.tuples(st.sampled_from([1, 1, 1, 2, 5, 9]), st.integers(0, 30)), min_size=1, max_size=6)


@settings(max_examples=250, deadline=None)
@given(
    sizes=SIZES,
    layout=st.sampled_from(LAYOUTS),
    page=st.integers(1, 6),
    feature=st.sampled_from(FEATURES),
    split_kv=st.booleans(),
    filler=st.sampled_from([NAN, 0.5]),
    padding=st.sampled_from([0, 0, 3, 9]),
    kernel=st.sampled_from(["rows", "rows", "gathered"]),
    seed=st.integers(0, 99),
)
def test_random_steps(
    sizes: list[tuple[int, int]], layout: str, page: int, feature: dict[str, Any], split_kv: bool, filler: float,
    padding: int, kernel: str, seed: int,
) -> None:  # fmt: skip
    """The pools are not numbers wherever no key of a request is, so that nothing else can reach a result."""
    step = Step(requests(*sizes), layout, page, **feature, split_kv=split_kv, filler=filler, padding=padding, seed=seed)
    assert_right(step, kernel)


@pytest.mark.parametrize("kernel", ["rows", "gathered"])
@pytest.mark.parametrize("feature", FEATURES, ids=str)
def test_each_feature(feature: dict[str, Any], kernel: str) -> None:
    """Prompts, chunks of prompts and single tokens in one step, and one in an empty cache."""
    mixed = requests((7, 0), (1, 20), (5, 40), (1, 0), (1, 13), (16, 16))
    for layout in LAYOUTS:
        assert_right(Step(mixed, layout, **feature), kernel)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("feature", [{}, {"softcap": 2.0}, {"window": 5}, {"sinks": True}], ids=str)
def test_dtypes(feature: dict[str, Any], dtype: torch.dtype) -> None:
    for layout in ("rows", "fragments"):
        assert_right(Step(requests((7, 9), (1, 20), (1, 30)), layout, **feature), "rows", dtype)


def test_long_chunks_and_windows() -> None:
    """Longer than a block of keys, and than a cut of a window's tokens."""
    assert_right(Step(requests((600, 700), (1, 1900)), "fragments", 16, softcap=2.0))
    assert_right(Step(requests((700, 900)), "rows", 16, window=100))
    assert_right(Step(requests((700, 900)), "pages", 16, chunk=300))


def test_strides() -> None:
    """Queries, keys and values as views of something larger; a bias that is repeated."""
    step = Step(requests((1, 9), (1, 12), (5, 3)), bias=(1, 1))
    given, right = arguments(step), expected(step)
    for name in ("q", "k", "v"):
        x = given[name]
        given[name] = torch.stack([x, x], -1)[..., 0]
        assert given[name].stride(-1) == 2
    given["bias"] = given["bias"].expand(1, 4, 7, -1)
    torch.testing.assert_close(FUNCTION(*given.values()), right, rtol=0, atol=1e-12)
    given["bias"] = torch.stack([given["bias"]] * 2, -1)[..., 0]
    torch.testing.assert_close(FUNCTION(*given.values()), right, rtol=0, atol=1e-12)


# --- calls and copies ------------------------------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """flash: calls of torch's kernel. most: bytes of tensors that were made and alive at a time."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__()
        self.flash = self.most = 0
        self._given = {id(x.untyped_storage()): x for x in given.values() if isinstance(x, Tensor)}
        self._made: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.flash += func is FLASH
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and id(x.untyped_storage()) not in self._given:
                self._made[id(x.untyped_storage())] = weakref.ref(x.untyped_storage())
        alive = (reference() for reference in self._made.values())
        self.most = max(self.most, sum(s.nbytes() for s in alive if s is not None))
        return out


def calls(step: Step, dtype: torch.dtype = torch.float32) -> Calls:
    given = arguments(step, dtype)
    with Calls(given) as found:
        FUNCTION(*given.values())
    return found


@pytest.mark.parametrize("split_kv", [True, False])
@pytest.mark.parametrize(
    ("sizes", "feature"),
    [
        ([(1, 0)], {}), ([(1, 0)] * 4, {}), ([(64, 0)], {}), ([(1, 0), (64, 0)], {}), ([(64, 0)], {"sinks": True}),
        ([(1, 0)], {"window": 50}), ([(64, 0)], {"window": 50}), ([(64, 0)], {"chunk": 100}),
    ],
)  # fmt: skip
def test_memory_does_not_depend_on_old_keys(
    sizes: list[tuple[int, int]], feature: dict[str, Any], split_kv: bool
) -> None:
    """Neither copies of keys nor masks."""
    few, many = (
        calls(Step(requests(*[(new, old) for new, _ in sizes]), "rows", 16, **feature, split_kv=split_kv)).most
        for old in (200, 5000)
    )
    assert 0 < few == many


@pytest.mark.parametrize("feature", [{"softcap": 2.0}, {"widths": (12, 8)}, {"bias": (0, 1)}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_bound_what_plain_products_allocate(feature: dict[str, Any], dtype: torch.dtype) -> None:
    step = Step(requests((32, 3000)), "rows", 16, **feature)
    longer = dataclasses.replace(step, requests=requests((32, 9000)))
    assert calls(longer, dtype).most <= calls(step, dtype).most * 1.05


@pytest.mark.parametrize("layout", ["fragments", "pages"])
def test_copies_of_fragments_are_bounded(layout: str) -> None:
    """Runs of pages are views, and short ones copied a block at a time."""
    few, many = (calls(Step(requests((1, old), (8, old)), layout, 16)).most for old in (4000, 12000))
    assert many <= few * 1.05


def test_decoding_requests_share_a_call() -> None:
    def flash(*sizes: tuple[int, int], layout: str = "rows", split_kv: bool = True) -> int:
        return calls(Step(requests(*sizes), layout, 16, filler=0.5, split_kv=split_kv)).flash

    assert flash(*[(1, 40)] * 64) == 1
    assert flash(*[(1, 40 + i % 9) for i in range(64)]) == 1
    assert flash(*[(1, 40)] * 8, layout="close") == 1
    assert flash(*[(1, 40)] * 6, layout="gaps") == 1
    assert flash((20, 0), *[(1, 40)] * 8) == 2
    # far longer than the others: to pad them would cost more than calls of their own
    assert flash((1, 40), (1, 40), (1, 9000), (1, 41), (1, 40)) == 3
    assert flash(*[(1, 40)] * 5, split_kv=False) == 5


def test_windows_share_a_call_on_pages_of_whole_rows() -> None:
    """The first visible keys lie at different places of the rows."""
    step = Step(requests((1, 40), (1, 44), (1, 59), (1, 20)), "rows", 64, window=16, filler=0.5)
    assert calls(step).flash == 1
    assert_right(step)
    assert_right(dataclasses.replace(step, filler=NAN))
    assert_right(dataclasses.replace(step, bias=(0, 1)))


def test_views_stay_within_the_pool() -> None:
    """The last region is shorter than the longest request's view of it would be."""
    step = Step(requests((1, 30), (1, 2)), "close", 4, filler=0.5)
    assert_right(step)
    assert_right(dataclasses.replace(step, requests=requests((1, 3), (1, 2), (1, 3), (1, 0))))


# --- neighbours ------------------------------------------------------------------------------------------------------

SUBJECTS = (Request(1, 37, 50), Request(9, 0, 51), Request(6, 50, 52), Request(1, 0, 53))


@pytest.mark.parametrize("feature", FEATURES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_neighbours(feature: dict[str, Any], dtype: torch.dtype) -> None:
    """With split_kv=False, in any company and on any pages."""
    if feature.get("bias"):
        feature = feature | {"bias": (feature["bias"][0], 1)}  # rows of others are other columns of random numbers
    others = requests((1, 37), (1, 3), (12, 80), (1, 20), (3, 3))
    for subject in SUBJECTS:
        found = []
        for company in ((), others, others[:2]):
            for at in {0, len(company) // 2, len(company)}:
                for layout in LAYOUTS:
                    members = (*company[:at], subject, *company[at:])
                    step = Step(members, layout, 8, **feature, split_kv=False, seed=at)
                    bias = {} if step.bias is None else {"bias": wide_bias(step)}
                    given = arguments(step, dtype) | {k: v.to(dtype) for k, v in bias.items()}
                    begin = sum(r.new for r in company[:at])
                    found.append(FUNCTION(*given.values())[:, :, begin : begin + subject.new])
        assert all(torch.equal(x, found[0]) for x in found[1:])


def wide_bias(step: Step) -> Tensor:
    """The same numbers for every step."""
    assert step.bias is not None
    g = torch.Generator().manual_seed(3)
    return torch.randn(1, step.bias[0] or step.heads[0], 1, 200, generator=g, dtype=torch.float64)


def test_no_request_spoils_another() -> None:
    """A step in one call, in which the keys of one request are not numbers."""
    step = Step(requests(*[(1, 9 + i) for i in range(6)]), "rows", 4, filler=0.5)
    given, right = arguments(step), expected(step)
    place = int(given["table"][2, 0])
    given["keys"][place, 1], given["values"][place, 1] = NAN, NAN
    given["values"][int(given["table"][4, 0]), 2] = float("inf")
    out = FUNCTION(*given.values())
    assert out[:, :, 2].isnan().all() and not out[:, :, 4].isfinite().any()
    others = [0, 1, 3, 5]
    torch.testing.assert_close(out[:, :, others], right[:, :, others], rtol=0, atol=1e-12)


# --- the plan of a step ----------------------------------------------------------------------------------------------


def test_layers_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[Any] = []
    original = paged_kernel.plan_step
    monkeypatch.setattr(paged_kernel, "plan_step", lambda *given: planned.append(given) or original(*given))
    step = Step(requests((1, 9), (1, 12), (4, 4)))
    given = arguments(step)
    for _ in range(3):
        FUNCTION(*given.values())
    assert len(planned) == 1
    FUNCTION(*(given | {"window": 4}).values())
    assert len(planned) == 2
    FUNCTION(*(given | {"lengths": given["lengths"].clone()}).values())
    assert len(planned) == 3
    for _ in range(40):
        FUNCTION(*arguments(step).values())
    assert len(paged_kernel._known) == paged_kernel._KEPT


@pytest.mark.parametrize("inference", [False, True])
def test_a_table_that_is_written_to_is_read_again(inference: bool) -> None:
    with torch.inference_mode(inference):
        one, two = Step(requests((1, 9), (1, 12))), Step(requests((1, 12), (1, 9)))
        given, other = arguments(one), arguments(two)
        FUNCTION(*given.values())
        for name in ("table", "lengths"):
            given[name].copy_(other[name])
        out = FUNCTION(*(other | {name: given[name] for name in ("table", "starts", "lengths")}).values())
        torch.testing.assert_close(out, expected(two), rtol=0, atol=1e-12)


# --- without data, and errors ----------------------------------------------------------------------------------------


def test_the_operator_is_what_its_schema_says() -> None:
    given = arguments(Step(requests((1, 9), (3, 4)), filler=0.5))
    torch.library.opcheck(OPERATOR, tuple(given.values()), test_utils=("test_schema", "test_faketensor"))
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in given.values()]
        out = OPERATOR(*fake)
    meta = FUNCTION(*[x.to("meta") if isinstance(x, Tensor) else x for x in given.values()])
    for x in (out, meta):
        assert x.shape == (1, 4, 4, 8) and x.transpose(1, 2).is_contiguous()


def cut(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda given: {name: given[name][..., :-1]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (cut("k"), r"q \[1, Hq, T, D\].*found q \[1, 4, 4, 8\], k \[1, 2, 4, 7\]"),
        (cut("v"), "needs pools"),
        (cut("slots"), r"slots \[4\], one for each token, found \[3\]"),
        (cut("starts"), "starts \\[R \\+ 1\\]"),
        (cut("lengths"), "lengths \\[R\\]"),
        (lambda given: {"sinks": torch.zeros(3)}, r"sinks \[4\], found \[3\]"),
        (lambda given: {"bias": torch.zeros(1, 3, 1, 20)}, r"a bias \[1, 4, 4, S\]"),
        (lambda given: {"keys": given["keys"].float()}, "one dtype"),
        (lambda given: {"keys": given["keys"].transpose(0, 1).contiguous().transpose(0, 1)}, "contiguous pools"),
        (lambda given: {"q": given["q"][:, :3]}, "multiple of Hk"),
    ],
)
def test_shapes_that_do_not_fit(change: Callable[[dict[str, Any]], dict[str, Any]], words: str) -> None:
    given = arguments(Step(requests((1, 9), (3, 4))))
    given |= change(given)
    with pytest.raises(ValueError, match=words):
        FUNCTION(*given.values())
    with pytest.raises(ValueError, match=words):
        FUNCTION(*[x.to("meta") if isinstance(x, Tensor) else x for x in given.values()])


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("lengths", [10, 2], "a length that counts them, found 3 tokens and length 2 of request 1"),
        ("lengths", [99, 7], "request 0 needs 25 pages, found a table of 3 columns"),
        ("table", [[1, 0, 3], [5, 6, 0]], "need pages out of 1 to 8, found 0 to 3"),
        ("table", [[1, 2, 99], [5, 6, 0]], "need pages out of 1 to 8, found 1 to 99"),
        ("starts", [0, 1, 9], "starts that end at the number of tokens, 4, found 9"),
    ],
)
def test_numbers_that_do_not_fit(name: str, content: Any, words: str) -> None:
    given = arguments(Step(requests((1, 9), (3, 4))))
    given[name] = torch.tensor(content, dtype=torch.int32)
    with pytest.raises(ValueError, match=words):
        FUNCTION(*given.values())


# --- the table of kernels --------------------------------------------------------------------------------------------


def test_the_first_kernel_that_applies_is_used() -> None:
    given = arguments(Step(requests((1, 9))))

    class Own(PagedKernel):
        name = "own"

        def applies(self, q: Tensor, given: Paged) -> bool:
            return True

        def forward(self, q: Tensor, given: Paged) -> Tensor:
            return torch.full_like(q, 3.0)

    PAGED.add("own", Own())
    try:
        assert not (FUNCTION(*given.values()) == 3).any()
        with paged.using("own"):
            assert (FUNCTION(*given.values()) == 3).all()
    finally:
        PAGED.remove("own")
    with pytest.raises(ValueError, match=r"kernel of paged attention: unknown name 'row'.*did you mean 'rows'"), \
            paged.using("row"):  # fmt: skip
        pass
    with paged.using("varlen"), pytest.raises(ValueError, match="leave the choice open or use 'gathered'"):
        FUNCTION(*given.values())


def stand_in(
    q: Tensor, keys: Tensor, values: Tensor, starts: Tensor, ends: None, most: int, longest: int, *, scale: float,
    window_size: tuple[int, int], enable_gqa: bool, seqused_k: Tensor, block_table: Tensor, num_splits: int,
) -> Tensor:  # fmt: skip
    """What torch says of `varlen_attn`."""
    assert num_splits == 1 and window_size[1] == 0 and (enable_gqa or q.shape[1] == keys.shape[2])
    out, page = torch.zeros_like(q), keys.shape[1]
    for r, (begin, end) in enumerate(zip(starts.tolist(), starts.tolist()[1:])):
        length = int(seqused_k[r])
        assert end - begin <= most and length <= longest
        at = [int(block_table[r, p // page]) * page + p % page for p in range(length)]
        k, v = (x.reshape(-1, *x.shape[2:])[at].float().nan_to_num() for x in (keys, values))
        k, v = (x.transpose(0, 1).repeat_interleave(q.shape[1] // x.shape[1], 0) for x in (k, v))
        i, j = torch.arange(length - (end - begin), length)[:, None], torch.arange(length)
        seen = (j <= i) & ((i - j <= window_size[0]) | (window_size[0] < 0))
        scores = q[begin:end].transpose(0, 1).float() @ k.transpose(1, 2) * scale
        weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1)
        out[begin:end] = (weights @ v).transpose(0, 1).to(q.dtype)
    return out


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(varlen_attention, "_varlen_attn", lambda: stand_in)
    varlen_attention._form.cache_clear()
    varlen_attention.works.cache_clear()
    monkeypatch.setattr("autopar.ops.kernels.paged_varlen._on_cuda", lambda q: True)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("split_kv", [True, False])
@pytest.mark.parametrize("feature", [{}, {"window": 100}, {"heads": (4, 4)}], ids=str)
def test_what_varlen_attn_is_given(feature: dict[str, Any], split_kv: bool) -> None:
    for sizes in ([(1, 300), (9, 40), (270, 0), (1, 0)], [(1, 4), (1, 300)]):
        step = Step(requests(*sizes), "pages", 256, **feature, split_kv=split_kv, padding=3, filler=0.5)
        assert_right(step, "varlen", torch.bfloat16)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_what_varlen_attn_does_not_support() -> None:
    def applies(dtype: torch.dtype = torch.float16, **how: Any) -> bool:
        given = arguments(Step(requests((1, 9)), **{"page": 256} | how), dtype)
        chosen = {name: given[name] for name in Paged._fields}
        return Varlen().applies(given["q"], Paged(**chosen))

    assert applies() and applies(torch.bfloat16) and applies(window=5) and applies(page=512)
    assert not applies(torch.float32) and not applies(page=64)
    refused = (
        {"softcap": 2.0},
        {"sinks": True},
        {"chunk": 4},
        {"bias": (1, 1)},
        {"widths": (12, 12)},
        {"widths": (8, 16)},
    )
    assert not any(applies(**how) for how in refused)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_varlen_attn_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen_attention, "_varlen_attn", lambda: lambda q, *given, **how: torch.zeros_like(q))
    with pytest.warns(UserWarning, match=r"varlen_attn cannot be used on cpu \(its results are wrong\)"):
        assert not varlen_attention.works(torch.device("cpu"))
    varlen_attention._form.cache_clear()
    varlen_attention.works.cache_clear()
