"""`autopar verify`: run a model on local processes and compare with one process; exits 1 on mismatch."""

from __future__ import annotations

import argparse

from autopar.cli.command import Command
from autopar.cli.shared_arguments import OFTEN, add_model


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, seq=16, batch=4, dtype="float64")


def _run(args: argparse.Namespace) -> int:
    from autopar.cli.compiling import asked_mesh, asked_options, configs

    hf = configs()
    from autopar.cli.verify_run import verify_config  # needs transformers

    config, mesh, options = hf.load_config(args.config), asked_mesh(args.mesh), asked_options(args)
    return verify_config(config, mesh, options, seq=args.seq, batch=args.batch, dtype=hf.dtype_named(args.dtype))


VERIFY = Command(
    "verify", "run on local processes and compare with one process; exits 1 on mismatch", _add_arguments, _run, OFTEN
)
