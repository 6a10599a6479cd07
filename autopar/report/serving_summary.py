"""A served model as plain JSON values and as tables: what is cached, what fits, how long steps take.

window   layers   heads   key width   value width   dtype   bytes per token and rank
all          32       1         128           128   bf16    16.0 KiB
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from autopar.cost.flops import Requests
from autopar.cost.serving_step import serving_step
from autopar.ir.graph import placeholders
from autopar.ir.storages import bytes_of
from autopar.report.graph_text import DTYPES
from autopar.report.tables import escaped, human_bytes, human_count, human_digits, human_seconds, show_table, table_of
from autopar.steps.packed import CachedLayer, Packed

HEAD = ("window", "layers", "on a rank", "heads", "key width", "value width", "dtype", "bytes per token and rank")
STEPS = (1, 8, 64)  # requests that decode


def cached_layers(packed: Packed) -> list[dict[str, Any]]:
    """A row per window and shape. layers: of the model; heads: of a rank; layers_of_rank and bytes (of a token): of the
    rank that caches most. window: tokens, 0 for all."""
    fullest = fullest_rank(packed)
    groups: dict[Any, list[tuple[int, CachedLayer]]] = {}
    for stage in packed.stages:
        for layer in stage.layers:
            alike = groups.setdefault((layer.kind, layer.key_shape, layer.value_shape, layer.dtype), [])
            alike.append((stage.rank, layer))
    return [
        {
            "window": packed.windows[kind],
            "layers": len(alike),
            "layers_of_rank": sum(rank == fullest for rank, _ in alike),
            "heads": keys[0],
            "key_width": keys[1],
            "value_width": values[1],
            "dtype": DTYPES.get(dtype, str(dtype)),
            "bytes": sum(layer.bytes_per_token for rank, layer in alike if rank == fullest),
        }
        for (kind, keys, values, dtype), alike in sorted(groups.items(), key=lambda item: item[0][0])
    ]


def fullest_rank(packed: Packed) -> int:
    """The coordinate on pp of the ranks that cache most bytes of a request of ``max_length``."""
    kept = [min(window or packed.max_length, packed.max_length) for window in packed.windows]
    sizes: dict[int, int] = {}
    for stage in packed.stages:
        of_stage = sum(kept[layer.kind] * layer.bytes_per_token for layer in stage.layers)
        sizes[stage.rank] = sizes.get(stage.rank, 0) + of_stage
    return max(sizes, key=sizes.__getitem__)


def weight_bytes(packed: Packed) -> dict[str, int]:
    """Bytes of a rank, the fullest one, and of the model. others: buffers and tables of positions."""
    mesh, ranks = packed.plan.mesh, {stage.rank for stage in packed.stages}
    parameters = {r: sum(p.nbytes(mesh) for p in packed.parameters if r in p.ranks) for r in ranks}
    others = dict.fromkeys(ranks, 0)
    known = {s.node for s in packed.signature.inputs if s.kind in ("buffer", "constant")}
    for stage in packed.stages:
        held = known | set(stage.tables.outputs if stage.tables is not None else ())
        inputs = zip(stage.graph.inputs, placeholders(stage.graph.graph), strict=True)
        others[stage.rank] += bytes_of(node for name, node in inputs if name in held)
    most = max(ranks, key=lambda r: parameters[r] + others[r])
    whole = sum(p.nbytes() for p in packed.parameters)
    return {"parameters": parameters[most], "others": others[most], "model": whole}


def serving_steps(packed: Packed, step_tokens: int) -> list[dict[str, Any]]:
    """Estimates of steps: requests that decode, with half of ``max_length`` keys each, and a chunk of a prompt with as
    many. tokens_per_second: of a replica, with a step in flight per pipeline stage."""
    keys = max(packed.max_length // 2, 1)
    chunk = min(step_tokens, packed.max_length)
    steps: list[tuple[str, Requests]] = [("decode", [(1, keys)] * count) for count in STEPS]
    rows = []
    for kind, requests in [*steps, ("prefill", [(chunk, max(keys, chunk))])]:
        found, tokens = serving_step(packed, requests), sum(new for new, _ in requests)
        rows.append(
            {
                "kind": kind,
                "requests": len(requests),
                "tokens": tokens,
                "keys": requests[0][1],
                **dataclasses.asdict(found),
                "tokens_per_second": tokens / found.period,
            }
        )
    return rows


# --- tables --------------------------------------------------------------------------------------------------


def cache_table(packed: Packed) -> tuple[Sequence[str], list[list[str]]]:
    """(head, rows of texts) of `cached_layers`."""
    return HEAD, [_cells(row) for row in cached_layers(packed)]


def _cells(row: dict[str, Any]) -> list[str]:
    numbers = (row[name] for name in ("layers", "layers_of_rank", "heads", "key_width", "value_width"))
    return [str(row["window"] or "all"), *map(str, numbers), row["dtype"], human_bytes(row["bytes"])]


def show_serving(summaries: Sequence[dict[str, Any]], console: Console) -> None:
    """Print summaries of `autopar plan --serve`, one per mesh, as tables; one with "refused" says why there is none."""
    for summary in summaries:
        mesh = ",".join(f"{axis}={size}" for axis, size in summary["mesh"].items())
        if "refused" in summary:
            console.print(f"{mesh}: {escaped(summary['refused'])}")
            continue
        replicas = f"{summary['replicas']} replica{'s' * (summary['replicas'] > 1)}"
        console.print(f"{summary['model']} served on {mesh} ({summary['ranks']} ranks, {replicas})", highlight=False)
        for table in (_layers(summary), _memory(summary), _steps(summary)):
            show_table(console, table)


def _layers(summary: dict[str, Any]) -> Table:
    table = table_of("Cache of keys and values", *HEAD, right=(*HEAD[1:6], HEAD[7]))
    for row in summary["layers"]:
        table.add_row(*_cells(row))
    return table


def _memory(summary: dict[str, Any]) -> Table:
    cache, weights = summary["cache"], summary["weights"]
    table = table_of("Memory of the fullest rank", "what", "value", "", right=("value",))
    table.add_row("weights", human_bytes(weights["parameters"]), f"of {human_bytes(weights['model'])}")
    table.add_row("buffers and tables of positions", human_bytes(weights["others"]), "")
    table.add_row("cache", human_bytes(cache["bytes"]), escaped(cache["from"]))
    table.add_row("of it a token", human_bytes(cache["bytes_per_token"]), "in all layers")
    whole = f"of {summary['max_length']} tokens, in pages of {cache['page_size']}"
    table.add_row("of it a request", human_bytes(cache["bytes_per_request"]), whole)
    for row in cache["windows"]:
        held = f"pages behind a window of {row['window']} are given back"
        table.add_row("", human_digits(row["tokens"]), f"tokens of it at most: {held}")
    table.add_row("requests that fit", human_digits(cache["requests"]), "per replica")
    table.add_row("tokens that fit", human_digits(cache["tokens"]), "per replica, in such requests")
    peak = max(row["peak"] for row in summary["steps"])
    table.add_row("values of a step", human_bytes(peak), "of the largest one below")
    return table


def _steps(summary: dict[str, Any]) -> Table:
    title = f"Steps of a replica, estimated for {summary['device']}, links {summary['links']}, without the host"
    numbers = ("requests", "tokens", "keys of each", "time", "exposed", "tokens/s")
    table = table_of(title, "step", *numbers, right=numbers)
    for row in summary["steps"]:
        counts = (str(row[name]) for name in ("requests", "tokens", "keys"))
        times = (human_seconds(row[name]) for name in ("seconds", "exposed"))
        table.add_row(row["kind"], *counts, *times, human_count(row["tokens_per_second"]))
    return table
