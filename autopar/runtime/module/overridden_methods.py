"""Methods of nn.Module that the model's class overrides are overridden on the parallel model, too.

    class Net(nn.Module):
        def parameters(self, recurse=True): ...     parallel.parameters() calls it
        def __len__(self): ...                      len(parallel)

The parallel model stands for the model's outermost module and has the same tensors and submodules. So torch's methods
do the same on either, and an override is called on the module whose class defines it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

# Methods of Python that create an object, name it or define its type: not forwarded.
_OWN = {
    "__init__", "__new__", "__del__", "__call__", "__repr__", "__hash__", "__eq__", "__ne__", "__class__", "__dict__",
    "__getattr__", "__getattribute__", "__setattr__", "__delattr__", "__dir__", "__sizeof__", "__subclasshook__",
    "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__copy__", "__deepcopy__", "__getnewargs__",
    "__getnewargs_ex__", "__init_subclass__", "__class_getitem__", "__set_name__", "__instancecheck__",
    "__subclasscheck__",
}  # fmt: skip


def face_of(base: type, root: nn.Module) -> type:
    """A subclass of ``base``, the class of parallel models, for this outermost module. It forwards the methods of torch
    that the module or its class overrides, unless ``base`` defines them itself."""
    own = {name for cls in base.__mro__ if cls not in (nn.Module, object) for name in vars(cls)}
    on_itself = [name for name, x in vars(root).items() if callable(x) and callable(getattr(nn.Module, name, None))]
    handed = {name: _handed_on(name) for name in (*_overridden(type(root)), *on_itself) if name not in own}
    return type(base.__name__, (base,), {"__module__": base.__module__, "__doc__": base.__doc__, **handed})


def overrides(module: nn.Module, *names: str) -> bool:
    """Whether one of these methods of torch is overridden, by the module's class or on the module itself."""
    return any(
        name in module.__dict__ or getattr(type(module), name, None) is not getattr(nn.Module, name) for name in names
    )


def _overridden(kind: type) -> Iterator[str]:
    """Names of the methods that override torch's, and of special methods that Python's operators and functions call."""
    for cls in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for name, value in vars(cls).items():
            special = name.startswith("__") and name.endswith("__")
            known = name not in _OWN if special else hasattr(nn.Module, name)
            if known and isinstance(value, (Callable, staticmethod, classmethod)):  # type: ignore[arg-type]
                yield name


def _handed_on(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        root = self._tree.root
        found = getattr(root, name)(*args, **kwargs)
        return self if found is root else found

    method.__name__ = name
    return method


def check_lists(model: nn.Module) -> None:
    """Raises ValueError where an overridden method lists other modules, parameters or buffers than the model has."""
    modules = list(_modules(model))
    needed: dict[str, list[tuple[str, Any]]] = {
        "named_modules": modules,
        "named_parameters": list(_members(modules, "_parameters")),
        "named_buffers": list(_members(modules, "_buffers")),
    }
    for what, entries in needed.items():
        name = f"{type(model).__qualname__}.{what}"
        try:
            found = [(path, id(x)) for path, x in getattr(model, what)(remove_duplicate=False)]
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"parallelize: needs {name} with the signature of torch, found {error}; accept prefix, recurse and "
                "remove_duplicate, or rename the method"
            ) from error
        if (others := {*found} ^ {(path, id(x)) for path, x in entries}) or len(found) != len(entries):
            raise ValueError(
                f"parallelize: needs {name} to list every module, parameter and buffer under its name in torch, found "
                f"another one for {min(others)[0] if others else found[0][0]!r}; list what an optimizer or a log needs "
                "in a method of another name, or in parameters()"
            )
    if not all(isinstance(p, Tensor) for p in model.parameters()):
        raise ValueError(
            f"parallelize: needs tensors from {type(model).__qualname__}.parameters, which torch.export calls, found "
            "other values; return parameter groups from a method of another name"
        )
    if {*map(id, model.modules())} != {id(module) for _, module in modules}:
        raise ValueError(
            f"parallelize: needs {type(model).__qualname__}.modules to list every module, found other ones; list what "
            "you need in a method of another name"
        )


def _modules(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    yield path, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _modules(child, f"{path}.{name}" if path else name)


def _members(modules: Iterable[tuple[str, nn.Module]], kind: str) -> Iterator[tuple[str, Any]]:
    for path, module in modules:
        entries: Mapping[str, Any] = getattr(module, kind)
        yield from ((f"{path}.{name}" if path else name, x) for name, x in entries.items() if x is not None)
