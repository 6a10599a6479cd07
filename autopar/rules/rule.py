"""Sharding rules: how an operator acts on shards, as data, and the one function that applies them.

A rule names the *factors* of every dim of every operand and result, in the style of Shardy:
``linear: (... i), (o i) -> (... o)``. A factor that is in an operand but not in a result is contracted: sharding it
leaves the result Partial. What factors alone cannot say is listed beside them: factors that may not be sharded
(``blocked``: softmax, norms, slices), operands in which the op is linear (what may pass a Partial), dims that merge
several factors (``("b", "s")``, major to minor) or concatenate them (`Cat`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.ir.placement import (
    INVARIANT,
    PARTIAL,
    REPLICATE,
    Invariant,
    Partial,
    Pieces,
    Placement,
    Replicate,
    Shard,
    extent,
    scaled_blocks,
)


@dataclass(frozen=True)
class Cat:
    """A dim that is the concatenation of factors, all sharded together or not at all."""

    parts: tuple[str, ...]


Dim = tuple[str, ...] | Cat
Dims = tuple[Dim, ...]
Cut = dict[str, tuple[int, ...]]  # the factors sharded on an axis, with the blocks of each, as in `Shard`
ROUTED = "routed "  # prefix of a factor's name in a Cut: its shards are routed rows
UNITS = "units "  # the same, with the units of a factor's blocks, if they are padded (`Shard.units`)


class RuleError(Exception):
    """The placements do not fit the rule; the message says why."""


class Indivisible(RuleError):
    """``size``: of a factor, or of a block of it, that does not divide over the ranks, or into the units."""

    def __init__(self, size: int, what: str, units: int, ranks: Pieces) -> None:
        over = f"into {units} units" if units else f"over {ranks} ranks"
        super().__init__(f"a size of {size}{what} does not divide {over}")
        self.size = size


@dataclass(frozen=True)
class Rule:
    """Factors of each operand and result; see the module's docstring.

    ``operands[i] is None``: only the shape of the operand matters (zeros_like), any placement will do.
    ``absorbed``: factors whose reduction happens inside the op, so that the result is Invariant (the vocabulary in a
    loss). ``linear``: sets of operands that may be Partial together (others then Replicate), giving a Partial result.
    ``keep_partial``: whether passing a Partial on is as cheap as reducing it first (views, sums of addends).
    ``addends``: operand -> factor; when the factor is sharded the operand must be Partial: each rank's own addend
    (the row offsets of its tokens).
    ``one_block``: factors of which rank r must hold the r-th run of consecutive entries (the rows of a vocabulary).
    ``rows``: (rows sorted by expert, tokens, experts), of which an operator may lack tokens or experts ("").
    Rows are sharded with their tokens, or, as routed ones, with their experts. ``expert_units``: the number of experts,
    if it does not divide over their axis.
    ``imposed``: what the plan wants sharded, whether or not operands have it or may be sharded.
    """

    operands: tuple[Dims | None, ...]
    results: tuple[Dims, ...]
    sizes: dict[str, int]
    blocked: dict[str, str] = field(default_factory=dict)
    absorbed: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    keep_partial: bool = False
    addends: dict[int, str] = field(default_factory=dict)
    one_block: frozenset[str] = frozenset()
    rows: tuple[str, str, str] = ("", "", "")
    expert_units: int = 0
    imposed: Cut = field(default_factory=dict)

    def cut_of(self, dims: Dims, shard: Shard, ranks: Pieces) -> Cut:
        """The factors that a Shard of a tensor with these dims shards. Raises RuleError if it shards none cleanly."""
        dim = dims[shard.dim]
        size = self.dim_size(dim)
        blocks, parts = shard.blocks or (size,), shard.units or ranks
        cut = self._cut_cat(dim, blocks) if isinstance(dim, Cat) else self._cut_merged(dim, blocks, parts)
        if cut is not None and shard.routed:
            cut |= {ROUTED + factor: () for factor in list(cut)}
        if cut is None:
            raise RuleError(f"{shard} does not fall on a boundary of the dim's factors {self.show(dim)}")
        for factor, sizes in cut.items():
            if factor in self.blocked:
                raise RuleError(f"dim {shard.dim} of size {size} cannot be sharded: {self.blocked[factor]}")
            if factor in self.one_block and sizes != (self.sizes[factor],):
                raise RuleError(f"{shard} shards blocks, but a rank must hold consecutive entries of {factor}")
            if any(b % parts for b in sizes):
                raise Indivisible(next(b for b in sizes if b % parts), "", shard.units, ranks)
            if shard.units and not self._takes_padding(factor):
                raise RuleError("rows of padding would count as others do")
        for part in self._beside(cut):
            if self.sizes[part] % parts:
                raise Indivisible(self.sizes[part], ", concatenated with it,", shard.units, ranks)
        return cut | {UNITS + factor: (shard.units,) for factor in cut} if shard.units else cut

    def _takes_padding(self, factor: str) -> bool:
        """Whether zeros in padded shards change nothing: tokens are sent to experts, as padding must not be, or to none
        of those that are padding; and where a factor is contracted, the op is linear in an operand that has it."""
        if factor in self.rows:
            return factor == self.rows[-1]
        if factor in self.absorbed or all(factor in factors_of(dims) for dims in self.results):
            return True
        having = {i for i, dims in enumerate(self.operands) if dims is not None and factor in factors_of(dims)}
        return any(kept <= having for kept in self.linear)

    def _beside(self, cut: Cut) -> list[str]:
        """The other entries of concatenations of which some are sharded."""
        cats = [dim for dims in (*self.operands, *self.results) for dim in dims or () if isinstance(dim, Cat)]
        touched = [cat for cat in cats if any(part in cut for part in cat.parts)]
        return [part for cat in touched for part in cat.parts if part not in cut]

    def completed(self, cut: Cut) -> Cut:
        """Sharding some entries of a concatenation shards the others too, each as one block."""
        units = next((given for name, given in cut.items() if name.startswith(UNITS)), None)
        for part in self._beside(cut):
            cut = cut | {part: (self.sizes[part],)} | ({UNITS + part: units} if units else {})
        return self._with_rows(dict(cut))

    def joined(self, cut: Cut, other: Cut) -> Cut | None:
        """The union of two cuts, if they agree on all factors that both name."""
        left, right, unnamed = self.completed(cut), self.completed(other), {*self._beside(cut), *self._beside(other)}
        agree = left.keys() == right.keys() and all(left[f] == right[f] for f in left.keys() - unnamed)
        return cut | other if agree else None

    @property
    def imposed_cut(self) -> Cut | None:
        """The factors that the plan shards."""
        return self.completed(self.imposed) if self.imposed else None

    def _with_rows(self, cut: Cut) -> Cut:
        """Add the factors that are sharded together with rows sorted by expert."""
        rows, tokens, experts = self.rows
        if rows and (experts in cut or ROUTED + rows in cut):
            cut |= {rows: (self.sizes[rows],), ROUTED + rows: ()}
            cut |= {UNITS + experts: (self.expert_units,)} if self.expert_units else {}
            return cut | {experts: (self.sizes[experts],)} if experts else cut
        for given, other in ((rows, tokens), (tokens, rows)):
            if given in cut and other in self.sizes:
                if any(b * self.sizes[other] % self.sizes[given] for b in cut[given]):
                    raise RuleError(
                        f"blocks of {cut[given]} of {self.sizes[given]} do not scale to {self.sizes[other]}"
                    )
                cut.setdefault(other, scaled_blocks(cut[given], self.sizes[other]))
        return cut

    def _cut_cat(self, dim: Cat, blocks: tuple[int, ...]) -> Cut | None:
        cut, position = {}, 0
        for part in dim.parts:
            taken: list[int] = []
            while extent(taken) < self.sizes[part] and position < len(blocks):
                taken.append(blocks[position])
                position += 1
            if extent(taken) != self.sizes[part]:
                return None
            cut[part] = tuple(taken)
        return cut

    def _cut_merged(self, dim: tuple[str, ...], blocks: tuple[int, ...], parts: Pieces) -> Cut | None:
        sizes = [self.sizes[f] for f in dim]
        fallback = None
        for i, factor in enumerate(dim):
            outer, inner = math.prod(sizes[:i]), math.prod(sizes[i + 1 :])
            period = len(blocks) // outer
            if len(blocks) % outer or blocks != blocks[:period] * outer or any(b % inner for b in blocks[:period]):
                continue
            mine = tuple(b // inner for b in blocks[:period])
            if extent(mine) != sizes[i] or sizes[i] == 1:
                continue
            if all(b % parts == 0 for b in mine):
                return {factor: mine}
            fallback = fallback or {factor: mine}
        return fallback

    def shard_of(self, dims: Dims, cut: Cut) -> Shard | None:
        """The Shard that a cut means for a tensor with these dims; None if it has no sharded factor."""
        for position, dim in enumerate(dims):
            if isinstance(dim, Cat):
                if any(part in cut for part in dim.parts):
                    if not all(part in cut for part in dim.parts):
                        raise RuleError("only some operands of a concatenation are sharded")
                    (units,) = cut.get(UNITS + dim.parts[0], (0,))
                    return Shard(position, tuple(b for part in dim.parts for b in cut[part]), units=units)
                continue
            for i, factor in enumerate(dim):
                if factor in cut:
                    outer = math.prod(self.sizes[f] for f in dim[:i])
                    inner = math.prod(self.sizes[f] for f in dim[i + 1 :])
                    if ROUTED + factor in cut:
                        return Shard(position, routed=True)
                    (units,) = cut.get(UNITS + factor, (0,))
                    return Shard(position, tuple(b * inner for b in cut[factor]) * outer, units=units)
        return None

    def dim_size(self, dim: Dim) -> int:
        sizes = [self.sizes[f] for f in (dim.parts if isinstance(dim, Cat) else dim)]
        return sum(sizes) if isinstance(dim, Cat) else math.prod(sizes)

    def show(self, dim: Dim) -> str:
        parts = dim.parts if isinstance(dim, Cat) else dim
        return (" + " if isinstance(dim, Cat) else "·").join(f"{f}={self.sizes[f]}" for f in parts) or "1"

    def required(self, cut: Cut) -> list[Placement | None]:
        """Operand placements that a cut requires; None where any will do."""
        out: list[Placement | None] = []
        for i, dims in enumerate(self.operands):
            if dims is None:
                out.append(None)
            else:
                adds = self.addends.get(i) in cut
                out.append(self.shard_of(dims, cut) or (PARTIAL if adds else REPLICATE))
        return out

    def produced(self, cut: Cut) -> list[Placement]:
        """Result placements under a cut."""
        whole = INVARIANT if any(f in self.absorbed for f in cut) else PARTIAL
        return [self.shard_of(dims, cut) or whole for dims in self.results]


def factors_of(dims: Dims) -> set[str]:
    """The names of all factors of a value."""
    return {f for dim in dims for f in (dim.parts if isinstance(dim, Cat) else dim)}


def apply(rule: Rule, operands: Sequence[Placement], gradients: Sequence[bool], ranks: Pieces) -> list[Placement]:
    """Result placements of an op whose operands have these placements: the type rule.

    ``gradients``: which operands carry a gradient. Those without may be either Replicate or Invariant.
    Raises RuleError when the op would be wrong on shards, or when a gradient would be summed never or twice.
    """
    used = [(i, p, g) for i, (p, g) in enumerate(zip(operands, gradients, strict=True)) if rule.operands[i] is not None]
    cut: Cut | None = rule.imposed_cut
    for i, p, _ in used if cut is None else ():
        if isinstance(p, Shard):
            dims = rule.operands[i]
            assert dims is not None
            mine = rule.cut_of(dims, p, ranks)
            both = mine if cut is None else rule.joined(cut, mine)
            if both is None:
                raise RuleError(f"operands are sharded on different factors: {sorted(cut or ())} and {sorted(mine)}")
            cut = both
    if cut is not None:
        cut = rule.completed(cut)
        for (i, p, g), need in zip(used, [n for n in rule.required(cut) if n is not None], strict=True):
            if not matches(p, need, g):
                raise RuleError(f"operand {i} is {p}, but sharding {sorted(cut)} needs {need}")
        return rule.produced(cut)
    partial = frozenset(i for i, p, _ in used if isinstance(p, Partial))
    if partial:
        if partial not in rule.linear:
            raise RuleError(f"the op is not linear in its Partial operands {sorted(partial)}")
        for i, p, g in used:
            if i not in partial and not matches(p, REPLICATE, g):
                raise RuleError(f"operand {i} is {p} next to a Partial operand, but needs R")
        return [PARTIAL for _ in rule.results]
    kinds = {type(p) for _, p, g in used if g}
    if kinds == {Replicate, Invariant}:
        raise RuleError("operands mix Replicate and Invariant")
    return [REPLICATE if Replicate in kinds else INVARIANT for _ in rule.results]


def matches(have: Placement, need: Placement, gradient: bool) -> bool:
    """Equal, or both replicated when no gradient flows."""
    if have == need:
        return True
    return not gradient and isinstance(have, (Replicate, Invariant)) and isinstance(need, (Replicate, Invariant))
