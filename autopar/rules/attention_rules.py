"""The rule of attention: what may be cut on which axis."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from autopar.ir.placement import scaled_blocks
from autopar.rules.call import Call
from autopar.rules.rule import Cut, Dims, Rule, RuleError


@dataclass(frozen=True)
class LinkedRule(Rule):
    """A rule with two factors that are cut together or not at all: the queries and keys of attention over cut
    sequences. ``dealt``: the blocks of each, of which the ratios count: those that the algorithm is planned for.
    Operands that come otherwise (keys joined from two sequences, each cut) are dealt anew."""

    linked: tuple[str, str] = ("s", "t")
    dealt: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    def completed(self, cut: Cut) -> Cut:
        full = super().completed(cut)
        if any(f in full for f in self.linked):
            for factor, blocks in zip(self.linked, self.dealt):
                planned = scaled_blocks(blocks, self.sizes[factor]) or (self.sizes[factor],)
                if full.setdefault(factor, planned) != planned:
                    raise RuleError(f"{full[factor]} of {factor} is not how its sequence is dealt: {planned}")
        return full


def attention_rule(call: Call) -> Rule:
    """q (b, hk·g, s, d), k (b, hk, t, d), v (b, hk, t, e) -> (b, hk·g, s, e), (b, hk·g, s). Heads and batch may be
    cut; so may queries into token slices (axis "sl") where each attends to keys that an earlier slice or its own made;
    so may queries and keys together on axis "cp", where an algorithm is planned for it (``meta["dealt"]``).
    """
    batch, heads, queries, width = call.shape("q")
    _, kv_heads, keys, _ = call.shape("k")
    b, s, t = call.factor("b", batch), call.factor("s", queries), call.factor("t", keys)
    d, e = call.factor("d", width), call.factor("e", call.shape("v")[3])
    hk, g = call.factor("hk", kv_heads), call.factor("g", heads // kv_heads)
    h = (*hk, *g)
    all_keys = call.factor("all", keys) if call.axis == "cp" else t  # masks are told of the whole sequence
    full: Dims = (b, h, s, all_keys)
    optional: dict[str, Dims] = {"sinks": (h,), "key_mask": (b, all_keys), "segments": (b, all_keys)}
    operands: list[Dims | None] = [(b, h, s, d), (b, hk, t, d), (b, hk, t, e)]
    for name in ("bias", "key_mask", "segments", "sinks", "seed"):
        if isinstance(call.args.get(name), Node):
            shape = call.shape(name)
            if name == "bias":
                operands.append(_aligned(call, shape, full, (batch, heads, queries, keys)))
            elif name == "seed":
                operands.append(())
            else:
                operands.append(tuple(() if n == 1 else dim for n, dim in zip(shape, optional[name], strict=True)))
    operands += [None] * (len(call.operands) - len(operands))
    blocked = _mixed(call, s, t)
    blocked |= {f: "the mask is told of all keys" for f in all_keys if f not in t}
    blocked |= {f: "attention contracts it before a softmax" for f in d}
    blocked |= {f: "the log-sum-exp beside the result does not have it" for f in e}
    rule = call.rule(operands, [(b, h, s, e), (b, h, s)], blocked=blocked)
    dealt = call.node.meta.get("dealt")
    if call.axis == "cp" and dealt is not None and not call.relaxed:
        return LinkedRule(**vars(rule), dealt=dealt)
    return rule


def _mixed(call: Call, s: tuple[str, ...], t: tuple[str, ...]) -> dict[str, str]:
    """Which of queries and keys cannot be cut, and why."""
    if call.axis == "sl":
        causal = call.args["causal"] and call.shape("q")[2] == call.shape("k")[2]
        return {f: "queries attend to later tokens: no causal flag is set" for f in (t if causal else (*s, *t))}
    if call.axis == "cp" and (call.relaxed or "dealt" in call.node.meta):
        return {}
    return {f: "attention mixes it; context parallelism cuts it" for f in (*s, *t)}


def _aligned(call: Call, shape: tuple[int, ...], full: Dims, sizes: tuple[int, ...]) -> Dims:
    offset = len(full) - len(shape)
    return tuple(full[i + offset] if n == sizes[i + offset] and n != 1 else () for i, n in enumerate(shape))
