"""Checks of the arguments of `parallelize`: mistakes are ValueErrors, raised before anything is captured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from autopar.adapters.tensors.tags import check_tags
from autopar.options import Options
from autopar.plan import Plan
from autopar.runtime.exec.finite_check import FINITE
from autopar.runtime.exec.lowering import BACKENDS
from autopar.runtime.exec.replay_check import REPLAY, replay_every
from autopar.runtime.inputs.rank_outputs import RANK
from autopar.runtime.module.overridden_methods import check_lists
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.values import one_of, refuse, whole_number, yes_or_no

MOST_SEED = 2**62
# Wrappers that run another module themselves, and how to get at the module inside.
WRAPPERS: dict[type[nn.Module], str] = {
    nn.parallel.DistributedDataParallel: ".module, before it is wrapped",
    nn.DataParallel: ".module",
}
FEW_BITS_OF_TORCHAO = tuple(  # whose layers compute products in few bits
    f"torchao.{room}"
    for room in (
        "float8",
        "prototype.blockwise_fp8_training",
        "prototype.float8nocompile",
        "prototype.moe_training",
        "prototype.mx_formats",
        "prototype.quantized_training",
    )
)

CHECKS = (FINITE, REPLAY)  # of `parallelize`


def check_module(model: Any) -> None:
    """Raises ValueError for anything but a module with unsharded parameters."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise ValueError(f"parallelize: needs a model, found the class {model.__name__}; pass {model.__name__}(...)")
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"parallelize: needs a torch.nn.Module, found a {type(model).__name__}; put the function and its "
            "parameters into a module"
        )
    for name, module in model.named_modules():
        at = f" at {name}" if name else ""
        if isinstance(module, ParallelModule):
            raise ValueError(
                f"parallelize: needs a model that is not parallelized yet, found a ParallelModule{at}; pass the "
                "model that it was made from"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"parallelize: needs Python modules, found a ScriptModule{at}, which torch.export can't trace; pass "
                "the module before torch.jit.script"
            )
        if type(module).__module__.startswith(FEW_BITS_OF_TORCHAO):
            raise ValueError(
                f"parallelize: needs the model's own layers, found torchao's {type(module).__name__}{at}; pass the "
                'model before its conversion, and precision="fp8" (tensorwise), "fp8_row" (rowwise), the same with '
                'wide_weight_gradient=True (rowwise_with_gw_hp) or "mxfp8"'
            )
        for wrapper, inside in WRAPPERS.items():
            if isinstance(module, wrapper):
                raise ValueError(f"parallelize: replaces {wrapper.__name__}, found one{at}; pass its model{inside}")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(
                f"parallelize: needs initialized parameters, found {name}, whose shape the first batch decides (a "
                "lazy module); run the model once"
            )
        if isinstance(tensor, DTensor):
            raise ValueError(
                f"parallelize: needs unsharded parameters, found {name}, a DTensor; pass the model as it was before "
                "fully_shard or parallelize_module"
            )
    check_lists(model)
    check_tags(model)


def check_no_gradients(model: nn.Module) -> None:
    """Raises ValueError for a parameter with a gradient: the next backward would add to it."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            raise ValueError(
                f"parallelize: parameter {name} has a gradient already, to which the first step would add; call "
                "model.zero_grad() first"
            )


def checks_of(given: Any) -> tuple[str, ...]:
    """The names of the checks. Raises ValueError."""
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, (list, tuple, set, frozenset)) or any(
        str(x).partition(":")[0] not in CHECKS for x in names
    ):
        raise refuse("check", f"names out of {', '.join(map(repr, CHECKS))}", given)
    replay_every(names)
    return tuple(sorted(set(names)))


def check_replicas(options: Options, backend: str, padding: Any, checks: tuple[str, ...]) -> None:
    """Raises ValueError for arguments that do not go with several replicas."""
    given = {
        f"check={list(checks)}": bool(checks),
        f"padding={padding!r}": padding != "exact",
        f"backend={backend!r}": "cudagraphs" in backend,
        f"precision={options.precision!r}": options.precision.scaling == "delayed",
    }
    if (count := options.replicas) > 1 and (found := next((words for words, asked in given.items() if asked), "")):
        raise ValueError(
            f"replicas: a step is computed by {count} worlds that do not share everything, found {found}, which needs "
            "one world; leave it out"
        )


def check_arguments(
    options: Options,
    dump: Any,
    plan: Any,
    example_batch: Any,
    *,
    seed: Any,
    backend: Any,
    padding: Any,
    outputs_with_grad: Any,
    **flags: Any,
) -> None:
    """Check the keyword arguments other than options, and whether they go together; ``flags`` are booleans. Raises
    ValueError."""
    whole_number("seed", seed, 0, MOST_SEED)
    for name, value in flags.items():
        yes_or_no(name, value)
    one_of("backend", backend, tuple(BACKENDS))
    one_of("outputs_with_grad", outputs_with_grad, (False, True, RANK))
    if not isinstance(dump, (str, Path, type(None))):
        raise refuse("dump", "the path of a folder", dump)
    if not isinstance(plan, (Plan, type(None))):
        raise ValueError(f"plan: needs a Plan, found a {type(plan).__name__}; read one with Plan.from_json(text)")
    if not isinstance(example_batch, (Mapping, type(None))):
        raise ValueError(
            f"example_batch: needs the keyword arguments of the forward, found a {type(example_batch).__name__}; "
            "pass a dict such as {'input_ids': ..., 'labels': ...}"
        )
    if "cudagraphs" in backend and options.precision.scaling == "delayed":
        raise ValueError(
            f"backend: a recorded step would repeat the scales of its first run, found {backend!r} and "
            f"{options.precision!r}; use another backend, or scaling='tensor'"
        )
    if options.deal_images is True and backend != "eager":
        raise ValueError(
            f"deal_images: an exchange of features reads its splits on the host, found backend={backend!r}; use "
            'backend="eager", or deal_images=False'
        )
    if padding != "exact" and options.capacity_factor:
        raise ValueError(
            f"padding: padded tokens would use up expert capacity, found capacity_factor={options.capacity_factor}; "
            "use padding or capacity_factor, not both"
        )
    if padding != "exact" and not options.precision.scales_by_token:
        raise ValueError(
            f"padding: padded tokens would change the scales of products in few bits, found {options.precision!r}; use "
            "padding=\"exact\", or a policy with scaling='row' or 'block' and wide_weight_gradient=True"
        )
    if padding != "exact" and outputs_with_grad is True:
        raise ValueError(
            f"outputs_with_grad: returns outputs of the global batch, found padding={padding!r}, which pads the "
            'batch of each rank; use outputs_with_grad="rank", loss=fn, or padding="exact"'
        )
    if flags["lift_to_float64"] and options.precision.compute not in ("", "float64"):
        raise ValueError(
            f"lift_to_float64: computes everything in float64, found precision={options.precision!r}, which "
            f"computes in {options.precision.compute}; use one of them, not both"
        )
