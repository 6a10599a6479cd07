"""Rules of operators that read a neighbour's tokens, or what all tokens before have summed to: over cp, the axis that
shards sequences, they run on the tokens of a rank and exchange a few rows (`autopar.ir.halo`, `autopar.ir.scans`). So
do reversals, which exchange nothing: shards have an order.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from torch.fx import Node

from autopar.ir.graph import arguments
from autopar.ir.placement import Pieces, Shard
from autopar.ir.scans import SCANS
from autopar.ops.token_windows import shift, token_conv1d
from autopar.rules.builders import UNARY, named_dims
from autopar.rules.call import Call
from autopar.rules.rule import ROUTED, UNITS, Cut, Dims, Rule, RuleError
from autopar.rules.space import convolution_rule
from autopar.rules.views import resized_dims

AXIS = "cp"
_SPANS = "the op spans it"


@dataclass(frozen=True)
class AlongRule(Rule):
    """``along``: factors whose shards exchange rows. They consist of chunks of the same length."""

    along: frozenset[str] = frozenset()

    def cut_of(self, dims: Dims, shard: Shard, ranks: Pieces) -> Cut:
        cut = super().cut_of(dims, shard, ranks)
        for factor in self.along & cut.keys():
            if len({abs(b) for b in cut[factor]}) > 1 or UNITS + factor in cut:
                raise RuleError(f"chunks of {factor} differ in length")
        return cut


def _along(call: Call, rule: Rule, factors: tuple[str, ...]) -> Rule:
    """The rule in which ``factors`` are sharded over cp, and over no other axis."""
    if call.axis != AXIS:
        return dataclasses.replace(rule, blocked=rule.blocked | dict.fromkeys(factors, _SPANS))
    blocked = {f: why for f, why in rule.blocked.items() if f not in factors}
    known = {f.name: getattr(rule, f.name) for f in dataclasses.fields(Rule)}
    return AlongRule(**known | {"blocked": blocked}, along=frozenset(factors))


def shift_rule(call: Call) -> Rule:
    """(.. d ..) -> (.. d ..)."""
    dims = named_dims(call, call.shape("x"))
    return _along(call, call.rule([dims], [dims], linear=UNARY), dims[call.args["dim"]])


def token_conv1d_rule(call: Call) -> Rule:
    """x (b, g·ci, t), w (g·co, ci, k) -> (b, g·co, t)."""
    rule = convolution_rule(call)
    source, *others = rule.operands
    (made,) = rule.results
    assert source is not None
    (time,) = named_dims(call, call.result[2:], "t")
    sizes = {f: n for f, n in call.sizes.items() if f[0] not in "xy"}
    blocked = {f: why for f, why in rule.blocked.items() if f in sizes}
    operands, results = ((*source[:2], time), *others), ((*made[:2], time),)
    return _along(
        call, dataclasses.replace(rule, operands=operands, results=results, sizes=sizes, blocked=blocked), time
    )


def scan_rule(call: Call) -> Rule:
    """cumsum, cumprod, logcumsumexp: (.. d ..) -> (.. d ..). Whether they are linear was never needed."""
    dims = named_dims(call, call.result)
    rule = call.rule([dims], [dims])
    return _along(call, rule, dims[int(call.args["dim"]) % len(dims)] if dims else ())


@dataclass(frozen=True)
class FlipRule(Rule):
    """``flipped``: factor -> that of the reversed dim. Each rank reverses its own rows, so that the blocks of the
    result are those of the operand in reverse, dealt from the other end: (s,) becomes (-s,), a zigzag stays."""

    flipped: dict[str, str] = field(default_factory=dict)

    def completed(self, cut: Cut) -> Cut:
        made = dict(super().completed(cut))
        for one, other in (*self.flipped.items(), *((b, a) for a, b in self.flipped.items())):
            if UNITS + one in made or ROUTED + one in made:
                raise RuleError(f"rows of padding, or routed ones, stay where they are, and {one} is reversed")
            if one in made:
                turned = tuple(-b for b in reversed(made[one]))
                if made.setdefault(other, turned) != turned:
                    raise RuleError(f"blocks of {one} and {other} are not each other's reverse")
        return made


def flip_rule(call: Call) -> Rule:
    """(.. d ..) -> (.. r ..), r the reverse of d."""
    rule = resized_dims(call)
    if call.axis != AXIS:
        return rule
    (source, *_), (made,) = rule.operands, rule.results
    assert source is not None
    pairs = {d[0]: n[0] for d, n in zip(source, made, strict=True) if d and n and d != n}  # type: ignore[index]
    blocked = {f: why for f, why in rule.blocked.items() if f not in {*pairs, *pairs.values()}}
    known = {f.name: getattr(rule, f.name) for f in dataclasses.fields(Rule)}
    return FlipRule(**known | {"blocked": blocked}, flipped=pairs)


def rows_sent(call: Node, axis: str) -> int:
    """Rows of a chunk that a call sends if it runs on the tokens of a rank: of its operand, or of its result."""
    args = arguments(call) if axis == AXIS else {}
    if call.target is token_conv1d:
        return int(args["before"] + args["behind"]) if args else 0
    if call.target is shift:
        return abs(int(args["by"])) if args else 0
    return int(bool(args) and call.target in SCANS)
