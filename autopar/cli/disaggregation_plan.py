"""`autopar experts --apart`: the best deployments of attention and experts, on GPUs of their own and together."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from autopar.chips import CHIPS
from autopar.cli.command import console_of_results
from autopar.cost.hardware import device_named
from autopar.cost.roles import TP, ExpertLayers, layers_of_sizes
from autopar.cost.topology import Topology
from autopar.planner.experts.disaggregation import Deployment, RoleChip, best_apart, best_together
from autopar.report.disaggregation_summary import show_deployments
from autopar.values import DTYPE_BYTES

_CAPTURED = 16  # least tokens of a captured sequence
_WIDTH = 160  # when stdout is no terminal


def plan_disaggregation(args: argparse.Namespace) -> int:
    """Run it. Returns the exit code; raises ValueError for bad input."""
    names = args.target_hardware, args.experts_on or args.target_hardware
    prices = args.price or (0.0, 0.0)
    chips = (_chip(args, names[0], prices[0]), _chip(args, names[1], prices[1]))
    title, layers, notes = _of_config(args) if args.config else _of_sizes(args)
    apart = best_apart(layers, chips, args.limit)
    together: list[Deployment | str] = []
    for chip in dict.fromkeys(chips):
        for overlapped in (False, True):
            try:
                together.append(best_together(layers, chip, args.limit, overlapped))
            except ValueError as error:
                together.append(f"on {chip.name}: {error}")
    heading = (
        f"{title}: {layers.layers} layers of {layers.num_experts} experts, {layers.top_k} per token; each request has "
        f"{args.keys} tokens and gets one more in at most {args.limit * 1e3:.4g} ms"
    )
    show_deployments([heading, *notes], layers.layers, apart, together, console_of_results(_WIDTH))
    return 0


def _chip(args: argparse.Namespace, name: str, price: float) -> RoleChip:
    """Its row of the table, with the speed that products reach, and the links that the arguments name."""
    chip, device = CHIPS[name], device_named(name)
    inside, links = Topology(bandwidth=chip.inside), device.card
    if args.inside:
        inside = Topology.parse(args.inside, inside)
    if args.between:
        links = Topology.parse(args.between, links)
    speeds: dict[str, Any] = {"flops": device.speed(args.dtype), "inside": inside.bandwidth, "links": links.bandwidth}
    return RoleChip(name, dataclasses.replace(chip, **speeds), price)


def _of_sizes(args: argparse.Namespace) -> tuple[str, ExpertLayers, list[str]]:
    layers = layers_of_sizes(
        layers=args.layers, hidden=args.hidden, intermediate=args.intermediate, num_experts=args.experts,
        top_k=args.top_k, query_group=args.query_group, vocabulary=args.vocabulary, keys=args.keys,
        size=DTYPE_BYTES[args.dtype],
    )  # fmt: skip
    return f"a decoder of width {args.hidden} ({args.dtype})", layers, []


def _of_config(args: argparse.Namespace) -> tuple[str, ExpertLayers, list[str]]:
    """From the graphs that would serve the model, for each tp that it can be sharded over; and why not over others."""
    import torch

    from autopar.cli.compiling import configs, shown_progress  # loads torch
    from autopar.compile.serving import compile_packed
    from autopar.cost.packed_roles import check_experts, layers_of_graphs
    from autopar.ir.mesh import Mesh
    from autopar.options import Options
    from autopar.serve_model import generation_facts
    from autopar.steps.packed import Packed

    hf = configs()
    config, dtype = hf.load_config(args.config), hf.dtype_named(args.dtype)
    graphs, notes = dict[int, Packed](), list[str]()
    with shown_progress() as observer:
        for tp in TP:
            model = hf.build(config, dtype).eval().requires_grad_(False)
            facts = generation_facts(model, None)
            _check_keys(args.keys, facts.max_length, type(model).__name__)
            row = torch.empty(1, max(args.keys, _CAPTURED), dtype=torch.int64, device="meta")
            try:
                graphs[tp] = compile_packed(
                    model, {facts.tokens: row}, facts.tokens, Mesh.of(tp=tp), Options(), observers=[observer]
                )
            except ValueError as error:
                if tp == 1:
                    raise
                notes.append(f"without tp={tp}: {error}")
            check_experts(graphs[1])
    return f"{type(model).__name__} ({args.dtype})", layers_of_graphs(graphs, args.keys), notes


def _check_keys(keys: int, most: int | None, model: str) -> None:
    if most and keys > most:
        raise ValueError(f"keys: {keys} tokens are beyond the {most} positions of {model}; use at most {most}")
