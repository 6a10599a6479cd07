"""ShardedTensor: every parameter, gradient, optimizer state and output on a mesh, a DTensor that computes globally.

torch's own DTensor has no value of a sum over a sharded dim: `.item()` reads this rank's addend. Nor can it express all
layouts: it shards on the outer mesh dim first, autopar on the inner one (tp before dp), and its `_StridedShard`
supports equal blocks only (with unequal ones `full_tensor` is silently wrong, and distributed checkpoint refuses both).

A ShardedTensor computes as the global tensor (`autopar.runtime.params.sharded_ops`):
  - elementwise and foreach operators run on the local shards;
  - sums, norms and extrema reduce at once over the axes that shard a reduced dim, so reading the result needs no
    communication;
  - everything else is computed from the gathered tensor on every rank; writes into it, or into a view of it
    (`ViewSource`), go back into the shards;
  - a tensor that only some pipeline stages hold exists on all of them: on other stages its shard has no elements,
    operators on shards do nothing there, and scalars come from the stage that holds it;
  - `full_tensor` gathers; distributed checkpoint writes and reads each run of rows as a separate chunk.

Every operation that communicates is collective: all ranks of the mesh call it, in the same order.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.adapters.autograd import version_of
from autopar.adapters.dtensor import (
    LayoutRecord,
    layout_record,
    local_of,
    made_as,
    parametrize_by_data,
    put_local,
    record_of,
    stage_shards,
    storage_of,
)  # fmt: skip
from autopar.adapters.foreach import take_part
from autopar.adapters.keys import Same
from autopar.adapters.tensors.parameter_data import refuse_as_data
from autopar.runtime.params.chunks import InChunks, StagedShard
from autopar.runtime.params.shards import (
    STAGES,
    Cuts,
    Holders,
    ShardRange,
    boxes,
    from_holder,
    gather,
    padded_piece,
    piece_of,
    shape_of_piece,
)


@dataclass(eq=False)
class ViewSource:
    """The source of a view that is not a view of the shard. It is a view of ``whole``, which was gathered when the
    shard had version ``seen``. ``stale``: an operator on shards has written to the source since."""

    of: Any  # a ShardedTensor
    whole: Tensor
    seen: int
    stale: bool = False

    @classmethod
    def gathered(cls, x: Any) -> ViewSource:
        """Collective."""
        of = x.same()  # over the current shard: `.data` of x may be set later
        whole = of.whole()
        if of.holders is not None and of.holders.here:
            whole = whole.clone()  # separate from the shard, as on other stages
        found = cls(of, whole, _version(of))
        _live.add(found)
        return found

    def refresh(self) -> None:
        """Gather again if the shard was written to; collective in this case."""
        if self.stale or _version(self.of) != self.seen:
            self.whole.copy_(self.of.whole())
            self.seen, self.stale = _version(self.of), False

    def write(self) -> None:
        """Write the current values of the full tensor into the shard."""
        local_of(self.of).copy_(piece_of(self.whole, self.of.device_mesh, self.of.cuts, self.of.holders))
        make_stale(self.of)
        self.seen, self.stale = _version(self.of), False


_live: weakref.WeakSet[ViewSource] = weakref.WeakSet()


def make_stale(x: Any) -> None:
    """Record that the shard of a tensor was written to."""
    if not _live:
        return
    place = storage_of(local_of(x))
    for source in _live:
        source.stale |= storage_of(local_of(source.of)) == place


def all_written() -> None:
    """Record that shards of any tensors may have been written to, on some ranks."""
    for source in _live:
        source.stale = True


def _version(x: Any) -> int:
    local = local_of(x) if x.piece is None else x.piece
    return version_of(local)


def written(x: Any) -> None:
    """Update versions and sources after an operator has written to the local tensor. (torch bumps no versions inside a
    dispatch.)"""
    if isinstance(x, ShardedTensor):
        increment_version(local_of(x))
        if x.source is not None:
            x.source.write()
        else:
            make_stale(x)


@functools.lru_cache(1024)
def _record(
    of: Same, cuts: Cuts, shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, holders: Holders | None
) -> LayoutRecord:
    """One spec for all tensors of a mesh with the same layout. (An equal mesh may have groups that are destroyed.)"""
    if holders is not None and not holders.here:
        strides = torch.empty(shape, device="meta").stride()
    dims, mesh = {axis: shard.dim for axis, shard in cuts}, of.held
    return layout_record(mesh, tuple(dims.get(axis) for axis in mesh.mesh_dim_names or ()), shape, strides, dtype)


_ATTRIBUTES: Any = Tensor  # whose attributes are descriptors
_get_grad, _set_grad = _ATTRIBUTES.grad.__get__, _ATTRIBUTES.grad.__set__


class ShardedTensor(InChunks, DTensor):
    """``ShardedTensor.make(local, mesh, cuts, shape)``; see the module's docstring. ``cuts``: which axes shard which
    dims in which blocks; on all other axes of the mesh the tensor is replicated.

    holders: the pipeline stages that hold it; None: all do.
    source: of a view that is not a view of the shard, the tensor to which writes go back.
    piece: of a view of a shard, that shard, whose version torch bumps on writes.
    run_operator: runs an operator with a ShardedTensor operand; set by `autopar.runtime.params.sharded_ops`.
    """

    cuts: Cuts
    holders: Holders | None = None
    source: ViewSource | None = None
    piece: Tensor | None = None
    run_operator: ClassVar[Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]

    @staticmethod
    def make(
        local: Tensor, mesh: DeviceMesh, cuts: Cuts, shape: torch.Size, holders: Holders | None = None
    ) -> ShardedTensor:
        """Create it from this rank's shard. Not collective. No gradient flows through it."""
        record = _record(Same(mesh), cuts, shape, local.stride(), local.dtype, holders)
        out: ShardedTensor = made_as(ShardedTensor, local, record)
        out.cuts = cuts
        if holders is not None:
            out.holders = holders
        return out

    @property
    def is_apart(self) -> bool:
        """Whether it is sharded: some rank does not hold all of it."""
        return bool(self.cuts) or self.holders is not None

    @property
    def is_here(self) -> bool:
        return self.holders is None or self.holders.here

    def like(self, local: Tensor) -> ShardedTensor:
        mine = local_of(self)
        if local.dtype != mine.dtype or local.stride() != mine.stride():
            return ShardedTensor.make(local, self.device_mesh, self.cuts, self.shape, self.holders)
        return self.alike(local)

    def alike(self, local: Tensor) -> ShardedTensor:
        """`like`, for a shard of the same dtype and strides."""
        out: ShardedTensor = made_as(ShardedTensor, local, record_of(self))
        out.cuts = self.cuts
        if self.holders is not None:
            out.holders = self.holders
        return out

    def same(self) -> ShardedTensor:
        out = self.alike(local_of(self))
        out.piece = self.piece
        return out

    def give_gradient(self, local: Tensor) -> None:
        """Set ``.grad`` to a tensor over ``local``, as by `alike`."""
        _set_grad(self, self.alike(local))

    def lies_as(self, x: Any) -> bool:
        """Whether another tensor has this shape and layout, on the same mesh."""
        if not isinstance(x, ShardedTensor):
            return False
        if record_of(x) is record_of(self):
            return True
        return x.shape == self.shape and _lies(x, self.device_mesh, self.cuts, self.holders)

    def laid_as(self, x: Tensor, what: str) -> Tensor:
        """This rank's shard of a tensor of the global shape, with the layout of this one. If it is not sharded, or has
        the same layout, the shard shares storage with ``x``. Collective for another layout. Raises ValueError, which
        begins with ``what``, for another shape."""
        if x.shape != self.shape:
            local = " (this rank's shard has this shape)" if x.shape == local_of(self).shape else ""
            raise ValueError(
                f"{what}: needs a tensor of global shape {tuple(self.shape)}, found one of {tuple(x.shape)}{local}; "
                "pass the global tensor, or one created with zeros_like or full_like of the parameter"
            )
        return piece_in(x, self.device_mesh, self.cuts, self.holders)

    # --- .grad and .data ------------------------------------------------------------------------------

    def _gradient(self) -> Tensor | None:
        found: Tensor | None = _get_grad(self)
        if found is None or self.lies_as(found):
            return found
        self.grad = found  # set by autograd, from an operator on full tensors
        return self._gradient()

    def _set_gradient(self, x: Any) -> None:
        if isinstance(x, Tensor) and not self.lies_as(x):
            x = self.like(self.laid_as(x.detach(), "p.grad = x"))
        _set_grad(self, x)

    def _set_data(self, x: Tensor) -> None:
        if not isinstance(x, Tensor) or x.dtype != self.dtype or x.device != self.device:
            found = f"a tensor of {x.dtype} on {x.device}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise ValueError(
                f"x.data = y: needs a tensor of {self.dtype} on {self.device}, found {found}; cast the whole model "
                "(model.to), or copy into it: x.data.copy_(y)"
            )
        put_local(self, self.laid_as(x.detach(), "x.data = y").contiguous())
        self.source = None

    grad = property(_gradient, _set_gradient)
    data = property(_ATTRIBUTES.data.__get__, _set_data)

    # --- conversions ----------------------------------------------------------------------------------

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if not self.cuts and self.source is None and self.is_here:
            return repr(local_of(self).detach().requires_grad_(self.requires_grad))
        return f"ShardedTensor(shape={tuple(self.shape)}, {_layout(self) or 'whole'}, local={local_of(self)})"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    def tolist(self) -> Any:
        """Of the global tensor. Collective if it is sharded."""
        return self.whole().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The global tensor, as in torch; a gathered array is read-only. Collective if it is sharded."""
        plain = self.whole().detach()
        found = (plain.requires_grad_() if self.requires_grad else plain).numpy(force=force)
        if self.is_apart or self.source is not None:
            found.flags.writeable = False
        return found

    def __dlpack__(self, **how: Any) -> Any:
        """Of the global tensor. Collective if it is sharded."""
        plain = self.whole()
        return plain.requires_grad_(self.requires_grad).__dlpack__(**how)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if not self.is_leaf:
            raise RuntimeError("only tensors that the user made can be deep copied; copy x.detach()")
        out: Any = self.detach().clone().requires_grad_(self.requires_grad)
        vars(out).update({name: copy.deepcopy(x, memo) for name, x in vars(self).items() if name == "_is_param"})
        if not isinstance(self, nn.Parameter):  # of a Parameter torch copies no .grad
            out.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = out
        return out

    def __copy__(self) -> Any:
        out: Any = self.detach().requires_grad_(self.requires_grad)
        vars(out).update({name: x for name, x in vars(self).items() if name == "_is_param"})
        return out

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as the global tensor, so that plain torch reads what ``torch.save`` writes. Collective if it is
        sharded."""
        plain = self.whole()
        if isinstance(self, nn.Parameter):
            return nn.Parameter(plain, self.requires_grad).__reduce_ex__(protocol)
        return plain.requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    def data_ptr(self) -> int:
        """The pointer of this rank's shard; for a shard without elements a unique number."""
        return local_of(self).data_ptr() if self.is_here else storage_of(local_of(self))

    def untyped_storage(self) -> torch.UntypedStorage:
        return local_of(self).untyped_storage()

    # --- the full tensor and the shard ----------------------------------------------------------------

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The global tensor on every rank. Collective over the axes that shard it. Its gradient is assumed to be the
        same on all ranks, as in torch's DTensor."""
        if torch.is_grad_enabled() and self.requires_grad:
            out: Tensor = _FullTensor.apply(self)
            return out
        return self.whole()

    def whole(self) -> Tensor:
        """`full_tensor` without autograd; shares storage with the tensor if it is not sharded. Collective."""
        value = self.fresh().detach()
        if self.holders is not None:
            shape = shape_of_piece(self.shape, self.device_mesh, self.cuts)
            value = from_holder(value, self.device_mesh, self.holders, shape)
        return self._joined(value)

    def on_stage(self) -> Tensor:
        """`whole`, of a tensor that this rank's stage holds. Collective within the stage."""
        return self._joined(self.fresh().detach())

    def _joined(self, value: Tensor) -> Tensor:
        value = padded_piece(value, self.shape, self.device_mesh, self.cuts)
        for axis, shard in reversed(self.cuts):
            value = gather(value, self.device_mesh.get_group(axis), shard)
        return value

    def fresh(self) -> Tensor:
        """The local tensor, after what was written to the source of a view. Collective if something was."""
        if self.source is not None:
            self.source.refresh()
        return local_of(self)

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        """This rank's shard; gradients flow back to the ShardedTensor."""
        if torch.is_grad_enabled() and self.requires_grad:
            out: Tensor = _ToLocal.apply(self)
            return out
        return self.fresh()

    def redistribute(self, device_mesh: Any = None, placements: Any = None, **_: Any) -> DTensor:
        if not self.is_apart:  # torch asks for the full tensor
            return self
        if placements and all(p.is_replicate() for p in placements) and not torch.is_grad_enabled():
            return ShardedTensor.make(self.whole(), self.device_mesh, (), self.shape)
        raise ValueError(f"{_name(self)}: cannot be redistributed; take full_tensor() and distribute that")

    # --- distributed checkpoint: one chunk per run of consecutive positions ----------------------------

    def chunks(self) -> list[ShardRange]:
        """This rank's shard, as boxes of the global tensor."""
        if not self.is_here:
            return []
        coordinate = dict(zip(self.device_mesh.mesh_dim_names or (), self.device_mesh.get_coordinate() or ()))
        sizes = {axis: self.device_mesh.get_group(axis).size() for axis, _ in self.cuts}
        return boxes(self.shape, self.cuts, sizes, coordinate)

    def held(self) -> Tensor:
        """This rank's shard, without a gradient."""
        return local_of(self).detach()

    def global_shape(self) -> torch.Size:
        return self.shape

    # --- operators ------------------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return cls.run_operator(func, args, kwargs or {})


take_part(ShardedTensor)
refuse_as_data(
    ShardedTensor,
    "p.data = x: needs a plain tensor for a parameter that is on no mesh, found one of a parallel model; copy it, "
    "p.data.copy_(x), or assign the full tensor, p.data = x.full_tensor()",
)
parametrize_by_data(ShardedTensor)
stage_shards(ShardedTensor, StagedShard.make)


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, mesh: DeviceMesh, cuts: Cuts, shape: torch.Size) -> ShardedTensor:
        ctx.layout = (mesh, cuts, None)
        return ShardedTensor.make(local.detach(), mesh, cuts, shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return piece_in(grad, *ctx.layout), None, None, None


def from_local(local: Tensor, mesh: DeviceMesh, cuts: Cuts, shape: torch.Size) -> ShardedTensor:
    """`ShardedTensor.make`, through which gradients flow back to the shard."""
    out: ShardedTensor = _FromLocal.apply(local, mesh, cuts, shape)
    return out


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: ShardedTensor) -> Tensor:
        ctx.layout = (x.device_mesh, x.cuts, x.shape, x.holders)
        local = local_of(x)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> ShardedTensor:
        return ShardedTensor.make(grad, *ctx.layout)


class _FullTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: ShardedTensor) -> Tensor:
        ctx.layout = (x.device_mesh, x.cuts, x.shape, x.holders)
        whole = x.whole()
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> ShardedTensor:
        mesh, cuts, _, holders = ctx.layout
        return ShardedTensor.make(piece_in(grad, mesh, cuts, holders), *ctx.layout)


def piece_in(x: Tensor, mesh: DeviceMesh, cuts: Cuts, holders: Holders | None) -> Tensor:
    """This rank's shard of any tensor. If it is not sharded, or has the same layout, it shares storage with ``x``.
    Collective for another layout."""
    if isinstance(x, ShardedTensor) and _lies(x, mesh, cuts, holders):
        return x.fresh()
    found = piece_of(whole_tensor(x), mesh, cuts, holders)
    return found.clone(memory_format=torch.contiguous_format) if cuts else found


def _lies(x: ShardedTensor, mesh: DeviceMesh, cuts: Cuts, holders: Holders | None) -> bool:
    return x.cuts == cuts and x.holders == holders and x.device_mesh == mesh


def whole_tensor(x: Tensor) -> Tensor:
    """The full plain tensor, without autograd; shares storage if ``x`` is not sharded, else collective."""
    if isinstance(x, ShardedTensor):
        return x.whole()
    found: Tensor = x.detach()
    return found.full_tensor() if isinstance(found, DTensor) else found


def _name(x: ShardedTensor) -> str:
    return f"a ShardedTensor of shape {tuple(x.shape)} cut by {_layout(x) or 'nothing'}"


def _layout(x: ShardedTensor) -> str:
    stages = [f"{STAGES}: {' and '.join(map(str, x.holders.stages))} alone"] if x.holders is not None else []
    return ", ".join([*stages, *(f"{axis}: {shard}" for axis, shard in x.cuts)])
