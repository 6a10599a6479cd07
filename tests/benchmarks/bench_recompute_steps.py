"""Full training steps on one process that recompute activations: autopar against torch.compile's memory budget and
transformers' gradient checkpointing.

Forward and backward of a Llama; losses are compared first, then steps run in turns. Peaks are those of the allocator's
own events (torch.profiler), the model left out, so that Inductor's buffers count as well.

    python tests/benchmarks/bench_recompute_steps.py [--rounds 5] [--small]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config as functorch
from common import SMALL, Step, Workload, interleaved, publish
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import autopar
from autopar.compile.model import compile_model
from autopar.cost.memory import memory
from autopar.ir.mesh import Mesh
from autopar.options import Options
from tests.support.ranks import run_ranks

WIDE = Workload(hidden=256, layers=8, inner=688, heads=4, vocab=2048, batch=8, length=256)
BUDGETS = (0.6, 0.3)


@dataclass
class Made:
    """A step that returns its loss, and the library's name. clear: frees the gradients."""

    step: Callable[[], Tensor]
    clear: Callable[[], None]


def eager(work: Workload, change: Callable[[nn.Module], Any] = lambda model: model) -> Made:
    """torch's, with a change of the model."""
    model, batch = work.model(), work.tokens()
    run = change(model) or model

    def step() -> Tensor:
        loss: Tensor = run(**batch).loss
        loss.backward()
        return loss.detach()

    return Made(step, model.zero_grad)


def compiled(work: Workload, budget: float) -> Made:
    """torch.compile under a memory budget."""

    def change(model: nn.Module) -> Any:
        def run(**batch: Tensor) -> Any:
            with functorch.patch(activation_memory_budget=budget):
                return made(**batch)

        made = torch.compile(model)
        return run

    return eager(work, change)


def ours(work: Workload, backend: str = "eager", **options: Any) -> Made:
    """autopar on a mesh of one rank."""
    mesh = autopar.init_mesh("cpu", 60.0, dp=1)
    parallel, batch = autopar.parallelize(work.model(), mesh, backend=backend, **options), work.tokens()
    return Made(lambda: parallel.train_step(**batch), parallel.zero_grad)


def checkpointed(model: nn.Module) -> None:
    """transformers' own, of each layer."""
    model.gradient_checkpointing_enable()  # type: ignore[operator]


def peak_of(made: Made) -> int:
    """Most bytes that a step allocates at once, gradients included, by the events of the allocator."""
    made.clear()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        made.step()
    events = sorted(
        (e.start_ns(), e.nbytes())
        for e in found.profiler.kineto_results.events()
        if e.name() == "[memory]"  # type: ignore[union-attr]
    )
    live = most = 0
    for _, size in events:
        live += size
        most = max(most, live)
    return most


def limit_of(work: Workload, peak: int) -> int:
    """What a rank may hold, for a step to allocate no more than ``peak``: what is there all the time counts, too."""
    found = memory(compile_model(work.model(), work.tokens(), Mesh.of(dp=1), Options(), outputs=()))
    return peak + found.steady


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="to try the harness itself: nothing is written")
    args = parser.parse_args()
    (text,) = run_ranks(1, table, args.small, args.rounds, timeout=3600.0)
    print(text) if args.small else publish("checkpoint steps", text)


def table(small: bool, rounds: int) -> str:
    """On the one rank."""
    work = SMALL if small else WIDE
    peers = {"eager": eager(work), "transformers' checkpoints": eager(work, checkpointed)}
    peers |= {f"torch.compile, budget {b}": compiled(work, b) for b in BUDGETS}
    for made in peers.values():
        made.step()  # compiles
    peaks = {name: peak_of(made) for name, made in peers.items()}
    limits = {name: limit_of(work, peak) for name, peak in peaks.items()}
    mine: dict[str, Made] = {
        "autopar": ours(work, activation_checkpoint="none"),
        "autopar full": ours(work, activation_checkpoint="full"),
    }
    mine |= {
        f"autopar{', inductor' if 'compile' in name else ''}, limit of {name}": ours(
            work, "inductor" if "compile" in name else "eager", memory_limit=limit
        )
        for name, limit in limits.items()
        if name != "eager"
    }
    losses = [float(made.step()) for made in (*peers.values(), *mine.values())]
    assert max(losses) - min(losses) < 1e-4, losses
    peaks |= {name: peak_of(made) for name, made in mine.items()}
    steps: dict[str, Step] = {name: made.step for name, made in (peers | mine).items()}
    times = {name: min(found.wall) for name, found in interleaved(steps, rounds).items()}
    rows = [f"| {name} | {times[name] / times['eager']:.2f} | {peaks[name] / 1e6:.1f} |" for name in steps]
    return "\n".join(["| step | time, of eager's | peak, MB |", "|---|---|---|", *rows])


if __name__ == "__main__":
    main()
