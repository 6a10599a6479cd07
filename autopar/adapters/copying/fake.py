"""Copies of modules without their weights: structure copies with fake tensors on the CPU, and skeletons.

One `FakeTensorMode` serves a whole capture. The device is always the CPU, never meta: on meta, cross_entropy loses
gradients silently, and a CPU build of torch refuses fake CUDA tensors.

An unregistered tensor is shared with the original. One that was computed from the model's tensors (a view of a weight,
a leftover of an earlier step) is replaced by a marked placeholder: a forward may replace it, but not use it.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode as FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.adapters.copying.fake_deepcopy import rebuild
from autopar.adapters.hooks import refuse_backward_hooks
from autopar.adapters.tensors.tags import tags_of


def new_mode() -> FakeTensorMode:
    """A fake mode that also converts real tensors that a model creates."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def silent_fakes() -> Iterator[None]:
    """Context manager: fake tensors do not log shape errors with a traceback, since our error reports them."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


SPARSE = "of layout {}; keep its indices and values, and use index_add, or make it dense by to_dense()"


def fake_like(tensor: Tensor, mode: FakeTensorMode, dtype: torch.dtype | None = None) -> Tensor:
    """A new fake tensor on the CPU with the same metadata (or another dtype). Never shared between two inputs: the
    exporter would specialize the graph to their being one tensor."""
    dtype = dtype or tensor.dtype
    with mode:
        if tensor.is_contiguous():
            out = torch.empty(tuple(tensor.shape), dtype=dtype, device="cpu")
        else:
            out = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(out, requires_grad=tensor.requires_grad)
    return out


def structure_copy(
    model: nn.Module, mode: FakeTensorMode, dtypes: Mapping[int, torch.dtype] | None = None
) -> nn.Module:
    """A deep copy with fake parameters and buffers; ties are kept, no tensor is copied. ``dtypes``: new dtypes, by id
    of the model's tensors.

    Raises ValueError if the module contains something that cannot be copied, a sparse tensor, or hooks that cannot be
    kept.
    """
    refuse_backward_hooks(model)
    for name, tensor in _registered(model).items():
        if tensor.layout != torch.strided:
            raise ValueError(f"capture: needs dense tensors, found {name} {SPARSE.format(tensor.layout)}")
    chosen = dtypes or {}
    return _copied(model, {id(t): fake_like(t, mode, chosen.get(id(t))) for t in _registered(model).values()})


def skeleton_of(model: nn.Module, dtypes: Mapping[int, torch.dtype] | None = None) -> nn.Module:
    """A deep copy with parameters and buffers on the meta device; ties are kept, and a config is shared with the model
    (`fake_deepcopy`). ``dtypes`` and errors: as in `structure_copy`."""
    tensors: dict[int, Tensor] = {}
    for tensor in _registered(model).values():
        meta = torch.empty_like(tensor, device="meta", dtype=(dtypes or {}).get(id(tensor)))
        tensors[id(tensor)] = nn.Parameter(meta, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta
    refuse_backward_hooks(model)
    return copy_with(model, tensors, shared=True)


def copy_with(model: nn.Module, tensors: Mapping[int, Tensor], shared: bool = False) -> nn.Module:
    """A deep copy with other parameters and buffers, by id of the model's. `owned_by` of the copy is that of the model.
    ``shared``: see `fake_deepcopy`."""
    made = _copied(model, tensors, shared=shared)
    _OWNED[made] = owned_by(model)
    for buffer in model.buffers():
        if (copied := tensors.get(id(buffer))) is not None and copied.is_meta:
            _ORIGINALS[copied] = weakref.ref(with_values(buffer))
    return made


def with_values(buffer: Tensor) -> Tensor:
    """A buffer, or for one on the meta device that a copy has, the original's while it exists."""
    found = _ORIGINALS[buffer]() if buffer in _ORIGINALS else None
    return buffer if found is None else found


def twin_of(model: nn.Module) -> nn.Module:
    """A deep copy with copies of the weights. Raises as `structure_copy`."""
    refuse_backward_hooks(model)
    owned = owned_by(model)

    def other(x: Tensor) -> Tensor:
        made = _stand_in(x, owned)
        return _cloned(x) if made is x else made

    return _copied(model, {id(t): _cloned(t) for t in _registered(model).values()}, other)


def _registered(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _cloned(x: Tensor) -> Tensor:
    made = x.detach().clone()
    return nn.Parameter(made, x.requires_grad) if isinstance(x, nn.Parameter) else made.requires_grad_(x.requires_grad)


def _copied(
    model: nn.Module,
    tensors: Mapping[int, Tensor],
    other: Callable[[Tensor], Tensor] | None = None,
    shared: bool = False,
) -> nn.Module:
    owned = owned_by(model)
    tagged = [(id(x), tags) for x in _registered(model).values() if (tags := tags_of(x))]
    try:
        made = rebuild(model, tensors, other or (lambda x: _stand_in(x, owned)), tagged, shared)
    except (TypeError, RuntimeError, AttributeError) as error:
        raise ValueError(
            f"capture: the model must be deep-copyable, found {error}; move what cannot be copied "
            "(handles, processes, connections) out of the module"
        ) from error
    _put_back(model, made, tensors)
    return made


def _put_back(model: nn.Module, made: nn.Module, tensors: Mapping[int, Tensor]) -> None:
    """Put the wanted tensors into a copy: a module with its own ``__deepcopy__`` may have created others.

    Raises ValueError if the copy is the original, or has other names.
    """
    wanted = {
        name: tensors.get(id(t))
        for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        for name, t in named
    }
    originals = set(map(id, model.modules()))
    for path, module in made.named_modules(remove_duplicate=False):
        entries = {**module._parameters, **module._buffers}
        names = {name: f"{path}.{name}" if path else name for name, t in entries.items() if t is not None}
        if id(module) in originals or any(name not in wanted for name in names.values()):
            raise ValueError(
                f"capture: the model must be deep-copyable, found that a copy of {path or 'the model'} is the "
                f"original, or has other tensors; {type(module).__qualname__}, or a module around it, needs a "
                "__deepcopy__ that copies its attributes with copy.deepcopy(attribute, memo)"
            )
        for name, full in names.items():
            tensor = wanted[full]
            if tensor is not None and entries[name] is not tensor:
                (module._parameters if name in module._parameters else module._buffers)[name] = tensor


# --- tensors that belong to the model ------------------------------------------------------------------


class Owned:
    """Weak references to the storages of a model's parameters and buffers. overlaps: pairs of names of different
    tensors that share memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.overlaps = tuple(_overlaps(tensors))
        self._names = {StorageWeakRef(t.untyped_storage()): name for name, t in tensors.items() if _has_storage(t)}

    def name_of(self, x: Tensor) -> str | None:
        """The name of the parameter or buffer whose storage a tensor shares."""
        return self._names.get(StorageWeakRef(x.untyped_storage())) if _has_storage(x) else None


def memory_of(x: Tensor) -> int:
    """An id of the storage of a tensor."""
    return int(x.untyped_storage()._cdata)


def extent_of(x: Tensor) -> int:
    """Number of storage elements from the first to the last of a tensor."""
    if not x.numel():
        return 0
    return 1 + sum((int(size) - 1) * int(stride) for size, stride in zip(x.shape, x.stride(), strict=True))


def geometry_of(x: Tensor) -> tuple[Any, ...]:
    """The layout of a tensor in its storage."""
    return x.dtype, x.shape, x.stride(), x.storage_offset()


def note_overlaps(copy: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Record tensors of a model that have come to share memory since it was copied."""
    known = owned_by(copy)
    _OWNED[copy] = owned = Owned({})
    owned._names, owned.overlaps = known._names, tuple(dict.fromkeys((*known.overlaps, *_overlaps(tensors))))


def _overlaps(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    places: dict[StorageWeakRef, list[tuple[int, int, str]]] = {}
    for name, x in tensors.items():
        if _has_storage(x) and x.numel():
            start = int(x.storage_offset()) * x.itemsize
            found = places.setdefault(StorageWeakRef(x.untyped_storage()), [])
            found.append((start, start + extent_of(x) * x.itemsize, name))
    for found in places.values():
        reached, last = 0, ""
        for start, end, name in sorted(found):
            if start < reached:
                yield last, name
            if end > reached:
                reached, last = end, name


_OWNED: WeakKeyDictionary[nn.Module, Owned] = WeakKeyDictionary()  # by skeleton: of its original model
# Buffers of skeletons -> those of the original model; who holds a buffer decides whether its memory is taken over.
_ORIGINALS = WeakTensorKeyDictionary()


def owned_by(model: nn.Module) -> Owned:
    """The storages of a model, or of the original of a skeleton."""
    return _OWNED.get(model) or Owned(_registered(model))


def came_from_elsewhere(skeleton: nn.Module, overlaps: tuple[tuple[str, str], ...]) -> None:
    """Register a skeleton that another process has sent, where its original model and storages are."""
    _OWNED[skeleton] = owned = Owned({})
    owned.overlaps = overlaps


def _has_storage(x: Tensor) -> bool:
    return x.layout == torch.strided and not isinstance(x, (nn.UninitializedParameter, nn.UninitializedBuffer))


def _stand_in(x: Tensor, owned: Owned) -> Tensor:
    """The tensor to use for an unregistered one in a copy. A constant is shared with the original, so writes to it are
    visible. One that was computed from parameters becomes a marked placeholder."""
    name = owned.name_of(x)
    if name is None and x.is_leaf:
        return x
    made = torch.zeros((), dtype=x.dtype).expand(x.shape)
    MARKS[made] = f"shares the storage of {name}" if name else f"was made by {type(x.grad_fn).__name__} before"
    return made


MARKS = WeakTensorKeyDictionary()  # stand-ins -> what is wrong with using them
