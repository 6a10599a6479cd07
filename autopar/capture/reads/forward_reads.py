"""What a forward reads beside its arguments, as guards that tell whether it would be traced alike again.

    GAIN * x                             names of its file and of files that it names: lib.settings.scale
    helper(x), self.config.scaled(x)     functions that may run: code, defaults, what they close over, what they read
    self.config.gain                     attributes of objects under names that code reads
    os.environ["GAIN"]                   variables of the environment, context variables, attributes of a thread

Nothing is run for this: what may run is what other code that may run names. Of libraries whose modules the model has
what their functions name is guarded, too, for people replace functions there; of torch's layers what they call.
"""

from __future__ import annotations

import argparse
import builtins
import operator
import os
import re
import sys
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol

from torch import Tensor, nn

from autopar.adapters.torch_flags import BACKENDS, SETTINGS, named_in_torch
from autopar.capture.reads.code_names import environment_read, globals_in, imported_modules, names_in, package_of
from autopar.capture.reads.code_owners import LIBRARY, TRUSTED, USER, owner_of_function, owner_of_module
from autopar.capture.reads.read_guards import CONTAINERS, Where
from autopar.capture.reads.read_values import ReadValues

_CALLED = {"forward", "backward", "setup_context", "jvp", "vmap", "__call__"}  # by torch
_NOT_RUN = {"__init__", "__new__", "__init_subclass__", "__repr__", "__str__", "__del__", "__class_getitem__",
            "__subclasshook__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__deepcopy__",
            "__copy__"}  # fmt: skip
_NOTES = {"__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__annotations__", "__abstractmethods__",
          "__parameters__", "__orig_bases__", "__match_args__", "__slots__", "__static_attributes__",
          "__firstlineno__", "__annotate__", "__annotate_func__", "__annotations_cache__", "__dataclass_params__",
          "__dataclass_fields__", "__builtins__"}  # fmt: skip
_BY_TEXT = {"getattr", "vars", "__dict__", "asdict", "astuple", "attrgetter", "__getattribute__", "dir", "copy",
            "deepcopy", "__getstate__"}  # fmt: skip
_FILES_BY_TEXT = {"globals", "eval", "exec", "modules", "__import__", "import_module"}
_OPERATORS = {f"__{side}{name}__" for name in ("add", "sub", "mul", "matmul", "truediv", "pow", "neg", "getitem")
              for side in ("", "r")}  # fmt: skip
_LAYERS = ("torch.nn.", "torch.functional")
_PLAIN_CLASSES = (object, nn.Module, argparse.Namespace, types.SimpleNamespace, Generic, Protocol)
_FRAGMENT = 3  # characters of a text that is taken for a part of a name
_DEEPEST = 3  # calls from a library's forward on
_LARGE = 1000  # entries of a container that a library's object holds


@dataclass(eq=False)
class Space:
    """A namespace: values by names, some of which are read.

    ``names``: those that code looks up in it; ``named``: whether it is the attributes of something, of which those are
    read that any code names; ``whole``: all are. ``more``: such as Python reads by itself. ``held``: names that are
    compared whoever reads them. ``through``: the object that they are attributes of, where they stand in no dict.
    """

    scope: Mapping[str, Any]
    where: Where
    owner: str
    names: set[str] = field(default_factory=set)
    more: Collection[str] = ()
    held: Collection[str] | None = None
    named: bool = False
    whole: bool = False
    file: bool = False
    through: Any = None
    known: int = 0  # names that were looked for
    taken: dict[str, None] = field(default_factory=dict)


class ForwardReads(ReadValues):
    """``ForwardReads(model).guards``: guards for all that forwards of its modules read, their attributes included.

    ``modes``: whether the modules' ``training`` counts. Parameters, buffers and children are for others to watch;
    ``uncomparable``: what may change and cannot be compared, and where it is.
    """

    def __init__(self, root: nn.Module, modes: bool = True) -> None:
        registered = list(root.named_modules())
        tensors = (t for _, m in registered for t in (*m._parameters.values(), *m._buffers.values()))
        super().__init__([x for x in tensors if x is not None], modes)
        self.names: set[str] = {*_CALLED}  # that code reads as attributes
        self._order = [*_CALLED]  # the same
        self._own_names: set[str] = set()  # the same, of the user's code
        self._texts: set[str] = set()  # that values are
        self._parts: set[str] = set()  # of names, that code may put together
        self._spaces: dict[int, Space] = {}
        self._functions: deque[tuple[types.FunctionType, int]] = deque()
        self._depth = 0  # of the library's function that is looked into, from the forwards on
        self._environment: dict[str, None] = {}
        self._whole_environment = self._by_text = self._files_by_text = False
        self._packages = {c.__module__.partition(".")[0] for _, m in registered for c in type(m).__mro__} - {"torch"}
        self._class(Tensor, _OPERATORS)
        self._class(nn.Module, {"_call_impl", "_wrapped_call_impl", "__getattr__"})
        self._seen.update((id(m), m) for _, m in registered)
        for path, module in registered:
            self._module(module, Where("", path or type(root).__name__, "attribute "))
        self._follow()
        self._finish()

    # --- until nothing new is found -------------------------------------------------------------------------

    def _follow(self) -> None:
        before: Any = None
        while self._functions or before != self._found():
            before = self._found()
            while self._functions:
                f, depth = self._functions.popleft()
                self._depth = depth + 1
                self._read(f)
                self._depth = 0
            for space in list(self._spaces.values()):
                self._take(space)

    def _found(self) -> Any:
        names = sum(len(space.names) + space.named + space.whole for space in self._spaces.values())
        return len(self.names), len(self._texts), len(self._spaces), names, self._by_text, self._files_by_text

    def _take(self, space: Space) -> None:
        """Look at what is read by now."""
        found = {*space.names, *space.more}
        if space.named:
            found.update(self._order[space.known :])
            space.known = len(self._order)
        if space.whole or (space.named and not space.file and self._by_text and space.owner == USER):
            found = {*space.scope}
        if space.file and (self._files_by_text or (self._by_text and (space.named or space.owner == TRUSTED))):
            found.update(filter(self._is_meant, space.scope) if space.owner == USER else self._texts)
        if space.scope is sys.modules:
            found = {name for name in [*sys.modules] if owner_of_module(name) == USER and self._is_meant(name)}
        if space.held is not None:
            found &= {*space.held}
        for name in sorted(name for name in found if name in space.scope and name not in space.taken):
            value = space.scope[name]
            late = space.whole and isinstance(value, CONTAINERS) and len(value) > _LARGE and name not in self.names
            if late or name in _NOTES or (space.whole and _is_memo(name)):
                continue
            space.taken[name] = None
            if space.owner == USER or self._is_foreign(value) or (space.file and _is_setting(value)):
                self._visit(value, space.where.attribute(name))

    def _is_meant(self, name: str) -> bool:
        """Whether a text is this name, or a part of it."""
        ends = (end for i in range(_FRAGMENT, len(name) + 1) for end in (name[:i], name[-i:]))
        return name in self._texts or not self._parts.isdisjoint(ends)

    def _is_foreign(self, value: Any) -> bool:
        """Of what stands in a library: whether it is a function to follow, an object, or of the user."""
        if isinstance(value, types.FunctionType):
            return self._owner(value) != TRUSTED or _is_of_layers(value) or bool(value.__closure__)
        if isinstance(value, type):
            return owner_of_module(value.__module__) == USER
        if isinstance(value, types.MethodType):
            return True
        return owner_of_module(type(value).__module__) == USER or self._is_of_model(type(value).__module__)

    def _finish(self) -> None:
        for space in self._spaces.values():
            names = [name for name in (space.taken if space.held is None else space.held) if name in space.scope]
            if space.through is not None:
                if names:
                    self.guards.slots(space.through, names, space.where)
            else:
                self.guards.attributes(space.scope, names, space.where, self._new(space))
        if self._whole_environment:
            self.guards.value(_whole_environment, None, Where("a variable", "the environment"), equal=True)
        for backend, flags in BACKENDS:
            if backend.rpartition(".")[2] in self._own_names:
                for name in sorted(self._own_names.intersection(flags)):
                    self.guards.value(_setting_of(name), named_in_torch(backend), Where(name, backend), equal=True)
        for name in self._environment:
            self.guards.value(_variable, name, Where(f"variable {name}", "the environment"), equal=True)
        self.guards.done()

    def _new(self, space: Space) -> set[str] | None:
        """Names that change something if they come to a namespace; None: all."""
        if space.held is not None or (space.whole and space.owner == USER):
            return None
        if space.owner != USER and space.file:
            return set()
        return space.names | self.names if space.named else space.names

    def _space(self, scope: Mapping[str, Any], where: Where, owner: str = USER, of: Any = None, **how: Any) -> Space:
        """The namespace, of which more may be known now."""
        key = id(scope if of is None else of)
        space = self._spaces.get(key)
        if space is None:
            space = self._spaces[key] = Space(scope, where, owner)
            self._kept.append(scope if of is None else of)
        for name, value in how.items():
            setattr(space, name, getattr(space, name) or value)
        return space

    # --- code -----------------------------------------------------------------------------------------------

    def _owner(self, f: types.FunctionType) -> str:
        """A library that no module of the model is of is nobody's to follow."""
        owner = owner_of_function(f)
        package = str(f.__globals__.get("__name__")).partition(".")[0]
        return TRUSTED if owner == LIBRARY and package not in self._packages else owner

    def _read(self, f: types.FunctionType) -> None:
        """The names that a function's code reads, should it run."""
        owner, read, scope = self._owner(f), names_in(f.__code__), f.__globals__
        names, attributes = globals_in(f.__code__), {*read.names}
        space = self._space(scope, Where("", _file_of(f), own=owner == USER), owner, file=True)
        space.names |= names
        self._order += attributes - self.names
        self.names |= attributes
        if owner != USER:
            self._take(space)  # now: functions there are as deep as this one
        if owner == USER:
            self._own_names |= attributes
            self._texts.update(read.texts)
            self._parts.update(x for text in read.texts for x in re.split(r"\W+", text) if len(x) >= _FRAGMENT)
            self._by_text |= not _BY_TEXT.isdisjoint(attributes)
            self._files_by_text |= not _FILES_BY_TEXT.isdisjoint(attributes)
            self._space(vars(builtins), Where("", "builtins"), TRUSTED).names |= names - scope.keys()
            for name in read.imported:
                for module in imported_modules(name, package_of(f)):
                    self._file(module, attributes, owner)
            self._read_environment(attributes, read.texts, [scope.get(name) for name in names])
        for name in sorted(names & scope.keys()):
            value = scope[name]
            if isinstance(value, types.ModuleType):
                self._file(value, attributes, owner)
            elif isinstance(value, type) and owner == USER:
                self._called(value)

    def _read_environment(self, names: set[str], texts: Iterable[str], values: list[Any]) -> None:
        found = environment_read(names, [*texts, *(x for x in values if isinstance(x, str))], values)
        self._whole_environment |= found is None
        self._environment |= dict.fromkeys(found or ())

    def _file(self, module: types.ModuleType, names: set[str], reader: str) -> None:
        """A module that code names which reads these names as attributes."""
        owner = owner_of_module(module.__name__)
        if owner == USER:
            self._visit(module, Where("", _name_of(module)))
            return
        if reader != USER and not self._is_near(module.__name__):
            return
        space = self._space(vars(module), Where("", _name_of(module), own=False), owner, file=True)
        if names <= space.names:
            return
        space.names |= names
        for inner in [vars(module)[name] for name in names & vars(module).keys()]:
            if isinstance(inner, types.ModuleType) and inner is not module:
                self._file(inner, names, reader)

    def _loaded_modules(self, where: Where) -> None:
        """`sys.modules`: code finds files there by a text, and not all that the process has loaded."""
        self._space(sys.modules, where)

    def _is_near(self, module: str) -> bool:
        return module in ("torch", "torch.nn") or module.startswith(_LAYERS) or self._is_of_model(module)

    def _is_of_model(self, module: str) -> bool:
        return module.partition(".")[0] in self._packages

    def _called(self, cls: type) -> None:
        """A class that code names may be called."""
        for base in cls.__mro__ if owner_of_module(cls.__module__) == USER else ():
            for name in ("__init__", "__new__", "__post_init__"):
                self._visit(vars(base).get(name), Where(f"{base.__qualname__}.{name}", base.__module__))

    # --- what values are ------------------------------------------------------------------------------------

    def _python_module(self, x: types.ModuleType, where: Where) -> None:
        if owner_of_module(x.__name__) == USER:
            self._space(vars(x), Where("", _name_of(x)), file=True, named=True)

    def _text(self, x: str) -> None:
        self._texts.add(x)

    def _has_run(self, f: types.FunctionType, where: Where) -> bool:
        """A function that may run. Whether it is one that is looked into."""
        owner = self._owner(f)
        if owner == TRUSTED and not _is_of_layers(f):
            return False
        if owner != USER and self._depth > _DEEPEST:
            return False
        self._functions.append((f, self._depth if owner != USER else 0))
        if f.__dict__ and owner == USER:
            self._space(f.__dict__, where, named=True)
        return owner == USER

    def _class(self, cls: type, more: Collection[str] = ()) -> None:
        for base in cls.__mro__:
            owner, name = owner_of_module(base.__module__), base.__module__
            near = owner == USER or base in (Tensor, nn.Module)
            near |= issubclass(base, nn.Module) and (self._is_of_model(name) or name.startswith(_LAYERS))
            if not near or base is object or id(base) in self._spaces:
                continue
            run = {n for n in vars(base) if n.startswith("__") and n.endswith("__")} - _NOT_RUN if owner == USER else ()
            where = Where(base.__qualname__, base.__module__, own=owner == USER)
            self._space(vars(base), where, owner, of=base, named=True, more={*more, *run})
            if type(base) is not type:
                self._class(type(base))

    def _attributes(self, x: Any, where: Where) -> None:
        """Of an object: those that code names; of a library's all, for its own code reads them."""
        kinds = [c for c in type(x).__mro__ if c not in _PLAIN_CLASSES]
        whole = any(owner_of_module(c.__module__) != USER for c in kinds if c not in CONTAINERS)
        entries = getattr(x, "__dict__", None)
        if isinstance(entries, dict):
            self._space(entries, where, of=x, named=True, whole=whole)
        names = [name for c in kinds for name, member in vars(c).items()
                 if type(member) is types.MemberDescriptorType and hasattr(x, name)]  # fmt: skip
        if names and owner_of_module(type(x).__module__) != TRUSTED:
            values = {name: getattr(x, name) for name in names}
            self._space(values, where, through=x, named=True, whole=whole)
        self._class(type(x))

    def _module(self, x: nn.Module, where: Where) -> None:
        """Its own attributes. What they hold counts where code names them."""
        entries = x.__dict__
        names = [k for k in entries if k not in INNER and (self._modes or k != "training")]
        plain = all(owner_of_module(c.__module__) == USER for c in type(x).__mro__ if c not in _PLAIN_CLASSES)
        space = self._space(entries, where, of=x, named=True, held=names)
        if not plain:
            space.names |= {*names}
        for name in HOOKS:
            if entries.get(name):
                self._visit_all(entries[name].values(), where.attribute("a hook"))
        self._class(type(x))


def _is_setting(value: Any) -> bool:
    """A function that tells a setting, or a list that everybody may change, such as sys.argv."""
    callable_ = isinstance(value, (types.FunctionType, types.BuiltinFunctionType))
    return value in SETTINGS if callable_ else type(value) is list and len(value) <= _LARGE


def _is_memo(name: str) -> bool:
    """Whether an object of a library keeps there what it has found out once."""
    return name.startswith("_") and "cache" in name


def _is_of_layers(f: types.FunctionType) -> bool:
    return str(f.__globals__.get("__name__")).startswith(_LAYERS)


def _file_of(f: types.FunctionType) -> str:
    file = f.__code__.co_filename
    return str(f.__globals__.get("__name__")) if file.startswith("<") else os.path.basename(file)


def _name_of(module: types.ModuleType) -> str:
    """Of its file, where it is a file of its own."""
    file = getattr(module, "__file__", None)
    return os.path.basename(file) if isinstance(file, str) and not file.endswith("__init__.py") else module.__name__


def _setting_of(name: str) -> Callable[[Any], tuple[Any]]:
    return lambda backend: (getattr(backend, name),)


def _variable(name: str) -> tuple[str | None]:
    return (os.environ.get(name),)


def _whole_environment(_: None) -> tuple[dict[str, str]]:
    return (dict(os.environ),)


# What nn.Module keeps in a module: of these only hooks and children matter to a forward; state is looked at by itself.
INNER = {*nn.Module().__dict__} - {"training"}
NOT_PERSISTENT: Callable[[Any], set[str]] = operator.attrgetter("_non_persistent_buffers_set")
HOOKS = sorted(k for k in INNER if k.startswith(("_forward", "_backward")))
