"""Layers of experts as people write them out: loops over experts, sorts with grouped products, one-hot dispatch.

Each is a residual MoE layer of H = 16, four experts, two of them per token (the Switch: one), behind an embedding and
before a head. Tokens are flattened, as in most of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

H, FF, E, K = 16, 24, 4, 2


class Gated(nn.Module):
    """SwiGLU."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(H, FF, bias), nn.Linear(H, FF, bias), nn.Linear(FF, H, bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Plain(nn.Sequential):
    """Two layers with biases."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(H, FF), nn.GELU(), nn.Linear(FF, H))


class Routed(nn.Module):
    """Base: a router and experts that are modules."""

    def __init__(self, expert: Any = Gated) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        self.experts = nn.ModuleList(expert() for _ in range(E))

    def chosen(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(weights, experts) of tokens, [T, K] each."""
        weights, index = torch.topk(F.softmax(self.gate(x), dim=-1), K, dim=-1)
        return weights / weights.sum(-1, keepdim=True), index


class LitGPT(Routed):
    """litgpt's LLaMAMoE: masks of all experts first."""

    def forward(self, x: Tensor) -> Tensor:
        shape, x = x.shape, x.view(-1, H)
        probs, indices = torch.topk(self.gate(x), K)
        probs = probs.softmax(dim=1, dtype=torch.float).to(dtype=x.dtype)
        masks = (indices.unsqueeze(-1) == torch.arange(E, device=x.device)).permute(2, 0, 1)
        y = torch.zeros_like(x)
        for mask, expert in zip(masks, self.experts):
            token_idx, expert_idx = torch.where(mask)
            y[token_idx] += probs[token_idx, expert_idx, None] * expert(x[token_idx])
        return y.view(shape)


class OldMixtral(Routed):
    """transformers' MixtralSparseMoeBlock until 4.5x: one-hot masks, index_add_."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        batch, length, width = hidden_states.shape
        hidden_states = hidden_states.view(-1, width)
        routing_weights, selected_experts = self.chosen(hidden_states)
        final = torch.zeros((batch * length, width), dtype=hidden_states.dtype, device=hidden_states.device)
        expert_mask = F.one_hot(selected_experts, num_classes=E).permute(2, 1, 0)
        for expert_idx in range(E):
            idx, top_x = torch.where(expert_mask[expert_idx])
            current_state = hidden_states[None, top_x].reshape(-1, width)
            current = self.experts[expert_idx](current_state) * routing_weights[top_x, idx, None]
            final.index_add_(0, top_x, current.to(hidden_states.dtype))
        return final.reshape(batch, length, width)


class MistralReference(Routed):
    """mistral's own reference: where, added in place, one expert after another."""

    def forward(self, inputs: Tensor) -> Tensor:
        flat = inputs.view(-1, inputs.shape[-1])
        weights, selected = self.chosen(flat)
        results = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            batch_idx, nth_expert = torch.where(selected == i)
            results[batch_idx] += weights[batch_idx, nth_expert, None] * expert(flat[batch_idx])
        return results.view_as(inputs)


class MakeMoE(Routed):
    """makeMoE and many tutorials: logits of others at -inf, a boolean mask of tokens, a branch on any()."""

    def __init__(self) -> None:
        super().__init__(Plain)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gate(x)
        top, indices = logits.topk(K, dim=-1)
        sparse = torch.full_like(logits, float("-inf")).scatter(-1, indices, top)
        gating = F.softmax(sparse, dim=-1)
        final = torch.zeros_like(x)
        flat, flat_gating = x.view(-1, x.size(-1)), gating.view(-1, gating.size(-1))
        for i, expert in enumerate(self.experts):
            expert_mask = (indices == i).any(dim=-1)
            flat_mask = expert_mask.view(-1)
            if flat_mask.any():
                expert_output = expert(flat[flat_mask])
                weighted = expert_output * flat_gating[flat_mask, i].unsqueeze(1)
                final[expert_mask] += weighted.squeeze(1)
        return final


class Nonzero(Routed):
    """nonzero and index_select, with an early continue for experts without tokens."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, H)
        weights, index = self.chosen(flat)
        out = torch.zeros_like(flat)
        for e in range(E):
            rows = (index == e).nonzero()
            if rows.shape[0] == 0:
                continue
            token, place = rows[:, 0], rows[:, 1]
            made = self.experts[e](flat.index_select(0, token))
            out.index_add_(0, token, made * weights[token, place].unsqueeze(-1))
        return out.view_as(x)


class DeepSeekTraining(Routed):
    """DeepSeek's MoE in training: tokens repeated K times, y[flat == i] = expert(x[flat == i])."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        shape = hidden_states.shape
        x = hidden_states.view(-1, H)
        weights, index = self.chosen(x)
        flat = index.view(-1)
        x = x.repeat_interleave(K, dim=0)
        y = torch.empty_like(x)
        for i, expert in enumerate(self.experts):
            y[flat == i] = expert(x[flat == i])
        return (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1).view(*shape)


class DeepSeekInference(Routed):
    """DeepSeek's moe_infer: an argsort, and slices by counts on the host."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.view(-1, H)
        weights, index = self.chosen(x)
        flat_index, flat_weights = index.view(-1), weights.view(-1, 1)
        cache = torch.zeros_like(x)
        idxs = flat_index.argsort()
        ends = flat_index.bincount(minlength=E).cpu().numpy().cumsum(0)
        tokens = idxs // K
        for i, end in enumerate(ends):
            start = 0 if i == 0 else ends[i - 1]
            if start == end:
                continue
            own = tokens[start:end]
            out = self.experts[i](x[own])
            out.mul_(flat_weights[idxs[start:end]])
            cache.scatter_reduce_(0, own.view(-1, 1).repeat(1, x.shape[-1]), out, reduce="sum")
        return cache.view_as(hidden_states)


class Switch(Routed):
    """Switch-like: top 1, a capacity by cumsum, one-hot dispatch and combine."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, H)
        probs = F.softmax(self.gate(flat), dim=-1)
        gate, index = probs.max(dim=-1)
        mask = F.one_hot(index, E)
        position = torch.cumsum(mask, dim=0) * mask
        mask = mask * (position <= flat.shape[0] // E + 1)
        kept = mask.sum(-1) > 0
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token = torch.nonzero(kept & (index == e)).squeeze(-1)
            out = out.index_add(0, token, expert(flat[token]) * gate[token].unsqueeze(-1))
        return out.view_as(x)


class EinsumDispatch(nn.Module):
    """GShard: a dispatch and a combine tensor [T, E, C], einsums."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        self.wi, self.wo = nn.Parameter(torch.randn(E, H, FF) / 4), nn.Parameter(torch.randn(E, FF, H) / 4)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, H)
        probs = F.softmax(self.gate(flat), dim=-1)
        gate, index = probs.max(dim=-1)
        capacity = flat.shape[0] // E + 2
        mask = F.one_hot(index, E)
        position = (torch.cumsum(mask, dim=0) - 1) * mask
        mask = mask * (position < capacity)
        place = F.one_hot((position * mask).sum(-1), capacity) * mask.sum(-1, keepdim=True)
        dispatch = torch.einsum("te,tc->tec", mask, place).to(flat.dtype)
        combine = dispatch * gate[:, None, None]
        rows = torch.einsum("tec,th->ech", dispatch, flat)
        made = torch.einsum("ecf,efh->ech", F.relu(torch.einsum("ech,ehf->ecf", rows, self.wi)), self.wo)
        return torch.einsum("tec,ech->th", combine, made).view_as(x)


class Dense(Routed):
    """Every expert computes every token; weights of those not chosen are zero."""

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.chosen(x)
        full = torch.zeros(*x.shape[:-1], E, dtype=x.dtype).scatter(-1, index, weights)
        made = torch.stack([expert(x) for expert in self.experts], dim=-2)
        return (made * full.unsqueeze(-1)).sum(-2)


def grouped(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """torch's grouped product with weights [E, O, I], which has no kernel for float64."""
    try:
        return F.grouped_mm(rows, weight.transpose(-2, -1), offs=offsets)
    except RuntimeError:
        out: Tensor = torch.ops.autopar.grouped_mm(rows, weight, offsets, False)
        return out


class Sorted(nn.Module):
    """torchtitan's: histc, a stable argsort, grouped products with offsets, scattered back."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        self.w1, self.w2, self.w3 = (nn.Parameter(torch.randn(E, o, i) / 4) for o, i in ((FF, H), (H, FF), (FF, H)))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, H)
        scores = F.softmax(self.gate(flat), dim=1)
        top, index = torch.topk(scores, k=K, dim=1)
        counts = torch.histc(index.view(-1).float(), bins=E, min=0, max=E)
        order = torch.argsort(index.view(-1), stable=True)
        top_sorted, token = top.view(-1)[order], order // K
        rows = flat[token]
        offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
        h = F.silu(grouped(rows, self.w1, offsets))
        h = h * grouped(rows, self.w3, offsets)
        out = grouped(h, self.w2, offsets)
        out = out * top_sorted.reshape(-1, 1)
        made = torch.zeros_like(flat).scatter_add(0, token.reshape(-1, 1).expand(-1, H), out)
        return made.view_as(x)


class SortedTitan(Sorted):
    """torchtitan's today: counts of a routing map, scores in the combine, rows placed back one by one."""

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        scores = torch.sigmoid(self.gate(x))
        _, index = torch.topk(scores, k=K, dim=-1, sorted=False)
        top = scores.gather(-1, index)
        top = top / (top.sum(-1, keepdim=True) + 1e-20)
        routing = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, index, True)
        offsets = torch.cumsum(routing.sum(dim=(0, 1)), dim=0, dtype=torch.int32)
        order = torch.argsort(index.view(-1, K).view(-1), stable=True)
        rows = x.view(-1, H)[order // K]
        h = F.silu(grouped(rows, self.w1, offsets)) * grouped(rows, self.w3, offsets)
        out = grouped(h, self.w2, offsets)
        unsorted = torch.zeros_like(out)
        unsorted[order] = out
        made = torch.bmm(top.view(-1, 1, K), unsorted.view(-1, K, H)).squeeze(1)
        return made.view(shape)


class SortedScaled(Sorted):
    """Scores before the experts; index_add."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, H)
        top, index = torch.topk(F.softmax(self.gate(flat), dim=-1), K)
        counts = F.one_hot(index, E).sum((0, 1))
        order = index.flatten().argsort()
        token = order // K
        rows = flat.index_select(0, token) * top.flatten()[order].unsqueeze(-1)
        offsets = counts.cumsum(0).to(torch.int32)
        out = grouped(F.gelu(grouped(rows, self.w1, offsets)), self.w2, offsets)
        return torch.zeros_like(flat).index_add(0, token, out).view_as(x)


SPELLINGS: dict[str, type[nn.Module]] = {
    cls.__name__: cls
    for cls in (
        LitGPT, OldMixtral, MistralReference, MakeMoE, Nonzero, DeepSeekTraining, DeepSeekInference, Switch,
        EinsumDispatch, Dense, Sorted, SortedTitan, SortedScaled,
    )
}  # fmt: skip


class Model(nn.Module):
    """A residual layer between an embedding and a head."""

    def __init__(self, layer: type[nn.Module], layers: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(32, H), nn.Linear(H, 32)
        self.layers = nn.ModuleList(layer() for _ in range(layers))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x).view(-1, 32), labels.view(-1))


def batch() -> dict[str, Tensor]:
    """Eight sequences of six tokens."""
    g = torch.Generator().manual_seed(1)
    return {name: torch.randint(32, (8, 6), generator=g) for name in ("ids", "labels")}
