"""Which algorithm each attention over a sharded sequence runs, and how the sequence is dealt: by estimated time.

    choose(problem, "auto", Topology("ring"))     -> bi_ring forward, token_ring backward, and why
    choose(problem, "bi_ring+token_ring", ...)    -> as requested, or the reason why not
    choose_layout(problems, "auto", "auto", ...)  -> zigzag for causal self-attention, mostly

Forward and backward are chosen separately: they send different tensors (the backward also sends gradients of k and v),
and all algorithms read and return the same shards. Algorithms that exchange heads for sequence save different shards
for the backward, so they run both passes or neither.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.attention.algorithm import AttentionAlgorithm
from autopar.attention.algorithm_table import ALGORITHMS
from autopar.attention.layouts import LAYOUTS
from autopar.attention.problem import Problem
from autopar.cost.attention_costs import PASSES, AttentionCost, _ms, candidates, check_together, estimate
from autopar.cost.hardware import DEFAULT, Device
from autopar.cost.topology import Topology

AUTO = "auto"
_AS_FAST = 1.005  # within half a percent of the fastest, the algorithm that sends less is chosen


@dataclass(frozen=True)
class AttentionChoice:
    """What one attention runs, and why. candidates: (algorithm, pass, cost or refusal) of all that were considered."""

    forward: str
    backward: str
    seconds: float
    reason: str
    candidates: tuple[tuple[str, str, str], ...] = ()


# --- algorithms ------------------------------------------------------------------------------------------


def choose_algorithms(
    problem: Problem, attention: str = AUTO, topology: Topology | None = None, device: Device = DEFAULT
) -> AttentionChoice:
    """The algorithms of one attention, whose sequences are dealt as the problem says.

    attention: "auto", "NAME" or "FORWARD+BACKWARD". Raises ValueError for unknown names, for a named algorithm that
    cannot run the problem, for names that cannot be combined, and if no algorithm can run it.
    """
    wires, named = topology or Topology(), _named(attention)
    check_together(named, problem)
    if named:
        looked_at = [estimate(algorithm, problem, way, wires, device) for algorithm, way in zip(named, PASSES)]
        options = [_Option(*looked_at)]
    else:
        looked_at = candidates(problem, wires, device)
        options = _options(problem, looked_at)
    if not options:
        raise ValueError(f"attention: no algorithm is left: {'; '.join(dict.fromkeys(c.refusal for c in looked_at))}")
    best = _best(options)
    return AttentionChoice(
        best.forward.algorithm,
        best.backward.algorithm,
        best.seconds,
        "asked for" if named else _reason(best, options),
        tuple((c.algorithm, c.direction, str(c)) for c in looked_at),
    )


@dataclass(frozen=True)
class _Option:
    """A forward and a backward that can be combined."""

    forward: AttentionCost
    backward: AttentionCost

    @property
    def seconds(self) -> float:
        return self.forward.seconds + self.backward.seconds

    @property
    def bytes(self) -> int:
        return self.forward.bytes + self.backward.bytes


def _best(options: Sequence[_Option]) -> _Option:
    """The fastest. Ties go to the one that sends least, then to one algorithm for both passes, then to the first."""
    fastest = min(option.seconds for option in options)
    fast = [option for option in options if option.seconds <= fastest * _AS_FAST]
    least = min(option.bytes for option in fast)
    return min(fast, key=lambda o: (o.bytes > least * _AS_FAST, o.forward.algorithm != o.backward.algorithm))


def _named(attention: str) -> tuple[AttentionAlgorithm, ...]:
    """The algorithms of both passes, by name; () for "auto"."""
    if attention == AUTO:
        return ()
    forward, plus, backward = attention.partition("+")
    return ALGORITHMS[forward], ALGORITHMS[backward if plus else forward]


def _options(problem: Problem, found: Sequence[AttentionCost]) -> list[_Option]:
    """The possible choices: any forward with any backward, unless one of them exchanges heads."""

    def apart(candidate: AttentionCost) -> bool:
        return ALGORITHMS[candidate.algorithm].head_ranks(problem) > 1

    able = [candidate for candidate in found if not candidate.refusal]
    forwards, backwards = ([c for c in able if c.direction == way] for way in PASSES)
    return [
        _Option(one, other)
        for one in forwards
        for other in backwards
        if one.algorithm == other.algorithm or not (apart(one) or apart(other))
    ]


def _reason(best: _Option, options: Sequence[_Option]) -> str:
    """The cost of the choice, and of the runner-up among those that run one algorithm for both passes."""
    exposed = best.forward.exposed + best.backward.exposed
    text = f"{_ms(best.seconds)} by estimate, of which {_ms(exposed)} waiting"
    others = [o for o in options if o.forward.algorithm == o.backward.algorithm and o != best]
    if not others:
        return text
    other = _best(others)
    same = abs(other.bytes - best.bytes) <= (_AS_FAST - 1) * best.bytes
    sends = "the same" if same else f"{other.bytes / 1e6:,.4g} MB instead of {best.bytes / 1e6:,.4g}"
    return f"{text}; {other.forward.algorithm} would take {_ms(other.seconds)} and send {sends}"


# --- layouts ---------------------------------------------------------------------------------------------


def dealt(problem: Problem, layout: str) -> Problem:
    """The same self-attention with its sequence dealt in this layout."""
    return dataclasses.replace(problem, query_blocks=LAYOUTS[layout], key_blocks=LAYOUTS[layout])


def check_layout(problem: Problem, layout: str) -> None:
    """Raises ValueError if the sequence cannot be dealt in this layout."""
    pieces = problem.size * max(1, len(LAYOUTS[layout]))
    if problem.queries % pieces:
        other = (
            ", or cp_load_balance=contiguous" if layout != "contiguous" and problem.queries % problem.size == 0 else ""
        )
        raise ValueError(
            f"context_parallel: cp_load_balance={layout}: a sequence of {problem.queries} tokens does not divide into "
            f"{pieces} chunks for {problem.size} ranks; pad to {-(-problem.queries // pieces) * pieces}{other}"
        )


def choose_layout(
    problems: Sequence[Problem],
    attention: str = AUTO,
    layout: str = AUTO,
    topology: Topology | None = None,
    device: Device = DEFAULT,
) -> tuple[str, str]:
    """(layout for the sequence of all these self-attentions, why): the one with the least sum of their best times.
    Raises ValueError if no layout divides the sequence, or if the requested algorithms can run none."""
    times: dict[str, float] = {}
    refusals: list[str] = []
    for name in LAYOUTS if layout == AUTO else [layout]:
        try:
            for problem in problems:
                check_layout(problem, name)
            if layout != AUTO:
                return layout, "asked for"
            if not any(p.mask.causal for p in problems):
                return name, "no query waits for earlier tokens"
            times[name] = math.fsum(
                choose_algorithms(dealt(p, name), attention, topology, device).seconds for p in problems
            )
        except ValueError as error:
            refusals.append(str(error))
    if not times:
        raise ValueError(refusals[0])
    fastest_first = sorted(times, key=times.__getitem__)
    took = [f"{name} takes {_ms(times[name])}" for name in fastest_first]
    return fastest_first[0], "; ".join(took + refusals)
