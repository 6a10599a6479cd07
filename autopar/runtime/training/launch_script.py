"""What starts ranks: a script, which each rank imports, or a REPL, ``python -c`` or a notebook, which none can.

a script           its functions are sent by name; behind if __name__ == "__main__": (else each rank would launch)
anything else      functions and classes are sent by value, with cloudpickle
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import os
import pickle
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any


def is_interactive() -> bool:
    """Whether ranks cannot import what calls: there is no file, or it is called "<stdin>"."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    return getattr(main, "__spec__", None) is None and (file is None or not os.path.exists(file))


@contextlib.contextmanager
def importable_main() -> Iterator[None]:
    """Within: multiprocessing has no "<stdin>" import itself on ranks."""
    main: dict[str, Any] = vars(sys.modules["__main__"])
    hidden = {name: main.pop(name) for name in ("__file__",) if name in main and is_interactive()}
    try:
        yield
    finally:
        main.update(hidden)


def task_bytes(fn: Any, args: tuple[Any, ...]) -> tuple[bytes, bool]:
    """The function and its arguments, and whether they go by value. Raises ValueError for what cannot be sent."""
    if is_interactive() and getattr(fn, "__module__", "__main__") == "__main__":
        return by_value(f"launch: a function of {_where()}").dumps((fn, args)), True
    try:
        return pickle.dumps((fn, args)), False
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"launch: fn must be a module-level function with picklable arguments: {error}") from error


def by_value(what: str) -> ModuleType:
    """cloudpickle. Raises ValueError where it is not there."""
    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        raise ValueError(
            f"{what} goes to ranks by value, which needs cloudpickle; pip install cloudpickle, or put it into a file "
            "and import it"
        ) from None


def _where() -> str:
    if "ipykernel" in sys.modules:
        return "a notebook"
    return "a REPL" if hasattr(sys, "ps1") else "python -c"


def check_guard() -> None:
    """Each rank imports the script: what launches must stand behind its guard. Raises ValueError."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    line = _running_line(file)
    if line is None or file is None:
        return
    try:
        with open(file, encoding="utf-8") as source:
            statements = ast.parse(source.read()).body
    except (OSError, SyntaxError, ValueError):
        return
    before = [s for s in statements if s.lineno <= line]
    if any(isinstance(s, ast.If) and _names_module(s.test) for s in before):
        return
    raise ValueError(
        f"launch: each rank imports {os.path.basename(file)}, and would launch ranks itself by its line {line}; put "
        'that line behind if __name__ == "__main__":'
    )


def _running_line(file: str | None) -> int | None:
    """The line of the script's top level that runs now."""
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__" and code.co_filename == file:
            return frame.f_lineno
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def _names_module(test: ast.expr) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(test))
