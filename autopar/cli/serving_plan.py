"""`autopar plan --serve`: what a served model caches, how many requests fit, how long its steps take."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from autopar.api import examples_of, load_adapters, planned_with
from autopar.chips import CHIPS
from autopar.cli.compiling import configs, shown_progress
from autopar.compile.model import plan_model
from autopar.compile.parameters import for_whole_batch
from autopar.cost.hardware import Links
from autopar.ir.mesh import Mesh
from autopar.options import Options
from autopar.plan import Plan
from autopar.report.dump.dump import Dumper
from autopar.report.serving_summary import cached_layers, serving_steps, weight_bytes
from autopar.rewrite.compilation import Observer
from autopar.serve_model import PAGE_SIZES, check_positions, generation_facts, packed_model
from autopar.serving.packed_runner import page_counts
from autopar.serving.pages import most_pages
from autopar.steps.packed import Packed
from autopar.values import byte_count

LEFT = 0.9  # of the memory that the weights leave, as `autopar.serve` takes it
DEFAULT_LENGTH, DEFAULT_STEP = 4096, 512


def serving_summary(args: argparse.Namespace, mesh: Mesh, options: Options, folder: Path | None) -> dict[str, Any]:
    """Plain JSON values, which `autopar.report.serving_summary.show_serving` prints. Raises ValueError where not one
    request of --max-length fits."""
    dumper = Dumper(folder, title=f"autopar plan --serve: {args.config} on {mesh}") if folder else None
    cache, hf = byte_count("cache", args.cache) if args.cache is not None else None, configs()
    model = hf.build(hf.load_config(args.config), hf.dtype_named(args.dtype))
    facts = generation_facts(model, None)
    length = args.max_length or min(DEFAULT_LENGTH, facts.max_length or DEFAULT_LENGTH)
    check_positions(model, facts, length)
    with shown_progress() as observer:
        observers: list[Observer] = [observer, *([dumper] if dumper else [])]
        fixed = parameter_plan(model, mesh, options)
        model = model.eval().requires_grad_(False)
        packed = packed_model(model, facts, mesh, fixed, length, observers=observers)
    name = f"{type(model).__name__} ({args.dtype})"
    if dumper:
        dumper.add_packed(packed, summary=[("model", name)])
    return _summary(packed, name, cache, args.step_tokens or DEFAULT_STEP)


def parameter_plan(model: nn.Module, mesh: Mesh, options: Options) -> Plan:
    """As `autopar.parallelize` plans the parameters."""

    def plan_of(batch: Mapping[str, Any]) -> Plan:
        found, _ = for_whole_batch(
            lambda whole: plan_model(model, whole, mesh, options), lambda found: found[0], model, batch, mesh, options
        )
        return found

    load_adapters(model)
    names = {name for name, _ in model.named_parameters()}
    return planned_with(examples_of(model, None), model, True, plan_of).of_parameters(names)


def _summary(packed: Packed, model: str, asked: int | None, step_tokens: int) -> dict[str, Any]:
    mesh, options = packed.plan.mesh, packed.plan.options
    weights, size = weight_bytes(packed), PAGE_SIZES["cuda"]
    held = weights["parameters"] + weights["others"]
    if asked is not None:
        cache, source = asked, "as asked for"
    else:
        cache, source = _left(options, held)
    needed = most_pages(packed.windows, size, packed.max_length, step_tokens)
    counts = page_counts(packed, size, cache, step_tokens)
    rows = cached_layers(packed)
    by_window = {window: sum(row["bytes"] for row in rows if row["window"] == window) for window in packed.windows}
    of_request = sum(n * size * by_window[w] for n, w in zip(needed, packed.windows, strict=True))
    requests = (counts.pages[0] - 1) // needed[0]
    if requests < 1:
        least = of_request + sum(size * x for x in by_window.values())  # with a page for padding
        raise ValueError(
            f"cache: a request of {packed.max_length} tokens needs {least} bytes per rank, found {cache}; raise it, "
            "lower max_length or use more ranks"
        )
    return {
        "model": model,
        "mesh": mesh.sizes,
        "ranks": mesh.world_size,
        "replicas": mesh.data_size,
        "max_length": packed.max_length,
        "step_tokens": step_tokens,
        "layers": rows,
        "weights": weights,
        "cache": {
            "bytes": cache,
            "from": source,
            "page_size": size,
            "bytes_per_token": sum(by_window.values()),
            "bytes_per_request": of_request,
            "requests": requests,
            "tokens": requests * packed.max_length,
            "windows": [
                {"window": w, "tokens": min(n * size, packed.max_length)}
                for n, w in zip(needed, packed.windows, strict=True)
                if w
            ],
        },
        "steps": serving_steps(packed, step_tokens),
        "device": options.target_hardware,
        "links": str(Links.of(options, packed.plan.mesh)),
        "seconds": {name: round(s, 3) for name, s in packed.timings.items()},
    }


def _left(options: Options, held: int) -> tuple[int, str]:
    """(bytes, where they come from) of a cache that is not asked for."""
    if options.memory_limit:
        whole, share, source = int(options.memory_limit), 1.0, "what the memory limit leaves"
    else:
        chip = options.target_hardware
        whole, share, source = (
            int(CHIPS[chip].capacity),
            LEFT,
            f"{LEFT:.0%} of what the weights leave of {chip}'s memory",
        )
    if held >= whole:
        raise ValueError(
            f"cache: the weights of a rank need {held} bytes, found a memory of {whole}; use more ranks on tp or pp"
        )
    return int(share * (whole - held)), source
