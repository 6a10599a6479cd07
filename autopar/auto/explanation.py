"""Why a layout was chosen: its price and band, what each neighbour costs or where it does not fit, and what limits it.

explanation = explain(found, pricing)
explanation.lines()      sentences
explanation.as_dict()    the same as JSON
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from autopar.auto.pricing import Pricing, exposed
from autopar.auto.search import BAND, Candidate, Found, search
from autopar.auto.space import ENTRIES, POLICIES, Question, Space, divisors
from autopar.cost.cluster import Cluster
from autopar.cost.layout import OUTER_TO_INNER, Layout
from autopar.cost.layout_price import Price
from autopar.options import Options

GIB = 1e9  # chips and prices count memory in these
WORDS = {
    "products": "products", "attention": "attention", "element-wise": "element-wise operators",
    "host": "launches by the host", "recomputation": "recomputation", "bubble": "pipeline bubble",
    "head": "head and loss", "optimizer": "optimizer", "jitter": "jitter of many ranks",
    "tp": "exposed exchanges of tp", "cp": "exposed exchanges of cp", "ep": "exposed exchanges of ep",
    "dp": "exposed gathers and reductions of dp", "pp": "exposed transfers between stages",
}  # fmt: skip
GROUPS = {
    "computation": ("products", "attention", "head"),
    "memory bandwidth": ("element-wise", "optimizer"),
    "the network": ("tp", "cp", "ep", "dp", "pp"),
    "the pipeline bubble": ("bubble",),
    "recomputation": ("recomputation",),
    "the host": ("host",),
}  # what a step may wait for -> causes
# what another value of an entry changes as well
DEPENDENTS = {
    "tp": ("sequence_parallel", "dp_replicate"), "cp": ("attention", "cp_load_balance", "dp_replicate"),
    "ep": ("token_dispatcher", "dp_replicate"), "pp": ("schedule", "virtual_stages"),
    "zero": ("dp_replicate", "reduce_grads", "reshard_after_forward"), "schedule": ("virtual_stages",),
    "micro_batch": ("schedule", "virtual_stages"),
}  # fmt: skip
SHOWN = 400  # candidates in a picture
WORTH_SAYING = 0.005  # of a step


@dataclass(frozen=True)
class Neighbour:
    """The choice with another value of one entry. name: "tp=4". layout, price: None if there is no such layout."""

    name: str
    sentence: str
    layout: Layout | None = None
    price: Price | None = None


@dataclass(frozen=True)
class Explanation:
    """A choice in sentences. pruned: what became of the layouts that were not chosen. remarks: what nobody measured,
    and what does not run yet."""

    found: Found
    pricing: Pricing
    neighbours: tuple[Neighbour, ...]
    limits: tuple[str, ...]
    pruned: tuple[str, ...]
    remarks: tuple[str, ...]
    carried: Mapping[str, Any] = field(default_factory=dict)  # the user's options that are not searched

    @property
    def options(self) -> dict[str, Any]:
        """The options of `autopar.parallelize`, without those that are as by default."""
        counts = self.choice.layout.layers
        cuts = {"split_points": self.pricing.model.split_points(counts)} if counts else {}
        return chosen_options(self.choice.layout) | cuts | dict(self.carried)

    @property
    def choice(self) -> Candidate:
        """The layout that was chosen."""
        assert self.found.choice is not None
        return self.found.choice

    @property
    def band(self) -> tuple[float, float]:
        """Seconds of a step, by the error of the stack's rows."""
        error = self.pricing.stack.error
        return self.choice.seconds * (1 - error), self.choice.seconds * (1 + error)

    def headline(self) -> list[str]:
        """The choice in three lines."""
        price, low_high, question = self.choice.price, self.band, self.found.question
        low, high = low_high
        options = _said(self.choice.layout)
        stack = self.pricing.stack
        return [
            f"mesh {self.choice.layout.mesh} for {question.ranks} GPUs ({self.pricing.cluster.name}), batch "
            f"{question.batch} x {question.seq}; {options}",
            f"{seconds(price.seconds)} per step ({seconds(low)} to {seconds(high)}: {stack.name} is off by "
            f"{stack.error:.0%} in the median), MFU {price.mfu:.1%}; {gigabytes(self.choice.memory)} on stage "
            f"{price.fullest}, of {gigabytes(price.limit)}",
            f"{self._beside()}; {self.pruned[0]}",
        ]

    def _beside(self) -> str:
        others = len(self.found.close) - 1
        if not others:
            return f"no other layout is within {BAND:.0%}"
        slower = self.choice.seconds / self.found.least - 1
        than = f"{slower:.1%} slower than the fastest" if slower > WORTH_SAYING else "the fastest"
        return f"the simplest of {others + 1} layouts within {BAND:.0%}, {than}"

    def lines(self) -> list[str]:
        """All sentences, a paragraph per entry."""
        return [
            *self.headline(), "", *(n.sentence for n in self.neighbours), "", *self.limits, "", *self.pruned[1:],
            *self.remarks,
        ]  # fmt: skip

    def _shown(self) -> list[Candidate]:
        """Candidates for a picture: those in the band, then the fastest."""
        rest = sorted((c for c in self.found.priced if c not in self.found.close), key=lambda c: c.seconds)
        return [*self.found.close, *rest][:SHOWN]

    def as_dict(self) -> dict[str, Any]:
        """What `autopar plan --auto --json` prints."""
        layout, price, question = self.choice.layout, self.choice.price, self.found.question
        low, high = self.band
        return {
            "mesh": dict(layout.mesh.sizes), "options": _plain(self.options), "ranks": question.ranks,
            "batch": question.batch, "seq": question.seq, "cluster": self.pricing.cluster.name,
            "stack": self.pricing.stack.name, "seconds": price.seconds, "low": low, "high": high, "mfu": price.mfu,
            "memory": list(price.memory), "limit": price.limit, "what_if": dict(self.pricing.what_if),
            "causes": [{f.name: getattr(c, f.name) for f in fields(c)} for c in price.causes],
            "close": [_row(c) for c in self.found.close], "candidates": [_row(c) for c in self._shown()], "band": BAND,
            "neighbours": [
                {"name": n.name, "sentence": n.sentence} | (_priced(n.price) if n.price else {})
                for n in self.neighbours
            ],
            "limits": list(self.limits), "counts": dict(self.found.counts), "refusals": dict(self.found.refusals),
            "pruned": list(self.pruned), "remarks": list(self.remarks),
        }  # fmt: skip


def _row(candidate: Candidate) -> dict[str, Any]:
    layout = candidate.layout
    name = f"{layout.mesh} {_said(layout)}"
    return {"name": name, "mesh": dict(layout.mesh.sizes), "options": chosen_options(layout)} | _priced(candidate.price)


def _priced(price: Price) -> dict[str, Any]:
    if price.refused:
        return {"refused": price.refused}
    return {"seconds": price.seconds, "memory": price.most_memory, "fits": price.fits}


def chosen_options(layout: Layout) -> dict[str, Any]:
    """The options of `autopar.parallelize` for a layout, without those that are as by default."""
    options, default = layout.options(), Options()
    return {f.name: value for f in fields(Options) if (value := getattr(options, f.name)) != getattr(default, f.name)}


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON."""
    return {
        name: value if isinstance(value, (int, float, str, list, tuple)) else str(value)
        for name, value in options.items()
    }


def seconds(value: float) -> str:
    """12.3 s or 45.6 ms"""
    return f"{value:,.3g} s" if value >= 1 else f"{1e3 * value:,.3g} ms"


def gigabytes(value: float) -> str:
    """81.2 GB"""
    return f"{value / GIB:,.1f} GB"


def explain(found: Found, pricing: Pricing) -> Explanation:
    """Why a search chose what it did. Raises ValueError if nothing fits: the nearest layout, and what would fit."""
    if found.choice is None:
        raise ValueError(why_nothing_fits(found, pricing))
    neighbours = tuple(_neighbours(found, found.choice, pricing))
    return Explanation(
        found, pricing, neighbours, tuple(_limits(found, found.choice, pricing)), tuple(_pruned(found)),
        tuple(_remarks(found.choice, pricing)),
    )  # fmt: skip


# --- neighbours ----------------------------------------------------------------------------------------------


def _neighbours(found: Found, choice: Candidate, pricing: Pricing) -> Iterator[Neighbour]:
    for name, value in _other_values(found.question, choice.layout):
        layout, reason = neighbour(found.question, choice.layout, name, value, pricing)
        label = f"{name}={value}"
        if layout is None:
            yield Neighbour(label, f"{label} cannot be: {reason}")
            continue
        price = pricing.price(layout)
        also = _changed_beside(name, choice.layout, layout)
        yield Neighbour(label, f"{label}{also} {compared(choice.price, price)}", layout, price)


def _changed_beside(name: str, layout: Layout, other: Layout) -> str:
    """The values of another layout that had to change with one, but for dp and the number of microbatches."""
    names = [e.name for e in ENTRIES if e.name not in (name, "data", "microbatches")]
    changed = [
        f"{n}={getattr(other, n)}" for n in names if getattr(other, n) != getattr(layout, n) and getattr(other, n)
    ]
    return f" with {', '.join(changed)}" if changed else ""


def _other_values(question: Question, layout: Layout) -> Iterator[tuple[str, Any]]:
    """(entry, value) next to those of a layout, without those that the user gives."""
    open_names = [e.name for e in ENTRIES if e.name not in question.fixed and e.name not in ("data", "microbatches")]
    for name in open_names:
        now = getattr(layout, name)
        if name in OUTER_TO_INNER and name != "dp_replicate":
            yield from (
                (name, size) for size in _beside(divisors(question.ranks), now) if _makes_sense(question, name, size)
            )
        elif name == "zero" and layout.dp * layout.cp * layout.ep > 1:
            yield from ((name, stage) for stage in (0, 1, 2, 3) if stage != now)
        elif name == "sequence_parallel" and layout.tp > 1:
            yield name, not now
        elif name == "activation_checkpoint":
            yield from ((name, policy) for policy in POLICIES if policy != now)
        elif name == "optimizer_cpu_offload":
            yield name, not now
        elif name == "schedule" and layout.pp > 1:
            yield from ((name, other) for other in ("1f1b", "interleaved", "zb_h1", "zb_v") if other != now)
    if "microbatches" not in question.fixed:
        yield from (("micro_batch", rows) for rows in _beside(divisors(question.batch), layout.micro_batch))


def _makes_sense(question: Question, name: str, size: int) -> bool:
    experts = size == 1 or (question.experts and question.experts % size == 0)
    return bool(experts) if name == "ep" else name != "pp" or size <= question.layers


def _beside(values: Sequence[int], now: int) -> list[int]:
    at = values.index(now) if now in values else 0
    return [*values[max(0, at - 1) : at], *values[at + 1 : at + 2]]


def neighbour(question: Question, layout: Layout, name: str, value: Any, pricing: Pricing) -> tuple[Layout | None, str]:
    """(the best layout with another value of one entry, why there is none). dp and the number of microbatches follow;
    what the entry does not leave possible changes as well, and what belongs to an axis that was not there."""
    kept = {entry.name: getattr(layout, entry.name) for entry in ENTRIES if entry.name not in ("data", "microbatches")}
    if layout.dp_replicate > 1:
        del kept["dp_replicate"]
    if not layout.schedule:  # a single stage has none
        del kept["schedule"]
    reason, dependents = "", DEPENDENTS.get(name, ())
    first = dependents if getattr(layout, name, None) == 1 else ()
    for dropped in dict.fromkeys((first, dependents, (*dependents, "zero", "schedule", "virtual_stages"))):
        fixed = {key: v for key, v in kept.items() if key not in dropped} | (
            {name: value} if name != "micro_batch" else {}
        )
        try:
            asked = replace(question, fixed={**question.fixed, **fixed})
        except ValueError as error:
            reason = str(error).removeprefix("auto: ")
            continue
        rows = value if name == "micro_batch" else layout.micro_batch
        found = [one for one in Space(asked).layouts() if one.micro_batch == rows or name != "micro_batch"]
        same = [one for one in found if one.micro_batch == rows] or found
        priced = [(pricing.price(one), one) for one in same]
        if not priced:
            reason = f"a batch of {question.batch} does not divide into such microbatches"
            continue
        best = min(priced, key=lambda pair: (bool(pair[0].refused), not pair[0].fits, pair[0].seconds if pair[0].fits
                                             else max(pair[0].memory, default=0.0)))  # fmt: skip
        return best[1], ""
    return None, reason


def compared(price: Price, other: Price) -> str:
    """What another price is, beside a price: "takes 12 % longer: 0.9 s more exposed exchanges of tp"."""
    if other.refused:
        return f"does not run: {other.refused}"
    more = other.seconds / price.seconds - 1
    if not other.fits:
        stage, time = other.fullest, "in the same time"
        if abs(more) > WORTH_SAYING:
            time = f"{abs(more):.0%} {'slower' if more > 0 else 'faster'}"
        memory = f"{gigabytes(other.most_memory)} on stage {stage}, of {gigabytes(other.limit)}"
        return f"does not fit: {memory} (it would be {time})"
    saved = price.most_memory - other.most_memory
    memory = (
        f", {gigabytes(abs(saved))} {'less' if saved > 0 else 'more'} memory" if abs(saved) > 0.01 * price.limit else ""
    )
    if abs(more) <= WORTH_SAYING:
        return f"takes as long{memory}"
    changes = _changes(price, other)
    name, change = max(changes.items(), key=lambda pair: pair[1] if more > 0 else -pair[1])
    verb, word = ("takes {:.0%} longer", "more") if more > 0 else ("takes {:.0%} less time", "less")
    return f"{verb.format(abs(more))}: {seconds(abs(change))} {word} {WORDS.get(name, name)}{memory}"


def _changes(price: Price, other: Price) -> dict[str, float]:
    names = dict.fromkeys(cause.name for cause in (*price.causes, *other.causes))
    return {name: exposed(other, name) - exposed(price, name) for name in names}


# --- what limits, and what was pruned ------------------------------------------------------------------------


def _limits(found: Found, choice: Candidate, pricing: Pricing) -> Iterator[str]:
    price = choice.price
    shares = {group: exposed(price, *names) / price.seconds for group, names in GROUPS.items()}
    order = sorted(shares, key=lambda group: -shares[group])
    rest = ", ".join(f"{group} {shares[group]:.0%}" for group in order[1:] if shares[group] > WORTH_SAYING)
    yield f"what limits: {order[0]}, {shares[order[0]]:.0%} of the step{f'; then {rest}' if rest else ''}"
    for words, faster in (("cards", {"card": 2.0}), ("links within a node", {"inside": 2.0})):
        changed = replace(pricing, cluster=_faster(pricing.cluster, **faster)).price(choice.layout)
        saved = 1 - changed.seconds / price.seconds
        if saved > WORTH_SAYING:
            yield f"{words} twice as fast save {saved:.0%}"
    roomy = [c.seconds for c in found.priced if c.memory <= 2 * price.limit]
    saved = 1 - min(roomy) / price.seconds
    if saved > WORTH_SAYING:
        yield f"chips with twice the memory save {saved:.0%} or more"


def _faster(cluster: Cluster, **factors: float) -> Cluster:
    groups = tuple(
        replace(group, **{name: getattr(group, name) * factor for name, factor in factors.items()})
        for group in cluster.groups
    )
    return replace(cluster, groups=groups)


def _pruned(found: Found) -> Iterator[str]:
    counts = found.counts
    yield f"{counts['priced']:,} of {counts['all']:,} layouts were priced"
    for key, words in (
        ("weights", "do not hold weights, gradients, optimizer states and the least that layers keep"),
        ("slower", f"cannot be within {BAND:.0%} of the fastest, by a bound"),
        ("too large", "of the priced ones do not fit"),
    ):
        if counts[key]:
            yield f"{counts[key]:,} {words}"
    for sentence, count in found.refusals.most_common(5):
        yield f"{count:,} do not run: {sentence}"


def _remarks(choice: Candidate, pricing: Pricing) -> Iterator[str]:
    yield from unequal_nodes(choice, pricing) if not pricing.cluster.is_uniform else ()
    if choice.price.guesses:
        yield f"nobody measured {', '.join(choice.price.guesses)} of stack {pricing.stack.name}: they are guesses"


SPEEDS = {"card": "network cards", "inside": "links within a node"}


def unequal_nodes(choice: Candidate, pricing: Pricing) -> Iterator[str]:
    """In which order ranks take the nodes, how many layers their stages have, and what slow nodes cost."""
    groups = pricing.cluster.groups
    if len({group.chip for group in groups}) > 1:
        yield f"start the ranks on the nodes in this order: {', then '.join(f'{g.nodes} of {g.chip}' for g in groups)}"
    if counts := choice.layout.layers:
        yield f"stages have {', '.join(map(str, counts))} layers, by the speed and the memory of their chips"
    at = 0
    for group in groups:
        ranks, at = f"ranks {at} to {at + group.ranks - 1}", at + group.ranks
        for name, words in SPEEDS.items():
            most = max(getattr(other, name) for other in groups if other.chip == group.chip)
            if getattr(group, name) < most:
                alike = tuple(replace(g, **{name: most}) if g is group else g for g in groups)
                other = replace(pricing, cluster=replace(pricing.cluster, groups=alike)).price(choice.layout)
                saved = 1 - other.seconds / choice.seconds
                yield (
                    f"slow {words} on {ranks} ({group.nodes} nodes of {group.chip}): {getattr(group, name) / 1e9:.3g} "
                    f"GB/s, others have {most / 1e9:.3g}; the choice takes {saved:.0%} less time without them"
                )


# --- nothing fits --------------------------------------------------------------------------------------------


def why_nothing_fits(found: Found, pricing: Pricing) -> str:
    """A sentence: the nearest layout, and what would make one fit."""
    question, near = found.question, found.nearest
    limit = gigabytes(pricing.limit)
    if near is None and found.refusals and not found.counts["weights"]:
        return f"auto: no layout of {question.ranks} GPUs runs: {found.refusals.most_common(1)[0][0]}"
    if near is None:
        lightest = min(pricing.weights(one) for one in Space(question).layouts())
        nearest = f"weights, gradients and optimizer states alone take {gigabytes(lightest)} of each rank's {limit}"
    else:
        nearest = (
            f"the nearest, {near.layout.mesh} with {_said(near.layout)}, takes {gigabytes(near.memory)} on stage "
            f"{near.price.fullest}, of {limit}"
        )
    remedies = " or ".join(_remedies(question, pricing)) or "a smaller model, or chips with more memory"
    return f"auto: nothing fits {question.ranks} GPUs: {nearest}; use {remedies}"


def _said(layout: Layout) -> str:
    return options_in_words(chosen_options(layout))


def options_in_words(options: Mapping[str, Any]) -> str:
    """Options without those that change nothing."""
    plain = {"activation_checkpoint": "none", "loss_chunks": 1}
    return " ".join(f"{n}={value}" for n, value in options.items() if plain.get(n) != value) or "options as by default"


def _remedies(question: Question, pricing: Pricing) -> Iterator[str]:
    """Changes of the question after which something fits."""
    for name in question.fixed:
        less = {key: value for key, value in question.fixed.items() if key != name}
        if _fits(replace(question, fixed=less), pricing):
            yield f"another {name} than {question.fixed[name]}"
    for factor in (2, 4, 8, 16):
        if _fits_with(question, pricing, ranks=question.ranks * factor):
            yield f"{question.ranks * factor} GPUs"
            return
        if _fits_with(question, pricing, ranks=question.ranks * factor, batch=question.batch * factor):
            yield f"{question.ranks * factor} GPUs with a batch of {question.batch * factor}"
            return


def _fits_with(question: Question, pricing: Pricing, **changes: int) -> bool:
    try:
        asked = replace(question, **changes)  # type: ignore[arg-type]
    except ValueError:
        return False
    cluster = replace(pricing.cluster, groups=tuple(replace(g, nodes=0) for g in pricing.cluster.groups[:1]))
    return _fits(asked, replace(pricing, cluster=cluster))


def _fits(question: Question, pricing: Pricing) -> bool:
    return search(Space(question), pricing).choice is not None
