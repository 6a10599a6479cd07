"""Plain torch beyond sequences: tables, graphs, images, algebra. No library is needed."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.outside.plain_sequences import HEADS, VOCAB, WIDTH, NanoBlock
from tests.outside.zoo_of_others import ROWS, Classifier, Made, Regressor, classes, draw, entry, pictures, text

GROUP = "plain"


class Dlrm(nn.Module):
    """Bags of embeddings, dense features, pairwise products."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList([nn.EmbeddingBag(20, 8, mode=mode) for mode in ("sum", "mean", "sum")])
        self.bottom = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(8 + 6, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, sparse: Tensor, target: Tensor) -> Tensor:
        x = self.bottom(dense)
        fields = torch.stack([x, *(bag(sparse[:, i]) for i, bag in enumerate(self.bags))], 1)
        products = torch.bmm(fields, fields.transpose(1, 2))
        i, j = torch.tril_indices(4, 4, -1)
        logits = self.top(torch.cat([x, products[:, i, j]], 1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, target)


def _dlrm() -> Made:
    batch = {"dense": draw(ROWS, 6), "sparse": classes(ROWS, 3, 4, count=20)}
    return Dlrm(), {**batch, "target": (draw(ROWS, seed=3) > 0).double()}


class GraphNet(nn.Module):
    """Message passing on a batch of small graphs: gather by edges, index_add per graph, scatter_reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.message, self.update = nn.Linear(4, 16), nn.Linear(32, 16), nn.Linear(48, 16)
        self.out = nn.Linear(16, 1)

    def forward(self, x: Tensor, edges: Tensor, target: Tensor) -> Tensor:
        h = torch.relu(self.into(x))
        source, sink = edges[:, 0], edges[:, 1]
        for _ in range(2):
            wide = (-1, -1, 16)
            a = h.gather(1, source.unsqueeze(-1).expand(wide))
            b = h.gather(1, sink.unsqueeze(-1).expand(wide))
            m = torch.relu(self.message(torch.cat([a, b], -1)))
            total = torch.zeros_like(h).scatter_add(1, sink.unsqueeze(-1).expand(wide), m)
            most = torch.zeros_like(h).scatter_reduce(1, sink.unsqueeze(-1).expand(wide), m, "amax")
            h = torch.relu(self.update(torch.cat([h, total, most], -1)))
        return F.mse_loss(self.out(h.mean(1)).squeeze(1), target)


def _graphs() -> Made:
    return GraphNet(), {"x": draw(ROWS, 5, 4), "edges": classes(ROWS, 2, 9, count=5), "target": draw(ROWS)}


class OneGraph(nn.Module):
    """Message passing on one large graph whose nodes are the rows: index_add over edges of all."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.message, self.out = nn.Linear(4, 16), nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, edge_index: Tensor, labels: Tensor) -> Tensor:
        h = torch.relu(self.into(x))
        for _ in range(2):
            m = self.message(h[edge_index[0]])
            h = torch.relu(h + torch.zeros_like(h).index_add(0, edge_index[1], m))
        return F.cross_entropy(self.out(h), labels)


def _one_graph() -> Made:
    return OneGraph(), {"x": draw(8, 4), "edge_index": classes(2, 20, count=8), "labels": classes(8)}


class Pinn(nn.Module):
    """Physics-informed: a derivative of the net with respect to its input, in closed form."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, t: Tensor, target: Tensor) -> Tensor:
        t = t.detach().requires_grad_()
        u = self.net(t)
        du = torch.autograd.grad(u.sum(), t, create_graph=True)[0]
        return ((du + u) ** 2).mean() + F.mse_loss(u, target)


entry(GROUP, "DLRM")(_dlrm)
entry(GROUP, "graph network")(_graphs)
entry(GROUP, "one large graph")(_one_graph)
entry(GROUP, "PINN")(lambda: (Pinn(), {"t": draw(ROWS, 1), "target": draw(ROWS, 1)}))


class UNet(nn.Module):
    """Group norm, transposed convolutions, upsampling, skip connections, PReLU, instance norm."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.n1 = nn.Conv2d(3, 8, 3, padding="same"), nn.GroupNorm(4, 8)
        self.c2, self.n2 = nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16)
        self.c3, self.n3 = nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.InstanceNorm2d(16, affine=True)
        self.u1, self.act = nn.ConvTranspose2d(16, 16, 2, stride=2), nn.PReLU(16)
        self.c4, self.out = nn.Conv2d(32, 8, 3, padding=1), nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.silu(self.n1(self.c1(x)))
        b = F.silu(self.n2(self.c2(a)))
        c = F.relu(self.n3(self.c3(b)))
        d = self.c4(torch.cat([self.act(self.u1(c)), b], 1))
        e = F.interpolate(d, scale_factor=2, mode="bilinear", align_corners=False)
        return self.out(torch.cat([e, a], 1))


entry(GROUP, "UNet")(lambda: (Regressor(UNet()), {"x": draw(ROWS, 3, 16, 16), "target": draw(ROWS, 3, 16, 16)}))


class FourierMixer(nn.Module):
    """FNet's mixing, and a spectral filter over space (GFNet, FNO)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 16)
        self.filter = nn.Parameter(torch.randn(8, 5, 16, 2) * 0.1)
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x.permute(0, 2, 3, 1))
        f = torch.fft.rfft2(h, dim=(1, 2), norm="ortho") * torch.view_as_complex(self.filter)
        h = h + torch.fft.irfft2(f, s=(8, 8), dim=(1, 2), norm="ortho")
        h = h + torch.fft.fft(h, dim=-1).real
        return self.head((h + self.down(F.gelu(self.up(h)))).mean((1, 2)))


entry(GROUP, "Fourier mixer")(lambda: (Classifier(FourierMixer()), pictures(8, 4)))


class Patches(nn.Module):
    """unfold and fold, pixel shuffle, adaptive pools, and what else stands beside convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.post, self.head = nn.Linear(12, 16), nn.Conv2d(4, 8, 3, padding=1), nn.Linear(8 * 4, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = F.unfold(x, 2, stride=2).transpose(1, 2)
        h = F.fold(self.mix(h).transpose(1, 2), (16, 16), 2, stride=2)
        h = F.pixel_unshuffle(F.pixel_shuffle(h, 2), 2)
        h = F.adaptive_avg_pool2d(F.relu(self.post(h)), 2)
        rows = h.unfold(2, 2, 1).sum(-1)
        return self.head((h + rows.expand_as(h)).flatten(1))


entry(GROUP, "patches")(lambda: (Classifier(Patches()), pictures(16)))


class SegmentAnything(nn.Module):
    """As segment-anything: windows with decomposed relative positions, a decoder of upscaled masks."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.pos = nn.Conv2d(3, 16, 4, 4), nn.Parameter(torch.randn(1, 8, 8, 16))
        self.norm, self.qkv, self.proj = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.rel_h, self.rel_w = nn.Parameter(torch.randn(7, 8)), nn.Parameter(torch.randn(7, 8))
        self.token = nn.Embedding(2, 16)
        self.up = nn.Sequential(nn.ConvTranspose2d(16, 8, 2, 2), nn.GELU(), nn.ConvTranspose2d(8, 4, 2, 2), nn.GELU())
        self.hyper = nn.Linear(16, 4)

    def window(self, x: Tensor) -> Tensor:
        B, H, W, C = x.shape
        x = x.view(B, H // 4, 4, W // 4, 4, C).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, 4, C)
        qkv = self.qkv(x).reshape(x.shape[0], 16, 3, 2, 8).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.reshape(3, x.shape[0] * 2, 16, 8).unbind(0)
        attn = (q * 8**-0.5) @ k.transpose(-2, -1)
        at = torch.arange(4)[:, None] - torch.arange(4)[None, :] + 3
        r = q.reshape(-1, 4, 4, 8)
        rel_h = torch.einsum("bhwc,hkc->bhwk", r, self.rel_h[at])
        rel_w = torch.einsum("bhwc,wkc->bhwk", r, self.rel_w[at])
        attn = (attn.view(-1, 4, 4, 4, 4) + rel_h[:, :, :, :, None] + rel_w[:, :, :, None, :]).view(-1, 16, 16)
        y = (attn.softmax(-1) @ v).view(x.shape[0], 2, 4, 4, 8).permute(0, 2, 3, 1, 4).reshape(x.shape)
        y = y.view(B, H // 4, W // 4, 4, 4, C).permute(0, 1, 3, 2, 4, 5).reshape(B, H, W, C)
        return self.proj(y)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = self.patch(x).permute(0, 2, 3, 1) + self.pos
        h = (h + self.window(self.norm(h))).permute(0, 3, 1, 2)
        up = self.up(h)
        tokens = self.hyper(self.token.weight.unsqueeze(0).expand(x.shape[0], -1, -1))
        masks = (tokens @ up.flatten(2)).view(x.shape[0], 2, 32, 32)
        return F.cross_entropy(F.interpolate(masks, (16, 16), mode="bilinear", align_corners=False), labels)


def _sam() -> Made:
    return SegmentAnything(), {"x": draw(ROWS, 3, 32, 32), "labels": classes(ROWS, 16, 16, count=2)}


entry(GROUP, "segment anything")(_sam)


class TextTower(nn.Module):
    """CLIP's text half: the row of the end token of each sample is picked by its position."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.norm(self.body(self.embed(ids)))
        picked = h[torch.arange(h.shape[0]), ids.argmax(-1)]
        return F.cross_entropy(self.head(picked), labels)


entry(GROUP, "picked rows")(lambda: (TextTower(), {"ids": classes(ROWS, 8, count=VOCAB), "labels": classes(ROWS)}))


class Prefix(nn.Module):
    """Image features stand where the text has placeholders: masked_scatter, as vision-language models do it."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.embed = nn.Linear(12, WIDTH), nn.Embedding(VOCAB, WIDTH)
        self.block, self.head = NanoBlock(True), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, image: Tensor, labels: Tensor) -> Tensor:
        features, h = self.patch(image), self.embed(ids)
        at = (ids == 1).unsqueeze(-1).expand_as(h)
        h = h.masked_scatter(at, features.to(h.dtype))
        return F.cross_entropy(self.head(self.block(h)).flatten(0, 1), labels.flatten())


def _prefix() -> Made:
    batch = text()
    ids = batch["ids"].clamp(min=2)
    for row in range(ROWS):
        ids[row, row : row + 4] = 1
    return Prefix(), {"ids": ids, "image": draw(ROWS, 4, 12), "labels": batch["labels"]}


entry(GROUP, "image in text", tokens=True)(_prefix)


class Solver(nn.Module):
    """Batched linear algebra: a whitening layer and a ridge regression per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor, labels: Tensor) -> Tensor:
        h = self.into(x)
        gram = h.transpose(1, 2) @ h + 0.5 * torch.eye(8, dtype=h.dtype)
        w = torch.linalg.solve(gram, h.transpose(1, 2) @ y)
        logdet = torch.linalg.slogdet(gram)[1]
        return (
            F.cross_entropy(self.out((h @ w).squeeze(-1) @ torch.ones(5, 8, dtype=h.dtype)), labels)
            + 0.01 * logdet.mean()
        )


entry(GROUP, "solver")(
    lambda: (Solver(), {"x": draw(ROWS, 5, 6), "y": draw(ROWS, 5, 1), "labels": classes(ROWS, count=4)})
)


class AxialAttention(nn.Module):
    """Attention of rank 5: rows of an image attend, heads have a dim of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Linear(4, 16), nn.Linear(16, 48), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x.permute(0, 2, 3, 1))
        q, k, v = self.qkv(h).unflatten(-1, (3, 2, 8)).permute(3, 0, 1, 4, 2, 5).unbind(0)
        h = h + F.scaled_dot_product_attention(q, k, v).transpose(2, 3).flatten(3)
        a = (h.unsqueeze(1) @ h.unsqueeze(1).transpose(-1, -2)).softmax(-1) @ h.unsqueeze(1)
        return self.out((h + a.squeeze(1)).mean((1, 2)))


entry(GROUP, "attention of rank 5")(lambda: (Classifier(AxialAttention()), pictures(8, 4)))


class CheckpointInside(nn.Module):
    """torch.utils.checkpoint within the model, spectral norm, weight norm, a custom autograd function."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(12, 16))
        self.second = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
        self.block = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        h = F.relu(self.second(F.relu(self.first(x))))
        return self.head(h + checkpoint(self.block, h, use_reentrant=False))


entry("habits", "parametrizations and checkpoint")(
    lambda: (Classifier(CheckpointInside()), {"x": draw(ROWS, 12), "labels": classes(ROWS)})
)


class ParallelBlock(nn.Module):
    """Attention and feed-forward side by side out of one product, and into another (Flux, PaLM)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.into, self.mlp = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 64)
        self.out, self.head = nn.Linear(16 + 64, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = self.into(h).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(torch.cat([attended, F.gelu(self.mlp(h), approximate="tanh")], 2))
        return F.cross_entropy(self.head(x[:, 2:]).flatten(0, 1), labels.flatten())


entry(GROUP, "parallel block")(lambda: (ParallelBlock(), {"x": draw(ROWS, 8, 16), "labels": classes(ROWS, 6)}))
