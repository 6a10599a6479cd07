"""A GPU that is not there: step graphs and the real executor on fake CUDA tensors, as one rank of a fake world.

    with fake_gpu(world=4) as gpu:
        result = gpu.step(compiled, model, batch)
    gpu.copies

Operators between devices raise, a read of a value raises, copies from the host are counted with the line that makes
them. Values are not computed.
"""

from __future__ import annotations

import contextlib
import ctypes
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

import autopar
from autopar import api
from autopar.capture.reads.code_owners import is_ours
from autopar.ir.placement import nested_piece
from autopar.ops.kernels.chips import chip_of
from autopar.ops.value_checks import take_notes
from autopar.runtime.checkpoint import hf_io
from autopar.runtime.consistency import rank_checks
from autopar.runtime.exec.executor import Executor, Result
from autopar.runtime.inputs import call_arguments
from autopar.runtime.mesh.process_groups import Groups
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.steps.graphs import Compiled

aten = torch.ops.aten


class FakeGpu(FakeTensorMode):
    """Counts copies between host and device, by the line of ours that asks for them."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.copies: Counter[str] = Counter()
        self.largest = 0  # bytes of a tensor on the device that an operator gave
        self.may_wait = False  # for a value on the device; else asking for one raises

    def step(self, compiled: Compiled, model: nn.Module, batch: Mapping[str, Tensor]) -> Result:
        """Two training steps of a compiled model; copies and results are those of the second."""
        groups = Groups(autopar.init_mesh("cuda", **compiled.plan.mesh.sizes))
        given = {**dict(model.named_buffers()), **_pieces(compiled, batch, groups)}
        facts = {name: (x.shape, x.dtype) for name, x in given.items()}
        facts |= {spec.name: (spec.local_shape(groups.mesh), spec.dtype) for spec in compiled.parameters}
        with self, Moves():
            executor = Executor(compiled, groups)
            values = {name: torch.empty(shape, dtype=dtype, device="cuda") for name, (shape, dtype) in facts.items()}
            values |= executor.constants
            values |= {name: torch.full((), 1, device="cuda") for name in executor.seeds}
            executor.run_step(values)
            self.copies.clear()
            return executor.run_step(values)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default and (self.may_wait or args[0].device.type == "cpu"):  # any value
            return 1.0 if args[0].is_floating_point() else 1
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(out, Tensor) and out.device.type == "cuda":
            self.largest = max(self.largest, out.numel() * out.element_size())
        if kwargs.get("pin_memory"):
            out.is_pinned_here = True
        if func in (aten._to_copy.default, aten.copy_.default):
            x = args[1] if func is aten.copy_.default else args[0]
            if isinstance(out, Tensor) and out.device.type != x.device.type:
                given = kwargs.get("non_blocking") or args[2:3] == (True,)
                waits = "" if given and (is_pinned(x) or is_pinned(out)) else ", waiting"
                self.copies[f"{x.device.type} to {out.device.type}{waits}: {_line()}"] += 1
        return out


def _pieces(compiled: Compiled, batch: Mapping[str, Tensor], groups: Groups) -> dict[str, Tensor]:
    """A rank's part of the batch."""
    placed = {name: {a: p for a, p in compiled.plan.inputs.get(name, {}).items() if a != "mb"} for name in batch}
    order, here = groups.mesh.cut_order, groups.coordinate
    return {name: nested_piece(x, placed[name], order, here) for name, x in batch.items()}


def _line() -> str:
    for frame in reversed(traceback.extract_stack()):
        if is_ours(frame.filename):
            return f"{Path(frame.filename).name}: {frame.line}"
    return "elsewhere"


def _to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Tensor.to that knows which GPU "cuda" is, and that a fake stands for what it moves."""
    non_blocking = kwargs.pop("non_blocking", False)
    copy = kwargs.pop("copy", False)
    for given in args:
        if isinstance(given, Tensor):
            kwargs |= {"dtype": given.dtype, "device": given.device}
        else:
            kwargs["dtype" if isinstance(given, torch.dtype) else "device"] = given
    device = torch.device(kwargs.get("device") or x.device)
    device = torch.device("cuda", device.index or 0) if device.type == "cuda" else device
    dtype = kwargs.get("dtype") or x.dtype
    if not copy and device == x.device and dtype == x.dtype:
        return x
    mode = _get_current_dispatch_mode()
    if isinstance(mode, FakeGpu) and type(x) in (Tensor, nn.Parameter):
        x = mode.from_tensor(x.detach())  # else torch computes with what is there, on the device
    elif getattr(x, "constant", None) is not None:
        x = x.fake_mode.from_tensor(x.constant.clone())  # else torch computes with the value, on the device
    made: Tensor = aten._to_copy.default(x, dtype=dtype, device=device, non_blocking=non_blocking)
    return made


def pinned(x: Tensor) -> Tensor:
    """A copy in memory of the host that a device can read while the host goes on."""
    out: Any = aten.clone.default(x)
    out.is_pinned_here = True
    return out  # type: ignore[no-any-return]


def is_pinned(x: Tensor) -> bool:
    return hasattr(x, "is_pinned_here")


@torch.no_grad()
def _backward(x: Tensor, **_: Any) -> None:
    """Node by node: torch's own engine has no thread for a device that is not there."""
    first: Any = x.grad_fn
    arrived: dict[Any, list[Any]] = {first: [None] * len(first._input_metadata)}
    arrived[first][x.output_nr] = torch.ones_like(x)
    while arrived:
        node = max(arrived, key=lambda node: node._sequence_nr())  # what was made last; accumulation into leaves behind
        given = arrived.pop(node)
        found = getattr(node, "apply", node)(*given)  # the first is of Python's functions
        grads = found if isinstance(found, tuple) else (found,)
        if grads and grads[0] is None:  # of arguments that are no tensors, which have no edges
            grads = grads[len(grads) - len(node.next_functions) :]
        for (following, place), grad in zip(node.next_functions, grads):
            if following is not None and grad is not None:
                slots = arrived.setdefault(following, [None] * len(following._input_metadata))
                slots[place] = grad if slots[place] is None else slots[place] + grad


ROUTES: dict[Any, Callable[..., Any]] = {
    Tensor.to: _to,
    Tensor.backward: _backward,
    Tensor.pin_memory: pinned,
    Tensor.is_pinned: is_pinned,
}


@contextlib.contextmanager
def module_on(gpu: FakeGpu, model: nn.Module, example: Mapping[str, Any], mesh: Any, **options: Any) -> Iterator[Any]:
    """What users hold, of one rank: `autopar.parallelize` and its steps, on fake CUDA tensors. Other ranks tell the
    same as this one. Compiling is real."""

    def outside(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return call(*args, **kwargs)

        return run

    def made(*args: Any, **kwargs: Any) -> Any:
        with gpu, Moves():
            return ParallelModule(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        for where, name, value in (
            (rank_checks, "meet", lambda *_: True),
            (rank_checks, "show", lambda scope, count, rank, ranks, text, limit: [text] * len(ranks)),
            (api, "ParallelModule", made),
            (hf_io.Files, "stored", outside(hf_io.Files.stored)),
            (call_arguments, "_problem", lambda *_: ""),  # fakes are no plain tensors
        ):
            stack.enter_context(patch.object(where, name, value))
        module = autopar.parallelize(model, mesh, example_batch=example, **options)
        module._cache._compiler = outside(module._cache._compiler)
        with gpu, Moves():
            yield module


class Moves(TorchFunctionMode):
    """Methods that move a tensor, or ask where it lies, as `ROUTES` has them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        here = isinstance(_get_current_dispatch_mode(), FakeGpu)  # not while a model is captured
        return (ROUTES.get(func, func) if here else func)(*args, **(kwargs or {}))


@contextlib.contextmanager
def _guarded() -> Iterator[None]:
    """torch asks a guard of the device's type which device is current, and ends the process where there is none, as in
    a build for the CPU. That of the meta device does nothing."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 15).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")  # by type of device
    cuda, meta = 1, 14
    before, guards[cuda] = guards[cuda], guards[meta]
    try:
        yield
    finally:
        guards[cuda] = before


@contextlib.contextmanager
def fake_gpu(world: int, rank: int = 0, capability: tuple[int, int] = (9, 0)) -> Iterator[FakeGpu]:
    """A world of ``world`` ranks with a GPU each, of which this process is one."""
    found: dict[str, Any] = {"is_available": True, "device_count": 8, "current_device": 0, "set_device": None}
    found |= {"_lazy_init": None, "get_device_capability": capability}
    found |= {"get_rng_state": torch.empty(0), "set_rng_state": None}  # kept by torch while it traces
    with contextlib.ExitStack() as stack:
        stack.enter_context(_guarded())
        for name, value in found.items():
            stack.enter_context(patch.object(torch.cuda, name, lambda *_, value=value: value))
        stack.enter_context(patch.object(torch.backends.cudnn, "is_available", lambda: True))
        stack.enter_context(patch.object(torch.backends.cudnn, "version", lambda: 91501))
        chip_of.cache_clear()
        stack.callback(chip_of.cache_clear)
        stack.enter_context(
            patch.object(autopar.runtime.mesh.process_groups, "check_devices", lambda *_: None)
        )  # nobody else is there
        stream = SimpleNamespace(record_event=lambda: SimpleNamespace(query=lambda: False, synchronize=lambda: None))
        stack.enter_context(patch.object(torch.accelerator, "current_stream", lambda *_: stream))
        dist.init_process_group("fake", rank=rank, world_size=world, store=dist.HashStore())
        stack.callback(dist.destroy_process_group)
        stack.callback(_clear_sharding_prop_cache)  # DTensors take an equal mesh, of groups that are gone, from it
        stack.callback(take_notes)  # of values that are on no device, for the next code that takes notes
        yield FakeGpu()
