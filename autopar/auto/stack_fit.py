"""The constants of a stack from measured steps: bounded, robust, and which of them the steps determine.

    fit = fitted(stack_named("autopar-eager", "H100"), measured_rows(lines, pricer))
    fit.stack, fit.lines()

Constants stay within bounds, a few wild measurements do not move them (``soft_l1``, then ``cauchy``), and directions
that no step depends on stay where they were: a weak pull to the start, as strong as the measurements are noisy.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.auto.priced_layouts import LayoutPricer, checked, layout_of
from autopar.cost.cluster import Cluster
from autopar.cost.efficiency import Stack
from autopar.cost.layer_costs import ModelCosts
from autopar.cost.layout import Layout
from autopar.cost.layout_price import price
from autopar.values import parse

Floats = NDArray[np.float64]
Path = tuple[str, ...]  # of a value in a stack: ("products",), ("attention", "flash2"), ("kernels", "flash1", "memory")

SHARES, SECONDS = (0.02, 1.4), (1e-7, 2e-3)  # bounds
BOUNDS: Mapping[str, tuple[float, float]] = {
    "products": SHARES, "attention": SHARES, "attention_backward": SHARES, "memory": SHARES, "inside": SHARES,
    "network": SHARES, "float8": SHARES, "launch": SECONDS, "start": SECONDS, "hidden": (0.0, 1.0),
    "jitter": (0.0, 0.05), "optimizer": (4.0, 300.0),
}  # fmt: skip
LINEAR = ("hidden", "jitter")  # others are fitted as logarithms
WIDE = 0.3  # how far constants are from their start, about, before anything is measured
NOISE = 0.003  # of a measured step, at least
KNOWN = 0.05  # a constant is determined if its error is smaller
EFFECT = 2e-3  # change of a step, of that of a constant, below which it does not depend on it
PART = 0.05  # of a direction: a constant with less is not of it
FAR = 10.0  # how far a constant may be off that nothing determines
LEAST_ROWS = 3
WILD = 0.05  # error of a step from which it counts less


@dataclass(frozen=True)
class MeasuredStep:
    """A layout that took ``seconds`` per step."""

    layout: Layout
    costs: ModelCosts
    cluster: Cluster
    seconds: float
    what_if: Mapping[str, Any] = field(default_factory=dict)

    def predicted(self, stack: Stack) -> float:
        """Seconds by a stack. Raises ValueError for what cannot be priced."""
        found = price(self.layout, self.costs, self.cluster, stack, **self.what_if)
        if found.refused:
            raise ValueError(found.refused)
        return found.seconds


@dataclass(frozen=True)
class Fit:
    """A stack with fitted constants. determined: constant -> its error, relative (of shares that are linear: absolute).
    together: constants that these steps do not tell apart. without_effect: no step depends on them. at_bound: they went
    as far as they may. errors: predicted / measured - 1 of each step. before: the same with the start."""

    stack: Stack
    determined: Mapping[str, float]
    together: tuple[tuple[str, ...], ...]
    without_effect: tuple[str, ...]
    at_bound: tuple[str, ...]
    errors: tuple[float, ...]
    before: tuple[float, ...]

    def lines(self) -> list[str]:
        """Sentences."""
        was, now = (float(np.median(np.abs(errors))) for errors in (self.before, self.errors))
        found = [f"{len(self.errors)} steps: off by {now:.1%} in the median, largest {max(map(abs, self.errors)):.1%} "
                 f"(before: {was:.1%})"]  # fmt: skip
        known = ", ".join(f"{name} {_shown(self.stack, name)}" for name in self.determined)
        found.append(f"determined: {known or 'nothing'}")
        several = [names for names in self.together if len(names) > 1]
        alone = [names[0] for names in self.together if len(names) == 1]
        found += [
            f"not told apart: {', '.join(names)}; measure other sequence lengths, widths or numbers of ranks"
            for names in several
        ]
        if alone:
            found.append(f"hardly determined: {', '.join(alone)}")
        if self.without_effect:
            found.append(f"no step depends on: {', '.join(self.without_effect)}; they stay as they were")
        if self.at_bound:
            found.append(f"at the end of its range: {', '.join(self.at_bound)}; something else is slow")
        return found


def fitted(stack: Stack, steps: Sequence[MeasuredStep], loose: Sequence[str] = ()) -> Fit:
    """Fit a stack to steps. loose: names of the constants that may change; by default all. Raises ValueError for less
    than three steps, or one that cannot be priced."""
    if len(steps) < LEAST_ROWS:
        raise ValueError(f"calibrate: needs {LEAST_ROWS} measured layouts or more, found {len(steps)}; measure others")
    problem = _Problem(stack, tuple(steps), tuple(_constants(stack, steps, loose)))
    return problem.fit()


def _constants(stack: Stack, steps: Sequence[MeasuredStep], loose: Sequence[str]) -> Iterable[Path]:
    kernels = list(dict.fromkeys(str(step.what_if.get("kernel") or stack.kernel) for step in steps))
    of_kernel = {name for kernel in kernels for name in stack.kernels.get(kernel, {})}
    for name in BOUNDS:
        if loose and name not in loose:
            continue
        if name in ("attention", "attention_backward"):
            yield from ((name, kernel) for kernel in kernels if kernel in getattr(stack, name))
        elif name == "hidden":
            yield from ((name, axis) for axis in ("dp", "zero", "tp", "pp", "cp", "ep"))
        else:
            yield (name,)
        if name in of_kernel:
            yield from (("kernels", k, name) for k in kernels if name in stack.kernels.get(k, {}))


def _get(stack: Stack, path: Path) -> float:
    value = getattr(stack, path[0])
    for name in path[1:]:
        value = value.get(name, HIDDEN.get(name, 0.0)) if path[0] == "hidden" else value[name]
    return float(value)


HIDDEN = {"dp": 0.8, "zero": 0.8}  # of stacks that say nothing


def _put(stack: Stack, path: Path, value: float) -> Stack:
    def inner(held: Any, rest: Path) -> Any:
        return value if not rest else {**held, rest[0]: inner(held.get(rest[0], {}), rest[1:])}

    return replace(stack, **{path[0]: inner(getattr(stack, path[0]), path[1:])})


def _name(path: Path) -> str:
    if path[0] == "kernels":
        return f"{path[2]} of {path[1]}"
    return f"{path[0]} {path[1]}" if path[0] == "hidden" else " of ".join(path)


def _path(stack: Stack, name: str) -> Path:
    words = name.replace(" of ", " ").split(" ")
    return ("kernels", words[1], words[0]) if len(words) > 1 and words[0] not in ATTENTION_OR_HIDDEN else tuple(words)


ATTENTION_OR_HIDDEN = ("attention", "attention_backward", "hidden")


def _shown(stack: Stack, name: str) -> str:
    value = _get(stack, _path(stack, name))
    return f"{1e6 * value:.3g} us" if name in ("launch", "start") else f"{round(value, 4):.3g}"


@dataclass(frozen=True)
class _Problem:
    """Constants in scaled units: logarithms, or shares as they are."""

    stack: Stack
    steps: tuple[MeasuredStep, ...]
    paths: tuple[Path, ...]

    def fit(self) -> Fit:
        start = self._scaled(self.stack)
        free = self._with_effect(start, self.paths)
        noise, found = NOISE, start
        for loss, wild in (("soft_l1", WILD), ("cauchy", None)):  # then with the noise that the first one found
            found = self._least(found, start, free, noise / WIDE, loss, wild or max(3 * noise, WILD / 2))
            noise = max(NOISE, 1.48 * float(np.median(np.abs(self._residuals(found)))))
        return self._judged(found, start, free, noise)

    def _scaled(self, stack: Stack) -> Floats:
        values = [_get(stack, path) for path in self.paths]
        pairs = zip(self.paths, values, strict=True)
        return np.array([v if p[0] in LINEAR else np.log(max(v, SECONDS[0])) for p, v in pairs])

    def _stack(self, x: Floats) -> Stack:
        found = self.stack
        for path, old, value in zip(self.paths, self._start, x, strict=True):
            if value != old:
                found = _put(found, path, float(value if path[0] in LINEAR else np.exp(value)))
        return found

    @functools.cached_property
    def _start(self) -> Floats:
        return self._scaled(self.stack)

    def _residuals(self, x: Floats) -> Floats:
        stack = self._stack(x)
        return np.array([np.log(step.predicted(stack) / step.seconds) for step in self.steps])

    def _bounds(self, path: Path) -> tuple[float, float]:
        name = path[2] if path[0] == "kernels" else path[0]
        low, high = BOUNDS[name]
        if self.stack.chip == "CPU":
            low, high = low / 20, high * 20  # the peaks of a CPU are orders of magnitude
        return (low, min(high, 1.0)) if name in LINEAR else (float(np.log(low)), float(np.log(high)))

    def _with_effect(self, x: Floats, paths: Sequence[Path]) -> list[int]:
        """Constants that a step depends on, at the start or with half or twice their values."""
        base = self._residuals(x)
        found = []
        for i, path in enumerate(paths):
            low, high = self._bounds(path)
            others = [min(max(x[i] + move, low), high) for move in ((-0.7, 0.7) if path[0] not in LINEAR else (-1, 1))]
            changed = max(np.max(np.abs(self._residuals(_with(x, i, v)) - base)) for v in others)
            if changed > EFFECT:
                found.append(i)
        return found

    def _least(self, x: Floats, start: Floats, free: Sequence[int], pull: float, loss: str, wild: float) -> Floats:
        from scipy.optimize import least_squares  # slow to import

        if not free:
            return x
        low, high = (np.array([self._bounds(self.paths[i])[end] for i in free]) for end in (0, 1))

        def whole(part: Floats) -> Floats:
            found = x.copy()
            found[list(free)] = part
            return found

        def values(part: Floats) -> Floats:
            return np.concatenate([self._residuals(whole(part)), pull * (part - start[list(free)])])

        begin = np.clip(x[list(free)], low + 1e-6 * (high - low), high - 1e-6 * (high - low))
        found = least_squares(values, begin, bounds=(low, high), loss=loss, f_scale=wild, diff_step=1e-4,
                              max_nfev=60, xtol=1e-6, ftol=1e-8)  # fmt: skip
        return whole(found.x)

    def _jacobian(self, x: Floats, free: Sequence[int]) -> Floats:
        columns = []
        for i in free:
            low, high = self._bounds(self.paths[i])
            a, b = max(x[i] - 0.01, low), min(x[i] + 0.01, high)
            columns.append((self._residuals(_with(x, i, b)) - self._residuals(_with(x, i, a))) / (b - a))
        return np.array(columns).T.reshape(len(self.steps), len(free))

    def _weak(self, x: Floats, free: Sequence[int], noise: float) -> tuple[Floats, list[set[int]]]:
        """(error of each free constant, constants of each direction that the steps hardly determine)."""
        if not free:
            return np.zeros(0), []
        ways, spread = _directions(self._jacobian(x, free), noise)
        errors: Floats = np.sqrt(((ways.T * spread) ** 2).sum(axis=1))
        weak = [{free[int(j)] for j in np.flatnonzero(np.abs(way) > PART)} for way in ways[spread > KNOWN / 2]]
        return errors, weak

    def _judged(self, x: Floats, start: Floats, free: Sequence[int], noise: float) -> Fit:
        """What the rank of the Jacobian says, where singular values count from the noise on."""
        names = [_name(path) for path in self.paths]
        errors, groups = self._weak(x, free, noise)
        determined = {names[i]: float(e) for i, e in zip(free, errors, strict=True) if e < KNOWN}
        _, before_groups = self._weak(start, free, noise)
        left = [{names[i]} for i in free if names[i] not in determined]
        together = _joined([*({names[i] for i in g} - determined.keys() for g in (*groups, *before_groups)), *left])
        stack = self._stack(x)
        at_bound = tuple(
            names[i] for i in free
            if names[i] in determined and self.paths[i][0] not in LINEAR
            and min(abs(x[i] - end) for end in self._bounds(self.paths[i])) < 1e-3
        )  # fmt: skip
        after, before = (tuple(map(float, np.expm1(self._residuals(one)))) for one in (x, start))
        free_rows = len(self.steps) - len(determined)
        median = float(np.median(np.abs(after)))
        error = max(0.01, median * np.sqrt(len(self.steps) / free_rows)) if free_rows > 1 else max(stack.error, median)
        idle_names = [name for i, name in enumerate(names) if i not in free]
        order = {name: i for i, name in enumerate(names)}
        guesses = sorted((*(n for group in together for n in group), *idle_names), key=order.__getitem__)
        stack = replace(
            stack, error=float(error), guesses=tuple(guesses), source=f"measured: fit to {len(self.steps)} steps"
        )  # fmt: skip
        return Fit(
            stack, determined, tuple(tuple(sorted(g, key=order.__getitem__)) for g in together),
            tuple(sorted(idle_names, key=order.__getitem__)), at_bound, after, before,
        )  # fmt: skip


def _directions(jacobian: Floats, noise: float) -> tuple[Floats, Floats]:
    """(directions of constants, one a row; how far each may be off)."""
    _, values, ways = np.linalg.svd(jacobian, full_matrices=True)
    sizes = np.zeros(len(ways))
    sizes[: len(values)] = values
    return ways, noise / np.maximum(sizes, noise / FAR)


def _with(x: Floats, i: int, value: float) -> Floats:
    found = x.copy()
    found[i] = value
    return found


def _joined(groups: Sequence[set[str]]) -> list[set[str]]:
    """Groups that share a name are one."""
    found: list[set[str]] = []
    for group in groups:
        if not group:
            continue
        touching = [other for other in found if other & group]
        found = [other for other in found if not other & group] + [set.union(group, *touching)]
    return found


# --- measured layouts of a file ------------------------------------------------------------------------------


def measured_rows(lines: Iterable[str], pricer: LayoutPricer) -> list[MeasuredStep]:
    """The steps of a file: lines as `autopar plan --layouts` takes them, with ``measured``. Raises ValueError, with the
    number of the line."""
    rows = [(number, _row(number, line)) for number, line in enumerate(lines, 1) if line.strip()]
    rows.sort(key=lambda pair: json.dumps([pair[1]["config"], pair[1]["seq"]], sort_keys=True))
    return [_step(number, row, pricer) for number, row in rows]


def _row(number: int, line: str) -> Mapping[str, Any]:
    try:
        row = parse(line)
        checked(row)
    except ValueError as error:
        raise ValueError(f"calibrate: line {number} is torn or wrong: {error}; leave it out") from error
    if row.get("measured") is None:
        raise ValueError(f"calibrate: line {number} needs measured, the seconds of a step, found none; leave it out")
    found: Mapping[str, Any] = row
    return found


def _step(number: int, row: Mapping[str, Any], pricer: LayoutPricer) -> MeasuredStep:
    try:
        cluster = Cluster.parse(row.get("cluster", pricer.cluster))
        layout = layout_of(row)
        costs = pricer.model(row).costs(layout.placement, layout.micro_batch)
    except ValueError as error:
        raise ValueError(f"calibrate: line {number}: {' '.join(str(error).split())}") from error
    what_if = {"kernel": row.get("attention", ""), "compute": row.get("compute", "")}
    return MeasuredStep(layout, costs, cluster, float(row["measured"]), what_if)
