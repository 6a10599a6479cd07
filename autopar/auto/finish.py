"""`finish=5`: the first layouts of a search, measured on the real ranks; the fastest that ran is kept."""

from __future__ import annotations

import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.auto.explanation import Explanation, chosen_options, options_in_words, seconds
from autopar.auto.search import OF_A_MESH, Candidate
from autopar.ir.mesh import Mesh
from autopar.runtime.consistency.rank_checks import answer_of_first
from autopar.runtime.fault.errors import CollectiveError, error_context
from autopar.runtime.mesh.process_groups import Groups

log = logging.getLogger("autopar.auto")
APART = 0.05  # measured times that differ by less are in no order


@dataclass(frozen=True)
class Finalist:
    """A layout that may be kept. sizes: of axes. options: those that are searched. seconds: of a step, estimated."""

    sizes: Mapping[str, int]
    options: Mapping[str, Any]
    seconds: float

    def __str__(self) -> str:
        return f"{Mesh(tuple(self.sizes.items()))} {options_in_words(self.options)}"


def finalists(found: Explanation, count: int) -> list[Finalist]:
    """The choice, then the fastest others that fit, two of a mesh before a third of any."""
    rest = sorted((c for c in found.found.priced if c.price.fits), key=lambda c: c.seconds)
    of_mesh: Counter[Mesh] = Counter()
    first, later = list[Candidate](), list[Candidate]()
    for candidate in (found.choice, *(c for c in rest if c != found.choice)):
        of_mesh[candidate.layout.mesh] += 1
        (first if of_mesh[candidate.layout.mesh] <= OF_A_MESH else later).append(candidate)
    return [
        Finalist(dict(c.layout.mesh.sizes), chosen_options(c.layout), c.seconds) for c in (*first, *later)[:count]
    ]  # fmt: skip


def fastest(groups: Groups, found: Sequence[Finalist], run: Callable[[Finalist, int], float]) -> Finalist:
    """Measure each and return the fastest, the same on all ranks. Collective. groups: of all ranks. run: seconds of a
    step of a finalist, given its number; raises ValueError where it is refused.

    Raises ValueError if none ran, and if a rank of a GPU ran out of memory while others waited for it."""
    measured: dict[int, float] = {}
    failed: dict[int, str] = {}
    for i, one in enumerate(found):
        own = _outcome(lambda one=one, i=i: run(one, i))  # type: ignore[misc]
        texts = json.loads(answer_of_first(groups, f"measuring {one}", json.dumps(own), _joined))
        reason = _reason(texts)
        if not reason:
            measured[i] = max(float(said["seconds"]) for said in texts)
            continue
        failed[i] = reason
        if any("waited" in said for said in texts) and groups.device.type == "cuda":
            raise ValueError(
                f"auto: finish={len(found)} needs layouts that fit, found {one}: {reason}; pass a memory_limit that "
                "leaves it out, or finish=0"
            )
    if not measured:
        raise ValueError(
            f"auto: finish={len(found)} needs a layout that runs, found none: {next(iter(failed.values()))}; "
            "name the mesh"
        )
    best = min(measured, key=lambda i: measured[i])
    if groups.rank == 0:
        for line in _lines(found, measured, failed, best, groups.mesh.world_size):
            log.info(line)
    return found[best]


def _joined(texts: list[str]) -> str:
    return json.dumps([json.loads(text) for text in texts])


def _outcome(run: Callable[[], float]) -> dict[str, Any]:
    """What became of a finalist on this rank. An error that is neither a refusal nor of memory is raised."""
    try:
        with error_context("measuring a layout"):
            return {"seconds": run()}
    except CollectiveError as error:
        return {"waited": _line(error)}
    except ValueError as error:
        return {"refused": _line(error)}
    except (torch.OutOfMemoryError, MemoryError) as error:
        torch.cuda.empty_cache()
        return {"memory": _line(error)}


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _reason(texts: Sequence[Mapping[str, Any]]) -> str:
    """Why it did not run; "" if it did on every rank."""
    for kind, words in (("memory", "out of memory on rank"), ("refused", ""), ("waited", "")):
        for rank, said in enumerate(texts):
            if kind in said:
                return f"{words} {rank}" if words else str(said[kind])
    return ""


def _lines(
    found: Sequence[Finalist], measured: Mapping[int, float], failed: Mapping[int, str], best: int, ranks: int
) -> list[str]:
    """Three lines: what was measured, what is kept, how good the estimates were."""
    told = [f"{found[i]} {seconds(s)} (estimated {seconds(found[i].seconds)})" for i, s in measured.items()]
    told += [f"{found[i]} did not run: {reason}" for i, reason in failed.items()]
    pairs = [(a, b) for a, b in itertools.combinations(measured, 2) if abs(measured[a] / measured[b] - 1) > APART]
    right = sum((measured[a] < measured[b]) == (found[a].seconds < found[b].seconds) for a, b in pairs)
    first = measured.get(0)
    saved = f"{1 - measured[best] / first:.0%} less than the first" if first and best else "the first"
    return [
        f"measured {len(measured)} of {len(found)} layouts on {ranks} ranks: {'; '.join(told)}",
        f"kept: {found[best]}, {seconds(measured[best])} per step, {saved}",
        f"estimates ordered {right} of {len(pairs)} pairs right that differ by {APART:.0%}",
    ]
