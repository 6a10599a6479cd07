"""A model's state on a mesh: parameters as DTensors, and conversion from and to full tensors by original name.

Every parameter is on one mesh of all axes, Replicate on axes that do not shard it, so that the foreach paths of
torch.optim and clip_grad_norm_ see uniform tensors. Every rank has all parameters of the model, in its order; those of
other pipeline stages have local tensors without elements (`ShardedTensor.holders`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.adapters.dtensor import have_gradients, local_of
from autopar.adapters.foreach import add_all
from autopar.adapters.hooks import Observers, accumulate_gradient
from autopar.adapters.state_dict import IncompatibleKeys, add_note, noted
from autopar.errors import refusal_like
from autopar.ir.placement import stored_piece
from autopar.ir.signature import ParameterSpec
from autopar.runtime.mesh.process_groups import Groups
from autopar.runtime.params import sharded_ops as sharded_ops  # registers the operators of ShardedTensor
from autopar.runtime.params.sharded_tensor import ShardedTensor, from_local, whole_tensor
from autopar.runtime.params.shards import STAGES, Holders, cuts_of, nothing_of, piece_of


def local_piece(whole: Tensor, spec: ParameterSpec, groups: Groups) -> Tensor:
    """This rank's shard of a full tensor: a contiguous copy on the mesh's device."""
    piece = stored_piece(whole.detach(), spec.placements, groups.mesh.cut_order, groups.coordinate)
    return piece.to(device=groups.device, dtype=spec.dtype, copy=True, memory_format=torch.contiguous_format)


def of_first_rank(mine: Tensor | None, shape: Iterable[int], dtype: torch.dtype, groups: Groups) -> Tensor:
    """Broadcast the tensor of rank 0 into a new tensor on the mesh's device; of other ranks only shape and dtype
    matter. Collective. It is sent as bytes, since backends support few dtypes."""
    if mine is None or groups.rank:
        out = torch.empty(tuple(shape), dtype=dtype, device=groups.device)
    else:
        out = mine.detach().to(device=groups.device, dtype=dtype, copy=True, memory_format=torch.contiguous_format)
    if groups.mesh.world_size > 1:
        dist.broadcast(out.reshape(-1).view(torch.uint8), 0, group=groups.group(groups.world))
    return out


def stages_with(spec: ParameterSpec, groups: Groups) -> Holders | None:
    """The pipeline stages that hold a parameter; None if all do."""
    if len(spec.ranks) >= groups.mesh.size(STAGES):
        return None
    return Holders(spec.ranks, groups.coordinate[STAGES] in spec.ranks)


def wrap(local: Tensor, spec: ParameterSpec, groups: Groups, holders: Holders | None = None) -> ShardedTensor:
    """This rank's shard (of a parameter or of an output) as a DTensor through which gradients flow. Without gradients
    it holds the shard itself: if ``.data`` of a returned buffer is set later, the output shows it, as in torch."""
    expected = spec.stored_shape(groups.mesh, groups.coordinate) if holders is None or holders.here else (0,)
    assert tuple(local.shape) == expected, f"{spec.name}: a piece has shape {expected}, found {tuple(local.shape)}"
    cuts = cuts_of(spec.placements, groups.mesh.sizes)
    mesh, shape = groups.device_mesh, torch.Size(spec.shape)
    if local.requires_grad and torch.is_grad_enabled():
        return from_local(local, mesh, cuts, shape)
    return ShardedTensor.make(local.detach() if local.requires_grad else local, mesh, cuts, shape, holders)


def make_parameter(local: Tensor, spec: ParameterSpec, groups: Groups) -> nn.Parameter:
    """A DTensor parameter over this rank's shard (same storage)."""
    laid = wrap(local.detach(), spec, groups, stages_with(spec, groups))
    parameter = nn.Parameter(laid, requires_grad=spec.requires_grad)
    parameter.share_memory_ = _not_shared  # type: ignore[method-assign] # torch's own crashes the interpreter
    return parameter


def _not_shared() -> Any:
    raise ValueError(
        "share_memory: a parameter on a mesh is in the memory of its own rank, which other processes cannot open; "
        "share the model before parallelize, or pass full_state_dict() to them"
    )


def make_parameters(
    specs: Iterable[ParameterSpec], values: Mapping[str, Tensor | None], groups: Groups, broadcast_weights: bool = False
) -> dict[str, nn.Parameter]:
    """All parameters, by name: shards of full ``values``, or uninitialized if there is no value. With
    ``broadcast_weights``, those of rank 0: collective, one parameter at a time."""
    out = {}
    for spec in specs:
        whole = values.get(spec.name)
        if broadcast_weights:
            whole = of_first_rank(whole, spec.shape, spec.dtype, groups)
        holders = stages_with(spec, groups)
        if holders is not None and not holders.here:
            local = torch.empty(1, dtype=spec.dtype, device=groups.device)[:0]  # tied weights are recognized by storage
        elif whole is None:
            local = torch.empty(
                spec.stored_shape(groups.mesh, groups.coordinate), dtype=spec.dtype, device=groups.device
            )
        else:
            local = local_piece(whole, spec, groups)
        out[spec.name] = make_parameter(local, spec, groups)
    return out


def own_buffers(buffers: Mapping[str, Tensor], groups: Groups, broadcast_weights: bool = False) -> dict[str, Tensor]:
    """Copies of buffers by name, on the mesh's device; tied ones stay tied. With ``broadcast_weights``, copies of those
    of rank 0: collective."""
    copies: dict[int, Tensor] = {}
    for b in buffers.values():
        copy = of_first_rank(b, b.shape, b.dtype, groups) if broadcast_weights else b.to(groups.device, copy=True)
        copies.setdefault(id(b), copy)
    return {name: copies[id(b)] for name, b in buffers.items()}


def local_tensor(x: Tensor) -> Tensor:
    """The local tensor, which step graphs compute with."""
    return local_of(x).detach() if isinstance(x, DTensor) else x.detach()


def no_elements(parameter: Any) -> Tensor:
    """The local tensor of a gradient, or another state, of a parameter that this stage does not hold."""
    assert not parameter.is_here, "a stage has gradients of what it holds"
    return nothing_of(local_of(parameter))


def set_gradients(found: Sequence[tuple[nn.Parameter, Tensor]], observers: Observers) -> None:
    """Accumulate this rank's shards of gradients into ``.grad``, for each (parameter, shard), in the parameter's
    layout. Hooks of the parameters and of their AccumulateGrad nodes are called as by one backward, with the gradient
    as a DTensor like its parameter."""
    watched = observers.of([parameter for parameter, _ in found])
    plain = found if True not in watched else [one for one, someone in zip(found, watched, strict=True) if not someone]
    sums: list[Tensor] = []
    addends: list[Tensor] = []
    fresh: list[tuple[nn.Parameter, Tensor]] = []
    for (parameter, local), old in zip(plain, have_gradients([p for p, _ in plain]), strict=True):
        if old:
            sums.append(local_of(parameter.grad))  # type: ignore[arg-type]
            addends.append(local)
        else:
            fresh.append((parameter, local))
    if sums:
        with torch.no_grad():
            add_all(sums, addends)
    for parameter, local in fresh:
        parameter.give_gradient(local)  # type: ignore[attr-defined]
    if len(plain) < len(found):
        hooked = [pair for pair, someone in zip(found, watched, strict=True) if someone]
        accumulate_gradient([p for p, _ in hooked], [p.alike(local) for p, local in hooked])  # type: ignore[attr-defined]


def piece_like(parameter: Any, whole: Tensor) -> Tensor:
    """This rank's shard of a full tensor, with the layout of a parameter."""
    return piece_of(whole, parameter.device_mesh, parameter.cuts, parameter.holders)


def is_alike(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same layout on the same mesh."""
    return isinstance(a, ShardedTensor) and a.lies_as(b)


def other_kind(found: torch.dtype, needed: torch.dtype) -> bool:
    """Whether values of one dtype cannot be read as another: int8 weights are meaningless without their scales, and a
    complex number has two parts. Floats are cast to floats, complex to complex; other dtypes must be the same."""
    both_floats = found.is_floating_point and needed.is_floating_point
    return found != needed and not both_floats and not (found.is_complex and needed.is_complex)


MOST_STEPS = 2**40  # dropout seeds are computed from them
STEPS = "autopar_steps"  # an entry of states and of file headers


def note_steps(state: Any, steps: int, prefix: str = "") -> Any:
    """The state with the number of training steps added; a result of a model's own `state_dict` that is not an
    OrderedDict is unchanged. ``prefix``: that of its names."""
    if isinstance(state, OrderedDict):
        add_note(state, STEPS, steps, prefix)
    return state


def steps_noted(state: Any) -> Any:
    """The number of training steps noted in a state, or None."""
    return noted(state, STEPS)


# --- full states --------------------------------------------------------------------------------------


def full_state_dict(
    parameters: Mapping[str, Tensor],
    specs: Iterable[ParameterSpec],
    groups: Groups,
    buffers: Mapping[str, Tensor] | None = None,
    rank0_only: bool = False,
) -> OrderedDict[str, Tensor]:
    """Original name (tied names too) -> full tensor on the CPU.

    ``rank0_only``: only rank 0 gets them, other ranks an empty dict; these hold one full tensor at a time. Collective:
    every rank calls it.
    """
    out: OrderedDict[str, Tensor] = OrderedDict()
    for spec in specs:
        value = fetch_whole(spec, parameters.get(spec.name))
        if not rank0_only or groups.rank == 0:
            out.update(dict.fromkeys((spec.name, *spec.aliases), _own_copy(value, parameters.get(spec.name))))
    if not rank0_only or groups.rank == 0:
        out.update({name: buffer.detach().cpu().clone() for name, buffer in (buffers or {}).items()})
    return out


def full_gradients(
    parameters: Mapping[str, nn.Parameter],
    specs: Iterable[ParameterSpec],
    groups: Groups,
    rank0_only: bool = False,
) -> dict[str, Tensor]:
    """Original name -> full gradient on the CPU; a parameter without gradient is left out. Collective."""
    out = {}
    for spec in specs:
        gradient = parameters[spec.name].grad if spec.name in parameters else None
        if gradient is None:
            continue
        value = fetch_whole(spec, gradient)
        if not rank0_only or groups.rank == 0:
            out[spec.name] = _own_copy(value, gradient)
    return out


def _own_copy(value: Tensor, source: Tensor | None) -> Tensor:
    """A copy on the CPU. A copy is needed since the full tensor of an unsharded parameter is its local tensor."""
    out = value.cpu()
    shared = source is not None and out.data_ptr() == local_tensor(source).data_ptr()
    return out.clone() if shared else out


def fetch_whole(spec: ParameterSpec, x: Tensor | None) -> Tensor:
    """The full tensor of a parameter or its gradient. Collective. Raises ValueError if there is none."""
    if x is None:
        raise ValueError(f"state: no tensor for {spec.name}; pass every parameter")
    return whole_tensor(x)


def check_tensors(state: Any) -> None:
    """Raises ValueError for anything but a state dict of dense tensors with values."""
    if not isinstance(state, Mapping):
        raise refusal_like(
            TypeError(),
            f"load_state_dict: needs names with tensors, found a {type(state).__name__}; pass the result of "
            "full_state_dict(), state_dict() or torch.load",
        )
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ValueError(
                f"load_state_dict: needs a tensor for each name, found a {type(value).__name__} for {name!r}; pass "
                "the state of the model only"
            )
        if value.is_meta or value.layout != torch.strided:
            what = "a tensor on the meta device, which has no values" if value.is_meta else "a sparse tensor"
            raise ValueError(f"load_state_dict: {name} needs a dense tensor, found {what}; load it on the CPU")


def check_kinds(state: Mapping[str, Any], own: Mapping[str, torch.dtype]) -> None:
    """Raises ValueError for tensors that cannot be cast to these dtypes."""
    wrong = [
        f"{name} is {state[name].dtype}, needs {dtype}"
        for name, dtype in own.items()
        if isinstance(state.get(name), Tensor) and other_kind(state[name].dtype, dtype)
    ]
    if wrong:
        raise ValueError(f"load_state_dict: {'; '.join(wrong[:8])}; convert it first (only floats are cast, to floats)")


def load_state_dict(
    state: Mapping[str, Tensor],
    parameters: Mapping[str, nn.Parameter],
    specs: Iterable[ParameterSpec],
    buffers: Mapping[str, Tensor] | None = None,
) -> tuple[IncompatibleKeys, list[str]]:
    """Copy full tensors, by original name, into this rank's shards. Not collective. Returns the missing and unexpected
    keys, and torch's messages for tensors of another shape, which are left out.

    A tied parameter may have any of its names. Raises ValueError for tensors of another kind of dtype, before anything
    is written.
    """
    check_tensors(state)
    places: list[tuple[tuple[str, ...], torch.Size, torch.dtype, Tensor | None]] = [
        ((s.name, *s.aliases), torch.Size(s.shape), s.dtype, parameters.get(s.name)) for s in specs
    ]
    places += [((name,), b.shape, b.dtype, b) for name, b in (buffers or {}).items()]
    found: list[tuple[Tensor, Tensor]] = []
    misfits, missing, dtypes = [], [], dict[str, torch.dtype]()
    for names, shape, dtype, target in places:
        if (name := next((n for n in names if n in state), None)) is None:
            missing.append(names[0])
            continue
        dtypes[name] = dtype
        if state[name].shape != shape:
            misfits.append(
                f"size mismatch for {name}: copying a param with shape {state[name].shape} from checkpoint, the shape "
                f"in current model is {shape}"
            )
        elif target is not None:
            found.append((target, state[name]))
    check_kinds(state, dtypes)
    with torch.no_grad():
        for target, x in found:
            whole = whole_tensor(x)
            local_tensor(target).copy_(piece_like(target, whole) if isinstance(target, DTensor) else whole)
    known = {name for names, *_ in places for name in names}
    return IncompatibleKeys(missing, [name for name in state if name not in known]), misfits


def refuse_others(found: IncompatibleKeys, misfits: Sequence[str], strict: bool, kind: str) -> None:
    """Raises torch's error for a state that does not fit a model of a ``kind``, as a ValueError that is a RuntimeError,
    too. Everything that fits has been loaded by then, as in torch."""
    problems = list(misfits)
    for what, names in (("Unexpected", found.unexpected_keys), ("Missing", found.missing_keys)):
        if strict and names:
            listed = ", ".join(f'"{name}"' for name in names[:_MOST_NAMES])
            more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
            problems.insert(0, f"{what} key(s) in state_dict: {listed}{more}")
    if problems:
        listed = ". ".join(problems[:_MOST_NAMES])
        more = f". And {len(problems) - _MOST_NAMES} more" if len(problems) > _MOST_NAMES else ""
        raise refusal_like(
            RuntimeError(),
            f"load_state_dict: Error(s) in loading state_dict for {kind}: {listed}{more}; pass a state of the same "
            "model, or strict=False for a part of it",
        )


_MOST_NAMES = 8
