"""Methods that the model's class defines in place of torch's are those of the parallel model, too.

    class Net(nn.Module):
        def parameters(self, recurse=True): ...     parallel.parameters() calls it
        def __len__(self): ...                      len(parallel)

The parallel model stands for the model's outermost module, and has its tensors and submodules for its own. So torch's
methods do the same to either, and what a class makes of them is called on the module of that class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

# Of Python's own methods those that make or name an object, or decide what it is.
_OWN = {
    "__init__", "__new__", "__del__", "__call__", "__repr__", "__hash__", "__eq__", "__ne__", "__class__", "__dict__",
    "__getattr__", "__getattribute__", "__setattr__", "__delattr__", "__dir__", "__sizeof__", "__subclasshook__",
    "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__copy__", "__deepcopy__", "__getnewargs__",
    "__getnewargs_ex__", "__init_subclass__", "__class_getitem__", "__set_name__", "__instancecheck__",
    "__subclasscheck__",
}  # fmt: skip


def face_of(base: type, root: nn.Module) -> type:
    """A class like ``base``, a parallel model's, for this outermost module: it hands on what the module, or its class,
    has in place of torch's methods, where ``base`` does not say itself what to do."""
    own = {name for cls in base.__mro__ if cls not in (nn.Module, object) for name in vars(cls)}
    on_itself = [name for name, x in vars(root).items() if callable(x) and callable(getattr(nn.Module, name, None))]
    handed = {name: _handed_on(name) for name in (*_overridden(type(root)), *on_itself) if name not in own}
    return type(base.__name__, (base,), {"__module__": base.__module__, "__doc__": base.__doc__, **handed})


def overrides(module: nn.Module, *names: str) -> bool:
    """Whether a module's class, or somebody on the module itself, has put something in place of these of torch's."""
    return any(
        name in module.__dict__ or getattr(type(module), name, None) is not getattr(nn.Module, name) for name in names
    )


def _overridden(kind: type) -> Iterator[str]:
    """Names of the methods that stand before torch's, and of those that Python's operators and functions call."""
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
    """Raises ValueError where what a model's class says of its modules, parameters and buffers is not what they are."""
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
                f"parallelize: needs {name} to be called as torch's, found {error}; take prefix, recurse and "
                "remove_duplicate, or give the method another name"
            ) from error
        if (others := {*found} ^ {(path, id(x)) for path, x in entries}) or len(found) != len(entries):
            raise ValueError(
                f"parallelize: needs every module, parameter and buffer under torch's own name, found that {name} says "
                f"otherwise of {min(others)[0] if others else found[0][0]!r}; give what an optimizer or a log needs "
                "under a name of its own, or as parameters()"
            )
    if not all(isinstance(p, Tensor) for p in model.parameters()):
        raise ValueError(
            f"parallelize: needs tensors from {type(model).__qualname__}.parameters, which torch.export calls, found "
            "others; give groups for an optimizer under a name of their own"
        )
    if {*map(id, model.modules())} != {id(module) for _, module in modules}:
        raise ValueError(
            f"parallelize: needs every module, found that {type(model).__qualname__}.modules gives others than there "
            "are; give what is needed under a name of its own"
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
