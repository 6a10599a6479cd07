"""`autopar flight`: who waited for whom when a collective failed, from the files that ranks wrote then.

autopar flight ~/.cache/autopar/flight/JOB
autopar flight FOLDER --last 20
"""

from __future__ import annotations

import argparse
from pathlib import Path

from autopar.cli.command import Command, console_of_results


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where ranks wrote them; their logs name it")
    parser.add_argument("--last", type=int, default=0, metavar="N", help="also show the last N events of each rank")


def _run(args: argparse.Namespace) -> int:
    from autopar.report.flight_summary import conclusions, doing, read_flights
    from autopar.report.tables import escaped, show_table, table_of
    from autopar.values import whole_number

    count = whole_number("--last", args.last)
    flights, earlier, unread = read_flights(args.folder)
    console = console_of_results(160)
    table = table_of("When the collective failed", "rank", "host", "did", "for", "of ranks", right=("rank", "for"))
    for one in flights:
        did, seconds, others = doing(one)
        table.add_row(str(one.rank), escaped(one.host), escaped(did), seconds, others)
    show_table(console, table)
    for text in (*conclusions(flights), *unread):
        print(text)
    if earlier:
        print(f"left out, of an earlier failure: ranks {', '.join(map(str, earlier))}")
    for one in flights if count else ():
        table = table_of(
            f"rank {one.rank}", "before the end, s", "took, s", "event", right=("before the end, s", "took, s")
        )
        for event in one.events[-count:]:
            took = "" if event.end is None else f"{event.end - event.start:.4f}"
            table.add_row(f"{one.written - event.start:.3f}", took, escaped(f"{event.kind} {event.what}"))
        show_table(console, table)
    return 0


FLIGHT = Command("flight", "show who waited for whom when a collective failed", _add_arguments, _run)
