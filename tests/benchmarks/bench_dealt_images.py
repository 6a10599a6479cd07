"""A step of Qwen2.5-VL on images of very unlike sizes, dealt to the ranks of dp by their cost, against each rank
computing its own.

    python tests/benchmarks/bench_dealt_images.py [--rounds 5] [--small]

Patches that a rank computes, padding included, time of its processor, what it sends; the losses and the gradients of
both are compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import warnings
from typing import Any

import torch
from bench_encoders import IMAGE, Sizes, qwen
from common import interleaved, load, publish, ratio, slowest, table
from torch import Tensor

import autopar
from autopar.runtime.inputs.image_dealing import division

OWN, DEALT = "its own", "dealt"
LEAST, MOST = 64, 1024  # patches of an image
CASES = {4: 2}  # ranks of dp -> images of each
FULL, SMALL = Sizes(128, 6), Sizes(64, 2)


def grids(images: int, least: int, most: int, chance: random.Random) -> Tensor:
    """Sizes of images, log-uniform in their patches, of sides that are multiples of four patches."""
    found = []
    for _ in range(images):
        side = math.sqrt(math.exp(chance.uniform(math.log(least), math.log(most)))) / 4
        found.append([1, 4 * max(round(side * 0.8), 1), 4 * max(round(side / 0.8), 1)])
    return torch.tensor(found)


def batch_of(sizes: Tensor) -> dict[str, Tensor]:
    """An image and 16 words in each row."""
    torch.manual_seed(1)
    counts = (sizes.prod(-1) // 4).tolist()
    ids = torch.randint(4, 512, (len(counts), MOST // 4 + 80))
    for row, count in enumerate(counts):
        ids[row, 1 : 1 + count] = IMAGE
    batch = {"input_ids": ids, "labels": ids.masked_fill(ids == IMAGE, -100), "image_grid_thw": sizes}
    pixels = torch.randn(int(sizes.prod(-1).sum()), 3 * 2 * 14 * 14)
    return batch | {"mm_token_type_ids": (ids == IMAGE).long(), "pixel_values": pixels}


def main() -> None:
    """Time all, print the tables, write them to docs/benchmarks.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="small models; the page is then left alone")
    chosen = parser.parse_args()
    before, rows = load(), []
    for ranks in CASES:
        how = ranks, SMALL if chosen.small else FULL, chosen.rounds
        there, found = autopar.launch(_work, nproc=ranks, args=how, timeout=550, device="cpu")[0]
        for way, (times, patches, sent) in found.items():
            cells = [f"{x:.2f}" for x in ratio(times, found[OWN][0])]
            seconds = f"{min(times.wall) * 1e3:.0f}", f"{min(times.cpu) * 1e3:.0f}"
            every = f"{patches * ranks / there:.2f}"
            rows.append([f"dp={ranks}", way, patches, every, *seconds, *cells, f"{sent / 1e6:.2f}"])
    head = ["", "images", "patches of a rank", "of all ranks, to those there are", "ms, min", "of the processor"]
    head += ["ratio: min", "median", "processor", "MB sent"]
    text = f"{chosen.rounds} rounds; {before} before, {load().split(' on ')[0]} after.\n\n{table(head, rows)}"
    text += f"\n\n{_simulated()}"
    print(text) if chosen.small else publish("dealt images", text)


def _work(ranks: int, sizes: Sizes, rounds: int) -> Any:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    mesh = autopar.init_mesh("cpu", dp=ranks)
    at, parts = autopar.dp_rank_and_size(mesh)
    images = grids(ranks * CASES[ranks], LEAST, MOST, random.Random(0))
    whole, own = batch_of(images), images.chunk(parts)[at]
    start = int(images[: at * len(own)].prod(-1).sum())
    mine = {name: x.chunk(parts)[at] for name, x in whole.items()}
    mine["pixel_values"] = whole["pixel_values"][start : start + int(own.prod(-1).sum())]
    steps, losses, gradients, found = {}, [], [], {}
    for way in (OWN, DEALT):
        model, _ = qwen(dataclasses.replace(sizes, images=1))
        parallel = autopar.parallelize(model, mesh, padding="bucket", deal_images=way == DEALT)
        losses.append(float(parallel.train_step(**mine)))
        gradients.append(parallel.full_gradients())
        sent = slowest(sum(x.bytes for x in parallel.traffic().values()))
        found[way] = parallel._fitter.images._patches["image"], sent  # type: ignore[union-attr]
        steps[way] = lambda parallel=parallel: parallel.train_step(**mine)
    assert abs(losses[0] - losses[1]) < 1e-4, losses
    assert max(float((x - gradients[1][n]).abs().max()) for n, x in gradients[0].items() if x is not None) < 1e-4
    times = interleaved(steps, rounds)
    return int(images.prod(-1).sum()), {way: (times[way], *found[way]) for way in steps}


def _simulated() -> str:
    """The division alone: what the slowest rank computes, to an even part of what there is."""
    rows = []
    for ranks in (8, 64, 512):
        ratios: list[list[float]] = []
        for seed in range(5):
            images = grids(4 * ranks, 256, 4096, random.Random(seed))
            homes = torch.arange(ranks).repeat_interleave(4).unsqueeze(1)
            found = division(torch.cat([homes, homes * 0, images], 1), ranks, 1)
            ways = (found, dataclasses.replace(found, owners=found.homes))
            mean = sum(found.sizes) / ranks
            pairs = (images[:, 0] * (images[:, 1] * images[:, 2]) ** 2).double()
            worst = [
                float(torch.zeros(ranks).double().index_add_(0, torch.tensor(w.owners), pairs).max()) for w in ways
            ]
            ratios.append([w.patches() / mean for w in ways] + [x * ranks / float(pairs.sum()) for x in worst])
        means = torch.tensor(ratios).mean(0).tolist()
        rows.append([ranks, *(f"{means[i]:.2f}" for i in (1, 0, 3, 2))])
    head = ["ranks, 4 images of 256 to 4,096 patches each", "patches: its own", DEALT, "pairs: its own", DEALT]
    return table(head, rows)


if __name__ == "__main__":
    main()
