"""Local types: what the ranks of an axis have of a value, and how operators propagate that, in graphs without autograd.

A placement says where a value is and where its gradient is. Step graphs contain the gradients themselves, so what a
rank has of a value is one of three:

    SAME           the same on all ranks
    PART           an addend of a partial value
    (dim, rows)    a shard on a dim of its own shape; ``rows`` of them are adjacent in the global value (0: unknown how
                   many, None: any number)

A value may have several of these at once (a shard of one row is a shard of every dim of size one; a value whose rows
are all equal is a shard of itself). So its type is a set, and is wrong if no choice makes it right. Nothing is claimed
where rules do not apply: the type is UNKNOWN. A choice that shards what an operator spans is dropped if there is
another one: the check of the graph with placements has refused it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.ir.placement import Partial, Placement, Shard
from autopar.rules.along_tokens import FlipRule
from autopar.rules.call import Call
from autopar.rules.rule import Cat, Dims, Rule
from autopar.rules.special import LinkedRule

SAME, PART, ANY = "replicated", "partial", "unknown"
Rows = int | None
Cut = tuple[int, Rows]


@dataclass(frozen=True)
class Joined:
    """A concatenation along ``dim`` of values with different local types: (size, type) of each."""

    dim: int
    parts: tuple[tuple[int, LocalType], ...]


LocalType = frozenset[str | Cut | Joined]
Shape = tuple[int, ...]
WHOLE: LocalType = frozenset({SAME})
ADDENDS: LocalType = frozenset({PART})
UNKNOWN: LocalType = frozenset({ANY})


class LocalCall(Call):
    """A call with the shapes of one rank: a dim of size one may be a shard, so it has a factor, too."""

    def factor(self, name: str, size: int) -> tuple[str, ...]:
        known = self.sizes.get(name, size)
        self.sizes[name] = max(known, size)
        return () if size == 1 != known else (name,)


def local_type_of(placement: Placement, shape: Shape, alone: bool = True) -> LocalType:
    """The local type of a value of this local shape; ``alone``: no other axis shards the same dim."""
    if isinstance(placement, Shard):
        if placement.blocks and not alone:
            return frozenset({(placement.dim, 0)})
        return with_single_rows(
            frozenset({(placement.dim, rows_in_piece(placement.blocks, shape[placement.dim]))}), shape
        )
    return ADDENDS if isinstance(placement, Partial) else WHOLE


def with_single_rows(held: LocalType, shape: Shape) -> LocalType:
    """A shard of one row may also be an addend of a sum over a dim of size one, whose op was dropped. And it may have
    any type that a view to its own shape gives, as [S, B, 1 head, D] viewed as [S, B * 1 head, D]: that was dropped
    too."""
    told = frozenset(x for x in held if isinstance(x, tuple) and x[1] and x[0] < len(shape))
    held = held | viewed(told, shape, shape) if told and 0 not in shape else held
    single = any(isinstance(x, tuple) and shape[x[0] : x[0] + 1] == (1,) for x in held)
    return held | ADDENDS if single else held


def rows_in_piece(blocks: Sequence[int], size: int) -> Rows:
    """How many rows of a shard of ``size`` are adjacent in the global value."""
    even = len(set(blocks)) < 2 and not any(b < 0 for b in blocks) and size % max(len(blocks), 1) == 0
    return size // max(len(blocks), 1) if even else 0


def constant_held(dims: int, zero: bool) -> LocalType:
    """One number everywhere: a shard of itself on every dim; zero is partial as well."""
    return frozenset({SAME, *((d, None) for d in range(dims)), *([PART] if zero else [])})


def is_unknown(held: LocalType) -> bool:
    """Whether nothing is known of it as one value."""
    return ANY in held or all(isinstance(x, Joined) for x in held)


def is_vague(held: LocalType) -> bool:
    """Whether it is a shard for which every choice leaves the number of adjacent rows unknown: where that matters (a
    dim of size one may stand between rows), nothing is known."""
    return all(isinstance(x, tuple) and x[1] == 0 for x in held)


def may_be(found: LocalType, expected: LocalType) -> bool:
    """Whether a value may have the expected type."""
    if is_unknown(found) or is_unknown(expected) or found & expected:
        return True
    if SAME in found and len(expected) > 1:  # a shard of one row: an expand by one was dropped
        return True
    rows = {e[0]: e[1] for e in expected if isinstance(e, tuple)}
    return any(f[0] in rows and not (f[1] and rows[f[0]]) for f in found if isinstance(f, tuple))


def shown(held: LocalType) -> str:
    """For messages."""
    words = {f"a shard on dim {x[0]}" if isinstance(x, tuple) else str(x) for x in held if not isinstance(x, Joined)}
    return " or ".join(sorted(words)) or "several values"


# --- through a rule -----------------------------------------------------------------------------------------


def through(rule: Rule, operands: Sequence[LocalType], strict: bool = False) -> list[LocalType]:
    """The types of an operator's results; empty where its operands do not fit the rule. ``strict``: the operator is
    linear in no operand but those that the rule names; otherwise its linearity is unknown."""
    used = [(i, d, held) for i, (d, held) in enumerate(zip(rule.operands, operands, strict=True)) if d is not None]
    if any(is_unknown(held) for _, _, held in used):
        return [UNKNOWN] * len(rule.results)
    found: list[set[str | Cut | Joined]] = [set() for _ in rule.results]
    if all(SAME in held for _, _, held in used):
        given = {f for _, dims, _ in used for f in _factors(dims)} | set(rule.blocked)
        for made, dims in zip(found, rule.results, strict=True):
            made |= {SAME, *((d, None) for d, dim in enumerate(dims) if not given.issuperset(_factors([dim])))}
    if any(all((PART if i in addends else SAME) in held for i, _, held in used) for addends in rule.linear):
        for made in found:
            made.add(PART)
    told = frozenset().union(*rule.linear)
    unsaid = [i for i, _, held in used if PART in held and i not in told and not strict]
    if unsaid and all(SAME in held for _, _, held in used):  # gradient of a replicated computation
        for made in found:
            made.add(PART)
    spanned = bool(unsaid) or any(
        isinstance(x, tuple) and not _factors([dims[x[0]]]) for _, dims, held in used for x in held
    )
    for factors, rows in _cuts(rule, used):
        if any(f in rule.blocked for f in factors):
            spanned = True
            continue
        for made, dims in zip(found, rule.results, strict=True):
            made.add(_made(rule, dims, factors, rows))
    return [UNKNOWN if spanned and not found[0] else frozenset(made) for made in found]


Used = list[tuple[int, Dims, LocalType]]


def _factors(dims: Iterable[Any]) -> list[str]:
    return [f for dim in dims for f in (dim.parts if isinstance(dim, Cat) else dim)]


def _cuts(rule: Rule, used: Used) -> list[tuple[frozenset[str], dict[str, Rows]]]:
    """(factors sharded together, rows of each) for every choice of shards for the operands."""
    met: dict[frozenset[str], dict[str, dict[int, set[Rows]]]] = {}
    fits: dict[int, set[frozenset[str]]] = {}
    for i, dims, held in used:
        for cut in held:
            if isinstance(cut, tuple):
                for factor, rows in _factors_at(rule, dims[cut[0]], cut[1]):
                    group = _together(rule, factor)
                    met.setdefault(group, {}).setdefault(factor, {}).setdefault(i, set()).add(rows)
                    fits.setdefault(i, set()).add(group)
    return [
        (group, rows)
        for group, found in met.items()
        if all(_fits(rule, i, held, group, group in fits.get(i, ())) for i, _, held in used)
        for rows in _readings({factor: _common(by_operand) for factor, by_operand in found.items()})
    ]


def _readings(options: Mapping[str, Sequence[Rows]]) -> list[dict[str, Rows]]:
    """Rows of factors that are sharded together, in all combinations that a result can distinguish: a concatenation
    knows the rows if they are the same in all its operands, another dim those of one factor. (All combinations would be
    exponential in the entries of a bucket.)"""
    first = {factor: rows[0] for factor, rows in options.items() if rows}
    if len(first) < len(options):
        return []
    alike = set.intersection(*map(set, options.values()))
    found: list[dict[str, Rows]] = [dict.fromkeys(options, rows) for rows in alike]
    return found + [first | {factor: n} for factor, rows in options.items() for n in rows]


def _fits(rule: Rule, i: int, held: LocalType, group: frozenset[str], cut: bool) -> bool:
    """Whether an operand may be combined with shards of ``group``. A value that is the same on all ranks may have the
    factor: it is then equal in all rows, as an expanded value is."""
    if rule.addends.get(i) in group:
        return PART in held
    return cut or SAME in held


def _together(rule: Rule, factor: str) -> frozenset[str]:
    """The factors that are sharded with one: the other operands of a concatenation; keys with queries; a reverse."""
    if isinstance(rule, LinkedRule) and factor in rule.linked:
        return frozenset(rule.linked)
    if isinstance(rule, FlipRule):
        return frozenset({factor, *(pair for both in rule.flipped.items() if factor in both for pair in both)})
    cats = [dim for dims in (*rule.operands, *rule.results) for dim in dims or () if isinstance(dim, Cat)]
    return frozenset({factor, *(part for cat in cats if factor in cat.parts for part in cat.parts)})


def _common(by_operand: Mapping[int, set[Rows]]) -> list[Rows]:
    """Rows of a factor that all operands may have, each of which may have several; 0 (unknown) where they disagree."""
    told = [known for rows in by_operand.values() if (known := rows - {None})]
    if not told:
        return [None]
    return [*set.intersection(*told)] if len(set.union(*told)) == 1 else [*set.intersection(*told) - {0}, 0]


def _factors_at(rule: Rule, dim: Any, rows: Rows) -> list[tuple[str, Rows]]:
    """The factors of a dim that may be sharded, and the rows of each."""
    if isinstance(dim, Cat):
        return [(part, _of_part(rule.sizes[part], rows)) for part in dim.parts]
    if len(dim) < 2 or not rows:
        return [(f, rows) for f in dim]
    return [(dim[k], n) for k, n in _standing(_spans([rule.sizes[f] for f in dim]), rows)]


def _of_part(size: int, rows: Rows) -> Rows:
    return rows if not rows else size if rows % size == 0 else rows if size % rows == 0 else 0


def _made(rule: Rule, dims: Dims, factors: frozenset[str], rows: dict[str, Rows]) -> str | Cut:
    """The type of a result when factors are sharded."""
    for d, dim in enumerate(dims):
        names = _factors([dim])
        if isinstance(dim, Cat) and factors.intersection(names):
            sizes = {(rule.sizes[f], rows.get(f, 0)) for f in names}
            return d, next(iter(sizes))[1] if len(sizes) == 1 and all(n == r for n, r in sizes) else 0
        for k, f in enumerate(names):
            if f in factors:
                here = rows.get(f, 0)
                return d, here and here * math.prod(rule.sizes[x] for x in names[k + 1 :])
    return SAME if any(f in rule.absorbed for f in factors) else PART


# --- through a view -----------------------------------------------------------------------------------------


def viewed(held: LocalType, source: Shape, target: Shape) -> LocalType:
    """The type of a value in another shape. A shard's rows keep their position among all elements: [B, S, H] sharded on
    S becomes [B * S, H], of whose rows S are adjacent, and [B, S, H] again."""
    if is_unknown(held) or 0 in source:
        return UNKNOWN
    before, after = _spans(source), _spans(target)
    found: set[str | Cut | Joined] = set()
    for x in held:
        if not isinstance(x, tuple):
            found |= {x} if isinstance(x, str) else set()
            continue
        (lo, hi), rows = before[x[0]], x[1]
        if not rows:
            found |= {(d, rows) for d, (a, b) in enumerate(after) if _meet(lo, hi, a, b)}
            continue
        found |= set(_standing(after, rows * lo))
        if source[x[0]] == 1:  # a shard of one row may stand anywhere
            found |= {(d, 1) for d, size in enumerate(target) if size == 1}
    return frozenset(found)


def _standing(spans: Sequence[tuple[int, int]], first: int) -> list[tuple[int, int]]:
    """(dim, rows) wherever shards of ``first`` elements may meet: before a dim's rows, between them, or after each
    single row, as if a dim of size one stood there."""
    return [(d, first // a) for d, (a, b) in enumerate(spans) if a <= first <= b]


def _spans(shape: Sequence[int]) -> list[tuple[int, int]]:
    """(elements within one row of a dim, with the whole dim) of each."""
    behind = [math.prod(shape[i:]) for i in range(len(shape) + 1)]
    return list(zip(behind[1:], behind, strict=False))


def _meet(lo: int, hi: int, a: int, b: int) -> bool:
    """Whether two dims share elements; one of size one does where it stands at or inside the other."""
    return max(lo, a) < min(hi, b) or ((lo == hi or a == b) and max(lo, a) <= min(hi, b))
