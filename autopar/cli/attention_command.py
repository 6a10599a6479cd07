"""`autopar attention`: the cost of every algorithm for one attention over ranks, and the one that a plan would choose.

    autopar attention --ranks 8 --seq 131072 --heads 32 --kv-heads 8 --head-dim 128 --topology switch
    autopar attention --ranks 4 --seq 24000 --heads 32 --head-dim 128 --topology ring:12e9 --svg timelines.svg

Bytes are those of the rank that sends most. Times are estimates; their ratios are what they are for.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from autopar.cli.command import Command
from autopar.cli.shared_arguments import add_option, add_target_hardware, positive, rate
from autopar.options import DECLARED
from autopar.values import DTYPES, dtype_name

_OFTEN = (
    "--ranks", "--seq", "--heads", "--kv-heads", "--head-dim", "--full", "--window", "--target-hardware", "--topology",
    "--attention", "--svg",
)  # fmt: skip


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ranks", type=positive, required=True, metavar="N", help="ranks of the axis cp")
    add("--seq", type=positive, required=True, metavar="N", help="queries per example, over all ranks")
    add("--heads", type=positive, required=True, metavar="N", help="query heads")
    add("--kv-heads", type=positive, metavar="N", help="key heads (default: as many as query heads)")
    add("--head-dim", type=positive, default=128, metavar="N", help="width of a head (default: %(default)s)")
    add("--batch", type=positive, default=1, metavar="N", help="examples (default: %(default)s)")
    add("--kv-seq", type=positive, metavar="N", help="keys, for cross-attention (default: as many as queries)")
    mask = parser.add_mutually_exclusive_group()
    mask.add_argument("--causal", action="store_true", help="no later keys (default without --kv-seq)")
    mask.add_argument("--full", action="store_true", help="all keys")
    add("--window", type=positive, default=0, metavar="N", help="only keys less than N tokens away")
    add("--dtype", type=dtype_name, choices=tuple(DTYPES), default="bfloat16", help="of q, k, v (default: %(default)s)")
    add_target_hardware(parser, "the chip of a rank")
    add("--topology", default="switch", metavar="KIND[:B/S[:S]]", help="ring, mesh or switch (default: %(default)s)")
    add("--bandwidth", type=rate, metavar="B/S", help="of a link, such as 50e9 or 50GB (default: the device's)")
    add("--latency", type=float, metavar="S", help="latency of a message in seconds (default: the device's)")
    add_option(parser, DECLARED["attention"])
    add_option(parser, DECLARED["cp_load_balance"])
    add_option(parser, DECLARED["documents"])
    add("--svg", type=Path, metavar="FILE", help="draw the timelines of all algorithms")


def _run(args: argparse.Namespace) -> int:
    from autopar.cli.algorithms_compared import compare_algorithms

    return compare_algorithms(args)


ATTENTION = Command("attention", "compare algorithms of context parallelism", _add_arguments, _run, _OFTEN)
