"""Guards on all that a forward reads besides its arguments: while they hold, tracing it again gives the same graph.

    GAIN * x                             globals of its Python module, and of modules that it refers to:
    lib.settings.scale helper(x), self.config.scaled(x)     functions that may run: code, defaults, closures, and what
    they read self.config.gain                     attributes of objects, if code reads their names
    os.environ["GAIN"]                   environment variables, context variables, thread-local attributes

Nothing is executed: a function may run if code that may run refers to it. For libraries that define modules of the
model, the names that their functions read are guarded, too, since users replace functions there; for torch's layers,
the functions that they call.
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

_CALLED = {"forward", "backward", "setup_context", "jvp", "vmap", "__call__"}  # methods that torch calls
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
_FRAGMENT = 3  # shortest string that may be part of a name, in characters
_DEEPEST = 3  # depth of calls from a library's forward
_LARGE = 1000  # entries of a container in an object of a library


@dataclass(eq=False)
class Space:
    """A namespace, some names of which are read.

    names: those that code looks up in it. named: it holds attributes, so any name that code reads as an attribute
    counts. whole: all names count. more: names that Python itself reads. held: if given, exactly these names are
    compared. through: the object with these attributes, if they are not in a dict.
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
    known: int = 0  # how many names of `_order` were looked up
    taken: dict[str, None] = field(default_factory=dict)


class ForwardReads(ReadValues):
    """``ForwardReads(model).guards``: guards for all that forwards of its modules read, their attributes included.

    modes: whether to guard ``training`` of the modules. Parameters, buffers and submodules are not guarded here.
    uncomparable: (where, value) of values that may change but cannot be compared.
    """

    def __init__(self, root: nn.Module, modes: bool = True) -> None:
        registered = list(root.named_modules())
        tensors = (t for _, m in registered for t in (*m._parameters.values(), *m._buffers.values()))
        super().__init__([x for x in tensors if x is not None], modes)
        self.names: set[str] = {*_CALLED}  # attribute names that code reads
        self._order = [*_CALLED]  # the same, in order
        self._own_names: set[str] = set()  # those that the user's code reads
        self._texts: set[str] = set()  # strings in code and values
        self._parts: set[str] = set()  # substrings from which code may build names
        self._spaces: dict[int, Space] = {}
        self._functions: deque[tuple[types.FunctionType, int]] = deque()
        self._depth = 0  # calls from a forward to the current function of a library
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

    # --- iterate to a fixpoint -------------------------------------------------------------------------

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
        """Visit the names of a namespace that are known to be read by now."""
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
        """Whether a string in the code is this name, or a part of it."""
        ends = (end for i in range(_FRAGMENT, len(name) + 1) for end in (name[:i], name[-i:]))
        return name in self._texts or not self._parts.isdisjoint(ends)

    def _is_foreign(self, value: Any) -> bool:
        """Whether a value in a library is a function to follow, or an object of the user or of the model's
        libraries."""
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
        """Names that matter if they are added to a namespace; None: all."""
        if space.held is not None or (space.whole and space.owner == USER):
            return None
        if space.owner != USER and space.file:
            return set()
        return space.names | self.names if space.named else space.names

    def _space(self, scope: Mapping[str, Any], where: Where, owner: str = USER, of: Any = None, **how: Any) -> Space:
        """The space of a namespace, created or updated with ``how``."""
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
        """The owner of a function; libraries without modules in the model count as trusted."""
        owner = owner_of_function(f)
        package = str(f.__globals__.get("__name__")).partition(".")[0]
        return TRUSTED if owner == LIBRARY and package not in self._packages else owner

    def _read(self, f: types.FunctionType) -> None:
        """Add the names that the code of a function reads."""
        owner, read, scope = self._owner(f), names_in(f.__code__), f.__globals__
        names, attributes = globals_in(f.__code__), {*read.names}
        space = self._space(scope, Where("", _file_of(f), own=owner == USER), owner, file=True)
        space.names |= names
        self._order += attributes - self.names
        self.names |= attributes
        if owner != USER:
            self._take(space)  # now, so that functions there get the depth of this one
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
        """A Python module of which code reads these attributes."""
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
        """`sys.modules`: code finds modules in it by strings, so not all loaded modules count."""
        self._space(sys.modules, where)

    def _is_near(self, module: str) -> bool:
        return module in ("torch", "torch.nn") or module.startswith(_LAYERS) or self._is_of_model(module)

    def _is_of_model(self, module: str) -> bool:
        return module.partition(".")[0] in self._packages

    def _called(self, cls: type) -> None:
        """A class that code refers to may be instantiated."""
        for base in cls.__mro__ if owner_of_module(cls.__module__) == USER else ():
            for name in ("__init__", "__new__", "__post_init__"):
                self._visit(vars(base).get(name), Where(f"{base.__qualname__}.{name}", base.__module__))

    # --- values ------------------------------------------------------------------------------------

    def _python_module(self, x: types.ModuleType, where: Where) -> None:
        if owner_of_module(x.__name__) == USER:
            self._space(vars(x), Where("", _name_of(x)), file=True, named=True)

    def _text(self, x: str) -> None:
        self._texts.add(x)

    def _has_run(self, f: types.FunctionType, where: Where) -> bool:
        """Queue a function that may run; returns whether its code is followed."""
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
        """Attributes of an object that code reads; all of a library's object, whose code is not read."""
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
        """The attributes of a module; their contents count if code reads them."""
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
    """Whether a value is a getter of a setting, or a global list such as sys.argv."""
    callable_ = isinstance(value, (types.FunctionType, types.BuiltinFunctionType))
    return value in SETTINGS if callable_ else type(value) is list and len(value) <= _LARGE


def _is_memo(name: str) -> bool:
    """Whether an object of a library caches a result under this name."""
    return name.startswith("_") and "cache" in name


def _is_of_layers(f: types.FunctionType) -> bool:
    return str(f.__globals__.get("__name__")).startswith(_LAYERS)


def _file_of(f: types.FunctionType) -> str:
    file = f.__code__.co_filename
    return str(f.__globals__.get("__name__")) if file.startswith("<") else os.path.basename(file)


def _name_of(module: types.ModuleType) -> str:
    """The file of a Python module; for a package its name."""
    file = getattr(module, "__file__", None)
    return os.path.basename(file) if isinstance(file, str) and not file.endswith("__init__.py") else module.__name__


def _setting_of(name: str) -> Callable[[Any], tuple[Any]]:
    return lambda backend: (getattr(backend, name),)


def _variable(name: str) -> tuple[str | None]:
    return (os.environ.get(name),)


def _whole_environment(_: None) -> tuple[dict[str, str]]:
    return (dict(os.environ),)


# Attributes of every nn.Module: only hooks and submodules matter to a forward; parameters and buffers are separate.
INNER = {*nn.Module().__dict__} - {"training"}
NOT_PERSISTENT: Callable[[Any], set[str]] = operator.attrgetter("_non_persistent_buffers_set")
HOOKS = sorted(k for k in INNER if k.startswith(("_forward", "_backward")))
