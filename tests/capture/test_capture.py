"""capture(): the graph gives what the model gives, loss and gradients, and the signature says what is what."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from autopar.capture.front_end import adapter_for, capture
from autopar.capture.trace import export
from autopar.ir.signature import Signature
from autopar.lift_to_float64 import LiftFloat32
from autopar.models.hf import exact_experts
from autopar.models.tiny import TINY, TinyModel
from autopar.passes.canonicalize.normalize import Normalize
from autopar.testing.reference import difference
from tests.support.subjects import subject
from tests.support.whole_joint import OwnBackwards

EXACT = 1e-12


def graph_inputs(gm: torch.fx.GraphModule, model: nn.Module, batch: dict[str, Any], seed: int = 7) -> list[Tensor]:
    """The values of a captured graph's placeholders."""
    state = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
        **gm.meta["constants"],
        "seed": torch.tensor(seed),
        **batch,
    }
    return [state[spec.name] for spec in gm.meta["signature"].inputs]


def run(gm: torch.fx.GraphModule, model: nn.Module, batch: dict[str, Any]) -> Any:
    """The graph's result in the model's own structure."""
    signature: Signature = gm.meta["signature"]
    outputs = sum(spec.kind == "output" for spec in signature.outputs)
    values = OwnBackwards(gm).run(*graph_inputs(gm, model, batch))  # a model's own backwards need it
    return signature.rebuild(values[:outputs])


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad))
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for n, p, g in zip(names, parameters, found)}


def one_layer(name: str) -> TinyModel:
    """A tiny model with one layer, unless they differ."""
    entry = TINY[name]
    if "layer_types" in entry.sizes or name == "gemma2":
        return entry
    counts = {size: 1 for size in entry.sizes if "layers" in size or size == "n_layer"}
    return dataclasses.replace(entry, sizes=entry.sizes | counts)


def compare(
    entry: TinyModel, batch: dict[str, Any], train: bool, others: Sequence[dict[str, Any]] = ()
) -> torch.fx.GraphModule:
    """Capture and normalise; loss and every gradient must equal eager transformers, for ``others`` as well."""
    model = entry.build().train(train)
    adapter = adapter_for(model)
    assert adapter is not None
    gm = Normalize().apply(capture(model, batch, train=train, lift_to_float64=True))
    for values in (batch, *others):
        with LiftFloat32(), adapter.reference(model):
            expected = model(**adapter.arguments(model, values))
        found = run(gm, model, values)
        assert type(found) is type(expected)
        assert_close(found.loss, gradients(model, found.loss), expected.loss, gradients(model, expected.loss))
    return gm


def assert_close(
    loss: Tensor, left: Mapping[str, Tensor], expected: Tensor | float, right: Mapping[str, Tensor | None]
) -> None:
    """A gradient of zeros is as good as none."""
    assert abs(float(loss) - float(expected)) < EXACT
    whole = {n: torch.zeros_like(g) if (x := right[n]) is None else x for n, g in left.items()}
    errors = {n: difference(g, whole[n]) for n, g in left.items()}
    assert max(errors.values()) < EXACT, max(errors, key=errors.__getitem__)
    assert max(g.abs().max() for g in whole.values()) > 1e-3  # the comparison is not one of zeros


# One of every kind of batch, with experts, and with attention of its own, are captured in eval mode, too; with -m full,
# all are.
EVAL = ("llama", "mixtral", "bert", "t5", "vit", "whisper", "falcon")


@pytest.mark.parametrize("name", TINY)
def test_all(name: str) -> None:
    known = subject(name if one_layer(name) is TINY[name] else f"one-layer {name}")  # captured in train mode
    gm = Normalize().apply(known.graph())
    with torch.no_grad(), exact_experts(known.model):
        expected = known.model(**known.batch)
    found = run(gm, known.model, known.batch)
    assert type(found) is type(expected)
    assert_close(found.loss, gradients(known.model, found.loss), *known.expected[:2])


@pytest.mark.parametrize("name", [n if n in EVAL else pytest.param(n, marks=pytest.mark.full) for n in TINY])
def test_all_in_eval_mode(name: str) -> None:
    compare(one_layer(name), TINY[name].batch(4, 16), train=False)


def padded(entry: TinyModel, side: str) -> dict[str, Tensor]:
    """Rows with ever more padding on one side."""
    batch = entry.batch(4, 16)
    mask = torch.ones(4, 16, dtype=torch.int64)
    for example in range(1, 4):
        mask[example, -3 * example :] = 0
        if side == "left":
            mask[example] = mask[example].flip(0)
    batch["attention_mask"] = mask
    if entry.kind != "seq2seq":
        # A padded row attends to nothing: 0 for us and for sdpa, an average over everything in eager transformers.
        # The shifted loss of the first token would see it.
        unseen = (mask == 0) | (mask.cumsum(1) == 1)
        batch["labels"] = batch["labels"].masked_fill(unseen, -100)
    return batch


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "gpt2", "gemma2", "bert", "t5", "gpt_oss", "falcon"),
        *(pytest.param(name, marks=pytest.mark.full) for name in ("mistral", "opt", "mixtral")),
    ],
)
def test_padding(name: str) -> None:
    """Padding is a key mask, never an [S, S] tensor; its values are not in the graph, which serves both sides."""
    entry = one_layer(name)
    gm = compare(entry, padded(entry, "right"), train=True, others=[padded(entry, "left")])
    calls = [n for n in gm.graph.nodes if n.target is torch.ops.autopar.attention.default]
    if name not in ("t5", "falcon"):
        assert calls and all(n.args[3] is None and n.args[4] is not None for n in calls)


def test_packed_documents() -> None:
    """position_ids that start again are documents: segments, as transformers masks them."""
    entry = TINY["mistral"]
    batch = entry.batch(2, 16)
    lengths = [(5, 11), (16,)]
    batch["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    gm = compare(entry, batch, train=True)
    attention = next(n for n in gm.graph.nodes if n.target is torch.ops.autopar.attention.default)
    assert attention.args[3] is None and attention.args[5] is not None
    assert list(attention.args[8:10]) == [True, 6]


def test_without_labels() -> None:
    entry = TINY["llama"]
    batch = {"input_ids": entry.batch(2, 8)["input_ids"]}
    model = entry.build()
    with LiftFloat32():
        expected = model(**batch)
    gm = capture(model, batch, lift_to_float64=True)
    found = run(gm, model, batch)
    assert found.loss is None and torch.equal(found.logits, expected.logits)
    assert [(o.kind, o.name) for o in gm.meta["signature"].outputs] == [("output", "logits")]


def test_facts_of_masks() -> None:
    """causal, window, softcap and sinks are arguments of the one operator."""
    names = ("bias", "key_mask", "segments", "sinks", "seed", "causal", "window", "chunk", "offset", "scale", "softcap")

    def facts(name: str) -> list[dict[str, Any]]:
        calls = [n for n in subject(name).captured.graph.nodes if n.target is torch.ops.autopar.attention.default]
        return [dict(zip(names, n.args[3:])) for n in calls]

    sliding, full = facts("gpt_oss")
    assert (sliding["window"], full["window"]) == (6, 0)
    assert sliding["causal"] and sliding["sinks"].name.endswith("sinks")
    assert {f["softcap"] for f in facts("gemma2")} == {50.0}
    assert not any(f["causal"] for f in facts("one-layer bert"))
    assert all(f[n] is None for f in facts("one-layer llama") for n in ("bias", "key_mask", "segments"))


class _Everything(nn.Module):
    """Ties, an unused parameter, buffers that change, a region without gradient, nested inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("idle", torch.zeros(3))

    def forward(self, pair: tuple[Tensor, Tensor], extra: dict[str, Tensor], flag: bool = False) -> dict[str, Any]:
        h = self.first(pair[0]) + pair[1]
        with torch.no_grad():
            size = h.abs().max() + torch.tensor([0.25]) + torch.tensor(0.25)
        h = self.norm(h / size) * self.table
        h.add_(1.0)
        out = torch.zeros(8, 4)
        out[:, 1:] = self.second(h)[:, 1:]
        return {"loss": (out * extra["weight"]).sum(), "none": None, "rest": [h, flag]}


def test_signature() -> None:
    torch.manual_seed(0)
    model = _Everything()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    pair = (torch.randn(8, 4), torch.randn(8, 4))
    weight = torch.randn(4)
    batch: dict[str, Any] = {"extra": {"weight": weight}, "pair": pair, "flag": True}
    gm = capture(model, batch)
    signature: Signature = gm.meta["signature"]
    specs = {spec.name: spec for spec in signature.inputs}
    assert specs["first.weight"].aliases == ("second.weight",)
    assert {"unused", "pair.0", "pair.1", "extra.weight", "lifted_tensor_0"} <= set(specs)
    assert "idle" not in specs and "flag" not in specs and "lifted_tensor_1" not in specs
    assert any(n.target is torch.ops.aten.full.default and n.args[1] == 0.25 for n in gm.graph.nodes)  # the scalar
    assert not specs["table"].persistent and specs["norm.running_mean"].kind == "buffer"
    mutated = [spec.name for spec in signature.outputs if spec.kind == "mutation"]
    assert mutated == ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())

    flat = {"pair.0": pair[0], "pair.1": pair[1], "extra.weight": weight}
    gm = Normalize().apply(gm)
    found = gm(*graph_inputs(gm, model, flat))
    result = signature.rebuild(found[:2])
    expected = model(**batch)
    assert result["none"] is None and result["rest"][1] is True
    torch.testing.assert_close(result["rest"][0], expected["rest"][0])
    left, right = gradients(model, result["loss"]), gradients(model, expected["loss"])
    for name in left:  # in particular: no gradient through the region without gradient
        torch.testing.assert_close(left[name], right[name], rtol=1e-4, atol=1e-5)
    for value, name in zip(found[2:], mutated):
        torch.testing.assert_close(value, model.state_dict()[name])


def test_factories_keep_their_dtype() -> None:
    """A graph captured under the lift gives the same under another default dtype."""

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            ends = torch.full((), 0.1), torch.full((), 0.7)
            lines = torch.linspace(*ends, 3) + torch.logspace(*ends, 3)
            return x.float() + lines + torch.zeros(3) + torch.arange(3, dtype=torch.float32) + torch.ones(3).to(x.dtype)

    x = torch.rand(3, dtype=torch.float64)
    gm = capture(Model(), {"x": x}, lift_to_float64=True)
    assert all(n.meta["val"].dtype == torch.float64 for n in gm.graph.nodes if n.op == "call_function")
    with LiftFloat32():
        expected = Model()(x)
    assert expected.dtype == torch.float64 and torch.equal(gm(x)[0], expected)


FLOATS_OF_INTEGERS: dict[str, Callable[[Tensor], Tensor]] = {
    "a table of positions": lambda i: torch.exp(-9.2 * torch.arange(4) / 4) * i,
    "a choice of numbers": lambda i: torch.where(i > 1, 0.1, 0.7),
    "a choice of a number": lambda i: torch.where(i > 1, 0.1, i) + torch.where(i > 1, i, 0.3),
    "a root": lambda i: (i + 1).sqrt(),
    "quotients": lambda i: i / 3 + (i > 1) / 7.0 + 0.7 / (i + 1) + i / (i + 3) + torch.true_divide(i, 11),
    "a power": lambda i: torch.pow(0.3, i) + (i + 1) ** -0.7,
    "a written difference": lambda i: (i - 0.1).mul_(0.3),
    "complex numbers": lambda i: torch.exp(1j * i * 0.3).real,
    "a clamp": lambda i: i.clamp(min=0.4) + torch.atan2(i, i + 1),
    "without gradient": lambda i: no_gradient(lambda: i * 0.3),
}


def no_gradient(body: Callable[[], Tensor]) -> Tensor:
    with torch.no_grad():
        return body().sin()


@pytest.mark.parametrize("name", FLOATS_OF_INTEGERS)
def test_floats_of_integers_keep_their_dtype(name: str) -> None:
    """Lifted to float64, and as they are."""

    class Model(nn.Module):
        def forward(self, x: Tensor, i: Tensor) -> Tensor:
            return x * FLOATS_OF_INTEGERS[name](i)

    given = {"x": torch.rand(3, 4, dtype=torch.float64), "i": torch.arange(12).view(3, 4) % 5}
    assert torch.equal(capture(Model(), given)(*given.values())[0], Model()(**given))
    gm = capture(Model(), given, lift_to_float64=True)
    with LiftFloat32():
        expected = Model()(**given)
    assert torch.equal(gm(*given.values())[0], expected)


def test_refuses_what_cannot_be_traced(capfd: pytest.CaptureFixture[str]) -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if x.sum() > 0 else x

    with pytest.raises(ValueError, match=r"test_capture\.py:\d+ in forward, `return x \+ 1 if.*torch\.where") as caught:
        capture(Branches(), {"x": torch.ones(3)})
    assert caught.value.__cause__ is not None
    assert capfd.readouterr().err == "", "torch prints the graph that came before, once for each of two tries"


def test_meta_model_of_real_size() -> None:
    """An 8B architecture (two of its layers, no storage) in whole-batch shapes."""
    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=2, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=8192,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    batch = {name: torch.empty(8, 8192, dtype=torch.int64, device="meta") for name in ("input_ids", "labels")}
    gm = capture(model, batch)
    logits = next(n for n in gm.graph.nodes if n.op == "output").args[0][1]
    assert tuple(logits.meta["val"].shape) == (8, 8192, 128256)
    assert max(abs(v.numel()) for n in gm.graph.nodes if isinstance(v := n.meta.get("val"), Tensor)) < 8193 * 8 * 128256
    assert not any(p.is_meta is False for p in model.parameters())


class Statistics(nn.Module):
    """What is called with a batch norm that is registered nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.held = nn.Linear(4, 4), [nn.BatchNorm1d(4).requires_grad_(False)]

    def forward(self, x: Tensor) -> Tensor:
        return torch.sum(self.held[0](self.linear(x)))


class Returned:
    """What no graph knows how to return."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class Object(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return Returned(super().forward(x).sum())


@pytest.mark.parametrize(
    "model, words",
    [
        (Statistics(), "writes to a tensor that is not a buffer of the model.*register the tensor with"),
        (Object(4, 4), "the forward returns a Returned, .*; return a tensor, or tensors in a dict"),
    ],
)
def test_words_of_what_cannot_be_captured(model: nn.Module, words: str) -> None:
    with pytest.raises(ValueError, match=f"^capture: .*{words}"):
        capture(model, {"x": torch.ones(2, 4)})


@pytest.mark.parametrize("name", ["llama", "bert", "t5", "vit", "whisper"])
def test_example_batch(name: str) -> None:
    """Enough for a plan before the first batch: it captures, and there is a loss."""
    model = one_layer(name).build()
    adapter = adapter_for(model)
    assert adapter is not None
    gm = capture(model, adapter.example_batches(model)[0])
    assert gm.meta["signature"].outputs[0].name == "loss"


def test_gradient_checkpointing_is_left_to_the_plan() -> None:
    model = TINY["llama"].build()
    model.gradient_checkpointing_enable()
    gm = capture(model, TINY["llama"].batch(2, 8))
    with contextlib.suppress(AttributeError):
        assert all("checkpoint" not in str(n.target) for n in gm.graph.nodes)
    assert model.is_gradient_checkpointing


def test_lines_of_forwards_are_those_of_the_whole_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = subject("one-layer mixtral").model, subject("one-layer mixtral").batch
    ours, torchs = [], []
    for found, context in ((ours, export.lines_of_forwards), (torchs, contextlib.nullcontext)):
        monkeypatch.setattr(export, "lines_of_forwards", context)
        found += [node.meta.get("stack_trace") for node in capture(model, batch).graph.nodes]
    assert ours == torchs and any("forward" in lines for lines in ours if lines)


def test_lines_are_of_the_model_alone() -> None:
    """Not of a forward that captures it, as that of a model on a mesh does."""

    def forward() -> list[str]:
        graph = capture(nn.Linear(4, 2), {"input": torch.rand(3, 4)}).graph
        return [lines for node in graph.nodes if (lines := node.meta.get("stack_trace"))]

    found = forward()
    assert found and all("in forward" in lines and __file__ not in lines for lines in found)
