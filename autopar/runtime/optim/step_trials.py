"""Which way an optimizer can step sharded parameters: found out on small copies of it, before its first step.

A copy of the optimizer steps small whole parameters, of the ranks, groups and dtypes of the real ones, a few times.
Other copies step them in the ways that a mesh can, of which the first whose parameters, states and options are the same
is taken:

    SHARDS      each rank steps its shards                                          elementwise optimizers
    GLOBALLY    the step computes with ShardedTensors, and gathers none             norms, sums over all parameters
    OWNERS      each parameter is stepped whole, on one rank                        factors, orthogonalization
    GLOBALLY    the step computes with ShardedTensors, on all ranks                 dot products of all parameters
    TOGETHER    all parameters are gathered and stepped whole, on every rank        everything else

An optimizer that draws random numbers steps TOGETHER, with those of one rank. One whose closure is called twice, or
after parameters were changed, steps GLOBALLY. Trials need no communication, except that of GLOBALLY.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from autopar.adapters.copying.fake import FakeTensorMode
from autopar.adapters.optimizer_step import copied, own_step
from autopar.ir.placement import piece
from autopar.runtime.optim.local_step import is_elementwise, over
from autopar.runtime.optim.whole_step import Member, holding, random_state, seed_all, set_random_state, spare
from autopar.runtime.params.sharded_tensor import ShardedTensor
from autopar.runtime.params.shards import Cuts, Gathered, Holders, piece_of

STEPS = (1.0, 3.0, 0.01, 30.0, 1.0, 0.1, 1.0)  # scales of gradients: some are above and some below a norm to clip to
EXACT = 1e-10  # relative to the largest entry, in float64
MOST = {1: (6144,), 2: (256, 144)}  # sizes of a small parameter, above what others call small; of more dims:
MOST_OF_MORE = 16, 40  # of the first and of each other dim
TORCH = {  # known, by the module that defines `step`
    "torch.optim._muon": "OWNERS", "torch.optim._adafactor": "OWNERS", "torch.optim.lbfgs": "GLOBALLY",
    "transformers.optimization": "OWNERS",
}  # fmt: skip


class Way(enum.Enum):
    """With what an optimizer steps, in the words of an error."""

    SHARDS = "its shards"
    OWNERS = "each parameter by itself"
    GLOBALLY = "ShardedTensors"
    TOGETHER = "all parameters whole"


@dataclass(frozen=True)
class Found:
    """The way, whether the step draws random numbers; or why there is no way."""

    way: Way | None
    draws: bool = False
    why: str = ""


@dataclass(frozen=True)
class Kind:
    """What decides how a parameter is stepped: its group, its shape if that is small, its shards and stages."""

    group: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    cuts: Cuts
    ranks: tuple[int, ...]  # of each of the axes
    stages: tuple[int, ...] | None

    @classmethod
    def of(cls, group: int, p: Any) -> Kind:
        ranks = tuple(p.device_mesh.get_group(axis).size() for axis, _ in p.cuts)
        parts = [1] * p.dim()
        for (_, shard), count in zip(p.cuts, ranks, strict=True):
            parts[shard.dim] *= count
        first, other = MOST_OF_MORE
        most = MOST.get(p.dim(), (first, *[other] * (p.dim() - 1)))
        shape = tuple(n * max(1, min(size, limit) // n) for size, limit, n in zip(p.shape, most, parts))
        cuts = tuple((axis, replace(shard, blocks=(), units=0)) for axis, shard in p.cuts)
        return cls(group, shape, p.dtype, cuts, ranks, p.holders.stages if p.holders is not None else None)


def way_of(optimizer: Optimizer, is_ours: Callable[[Tensor], bool], args: Any = (), kwargs: Any = None) -> Found:
    """How an optimizer steps. Tried once per class, options and kinds of parameters; collective if it is tried.
    ``args``, ``kwargs``: of the step. Raises ValueError if there is no way."""
    if (known := known_way(optimizer)) is not None:
        return Found(known)
    before, options = _WAYS.get(optimizer), _options(optimizer)
    if before is None or before[0] != options:
        kinds = tuple(
            dict.fromkeys(
                Kind.of(i, p) for i, group in enumerate(optimizer.param_groups) for p in group["params"] if is_ours(p)
            )
        )
        key = type(optimizer), options, kinds, repr(kwargs.keys() if kwargs else ())
        if key not in _FOUND:
            with _numbers_kept(optimizer):
                _FOUND[key] = _Trials(optimizer, is_ours, kinds, args, {**(kwargs or {})}).found()
        before = _WAYS[optimizer] = options, _FOUND[key]
    found: Found = before[1]
    if found.way is None:
        raise ValueError(
            f"optimizer: needs one that steps a part of the parameters, or all of them gathered, as it does in one "
            f"process, found {type(optimizer).__name__}, which {found.why}; use another, such as torch.optim.AdamW"
        )
    return found


def known_way(optimizer: Optimizer) -> Way | None:
    """That of torch's own optimizers."""
    if is_elementwise(optimizer):
        return Way.SHARDS
    name = TORCH.get(own_step(optimizer).__module__)
    return Way[name] if name is not None else None


def steps_whole(optimizer: Optimizer) -> bool:
    """Whether it makes states of whole parameters, as far as is known."""
    way = known_way(optimizer) or (_WAYS[optimizer][1].way if optimizer in _WAYS else Way.OWNERS)
    return way in (Way.OWNERS, Way.TOGETHER)


_WAYS = WeakIdKeyDictionary()  # optimizer -> its options and what was found
_FOUND: dict[Any, Found] = {}


def note_options(optimizer: Optimizer) -> None:
    """Call after a step: options that the step itself has changed need no new trial."""
    if optimizer in _WAYS:
        _WAYS[optimizer] = _options(optimizer), _WAYS[optimizer][1]


def _options(optimizer: Optimizer) -> tuple[Any, ...]:
    """What of the options of groups may decide how it steps: numbers that change over a run only by whether they are
    0."""
    skipped = ("params", "lr", "initial_lr", "step")
    return tuple(
        (len(group["params"]), *((name, _option(x)) for name, x in group.items() if name not in skipped))
        for group in optimizer.param_groups
    )


def _option(x: Any) -> Any:
    if isinstance(x, (bool, str, type(None))):
        return x
    if isinstance(x, (int, float)):
        return x != 0
    return tuple(map(_option, x)) if isinstance(x, (tuple, list)) else type(x)


@contextlib.contextmanager
def _numbers_kept(optimizer: Optimizer) -> Iterator[None]:
    device = optimizer.param_groups[0]["params"][0].device.type
    state = random_state(device)
    try:
        yield
    finally:
        set_random_state(state, device)


# --- trials ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Small:
    """A small parameter. There are two of each kind."""

    kind: Kind
    twin: int
    like: Any  # the real parameter

    def numbers(self, seed: int, dtype: torch.dtype) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * seed + self.twin)
        drawn = torch.randn(self.kind.shape, generator=generator, dtype=torch.float64)
        return drawn.to(self.like.device, dtype)

    def shard(self, x: Tensor, rank: int) -> Tensor:
        """That of one of two ranks, the first and the last of each axis."""
        if self.kind.stages is not None and self.twin != rank:
            return x.new_empty(0)
        for (_, shard), ranks in zip(self.kind.cuts, self.kind.ranks, strict=True):
            x = piece(x, shard, ranks, rank * (ranks - 1))
        return x.clone()


@dataclass
class _Record:
    """What became of parameters after each step; of states and options after the last. ``outlines``: those of states
    after the first."""

    parameters: list[list[Tensor]] = field(default_factory=list)
    outlines: list[Any] = field(default_factory=list)
    states: list[Any] = field(default_factory=list)
    rest: Any = None


class _Differs(Exception):
    """A copy did not step as the first one."""


class _Trials:
    def __init__(
        self, optimizer: Optimizer, is_ours: Callable[[Tensor], bool], kinds: Sequence[Kind], args: Any, kwargs: Any
    ) -> None:
        self._optimizer, self._args, self._kwargs = optimizer, args, kwargs
        first: dict[Kind, Any] = {}
        self._kind_of: dict[int, Kind] = {}
        for i, group in enumerate(optimizer.param_groups):
            for p in filter(is_ours, group["params"]):
                self._kind_of[id(p)] = Kind.of(i, p)
                first.setdefault(self._kind_of[id(p)], p)
        self._smalls = [_Small(kind, twin, first[kind]) for twin in (0, 1) for kind in kinds]
        self._filled = False
        self._again = False  # whether the closure is called at another time than once, first
        self._closed = kwargs.pop("closure", None) is not None

    def found(self) -> Found:
        try:
            whole = self._first()
        except Exception as error:
            return Found(None, why=f"{_words(error)} on small tensors")
        if self._again:
            return self._one_of([Way.GLOBALLY], whole)
        if self._draws(whole):
            return replace(self._one_of([Way.TOGETHER], whole), draws=True)
        if not self._is_typical(whole[0]):
            return self._one_of([Way.OWNERS, Way.TOGETHER], whole)
        return self._one_of([Way.SHARDS, None, Way.OWNERS, Way.GLOBALLY, Way.TOGETHER], whole)

    def _first(self) -> list[_Record]:
        """A step of whole parameters, in float64, and in their own dtypes if these are others."""
        dtypes: list[torch.dtype | None] = [torch.float64]
        if any(small.kind.dtype != torch.float64 for small in self._smalls):
            dtypes.append(None)
        self._dtypes = dtypes
        try:
            return [self._native(dtype) for dtype in dtypes]
        except Exception:
            if not any(self._optimizer.state.values()):
                raise
        self._filled = True  # it cannot begin without the states that it has
        return [self._native(dtype) for dtype in dtypes]

    def _one_of(self, ways: Sequence[Way | None], whole: Sequence[_Record]) -> Found:
        """The first that does. None: GLOBALLY, if the step gathers no tensor."""
        run = {
            Way.SHARDS: self._on_shards, Way.OWNERS: self._on_owners,
            Way.GLOBALLY: self._globally, Way.TOGETHER: self._together,
        }  # fmt: skip
        why = []
        for way in ways:
            try:
                if way is None:
                    self._globally(self._dtypes[0], whole[0], gathers=False)
                    return Found(Way.GLOBALLY)
                for dtype, record in zip(self._dtypes, whole, strict=True):
                    if way is not Way.GLOBALLY or dtype is not None:  # which adds up in another order
                        run[way](dtype, record)
            except Exception as error:
                if way is not None:
                    why.append(f"with {way.value} {_words(error)}")
            else:
                return Found(way)
        return Found(None, why=", ".join(why))

    def _draws(self, whole: Sequence[_Record]) -> bool:
        try:
            _same(self._native(self._dtypes[0], seed=1).parameters, whole[0].parameters, EXACT)
        except _Differs:
            return True
        return False

    def _is_typical(self, whole: _Record) -> bool:
        """Whether parameters of the real shapes get the same states as small ones: a step of fake tensors. (What reads
        values is not tried.)"""
        fake, disabled = FakeTensorMode(allow_non_fake_inputs=True), logging.root.manager.disable
        with fake:
            large = [torch.empty(s.like.shape, dtype=torch.float64, device=s.like.device) for s in self._smalls]
            parameters = [nn.Parameter(x) for x in large]
            for p in parameters:
                p.grad = torch.empty_like(p)
        made = self._copy(dict(enumerate(parameters)))
        logging.disable(logging.ERROR)  # torch logs what it cannot fake
        try:
            with fake:
                self._step(made, closure=_one if self._closed else None)
                found = [_outline(made.state.get(p, {}), p.shape) for p in parameters]
        except Exception:
            return True
        finally:
            logging.disable(disabled)
        return found == whole.outlines

    # --- copies ---

    def _values(self, dtype: torch.dtype | None) -> list[Tensor]:
        return [s.numbers(3 * i, dtype or s.kind.dtype) * 0.3 + s.twin for i, s in enumerate(self._smalls)]

    def _gradient(self, i: int, t: int, x: Tensor, shard: Callable[[Tensor], Tensor]) -> Tensor:
        """Of the i-th parameter in step t: the same direction in all steps, noise, and some of the parameter."""
        small = self._smalls[i]
        steady, noise = small.numbers(3 * i + 1, x.dtype), small.numbers(3 * i + 2 + 7919 * (t + 1), x.dtype)
        return (shard(steady + 0.5 * noise) + 0.2 * x.detach()) * STEPS[t]

    def _copy(self, parameters: Mapping[int, nn.Parameter]) -> Optimizer:
        """The optimizer with parameters in place of ours. ``parameters``: by position."""
        of_kind = {s.kind: parameters[i] for i, s in reversed([*enumerate(self._smalls)]) if i in parameters}
        exchanged = {id(key): of_kind.get(kind) for key, kind in self._real().items()}
        groups = []
        for g, group in enumerate(self._optimizer.param_groups):
            options = {n: copy.deepcopy(x, dict(exchanged)) for n, x in group.items() if n != "params"}
            if isinstance(options.get("lr"), float) and abs(options["lr"]) < 1e-6:
                options["lr"] = 1e-3
            mine = [parameters[i] for i, s in enumerate(self._smalls) if s.kind.group == g and i in parameters]
            groups.append({"params": mine, **options})
        made = copied(self._optimizer, groups, exchanged)
        kept = {key: x for key, x in self._optimizer.state.items() if not isinstance(key, Tensor)}
        made.state.update(copy.deepcopy(kept, dict(exchanged)))
        if self._filled:
            for i, p in parameters.items():
                state = self._optimizer.state.get(self._smalls[i].like, {})
                shape = self._smalls[i].like.shape
                made.state[p] = over(Tensor, dict(state), functools.partial(_filler, shape, p))
        return made

    def _real(self) -> dict[Any, Kind]:
        return {
            p: self._kind_of[id(p)] for g in self._optimizer.param_groups for p in g["params"] if id(p) in self._kind_of
        }

    def _step(self, made: Optimizer, seed: int = 0, closure: Callable[[], Any] | None = None) -> None:
        seed_all(seed)
        kwargs = {**self._kwargs, **({"closure": closure} if self._closed else {})}
        with torch.no_grad() if closure is None else contextlib.nullcontext():
            own_step(made)(made, *self._args, **kwargs)

    def _native(self, dtype: torch.dtype | None, seed: int = 0) -> _Record:
        parameters = [nn.Parameter(x) for x in self._values(dtype)]
        made, record = self._copy(dict(enumerate(parameters))), _Record()
        for t in range(len(STEPS)):
            before = [p.detach().clone() for p in parameters]
            calls: list[bool] = []

            def closure(t: int = t, before: Any = before, calls: Any = calls) -> Tensor:
                calls.append(all(torch.equal(p, x) for p, x in zip(parameters, before, strict=True)))
                for i, p in enumerate(parameters):
                    p.grad = self._gradient(i, t, p, lambda x: x)
                return torch.ones((), dtype=torch.float64)

            closure()
            calls.clear()
            self._step(made, seed, closure if self._closed else None)
            self._again |= len(calls) > 1 or not all(calls)
            record.parameters.append([p.detach().clone() for p in parameters])
            if t == 0:
                record.outlines = [_outline(made.state.get(p, {}), p.shape) for p in parameters]
        if not all(bool(x.isfinite().all()) for x in record.parameters[-1]):
            raise FloatingPointError("infinite or not a number")
        record.states = [dict(made.state.get(p, {})) for p in parameters]
        record.rest = _rest(made)
        return record

    def _on_shards(self, dtype: torch.dtype | None, whole: _Record) -> None:
        for rank in (0, 1):
            parts = [functools.partial(s.shard, rank=rank) for s in self._smalls]
            self._renewed(dtype, whole, parts)

    def _together(self, dtype: torch.dtype | None, whole: _Record) -> None:
        self._renewed(dtype, whole, [lambda x: x for _ in self._smalls])

    def _renewed(self, dtype: torch.dtype | None, whole: _Record, parts: Sequence[Callable[[Tensor], Tensor]]) -> None:
        """A step of parts of the parameters, which are other objects in each step."""
        parameters = [nn.Parameter(part(x)) for part, x in zip(parts, self._values(dtype), strict=True)]
        made = self._copy(dict(enumerate(parameters)))
        for t in range(len(STEPS)):
            parameters = _rekeyed(made, parameters)
            for i, p in enumerate(parameters):
                p.grad = self._gradient(i, t, p, parts[i])
            self._step(made, closure=_one if self._closed else None)
            self._compare(whole.parameters[t], [*map(torch.Tensor.detach, parameters)], parts, dtype)
        states = [dict(made.state.get(p, {})) for p in parameters]
        for i, (part, state) in enumerate(zip(parts, states, strict=True)):
            shape = self._smalls[i].kind.shape
            expected = over(Tensor, whole.states[i], functools.partial(_part_of_state, part, shape))
            _same(state, expected, self._exact(i, dtype))
        _same(_rest(made), whole.rest, self._exact(None, dtype))

    def _on_owners(self, dtype: torch.dtype | None, whole: _Record) -> None:
        for rank in (0, 1, 2):  # the last one owns nothing
            own = [i for i, s in enumerate(self._smalls) if s.twin == rank or not (s.kind.cuts or s.kind.stages)]
            values, mine = self._values(dtype), {}
            for i in own:
                mine[i] = Member(self._smalls[i].kind.group, nn.Parameter(values[i]), {})
            made = self._copy({i: m.whole for i, m in mine.items()})
            for m in mine.values():
                m.state = made.state.pop(m.whole, {})
            for t in range(len(STEPS)):
                first = {s.kind.group: x for s, x in reversed([*zip(self._smalls, values, strict=True)])}
                spares = {group: spare(made, group, x) for group, x in first.items()}
                for i, m in mine.items():
                    m.whole = nn.Parameter(m.whole.detach())
                    m.whole.grad = self._gradient(i, t, m.whole, lambda x: x)
                rounds = [[m] for m in mine.values()] or [[]]
                for k, members in enumerate(rounds):
                    with holding(made, members, _all if k == len(rounds) - 1 else None, spares):
                        self._step(made, closure=_one if self._closed else None)
                found = {i: m.whole.detach() for i, m in mine.items()}
                for i, x in found.items():
                    _same(x, whole.parameters[t][i], self._exact(i, dtype))
            for i, m in mine.items():
                _same(m.state, whole.states[i], self._exact(i, dtype))
            _same(_rest(made), whole.rest, self._exact(None, dtype))

    def _globally(self, dtype: torch.dtype | None, whole: _Record, gathers: bool = True) -> None:
        """On the real mesh; all ranks find the same, after each step. ``gathers``: whether the step may gather."""
        steps = self._on_mesh(dtype, whole)
        for _ in STEPS:
            failed: Exception | None = None
            before = Gathered.count
            try:
                compare = next(steps)
                if not gathers and Gathered.count > before:
                    raise _Differs("gathers tensors")
                compare()
            except Exception as error:
                failed = error
            mesh = self._smalls[0].like.device_mesh
            good = torch.tensor(int(failed is None), device=self._smalls[0].like.device)
            for axis in mesh.mesh_dim_names or ():
                dist.all_reduce(good, dist.ReduceOp.MIN, group=mesh.get_group(axis))
            if failed is not None or not int(good):
                raise failed or _Differs("differs on another rank")

    def _on_mesh(self, dtype: torch.dtype | None, whole: _Record) -> Iterator[Callable[[], None]]:
        """Makes the steps; what it yields compares with the first copy."""
        laid = [functools.partial(_on_mesh, s) for s in self._smalls]
        parameters = [nn.Parameter(lay(x)) for lay, x in zip(laid, self._values(dtype), strict=True)]
        made = self._copy(dict(enumerate(parameters)))
        for t in range(len(STEPS)):

            def closure(t: int = t) -> Tensor:
                for i, p in enumerate(parameters):
                    p.grad = self._gradient(i, t, p, laid[i])
                return torch.ones((), dtype=torch.float64)

            def compare(t: int = t) -> None:
                found = [p.whole() for p in parameters]  # type: ignore[attr-defined]
                self._compare(whole.parameters[t], found, [lambda x: x for _ in found], dtype)
                if t == len(STEPS) - 1:
                    _same(_rest(made), whole.rest, self._exact(None, dtype))

            closure()
            self._step(made, closure=closure if self._closed else None)
            yield compare

    def _compare(
        self, whole: Sequence[Tensor], found: Sequence[Tensor], parts: Sequence[Any], dtype: torch.dtype | None
    ) -> None:
        for i, (part, x, y) in enumerate(zip(parts, whole, found, strict=True)):
            _same(y, part(x), self._exact(i, dtype))

    def _exact(self, i: int | None, dtype: torch.dtype | None) -> float:
        """The largest relative difference of the i-th parameter, or of any."""
        if dtype is not None:
            return EXACT
        of = self._smalls if i is None else [self._smalls[i]]
        return max(8 * torch.finfo(s.kind.dtype).eps for s in of)


def _outline(state: Any, shape: Sequence[int]) -> Any:
    """Names of states, with the rank of tensors that are not of the parameter's shape."""
    noted = over(Tensor, dict(state), lambda x: "like" if tuple(x.shape) == tuple(shape) else x.dim())
    return over((int, float), noted, lambda _: "number")


def _part_of_state(part: Callable[[Tensor], Tensor], shape: Sequence[int], x: Tensor) -> Tensor:
    return part(x) if tuple(x.shape) == tuple(shape) and x.dim() else x


def _all(_: Tensor) -> bool:
    return True


def _one() -> Tensor:
    return torch.ones((), dtype=torch.float64)


def _filler(shape: torch.Size, p: Tensor, x: Tensor) -> Tensor:
    """A state that a copy begins with."""
    if x.shape == shape and x.dim():
        return p.detach().abs().to(x.dtype)
    return (x.whole() if isinstance(x, ShardedTensor) else x).clone()


def _on_mesh(small: _Small, x: Tensor) -> ShardedTensor:
    p = small.like
    holders = p.holders
    local = piece_of(x, p.device_mesh, small.kind.cuts, holders).clone()
    return ShardedTensor.make(local, p.device_mesh, small.kind.cuts, x.shape, _copied_holders(holders))


def _copied_holders(holders: Holders | None) -> Holders | None:
    return None if holders is None else Holders(holders.stages, holders.here)


def _rekeyed(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """The optimizer gets new objects over the same values."""
    fresh: dict[Tensor, nn.Parameter] = {p: nn.Parameter(p.detach()) for p in parameters}
    optimizer.param_groups = [{**g, "params": [fresh[p] for p in g["params"]]} for g in optimizer.param_groups]
    states = {fresh.get(key, key): dict(x) if isinstance(x, dict) else x for key, x in optimizer.state.items()}
    optimizer.state = defaultdict(dict, states)
    return [fresh[p] for p in parameters]


def _rest(optimizer: Optimizer) -> Any:
    """Options and attributes that are numbers or contain numbers."""
    groups = [{name: x for name, x in group.items() if name != "params"} for group in optimizer.param_groups]
    skipped = ("param_groups", "state", "defaults")
    attributes = {n: x for n, x in vars(optimizer).items() if n not in skipped and not isinstance(x, Tensor)}
    return [groups, attributes, {k: x for k, x in optimizer.state.items() if not isinstance(k, Tensor)}]


def _same(found: Any, expected: Any, most: float) -> None:
    """Raises _Differs unless numbers and tensors are the same, up to a relative difference."""
    if isinstance(expected, Tensor) or isinstance(found, Tensor):
        _same_tensors(found, expected, most)
    elif isinstance(expected, dict):
        names = [key for key in expected if not isinstance(key, Tensor)]
        if not isinstance(found, dict) or names != [key for key in found if not isinstance(key, Tensor)]:
            raise _Differs("makes other states")
        for name in names:
            _same(found[name], expected[name], most)
    elif isinstance(expected, (list, tuple)) or hasattr(expected, "maxlen"):
        if len(found) != len(expected):
            raise _Differs("makes other states")
        for a, b in zip(found, expected, strict=True):
            _same(a, b, most)
    elif isinstance(expected, (int, float)):
        _same_tensors(torch.as_tensor(found, dtype=torch.float64), torch.as_tensor(expected, dtype=torch.float64), most)


def _same_tensors(found: Any, expected: Any, most: float) -> None:
    a, b = torch.as_tensor(found).detach(), torch.as_tensor(expected).detach()
    if a.shape != b.shape:
        raise _Differs("makes states of other shapes")
    if not a.numel():
        return
    wide = torch.complex128 if b.is_complex() else torch.float64
    a, b = a.to("cpu", wide), b.to("cpu", wide)
    worst = (a - b).abs().nan_to_num(0.0 if bool((a.isnan() == b.isnan()).all()) else torch.inf).max()
    if not bool(worst <= most * b.abs().nan_to_num(0.0).max()):
        raise _Differs("computes other numbers")


def _words(error: Exception) -> str:
    if isinstance(error, _Differs):
        return str(error)
    return f"raises {type(error).__name__}: {' '.join(str(error).split())[:120]}"
