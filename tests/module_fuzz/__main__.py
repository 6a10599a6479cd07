"""`python -m tests.module_fuzz --programs 20000 --seed 7 --workers 2`"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from pathlib import Path

os.environ.setdefault("AUTOPAR_CACHE", "off")  # what is tested is the compiler

import torch
from tqdm import tqdm

from tests.module_fuzz.check import FAILURES, Result, checked
from tests.module_fuzz.program import SHARES, Program, each, programs
from tests.module_fuzz.script import script
from tests.module_fuzz.shrink import small
from tests.module_fuzz.tally import Tally


def _checked(job: tuple[int, Program, bool]) -> tuple[int, Program, Result]:
    number, program, shrinks = job
    result = checked(program, f"fuzz_{number}")
    if result.failed and shrinks:
        program, result = small(program, result, f"fuzz_{number}")
    return number, program, result


def _start() -> None:
    torch.set_num_threads(1)
    sys.dont_write_bytecode = True


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.module_fuzz")
    parser.add_argument("--programs", type=int, default=500, help="how many are drawn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one of them")
    parser.add_argument(
        "--each", nargs="?", const="".join(SHARES), metavar="KINDS", help="every piece alone instead, of these kinds"
    )
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--scripts", type=Path, help="a folder for scripts of what fails; default: printed")
    given = parser.parse_args()
    every = each(given.each) if given.each else programs(given.seed, given.programs)
    jobs = [(i, program, not given.no_shrink) for i, program in enumerate(every) if given.only in (None, i)]
    tally, context = Tally(), multiprocessing.get_context("fork")
    bar = tqdm(total=len(jobs), smoothing=0.02, mininterval=1.0)
    with context.Pool(given.workers, _start, maxtasksperchild=500) as pool:
        for number, program, result in pool.imap_unordered(_checked, jobs):
            if tally.add(program, result):
                _tell(program, result, number, given.scripts, bar)
            bar.set_postfix({kind: n for kind, n in tally.kinds.items()}, refresh=False)
            bar.update()
    bar.close()
    print(tally)
    sys.exit(any(tally.kinds[kind] for kind in FAILURES))


def _tell(program: Program, result: Result, number: int, folder: Path | None, bar: tqdm) -> None:  # type: ignore[type-arg]
    text = f"program {number}, {result.kind}: {result.text}\n{result.where}"
    if folder is None:
        bar.write(script(program, text))
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.kind}_{number}.py"
    path.write_text(script(program, text), encoding="utf-8")
    bar.write(f"{path}: {' + '.join(program.names())}: {result.text[:150]}")


if __name__ == "__main__":
    main()
