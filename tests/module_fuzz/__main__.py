"""`python -m tests.module_fuzz --programs 20000 --seed 7 --workers 2`"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Sequence
from multiprocessing.pool import Pool
from pathlib import Path

os.environ.setdefault("AUTOPAR_CACHE", "off")  # what is tested is the compiler

import torch
from tqdm import tqdm

from tests.module_fuzz.check import Result, checked
from tests.module_fuzz.program import ALL, Program, each, programs
from tests.module_fuzz.script import script
from tests.module_fuzz.shrink import small
from tests.module_fuzz.tally import Tally

Job = tuple[int, Program]


def _checked(job: Job) -> tuple[Job, Result]:
    return job, checked(job[1], f"fuzz_{job[0]}")


def _small(failure: tuple[Job, Result]) -> tuple[Job, Result]:
    (number, program), result = failure
    program, result = small(program, result, f"fuzz_{number}_smaller")
    return (number, program), result


def _start() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)  # torch logs what it cannot export
    sys.dont_write_bytecode = True


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.module_fuzz")
    parser.add_argument("--programs", type=int, default=500, help="how many are drawn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first that is run")
    parser.add_argument("--only", type=int, help="the number of one of them")
    parser.add_argument("--each", action="store_true", help="instead of drawn ones: every piece alone")
    parser.add_argument("--kinds", default=ALL, help="of pieces")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--scripts", type=Path, help="a folder for scripts of what fails; default: printed")
    given = parser.parse_args()
    every = each(given.kinds) if given.each else programs(given.seed, given.programs, given.kinds)
    jobs = [(i, program) for i, program in enumerate(every) if i >= given.first and given.only in (None, i)]
    tally = Tally()
    with multiprocessing.get_context("fork").Pool(given.workers, _start, maxtasksperchild=500) as pool:
        failures = _run(pool, jobs, tally)
        print(tally, flush=True)
        told = _tell_each(pool, failures, given.workers, given.scripts)
    print(f"{len(failures)} failures, made small to {len(told)} sets of pieces, which the others have among theirs:")
    for result, program in told:
        print(f"  {result.kind} {program.kinds()}: {' + '.join(program.names())}: {result.text[:120]}")
    print(Counter(f"{result.kind} {program.kinds()}" for result, program in told))
    sys.exit(bool(failures))


def _run(pool: Pool, jobs: Sequence[Job], tally: Tally) -> list[tuple[Job, Result]]:
    """Those that fail."""
    failures = []
    with tqdm(total=len(jobs), smoothing=0.02, mininterval=1.0) as bar:
        for job, result in pool.imap_unordered(_checked, jobs):
            tally.add(result)
            if result.failed:
                failures.append((job, result))
                bar.write(
                    f"{job[0]}, {result.kind}: {' + '.join(job[1].names())}: {result.text[:120]}", file=sys.stderr
                )
            bar.set_postfix(dict(tally.kinds), refresh=False)
            bar.update()
    return failures


def _tell_each(
    pool: Pool, failures: list[tuple[Job, Result]], workers: int, folder: Path | None
) -> list[tuple[Result, Program]]:
    """Makes small and tells what has no cause yet: the smallest first."""
    left = sorted(failures, key=lambda failure: len(failure[0][1].names()))
    causes: list[tuple[str, set[str]]] = []  # kind, names of pieces
    told = []
    with tqdm(total=len(left), desc="made small", mininterval=1.0) as bar:
        while left:
            for job, result in pool.map(_small, left[:workers], chunksize=1):
                names = set(job[1].names())
                if (result.kind, names) not in causes:
                    causes.append((result.kind, names))
                    _tell(job, result, folder)
                    told.append((result, job[1]))
            before, left = len(left), [f for f in left[workers:] if not _explained(f, causes)]
            bar.update(before - len(left))
    return told


def _explained(failure: tuple[Job, Result], causes: list[tuple[str, set[str]]]) -> bool:
    """Whether a smaller program failed of pieces that this one has, too."""
    (_, program), result = failure
    return any(kind == result.kind and names and names <= set(program.names()) for kind, names in causes)


def _tell(job: Job, result: Result, folder: Path | None) -> None:
    number, program = job
    text = script(program, f"program {number}, {result.kind}: {result.text}\n{result.where}")
    if folder is None:
        tqdm.write(text)
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{result.kind}_{number}.py").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
