"""The fingerprint of a compiled step or plan: compilations with equal keys have equal results, in any process.

    the graph       as captured: calls, metadata, signature; constants by content
    the question    options, mesh, plans, kind of step
    global state    torch's flags and devices, the processor, entries that users added to autopar's registries
    versions        of Python, torch and numpy; autopar's sources

What a forward reads, from code to environment variables, is covered by the graph, since the model is captured before
each lookup. The coordinate of a rank is not part of the key: all ranks compile the same result.
"""

from __future__ import annotations

import functools
import hashlib
import json
import types
from collections.abc import Callable, Iterable, Mapping
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
from autopar.cache.value_codec import Encoder, Json, Unstorable
from autopar.chips import CHIPS
from autopar.ir.mesh import Mesh
from autopar.ops.kernels import KERNELS
from autopar.ops.kernels.paged import PAGED
from autopar.passes.canonicalize.normalize import REWRITES
from autopar.passes.pipelines import GLOBAL_PASSES, PLACEMENT_PASSES, STEP_PASSES
from autopar.plan import Plan
from autopar.rules.core import CORE
from autopar.rules.table import RULES
from autopar.schedule.request import SCHEDULES
from autopar.token_dispatchers import TOKEN_DISPATCHERS
from autopar.zero_stages import ZERO_STAGES

_PURE = ("autopar.", "_operator", "math", "builtins")  # modules whose functions a captured graph calls


def step_key(kind: str, gm: GraphModule, mesh: Mesh, **how: Any) -> str:
    """The key for a captured graph. Raises Unstorable if something that may affect the result cannot be compared."""
    if not own_digest():
        raise Unstorable("a source file of autopar that changed after it was loaded")
    if where := changed_autopar():
        raise Unstorable(f"a function that replaces {where}")
    if modes := unknown_modes():
        raise Unstorable(f"the active mode {modes[0]}")
    asked = {name: x.to_json() if isinstance(x, Plan) else Encoder().encode(x) for name, x in how.items()}
    # derived sharding rules depend on them
    around = [*torch_flags(), *default_devices(), torch.backends.cpu.get_cpu_capability()]
    facts = [kind, [*mesh.axes, str(mesh.slice)], asked, around, versions(), _tables(), _KeyEncoder().graph(gm)]
    return hashlib.blake2b(json.dumps(facts).encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()


class _KeyEncoder(GraphEncoder):
    """Encodes a graph for a digest: operators and classes by name, constants by digest."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds[OpOverload] = str
        self.kinds[type] = lambda cls: ["class", cls.__module__, cls.__qualname__]

    def _target(self, target: Any) -> Json:
        if isinstance(target, OpOverload):
            if name_of(target).partition("::")[0] not in SPACES:  # a user's operator may change under the same name
                raise Unstorable(f"the operator {target}, which is not torch's")
            return str(target)
        if not isinstance(target, (types.FunctionType, types.BuiltinFunctionType)) or is_foreign(target):
            raise Unstorable(f"the call target {target}")
        if not target.__module__.startswith(_PURE):
            raise Unstorable(f"the call target {target.__module__}.{target.__qualname__}")
        return f"{target.__module__}.{target.__qualname__}"

    def _other(self, value: Any) -> Json:
        """Fake values without their storage offset, which depends on the history of torch's fake propagation."""
        if not is_fake(value):
            return super()._other(value)
        kind = str(value.dtype), str(value.device), value.requires_grad, isinstance(value, nn.Parameter)
        return ["k", list(value.shape), list(value.stride()), *kind]

    def _constant(self, x: Tensor) -> Json:
        described = [str(x.dtype), list(x.shape), list(x.stride()), str(x.device)]
        if x.is_meta:
            return described
        data = bytes(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        return [*described, hashlib.blake2b(data, digest_size=20).hexdigest()]


def _tables() -> list[str]:
    """The entries of all tables to which a script may add its own. Raises Unstorable for one that is not autopar's: its
    code may be another one tomorrow."""
    rules = [f"{_op_name(op)} {_rule_name(rule)}" for table in (RULES, CORE) for op, rule in table.items()]
    tables: list[Mapping[Any, Any]] = [REWRITES, ZERO_STAGES]
    tables += [x._entries for x in (AC_POLICIES, SCHEDULES, ALGORITHMS, TOKEN_DISPATCHERS, CHIPS, KERNELS, PAGED)]
    tables += [{p.name: p for p in passes} for passes in (GLOBAL_PASSES, PLACEMENT_PASSES, STEP_PASSES)]
    return [*rules, *(_entry(name, entry) for table in tables for name, entry in table.items())]


def _entry(name: Any, entry: Any) -> str:
    """A row by its name and plain values. ``module``: where its functions are, if it names a module."""
    values = [entry, type(entry), *getattr(entry, "__dict__", {}).values()]
    if any(map(is_foreign, values)) or not getattr(entry, "module", "autopar.").startswith("autopar."):
        raise Unstorable(f"the user-defined registry entry {name}")
    return f"{name} {[x for x in values if isinstance(x, (str, int, float, tuple, type(None)))]}"


@functools.lru_cache(4096)
def _op_name(op: Any) -> str:
    return f"{op.__module__}.{op.__qualname__}" if isinstance(op, types.FunctionType) else str(op)


def _rule_name(rule: Callable[..., Any]) -> str:
    """A name for a rule, with the values that its closure holds: rules of one name may be made from different ones."""
    cells: Iterable[Any] = [cell.cell_contents for cell in getattr(rule, "__closure__", None) or ()]
    if is_foreign(rule) or any(map(is_foreign, cells)):
        raise Unstorable(f"the rule {getattr(rule, '__qualname__', rule)}, which is user-defined")
    held = [x for x in cells if isinstance(x, (str, int, bool, tuple, type(None)))]
    return f"{getattr(rule, '__qualname__', type(rule).__qualname__)} {held!r}"
