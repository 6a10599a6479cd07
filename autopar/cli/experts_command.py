"""`autopar experts`: what each token dispatcher sends, and how long that takes.

    autopar experts --ranks 64 --per-node 8 --experts 256 --top-k 8 --hidden 7168 --tokens 4096
    autopar experts --ranks 64 --per-node 8 --experts 256 --top-k 8 --hidden 7168 --groups 8 --limit 4

Routing is even. Times are estimates of exchanges that nothing hides; their ratios are what they are for.
"""

from __future__ import annotations

import argparse

from rich.table import Table

from autopar.cli.command import Command, console_of_results
from autopar.cli.shared_arguments import add_target_hardware, positive
from autopar.cost.expert_traffic import DispatchCost, dispatch_costs
from autopar.cost.hardware import device_named
from autopar.cost.topology import Topology
from autopar.report.tables import human_digits, show_table
from autopar.token_dispatchers import TOKEN_DISPATCHERS, Routing
from autopar.values import DTYPES, dtype_name

_BYTES = dict(zip(DTYPES, (2, 2, 4, 8), strict=True))
_INSIDE = Topology(bandwidth=300e9, latency=5e-6)  # NVLink of an A100, each direction: NVIDIA's data sheet
_WIDTH = 160  # when stdout is no terminal


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ranks", type=positive, required=True, metavar="N", help="ranks of the axis ep")
    add("--per-node", type=positive, metavar="N", help="ranks of a node (default: all in one)")
    add("--experts", type=positive, required=True, metavar="N", help="experts per layer")
    add("--top-k", type=positive, required=True, metavar="N", help="experts that a token chooses")
    add("--hidden", type=positive, required=True, metavar="N", help="width of a token")
    add("--tokens", type=positive, default=4096, metavar="N", help="tokens per rank (default: %(default)s)")
    add("--groups", type=positive, default=1, metavar="N", help="groups of experts (default: %(default)s)")
    add("--limit", type=positive, metavar="N", help="groups that a token may use (default: all)")
    add("--dtype", type=dtype_name, choices=tuple(DTYPES), default="bfloat16", help="of tokens (default: %(default)s)")
    add_target_hardware(parser, "the chip whose links connect nodes")
    add("--inside", default="", metavar="KIND[:B/S[:S]]", help=f"links within a node (default: {_INSIDE})")
    add("--between", default="", metavar="KIND[:B/S[:S]]", help="links between nodes (default: the device's)")


def _run(args: argparse.Namespace) -> int:
    per_node = args.per_node or args.ranks
    routing = Routing(args.experts, args.top_k, args.ranks, per_node, args.groups, args.limit or args.groups)
    size, links = _BYTES[args.dtype], device_named(args.target_hardware).links
    inside = Topology.parse(args.inside, _INSIDE) if args.inside else _INSIDE
    between = Topology.parse(args.between, links) if args.between else links
    costs = dispatch_costs(routing, args.tokens, args.hidden, size, inside, between)
    console = console_of_results(_WIDTH)
    for line in (*_heading(args, routing, inside, between), *_rows(args.tokens, args.hidden * size, routing)):
        console.print(line, soft_wrap=True)
    show_table(console, _table(costs))
    for line in _notes(routing, costs, inside, between):
        console.print(line, soft_wrap=True)
    return 0


def _heading(args: argparse.Namespace, routing: Routing, inside: Topology, between: Topology) -> list[str]:
    where = f"{routing.nodes} node{'s' * (routing.nodes > 1)} of {routing.per_node} ranks"
    limit = f", from {routing.limit} of {routing.groups} groups" if routing.limit < routing.groups else ""
    return [
        f"{routing.experts} experts on {where}, {routing.top_k} per token{limit}; {args.tokens} tokens x "
        f"{args.hidden} per rank, {args.dtype}",
        f"links: {inside} inside of a node" + (f", {between} between nodes" if routing.nodes > 1 else ""),
    ]


def _rows(tokens: int, row: int, routing: Routing) -> list[str]:
    even, worst = tokens * routing.top_k, routing.worst_rows(tokens)
    even_mb, worst_mb = (human_digits(rows * row / 1e6) for rows in (even, worst))
    return [f"rows of a rank's experts: {even} if routing is even ({even_mb} MB), at worst {worst} ({worst_mb} MB)"]


def _table(costs: list[DispatchCost]) -> Table:
    table = Table(caption="per rank, layer and step, forward and backward", caption_justify="left")
    for column in ("token dispatcher", "copies inside", "between nodes", "MB inside", "between nodes", "ms"):
        table.add_column(column, justify="left" if column == "token dispatcher" else "right", no_wrap=True)
    least = min(cost.seconds for cost in costs)
    for c in costs:
        copies, sizes = (c.copies_inside, c.copies_between), (c.bytes_inside / 1e6, c.bytes_between / 1e6)
        cells = (*(f"{n:.2f}" for n in copies), *map(human_digits, sizes), human_digits(c.seconds * 1e3))
        table.add_row(c.name, *cells, style="bold" if c.seconds == least else None)
    return table


def _notes(routing: Routing, costs: list[DispatchCost], inside: Topology, between: Topology) -> list[str]:
    fastest = min(costs, key=lambda c: c.seconds)
    title, took = TOKEN_DISPATCHERS[fastest.name].title, human_digits(fastest.seconds * 1e3)
    lines = [f"least time: {fastest.name} ({took} ms by estimate): {title}"]
    if routing.nodes > 1:
        n = routing.per_node
        lines.append(
            f'on a mesh: topology="ep%{n}={inside},ep/{n}={between}", and token_dispatcher="auto" or one of these names'
        )
        lines.append(f"a token reaches {routing.reached(routing.nodes):.2f} nodes, at most {routing.most_nodes}")
    if routing.limit < routing.groups and routing.nodes > 1 and routing.groups % routing.nodes:
        lines.append(
            f"warning: {routing.groups} groups of experts do not divide over {routing.nodes} nodes, so {routing.limit} "
            "groups are on more nodes than that; use a number of groups that is a multiple of that of nodes"
        )
    return lines


EXPERTS = Command("experts", "compare token dispatchers of expert parallelism", _add_arguments, _run)
