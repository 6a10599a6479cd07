"""Optimizer CPU offload: states are in host memory and are copied to the device for one bucket of parameters at a time;
at most those of three buckets are on the device.

Works for any torch optimizer that steps each parameter by itself: its own kernels run on the device, on the same
values. States created by the first step are offloaded after it; scalars such as the step count stay where they are. On
a GPU a step returns while copies are in flight; `state_dict`, `autopar.save` and `autopar.load` wait for them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopar.adapters.dtensor import local_of
from autopar.adapters.optimizer_step import own_step
from autopar.ir.signature import in_buckets
from autopar.ir.storages import is_dense
from autopar.runtime.mesh.host_copies import OffloadBuffers, host_copies_arrived
from autopar.runtime.optim.local_step import on_pieces
from autopar.runtime.params.dtensor_layout import as_local
from autopar.runtime.params.sharded_tensor import ShardedTensor

_TOLD: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # whose `state_dict` waits for copies
_MODELS: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()  # -> bytes of a bucket


def keep_on_host(model: nn.Module, bucket: int) -> None:
    """Keep states of optimizers of a model's parameters in host memory from now on. ``bucket``: bytes of parameters
    whose states are copied to the device together."""
    _MODELS[model] = bucket


class OffloadedStates:
    """The states of one optimizer, for one step."""

    def __init__(self, optimizer: Optimizer, bucket: int, device: torch.device) -> None:
        self._optimizer, self.bucket = optimizer, bucket
        self._copies = OffloadBuffers.on(device)

    @staticmethod
    def of(optimizer: Optimizer, parameters: Sequence[Tensor]) -> OffloadedStates | None:
        """None if states stay on the device. Raises ValueError for an optimizer that cannot be stepped by bucket."""
        mine = {id(p) for p in parameters if _MODELS}
        for model, bucket in list(_MODELS.items()):
            if any(id(p) in mine for _, p in model.named_parameters()):
                _check_apart(optimizer)
                if optimizer not in _TOLD:
                    _TOLD.add(optimizer)
                    optimizer.register_state_dict_pre_hook(lambda _: host_copies_arrived())
                return OffloadedStates(optimizer, bucket, local_of(parameters[0]).device)  # type: ignore[arg-type]
        return None

    def bring(self, parameters: Sequence[Tensor]) -> Callable[[], None]:
        """Start to copy states to the device; returns a function that puts them in place."""
        return self._move(parameters, self._copies.arena.holds, self._copies.from_host)

    def put_away(self, parameters: Sequence[Tensor]) -> Callable[[], None]:
        """Start to copy states to the host; returns a function that puts them in place."""

        def may_leave(x: Tensor) -> bool:
            return bool(x.dim() and x.numel()) and is_dense(x) and not self._copies.arena.holds(x)

        return self._move(parameters, may_leave, self._copies.to_host)

    def empty_like(self, p: Tensor, dtype: torch.dtype) -> Tensor:
        """A state laid out like a parameter, on the host."""
        local, _ = self._copies.arena.like(torch.empty_like(as_local(p), dtype=dtype, device="meta"))
        return _laid_out_like(p, local)

    def _move(
        self, parameters: Sequence[Tensor], moves: Callable[[Tensor], bool], start: Callable[[Tensor], Any]
    ) -> Callable[[], None]:
        pending = []
        for p in parameters:
            state = self._optimizer.state.get(p, {})
            for name, x in state.items():
                if isinstance(x, Tensor) and moves(as_local(x)):
                    pending.append((state, name, x, start(as_local(x))))

        def finish() -> None:
            while pending:
                state, name, x, copy = pending.pop()
                state[name] = _laid_out_like(x, self._copies.finish(copy))

        return finish


def _laid_out_like(x: Tensor, local: Tensor) -> Tensor:
    return x.like(local) if isinstance(x, ShardedTensor) else local


def _check_apart(optimizer: Optimizer) -> None:
    """Raises ValueError unless the optimizer steps each parameter by itself: all of torch's do, except LBFGS."""
    step = own_step(optimizer)
    known = ("torch.optim.", "transformers.optimization")
    if not step.__module__.startswith(known) or type(optimizer).__name__ == "LBFGS":
        raise ValueError(
            "optimizer_cpu_offload: needs an optimizer that steps each parameter by itself, such as those of "
            f"torch.optim, found {type(optimizer).__name__} of {step.__module__}; leave optimizer_cpu_offload out, or "
            "use one of them"
        )


@torch.no_grad()
def step_buckets(
    optimizer: Optimizer, is_ours: Callable[[Tensor], bool], hosts: OffloadedStates, call: Callable[[], Any]
) -> Any:
    """Step our parameters bucket by bucket, then all others by ``call``. Returns what this returns."""
    step, groups = own_step(optimizer), optimizer.param_groups
    try:
        for group in groups:
            mine = [p for p in group["params"] if is_ours(p) and p.grad is not None]
            sizes = [as_local(p).numel() * p.itemsize for p in mine]
            buckets = [[mine[i] for i in bucket] for bucket in in_buckets(sizes, hosts.bucket)]
            before = {name: value for name, value in group.items() if name != "params"}
            arrives, leaves = hosts.bring(buckets[0] if buckets else ()), _nothing
            for k, bucket in enumerate(buckets):
                arrives()
                arrives = hosts.bring(buckets[k + 1]) if k + 1 < len(buckets) else _nothing
                only = {**before, "params": bucket}
                optimizer.param_groups = [only]
                with on_pieces(optimizer, is_ours):
                    step(optimizer)
                leaves()
                leaves = hosts.put_away(bucket)
                group.update({name: value for name, value in only.items() if name != "params"})
            leaves()
        optimizer.param_groups = [_others(group, is_ours) for group in groups]
        return call()
    finally:
        optimizer.param_groups = groups


def _others(group: dict[str, Any], is_ours: Callable[[Tensor], bool]) -> dict[str, Any]:
    return {**group, "params": [p for p in group["params"] if not is_ours(p)]}


def _nothing() -> None:
    pass
