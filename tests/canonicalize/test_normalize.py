"""normalize: each rewrite by the graph before and after, and by its numbers."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from autopar.capture.front_end import capture
from autopar.models.tiny import TINY
from autopar.passes.canonicalize.normalize import REWRITES, Normalize


class Wrapped(nn.Module):
    """A function of inputs and parameters (w: 2-D weight, b: bias) as a module."""

    def __init__(self, function: Callable[..., Any], **parameters: Tensor) -> None:
        super().__init__()
        self.function = function
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, **inputs: Tensor) -> Any:
        return self.function(**inputs, **dict(self.named_parameters()))


def text(gm: GraphModule) -> list[str]:
    """One line per call, values numbered in order: 'linear(x, w) -> 2x3'."""
    names: dict[Any, str] = {}
    lines = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            names[node] = re.sub(r"^p_", "", node.name)
        if node.op != "call_function":
            continue
        names[node] = f"%{len(lines)}"
        target = getattr(node.target, "_opname", getattr(node.target, "__name__", ""))
        shown = re.sub(r"[A-Za-z]\w*", lambda m: m[0], ", ".join(_show(a, names) for a in node.args))
        lines.append(f"{target}({shown})")
    return lines


def _show(value: Any, names: dict[Any, str]) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_show(v, names) for v in value)}]"
    return names.get(value, str(value)) if isinstance(value, torch.fx.Node) else str(value)


def normalized(function: Callable[..., Any], inputs: dict[str, Tensor], **parameters: Tensor) -> GraphModule:
    """Capture, normalise, and compare outputs and gradients (of inputs and parameters) with the function itself."""
    module = Wrapped(function, **parameters)
    gm = Normalize().apply(capture(module, inputs))
    for operator in (n.target for n in gm.graph.nodes if n.op == "call_function"):
        assert not getattr(operator, "_schema", None) or not operator._schema.is_mutable
    state = {**dict(module.named_parameters()), **inputs, **gm.meta["constants"]}
    found = gm(*(state[spec.name] for spec in gm.meta["signature"].inputs))
    expected = module(**inputs)
    expected = expected if isinstance(expected, (tuple, list)) else (expected,)
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12, equal_nan=True)
    trained = [t for t in state.values() if t.requires_grad]
    floating = [i for i, t in enumerate(expected) if t.requires_grad]
    if trained and floating:
        seeds = [torch.rand_like(expected[i]) for i in floating]
        pairs = [
            torch.autograd.grad([side[i] for i in floating], trained, seeds, allow_unused=True)
            for side in (found, expected)
        ]
        for left, right in zip(*pairs):
            torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12)
    return gm


def rand(*shape: int, seed: int = 0, grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_(grad)


X, W, BIAS = rand(2, 4, 6), rand(6, 8, seed=1), rand(8, seed=2)


PRODUCTS: dict[str, tuple[Callable[..., Any], dict[str, Tensor], list[str]]] = {
    "addmm between flattening views": (
        lambda x, w, b: torch.addmm(b, x.view(-1, 6), w).view(2, 4, 8),
        {"w": W, "b": BIAS},
        ["t(w)", "linear(x, %0, b)"],
    ),
    "matmul with a transposed weight": (lambda x, w: x @ w.T, {"w": rand(8, 6)}, ["linear(x, w)"]),
    "mm": (lambda x, w: torch.mm(x.reshape(8, 6), w).tanh(), {"w": W},
           ["t(w)", "linear(x, %0)", "tanh(%1)", "reshape(%2, [8, 8])"]),
    "bmm": (lambda x, w: torch.bmm(x, x.transpose(1, 2)) + w.sum(), {"w": BIAS},
            ["transpose(x, 1, 2)", "matmul(x, %0)", "sum(w)", "add(%1, %2)"]),
    "baddbmm": (lambda x, w: torch.baddbmm(w, x, x.transpose(1, 2), beta=0.5, alpha=2.0), {"w": rand(4)},
                ["transpose(x, 1, 2)", "matmul(x, %0)", "mul(%1, 2.0)", "mul(w, 0.5)", "add(%3, %2)"]),
    "einsum with a weight": (lambda x, w: torch.einsum("bsi,oi->bso", x, w), {"w": rand(8, 6)}, ["linear(x, w)"]),
    "einsum, rows last": (lambda x, w: torch.einsum("bsi,bti->tbs", x, x * w), {"w": rand(6)},
                          ["mul(x, w)", "transpose(%0, -2, -1)", "matmul(x, %1)", "permute(%2, [2, 0, 1])"]),
    "einsum of three dims": (lambda x, w: torch.einsum("bsi,iho->bsho", x, w), {"w": rand(6, 2, 4)},
                             ["einsum(bsi,iho->bsho, [x, w])"]),
    "linear on flattened rows": (lambda x, w: F.gelu(F.linear(x.flatten(0, 1), w)).view(2, 4, 8), {"w": rand(8, 6)},
                                 ["linear(x, w)", "gelu(%0)"]),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str) -> None:
    function, parameters, after = PRODUCTS[name]
    assert text(normalized(function, {"x": X}, **parameters)) == after


def test_products_of_activations_stay_matmul() -> None:
    """Only a weight makes a projection: here both sides are activations."""
    assert "matmul(x, %0)" in text(normalized(lambda x: x @ x[0].t(), {"x": rand(4, 4, 6)}))[-1].replace("%1", "%0")


SHAPES: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "views merge": (lambda x: x.view(8, 6).unflatten(1, (2, 3)).tanh(), ["reshape(x, [8, 2, 3])", "tanh(%0)"]),
    "no-ops vanish": (lambda x: x.contiguous().clone().to(x.dtype).expand(2, 4, 6)[:, :].detach() + 1, ["add(x, 1)"]),
    "slices that tile": (
        lambda x: torch.cat((-x[..., 3:], x[..., :3]), -1),
        ["split_with_sizes(x, [3, 3], 2)", "getitem(%0, 0)", "getitem(%0, 1)", "neg(%2)", "cat([%3, %1], -1)"],
    ),
    "slices that do not": (lambda x: x[..., 2:] + x[..., :4],
                           ["slice(x, 2, 2, 9223372036854775807)", "slice(x, 2, 0, 4)", "add(%0, %1)"]),
    "chunk": (lambda x: x.chunk(3, -1)[1] * 2, ["split_with_sizes(x, [2, 2, 2], 2)", "getitem(%0, 1)", "mul(%1, 2)"]),
    "flattened pointwise": (lambda x: x.view(8, 6).relu().view(2, 4, 6) + 1, ["relu(x)", "add(%0, 1)"]),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str) -> None:
    function, after = SHAPES[name]
    lines = text(normalized(lambda x: function(x), {"x": X}))
    assert [re.sub(r"(slice\(x, 2), 2\)", r"\1)", line) for line in lines] == after


def test_a_detach_stays_behind_what_was_rewritten_in_the_same_sweep() -> None:
    gm = normalized(lambda x, w: (x @ w).view(8, 8).detach() * (x @ w).flatten(0, 1), {"x": X}, w=W)
    assert sum(line.startswith("detach") for line in text(gm)) == 1


def test_what_torch_defines_by_others_is_taken_apart() -> None:
    """Operators without a rule: aliases, and several results."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        a, b = torch.tensor_split(torch.multiply(x, 2.0), 2, dim=-1)
        return torch.subtract(torch.movedim(a, 0, 1), torch.swapaxes(b, 0, 1)) * w.sum()

    lines = text(normalized(function, {"x": X}, w=W))
    assert not any(re.match("multiply|tensor_split|movedim|swapaxes|subtract", line) for line in lines), lines


def test_in_place_becomes_functional() -> None:
    def shifted(x: Tensor, w: Tensor) -> Tensor:
        y = x.new_zeros(x.shape)
        y[:, 1:] = (x * w)[:, :-1].clone()
        y[:, 0] = 3.0
        return y.mul_(2.0)

    lines = text(normalized(shifted, {"x": X}, w=rand(6)))
    assert not any(line.startswith(("copy", "fill")) for line in lines)
    assert sum("slice_scatter" in line or "select_scatter" in line for line in lines) >= 2


def test_a_slice_that_is_all_is_no_slice() -> None:
    """A loop over chunks of tokens that runs once writes what it makes into all of the result: examples stay apart."""

    def in_chunks(x: Tensor, w: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for start in range(0, len(x), 4096):
            y[start : start + 4096] = x[start : start + 4096] * w
        return y

    lines = text(normalized(in_chunks, {"x": X}, w=rand(6)))
    assert not any("slice" in line for line in lines), lines


TARGET = torch.tensor([0, 3, -100, 2, -100, 1])
LOGITS = {"x": rand(6, 5, grad=True), "y": TARGET}


def ce(**options: Any) -> Callable[..., Tensor]:
    return lambda x, y: F.cross_entropy(x, y, **options)


LOSSES: dict[str, tuple[Callable[..., Any], dict[str, Tensor]]] = {
    "mean": (ce(), LOGITS),
    "sum": (ce(reduction="sum"), LOGITS),
    "none": (ce(reduction="none", ignore_index=2), {"x": LOGITS["x"], "y": TARGET.clamp(min=0)}),
    "smoothing": (ce(label_smoothing=0.1), LOGITS),
    "class weights": (ce(weight=rand(5).abs()), LOGITS),
    "images": (ce(), {"x": rand(2, 5, 3, grad=True), "y": TARGET.view(2, 3)}),
    "images, per pixel": (ce(reduction="none"), {"x": rand(2, 5, 3, grad=True), "y": TARGET.view(2, 3)}),
    "one row": (ce(), {"x": rand(5, grad=True), "y": torch.tensor(3)}),
    "probabilities": (ce(label_smoothing=0.1), {"x": rand(6, 5, grad=True), "y": rand(6, 5, seed=3).softmax(-1)}),
    "nll": (lambda x, y: F.nll_loss(x, y), LOGITS),
    "nll of log_softmax": (lambda x, y: F.nll_loss(F.log_softmax(x, 1), y), LOGITS),
    "nll 2d": (lambda x, y: F.nll_loss(x, y), {"x": rand(2, 5, 3, 1, grad=True), "y": TARGET.view(2, 3, 1)}),
}
PAIR = {"x": rand(4, 5, grad=True), "y": rand(4, 5, seed=5)}
UNIT = {"x": rand(4, 5, grad=True), "y": rand(4, 5, seed=5).sigmoid()}


def _call(name: str, reduction: str, x: Tensor, y: Tensor) -> Tensor:
    out: Tensor = getattr(F, name)(x, y, reduction=reduction)
    return out


for _name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
    for _reduction in ("mean", "sum", "none"):
        LOSSES[f"{_name} {_reduction}"] = (functools.partial(_call, _name, _reduction), PAIR)
FIVE = rand(5).abs()
LOSSES |= {
    "smooth_l1_loss with a small knee": (lambda x, y: F.smooth_l1_loss(x, y, beta=0.3), PAIR),
    "huber_loss with a small knee": (lambda x, y: F.huber_loss(x, y, delta=0.3), PAIR),
    "bce with logits": (lambda x, y: F.binary_cross_entropy_with_logits(x, y, pos_weight=FIVE), UNIT),
    "bce": (lambda x, y: F.binary_cross_entropy(x.sigmoid(), y, weight=FIVE), UNIT),
    "kl_div": (lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"), PAIR),
    "kl_div, log target": (lambda x, y: F.kl_div(x, y, log_target=True, reduction="sum"), PAIR),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    """By numbers and gradients; and no fused loss operator is left."""
    function, inputs = LOSSES[name]
    lines = text(normalized(function, {"y": inputs["y"]}, x=inputs["x"].detach()))
    called = [line.partition("(")[0] for line in lines]
    assert not any("loss" in name or "kl_div" in name or "binary" in name for name in called)


def test_mean_loss_is_a_sum_and_a_count() -> None:
    assert text(normalized(ce(), LOGITS)) == [
        "cross_entropy(x, y, -100, 0.0)", "getitem(%0, 0)", "ne(y, -100)", "sum(%1)", "sum(%2)",
        "watch(%4, 1e-30, inf, None, no label counts (all are -100, or their classes have no weight), so the mean loss "
        "is 0/0 = nan, False)", "div(%3, %5)",
    ]  # fmt: skip


def heads(**extra: Tensor) -> dict[str, Tensor]:
    shapes = {"q": (2, 4, 6, 8), "k": (2, 2, 6, 8), "v": (2, 2, 6, 8)}
    return {name: rand(*shape, seed=i, grad=True) for i, (name, shape) in enumerate(shapes.items())} | extra


def repeated(x: Tensor) -> Tensor:
    return x[:, :, None].expand(2, 2, 2, 6, 8).reshape(2, 4, 6, 8)


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    weights = q @ repeated(k).transpose(-2, -1) * 0.3
    weights = weights if mask is None else weights + mask
    return F.dropout(F.softmax(weights, -1, dtype=torch.float64), 0.1, False) @ repeated(v)


def filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ repeated(k).transpose(-2, -1)) / 2.0
    keep = torch.ones(6, 6, dtype=torch.bool).tril()
    return F.softmax(weights.masked_fill(~keep, float("-inf")), -1) @ repeated(v)


KEYS = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6], dtype=torch.bool)
ATTENTIONS: dict[str, tuple[Callable[..., Any], dict[str, Tensor], str]] = {
    "sdpa, repeated keys": (
        lambda q, k, v: F.scaled_dot_product_attention(q, repeated(k), repeated(v), is_causal=True), heads(),
        "None, None, None, None, None, True",
    ),
    "sdpa, key mask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(
            q, k, v, m[:, None, None].expand(2, 1, 6, 6), enable_gqa=True
        ),
        heads(m=KEYS), "None, m, None, None, None, False",
    ),
    "sdpa, bool mask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, scale=0.2, enable_gqa=True),
        heads(m=torch.ones(6, 6, dtype=torch.bool).tril()), "%3, None, None, None, None, False",
    ),
    "sdpa, repeat_interleave": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), m),
        heads(m=rand(1, 1, 6, 6)), "m, None, None, None, None, False",
    ),
    "softmax of products": (eager, heads(), "None, None, None, None, None, False"),
    "softmax of products with a mask": (eager, heads(mask=rand(1, 1, 6, 6)), "mask, None, None, None, None, False"),
    "softmax of products, filled": (filled, heads(), "None, None, None, None, None, True"),
    "sdpa, a triangle": (
        lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, torch.triu(torch.full((6, 6), float("-inf"), dtype=q.dtype), 1)[None], enable_gqa=True
        ),
        heads(), "None, None, None, None, None, True",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention(name: str) -> None:
    """One operator on unrepeated keys, with what could be read off the mask."""
    function, inputs, facts = ATTENTIONS[name]
    lines = text(normalized(function, inputs))
    found = [line for line in lines if line.startswith("attention")]
    assert len(found) == 1 and re.match(rf"attention\(q, k, v, {facts}", found[0]), lines
    assert not any("softmax" in line or "repeat" in line for line in lines)


def test_attention_with_one_head() -> None:
    inputs = {n: rand(2, 6, 8, seed=i, grad=True) for i, n in enumerate("qkv")}
    lines = text(normalized(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), inputs))
    assert lines[-1] == "reshape(%4, [2, 6, 8])"


def test_what_was_split_is_joined_again() -> None:
    assert not text(normalized(lambda x: torch.cat(x.split([1, 3], 1), 1), {"x": X}))
    assert len(text(normalized(lambda x: torch.cat(x.split([1, 3], 1)[::-1], 1), {"x": X}))) > 1
    assert len(text(normalized(lambda x: torch.cat(x.split(2, 1), 0), {"x": X}))) > 1
    assert text(normalized(lambda x: torch.cat(x.unbind(1), 1), {"x": X})) == ["reshape(x, [2, 24])"]
    assert not text(normalized(lambda x: torch.stack(x.unbind(1), 1), {"x": X}))
    assert len(text(normalized(lambda x: torch.stack(x.unbind(1), 2), {"x": X}))) > 1
    assert len(text(normalized(lambda x: torch.stack(x.split(2, 1), 1), {"x": X}))) > 1


def test_zero_bias_is_none() -> None:
    gm = Normalize().apply(capture(TINY["t5"].build(), TINY["t5"].batch(2, 8)))
    biases = [n.args[3] for n in gm.graph.nodes if n.target is torch.ops.autopar.attention.default]
    assert len(biases) == 6 and sum(b is None for b in biases) == 2  # cross attention has no position bias


@pytest.mark.parametrize("train", [True, False])
def test_batch_norm(train: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten()).double().train(train)
    x = rand(4, 3, 2, 2)
    model[0].running_mean.copy_(rand(3)), model[0].running_var.copy_(rand(3).abs())
    gm = Normalize().apply(capture(Wrapped(lambda x: x), {"x": x}))
    gm = Normalize().apply(capture(model, {"input": x}, train=train))
    assert not any("norm" in line for line in text(gm))
    state = {**model.state_dict(keep_vars=True), "input": x}
    found = gm(*(state[s.name] for s in gm.meta["signature"].inputs))
    values = [v.detach().clone() for v in found[1:]]
    expected = model(x)
    torch.testing.assert_close(found[0], expected, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(side.square().sum(), list(model.parameters())) for side in (found[0], expected)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)
    for spec, value in zip(gm.meta["signature"].outputs[1:], values, strict=True):
        torch.testing.assert_close(value, model.state_dict()[spec.name], rtol=1e-12, atol=1e-12)


def test_dropout_is_numbered() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.dropout(F.dropout(F.dropout(x * w, 0.5), 0.0), 0.25) + F.dropout(x, 0.9, training=False)

    gm = Normalize().apply(capture(Wrapped(function, w=BIAS[:6]), {"x": X}))
    assert text(gm) == [
        "mul(x, w)", "dropout(%0, seed, 0.5, 0, [], [])", "dropout(%1, seed, 0.25, 1, [], [])", "add(%2, x)",
    ]  # fmt: skip
    assert [(s.kind, s.node) for s in gm.meta["signature"].inputs][-1] == ("seed", "seed")
    run = [gm(BIAS[:6], X, torch.tensor(s))[0] for s in (1, 1, 2)]
    assert torch.equal(run[0], run[1]) and not torch.equal(run[0], run[2])


def test_dropout_of_models() -> None:
    """bert: hidden and attention dropout get the seed and different sites; in eval there is no seed at all."""
    entry = TINY["bert"]
    gm = Normalize().apply(capture(entry.build(dropout=0.1), entry.batch(2, 8)))
    seed = next(n for n in gm.graph.nodes if n.name == "seed")
    schema = {u: [a.name for a in u.target._schema.arguments].index("site") for u in seed.users}
    sites = [user.args[position] for user, position in schema.items()]
    assert len(sites) == 7 and len(set(sites)) == 7
    gm = Normalize().apply(capture(entry.build(dropout=0.1), entry.batch(2, 8), train=False))
    assert all(n.name != "seed" for n in gm.graph.nodes)


def test_is_a_no_op_on_a_normalised_graph() -> None:
    gm = Normalize().apply(capture(TINY["gpt2"].build(dropout=0.1), TINY["gpt2"].batch(2, 8)))
    before: Sequence[str] = text(gm)
    assert text(Normalize().apply(gm)) == before


def test_every_rewrite_shows_before_and_after() -> None:
    for rewrite in set(REWRITES.values()):
        source = rewrite.__doc__ or ""
        assert "-->" in source or rewrite.__name__ == "matmul", rewrite
