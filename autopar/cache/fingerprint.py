"""An object as a digest that is the same in every process: by content, with all that is reached from it.

    reached = Reached()
    reached.add("the model", model)         modules, attributes, hooks, tensors' facts, classes, functions ...
    reached.digest()                        and what the code of all these reads by name

Classes are their names and all that stands in them; functions their code, what they have closed over, and what they
read (`code_reached`). A library (`libraries`) is its version; of the one that the model's classes are of, functions
that may run are followed and what they find under their names is looked at, since people replace such things. Which
methods may run is decided by name: those that some code that may run names, and those that Python calls by itself.

Raises `Uncacheable` for what has no content that can be told: an object of a class written in C, a clock that is read.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import operator
import os
import re
import sys
import types
import weakref
from collections.abc import Collection, Iterable
from typing import Any

from autopar.adapters.copying.fake import Owned
from autopar.adapters.function_caches import CACHED
from autopar.cache.fingerprint_code import ABOUT_CODE, code_digest, entries_named, globals_read, impurity, reads_data
from autopar.cache.fingerprint_values import FINDERS, Uncacheable, ValueFingerprints
from autopar.cache.library_versions import version_of_package
from autopar.capture.reads.code_names import CodeNames, environment_read, names_in
from autopar.capture.reads.code_owners import LIBRARY, TRUSTED, USER, owner_of_function, owner_of_module

_CALLED = {
    "forward", "train", "eval", "named_parameters", "named_buffers", "named_modules", "modules", "parameters",
    "buffers", "children", "named_children", "extra_repr",
}  # fmt: skip
_NOT_RUN = {"__init__", "__new__", "__init_subclass__", "__repr__", "__str__", "__del__", "__class_getitem__",
            "__subclasshook__"}  # fmt: skip
_SKIPPED = {"__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "_abc_impl", "__abstractmethods__",
            "__annotations__", "__parameters__", "__orig_bases__", "__static_attributes__", "__firstlineno__",
            "__match_args__", "__slots__", "__slotnames__", "__annotations_cache__"}  # fmt: skip
_SESSION = re.compile(r"[0-9a-f]{32}")  # what a library calls a process
_EMPTY: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()  # of what a cached function read then
_PLAIN = (bool, int, float, str, type(None), list, tuple)


class Fingerprint(ValueFingerprints):
    """Grows with every `add`. ``owned``: the tensors of the model that the objects belong to. ``classes``: of its
    modules; the code of the libraries that they are of is followed, others are their versions."""

    def __init__(self, owned: Owned | None = None, classes: Collection[type] = ()) -> None:
        super().__init__(owned, classes)
        self._of_modules = classes
        self._own_packages = {cls.__module__.partition(".")[0] for cls in classes}
        self._names: set[str] = set()
        self._methods: dict[str, list[types.FunctionType]] = {}  # not named yet
        self._held: list[tuple[types.ModuleType, bool]] = []  # modules that values are; whether of libraries' objects
        self._searched: list[types.ModuleType] = []  # that the user's code may search by texts
        self._texts: set[str] = set()  # that may be names: of so many facts
        self._looked = 0
        self._functions: list[types.FunctionType] = []  # to follow
        self._followed: set[types.FunctionType] = set()
        self.files: dict[str, str] = {}  # file -> whose
        self.packages: set[str] = set()
        self._name_all(_CALLED)

    def add(self, label: str, value: Any) -> None:
        """Raises Uncacheable."""
        try:
            self._say(label)
            self._walk(value)
            self._follow_all()
        except RecursionError:
            raise Uncacheable(f"{label} holds itself in a chain that is too long") from None

    def digest(self) -> str:
        """Of all that was added, the files of the code, and versions of libraries."""
        for path, owner in sorted(self.files.items()):
            self._say(f"{path}: {_file_digest(path, owner)}")
        for name in sorted(self.packages):
            self._say(f"{name} {version_of_package(name)}")
        text = repr(self.facts)  # quoted: where one ends counts, too
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()

    # --- code ---------------------------------------------------------------------------------------------

    def _owner(self, of: types.FunctionType | type) -> str:
        """Whose code it is. A library that is none of the model's is known by its version."""
        owner = owner_of_module(of.__module__) if isinstance(of, type) else owner_of_function(of)
        if owner == LIBRARY:
            name = of.__module__ if isinstance(of, type) else of.__globals__.get("__name__")
            package = str(name).partition(".")[0]
            self.packages.add(package)
            return LIBRARY if package in self._own_packages else TRUSTED
        return owner

    def _is_users(self, value: object) -> bool:
        """Whether it is a function or a class of the user's."""
        if isinstance(value, type) and value.__module__ == "builtins":  # as most that are asked for
            return False
        return isinstance(value, (types.FunctionType, type)) and self._owner(value) == USER

    def _class(self, cls: type) -> None:
        owner, of_torch = self._owner(cls), cls.__module__.partition(".")[0] == "torch"
        self._say("class", owner, cls.__module__, cls.__qualname__, len(cls.__mro__))
        if type(cls) is not type:
            self._walk(type(cls))
        for base in cls.__mro__[1:]:
            if base is not object:
                self._walk(base)
        for name, value in list(vars(cls).items()):
            function = _function_of(value)
            if function is not None and (owner != TRUSTED or self._owner(function) != TRUSTED):
                self._say(name)
                self._method(name, function)
                if value is not function and owner == USER:
                    self._say(type(value).__name__)
                    self._check_kept(value) if type(value) is CACHED else None
            elif owner == USER and name not in _SKIPPED and not isinstance(value, types.MemberDescriptorType):
                self._say(name)
                self._walk(value)
            elif owner == LIBRARY and name not in _SKIPPED and type(value) in _PLAIN:
                self._say(name, _plain(value))
            elif of_torch and name not in _SKIPPED and not _is_ours(value):  # people put things there
                self._say(name, _plain(value))
                self._walk(value) if self._is_users(type(value)) else None

    def _method(self, name: str, function: types.FunctionType) -> None:
        """A function that runs if its name is named: its code counts in any case, what it reads only then."""
        self._say(code_digest(function.__code__))
        if name in self._names or (name.startswith("__") and name not in _NOT_RUN):
            self._function_inside(function)
        else:
            self._methods.setdefault(name, []).append(function)

    def _function(self, f: types.FunctionType) -> None:
        self._say("function", f.__module__, f.__qualname__, code_digest(f.__code__))
        self._function_inside(f)

    def _function_inside(self, f: types.FunctionType) -> None:
        owner = self._owner(f)
        if owner == TRUSTED and not f.__closure__:
            return
        before, self._lenient = self._lenient, self._lenient or owner != USER
        for cell in f.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:
                self._say("empty")
                continue
            self._walk(content)
        for held in (f.__defaults__, f.__kwdefaults__, f.__dict__) if owner != TRUSTED else ():
            if held:
                self._walk(held)
        self._lenient = before
        if owner != TRUSTED and f not in self._followed:
            self._followed.add(f)
            self._functions.append(f)

    def _cached(self, x: Any) -> None:
        super()._cached(x)
        self._check_kept(x)

    def _check_kept(self, x: Any) -> None:
        """What a cached function has kept cannot be looked at. It is what the function would find now, if nothing that
        it reads has changed since it kept nothing; of what a method reads of its objects nobody knows. A step that
        fills it is another one afterwards: who reads it from the disk fills nothing. Raises Uncacheable."""
        function = x.__wrapped__
        if self._lenient or not self._is_users(function) or not reads_data(function, {x}):
            return
        inside = Fingerprint(self._owned, self._of_modules)
        inside._skip(x)
        inside.add("cached", function)
        now, is_method = inside.digest(), function.__code__.co_varnames[:1] == ("self",)
        self._say("filled" if x.cache_info().currsize else "empty")
        if not x.cache_info().currsize:
            _EMPTY[x] = now
        elif is_method or _EMPTY.get(x) != now:
            raise Uncacheable(f"{function.__qualname__}, which keeps results that it found with what it read before")

    def _file(self, x: types.ModuleType) -> None:
        self._say("python module", x.__name__)
        self._held.append((x, self._lenient))
        self._look_into(x, self._names, self._lenient)

    def _look_into(self, module: types.ModuleType, names: Iterable[str], lenient: bool = False) -> None:
        """What stands in a module under names of what may be read of it. ``lenient``: by libraries alone."""
        owner, before = owner_of_module(module.__name__), self._lenient
        for name, value in entries_named(module, sorted(names)):
            why = None if lenient else impurity(name, value, self._names)
            if why:
                raise Uncacheable(f"{module.__name__}.{name} may be read: {why}")
            if owner != TRUSTED:
                self._lenient = owner == LIBRARY
                self._say(name)
                self._named(value)
        self._lenient = before

    def _follow_all(self) -> None:
        while self._functions or (self._finds_by_text and self._looked < len(self.facts)):
            while self._functions:
                self._follow(self._functions.pop())
            if self._finds_by_text:  # what is a text anywhere may be a name, or several: "gates.first"
                facts, self._looked = self.facts[self._looked :], len(self.facts)
                texts = [text for kind, text in itertools.pairwise(facts) if kind == str.__name__]
                self._name_texts(part for text in texts for part in text.split(".") if part.isidentifier())

    def _follow(self, f: types.FunctionType) -> None:
        owner, read = self._owner(f), names_in(f.__code__)
        file = f.__code__.co_filename
        if not file.startswith("<"):
            self.files[file] = owner
        self._say("reads of", f.__module__, f.__qualname__)
        before, self._lenient = self._lenient, owner == LIBRARY
        values = [(name, x) for name, x in globals_read(f, read) if not (self._lenient and _is_of_process(x))]
        for name, value in values:
            why = impurity(name, value, read.names) if owner == USER else None
            if why:
                raise Uncacheable(f"{f.__qualname__} reads {name}: {why}")
            if isinstance(value, types.ModuleType) and self._is_users(type(value)):
                raise Uncacheable(f"{f.__qualname__} reads {name}, a file with a class of its own")
            if not (isinstance(value, types.ModuleType) or value is os.environ or value is sys.modules):
                self._say(name)
                self._named(value)
        if owner == USER and (about := ABOUT_CODE.intersection(read.names)):
            raise Uncacheable(f"{f.__qualname__} reads {about.pop()}")
        self._read_environment(f, read, [x for _, x in values])
        self._lenient = before
        self._name_all(read.names)
        by_text = "__dict__" in read.names or any(x is finder for _, x in values for finder in FINDERS)
        if owner == USER and (by_text or any(isinstance(x, operator.attrgetter) for _, x in values)):
            self._finds_by_text |= by_text
            self._search(f, [x for _, x in values])

    def _read_environment(self, f: types.FunctionType, read: CodeNames, values: list[Any]) -> None:
        texts = [*read.texts, *(x for x in values if isinstance(x, str))]
        variables = environment_read(read.names, texts, values)
        if variables is None and self._owner(f) == USER:
            raise Uncacheable(f"{f.__qualname__} reads variables of the environment whose names it makes up")
        for variable, text in (variables or {}).items():
            self._say("environment", variable, text)

    def _search(self, f: types.FunctionType, values: list[Any]) -> None:
        """The user's code finds by texts what it reads of these, or of its own file."""
        if any(x is globals or x is vars for x in values):
            own = sys.modules.get(str(f.__globals__.get("__name__")))
            if own is None or vars(own) is not f.__globals__:
                raise Uncacheable(f"{f.__qualname__} finds things by texts in a file that is no module")
            values = [*values, own]
        for module in values:
            if isinstance(module, types.ModuleType) and owner_of_module(module.__name__) == USER:
                self._searched.append(module)
                self._look_into(module, self._texts)

    def _named(self, value: Any) -> None:
        """What code reads by name. A class may be called."""
        self._walk(value)
        if isinstance(value, type) and self._owner(value) != TRUSTED:
            for cls in value.__mro__:
                for name in ("__init__", "__new__"):
                    function = _function_of(vars(cls).get(name))
                    if function is not None:
                        self._function_inside(function)

    def _name_all(self, names: Iterable[str]) -> None:
        new = set(names) - self._names
        self._names |= new
        for name in sorted(self._methods.keys() & new):
            for function in self._methods.pop(name):
                self._function_inside(function)
        for module, lenient in list(self._held):
            self._look_into(module, new, lenient)

    def _name_texts(self, texts: Iterable[str]) -> None:
        new = set(texts) - self._texts
        self._texts |= new
        for module in list(self._searched):
            self._look_into(module, new)
        self._name_all(new)


def _function_of(value: Any) -> types.FunctionType | None:
    """That an entry of a class calls."""
    for name in ("__func__", "fget", "func", "__wrapped__") if type(value) in _WRAPPERS else ():
        if not isinstance(value, types.FunctionType):
            value = getattr(value, name, value) if type(value) in _WRAPPERS else value
    return value if isinstance(value, types.FunctionType) else None


def _is_of_process(value: Any) -> bool:
    return isinstance(value, str) and _SESSION.fullmatch(value) is not None


def _is_ours(value: Any) -> bool:
    """Whether it is a property that autopar has put into a class of torch, which a process may not have done yet."""
    return isinstance(value, property) and str(getattr(value.fset, "__module__", "")).startswith("autopar.")


def _plain(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}[{', '.join(map(_plain, value))}]"
    return repr(value) if type(value) in (bool, int, float, str, type(None)) else type(value).__qualname__


def _file_digest(path: str, owner: str) -> str:
    """Of a library's file its size and time, of others their content."""
    try:
        if owner == LIBRARY:
            found = os.stat(path)
            return f"{found.st_size} {found.st_mtime_ns}"
        with open(path, "rb") as file:
            return hashlib.blake2b(file.read(), digest_size=16).hexdigest()
    except OSError:
        return "none"


_WRAPPERS = (staticmethod, classmethod, property, functools.cached_property, CACHED)
