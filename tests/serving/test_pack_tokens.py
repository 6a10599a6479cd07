"""The graph that runs tokens of any requests: its text, what it selects and shares, and what is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from autopar.compile.serving import compile_packed
from autopar.ir.graph import ancestors, calls_of, placeholders, shape
from autopar.ir.mesh import Mesh
from autopar.ops.traits import COLLECTIVES
from autopar.options import Options
from autopar.report.graph_text import format_graph
from autopar.steps.packed import Packed
from tests.serving.served import tiny
from tests.support.ranks import refusal

S, H, HEADS, V = 24, 16, 4, 20
CACHED, SELECT = torch.ops.autopar.cached_attention.default, torch.ops.aten.index_select.default


class Causal(nn.Module):
    """One decoder layer with learned positions; subclasses change a part of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.position = nn.Embedding(V, H), nn.Embedding(S, H)
        self.qkv, self.out, self.head = nn.Linear(H, 3 * H), nn.Linear(H, H), nn.Linear(H, V, bias=False)
        self.double().eval()

    def forward(self, tokens: Tensor) -> Any:
        h = self.stem(self.embed(tokens) + self.positions(tokens), tokens)
        return self.logits(h + self.attend(h))

    def positions(self, tokens: Tensor) -> Tensor:
        return self.position(torch.arange(tokens.shape[1]))

    def stem(self, h: Tensor, tokens: Tensor) -> Tensor:
        return h

    def attend(self, h: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in self.qkv(h).chunk(3, -1))
        return self.out(self.attention(q, k, v, h).transpose(1, 2).flatten(2))

    def attention(self, q: Tensor, k: Tensor, v: Tensor, h: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def logits(self, h: Tensor) -> Any:
        return self.head(h)


class Seen:
    """Keeps the graphs after the passes of these names."""

    def __init__(self) -> None:
        self.graphs: dict[str, str] = {}

    def __call__(self, name: str, gm: GraphModule, *_: Any, **__: Any) -> None:
        self.graphs[name] = format_graph(gm)


def packed(
    model: nn.Module, tokens: str = "tokens", observers: Any = (), options: Options | None = None, **sizes: int
) -> Packed:
    mesh = Mesh.of(**(sizes or {"dp": 1}))
    ids = torch.zeros(mesh.data_size, S, dtype=torch.int64)
    masks = {name: b for name, b in model.named_buffers() if b.dtype == torch.bool}
    model = model.requires_grad_(False)
    how: dict[str, Any] = {"buffers": masks, "observers": observers, "lift_to_float64": True}
    return compile_packed(model, {tokens: ids}, tokens, mesh, options, **how)


def main(model: nn.Module, *args: Any, **how: Any) -> GraphModule:
    (stage,) = packed(model, *args, **how).stages
    return stage.graph.graph


BEFORE = """
embedding = embedding(p_embed_weight, tokens)
arange = arange(24, device=cpu, pin_memory=False, dtype=i64)
arange_sl = exchange_slice(arange, sl, I -> S(0))
embedding_1 = embedding(p_position_weight, arange_sl)
add = add(embedding, embedding_1)
linear = linear(add, p_qkv_weight, p_qkv_bias)
split_with_sizes_default = split_with_sizes(linear, [16, 16, 16], 2)
getitem = split_with_sizes_default[0]
getitem_1 = split_with_sizes_default[1]
getitem_2 = split_with_sizes_default[2]
reshape_default = reshape(getitem, [1, 5, 4, 4])
transpose = transpose.int(reshape_default, 1, 2)
reshape_default_1 = reshape(getitem_1, [1, 5, 4, 4])
transpose_1 = transpose.int(reshape_default_1, 1, 2)
reshape_default_2 = reshape(getitem_2, [1, 5, 4, 4])
transpose_2 = transpose.int(reshape_default_2, 1, 2)
transpose_1_sl = exchange_slice(transpose_1, sl, S(2) -> R)
transpose_2_sl = exchange_slice(transpose_2, sl, S(2) -> R)
attention_default = autopar.attention(transpose, transpose_1_sl, transpose_2_sl, None, None, None, None, None, \
True, 0, 0, 4, 0.5, 0.0, 0.0, 0, [], [], [])
getitem_3 = attention_default[0]
transpose_3 = transpose.int(getitem_3, 1, 2)
reshape_default_3 = reshape(transpose_3, [1, 5, 16])
linear_1 = linear(reshape_default_3, p_out_weight, p_out_bias)
add_1 = add(add, linear_1)
linear_2 = linear(add_1, p_head_weight)
return (linear_2,)
"""
AFTER = """
embedding = embedding(p_embed_weight, tokens)
index_select_default = index_select(table_0, 0, positions)
embedding_1 = embedding(p_position_weight, index_select_default)
add = add(embedding, embedding_1)
linear = linear(add, p_qkv_weight, p_qkv_bias)
split_with_sizes_default = split_with_sizes(linear, [16, 16, 16], 2)
getitem = split_with_sizes_default[0]
getitem_1 = split_with_sizes_default[1]
getitem_2 = split_with_sizes_default[2]
reshape_default = reshape(getitem, [1, slice_length, 4, 4])
transpose = transpose.int(reshape_default, 1, 2)
reshape_default_1 = reshape(getitem_1, [1, slice_length, 4, 4])
transpose_1 = transpose.int(reshape_default_1, 1, 2)
reshape_default_2 = reshape(getitem_2, [1, slice_length, 4, 4])
transpose_2 = transpose.int(reshape_default_2, 1, 2)
cached_attention_default = autopar.cached_attention(transpose, transpose_1, transpose_2, keys_0, values_0, slots_0, \
pages_0, starts, lengths, None, None, 0, 0, 0.5, 0.0, True)
index_select_default_1 = index_select(cached_attention_default, 2, last)
transpose_3 = transpose.int(index_select_default_1, 1, 2)
reshape_default_3 = reshape(transpose_3, [1, slice_start, 16])
linear_1 = linear(reshape_default_3, p_out_weight, p_out_bias)
index_select_default_2 = index_select(add, 1, last)
add_1 = add(index_select_default_2, linear_1)
linear_2 = linear(add_1, p_head_weight)
return (linear_2,)
"""


def operators(text: str) -> str:
    """The lines of a graph's text without inputs, types and modules."""
    lines = (line.partition("  #")[0].rstrip() for line in text.splitlines())
    lines = (re.sub(r"^(\w+): .*?\s+= ", r"\1 = ", line) for line in lines)
    return "\n".join(x for x in lines if not x.endswith((" = parameter", " = input", " = constant", " = buffer")))


def test_text_before_and_after() -> None:
    seen = Seen()
    packed(Causal(), observers=[seen])
    assert operators(seen.graphs["lower_to_local"]).strip() == BEFORE.strip()
    assert operators(seen.graphs["packed"]).strip() == AFTER.strip()
    assert operators(seen.graphs["tables"]).strip() == (
        "arange = arange(24, device=cpu, pin_memory=False, dtype=i64)\nreturn (arange,)"
    )


def independent_of_length(gm: GraphModule) -> None:
    """No value of the step's tokens has a dim of all positions."""
    for node in gm.graph.nodes:
        for x in node.meta["val"] if isinstance(node.meta.get("val"), (list, tuple)) else [node.meta.get("val")]:
            if node.op == "call_function" and isinstance(x, Tensor):
                assert S not in x.shape, f"{node.name} {list(x.shape)}"


def selected(gm: GraphModule) -> set[str]:
    """Values of which only the rows `last` are used."""
    return {str(n.args[0]) for n in calls_of(gm.graph, SELECT) if str(n.args[2]) == "last"}


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3", "falcon"])
def test_tables_are_shared_and_rows_selected_right_behind_the_last_attention(kind: str) -> None:
    gm = main(tiny(kind), "input_ids")
    independent_of_length(gm)
    attentions = calls_of(gm.graph, CACHED)
    pools = [str(x) for n in attentions for x in n.args[3:5]]
    assert len(attentions) == 2 and len(set(pools)) == 4
    tables = [n for n in placeholders(gm) if n.name.startswith("table_")]
    taken = [n.args[0] for n in calls_of(gm.graph, SELECT) if str(n.args[2]) == "positions"]
    assert sorted(map(str, taken)) == sorted(map(str, tables)), "each table is read once"
    assert attentions[-1].name in selected(gm)
    names = [n.name for n in gm.graph.nodes]
    late = [n for n in gm.graph.nodes if names.index(n.name) > names.index(attentions[-1].name)]
    whole = [n for n in late if n.op == "call_function" and n.target is torch.ops.aten.linear.default and 5 in shape(n)]
    assert not whole, "no product behind the last attention has rows of other tokens"


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_rows_are_not_selected_through_routing(kind: str) -> None:
    gm = main(tiny(kind), "input_ids")
    independent_of_length(gm)
    attention = calls_of(gm.graph, CACHED)[-1]
    assert selected(gm) and attention.name not in selected(gm)


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall", "alltoall_dedup"])
def test_rows_are_selected_behind_exchanges_with_other_replicas(dispatcher: str) -> None:
    """Which have other requests, so other rows ``last``."""
    gm = main(tiny("mixtral"), "input_ids", options=Options(token_dispatcher=dispatcher), ep=2)
    chosen = {n for n in calls_of(gm.graph, SELECT) if str(n.args[2]) == "last"}
    exchanges = calls_of(gm.graph, *COLLECTIVES)
    assert chosen and exchanges and not chosen & ancestors(exchanges)


MANY = ({"dp": 2, "ep": 2}, Options()), (
    {"ep": 4}, Options(token_dispatcher="hierarchical", topology="ep%2=switch")
)  # fmt: skip


@pytest.mark.parametrize(("sizes", "options"), MANY, ids=["two axes of rows", "two levels of copies"])
def test_no_number_of_tokens_is_left(sizes: dict[str, int], options: Options) -> None:
    gm = main(tiny("mixtral"), "input_ids", options=options, **sizes)
    independent_of_length(gm)
    known = [n.args[3] for n in calls_of(gm.graph, torch.ops.autopar.add_copies.default)]
    assert all(isinstance(tokens, Node) for tokens in known)


class Triangle(Causal):
    """A mask that is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keep", torch.ones(S, S, dtype=torch.bool).tril())

    def attention(self, q: Tensor, k: Tensor, v: Tensor, h: Tensor) -> Tensor:
        t = q.shape[2]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.keep[:t, :t])


class Factories(Causal):
    def stem(self, h: Tensor, tokens: Tensor) -> Tensor:
        return h * torch.ones_like(h[..., :1]) + torch.zeros(1, h.shape[1], 1, dtype=h.dtype)


@pytest.mark.parametrize("model", [Triangle, Factories])
def test_runs(model: type[Causal]) -> None:
    assert len(calls_of(main(model()).graph, CACHED)) == 1


# --- refusals -------------------------------------------------------------------------------------------------


class Bidirectional(Causal):
    def attention(self, q: Tensor, k: Tensor, v: Tensor, h: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class MaskOfValues(Causal):
    def attention(self, q: Tensor, k: Tensor, v: Tensor, h: Tensor) -> Tensor:
        keep = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool).tril() & (h[:, None, None, :, 0] > 0)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)


class Stem(Causal):
    """``change``: of the values behind the embeddings, with the ids."""

    def __init__(self, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change
        self.conv = nn.Conv1d(H, H, 3, padding=2, groups=H).double()
        self.rnn = nn.GRU(H, H, batch_first=True).double()

    def stem(self, h: Tensor, tokens: Tensor) -> Tensor:
        return self.change(h, tokens)


class Convolution(Stem):
    def stem(self, h: Tensor, tokens: Tensor) -> Tensor:
        return self.conv(h.transpose(1, 2))[..., : h.shape[1]].transpose(1, 2)


class Counter(Causal):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def stem(self, h: Tensor, tokens: Tensor) -> Tensor:
        self.calls.add_(1)
        return h


class Pooled(Causal):
    def logits(self, h: Tensor) -> Any:
        return self.head(h.mean(1))


class Transposed(Causal):
    def logits(self, h: Tensor) -> Any:
        return self.head(h).transpose(1, 2)


class Noise(Causal):
    def stem(self, h: Tensor, tokens: Tensor) -> Tensor:
        return h + torch.randn_like(h)


class Several(Causal):
    def logits(self, h: Tensor) -> Any:
        return {"first": self.head(h), "second": self.head(h * 2)}


WAY_OUT = "generate with the model itself"
REFUSED = {
    "bidirectional": (Bidirectional, "attention"),
    "mask": (MaskOfValues, "attention"),
    "convolution": (lambda: Convolution(lambda h, t: h), "conv1d"),
    "cumsum": (lambda: Stem(lambda h, t: h + torch.cumsum(h, 1)), "cumsum"),
    "positions": (lambda: Stem(lambda h, t: h + torch.cumsum(t != 0, 1)[..., None]), "cumsum"),
    "mean": (lambda: Stem(lambda h, t: h - h.mean(1, keepdim=True)), "mean|add|sub"),
    "shift": (lambda: Stem(lambda h, t: h + F.pad(h, (0, 0, 1, 0))[:, :-1]), "pad|slice"),
    "roll": (lambda: Stem(lambda h, t: h + torch.roll(h, 1, 1)), "roll"),
    "ids": (lambda: Stem(lambda h, t: h * (t == t[:, :1])[..., None]), "slice|eq"),
    "softmax": (lambda: Stem(lambda h, t: torch.softmax(h, 1)), "softmax"),
    "flip": (lambda: Stem(lambda h, t: h.flip(1)), "flip"),
    "sort": (lambda: Stem(lambda h, t: h.sort(1)[0]), "sort"),
    "any": (lambda: Stem(lambda h, t: h * (t == 3).any()), "any|mul"),
}


def words(call: Callable[[], Any]) -> str:
    found = refusal(call)
    assert found.startswith("serve: ") and "\n" not in found and found.count(". ") == 0, found
    assert "slice by slice" not in found and "token slices" not in found
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_operator(name: str) -> None:
    made, operator = REFUSED[name]
    found = words(lambda: packed(made()))
    assert re.search(rf"(aten|autopar)\.\w*({operator})\w*", found), found
    assert found.endswith(WAY_OUT)


TABLE = torch.arange(2.0 * S).sin()[:, None].expand(-1, H).double()
ALONE = "has other values for the first 3 tokens of 24 than for 3 tokens alone"
LENGTHS = {
    "scale": (lambda h, t: h * h.shape[1], r"aten\.mul\.Tensor .* computes with 24 for 24 tokens and with 3 for 3"),
    "branch": (
        lambda h, t: h.relu() if h.shape[1] > 20 else h,
        r"other operators for 3 tokens than for 24, from aten",
    ),
    "more": (lambda h, t: h if h.shape[1] > 20 else h.relu(), r"other operators for 3 tokens than for 24, from aten"),
    "few": (lambda h, t: h.relu() if h.shape[1] < 8 else h, r"other operators for 3 tokens than for 24, from aten"),
    "even": (lambda h, t: h if h.shape[1] % 2 else h.relu(), r"other operators for 3 tokens than for 24, from aten"),
    "from the last": (lambda h, t: h + TABLE[torch.arange(h.shape[1] - 1, -1, -1)], ALONE),
    "flipped": (lambda h, t: h + torch.arange(h.shape[1]).flip(0)[:, None], ALONE),
    "last rows": (lambda h, t: h + TABLE[-h.shape[1] :], ALONE),
    "counted": (lambda h, t: h / h.new_ones(h.shape[1]).sum(), "has other values"),
    "steps": (lambda h, t: h + torch.linspace(0, 1, h.shape[1])[:, None], ALONE),
    "one": (
        lambda h, t: h.relu() if h.shape[1] == 1 else h,
        "other operators for one token than for 24, from aten",
    ),
    "one less": (
        lambda h, t: h if h.shape[1] == 1 else h.relu(),
        "other operators for one token than for 24, from aten",
    ),
    "number of one": (lambda h, t: h * (2.0 if h.shape[1] == 1 else 1.0), "other operators for one token than for 24"),
    "table of one": (
        lambda h, t: h + TABLE[5 if h.shape[1] == 1 else 0 :][: h.shape[1]],
        "other operators for one token than for 24",
    ),
    "views of one": (
        lambda h, t: h.view(1, 1, 4, 4).transpose(2, 3).reshape(1, 1, H) if h.shape[1] == 1 else h,
        "other operators for one token than for 24",
    ),
    "full": (lambda h, t: h + torch.full((1, h.shape[1], 1), h.shape[1] * 0.5), r"aten\.full"),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_a_forward_that_depends_on_the_length(name: str) -> None:
    """Requests have any length, the graph is captured with one."""
    change, expected = LENGTHS[name]
    assert re.search(expected, words(lambda: packed(Stem(change))))


def matched(n: int) -> bool:
    match n:
        case 13:
            return True
    return False


WAYS: dict[str, tuple[Callable[[Tensor, Tensor], bool], int]] = {  # and the number of tokens that is found
    "==": (lambda h, t: h.shape[1] == 2, 2),
    "!=": (lambda h, t: (h.shape[1] != 23) is False, 23),
    "< <=": (lambda h, t: 5 < t.size(1) <= 10, 6),
    "> >=": (lambda h, t: 12 >= h.shape[-2] > 4, 5),
    "in a tuple": (lambda h, t: h.shape[1] in (7, 11), 7),
    "in a set": (lambda h, t: h.shape[1] in {7, 11}, 7),
    "a shape": (lambda h, t: h.shape[:2] == (1, 5), 5),
    "%": (lambda h, t: h.shape[1] % 7 == 0, 7),
    "// and divmod": (lambda h, t: divmod(h.shape[1], 4)[1] + h.shape[1] // 4 == 8, 23),
    "match": (lambda h, t: matched(h.shape[1]), 13),
    "min": (lambda h, t: min(h.shape[1], 8) == 7, 7),
    "max": (lambda h, t: max(h.shape[1], 8) == 17, 17),
    "numel": (lambda h, t: h.numel() == 4 * H, 4),
    "len": (lambda h, t: len(t[0]) == 13, 13),
    "int": (lambda h, t: int(h.shape[1]) == 13, 13),
    "of a view": (lambda h, t: h.view(-1, H).shape[0] * 2 == 14, 7),
    "a ratio": (lambda h, t: h.shape[1] / 2 == 3.5, 7),
    "rounded": (lambda h, t: -(-h.shape[1] // 4) == 2 or round(h.shape[1] * 0.5) == 8, 5),
    "bits": (lambda h, t: h.shape[1] & 6 == 4 and h.shape[1] < 8, 4),
    "a branch in a branch": (lambda h, t: h.shape[1] % 2 == 0 and bool(h.shape[1] - 6 == 0), 6),
}


@pytest.mark.parametrize("name", WAYS)
def test_a_forward_that_computes_otherwise_for_some_numbers_of_tokens(name: str) -> None:
    special, count = WAYS[name]
    change = Stem(lambda h, t: h.relu() if special(h, t) else h)
    assert f"other operators for {count} tokens than for {S}, from aten." in words(lambda: packed(change))


def test_branches_that_compute_alike() -> None:
    """They are compared, and served."""
    ways = {
        "alike": lambda h, t: (h + 1 if h.shape[1] % 7 == 0 else 1 + h) * 2,
        "clipped": lambda h, t: h + TABLE[: min(h.shape[1], S)],
    }
    for change in ways.values():
        assert main(Stem(change)) is not None


def test_too_many_ways() -> None:
    change = Stem(lambda h, t: h + sum(1 for n in range(2, S) if h.shape[1] == n) * 0)
    assert words(lambda: packed(change)).startswith(
        "serve: the forward decides by the number of tokens in more than 16 ways"
    )


class Decodes(Causal):
    """Written for decoding: one token needs no mask, and its heads no transpose."""

    def attend(self, h: Tensor) -> Tensor:
        if h.shape[1] > 1:
            return super().attend(h)
        q, k, v = (x.view(1, HEADS, 1, -1) for x in self.qkv(h).chunk(3, -1))
        weights = (q @ k.transpose(-1, -2) * 0.5).softmax(-1)
        return self.out((weights @ v).view(1, 1, -1))


def test_one_token_needs_no_mask() -> None:
    assert len(calls_of(main(Decodes()).graph, CACHED)) == 1


class Bigram(Causal):
    def attend(self, h: Tensor) -> Tensor:
        return h


def test_refused() -> None:
    assert words(lambda: packed(Noise())).endswith(
        "draws random numbers in eval mode, so a request's tokens would depend on its company; " + WAY_OUT
    )
    assert "found tokens in dim 2 of aten.transpose" in words(lambda: packed(Transposed()))
    assert words(lambda: packed(Bigram())) == f"serve: needs causal attention, found none in Bigram; {WAY_OUT}"
    assert words(lambda: packed(Counter())) == (
        f"serve: the forward writes buffer calls in eval mode, which requests would share; {WAY_OUT}"
    )
    assert words(lambda: packed(Causal(), cp=2)) == (
        "serve: requests are not sharded on their tokens, found axis cp=2 in the mesh; use tp, dp, ep or pp"
    )
    assert words(lambda: packed(Pooled())) == (
        f"serve: needs logits [rows, tokens, vocabulary], found [1, {V}]; return those of all tokens"
    )
    assert words(lambda: packed(Several())) == (
        "serve: needs one output with logits, found first, second; return it as 'logits'"
    )
