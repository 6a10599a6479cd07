"""One training step on real ranks against one process: compiled once here, run by ranks that are forked afterwards.

    check("llama", {"dp": 2, "tp": 2}, zero=3, micro_batches=2)

Compiling is pure and takes most of the time, so it is done once, in the parent, and not by every rank: the pool is
forked anew and inherits the result. All else is what users call: init_mesh, parallelize, train_step, full_gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import GraphModule

import autopar
from autopar import api
from autopar.capture import capture
from autopar.compile.model import compile_graph
from autopar.ir.graph import copy_graph
from autopar.ir.mesh import Mesh
from autopar.models.tiny import TINY
from autopar.options import Options
from autopar.steps.graphs import Compiled
from autopar.verification import reference
from tests.ranks import close_pools, run_ranks

LIMIT = 1e-10  # of loss and gradients, in float64
BATCH, LENGTH = 8, 16


class Mlp(nn.Module):
    """A plain module: no library, returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(12, 32), nn.Linear(32, 32), nn.LayerNorm(32)
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        h = self.norm(h + nn.functional.gelu(self.second(h)))
        return nn.functional.mse_loss(self.head(h), target)


class Cnn(nn.Module):
    """Convolutions, a group norm, pooling, classes; some examples are ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.norm, self.head = nn.GroupNorm(4, 8), nn.Linear(16 * 4, 8)

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(self.norm(self.first(images)))
        h = nn.functional.max_pool2d(torch.relu(self.second(h)), 2).flatten(1)
        logits = self.head(h)
        return nn.functional.cross_entropy(logits, labels), logits


def _mlp() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Mlp().double(), {"x": torch.randn(BATCH, 12).double(), "target": torch.randn(BATCH, 8).double()}


def _cnn() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    labels = torch.randint(0, 8, (BATCH,)).masked_fill(torch.arange(BATCH) % 3 == 1, -100)
    return Cnn().double(), {"images": torch.randn(BATCH, 3, 8, 8).double(), "labels": labels}


def _hf(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    return TINY[name].build(), TINY[name].batch(BATCH, LENGTH)


PLAIN: dict[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]]] = {"mlp": _mlp, "cnn": _cnn}


@functools.cache
def subject(name: str) -> tuple[nn.Module, dict[str, Tensor], float, dict[str, Tensor | None]]:
    """(model, whole batch, loss and gradients of one process)"""
    model, batch = PLAIN[name]() if name in PLAIN else _hf(name)
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    loss, gradients = reference(model, batch)
    with torch.no_grad():
        for n, b in model.named_buffers():
            b.copy_(buffers[n])
    return model, batch, loss, gradients


@functools.cache
def captured(name: str) -> GraphModule:
    """The model's graph, to be copied: compiling changes it."""
    model, batch, _, _ = subject(name)
    return capture(model, {k: v.to("meta") for k, v in batch.items()}, exact=True)


@dataclass
class Case:
    """What the ranks inherit."""

    name: str
    sizes: dict[str, int]
    options: dict[str, Any]
    compiled: Compiled


_case: list[Case] = []


def check(name: str, sizes: dict[str, int], **options: Any) -> None:
    """Assert that loss and every gradient of a step on the mesh are those of one process."""
    compiled = compile_graph(copy_graph(captured(name)), Mesh.of(**sizes), Options(**options), outputs=())
    _case[:] = [Case(name, sizes, options, compiled)]
    close_pools()  # the next pool is forked from this process, with the case in it
    found = run_ranks(compiled.plan.mesh.world_size, _step)
    close_pools()  # these ranks take what was compiled for this case: no other test may have them
    for rank, (worst, who, without) in enumerate(found):
        assert not without, f"rank {rank}: a gradient on one side only: {without}"
        assert worst < LIMIT, f"rank {rank}: {who} is off by {worst:.2e}"


def _step() -> tuple[float, str, list[str]]:
    """On a rank: (largest error, of what, parameters with a gradient on one side only)."""
    case = _case[0]
    model, batch, expected_loss, expected = subject(case.name)
    _give(case)
    mesh = autopar.init_mesh("cpu", 30.0, **case.sizes)
    ranks, index = mesh.size(0) if "dp" in case.sizes else 1, dist.get_rank() // case.sizes.get("tp", 1)
    part = {k: v.chunk(ranks)[index] for k, v in batch.items()}
    parallel = autopar.parallelize(model, mesh, exact=True, example_batch=part, **case.options)
    loss = parallel.train_step(**part)
    found = parallel.full_gradients()
    errors = {n: float((found[n] - g).abs().max()) for n, g in expected.items() if g is not None and n in found}
    errors["loss"] = abs(float(loss) - expected_loss)
    who = max(errors, key=lambda n: errors[n])
    return errors[who], who, sorted({n for n, g in expected.items() if g is not None} ^ set(found))


def _give(case: Case) -> None:
    """Let parallelize take what the parent compiled, if it asks for just that."""

    def plan_model(model: nn.Module, batch: Any, mesh: Mesh, options: Options, fixed: Any = None, **_: Any) -> Any:
        assert mesh == case.compiled.plan.mesh and options == case.compiled.plan.options
        return case.compiled.plan, case.compiled.parameters

    def compile_model(model: nn.Module, batch: Any, mesh: Mesh, options: Options, **facts: Any) -> Compiled:
        whole = subject(case.name)[1]
        assert {k: (v.shape, v.dtype) for k, v in batch.items()} == {k: (v.shape, v.dtype) for k, v in whole.items()}
        assert facts["train"] and facts["exact"] and facts["outputs"] == ()
        return case.compiled

    api.plan_model, api.compile_model = plan_model, compile_model  # type: ignore[assignment]
