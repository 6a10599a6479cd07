"""Plain torch of many kinds: what is neither an image classifier nor a language model, as people write it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.outside.zoo_of_others import ROWS, Language, Regressor, classes, draw, entry, text

GROUP = "ideas"
WIDTH, VOCAB = 16, 64


class Hyena(nn.Module):
    """Long convolutions by FFT, with filters made of positions, gated twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.into, self.short = nn.Linear(WIDTH, 3 * WIDTH), nn.Conv1d(3 * WIDTH, 3 * WIDTH, 3, padding=2, groups=48)
        self.filter = nn.Sequential(nn.Linear(3, 16), nn.GELU(), nn.Linear(16, WIDTH))
        self.bias, self.out = nn.Parameter(torch.zeros(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def kernel(self, length: int) -> Tensor:
        t = torch.linspace(0, 1, length, dtype=self.bias.dtype).unsqueeze(-1)
        features = torch.cat([t, torch.sin(6.28 * t), torch.cos(6.28 * t)], -1)
        return (self.filter(features) * torch.exp(-3 * t)).transpose(0, 1)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        length = h.shape[1]
        x = self.short(self.into(h).transpose(1, 2))[..., :length]
        q, k, v = x.chunk(3, 1)
        v = k * v
        k_f = torch.fft.rfft(self.kernel(length), n=2 * length)
        y = torch.fft.irfft(torch.fft.rfft(v, n=2 * length) * k_f, n=2 * length)[..., :length]
        return self.head(h + self.out((q * (y + v * self.bias[:, None])).transpose(1, 2)))


class Capsules(nn.Module):
    """Dynamic routing by agreement, and the margin loss."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 5, stride=2)
        self.votes = nn.Parameter(torch.randn(6, 64, 8, 4) * 0.1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        u = self.conv(x).view(x.shape[0], 64, 4)
        u = u * u.norm(dim=-1, keepdim=True) / (1 + u.square().sum(-1, keepdim=True))
        votes = torch.einsum("bni,knoi->bkno", u, self.votes)
        logits = torch.zeros(x.shape[0], 6, 64, 1, dtype=x.dtype)
        for _ in range(3):
            s = (torch.softmax(logits, 1) * votes).sum(2, keepdim=True)
            squared = s.square().sum(-1, keepdim=True)
            v = squared / (1 + squared) * s / torch.sqrt(squared + 1e-8)
            logits = logits + (votes * v).sum(-1, keepdim=True)
        length = v.squeeze(2).norm(dim=-1)
        target = F.one_hot(labels, 6).to(x.dtype)
        return (target * F.relu(0.9 - length) ** 2 + 0.5 * (1 - target) * F.relu(length - 0.1) ** 2).sum(-1).mean()


class HandMadeExperts(nn.Module):
    """Experts as one weight each, tokens weighted by the two best of a router; a loss that balances them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.SiLU(), nn.Linear(32, WIDTH)) for _ in range(4)
        )

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.embed(ids)
        probs = self.router(h).softmax(-1)
        best, chosen = probs.topk(2, dim=-1)
        weights = torch.zeros_like(probs).scatter(-1, chosen, best / best.sum(-1, keepdim=True))
        mixed = sum(weights[..., i : i + 1] * expert(h) for i, expert in enumerate(self.experts))
        balance = (probs.mean((0, 1)) * (weights > 0).to(h.dtype).mean((0, 1))).sum()
        return F.cross_entropy(self.head(h + mixed).flatten(0, 1), labels.flatten()) + 0.01 * balance


class NeuralOde(nn.Module):
    """Fixed steps of Runge and Kutta through one net, which knows the time."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 4)
        self.net = nn.Sequential(nn.Linear(WIDTH + 1, 32), nn.Tanh(), nn.Linear(32, WIDTH))

    def f(self, t: float, h: Tensor) -> Tensor:
        return self.net(torch.cat([h, torch.full_like(h[:, :1], t)], 1))

    def forward(self, x: Tensor) -> Tensor:
        h, dt = self.into(x), 0.25
        for step in range(4):
            t = step * dt
            k1 = self.f(t, h)
            k2 = self.f(t + dt / 2, h + dt / 2 * k1)
            k3 = self.f(t + dt / 2, h + dt / 2 * k2)
            k4 = self.f(t + dt, h + dt * k3)
            h = h + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return self.out(h)


class SetPrediction(nn.Module):
    """Queries and targets matched by their costs, soft (Sinkhorn), without gradients through the matching."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.queries = nn.Linear(6, WIDTH), nn.Parameter(torch.randn(5, WIDTH))
        self.decoder = nn.TransformerDecoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        self.boxes, self.kinds = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, boxes: Tensor, kinds: Tensor) -> Tensor:
        h = self.decoder(self.queries.expand(x.shape[0], -1, -1), self.embed(x))
        found, logits = self.boxes(h).sigmoid(), self.kinds(h)
        with torch.no_grad():
            cost = torch.cdist(found, boxes, p=1) - logits.softmax(-1).gather(2, kinds[:, None].expand(-1, 5, -1))
            plan = (-cost / 0.1).log_softmax(-1)
            for _ in range(5):
                plan = (plan - plan.logsumexp(1, keepdim=True)).log_softmax(-1)
            match = plan.argmax(1)
        picked = found.gather(1, match[..., None].expand(-1, -1, 4))
        scores = logits.gather(1, match[..., None].expand(-1, -1, 3))
        return F.l1_loss(picked, boxes) + F.cross_entropy(scores.transpose(1, 2), kinds)


class Siamese(nn.Module):
    """One encoder for both, a contrastive margin."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, WIDTH))

    def forward(self, a: Tensor, b: Tensor, same: Tensor) -> Tensor:
        distance = F.pairwise_distance(self.net(a), self.net(b))
        return (same * distance.square() + (1 - same) * F.relu(1 - distance).square()).mean()


class Discriminator(nn.Module):
    """A GAN's, with spectral norm and the penalty on its gradient."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.spectral_norm
        self.net = nn.Sequential(
            norm(nn.Conv2d(3, 8, 4, 2, 1)), nn.LeakyReLU(0.2), norm(nn.Conv2d(8, 16, 4, 2, 1)), nn.LeakyReLU(0.2)
        )
        self.head = norm(nn.Linear(16 * 4, 1))

    def score(self, x: Tensor) -> Tensor:
        return self.head(self.net(x).flatten(1))

    def forward(self, real: Tensor, fake: Tensor, mix: Tensor) -> Tensor:
        between = (mix * real + (1 - mix) * fake).requires_grad_()
        scores = self.score(between)
        (slope,) = torch.autograd.grad(scores, between, torch.ones_like(scores), create_graph=True)
        penalty = (slope.flatten(1).norm(2, dim=1) - 1).square().mean()
        return F.softplus(-self.score(real)).mean() + F.softplus(self.score(fake)).mean() + 10 * penalty


class SetTransformer(nn.Module):
    """Induced points, pooling by a seed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 4)
        self.points, self.seed = nn.Parameter(torch.randn(1, 4, WIDTH)), nn.Parameter(torch.randn(1, 1, WIDTH))
        self.up, self.down, self.pool = (nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h, rows = self.embed(x), x.shape[0]
        points = self.points.repeat(rows, 1, 1)
        induced = points + self.up(points, h, h, need_weights=False)[0]
        h = h + self.down(h, induced, induced, need_weights=False)[0]
        return self.out(self.pool(self.seed.expand(rows, -1, -1), h, h)[0].squeeze(1))


class AttentionUNet(nn.Module):
    """Skip connections under gates, self-attention at the bottom."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 16, 3, 2, 1), nn.Conv2d(16, 16, 3, 2, 1)
        self.qkv, self.proj, self.norm = nn.Conv2d(16, 48, 1), nn.Conv2d(16, 16, 1), nn.GroupNorm(4, 16)
        self.gate_h, self.gate_x, self.psi = nn.Conv2d(16, 8, 1), nn.Conv2d(16, 8, 1), nn.Conv2d(8, 1, 1)
        self.up1, self.up2 = nn.ConvTranspose2d(16, 16, 2, 2), nn.ConvTranspose2d(32, 8, 2, 2)
        self.out = nn.Conv2d(16, 3, 1)

    def attend(self, x: Tensor) -> Tensor:
        B, C, H, W = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(B, 3, 2, C // 2, H * W).transpose(3, 4).unbind(1)
        y = F.scaled_dot_product_attention(q, k, v).transpose(2, 3).reshape(B, C, H, W)
        return x + self.proj(y)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        a = F.silu(self.a(x))
        b = F.silu(self.b(a))
        h = self.up1(self.attend(F.silu(self.c(b))) * (1 + torch.sin(t)[:, None, None, None]))
        b = b * torch.sigmoid(self.psi(F.relu(self.gate_h(h) + self.gate_x(b))))
        return self.out(torch.cat([self.up2(torch.cat([h, b], 1)), a], 1))


class TwoTowers(nn.Module):
    """In-batch negatives, with a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.EmbeddingBag(32, WIDTH, mode="mean"), nn.Embedding(32, WIDTH)
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, history: Tensor, item: Tensor) -> Tensor:
        u = F.normalize(self.left(self.users(history)), dim=-1)
        v = F.normalize(self.right(self.items(item)), dim=-1)
        logits = self.scale.exp() * u @ v.T
        return F.cross_entropy(logits, torch.arange(len(u)))


class VariationalAutoencoder(nn.Module):
    """Noise drawn in the forward, a divergence, tied decoder weights."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.stats, self.out = nn.Linear(12, 32), nn.Linear(32, 2 * WIDTH), nn.Linear(WIDTH, 32)

    def forward(self, x: Tensor) -> Tensor:
        mean, log = self.stats(F.gelu(self.into(x))).chunk(2, -1)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log)
        found = F.linear(F.gelu(self.out(z)), self.into.weight.t())
        return F.mse_loss(found, x) - 0.01 * (1 + log - mean.square() - log.exp()).sum(-1).mean()


class LiquidLoop(nn.Module):
    """A layer that is called again and again on a residual, with halting weights."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.layer, self.halt = nn.Linear(6, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.out = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, left, total = self.into(x), torch.ones_like(x[:, :1]), torch.zeros_like(self.into(x))
        for _ in range(4):
            h = F.layer_norm(h + torch.tanh(self.layer(h)), (WIDTH,))
            p = torch.sigmoid(self.halt(h)) * left
            total, left = total + p * h, left - p
        return self.out(total + left * h)


class MaskedModelling(nn.Module):
    """The loss of the entries that were masked alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mask = nn.Linear(6, WIDTH), nn.Parameter(torch.randn(WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        self.body, self.out = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(WIDTH, 6)

    def forward(self, x: Tensor, masked: Tensor) -> Tensor:
        h = torch.where(masked.unsqueeze(-1), self.mask, self.embed(x))
        return F.mse_loss(self.out(self.body(h))[masked], x[masked])


def _put(name: str, model: Any, **batch: Tensor) -> None:
    entry(GROUP, name)(lambda: (model(), batch))


def _regressor(net: type[nn.Module]) -> Any:
    return lambda: Regressor(net())


_rows = ROWS
entry(GROUP, "Hyena")(lambda: (Language(Hyena()), text(8)))
_put("capsules", Capsules, x=draw(_rows, 1, 12, 12), labels=classes(_rows, count=6))
_put("experts by hand", HandMadeExperts, **text(8))
_put("neural ODE", _regressor(NeuralOde), x=draw(_rows, 6), target=draw(_rows, 4, seed=1))
_put(
    "set prediction",
    SetPrediction,
    x=draw(_rows, 7, 6),
    boxes=draw(_rows, 3, 4).sigmoid(),
    kinds=classes(_rows, 3, count=3),
)
_put("siamese", Siamese, a=draw(_rows, 12), b=draw(_rows, 12, seed=1), same=classes(_rows, count=2).double())
_put(
    "discriminator",
    Discriminator,
    real=draw(_rows, 3, 8, 8),
    fake=draw(_rows, 3, 8, 8, seed=1),
    mix=draw(_rows, 1, 1, 1).sigmoid(),
)
_put("set transformer", _regressor(SetTransformer), x=draw(_rows, 7, 3), target=draw(_rows, 4, seed=1))
_put(
    "attention UNet",
    _regressor(AttentionUNet),
    x=draw(_rows, 3, 16, 16),
    t=draw(_rows),
    target=draw(_rows, 3, 16, 16, seed=1),
)
_put("two towers", TwoTowers, history=classes(_rows, 5, count=32), item=classes(_rows, count=32))
_put("variational autoencoder", VariationalAutoencoder, x=draw(_rows, 12))
_put("halting loop", _regressor(LiquidLoop), x=draw(_rows, 6), target=draw(_rows, 4, seed=1))
_put("masked modelling", MaskedModelling, x=draw(_rows, 7, 6), masked=draw(_rows, 7, seed=2) > 0)
