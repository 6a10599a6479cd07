"""Batches of changing sizes, padded to a few: ``parallelize(model, mesh, padding="bucket")``.

    input_ids [4, 137]         input_ids [4, 256]      filled with the model's padding token
    labels    [4, 137]   -->   labels    [4, 256]      filled with -100, which no loss counts

Each length is padded to the next of 64, 128, 256, ..., on all ranks to that of the longest. A batch with fewer rows
than an earlier one gets rows without labels. So random lengths compile a few steps, not one each. Padding must not
change the loss: before the first padded step the model is evaluated on the same tokens with and without padding and, if
the losses differ, with an attention mask. If they still differ, or a batch norm would see the padding, the batch is
refused.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.adapters.distributed import takes_host_tensors
from autopar.adapters.dtensor import local_of
from autopar.capture.trace.export import flatten, paths, unflatten
from autopar.ir.batch import map_tensors, tensors_of
from autopar.plan import Plan
from autopar.runtime.fault.errors import explained
from autopar.runtime.inputs.image_dealing import dealer_of
from autopar.runtime.inputs.image_padding import ImagePadder
from autopar.runtime.inputs.padded_outputs import Growth, Sizes, differences, growth_of, without_padding
from autopar.runtime.inputs.unused_inputs import Modules, UnusedInputs
from autopar.runtime.mesh.process_groups import Groups
from autopar.runtime.params.sharded_tensor import ShardedTensor, from_local
from autopar.spelling import did_you_mean
from autopar.values import refuse

IGNORED = -100  # the label that counts in no loss
LEAST = 64
TOKEN = "the model's padding token, else 0"
MASKS = {"input_ids": "attention_mask", "decoder_input_ids": "decoder_attention_mask"}
# Inputs of transformers models, [rows, tokens, ...] each, and their fill values.
FILLED: dict[str, Any] = {
    "input_ids": TOKEN, "decoder_input_ids": TOKEN, "labels": IGNORED, "attention_mask": 0,
    "decoder_attention_mask": 0, "token_type_ids": 0, "mm_token_type_ids": 0, "position_ids": 0, "inputs_embeds": 0,
    "decoder_inputs_embeds": 0,
}  # fmt: skip
POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions")
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
CLOSE = {torch.float64: 1e-9, torch.float32: 2e-5}  # relative tolerance of losses; half precision: 2e-2


@dataclass(frozen=True)
class PaddingBuckets:
    """How batches are padded.

    pad: name of an input [rows, tokens, ...] -> fill value of the padding, in addition to those of transformers
    (`FILLED`). lengths: the padded lengths in tokens, ascending; empty: powers of two from 64. check: compare losses
    with and without padding, once. ahead: compile the next longer step in a background process, into the compile cache.
    """

    pad: Mapping[str, float] = field(default_factory=dict)
    lengths: tuple[int, ...] = ()
    check: bool = True
    ahead: bool = True
    lazy: bool = False

    def __post_init__(self) -> None:
        lengths = tuple(self.lengths)
        if any(not isinstance(n, int) or n < 1 for n in lengths) or list(lengths) != sorted(set(lengths)):
            raise ValueError(f"padding: lengths need ascending positive integers, found {lengths}")

    def length(self, tokens: int, unit: int = 1, limit: int = 0) -> int:
        """The padded length: a multiple of ``unit``, and at most ``limit`` positions unless the tokens are more."""
        if self.lengths:
            found = next((n for n in self.lengths if n >= tokens), 0)
            if not found:
                raise ValueError(
                    f"padding: {tokens} tokens are more than the longest of lengths={self.lengths}; add a longer one"
                )
            return found
        found = max(LEAST, 1 << (tokens - 1).bit_length())
        if tokens <= limit < found:
            found = limit
        return max(math.ceil(found / unit) * unit, tokens)


def asked_padding(padding: Any) -> PaddingBuckets | None:
    """From the ``padding`` argument of `parallelize`; None for no padding. Raises ValueError."""
    if padding == "exact":
        return None
    if padding in ("bucket", "auto"):
        return PaddingBuckets(lazy=padding == "auto")
    if isinstance(padding, PaddingBuckets):
        return padding
    hint = did_you_mean(padding, ("exact", "bucket", "auto"))
    raise refuse("padding", '"exact", "bucket", "auto" or autopar.PaddingBuckets(...)', padding, hint)


Evaluate = Callable[[dict[str, Any]], Any]
Call = str  # what a call of the model is given, but for sizes and values


class BatchPadder:
    """Pads the batches of one model. ``evaluate``: the outputs of an unpadded batch, in eval mode. ``of_rank``:
    these are plain tensors of this rank's examples. ``lift``: `autopar.lift_to_float64`. ``deal_images``: of
    `Options`."""

    def __init__(
        self,
        buckets: PaddingBuckets,
        root: nn.Module,
        plan: Plan,
        groups: Groups,
        evaluate: Evaluate,
        modules: Modules,
        of_rank: bool = False,
        lift: bool = False,
        microbatches: int = 1,
        deal_images: bool | str = False,
    ) -> None:
        self.buckets, self.root, self.plan, self.groups, self.evaluate = buckets, root, plan, groups, evaluate
        self.fill, self.of_rank = FILLED | dict(buckets.pad), of_rank
        self.rows = 0  # rows of the largest batch so far
        self.checked: set[str] = {"tokens", "rows"} if not buckets.check else set()  # what may be padded
        self._last: dict[str, int] = {}  # sizes of the last batch, padded
        self._widths: dict[str, int] = {}  # first sizes of inputs that may have tokens
        self._first: dict[Call, dict[str, int]] = {}  # sizes of the first batch of each call
        self._growths: dict[Call, list[Growth]] = {}  # of outputs
        self._unchanged: set[tuple[Call, str]] = set()  # whose outputs padding does not change
        how = {"lift_to_float64": lift, "precision": plan.options.precision}
        self._unused = UnusedInputs(modules, self._extremes, how)
        dealer = dealer_of(groups) if deal_images else None
        self.images = ImagePadder(root, microbatches, lift, self._extremes, buckets.lazy, dealer, deal_images is True)
        self.masks = self.busy = self.uneven = False  # masks added; inside a check; numbers of rows differ

    def fit(self, batch: dict[str, Any], outputs: bool = False) -> dict[str, Any]:
        """The batch, padded. ``outputs``: its outputs matter, not only the loss. Collective: the sizes are those of the
        largest on any rank."""
        if self.busy:
            return batch
        text, images = self.images.apart(self._unused.left_out(batch))
        return self.images.fit(self._fitted(text, outputs), images)

    def _fitted(self, batch: dict[str, Any], outputs: bool) -> dict[str, Any]:
        least, largest = self._extremes(self._sizes(batch) | {"": len(self._unknown(batch))})
        if least.pop("") == largest.pop("") > 0 and self._learn(batch):
            least, largest = self._extremes(self._sizes(batch))
        own, call = self._sizes(batch), self._call(batch)
        self.uneven = least["rows"] < largest["rows"]
        if self.buckets.lazy and least == largest == self._first.setdefault(call, largest):
            self._last = own
            return batch
        self.rows = max(self.rows, largest["rows"])
        wanted = self._wanted(largest) | {"rows": self.rows}
        padded = {"rows" if name == "rows" else "tokens" for name, n in least.items() if n and wanted[name] != n}
        try:
            self._look(batch, own, padded, call if outputs and self.of_rank else None)
            fitted = self._padded(batch, wanted) if padded else batch
        except ValueError:
            if not self.buckets.lazy or least != largest:
                raise
            fitted = batch
        self._last = self._sizes(fitted)
        return fitted

    def _extremes(self, sizes: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
        return self._over_ranks(sizes, dist.ReduceOp.MIN), self._over_ranks(sizes, dist.ReduceOp.MAX)

    def _unknown(self, batch: Mapping[str, Any]) -> dict[str, int]:
        """Inputs of whole numbers [rows, more, ...] that may have tokens, and how many."""
        if not self.buckets.lazy:
            return {}
        found = {name: x for name, x in batch.items() if isinstance(x, Tensor) and name not in self.fill}
        whole = {name: x for name, x in found.items() if x.dim() > 1 and not x.is_floating_point()}
        return {name: x.shape[1] for name, x in whole.items() if self.plan.batch_dims.get(name, 0) == 0}

    def _learn(self, batch: Mapping[str, Any]) -> bool:
        """Take inputs whose second dim varies for tokens; whether there are new ones. That padding them changes nothing
        is checked as for all others. Collective."""
        found = self._unknown(batch)
        least, largest = self._extremes(found)
        vary = [n for n in found if least[n] != largest[n] or largest[n] != self._widths.setdefault(n, largest[n])]
        self.fill |= {name: IGNORED if "label" in name or "target" in name else 0 for name in vary}
        return bool(vary)

    def _look(self, batch: dict[str, Any], own: dict[str, int], padded: set[str], call: Call | None) -> None:
        """Raises ValueError, on all ranks, if padding would change the loss, or the outputs of a ``call``."""
        if call is not None and any((call, what) not in self._unchanged for what in padded):
            self._check(batch, own, padded, call)
            self._unchanged |= {(call, what) for what in padded}
        elif call is None and padded - self.checked:
            self._check(batch, own, padded, None)

    def _call(self, batch: Mapping[str, Any]) -> Call:
        """What outputs there are: names of the inputs, constants, and which inputs have equally many tokens."""
        sizes = self._sizes(batch)
        alike = {name: next(k for k, n in sizes.items() if n == sizes[name]) for name in sizes if sizes[name]}
        constants = ((name, x) for name, x in paths(batch) if not isinstance(x, Tensor))
        return repr((sorted(batch), sorted(constants, key=repr), sorted((n, alike[n]) for n in alike if n != "rows")))

    def longer(self, batch: Mapping[str, Any]) -> dict[str, Any] | None:
        """The batch padded to the next lengths; None if there are none, or images beside it."""
        if self.images.active:
            return None
        sizes, limit = self._sizes(batch), self._limit()
        tokens = {name: size for name, size in sizes.items() if name != "rows" and size}
        if not tokens or any(size == limit for size in tokens.values()):
            return None
        try:
            wanted = self._wanted({**dict.fromkeys(self.fill, 0), **{name: size + 1 for name, size in tokens.items()}})
            return self._padded(batch, wanted | {"rows": sizes["rows"]})
        except ValueError:  # beyond the longest of `lengths`, or an input without a fill value
            return None

    def padded_again(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The last batch, padded to the same sizes once more."""
        text, images = self.images.apart_again(self._unused.without(batch))
        text = self._padded(text, self._last) if self._sizes(text) != self._last else text
        return self.images.fit_again(text, images)

    def trimmed(self, outputs: Any, batch: Mapping[str, Any]) -> Any:
        """Outputs [rows, tokens, ...] of the last batch without the padding, except in dims that are sharded."""
        batch = self._unused.without(batch)
        before, after = self._sizes(self.images.apart_again(batch)[0]), self._last
        if self.busy or before == after:
            return outputs
        if self.of_rank:
            return self._cut(outputs, self._growths[self._call(batch)], before, after)
        lengths = {after[name]: before[name] for name in self.fill if after[name]}
        leaves, spec = flatten(outputs)
        rows = before["rows"] if not self.uneven else after["rows"]  # DTensors have the same number on each rank
        return unflatten([_trimmed(x, rows, after["rows"], lengths) for x in leaves], spec)

    def _cut(self, outputs: Any, growths: Sequence[Growth], own: Sizes, padded: Sizes) -> Any:
        leaves, spec = flatten(outputs)
        places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        for i, growth in zip(places, growths, strict=True):
            leaves[i] = without_padding(leaves[i], growth, own, padded)
        return unflatten(leaves, spec)

    # --- sizes ---------------------------------------------------------------------------------------------------

    def _sizes(self, batch: Mapping[str, Any]) -> dict[str, int]:
        """Rows of the batch, and tokens of each input that has tokens (0: no such input)."""
        given = {name: x for name, x in batch.items() if isinstance(x, Tensor) and x.dim()}
        dims = self.plan.batch_dims
        rows = [x.shape[0] for name, x in given.items() if name in self.fill or dims.get(name, 0) == 0]
        tokens = {name: given[name].shape[1] if name in given and given[name].dim() > 1 else 0 for name in self.fill}
        return {"rows": max(rows, default=0), **tokens}

    def _over_ranks(self, sizes: Mapping[str, int], op: Any) -> dict[str, int]:
        found = torch.tensor(list(sizes.values()))
        for axis, size in self.groups.mesh.axes:
            if size > 1:
                group = self.groups.group(axis)
                here = found if takes_host_tensors(group) else found.to(self.groups.device)
                with explained("comparing the sizes of the batch", self.groups.ranks(axis)):
                    dist.all_reduce(here, op, group=group)
                found = here.cpu()
        return dict(zip(sizes, found.tolist(), strict=True))

    def _wanted(self, sizes: Mapping[str, int]) -> dict[str, int]:
        mesh, limit = self.groups.mesh, self._limit()
        cut = mesh.size("tp") if self.plan.options.sequence_parallel else 1
        unit = math.lcm(cut, 2 * mesh.size("cp") if mesh.size("cp") > 1 else 1)
        return {n: self.buckets.length(size, unit, limit) if size else 0 for n, size in sizes.items() if n != "rows"}

    def _limit(self) -> int:
        config = getattr(self.root, "config", None)
        return next((n for name in POSITIONS if isinstance(n := getattr(config, name, None), int) and n > 0), 0)

    # --- padding -------------------------------------------------------------------------------------------------

    def _padded(self, batch: Mapping[str, Any], wanted: Mapping[str, int]) -> dict[str, Any]:
        sizes = self._sizes(batch)
        lengths = {n for name, n in sizes.items() if name != "rows" and n and wanted[name] != n}
        if self.masks:
            made = self._all_seen(batch)
            batch = {**batch, **made}
            wanted = {**wanted, **{mask: wanted[ids] for ids, mask in MASKS.items() if mask in made}}
        dims = self.plan.batch_dims

        def pad(path: str, x: Tensor) -> Tensor:
            known = path in self.fill
            if not known and x.dim() > 1 and x.shape[1] in lengths and dims.get(path, 0) == 0:
                raise ValueError(
                    f"padding: needs a fill value for input {path} of shape {list(x.shape)}, whose dim 1 is as long as "
                    f"the tokens; set padding=autopar.PaddingBuckets(pad={{{path!r}: 0}}), or pad it yourself"
                )
            if known and x.dim() > 1:
                x = _wider(x, 1, wanted[path], self._value(path))
            rows = wanted["rows"]
            if (known or dims.get(path, 0) == 0) and x.dim() and x.shape[0] == sizes["rows"] < rows:
                x = _wider(x, 0, rows, self._of_row(path, x))
            return x

        found: dict[str, Any] = map_tensors(dict(batch), pad)
        return found

    def _all_seen(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        made = {mask: torch.ones_like(batch[ids]) for ids, mask in MASKS.items() if isinstance(batch.get(ids), Tensor)}
        return {mask: x for mask, x in made.items() if batch.get(mask) is None and mask in _arguments(self.root)}

    def _value(self, path: str) -> float:
        value = self.fill[path]
        if value is not TOKEN:
            return float(value) if isinstance(value, float) else value
        token = getattr(getattr(self.root, "config", None), "pad_token_id", None)
        return token if isinstance(token, int) and token >= 0 else 0

    def _of_row(self, path: str, x: Tensor) -> float:
        """The fill value of added rows: no labels, and an attention mask of ones, since attention over nothing is
        NaN."""
        if "mask" in path:
            return 1
        if path in self.fill:
            return self._value(path)
        if "label" in path or "target" in path:
            if x.is_floating_point():
                raise ValueError(
                    "padding: a batch of fewer rows than before gets rows without labels, found floating-point labels "
                    f"{path}, which have no value for that; drop or fill the last batch (drop_last=True)"
                )
            return IGNORED
        return 0

    # --- that padding changes nothing ----------------------------------------------------------------------------

    def _check(self, batch: dict[str, Any], own: dict[str, int], padded: set[str], call: Call | None) -> None:
        """Raises ValueError, on all ranks, if padding changes the loss of the same tokens, or the outputs of a call."""
        if norm := next((m for m in self.root.modules() if isinstance(m, BATCH_NORMS)), None):
            raise ValueError(
                f"padding: a {type(norm).__name__} averages over all rows and tokens, padding included; pass batches "
                'of one size, with padding="exact"'
            )
        if not own["rows"]:  # nothing to compare on this rank
            own = own | {"rows": 1}
            batch = self._padded(batch, own)
        short, wanted = self._shortest(batch, own, padded)
        sizes = self._sizes(short)
        plain = self._evaluated(short)
        if call is None and not all(map(math.isfinite, self._losses(plain))):
            return  # no label among these tokens: check the next padded batch
        for masks in (True,) if self.masks else (False, True):
            self.masks = masks
            longer = self._padded(short, wanted)
            unlike = self._unlike(plain, self._evaluated(longer), sizes, self._sizes(longer), call)
            if not self._agreed(unlike):
                self.checked |= padded if call is None else set()
                return
            if masks or not self._all_seen(short):
                break
        self.masks = False
        raise ValueError(
            f"padding: changes {unlike or 'a result of another rank'}: tokens attend to "
            "it, or are averaged with it; pass an attention_mask, set fill values with "
            'autopar.PaddingBuckets(pad={...}), or pass batches of one size on all ranks with padding="exact"'
        )

    def _unlike(self, plain: Any, longer: Any, before: Sizes, after: Sizes, call: Call | None) -> str:
        """Names what padding has changed, "" if nothing."""
        name = type(self.root).__name__
        if call is None:
            pair = self._losses(plain), self._losses(longer)
            return "" if all(map(self._close, *pair)) else f"the loss of {name} from {pair[0]} to {pair[1]}"
        short, large = tensors_of({"": plain}), tensors_of({"": longer})
        growths = []
        for path, x in short.items():
            growth = growth_of(x, large[path], before, after) if path in large else None
            if growth is None:
                return f"output {path} of {name} in a dim that is neither the examples nor the tokens"
            growths.append(growth)
            cut = without_padding(large[path], growth, before, after)
            if differences([x], [cut])[0] > self._limit_of():
                return f"output {path} of {name}"
        self._growths[call] = growths
        return ""

    def _agreed(self, unlike: str) -> bool:
        """Whether any rank has found a difference. Collective."""
        return bool(self._over_ranks({"unlike": int(bool(unlike))}, dist.ReduceOp.MAX)["unlike"])

    def _shortest(
        self, batch: Mapping[str, Any], own: Mapping[str, int], padded: set[str]
    ) -> tuple[dict[str, Any], dict[str, int]]:
        """A slice of the batch that exists on all ranks, with sizes that divide, and its padded sizes."""
        least = self._over_ranks(own, dist.ReduceOp.MIN)
        unit = math.lcm(self.groups.mesh.size("tp"), 2 * self.groups.mesh.size("cp"))
        counts = self.plan.options.microbatches
        rows = max(least["rows"] // counts * counts, 1)
        lengths = {n: max(size // unit * unit, 1) for n, size in least.items() if n != "rows" and size}

        def cut(path: str, x: Tensor) -> Tensor:
            if path in lengths and x.dim() > 1:
                x = x[:, : lengths[path]]
            return (x[:rows] if x.dim() and x.shape[0] == own["rows"] else x).contiguous()

        short: dict[str, Any] = map_tensors(dict(batch), cut)
        wanted = self._wanted({"rows": rows, **dict.fromkeys(self.fill, 0), **lengths})
        longer = {n: size if size > lengths.get(n, 0) else 2 * size for n, size in wanted.items()}
        return short, longer | {"rows": rows + counts if "rows" in padded else rows}

    def _evaluated(self, batch: dict[str, Any]) -> Any:
        self.busy = True
        try:
            return self.evaluate(batch)
        finally:
            self.busy = False

    def _losses(self, outputs: Any) -> list[float]:
        found = [float(x) for x in tensors_of({"": outputs}).values() if not x.dim() and x.is_floating_point()]
        if not found:
            raise ValueError(
                "padding: needs a model that returns its loss, found no scalar; pass labels with the batch"
            )
        return found

    def _close(self, one: float, other: float) -> bool:
        return abs(one - other) <= self._limit_of() * max(abs(one), abs(other), 1e-6)

    def _limit_of(self) -> float:
        """The relative difference that rounding makes."""
        dtypes = {p.dtype for _, p in self.root.named_parameters() if p.is_floating_point()}
        if self.plan.options.precision.compute not in ("", "float32", "float64"):
            return 2e-2
        return max((CLOSE.get(dtype, 2e-2) for dtype in dtypes), default=1e-9)


def _wider(x: Tensor, dim: int, size: int, value: float) -> Tensor:
    if x.shape[dim] >= size:
        return x
    more = list(x.shape)
    more[dim] = size - x.shape[dim]
    return torch.cat([x, x.new_full(more, value)], dim)


def _trimmed(x: Any, rows: int, padded_rows: int, lengths: Mapping[int, int]) -> Any:
    if not isinstance(x, Tensor) or x.dim() < 2:
        return x
    cut = {shard.dim for _, shard in x.cuts} if isinstance(x, ShardedTensor) else set()
    if x.shape[1] in lengths and 1 not in cut:
        x = _narrowed(x, 1, lengths[x.shape[1]])
    return _narrowed(x, 0, rows) if rows < padded_rows else x


def _narrowed(x: Tensor, dim: int, size: int) -> Tensor:
    """Narrow a dim of tokens or this rank's rows; of a ShardedTensor its local shard, unsharded along that dim."""
    if not isinstance(x, ShardedTensor):
        return x.narrow(dim, 0, size)
    ranks = x.shape[dim] // local_of(x).shape[dim]
    shape = torch.Size(size * ranks if d == dim else length for d, length in enumerate(x.shape))
    return from_local(x.to_local().narrow(dim, 0, size), x.device_mesh, x.cuts, shape)


def _arguments(model: nn.Module) -> Iterable[str]:
    return inspect.signature(model.forward).parameters
