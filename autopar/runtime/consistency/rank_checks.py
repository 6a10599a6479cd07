"""Checks that values are equal on several ranks, made before they are used; and calls that must succeed on all ranks.

    agree_on(groups, [RankCheck(("cp", "tp"), {"x": hash, "mask": hash}, need, way_out), ...], "the batch")
    plan = raise_on_all_ranks(groups, "load", lambda: read(folder))     an error of one rank is raised on all

Ranks vote on a digest of each check at once, through the store, with a number of requests that does not depend on the
number of ranks. Only if digests differ do they exchange the values, to name the difference. A call that all ranks
expect (`CallSequence`) does not use the store: `hold` compares its checks by a few numbers in collectives between
hosts.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.adapters.distributed import takes_host_tensors
from autopar.errors import is_refusal
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Shard
from autopar.ir.signature import ParameterSpec
from autopar.plan import Plan
from autopar.runtime.comm.p2p import AXIS
from autopar.runtime.consistency.tensor_hash import hashes_of
from autopar.runtime.fault.error_propagation import CheckpointError
from autopar.runtime.fault.errors import CollectiveError, board, explained
from autopar.runtime.fault.flight import flying
from autopar.runtime.fault.store_barrier import RankMovedOn, Round, Rounds, differences, meet, show
from autopar.runtime.fault.store_client import StoreError
from autopar.runtime.mesh.process_groups import Groups

# --- by a few numbers in collectives between hosts -------------------------------------------------------------


def as_expected(groups: Groups, call: Hashable, own: Hashable = None) -> bool:
    """Whether all ranks expect this call next; then this rank proceeds. ``own``: what else must be the same as in the
    previous such call on this rank. Collective along pp. Raises CollectiveError if a rank is known to have failed."""
    if verdict := board().verdict:
        raise board().ended("agreeing on the next call", verdict)
    expected = groups.order.expects(call, own)
    if groups.mesh.size(AXIS) > 1:
        expected = _all_do(groups, expected)
    if expected:
        groups.order.goes_on(call)
    return expected


def _all_do(groups: Groups, expected: bool) -> bool:
    """Whether ``expected`` is true on all ranks along pp; always False without a backend for the host."""
    group = groups.votes()
    if group is None:
        return False
    said = torch.tensor([int(expected)])
    with explained("agreeing on the next call", groups.ranks(AXIS)):
        dist.all_reduce(said, dist.ReduceOp.MIN, group=group)
    return bool(said.item())


def can_reduce(groups: Groups) -> bool:
    """Whether the groups of all axes accept tensors on the host."""
    return all(takes_host_tensors(groups.group(axis)) for axis, size in groups.mesh.axes if size > 1)


def all_hold(groups: Groups, claims: Sequence[tuple[tuple[str, ...], str]]) -> bool:
    """Whether for each claim (axes, digest) the digests are equal on ranks that differ only on these axes. All ranks
    make the same claims, up to the digests. Collective over all ranks, except for claims that a rank shares with none.
    """
    sizes = groups.mesh.sizes
    spread = [tuple(axis for axis in axes if sizes[axis] > 1) for axes, _ in claims]
    digests = [int(digest, 16) >> 1 for _, digest in claims]
    bounds = torch.tensor([[digest, -digest] for digest in digests])  # maximum, and negated minimum
    if not any(spread):
        return True
    for axis in sizes:
        _reduce(groups, axis, bounds, [i for i, axes in enumerate(spread) if axis in axes])
    differ = torch.zeros(1, 1, dtype=torch.int64)
    differ[0, 0] = int((bounds.sum(1) != 0).any())
    for axis, size in sizes.items():
        if size > 1 and any(axes and axis not in axes for axes in spread):
            _reduce(groups, axis, differ, [0])
    return not differ.item()


def _reduce(groups: Groups, axis: str, rows: Tensor, chosen: list[int]) -> None:
    """Elementwise maximum over the axis, of the chosen rows."""
    if chosen:
        found = rows[chosen]
        with explained("comparing the batch", groups.ranks(axis)):
            dist.all_reduce(found, dist.ReduceOp.MAX, group=groups.group(axis))
        rows[chosen] = found


MOST_SHOWN = 3
WEIGHTS = "the weights"


@dataclass(frozen=True)
class RankCheck:
    """``facts`` by name must be equal on ranks that differ only on ``axes``; if not, the error is "``need``, found ...;
    ``way_out``"."""

    axes: tuple[str, ...]
    facts: Mapping[str, str]
    need: str
    way_out: str

    @property
    def digest(self) -> str:
        return _digest(sorted(self.facts.items()))


def _digest(x: Any) -> str:
    return hashlib.sha256(repr(x).encode()).hexdigest()[:16]


# --- through the store -----------------------------------------------------------------------------------------


class CallsDiffer(ValueError):
    """Ranks that are in different calls have met."""


def _alike(groups: Groups, what: str, digest: str = "", votes: Mapping[int, str] = MappingProxyType({})) -> bool:
    """Whether all ranks meet for ``what`` with the same digest, and those that vote under the same number with the same
    text. Raises RankMovedOn if a rank makes another call meanwhile."""
    number, name, ranks = groups.order.meets(), groups.name, range(groups.mesh.world_size)
    scope = f"autopar/{name}/agree"
    rounds, held = groups.rounds.setdefault(scope, Rounds()), _digest((what, digest))
    round_ = Round(scope, rounds, groups.rank, ranks, held, votes)
    with flying("wait", f"agreeing on {what}", ranks):
        return meet(round_, ranks, what, groups.timeout.total_seconds(), lambda: board().gone_on(name, number))


def answer_of_first(groups: Groups, what: str, text: str, reply: Callable[[list[str]], str]) -> str:
    """The reply of rank 0 to the texts of all ranks, right after they met. Raises if they came for different calls.
    Through the store: also after a collective has failed."""
    scope, ranks = f"autopar/{groups.name}/agree/texts", range(groups.mesh.world_size)

    def answer(found: list[str]) -> str:
        apart = differences(ranks, [f"\n{text.partition(chr(10))[0]}" for text in found])
        return _OTHER_STEPS + apart if apart else reply([text.partition("\n")[2] for text in found])

    rounds = groups.rounds.setdefault(scope, Rounds())
    with flying("wait", f"agreeing on {what}", ranks):
        found = show(scope, rounds, groups.rank, ranks, f"{what}\n{text}", groups.timeout.total_seconds(), answer)
    if found.startswith(_OTHER_STEPS):
        raise CallsDiffer(
            f"agree: all ranks must take the same steps, found {found.removeprefix(_OTHER_STEPS)}; run the same "
            "program on every rank"
        )
    return found


_OTHER_STEPS = "\0"


def all_alike(groups: Groups, what: str, digest: str = "") -> bool:
    """Wait until all ranks meet for ``what``; returns whether they hold the same digest.

    Raises RuntimeError that names the ranks missing after the timeout, ValueError if ranks are at different steps. Uses
    the store: no device, no process group.
    """
    if groups.mesh.world_size == 1:
        return True
    with _all_come(groups, what):
        if not _alike(groups, what):
            answer_of_first(groups, what, "", lambda texts: "")  # raises if they came for different calls
        return not digest or _alike(groups, what, digest)


def text_of_first(groups: Groups, text: str, what: str) -> str:
    """The text of rank 0, on every rank."""
    return answer_of_first(groups, what, text if groups.rank == 0 else "", lambda texts: texts[0])


@contextmanager
def _all_come(groups: Groups, what: str, found: Callable[[int], str] = lambda _: "") -> Iterator[None]:
    """Raises ValueError if a rank makes another call, which waits for this rank, too. ``found``: describes it."""
    try:
        yield
    except RankMovedOn as gone:
        text = found(gone.rank) or (
            f"agree: all ranks must take the same steps, found {what} on rank {groups.rank}, while rank {gone.rank} "
            "went on with the calls that were expected; run the same program on every rank"
        )
        with contextlib.suppress(StoreError):
            board().give_verdict(f"rank {board().rank} failed: ValueError: {text}"[:500])
        raise ValueError(text) from None


def agree_on(
    groups: Groups, claims: Sequence[RankCheck], what: str, expected: Callable[[], RankCheck | None] = lambda: None
) -> None:
    """Compare the checks in order: the first one that fails raises ValueError, the same on every rank.

    Every rank passes the same checks, up to the facts; after one that fails their number may differ. Takes one vote of
    all ranks; facts are exchanged only to explain a failure. ``expected``: the first check of a rank that would repeat
    its earlier calls.
    """
    if groups.mesh.world_size == 1 or not claims:
        return
    order = groups.order
    here = RankCheck(everywhere(groups), {"the calls before": order.past}, "agree: all ranks must take the same steps",
                 "handle an error alike on every rank")  # fmt: skip
    claims = [here, *claims]
    votes: dict[int, list[str]] = {}
    for claim in claims:
        if 1 < len(ranks := groups.mesh.along(claim.axes, groups.rank)) < groups.mesh.world_size:
            votes.setdefault(ranks[0], []).append(claim.digest)
    same = [claim.digest for claim in claims if len(claim.axes) == len(groups.mesh.sizes)]
    try:
        with _all_come(groups, what, lambda rank: _gone_on(groups, rank, claims[1], expected())):
            if _alike(groups, what, _digest(same), {first: _digest(told) for first, told in votes.items()}):
                return

        def first_apart(texts: list[str]) -> str:
            told = [text.split("\n") for text in texts]
            for i, claim in enumerate(claims):
                if any(len({told[r][i] for r in ranks}) > 1 for ranks in _parts(groups.mesh, claim.axes)):
                    return str(i)
            return ""

        if i := answer_of_first(groups, what, "\n".join(claim.digest for claim in claims), first_apart):
            claim = claims[int(i)]
            raise ValueError(
                answer_of_first(groups, what, json.dumps(dict(claim.facts)), lambda t: _explained(groups, claim, t))
            )
    except BaseException:
        order.forget()
        raise


def _gone_on(groups: Groups, rank: int, claim: RankCheck, expected: RankCheck | None) -> str:
    """How this call differs from that of ``rank``, which makes the expected one."""
    if expected is None or (expected.axes, expected.need) != (claim.axes, claim.need):
        return ""
    told = {rank: expected.facts, groups.rank: claim.facts}
    names = [n for n in dict.fromkeys([*expected.facts, *claim.facts]) if expected.facts.get(n) != claim.facts.get(n)]
    shown = [f"{n}: {differences(list(told), [chr(10) + f.get(n, 'nothing') for f in told.values()])}" for n in names]
    return f"{claim.need}, found {', and '.join(shown[:MOST_SHOWN])}; {claim.way_out}" if shown else ""


def compare_on_ranks(groups: Groups, claims: Sequence[RankCheck], what: str) -> None:
    """`agree_on` for a call that all ranks expect: uses the store only if checks fail, or hosts have no collectives."""
    told = [claim for claim in claims if claim.facts]
    if told and not (can_reduce(groups) and all_hold(groups, [(claim.axes, claim.digest) for claim in told])):
        agree_on(groups, claims, what)


def agree_on_arguments(
    groups: Groups,
    who: str,
    arguments: Mapping[str, Any],
    names: Iterable[str] = (),
    owed: Sequence[RankCheck] = (),
) -> None:
    """Check a call that all ranks must make with the same ``arguments``, and with the same parameter ``names`` within a
    stage. ``owed``: checks that earlier calls have deferred. Raises ValueError. An expected call does not use the
    store."""
    if groups.mesh.world_size == 1:
        return
    facts, names = {"the call": who, **{k: repr(v) for k, v in arguments.items()}}, tuple(names)
    call = (who, *facts.values())
    if as_expected(groups, call, names):
        compare_on_ranks(groups, owed, who)
        return
    stage = tuple(axis for axis in groups.mesh.sizes if axis != "pp")
    need, way_out = f"{who}: every rank must be given the same", "call it alike on every rank"
    told = RankCheck(everywhere(groups), facts, f"{need} arguments", way_out)
    agree_on(groups, [told, RankCheck(stage, dict.fromkeys(names, "given"), f"{need} tensors", way_out), *owed], who)
    groups.order.agreed(call, names)


@functools.cache
def _parts(mesh: Mesh, axes: tuple[str, ...]) -> list[list[int]]:
    """The ranks of the world, grouped into those that differ only in their coordinates on ``axes``."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.world_size):
        at = mesh.coordinate(rank)
        found.setdefault(tuple(at[a] for a in at if a not in axes), []).append(rank)
    return list(found.values())


def _explained(groups: Groups, claim: RankCheck, texts: Sequence[str]) -> str:
    told = [json.loads(text) for text in texts]
    found: dict[str, str] = {}
    for ranks in _parts(groups.mesh, claim.axes):
        for name in dict.fromkeys(n for r in ranks for n in told[r]):
            differ = differences(ranks, [f"\n{told[r].get(name, 'nothing')}" for r in ranks])
            if differ:
                found.setdefault(name, differ)
    shown = ", and ".join(f"{name}: {differ}" for name, differ in list(found.items())[:MOST_SHOWN])
    more = f" (and {len(found) - MOST_SHOWN} more)" if len(found) > MOST_SHOWN else ""
    return f"{claim.need}, found {shown}{more}; {claim.way_out}"


def everywhere(groups: Groups) -> tuple[str, ...]:
    """All axes."""
    return tuple(groups.mesh.sizes)


def agree_on_call(groups: Groups, facts: Mapping[str, Any]) -> None:
    """Check the arguments of `parallelize`, by name."""
    told = {name: repr(value) for name, value in facts.items()}
    need, way_out = "parallelize: every rank must be given the same options", "call it alike on every rank"
    agree_on(groups, [RankCheck(everywhere(groups), told, need, way_out)], "the options")


def agree_on_plan(groups: Groups, plan: Plan) -> None:
    """Check the plan, which follows from the model's structure, the mesh, the options and the example's shapes."""
    told = {name: str(part) for name, part in json.loads(plan.to_json()).items()}
    need = "agree: the plan must be the same on all ranks"
    way_out = "give every rank the same model, mesh, options and batch shapes"
    agree_on(groups, [RankCheck(everywhere(groups), told, need, way_out)], "the plan")


# --- weights ----------------------------------------------------------------------------------------------


def check_source(groups: Groups, tensors: Mapping[str, Tensor | None]) -> None:
    """Check that rank 0, whose weights are broadcast, has all values. Raises the same ValueError on every rank."""
    missing = next((name for name, x in tensors.items() if x is None), "")
    if first := text_of_first(groups, missing, WEIGHTS):
        raise ValueError(
            f"parallelize: broadcast_weights=True takes the weights of rank 0, found {first} on the meta device there; "
            "build the model of rank 0 with weights, or load them afterwards with load_pretrained(folder)"
        )


def agree_on_model(groups: Groups, tensors: Mapping[str, Tensor], given: Mapping[str, Tensor | None] | None) -> None:
    """Check the unsharded parameters and buffers of each rank's model by name: names, shapes and dtypes. Also the
    values of ``given`` (None: on the meta device, without values), unless it is None itself.

    Raises ValueError for tensors whose values differ: replicas would never be equal.
    """
    if groups.mesh.world_size == 1:
        return
    shapes = {name: f"{tuple(x.shape)} {x.dtype}" for name, x in tensors.items()}
    need, way_out = "parallelize: every rank must be given the same model", "build it alike on every rank"
    claims = [RankCheck(everywhere(groups), shapes, need, way_out)]
    if given is not None:
        hashes = hashes_of({name: x for name, x in given.items() if x is not None})
        told = {name: hashes.get(name, "no values") for name in given}
        need = "parallelize: every rank must be given the same weights"
        way_out = (
            "set the same seed before building the model (torch.manual_seed), load the same checkpoint with "
            "load_pretrained(folder), or take those of rank 0 with parallelize(..., broadcast_weights=True)"
        )
        claims.append(RankCheck(everywhere(groups), told, need, way_out))
    agree_on(groups, claims, WEIGHTS)


def agree_on_pieces(
    groups: Groups,
    pieces: Mapping[str, Tensor],
    specs: Sequence[ParameterSpec],
    buffers: Mapping[str, Tensor],
    need: str,
    way_out: str,
) -> None:
    """Check this rank's shards of the parameters, as after a load: ranks with the same shard must have the same values.

    A shard that no other rank holds cannot be compared.
    """
    if groups.mesh.world_size == 1:
        return
    hashes = hashes_of({**pieces, **buffers})
    by_axes: dict[tuple[str, ...], dict[str, str]] = {
        axes: {} for axes in sorted({_copied_over(groups, s) for s in specs} | {everywhere(groups)}) if axes
    }
    for spec in specs:
        if spec.name in pieces and (axes := _copied_over(groups, spec)):
            by_axes[axes][spec.name] = hashes[spec.name]
    by_axes[everywhere(groups)] |= {name: hashes[name] for name in buffers}
    agree_on(groups, [RankCheck(axes, facts, need, way_out) for axes, facts in by_axes.items()], WEIGHTS)


def _copied_over(groups: Groups, spec: ParameterSpec) -> tuple[str, ...]:
    """The axes on which the parameter is replicated; stages hold different parameters."""
    cut = {axis for axis, p in spec.placements.items() if isinstance(p, Shard)}
    return tuple(axis for axis in groups.mesh.sizes if axis not in cut and axis != "pp")


# --- local calls that must succeed on all ranks -----------------------------------------------------------------


T = TypeVar("T")


def raise_on_all_ranks(groups: Groups, what: str, call: Callable[[], T]) -> T:
    """Run ``call`` and return its result once it has returned on all ranks. The error of the first rank that has one is
    raised on all: ValueError for a user's mistake, else CheckpointError. Collective."""
    found, said, cause = attempted(what, call)
    if not all_alike(groups, f"{what}: what came of it", said or "all is well") or said:
        if groups.mesh.world_size == 1:
            raise _error_of(said, None) from cause
        texts: list[str] = json.loads(answer_of_first(groups, f"{what}: who failed", said, json.dumps))
        rank = next(r for r, text in enumerate(texts) if text)
        raise _error_of(texts[rank], rank) from cause
    assert found is not None
    return found[0]


def on_first_rank(groups: Groups, what: str, call: Callable[[], str]) -> str:
    """Run ``call`` on rank 0 only and return its text on all ranks; its error is raised on all ranks."""
    text, cause = "", None
    if groups.rank == 0:
        found, said, cause = attempted(what, call)
        text = said or json.dumps(found)
    if groups.mesh.world_size > 1:
        text = text_of_first(groups, text, what)
    told = json.loads(text)
    if isinstance(told, dict):
        raise _error_of(text, None) from cause
    return str(told[0])


def attempted(what: str, call: Callable[[], T]) -> tuple[tuple[T] | None, str, BaseException | None]:
    """(what it returned, "", None), or (None, its error as a text for other ranks, its error)."""
    try:
        return (call(),), "", None
    except CollectiveError:
        raise
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        mine = is_refusal(error)
        text = first if mine or isinstance(error, CheckpointError) else f"{what}: {type(error).__name__}: {first}"
        return None, json.dumps({"mistake": mine, "text": text}), error


def _error_of(said: str, rank: int | None) -> Exception:
    told = json.loads(said)
    where = "" if rank is None else f" (on rank {rank})"
    return (ValueError if told["mistake"] else CheckpointError)(told["text"] + where)
