"""Every reader of the fuzzer reads what was written for it, and reads or refuses a few inputs with something wrong."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.malformed.judge import broken
from tests.malformed.readers import READERS, problem_with

SLOW = {"config", "step", "checkpoint"}  # milliseconds per input


def inputs(seed: bytes, kind: str, count: int) -> list[bytes]:
    rng, out = random.Random(0), []
    for _ in range(count):
        if kind == "json":
            out.append(json.dumps(broken(json.loads(seed), rng)[1]).encode())
        else:
            place = rng.randrange(len(seed))
            middle = rng.choice(
                (
                    b"",
                    b"\xff",
                    b"0",
                    b"9" * (5000 if kind == "bytes" else 50),
                    seed[place : place + 9],
                    bytes([rng.randrange(256)]),
                )
            )
            out.append(seed[:place] + middle + seed[place + rng.randrange(3) :])
    return [*out, b"", b"{}", b"[]", b"\xff\xfe", seed[: len(seed) // 2], b"[" * (100 if kind == "text" else 5000)]


@pytest.fixture(scope="module", autouse=True)
def no_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("name", READERS)
def test_readers(name: str) -> None:
    reader, found = READERS[name], []
    seeds = reader.seeds()
    for seed in seeds:
        reader.read(seed)
        for data in inputs(seed, reader.kind, 20 if name in SLOW else 100):
            if problem := problem_with(reader, data):
                found.append(f"{data[:300]!r}: {problem}")
    assert seeds and not found, "\n".join(found)
