"""A coverage-guided fuzzer of what is read from outside: every input is read, or refused in a sentence.

    pip install -e ".[fuzz]"
    python -m tests.malformed.fuzz plan --seconds 600      # or another reader; "all" by default, each in its turn

JSON is changed as JSON (`tests.malformed.judge.broken`), text and bytes as libFuzzer does. The first input that is
neither read nor refused ends the run; its bytes are written to ``crash-...``.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Callable

import atheris

with atheris.instrument_imports(include=["autopar"]):
    from tests.malformed.readers import READERS, Reader, new_folder, problem_with

from tests.malformed.judge import broken

MOST_MB = 4096  # of memory


def _judged(reader: Reader) -> Callable[[bytes], None]:
    def one(data: bytes) -> None:
        if problem := problem_with(reader, data):
            raise RuntimeError(problem)

    return one


def _changed() -> Callable[[bytes, int, int], bytes]:
    """A mutator of JSON."""

    def change(data: bytes, longest: int, seed: int) -> bytes:
        rng = random.Random(seed)
        try:
            tree = json.loads(data)
            for _ in range(rng.randrange(1, 4)):
                tree = broken(tree, rng)[1]
            return json.dumps(tree).encode()[:longest]
        except (ValueError, IndexError, TypeError, RecursionError):
            return bytes(atheris.Mutate(data, longest))

    return change


def fuzz(name: str, seconds: int) -> None:
    """Run one reader; ends the process."""
    reader, corpus = READERS[name], new_folder()
    seeds = reader.seeds()
    for i, seed in enumerate(seeds):
        (corpus / f"seed-{i}").write_bytes(seed)
        reader.read(seed)  # it is no refusal
    longest = 200 if reader.kind == "text" else max(65536, *(2 * len(seed) for seed in seeds))
    arguments = [sys.argv[0], str(corpus), f"-max_total_time={seconds}", f"-rss_limit_mb={MOST_MB}", "-timeout=20",
                 f"-max_len={longest}", "-verbosity=0", "-print_final_stats=1"]  # fmt: skip
    how = {"custom_mutator": _changed()} if reader.kind == "json" else {}
    atheris.Setup(arguments, _judged(reader), **how)
    atheris.Fuzz()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("reader", nargs="?", default="all", choices=[*READERS, "all"])
    parser.add_argument("--seconds", type=int, default=60, help="of each reader")
    given = parser.parse_args()
    if given.reader != "all":
        fuzz(given.reader, given.seconds)
    command = [sys.executable, "-m", "tests.malformed.fuzz", "--seconds", str(given.seconds)]
    bad = [name for name in READERS if subprocess.run([*command, name], check=False).returncode]
    print("nothing found" if not bad else f"found something in: {', '.join(bad)}")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
