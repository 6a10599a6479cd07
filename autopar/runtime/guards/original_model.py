"""The original model after parallelize: changes of it do not reach the parallel model, so they are refused.

    parallel = autopar.parallelize(model, mesh)
    model.backbone.eval()                      the next step of `parallel` raises: call it on parallel.backbone

Reading, running and training the original by itself (as a reference, with its own optimizer) is fine. Changes that
make the two models differ and were likely meant for both are refused at the next step: modes, attributes, hooks,
modules, requires_grad, and writes to weights. Exceptions are writes of an optimizer and writes that make the two equal
(``model.load_state_dict(parallel.full_state_dict())``).

The model is not kept alive. The first `OFTEN` steps check, then every `EVERY`th step and the first of another kind:
150 us for 60 modules, and nothing once the model is gone.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from autopar.adapters.autograd import version_of
from autopar.adapters.copying.fake_deepcopy import walk_attributes
from autopar.adapters.dtensor import local_of
from autopar.adapters.hooks import HOOKS_OF_MODULES, has_gradient_hooks, hooks_so_far
from autopar.adapters.tensors.first_words import place_of, sampled_words, value_of
from autopar.adapters.tensors.tags import tags_of
from autopar.capture.reads.named_in_code import names_written
from autopar.ir.placement import stored_piece
from autopar.ir.signature import ParameterSpec
from autopar.runtime.guards.shared_memory import is_taken_back
from autopar.runtime.inputs.padding import BATCH_NORMS
from autopar.runtime.mesh.process_groups import Groups
from autopar.runtime.optim.step_hooks import version_after_step
from autopar.runtime.params.dtensor_layout import is_here, told_by_holder
from autopar.runtime.params.sharded_modules import ShardedModules

OFTEN, EVERY = 64, 16  # steps: the same ones on all ranks
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_TABLES = {"_modules": "module", "_parameters": "parameter", "_buffers": "buffer"}
_APART = {*nn.Module().__dict__, "_compiled_call_impl"} - {"training"}
_MISSING, _MODE = object(), ("attribute", "training")
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # buffers of a batch norm, the count last
_WANTS_GRADIENT: Callable[[Tensor], bool] = operator.attrgetter("requires_grad")
_ENTRIES = operator.attrgetter("__dict__")

Fact = tuple[str, str]  # (kind, name): ("attribute", "eps"), ("parameter", "weight"), ("hooks", "_forward_hooks")


def _facts_of(module: nn.Module) -> dict[Fact, Any]:
    """The facts of a module that are compared: values, and the identity of objects."""
    entries = module.__dict__
    found: dict[Fact, Any] = {
        ("attribute", name): x if isinstance(x, _PLAIN) else ("object", id(x))
        for name, x in entries.items()
        if name not in _APART
    }
    found["attribute", "__class__"] = type(module)
    for table, kind in _TABLES.items():
        found |= {(kind, name): ("object", id(x)) for name, x in entries[table].items() if x is not None}
    return found | {("hooks", name): tuple(entries[name]) for name in HOOKS_OF_MODULES if entries.get(name)}


def _state_of(x: Tensor) -> tuple[Any, ...]:
    return place_of(x), version_of(x), x.requires_grad, len(x.__dict__)


class _Observed:
    """Modules and tensors as they are when this is created, by name, held weakly."""

    def __init__(
        self, modules: Mapping[str, nn.Module], tensors: Mapping[str, Tensor], hooks: Sequence[Hooks] | None = None
    ) -> None:
        self._gone = False
        self._held_hooks = list(_hooks_of(modules)) if hooks is None else hooks
        self._held_hooks_then = [tuple(held) for *_, held in self._held_hooks]
        self._paths, self._names = list(modules), list(tensors)
        self._modules = [weakref.ref(m, self._left) for m in modules.values()]
        self._tensors = [weakref.ref(x, self._left) for x in tensors.values()]
        self._facts = list(map(_facts_of, modules.values()))
        self._states, self._tags = list(map(_state_of, tensors.values())), list(map(tags_of, tensors.values()))
        self._words = list(map(sampled_words, tensors.values()))
        self._contents = [list(map(value_of, words)) for words in self._words]
        # the same facts as lists, to compare in C
        self._flat, self._flat_contents = list(chain(*self._words)), list(chain(*self._contents))
        plain, objects = [], []
        for module in modules.values():
            names = [name for name in module.__dict__ if name not in _APART]
            held = [name for name in names if not isinstance(module.__dict__[name], _PLAIN)]
            mode = ("training",) if "training" in module.__dict__ else ()  # torch.compile's modules have a property
            same = (*mode, *(name for name in names if name not in held))
            plain.append(operator.itemgetter(*same) if same else _nothing)
            objects.append(operator.itemgetter(*held, *held[:1]) if held else _nothing)
        self._plain, self._objects = plain, objects
        self._hooked = [get for name, get in _GET_HOOKS.items() if any(m.__dict__.get(name) for m in modules.values())]
        self._then = self._now(list(modules.values())), self._now_of_tensors(list(tensors.values()))
        self._hooks = hooks_so_far()

    def _left(self, _: Any) -> None:
        self._gone = True

    def __bool__(self) -> bool:
        return bool(self._modules or self._tensors or self._held_hooks)

    def has_module(self, path: str) -> bool:
        """Whether the module is still alive."""
        return any(known == path and ref() is not None for known, ref in zip(self._paths, self._modules))

    def _now(self, modules: Sequence[nn.Module]) -> tuple[list[Any], ...]:
        entries = list(map(_ENTRIES, modules))
        objects = chain.from_iterable(map(operator.call, self._objects, entries))
        tables = [chain.from_iterable(map(dict.values, map(get, entries))) for get in _GET_TABLES]
        return (
            list(map(type, modules)),
            list(map(len, entries)),
            list(map(operator.call, self._plain, entries)),
            list(map(id, chain(objects, *tables))),
            [list(map(len, map(get, entries))) for get in self._hooked],  # a hook may be removed
        )

    @staticmethod
    def _now_of_tensors(tensors: Sequence[Tensor]) -> tuple[list[Any], ...]:
        return (
            list(map(place_of, tensors)),
            list(map(version_of, tensors)),
            list(map(_WANTS_GRADIENT, tensors)),
            list(map(len, map(_ENTRIES, tensors))),
        )

    def has_only_run(self, path: str) -> bool:
        """Whether only its forward has written to the statistics of a batch norm: once per batch that it has counted.
        (Unknown on other devices than the CPU, where this is assumed.)"""
        names = [f"{path}.{name}" if path else name for name in _STATISTICS]
        places = [self._names.index(name) for name in names if name in self._names]
        written = [version_of(x) - self._states[i][1] for i in places if (x := self._tensors[i]()) is not None]
        if len(written) < len(names) or not self._words[places[-1]]:
            return True
        counted = value_of(self._words[places[-1]][0]) - self._contents[places[-1]][0]
        return written[-1] == counted and {*written} <= {0, counted}  # torch does not count its own writes

    def same(self) -> bool:
        """Whether nothing has changed. (Values are read where the tensors still are.)"""
        if self._gone or hooks_so_far() != self._hooks:
            return False
        try:
            modules: list[Any] = list(map(operator.call, self._modules))
            tensors: list[Any] = list(map(operator.call, self._tensors))
            return (
                (self._now(modules), self._now_of_tensors(tensors)) == self._then
                and self._flat_contents == list(map(value_of, self._flat))
                and [tuple(held) for *_, held in self._held_hooks] == self._held_hooks_then
            )
        except Exception:  # an attribute is gone, or its == does not return a bool
            return False

    def changes(self) -> Iterator[tuple[str, Any, str, str]]:
        """(path, module or tensor, kind, name) of each change."""
        for path, ref, then in zip(self._paths, self._modules, self._facts, strict=True):
            module = ref()
            now = _facts_of(module) if module is not None else then
            for fact in dict.fromkeys((*then, *now)):
                if not _equal(now.get(fact, _MISSING), then.get(fact, _MISSING)):
                    yield path, module, *fact
        for (path, name, hooks), before in zip(self._held_hooks, self._held_hooks_then, strict=True):
            if tuple(hooks) != before:
                yield path, hooks, "hooks", name
        held = zip(self._names, self._tensors, self._states, self._tags, self._words, self._contents, strict=True)
        for name, of_tensor, state, tags, words, contents in held:
            x = of_tensor()
            if x is None:
                continue
            place, version, wants, _ = state
            if place_of(x) != place or version_of(x) != version or list(map(value_of, words)) != contents:
                yield name, x, "values", ""
            if x.requires_grad != wants:
                yield name, x, "requires_grad", ""
            if has_gradient_hooks(x):
                yield name, x, "gradient hook", ""
            now_tags = tags_of(x)
            yield from ((name, x, "tag", tag) for tag in {**tags, **now_tags} if tags.get(tag) is not now_tags.get(tag))

    def again(self) -> _Observed:
        """A new record of what is still alive."""
        modules = {p: m for p, ref in zip(self._paths, self._modules, strict=True) if (m := ref()) is not None}
        held = ((n, x) for n, ref in zip(self._names, self._tensors, strict=True) if (x := ref()) is not None)
        tensors = {n: x for n, x in held if not is_taken_back(x)}
        return _Observed(modules, tensors, self._held_hooks)


Hooks = tuple[str, str, dict[Any, Any]]  # (path of a module, name of the table, the hooks)


def _hooks_of(modules: Mapping[str, nn.Module]) -> Iterator[Hooks]:
    """Tables with hooks, from which a handle may remove one after the module is gone; not those that would keep the
    model alive."""
    for path, module in modules.items():
        for name in HOOKS_OF_MODULES:
            hooks = module.__dict__.get(name)
            if hooks and not any(isinstance(x, (nn.Module, Tensor)) for _, x in walk_attributes(hooks)):
                yield path, name, hooks


_GET_TABLES = [operator.itemgetter(name) for name in _TABLES]
_GET_HOOKS = {name: operator.itemgetter(name) for name in HOOKS_OF_MODULES}


def _nothing(_: Any) -> tuple[()]:
    return ()


def _equal(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and bool(a == b))


class OriginalModel:
    """``OriginalModel({"": model}, tree, groups, written).check()`` at each step. ``written``: returns the names of the
    buffers that steps write to, None before the first step."""

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        tree: ShardedModules,
        groups: Groups,
        written: Callable[[], set[str] | None],
    ) -> None:
        self._tree, self._groups, self._written = tree, groups, written
        self._steps, self._kind = 0, object()
        modules: dict[int, tuple[str, nn.Module]] = {}
        tensors: dict[int, tuple[str, Tensor]] = {}
        for above, model in models.items():
            for path, module in model.named_modules():
                path = ".".join(filter(None, (above, path)))
                modules.setdefault(id(module), (path, module))
                for name, x in (*module._parameters.items(), *module._buffers.items()):
                    if x is not None and not x.is_inference():
                        tensors.setdefault(id(x), (f"{path}.{name}" if path else name, x))
        self._seen, self._twins = _Observed(dict(modules.values()), dict(tensors.values())), self._facts_of_twins()

    def check(self, kind: object, modes: bool = True) -> None:
        """Check at a step of this kind. ``modes``: whether modes of modules count for it. Raises ValueError for changes
        since the last check that the parallel model does not have."""
        self._steps += 1
        often = self._steps <= OFTEN or self._steps % EVERY == 0 or kind != self._kind
        self._kind = kind
        if not often or not self._seen or self._seen.same():
            return
        later = False
        for change in self._seen.changes():
            if (change[2:] == _MODE and not modes) or (change[2] == "values" and self._may_be_of_forward(change[0])):
                later = True
            else:
                self._judge(*change)
        if not later:
            self._seen, self._twins = self._seen.again(), self._facts_of_twins()

    def _facts_of_twins(self) -> dict[str, dict[Fact, Any]]:
        return {path: _facts_of(module) for path, module in self._tree.root.named_modules(remove_duplicate=False)}

    def _judge(self, path: str, x: Any, kind: str, name: str) -> None:
        if isinstance(x, dict):
            self._judge_hooks(path, x, name)
        elif isinstance(x, nn.Module):
            self._judge_module(path, x, kind, name)
        elif kind == "values":
            self._judge_values(path, x)
        else:
            twin = self._tensor(path)
            if twin is None:
                return
            if kind == "requires_grad" and twin.requires_grad != x.requires_grad:
                self._refuse(f"requires_grad of {path} was set to {x.requires_grad}", path)
            if kind == "gradient hook" and not has_gradient_hooks(twin):
                self._refuse(f"a gradient hook of {path} was registered", path)
            if kind == "tag" and not _equal(tags_of(twin).get(name), tags_of(x).get(name)):
                self._refuse(f"attribute {name} of {path} was set", path)

    def _judge_module(self, path: str, module: nn.Module, kind: str, name: str) -> None:
        twin = self._module(path)
        if twin is None or (kind != "hooks" and name in names_written(type(module))):
            return
        at = f"{path}.{name}" if path else name
        if kind == "hooks":
            self._judge_hooks(path, vars(module)[name], name)
            return
        if kind == "attribute":
            now, mine = (
                getattr(x, name) if name == "__class__" else vars(x).get(name, _MISSING) for x in (module, twin)
            )
            if now is mine or (_equal(now, mine) if isinstance(now, _PLAIN) else self._changed_too(path, kind, name)):
                return
            said = "removed" if now is _MISSING else f"set to {now!r}" if isinstance(now, _PLAIN) else "set"
            self._refuse(f"attribute {at} was {said}", path)
        table = next(table for table, of in _TABLES.items() if of == kind)
        now, mine = vars(module)[table].get(name), vars(twin)[table].get(name)
        if (now is None and mine is None) or (isinstance(now, Tensor) and now.is_meta):  # dropped
            return
        if self._changed_too(path, kind, name) or (kind == "buffer" and _both_hold(now, mine)):
            return
        how = "removed" if now is None else "added" if mine is None else "replaced"
        self._refuse(f"{kind} {at} was {how}", path)

    def _judge_hooks(self, path: str, hooks: dict[Any, Any], name: str) -> None:
        twin = self._module(path)
        if twin is not None and len(hooks) != len(vars(twin)[name]):
            self._refuse(f"hooks of {path or 'the model'} were registered or removed", path)

    def _judge_values(self, name: str, x: Tensor) -> None:
        if x.is_meta or version_of(x) == version_after_step(x):
            return
        twin = self._tensor(name)
        if twin is None or is_taken_back(x):
            return
        spec = next((s for s in self._tree.specs if name in (s.name, *s.aliases)), None)
        if spec is not None:
            if not told_by_holder(twin, not is_here(twin) or self._is_piece(x, twin, spec)):
                self._refuse(f"values of {name} were written", name)
            return
        path = name.rpartition(".")[0]
        ran = self._seen.has_module(path) and (  # written by its own forward
            self._seen.has_only_run(path)
            if isinstance(self._module(path), BATCH_NORMS)
            else name in (self._written() or ())
        )
        if not ran and not _holds(x, twin, 0.5):
            self._refuse(f"values of {name} were written", name)

    def _may_be_of_forward(self, name: str) -> bool:
        """Whether it is a buffer, as long as no step has shown which ones forwards write to."""
        path, _, own = name.rpartition(".")
        module = self._module(path)
        return self._written() is None and module is not None and own in module._buffers

    def _changed_too(self, path: str, kind: str, name: str) -> bool:
        """Whether the same fact of the parallel model has changed, too."""
        twin, fact = self._module(path), (kind, name)
        return twin is not None and not _equal(
            _facts_of(twin).get(fact, _MISSING), self._twins.get(path, {}).get(fact, _MISSING)
        )

    def _is_piece(self, x: Tensor, twin: Tensor, spec: ParameterSpec) -> bool:
        if tuple(x.shape) != tuple(spec.shape):
            return False
        piece = stored_piece(x.detach(), spec.placements, self._groups.mesh.cut_order, self._groups.coordinate)
        return _holds(piece, local_of(twin))  # type: ignore[arg-type]

    def _module(self, path: str) -> nn.Module | None:
        """The module of the parallel model."""
        found: nn.Module | None = self._tree.root
        for name in filter(None, path.split(".")):
            found = found._modules.get(name) if found is not None else None
        return found

    def _tensor(self, name: str) -> Tensor | None:
        path, _, own = name.rpartition(".")
        module = self._module(path)
        if module is None:
            return None
        found = module._parameters.get(own)
        return found if found is not None else module._buffers.get(own)

    def _refuse(self, what: str, path: str) -> None:
        at = f"model.{path} of the model" if path else "the model"
        raise ValueError(
            f"parallelize: {what} on the original model after parallelize, which does not reach the parallel model; "
            f"change {at} that parallelize returned, or parallelize copy.deepcopy(model) to keep the original separate"
        )


def _both_hold(x: Tensor | None, other: Tensor | None) -> bool:
    return x is not None and other is not None and _holds(x, other, 0.5)


def _holds(x: Tensor, other: Tensor, power: float = 0.9) -> bool:
    """Whether two tensors have the same values, up to the rounding of a few operations. ``power``: exponent of eps in
    the tolerance. Statistics of two models that train alike drift apart further than weights."""
    if x.shape != other.shape or other.is_meta or x.is_meta:
        return False
    x, other = x.detach().to(other.device, other.dtype), other.detach()
    if not other.is_floating_point() or not other.numel():
        return torch.equal(x, other)
    few = torch.finfo(other.dtype).eps ** power
    return torch.allclose(x, other, rtol=few, atol=few * float(other.abs().max()), equal_nan=True)
