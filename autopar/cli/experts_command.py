"""`autopar experts`: what each token dispatcher sends, and how long that takes; with --apart, whether it pays to serve
attention and experts on GPUs of their own.

    autopar experts --ranks 64 --per-node 8 --experts 256 --top-k 8 --hidden 7168 --tokens 4096
    autopar experts --ranks 64 --per-node 8 --experts 256 --top-k 8 --hidden 7168 --groups 8 --group-limit 4
    autopar experts --apart --config CONFIG.json --target-hardware H20 --experts-on L40S --keys 650 --limit 150ms

Routing is even. Times are estimates; their ratios are what they are for. Those of dispatchers hide nothing.
"""

from __future__ import annotations

import argparse
import math
import re

from rich.table import Table

from autopar.chips import CHIPS
from autopar.cli.command import Command, console_of_results
from autopar.cli.shared_arguments import add_target_hardware, config, positive
from autopar.cost.expert_traffic import DispatchCost, dispatch_costs
from autopar.cost.hardware import device_named
from autopar.cost.topology import NamedLinks, Topology
from autopar.report.tables import human_digits, show_table
from autopar.token_dispatchers import TOKEN_DISPATCHERS, Routing
from autopar.values import DTYPE_BYTES, DTYPES, dtype_name

_INSIDE = Topology(bandwidth=300e9, latency=5e-6)  # NVLink of an A100, each direction: NVIDIA's data sheet
_TOKENS, _KEYS, _LIMIT = 4096, 1024, 0.15
_WIDTH = 160  # when stdout is no terminal
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}

_SIZES = ("experts", "top_k", "hidden")  # of both uses of the command
_OF_DISPATCHERS = ("ranks", "per_node", "tokens", "groups", "group_limit")
_DEFAULTS = {"query_group": 1, "vocabulary": 0, "keys": _KEYS, "limit": _LIMIT}
_OF_APART = ("config", "layers", "intermediate", *_DEFAULTS, "experts_on", "price")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ranks", type=positive, metavar="N", help="ranks of the axis ep")
    add("--per-node", type=positive, metavar="N", help="ranks of a node (default: all in one)")
    add("--experts", type=positive, metavar="N", help="experts per layer")
    add("--top-k", type=positive, metavar="N", help="experts that a token chooses")
    add("--hidden", type=positive, metavar="N", help="width of a token")
    add("--tokens", type=positive, metavar="N", help=f"tokens per rank (default: {_TOKENS})")
    add("--groups", type=positive, metavar="N", help="groups of experts (default: 1)")
    add("--group-limit", type=positive, metavar="N", help="groups that a token may use (default: all)")
    add("--dtype", type=dtype_name, choices=tuple(DTYPES), default="bfloat16", help="of tokens (default: %(default)s)")
    add_target_hardware(parser, "the chip")
    add(
        "--inside",
        default="",
        metavar="KIND[:B/S[:S]]",
        help=f"links within a node (default: {_INSIDE}; --apart: the chip's)",
    )
    add("--between", default="", metavar="KIND[:B/S[:S]]", help="links between nodes (default: the chip's)")
    add("--apart", action="store_true", help="plan to serve attention and experts on GPUs of their own")
    add = parser.add_argument_group("with --apart").add_argument
    add("--config", type=config, metavar="CONFIG.json", help="a transformers config.json, or sizes:")
    add("--layers", type=positive, metavar="N", help="layers of experts")
    add("--intermediate", type=positive, metavar="N", help="width inside an expert")
    add("--query-group", type=positive, metavar="N", help="query heads per key head (default: 1)")
    add("--vocabulary", type=positive, metavar="N", help="rows of the embedding (default: none)")
    add("--keys", type=positive, metavar="N", help=f"tokens that a request has (default: {_KEYS})")
    add("--limit", type=_seconds, metavar="TIME", help="most for a token, such as 150ms (default: 150ms)")
    add("--experts-on", type=str.upper, choices=tuple(CHIPS), metavar="CHIP", help="experts' chip (default: the same)")
    add("--price", type=_prices, metavar="X[,Y]", help="of a GPU per hour; Y: of experts'")


def _seconds(text: str) -> float:
    """From "150ms" or "0.15s"."""
    found = re.fullmatch(r"([0-9.]+(?:e-?[0-9]+)?) *(s|ms|us)", text.strip())
    try:
        value = float(found[1]) * _UNITS[found[2]] if found else 0.0
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(
            f"expected a time with a unit, such as 150ms, found {text!r} (of groups: --group-limit)"
        )
    return value


def _prices(text: str) -> tuple[float, float]:
    """(of a GPU with attention, of one with experts)."""
    try:
        prices = [float(word) for word in text.split(",")]
    except ValueError:
        prices = []
    if len(prices) not in (1, 2) or not all(0 < price < math.inf for price in prices):
        raise argparse.ArgumentTypeError(f"expected one or two prices above 0, such as 1.85,1.08, found {text!r}")
    return prices[0], prices[-1]


def _run(args: argparse.Namespace) -> int:
    _check(args)
    if args.apart:
        for name, value in _DEFAULTS.items():
            setattr(args, name, getattr(args, name) or value)
        from autopar.cli.disaggregation_plan import plan_disaggregation

        return plan_disaggregation(args)
    return _compare(args, args.tokens or _TOKENS, args.groups or 1)


def _check(args: argparse.Namespace) -> None:
    """Raises ValueError for options of the other use of the command, and for missing ones."""
    foreign, needed = list(_OF_DISPATCHERS), [*_SIZES, "layers", "intermediate"]
    hint = "is of the comparison without --apart; leave it out"
    if not args.apart:
        foreign, needed, hint = list(_OF_APART), ["ranks", *_SIZES], "is of plans with --apart; add --apart"
    elif args.config:
        foreign, needed = [*foreign, *needed, "query_group", "vocabulary"], []
        hint = "is not read beside --apart --config; leave it out"
    for name in foreign:
        if (value := getattr(args, name)) is not None:
            raise ValueError(f"experts: {_flag(name)} {hint}, found {value}")
    if missing := [_flag(name) for name in needed if getattr(args, name) is None]:
        way = "give them, or a model by --config" if args.apart else "give them, or use --apart"
        raise ValueError(f"experts: needs {', '.join(missing)}, found none; {way}")
    if args.apart and args.price and args.price[0] != args.price[1] and not args.experts_on:
        raise ValueError("experts: a second price is of another chip; name it by --experts-on")
    if args.apart and not args.config and not args.top_k <= args.experts > 1:
        raise ValueError(
            f"experts: needs two experts or more, and top_k up to their number, found {args.experts} and "
            f"top_k={args.top_k}"
        )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _compare(args: argparse.Namespace, tokens: int, groups: int) -> int:
    per_node = args.per_node or args.ranks
    routing = Routing(args.experts, args.top_k, args.ranks, per_node, groups, args.group_limit or groups)
    size, links = DTYPE_BYTES[args.dtype], device_named(args.target_hardware).card
    inside = Topology.parse(args.inside, _INSIDE) if args.inside else _INSIDE
    between = Topology.parse(args.between, links) if args.between else links
    costs = dispatch_costs(
        routing, tokens, args.hidden, size, NamedLinks(inside, per_node), NamedLinks(between, routing.nodes)
    )
    console = console_of_results(_WIDTH)
    for line in (*_heading(args, tokens, routing, inside, between), *_rows(tokens, args.hidden * size, routing)):
        console.print(line, soft_wrap=True)
    show_table(console, _table(costs))
    for line in _notes(routing, costs, inside, between):
        console.print(line, soft_wrap=True)
    return 0


def _heading(args: argparse.Namespace, tokens: int, routing: Routing, inside: Topology, between: Topology) -> list[str]:
    where = f"{routing.nodes} node{'s' * (routing.nodes > 1)} of {routing.per_node} ranks"
    limit = f", from {routing.limit} of {routing.groups} groups" if routing.limit < routing.groups else ""
    return [
        f"{routing.experts} experts on {where}, {routing.top_k} per token{limit}; {tokens} tokens x "
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


EXPERTS = Command(
    "experts",
    "compare token dispatchers of expert parallelism; plan experts on GPUs of their own",
    _add_arguments,
    _run,
)
