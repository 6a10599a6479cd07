"""Plain torch over sequences, written as people write it: no library is needed."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.outside.zoo_of_others import (
    ROWS,
    Language,
    Made,
    classes,
    draw,
    entry,
    text,
)

GROUP = "plain"
WIDTH, HEADS, VOCAB = 32, 4, 64


# --- recurrent -------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """Embedding, two layers of an RNN, head."""

    def __init__(self, kind: type[nn.RNNBase], **more: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.rnn = kind(16, 16, num_layers=2, batch_first=True, **more)
        self.head = nn.Linear(16 * (2 if more.get("bidirectional") else 1), VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(ids))[0])


class Cells(nn.Module):
    """A loop over an LSTMCell and a GRUCell."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.gru = nn.Embedding(VOCAB, 16), nn.LSTMCell(16, 16), nn.GRUCell(16, 16)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        h = c = g = x.new_zeros(x.shape[0], 16)
        out = []
        for t in range(x.shape[1]):
            h, c = self.lstm(x[:, t], (h, c))
            g = self.gru(h, g)
            out.append(g)
        return self.head(torch.stack(out, 1))


entry(GROUP, "LSTM")(lambda: (Language(Recurrent(nn.LSTM)), text(8)))
entry(GROUP, "bidirectional LSTM")(lambda: (Language(Recurrent(nn.LSTM, bidirectional=True)), text(8)))
entry(GROUP, "GRU")(lambda: (Language(Recurrent(nn.GRU)), text(8)))
entry(GROUP, "RNN")(lambda: (Language(Recurrent(nn.RNN)), text(8)))
entry(GROUP, "recurrent cells")(lambda: (Language(Cells()), text(6)))


# --- transformers ----------------------------------------------------------------------------------------------


class TorchTransformer(nn.Module):
    """nn.Transformer, encoder and decoder, with its own causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.body = nn.Transformer(WIDTH, HEADS, 1, 1, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=x.dtype)
        return self.head(self.body(x, x, tgt_mask=mask, tgt_is_causal=True))


class TorchEncoder(nn.Module):
    """nn.TransformerEncoder with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids), src_key_padding_mask=ids == 0))


class NanoBlock(nn.Module):
    def __init__(self, flash: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc, self.proj, self.flash = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), flash
        self.register_buffer("bias", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))

    def attend(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        k = k.view(B, T, HEADS, C // HEADS).transpose(1, 2)
        q = q.view(B, T, HEADS, C // HEADS).transpose(1, 2)
        v = v.view(B, T, HEADS, C // HEADS).transpose(1, 2)
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            y = F.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.ln_1(x))
        return x + self.proj(F.gelu(self.fc(self.ln_2(x))))


class NanoGPT(nn.Module):
    """As nanoGPT and minGPT write it, with the tie of their embedding."""

    def __init__(self, flash: bool) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        self.h = nn.ModuleList([NanoBlock(flash) for _ in range(2)])
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(ids) + self.wpe(torch.arange(0, ids.size(1), dtype=torch.long))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class Llama2C(nn.Module):
    """As llama2.c writes it: RoPE by views of pairs, repeated key heads, the loss kept on the module."""

    last_loss: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.out = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.wq, self.wk = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.wv, self.wo = nn.Linear(WIDTH, WIDTH // 2, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.Parameter(torch.ones(WIDTH))
        self.last_loss = None
        freqs = 1.0 / (10000.0 ** (torch.arange(0, 8, 2).float() / 8))
        angles = torch.outer(torch.arange(64).float(), freqs)
        self.register_buffer("cos", torch.cos(angles), persistent=False)
        self.register_buffer("sin", torch.sin(angles), persistent=False)

    def rotate(self, x: Tensor, length: int) -> Tensor:
        r, i = x.float().reshape(x.shape[:-1] + (-1, 2)).unbind(-1)
        cos, sin = self.cos[:length].view(1, length, 1, -1), self.sin[:length].view(1, length, 1, -1)
        return torch.stack([r * cos - i * sin, r * sin + i * cos], dim=-1).flatten(3).type_as(x)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        b, s = tokens.shape
        h = self.tok(tokens)
        x = h * torch.rsqrt(h.float().pow(2).mean(-1, keepdim=True) + 1e-5).type_as(h) * self.norm
        q, k, v = self.wq(x).view(b, s, 4, 8), self.wk(x).view(b, s, 2, 8), self.wv(x).view(b, s, 2, 8)
        q, k = self.rotate(q, s), self.rotate(k, s)
        k = k[:, :, :, None, :].expand(b, s, 2, 2, 8).reshape(b, s, 4, 8)
        v = v[:, :, :, None, :].expand(b, s, 2, 2, 8).reshape(b, s, 4, 8)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.wo(y.transpose(1, 2).contiguous().view(b, s, -1))
        logits = self.out(h)
        self.last_loss = F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1), ignore_index=-1)
        return self.last_loss


def _targets(ids: str) -> dict[str, Tensor]:
    batch = text(16)
    return {ids: batch["ids"], "targets": batch["labels"].masked_fill(batch["labels"] < 0, -1)}


entry(GROUP, "nn.Transformer", tokens=True)(lambda: (Language(TorchTransformer()), text()))
entry(GROUP, "nn.TransformerEncoder", tokens=True)(lambda: (Language(TorchEncoder()), text()))
entry(GROUP, "nanoGPT", tokens=True)(lambda: (NanoGPT(True), _targets("ids")))
entry(GROUP, "minGPT", tokens=True)(lambda: (NanoGPT(False), _targets("ids")))
entry(GROUP, "llama2.c", tokens=True)(lambda: (Llama2C(), _targets("tokens")))


class Conformer(nn.Module):
    """One block: half feed-forwards, attention, a convolution module with GLU and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.subsample = nn.Conv2d(1, WIDTH, 3, stride=2, padding=1)
        self.proj = nn.Linear(WIDTH * 8, WIDTH)
        self.ff1 = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.SiLU(), nn.Linear(64, WIDTH))
        self.ff2 = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.SiLU(), nn.Linear(64, WIDTH))
        self.norm, self.attn = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.pw1, self.dw = nn.Conv1d(WIDTH, 2 * WIDTH, 1), nn.Conv1d(WIDTH, WIDTH, 5, padding=2, groups=WIDTH)
        self.bn, self.pw2, self.head = nn.BatchNorm1d(WIDTH), nn.Conv1d(WIDTH, WIDTH, 1), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = self.subsample(x.unsqueeze(1))
        h = self.proj(h.permute(0, 2, 1, 3).flatten(2))
        h = h + 0.5 * self.ff1(h)
        n = self.norm(h)
        h = h + self.attn(n, n, n, need_weights=False)[0]
        c = F.glu(self.pw1(h.transpose(1, 2)), dim=1)
        h = h + self.pw2(F.silu(self.bn(self.dw(c)))).transpose(1, 2)
        h = h + 0.5 * self.ff2(h)
        logits = self.head(h).log_softmax(-1).transpose(0, 1)
        lengths = torch.full((x.shape[0],), logits.shape[0], dtype=torch.long)
        return F.ctc_loss(logits, labels, lengths, torch.full((x.shape[0],), labels.shape[1], dtype=torch.long))


def _conformer() -> Made:
    return Conformer(), {"x": draw(ROWS, 16, 16), "labels": classes(ROWS, 3, count=7) + 1}


entry(GROUP, "conformer with CTC")(_conformer)


class Mamba(nn.Module):
    """A selective scan in plain torch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)
        self.in_proj, self.conv = nn.Linear(16, 64), nn.Conv1d(32, 32, 3, groups=32, padding=2)
        self.x_proj, self.dt = nn.Linear(32, 2 + 8), nn.Linear(2, 32)
        self.A = nn.Parameter(torch.log(torch.arange(1, 5).float().repeat(32, 1)))
        self.D, self.out = nn.Parameter(torch.ones(32)), nn.Linear(32, 16)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        x, z = self.in_proj(h).chunk(2, -1)
        x = F.silu(self.conv(x.transpose(1, 2))[..., : ids.shape[1]].transpose(1, 2))
        dt, B, C = self.x_proj(x).split([2, 4, 4], -1)
        dt = F.softplus(self.dt(dt))
        dA = torch.exp(dt.unsqueeze(-1) * -torch.exp(self.A))
        dB = dt.unsqueeze(-1) * B.unsqueeze(2) * x.unsqueeze(-1)
        state, ys = torch.zeros_like(dA[:, 0]), []
        for t in range(ids.shape[1]):
            state = dA[:, t] * state + dB[:, t]
            ys.append((state * C[:, t].unsqueeze(1)).sum(-1))
        y = (torch.stack(ys, 1) + x * self.D) * F.silu(z)
        return self.head(h + self.out(y))


class RWKV(nn.Module):
    """Time mixing with a recurrence of exponentials, token shift by padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.ln = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB), nn.LayerNorm(WIDTH)
        self.k, self.v, self.r, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.mix, self.decay, self.first = (nn.Parameter(torch.rand(WIDTH)) for _ in range(3))
        self.shift = nn.ZeroPad2d((0, 0, 1, -1))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        n = self.ln(h)
        x = n * self.mix + self.shift(n) * (1 - self.mix)
        k, v, r = self.k(x), self.v(x), torch.sigmoid(self.r(x))
        w, a, b, p, out = -torch.exp(self.decay), torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0]), k[:, 0] - 9, []
        for t in range(ids.shape[1]):
            q = torch.maximum(p, self.first + k[:, t])
            e1, e2 = torch.exp(p - q), torch.exp(self.first + k[:, t] - q)
            out.append((e1 * a + e2 * v[:, t]) / (e1 * b + e2))
            q = torch.maximum(p + w, k[:, t])
            e1, e2 = torch.exp(p + w - q), torch.exp(k[:, t] - q)
            a, b, p = e1 * a + e2 * v[:, t], e1 * b + e2, q
        return self.head(h + self.o(r * torch.stack(out, 1)))


entry(GROUP, "mamba")(lambda: (Language(Mamba()), text(6)))
entry(GROUP, "RWKV")(lambda: (Language(RWKV()), text(6)))
