"""Global state of torch that a capture may depend on: modes, dtypes, precision, backends, configuration."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._config_module import _UNSET_SENTINEL
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_CONFIGS = (
    "torch._dynamo.config", "torch._export.config", "torch._functorch.config", "torch.fx.experimental._config",
    "torch.fx.config", "torch._config", "torch._library.config",
)  # fmt: skip
_DEVICES = ("cpu", "cuda")
_FLAGS = (
    "torch.is_grad_enabled", "torch.is_inference_mode_enabled", "torch.get_default_dtype",
    "torch.is_autocast_cache_enabled", "torch.are_deterministic_algorithms_enabled",
    "torch.is_deterministic_algorithms_warn_only_enabled", "torch.get_float32_matmul_precision",
    "torch.is_anomaly_enabled", "torch.backends.cuda.flash_sdp_enabled", "torch.backends.cuda.math_sdp_enabled",
    "torch.backends.cuda.mem_efficient_sdp_enabled", "torch.backends.cuda.cudnn_sdp_enabled",
    "torch.backends.mha.get_fastpath_enabled", "torch.__future__.get_overwrite_module_params_on_conversion",
    "torch.__future__.get_swap_module_params_on_conversion",
)  # fmt: skip
BACKENDS = (
    ("torch.backends.cudnn", ("enabled", "benchmark", "deterministic", "allow_tf32")),
    ("torch.backends.mkldnn", ("enabled", "deterministic", "allow_tf32")),
    ("torch.backends.cuda.matmul", ("allow_tf32", "allow_fp16_reduced_precision_reduction",
                                    "allow_bf16_reduced_precision_reduction")),
    ("torch.backends.opt_einsum", ("enabled", "strategy")),
    ("torch.backends.nnpack", ("enabled",)),
    ("torch.backends.quantized", ("engine",)),
)  # fmt: skip
_READ = ("AUTOPAR_", "TORCH_", "PYTORCH_", "ATEN_", "TORCHDYNAMO_", "TRANSFORMERS_", "HF_")
_NOT_READ = (
    "AUTOPAR_CACHE", "AUTOPAR_DUMP", "AUTOPAR_TIMEOUT", "AUTOPAR_HEARTBEAT_TIMEOUT", "AUTOPAR_REPLICA", "TORCH_NCCL_",
    "TORCH_DISTRIBUTED_", "TORCH_CPP_LOG", "TORCH_LOGS", "TORCH_SHOW_", "TORCH_FR_", "TORCH_TRACE",
    "TORCH_HOME", "TORCH_COMPILE_DEBUG", "HF_TOKEN", "HF_HOME", "HF_HUB_", "HF_DATASETS_", "TRANSFORMERS_CACHE",
    "TRANSFORMERS_VERBOSITY",
)  # fmt: skip


def torch_flags() -> Iterator[tuple[str, Any]]:
    """(name, value) of all flags, as strings."""
    for name in _FLAGS:
        yield name, str(named_in_torch(name)())
    for device in _DEVICES:
        yield f"autocast {device}", f"{torch.is_autocast_enabled(device)} {torch.get_autocast_dtype(device)}"
    for module, names in BACKENDS:
        yield from ((f"{module}.{name}", str(getattr(named_in_torch(module), name, None))) for name in names)
    yield from _configured()
    for name, text in sorted(os.environ.items()):
        if name.startswith(_READ) and not name.startswith(_NOT_READ):
            yield name, text


def named_in_torch(path: str) -> Any:
    """The object of a dotted name in torch."""
    parts = path.split(".")
    found: Any = torch
    for part in parts[1:]:
        found = getattr(found, part)
    return found


def _configured() -> Iterator[tuple[str, str]]:
    """Configuration values that differ from their defaults, in modules that are loaded."""
    for name in _CONFIGS:
        module: Any = sys.modules.get(name)
        for key, entry in sorted(getattr(module, "_config", {}).items()):
            given = (entry.env_value_force, entry.env_value_default, entry.default)
            value = entry.user_override.get()
            if value is not _UNSET_SENTINEL and value != next((x for x in given if x is not _UNSET_SENTINEL), None):
                yield f"{name}.{key}", repr(value)


_MODES = ("torch.is_grad_enabled", "torch.is_inference_mode_enabled")  # others around a step than in its forward
# Functions without arguments, whose results are compared if the user's code refers to them.
SETTINGS: frozenset[Any] = frozenset(
    [named_in_torch(name) for name in _FLAGS if name not in _MODES]
    + [torch.get_num_threads, torch.get_num_interop_threads, torch.get_default_device, sys.getrecursionlimit]
    + [sys.getswitchinterval, gc.isenabled, gc.get_threshold, threading.active_count, threading.enumerate]
)


def unknown_modes() -> list[str]:
    """Active function and dispatch modes that are not known."""
    found = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    return [type(mode).__qualname__ for mode in found if type(mode) is not DeviceContext]


def default_devices() -> list[str]:
    """Devices of active `torch.device` contexts."""
    return [str(mode.device) for mode in _get_current_function_mode_stack() if type(mode) is DeviceContext]
