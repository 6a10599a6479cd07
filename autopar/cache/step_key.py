"""Everything that decides what a compilation makes, as one digest: equal keys, equal steps, in whichever process.

the model           classes, code, attributes, hooks, shapes and dtypes of tensors, ties (`reached`)
what it is called with: shapes and dtypes of the batch, other values; options, mesh, plans, kind of step
around it           torch's flags and modes, environment, what has been put into torch and into autopar's tables
versions            of Python, torch, numpy, the libraries whose code is reached; autopar's sources

A rank's coordinate is no part of it: compiling makes the same on all ranks.
"""

from __future__ import annotations

import decimal
import functools
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.ac_policies import AC_POLICIES
from autopar.adapters.copying.fake import owned_by
from autopar.adapters.torch_flags import default_devices, torch_flags, unknown_modes
from autopar.attention.algorithm_table import ALGORITHMS
from autopar.cache.fingerprint import Fingerprint
from autopar.cache.fingerprint_values import Uncacheable
from autopar.cache.library_versions import changed_autopar, is_foreign, own_digest, renamed, replaced, versions
from autopar.capture.front_end import ADAPTERS, adapter_for
from autopar.ir.batch import ConstantTensor, facts_of, tensors_of
from autopar.ir.mesh import Mesh
from autopar.plan import Plan
from autopar.rules.core import CORE
from autopar.rules.table import RULES
from autopar.schedule.request import SCHEDULES

_DECIMAL = ("prec", "rounding", "Emin", "Emax", "clamp", "capitals")


def step_key(kind: str, model: nn.Module, batch: Mapping[str, Any], mesh: Mesh, **how: Any) -> str:
    """Raises Uncacheable where something that may decide cannot be told."""
    return _reached(kind, model, batch, mesh, **how).digest()


def _reached(kind: str, model: nn.Module, batch: Mapping[str, Any], mesh: Mesh, **how: Any) -> Fingerprint:
    if not own_digest():
        raise Uncacheable("a file of autopar that is younger than this process")
    if where := changed_autopar():
        raise Uncacheable(f"somebody has put a function of their own in the place of {where}")
    if modes := unknown_modes():
        raise Uncacheable(f"the mode {modes[0]} around the call")
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    reached = Fingerprint(owned_by(model), classes)
    reached.add("kind", kind)
    reached.add("versions", versions())
    reached.add("torch", [*torch_flags(), *default_devices()])
    reached.add("processor", torch.backends.cpu.get_cpu_capability())  # whose kernels rules were derived from
    reached.add(
        "decimal", [getattr(decimal.getcontext(), name) for name in ("prec", "rounding", "Emin", "Emax", "clamp")]
    )
    reached.add("names", tuple(renamed()))
    for where, function in replaced():
        reached.add(where, function)
    _add_tables(reached)
    reached.add("mesh", [mesh.axes, str(mesh.slice)])
    for name, value in how.items():
        reached.add(name, value.to_json() if isinstance(value, Plan) else value)
    _add_batch(reached, batch)
    adapter = adapter_for(model)
    reached.add("adapter", type(adapter).__qualname__ if type(adapter).__module__.startswith("autopar.") else adapter)
    reached.add("overlaps", owned_by(model).overlaps)
    reached.add("model", model)
    return reached


def _add_batch(reached: Fingerprint, batch: Mapping[str, Any]) -> None:
    """Its tensors by what they are, everything else by content."""
    reached.add("batch", facts_of(batch))
    for path, x in tensors_of(batch).items():
        reached.add(path, [x.stride(), x.requires_grad, type(x).__qualname__])
    reached.add("other values", _without_tensors(batch))


def _without_tensors(value: Any) -> Any:
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, ConstantTensor):
        return repr(value)
    if type(value) in (list, tuple):
        return type(value)(map(_without_tensors, value))
    if type(value) is dict:
        return {key: _without_tensors(x) for key, x in value.items()}
    return value


def _add_tables(reached: Fingerprint) -> None:
    """What users may add to: rules, schedules, algorithms, adapters. Ours are sources."""
    reached.add("adapters", [type(x).__qualname__ for x in ADAPTERS])
    reached.add(
        "rules", [f"{_op_name(op)} {_rule_name(rule)}" for table in (RULES, CORE) for op, rule in table.items()]
    )
    reached.add("schedules", [f"{name} {_entry(entry)}" for name, entry in _entries(SCHEDULES)])
    reached.add("checkpoints", [f"{name} {_policy(entry)}" for name, entry in _entries(AC_POLICIES)])
    reached.add("algorithms", [f"{name} {_entry(entry)}" for name, entry in _entries(ALGORITHMS)])


@functools.lru_cache(4096)
def _op_name(op: Any) -> str:
    return f"{op.__module__}.{op.__qualname__}" if isinstance(op, types.FunctionType) else str(op)


def _rule_name(rule: Callable[..., Any]) -> str:
    """A rule of ours, with what it was made of: two of one name may be made of other texts."""
    if is_foreign(rule):
        raise Uncacheable(f"the rule {getattr(rule, '__qualname__', rule)}, which is not autopar's")
    cells = [cell.cell_contents for cell in getattr(rule, "__closure__", None) or ()]
    held = [x for x in cells if isinstance(x, (str, int, bool, tuple, type(None)))]
    if any(map(is_foreign, cells)):
        raise Uncacheable("a rule that calls a function which is not autopar's")
    return f"{getattr(rule, '__qualname__', type(rule).__qualname__)} {held!r}"


def _entries(table: Any) -> Iterable[tuple[str, Any]]:
    return [(name, table._entries[name]) for name in table]


def _policy(policy: Callable[..., Any]) -> str:
    if is_foreign(policy):
        raise Uncacheable("a policy of checkpoints which is not autopar's")
    return ""


def _entry(entry: Any) -> str:
    """What stands in a table of ours and is loaded when it is asked for is the same before."""
    cls = type(entry)
    if not cls.__module__.startswith("autopar."):
        raise Uncacheable(f"{cls.__qualname__}, which is not autopar's, in a table of autopar")
    return ""
