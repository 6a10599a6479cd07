"""`autopar replica-store`: the store in which replicas meet (`autopar.Replicas`), on a host that outlives them.

autopar replica-store --port 29600
"""

from __future__ import annotations

import argparse

from autopar.cli.command import Command
from autopar.values import whole_number


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, default=29600, metavar="N", help="to listen on (default: %(default)s)")


def _run(args: argparse.Namespace) -> int:
    import signal
    import socket

    import torch.distributed as dist

    port = whole_number("--port", args.port, 0, 65535)
    try:
        store = dist.TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    except (dist.DistError, RuntimeError) as error:
        raise ValueError(f"replica-store: port {port} cannot be used; choose another with --port") from error
    print(f"AUTOPAR_REPLICA_STORE={socket.gethostname()}:{store.port}", flush=True)
    signal.pause()
    return 0


REPLICA_STORE = Command("replica-store", "host the store in which replicas meet", _add_arguments, _run)
