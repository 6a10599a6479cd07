"""What each rank does in `autopar calibrate`: time operators and collectives, then three small training steps."""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.api import parallelize
from autopar.auto.costed_model import CostedModel
from autopar.auto.machine import this_machine, world_mesh
from autopar.auto.measured_machine import Sizes, levels, measure, stack_of
from autopar.auto.stack_fit import MeasuredStep, fitted
from autopar.auto.timed_steps import timed_steps
from autopar.cost.cluster import Cluster
from autopar.cost.efficiency import stack_named, stack_text
from autopar.cost.layout import Layout
from autopar.models import hf_configs as hf
from autopar.runtime.mesh.devices import choose_device
from autopar.runtime.mesh.process_groups import Groups, init_mesh


@dataclass(frozen=True)
class SmallSteps:
    """A model of few layers, and (rows of a rank, tokens of a row) of three steps."""

    config: Mapping[str, Any]
    sizes: tuple[tuple[int, int], ...]


def _llama(width: int, layers: int, vocabulary: int) -> dict[str, Any]:
    heads = max(2, width // 64)
    return {
        "model_type": "llama", "hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": heads, "vocab_size": vocabulary,
        "max_position_embeddings": 8192, "tie_word_embeddings": False,
    }  # fmt: skip


ON_GPU = SmallSteps(_llama(2048, 4, 32000), ((1, 1024), (1, 4096), (4, 2048)))
ON_CPU = SmallSteps(_llama(256, 3, 1024), ((1, 64), (1, 256), (4, 128)))


def calibrated(base: str, sizes: Sizes | None = None, small: SmallSteps | None = None) -> tuple[str, list[str]]:
    """(text of a stack file, sentences). Collective over the world, which it joins or makes."""
    begin = time.perf_counter()
    device = choose_device(None)
    world = world_mesh().size()
    machine = this_machine(world)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    mesh = init_mesh(None, None, **levels(machine, world))
    start = stack_named(base, machine.chip)
    measured = measure(Groups(mesh), dtype, device, sizes)
    about = f"{world} ranks, {machine.cluster.name}, torch {torch.__version__}, {str(dtype).split('.')[1]}, " + str(
        datetime.date.today()
    )
    stack = stack_of(measured, machine, start, about)
    small = small or (ON_GPU if device.type == "cuda" else ON_CPU)
    steps = small_steps(small, world, dtype, machine.cluster)
    fit = fitted(stack, steps, ("products", "memory", "attention", "attention_backward", "launch", "optimizer"))
    was = [abs(error) for error in fit.before]
    found = replace(fit.stack, error=max(0.02, statistics.median(was)), source=stack.source, guesses=stack.guesses)
    lines = [
        f"measured on {about}, in {time.perf_counter() - begin:.0f} s, all ranks busy",
        f"products {measured.products / 1e9:,.4g} GFLOP/s, memory {measured.memory / 1e9:,.4g} GB/s, "
        f"launch {1e6 * measured.launch:.3g} us, copies {measured.copies / 1e9:,.3g} GB/s, optimizer "
        f"{1e9 * measured.optimizer:.3g} ns per element",
        "; ".join(f"attention {k} {1e3 * a:.3g} ms forward, {1e3 * b:.3g} ms backward"
                  for k, (a, b) in measured.attention.items()),
        *(f"{level}: {speed / 1e9:.3g} GB/s and rank, {1e6 * wait:.3g} us until it starts"
          for level, (speed, wait) in measured.links.items()),
        f"three small steps: off by {', '.join(f'{error:+.0%}' for error in fit.before)} before they were fitted, "
        f"{', '.join(f'{error:+.0%}' for error in fit.errors)} after",
        f"nobody measured {', '.join(found.guesses)}",
    ]  # fmt: skip
    return stack_text(found), lines


def small_steps(small: SmallSteps, world: int, dtype: torch.dtype, cluster: Cluster) -> list[MeasuredStep]:
    """Three training steps on dp over all ranks, measured."""
    torch.manual_seed(0)
    device = choose_device(None)
    model = hf.build(hf.config_of(small.config), dtype, str(device))
    parallel = parallelize(model, init_mesh(dp=world))
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-4)
    found = []
    for rows, seq in small.sizes:
        tokens = torch.randint(small.config["vocab_size"], (rows, seq), device=device)
        seconds = timed_steps(parallel, optimizer, {"input_ids": tokens, "labels": tokens}, device)
        name = str(dtype).removeprefix("torch.")
        costs = CostedModel.from_config(small.config, seq, name).costs(Layout().placement)
        found.append(MeasuredStep(Layout(dp=world, micro_batch=rows), costs, cluster, seconds))
    return found
