"""Whether a forward is being compiled or exported: not for the model, which a step runs in place of.

    if torch.compiler.is_compiling(): ...       False in a forward, as without autopar; torch's own code sees the export

The functions may have been imported under any name, so their code is what is replaced.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from autopar.adapters.function_watch import is_outside

_QUESTIONS = (
    ("torch.compiler", "is_compiling"),
    ("torch.compiler", "is_exporting"),
    ("torch._utils", "is_compiling"),
    ("torch._dynamo.external_utils", "is_compiling"),
    ("torch.fx._symbolic_trace", "is_fx_tracing"),
)
_ASKED: dict[tuple[str, str], Callable[[], bool]] = {}  # (module, name) -> the function with its own code


@contextmanager
def answered_as_eager() -> Iterator[None]:
    """Within: code that is neither torch's nor ours is told that nobody compiles or exports."""
    functions: list[Any] = [getattr(sys.modules[m], name) for m, name in _QUESTIONS if m in sys.modules]
    codes = [function.__code__ for function in functions]
    for function, code in zip(functions, codes, strict=True):
        _ASKED[function.__globals__["__name__"], code.co_name] = types.FunctionType(code, function.__globals__)
        function.__code__ = _stand_in.__code__.replace(co_name=code.co_name)
    try:
        yield
    finally:
        for function, code in zip(functions, codes, strict=True):
            function.__code__ = code


def _stand_in() -> bool:  # runs with the global names of the function that it stands in for
    import sys

    from autopar.adapters.compile_questions import answer

    return answer(sys._getframe())


def answer(asked: FrameType) -> bool:
    """What a question, in its frame, is answered to who asks it."""
    assert asked.f_back is not None
    return not is_outside(asked.f_back) and _ASKED[asked.f_globals["__name__"], asked.f_code.co_name]()
