"""The key of a compiled step, or of a plan: equal keys, equal results of compiling, in whichever process.

    the graph       as it was captured: calls, notes, signature; constants by content
    the question    options, mesh, plans, kind of step
    around it       torch's flags and devices, the processor, what users have added to autopar's tables
    versions        of Python, torch and numpy; autopar's sources

What a forward reads, from the code of a module to a variable of the environment, counts by what it has done to the
graph: who looks for a step has captured the model just before. A rank's coordinate is no part of it: compiling makes
the same on all ranks.
"""

from __future__ import annotations

import functools
import hashlib
import json
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from autopar.ac_policies import AC_POLICIES
from autopar.adapters.fx.graph_data import is_fake
from autopar.adapters.operators import OpOverload, name_of
from autopar.adapters.torch_flags import default_devices, torch_flags, unknown_modes
from autopar.attention.algorithm_table import ALGORITHMS
from autopar.cache.graph_codec import GraphEncoder
from autopar.cache.own_sources import changed_autopar, is_foreign, own_digest, versions
from autopar.cache.stored_operators import SPACES
from autopar.cache.value_codec import Encoder, ShardedModules, Unstorable
from autopar.chips import CHIPS
from autopar.ir.mesh import Mesh
from autopar.plan import Plan
from autopar.rules.core import CORE
from autopar.rules.table import RULES
from autopar.schedule.request import SCHEDULES
from autopar.token_dispatchers import TOKEN_DISPATCHERS

_PURE = ("autopar.", "_operator", "math", "builtins")  # modules whose functions a captured graph calls


def step_key(kind: str, gm: GraphModule, mesh: Mesh, **how: Any) -> str:
    """Of a captured graph. Raises Unstorable where something that may decide cannot be told."""
    if not own_digest():
        raise Unstorable("a file of autopar that is younger than this process")
    if where := changed_autopar():
        raise Unstorable(f"somebody has put a function of their own in the place of {where}")
    if modes := unknown_modes():
        raise Unstorable(f"the mode {modes[0]} around the call")
    asked = {name: x.to_json() if isinstance(x, Plan) else Encoder().encode(x) for name, x in how.items()}
    around = [*torch_flags(), *default_devices(), torch.backends.cpu.get_cpu_capability()]  # rules are derived on it
    facts = [kind, [*mesh.axes, str(mesh.slice)], asked, around, versions(), _tables(), _KeyEncoder().graph(gm)]
    return hashlib.blake2b(json.dumps(facts).encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()


class _KeyEncoder(GraphEncoder):
    """Nothing is read from it: operators and classes by their names, constants by a digest."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds[OpOverload] = str
        self.kinds[type] = lambda cls: ["class", cls.__module__, cls.__qualname__]

    def _target(self, target: Any) -> ShardedModules:
        if isinstance(target, OpOverload):
            if name_of(target).partition("::")[0] not in SPACES:  # others may be something else under the same name
                raise Unstorable(f"the operator {target}, which is not torch's")
            return str(target)
        if not isinstance(target, (types.FunctionType, types.BuiltinFunctionType)) or is_foreign(target):
            raise Unstorable(f"the call target {target}")
        if not target.__module__.startswith(_PURE):
            raise Unstorable(f"the call target {target.__module__}.{target.__qualname__}")
        return f"{target.__module__}.{target.__qualname__}"

    def _other(self, value: Any) -> ShardedModules:
        """Not where a fake begins in its memory: that depends on what torch has propagated before."""
        if not is_fake(value):
            return super()._other(value)
        told = str(value.dtype), str(value.device), value.requires_grad, isinstance(value, nn.Parameter)
        return ["k", list(value.shape), list(value.stride()), *told]

    def _constant(self, x: Tensor) -> ShardedModules:
        described = [str(x.dtype), list(x.shape), list(x.stride()), str(x.device)]
        if x.is_meta:
            return described
        data = bytes(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        return [*described, hashlib.blake2b(data, digest_size=20).hexdigest()]


def _tables() -> list[str]:
    """What users may add to: rules, schedules, policies, algorithms, dispatchers, chips. Ours are sources."""
    rules = [f"{_op_name(op)} {_rule_name(rule)}" for table in (RULES, CORE) for op, rule in table.items()]
    for policy in (AC_POLICIES._entries[name] for name in AC_POLICIES):
        if is_foreign(policy):
            raise Unstorable("a policy of activation checkpoints which is not autopar's")
    entries = [(name, table._entries[name]) for table in (SCHEDULES, ALGORITHMS) for name in table]
    for name, entry in entries:
        if not type(entry).__module__.startswith("autopar."):
            raise Unstorable(f"{name}, which is not autopar's, in a table of autopar")
    for name, row in TOKEN_DISPATCHERS.items():
        if not row.module.startswith("autopar."):
            raise Unstorable(f"{name}, which is not autopar's, in a table of autopar")
    chips = (f"{name} {chip}" for name, chip in CHIPS.items())
    return [*rules, *AC_POLICIES, *TOKEN_DISPATCHERS, *chips, *(name for name, _ in entries)]


@functools.lru_cache(4096)
def _op_name(op: Any) -> str:
    return f"{op.__module__}.{op.__qualname__}" if isinstance(op, types.FunctionType) else str(op)


def _rule_name(rule: Callable[..., Any]) -> str:
    """A rule of ours, with what it was made of: two of one name may be made of other texts."""
    cells: Iterable[Any] = [cell.cell_contents for cell in getattr(rule, "__closure__", None) or ()]
    if is_foreign(rule) or any(map(is_foreign, cells)):
        raise Unstorable(f"the rule {getattr(rule, '__qualname__', rule)}, which is not autopar's")
    held = [x for x in cells if isinstance(x, (str, int, bool, tuple, type(None)))]
    return f"{getattr(rule, '__qualname__', type(rule).__qualname__)} {held!r}"
