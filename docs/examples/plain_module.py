"""Your own module with data and tensor parallelism: a small network that classifies two spirals.

torchrun --nproc-per-node 4 docs/examples/plain_module.py     (or: python docs/examples/plain_module.py)
"""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import autopar


class Classifier(nn.Module):
    """An ordinary module, without any parallelism."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        scores = self.head(self.layers(x))
        return {"loss": nn.functional.cross_entropy(scores, y), "right": (scores.argmax(1) == y).sum()}


def spirals(count: int) -> TensorDataset:
    kind, turn = torch.arange(count) % 2, torch.rand(count) * 6 + 0.5
    angle = turn + kind * torch.pi
    points = torch.stack([angle.cos(), angle.sin()], dim=1) * turn[:, None] / 3
    return TensorDataset(points + 0.02 * torch.randn(count, 2), kind)


def main() -> list[float]:
    mesh = autopar.init_mesh(dp=2, tp=2)
    torch.manual_seed(0)  # the same weights and data on every rank
    data = spirals(1024)
    x, y = data[:8]
    model = autopar.parallelize(Classifier(), mesh, example_batch={"x": x, "y": y})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    sampler = autopar.sampler(data, mesh, batch_size=256, seed=0)  # each data-parallel rank reads its shard of a batch
    losses = []
    for _ in range(15):
        for x, y in sampler.loader():
            losses.append(float(model.train_step(x=x, y=y)))  # the loss of all 256 examples, on every rank
            optimizer.step()
            optimizer.zero_grad()
    x, y = data[:]
    right = model.eval_step(x=x.chunk(mesh.data_size)[mesh.data_rank], y=y.chunk(mesh.data_size)[mesh.data_rank])
    if mesh.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {int(right['right'])} of {len(data)} right")
    return losses


if __name__ == "__main__":
    autopar.launch(main, 4)
