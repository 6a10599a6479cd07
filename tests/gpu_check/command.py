"""The command: which checks, on which device, in which order."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

import autopar.api  # what is imported before the fork, no check has to import
import autopar.models.tiny
from autopar.runtime.mesh.devices import RANKS_SHARE_GPUS
from tests.gpu_check import attention, compiled, dropout, experts, facts, offload, paged, ranks, sampling, step
from tests.gpu_check.processes import Check, Machine, answer, run_checks
from tests.gpu_check.rows import FAILED, Row, table, write_json

SECTIONS: dict[str, Callable[[Machine], Sequence[Check]]] = {
    "facts": facts.checks,
    "kernels": attention.checks,
    "paged": paged.checks,
    "experts": experts.checks,
    "dropout": dropout.checks,
    "sampling": sampling.checks,
    "step": step.checks,
    "offload": offload.checks,
    "ranks": ranks.checks,
    "order": compiled.order_checks,
    "speed": compiled.speed_checks,
}

TOGETHER = {
    "kernels": 6,
    "paged": 4,
    "step": 4,
    "offload": 3,
    "ranks": 4,
}  # checks side by side on a GPU: most of each is starting up

EVERY = 5.0  # seconds between two JSON files


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if nothing failed, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_check", description="What works on this machine's GPUs.")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is a GPU")
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"sections: {', '.join(SECTIONS)}")
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument(
        "--ranks-per-gpu", type=int, default=1, metavar="N", help="for machines of few GPUs (NCCL 2.32)"
    )
    parser.add_argument("--match", default="", help="only checks with this in their name")
    given = parser.parse_args(arguments)
    names = [name.strip() for name in given.only.split(",")]
    if unknown := set(names) - set(SECTIONS):
        parser.error(f"unknown sections {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    machine, start = find_machine(given.device, given.quick, given.ranks_per_gpu), time.monotonic()
    if machine is None:
        parser.error("no GPU is there; leave --device away, or say cpu")
    print(f"gpu-check on {machine.device}, {machine.count} ranks, {machine.gpus} GPUs", flush=True)
    rows, written = list[Row](), start
    for row in (row for name in names for row in run_section(name, machine, given.match)):
        rows.append(row)
        if row.verdict == FAILED:
            print(f"FAILED {row.what}, {row.case}: {row.words}", flush=True)
        if time.monotonic() - written > EVERY:  # for who is stopped
            written = time.monotonic()
            write_json(given.json, machine.device, rows, written - start)
    write_json(given.json, machine.device, rows, time.monotonic() - start)
    print(f"\n{table(rows)}\n{time.monotonic() - start:.0f} s; all rows in {given.json}")
    return int(any(row.verdict == FAILED for row in rows))


def find_machine(device: str | None, quick: bool, ranks_per_gpu: int = 1) -> Machine | None:
    """The GPUs, else the CPU; None if a GPU was asked for that is not there."""
    gpus = 0 if device == "cpu" else answer(torch.cuda.device_count) or 0
    if gpus and ranks_per_gpu > 1:
        os.environ[RANKS_SHARE_GPUS] = "1"
    if gpus:
        return Machine("cuda", gpus * ranks_per_gpu, quick, gpus)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return None if device == "cuda" else Machine("cpu", 2, quick)


def run_section(name: str, machine: Machine, match: str = "") -> Iterator[Row]:
    """All rows; a line for each check when it is done. A section that cannot even be laid out is a failed row."""
    try:
        found = [check for check in SECTIONS[name](machine) if match in check.name]
    except Exception as error:
        yield Row(name, "the section", FAILED, words=f"{type(error).__name__}: {error}", section=name)
        return
    rows: dict[str, list[Row]] = {check.name: [] for check in found}
    done = 0
    for check, what in run_checks(found, machine, TOGETHER.get(name, 1) if machine.is_gpu else 1):
        if isinstance(what, Row):
            rows[check.name].append(what)
            yield replace(what, section=name)
            continue
        done, failed = done + 1, sum(row.verdict == FAILED for row in rows[check.name])
        wrong = f", {failed} FAILED" if failed else ""
        print(
            f"[{name} {done}/{len(found)}] {check.name}: {len(rows[check.name])} rows{wrong}, {what:.1f} s", flush=True
        )


assert autopar.api and autopar.models.tiny
