"""A step of Muon over sharded matrices, each orthogonalized by one owner, against every rank orthogonalizing all.

    python tests/benchmarks/bench_muon.py [--rounds 5] [--small]

The same gradients in every step, and the same weights after it as one process, on 2 and on 4 ranks.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import torch
from common import SMALL, Times, Workload, interleaved, load, publish, ratio, table
from torch import nn

import autopar
from autopar.adapters.optimizer_step import own_step
from autopar.runtime.optim.whole_step import step_together
from autopar.runtime.params.sharded_tensor import ShardedTensor


def main() -> None:
    """Time all, print the table, write it to docs/benchmarks.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="a small model; the page is then left alone")
    chosen = parser.parse_args()
    work, before, rows = SMALL if chosen.small else Workload(layers=4), load(), []
    for ranks in (2, 4):
        times = autopar.launch(_work, nproc=ranks, args=(work, chosen.rounds, ranks), timeout=500, device="cpu")[0]
        for name, found in times.items():
            cells = [f"{x:.2f}" for x in ratio(found, times["one process, on each rank"])]
            rows.append([ranks, name, f"{min(found.wall) * 1e3:.0f}", f"{min(found.cpu) * 1e3:.0f}", *cells])
    head = ["ranks", "", "ms, min", "of the processor", "to one process: min", "median", "processor"]
    text = f"{chosen.rounds} rounds; {before} before, {load().split(' on ')[0]} after.\n\n{table(head, rows)}"
    print(text) if chosen.small else publish("muon", text)


def _work(work: Workload, rounds: int, ranks: int) -> dict[str, Times]:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    mesh = autopar.init_mesh("cpu", dp=ranks)
    plain, one = _with_gradients(work.model())
    steps: dict[str, Any] = {"one process, on each rank": one.step}
    models = {}
    for name in ("all matrices on every rank", "one owner each"):
        models[name], optimizer = _with_gradients(autopar.parallelize(work.model(), mesh, zero=3))
        steps[name] = optimizer.step if "owner" in name else _together(optimizer)
    found = interleaved(steps, rounds)
    for name, model in models.items():
        whole = model.full_state_dict()
        worst = max(float((whole[n] - p.detach()).abs().max()) for n, p in plain.named_parameters())
        assert worst < 1e-5, f"{name}: weights differ by {worst}"
    return found


def _together(optimizer: torch.optim.Optimizer) -> Any:
    """What it would be without owners."""
    step = own_step(optimizer)
    return lambda: step_together(optimizer, lambda p: isinstance(p, ShardedTensor), False, lambda: step(optimizer))


def _with_gradients(model: Any) -> tuple[Any, torch.optim.Optimizer]:
    """The matrices of the layers get gradients, seeded by their order."""
    matrices: list[nn.Parameter] = []
    for n, p in model.named_parameters():
        if p.dim() == 2 and "layers" in n:
            seeded = torch.Generator().manual_seed(len(matrices))
            p.grad = torch.randn(p.shape, generator=seeded)
            matrices.append(p)
    return model, torch.optim.Muon(matrices, lr=1e-3)


if __name__ == "__main__":
    main()
