"""The layouts that a search may choose: sizes of axes and values of options, each declared once.

    space = Space(Question(ranks=8, batch=64, seq=8192, layers=32))
    for family in space.families():         sizes of axes, microbatches: one graph of a layer for each checkpoint policy
        for member in space.members(family):    ZeRO, replicas, schedules: the same graphs
            space.savings(member)                   the same with less memory, in more time

A user's value replaces those of its entry. A new option is one entry of `FAMILY`, `MEMBER` or `SAVING`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.ac_policies import AC_POLICIES
from autopar.cost.layout import OUTER_TO_INNER, Layout
from autopar.options import DECLARED
from autopar.schedule.request import SCHEDULES, Schedule

LEAST_TOKENS = 2048  # of a sequence on one rank of cp
MOST_ROWS = 16  # of a microbatch
MOST_PARTS = 8  # per rank of pp
IDLE_LAYERS = 2  # slots of a pipeline without a layer, at most, in deep models
CHUNKS = 8  # of the loss, where its logits do not fit
FIRST = ("1f1b", "interleaved")  # of schedules: the simplest
POLICIES = ("none", "selective", "full")  # of activation checkpointing, in the order of time

Chosen = Mapping[str, Any]


@dataclass(frozen=True)
class Question:
    """What a layout is asked for. ranks: GPUs. batch: rows of a step. seq: tokens of a row. layers: of the model.
    per_node: ranks of a node. experts: of a layer that can be sharded, 0 for none. fixed: the user's values, by
    the names of axes and of `Layout`."""

    ranks: int
    batch: int
    seq: int
    layers: int
    per_node: int = 8
    experts: int = 0
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self)

    def free(self, **less: Any) -> Question:
        """Without the user's values."""
        return replace(self, fixed={}, **less)


@dataclass(frozen=True)
class Entry:
    """A value that is searched. values: those worth pricing, the simplest first, given the values of earlier entries;
    allows: whether a user's value can be."""

    name: str
    values: Callable[[Question, Chosen], Iterable[Any]]
    allows: Callable[[Question, Chosen, Any], bool] = lambda question, chosen, value: True


def divisors(number: int) -> list[int]:
    """Ascending."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})


# --- sizes of axes -------------------------------------------------------------------------------------------


def _left(question: Question, chosen: Chosen) -> int:
    """Ranks that the axes so far leave."""
    return question.ranks // math.prod(chosen.get(axis, 1) for axis in ("tp", "cp", "ep", "pp"))


def _divides(question: Question, chosen: Chosen, size: int) -> bool:
    return _left(question, chosen) % size == 0


def _tp(question: Question, chosen: Chosen) -> list[int]:
    return [n for n in divisors(question.ranks) if n <= question.per_node]


def _cp(question: Question, chosen: Chosen) -> list[int]:
    most = question.seq // LEAST_TOKENS
    return [n for n in divisors(_left(question, chosen)) if n == 1 or (n <= most and question.seq % (2 * n) == 0)]


def _ep(question: Question, chosen: Chosen) -> list[int]:
    return [n for n in divisors(_left(question, chosen)) if n == 1 or (question.experts and question.experts % n == 0)]


def _pp(question: Question, chosen: Chosen) -> list[int]:
    layers, found = question.layers, []
    for n in divisors(_left(question, chosen)):
        idle = -(-layers // n) * n - layers
        if n == 1 or (n <= layers and idle <= max(IDLE_LAYERS, layers // 8) and idle < n):
            found.append(n)
    return found


def _data(question: Question, chosen: Chosen) -> list[int]:
    """Ranks of dp and dp_replicate together."""
    found = _left(question, chosen)
    sizes = [question.fixed[axis] for axis in ("dp", "dp_replicate") if axis in question.fixed]
    fits = found == math.prod(sizes) if len(sizes) == 2 else all(found % size == 0 for size in sizes)
    return [found] if fits and question.batch % (found * chosen["ep"]) == 0 else []


def _microbatches(question: Question, chosen: Chosen) -> list[int]:
    rows = question.batch // (chosen["data"] * chosen["ep"])
    cp = chosen["cp"]
    # rows that cp could share are better shared by dp: the same tokens on a rank, and nothing travels
    found = [
        b for b in divisors(rows) if b <= MOST_ROWS and (cp == 1 or "cp" in question.fixed or math.gcd(b, cp) == 1)
    ]
    return [rows // b for b in found]


def _rows(question: Question, chosen: Chosen, count: int) -> bool:
    return question.batch % (chosen["data"] * chosen["ep"] * count) == 0


def _sequence_parallel(question: Question, chosen: Chosen) -> list[bool]:
    """On, where tokens divide: as many bytes travel, and a rank keeps and computes less. A model that cannot have it
    is searched without (`autopar.auto.search`)."""
    return [chosen["tp"] > 1 and question.seq % (chosen["tp"] * chosen["cp"]) == 0]


def _of_axis(axis: str, *values: Any) -> Callable[[Question, Chosen], Sequence[Any]]:
    """The first value, unless the user asks for another."""
    return lambda question, chosen: values[:1]


FAMILY = (
    Entry("tp", _tp, _divides),
    Entry("cp", _cp, _divides),
    Entry("ep", _ep, _divides),
    Entry("pp", _pp, lambda q, c, n: _divides(q, c, n) and n <= max(q.layers, 1)),
    Entry("data", _data),
    Entry("microbatches", _microbatches, _rows),
    Entry("sequence_parallel", _sequence_parallel, lambda q, c, on: not on or c["tp"] > 1),
    Entry("attention", _of_axis("cp", "auto"), lambda q, c, name: name == "auto" or c["cp"] > 1),
    Entry("cp_load_balance", _of_axis("cp", "auto"), lambda q, c, name: name == "auto" or c["cp"] > 1),
    Entry("expert_axis", _of_axis("ep", "ep"), lambda q, c, axis: axis == "ep" or c[axis] > 1),
    Entry(
        "token_dispatcher",
        _of_axis("ep", "auto"),
        lambda q, c, n: n == "auto" or c["ep"] > 1 or c["expert_axis"] != "ep",
    ),
)


# --- what the graphs of a layer do not depend on -------------------------------------------------------------


def _shards(chosen: Chosen) -> int:
    """Ranks over which ZeRO could shard."""
    return int(chosen["data"] * chosen["cp"] * chosen["ep"])


def _zero(question: Question, chosen: Chosen) -> list[int]:
    if _shards(chosen) == 1:
        return [0]
    return [0, 1, 2, 3] if chosen["microbatches"] > 1 else [0, 1, 3]


def _dp_replicate(question: Question, chosen: Chosen) -> list[int]:
    """No replicas, or one on each node."""
    data, fixed = chosen["data"], question.fixed
    if "dp" in fixed:
        return [data // fixed["dp"]]
    inside = question.per_node // (chosen["tp"] * chosen["cp"] * chosen["ep"])
    apart = chosen["zero"] and 1 < inside < data and data % inside == 0
    return [1, data // inside] if apart else [1]


def _reduce_grads(question: Question, chosen: Chosen) -> list[str]:
    return ["auto", "step"] if chosen["zero"] == 3 and chosen["microbatches"] > 1 else ["auto"]


def _schedule(question: Question, chosen: Chosen) -> list[str]:
    if chosen["pp"] == 1:
        return [""]
    _fill_schedules()
    return [*FIRST, *(name for name, one in SCHEDULES.items() if one.candidate and name not in FIRST)]


def _virtual_stages(question: Question, chosen: Chosen) -> list[int]:
    pp, name = chosen["pp"], chosen["schedule"]
    if pp == 1:
        return [1]
    least = SCHEDULES[name].virtual_stages
    if name != "interleaved":
        return [least] if pp * least <= question.layers else []
    if chosen["microbatches"] % pp:
        return []
    per_rank = -(-question.layers // pp)
    return [v for v in divisors(per_rank) if least <= v <= MOST_PARTS and v * pp <= question.layers]


def _parts(question: Question, chosen: Chosen, count: int) -> bool:
    if chosen["pp"] == 1:
        return bool(count == 1)
    one = SCHEDULES[chosen["schedule"]]
    same = count >= 2 if chosen["schedule"] == "interleaved" else count == one.virtual_stages
    return same and chosen["pp"] * count <= question.layers


def _can_run(question: Question, chosen: Chosen, name: str) -> bool:
    """A schedule with a closed form of its bubble; those over token slices have another search."""
    if chosen["pp"] == 1 or name not in SCHEDULES:
        return False
    one, p, m = SCHEDULES[name], chosen["pp"], chosen["microbatches"]
    if name.startswith("dual_pipe") and (m < 2 * p or (name == "dual_pipe" and (p % 2 or m % 2))):
        return False
    return _has_price(one)


def _has_price(one: Schedule) -> bool:
    return bool(one.bubble) and not one.sliced and not one.searches


MEMBER = (
    Entry("zero", _zero, lambda q, c, stage: not stage or _shards(c) > 1),
    Entry("dp_replicate", _dp_replicate, lambda q, c, n: c["data"] % n == 0),
    Entry("reduce_grads", _reduce_grads, lambda q, c, when: when == "auto" or _shards(c) > 1),
    Entry("reshard_after_forward", lambda q, c: ["auto"], lambda q, c, on: on == "auto" or c["zero"] > 0),
    Entry("schedule", _schedule, _can_run),
    Entry("virtual_stages", _virtual_stages, _parts),
)
SAVING = (
    Entry("activation_checkpoint", lambda q, c: POLICIES),
    Entry("loss_chunks", lambda q, c: [1, CHUNKS]),
    Entry("optimizer_cpu_offload", lambda q, c: [False, True]),
)
ENTRIES = (*FAMILY, *MEMBER, *SAVING)
SEARCHED = ("dp", *(entry.name for entry in ENTRIES if entry.name != "data"))


@dataclass(frozen=True)
class Space:
    """All layouts for a question."""

    question: Question

    def families(self) -> Iterator[Layout]:
        """Every choice of axes and microbatches, with the simplest of everything else."""
        for chosen in _expand(self.question, {}, FAMILY):
            first = next(_expand(self.question, chosen, (*MEMBER, *SAVING)), None)
            if first is not None:
                yield _layout(self.question, first)

    def members(self, family: Layout) -> Iterator[Layout]:
        """A family with every stage of ZeRO, replicas and schedule."""
        chosen = _chosen(family)
        for member in _expand(self.question, chosen, MEMBER):
            yield _layout(self.question, next(_expand(self.question, member, SAVING)))

    def savings(self, member: Layout) -> Iterator[Layout]:
        """The same layout with less memory and more time, the fastest first."""
        ways = _expand(self.question, _chosen(member), SAVING)
        next(ways)
        return (_layout(self.question, chosen) for chosen in ways)

    def layouts(self) -> Iterator[Layout]:
        """All of them."""
        for family in self.families():
            for member in self.members(family):
                yield member
                yield from self.savings(member)


def _expand(question: Question, chosen: Chosen, entries: Sequence[Entry]) -> Iterator[dict[str, Any]]:
    if not entries:
        yield dict(chosen)
        return
    first, *rest = entries
    values: Iterable[Any]
    if first.name in question.fixed:
        value = question.fixed[first.name]
        values = [value] if first.allows(question, chosen, value) else []
    else:
        values = first.values(question, chosen)
    for value in values:
        yield from _expand(question, {**chosen, first.name: value}, rest)


def _layout(question: Question, chosen: Chosen) -> Layout:
    values = {name: value for name, value in chosen.items() if name != "data"}
    rows = question.batch // (chosen["data"] * chosen["ep"] * chosen["microbatches"])
    return Layout(**values, dp=chosen["data"] // chosen["dp_replicate"], micro_batch=rows)


def _chosen(layout: Layout) -> dict[str, Any]:
    values = {entry.name: getattr(layout, entry.name) for entry in (*FAMILY, *MEMBER) if entry.name != "data"}
    return values | {"data": layout.dp * layout.dp_replicate}


@functools.cache
def _fill_schedules() -> None:
    import autopar.runtime.schedules  # noqa: F401  (fills the table)


# --- what a question must be ---------------------------------------------------------------------------------


def _check(question: Question) -> None:
    """Raises ValueError for a question without an answer, before anything is compiled."""
    fixed = question.fixed
    for name in ("ranks", "batch", "seq"):
        if getattr(question, name) < 1:
            raise ValueError(f"auto: {name} needs a number above 0, found {getattr(question, name)}")
    if not question.layers:
        raise ValueError(
            "auto: needs a model with repeated layers (two or more equal blocks in a list), found none; name the mesh"
        )
    _fill_schedules()
    for name, value in fixed.items():
        _check_value(question, name, value)
    axes = {axis: fixed[axis] for axis in OUTER_TO_INNER if axis in fixed}
    asked = ",".join(f"{axis}={size}" for axis, size in axes.items())
    if question.ranks % math.prod(axes.values()):
        raise ValueError(
            f"auto: {asked} needs a number of GPUs that {math.prod(axes.values())} divides, found {question.ranks}; "
            "use another number, or leave an axis open"
        )
    if next(Space(question).families(), None) is None:
        raise ValueError(_why_nothing(question))


def _check_value(question: Question, name: str, value: Any) -> None:
    if name not in SEARCHED:
        hint = "name the mesh to use it" if name in DECLARED else f"the values are {', '.join(SEARCHED)}"
        raise ValueError(f"auto: {name} is not searched, found {value!r}; {hint}")
    if name == "activation_checkpoint" and value not in POLICIES:
        known = "has no price" if value in AC_POLICIES else "is unknown"
        raise ValueError(f"auto: activation_checkpoint {value!r} {known}; use one of {', '.join(POLICIES)}")
    if name == "expert_axis" and value not in ("ep", "cp", "tp"):
        raise ValueError(f"auto: experts on axis {value!r} have no price; use ep, cp or tp, or name the mesh")
    if name == "schedule" and (value not in SCHEDULES or not _has_price(SCHEDULES[value])):
        known = ", ".join(n for n, s in SCHEDULES.items() if _has_price(s))
        raise ValueError(f"auto: schedule {value!r} has no closed price; use one of {known}, or name the mesh")
    if name == "pp" and value > question.layers:
        raise ValueError(
            f"auto: pp={value} needs as many layers, found {question.layers}; use at most pp={question.layers}"
        )


def _why_nothing(question: Question) -> str:
    """A sentence about a question for which there is no layout."""
    ranks, batch = question.ranks, question.batch
    for name in question.fixed:
        less = {key: value for key, value in question.fixed.items() if key != name}
        if _has_layouts(question, less):
            value = question.fixed[name]
            others = ", ".join(f"{key}={question.fixed[key]}" for key in less) or "the batch"
            return (
                f"auto: no layout of {ranks} GPUs for a batch of {batch} has {name}={value} together with {others}; "
                f"leave {name} open"
            )
    fewest = min((size for size in _data_sizes(question)), default=ranks)
    if fewest > batch:
        least = fewest
        return (
            f"auto: {ranks} GPUs need a batch of at least {least} rows (tp, cp and pp feed {ranks // fewest} ranks "
            f"with one row), found {batch}; use a larger batch, or at most {batch * (ranks // fewest)} GPUs"
        )
    near = next(n for n in range(batch + 1, batch + ranks + 1) if any(n % size == 0 for size in _data_sizes(question)))
    return f"auto: no layout of {ranks} GPUs divides a batch of {batch}; the next that one divides is {near}"


def _has_layouts(question: Question, fixed: Mapping[str, Any]) -> bool:
    trial = object.__new__(Question)  # without its check
    for name, value in {**vars(question), "fixed": fixed}.items():
        object.__setattr__(trial, name, value)
    return next(Space(trial).families(), None) is not None


def _data_sizes(question: Question) -> list[int]:
    """How many shards of the batch meshes have, whatever the batch."""
    found = _expand(question, {}, FAMILY[:4])
    return sorted({_left(question, chosen) * chosen["ep"] for chosen in found})
