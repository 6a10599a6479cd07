"""Experts of transformers' models that are not in its registry, as the operators of `autopar.ops.grouped_experts`.

llama4 multiplies every token with every expert; dbrx, longcat_flash, switch_transformers and nllb_moe loop over the
experts that were hit; jetmoe splits its rows by counts that it reads on the host. Each forward here computes the same
as the class of that name, for each (token, expert) pair. It replaces the forward of a module of the structure copy
only if that is transformers' own, with the source that this file was written for: subclasses and releases that changed
it keep theirs.

A module whose submodules would no longer be called (layers of jetmoe and llama4, experts that are modules) also keeps
its forward if one of them has hooks.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import re
import textwrap
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ours = torch.ops.autopar
Method = Callable[..., Any]


def dispatch_own_experts(model: nn.Module) -> None:
    """Replace the forwards of such layers in a structure copy by dispatching ones."""
    for module in model.modules():
        for name in map(_name, type(module).__mro__):
            known = _OWN.get(name)
            if known is not None and _unchanged(module, name, *known.methods) and known.applies(module):
                _give(module, known.methods)
                if known.router is not None:
                    _give(module.router, {"forward": known.router})


def _name(cls: type) -> str:
    """ "dbrx.DbrxExperts" of a class of transformers' models, so that none has to be imported; "" of others."""
    found = re.fullmatch(r"transformers\.models\.(\w+)\.modeling_\1", cls.__module__)
    return f"{found[1]}.{cls.__name__}" if found else ""


def _give(module: Any, methods: dict[str, Method]) -> None:
    for name, method in methods.items():
        object.__setattr__(module, name, types.MethodType(method, module))


def _unchanged(module: nn.Module, name: str, *methods: str) -> bool:
    """Whether methods of a module are those of its class, and the class has the source that this file was written for:
    other releases of transformers may compute something else."""
    cls: Any = next((c for c in type(module).__mro__ if _name(c) == name), None)
    return cls is not None and all(
        getattr(type(module), method) is getattr(cls, method)
        and method not in vars(module)
        and method_digest(getattr(cls, method)) == CODE[f"{name}.{method}"]
        for method in methods or ("forward",)
    )


@functools.cache
def method_digest(method: Method) -> str:
    """A digest of a method: its source without comments, docstring and layout."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    (function,) = tree.body
    assert isinstance(function, ast.FunctionDef)
    if ast.get_docstring(function) is not None:
        del function.body[0]
    return hashlib.sha256(ast.unparse(function).encode()).hexdigest()[:16]


def _plain(modules: Iterable[nn.Module], name: str) -> bool:
    """Whether these modules, which will not be called, have this class and no hooks, including their submodules."""
    return all(
        _unchanged(module, name) and not any(x._forward_hooks or x._forward_pre_hooks for x in module.modules())
        for module in modules
    )


def _by_pair(x: Tensor, expert: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """`moe_dispatch` with each (token, expert) pair as a separate token: x [T*K, H], expert [T, K]."""
    out: tuple[Tensor, Tensor, Tensor] = ours.moe_dispatch(x, expert.reshape(-1, 1), experts)
    return out


def _in_order(rows: Tensor, order: Tensor, tokens: int) -> Tensor:
    """Rows of a dispatch by pairs [T*K, H] -> the same in the order of pairs."""
    out: Tensor = ours.moe_combine(rows, order, rows.new_ones(tokens, 1))
    return out


def llama4_forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """`Llama4TextMoe`: tokens [..., H], scaled by the score of an expert before it -> [T, H], router's logits [T, E].

    The dense form passes zeros to all other experts, which return zeros, since they have no bias.
    """
    x = hidden_states.reshape(-1, self.hidden_dim)
    _, logits = self.router(x)
    top, expert = torch.topk(logits, self.top_k, dim=1)
    scores = torch.sigmoid(top.float()).to(logits.dtype)
    scaled = (x.unsqueeze(1) * scores.unsqueeze(2)).reshape(-1, self.hidden_dim)
    rows, order, offsets = _by_pair(scaled, expert, self.num_experts)
    gate, up = ours.grouped_mm(rows, self.experts.gate_up_proj, offsets, True).chunk(2, dim=-1)
    made = ours.grouped_mm(up * self.experts.act_fn(gate), self.experts.down_proj, offsets, True)
    routed = _in_order(made, order, scaled.shape[0]).view(x.shape[0], self.top_k, self.hidden_dim).sum(1)
    return self.shared_expert(x) + routed, logits


def dbrx_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """`DbrxExperts`: tokens [B, S, H], weights of all experts in one [E*F, H] -> [B, S, H]."""
    shape = (self.num_experts, self.ffn_hidden_size, self.hidden_size)
    w1, v1, w2 = (getattr(self.mlp, name).view(shape) for name in ("w1", "v1", "w2"))
    x = hidden_states.reshape(-1, self.hidden_size)
    rows, order, offsets = ours.moe_dispatch(x, top_k_index, self.num_experts)
    gate = self.mlp.activation_fn(ours.grouped_mm(rows, w1, offsets, False))
    made = ours.grouped_mm(gate * ours.grouped_mm(rows, v1, offsets, False), w2, offsets, True)
    out: Tensor = ours.moe_combine(made, order, top_k_weights)
    return out.view(hidden_states.shape[0], -1, self.hidden_size)


def longcat_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """`LongcatFlashExperts`: tokens [T, H] -> [T, H]. Experts after the routed ones return a token unchanged."""
    identity = torch.where(top_k_index >= self.num_routed_experts, top_k_weights, torch.zeros_like(top_k_weights))
    kept = hidden_states * identity.sum(1, keepdim=True)
    if self.gate_up_proj is None:
        return kept.to(hidden_states.dtype)
    used = self.gate_up_proj if not self.zero_expert_num else self.gate_up_proj[: self.num_routed_experts]
    rows, order, offsets = ours.moe_dispatch(hidden_states, top_k_index, self.num_routed_experts)
    gate, up = ours.grouped_mm(rows, used, offsets, False).chunk(2, dim=-1)
    made = ours.grouped_mm(self.act_fn(gate) * up, self.down_proj, offsets, False)
    out: Tensor = ours.moe_combine(made, order, top_k_weights)
    return out + kept.to(hidden_states.dtype)


def jetmoe_gating(self: Any, hidden_states: Tensor) -> tuple[Any, ...]:
    """`JetMoeTopKGating`, with logits in the same position: experts [T, K], None, weights [T, K], None, logits."""
    logits = self.layer(hidden_states).float()
    top, expert = logits.topk(self.top_k, dim=1)
    return expert, None, torch.softmax(top, dim=1).type_as(hidden_states), None, logits


def jetmoe_forward(self: Any, layer_input: Tensor) -> Tensor:
    """`JetMoeMoE`: [B, S, H] -> [B, S, H]."""
    x = layer_input.reshape(-1, self.input_size)
    expert, _, weights, _, _ = self.router(x)
    rows, order, offsets = ours.moe_dispatch(x, expert, self.input_linear.num_experts)
    gate, up = ours.grouped_mm(rows, self.input_linear.weight, offsets, False).chunk(2, dim=-1)
    made = ours.grouped_mm(self.activation(gate) * up, self.output_linear.weight, offsets, False)
    return ours.moe_combine(made, order, weights).view(layer_input.shape) + self.bias


def jetmoe_queries(self: Any, layer_input: Tensor) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """`JetMoeMoA.map`: [B, S, H] -> queries of each token's experts [B, S, K, D], logits, what `reduce` asks for."""
    x = layer_input.reshape(-1, self.input_size)
    expert, _, weights, _, logits = self.router(x)
    pairs = x.unsqueeze(1).expand(-1, self.top_k, -1).reshape(-1, self.input_size)
    rows, order, offsets = _by_pair(pairs, expert, self.num_experts)
    made = ours.grouped_mm(rows, self.input_linear.weight, offsets, False)
    queries = _in_order(made, order, pairs.shape[0]).view(*layer_input.shape[:2], self.top_k, -1)
    return queries, logits, (expert, weights)


def jetmoe_merge(self: Any, layer_input: Tensor, topo_info: tuple[Any, ...]) -> Tensor:
    """`JetMoeMoA.reduce`: what attention made of each pair [B, S, K, D] -> [B, S, H], weighted."""
    expert, weights = topo_info
    batch, length, top, width = layer_input.shape
    rows, order, offsets = _by_pair(layer_input.reshape(-1, width), expert, self.num_experts)
    made = ours.grouped_mm(rows, self.output_linear.weight, offsets, False)
    out: Tensor = ours.moe_combine(made, order, weights.reshape(-1, 1))
    return out.view(batch, length, top, self.input_size).sum(2) + self.bias


def switch_forward(self: Any, hidden_states: Tensor, selected_experts: Tensor, routing_weights: Tensor) -> Tensor:
    """`SwitchTransformersExperts`: selected [T, 1, E], all zeros for a token above its expert's capacity."""
    chosen = selected_experts.squeeze(1)
    nobody = torch.full_like(chosen[:, :1], self.num_experts)
    expert = torch.where(chosen.sum(-1, keepdim=True) > 0, chosen.argmax(-1, keepdim=True), nobody)
    return _through_modules(_modules(self), hidden_states, expert, routing_weights, ("wi", "wo"))


def nllb_forward(self: Any, hidden_states: Tensor, padding_mask: Tensor | None = None) -> Tensor:
    """`NllbMoeSparseMLP`: [B, S, H] -> [B, S, H], as transformers computes it: an entry of the mask [T, E] of first
    choices, 0 or 1, is read as the index of an expert, so the other experts are never used."""
    x = hidden_states.view(-1, hidden_states.shape[-1])
    mask, weights, _ = self.router(x, padding_mask)
    lost = self.experts.moe_token_dropout
    if lost > 0 and self.training:
        raise ValueError(
            f"experts: {type(self.experts).__name__} drops rows of experts (moe_token_dropout={lost}), and which rows "
            "there are is known at run time only; set moe_token_dropout to 0 in the config"
        )
    asked = _modules(self.experts)[:2]
    out = _through_modules(asked, x, mask, weights if lost <= 0 else weights * (1 - lost), ("fc1", "fc2"))
    return out.reshape(hidden_states.shape)


def _modules(experts: Any) -> list[Any]:
    """Experts by index; other modules may be among them."""
    return [experts[f"expert_{i}"] for i in range(experts.num_experts)]


def _through_modules(experts: list[Any], x: Tensor, expert: Tensor, weights: Tensor, names: tuple[str, str]) -> Tensor:
    """Experts that are modules with two products: their stacked weights [O, I] form a group."""
    first, second = names
    rows, order, offsets = ours.moe_dispatch(x, expert, len(experts))
    hidden = experts[0].act(_together([getattr(e, first) for e in experts], rows, offsets))
    made = _together([getattr(e, second) for e in experts], experts[0].dropout(hidden), offsets)
    combined: Tensor = ours.moe_combine(made, order, weights)
    return combined.to(x.dtype)


def _together(products: list[nn.Linear], rows: Tensor, offsets: Tensor) -> Tensor:
    weight = torch.stack([p.weight for p in products])
    out: Tensor = ours.grouped_mm(rows.to(weight.dtype), weight, offsets, False)
    if products[0].bias is not None:
        out = ours.grouped_bias(out, torch.stack([p.bias for p in products]), offsets)
    return out


def _jetmoe_plain(module: Any) -> bool:
    return _plain([module.input_linear, module.output_linear], "jetmoe.JetMoeParallelExperts") and _unchanged(
        module.router, "jetmoe.JetMoeTopKGating"
    )


def _modules_plain(module: Any, name: str, products: tuple[str, str]) -> bool:
    """Whether its experts can be one grouped product: identical, and without replaced layers (such as adapters)."""
    experts = _modules(module)
    inner = [getattr(expert, product) for expert in experts for product in products]
    return _plain(experts, name) and all(type(x) is nn.Linear for x in inner)


@dataclass(frozen=True)
class _OwnExperts:
    """Replacement methods for a class and its router, and when they apply."""

    methods: dict[str, Method]
    applies: Callable[[Any], bool]
    router: Method | None = None


_OWN: dict[str, _OwnExperts] = {
    "llama4.Llama4TextMoe": _OwnExperts(
        {"forward": llama4_forward},
        lambda m: _unchanged(m.router, "llama4.Llama4Router") and _plain([m.experts], "llama4.Llama4TextExperts"),
    ),
    "dbrx.DbrxExperts": _OwnExperts({"forward": dbrx_forward}, lambda m: _plain([m.mlp], "dbrx.DbrxExpertGLU")),
    "longcat_flash.LongcatFlashExperts": _OwnExperts({"forward": longcat_forward}, lambda m: True),
    "jetmoe.JetMoeMoE": _OwnExperts({"forward": jetmoe_forward}, _jetmoe_plain, jetmoe_gating),
    "jetmoe.JetMoeMoA": _OwnExperts({"map": jetmoe_queries, "reduce": jetmoe_merge}, _jetmoe_plain, jetmoe_gating),
    "switch_transformers.SwitchTransformersExperts": _OwnExperts(
        {"forward": switch_forward},
        lambda m: _modules_plain(m, "switch_transformers.SwitchTransformersDenseActDense", ("wi", "wo")),
    ),
    "nllb_moe.NllbMoeSparseMLP": _OwnExperts(
        {"forward": nllb_forward},
        lambda m: (
            _unchanged(m.router, "nllb_moe.NllbMoeTop2Router", "forward", "route_tokens")
            and _unchanged(m.experts, "nllb_moe.NllbMoeExperts")
            and not (m.experts._forward_hooks or m.experts._forward_pre_hooks)
            and _modules_plain(m.experts, "nllb_moe.NllbMoeDenseActDense", ("fc1", "fc2"))
        ),
    ),
}

# `method_digest` of what is replaced or not called any more, of transformers 5.
CODE = {
    "llama4.Llama4TextMoe.forward": "6f9863fcc8313ee9",
    "llama4.Llama4Router.forward": "e67ac26ae72620fe",
    "llama4.Llama4TextExperts.forward": "56705ee8b1253e4f",
    "dbrx.DbrxExperts.forward": "a259b03b3a76bd28",
    "dbrx.DbrxExpertGLU.forward": "b7b903b0c940c94f",
    "longcat_flash.LongcatFlashExperts.forward": "453eaea1d0333452",
    "jetmoe.JetMoeMoE.forward": "bb7de2b1413a118f",
    "jetmoe.JetMoeMoA.map": "9c658e1f5c7ef253",
    "jetmoe.JetMoeMoA.reduce": "df65b718c9efea01",
    "jetmoe.JetMoeTopKGating.forward": "6fdf82e574f66183",
    "jetmoe.JetMoeParallelExperts.forward": "4a78bf31359d1e96",
    "switch_transformers.SwitchTransformersExperts.forward": "fed7fd55a8ef9c81",
    "switch_transformers.SwitchTransformersDenseActDense.forward": "0711daaf9810a59b",
    "nllb_moe.NllbMoeSparseMLP.forward": "892ea830b12b4809",
    "nllb_moe.NllbMoeTop2Router.forward": "3e070c7e61a208ca",
    "nllb_moe.NllbMoeTop2Router.route_tokens": "c2a13cdd7c2df2ef",
    "nllb_moe.NllbMoeExperts.forward": "b1b32e6c6ae65245",
    "nllb_moe.NllbMoeDenseActDense.forward": "d71d6fa0e690dfa2",
}
