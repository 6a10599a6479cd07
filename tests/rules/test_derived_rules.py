"""Rules that are derived: what is found, that it is true, what is not claimed, and models that run by them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node

from autopar.compile.model import compile_model
from autopar.ir.graph import tensor_operands
from autopar.ir.mesh import Mesh
from autopar.ir.placement import REPLICATE, Shard
from autopar.options import Options
from autopar.report.dump.dump import Dumper
from autopar.rules import RULES, RuleError, infer_rule, rule_of
from autopar.rules.derived import DerivedRule, NoRule, as_file, entry_of, text_of
from autopar.rules.infer_rule import derive
from autopar.testing.harness import check_model
from autopar.testing.soundness import call, unsound
from tests.support.derived_rules_file import FILE, call_of, found, sample_of
from tests.support.pointwise_samples import integer, normal
from tests.support.rule_samples import SAMPLES

aten = torch.ops.aten
F = nn.functional


def entries() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def called(target: Any, *args: Any) -> Node:
    return next(n for n in call(target, *args).graph.graph.nodes if n.op == "call_function")


@pytest.mark.parametrize(
    "turn, entry", [pytest.param(i, e, id=f"{e['op']} {e['rule']}") for i, e in enumerate(entries())]
)
def test_file_is_replayed(turn: int, entry: dict[str, Any]) -> None:
    """What is derived today is what the file says, and it is true as rules of the table are. (One function makes rules
    of what was derived: calls take turns with the ways to cut a dim.)"""
    torch.manual_seed(0)
    sample = sample_of(entry)
    node = next(n for n in sample.graph.graph.nodes if n.op == "call_function")
    node.meta["derived"] = derived = derive(node)
    if entry["rule"] == "none":
        assert isinstance(derived, NoRule)
        return
    assert text_of(node) == entry["rule"]
    if sample.tensors[0].dtype == torch.float64 and node.target not in RULES:
        tried, wrong = unsound(sample, Mesh.of(dp=2), turn)
        assert tried
        assert not wrong, "\n".join(wrong)


def test_files_are_read_as_they_were_written() -> None:
    for entry in entries():
        if entry["rule"] != "none":
            op, _, _ = call_of(entry)
            assert found((str(op), *entry["args"])) == entry
    assert json.loads(as_file(entries())) == entries()
    with pytest.raises(TypeError, match="cannot be written to a file"):
        entry_of(called(aten.sinc.default, normal(4)).graph.call_function(aten.sinc.default, (object(),)))


TABLE = ["linear.default", "matmul", "softmax.int", "cumsum", "gather", "embedding.default", "conv1d", "layer_norm"]
TABLE += ["index_select", "scatter.src", "aten.sort", "topk", "roll", "tril", "flip", "where.self", "cat", "max_pool1d"]


ATEN = [t for t in SAMPLES if getattr(t, "namespace", "") == "aten"]


@pytest.mark.parametrize("name", TABLE)
def test_nothing_is_derived_that_the_table_forbids(name: str) -> None:
    check_nothing_more([t for t in ATEN if str(t).startswith((name, f"aten.{name}"))], 1)


@pytest.mark.full
@pytest.mark.parametrize("name", TABLE)
def test_nothing_is_derived_that_the_table_forbids_of_operators_with_such_names(name: str) -> None:
    check_nothing_more([t for t in ATEN if name in str(t)], 4)


def check_nothing_more(targets: list[Any], most: int) -> None:
    """Whatever is found out about a call that has a rule is a part of that rule. (Windows of one row, and parts without
    rows, are no samples: the table is coarser there.)"""
    seen = 0
    for target in targets:
        for sample in SAMPLES[target][:most]:
            node = next(n for n in sample.graph.graph.nodes if n.op == "call_function")
            operands = tensor_operands(node)
            derived = derive(node) if operands and all(x.meta["val"].numel() for x in operands) else NoRule("")
            for dim in derived.dims if isinstance(derived, DerivedRule) else ():
                size = next(
                    x.meta["val"].shape[p] for x, p in zip(operands, dim.operands, strict=True) if p is not None
                )
                rule = rule_of(node, "dp", Mesh.of(dp=size))
                i, p = next((i, p) for i, p in enumerate(dim.operands) if p is not None)
                dims = rule.operands[i]
                assert dims is not None
                cut = rule.cut_of(dims, Shard(p), size)
                expected = [REPLICATE if p is None else Shard(p) for p in dim.operands]
                assert [a or REPLICATE for a in rule.required(cut)] == expected
                made = rule.produced(cut)
                assert all(p is None or made[k] == Shard(p) for k, p in enumerate(dim.results))
                seen += 1
    assert seen


# --- what must not be derived --------------------------------------------------------------------------------

_library = torch.library.Library("autopar_traps", "DEF")
_calls = [0]


def _counted(x: Tensor) -> Tensor:
    _calls[0] += 1
    return x * _calls[0]


def _written(x: Tensor) -> Tensor:
    x.detach().mul_(1.5)
    return x * 2


TRAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "centred": lambda x: x - x.mean(0, keepdim=True),
    "a trace of the others": lambda x: x + 1e-9 * x.sum(0, keepdim=True),
    "scaled by the largest": lambda x: x / x.abs().max(),
    "clamped if one is large": lambda x: x.clamp(-1, 1) if x.abs().max() > 1e5 else x * 1.0,
    "zeros if one is NaN": lambda x: torch.zeros_like(x) if x.isnan().any() else x * 2,
    "turned round": lambda x: x.flip(0),
    "swapped in pairs": lambda x: x.unflatten(0, (-1, 2)).flip(1).flatten(0, 1) if len(x) % 2 == 0 else x.clone(),
    "shifted": lambda x: torch.cat([torch.zeros_like(x[:1]), x[:-1]]),
    "the last one is other": lambda x: torch.cat([x[:-1], x[-1:] * (1 + 1e-6)]),
    "by its place": lambda x: x * torch.arange(1, len(x) + 1, dtype=x.dtype).unsqueeze(1),
    "by their number": lambda x: x / len(x),
    "many are other": lambda x: x * (1 if len(x) < 8 else 2),
    "sorted": lambda x: x.sort(0).values,
    "noise": lambda x: x + torch.rand_like(x),
    "a trace of noise": lambda x: x + 1e-14 * torch.rand_like(x),
    "a state": _counted,
    "writes": _written,
    "says nothing": torch.zeros_like,
}


def _trap(name: str) -> Any:
    word = name.replace(" ", "_")
    if not hasattr(torch.ops.autopar_traps, word):
        _library.define(f"{word}(Tensor x) -> Tensor")
        _library.impl(word, TRAPS[name], "CompositeExplicitAutograd")
        torch.library.register_fake(f"autopar_traps::{word}", torch.empty_like, lib=_library)
    return getattr(torch.ops.autopar_traps, word).default


@pytest.mark.parametrize("name", TRAPS)
def test_rows_that_know_of_each_other_are_not_cut(name: str) -> None:
    derived = derive(called(_trap(name), normal(8, 6)))
    assert not isinstance(derived, DerivedRule) or all(dim.operands != (0,) for dim in derived.dims)


ARGUMENTS: list[tuple[Any, tuple[Any, ...], str]] = [
    (aten.tril.default, (normal(64, 64), 10), "none"),
    (aten.roll.default, (normal(12, 6), [12], [0]), "[(. a)] -> (. a)"),
    (aten.roll.default, (normal(2, 6), [2], [0]), "[(. a)] -> (. a)"),
    (aten.view.default, (normal(8, 6), [4, 12]), "none"),
    (aten.expand.default, (normal(8, 1), [8, 6]), "none"),
    (aten.as_strided.default, (normal(8, 6), [8, 6], [6, 1]), "none"),
    (aten.new_zeros.default, (normal(8, 6), [8, 6]), "none"),
    (aten.gather.default, (normal(8, 6), 0, integer(8, 6, high=6)), "[(. a), (b a)] -> (b a)"),
    (aten.nansum.default, (normal(8, 6), None), "none"),
    (aten.pdist.default, (normal(8, 6),), "none"),
    (aten.bernoulli.default, (normal(8, 6).sigmoid(),), "none"),
]


@pytest.mark.parametrize("target, args, rule", ARGUMENTS, ids=str)
def test_arguments_that_hold_sizes_and_places(target: Any, args: tuple[Any, ...], rule: str) -> None:
    node = called(target, *args)
    node.meta["derived"] = derived = derive(node)
    assert (text_of(node) if isinstance(derived, DerivedRule) else "none") == rule


def test_nothing_is_left_behind() -> None:
    torch.manual_seed(3)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    infer_rule._known.clear()
    derive(called(_trap("noise"), normal(8, 6)))
    derive(called(aten.sinc.default, normal(8, 6)))
    assert torch.equal(before, torch.get_rng_state()) and threads == torch.get_num_threads()
    calls = len(infer_rule._known)
    derive(called(aten.sinc.default, normal(8, 6)))
    derive(called(aten.sinc.default, normal(8, 7)))
    assert len(infer_rule._known) == calls + 1


def test_large_operands_are_made_smaller_as_far_as_arguments_allow() -> None:
    node = called(aten.sinc.default, torch.empty(4, 2048, 1024, dtype=torch.float64))
    assert isinstance(derive(node), DerivedRule)
    far = derive(called(aten.diagonal_copy.default, torch.empty(2, 3000, 3000, dtype=torch.float64), 1500, 1, 2))
    assert isinstance(far, NoRule) and "too many for a trial" in far.why
    foreign = derive(called(_trap("centred"), torch.empty(4, 2048, 1024, dtype=torch.float64)))
    assert isinstance(foreign, NoRule) and "too many for a trial" in foreign.why


# --- models --------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A function between two linears; ``inner``: its module, or a parameter."""

    def __init__(self, middle: Callable[[Any, Tensor], Tensor], inner: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)
        self.middle = middle
        self.inner = inner() if inner is not None else None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(self.middle(self.inner, self.up(x))), y)


def _images(h: Tensor) -> Tensor:
    return h.reshape(-1, 1, 4, 4)


MODELS: dict[str, tuple[Any, ...]] = {
    "pointwise": (lambda m, h: torch.sinc(h),),
    "kth value": (lambda m, h: h * torch.kthvalue(h, 2, -1).values.unsqueeze(-1),),
    "fourier": (lambda m, h: torch.fft.irfft(torch.fft.rfft(h) * 0.5, n=16),),
    "grid sample": (lambda m, h: h * F.grid_sample(_images(h), h.reshape(-1, 4, 2, 2).tanh()).sum((2, 3)),),
    "folds": (lambda m, h: F.fold(F.unfold(_images(h), 2, stride=2), (4, 4), 2, stride=2).reshape(-1, 16),),
    "resized": (lambda m, h: F.interpolate(_images(h), scale_factor=2, mode="bicubic").reshape(-1, 16, 4).mean(-1),),
    "weight norm": (lambda m, h: m(h), lambda: nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))),
    "spectral norm": (lambda m, h: m(h), lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))),
    "orthogonal": (lambda m, h: m(h), lambda: nn.utils.parametrizations.orthogonal(nn.Linear(16, 16))),
    "positions": (
        lambda m, h: h + F.interpolate(m, size=(1, 16), mode="bicubic").reshape(1, 16),
        lambda: nn.Parameter(torch.randn(1, 1, 1, 9)),
    ),
    "a table summed": (lambda m, h: h * torch.nanmedian(m), lambda: nn.Parameter(torch.randn(4, 4))),
    "same": (lambda m, h: m(_images(h)).reshape(-1, 16), lambda: nn.Conv2d(1, 1, 3, padding="same")),
    "same, even": (
        lambda m, h: m(h.reshape(-1, 2, 2, 4)).reshape(-1, 16),
        lambda: nn.Conv2d(2, 2, (2, 4), padding="same"),
    ),
    "valid": (
        lambda m, h: F.pad(m(h.reshape(-1, 2, 8)), (1, 1)).reshape(-1, 16),
        lambda: nn.Conv1d(2, 2, 3, padding="valid"),
    ),
}  # fmt: skip


def batch() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    return {n: torch.randn(8, d, generator=g, dtype=torch.float64) for n, d in (("x", 8), ("y", 4))}


MESHES: list[tuple[str, dict[str, Any]]] = [("dp=2,tp=2", {"zero": 3}), ("dp=2", {"microbatches": 2})]


@pytest.mark.parametrize(
    "name, mesh, options",
    [  # each model on one of them, in turn
        pytest.param(name, *way, marks=() if (i + k) % 2 else pytest.mark.full, id=f"{name}-{way[0]}")
        for i, name in enumerate(MODELS)
        for k, way in enumerate(MESHES)
    ],
)
def test_models(name: str, mesh: str, options: dict[str, Any]) -> None:
    result = check_model(Net(*MODELS[name]).double(), batch(), Mesh.parse(mesh), Options(**options))
    assert result.worst < 1e-12, result


def plan_of(name: str) -> str:
    return str(compile_model(Net(*MODELS[name]), _float(), Mesh.of(dp=2), Options()).plan)


def _float() -> dict[str, Tensor]:
    return {name: x.float() for name, x in batch().items()}


def test_the_plan_says_what_was_derived() -> None:
    assert "note rules: aten.sinc.default: derived: [(a b)] -> (a b)" in plan_of("pointwise")
    assert "note rules: aten.nanmedian.default: computed from parameters alone, replicated" in plan_of("a table summed")
    assert "note rules" not in plan_of("same")


def test_a_dump_holds_them(tmp_path: Path) -> None:
    compile_model(Net(*MODELS["pointwise"]), _float(), Mesh.of(dp=2), Options(), observers=[Dumper(tmp_path)])
    (entry,) = json.loads((tmp_path / "derived_rules.json").read_text(encoding="utf-8"))
    assert entry == {
        "op": "aten.sinc.default",
        "args": [{"float32": [8, 16]}],
        "kwargs": {},
        "rule": "[(a b)] -> (a b)",
    }


def test_the_error_says_why_there_is_none() -> None:
    net = Net(lambda m, h: h * torch.nanmedian(h))
    op = "aten.nanmedian.default"
    with pytest.raises(
        ValueError, match=rf"no sharding rule for {op}.*none could be derived: no dim.*replicate_ops=\('{op}',\)"
    ):
        compile_model(net, _float(), Mesh.of(dp=2), Options())
    assert check_model(net.double(), batch(), Mesh.of(dp=2), Options(replicate_ops=(op,))).worst < 1e-12


def test_what_the_rule_does_not_cut_is_not_gathered_in_silence() -> None:
    net = Net(lambda m, h: h + torch.kthvalue(h, 2, dim=0).values)
    op = "aten.kthvalue.default"
    with pytest.raises(
        ValueError,
        match=rf"no sharding rule for {op}.*derived rule, \[\(\. a\)\].*does not shard it.*replicate_ops=",
    ):
        compile_model(net, _float(), Mesh.of(dp=2), Options())
    assert check_model(net.double(), batch(), Mesh.of(dp=2, tp=2), Options(replicate_ops=(op,), zero=3)).worst < 1e-12


@pytest.mark.parametrize("name", ["noise", "a state"])
def test_what_does_not_repeat_itself_is_no_value_of_all_ranks(name: str) -> None:
    """Not even if it is made of parameters alone."""
    net = Net(lambda m, h: h * _trap(name)(m).sum(), lambda: nn.Parameter(torch.randn(4, 4)))
    with pytest.raises(ValueError, match=r"none could be derived: two runs gave different results.*replicate_ops="):
        compile_model(net, _float(), Mesh.of(dp=2), Options())


def test_a_dim_that_was_not_found_is_refused() -> None:
    node = called(aten.kthvalue.default, normal(8, 6), 2, -1)
    node.meta["derived"] = derive(node)
    rule = rule_of(node, "tp", Mesh.of(tp=2))
    assert rule.operands[0] is not None
    with pytest.raises(RuleError, match="was derived, and it does not shard this dim"):
        rule.cut_of(rule.operands[0], Shard(1), 2)
